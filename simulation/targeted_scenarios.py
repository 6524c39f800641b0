"""Scenes: worlds in which something rare is made likely, for the cells of the table of faults and states that chance
alone leaves empty for long.

A scene is drawn from a seed as every world; then its people and processes do more of what leads to the cell. Nothing
else is changed: the code is the real one, and every invariant is checked. No bug is planted or looked for here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from remuda.controlplane.operator import OperatorAction
from remuda.domain.instance import State
from simulation.coverage import Cell
from simulation.faults import NO_RECORD, Fault
from simulation.plan import CONFIGURATIONS, Operation, Plan, ProcessCut, Pull, Refresh, Run, draw
from simulation.run import Outcome, simulate

#: More than a scene has of each: a cut of what never starts is no cut.
MACHINES, SWEEPS, ORDERS = 60, 40, 16
Stage = Callable[[Plan, random.Random], Iterator[Operation]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    fault: Fault
    state: str
    seed: int
    stage: Stage
    #: Besides the cell's own.
    faults: frozenset[Fault]
    hours: float = 0.25
    instances: int = 5

    @property
    def cell(self) -> Cell:
        return self.fault, self.state

    def plan(self, seed: int | None = None) -> Plan:
        number = self.seed if seed is None else seed
        on = self.faults | {self.fault}
        drawn = draw(number, hours=self.hours, instances=self.instances, faults=on)
        return replace(drawn, operations=tuple(self.stage(drawn, random.Random(f"{number} scene"))))

    def play(self) -> Outcome:
        return simulate(self.plan())


def _agent(machine: int, life: int) -> str:
    return f"agent {machine:04x}.{life}"


def _runs(plan: Plan) -> list[Run]:
    return [item for item in plan.operations if isinstance(item, Run)]


def _hints_are_late(plan: Plan, chance: random.Random) -> Iterator[Operation]:
    """Whoever makes an instance idle stands still before it tells so."""
    yield from plan.operations
    parties = [f"release {run.run_id}.1" for run in _runs(plan)] + [f"sweep {turn}" for turn in range(1, SWEEPS)]
    for party in parties:
        yield ProcessCut(party=party, call="apply", step=chance.randint(1, 3), pause_s=chance.uniform(100, 700))


def _launches_are_slow(plan: Plan, chance: random.Random) -> Iterator[Operation]:
    """The answer to a launch comes when its machine was found without a record, and buried."""
    yield from plan.operations
    for run in _runs(plan):
        yield ProcessCut(party=f"provision {run.run_id}.1", call="launch", step=1, pause_s=chance.uniform(350, 900))


def _all_refresh(plan: Plan, chance: random.Random) -> Iterator[Operation]:
    yield from plan.operations
    for at in range(60, int(plan.hours * 3_600), 20):
        yield Refresh(at=at + chance.random(), twice=True, config=chance.randrange(CONFIGURATIONS))


def _ends_are_slow(plan: Plan, chance: random.Random) -> Iterator[Operation]:
    """A reset outlasts its release; whoever ends the instance for that has not told EC2 yet."""
    yield from plan.operations
    for turn in range(1, SWEEPS):
        yield ProcessCut(party=f"sweep {turn}", call="apply_all", step=1, pause_s=chance.uniform(60, 100))
    for machine in range(1, MACHINES):
        yield ProcessCut(party=_agent(machine, 1), call="reset", step=1, pause_s=chance.uniform(220, 290))


def _resets_come_twice(plan: Plan, chance: random.Random) -> Iterator[Operation]:
    """An agent dies when it has told that its machine is clean. The next one sees the release that has not read it yet,
    and resets again, while the machine is pooled, and claimed by one of many runs.
    """
    yield from plan.operations
    drawn = _runs(plan)
    more = [
        replace(
            run,
            at=run.at + chance.uniform(0, 300),
            run_id=f"{run.run_id}-{again}",
            resource_class="large",
            count=1,
            jobs=(5.0,),
            ephemeral=False,
        )
        for again in range(4)
        for run in drawn
    ]
    yield from more
    for run in (*drawn, *more):
        yield ProcessCut(party=f"release {run.run_id}.1", call="apply", step=1, pause_s=chance.uniform(15, 60))
    for machine in range(1, MACHINES):
        # What it told before: its script, the registration, and that it is gone.
        yield ProcessCut(party=_agent(machine, 1), call="write_signal", step=4)
        yield ProcessCut(party=_agent(machine, 2), call="reset", step=1, pause_s=chance.uniform(60, 200))


def _orders_are_slow(plan: Plan, chance: random.Random) -> Iterator[Operation]:
    """Listeners without a job and agents that stand still, while operators end the instance and EC2 is not told yet."""
    for item in plan.operations:
        yield replace(item, jobs=(), released=False, ephemeral=False) if isinstance(item, Run) else item
    for number in range(100, 100 + ORDERS):
        at = chance.uniform(0.1, 1.0) * plan.hours * 3_600
        yield Pull(at=at, number=number, lever=OperatorAction.TERMINATE, pick=chance.random())
        yield ProcessCut(party=f"operator {number}", call="apply", step=1, pause_s=chance.uniform(60, 200))
    for machine in range(1, MACHINES):
        for _ in range(10):
            step = 1 + int(chance.random() ** 1.5 * 150)
            yield ProcessCut(party=_agent(machine, 1), step=step, pause_s=chance.uniform(10, 90))


def _late_hint(fault: Fault, state: str, seed: int) -> Scene:
    more = frozenset({Fault.PAUSE, Fault.POWER_CUT, Fault.CONFIG_CHANGE, Fault.REFRESH_TWICE})
    return Scene(fault=fault, state=state, seed=seed, stage=_hints_are_late, faults=more)


SCENES = (
    _late_hint(Fault.MESSAGE_LOST, NO_RECORD, 7),
    _late_hint(Fault.MESSAGE_LOST, State.RUNNING, 15),
    _late_hint(Fault.MESSAGE_LOST, State.TERMINATED, 3),
    _late_hint(Fault.MESSAGE_LATE, NO_RECORD, 16),
    Scene(
        fault=Fault.LAUNCH_UNSURE,
        state=State.TERMINATED,
        seed=0,
        stage=_launches_are_slow,
        faults=frozenset({Fault.PAUSE}),
    ),
    Scene(
        fault=Fault.SHORT_PAGES,
        state=State.TERMINATED,
        seed=0,
        stage=_all_refresh,
        faults=frozenset({Fault.REFRESH_TWICE, Fault.CONFIG_CHANGE, Fault.POWER_CUT}),
        hours=0.5,
        instances=15,
    ),
    Scene(
        fault=Fault.RESET_FAILED,
        state=State.TERMINATING,
        seed=108,
        stage=_ends_are_slow,
        faults=frozenset({Fault.AGENT_PAUSE, Fault.PAUSE}),
    ),
    Scene(
        fault=Fault.RESET_FAILED,
        state=State.CLAIMED,
        seed=75,
        stage=_resets_come_twice,
        faults=frozenset({Fault.AGENT_CRASH, Fault.AGENT_PAUSE, Fault.PAUSE}),
    ),
    Scene(
        fault=Fault.LISTENER_DIES,
        state=State.TERMINATING,
        seed=154,
        stage=_orders_are_slow,
        faults=frozenset({Fault.AGENT_PAUSE, Fault.PAUSE, Fault.RELEASE_NEVER, Fault.TERMINATE}),
    ),
)
