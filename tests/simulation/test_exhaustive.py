"""Every order of events in small worlds; and who searches the search: bugs planted in the table must be found."""

from __future__ import annotations

import pytest

from simulation.exhaustive import _BITS, _BUDGETS, Bounds, _Explorer, explore
from simulation.mutants import MUTANTS, Mutant, expression
from simulation.run_mutant import run_mutated


@pytest.mark.parametrize(
    ("bounds", "least"),
    [
        (Bounds(instances=2, runs=3), 300_000),
        (Bounds(instances=1, runs=2, crash=True, expiry=True, lost_answer=True), 20_000),
        (Bounds(instances=1, runs=2, crash=False, operator=True), 1_900),
    ],
    ids=str,
)
def test_no_order_of_events_violates_anything(bounds: Bounds, least: int):
    search = explore(bounds)
    assert not search.violation, "\n".join([search.violation, *search.path])
    assert search.complete
    # A search that lost half of its steps would find nothing either.
    assert search.states > least


class _WithPlaces(_Explorer):
    """Tells the first instance from the second, and keeps each state that it is asked for."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self.asked: set[tuple[int, int, int, int]] = set()

    def _pack(self, zero: int, one: int, team: int, budget: int) -> int:
        self.asked.add((zero, one, team, budget))
        return ((zero << _BITS | one) << _BITS | team) << _BUDGETS | budget


def test_names_alone_make_no_difference():
    """The states without names are those with names, less the names: none is lost, and none is seen twice."""
    bounds = Bounds(instances=2, runs=2, crash=False)
    with_places = _WithPlaces(bounds)
    many = with_places.explore(None)
    few = explore(bounds)
    assert len({_Explorer._pack(with_places, *state) for state in with_places.asked}) == few.states
    assert few.states < many.states == len(with_places.asked)
    assert (few.depth, few.violation) == (many.depth, many.violation)


def test_a_limit_is_told():
    search = explore(Bounds(instances=2, runs=3), limit=1_000)
    assert not search.complete
    assert search.states >= 1_000


def _planted(name: str) -> Mutant:
    return next(mutant for mutant in MUTANTS if mutant.name == name)


def _without_condition(name: str, condition: str) -> Mutant:
    removal = expression("remuda.domain.transitions", "Guard.admits", condition, "True")
    return Mutant(name=name, bug=name, replacements=(removal,))


_ANY_EPOCH = _without_condition("any-epoch", "record.epoch == self.epoch")
_ANY_STATE = _without_condition("any-state", "record.state is self.state")
_ANY_OWNER = _without_condition("any-owner", "self.owner is None or record.owner == self.owner")


@pytest.mark.parametrize(
    ("mutant", "found", "options"),
    [
        (_ANY_EPOCH, "S", ()),
        (_ANY_STATE, "S", ()),
        (_planted("claim-without-epoch"), "S", ("--runs=3",)),
        (_planted("claim-across-tiers"), "S11", ()),
        (_planted("claim-of-the-retired"), "S2", ("--operator",)),
        (_planted("adopt-a-sibling"), "S1", ("--runs=3",)),
        (_ANY_OWNER, "S", ("--runs=3", "--lost-answer")),
        (_planted("create-over-a-tombstone"), "S5", ()),
        (_planted("start-before-running"), "S2", ("--instances=2",)),
        (_planted("stop-before-removal"), "S6", ("--instances=2",)),
    ],
    ids=lambda value: value.name if isinstance(value, Mutant) else "",
)
def test_a_planted_bug_is_found(mutant: Mutant, found: str, options: tuple[str, ...]):
    done = run_mutated(mutant, "simulation.exhaustive", "--instances=1", "--runs=2", *options)
    summary, *path = done.stdout.splitlines() or [done.stderr]
    assert done.returncode == 1, done.stderr
    assert f" s: {found}" in summary
    assert path[0] == "  1. instance 0: run 0 launches"
