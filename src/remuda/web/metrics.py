"""Prometheus metrics: the fleet as the last look found it, and what happened since this process began to look.

It reads nothing: it is told what was seen, and gives text. No label grows with the fleet or with time: ids of runs and
instances are never labels, and a name that the pool's configuration does not have counts as `other`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import product

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from remuda import __version__
from remuda.controlplane.read.status import Status
from remuda.domain.instance import LIVE, HistoryEntry, Instance, State
from remuda.domain.provision import Provision
from remuda.domain.reporting.warnings import KINDS
from remuda.domain.resources import UsageClass
from remuda.domain.transitions import ENDINGS, TRANSITIONS, Cause
from remuda.ports.calls import CallCounter

#: Upper bounds of the histogram's buckets: a warm provision takes about a second, a cold one about a minute.
BUCKETS_S = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0)
#: How many events are remembered so that none is counted twice.
MAX_REMEMBERED = 100_000
OTHER = "other"
#: In place of a state: there was no record.
NONE = "none"
FAILED = "failed"

#: Values of one metric by the values of its labels.
Values = Mapping[tuple[str, ...], float]


class Kind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    name: str
    kind: Kind
    labels: tuple[str, ...]
    what: str


def _gauge(name: str, labels: str, what: str) -> Definition:
    return Definition(name=name, kind=Kind.GAUGE, labels=tuple(labels.split()), what=what)


def _counter(name: str, labels: str, what: str) -> Definition:
    told = f"{what} Over what this process saw since its start."
    return Definition(name=name, kind=Kind.COUNTER, labels=tuple(labels.split()), what=told)


INSTANCES = _gauge("remuda_instances", "pool state resource_class usage_class", "Instances that are not terminated.")
MAX_INSTANCES = _gauge("remuda_max_instances", "pool", "How many instances the pool may have.")
POOL_IDLE = _gauge(
    "remuda_pool_idle",
    "pool resource_class",
    "Idle instances that may be claimed, by their records: neither drained nor held.",
)
POOL_HINTS = _gauge(
    "remuda_pool_hints",
    "pool resource_class",
    "Messages in the pool's queue: about as many as idle instances, sometimes stale or doubled.",
)
OPEN = _gauge("remuda_open_provisions", "pool", "Provisions that are not committed yet.")
OPEN_AGE = _gauge("remuda_open_provision_age_max_seconds", "pool", "Age of the oldest open provision; 0 without one.")
BEAT_AGE = _gauge(
    "remuda_heartbeat_age_max_seconds",
    "pool state",
    "Time since the last heartbeat of the instance that has been silent the longest; 0 without one.",
)
NO_BEAT = _gauge("remuda_instances_without_heartbeat", "pool state", "Instances whose agent has not reported yet.")
WARNINGS = _gauge("remuda_warnings", "pool kind", "What `remuda status` warns of, by kind.")
TOKEN = _gauge(
    "remuda_registration_token_expiry_timestamp_seconds",
    "pool",
    "When the first of the pool's registration tokens expires.",
)
LOOKED = _gauge("remuda_look_timestamp_seconds", "pool", "When the fleet was last read.")
BUILD = _gauge("remuda_build_info", "version", "Always 1: the version of this process is its label.")
LOOK_FAILURES = _counter("remuda_look_failures_total", "", "Times that the fleet could not be read.")
SECONDS = Definition(
    name="remuda_provision_seconds",
    kind=Kind.HISTOGRAM,
    labels=("pool", "source"),
    what="Time from a provision's begin to its commit. Source: warm (all runners from the pool), cold (none) or mixed."
    " Over what this process saw since its start.",
)
PROVISIONS = _counter("remuda_provisions_total", "pool outcome", "Provisions that ended: warm, cold, mixed or failed.")
RUNNERS = _counter("remuda_runners_total", "pool source", "Runners that runs got: reused from the pool, or created.")
RETIREMENTS = _counter(
    "remuda_retirements_total", "pool state reason", "Instances whose end was decided, by the state that they were in."
)
STEPS = _counter("remuda_transitions_total", "pool transition", "Changes of instances, by row of the transition table.")
CALLS = _counter(
    "remuda_api_calls_total",
    "service operation outcome",
    "Calls of this process alone, retries included. Outcome: ok, or error (no answer, or a refusal);"
    " a condition that does not hold and a thing that is not there are answers.",
)

METRICS = (
    *(INSTANCES, MAX_INSTANCES, POOL_IDLE, POOL_HINTS, OPEN, OPEN_AGE, BEAT_AGE, NO_BEAT, WARNINGS, TOKEN, LOOKED),
    *(BUILD, LOOK_FAILURES, SECONDS, PROVISIONS, RUNNERS, RETIREMENTS, STEPS, CALLS),
)
_LIVE = tuple(state for state in State if state in LIVE)
_SOURCES = ("warm", "cold", "mixed")


class Once:
    """Admits each event once, and none from before it began. Forgets the oldest when there are many: what is older than
    anything forgotten is not admitted any more, so that nothing counts twice.
    """

    def __init__(self, *, since: datetime, limit: int = MAX_REMEMBERED) -> None:
        self._since = since
        self._limit = limit
        self._keys: set[Hashable] = set()
        self._oldest: list[tuple[datetime, int, Hashable]] = []
        self._number = 0

    def admits(self, key: Hashable, at: datetime) -> bool:
        if at < self._since or key in self._keys:
            return False
        self._number += 1
        self._keys.add(key)
        heapq.heappush(self._oldest, (at, self._number, key))
        if len(self._keys) > self._limit:
            forgotten, _, old = heapq.heappop(self._oldest)
            self._keys.discard(old)
            self._since = max(self._since, forgotten + timedelta.resolution)
        return True


class Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        place = next((number for number, bound in enumerate(BUCKETS_S) if seconds <= bound), len(BUCKETS_S))
        self._counts[place] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Each with all that is below it."""
        bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
        return [(bound, float(sum(self._counts[: number + 1]))) for number, bound in enumerate(bounds)]


