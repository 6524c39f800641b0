"""Shrinking of a plan that violates an invariant, and the report of the smallest one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from simulation.campaign import CampaignSettings, SimulationResult, simulate
from simulation.faults import Fault, InjectedFault, format_faults
from simulation.plan import Operation, WorldPlan

T = TypeVar("T")

#: Maximum number of plans that a shrinking simulates, and of seconds after which it begins no other.
MAX_TRIES = 400
MAX_SECONDS = 60.0
#: Maximum number of trace lines in a report.
MAX_LINES = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class ShrunkViolation:
    found: SimulationResult
    smallest: SimulationResult
    tries: int


class _Shrinker:
    def __init__(self, found: SimulationResult, *, tries: int, seconds: float) -> None:
        assert found.violation is not None  # noqa: S101 - there is nothing to shrink without one
        self._invariant = found.violation.invariant
        self.tries_left = tries
        self._ends_at = time.monotonic() + seconds
        self.best = found

    def still_fails(self, plan: WorldPlan) -> bool:
        """Return whether a smaller plan violates the same invariant, and keep it if so."""
        if self.tries_left <= 0 or time.monotonic() >= self._ends_at:
            return False
        self.tries_left -= 1
        result = simulate(plan)
        if result.violation is None or result.violation.invariant != self._invariant:
            return False
        self.best = result
        return True

    def run(self) -> None:
        before = 0
        while before != self._size():
            before = self._size()
            self._remove_operations()
            self._disable_faults()
            self._suppress_injected_faults()
            # Last: without an operation or a fault, the violation may come later.
            self._shorten()

    def _size(self) -> int:
        plan = self.best.plan
        return len(plan.operations) + len(plan.faults) + len(self.best.injected)

    def _shorten(self) -> None:
        violation = self.best.violation
        if violation is not None and violation.at < self.best.plan.hours * 3_600:
            self.still_fails(replace(self.best.plan, hours=(violation.at + 1) / 3_600))

    def _remove_operations(self) -> None:
        def still_fails(operations: Sequence[Operation]) -> bool:
            return self.still_fails(replace(self.best.plan, operations=tuple(operations)))

        minimize(list(self.best.plan.operations), still_fails)

    def _disable_faults(self) -> None:
        def still_fails(faults: Sequence[Fault]) -> bool:
            return self.still_fails(replace(self.best.plan, faults=frozenset(faults)))

        minimize(sorted(self.best.plan.faults), still_fails)

    def _suppress_injected_faults(self) -> None:
        suppressed = self.best.plan.suppressed
        injected = list(self.best.injected)

        def still_fails(kept: Sequence[InjectedFault]) -> bool:
            removed = set(injected) - set(kept)
            return self.still_fails(replace(self.best.plan, suppressed=suppressed | removed))

        minimize(injected, still_fails)


def minimize(items: list[T], still_fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Remove halves, then quarters, then single items, as long as `still_fails` holds for the rest."""
    size = max(1, len(items) // 2)
    while items:
        at = 0
        while at < len(items):
            fewer = items[:at] + items[at + size :]
            if still_fails(fewer):
                items = fewer
            else:
                at += size
        if size == 1:
            break
        size //= 2
    return items


def shrink(found: SimulationResult, *, tries: int = MAX_TRIES, seconds: float = MAX_SECONDS) -> ShrunkViolation:
    shrinker = _Shrinker(found, tries=tries, seconds=seconds)
    shrinker.run()
    smallest = simulate(shrinker.best.plan, keep_trace=True)
    return ShrunkViolation(found=found, smallest=smallest, tries=tries - max(0, shrinker.tries_left))


def report_seed(seed: int, settings: CampaignSettings) -> list[str]:
    """Simulate a seed that violates an invariant, and report the violation."""
    return report(simulate(settings.plan(seed)), settings)


def report(found: SimulationResult, settings: CampaignSettings) -> list[str]:
    """Shrink a violation and describe it, with the command that shows the whole trace."""
    world = f"--seed {found.plan.seed} --hours {settings.hours:g} --instances {settings.instances}"
    kind = " --demand" if settings.demand else ""
    command = f"full trace: python -m simulation {world} --faults {format_faults(settings.faults)}{kind} --trace"
    return [*describe(shrink(found)), command]


def describe(shrunk: ShrunkViolation) -> Iterator[str]:
    """The lines of a report: operations, trace and instance history of the smallest violating plan."""
    found, smallest = shrunk.found, shrunk.smallest
    yield f"seed {found.plan.seed}: {found.violation}"
    if smallest.violation is None:
        return
    yield f"smallest plan that violates it ({shrunk.tries} tries): {smallest.violation}"
    yield f"faults: {', '.join(sorted(smallest.faults)) or 'none'}"
    yield "operations:"
    for operation in sorted(smallest.plan.operations, key=lambda item: item.at):
        yield f"  {operation.at:9.3f}  {operation}"
    yield "timeline:"
    yield from (f"  {line}" for line in _relevant_lines(smallest))
    if smallest.history:
        yield f"history of {smallest.violation.instance_id}:"
        for entry in smallest.history:
            step = f"{entry.transition:<12} {entry.source or '':>11} to {entry.target:<11}"
            actor = f"epoch {entry.epoch}, run {entry.subject}, by {entry.by}"
            yield f"  {entry.at:%H:%M:%S} {step} {actor}: {entry.why}"


def _relevant_lines(result: SimulationResult) -> list[str]:
    """Trace lines about the instance of the violation, about faults and about interrupted processes."""
    instance_id = result.violation.instance_id if result.violation else ""
    chosen = [
        str(line)
        for line in result.lines
        if not line.source
        or line.text.startswith(("interruption", "ended", "off"))
        or (instance_id and instance_id in line.text and not line.text.startswith("beat"))
        or (not instance_id and line.source in {"record", "provision", "ec2", "github"})
    ]
    omitted = len(chosen) - MAX_LINES
    return chosen if omitted <= 0 else [f"({omitted} earlier lines omitted)", *chosen[-MAX_LINES:]]
