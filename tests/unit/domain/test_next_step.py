"""The next step of an instance by its state and its report, and decisions to retire one."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.domain.decide.next_step import (
    Leave,
    NewCredential,
    PoolPolicy,
    Publish,
    RegistrationRemoval,
    Step,
    Terminate,
    Write,
    leave_holder,
    next_step,
)
from remuda.domain.instance import (
    ABSORBING,
    ASSIGNED,
    Credential,
    Instance,
    RetireReason,
    State,
    decide_retirement,
)
from remuda.domain.resources import Reuse, Tier
from remuda.domain.signals import Report, Signal
from remuda.domain.thresholds import Lifetimes, expired
from remuda.domain.transitions import Actor, End, Extend, Retire, ReturnToPool, advance
from tests.support.records import NOW, assignment, at, in_state, report, set_holder

LIFE = Lifetimes(release_time_s=300.0, max_age_s=3_600.0, max_uses=3)
BEFORE_TERMINATING = [state for state in State if state not in ABSORBING]
CLEAN = Signal.UD_REMOVE_REG_REMOVE_RUN_OK


def step(record: Instance, seen: Report | None, **policy: Any) -> Step | None:
    return next_step(record, seen, PoolPolicy(lifetimes=LIFE, **policy), now=NOW)


def decide(seen: Any, **changed: Any) -> Any:
    decided = step(in_state(State.RELEASING, **changed), seen)
    return decided.event if isinstance(decided, Write) else decided


def test_clean_instance_returns_to_the_pool() -> None:
    assert decide(report(CLEAN)) == ReturnToPool(report=report(CLEAN), idle_time_s=420.0)


@pytest.mark.parametrize(
    ("changed", "notice", "reason"),
    [
        ({"retire_reason": RetireReason.DRAINED, "retire_detail": "old"}, "", (RetireReason.DRAINED, "old")),
        ({}, "terminate at noon", (RetireReason.SPOT_NOTICE, "terminate at noon")),
        ({"created_at": at(-3_600)}, "", (RetireReason.TOO_OLD, "the maximum age is 3600 s")),
        ({"uses": 2}, "", (RetireReason.USED_UP, "3 of 3 uses")),
    ],
)
def test_clean_instance_that_must_retire_is_terminated_with_the_reason(
    changed: dict[str, Any], notice: str, reason: tuple[RetireReason, str]
) -> None:
    event = decide(report(CLEAN, notice=notice), **changed)
    assert (event.reason, event.detail) == reason


UNBOUND = {"runner_set": "large"}


@pytest.mark.parametrize(
    ("changed", "spent_epoch", "retires"),
    [
        (UNBOUND, 2, True),
        # The job was recorded: its trust is known.
        ({**UNBOUND, "run_id": "1234"}, 2, False),
        (UNBOUND, 1, False),
        ({**UNBOUND, "tier": Tier.UNTRUSTED}, 2, False),
        ({"run_id": "1234"}, 2, False),
        ({**UNBOUND, "retire_reason": RetireReason.QUARANTINED, "quarantined_until": at(60)}, 2, False),
    ],
)
def test_machine_that_had_a_job_during_its_withdrawal_is_not_reused(
    changed: dict[str, Any],
    spent_epoch: int,
    retires: bool,  # noqa: FBT001
) -> None:
    event = decide(report(CLEAN, spent_epoch=spent_epoch), **changed)
    assert isinstance(event, End) is retires
    assert not retires or event.reason is RetireReason.UNTRUSTED_JOB


@pytest.mark.parametrize(
    ("detail", "why"),
    [
        ("", "clean, but never reused"),
        ("refused 1 foreign job; 1 process (sleep 9)", "refused 1 foreign job; 1 process (sleep 9)"),
    ],
)
def test_retirement_text_contains_the_agents_detail(detail: str, why: str) -> None:
    seen = replace(report(CLEAN), detail=detail)
    decided = step(in_state(State.RELEASING), seen, reuse=Reuse.NEVER)
    assert isinstance(decided, Write)
    assert decided.why.startswith("clean, but never reused")
    assert decided.why.endswith(why)


@pytest.mark.parametrize("signal", [Signal.UD_REMOVE_REG_FAILED, Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED])
def test_failed_removal_terminates_the_instance(signal: Signal) -> None:
    assert decide(report(signal)).reason is RetireReason.FAILED


@pytest.mark.parametrize(
    "signal", [None, *(each for each in Signal if each is not CLEAN and not each.name.startswith("UD_REMOVE_REG_"))]
)
def test_signals_before_the_removal_decide_nothing(signal: Signal | None) -> None:
    assert decide(report(signal)) is None


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("epoch", [1, 3])
def test_signals_of_another_epoch_decide_nothing(signal: Signal, epoch: int) -> None:
    assert decide(report(signal, epoch)) is None
    assert decide(None) is None


@pytest.mark.parametrize(
    ("threshold", "deadline", "extends"),
    [
        (at(449), at(1_800), True),
        (at(450), at(1_800), False),
        (at(100), at(100), False),
        (at(100), at(101), True),
        (at(100), None, False),
    ],
    ids=["half used up", "not yet half", "at the run's deadline", "just before it", "no deadline"],
)
def test_running_job_is_extended_at_half_time_until_the_runs_deadline(
    threshold: datetime, deadline: datetime | None, *, extends: bool
) -> None:
    event = decide(report(busy=True), threshold=threshold, run_deadline=deadline)
    assert isinstance(event, Extend) is extends


@given(
    st.sampled_from([None, *Signal]),
    st.integers(1, 3),
    st.booleans(),
    st.floats(1, 2_000),
    st.none() | st.floats(1, 2_000),
    st.integers(0, 4),
    st.sampled_from(["", "soon"]),
    st.sampled_from([None, RetireReason.TOO_OLD]),
)
def test_every_decision_is_legal_and_changes_the_record(
    signal: Signal | None,
    epoch: int,
    busy: bool,  # noqa: FBT001
    left_s: float,
    deadline_s: float | None,
    uses: int,
    notice: str,
    retire_reason: RetireReason | None,
) -> None:
    """Release and refresh may apply it, and it never repeats without effect."""
    record = in_state(
        State.RELEASING,
        threshold=at(left_s),
        run_deadline=None if deadline_s is None else at(deadline_s),
        uses=uses,
        retire_reason=retire_reason,
    )
    seen = report(signal, epoch, busy=busy, notice=notice)
    decided = step(record, seen)
    if not isinstance(decided, Write):
        return
    assert decided.why
    for by in (Actor.RELEASE, Actor.REFRESH):
        change = advance(record, decided.event, by=by, now=NOW, why=decided.why)
        assert change.condition.is_met_by(record)
        after = change.applied_to(record)
        assert after != record
        if isinstance(decided.event, End):
            assert after.state is State.TERMINATING


# The removal credential -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expires", "threshold", "short"),
    [
        (at(301), at(300), False),
        (at(300), at(300), True),
        (at(61), at(10), False),
        (at(60), at(10), True),
        (at(-1), at(300), True),
    ],
)
def test_credential_must_outlast_threshold_and_margin(expires: datetime, threshold: datetime, *, short: bool) -> None:
    changed = replace(assignment(2), credential=Credential(token="t0ken", expires_at=expires))
    record = in_state(State.RELEASING, assignment=changed, threshold=threshold)
    assert (step(record, None) == NewCredential()) is short


def test_missing_credential_is_renewed_unless_the_assignment_is_missing() -> None:
    record = in_state(State.RELEASING, assignment=replace(assignment(2), credential=None))
    assert step(record, None) == NewCredential()
    assert step(replace(record, assignment=None), None) is None
    assert step(replace(record, last_holder=set_holder()), None) is None


# Retirement and time ----------------------------------------------------------------------------------------------


def test_young_instance_with_few_uses_does_not_retire() -> None:
    record = in_state(State.RELEASING, uses=1, created_at=at(-3_599.999))
    assert decide_retirement(record, now=NOW, max_age_s=3_600.0, max_uses=3) is None


@pytest.mark.parametrize(("uses", "most", "retires"), [(0, 1, True), (0, 2, False), (48, 50, False), (49, 50, True)])
def test_instance_retires_after_its_last_allowed_use(uses: int, most: int, retires: bool) -> None:  # noqa: FBT001
    record = in_state(State.RELEASING, uses=uses)
    assert bool(decide_retirement(record, now=NOW, max_age_s=3_600.0, max_uses=most)) is retires


@pytest.mark.parametrize(
    ("own", "pool", "retires"),
    [
        ("2.335.0", "2.336.0", True),
        ("2.336.0", "2.335.0", True),
        ("2.336.0", "2.336.0", False),
        ("", "2.336.0", False),
        ("2.336.0", "", False),
    ],
)
def test_instance_retires_if_its_runner_differs_from_the_pools(own: str, pool: str, *, retires: bool) -> None:
    found = decide_retirement(
        in_state(State.IDLE, runner_version=own), now=NOW, max_age_s=3_600.0, max_uses=3, runner_version=pool
    )
    assert (found is not None and found.reason is RetireReason.OUTDATED) is retires
    releasing = in_state(State.RELEASING, runner_version=own)
    decided = step(releasing, report(CLEAN), runner_version=pool)
    assert isinstance(decided, Write)
    assert isinstance(decided.event, End) is retires
    # A job that still runs is never interrupted.
    decided = step(releasing, report(busy=True), runner_version=pool)
    assert not isinstance(decided, Write) or not isinstance(decided.event, End)


def test_first_retire_reason_is_kept() -> None:
    record = in_state(State.RELEASING, retire_reason=RetireReason.DRAINED, uses=99)
    found = decide_retirement(record, now=NOW, max_age_s=1.0, max_uses=1, notice="soon")
    assert found is not None
    assert found.reason is RetireReason.DRAINED


@given(st.floats(-200, 200), st.floats(0, 100))
def test_threshold_expires_after_the_margin(left_s: float, margin_s: float) -> None:
    if abs(abs(left_s) - margin_s) > 1e-5:
        assert expired(at(left_s), now=NOW, margin_s=margin_s) == (left_s < -margin_s)


@pytest.mark.parametrize("phase_s", range(0, 330, 10))
def test_job_survives_a_release_that_only_sweeps_extend(phase_s: int) -> None:
    """Sweeps run every five minutes, up to half a minute late: only the run's own deadline ends the job."""
    lifetimes = Lifetimes()
    record = in_state(State.RELEASING, threshold=at(lifetimes.release_time_s), run_deadline=at(3_000))
    busy_report = report(busy=True)
    for now_s in range(phase_s, 3_000, 330):
        assert not expired(record.threshold, now=at(now_s), margin_s=lifetimes.margin_s)
        action = next_step(record, busy_report, PoolPolicy(lifetimes=lifetimes), now=at(now_s))
        if isinstance(action, Write):
            change = advance(record, action.event, by=Actor.REFRESH, now=at(now_s), why=action.why)
            assert change.condition.is_met_by(record)
            record = change.applied_to(record)
    assert record.threshold == at(3_000)


