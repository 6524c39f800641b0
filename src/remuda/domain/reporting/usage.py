"""The ledger of a time: how often machines were reused, how long runs waited, what hours were paid for, what it saved.

Pure: it is made of provisions, instances, histories and prices, and says nothing that they do not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from remuda.domain.instance import HistoryEntry, Instance
from remuda.domain.provision import Provision
from remuda.domain.provision_outcome import ProvisionKind, RunnerSource
from remuda.domain.reporting.prices import PriceTable
from remuda.domain.reporting.timeline import MachinePhase, Span, clipped, levels, spans_of

#: How finely the fleet is drawn over time.
STEPS = 168
HOUR_S = 3_600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DurationStats:
    count: int
    p50: float
    p95: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CostBreakdown:
    """Money, cut in several ways: each adds up to the total."""

    total: float
    by_phase: Mapping[str, float]
    by_class: Mapping[str, float]
    by_usage: Mapping[str, float]
    by_type: Mapping[str, float]
    #: Empty: no run's (idle, ending, unknown).
    by_run: Mapping[str, float]
    #: Hours of types that nobody knows a price of, by type and usage.
    unpriced_hours: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Savings:
    """What reuse was worth, against a fleet that boots a machine for each runner."""

    #: How long a boot took in this time, on the median. None where none was seen: then nothing can be said.
    boot_s: float | None
    #: What runs would have waited longer.
    waiting_s: float
    #: What would have been booted, and what that costs.
    boot_hours: float
    boot_cost: float
    #: What the warm pool cost meanwhile.
    idle_cost: float

    @property
    def net(self) -> float:
        return self.boot_cost - self.idle_cost


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionPoint:
    """One provision, for a plot."""

    at: datetime
    run_id: str
    kind: str
    seconds: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageReport:
    since: datetime
    until: datetime
    currency: str
    #: When and where the prices were true.
    priced: str
    instances: int
    provisions: int
    #: Provisions by kind: warm, mixed, cold, failed, and unknown if the record has no outcome.
    kinds: Mapping[str, int]
    reused: int
    created: int
    #: Seconds of provisions, by kind.
    times: Mapping[str, DurationStats]
    #: Seconds until one runner was registered, by source.
    ready: Mapping[str, DurationStats]
    hours: Mapping[str, float]
    costs: CostBreakdown
    savings: Savings
    #: Why provisions gave up, counted.
    failures: Mapping[str, int]
    #: Why machines were retired, counted.
    retirements: Mapping[str, int]
    points: tuple[ProvisionPoint, ...] = ()
    #: How many machines there were, on the mean, in equal steps from `drawn_from` on.
    fleet: tuple[Mapping[MachinePhase, float], ...] = ()
    #: When the first of it happened.
    drawn_from: datetime
    notes: tuple[str, ...] = field(default=())

    @property
    def reuse_rate(self) -> float | None:
        runners = self.reused + self.created
        return self.reused / runners if runners else None


def usage_report(
    provisions: Sequence[Provision],
    instances: Sequence[Instance],
    histories: Mapping[str, Sequence[HistoryEntry]],
    prices: PriceTable,
    *,
    since: datetime,
    until: datetime,
) -> UsageReport:
    spans = [
        span
        for instance in instances
        for span in clipped(
            spans_of(instance, histories.get(instance.instance_id, ()), now=until), since=since, until=until
        )
    ]
    told = _told(provisions, since, until)
    costs = _costs(spans, prices)
    drawn_from = min([*(span.begin for span in spans), *(item.created_at for item in told)], default=since)
    ready = _ready(told)
    return UsageReport(
        since=since,
        until=until,
        currency=prices.currency,
        priced=_priced(prices),
        instances=len({span.instance_id for span in spans}),
        provisions=len(provisions),
        kinds=dict(Counter(item.outcome.kind if item.outcome else "unknown" for item in provisions)),
        reused=_reused(told),
        created=_created(told),
        times=duration_stats((item.outcome.kind, item.outcome.seconds) for item in told if item.outcome),
        ready=ready,
        hours=_sums(spans, _hours(spans), key=lambda span: span.phase.value),
        costs=costs,
        savings=_savings(told, instances, prices, ready, costs.by_phase.get(MachinePhase.IDLE.value, 0.0)),
        failures=dict(Counter(item.outcome.error for item in told if item.outcome and item.outcome.error)),
        retirements=_retirements(histories, since, until),
        points=tuple(_point(item) for item in told),
        fleet=tuple(levels(spans, since=drawn_from, until=until, steps=STEPS)),
        drawn_from=drawn_from,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceCost:
    """What one machine cost in a time."""

    cost: float
    idle_cost: float
    #: The type and usage that nobody knows a price of, or empty.
    unpriced: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageSummary:
    """Whether reuse pays off: the ledger's few numbers that fit a glance."""

    since: datetime
    until: datetime
    currency: str
    priced: str
    runs: int
    reused: int
    created: int
    cost: float
    savings: Savings
    unpriced: tuple[str, ...]


def instance_cost(
    instance: Instance, history: Sequence[HistoryEntry], prices: PriceTable, *, since: datetime, until: datetime
) -> InstanceCost:
    spans = list(clipped(spans_of(instance, history, now=until), since=since, until=until))
    price = prices.hourly(instance.instance_type, instance.usage_class)
    hourly = price or 0.0
    return InstanceCost(
        cost=hourly * sum(_hours(spans)),
        idle_cost=hourly * sum(_hours(span for span in spans if span.phase is MachinePhase.IDLE)),
        unpriced="" if price is not None or not spans else f"{instance.instance_type} {instance.usage_class}",
    )


