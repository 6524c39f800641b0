"""One simulated world, from its plan to its result."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from remuda.domain.instance import HistoryEntry
from simulation.faults import Fault, InjectedFault
from simulation.invariants import Violation
from simulation.loop import new_loop, without_gc
from simulation.plan import WorldPlan
from simulation.trace import TraceLine
from simulation.workload import Workload
from simulation.world import Halted, World


@dataclass(kw_only=True, slots=True)
class SimulationResult:
    plan: WorldPlan
    violation: Violation | None
    digest: str
    #: Simulated seconds, including the time after the faults ended.
    seconds: float
    steps: int
    checks: int
    stats: Counter[str]
    faults: Counter[Fault]
    injected: tuple[InjectedFault, ...] = ()
    lines: Sequence[TraceLine] = ()
    #: History of the instance that the violation is about.
    history: Sequence[HistoryEntry] = field(default_factory=tuple)


def simulate(plan: WorldPlan, *, keep_trace: bool = False) -> SimulationResult:
    """Run a plan to its end or to the first violation."""
    with without_gc():
        return _simulate(plan, keep_trace=keep_trace)


def _simulate(plan: WorldPlan, *, keep_trace: bool) -> SimulationResult:
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
    instance_id = world.violation.instance_id if world.violation else ""
    return SimulationResult(
        plan=plan,
        violation=world.violation,
        digest=world.trace.digest,
        seconds=loop.time(),
        steps=loop.steps,
        checks=world.safety.checks + (load.liveness.checks if load.liveness else 0),
        stats=world.stats,
        faults=world.faults.counts,
        injected=tuple(world.faults.injected),
        lines=world.trace.lines,
        history=world.database.histories.get(instance_id, ()),
    )
