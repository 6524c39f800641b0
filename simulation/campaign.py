"""Runs of simulated worlds: one plan, many seeds in several processes, and seeds until the first violation.

`python -m simulation.campaign` does the last of them; mutants run it in their own process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import repeat
from typing import Any

from remuda.domain.instance import HistoryEntry
from simulation.faults import Fault, FaultChoice, InjectedFault, Swarm, TraceLine, format_faults, parse_faults
from simulation.holds import NumberedCall
from simulation.invariants import Violation
from simulation.loop import new_loop, without_gc
from simulation.plan import WorldPlan, draw_plan
from simulation.workload import Workload
from simulation.world import Halted, World

#: Seeds per task of a worker process.
BATCH = 4
#: Counts in the summary, and the statistic of the world that each one is taken from.
COUNTED = {
    "machines": "machines",
    "claims": "claim-won",
    "jobs": "jobs",
    "provisions": "provisions",
    "releases": "releases",
    "refreshes": "refreshs",
    "crashes": "crashes",
    "set_jobs": "jobs of sets",
}


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
    #: The numbered calls, if the plan asks for them, and the one that was held.
    calls: Sequence[NumberedCall] = ()
    held: NumberedCall | None = None
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
        checks=world.safety.checks + world.safety.demand.checks + (load.liveness.checks if load.liveness else 0),
        stats=world.stats,
        faults=world.faults.counts,
        injected=tuple(world.faults.injected),
        lines=world.trace.lines,
        calls=world.calls.made if world.calls else (),
        held=world.calls.held if world.calls else None,
        history=world.database.histories.get(instance_id, ()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignSettings:
    hours: float
    instances: int
    faults: FaultChoice = Swarm.HALF
    #: Whether the worlds have runner sets.
    demand: bool = False

    def plan(self, seed: int) -> WorldPlan:
        return draw_plan(seed, hours=self.hours, instances=self.instances, faults=self.faults, demand=self.demand)

    def arguments(self, seeds: int) -> list[str]:
        """Arguments of `python -m simulation.campaign` for the first seeds."""
        kind = "demand" if self.demand else "runs"
        return [*map(str, (0, seeds, self.hours, self.instances)), format_faults(self.faults), kind]


@dataclass(kw_only=True, slots=True)
class CampaignSummary:
    seeds: int = 0
    simulated_s: float = 0.0
    steps: int = 0
    checks: int = 0
    stats: Counter[str] = field(default_factory=Counter)
    faults: Counter[Fault] = field(default_factory=Counter)
    #: Violations by seed.
    violations: dict[int, Violation] = field(default_factory=dict)

    def add(self, result: SimulationResult) -> None:
        self.seeds += 1
        self.simulated_s += result.seconds
        self.steps += result.steps
        self.checks += result.checks
        self.stats.update(result.stats)
        self.faults.update(result.faults)
        if result.violation is not None:
            self.violations[result.plan.seed] = result.violation

    def merge(self, other: CampaignSummary) -> None:
        self.seeds += other.seeds
        self.simulated_s += other.simulated_s
        self.steps += other.steps
        self.checks += other.checks
        self.stats.update(other.stats)
        self.faults.update(other.faults)
        self.violations |= other.violations

    def document(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "simulated_s": round(self.simulated_s),
            "steps": self.steps,
            "checks": self.checks,
            **{name: self.stats[note] for name, note in COUNTED.items()},
            "faults": {fault.value: self.faults[fault] for fault in Fault},
            "violations": [
                {"seed": seed, "invariant": found.invariant, "text": str(found), "instance_id": found.instance_id}
                for seed, found in sorted(self.violations.items())
            ],
        }


def run_batch(seeds: Sequence[int], settings: CampaignSettings) -> CampaignSummary:
    summary = CampaignSummary()
    for seed in seeds:
        summary.add(simulate(settings.plan(seed)))
    return summary


def run_many(
    seeds: Sequence[int],
    settings: CampaignSettings,
    *,
    workers: int,
    done: Callable[[CampaignSummary], None] = lambda _: None,
) -> CampaignSummary:
    """Simulate all seeds. `done` is called after each batch with the sum so far."""
    total = CampaignSummary()
    batches = [seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH)]
    with worker_pool(workers) as pool:
        try:
            for summary in pool.map(run_batch, batches, repeat(settings)):
                total.merge(summary)
                done(total)
        except KeyboardInterrupt:
            # Running batches end within seconds.
            pool.shutdown(cancel_futures=True)
            raise
    return total


def worker_pool(workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max_workers=workers, mp_context=context, initializer=_start_worker)


def _start_worker() -> None:
    """Leave Ctrl-C to the parent process, and exclude imported objects from garbage collection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstViolation:
    #: Number of simulated seeds, including the one that violated an invariant.
    seeds_run: int
    #: The seed that violated an invariant; None if none did.
    seed: int | None = None
    violation: str = ""
    invariant: str = ""


def first_violation(seeds: Sequence[int], settings: CampaignSettings) -> FirstViolation:
    """Simulate the seeds one after the other until one violates an invariant."""
    for number, seed in enumerate(seeds, start=1):
        found = simulate(settings.plan(seed)).violation
        if found is not None:
            return FirstViolation(seeds_run=number, seed=seed, violation=str(found), invariant=found.invariant)
    return FirstViolation(seeds_run=len(seeds))


def main(arguments: Sequence[str]) -> None:
    """Print the first violation as JSON."""
    first, count, hours, instances, faults, demand = arguments
    settings = CampaignSettings(
        hours=float(hours), instances=int(instances), faults=parse_faults(faults), demand=demand == "demand"
    )
    # Exclude imported objects from garbage collection, which makes the simulation faster.
    gc.freeze()
    found = first_violation(range(int(first), int(first) + int(count)), settings)
    sys.stdout.write(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