class Meters:
    """What `/metrics` shows. Counters begin at 0 with the process and never fall: they count events as they are first
    seen, whatever becomes of the records later. What happened while nobody looked is not in them.
    """

    def __init__(self, *, began: datetime) -> None:
        #: As the first look tells it: the store knows its name, whatever the settings say.
        self._pool: str | None = None
        self._gauges: Mapping[str, Values] = {}
        #: By name, and by labels without the pool.
        self._counts: dict[str, Counter[tuple[str, ...]]] = {
            item.name: Counter() for item in METRICS if item.kind is Kind.COUNTER
        }
        self._counts[LOOK_FAILURES.name][()] = 0
        self._zero(PROVISIONS, [(outcome,) for outcome in (*_SOURCES, FAILED)])
        self._zero(RUNNERS, [("pool",), ("created",)])
        self._zero(RETIREMENTS, _ends())
        self._zero(STEPS, [(row.name,) for row in TRANSITIONS])
        self._seconds = {source: Histogram() for source in _SOURCES}
        self._ended = Once(since=began)
        self._changed = Once(since=began)

    def _zero(self, definition: Definition, labels: Iterable[tuple[str, ...]]) -> None:
        """Known from the start, so that the first event is a rise."""
        for values in labels:
            self._counts[definition.name][values] = 0

    def look(self, status: Status) -> None:
        """The fleet as it is now."""
        self._pool = status.pool
        self._gauges = dict(_gauges(status.pool, status))
        self.add_provisions(status.runs)

    def look_failed(self) -> None:
        """The gauges stay as they were, and their time tells."""
        self._counts[LOOK_FAILURES.name][()] += 1

    def add_provisions(self, provisions: Iterable[Provision]) -> None:
        """Any that were read, as often as they are read."""
        for provision in provisions:
            course = provision.course
            if course is None or not self._ended.admits(provision.provision_id, course.ended_at):
                continue
            self._counts[PROVISIONS.name][course.kind,] += 1
            if course.kind == FAILED:
                continue
            self._seconds[course.kind].observe(course.seconds)
            self._counts[RUNNERS.name]["pool",] += course.reused
            self._counts[RUNNERS.name]["created",] += course.created

    def add_histories(self, histories: Mapping[str, Sequence[HistoryEntry]]) -> None:
        """Any that were read, as often as they are read."""
        for instance_id, entries in histories.items():
            for entry in entries:
                key = (instance_id, entry.at, entry.transition, entry.epoch)
                if self._changed.admits(key, entry.at):
                    self._count(entry)

    def _count(self, entry: HistoryEntry) -> None:
        known = (entry.transition,) in self._counts[STEPS.name]
        self._counts[STEPS.name][entry.transition if known else OTHER,] += 1
        if entry.target == State.TERMINATING and entry.source != entry.target:
            state = entry.source if entry.source in set(State) else NONE if not entry.source else OTHER
            reason = entry.cause if entry.cause in ENDINGS else OTHER
            self._counts[RETIREMENTS.name][state, reason] += 1

    def text(self, calls: CallCounter, accept: str = "") -> tuple[bytes, str]:
        """All of it, and its content type: Prometheus' text, or OpenMetrics where `accept` asks for it."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(list(self._families(calls))))
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    def _families(self, calls: CallCounter) -> Iterator[Metric]:
        gauges: dict[str, Values] = {**self._gauges, BUILD.name: {(__version__,): 1.0}}
        counts = {item.name: self._labelled(item) for item in METRICS if item.kind is Kind.COUNTER}
        counts[CALLS.name] = _calls(calls)
        for item in METRICS:
            if item.kind is Kind.GAUGE:
                gauge = GaugeMetricFamily(item.name, item.what, labels=item.labels)
                _fill(gauge, gauges.get(item.name, {}))
                yield gauge
            elif item.kind is Kind.COUNTER:
                counter = CounterMetricFamily(item.name, item.what, labels=item.labels)
                _fill(counter, counts[item.name])
                yield counter
            else:
                family = HistogramMetricFamily(item.name, item.what, labels=item.labels)
                for source, histogram in self._seconds.items():
                    if self._pool is not None:
                        family.add_metric([self._pool, source], histogram.buckets(), histogram.sum)
                yield family

    def _labelled(self, definition: Definition) -> Values:
        counts = self._counts[definition.name]
        if "pool" not in definition.labels:
            return counts
        return {} if self._pool is None else {(self._pool, *labels): count for labels, count in counts.items()}


def _ends() -> Iterator[tuple[str, str]]:
    """Every state and reason that the table of transitions knows."""
    for row in TRANSITIONS:
        if row.target is not State.TERMINATING:
            continue
        reasons = {cause.value for cause in row.causes}
        if Cause.RETIRED in row.causes:
            reasons |= set(ENDINGS) - {cause.value for cause in Cause}
        yield from product((source.value if source else NONE for source in row.sources), reasons)


class _Collected(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _fill(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> None:
    for labels, value in sorted(values.items()):
        family.add_metric(labels, value)


def _calls(calls: CallCounter) -> Values:
    return {
        (service, operation, outcome): float(count)
        for (service, operation), counts in calls.outcomes().items()
        for outcome, count in zip(("ok", "error"), counts, strict=True)
    }


def _gauges(pool: str, status: Status) -> Iterator[tuple[str, Values]]:
    classes = [item.name for item in status.config.classes] if status.config else []
    yield INSTANCES.name, _instances(pool, status, classes)
    yield POOL_IDLE.name, _claimable(pool, status, classes)
    yield POOL_HINTS.name, {(pool, name): float(status.pools[name].hints) for name in classes if name in status.pools}
    ages = [_seconds_since(item.provision.created_at, status.at) for item in status.openings]
    yield OPEN.name, {(pool,): float(len(ages))}
    yield OPEN_AGE.name, {(pool,): max(ages, default=0.0)}
    yield from _heartbeats(pool, status)
    kinds = Counter(item.kind if item.kind in KINDS else OTHER for item in status.concerns)
    yield WARNINGS.name, {(pool, kind): float(kinds[kind]) for kind in (*KINDS, OTHER)}
    yield LOOKED.name, {(pool,): status.at.timestamp()}
    if status.config is not None:
        yield MAX_INSTANCES.name, {(pool,): float(status.config.max_instances)}
        expiries = [item.registration.expires_at.timestamp() for item in status.config.tokens]
        yield TOKEN.name, {(pool,): min(expiries)} if expiries else {}


def _instances(pool: str, status: Status, classes: Sequence[str]) -> Values:
    """With zeros for what there could be: an alert on an absent series would never fire."""
    counts: Counter[tuple[str, ...]] = Counter()
    for item in _live(status):
        name = item.resource_class if item.resource_class in classes else OTHER
        counts[pool, item.state.value, name, item.usage_class.value] += 1
    states = [state.value for state in _LIVE]
    known = {(pool, *each) for each in product(states, classes, (usage.value for usage in UsageClass))}
    return {labels: float(counts[labels]) for labels in known | set(counts)}


def _claimable(pool: str, status: Status, classes: Sequence[str]) -> Values:
    """Neither drained nor in quarantine."""
    counts = Counter(
        item.resource_class if item.resource_class in classes else OTHER
        for item in _live(status)
        if item.state is State.IDLE and not item.retire and not item.is_held(status.at)
    )
    return {(pool, name): float(counts[name]) for name in {*classes, *counts}}


def _heartbeats(pool: str, status: Status) -> Iterator[tuple[str, Values]]:
    oldest = dict.fromkeys(_LIVE, 0.0)
    silent = dict.fromkeys(_LIVE, 0)
    for item in _live(status):
        report = status.reports.get(item.instance_id)
        if report is None or report.beat_at is None:
            silent[item.state] += 1
        else:
            oldest[item.state] = max(oldest[item.state], _seconds_since(report.beat_at, status.at))
    # What ends need not beat.
    alive = [state for state in _LIVE if state is not State.TERMINATING]
    yield BEAT_AGE.name, {(pool, state.value): oldest[state] for state in alive}
    yield NO_BEAT.name, {(pool, state.value): float(silent[state]) for state in alive}


def _live(status: Status) -> list[Instance]:
    return [item for item in status.instances if item.state in LIVE]


def _seconds_since(at: datetime, now: datetime) -> float:
    """Clocks differ: nothing is younger than now."""
    return max(0.0, (now - at).total_seconds())
