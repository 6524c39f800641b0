"""Model of a provision's work on one instance: launch, claim, commit, roll back.

As in the control plane, every write is conditional, answers may be lost, and a run knows only the result of its last
write. A crashed process is one that takes no further step.
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
    Change,
    Claim,
    Commit,
    End,
    Event,
    Release,
    RetireReason,
    advance,
    create,
    presumed_idle,
    tombstone,
)
from simulation.instance_model import (
    DEADLINE,
    ID,
    LIFETIMES,
    LOST_ANSWER,
    NOW,
    OTHER,
    OWN,
    REMOVAL,
    InstanceModel,
    InstanceState,
    ModelStep,
    ModelViolation,
    assignment,
    buried,
    holder_of,
    new_record,
    owned_by,
    write_of,
)

ROLLBACK_TRIES = 4


class ProvisionPhase(IntEnum):
    """Phases of a run's process."""

    FREE = 0
    LAUNCHED = 1
    #: The answer to a write was lost.
    UNSURE_CREATE = 2
    UNSURE_CLAIM = 3
    UNSURE_COMMIT = 4
    HOLDS = 5
    #: It lost the instance or a write and rolls back.
    BACK = 6
    TOMBSTONE = 7
    #: Everything is rolled back; the provision is still open.
    CLOSING = 8
    OVER = 9


#: Phases without an instance.
WITHOUT_INSTANCE = frozenset({ProvisionPhase.FREE, ProvisionPhase.CLOSING, ProvisionPhase.OVER})


class ProvisionStep(NamedTuple):
    """A step of a run at an instance: the instance state and the phase after it."""

    text: str
    after: InstanceState
    phase: ProvisionPhase
    #: The record that the run knows.
    known: Instance | None = None
    cost: int = 0
    #: Whether the instance belongs to the run from now on.
    takes: bool = False
    violation: str = ""


