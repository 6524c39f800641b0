"""Exhaustive search of a small world: every order of events of two instances and three runs.

A breadth-first search without an event loop. The steps of an instance (`instance_model`) and of a run
(`provision_model`) come from the real transition table and the real decisions of agents and sweeps; each answer is
cached. The search itself works on numbers: a world state is two instance states, a team of runs and the remaining
budget of incidents. Instances are interchangeable and so are runs, so states that differ only by names count as one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from remuda.domain.instance import ASSIGNED, Instance, State
from simulation.demand_model import DemandBounds, DemandModel
from simulation.instance_model import (
    ABSENT,
    CRASH,
    EXPIRY,
    INCIDENTS,
    LOST_ANSWER,
    OPERATOR,
    InstanceModel,
    InstanceState,
    ModelStep,
)
from simulation.provision_model import WITHOUT_INSTANCE, ProvisionModel, ProvisionPhase, ProvisionStep

#: Bits per part of a state number: two instances and a team of _BITS each, then the budget.
_BITS = 18
_MASK = (1 << _BITS) - 1
_BUDGETS = 4
_BUDGET_MASK = (1 << _BUDGETS) - 1

OPEN, COMMITTED, RELEASED = 0, 1, 2

T = TypeVar("T")


class ModelRun(NamedTuple):
    """A workflow run: the status of its provision and the phase of its process."""

    status: int = OPEN
    phase: ProvisionPhase = ProvisionPhase.FREE
    #: Number of the instance that its process works on.
    at: int = 0
    #: Number of the record that it knows of that instance; 0 for none.
    known: int = 0
    #: Whether each of the instances is assigned to it.
    owns: tuple[bool, bool] = (False, False)


DONE = ModelRun(status=RELEASED, phase=ProvisionPhase.OVER)


@dataclass(kw_only=True, slots=True)
class SearchResult:
    states: int = 0
    actions: int = 0
    depth: int = 0
    #: Number of different instance states and of different teams of runs.
    instance_states: int = 0
    teams: int = 0
    #: False if a limit ended the search.
    complete: bool = True
    #: The first violation and the shortest path to it.
    violation: str = ""
    path: list[str] = field(default_factory=list)
    #: CPU time.
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchBounds:
    #: 1 or 2.
    instances: int = 2
    runs: int = 3
    #: Whether one of each incident may happen. Crashes of commands need no budget: a command that takes no further step
    #: is a crashed one.
    crash: bool = True
    expiry: bool = False
    lost_answer: bool = False
    operator: bool = False
    #: Whether sweeps, operators and agents may act on outdated reads.
    stale: bool = True

    @property
    def budget(self) -> int:
        return CRASH * self.crash | EXPIRY * self.expiry | LOST_ANSWER * self.lost_answer | OPERATOR * self.operator

    def __str__(self) -> str:
        incidents = [f"one {name}" for bit, name in INCIDENTS.items() if self.budget & bit]
        plural = "s" if self.instances > 1 else ""
        return f"{self.instances} instance{plural}, {self.runs} runs, {', '.join(incidents) or 'no incident'}"


class _Action(NamedTuple):
    """One action at one instance. Instances and runs are in the order of the state."""

    text: str
    #: Number of the run that acts, or None.
    run: int | None
    instance: int
    #: Runs after the action, unsorted.
    runs: tuple[int, ...]
    cost: int
    violation: str


#: Successors through one instance as (instance, team, cost), and violating actions as (cost, number).
_Next = tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int], ...]]


def explore(bounds: SearchBounds | None = None, *, limit: int | None = None) -> SearchResult:
    """Search all states within the bounds, breadth-first."""
    return _Explorer(bounds or SearchBounds()).explore(limit)


class _Numbers(dict[T, int]):
    """Numbers of values, in the order in which they are first looked up."""

    def __init__(self, first: Mapping[T, int] | None = None) -> None:
        super().__init__(first or {})
        self.values_by_number: list[T] = list(self)

    def __missing__(self, value: T) -> int:
        number = self[value] = len(self.values_by_number)
        self.values_by_number.append(value)
        if number > _MASK:
            raise OverflowError(f"more than {_MASK} instance states, runs or teams: raise _BITS")
        return number


class _Explorer:
    def __init__(self, bounds: SearchBounds) -> None:
        self._bounds = bounds
        self._instance_model = InstanceModel(stale=bounds.stale)
        self._provision_model = ProvisionModel(self._instance_model)
        # Number 0 stands for an absent instance.
        self._instance_ids = _Numbers[InstanceState]()
        self._instance_of = self._instance_ids.values_by_number
        self._instance_of.append(ABSENT)
        self._assigned: list[bool] = [False]
        self._known_ids = _Numbers[Instance | None]({None: 0})
        self._known_of = self._known_ids.values_by_number
        self._run_ids = _Numbers[ModelRun]()
        self._run_of = self._run_ids.values_by_number
        self._normalized: dict[tuple[ModelRun, tuple[bool, bool]], int] = {}
        self._team_ids = _Numbers[tuple[int, ...]]()
        self._team_of = self._team_ids.values_by_number
        #: Number of each team with its two instances exchanged.
        self._mirrored: dict[int, int] = {}
        self._next: tuple[dict[int, _Next], dict[int, _Next]] = ({}, {})
        self._known_record_steps: dict[int, tuple[int, ...]] = {}
        self._steps_of: dict[tuple[int, bool], list[tuple[ModelStep, int]]] = {}
        self._provision_steps_of: dict[tuple[int, int, int, bool], list[tuple[ProvisionStep, int, int]]] = {}

    def explore(self, limit: int | None) -> SearchResult:
        first = self._first()
        came_from = {first: first}
        frontier = [first]
        search = SearchResult()
        while frontier:
            found: list[int] = []
            for state in frontier:
                actions, bad = self._expand(state, came_from, found)
                search.actions += actions
                if bad:
                    search.violation, search.path = self._path(came_from, state)
                    search.complete = False
                    break
            search.depth += bool(found)
            if search.violation or (limit is not None and len(came_from) >= limit):
                search.complete = search.complete and not found
                break
            frontier = found
        search.states = len(came_from)
        search.instance_states, search.teams = len(self._instance_of), len(self._team_of)
        return search

    def _first(self) -> int:
        unborn = self._instance_id(ABSENT)
        pair = (unborn, unborn) if self._bounds.instances > 1 else (0, unborn)
        team = self._team_id((self._run_ids[ModelRun()],) * self._bounds.runs)
        return self._pack(*pair, team, self._bounds.budget)

    def _expand(self, state: int, came_from: dict[int, int], found: list[int]) -> tuple[int, bool]:
        """Add the new successors of a state. The hot path, so it works on numbers only."""
        budget = state & _BUDGET_MASK
        team = (state >> _BUDGETS) & _MASK
        one = (state >> (_BUDGETS + _BITS)) & _MASK
        zero = state >> (_BUDGETS + 2 * _BITS)
        spent = ~budget
        pack, actions = self._pack, 0
        for at, instance, other in ((0, zero, one), (1, one, zero)):
            if not instance:
                continue
            key = (team << _BITS | instance) << 1 | self._assigned[other]
            known = self._next[at].get(key)
            if known is None:
                known = self._next[at][key] = self._neighbours(at, instance, team, other)
            for after, next_team, cost in known[0]:
                if cost & spent:
                    continue
                actions += 1
                pair = (other, after) if at else (after, other)
                reached = pack(*pair, next_team, budget ^ cost)
                if reached not in came_from:
                    came_from[reached] = state
                    found.append(reached)
            if known[1] and any(not cost & spent for cost, _ in known[1]):
                return actions, True
        for next_team in self._record_steps(team, zero, one):
            actions += 1
            reached = pack(zero, one, next_team, budget)
            if reached not in came_from:
                came_from[reached] = state
                found.append(reached)
        return actions, False

    def _pack(self, zero: int, one: int, team: int, budget: int) -> int:
        """The number of a state, equal for states that differ only by names."""
        if zero >= one and one:
            mirrored = self._mirrored.get(team)
            if mirrored is None:
                mirrored = self._mirror(team)
            if zero > one:
                zero, one, team = one, zero, mirrored
            elif mirrored < team:
                team = mirrored
        return ((zero << _BITS | one) << _BITS | team) << _BUDGETS | budget

    def _mirror(self, team: int) -> int:
        mirrored = self._team_id(self._mirror_runs(self._team_of[team]))
        self._mirrored[team], self._mirrored[mirrored] = mirrored, team
        return mirrored

    def _mirror_runs(self, runs: tuple[int, ...]) -> tuple[int, ...]:
        found = []
        for run in map(self._run_of.__getitem__, runs):
            at = run.at if run.phase in WITHOUT_INSTANCE else 1 - run.at
            found.append(self._run_ids[run._replace(at=at, owns=(run.owns[1], run.owns[0]))])
        return tuple(found)

    # Cached answers of the models

    def _neighbours(self, at: int, instance: int, team: int, other: int) -> _Next:
        good: dict[tuple[int, int, int], None] = {}
        bad: list[tuple[int, int]] = []
        for number, action in enumerate(self._actions(at, instance, team, other)):
            if action.violation:
                bad.append((action.cost, number))
            else:
                good[action.instance, self._team_id(action.runs), action.cost] = None
        return tuple(good), tuple(bad)

    def _actions(self, at: int, instance: int, team: int, other: int) -> Iterator[_Action]:
        """All actions at one instance."""
        team_runs = [self._run_of[run] for run in self._team_of[team]]
        owner = next((run for run in team_runs if run.owns[at]), None)
        released = owner is not None and owner.status == RELEASED and self._assigned[instance]
        for step, after in self._steps(instance, released=released):
            same = self._assigned[after] is self._assigned[instance]
            kept = self._team_of[team] if same else self._runs(team_runs, at, after, other)
            yield _Action(step.text, None, after, kept, step.cost, step.violation)
        for number, run in enumerate(team_runs):
            if run in team_runs[:number]:
                continue
            if run.phase is not ProvisionPhase.FREE and (run.phase in WITHOUT_INSTANCE or run.at != at):
                continue
            yield from self._actions_of_run(at, instance, team_runs, number, other, released=released)

    def _actions_of_run(
        self, at: int, instance: int, runs: list[ModelRun], number: int, other: int, *, released: bool
    ) -> Iterator[_Action]:
        for step, after, known in self._provision_steps(at, instance, runs[number], released=released):
            moved = list(runs)
            if step.takes:
                moved = [_owning(item, at, mine=index == number) for index, item in enumerate(runs)]
            moved[number] = moved[number]._replace(phase=step.phase, at=at, known=known)
            twice = self._held_twice(moved)
            yield _Action(
                step.text, number, after, self._runs(moved, at, after, other), step.cost, step.violation or twice
            )

    def _steps(self, instance: int, *, released: bool) -> list[tuple[ModelStep, int]]:
        known = self._steps_of.get((instance, released))
        if known is None:
            steps = self._instance_model.steps(self._instance_of[instance], released=released)
            known = self._steps_of[instance, released] = [(step, self._instance_id(step.after)) for step in steps]
        return known

    def _provision_steps(
        self, at: int, instance: int, run: ModelRun, *, released: bool
    ) -> list[tuple[ProvisionStep, int, int]]:
        key = (self._run_ids[run], at, instance, released)
        known = self._provision_steps_of.get(key)
        if known is None:
            provision_steps = self._provision_model.steps(
                self._instance_of[instance],
                run.phase,
                self._known_of[run.known],
                owns=run.owns[at],
                released=released,
                own_released=run.status == RELEASED,
            )
            known = self._provision_steps_of[key] = [
                (step, self._instance_id(step.after), self._known_ids[step.known]) for step in provision_steps
            ]
        return known

    def _record_steps(self, team: int, zero: int, one: int) -> tuple[int, ...]:
        assigned = (self._assigned[zero], self._assigned[one])
        key = team << 2 | assigned[0] << 1 | assigned[1]
        known = self._known_record_steps.get(key)
        if known is None:
            actions = self._record_actions(team, zero, one)
            known = self._known_record_steps[key] = tuple(dict.fromkeys(self._team_id(item.runs) for item in actions))
        return known

    def _record_actions(self, team: int, zero: int, one: int) -> Iterator[_Action]:
        """Actions that change only the record of a provision."""
        runs = [self._run_of[run] for run in self._team_of[team]]
        for number, run in enumerate(runs):
            if run in runs[:number] or run == DONE:
                continue
            possible = []
            if run.status != RELEASED:
                possible.append(("is released", run._replace(status=RELEASED)))
            if run.phase is ProvisionPhase.CLOSING:
                possible.append(("closes its provision", run._replace(status=RELEASED, phase=ProvisionPhase.OVER)))
            known = self._known_of[run.known]
            if run.phase is ProvisionPhase.HOLDS and run.status == OPEN and known and known.state is State.RUNNING:
                possible.append(("succeeds", run._replace(status=COMMITTED, phase=ProvisionPhase.OVER)))
            for text, after in possible:
                moved = self._runs([*runs[:number], after, *runs[number + 1 :]], 0, zero, one)
                yield _Action(text, number, 0, moved, 0, "")

    def _runs(self, runs: list[ModelRun], at: int, instance: int, other: int) -> tuple[int, ...]:
        """Numbers of the runs without the owners of unassigned instances, which nothing reads."""
        here, there = self._assigned[instance], self._assigned[other]
        assigned = (there, here) if at else (here, there)
        return tuple(self._normalized_id(run, assigned) for run in runs)

    def _normalized_id(self, run: ModelRun, assigned: tuple[bool, bool]) -> int:
        number = self._normalized.get((run, assigned))
        if number is None:
            number = self._normalized[run, assigned] = self._run_ids[_normalized(run, assigned)]
        return number

    def _held_twice(self, runs: list[ModelRun]) -> str:
        known = [(run.at, self._known_of[run.known]) for run in runs if run.phase is ProvisionPhase.HOLDS]
        held = [(at, record.epoch) for at, record in known if record is not None]
        return "" if len(set(held)) == len(held) else "S1: two runs hold one instance at one epoch"

    def _instance_id(self, instance: InstanceState) -> int:
        number = self._instance_ids[instance]
        if number == len(self._assigned):
            # A launched machine without a record is assigned, too.
            self._assigned.append(instance.state in ASSIGNED or (instance.record is None and instance.launched))
        return number

    def _team_id(self, runs: tuple[int, ...]) -> int:
        return self._team_ids[tuple(sorted(runs))]

    # The path to a violation

    def _path(self, came_from: dict[int, int], last: int) -> tuple[str, list[str]]:
        """The violation and the actions that lead to it, replayed with fixed names of runs and instances."""
        way = [last]
        while came_from[way[-1]] != way[-1]:
            way.append(came_from[way[-1]])
        # A single instance is in the second place.
        instances = (0, 1) if self._bounds.instances > 1 else (1, 0)
        names = _Names(instances=instances, runs=tuple(range(self._bounds.runs)))
        texts: list[str] = []
        for state, goal in zip(way[:0:-1], way[-2::-1], strict=True):
            for at, action, pair in self._named(state):
                reached, renamed = self._reach(pair, action.runs, (state & _BUDGET_MASK) ^ action.cost, names)
                if reached == goal and not action.violation:
                    texts.append(names.describe(action, at))
                    names = renamed
                    break
            else:
                raise AssertionError("a step of the path cannot be replayed")
        for at, action, _ in self._named(last):
            if action.violation:
                return action.violation, [*texts, names.describe(action, at)]
        raise AssertionError("the violation cannot be replayed")

    def _named(self, state: int) -> Iterator[tuple[int | None, _Action, tuple[int, int]]]:
        """The actions that the budget of a state allows, with their place and the instances after them."""
        budget, team = state & _BUDGET_MASK, (state >> _BUDGETS) & _MASK
        one, zero = (state >> (_BUDGETS + _BITS)) & _MASK, state >> (_BUDGETS + 2 * _BITS)
        for at, instance, other in ((0, zero, one), (1, one, zero)):
            if not instance:
                continue
            for action in self._actions(at, instance, team, other):
                if not action.cost & ~budget:
                    yield at, action, (other, action.instance) if at else (action.instance, other)
        for action in self._record_actions(team, zero, one):
            yield None, action, (zero, one)

    def _reach(self, pair: tuple[int, int], runs: tuple[int, ...], budget: int, names: _Names) -> tuple[int, _Names]:
        """The number of a state, and the names in its order."""
        zero, one = pair
        team, mirrored = self._team_id(runs), self._team_id(self._mirror_runs(runs))
        instances = names.instances
        if one and (zero > one or (zero == one and mirrored < team)):
            runs, instances = self._mirror_runs(runs), (instances[1], instances[0])
        order = sorted(range(len(runs)), key=runs.__getitem__)
        return self._pack(zero, one, team, budget), _Names(instances, tuple(names.runs[index] for index in order))


class _Names(NamedTuple):
    """Names of the instances and runs in the order of a state."""

    instances: tuple[int, int]
    runs: tuple[int, ...]

    def describe(self, action: _Action, at: int | None) -> str:
        where = f"instance {self.instances[at]}: " if at is not None else ""
        return (
            f"{where}run {self.runs[action.run]} {action.text}" if action.run is not None else f"{where}{action.text}"
        )


def _owning(run: ModelRun, at: int, *, mine: bool) -> ModelRun:
    zero, one = run.owns
    return run._replace(owns=(zero, mine) if at else (mine, one))


def _normalized(run: ModelRun, assigned: tuple[bool, bool]) -> ModelRun:
    if run.phase not in WITHOUT_INSTANCE:
        return run
    owns = (run.owns[0] and assigned[0], run.owns[1] and assigned[1])
    if run.phase is ProvisionPhase.CLOSING and run.status == RELEASED:
        run = run._replace(phase=ProvisionPhase.OVER)
    if run.phase is ProvisionPhase.OVER and not any(owns):
        return DONE
    return run._replace(at=0, known=0, owns=owns)


def explore_demand(bounds: DemandBounds | None = None, *, limit: int | None = None) -> SearchResult:
    """Search all states of a runner set within the bounds, and check that every job can be served from each."""
    model = DemandModel(bounds or DemandBounds())
    first = model.first()
    came_from = {first: first}
    frontier = [first]
    search = SearchResult()
    while frontier and not search.violation:
        found: list[int] = []
        for state in frontier:
            for reached, step in model.steps(state):
                search.actions += 1
                if step.violation:
                    search.violation = step.violation
                    search.path = [*_demand_path(model, came_from, state), step.text]
                    break
                if reached not in came_from:
                    came_from[reached] = state
                    found.append(reached)
            if search.violation:
                break
        search.depth += bool(found)
        frontier = found
        if limit is not None and len(came_from) >= limit:
            break
    search.states = len(came_from)
    search.complete = not frontier and not search.violation
    if search.complete and (stuck := _find_stuck(model, came_from)) is not None:
        search.violation = "D1: a job can never be served any more"
        search.path = _demand_path(model, came_from, stuck)
    return search


def _find_stuck(model: DemandModel, states: Mapping[int, int]) -> int | None:
    """The first state from which no order of events serves all jobs without another incident.

    The steps are computed again, because all of them would not fit into memory. Most lead to later states, so that the
    reverse order of discovery settles nearly all states at once.
    """
    stuck = {state: None for state in states if not model.is_served(state)}
    count = 0
    while len(stuck) != count:
        count = len(stuck)
        for state in reversed(list(stuck)):
            if any(reached not in stuck and not step.is_incident for reached, step in model.steps(state)):
                del stuck[state]
    return next(iter(stuck), None)


def _demand_path(model: DemandModel, came_from: Mapping[int, int], last: int) -> list[str]:
    """The shortest path to a state. Machines have no names: the text says which step was taken by one of them."""
    texts: list[str] = []
    while came_from[last] != last:
        before = came_from[last]
        texts.append(next(step.text for reached, step in model.steps(before) if reached == last))
        last = before
    return texts[::-1]


#: Worlds whose figures are in the docs, the quick ones first.
WORLDS: tuple[SearchBounds | DemandBounds, ...] = (
    DemandBounds(machines=1, jobs=2, lost_event=True),
    DemandBounds(machines=2, jobs=1),
    DemandBounds(machines=2, jobs=2),
    SearchBounds(instances=2, runs=3),
    SearchBounds(instances=1, runs=3, expiry=True, lost_answer=True),
    SearchBounds(instances=1, runs=2, expiry=True, lost_answer=True, operator=True),
    SearchBounds(instances=2, runs=3, expiry=True),
    SearchBounds(instances=2, runs=3, lost_answer=True),
    SearchBounds(instances=2, runs=3, operator=True),
)
#: Figures of their last searches, and the modules that decide how many states there are.
FIGURES = Path(__file__).parents[1] / "docs/reference/searches.json"
_MODELS = ("demand_model.py", "instance_model.py", "provision_model.py")


def digest_models() -> str:
    """A digest of the models. Figures of other models are stale."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in _MODELS)).hexdigest()[:16]


