"""Instances of the sets that the cloud has ended, and whose agents cannot say so."""

from __future__ import annotations

from collections.abc import Callable

from remuda.controlplane.context import Context
from remuda.controlplane.demand.context import BackgroundTasks
from remuda.controlplane.demand.equipment import Equipment
from remuda.controlplane.demand.machines import KnownMachine, MachineTable
from remuda.controlplane.demand.sets import SetState
from remuda.controlplane.ended import LOOK_S, early_end, find_ended
from remuda.domain.errors import RemudaError
from remuda.domain.instance import State
from remuda.ports.compute import MachineView

#: Seconds between two questions about an instance with a job and without a heartbeat. Sweeps find it as well, but on
#: AWS they run every five minutes only.
CHECK_S = 60.0


class EndedInstances:
    """Asks the cloud about instances that boot, and about those that fell silent under their job: one call for all."""

    def __init__(
        self,
        context: Context,
        table: MachineTable,
        equipment: Equipment,
        tasks: BackgroundTasks,
        *,
        find: Callable[[str], SetState | None],
    ) -> None:
        """`find` returns the state of a set."""
        self._context = context
        self._table = table
        self._equipment = equipment
        self._tasks = tasks
        self._find = find

    async def run(self) -> None:
        while True:
            await self._context.clock.sleep(LOOK_S)
            try:
                await self.look()
            except RemudaError as error:
                self._context.event_log.record("read-failed", error.message)

    async def look(self) -> None:
        """Ask once, and start a step for each instance that has ended."""
        monotonic = self._context.clock.monotonic()
        due = {item.instance.instance_id: item for item in self._table if _is_due(item, monotonic)}
        for machine in due.values():
            machine.check_at = monotonic + CHECK_S if machine.has_job else 0.0
        failed: dict[tuple[str, bool], RemudaError] = {}
        for instance, view in await find_ended(self._context, [machine.instance for machine in due.values()]):
            machine = due[instance.instance_id]
            state = self._find(instance.runner_set)
            if state is None or machine.handled or machine.instance != instance:
                continue
            if instance.state is State.CREATED:
                failed.setdefault((instance.runner_set, machine.for_pool), early_end(instance, view))
            self._start(state, machine, view)
        for (name, for_pool), error in failed.items():
            if (state := self._find(name)) is not None:
                # Once for all instances of a launch.
                state.note_early_end(self._context, error, for_pool=for_pool)

    def _start(self, state: SetState, machine: KnownMachine, view: MachineView) -> None:
        machine.handled = True
        record = self._equipment.record_end
        step = self._equipment.run_step(state, machine, lambda: record(machine, view))
        self._tasks.start("step", step)


def _is_due(machine: KnownMachine, monotonic: float) -> bool:
    if machine.handled or machine.retry_at > monotonic or machine.check_at > monotonic:
        return False
    is_booting = machine.instance.state is State.CREATED and not machine.has_booted
    return is_booting or (machine.dead and machine.has_job)
