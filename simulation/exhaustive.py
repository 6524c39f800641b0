"""Every order of events in a small world: two instances, three runs, messages that come again, one crash.

A breadth-first search without an event loop. The real transition table and the real decisions of agents and sweeps make
each step of a life (`lives`) and of a run (`claims`). They are asked once for each question; the search itself goes
over numbers: a state is two lives, a team of runs and what may still go wrong. Instances are alike and runs are alike,
so of the states that differ by their names alone one is looked at.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from remuda.domain.instance import ASSIGNED, Instance, State
from simulation.instance_model import CRASH, EXPIRY, LOST, MISHAPS, OPERATOR, UNBORN, Life, Lives, Step
from simulation.provision_model import EMPTY_HANDED, Claims, Move, Phase

#: A state is one number: two lives, a team, and the budgets, so many bits each.
_BITS = 18
_MASK = (1 << _BITS) - 1
_BUDGETS = 4
_BUDGET_MASK = (1 << _BUDGETS) - 1

OPEN, COMMITTED, RELEASED = 0, 1, 2


class Run(NamedTuple):
    """A run's provision: its record, and what its process is about."""

    status: int = OPEN
    phase: Phase = Phase.FREE
    #: The instance that it is about.
    at: int = 0
    #: What it knows of it, by number; 0 for nothing.
    known: int = 0
    #: Which instances are assigned to it.
    owns: tuple[bool, bool] = (False, False)


DONE = Run(status=RELEASED, phase=Phase.OVER)


@dataclass(kw_only=True, slots=True)
class Search:
    """What a search came to."""

    states: int = 0
    actions: int = 0
    depth: int = 0
    #: Different lives of an instance, and different teams of runs.
    lives: int = 0
    teams: int = 0
    #: False where a limit ended it.
    complete: bool = True
    #: The first violation, and the shortest way to it.
    violation: str = ""
    path: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    #: One or two.
    instances: int = 2
    runs: int = 3
    #: May one of each happen? Dead commands are not counted: each of their steps may be the last one.
    crash: bool = True
    expiry: bool = False
    lost_answer: bool = False
    operator: bool = False
    #: Sweeps, operators and agents may act on what they read a while ago.
    stale: bool = True

    @property
    def budget(self) -> int:
        return CRASH * self.crash | EXPIRY * self.expiry | LOST * self.lost_answer | OPERATOR * self.operator

    def __str__(self) -> str:
        mishaps = [f"one {name}" for bit, name in MISHAPS.items() if self.budget & bit]
        plural = "s" if self.instances > 1 else ""
        return f"{self.instances} instance{plural}, {self.runs} runs, {', '.join(mishaps) or 'no mishap'}"


class _Act(NamedTuple):
    """One action at one instance, in the order in which lives and runs stand in the state."""

    text: str
    #: Which run acts, if one does.
    run: int | None
    life: int
    #: As they stand, not sorted.
    runs: tuple[int, ...]
    cost: int
    broken: str


#: A state's neighbours by one instance: its life, the team, the cost; and what must not be: cost and number of the act.
_Next = tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int], ...]]


def explore(bounds: Bounds | None = None, *, limit: int | None = None) -> Search:
    """All states within the bounds, the nearest first."""
    return _Explorer(bounds or Bounds()).explore(limit)


