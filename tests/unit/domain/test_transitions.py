"""Legal transitions, compared with a copy of the contract (lifecycle, section 3), and the fields that they write."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from remuda.domain.errors import IllegalTransition
from remuda.domain.instance import RETIREMENTS, Instance, State
from remuda.domain.provision import Provision, ProvisionStatus, committed, released, settled
from remuda.domain.resources import Tier
from remuda.domain.signals import Signal
from remuda.domain.transitions import (
    MAX_WHY,
    TRANSITIONS,
    Actor,
    Announce,
    Bind,
    Change,
    Claim,
    Commit,
    Confirm,
    Equip,
    Event,
    Extend,
    Fill,
    ListenOn,
    Quarantine,
    Release,
    Renew,
    RenewCredential,
    Retire,
    RetireReason,
    ReturnToPool,
    advance,
    create,
    presumed_idle,
    tombstone,
)
from tests.support.records import (
    CLAIM,
    NOW,
    REMOVAL,
    assignment,
    at,
    claim,
    end,
    evidence,
    evidence_in_set,
    in_set,
    in_state,
    instance,
    provision,
    report,
    run_holder,
    set_holder,
    write,
)

P, L, R, S, D = Actor.PROVISION, Actor.RELEASE, Actor.REFRESH, Actor.SCALE_DOWN, Actor.LISTENER
OPERATOR = Actor.OPERATOR

#: Target state and actors by event and state. Everything else is illegal.
LEGAL: dict[tuple[type, State], tuple[State, set[Actor]]] = {
    (Claim, State.IDLE): (State.CLAIMED, {P, D}),
    (Commit, State.CREATED): (State.RUNNING, {P}),
    (Commit, State.CLAIMED): (State.RUNNING, {P}),
    (Release, State.CLAIMED): (State.RELEASING, {P, L, R, D}),
    (Release, State.RUNNING): (State.RELEASING, {P, L, R, D}),
    (Extend, State.RELEASING): (State.RELEASING, {L, R, D}),
    (RenewCredential, State.RELEASING): (State.RELEASING, {L, R, D}),
    (ReturnToPool, State.RELEASING): (State.IDLE, {L, R, D}),
    (Announce, State.IDLE): (State.IDLE, {L, R, D}),
    (Renew, State.IDLE): (State.IDLE, {S, D}),
    # Section 5: "spot notice: the control plane sets `retire_reason`".
    (Retire, State.CREATED): (State.CREATED, {L, R, D, OPERATOR}),
    (Retire, State.CLAIMED): (State.CLAIMED, {L, R, D, OPERATOR}),
    (Retire, State.RUNNING): (State.RUNNING, {L, R, D, OPERATOR}),
    (Retire, State.RELEASING): (State.RELEASING, {L, R, D, OPERATOR}),
    (Retire, State.IDLE): (State.IDLE, {L, R, D, OPERATOR}),
    # An operator may quarantine any live instance.
    (Quarantine, State.CREATED): (State.CREATED, {OPERATOR}),
    (Quarantine, State.CLAIMED): (State.CLAIMED, {OPERATOR}),
    (Quarantine, State.RUNNING): (State.RUNNING, {OPERATOR}),
    (Quarantine, State.RELEASING): (State.RELEASING, {OPERATOR}),
    (Quarantine, State.IDLE): (State.IDLE, {OPERATOR}),
    (Confirm, State.TERMINATING): (State.TERMINATED, {R}),
}

#: The same for events of instances that a runner set holds.
LEGAL_IN_SET: dict[tuple[type, State], tuple[State, set[Actor]]] = {
    (Equip, State.CREATED): (State.RUNNING, {D}),
    (Equip, State.CLAIMED): (State.RUNNING, {D}),
    (Bind, State.RUNNING): (State.RUNNING, {D, R}),
    (ListenOn, State.RUNNING): (State.RUNNING, {D}),
    (Fill, State.CREATED): (State.IDLE, {D}),
}

#: Actors and reasons of ends by state. In addition, only an operator may end an instance in any live state.
ENDS: dict[State, tuple[set[Actor], set[RetireReason]]] = {
    State.CREATED: (
        {P, L, R, D},
        {RetireReason.FAILED, RetireReason.TIMED_OUT, RetireReason.RELEASED, RetireReason.EXPIRED, RetireReason.GONE},
    ),
    State.CLAIMED: ({P, R, D}, {RetireReason.FAILED, RetireReason.TIMED_OUT, RetireReason.EXPIRED, RetireReason.GONE}),
    State.RUNNING: ({R, D}, {RetireReason.FAILED, RetireReason.EXPIRED, RetireReason.GONE}),
    State.RELEASING: ({L, R, D}, {RetireReason.FAILED, RetireReason.EXPIRED, RetireReason.GONE, *RETIREMENTS}),
    State.IDLE: ({R}, {RetireReason.EXPIRED, RetireReason.GONE, *RETIREMENTS}),
}

EVENTS = (Claim, Commit, Release, Extend, RenewCredential, ReturnToPool, Announce, Renew, Retire, Quarantine, Confirm)
EVENTS_IN_SET = (Equip, Bind, ListenOn, Fill)


def _name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize(("state", "kind", "by"), list(itertools.product(State, EVENTS, Actor)), ids=_name)
def test_event_is_legal_exactly_as_in_the_contract(state: State, kind: type, by: Actor) -> None:
    record = in_state(state)
    target, actors = LEGAL.get((kind, state), (None, set()))
    if by not in actors:
        with pytest.raises(IllegalTransition):
            write(record, evidence(record)[kind], by)
        return
    change = write(record, evidence(record)[kind], by)
    assert change.applied_to(record).state is target
    assert (change.entry.source, change.entry.target, change.entry.by) == (state, target, by)


@pytest.mark.parametrize(("state", "kind", "by"), list(itertools.product(State, EVENTS_IN_SET, Actor)), ids=_name)
def test_event_in_a_set_is_legal_exactly_as_in_the_contract(state: State, kind: type, by: Actor) -> None:
    record = in_set(state)
    target, actors = LEGAL_IN_SET.get((kind, state), (None, set()))
    with pytest.raises(IllegalTransition):
        # Without a set.
        write(in_state(state), evidence_in_set(record)[kind], by)
    if by not in actors:
        with pytest.raises(IllegalTransition):
            write(record, evidence_in_set(record)[kind], by)
        return
    change = write(record, evidence_in_set(record)[kind], by)
    assert change.applied_to(record).state is target


@pytest.mark.parametrize(("state", "reason", "by"), list(itertools.product(State, RetireReason, Actor)), ids=_name)
def test_end_is_legal_exactly_as_in_the_contract(state: State, reason: RetireReason, by: Actor) -> None:
    record = in_state(state)
    actors, reasons = ENDS.get(state, (set(), set()))
    ordered = (by is OPERATOR, reason is RetireReason.TERMINATED_BY_OPERATOR)
    if (by in actors and reason in reasons) or (state in ENDS and all(ordered)):
        change = write(record, end(record, reason), by)
        assert change.applied_to(record).state is State.TERMINATING
    else:
        with pytest.raises(IllegalTransition):
            write(record, end(record, reason), by)


@pytest.mark.parametrize("state", [State.TERMINATING, State.TERMINATED])
def test_terminating_and_terminated_absorb(state: State) -> None:
    record = in_state(state)
    events = [*evidence(record).values(), *(end(record, reason) for reason in RetireReason)]
    reached = set()
    for event, by in itertools.product(events, Actor):
        try:
            reached.add(write(record, event, by).applied_to(record).state)
        except IllegalTransition:
            continue
    assert reached == ({State.TERMINATED} if state is State.TERMINATING else set())


def test_illegal_transition_contains_the_record() -> None:
    record = in_state(State.IDLE)
    with pytest.raises(IllegalTransition, match=r"no commit from idle.*epoch 2") as error:
        write(record, evidence(record)[Commit], P)
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
    assert rows == {
        (state, target, by) for (_, state), (target, actors) in (LEGAL | LEGAL_IN_SET).items() for by in actors
    }
    ends = {
        source: (set(row.by) - {OPERATOR}, set(row.reasons) - {RetireReason.TERMINATED_BY_OPERATOR})
        for row in TRANSITIONS
        for source in row.sources
        if source is not None and row.target is State.TERMINATING
    }
    assert ends == ENDS
    inserts = {(row.target, row.by) for row in TRANSITIONS if None in row.sources}
    assert inserts == {(State.CREATED, (P, D)), (State.TERMINATING, (P, R, D))}
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


@pytest.mark.parametrize("by", [each for each in Actor if each not in {P, D}], ids=_name)
def test_only_a_provision_or_the_listener_creates(by: Actor) -> None:
    with pytest.raises(IllegalTransition):
        create(in_state(State.CREATED), by=by, why="a test")


@pytest.mark.parametrize("by", [L, S, OPERATOR], ids=_name)
def test_only_launching_processes_and_refresh_write_tombstones(by: Actor) -> None:
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


# Fields that each row writes ------------------------------------------------------------------------------------------


def differences(before: Instance, after: Instance) -> dict[str, Any]:
    names = (item.name for item in fields(Instance))
    return {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}


def effect(record: Instance, event: Event, by: Actor) -> dict[str, Any]:
    return differences(record, write(record, event, by).applied_to(record))


def test_claim_increments_the_epoch_and_sets_holder_claim_assignment_and_threshold() -> None:
    record = in_state(State.IDLE, run_deadline=at(9))
    assert effect(record, claim(), P) == {
        "state": State.CLAIMED,
        "epoch": 3,
        "holder": run_holder("1235", "p-2"),
        "last_holder": None,
        "claim": "p-2/b",
        "scope": "octo/other",
        "threshold": at(300),
        "assignment": assignment(3),
        "announced_at": None,
        "run_deadline": None,
    }


@pytest.mark.parametrize("state", [State.CREATED, State.CLAIMED])
def test_commit_sets_the_threshold_and_removes_the_credential(state: State) -> None:
    record = in_state(state)
    event = Commit(claim=CLAIM, report=report(Signal.UD_REG_OK, record.epoch), max_runtime_s=90.0)
    assert record.assignment is not None
    assert effect(record, event, P) == {
        "state": State.RUNNING,
        "threshold": at(90),
        "assignment": replace(record.assignment, credential=None),
    }


def test_commit_removes_the_just_in_time_configuration() -> None:
    record = in_state(State.CREATED, assignment=replace(assignment(1), jit_config="secret"))
    after = write(record, evidence(record)[Commit], P).applied_to(record)
    assert after.assignment is not None
    assert after.assignment.jit_config == ""


@pytest.mark.parametrize("state", [State.CLAIMED, State.RUNNING])
def test_release_clears_the_holder_keeps_its_deadline_and_sets_the_removal_credential(state: State) -> None:
    record = in_state(state)
    assert record.assignment is not None
    assert effect(record, Release(release_time_s=120.0, credential=REMOVAL, claim=CLAIM), P) == {
        "state": State.RELEASING,
        "holder": None,
        "last_holder": record.holder,
        "run_deadline": record.threshold,
        "threshold": at(120),
        "assignment": replace(record.assignment, credential=REMOVAL),
    }


@pytest.mark.parametrize(
    ("threshold", "run_deadline", "expected"),
    [
        (at(10), at(1_800), at(300)),
        (at(10), at(200), at(200)),
        (at(400), at(1_800), at(400)),
        (at(250), at(200), at(250)),
        (at(10), None, at(10)),
    ],
    ids=["by the release time", "to the run's deadline", "never shorter", "past the deadline", "no deadline"],
)
def test_extension_ends_at_the_runs_deadline_and_never_shortens_the_threshold(
    threshold: datetime, run_deadline: datetime | None, expected: datetime
) -> None:
    record = in_state(State.RELEASING, threshold=threshold, run_deadline=run_deadline)
    event = Extend(report=report(busy=True), extension_s=300.0, margin_s=0.0)
    after = write(record, event, L).applied_to(record)
    assert after == replace(record, threshold=expected)


def test_renewed_credential_changes_nothing_else() -> None:
    record = in_state(State.RELEASING)
    fresh = replace(REMOVAL, token="fresh")
    assert record.assignment is not None
    assert effect(record, RenewCredential(credential=fresh), R) == {
        "assignment": replace(record.assignment, credential=fresh)
    }


def test_pooling_clears_the_assignment_counts_the_use_and_sets_the_idle_time() -> None:
    record = in_state(State.RELEASING, announced_at=at(-9))
    event = ReturnToPool(report=report(Signal.UD_REMOVE_REG_REMOVE_RUN_OK), idle_time_s=420.0)
    assert effect(record, event, L) == {
        "state": State.IDLE,
        "assignment": None,
        "announced_at": None,
        "run_deadline": None,
        "uses": 2,
        "threshold": at(420),
    }


def test_announcement_sets_only_its_time() -> None:
    record = in_state(State.IDLE, announced_at=None)
    assert effect(record, Announce(), R) == {"announced_at": NOW}


def test_renewal_sets_only_the_threshold() -> None:
    record = in_state(State.IDLE)
    assert effect(record, Renew(until=at(500)), S) == {"threshold": at(500)}


def test_retirement_sets_only_reason_and_detail() -> None:
    record = in_state(State.RUNNING)
    assert effect(record, Retire(reason=RetireReason.SPOT_NOTICE, detail="soon"), R) == {
        "retire_reason": RetireReason.SPOT_NOTICE,
        "retire_detail": "soon",
    }


@pytest.mark.parametrize(
    ("state", "by", "reason"),
    [
        (State.CREATED, L, RetireReason.RELEASED),
        (State.CLAIMED, P, RetireReason.TIMED_OUT),
        (State.RUNNING, R, RetireReason.GONE),
        (State.RELEASING, R, RetireReason.FAILED),
        (State.IDLE, R, RetireReason.EXPIRED),
    ],
)
def test_end_clears_holder_and_assignment_and_sets_last_holder_and_reason(
    state: State, by: Actor, reason: RetireReason
) -> None:
    record = in_state(state)
    after = write(record, end(record, reason), by).applied_to(record)
    assert (after.state, after.holder, after.last_subject) == (State.TERMINATING, None, "1234")
    assert after.assignment is None
    assert after.announced_at is None
    assert after.retire_reason is reason
    assert after.threshold == NOW
    assert after.provision_id == record.provision_id


def test_end_keeps_the_first_retire_reason() -> None:
    record = in_state(State.IDLE, retire_reason=RetireReason.SPOT_NOTICE, retire_detail="soon")
    assert not {"retire_reason", "retire_detail"} & set(effect(record, end(record, RetireReason.EXPIRED), R))


def test_confirmed_end_sets_the_expiry_of_the_record() -> None:
    record = in_state(State.TERMINATING)
    expected = {"state": State.TERMINATED, "forget_at": at(600)}
    assert effect(record, Confirm(keep_records_s=600.0), R) == expected


def _changes() -> list[Change]:
    found = []
    for state in State:
        record = in_state(state)
        for event in [*evidence(record).values(), *(end(record, reason) for reason in RetireReason)]:
            for by in Actor:
                try:
                    found.append(write(record, event, by))
                except IllegalTransition:
                    continue
    return found


CHANGES = _changes()


def test_only_a_claim_changes_the_epoch() -> None:
    assert {change.entry.transition for change in CHANGES if "epoch" in change.sets} == {"claim"}


def test_only_pooling_counts_a_use() -> None:
    assert {change.entry.transition for change in CHANGES if "uses" in change.sets} == {"pool"}


def test_only_a_claim_changes_tier_and_repository() -> None:
    assert {change.entry.transition for change in CHANGES if "tier" in change.sets} == {"claim"}
    assert {change.entry.transition for change in CHANGES if "repository" in change.sets} == {"claim"}


def test_every_change_of_state_replaces_the_credential() -> None:
    """S12: neither the registration nor the removal token outlives its step."""
    for change in CHANGES:
        if change.entry.target not in {change.entry.source, State.TERMINATED}:
            assert "assignment" in change.sets, change.entry.transition


def test_every_write_is_conditional_on_state_and_epoch() -> None:
    for change in CHANGES:
        assert change.entry.source is not None
        record = in_state(change.entry.source)
        assert (change.condition.state, change.condition.epoch) == (record.state, record.epoch)


# History ----------------------------------------------------------------------------------------------------------


def test_history_entry_contains_holder_new_epoch_and_actor() -> None:
    record = in_state(State.IDLE)
    entry = advance(record, claim(), by=P, now=NOW + timedelta(microseconds=999), why="picked").entry
    assert (entry.transition, entry.epoch, entry.holder, entry.by, entry.why) == (
        "claim",
        3,
        claim().holder,
        P,
        "picked",
    )
    assert entry.at == NOW


def test_history_entry_contains_the_holder_that_a_release_clears() -> None:
    record = in_state(State.RUNNING)
    assert write(record, evidence(record)[Release], L).entry.holder == record.holder


def test_texts_are_bounded() -> None:
    record = in_state(State.IDLE)
    assert len(advance(record, claim(), by=P, now=NOW, why="x" * 10_000).entry.why) == MAX_WHY
    retired = write(record, Retire(reason=RetireReason.DRAINED, detail="x" * 10_000), R).applied_to(record)
    assert len(retired.retire_detail) == MAX_WHY


def test_claim_by_message_equals_claim_by_record() -> None:
    record = in_state(State.IDLE, tier=Tier.UNTRUSTED)
    by_message = write(presumed_idle(record.message(), now=NOW), claim(tier=Tier.UNTRUSTED), P)
    by_record = write(record, claim(tier=Tier.UNTRUSTED), P)
    assert by_message.condition == by_record.condition
    assert by_message.applied_to(record) == by_record.applied_to(record)


@pytest.mark.parametrize(
    ("state", "for_s", "until"),
    [(State.IDLE, 10, 10), (State.IDLE, 900, 900), (State.RELEASING, 10, None), (State.RELEASING, 900, 900)],
)
def test_quarantine_sets_the_threshold_of_idle_and_releasing_instances(state: State, for_s: int, until: int | None):
    record = in_state(state)
    event = Quarantine(detail="odd", until=at(for_s))
    change = advance(record, event, by=Actor.OPERATOR, now=NOW, why="odd")
    after = change.applied_to(record)
    assert after.quarantined_until == at(for_s)
    assert after.threshold == (at(until) if until else record.threshold)


# Provisions -----------------------------------------------------------------------------------------------------------


OPEN, COMMITTED, RELEASED = ProvisionStatus.OPEN, ProvisionStatus.COMMITTED, ProvisionStatus.RELEASED
FORGET_AT = at(600)
FORWARD = {(OPEN, COMMITTED), (OPEN, RELEASED), (COMMITTED, RELEASED)}


def move(before: Provision, status: ProvisionStatus) -> Provision:
    if status is COMMITTED:
        return committed(before, ("i-1", "i-2"), deadline=at(50))
    return released(before, now=at(5), why="cancelled")


@pytest.mark.parametrize(("source", "target"), list(itertools.product(ProvisionStatus, (COMMITTED, RELEASED))))
def test_provision_status_only_moves_forward(source: ProvisionStatus, target: ProvisionStatus) -> None:
    before = provision(status=source)
    if (source, target) in FORWARD:
        assert move(before, target).status is target
    else:
        with pytest.raises(IllegalTransition) as refused:
            move(before, target)
        assert refused.value.history == (before,)


def test_commit_records_the_instances_and_release_keeps_them() -> None:
    done = committed(provision(), ("i-1", "i-2"), deadline=at(50))
    assert (done.instance_ids, done.deadline) == (("i-1", "i-2"), at(50))
    after = released(done, now=at(5), why="given back")
    assert (after.instance_ids, after.released_at, after.why) == (("i-1", "i-2"), at(5), "given back")
    assert not after.settled


@pytest.mark.parametrize("status", [OPEN, COMMITTED])
def test_only_a_released_provision_can_be_settled(status: ProvisionStatus) -> None:
    with pytest.raises(IllegalTransition):
        settled(provision(status=status), forget_at=FORGET_AT)
    after = settled(provision(status=RELEASED), forget_at=FORGET_AT)
    assert (after.settled, after.forget_at) == (True, FORGET_AT)


# Runner sets ------------------------------------------------------------------------------------------------------


def bind(**changed: Any) -> Bind:
    values: dict[str, Any] = {"runner_name": in_set(State.RUNNING).assignment.runner_name, "run_id": "77"}  # type: ignore[union-attr]
    values |= {"repository": "Octo/App", "tier": Tier.TRUSTED, "set_tier": Tier.TRUSTED}
    return Bind(**{**values, "max_runtime_s": 1_800.0, "margin_s": 60.0, **changed})


def test_equip_adds_the_registration_and_bind_removes_its_configuration() -> None:
    claimed = in_set(State.CLAIMED)
    listening = write(claimed, evidence_in_set(claimed)[Equip], D).applied_to(claimed)
    assert listening.assignment is not None
    assert (listening.assignment.jit_config, listening.assignment.runner_id) == ("configuration", 7)
    assert (listening.threshold, listening.run_deadline) == (at(900), at(2_700))
    assert not listening.is_bound
    bound = write(listening, bind(), D).applied_to(listening)
    assert bound.assignment is not None
    assert (bound.assignment.jit_config, bound.assignment.runner_id) == ("", 7)
    assert (bound.run_id, bound.tier, bound.retire_reason) == ("77", Tier.TRUSTED, None)
    assert (bound.threshold, bound.run_deadline, bound.is_bound) == (at(1_800), None, True)
    with pytest.raises(IllegalTransition):
        write(bound, bind(run_id="78"), D)


def test_late_renewal_of_a_listening_runner_does_not_shorten_a_later_one() -> None:
    listening = in_set(State.RUNNING)
    renewal = write(listening, evidence_in_set(listening)[ListenOn], D)
    assert renewal.condition.is_met_by(listening)
    renewed = renewal.applied_to(listening)
    assert renewal.condition.is_met_by(renewed)
    later = replace(renewed, threshold=renewed.threshold + timedelta(milliseconds=1))
    assert not renewal.condition.is_met_by(later)


def test_a_release_of_a_listening_runner_does_not_overwrite_the_run_of_its_job() -> None:
    listening = in_set(State.RUNNING)
    change = write(listening, Release(release_time_s=300.0, credential=None), D)
    assert change.condition.is_met_by(listening)
    bound = write(listening, bind(), D).applied_to(listening)
    assert not change.condition.is_met_by(bound)


@pytest.mark.parametrize(
    ("strict", "tier", "uses", "only_trusted"),
    [
        (True, Tier.TRUSTED, 1, True),
        (True, Tier.TRUSTED, 0, True),
        (True, Tier.UNTRUSTED, 1, False),
        (False, Tier.TRUSTED, 1, False),
    ],
)
def test_instances_of_a_strict_set_take_only_trusted_jobs_used_or_not(
    *, strict: bool, tier: Tier, uses: int, only_trusted: bool
) -> None:
    claimed = in_set(State.CLAIMED, tier=tier, uses=uses)
    event: Any = evidence_in_set(claimed)[Equip]
    listening = write(claimed, replace(event, strict=strict), D).applied_to(claimed)
    assert listening.assignment is not None
    assert (listening.assignment.any_run, listening.assignment.only_trusted) == (True, only_trusted)


def test_a_created_instance_needs_its_ok_before_it_listens_or_fills_the_pool() -> None:
    created = in_set(State.CREATED)
    for kind in (Equip, Fill):
        event: Any = evidence_in_set(created)[kind]
        for found in (None, report(None, 1), report(Signal.UD_OK, 2), report(Signal.UD_FAILED, 1)):
            with pytest.raises(IllegalTransition):
                write(created, replace(event, report=found), D)


def test_only_the_event_of_this_runner_or_a_report_of_this_epoch_binds() -> None:
    listening = in_set(State.RUNNING)
    for event in (
        bind(runner_name="another"),
        bind(runner_name=""),
        bind(runner_name="", report=report(Signal.UD_REG_OK, 1, busy=True)),
        bind(runner_name="", report=report(Signal.UD_REG_OK, 2, spent_epoch=1)),
    ):
        with pytest.raises(IllegalTransition):
            write(listening, event, D)


def test_a_job_that_only_the_agent_reports_is_untrusted_and_retires_the_machine_of_a_trusted_set() -> None:
    listening = in_set(State.RUNNING)
    for found in (report(Signal.UD_REG_OK, 2, busy=True), report(Signal.UD_REG_OK, 2, spent_epoch=2)):
        bound = write(listening, bind(runner_name="", report=found), R).applied_to(listening)
        assert (bound.holder, bound.tier) == (set_holder("large", ""), Tier.UNTRUSTED)
        assert bound.is_bound
        assert bound.retire_reason is RetireReason.UNTRUSTED_JOB
        assert bound.repository == ""


def test_an_untrusted_set_reuses_its_machines() -> None:
    listening = in_set(State.RUNNING, tier=Tier.UNTRUSTED)
    bound = write(listening, bind(tier=Tier.TRUSTED, set_tier=Tier.UNTRUSTED), D).applied_to(listening)
    assert (bound.tier, bound.retire_reason) == (Tier.UNTRUSTED, None)


def test_a_machine_that_served_trusted_jobs_is_retired_after_a_job_of_its_set_that_is_untrusted_by_now() -> None:
    listening = in_set(State.RUNNING, tier=Tier.TRUSTED)
    bound = write(listening, bind(tier=Tier.UNTRUSTED, set_tier=Tier.UNTRUSTED), D).applied_to(listening)
    assert (bound.tier, bound.retire_reason) == (Tier.UNTRUSTED, RetireReason.UNTRUSTED_JOB)


def test_a_running_job_that_nobody_recorded_protects_a_listening_runner() -> None:
    listening = in_set(State.RUNNING)
    assert listening.deadline(busy=False) == at(900)
    assert listening.deadline(busy=True) == at(2_700)
    bound = write(listening, bind(), D).applied_to(listening)
    assert bound.deadline(busy=True) == bound.threshold
    released_early = write(listening, evidence(listening)[Release], D).applied_to(listening)
    assert released_early.run_deadline == at(2_700)


def test_a_machine_whose_job_was_recorded_meanwhile_is_not_retired_for_an_unknown_one() -> None:
    listening = in_set(State.RUNNING)
    bound = write(listening, bind(), D).applied_to(listening)
    unknown = write(listening, Retire(reason=RetireReason.UNTRUSTED_JOB), D)
    assert unknown.condition.is_met_by(listening)
    assert not unknown.condition.is_met_by(bound)
    drained = write(listening, Retire(reason=RetireReason.DRAINED), D)
    assert drained.condition.is_met_by(bound)


def test_a_machine_that_was_drained_meanwhile_keeps_its_reason_to_retire() -> None:
    listening = in_set(State.RUNNING)
    drained = write(listening, Retire(reason=RetireReason.DRAINED), D).applied_to(listening)
    untrusted = bind(tier=Tier.UNTRUSTED)
    assert not write(listening, untrusted, D).condition.is_met_by(drained)
    assert write(listening, bind(), D).condition.is_met_by(drained)
    bound = write(drained, untrusted, D)
    assert bound.condition.is_met_by(drained)
    assert bound.applied_to(drained).retire_reason is RetireReason.DRAINED
