"""One seed, from its plan to its outcome."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from remuda.domain.instance import HistoryEntry
from simulation.faults import Fault, InjectedFault
from simulation.invariants import Violation
from simulation.loop import new_loop, undisturbed
from simulation.plan import Plan
from simulation.trace import Line
from simulation.workload import Workload
from simulation.world import Halted, World


@dataclass(kw_only=True, slots=True)
class Outcome:
    plan: Plan
    violation: Violation | None
    digest: str
    #: How long the world lived, its rest included.
    seconds: float
    steps: int
    checks: int
    stats: Counter[str]
    faults: Counter[Fault]
    coverage: Counter[tuple[Fault, str]]
    strikes: tuple[InjectedFault, ...] = ()
    lines: Sequence[Line] = ()
    #: Of the instance that the violation is about.
    history: Sequence[HistoryEntry] = field(default_factory=tuple)


def simulate(plan: Plan, *, keep_trace: bool = False) -> Outcome:
    """Live through a plan. What a violation leaves running never goes on."""
    with undisturbed():
        return _live(plan, keep_trace=keep_trace)


def _live(plan: Plan, *, keep_trace: bool) -> Outcome:
    loop = new_loop(random.Random(f"{plan.seed} order"))
    worlds: list[World] = []
    loads: list[Workload] = []

    async def live() -> None:
        world = World(plan, loop, keep_trace=keep_trace)
        worlds.append(world)
        load = Workload(world)
        loads.append(load)
        await load.run()

    with contextlib.suppress(Halted):
        loop.run(live())
    world, load = worlds[0], loads[0]
    about = world.violation.instance_id if world.violation else ""
    return Outcome(
        plan=plan,
        violation=world.violation,
        digest=world.trace.digest,
        seconds=loop.time(),
        steps=loop.steps,
        checks=world.safety.checks + (load.liveness.checks if load.liveness else 0),
        stats=world.stats,
        faults=world.faults.counts,
        coverage=world.faults.coverage,
        strikes=tuple(world.faults.strikes),
        lines=world.trace.lines,
        history=world.database.histories.get(about, ()),
    )
