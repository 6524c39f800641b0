"""Reads of records and reports for all sets at once.

Records are searched for while a set has machines or wants idle ones, and rarely otherwise, so that an idle pool costs
nothing. A report is read when its machine may have changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from remuda.controlplane.context import Context, skip_unreadable
from remuda.controlplane.demand.machines import HELD, KnownMachine, MachineTable
from remuda.domain.errors import RemudaError
from remuda.domain.instance import Instance, State
from remuda.domain.signals import Report
from remuda.domain.timestamps import seconds_to_minute

#: Seconds between two searches for records: with machines or wanted idle ones, and without.
SEARCH_S = 10.0
IDLE_SEARCH_S = 300.0
#: Minimum seconds between two reads of reports; those that are due soon share a read.
READ_S = 0.5
#: Seconds after a failed read.
RETRY_S = 2.0


class MachineObserver:
    def __init__(
        self,
        context: Context,
        table: MachineTable,
        *,
        wake: Callable[[str], None],
        on_search: Callable[[], None],
        wants_idle: Callable[[], bool],
    ) -> None:
        """`wake` is called with each set whose machines changed, `on_search` after each search for records."""
        self._context = context
        self._table = table
        self._wake = wake
        self._on_search = on_search
        self._wants_idle = wants_idle
        self._searched_at: float | None = None
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """A machine was added, or is expected to change soon."""
        self._woken.set()

    def search_soon(self) -> None:
        self._searched_at = None
        self._woken.set()

    async def run(self) -> None:
        while True:
            self._woken.clear()
            try:
                if self._search_due_in() <= 0:
                    await self.search()
                await self.read_reports()
                pause_s = self._pause_s()
            except RemudaError as error:
                self._context.event_log.record("read-failed", error.message)
                self._restart_heartbeats()
                pause_s = RETRY_S
            await self._sleep(pause_s)

    async def _sleep(self, pause_s: float) -> None:
        """Sleep, at least as long as reads must be apart. A wake-up ends the rest."""
        await self._context.clock.sleep(min(pause_s, READ_S))
        if pause_s > READ_S and not self._woken.is_set():
            waking = asyncio.ensure_future(self._woken.wait())
            sleeping = asyncio.ensure_future(self._context.clock.sleep(pause_s - READ_S))
            try:
                await asyncio.wait({waking, sleeping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waking.cancel()
                sleeping.cancel()

    def _search_due_in(self) -> float:
        if self._searched_at is None:
            return 0.0
        interval_s = SEARCH_S if len(self._table) or self._wants_idle() else IDLE_SEARCH_S
        return self._searched_at + interval_s - self._context.clock.monotonic()

    def _pause_s(self) -> float:
        """Seconds until something is due. Capacity windows open at a minute: then idle machines may be wanted."""
        now = self._context.clock.monotonic()
        read_in = (machine.read_at - now for machine in self._table)
        return max(0.0, min([self._search_due_in(), seconds_to_minute(self._context.clock.now()), *read_in]))

    def _restart_heartbeats(self) -> None:
        """A failed read says nothing about the agents."""
        now = self._context.clock.monotonic()
        for machine in self._table:
            machine.restart_heartbeat(now)

    async def search(self) -> None:
        """Search for the records of all sets. Search results may be old, so records that differ are read by key."""
        context, table = self._context, self._table
        began = context.clock.monotonic()
        known = {machine.instance.instance_id: machine.instance for machine in table}
        found = await context.store.find(HELD | {State.IDLE})
        table.set_idle((item for item in found if item.state is State.IDLE), began)
        held = {item.instance_id: item for item in found if item.runner_set and item.state in HELD}
        differing = sorted(key for key in {*known, *held} if held.get(key) != known.get(key))
        records, unreadable = await skip_unreadable(context.store.get_many(differing))
        for instance_id in differing:
            machine = table.get(instance_id)
            # A task of this process may have changed or removed it meanwhile, and knows better.
            changed = (machine.instance if machine is not None else None) != known.get(instance_id)
            if instance_id in unreadable or changed or (machine is not None and machine.handled):
                continue
            record = records.get(instance_id)
            if machine is None and record is not None and record.provision_id in table.acquiring:
                continue
            self._note(machine, instance_id, record)
        self._searched_at = context.clock.monotonic()
        self._on_search()

    def _note(self, machine: KnownMachine | None, instance_id: str, record: Instance | None) -> None:
        if machine is not None:
            self._wake(machine.instance.runner_set)
        if record is None:
            self._table.remove(instance_id)
            return
        if self._table.put(record) is not None:
            self._wake(record.runner_set)

    async def read_reports(self) -> None:
        """Read the reports that are due, with those that are due soon."""
        clock = self._context.clock
        now = clock.monotonic()
        due = [machine for machine in self._table if machine.read_at <= now]
        if not due:
            return
        ids = [machine.instance.instance_id for machine in self._table if machine.read_at <= now + READ_S]
        reports, unreadable = await skip_unreadable(self._context.store.get_reports(ids))
        for instance_id in ids:
            machine = self._table.get(instance_id)
            if machine is not None and instance_id not in unreadable:
                self._observe(machine, reports.get(instance_id))

    def _observe(self, machine: KnownMachine, report: Report | None) -> None:
        clock = self._context.clock
        changed = machine.observe(report, now=clock.now(), monotonic=clock.monotonic())
        if changed:
            self._wake(machine.instance.runner_set)
