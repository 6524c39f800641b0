"""Many seeds on several cores, and what they came to."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from simulation.coverage import STATES, empty_cells
from simulation.faults import Chosen, Fault, Swarm
from simulation.invariants import Violation
from simulation.plan import Plan, draw
from simulation.run import Outcome, simulate

#: Seeds that a worker takes at a time.
BATCH = 4
#: What is counted for people, and which note of the world it is.
COUNTED = {
    "lives": "lives",
    "claims": "claim-won",
    "jobs": "jobs",
    "provisions": "provisions",
    "releases": "releases",
    "refreshes": "refreshs",
    "crashes": "crashes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    hours: float
    instances: int
    faults: Chosen = Swarm.HALF

    def plan(self, seed: int) -> Plan:
        return draw(seed, hours=self.hours, instances=self.instances, faults=self.faults)


@dataclass(kw_only=True, slots=True)
class Summary:
    seeds: int = 0
    simulated_s: float = 0.0
    steps: int = 0
    checks: int = 0
    stats: Counter[str] = field(default_factory=Counter)
    faults: Counter[Fault] = field(default_factory=Counter)
    coverage: Counter[tuple[Fault, str]] = field(default_factory=Counter)
    #: By seed.
    violations: dict[int, Violation] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        self.simulated_s += outcome.seconds
        self.steps += outcome.steps
        self.checks += outcome.checks
        self.stats.update(outcome.stats)
        self.faults.update(outcome.faults)
        self.coverage.update(outcome.coverage)
        if outcome.violation is not None:
            self.violations[outcome.plan.seed] = outcome.violation

    def merge(self, other: Summary) -> None:
        self.seeds += other.seeds
        self.simulated_s += other.simulated_s
        self.steps += other.steps
        self.checks += other.checks
        self.stats.update(other.stats)
        self.faults.update(other.faults)
        self.coverage.update(other.coverage)
        self.violations |= other.violations

    def document(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "simulated_s": round(self.simulated_s),
            "steps": self.steps,
            "checks": self.checks,
            **{name: self.stats[note] for name, note in COUNTED.items()},
            "faults": {fault.value: self.faults[fault] for fault in Fault},
            "coverage": {fault.value: {state: self.coverage[fault, state] for state in STATES} for fault in Fault},
            "empty": [[fault.value, state] for fault, state in empty_cells(self.coverage)],
            "violations": [
                {"seed": seed, "invariant": found.invariant, "what": str(found), "instance_id": found.instance_id}
                for seed, found in sorted(self.violations.items())
            ],
        }


def run_batch(seeds: Sequence[int], settings: Settings) -> Summary:
    summary = Summary()
    for seed in seeds:
        summary.add(simulate(settings.plan(seed)))
    return summary


def run_many(
    seeds: Iterable[int],
    settings: Settings,
    *,
    workers: int,
    done: Callable[[Summary], None] = lambda _: None,
) -> Summary:
    """All of them, in any order; `done` is told after each batch, with the sum so far."""
    total = Summary()
    batches = _batches(seeds)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=workers, mp_context=context, initializer=_begin) as pool:
        running: set[Future[Summary]] = set()
        try:
            for batch in batches:
                running.add(pool.submit(run_batch, batch, settings))
                if len(running) >= 2 * workers:
                    running = _collect(running, total, done)
            while running:
                running = _collect(running, total, done)
        except KeyboardInterrupt:
            # What has begun is a matter of seconds.
            pool.shutdown(cancel_futures=True)
            raise
    return total


def _begin() -> None:
    """In each worker: Ctrl-C is for the one who started it, and what is imported need not be looked through again."""
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


def _collect(running: set[Future[Summary]], total: Summary, done: Callable[[Summary], None]) -> set[Future[Summary]]:
    finished, rest = wait(running, return_when=FIRST_COMPLETED)
    for future in finished:
        total.merge(future.result())
        done(total)
    return rest
