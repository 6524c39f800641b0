"""Fields that each row of the transition table writes."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from remuda.domain.errors import IllegalTransition
from remuda.domain.instance import Instance, State
from remuda.domain.resources import Tier
from remuda.domain.signals import Signal
from remuda.domain.transitions import (
    MAX_WHY,
    Actor,
    Announce,
    Change,
    Commit,
    Confirm,
    Event,
    Extend,
    Quarantine,
    Release,
    Renew,
    RenewCredential,
    Retire,
    RetireReason,
    ReturnToPool,
    advance,
    presumed_idle,
)
from tests.support.records import NOW, OWNER, REMOVAL, assignment, at, claim, end, evidence, in_state, report

P, L, R, S = Actor.PROVISION, Actor.RELEASE, Actor.REFRESH, Actor.SCALE_DOWN


def differences(before: Instance, after: Instance) -> dict[str, Any]:
    names = (item.name for item in fields(Instance))
    return {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}


def effect(record: Instance, event: Event, by: Actor) -> dict[str, Any]:
    return differences(record, advance(record, event, by=by, now=NOW, why="a test").applied_to(record))


def test_claim_increments_the_epoch_and_sets_run_owner_assignment_and_threshold() -> None:
    record = in_state(State.IDLE, run_deadline=at(9))
    assert effect(record, claim(), P) == {
        "state": State.CLAIMED,
        "epoch": 3,
        "run_id": "1235",
        "owner": "p-2/b",
        "provision_id": "p-2",
        "scope": "octo/other",
        "threshold": at(300),
        "assignment": assignment(3),
        "announced_at": None,
        "run_deadline": None,
    }


@pytest.mark.parametrize("state", [State.CREATED, State.CLAIMED])
def test_commit_sets_the_threshold_and_removes_the_credential(state: State) -> None:
    record = in_state(state)
    event = Commit(owner=OWNER, report=report(Signal.UD_REG_OK, record.epoch), max_runtime_s=90.0)
    assert record.assignment is not None
    assert effect(record, event, P) == {
        "state": State.RUNNING,
        "threshold": at(90),
        "assignment": replace(record.assignment, credential=None),
    }


def test_commit_removes_the_just_in_time_configuration() -> None:
    record = in_state(State.CREATED, assignment=replace(assignment(1), jit_config="secret"))
    after = advance(record, evidence(record)[Commit], by=P, now=NOW, why="a test").applied_to(record)
    assert after.assignment is not None
    assert after.assignment.jit_config == ""


@pytest.mark.parametrize("state", [State.CLAIMED, State.RUNNING])
def test_release_clears_the_run_keeps_its_deadline_and_sets_the_removal_credential(state: State) -> None:
    record = in_state(state)
    assert record.assignment is not None
    assert effect(record, Release(release_time_s=120.0, credential=REMOVAL, owner=OWNER), P) == {
        "state": State.RELEASING,
        "run_id": "",
        "last_run_id": "1234",
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
    after = advance(record, event, by=L, now=NOW, why="a test").applied_to(record)
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
def test_end_clears_run_and_assignment_and_sets_last_run_and_reason(
    state: State, by: Actor, reason: RetireReason
) -> None:
    record = in_state(state)
    after = advance(record, end(record, reason), by=by, now=NOW, why="a test").applied_to(record)
    assert (after.state, after.run_id, after.last_run_id) == (State.TERMINATING, "", "1234")
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
                    found.append(advance(record, event, by=by, now=NOW, why="a test"))
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


def test_history_entry_contains_run_new_epoch_and_actor() -> None:
    record = in_state(State.IDLE)
    entry = advance(record, claim(), by=P, now=NOW + timedelta(microseconds=999), why="picked").entry
    assert (entry.transition, entry.epoch, entry.run_id, entry.by, entry.why) == ("claim", 3, "1235", P, "picked")
    assert entry.at == NOW


def test_history_entry_contains_the_run_that_a_release_clears() -> None:
    record = in_state(State.RUNNING)
    assert advance(record, evidence(record)[Release], by=L, now=NOW, why="a test").entry.run_id == "1234"


def test_texts_are_bounded() -> None:
    record = in_state(State.IDLE)
    assert len(advance(record, claim(), by=P, now=NOW, why="x" * 10_000).entry.why) == MAX_WHY
    retired = advance(
        record, Retire(reason=RetireReason.DRAINED, detail="x" * 10_000), by=R, now=NOW, why="a test"
    ).applied_to(record)
    assert len(retired.retire_detail) == MAX_WHY


def test_claim_by_message_equals_claim_by_record() -> None:
    record = in_state(State.IDLE, tier=Tier.UNTRUSTED)
    by_message = advance(
        presumed_idle(record.message(), now=NOW), claim(tier=Tier.UNTRUSTED), by=P, now=NOW, why="a test"
    )
    by_record = advance(record, claim(tier=Tier.UNTRUSTED), by=P, now=NOW, why="a test")
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
