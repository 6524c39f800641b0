"""Steps of the listener that complete while its search, or its read of reports, is under way: they know better."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from remuda.controlplane.demand.machines import HELD, MachineTable
from remuda.controlplane.demand.observer import MachineObserver
from remuda.domain.instance import Instance, State
from tests.support.records import at, in_set, instance, instance_id, set_holder
from tests.support.virtual_time import Call
from tests.support.world import PoolWorld

CREATED = in_set(State.CREATED, epoch=1)
RUNNING = in_set(State.RUNNING, epoch=1)
BOUND = replace(RUNNING, holder=set_holder(run_id="77"), threshold=at(900))
RELEASING = in_set(State.RELEASING, epoch=1)
IDLE = instance(epoch=1)
CLAIMED = in_set(State.CLAIMED, epoch=2)
TERMINATING = replace(IDLE, state=State.TERMINATING)
OTHER = replace(RUNNING, instance_id=instance_id(2))
#: The records before and after each step; None if there is none.
STEPS: dict[str, tuple[Instance | None, Instance]] = {
    "launch": (None, CREATED),
    "claim": (IDLE, CLAIMED),
    "fill": (CREATED, IDLE),
    "equip": (CREATED, RUNNING),
    "equip claimed": (CLAIMED, replace(RUNNING, epoch=2)),
    "bind": (RUNNING, BOUND),
    "renew": (RUNNING, replace(RUNNING, threshold=at(1_800))),
    "release": (BOUND, replace(RELEASING, holder=BOUND.holder)),
    "pool": (RELEASING, IDLE),
    "end": (BOUND, TERMINATING),
}
#: Which records the index shows: it may lag.
INDEX = {"none": (False, False), "before": (True, False), "after": (False, True)}


class Race:
    """A search in which one read takes as long as a step of the same process."""

    def __init__(self, world: PoolWorld, step: str, *, held: str, is_late: bool, index: str, is_handled: bool) -> None:
        self.before, self.after = STEPS[step]
        self._world = world
        self._held = held
        self._is_late = is_late
        shown = [record for record, is_shown in zip((self.before, self.after), INDEX[index], strict=True) if is_shown]
        self._index = [record for record in shown if record is not None and record.state in HELD | {State.IDLE}]
        self._is_handled = is_handled
        self.context = world.process(self._hook)
        self.table = MachineTable(self.context.clock)
        self.observer = MachineObserver(
            self.context, self.table, wake=lambda _: None, on_search=lambda: None, wants_idle=lambda: True
        )
        self._is_done = False

    def begin(self) -> None:
        for record in (OTHER, self.before):
            if record is not None:
                self._world.database.instances[record.instance_id] = record
                self.table.put(record)
        self._set_handled(is_handled=self._is_handled)

    def _set_handled(self, *, is_handled: bool) -> None:
        machine = self.table.get(self.after.instance_id)
        if machine is not None:
            machine.handled = is_handled

    def complete(self) -> None:
        """The step's write, and what the process knows of it."""
        if not self._is_done:
            self._is_done = True
            self._world.database.instances[self.after.instance_id] = self.after
            self.table.put(self.after)
            self._set_handled(is_handled=False)

    async def _hook(self, name: str, call: Call) -> Any:
        if name == self._held and not self._is_late:
            self.complete()
        answer = await call()
        if name == "store.find":
            answer = self._index
        if name == self._held and self._is_late:
            self.complete()
        return answer


@pytest.mark.parametrize("is_handled", [False, True], ids=["short", "begun before"])
@pytest.mark.parametrize("index", INDEX)
@pytest.mark.parametrize("is_late", [False, True], ids=["before the read", "after the read"])
@pytest.mark.parametrize("held", ["store.find", "store.get_many", "store.get_reports"])
@pytest.mark.parametrize("step", STEPS)
async def test_search_does_not_undo_a_step_that_completes_meanwhile(
    step: str,
    held: str,
    is_late: bool,  # noqa: FBT001
    index: str,
    is_handled: bool,  # noqa: FBT001
) -> None:
    world = PoolWorld()
    race = Race(world, step, held=held, is_late=is_late, index=index, is_handled=is_handled)
    race.begin()
    await race.observer.search()
    await race.observer.read_reports()
    race.complete()
    known = race.table.get(race.after.instance_id)
    is_held = race.after.state in HELD
    assert (known.instance if known is not None else None) == (race.after if is_held else None)
    other = race.table.get(OTHER.instance_id)
    assert other is not None
    assert other.instance == OTHER
