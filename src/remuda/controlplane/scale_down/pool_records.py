"""Pool records in scale-down: machines with a live record are left to their pool, and idle ones are renewed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from remuda.controlplane.context import Context, check_pool_name, map_concurrently, transition
from remuda.controlplane.scale_down.result import ScaleDownResultBuilder
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import LIVE, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.resources import Reuse, RunnerRequest, mismatch
from remuda.domain.scale_down.decisions import (
    Action,
    Decision,
    Renewal,
    ScaleDownPhase,
    decide_recorded,
    decision,
    renewals,
)
from remuda.domain.scale_down.fleet import FleetMachine
from remuda.domain.scale_down.idle_config import Quota
from remuda.domain.transitions import Actor, Renew
from remuda.ports.compute import POOL_TAG


class PoolRecords:
    """The records of one pool. If there is no pool, or its store cannot be read, only the machines' tags count."""

    def __init__(self, context: Context | None, result: ScaleDownResultBuilder) -> None:
        self._context = context
        self._result = result
        self._config: PoolConfig | None = None
        #: Why no record can be read; empty if they can.
        self._unreadable = "" if context is not None else "this scale-down does not manage its pool"
        self._live: dict[str, Instance] = {}

    async def open(self) -> None:
        if self._context is None:
            return
        try:
            self._config = await self._context.store.get_config()
            if self._config is not None:
                check_pool_name(self._context, self._config)
        except RemudaError as error:
            self._mark_unreadable(error)

    async def read(self, machines: Iterable[FleetMachine]) -> None:
        """Read the machines' records. An instance that was live in any read counts as live for the whole cycle."""
        ids = [machine.instance_id for machine in machines]
        if self._context is None or self._unreadable or not ids:
            return
        try:
            found: Mapping[str, Instance] = await self._context.store.get_many(ids)
        except RemudaError as error:
            self._mark_unreadable(error)
            return
        self._live |= {key: record for key, record in found.items() if record.state in LIVE}

    def decide(self, machine: FleetMachine, phase: ScaleDownPhase) -> Decision | None:
        """The decision for a machine of a pool; None if its registrations decide."""
        record = self._live.get(machine.instance_id)
        if record is not None:
            return decide_recorded(machine, record, phase)
        pool = machine.tags.get(POOL_TAG)
        if pool is None:
            return None
        if self._context is not None and pool != self._context.pool_name:
            return decision(machine, Action.SKIP, f"it belongs to pool {pool[:40]!r}", phase)
        if self._unreadable:
            return decision(machine, Action.SKIP, f"a machine of the pool, and {self._unreadable}", phase)
        return None

    async def renew(self, quota: Quota, *, dry_run: bool) -> None:
        """Extend the threshold of idle instances up to the quota. The others end with their idle time."""
        context, config = self._context, self._config
        if context is None or config is None or self._unreadable or not quota.idle_count:
            return
        try:
            idle = await context.store.find({State.IDLE})
        except RemudaError as error:
            self._result.error(f"pool {context.pool_name}: idle instances could not be found: {error.message}")
            return
        lifetimes = config.lifetimes
        due = renewals(
            [item for item in idle if _may_be_claimed(item, config)],
            quota,
            now=context.clock.now(),
            idle_time_s=lifetimes.idle_time_s,
            max_age_s=lifetimes.max_age_s,
        )

        async def one(renewal: Renewal) -> None:
            if dry_run:
                self._result.set_keep_reason(_kept(renewal, f"would be {renewal.reason}"))
                return
            event = Renew(until=renewal.until)
            try:
                await transition(context, renewal.instance, event, by=Actor.SCALE_DOWN, why=renewal.reason)
            except Conflict:
                # It was claimed, or its time is up.
                self._result.set_keep_reason(_kept(renewal, "not renewed: its record changed meanwhile"))
                return
            self._result.set_keep_reason(_kept(renewal, renewal.reason))

        for renewal, outcome in zip(due, await map_concurrently(due, one), strict=True):
            if isinstance(outcome, RemudaError):
                self._result.error(f"{renewal.instance.instance_id}: it could not be renewed: {outcome.message}")

    def _mark_unreadable(self, error: RemudaError) -> None:
        self._unreadable = "its records cannot be read"
        name = self._context.pool_name if self._context is not None else ""
        self._result.error(f"pool {name}: {error.message}")


def _may_be_claimed(record: Instance, config: PoolConfig) -> bool:
    """Whether a run can get it: an earlier configuration may have had other classes or another reuse policy."""
    wanted = next((item for item in config.classes if item.name == record.resource_class), None)
    if wanted is None or config.reuse is Reuse.NEVER or (config.reuse is Reuse.SAME_REPO and not record.repository):
        return False
    request = RunnerRequest(
        resource_class=wanted,
        usage_class=record.usage_class,
        patterns=wanted.types,
        tier=record.tier,
        reuse=config.reuse,
        repository=record.repository,
    )
    return mismatch(record.message(), request) is None


def _kept(renewal: Renewal, reason: str) -> Decision:
    record = renewal.instance
    return Decision(
        instance_id=record.instance_id,
        owner=record.scope,
        action=Action.KEEP,
        reason=reason,
        phase=ScaleDownPhase.ACTIVE,
    )
