"""What a sweep observes before it acts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TypeVar

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable
from remuda.controlplane.refresh.result import RefreshResult
from remuda.domain.errors import RemudaError, Unreadable
from remuda.domain.instance import LIVE, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.reporting.warnings import EXPIRY_WARNING_S
from remuda.domain.signals import Report
from remuda.domain.sweep_record import Anomaly, AnomalyKind, SweepRecord
from remuda.ports.compute import MachineView
from remuda.ports.github import GitHubRunner

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The lists of EC2 and GitHub, the records, and what the last sweep has recorded.

    Machines and runners are listed *before* the records are read: what the later records do not own stays without an
    owner.
    """

    context: Context
    config: PoolConfig
    #: When the lists of machines and runners were asked for.
    listed_at: datetime
    #: None if they could not be listed.
    machines: Mapping[str, MachineView] | None
    #: By scope, without scopes that could not be listed.
    runners: Mapping[str, Sequence[GitHubRunner]]
    before: SweepRecord
    #: When the anomalies of this sweep count as seen, however long it takes.
    seen_at: datetime
    #: The live instances.
    records: Mapping[str, Instance]
    #: Instances of machines that the search for live ones did not find: they are terminated, or the search lags.
    others: Mapping[str, Instance]
    #: Machines whose record cannot be parsed.
    unreadable: frozenset[str]
    #: Only the reports that decide something.
    reports: Mapping[str, Report]

    def without(self, ids: Collection[str]) -> Observed:
        """The same without the records of these instances, which are not the present ones any more."""
        return replace(self, records={key: item for key, item in self.records.items() if key not in ids})

    def sighting(self, kind: AnomalyKind, subject: str, epoch: int = 0) -> Anomaly:
        """An anomaly that is seen now, with the time when it was first seen."""
        return self.before.sighting(kind, subject, epoch, now=self.seen_at)

    def was_seen_before(self, anomaly: Anomaly) -> bool:
        """Whether the last sweep has seen it, too."""
        return self.before.first_seen(*anomaly.key) is not None


async def observe(context: Context, config: PoolConfig) -> tuple[Observed, RefreshResult]:
    """Read everything that a sweep works on, and tell what could not be read."""
    errors: list[str] = []
    listed_at = context.clock.now()
    async with asyncio.TaskGroup() as group:
        listing = group.create_task(_tell_failure("machines", context.compute.list_pool(), errors))
        runners = group.create_task(_list_runners(context, config, errors))
    listed = listing.result()
    machines = None if listed is None else {view.instance_id: view for view in listed}
    before = await _read_sweep_record(context, errors)
    seen_at = context.clock.now()
    records = {item.instance_id: item for item in await context.store.find(LIVE)}
    # The search may lag, so read by key before calling a machine unrecorded.
    unknown = context.store.get_many([key for key in machines or {} if key not in records])
    others = await _tell_failure("machines", skip_unreadable(unknown, errors.append), errors)
    observed = Observed(
        context=context,
        config=config,
        listed_at=listed_at,
        machines=None if others is None else machines,
        runners=runners.result(),
        before=before,
        seen_at=seen_at,
        records=records,
        others=others[0] if others else {},
        unreadable=others[1] if others else frozenset(),
        reports=await _read_reports(context, records, errors),
    )
    counts = Counter(item.state for item in records.values())
    live = {state.value: counts[state] for state in State if state in LIVE}
    return observed, RefreshResult(errors=tuple(errors), live_instances=live)


async def _tell_failure(name: str, read: Awaitable[T], errors: list[str]) -> T | None:
    """Return None if something cannot be read, and add the error."""
    try:
        return await read
    except RemudaError as error:
        errors.append(f"{name}: {error.message}")
        return None


async def _list_runners(
    context: Context, config: PoolConfig, errors: list[str]
) -> Mapping[str, Sequence[GitHubRunner]]:
    if context.github is None:
        return {}
    # Each scope once, in which the pool may have registered runners.
    names = [*(item.scope for item in config.runner_sets), *(item.scope for item in config.tokens)]
    scopes = list({scope.lower(): scope for scope in names}.values())
    runners: dict[str, Sequence[GitHubRunner]] = {}
    for scope, listed in zip(scopes, await map_concurrently(scopes, context.github.list_runners), strict=True):
        if isinstance(listed, RemudaError):
            errors.append(f"runners of {scope}: {listed.message}")
        else:
            runners[scope] = listed
    return runners


async def _read_sweep_record(context: Context, errors: list[str]) -> SweepRecord:
    """If the record cannot be parsed, start without any: every grace period begins again."""
    try:
        return await context.store.get_sweep_record()
    except Unreadable as error:
        errors.append(f"{error.message}; it is replaced")
        return SweepRecord()


async def _read_reports(context: Context, records: Mapping[str, Instance], errors: list[str]) -> Mapping[str, Report]:
    """Those with a problem, and those of releasing instances, of runners of sets, and of runs that expire soon.

    Without them, only thresholds decide.
    """
    soon = context.clock.now() + timedelta(seconds=EXPIRY_WARNING_S)
    ids = [
        key
        for key, item in records.items()
        if item.state is State.RELEASING
        or (item.state is State.RUNNING and (item.runner_set or item.threshold <= soon))
    ]
    troubled = await _tell_failure("reports with a problem", context.store.troubled_reports(), errors)
    read = skip_unreadable(context.store.get_reports(ids), errors.append)
    others = await _tell_failure("reports", read, errors)
    return {**{item.instance_id: item for item in troubled or ()}, **(others[0] if others else {})}
