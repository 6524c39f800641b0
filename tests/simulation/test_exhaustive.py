"""Exhaustive search of small worlds, and mutants that it must catch."""

from __future__ import annotations

import pytest

from simulation import demand_model
from simulation.demand_model import DemandBounds, DemandModel, MachineModel, _without_unread
from simulation.exhaustive import _BITS, _BUDGETS, SearchBounds, _Explorer, explore, explore_demand, read_figures
from simulation.mutants import MUTANTS, BugClass, Mutant, expression
from simulation.report import run_module_with_mutant


@pytest.mark.parametrize(
    ("bounds", "least"),
    [
        (SearchBounds(instances=2, runs=3), 300_000),
        (SearchBounds(instances=1, runs=2, crash=True, expiry=True, lost_answer=True), 20_000),
        (SearchBounds(instances=1, runs=2, crash=False, operator=True), 1_900),
    ],
    ids=str,
)
def test_no_order_of_events_violates_an_invariant(bounds: SearchBounds, least: int):
    search = explore(bounds)
    assert not search.violation, "\n".join([search.violation, *search.path])
    assert search.complete
    # A search that misses steps would find no violation, either.
    assert search.states > least


@pytest.mark.parametrize(
    "bounds", [DemandBounds(machines=1, lost_event=True), DemandBounds(machines=2, jobs=1)], ids=str
)
def test_no_order_of_events_of_a_runner_set_violates_an_invariant(bounds: DemandBounds):
    search = explore_demand(bounds)
    assert not search.violation, "\n".join([search.violation, *search.path])
    assert search.complete
    figures = read_figures().get(str(bounds), {})
    found = (search.states, search.actions, search.depth)
    stale = "the figures in the docs are stale: run python -m simulation.exhaustive --all"
    assert found == (figures.get("states"), figures.get("actions"), figures.get("depth")), stale


def _reachable(bounds: DemandBounds) -> set[tuple[MachineModel, int]]:
    """The machine of each state of a set with one machine, without values that nothing reads, and the rest."""
    model = DemandModel(bounds)
    found, frontier = {model.first()}, [model.first()]
    while frontier:
        for reached, step in model.steps(frontier.pop()):
            assert not step.violation
            if reached not in found:
                found.add(reached)
                frontier.append(reached)
    machines = {state: model._machines[state >> demand_model._REST] for state in found}
    return {(_merged(machine), state & demand_model._REST_MASK) for state, machine in machines.items()}


def _merged(machine: MachineModel) -> MachineModel:
    return _without_unread(machine, machine.record) if machine.record is not None else machine


def test_states_that_differ_only_by_unread_values_count_once(monkeypatch: pytest.MonkeyPatch):
    """No state is lost by the merge, and none is added."""
    bounds = DemandBounds(machines=1, jobs=2, crash=False, uses=2, stale=False)
    few = _reachable(bounds)
    monkeypatch.setattr(demand_model, "_without_unread", lambda machine, _: machine)
    assert _reachable(bounds) == few


class _WithoutSymmetry(_Explorer):
    """Distinguishes the two instances, and collects all states."""

    def __init__(self, bounds: SearchBounds) -> None:
        super().__init__(bounds)
        self.packed: set[tuple[int, int, int, int]] = set()

    def _pack(self, zero: int, one: int, team: int, budget: int) -> int:
        self.packed.add((zero, one, team, budget))
        return ((zero << _BITS | one) << _BITS | team) << _BUDGETS | budget


def test_states_that_differ_only_by_names_count_once():
    """No state is lost and none is counted twice."""
    bounds = SearchBounds(instances=2, runs=2, crash=False)
    explorer = _WithoutSymmetry(bounds)
    many = explorer.explore(None)
    few = explore(bounds)
    assert len({_Explorer._pack(explorer, *state) for state in explorer.packed}) == few.states
    assert few.states < many.states == len(explorer.packed)
    assert (few.depth, few.violation) == (many.depth, many.violation)


def test_a_limited_search_is_incomplete():
    search = explore(SearchBounds(instances=2, runs=3), limit=1_000)
    assert not search.complete
    assert search.states >= 1_000


def _mutant(name: str) -> Mutant:
    return next(mutant for mutant in MUTANTS if mutant.name == name)


def _without_condition(name: str, condition: str) -> Mutant:
    removal = expression("remuda.domain.transitions.apply", "WriteCondition.is_met_by", condition, "True")
    return Mutant(name=name, kind=BugClass.RULE, bug=name, replacements=(removal,))


_ANY_EPOCH = _without_condition("any-epoch", "record.epoch == self.epoch")
_ANY_STATE = _without_condition("any-state", "record.state is self.state")
_ANY_CLAIM = _without_condition("any-claim", "self.claim is None or record.claim == self.claim")


@pytest.mark.parametrize(
    ("mutant", "found", "options"),
    [
        (_ANY_EPOCH, "S", ()),
        (_ANY_STATE, "S", ()),
        (_mutant("claim-without-epoch"), "S", ("--runs=3",)),
        (_mutant("claim-across-tiers"), "S11", ()),
        (_mutant("claim-of-the-retired"), "S2", ("--operator",)),
        (_mutant("adopt-a-sibling"), "S1", ("--runs=3",)),
        (_ANY_CLAIM, "S", ("--runs=3", "--lost-answer")),
        (_mutant("create-over-a-tombstone"), "S5", ()),
        (_mutant("start-before-running"), "S2", ("--instances=2",)),
        (_mutant("stop-before-removal"), "S6", ("--instances=2",)),
    ],
    ids=lambda value: value.name if isinstance(value, Mutant) else "",
)
def test_a_mutant_is_caught(mutant: Mutant, found: str, options: tuple[str, ...]):
    done = run_module_with_mutant(mutant, "simulation.exhaustive", "--instances=1", "--runs=2", *options)
    summary, *path = done.stdout.splitlines() or [done.stderr]
    assert done.returncode == 1, done.stderr
    assert f" s: {found}" in summary
    assert path[0] == "  1. instance 0: run 0 launches"


def test_a_mutant_of_demand_mode_is_caught():
    caught = {
        "untrusted-and-reused": "S11",
        "configuration-kept-while-bound": "S12",
        "second-job-of-a-registration": "S",
    }
    for name, found in caught.items():
        done = run_module_with_mutant(_mutant(name), "simulation.exhaustive", "--instances=1", "--jobs=2")
        assert done.returncode == 1, (name, done.stdout, done.stderr)
        assert f" s: {found}" in done.stdout.splitlines()[0]
