"""Usage reports: reuse, waiting times, machine hours, costs and savings in a period."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from remuda.domain.demand import JobRecord
from remuda.domain.holder import subject_of
from remuda.domain.instance import HistoryEntry, Instance
from remuda.domain.provision import Provision, ProvisionKind, ProvisionOutcome, RunnerSource
from remuda.domain.reporting.prices import MONEY_DIGITS, PriceTable, format_money
from remuda.domain.reporting.timeline import MachinePhase, Span, clip, mean_counts, spans_of

#: Intervals of the chart of the fleet.
CHART_STEPS = 168
HOUR_S = 3_600.0
UNKNOWN = "unknown"
NO_BOOT_TIME = "unknown: no boot time measured"
LOST = "instance lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class DurationStats:
    """Number, median and 95th percentile of durations in seconds."""

    count: int
    p50: float
    p95: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CostBreakdown:
    """Costs by several criteria; each mapping adds up to the total."""

    total: float
    by_phase: Mapping[str, float]
    by_class: Mapping[str, float]
    by_usage: Mapping[str, float]
    by_type: Mapping[str, float]
    #: The empty key holds the costs of idle, ending and unknown phases, `set.` and a name those of a set's
    #: runners without a job whose run is known.
    by_run: Mapping[str, float]
    #: Hours of types without a known price, by type and usage class.
    unpriced_hours: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Savings:
    """Savings by reuse, compared with booting one machine per runner."""

    #: Median boot time in the period, or None if no machine booted: then the savings are unknown.
    boot_s: float | None
    #: Additional seconds that runs would have waited.
    waiting_s: float
    #: Additional boot time, and its cost.
    boot_hours: float
    boot_cost: float
    #: Cost of the idle pool.
    idle_cost: float

    @property
    def net(self) -> float:
        return self.boot_cost - self.idle_cost

    def describe_cost(self, currency: str) -> str:
        """What reuse saved in money, for example "1.20 USD after the cost of idle instances".

        Instances that are idle for long cost more than the boots that they save. The text then says so instead of
        showing a negative saving: "idle instances cost 0.0442 USD more than reuse saved".
        """
        if self.boot_s is None:
            return NO_BOOT_TIME
        if round(self.net, MONEY_DIGITS) < 0:
            return f"idle instances cost {format_money(-self.net, currency)} more than reuse saved"
        return f"{format_money(max(self.net, 0.0), currency)} after the cost of idle instances"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionPoint:
    """One provision in a chart."""

    at: datetime
    run_id: str
    kind: str
    seconds: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSetUsage:
    """The jobs of one runner set in a period."""

    jobs: int
    #: Seconds from the queue to the start of the jobs that started.
    queue_wait: DurationStats | None
    #: Number of jobs per result; `running` and `waiting` for those without one, `instance lost` for those whose
    #: instance ended while they ran.
    results: Mapping[str, int]
    #: Machines taken from the pool, and launched ones.
    reused: int
    created: int

    @property
    def reuse_rate(self) -> float | None:
        return _share(self.reused, self.created)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobUsage:
    """The jobs of runner sets in a period."""

    by_set: Mapping[str, RunnerSetUsage] = field(default_factory=dict)
    #: Costs of the machines from the start of a job to their return to the pool, without idle and listening time.
    cost_by_repository: Mapping[str, float] = field(default_factory=dict)
    #: By repository and workflow file.
    cost_by_workflow: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageReport:
    since: datetime
    until: datetime
    currency: str
    #: Region and date of the prices.
    prices_as_of: str
    instances: int
    provisions: int
    #: Number of provisions per `ProvisionKind`, and of those with an unknown outcome.
    kinds: Mapping[str, int]
    reused: int
    created: int
    #: Durations of provisions, by kind.
    provision_times: Mapping[str, DurationStats]
    #: Durations until a runner was registered, by source.
    registration_times: Mapping[str, DurationStats]
    hours: Mapping[str, float]
    costs: CostBreakdown
    savings: Savings
    #: Number of failed provisions per error.
    failures: Mapping[str, int]
    #: Number of terminated instances per state and reason.
    retirements: Mapping[str, int]
    jobs: JobUsage = field(default_factory=JobUsage)
    points: tuple[ProvisionPoint, ...] = ()
    #: Mean number of machines per phase, in equal intervals from `chart_start` on.
    fleet: tuple[Mapping[MachinePhase, float], ...] = ()
    #: Time of the first event in the period.
    chart_start: datetime
    #: Repositories as owner/name, by run id, as far as they are known.
    repositories: Mapping[str, str] = field(default_factory=dict)
    #: Addresses of runs on GitHub, by run id.
    run_urls: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=())

    @property
    def reuse_rate(self) -> float | None:
        return _share(self.reused, self.created)


def _share(reused: int, created: int) -> float | None:
    return reused / (reused + created) if reused + created else None


def usage_report(
    provisions: Sequence[Provision],
    instances: Sequence[Instance],
    histories: Mapping[str, Sequence[HistoryEntry]],
    prices: PriceTable,
    *,
    jobs: Sequence[JobRecord] = (),
    since: datetime,
    until: datetime,
) -> UsageReport:
    spans = [
        span
        for instance in instances
        for span in clip(
            spans_of(instance, histories.get(instance.instance_id, ()), now=until), since=since, until=until
        )
    ]
    finished = _finished(provisions, since, until)
    outcomes = [outcome for _, outcome in finished]
    costs = _costs(spans, prices)
    chart_start = min([*(span.begin for span in spans), *(item.created_at for item, _ in finished)], default=since)
    registration_times = _registration_times(outcomes)
    return UsageReport(
        since=since,
        until=until,
        currency=prices.currency,
        prices_as_of=_prices_as_of(prices),
        instances=len({span.instance_id for span in spans}),
        provisions=len(provisions),
        kinds=dict(Counter(item.outcome.kind.value if item.outcome else "unknown" for item in provisions)),
        reused=_reused(outcomes),
        created=_created(outcomes),
        provision_times=duration_stats((outcome.kind.value, outcome.seconds) for outcome in outcomes),
        registration_times=registration_times,
        hours=_sums(spans, _hours(spans), key=lambda span: span.phase.value),
        costs=costs,
        savings=_savings(
            finished, instances, prices, registration_times, costs.by_phase.get(MachinePhase.IDLE.value, 0.0)
        ),
        failures=dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        retirements=_retirements(histories, since, until),
        jobs=_job_usage(jobs, finished, costs.by_run),
        points=tuple(_point(item, outcome) for item, outcome in finished),
        fleet=tuple(mean_counts(spans, since=chart_start, until=until, steps=CHART_STEPS)),
        chart_start=chart_start,
        repositories={job.run_id: job.repository for job in jobs if job.repository}
        | {item.run_id: item.repository for item in provisions if item.repository},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceCost:
    """Cost of one machine in a period."""

    cost: float
    idle_cost: float
    #: Type and usage class without a known price, or empty.
    unpriced: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageSummary:
    """The main numbers of a usage report."""

    since: datetime
    until: datetime
    currency: str
    prices_as_of: str
    runs: int
    reused: int
    created: int
    cost: float
    savings: Savings
    unpriced: tuple[str, ...]


def instance_cost(
    instance: Instance, history: Sequence[HistoryEntry], prices: PriceTable, *, since: datetime, until: datetime
) -> InstanceCost:
    spans = list(clip(spans_of(instance, history, now=until), since=since, until=until))
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
    costs: Sequence[InstanceCost],
    prices: PriceTable,
    *,
    since: datetime,
    until: datetime,
) -> UsageSummary:
    """Return the same numbers as `usage_report`, from costs per machine that the caller may cache."""
    finished = _finished(provisions, since, until)
    outcomes = [outcome for _, outcome in finished]
    idle_cost = sum(item.idle_cost for item in costs)
    return UsageSummary(
        since=since,
        until=until,
        currency=prices.currency,
        prices_as_of=_prices_as_of(prices),
        runs=len(outcomes),
        reused=_reused(outcomes),
        created=_created(outcomes),
        cost=sum(item.cost for item in costs),
        savings=_savings(finished, instances, prices, _registration_times(outcomes), idle_cost),
        unpriced=tuple(sorted({item.unpriced for item in costs if item.unpriced})),
    )


def _finished(
    provisions: Sequence[Provision], since: datetime, until: datetime
) -> list[tuple[Provision, ProvisionOutcome]]:
    """Return the provisions of the period that have an outcome, with it."""
    return [
        (item, item.outcome) for item in provisions if item.outcome is not None and since <= item.created_at <= until
    ]


def _reused(outcomes: Sequence[ProvisionOutcome]) -> int:
    return sum(outcome.reused for outcome in outcomes if not outcome.error)


def _created(outcomes: Sequence[ProvisionOutcome]) -> int:
    return sum(outcome.created for outcome in outcomes if not outcome.error)


def _job_usage(
    jobs: Sequence[JobRecord], finished: Sequence[tuple[Provision, ProvisionOutcome]], cost_by_run: Mapping[str, float]
) -> JobUsage:
    groups: dict[str, list[JobRecord]] = defaultdict(list)
    for job in jobs:
        groups[job.runner_set].append(job)
    outcomes: dict[str, list[ProvisionOutcome]] = defaultdict(list)
    for item, outcome in finished:
        if item.runner_set:
            outcomes[item.runner_set].append(outcome)
    by_repository: dict[str, float] = defaultdict(float)
    by_workflow: dict[str, float] = defaultdict(float)
    # A run belongs to one workflow; its jobs may name files that the workflow calls, so the first one decides.
    runs = {job.run_id: job for job in sorted(jobs, key=lambda job: job.seen_at, reverse=True) if job.run_id}
    for run_id, job in runs.items():
        cost = cost_by_run.get(run_id)
        if cost is not None:
            by_repository[job.repository or UNKNOWN] += cost
            by_workflow[_workflow_name(job)] += cost
    return JobUsage(
        by_set={name: _set_usage(groups[name], outcomes[name]) for name in sorted({*groups, *outcomes})},
        cost_by_repository=dict(by_repository),
        cost_by_workflow=dict(by_workflow),
    )


def _workflow_name(job: JobRecord) -> str:
    """Repository and file, without the ref: `acme/app/.github/workflows/ci.yml@refs/heads/main`."""
    return job.workflow.partition("@")[0] or job.repository or UNKNOWN


def _set_usage(jobs: Sequence[JobRecord], outcomes: Sequence[ProvisionOutcome]) -> RunnerSetUsage:
    waits = [
        ("", max(0.0, (job.started_at - job.queued_at).total_seconds()))
        for job in jobs
        if job.started_at and job.queued_at
    ]
    return RunnerSetUsage(
        jobs=len(jobs),
        queue_wait=duration_stats(waits).get(""),
        results=dict(Counter(_result(job) for job in jobs)),
        reused=_reused(outcomes),
        created=_created(outcomes),
    )


def _result(job: JobRecord) -> str:
    if job.is_lost:
        return LOST
    if job.completed_at is not None:
        return job.result or UNKNOWN
    return "running" if job.started_at is not None else "waiting"


def _prices_as_of(prices: PriceTable) -> str:
    return ", ".join(part for part in (prices.region, prices.dated) if part)


def quantile(values: Sequence[float], part: float) -> float:
    """Interpolate linearly between the two nearest values."""
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


def _registration_times(outcomes: Iterable[ProvisionOutcome]) -> dict[str, DurationStats]:
    return duration_stats((runner.source.value, runner.seconds) for outcome in outcomes for runner in outcome.acquired)


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
        by_run=_sums(spans, costs, key=lambda span: subject_of(span.holder)),
        unpriced_hours=_sums(unpriced, _hours(unpriced), key=lambda span: f"{span.instance_type} {span.usage_class}"),
    )


def _savings(
    finished: Sequence[tuple[Provision, ProvisionOutcome]],
    instances: Sequence[Instance],
    prices: PriceTable,
    registration_times: Mapping[str, DurationStats],
    idle_cost: float,
) -> Savings:
    boots = registration_times.get(RunnerSource.CREATED.value)
    if boots is None:
        return Savings(boot_s=None, waiting_s=0.0, boot_hours=0.0, boot_cost=0.0, idle_cost=idle_cost)
    known = {item.instance_id: item for item in instances}
    waiting_s = boot_hours = boot_cost = 0.0
    for provision, outcome in finished:
        if outcome.error:
            continue
        if outcome.kind is ProvisionKind.WARM and not provision.runner_set:
            waiting_s += max(0.0, boots.p50 - outcome.seconds)
        from_pool = [item for item in outcome.acquired if item.source is RunnerSource.POOL]
        # The list of runners is bounded; each listed runner stands for several.
        weight = outcome.reused / len(from_pool) if from_pool else 0.0
        for item in from_pool:
            if provision.runner_set:
                # Each runner of a set has its own job. A run waits for all of its runners.
                waiting_s += weight * max(0.0, boots.p50 - item.seconds)
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


def _point(item: Provision, outcome: ProvisionOutcome) -> ProvisionPoint:
    return ProvisionPoint(
        at=item.created_at,
        run_id=item.subject,
        kind=outcome.kind.value,
        seconds=outcome.seconds,
        count=item.count,
    )