def usage_summary(
    provisions: Sequence[Provision],
    instances: Sequence[Instance],
    bills: Sequence[InstanceCost],
    prices: PriceTable,
    *,
    since: datetime,
    until: datetime,
) -> UsageSummary:
    """As the ledger says it; made of each machine's bill, so that it can be made in parts."""
    told = _told(provisions, since, until)
    idle_cost = sum(item.idle_cost for item in bills)
    return UsageSummary(
        since=since,
        until=until,
        currency=prices.currency,
        priced=_priced(prices),
        runs=len(told),
        reused=_reused(told),
        created=_created(told),
        cost=sum(item.cost for item in bills),
        savings=_savings(told, instances, prices, _ready(told), idle_cost),
        unpriced=tuple(sorted({item.unpriced for item in bills if item.unpriced})),
    )


def _told(provisions: Sequence[Provision], since: datetime, until: datetime) -> list[Provision]:
    return [item for item in provisions if item.outcome is not None and since <= item.created_at <= until]


def _reused(told: Sequence[Provision]) -> int:
    return sum(item.outcome.reused for item in told if item.outcome and not item.outcome.error)


def _created(told: Sequence[Provision]) -> int:
    return sum(item.outcome.created for item in told if item.outcome and not item.outcome.error)


def _priced(prices: PriceTable) -> str:
    return ", ".join(part for part in (prices.region, prices.dated) if part)


def quantile(values: Sequence[float], part: float) -> float:
    """Between the two nearest values, in proportion."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def duration_stats(pairs: Iterable[tuple[str, float]]) -> dict[str, DurationStats]:
    groups: dict[str, list[float]] = defaultdict(list)
    for name, seconds in pairs:
        groups[name].append(seconds)
    return {
        name: DurationStats(count=len(values), p50=quantile(values, 0.5), p95=quantile(values, 0.95))
        for name, values in groups.items()
    }


def _ready(told: Sequence[Provision]) -> dict[str, DurationStats]:
    return duration_stats(
        (taken.source.value, taken.seconds)
        for item in told
        if item.outcome is not None
        for taken in item.outcome.acquired
    )


def _sums(spans: Iterable[Span], values: Iterable[float], *, key: Callable[[Span], str]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for span, value in zip(spans, values, strict=True):
        found[key(span)] += value
    return dict(found)


def _hours(spans: Iterable[Span]) -> list[float]:
    return [span.seconds / HOUR_S for span in spans]


def _costs(spans: Sequence[Span], prices: PriceTable) -> CostBreakdown:
    hourly = [prices.hourly(span.instance_type, span.usage_class) for span in spans]
    costs = [(price or 0.0) * hours for price, hours in zip(hourly, _hours(spans), strict=True)]
    unpriced = [span for span, price in zip(spans, hourly, strict=True) if price is None]
    return CostBreakdown(
        total=sum(costs),
        by_phase=_sums(spans, costs, key=lambda span: span.phase.value),
        by_class=_sums(spans, costs, key=lambda span: span.resource_class),
        by_usage=_sums(spans, costs, key=lambda span: span.usage_class.value),
        by_type=_sums(spans, costs, key=lambda span: span.instance_type),
        by_run=_sums(spans, costs, key=lambda span: span.run_id),
        unpriced_hours=_sums(unpriced, _hours(unpriced), key=lambda span: f"{span.instance_type} {span.usage_class}"),
    )


def _savings(
    told: Sequence[Provision],
    instances: Sequence[Instance],
    prices: PriceTable,
    ready: Mapping[str, DurationStats],
    idle_cost: float,
) -> Savings:
    boots = ready.get(RunnerSource.CREATED.value)
    if boots is None:
        return Savings(boot_s=None, waiting_s=0.0, boot_hours=0.0, boot_cost=0.0, idle_cost=idle_cost)
    known = {item.instance_id: item for item in instances}
    waiting_s = boot_hours = boot_cost = 0.0
    for outcome in (item.outcome for item in told):
        if outcome is None or outcome.error:
            continue
        if outcome.kind is ProvisionKind.WARM:
            waiting_s += max(0.0, boots.p50 - outcome.seconds)
        from_pool = [item for item in outcome.acquired if item.source is RunnerSource.POOL]
        # What is told one by one is bounded: it stands for the rest.
        weight = outcome.reused / len(from_pool) if from_pool else 0.0
        for item in from_pool:
            instance = known.get(item.instance_id)
            price = prices.hourly(instance.instance_type, instance.usage_class) if instance else None
            boot_hours += weight * boots.p50 / HOUR_S
            boot_cost += weight * boots.p50 / HOUR_S * (price or 0.0)
    return Savings(
        boot_s=boots.p50, waiting_s=waiting_s, boot_hours=boot_hours, boot_cost=boot_cost, idle_cost=idle_cost
    )


def _retirements(histories: Mapping[str, Sequence[HistoryEntry]], since: datetime, until: datetime) -> dict[str, int]:
    ends = (entry for entries in histories.values() for entry in entries if entry.is_end and since <= entry.at <= until)
    return dict(Counter(f"{entry.source or 'no record'}: {entry.retire_reason or 'unknown'}" for entry in ends))


def _point(item: Provision) -> ProvisionPoint:
    outcome = item.outcome
    if outcome is None:  # told ones only
        raise ValueError(f"provision {item.provision_id} has no outcome")
    return ProvisionPoint(
        at=item.created_at, run_id=item.run_id, kind=outcome.kind, seconds=outcome.seconds, count=item.count
    )