def read_figures() -> dict[str, Any]:
    """The figures by world, without those of other models."""
    document = json.loads(FIGURES.read_text(encoding="utf-8"))
    return dict(document["searches"]) if document["models"] == digest_models() else {}


def _write_figures(bounds: SearchBounds | DemandBounds, search: SearchResult) -> None:
    figures = read_figures() if FIGURES.exists() else {}
    figures[str(bounds)] = {
        "states": search.states,
        "actions": search.actions,
        "depth": search.depth,
        "seconds": round(search.seconds),
    }
    ordered = {str(world): figures[str(world)] for world in WORLDS if str(world) in figures}
    document = {"models": digest_models(), "searches": ordered}
    FIGURES.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def explore_and_describe(bounds: SearchBounds | DemandBounds, limit: int | None = None) -> tuple[SearchResult, str]:
    """Search, and describe the result in lines of text."""
    started = time.process_time()
    search = explore_demand(bounds, limit=limit) if isinstance(bounds, DemandBounds) else explore(bounds, limit=limit)
    search.seconds = time.process_time() - started
    extent = "all" if search.complete else "the first"
    size = f"{extent} {search.states:,} states, {search.actions:,} actions, depth {search.depth}"
    verdict = search.violation or "no violation"
    lines = [f"{bounds}: {size}, {search.seconds:.0f} s: {verdict}"]
    lines += [f"  {number}. {text}" for number, text in enumerate(search.path, start=1)]
    return search, "\n".join(lines)