# All states -------------------------------------------------------------------------------------------------------

OF_SET = {"runner_set": "large"}
NOTICE = Write(event=Retire(reason=RetireReason.SPOT_NOTICE, detail="soon"), why="spot notice: soon")


@pytest.mark.parametrize(
    ("state", "changed", "seen", "expected"),
    [
        # A new or a claimed instance waits for its agent. Only its time limit, or its holder, ends that.
        (State.CREATED, {}, None, None),
        (State.CLAIMED, {}, report(Signal.UD_REG_OK), None),
        # EC2 takes it back in two minutes: no other job begins on it.
        (State.CLAIMED, {}, report(notice="soon"), NOTICE),
        (State.RUNNING, {}, report(busy=True, notice="soon"), NOTICE),
        (State.IDLE, {"announced_at": NOW}, report(notice="soon"), NOTICE),
        # It knows that already.
        (State.RUNNING, {"retire_reason": RetireReason.SPOT_NOTICE}, report(notice="soon"), None),
        # Its job runs, or may come.
        (State.RUNNING, {}, report(busy=True), None),
        (State.RUNNING, {}, None, None),
        # Its message was never sent, or ten minutes ago, or just now.
        (State.IDLE, {"announced_at": None}, None, Publish()),
        (State.IDLE, {"announced_at": at(-600)}, None, Publish()),
        (State.IDLE, {"announced_at": at(-599)}, None, None),
        # A use of an idle instance is counted already.
        (State.IDLE, {"announced_at": NOW, "uses": 2}, None, None),
        # Nothing follows but the confirmation by EC2.
        (State.TERMINATING, {}, report(CLEAN), None),
        (State.TERMINATED, {}, report(CLEAN), None),
    ],
)
def test_step_by_state_and_report(
    state: State, changed: dict[str, Any], seen: Report | None, expected: Step | None
) -> None:
    assert step(in_state(state, **changed), seen) == expected


