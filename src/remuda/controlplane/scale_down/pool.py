"""The pool's side of scale-down: whose record rules a machine, and which idle ones are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from remuda.controlplane.context import Context, check_pool_name, map_concurrently, transition
from remuda.controlplane.scale_down.result import Tally
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import LIVE, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.resources import Reuse
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
    """What the records say. Without a pool, or with a store that cannot be read, only the tags are known."""

    def __init__(self, context: Context | None, tally: Tally) -> None:
        self._context = context
        self._tally = tally
        self._config: PoolConfig | None = None
        self._unreadable = "" if context is not None else "its pool is not looked after here"
        self._live: dict[str, Instance] = {}

    async def open(self) -> None:
        if self._context is None:
            return
        try:
            self._config = await self._context.store.get_config()
            if self._config is not None:
                check_pool_name(self._context, self._config)
        except RemudaError as error:
            self._give_up(error)

    async def read(self, machines: Iterable[FleetMachine]) -> None:
        """The records of these machines, as they are now. One that was live at any look is not for the table."""
        wanted = [machine.instance_id for machine in machines]
        if self._context is None or self._unreadable or not wanted:
            return
        try:
            found: Mapping[str, Instance] = await self._context.store.get_many(wanted)
        except RemudaError as error:
            self._give_up(error)
            return
        self._live |= {key: record for key, record in found.items() if record.state in LIVE}

    def judge(self, machine: FleetMachine, phase: ScaleDownPhase) -> Decision | None:
        """For machines that the table does not concern."""
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
        """Keep idle instances warm, up to the quota. Those beyond it end with their idle time."""
        context, config = self._context, self._config
        if context is None or config is None or self._unreadable or not quota.idle_count:
            return
        if config.reuse is Reuse.NEVER:
            # Nobody will be given them: refresh ends those that an earlier policy left.
            return
        try:
            idle = await context.store.find({State.IDLE})
        except RemudaError as error:
            self._tally.error(f"pool {context.pool_name}: idle instances could not be found: {error.message}")
            return
        lifetimes = config.lifetimes
        due = renewals(
            idle,
            quota,
            now=context.clock.now(),
            idle_time_s=lifetimes.idle_time_s,
            max_age_s=lifetimes.max_age_s,
        )

        async def one(renewal: Renewal) -> None:
            if dry_run:
                self._tally.explain(_kept(renewal, f"would be {renewal.reason}"))
                return
            event = Renew(until=renewal.until)
            try:
                await transition(context, renewal.instance, event, by=Actor.SCALE_DOWN, why=renewal.reason)
            except Conflict:
                # A claim was first, or its time is up: whoever moved it rules it now.
                self._tally.explain(_kept(renewal, "its record moved on meanwhile: not renewed"))
                return
            self._tally.explain(_kept(renewal, renewal.reason))

        for renewal, result in zip(due, await map_concurrently(due, one), strict=True):
            if isinstance(result, RemudaError):
                self._tally.error(f"{renewal.instance.instance_id}: it could not be renewed: {result.message}")

    def _give_up(self, error: RemudaError) -> None:
        self._unreadable = "its records cannot be read"
        name = self._context.pool_name if self._context is not None else ""
        self._tally.error(f"pool {name}: {error.message}")


def _kept(renewal: Renewal, reason: str) -> Decision:
    record = renewal.instance
    return Decision(
        instance_id=record.instance_id,
        owner=record.scope,
        action=Action.KEEP,
        reason=reason,
        phase=ScaleDownPhase.ACTIVE,
    )