class _Explorer:
    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._lives = Lives(stale=bounds.stale)
        self._claims = Claims(self._lives)
        # Number 0 is what is not there.
        self._life_ids: dict[Life, int] = {}
        self._life_of: list[Life] = [UNBORN]
        self._assigned: list[bool] = [False]
        self._known_ids: dict[Instance | None, int] = {None: 0}
        self._known_of: list[Instance | None] = [None]
        self._run_ids: dict[Run, int] = {}
        self._run_of: list[Run] = []
        self._settled: dict[tuple[Run, tuple[bool, bool]], int] = {}
        self._team_ids: dict[tuple[int, ...], int] = {}
        self._team_of: list[tuple[int, ...]] = []
        #: The same team with the instances the other way round, found when asked for.
        self._mirrored: dict[int, int] = {}
        self._next: tuple[dict[int, _Next], dict[int, _Next]] = ({}, {})
        self._alone: dict[int, tuple[int, ...]] = {}
        self._steps_of: dict[tuple[int, bool], list[tuple[Step, int]]] = {}
        self._moves_of: dict[tuple[int, int, int, bool], list[tuple[Move, int, int]]] = {}

    def explore(self, limit: int | None) -> Search:
        first = self._first()
        came_from = {first: first}
        frontier = [first]
        search = Search()
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
        search.lives, search.teams = len(self._life_of), len(self._team_of)
        return search

    def _first(self) -> int:
        unborn = self._life_id(UNBORN)
        lives = (unborn, unborn) if self._bounds.instances > 1 else (0, unborn)
        team = self._team_id((self._run_id(Run()),) * self._bounds.runs)
        return self._pack(*lives, team, self._bounds.budget)

    def _expand(self, state: int, came_from: dict[int, int], found: list[int]) -> tuple[int, bool]:
        """Adds the neighbours that are new. The hot path: numbers only."""
        budget = state & _BUDGET_MASK
        team = (state >> _BUDGETS) & _MASK
        one = (state >> (_BUDGETS + _BITS)) & _MASK
        zero = state >> (_BUDGETS + 2 * _BITS)
        spent = ~budget
        pack, actions = self._pack, 0
        for at, life, other in ((0, zero, one), (1, one, zero)):
            if not life:
                continue
            key = (team << _BITS | life) << 1 | self._assigned[other]
            known = self._next[at].get(key)
            if known is None:
                known = self._next[at][key] = self._neighbours(at, life, team, other)
            for after, following, cost in known[0]:
                if cost & spent:
                    continue
                actions += 1
                lives = (other, after) if at else (after, other)
                reached = pack(*lives, following, budget ^ cost)
                if reached not in came_from:
                    came_from[reached] = state
                    found.append(reached)
            if known[1] and any(not cost & spent for cost, _ in known[1]):
                return actions, True
        for following in self._steps_alone(team, zero, one):
            actions += 1
            reached = pack(zero, one, following, budget)
            if reached not in came_from:
                came_from[reached] = state
                found.append(reached)
        return actions, False

    def _pack(self, zero: int, one: int, team: int, budget: int) -> int:
        """The state's one number, the same for all that differ by names alone."""
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
            at = run.at if run.phase in EMPTY_HANDED else 1 - run.at
            found.append(self._run_id(run._replace(at=at, owns=(run.owns[1], run.owns[0]))))
        return tuple(found)

    # What each question is answered once

    def _neighbours(self, at: int, life: int, team: int, other: int) -> _Next:
        good: dict[tuple[int, int, int], None] = {}
        bad: list[tuple[int, int]] = []
        for number, act in enumerate(self._acts(at, life, team, other)):
            if act.broken:
                bad.append((act.cost, number))
            else:
                good[act.life, self._team_id(act.runs), act.cost] = None
        return tuple(good), tuple(bad)

    def _acts(self, at: int, life: int, team: int, other: int) -> Iterator[_Act]:
        """All that can happen at one instance."""
        team_runs = [self._run_of[run] for run in self._team_of[team]]
        owner = next((run for run in team_runs if run.owns[at]), None)
        released = owner is not None and owner.status == RELEASED and self._assigned[life]
        for step, after in self._steps(life, released=released):
            same = self._assigned[after] is self._assigned[life]
            kept = self._team_of[team] if same else self._runs(team_runs, at, after, other)
            yield _Act(step.text, None, after, kept, step.cost, step.broken)
        for number, run in enumerate(team_runs):
            if run in team_runs[:number]:
                continue
            if run.phase is not Phase.FREE and (run.phase in EMPTY_HANDED or run.at != at):
                continue
            yield from self._acts_of_run(at, life, team_runs, number, other, released=released)

    def _acts_of_run(
        self, at: int, life: int, runs: list[Run], number: int, other: int, *, released: bool
    ) -> Iterator[_Act]:
        for move, after, known in self._moves(at, life, runs[number], released=released):
            moved = list(runs)
            if move.takes:
                moved = [_owning(item, at, mine=index == number) for index, item in enumerate(runs)]
            moved[number] = moved[number]._replace(phase=move.phase, at=at, known=known)
            twice = self._held_twice(moved)
            yield _Act(move.text, number, after, self._runs(moved, at, after, other), move.cost, move.broken or twice)

    def _steps(self, life: int, *, released: bool) -> list[tuple[Step, int]]:
        known = self._steps_of.get((life, released))
        if known is None:
            steps = self._lives.steps(self._life_of[life], released=released)
            known = self._steps_of[life, released] = [(step, self._life_id(step.after)) for step in steps]
        return known

    def _moves(self, at: int, life: int, run: Run, *, released: bool) -> list[tuple[Move, int, int]]:
        key = (self._run_id(run), at, life, released)
        known = self._moves_of.get(key)
        if known is None:
            moves = self._claims.moves(
                self._life_of[life],
                run.phase,
                self._known_of[run.known],
                owns=run.owns[at],
                released=released,
                own_released=run.status == RELEASED,
            )
            known = self._moves_of[key] = [
                (move, self._life_id(move.after), self._known_id(move.known)) for move in moves
            ]
        return known

    def _steps_alone(self, team: int, zero: int, one: int) -> tuple[int, ...]:
        assigned = (self._assigned[zero], self._assigned[one])
        key = team << 2 | assigned[0] << 1 | assigned[1]
        known = self._alone.get(key)
        if known is None:
            acts = self._acts_alone(team, zero, one)
            known = self._alone[key] = tuple(dict.fromkeys(self._team_id(act.runs) for act in acts))
        return known

    def _acts_alone(self, team: int, zero: int, one: int) -> Iterator[_Act]:
        """What happens to a provision's record."""
        runs = [self._run_of[run] for run in self._team_of[team]]
        for number, run in enumerate(runs):
            if run in runs[:number] or run == DONE:
                continue
            following = []
            if run.status != RELEASED:
                following.append(("is released", run._replace(status=RELEASED)))
            if run.phase is Phase.CLOSING:
                following.append(("closes its provision", run._replace(status=RELEASED, phase=Phase.OVER)))
            known = self._known_of[run.known]
            if run.phase is Phase.HOLDS and run.status == OPEN and known and known.state is State.RUNNING:
                following.append(("succeeds", run._replace(status=COMMITTED, phase=Phase.OVER)))
            for text, after in following:
                moved = self._runs([*runs[:number], after, *runs[number + 1 :]], 0, zero, one)
                yield _Act(text, number, 0, moved, 0, "")

    def _runs(self, runs: list[Run], at: int, life: int, other: int) -> tuple[int, ...]:
        """Without what nobody reads any more: to whom an instance belongs that is not assigned."""
        here, there = self._assigned[life], self._assigned[other]
        assigned = (there, here) if at else (here, there)
        return tuple(self._settled_id(run, assigned) for run in runs)

    def _settled_id(self, run: Run, assigned: tuple[bool, bool]) -> int:
        number = self._settled.get((run, assigned))
        if number is None:
            number = self._settled[run, assigned] = self._run_id(_settled(run, assigned))
        return number

    def _held_twice(self, runs: list[Run]) -> str:
        known = [(run.at, self._known_of[run.known]) for run in runs if run.phase is Phase.HOLDS]
        held = [(at, record.epoch) for at, record in known if record is not None]
        return "" if len(set(held)) == len(held) else "S1: two runs hold one instance at one epoch"

    def _known_id(self, known: Instance | None) -> int:
        number = self._known_ids.get(known)
        if number is None:
            number = self._known_ids[known] = len(self._known_of)
            self._known_of.append(known)
        return number

    def _life_id(self, life: Life) -> int:
        number = self._life_ids.get(life)
        if number is None:
            number = self._life_ids[life] = len(self._life_of)
            self._life_of.append(life)
            # A launch without a record belongs to somebody too.
            self._assigned.append(life.state in ASSIGNED or (life.record is None and life.launched))
            _check_fits(number)
        return number

    def _run_id(self, run: Run) -> int:
        number = self._run_ids.get(run)
        if number is None:
            number = self._run_ids[run] = len(self._run_of)
            self._run_of.append(run)
        return number

    def _team_id(self, runs: tuple[int, ...]) -> int:
        team = tuple(sorted(runs))
        number = self._team_ids.get(team)
        if number is None:
            number = self._team_ids[team] = len(self._team_of)
            self._team_of.append(team)
            _check_fits(number)
        return number

    # The way to a violation

    def _path(self, came_from: dict[int, int], last: int) -> tuple[str, list[str]]:
        """The actions that lead to it, found by going the way again, with one name for each run and instance."""
        way = [last]
        while came_from[way[-1]] != way[-1]:
            way.append(came_from[way[-1]])
        # One that is alone stands in the second place.
        instances = (0, 1) if self._bounds.instances > 1 else (1, 0)
        names = _Names(instances=instances, runs=tuple(range(self._bounds.runs)))
        told: list[str] = []
        for state, goal in zip(way[:0:-1], way[-2::-1], strict=True):
            for at, act, lives in self._named(state):
                reached, renamed = self._reach(lives, act.runs, (state & _BUDGET_MASK) ^ act.cost, names)
                if reached == goal and not act.broken:
                    told.append(names.tell(act, at))
                    names = renamed
                    break
            else:
                raise AssertionError("a step of the way is not found again")
        for at, act, _ in self._named(last):
            if act.broken:
                return act.broken, [*told, names.tell(act, at)]
        raise AssertionError("the violation is not where it was found")

    def _named(self, state: int) -> Iterator[tuple[int | None, _Act, tuple[int, int]]]:
        """A state's affordable actions, with where they happen and the lives after them."""
        budget, team = state & _BUDGET_MASK, (state >> _BUDGETS) & _MASK
        one, zero = (state >> (_BUDGETS + _BITS)) & _MASK, state >> (_BUDGETS + 2 * _BITS)
        for at, life, other in ((0, zero, one), (1, one, zero)):
            if not life:
                continue
            for act in self._acts(at, life, team, other):
                if not act.cost & ~budget:
                    yield at, act, (other, act.life) if at else (act.life, other)
        for act in self._acts_alone(team, zero, one):
            yield None, act, (zero, one)

    def _reach(self, lives: tuple[int, int], runs: tuple[int, ...], budget: int, names: _Names) -> tuple[int, _Names]:
        """The state, and who stands where in it."""
        zero, one = lives
        team, mirrored = self._team_id(runs), self._team_id(self._mirror_runs(runs))
        instances = names.instances
        if one and (zero > one or (zero == one and mirrored < team)):
            runs, instances = self._mirror_runs(runs), (instances[1], instances[0])
        order = sorted(range(len(runs)), key=runs.__getitem__)
        return self._pack(zero, one, team, budget), _Names(instances, tuple(names.runs[index] for index in order))


