"""Campaigns: many seeds in several processes, and the sum of their results."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from simulation.faults import Fault, FaultChoice, Swarm
from simulation.invariants import Violation
from simulation.plan import WorldPlan, draw_plan
from simulation.run import SimulationResult, simulate

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
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignSettings:
    hours: float
    instances: int
    faults: FaultChoice = Swarm.HALF

    def plan(self, seed: int) -> WorldPlan:
        return draw_plan(seed, hours=self.hours, instances=self.instances, faults=self.faults)


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
    seeds: Iterable[int],
    settings: CampaignSettings,
    *,
    workers: int,
    done: Callable[[CampaignSummary], None] = lambda _: None,
) -> CampaignSummary:
    """Simulate all seeds. `done` is called after each batch with the sum so far."""
    total = CampaignSummary()
    batches = _batches(seeds)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=workers, mp_context=context, initializer=_start_worker) as pool:
        running: set[Future[CampaignSummary]] = set()
        try:
            for batch in batches:
                running.add(pool.submit(run_batch, batch, settings))
                if len(running) >= 2 * workers:
                    running = _collect(running, total, done)
            while running:
                running = _collect(running, total, done)
        except KeyboardInterrupt:
            # Running batches end within seconds.
            pool.shutdown(cancel_futures=True)
            raise
    return total


def _start_worker() -> None:
    """Leave Ctrl-C to the parent process, and exclude imported objects from garbage collection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()


def _batches(seeds: Iterable[int]) -> Iterable[list[int]]:
    batch: list[int] = []
    for seed in seeds:
        batch.append(seed)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _collect(
    running: set[Future[CampaignSummary]], total: CampaignSummary, done: Callable[[CampaignSummary], None]
) -> set[Future[CampaignSummary]]:
    finished, rest = wait(running, return_when=FIRST_COMPLETED)
    for future in finished:
        total.merge(future.result())
        done(total)
    return rest
