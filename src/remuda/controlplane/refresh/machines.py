"""Machines against records: those without a record, records without a machine, and ends to be confirmed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypeVar

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable, transition, transition_all
from remuda.controlplane.refresh.result import Tally
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import ABSORBING, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.resources import UsageClass
from remuda.domain.timestamps import to_milliseconds
from remuda.domain.transitions import Actor, Confirm, End, RetireReason, tombstone
from remuda.ports.compute import PROVISION_TAG, MachineState, MachineView
from remuda.ports.store import InstanceStore

T = TypeVar("T")

OVER = frozenset({MachineState.SHUTTING_DOWN, MachineState.TERMINATED})


class FirstSeen:
    """Since when something has looked amiss. What looks right again is dropped."""

    def __init__(self, known: Mapping[str, datetime], *, now: datetime) -> None:
        self._known = dict(known)
        self._now = now
        self._seen: dict[str, datetime] = {}

    def since(self, what: str) -> datetime:
        """Note a sighting; the time of the first one."""
        self._seen[what] = self._known.get(what, to_milliseconds(self._now))
        return self._seen[what]

    def again(self, what: str) -> bool:
        """Note a sighting; whether an earlier sweep saw it, too, and all sweeps since."""
        self.since(what)
        return what in self._known

    def keep(self, what: str) -> None:
        """Nobody could look: what was seen before stays as it is."""
        if what in self._known:
            self._seen[what] = self._known[what]

    async def save(self, store: InstanceStore) -> None:
        if self._seen != self._known:
            await store.put_sightings(self._seen)


class MachineSweep:
    def __init__(self, context: Context, config: PoolConfig, tally: Tally, sightings: FirstSeen) -> None:
        self._context = context
        self._config = config
        self._tally = tally
        self._sightings = sightings

    async def run(self, views: Sequence[MachineView], records: Mapping[str, Instance], *, listed_at: datetime) -> None:
        """`views` were listed at that time, by our clock: long ago, where this process stood still meanwhile."""
        machines = {view.instance_id: view for view in views}
        unknown = [key for key in machines if key not in records]
        # The search may lag: what it missed is read by key before it is called unrecorded.
        more, unreadable = await skip_unreadable(self._context.store.get_many(unknown), self._tally.error)
        known = {**records, **more}
        live = [item for item in known.values() if item.state not in ABSORBING]
        await self._each(live, lambda item: self._close_if_gone(item, machines.get(item.instance_id), listed_at))
        strays = [machines[key] for key in unknown if key not in known and key not in unreadable]
        await self._each(strays, self._bury_if_stray)
        await self._terminate(machines, known)

    async def _each(self, items: Sequence[T], work: Callable[[T], Awaitable[None]]) -> None:
        for result in await map_concurrently(items, work):
            if isinstance(result, RemudaError) and not isinstance(result, Conflict):
                self._tally.error(f"machines: {result.message}")

    async def _close_if_gone(self, instance: Instance, view: MachineView | None, listed_at: datetime) -> None:
        if view is not None and view.state not in OVER:
            return
        if view is None and not self._is_missing(instance, listed_at):
            return
        why = f"the machine is {view.state}" if view else "the machine is not found any more"
        await transition(self._context, instance, End(reason=RetireReason.GONE), by=Actor.REFRESH, why=why)
        self._tally.retired[instance.instance_id] = why

    def _is_missing(self, instance: Instance, listed_at: datetime) -> bool:
        """Not found twice, far enough apart, past the launch: a list says nothing of what came after it."""
        grace = timedelta(seconds=self._config.lifetimes.missing_after_s)
        return listed_at - self._sightings.since(f"missing:{instance.instance_id}") >= grace and (
            listed_at - instance.created_at >= grace
        )

    async def _bury_if_stray(self, view: MachineView) -> None:
        now = self._context.clock.now()
        grace = timedelta(seconds=self._config.lifetimes.unrecorded_grace_s)
        if view.state in OVER or now - view.launched_at < grace:
            return
        stone = Instance(
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
        await self._context.store.apply(tombstone(stone, by=Actor.REFRESH, now=now, why=why))
        self._context.event_log.record(
            "tombstone", why, instance_id=view.instance_id, retire_reason=RetireReason.UNRECORDED
        )
        self._tally.retired[view.instance_id] = why

    async def _terminate(self, machines: Mapping[str, MachineView], known: Mapping[str, Instance]) -> None:
        """Ask until it is confirmed; also for machines that live on although their record says terminated."""
        revived = {
            key
            for key, view in machines.items()
            if key in known and known[key].state is State.TERMINATED and view.state not in OVER
        }
        ending = {key for key, item in known.items() if item.state is State.TERMINATING} | set(self._tally.retired)
        if not ending and not revived:
            return
        # A search said so; no machine is ended on its word.
        read = self._context.store.get_many(sorted(ending | revived))
        records, _ = await skip_unreadable(read, self._tally.error)
        waiting = [item for key, item in records.items() if key in ending and item.state is State.TERMINATING]
        over = [key for key in sorted(revived) if key in records and records[key].state is State.TERMINATED]
        asked = [*sorted(item.instance_id for item in waiting), *over]
        if not asked:
            return
        for instance_id, why in (await self._context.compute.terminate(asked)).items():
            self._tally.error(f"{instance_id} could not be terminated: {why}")
        described_at = self._context.clock.now()
        views = await self._context.compute.describe(sorted(item.instance_id for item in waiting))
        await self._confirm([item for item in waiting if self._ended(item, views.get(item.instance_id), described_at)])

    def _ended(self, instance: Instance, view: MachineView | None, described_at: datetime) -> bool:
        if view is not None and view.state is not MachineState.TERMINATED:
            return False
        return view is not None or self._is_missing(instance, described_at)

    async def _confirm(self, ended: Sequence[Instance]) -> None:
        """Nobody waits for it and nothing follows: all of them in one go."""
        event = Confirm(keep_records_s=self._config.lifetimes.keep_records_s)
        results = await transition_all(self._context, ended, event, by=Actor.REFRESH, why="the machine has ended")
        for instance, error in zip(ended, results, strict=True):
            if error is None:
                self._tally.terminated.append(instance.instance_id)
            elif not isinstance(error, Conflict):
                self._tally.error(f"machines: {error.message}")