@pytest.mark.parametrize(
    ("state", "changed", "seen", "reason"),
    [
        *((state, {"threshold": at(-60)}, None, RetireReason.EXPIRED) for state in BEFORE_TERMINATING),
        # GitHub refused the registration of a running instance, and no job can start on it.
        (State.RUNNING, {}, report(Signal.UD_REG_FAILED), RetireReason.FAILED),
        (State.IDLE, {"uses": 3}, None, RetireReason.USED_UP),
        (State.IDLE, {"created_at": at(-3_600)}, None, RetireReason.TOO_OLD),
        (State.IDLE, {"retire_reason": RetireReason.DRAINED}, None, RetireReason.DRAINED),
    ],
)
def test_end_by_state_and_report(
    state: State, changed: dict[str, Any], seen: Report | None, reason: RetireReason
) -> None:
    decided = step(in_state(state, **changed), seen)
    assert isinstance(decided, Write)
    assert isinstance(decided.event, End)
    assert decided.event.reason is reason


def test_runner_of_a_set_that_works_again_after_a_failure_is_kept() -> None:
    failed = report(Signal.UD_REG_FAILED, busy=True)
    assert step(in_state(State.RUNNING, **OF_SET), failed) is None
    assert isinstance(step(in_state(State.RUNNING), failed), Write)


