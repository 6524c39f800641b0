"""Status of the fleet, and the usage report of a period. Reads only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from remuda.controlplane.budget import with_spot_prices
from remuda.controlplane.context import Context, skip_unreadable
from remuda.controlplane.read.demand import read_demand
from remuda.domain.errors import NotFound, RemudaError, Unreadable
from remuda.domain.instance import LIVE, Instance, State
from remuda.domain.pool_config import PoolConfig, parse_runner_name, stale_registration_reason
from remuda.domain.provision import Provision, ProvisionStatus, lost_instances
from remuda.domain.reporting.demand import DemandStatus
from remuda.domain.reporting.prices import PriceTable
from remuda.domain.reporting.usage import UsageReport, usage_report
from remuda.domain.reporting.warnings import (
    PoolWarning,
    WarningKind,
    describe_dead_agent,
    find_demand_warnings,
    find_unreleased,
    find_warnings,
)
from remuda.domain.signals import Report
from remuda.domain.sweep_record import AnomalyKind, SweepRecord
from remuda.ports.clock import CLOCK_FIX
from remuda.ports.github import GitHubRunner

#: Newest provisions in a status. Open provisions are always included.
RECENT_PROVISIONS = 50
#: Maximum time that a provision stays open.
MAX_OPEN = timedelta(hours=1)
#: Seconds between two checks for stale registrations by a process that reads the status repeatedly. GitHub limits the
#: number of requests.
REGISTRATION_CHECK_INTERVAL_S = 60.0
#: Kinds of warnings that need a request to GitHub.
_GITHUB_WARNINGS = frozenset({WarningKind.STALE_REGISTRATION, WarningKind.GITHUB})
#: Maximum number of provisions in a report; the newest are taken.
MAX_PROVISIONS = 50_000
#: The same for jobs of runner sets.
MAX_JOBS = 50_000
#: Maximum seconds between the decision to end a machine and its confirmed termination.
MAX_TERMINATION_S = 3_600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLevel:
    idle: int
    #: Messages in the queue. Some may be stale or duplicates.
    messages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenProvision:
    """A provision that is not committed yet."""

    provision: Provision
    #: Number of its instances per state.
    instances: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    at: datetime
    pool: str
    config: PoolConfig | None
    instances: Sequence[Instance]
    reports: Mapping[str, Report]
    pools: Mapping[str, PoolLevel]
    runs: Sequence[Provision]
    #: By provision id, the instances that a run lost: they ended before it was released.
    lost: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    demand: DemandStatus = field(default_factory=DemandStatus)
    warnings: Sequence[PoolWarning] = ()
    #: One sentence per record that cannot be parsed.
    unreadable: Sequence[str] = ()

    @property
    def open_provisions(self) -> tuple[OpenProvision, ...]:
        return tuple(self._open_provision(run) for run in self.runs if run.status is ProvisionStatus.OPEN)

    def _open_provision(self, run: Provision) -> OpenProvision:
        counts = Counter(item.state.value for item in self.instances if item.provision_id == run.provision_id)
        return OpenProvision(provision=run, instances=dict(counts))

    def agent_death(self, instance: Instance) -> str:
        """Say that its agent is dead, or return an empty string."""
        margin_s = self.config.lifetimes.margin_s if self.config else 0.0
        report = self.reports.get(instance.instance_id)
        return describe_dead_agent(instance, report, now=self.at, margin_s=margin_s)

    def by_state(self) -> Mapping[str, int]:
        """Number of live instances per state, in lifecycle order."""
        counts = Counter(item.state for item in self.instances)
        return {state.value: counts[state] for state in State if state in LIVE and counts[state]}


async def status(context: Context, *, include_terminated: bool = False, check_registrations: bool = True) -> Status:
    """Read records, reports, pool queues, provisions and GitHub.

    `check_registrations` adds warnings about stale registrations if the process has a GitHub credential.
    """
    store = context.store
    config = await store.get_config()
    # List runners before reading records: a registration that the later records do not own stays without an owner.
    runners, failures = await _runners(context, config) if check_registrations else ({}, [])
    # AWS or GitHub has answered by now.
    context = context.with_true_time()
    states = LIVE | {State.TERMINATED} if include_terminated else LIVE
    found, runs = await asyncio.gather(store.find(states), _runs(context))
    instances = sorted(found, key=lambda item: (item.created_at, item.instance_id))
    classes = [item.name for item in config.classes] if config else []
    unreadable: list[str] = []
    (reports, _), depths, (lost, records), sweep = await asyncio.gather(
        skip_unreadable(store.get_reports([item.instance_id for item in instances]), unreadable.append),
        asyncio.gather(*(_depth(context, name) for name in classes)),
        _lost(context, runs, instances),
        _read_sweep_record(context, unreadable.append),
    )
    demand = await read_demand(context, config, instances, reports, runs, sweep=sweep)
    now = context.clock.now()
    idle = Counter(
        item.resource_class for item in instances if item.state is State.IDLE and not item.is_quarantined(now)
    )
    unreadable += [f"the record {name} cannot be read: {why}" for name, why in store.malformed_records.items()]
    return Status(
        at=now,
        pool=context.pool_name,
        config=config,
        instances=instances,
        reports=reports,
        pools={name: PoolLevel(idle=idle[name], messages=depth) for name, depth in zip(classes, depths, strict=True)},
        runs=runs,
        lost=lost,
        demand=demand,
        warnings=(
            *_clock_warnings(context),
            *find_warnings(
                config,
                instances,
                reports,
                runs,
                lost=lost,
                ended=records,
                sweep_due=sweep.next_due_at,
                now=now,
            ),
            *(find_unreleased(config, sweep.runs, runs, now=now) if config else ()),
            *find_demand_warnings(demand, now=now),
            *(await _stale_registrations(context, config, runners, instances, sweep) if config and runners else ()),
            *failures,
            *(PoolWarning(kind=WarningKind.UNREADABLE, subject="", text=sentence) for sentence in unreadable),
        ),
        unreadable=tuple(unreadable),
    )


def _clock_warnings(context: Context) -> Iterator[PoolWarning]:
    if (wrong := context.clock_error) is not None:
        text = f"{wrong}: {CLOCK_FIX}; the times shown here are corrected by this difference"
        yield PoolWarning(kind=WarningKind.CLOCK, subject="", text=text)


def keep_github_warnings(fresh: Status, before: Status | None) -> Status:
    """Copy the warnings about GitHub from the previous status to one that was read without a check."""
    kept = [item for item in before.warnings if item.kind in _GITHUB_WARNINGS] if before else []
    return replace(fresh, warnings=(*fresh.warnings, *kept))


async def _runs(context: Context) -> Sequence[Provision]:
    """The newest provisions and all open ones, newest first."""
    store = context.store
    newest, unsettled = await asyncio.gather(
        store.recent_provisions(RECENT_PROVISIONS),
        store.unsettled_provisions(context.clock.now() + MAX_OPEN),
    )
    known = {item.provision_id for item in newest}
    older = [item for item in unsettled if item.status is ProvisionStatus.OPEN and item.provision_id not in known]
    return [*newest, *sorted(older, key=lambda item: (item.created_at, item.provision_id), reverse=True)]


async def _lost(
    context: Context, runs: Sequence[Provision], instances: Sequence[Instance]
) -> tuple[dict[str, tuple[str, ...]], Mapping[str, Instance]]:
    """Return the lost instances by provision id, and all known records.

    Reads the records that the search did not find: it may lag, so a missing one may be live.
    """
    records = {item.instance_id: item for item in instances}
    unsettled = [run for run in runs if not run.settled and not run.runner_set]
    ids = {item for run in unsettled for item in run.instance_ids if item not in records}
    if ids:
        found, _ = await skip_unreadable(context.store.get_many(ids))
        records |= found
    return {run.provision_id: lost for run in runs if (lost := lost_instances(run, records))}, records


async def _read_sweep_record(context: Context, report_error: Callable[[str], None]) -> SweepRecord:
    try:
        return await context.store.get_sweep_record()
    except Unreadable as error:
        report_error(error.message)
        return SweepRecord()


async def _depth(context: Context, resource_class: str) -> int:
    try:
        return await context.pool.depth(resource_class)
    except NotFound:
        return 0


async def _runners(
    context: Context, config: PoolConfig | None
) -> tuple[dict[str, Sequence[GitHubRunner]], list[PoolWarning]]:
    found: dict[str, Sequence[GitHubRunner]] = {}
    failures: list[PoolWarning] = []
    for scope in (tokens.scope for tokens in config.tokens) if config and context.github else ():
        try:
            found[scope] = await context.github.list_runners(scope) if context.github else ()
        except RemudaError as error:
            text = f"its runners could not be listed: {error.message}"
            failures.append(PoolWarning(kind=WarningKind.GITHUB, subject=scope, text=text))
    return found, failures


async def _stale_registrations(
    context: Context,
    config: PoolConfig,
    runners: Mapping[str, Sequence[GitHubRunner]],
    instances: Sequence[Instance],
    sweep: SweepRecord,
) -> Sequence[PoolWarning]:
    """Warn about registrations that no assignment owns. Reads by key only the records that the search missed."""
    now, known = context.clock.now(), {item.instance_id: item for item in instances}

    def reason_for(name: str, record: Instance | None, since: datetime | None) -> str | None:
        return stale_registration_reason(
            name,
            record,
            pool=config.pool,
            unrecorded_since=since,
            now=now,
            grace_s=config.lifetimes.registration_stale_after_s,
        )

    ours = [
        (scope, runner.name, parsed[1])
        for scope, listed in runners.items()
        for runner in listed
        if (parsed := parse_runner_name(config.pool, runner.name)) is not None
        and (parsed[1] not in known or reason_for(runner.name, known[parsed[1]], None) is not None)
    ]
    ids = {instance_id for _, _, instance_id in ours}
    records, unreadable = await skip_unreadable(context.store.get_many(ids)) if ids else ({}, {})
    found = []
    for scope, name, instance_id in ours:
        if instance_id in unreadable:
            continue
        since = sweep.first_seen(AnomalyKind.STALE_REGISTRATION, name)
        reason = reason_for(name, records.get(instance_id), since)
        if reason is not None:
            text = f"stale registration in {scope}: {reason}; refresh removes it"
            found.append(PoolWarning(kind=WarningKind.STALE_REGISTRATION, subject=name, text=text))
    return found


async def report(context: Context, *, since: datetime, prices: PriceTable) -> UsageReport:
    """Read the provisions, instances, histories and spot prices of a period."""
    store = context.store
    until = context.clock.now()
    provisions = await store.recent_provisions(MAX_PROVISIONS, since=since)
    # The threshold of a terminated instance is the time when its end was decided. Skip those that ended earlier.
    ended_before = since - timedelta(seconds=MAX_TERMINATION_S)
    found = await store.find(frozenset(State))
    instances = [item for item in found if item.state is not State.TERMINATED or item.threshold >= ended_before]
    histories = await store.histories([item.instance_id for item in instances])
    prices, notes = await with_spot_prices(context, prices, instances, since=since, until=until)
    if len(provisions) == MAX_PROVISIONS:
        notes.append(f"only the newest {MAX_PROVISIONS} provisions are counted")
    if store.malformed_records:
        notes.append(f"{len(store.malformed_records)} records cannot be parsed and are left out")
    jobs = await store.recent_jobs(MAX_JOBS, since=since)
    if len(jobs) == MAX_JOBS:
        notes.append(f"only the newest {MAX_JOBS} jobs are counted")
    usage = usage_report(provisions, instances, histories, prices, jobs=jobs, since=since, until=until)
    notes += (f"no price is known for {name}: it counts as free" for name in sorted(usage.costs.unpriced_hours))
    config = await store.get_config()
    run_urls = {run: config.run_url(name, run) for run, name in usage.repositories.items()} if config else {}
    return replace(usage, notes=tuple(notes), run_urls={run: url for run, url in run_urls.items() if url})
