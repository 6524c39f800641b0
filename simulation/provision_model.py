"""What a provision does with one instance, as steps of a run: launch, claim, commit, give back.

As in the control plane: every write is guarded, an answer may be lost, and what a run knows of an instance is what its
own last write made of it. A process that dies is one that takes no further step, so each of its steps may be its last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

from remuda.controlplane.context import is_applied
from remuda.domain.errors import IllegalTransition
from remuda.domain.instance import ASSIGNED, Instance, State
from remuda.domain.resources import Tier
from remuda.domain.signals import Report, Signal, Verdict, registration_verdict
from remuda.domain.transitions import (
    Actor,
    Cause,
    Change,
    Claim,
    Commit,
    End,
    Event,
    Release,
    advance,
    create,
    presumed,
    tombstone,
)
from simulation.instance_model import (
    DEADLINE,
    ID,
    LIFETIMES,
    LOST,
    NOW,
    OTHER,
    OWN,
    REMOVAL,
    Broken,
    Life,
    Lives,
    Step,
    assignment,
    born,
    named,
    write_of,
)

GIVE_BACK_TRIES = 4


class Phase(IntEnum):
    """What a run's process is about."""

    FREE = 0
    LAUNCHED = 1
    #: A write whose answer was lost.
    UNSURE_CREATE = 2
    UNSURE_CLAIM = 3
    UNSURE_COMMIT = 4
    HOLDS = 5
    #: It lost what it held, or a write, and gives up.
    BACK = 6
    BURY = 7
    #: It has given everything back, and its provision is to be closed.
    CLOSING = 8
    OVER = 9


#: These know of no instance.
EMPTY_HANDED = frozenset({Phase.FREE, Phase.CLOSING, Phase.OVER})


class Move(NamedTuple):
    """A step of a run at an instance: what becomes of the life, and of what the run is about."""

    text: str
    after: Life
    phase: Phase
    #: What it knows of the instance.
    known: Instance | None = None
    cost: int = 0
    #: The instance is its own from now on.
    takes: bool = False
    broken: str = ""


