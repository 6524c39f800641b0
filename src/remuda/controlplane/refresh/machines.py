"""Sweep of machines: machines without a record, records without a machine, and terminations to confirm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypeVar

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable, transition, transition_all
from remuda.controlplane.refresh.first_seen import FirstSeen
from remuda.controlplane.refresh.result import RefreshResultBuilder
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import ABSORBING, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.resources import UsageClass
from remuda.domain.timestamps import to_milliseconds
from remuda.domain.transitions import Actor, Confirm, End, RetireReason, tombstone
from remuda.ports.compute import PROVISION_TAG, MachineState, MachineView

T = TypeVar("T")

#: States of machines that run no more jobs.
ENDED = frozenset({MachineState.SHUTTING_DOWN, MachineState.TERMINATED})


class MachineSweep:
    def __init__(
        self, context: Context, config: PoolConfig, result: RefreshResultBuilder, first_seen: FirstSeen
    ) -> None:
        self._context = context
        self._config = config
        self._result = result
        self._first_seen = first_seen

    async def run(self, views: Sequence[MachineView], records: Mapping[str, Instance], *, listed_at: datetime) -> None:
        """`views` were listed at `listed_at`, which may be long ago if this process was paused meanwhile."""
        machines = {view.instance_id: view for view in views}
        unknown = [key for key in machines if key not in records]
        # The search for records may lag, so read by key before calling a machine unrecorded.
        more, unreadable = await skip_unreadable(self._context.store.get_many(unknown), self._result.error)
        known = {**records, **more}
        live = [item for item in known.values() if item.state not in ABSORBING]
        await self._for_each(live, lambda item: self._close_if_gone(item, machines.get(item.instance_id), listed_at))
        unrecorded = [machines[key] for key in unknown if key not in known and key not in unreadable]
        await self._for_each(unrecorded, self._tombstone_if_unrecorded)
        await self._terminate(machines, known)

    async def _for_each(self, items: Sequence[T], work: Callable[[T], Awaitable[None]]) -> None:
        for result in await map_concurrently(items, work):
            if isinstance(result, RemudaError) and not isinstance(result, Conflict):
                self._result.error(f"machines: {result.message}")

    async def _close_if_gone(self, instance: Instance, view: MachineView | None, listed_at: datetime) -> None:
        if view is not None and view.state not in ENDED:
            return
        if view is None and not self._is_missing(instance, listed_at):
            return
        why = f"the machine is {view.state}" if view else "the machine no longer exists"
        await transition(self._context, instance, End(reason=RetireReason.GONE), by=Actor.REFRESH, why=why)
        self._result.retired[instance.instance_id] = why

    def _is_missing(self, instance: Instance, listed_at: datetime) -> bool:
        """Whether the machine was missing in two lists, a grace period apart, and was launched before the grace period.

        Compares with the time of the list, which shows nothing of what happened after it.
        """
        grace = timedelta(seconds=self._config.lifetimes.missing_after_s)
        return listed_at - self._first_seen.since(f"missing:{instance.instance_id}") >= grace and (
            listed_at - instance.created_at >= grace
        )

    async def _tombstone_if_unrecorded(self, view: MachineView) -> None:
        """Write a locked record for a machine that has none after a grace period; `_terminate` then ends it."""
        now = self._context.clock.now()
        grace = timedelta(seconds=self._config.lifetimes.unrecorded_grace_s)
        if view.state in ENDED or now - view.launched_at < grace:
            return
        record = Instance(
            instance_id=view.instance_id,
            state=State.TERMINATING,
            epoch=1,
            threshold=to_milliseconds(now),
            resource_class="",
            instance_type=view.instance_type,
            usage_class=UsageClass.ON_DEMAND,
            cpu=0,
            memory_mib=0,
            created_at=to_milliseconds(view.launched_at),
            provision_id=view.tags.get(PROVISION_TAG, ""),
            retire_reason=RetireReason.UNRECORDED,
        )
        why = "a machine of this pool without a record"
        await self._context.store.apply(tombstone(record, by=Actor.REFRESH, now=now, why=why))
        self._context.event_log.record(
            "tombstone", why, instance_id=view.instance_id, retire_reason=RetireReason.UNRECORDED
        )
        self._result.retired[view.instance_id] = why

    async def _terminate(self, machines: Mapping[str, MachineView], known: Mapping[str, Instance]) -> None:
        """Terminate machines until EC2 confirms, including those that run although their record is terminated."""
        revived = {
            key
            for key, view in machines.items()
            if key in known and known[key].state is State.TERMINATED and view.state not in ENDED
        }
        ending = {key for key, item in known.items() if item.state is State.TERMINATING} | set(self._result.retired)
        if not ending and not revived:
            return
        # The search may lag, so read the records by key before terminating a machine.
        read = self._context.store.get_many(sorted(ending | revived))
        records, _ = await skip_unreadable(read, self._result.error)
        unconfirmed = [item for key, item in records.items() if key in ending and item.state is State.TERMINATING]
        still_running = [key for key in sorted(revived) if key in records and records[key].state is State.TERMINATED]
        ids = [*sorted(item.instance_id for item in unconfirmed), *still_running]
        if not ids:
            return
        for instance_id, why in (await self._context.compute.terminate(ids)).items():
            self._result.error(f"{instance_id} could not be terminated: {why}")
        described_at = self._context.clock.now()
        views = await self._context.compute.describe(sorted(item.instance_id for item in unconfirmed))
        await self._confirm(
            [item for item in unconfirmed if self._has_ended(item, views.get(item.instance_id), described_at)]
        )

    def _has_ended(self, instance: Instance, view: MachineView | None, described_at: datetime) -> bool:
        if view is not None and view.state is not MachineState.TERMINATED:
            return False
        return view is not None or self._is_missing(instance, described_at)

    async def _confirm(self, ended: Sequence[Instance]) -> None:
        event = Confirm(keep_records_s=self._config.lifetimes.keep_records_s)
        results = await transition_all(self._context, ended, event, by=Actor.REFRESH, why="the machine has ended")
        for instance, error in zip(ended, results, strict=True):
            if error is None:
                self._result.terminated.append(instance.instance_id)
            elif not isinstance(error, Conflict):
                self._result.error(f"machines: {error.message}")
