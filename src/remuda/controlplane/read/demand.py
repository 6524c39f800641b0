"""Status of the runner sets: reads their demand, jobs and the listener's lease. Reads only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta

from remuda.controlplane.context import Context
from remuda.domain.demand import LISTENER_LEASE, MAX_QUEUED_S
from remuda.domain.instance import Instance
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.reporting.demand import DemandInput, DemandStatus, demand_status
from remuda.domain.signals import Report
from remuda.domain.sweep_record import SweepRecord

#: Newest jobs that a status contains.
RECENT_JOBS = 200


async def read_demand(
    context: Context,
    config: PoolConfig | None,
    instances: Sequence[Instance],
    reports: Mapping[str, Report],
    provisions: Sequence[Provision],
    *,
    sweep: SweepRecord,
) -> DemandStatus:
    """Combine the demand with records that the caller has read. A pool without sets and runs costs no call."""
    has_runners = any(item.holder is not None for item in instances)
    if config is None or not (config.runner_sets or has_runners):
        return DemandStatus()
    return demand_status(await read_demand_input(context, config, instances, reports, provisions, sweep=sweep))


async def read_demand_input(
    context: Context,
    config: PoolConfig,
    instances: Sequence[Instance],
    reports: Mapping[str, Report],
    provisions: Sequence[Provision],
    *,
    sweep: SweepRecord,
) -> DemandInput:
    store, now = context.store, context.clock.now()
    demand, lease, jobs = await asyncio.gather(
        store.get_demand(),
        store.get_lease(LISTENER_LEASE),
        store.recent_jobs(RECENT_JOBS, since=now - timedelta(seconds=MAX_QUEUED_S)),
    )
    return DemandInput(
        now=now,
        config=config,
        demand=demand,
        lease=lease,
        jobs=jobs,
        instances=instances,
        reports=reports,
        provisions=provisions,
        sweep=sweep,
    )