class ProvisionModel:
    def __init__(self, states: InstanceModel) -> None:
        self._instance_model = states

    def steps(
        self,
        state: InstanceState,
        phase: ProvisionPhase,
        known: Instance | None,
        *,
        owns: bool,
        released: bool,
        own_released: bool,
    ) -> Iterator[ProvisionStep]:
        """`released` concerns the run that the instance belongs to, `own_released` this run."""
        who = OWN if owns else OTHER
        mine = owned_by(known, who) if known is not None else None
        try:
            for step in self._steps(state, phase, mine, who):
                if own_released and step.phase is ProvisionPhase.FREE and phase is not ProvisionPhase.FREE:
                    # A run reads its provision before it claims another instance.
                    step = step._replace(phase=ProvisionPhase.CLOSING)  # noqa: PLW2901 - the same step of a released run
                yield from self._with_pending(state, step, released=released, own_released=own_released)
        except ModelViolation as violation:
            yield ProvisionStep("continues", state, phase, violation=str(violation))

    def _with_pending(
        self, state: InstanceState, step: ProvisionStep, *, released: bool, own_released: bool
    ) -> Iterator[ProvisionStep]:
        known = owned_by(step.known, OWN) if step.known is not None else None
        if step.violation or step.after == state:
            yield step._replace(known=known)
            return
        after = step.after
        if step.takes and after.record is not None:
            after = after._replace(record=owned_by(after.record, OWN))
        plain = ModelStep(step.text, after, step.cost)
        is_released = own_released if step.takes else released
        for text, normalized, cost, violation in self._instance_model.with_pending(
            state, plain, was_released=released, is_released=is_released
        ):
            yield step._replace(text=text, after=normalized, cost=cost, violation=violation, known=known)

    def _steps(
        self, state: InstanceState, phase: ProvisionPhase, mine: Instance | None, who: str
    ) -> Iterator[ProvisionStep]:
        match phase:
            case ProvisionPhase.FREE:
                yield from self._acquire(state, who)
            case ProvisionPhase.LAUNCHED:
                yield from self._record(state, who)
                yield self._tombstone(state, who)
            case ProvisionPhase.UNSURE_CREATE:
                yield from self._record(state, who, again=True)
                yield self._tombstone(state, who)
            case ProvisionPhase.TOMBSTONE:
                yield self._tombstone(state, who)
            case ProvisionPhase.UNSURE_CLAIM if mine is not None:
                yield from self._claim_again(state, mine, who)
                yield self._roll_back(state, mine)
            case ProvisionPhase.UNSURE_COMMIT if mine is not None:
                yield from self._commit_again(state, mine, who)
                yield self._roll_back(state, mine)
            case ProvisionPhase.HOLDS if mine is not None:
                yield from self._continue(state, mine)
                yield self._roll_back(state, mine)
            case ProvisionPhase.BACK if mine is not None:
                yield self._roll_back(state, mine)
            case _:
                return

    # Launch and claim

    def _acquire(self, state: InstanceState, who: str) -> Iterator[ProvisionStep]:
        if state.record is None:
            if not state.launched:
                yield ProvisionStep("launches", state._replace(launched=True), ProvisionPhase.LAUNCHED, takes=True)
            return
        for epoch in _announced_epochs(state.record):
            change = _claim(epoch, who)
            if change.condition.is_met_by(state.record):
                yield from self._claimed(state, change, "claims", Tier.TRUSTED, epoch)
            elif is_applied(change, state.record):
                yield ProvisionStep(
                    "claims", state, ProvisionPhase.FREE, violation="S1: it takes another run's claim for its own"
                )
            expected = change.applied_to(_presumed(epoch))
            yield ProvisionStep(
                "claims without effect, answer lost",
                state,
                ProvisionPhase.UNSURE_CLAIM,
                known=expected,
                cost=LOST_ANSWER,
            )
            mismatched = _claim(epoch, who, Tier.UNTRUSTED)
            if mismatched.condition.is_met_by(state.record):
                yield from self._claimed(state, mismatched, "claims, untrusted,", Tier.UNTRUSTED, epoch)

    def _claimed(
        self, state: InstanceState, change: Change, text: str, tier: Tier, epoch: int
    ) -> Iterator[ProvisionStep]:
        if state.record is not None and state.record.tier is not tier:
            yield ProvisionStep(
                text,
                state,
                ProvisionPhase.FREE,
                violation=f"S11: a run of tier {tier} claims one of {state.record.tier}",
            )
            return
        try:
            after = self._instance_model.written(state, write_of(change, text, Actor.PROVISION), released=False)
        except ModelViolation as violation:
            yield ProvisionStep(
                f"{text} by the message of epoch {epoch}", state, ProvisionPhase.FREE, violation=str(violation)
            )
            return
        yield ProvisionStep(text, after, ProvisionPhase.HOLDS, known=after.record, takes=True)
        expected = change.applied_to(_presumed(epoch, tier))
        yield ProvisionStep(
            f"{text}, answer lost", after, ProvisionPhase.UNSURE_CLAIM, known=expected, cost=LOST_ANSWER, takes=True
        )

    def _claim_again(self, state: InstanceState, mine: Instance, who: str) -> Iterator[ProvisionStep]:
        change = _claim(mine.epoch - 1, who)
        if change.condition.is_met_by(state.record):
            yield from self._claimed(state, change, "claims again", Tier.TRUSTED, mine.epoch - 1)
        elif state.record is not None and is_applied(change, state.record):
            yield from _adopted(state, "finds its claim", who, "claim")
        else:
            yield ProvisionStep("has lost its claim", state, ProvisionPhase.FREE)

    def _record(self, state: InstanceState, who: str, *, again: bool = False) -> Iterator[ProvisionStep]:
        """Record a launched machine."""
        first = new_record(who)
        change = create(first, by=Actor.PROVISION, why="")
        if change.condition.is_met_by(state.record):
            after = self._written(state, change, "records its launch", first.claim)
            yield ProvisionStep("records its launch", after, ProvisionPhase.HOLDS, known=first)
            yield ProvisionStep(
                "records its launch, answer lost", after, ProvisionPhase.UNSURE_CREATE, cost=LOST_ANSWER
            )
        elif again and state.record is not None and is_applied(change, state.record):
            yield ProvisionStep("finds its record", state, ProvisionPhase.HOLDS, known=state.record)
        else:
            yield ProvisionStep("finds a tombstone", state, ProvisionPhase.TOMBSTONE)

    # Commit

    def _continue(self, state: InstanceState, mine: Instance) -> Iterator[ProvisionStep]:
        if mine.state not in {State.CREATED, State.CLAIMED}:
            return
        verdict = registration_verdict(state.report, mine.epoch)
        if verdict is Verdict.OK:
            change = _advance(mine, Commit(claim=mine.claim, report=state.report, max_runtime_s=1_800.0))
            if change.condition.is_met_by(state.record):
                after = self._written(state, change, "commits", mine.claim)
                yield ProvisionStep("commits", after, ProvisionPhase.HOLDS, known=after.record)
                yield ProvisionStep(
                    "commits, answer lost", after, ProvisionPhase.UNSURE_COMMIT, known=mine, cost=LOST_ANSWER
                )
            else:
                yield ProvisionStep("cannot commit", state, ProvisionPhase.BACK, known=mine)
        elif mine.state is State.CLAIMED:
            cause = RetireReason.FAILED if verdict is Verdict.FAILED else RetireReason.TIMED_OUT
            change = _advance(mine, End(reason=cause, report=state.report, claim=mine.claim))
            admitted = change.condition.is_met_by(state.record)
            yield ProvisionStep(
                "gives up",
                self._written(state, change, "gives up", mine.claim) if admitted else state,
                ProvisionPhase.FREE,
            )

    def _commit_again(self, state: InstanceState, mine: Instance, who: str) -> Iterator[ProvisionStep]:
        seen = Report(instance_id=ID, epoch=mine.epoch, signal=Signal.UD_REG_OK)
        change = _advance(mine, Commit(claim=mine.claim, report=seen, max_runtime_s=1_800.0))
        if change.condition.is_met_by(state.record):
            after = self._written(state, change, "commits again", mine.claim)
            yield ProvisionStep("commits again", after, ProvisionPhase.HOLDS, known=after.record)
        elif state.record is not None and is_applied(change, state.record):
            yield from _adopted(state, "finds it committed", who, "commit")
        else:
            yield ProvisionStep("cannot commit", state, ProvisionPhase.BACK, known=mine)

    # Rollback

    def _roll_back(self, state: InstanceState, mine: Instance) -> ProvisionStep:
        """Roll back like the control plane: repeat with the current record while it belongs to the run."""
        instance = mine
        for _ in range(ROLLBACK_TRIES):
            event: Event = Release(release_time_s=LIFETIMES.release_time_s, credential=REMOVAL, claim=mine.claim)
            if instance.state is State.CREATED:
                event = End(reason=RetireReason.RELEASED, claim=mine.claim)
            elif instance.state not in ASSIGNED:
                break
            change = _advance(instance, event)
            if change.condition.is_met_by(state.record):
                return ProvisionStep(
                    "rolls back", self._written(state, change, "rolls back", mine.claim), ProvisionPhase.CLOSING
                )
            if state.record is None or state.record.claim != mine.claim or state.record == instance:
                break
            instance = state.record
        return ProvisionStep("has nothing to roll back", state, ProvisionPhase.CLOSING)

    def _tombstone(self, state: InstanceState, who: str) -> ProvisionStep:
        first = new_record(who)
        change = tombstone(buried(first), by=Actor.PROVISION, now=NOW, why="")
        current = state.record
        if change.condition.is_met_by(current):
            return ProvisionStep(
                "writes a tombstone",
                self._written(state, change, "writes a tombstone", first.claim),
                ProvisionPhase.CLOSING,
            )
        if current is not None and current.claim == first.claim and current.state is State.CREATED:
            end = _advance(current, End(reason=RetireReason.RELEASED, claim=first.claim))
            if end.condition.is_met_by(current):
                return ProvisionStep(
                    "ends its launch", self._written(state, end, "ends its launch", first.claim), ProvisionPhase.CLOSING
                )
        return ProvisionStep("finds its launch ended", state, ProvisionPhase.CLOSING)

    def _written(self, state: InstanceState, change: Change, text: str, claim: str) -> InstanceState:
        """The state after a write with this claim, checked against the true one."""
        write = write_of(change, text, Actor.PROVISION, state.last_signal)
        return self._instance_model.written(state, write, released=False, by_owner=claim.startswith(f"{OWN}/"))


