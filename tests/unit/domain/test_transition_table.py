"""All legal and illegal transitions, compared with a copy of the contract (lifecycle, section 3)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from remuda.domain.errors import IllegalTransition
from remuda.domain.instance import RETIREMENTS, State
from remuda.domain.transitions import (
    TRANSITIONS,
    Actor,
    Announce,
    Claim,
    Commit,
    Confirm,
    Extend,
    Quarantine,
    Release,
    Renew,
    RenewCredential,
    Retire,
    RetireReason,
    ReturnToPool,
    advance,
    create,
    tombstone,
)
from tests.support.records import NOW, end, evidence, in_state, instance

P, L, R, S = Actor.PROVISION, Actor.RELEASE, Actor.REFRESH, Actor.SCALE_DOWN
OPERATOR = Actor.OPERATOR

#: Target state and actors by event and state. Everything else is illegal.
LEGAL: dict[tuple[type, State], tuple[State, set[Actor]]] = {
    (Claim, State.IDLE): (State.CLAIMED, {P}),
    (Commit, State.CREATED): (State.RUNNING, {P}),
    (Commit, State.CLAIMED): (State.RUNNING, {P}),
    (Release, State.CLAIMED): (State.RELEASING, {P, L, R}),
    (Release, State.RUNNING): (State.RELEASING, {P, L, R}),
    (Extend, State.RELEASING): (State.RELEASING, {L, R}),
    (RenewCredential, State.RELEASING): (State.RELEASING, {L, R}),
    (ReturnToPool, State.RELEASING): (State.IDLE, {L, R}),
    (Announce, State.IDLE): (State.IDLE, {L, R}),
    (Renew, State.IDLE): (State.IDLE, {S}),
    # Section 5: "spot notice: the control plane sets `retire_reason`".
    (Retire, State.CREATED): (State.CREATED, {L, R, OPERATOR}),
    (Retire, State.CLAIMED): (State.CLAIMED, {L, R, OPERATOR}),
    (Retire, State.RUNNING): (State.RUNNING, {L, R, OPERATOR}),
    (Retire, State.RELEASING): (State.RELEASING, {L, R, OPERATOR}),
    (Retire, State.IDLE): (State.IDLE, {L, R, OPERATOR}),
    # An operator may quarantine any live instance.
    (Quarantine, State.CREATED): (State.CREATED, {OPERATOR}),
    (Quarantine, State.CLAIMED): (State.CLAIMED, {OPERATOR}),
    (Quarantine, State.RUNNING): (State.RUNNING, {OPERATOR}),
    (Quarantine, State.RELEASING): (State.RELEASING, {OPERATOR}),
    (Quarantine, State.IDLE): (State.IDLE, {OPERATOR}),
    (Confirm, State.TERMINATING): (State.TERMINATED, {R}),
}

#: Actors and reasons of ends by state. In addition, only an operator may end an instance in any live state.
ENDS: dict[State, tuple[set[Actor], set[RetireReason]]] = {
    State.CREATED: (
        {P, L, R},
        {RetireReason.FAILED, RetireReason.TIMED_OUT, RetireReason.RELEASED, RetireReason.EXPIRED, RetireReason.GONE},
    ),
    State.CLAIMED: ({P, R}, {RetireReason.FAILED, RetireReason.TIMED_OUT, RetireReason.EXPIRED, RetireReason.GONE}),
    State.RUNNING: ({R}, {RetireReason.FAILED, RetireReason.EXPIRED, RetireReason.GONE}),
    State.RELEASING: ({L, R}, {RetireReason.FAILED, RetireReason.EXPIRED, RetireReason.GONE, *RETIREMENTS}),
    State.IDLE: ({R}, {RetireReason.EXPIRED, RetireReason.GONE, *RETIREMENTS}),
}

EVENTS = (Claim, Commit, Release, Extend, RenewCredential, ReturnToPool, Announce, Renew, Retire, Quarantine, Confirm)


def _name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize(("state", "kind", "by"), list(itertools.product(State, EVENTS, Actor)), ids=_name)
def test_event_is_legal_exactly_as_in_the_contract(state: State, kind: type, by: Actor) -> None:
    record = in_state(state)
    target, actors = LEGAL.get((kind, state), (None, set()))
    if by not in actors:
        with pytest.raises(IllegalTransition):
            advance(record, evidence(record)[kind], by=by, now=NOW, why="a test")
        return
    change = advance(record, evidence(record)[kind], by=by, now=NOW, why="a test")
    assert change.applied_to(record).state is target
    assert (change.entry.source, change.entry.target, change.entry.by) == (state, target, by)


@pytest.mark.parametrize(("state", "reason", "by"), list(itertools.product(State, RetireReason, Actor)), ids=_name)
def test_end_is_legal_exactly_as_in_the_contract(state: State, reason: RetireReason, by: Actor) -> None:
    record = in_state(state)
    actors, reasons = ENDS.get(state, (set(), set()))
    ordered = (by is OPERATOR, reason is RetireReason.TERMINATED_BY_OPERATOR)
    if (by in actors and reason in reasons) or (state in ENDS and all(ordered)):
        change = advance(record, end(record, reason), by=by, now=NOW, why="a test")
        assert change.applied_to(record).state is State.TERMINATING
    else:
        with pytest.raises(IllegalTransition):
            advance(record, end(record, reason), by=by, now=NOW, why="a test")


@pytest.mark.parametrize("state", [State.TERMINATING, State.TERMINATED])
def test_terminating_and_terminated_absorb(state: State) -> None:
    record = in_state(state)
    events = [*evidence(record).values(), *(end(record, reason) for reason in RetireReason)]
    reached = set()
    for event, by in itertools.product(events, Actor):
        try:
            reached.add(advance(record, event, by=by, now=NOW, why="a test").applied_to(record).state)
        except IllegalTransition:
            continue
    assert reached == ({State.TERMINATED} if state is State.TERMINATING else set())


def test_illegal_transition_contains_the_record() -> None:
    record = in_state(State.IDLE)
    with pytest.raises(IllegalTransition, match=r"no commit from idle.*epoch 2") as error:
        advance(record, evidence(record)[Commit], by=P, now=NOW, why="a test")
    assert error.value.history == (record,)
    assert error.value.exit_code == 70


def test_transition_table_equals_the_contract() -> None:
    rows = {
        (source, row.target or source, by)
        for row in TRANSITIONS
        for source in row.sources
        for by in row.by
        if source is not None and row.target is not State.TERMINATING
    }
    assert rows == {(state, target, by) for (_, state), (target, actors) in LEGAL.items() for by in actors}
    ends = {
        source: (set(row.by) - {OPERATOR}, set(row.reasons) - {RetireReason.TERMINATED_BY_OPERATOR})
        for row in TRANSITIONS
        for source in row.sources
        if source is not None and row.target is State.TERMINATING
    }
    assert ends == ENDS
    inserts = {(row.target, row.by) for row in TRANSITIONS if None in row.sources}
    assert inserts == {(State.CREATED, (P,)), (State.TERMINATING, (P, R))}
    assert len({row.name for row in TRANSITIONS}) == len(TRANSITIONS)


# Inserts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [each for each in State if each is not State.CREATED], ids=_name)
def test_create_requires_the_state_created(state: State) -> None:
    with pytest.raises(IllegalTransition):
        create(instance(state=state, epoch=1), by=P, why="a test")


@pytest.mark.parametrize("epoch", [0, 2])
def test_create_requires_epoch_1(epoch: int) -> None:
    with pytest.raises(IllegalTransition):
        create(instance(state=State.CREATED, epoch=epoch), by=P, why="a test")


@pytest.mark.parametrize("by", [each for each in Actor if each is not P], ids=_name)
def test_only_a_provision_creates(by: Actor) -> None:
    with pytest.raises(IllegalTransition):
        create(in_state(State.CREATED), by=by, why="a test")


@pytest.mark.parametrize("by", [L, S, OPERATOR], ids=_name)
def test_only_provision_and_refresh_write_tombstones(by: Actor) -> None:
    with pytest.raises(IllegalTransition):
        tombstone(in_state(State.TERMINATING), by=by, now=NOW, why="a test")


@pytest.mark.parametrize("state", [each for each in State if each is not State.TERMINATING], ids=_name)
def test_tombstone_requires_the_state_terminating(state: State) -> None:
    with pytest.raises(IllegalTransition):
        tombstone(in_state(state), by=R, now=NOW, why="a test")


def test_inserts_require_that_there_is_no_record() -> None:
    record = in_state(State.CREATED)
    for change in (
        create(record, by=P, why="launched"),
        tombstone(in_state(State.TERMINATING, epoch=1), by=R, now=NOW, why="no record"),
    ):
        assert change.condition.is_met_by(None)
        assert not any(change.condition.is_met_by(in_state(state, epoch=1)) for state in State)
        assert change.entry.source is None
    assert create(record, by=P, why="launched").applied_to(None) == record