def _search_and_write(bounds: SearchBounds | DemandBounds) -> int:
    search, text = explore_and_describe(bounds)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    if search.violation:
        return 1
    _write_figures(bounds, search)
    return 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.exhaustive", description=__doc__)
    parser.add_argument("--instances", type=int, choices=(1, 2), default=2)
    parser.add_argument("--runs", type=int, choices=range(1, 5), default=3)
    parser.add_argument("--states", type=int, help="maximum number of states")
    for bit, name in INCIDENTS.items():
        flag = "--" + name.replace(" ", "-")
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=bit == CRASH, help=f"one {name}")
    parser.add_argument("--jobs", type=int, choices=range(1, 4), help="search a runner set with this many jobs instead")
    parser.add_argument("--lost-event", action="store_true", help="one lost event of a runner set's job")
    parser.add_argument("--all", action="store_true", help="search the worlds of the docs and write their figures")
    given = parser.parse_args(arguments)
    if given.all:
        return max(_search_and_write(bounds) for bounds in WORLDS)
    bounds: SearchBounds | DemandBounds = SearchBounds(
        instances=given.instances,
        runs=given.runs,
        crash=given.crash,
        expiry=given.expiry,
        lost_answer=given.lost_answer,
        operator=given.operator,
    )
    if given.jobs:
        bounds = DemandBounds(machines=given.instances, jobs=given.jobs, crash=given.crash, lost_event=given.lost_event)
    search, text = explore_and_describe(bounds, given.states)
    sys.stdout.write(f"{text}\n")
    return 1 if search.violation else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
