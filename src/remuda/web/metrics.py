"""Prometheus metrics: gauges of the last poll, and counters of the events since this process started.

No label grows with the pool or with time: ids of runs and instances are never labels, and a name that the pool's
configuration does not contain is counted as `other`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import product

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from remuda import __version__
from remuda.controlplane.read.status import Status
from remuda.domain.instance import LIVE, HistoryEntry, Instance, State
from remuda.domain.provision import Provision, ProvisionKind
from remuda.domain.reporting.demand import SessionState, WaitReason, waited_s
from remuda.domain.reporting.warnings import WarningKind
from remuda.domain.resources import UsageClass
from remuda.domain.transitions import TRANSITIONS
from remuda.ports.calls import CallCounter

#: Upper bounds in seconds of the histogram's buckets: a warm provision takes about a second, a cold one a minute.
BUCKETS_S = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0)
#: Number of events remembered to count none twice.
MAX_REMEMBERED = 100_000
OTHER = "other"
#: State label of an instance that had no record.
NONE = "none"

#: Values of one metric, by label values.
Values = Mapping[tuple[str, ...], float]


class MetricKind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricDefinition:
    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str


#: All metrics, in the order of their definitions.
METRICS: list[MetricDefinition] = []


def _define(kind: MetricKind, name: str, labels: str, text: str) -> MetricDefinition:
    METRICS.append(MetricDefinition(name=name, kind=kind, labels=tuple(labels.split()), help=text))
    return METRICS[-1]


def _gauge(name: str, labels: str, text: str) -> MetricDefinition:
    return _define(MetricKind.GAUGE, name, labels, text)


def _counter(name: str, labels: str, text: str, kind: MetricKind = MetricKind.COUNTER) -> MetricDefinition:
    return _define(kind, name, labels, f"{text} Counted since the start of this process.")


INSTANCES = _gauge("remuda_instances", "pool state resource_class usage_class", "Instances that are not terminated.")
MAX_INSTANCES = _gauge("remuda_max_instances", "pool", "Maximum number of instances in the pool.")
BUDGET = _gauge("remuda_budget_dollars", "pool", "Budget of the pool per month, if it has one.")
SPENT = _gauge("remuda_spent_dollars", "pool", "Cost of the pool's machines in this month, if it has a budget.")
POOL_IDLE = _gauge(
    "remuda_pool_idle", "pool resource_class", "Idle instances that can be claimed: neither drained nor in quarantine."
)
POOL_MESSAGES = _gauge(
    "remuda_pool_messages",
    "pool resource_class",
    "Messages in the pool's queue: about one per idle instance; some may be stale or duplicates.",
)
OPEN_PROVISIONS = _gauge("remuda_open_provisions", "pool", "Provisions in progress.")
OPEN_PROVISION_AGE = _gauge(
    "remuda_open_provision_age_max_seconds", "pool", "Age of the oldest open provision; 0 without open provisions."
)
HEARTBEAT_AGE = _gauge(
    "remuda_heartbeat_age_max_seconds", "pool state", "Age of the oldest last heartbeat; 0 without heartbeats."
)
WITHOUT_HEARTBEAT = _gauge(
    "remuda_instances_without_heartbeat", "pool state", "Instances whose agent has not reported yet."
)
SET_JOBS = _gauge(
    "remuda_set_jobs",
    "pool runner_set state",
    "Jobs of a runner set. State: waiting (not started, with those above its maximum), assigned (GitHub's count,"
    " including running) or running. Absent while the present counts are not known.",
)
SET_RUNNERS = _gauge(
    "remuda_set_runners",
    "pool runner_set state",
    "Machines of a runner set. State: running (with a job), hot (listening), launching (booting or registering)"
    " or warm (idle in the pool; sets of the same class share them).",
)
SET_MAX = _gauge("remuda_set_max_runners", "pool runner_set", "Maximum number of machines of a runner set.")
SET_OLDEST_WAIT = _gauge(
    "remuda_set_oldest_wait_seconds",
    "pool runner_set",
    "Waiting time of the job that has waited longest; 0 if none waits. Absent while that is not known.",
)
SET_SESSION_UP = _gauge(
    "remuda_set_session_up", "pool runner_set", "Whether a live listener has a working session for the set: 1 or 0."
)
SET_MESSAGE_AGE = _gauge(
    "remuda_set_last_message_age_seconds",
    "pool runner_set",
    "Age of the last message or count of GitHub. Absent before the first one.",
)
LISTENER_UP = _gauge("remuda_listener_up", "pool", "Whether a listener is alive: 1 or 0. Absent without runner sets.")
LISTENER_BEAT = _gauge(
    "remuda_listener_beat",
    "pool",
    "Heartbeat counter of the listener's lease: it changes every few seconds while a listener is alive.",
)
WAITING_TOO_LONG = _gauge(
    "remuda_jobs_waiting_too_long", "pool reason", "Jobs that have waited for more than five minutes, by reason."
)
WARNINGS = _gauge("remuda_warnings", "pool kind", "Warnings of `remuda status`, by kind.")
TOKEN_EXPIRY = _gauge(
    "remuda_registration_token_expiry_timestamp_seconds", "pool", "Expiry of the registration token that expires first."
)
RUNNER_DEADLINE = _gauge(
    "remuda_runner_version_deadline_timestamp_seconds",
    "pool",
    "Time from which GitHub may refuse the pool's version of the runner. Absent while it is the newest, or unknown.",
)
LAST_POLL = _gauge("remuda_last_poll_timestamp_seconds", "pool", "Time of the last successful poll of the store.")
BUILD = _gauge("remuda_build_info", "version", "Always 1; the label is the version of this process.")
POLL_FAILURES = _counter("remuda_poll_failures_total", "", "Failed polls of the store.")
PROVISION_SECONDS = _counter(
    "remuda_provision_seconds",
    "pool source",
    "Duration of successful provisions. Source: warm (all runners from the pool), cold (none) or mixed.",
    MetricKind.HISTOGRAM,
)
PROVISIONS = _counter(
    "remuda_provisions_total", "pool outcome", "Ended provisions. Outcome: warm, cold, mixed or failed."
)
RUNNERS = _counter("remuda_runners_total", "pool source", "Runners of provisions. Source: pool (reused) or created.")
RETIREMENTS = _counter(
    "remuda_retirements_total",
    "pool state reason",
    "Instances that entered `terminating`, by previous state and reason.",
)
TRANSITION_COUNT = _counter(
    "remuda_transitions_total", "pool transition", "State transitions of instances, by row of the transition table."
)
JOB_WAIT = _counter(
    "remuda_job_wait_seconds",
    "pool runner_set",
    "Time that jobs of a runner set waited, from the queue to their start.",
    MetricKind.HISTOGRAM,
)
JOBS = _counter(
    "remuda_jobs_total",
    "pool runner_set result",
    "Ended jobs of a runner set, by GitHub's result: succeeded, failed, canceled, …; any unknown one is other.",
)
API_CALLS = _counter(
    "remuda_api_calls_total",
    "service operation outcome",
    "API calls of this process, retries included. Outcome: ok or error (no response, or rejected);"
    " a failed condition and a missing item count as ok.",
)

_JOB_STATES = ("waiting", "assigned", "running")
_RUNNER_STATES = ("running", "hot", "launching", "warm")
_LIVE = tuple(state for state in State if state in LIVE)
_SOURCES = ("warm", "cold", "mixed")
#: Results of jobs that have their own label value. GitHub's runner reports these (TaskResult of actions/runner).
JOB_RESULTS = ("succeeded", "succeededwithissues", "failed", "canceled", "skipped", "abandoned")


class EventDeduplicator:
    """Accepts each event once, and none before `since`.

    Remembers at most `limit` events. Events as old as a forgotten one are rejected, so that nothing counts twice.
    """

    def __init__(self, *, since: datetime, limit: int = MAX_REMEMBERED) -> None:
        self._since = since
        self._limit = limit
        self._keys: set[Hashable] = set()
        self._oldest: list[tuple[datetime, int, Hashable]] = []
        self._number = 0

    def accept(self, key: Hashable, at: datetime) -> bool:
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
        bucket = next((number for number, bound in enumerate(BUCKETS_S) if seconds <= bound), len(BUCKETS_S))
        self._counts[bucket] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound."""
        bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
        return [(bound, float(sum(self._counts[: number + 1]))) for number, bound in enumerate(bounds)]


