"""From a seed that violates an invariant to the least that still does: fewer faults, fewer operations, a short tale."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from simulation.faults import Fault, InjectedFault
from simulation.plan import Operation, Plan
from simulation.run import Outcome, simulate

T = TypeVar("T")

#: How often a plan is tried while it is cut down.
MAX_TRIES = 400
#: How many lines a tale has at most.
MAX_LINES = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Shrunk:
    #: As it was found, and as it is now.
    found: Outcome
    least: Outcome
    tries: int


class _Shrinker:
    def __init__(self, found: Outcome, *, tries: int) -> None:
        assert found.violation is not None  # noqa: S101 - there is nothing to shrink without one
        self._invariant = found.violation.invariant
        self._left = tries
        self.best = found

    def still(self, plan: Plan) -> bool:
        """Whether a smaller plan violates the same invariant."""
        if self._left <= 0:
            return False
        self._left -= 1
        outcome = simulate(plan)
        if outcome.violation is None or outcome.violation.invariant != self._invariant:
            return False
        self.best = outcome
        return True

    def run(self) -> None:
        before = 0
        while before != self._size():
            before = self._size()
            self._end_sooner()
            self._fewer_operations()
            self._fewer_faults()
            self._fewer_strikes()

    def _size(self) -> int:
        plan = self.best.plan
        return len(plan.operations) + len(plan.faults) + len(self.best.strikes)

    def _end_sooner(self) -> None:
        violation = self.best.violation
        if violation is not None and violation.at < self.best.plan.hours * 3_600:
            self.still(replace(self.best.plan, hours=(violation.at + 1) / 3_600))

    def _fewer_operations(self) -> None:
        def still(operations: Sequence[Operation]) -> bool:
            return self.still(replace(self.best.plan, operations=tuple(operations)))

        fewest(list(self.best.plan.operations), still)

    def _fewer_faults(self) -> None:
        def still(faults: Sequence[Fault]) -> bool:
            return self.still(replace(self.best.plan, faults=frozenset(faults)))

        fewest(sorted(self.best.plan.faults), still)

    def _fewer_strikes(self) -> None:
        spared = self.best.plan.spared
        every = list(self.best.strikes)

        def still(strikes: Sequence[InjectedFault]) -> bool:
            kept = set(strikes)
            return self.still(replace(self.best.plan, spared=spared | {item for item in every if item not in kept}))

        fewest(every, still)


def fewest(items: list[T], still: Callable[[Sequence[T]], bool]) -> list[T]:
    """Leave out halves, then quarters, then single ones, as long as it still holds."""
    size = max(1, len(items) // 2)
    while items:
        at = 0
        while at < len(items):
            fewer = items[:at] + items[at + size :]
            if still(fewer):
                items = fewer
            else:
                at += size
        if size == 1:
            break
        size //= 2
    return items


def shrink(found: Outcome, *, tries: int = MAX_TRIES) -> Shrunk:
    shrinker = _Shrinker(found, tries=tries)
    shrinker.run()
    least = simulate(shrinker.best.plan, keep_trace=True)
    return Shrunk(found=found, least=least, tries=tries - max(0, shrinker._left))  # noqa: SLF001 - its own


def tell(shrunk: Shrunk) -> Iterator[str]:
    """The tale of a violation, for people."""
    found, least = shrunk.found, shrunk.least
    yield f"seed {found.plan.seed}: {found.violation}"
    if least.violation is None:
        return
    yield f"the least that does it ({shrunk.tries} tries): {least.violation}"
    yield f"faults: {', '.join(sorted(least.faults)) or 'none'}"
    yield "operations:"
    for operation in sorted(least.plan.operations, key=lambda item: item.at):
        yield f"  {operation.at:9.3f}  {operation}"
    yield "timeline:"
    yield from (f"  {line}" for line in _lines_of(least))
    if least.history:
        yield f"history of {least.violation.instance_id}:"
        for entry in least.history:
            step = f"{entry.transition:<12} {entry.source:>11} to {entry.target:<11}"
            who = f"epoch {entry.epoch}, run {entry.run_id}, by {entry.by}"
            yield f"  {entry.at:%H:%M:%S} {step} {who}: {entry.why}"


def _lines_of(outcome: Outcome) -> list[str]:
    """What concerns the instance, and what went wrong."""
    about = outcome.violation.instance_id if outcome.violation else ""
    chosen = [
        str(line)
        for line in outcome.lines
        if not line.who
        or line.what.startswith(("cut", "ended", "off"))
        or (about and about in line.what and not line.what.startswith("beat"))
        or (not about and line.who in {"record", "provision", "ec2", "github"})
    ]
    left_out = len(chosen) - MAX_LINES
    return chosen if left_out <= 0 else [f"({left_out} lines before)", *chosen[-MAX_LINES:]]
