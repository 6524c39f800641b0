"""Status: the fleet as the records, the pool and the provisions show it. Reads only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from remuda.controlplane.context import Context, each, readable
from remuda.domain.errors import NotFound, RemudaError
from remuda.domain.instance import LIVE, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.signals import Report

#: How many provisions a status shows.
RECENT_PROVISIONS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLevel:
    idle: int
    #: Messages: about as many as idle instances, sometimes stale or doubled.
    hints: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    config: PoolConfig | None
    instances: Sequence[Instance]
    reports: Mapping[str, Report]
    pools: Mapping[str, PoolLevel]
    runs: Sequence[Provision]
    #: Records that cannot be parsed, one sentence each.
    unreadable: Sequence[str] = ()


async def status(context: Context, *, everything: bool = False) -> Status:
    """`everything` shows terminated instances too."""
    config = await context.store.get_config()
    states = LIVE | {State.TERMINATED} if everything else LIVE
    instances = sorted(await context.store.find(states), key=lambda item: (item.created_at, item.instance_id))
    idle = Counter(item.resource_class for item in instances if item.state is State.IDLE)
    names = [resource_class.name for resource_class in config.classes] if config else []
    pools: dict[str, PoolLevel] = {}
    for name, hints in zip(names, await each(names, context.pool.depth), strict=True):
        if isinstance(hints, RemudaError) and not isinstance(hints, NotFound):
            raise hints
        pools[name] = PoolLevel(idle=idle[name], hints=0 if isinstance(hints, RemudaError) else hints)
    read = context.store.get_reports([item.instance_id for item in instances])
    unreadable: list[str] = []
    reports, _ = await readable(read, unreadable.append)
    runs = await context.store.recent_provisions(RECENT_PROVISIONS)
    malformed = context.store.malformed_records
    unreadable += [f"the record {name} cannot be read: {why}" for name, why in malformed.items()]
    return Status(
        config=config, instances=instances, reports=reports, pools=pools, runs=runs, unreadable=tuple(unreadable)
    )