class FleetMetrics:
    """The state behind `/metrics`.

    Counters start at 0 with the process and never decrease: an event is counted when it is first read, whatever happens
    to its record later. Events that were deleted between two polls are missed.
    """

    def __init__(self, *, started_at: datetime) -> None:
        #: The pool's name, as stored; None before the first poll.
        self._pool: str | None = None
        self._gauges: Mapping[str, Values] = {}
        #: By metric name, then by label values without the pool.
        self._counts: dict[str, Counter[tuple[str, ...]]] = {
            item.name: Counter() for item in METRICS if item.kind is MetricKind.COUNTER
        }
        self._counts[POLL_FAILURES.name][()] = 0
        self._initialize(PROVISIONS, [(outcome,) for outcome in ProvisionKind])
        self._initialize(RUNNERS, [("pool",), ("created",)])
        self._initialize(RETIREMENTS, _retirement_labels())
        self._initialize(TRANSITION_COUNT, [(row.name,) for row in TRANSITIONS])
        self._histograms: dict[str, dict[str, Histogram]] = {
            PROVISION_SECONDS.name: {source: Histogram() for source in _SOURCES},
            JOB_WAIT.name: {},
        }
        self._started_jobs = EventDeduplicator(since=started_at)
        self._ended_jobs = EventDeduplicator(since=started_at)
        self._ended = EventDeduplicator(since=started_at)
        self._changed = EventDeduplicator(since=started_at)

    def _initialize(self, definition: MetricDefinition, labels: Iterable[tuple[str, ...]]) -> None:
        """Export zeros from the start, so that `rate()` sees the first event."""
        for values in labels:
            self._counts[definition.name][values] = 0

    def on_status(self, status: Status) -> None:
        """Replace the gauges and count the ended provisions."""
        self._pool = status.pool
        self._gauges = dict(_gauges(status.pool, status))
        self.add_provisions(status.runs)
        self._add_jobs(status)

    def _add_jobs(self, status: Status) -> None:
        """Count the jobs that started or ended. The same job may be in many statuses."""
        names = {item.name for item in status.demand.sets}
        waits = self._histograms[JOB_WAIT.name]
        for name in names:
            waits.setdefault(name, Histogram())
            self._initialize(
                JOBS,
                [(name, result) for result in (*JOB_RESULTS, OTHER) if (name, result) not in self._counts[JOBS.name]],
            )
        for job in status.demand.jobs:
            name = job.runner_set if job.runner_set in names else OTHER
            if job.started_at is not None and self._started_jobs.accept(job.job_id, job.started_at):
                waits.setdefault(name, Histogram()).observe(waited_s(job, status.at))
            if job.completed_at is not None and self._ended_jobs.accept(job.job_id, job.completed_at):
                result = job.result.lower()
                self._counts[JOBS.name][name, result if result in JOB_RESULTS else OTHER] += 1

    def on_poll_failed(self) -> None:
        """Count the failure. The gauges keep their values; `remuda_last_poll_timestamp_seconds` shows their age."""
        self._counts[POLL_FAILURES.name][()] += 1

    def add_provisions(self, provisions: Iterable[Provision]) -> None:
        """Count the ended ones. The same provision may be passed again."""
        for provision in provisions:
            outcome = provision.outcome
            if outcome is None or not self._ended.accept(provision.provision_id, outcome.ended_at):
                continue
            self._counts[PROVISIONS.name][outcome.kind,] += 1
            if outcome.kind is ProvisionKind.FAILED:
                continue
            self._histograms[PROVISION_SECONDS.name][outcome.kind].observe(outcome.seconds)
            self._counts[RUNNERS.name]["pool",] += outcome.reused
            self._counts[RUNNERS.name]["created",] += outcome.created

    def add_histories(self, histories: Mapping[str, Sequence[HistoryEntry]]) -> None:
        """Count the transitions. The same entry may be passed again."""
        for instance_id, entries in histories.items():
            for entry in entries:
                key = (instance_id, entry.at, entry.transition, entry.epoch)
                if self._changed.accept(key, entry.at):
                    self._count(entry)

    def _count(self, entry: HistoryEntry) -> None:
        known = (entry.transition,) in self._counts[TRANSITION_COUNT.name]
        self._counts[TRANSITION_COUNT.name][entry.transition if known else OTHER,] += 1
        if entry.is_end:
            state = entry.source.value if entry.source else NONE
            reason = entry.retire_reason.value if entry.retire_reason else OTHER
            self._counts[RETIREMENTS.name][state, reason] += 1

    def text(self, calls: CallCounter, accept: str = "") -> tuple[bytes, str]:
        """Return the page and its content type: Prometheus text, or OpenMetrics if the Accept header prefers it."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_StaticCollector(list(self._families(calls))))
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    def _families(self, calls: CallCounter) -> Iterator[Metric]:
        gauges: dict[str, Values] = {**self._gauges, BUILD.name: {(__version__,): 1.0}}
        counts = {item.name: self._labelled(item) for item in METRICS if item.kind is MetricKind.COUNTER}
        counts[API_CALLS.name] = _call_counts(calls)
        for item in METRICS:
            if item.kind is MetricKind.GAUGE:
                gauge = GaugeMetricFamily(item.name, item.help, labels=item.labels)
                _fill(gauge, gauges.get(item.name, {}))
                yield gauge
            elif item.kind is MetricKind.COUNTER:
                counter = CounterMetricFamily(item.name, item.help, labels=item.labels)
                _fill(counter, counts[item.name])
                yield counter
            else:
                family = HistogramMetricFamily(item.name, item.help, labels=item.labels)
                for source, histogram in self._histograms[item.name].items():
                    if self._pool is not None:
                        family.add_metric([self._pool, source], histogram.buckets(), histogram.sum)
                yield family

    def _labelled(self, definition: MetricDefinition) -> Values:
        counts = self._counts[definition.name]
        if "pool" not in definition.labels:
            return counts
        return {} if self._pool is None else {(self._pool, *labels): count for labels, count in counts.items()}


def _retirement_labels() -> Iterator[tuple[str, str]]:
    """Yield every state and reason of the transition table."""
    for row in TRANSITIONS:
        if row.target is not State.TERMINATING:
            continue
        reasons = {reason.value for reason in row.reasons}
        yield from product((source.value if source else NONE for source in row.sources), reasons)


class _StaticCollector(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _fill(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> None:
    for labels, value in sorted(values.items()):
        family.add_metric(labels, value)


def _call_counts(calls: CallCounter) -> Values:
    return {
        (service, operation, outcome): float(count)
        for (service, operation), counts in calls.outcomes().items()
        for outcome, count in zip(("ok", "error"), counts, strict=True)
    }


def _gauges(pool: str, status: Status) -> Iterator[tuple[str, Values]]:
    classes = [item.name for item in status.config.classes] if status.config else []
    yield INSTANCES.name, _instances(pool, status, classes)
    yield POOL_IDLE.name, _claimable(pool, status, classes)
    yield (
        POOL_MESSAGES.name,
        {(pool, name): float(status.pools[name].messages) for name in classes if name in status.pools},
    )
    ages = [_seconds_since(item.provision.created_at, status.at) for item in status.open_provisions]
    yield OPEN_PROVISIONS.name, {(pool,): float(len(ages))}
    yield OPEN_PROVISION_AGE.name, {(pool,): max(ages, default=0.0)}
    yield from _heartbeats(pool, status)
    yield from _demand(pool, status)
    kinds = Counter(item.kind for item in status.warnings)
    yield WARNINGS.name, {(pool, kind.value): float(kinds[kind]) for kind in WarningKind}
    yield LAST_POLL.name, {(pool,): status.at.timestamp()}
    if status.config is not None:
        yield MAX_INSTANCES.name, {(pool,): float(status.config.max_instances)}
        if status.config.monthly_budget:
            yield BUDGET.name, {(pool,): status.config.monthly_budget}
            yield SPENT.name, {(pool,): status.config.budget.spent(status.at)}
        expiries = [item.registration.expires_at.timestamp() for item in status.config.tokens]
        deadline = status.config.runner.deadline if status.config.runner else None
        yield RUNNER_DEADLINE.name, {(pool,): deadline.timestamp()} if deadline else {}
        yield TOKEN_EXPIRY.name, {(pool,): min(expiries)} if expiries else {}


def _instances(pool: str, status: Status, classes: Sequence[str]) -> Values:
    """Count instances, with zeros for all known combinations: an alert on an absent series would never fire."""
    counts: Counter[tuple[str, ...]] = Counter()
    for item in _live(status):
        name = item.resource_class if item.resource_class in classes else OTHER
        counts[pool, item.state.value, name, item.usage_class.value] += 1
    states = [state.value for state in _LIVE]
    known = {(pool, *each) for each in product(states, classes, (usage.value for usage in UsageClass))}
    return {labels: float(counts[labels]) for labels in known | set(counts)}


def _claimable(pool: str, status: Status, classes: Sequence[str]) -> Values:
    """Count idle instances that are neither drained nor in quarantine, by class."""
    counts = Counter(
        item.resource_class if item.resource_class in classes else OTHER
        for item in _live(status)
        if item.state is State.IDLE and item.retire_reason is None and not item.is_quarantined(status.at)
    )
    return {(pool, name): float(counts[name]) for name in {*classes, *counts}}


def _heartbeats(pool: str, status: Status) -> Iterator[tuple[str, Values]]:
    max_age = dict.fromkeys(_LIVE, 0.0)
    missing = dict.fromkeys(_LIVE, 0)
    for item in _live(status):
        report = status.reports.get(item.instance_id)
        if report is None or report.beat_at is None:
            missing[item.state] += 1
        else:
            max_age[item.state] = max(max_age[item.state], _seconds_since(report.beat_at, status.at))
    # Terminating instances need not send heartbeats.
    states = [state for state in _LIVE if state is not State.TERMINATING]
    yield HEARTBEAT_AGE.name, {(pool, state.value): max_age[state] for state in states}
    yield WITHOUT_HEARTBEAT.name, {(pool, state.value): float(missing[state]) for state in states}


def _demand(pool: str, status: Status) -> Iterator[tuple[str, Values]]:
    """The sets of the configuration are few, and their names are bounded."""
    sets, demand = status.demand.sets, status.demand
    # An old count would look like the present one.
    current = [item for item in sets if item.is_current]
    jobs: Values = {(pool, item.name, name): float(getattr(item, name)) for item in current for name in _JOB_STATES}
    runners: Values = {(pool, item.name, name): float(getattr(item, name)) for item in sets for name in _RUNNER_STATES}
    yield SET_JOBS.name, jobs
    yield SET_RUNNERS.name, runners
    yield SET_MAX.name, {(pool, item.name): float(item.max) for item in sets}
    yield SET_OLDEST_WAIT.name, {(pool, item.name): item.oldest_wait_s or 0.0 for item in current}
    yield SET_SESSION_UP.name, {(pool, item.name): float(item.session is SessionState.OPEN) for item in sets}
    ages: Values = {(pool, item.name): item.message_age_s for item in sets if item.message_age_s is not None}
    yield SET_MESSAGE_AGE.name, ages
    if sets:
        listener = demand.listener
        yield LISTENER_UP.name, {(pool,): float(listener is not None and listener.is_alive)}
        yield LISTENER_BEAT.name, {(pool,): float(listener.beat)} if listener else {}
        reasons = Counter(item.reason for item in demand.overdue)
        yield WAITING_TOO_LONG.name, {(pool, reason.value): float(reasons[reason]) for reason in WaitReason}


def _live(status: Status) -> list[Instance]:
    return [item for item in status.instances if item.state in LIVE]


def _seconds_since(at: datetime, now: datetime) -> float:
    """Return the age, at least 0: the clocks of two machines differ."""
    return max(0.0, (now - at).total_seconds())


def metrics_route(metrics: FleetMetrics, calls: CallCounter, *, refresh: Callable[[], Awaitable[None]]) -> Route:
    """Build the `/metrics` route. `refresh` is awaited before each response and must return soon.

    `calls` must be the same object for the whole process, because counters must not decrease.
    """

    async def respond(request: Request) -> Response:
        await refresh()
        text, content_type = metrics.text(calls, accept=request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type, "cache-control": "no-store"})

    return Route("/metrics", respond, methods=["GET"])