def test_job_that_nobody_has_recorded_protects_a_listening_runner_until_its_deadline() -> None:
    record = in_state(State.RUNNING, threshold=at(-100), run_deadline=at(100), **OF_SET)
    assert step(record, report(busy=True)) is None
    assert isinstance(step(record, report()), Write)


@pytest.mark.parametrize(
    ("state", "changed", "seen", "expected"),
    [
        # Nobody has used it, and its agent may be about to start a runner.
        (State.CREATED, {}, None, Terminate()),
        (State.CREATED, OF_SET, None, Terminate()),
        # The agent removes the registration of a run's runner before it stops it.
        (State.CLAIMED, {}, None, Leave(removal=RegistrationRemoval.BY_AGENT)),
        (State.RUNNING, {}, report(busy=True), Leave(removal=RegistrationRemoval.BY_AGENT)),
        # The claim of a set may have been interrupted between the registration and its record.
        (State.CLAIMED, OF_SET, None, Leave(removal=RegistrationRemoval.NOT_RECORDED)),
        # Any job of the set may start at this moment: only GitHub knows, and tells the listener.
        (State.RUNNING, OF_SET, None, None),
        (State.RUNNING, OF_SET, report(spent_epoch=1), None),
        # Its one job is over, and its registration with it.
        (State.RUNNING, OF_SET, report(spent_epoch=2), Leave(removal=RegistrationRemoval.USED_UP)),
        # Nobody holds it.
        *((state, {}, None, None) for state in State if state not in ASSIGNED),
    ],
)
def test_how_an_instance_leaves_its_holder(
    state: State, changed: dict[str, Any], seen: Report | None, expected: Terminate | Leave | None
) -> None:
    assert leave_holder(in_state(state, **changed), seen) == expected