class _Names(NamedTuple):
    """Who stands where in a state."""

    instances: tuple[int, int]
    runs: tuple[int, ...]

    def tell(self, act: _Act, at: int | None) -> str:
        where = f"instance {self.instances[at]}: " if at is not None else ""
        return f"{where}run {self.runs[act.run]} {act.text}" if act.run is not None else f"{where}{act.text}"


def _owning(run: Run, at: int, *, mine: bool) -> Run:
    zero, one = run.owns
    return run._replace(owns=(zero, mine) if at else (mine, one))


def _settled(run: Run, assigned: tuple[bool, bool]) -> Run:
    if run.phase not in EMPTY_HANDED:
        return run
    owns = (run.owns[0] and assigned[0], run.owns[1] and assigned[1])
    if run.phase is Phase.CLOSING and run.status == RELEASED:
        run = run._replace(phase=Phase.OVER)
    if run.phase is Phase.OVER and not any(owns):
        return DONE
    return run._replace(at=0, known=0, owns=owns)


def _check_fits(number: int) -> None:
    if number > _MASK:
        raise OverflowError(f"more than {_MASK} lives or teams: raise _BITS")


def told(bounds: Bounds, limit: int | None = None) -> tuple[Search, str]:
    """A search, and what to say of it."""
    started = time.process_time()
    search = explore(bounds, limit=limit)
    extent = "all" if search.complete else "the nearest"
    size = f"{extent} {search.states:,} states, {search.actions:,} actions, {search.depth} deep"
    verdict = search.violation or "no violation"
    lines = [f"{bounds}: {size}, {time.process_time() - started:.0f} s: {verdict}"]
    lines += [f"  {number}. {text}" for number, text in enumerate(search.path, start=1)]
    return search, "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.exhaustive", description=__doc__)
    parser.add_argument("--instances", type=int, choices=(1, 2), default=2)
    parser.add_argument("--runs", type=int, choices=range(1, 5), default=3)
    parser.add_argument("--states", type=int, help="the most states")
    for bit, name in MISHAPS.items():
        flag = "--" + name.replace(" ", "-")
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=bit == CRASH, help=f"one {name}")
    given = parser.parse_args(arguments)
    bounds = Bounds(
        instances=given.instances,
        runs=given.runs,
        crash=given.crash,
        expiry=given.expiry,
        lost_answer=given.lost_answer,
        operator=given.operator,
    )
    search, text = told(bounds, given.states)
    sys.stdout.write(f"{text}\n")
    return 1 if search.violation else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