class Claims:
    def __init__(self, lives: Lives) -> None:
        self._lives = lives

    def moves(
        self, life: Life, phase: Phase, known: Instance | None, *, owns: bool, released: bool, own_released: bool
    ) -> Iterator[Move]:
        """`released`: the run that the instance belongs to was; `own_released`: this run was."""
        who = OWN if owns else OTHER
        mine = named(known, who) if known is not None else None
        try:
            for move in self._moves(life, phase, mine, who):
                if own_released and move.phase is Phase.FREE and phase is not Phase.FREE:
                    # Before it claims another, it reads its provision.
                    move = move._replace(phase=Phase.CLOSING)  # noqa: PLW2901 - the same move, seen by a closed run
                yield from self._following(life, move, released=released, own_released=own_released)
        except Broken as broken:
            yield Move("goes on", life, phase, broken=str(broken))

    def _following(self, life: Life, move: Move, *, released: bool, own_released: bool) -> Iterator[Move]:
        known = named(move.known, OWN) if move.known is not None else None
        if move.broken or move.after == life:
            yield move._replace(known=known)
            return
        after = move.after
        if move.takes and after.record is not None:
            after = after._replace(record=named(after.record, OWN))
        step = Step(move.text, after, move.cost)
        is_released = own_released if move.takes else released
        for text, settled, cost, broken in self._lives.following(
            life, step, was_released=released, is_released=is_released
        ):
            yield move._replace(text=text, after=settled, cost=cost, broken=broken, known=known)

    def _moves(self, life: Life, phase: Phase, mine: Instance | None, who: str) -> Iterator[Move]:
        match phase:
            case Phase.FREE:
                yield from self._take(life, who)
            case Phase.LAUNCHED:
                yield from self._record(life, who)
                yield self._bury(life, who)
            case Phase.UNSURE_CREATE:
                yield from self._record(life, who, again=True)
                yield self._bury(life, who)
            case Phase.BURY:
                yield self._bury(life, who)
            case Phase.UNSURE_CLAIM if mine is not None:
                yield from self._claim_again(life, mine, who)
                yield self._give_back(life, mine)
            case Phase.UNSURE_COMMIT if mine is not None:
                yield from self._commit_again(life, mine, who)
                yield self._give_back(life, mine)
            case Phase.HOLDS if mine is not None:
                yield from self._go_on(life, mine)
                yield self._give_back(life, mine)
            case Phase.BACK if mine is not None:
                yield self._give_back(life, mine)
            case _:
                return

    # Taking one

    def _take(self, life: Life, who: str) -> Iterator[Move]:
        if life.record is None:
            if not life.launched:
                yield Move("launches", life._replace(launched=True), Phase.LAUNCHED, takes=True)
            return
        for epoch in _announced(life.record):
            change = _claim(epoch, who)
            if change.guard.admits(life.record):
                yield from self._claimed(life, change, "claims", Tier.TRUSTED, epoch)
            elif is_applied(change, life.record):
                yield Move("claims", life, Phase.FREE, broken="S1: it takes another's claim for its own")
            hoped_for = change.applied_to(_hinted(epoch))
            yield Move("claims in vain, answer lost", life, Phase.UNSURE_CLAIM, known=hoped_for, cost=LOST)
            lie = _claim(epoch, who, Tier.UNTRUSTED)
            if lie.guard.admits(life.record):
                yield from self._claimed(life, lie, "claims, untrusted,", Tier.UNTRUSTED, epoch)

    def _claimed(self, life: Life, change: Change, text: str, tier: Tier, epoch: int) -> Iterator[Move]:
        if life.record is not None and life.record.tier is not tier:
            yield Move(text, life, Phase.FREE, broken=f"S11: a run of tier {tier} claims one of {life.record.tier}")
            return
        try:
            after = self._lives.written(life, write_of(change, text, Actor.PROVISION), released=False)
        except Broken as broken:
            yield Move(f"{text} by the hint of epoch {epoch}", life, Phase.FREE, broken=str(broken))
            return
        yield Move(text, after, Phase.HOLDS, known=after.record, takes=True)
        hoped_for = change.applied_to(_hinted(epoch, tier))
        yield Move(f"{text}, answer lost", after, Phase.UNSURE_CLAIM, known=hoped_for, cost=LOST, takes=True)

    def _claim_again(self, life: Life, mine: Instance, who: str) -> Iterator[Move]:
        change = _claim(mine.epoch - 1, who)
        if change.guard.admits(life.record):
            yield from self._claimed(life, change, "claims again", Tier.TRUSTED, mine.epoch - 1)
        elif life.record is not None and is_applied(change, life.record):
            if who is not OWN:
                yield Move("finds its claim", life, Phase.HOLDS, broken="S1: it adopts another's claim")
            yield Move("finds its claim", life, Phase.HOLDS, known=life.record)
        else:
            yield Move("has lost its claim", life, Phase.FREE)

    def _record(self, life: Life, who: str, *, again: bool = False) -> Iterator[Move]:
        """The record of a machine that it has launched."""
        first = born(who)
        change = create(first, by=Actor.PROVISION, why="")
        if change.guard.admits(life.record):
            after = self._written(life, change, "records its launch", first.owner)
            yield Move("records its launch", after, Phase.HOLDS, known=first)
            yield Move("records its launch, answer lost", after, Phase.UNSURE_CREATE, cost=LOST)
        elif again and life.record is not None and is_applied(change, life.record):
            yield Move("finds its record", life, Phase.HOLDS, known=life.record)
        else:
            yield Move("finds its machine buried", life, Phase.BURY)

    # Going on

    def _go_on(self, life: Life, mine: Instance) -> Iterator[Move]:
        if mine.state not in {State.CREATED, State.CLAIMED}:
            return
        verdict = registration_verdict(life.report, mine.epoch)
        if verdict is Verdict.OK:
            change = _advance(mine, Commit(owner=mine.owner, report=life.report, max_runtime_s=1_800.0))
            if change.guard.admits(life.record):
                after = self._written(life, change, "commits", mine.owner)
                yield Move("commits", after, Phase.HOLDS, known=after.record)
                yield Move("commits, answer lost", after, Phase.UNSURE_COMMIT, known=mine, cost=LOST)
            else:
                yield Move("cannot commit", life, Phase.BACK, known=mine)
        elif mine.state is State.CLAIMED:
            cause = Cause.FAILED if verdict is Verdict.FAILED else Cause.TIMED_OUT
            change = _advance(mine, End(cause=cause, report=life.report, owner=mine.owner))
            admitted = change.guard.admits(life.record)
            yield Move(
                "gives up", self._written(life, change, "gives up", mine.owner) if admitted else life, Phase.FREE
            )

    def _commit_again(self, life: Life, mine: Instance, who: str) -> Iterator[Move]:
        seen = Report(instance_id=ID, epoch=mine.epoch, signal=Signal.UD_REG_OK)
        change = _advance(mine, Commit(owner=mine.owner, report=seen, max_runtime_s=1_800.0))
        if change.guard.admits(life.record):
            after = self._written(life, change, "commits again", mine.owner)
            yield Move("commits again", after, Phase.HOLDS, known=after.record)
        elif life.record is not None and is_applied(change, life.record):
            if who is not OWN:
                yield Move("finds it committed", life, Phase.HOLDS, broken="S1: it adopts another's commit")
            yield Move("finds it committed", life, Phase.HOLDS, known=life.record)
        else:
            yield Move("cannot commit", life, Phase.BACK, known=mine)

    # Giving back

    def _give_back(self, life: Life, mine: Instance) -> Move:
        """As a rollback does: again from what the record says, while it is still its own."""
        instance = mine
        for _ in range(GIVE_BACK_TRIES):
            event: Event = Release(release_time_s=LIFETIMES.release_time_s, credential=REMOVAL, owner=mine.owner)
            if instance.state is State.CREATED:
                event = End(cause=Cause.RELEASED, owner=mine.owner)
            elif instance.state not in ASSIGNED:
                break
            change = _advance(instance, event)
            if change.guard.admits(life.record):
                return Move("rolls back", self._written(life, change, "rolls back", mine.owner), Phase.CLOSING)
            if life.record is None or life.record.owner != mine.owner or life.record == instance:
                break
            instance = life.record
        return Move("has nothing to roll back", life, Phase.CLOSING)

    def _bury(self, life: Life, who: str) -> Move:
        first = born(who)
        stone = replace(first, state=State.TERMINATING, threshold=NOW, run_id="", last_run_id=who, assignment=None)
        change = tombstone(stone, by=Actor.PROVISION, now=NOW, why="")
        current = life.record
        if change.guard.admits(current):
            return Move("buries its launch", self._written(life, change, "buries", first.owner), Phase.CLOSING)
        if current is not None and current.owner == first.owner and current.state is State.CREATED:
            end = _advance(current, End(cause=Cause.RELEASED, owner=first.owner))
            if end.guard.admits(current):
                return Move("ends its launch", self._written(life, end, "ends its launch", first.owner), Phase.CLOSING)
        return Move("finds its launch ended", life, Phase.CLOSING)

    def _written(self, life: Life, change: Change, text: str, owner: str) -> Life:
        """A write by somebody who takes the instance for its own; judged by whose it is."""
        write = write_of(change, text, Actor.PROVISION, life.told)
        return self._lives.written(life, write, released=False, by_owner=owner.startswith(f"{OWN}/"))


def _announced(record: Instance) -> range:
    """Whatever was idle once was announced, and each hint may come at any time, any number of times."""
    return range(1, (record.epoch if record.state is State.IDLE else record.epoch - 1) + 1)


def _hinted(epoch: int, tier: Tier = Tier.TRUSTED) -> Instance:
    message = replace(born(OWN), state=State.IDLE, epoch=epoch, tier=tier).message()
    return presumed(message, now=NOW)


def _claim(epoch: int, who: str, tier: Tier = Tier.TRUSTED) -> Change:
    event = Claim(
        run_id=who,
        owner=f"{who}/w{epoch + 1}",
        provision_id=who,
        scope="o/r",
        tier=tier,
        threshold=DEADLINE,
        assignment=assignment(epoch + 1),
        margin_s=LIFETIMES.margin_s,
    )
    return advance(_hinted(epoch, tier), event, by=Actor.PROVISION, now=NOW, why="")


def _advance(known: Instance, event: Event) -> Change:
    try:
        return advance(known, event, by=Actor.PROVISION, now=NOW, why="")
    except IllegalTransition as illegal:
        raise Broken(f"S10: {illegal}") from illegal