def _announced_epochs(record: Instance) -> range:
    """Epochs with a pool message: each message may arrive at any time, any number of times."""
    return range(1, (record.epoch if record.state is State.IDLE else record.epoch - 1) + 1)


def _presumed(epoch: int, tier: Tier = Tier.TRUSTED) -> Instance:
    message = replace(new_record(OWN), state=State.IDLE, epoch=epoch, tier=tier).message()
    return presumed_idle(message, now=NOW)


def _claim(epoch: int, who: str, tier: Tier = Tier.TRUSTED) -> Change:
    event = Claim(
        holder=holder_of(who),
        claim=f"{who}/w{epoch + 1}",
        scope="o/r",
        tier=tier,
        threshold=DEADLINE,
        assignment=assignment(epoch + 1),
        margin_s=LIFETIMES.margin_s,
    )
    return advance(_presumed(epoch, tier), event, by=Actor.PROVISION, now=NOW, why="")


def _adopted(state: InstanceState, text: str, who: str, what: str) -> Iterator[ProvisionStep]:
    """The step of a provision that finds its lost write applied."""
    if who is not OWN:
        yield ProvisionStep(text, state, ProvisionPhase.HOLDS, violation=f"S1: it adopts another run's {what}")
    yield ProvisionStep(text, state, ProvisionPhase.HOLDS, known=state.record)


def _advance(known: Instance, event: Event) -> Change:
    try:
        return advance(known, event, by=Actor.PROVISION, now=NOW, why="")
    except IllegalTransition as illegal:
        raise ModelViolation(f"S10: {illegal}") from illegal
