"""Conditions of each write on the stored record, and the evidence that each event requires."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from remuda.domain.errors import IllegalTransition
from remuda.domain.instance import RETIREMENTS, Instance, State
from remuda.domain.resources import Reuse, Tier
from remuda.domain.signals import Report, Signal
from remuda.domain.transitions import (
    Actor,
    Announce,
    Claim,
    Commit,
    Confirm,
    End,
    Event,
    Extend,
    Quarantine,
    Release,
    Renew,
    RenewCredential,
    Retire,
    RetireReason,
    ReturnToPool,
    WriteCondition,
    advance,
)
from tests.support.records import (
    CLAIM,
    NOW,
    REMOVAL,
    at,
    claim,
    end,
    evidence,
    in_set,
    in_state,
    instance,
    report,
    set_holder,
    write,
)

P, L, R, S = Actor.PROVISION, Actor.RELEASE, Actor.REFRESH, Actor.SCALE_DOWN

#: One event per row that does not terminate an instance.
ROWS: list[tuple[type, State, Actor]] = [
    (Claim, State.IDLE, P),
    (Commit, State.CREATED, P),
    (Commit, State.CLAIMED, P),
    (Release, State.CLAIMED, R),
    (Release, State.RUNNING, L),
    (Extend, State.RELEASING, L),
    (RenewCredential, State.RELEASING, L),
    (ReturnToPool, State.RELEASING, L),
    (Announce, State.IDLE, L),
    (Renew, State.IDLE, S),
    (Retire, State.RUNNING, R),
]
ENDS = [(State.CREATED, R), (State.CLAIMED, R), (State.RUNNING, R), (State.RELEASING, R), (State.IDLE, R)]


@pytest.mark.parametrize(("kind", "state", "by"), ROWS)
def test_write_requires_state_epoch_and_time_left(kind: type, state: State, by: Actor) -> None:
    record = in_state(state)
    condition = write(record, evidence(record)[kind], by).condition
    assert condition.is_met_by(record)
    assert not condition.is_met_by(None)
    assert not condition.is_met_by(replace(record, epoch=record.epoch + 1))
    assert not condition.is_met_by(replace(record, epoch=record.epoch - 1))
    assert not any(condition.is_met_by(replace(record, state=other)) for other in State if other is not state)
    assert not condition.is_met_by(replace(record, threshold=NOW))
    assert not condition.is_met_by(replace(record, threshold=at(-1)))


@pytest.mark.parametrize(("kind", "state", "by"), [row for row in ROWS if row[0] is not Claim])
def test_write_is_accepted_until_the_threshold(kind: type, state: State, by: Actor) -> None:
    record = in_state(state)
    assert write(record, evidence(record)[kind], by).condition.is_met_by(replace(record, threshold=at(0.001)))


def test_claim_requires_more_time_than_the_margin() -> None:
    record = in_state(State.IDLE)
    condition = write(record, claim(margin_s=60.0), P).condition
    assert condition.is_met_by(replace(record, threshold=at(60.001)))
    assert not condition.is_met_by(replace(record, threshold=at(60)))


@pytest.mark.parametrize("event", [claim(), Renew(until=at(9_000))], ids=["claim", "renew"])
def test_retired_instance_is_neither_claimed_nor_renewed(event: Event) -> None:
    record = in_state(State.IDLE)
    condition = write(record, event, P if isinstance(event, Claim) else S).condition
    assert condition.is_met_by(record)
    assert not condition.is_met_by(replace(record, retire_reason=RetireReason.SPOT_NOTICE))


def test_delayed_renewal_does_not_shorten_a_later_one() -> None:
    record = in_state(State.IDLE)
    condition = write(record, Renew(until=at(900)), S).condition
    assert condition.is_met_by(replace(record, threshold=at(900)))
    assert not condition.is_met_by(replace(record, threshold=at(901)))


@pytest.mark.parametrize(
    ("event", "by", "until_s"),
    [
        (Extend(report=report(busy=True), extension_s=900.0, margin_s=0.0), L, 900),
        (Quarantine(until=at(300), detail="slow disk"), Actor.OPERATOR, 300),
    ],
    ids=["extension", "quarantine"],
)
def test_release_of_a_running_job_is_not_shortened_by_a_write_that_comes_late(
    event: Event, by: Actor, until_s: float
) -> None:
    """Two releases extend the same job, and one of them has a slow clock."""
    record = in_state(State.RELEASING, threshold=at(60), run_deadline=at(3_600))
    change = write(record, event, by)
    assert change.sets["threshold"] == at(until_s)
    assert change.condition.is_met_by(replace(record, threshold=at(until_s)))
    assert not change.condition.is_met_by(replace(record, threshold=at(until_s + 1)))


def test_claim_requires_the_tier_in_the_record() -> None:
    record = in_state(State.IDLE, tier=Tier.TRUSTED)
    condition = write(record, claim(tier=Tier.TRUSTED), P).condition
    assert not condition.is_met_by(replace(record, tier=Tier.UNTRUSTED))


@pytest.mark.parametrize(("has", "wants"), [(Tier.TRUSTED, Tier.UNTRUSTED), (Tier.UNTRUSTED, Tier.TRUSTED)])
def test_claim_with_another_tier_is_illegal(has: Tier, wants: Tier) -> None:
    with pytest.raises(IllegalTransition, match=r"claim of a .*trusted instance"):
        write(in_state(State.IDLE, tier=has), claim(tier=wants), P)


def test_reuse_always_lets_the_tier_fall_but_not_rise() -> None:
    trusted, untrusted = (in_state(State.IDLE, tier=tier) for tier in Tier)
    change = write(trusted, claim(tier=Tier.UNTRUSTED, reuse=Reuse.ALWAYS), P)
    assert change.condition.is_met_by(trusted)
    assert change.condition.is_met_by(untrusted)
    assert {change.applied_to(record).tier for record in (trusted, untrusted)} == {Tier.UNTRUSTED}
    rising = claim(tier=Tier.TRUSTED, reuse=Reuse.ALWAYS)
    assert not write(trusted, rising, P).condition.is_met_by(untrusted)
    with pytest.raises(IllegalTransition, match="claim of a untrusted instance"):
        write(untrusted, rising, P)


def test_same_repo_requires_the_repository_in_the_record() -> None:
    record = in_state(State.IDLE, repository="octo/one")
    condition = write(record, claim(repository="octo/one", reuse=Reuse.SAME_REPO), P).condition
    assert condition.is_met_by(record)
    assert not condition.is_met_by(replace(record, repository="octo/two"))
    assert not condition.is_met_by(replace(record, repository=""))


@pytest.mark.parametrize(("has", "wants"), [("octo/one", "octo/two"), ("", "octo/two"), ("octo/one", ""), ("", "")])
def test_same_repo_rejects_another_repository(has: str, wants: str) -> None:
    with pytest.raises(IllegalTransition, match="claim of an instance of"):
        write(in_state(State.IDLE, repository=has), claim(repository=wants, reuse=Reuse.SAME_REPO), P)


def test_reuse_never_rejects_every_claim() -> None:
    with pytest.raises(IllegalTransition, match="reuse never"):
        write(in_state(State.IDLE), claim(reuse=Reuse.NEVER), P)


@pytest.mark.parametrize("reuse", [Reuse.ALWAYS, Reuse.SAME_TRUST])
@pytest.mark.parametrize(
    ("has", "wants", "kept"),
    [("octo/one", "octo/one", "octo/one"), ("octo/one", "octo/two", ""), ("", "octo/two", ""), ("octo/one", "", "")],
)
def test_other_policies_keep_the_repository_only_if_it_is_the_only_one(
    reuse: Reuse, has: str, wants: str, kept: str
) -> None:
    record = in_state(State.IDLE, repository=has)
    change = write(record, claim(repository=wants, reuse=reuse), P)
    assert change.applied_to(record).repository == kept
    # Kept only if the record proves it.
    assert change.condition.is_met_by(replace(record, repository="octo/other")) is not bool(kept)


def test_only_the_owner_commits_an_instance() -> None:
    record = in_state(State.CLAIMED)
    condition = write(record, replace_owner(evidence(record)[Commit], "p-1/sibling"), P).condition
    assert not condition.is_met_by(record)
    assert write(record, evidence(record)[Commit], P).condition.is_met_by(record)


def replace_owner(event: Event, owner: str | None) -> Event:
    assert isinstance(event, Commit | Release | End)
    return replace(event, claim=owner)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (State.CLAIMED, Release(release_time_s=9.0, credential=REMOVAL, claim="p-1/sibling")),
        (State.CREATED, End(reason=RetireReason.RELEASED, claim="p-1/sibling")),
        (State.CLAIMED, End(reason=RetireReason.TIMED_OUT, claim="p-1/sibling")),
    ],
    ids=["release", "end-created", "end-claimed"],
)
def test_rollback_changes_only_its_own_assignment(state: State, event: Event) -> None:
    assert not write(in_state(state), event, P).condition.is_met_by(in_state(state))
    own = replace_owner(event, CLAIM)
    assert write(in_state(state), own, P).condition.is_met_by(in_state(state))
    with pytest.raises(IllegalTransition):
        write(in_state(state), replace_owner(event, None), P)


def test_only_the_owner_ends_a_claim_by_timeout() -> None:
    with pytest.raises(IllegalTransition):
        write(in_state(State.CLAIMED), End(reason=RetireReason.TIMED_OUT), R)


@pytest.mark.parametrize(("state", "by"), ENDS)
def test_expiry_requires_threshold_plus_margin_to_be_past(state: State, by: Actor) -> None:
    record = in_state(state)
    condition = write(record, End(reason=RetireReason.EXPIRED, margin_s=60.0), by).condition
    assert condition.is_met_by(replace(record, threshold=at(-60)))
    assert not condition.is_met_by(replace(record, threshold=at(-59.999)))


@pytest.mark.parametrize(("state", "by"), ENDS)
def test_end_for_another_reason_ignores_the_threshold(state: State, by: Actor) -> None:
    record = in_state(state)
    condition = write(record, End(reason=RetireReason.GONE), by).condition
    assert condition.is_met_by(record)
    assert condition.is_met_by(replace(record, threshold=at(-1_000)))
    assert not condition.is_met_by(replace(record, epoch=record.epoch + 1))


def test_confirmation_ignores_the_threshold() -> None:
    record = in_state(State.TERMINATING)
    assert write(record, Confirm(keep_records_s=9.0), R).condition.is_met_by(record)


@pytest.mark.parametrize("state", [each for each in State if each is not State.IDLE])
def test_condition_for_no_record_rejects_records(state: State) -> None:
    condition = WriteCondition(state=None, epoch=1)
    assert condition.is_met_by(None)
    assert not condition.is_met_by(in_state(state))
    assert not WriteCondition(state=state, epoch=1).is_met_by(None)


# Evidence (S4, S6) ------------------------------------------------------------------------------------------------

REPORTS: list[Report | None] = [None, report(None)] + [
    report(signal, epoch) for signal, epoch in itertools.product(Signal, (1, 2, 3))
]


def _accepts(record: Instance, event: Event, by: Actor) -> bool:
    try:
        write(record, event, by)
    except IllegalTransition:
        return False
    return True


def _signals(accepted: list[Report | None]) -> set[tuple[int, Signal | None]]:
    return {(each.epoch, each.signal) if each else (0, None) for each in accepted}


def test_commit_requires_a_registration_of_its_epoch() -> None:
    record = in_state(State.CLAIMED)
    accepted = [r for r in REPORTS if _accepts(record, Commit(claim=CLAIM, report=r, max_runtime_s=9.0), P)]
    later = {Signal.UD_REMOVE_REG_OK, Signal.UD_REMOVE_REG_REMOVE_RUN_OK}
    assert _signals(accepted) == {(2, signal) for signal in {Signal.UD_REG_OK} | later}


def test_pooling_requires_a_reset_of_its_epoch() -> None:
    record = in_state(State.RELEASING)
    accepted = [r for r in REPORTS if _accepts(record, ReturnToPool(report=r, idle_time_s=9.0), L)]
    assert _signals(accepted) == {(2, Signal.UD_REMOVE_REG_REMOVE_RUN_OK)}


@pytest.mark.parametrize(("state", "by"), [(State.CLAIMED, P), (State.CLAIMED, R), (State.RUNNING, R)])
def test_end_by_failure_requires_a_failed_registration_of_its_epoch(state: State, by: Actor) -> None:
    record = in_state(state)
    accepted = [r for r in REPORTS if _accepts(record, End(reason=RetireReason.FAILED, report=r, claim=CLAIM), by)]
    assert _signals(accepted) == {(2, Signal.UD_FAILED), (2, Signal.UD_REG_FAILED)}


def test_end_by_failure_while_releasing_requires_a_failed_removal_of_its_epoch() -> None:
    record = in_state(State.RELEASING)
    accepted = [r for r in REPORTS if _accepts(record, End(reason=RetireReason.FAILED, report=r), L)]
    assert _signals(accepted) == {(2, Signal.UD_REMOVE_REG_FAILED), (2, Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED)}


def test_retirement_while_releasing_requires_the_ok_of_its_epoch() -> None:
    record = in_state(State.RELEASING, retire_reason=RetireReason.SPOT_NOTICE)
    accepted = [r for r in REPORTS if _accepts(record, End(reason=RetireReason.SPOT_NOTICE, report=r), L)]
    assert _signals(accepted) == {(2, Signal.UD_REMOVE_REG_REMOVE_RUN_OK)}


@pytest.mark.parametrize("reason", sorted(set(RetireReason) - RETIREMENTS))
def test_retire_event_accepts_only_retirement_reasons(reason: RetireReason) -> None:
    with pytest.raises(IllegalTransition, match=f"retirement because {reason}"):
        write(in_state(State.IDLE), Retire(reason=reason), R)


def test_extension_requires_a_running_job() -> None:
    with pytest.raises(IllegalTransition, match="without a running job"):
        write(in_state(State.RELEASING), Extend(report=report(busy=False), extension_s=9.0, margin_s=0.0), L)


def test_retired_instance_is_not_pooled() -> None:
    record = in_state(State.RELEASING)
    event = evidence(record)[ReturnToPool]
    with pytest.raises(IllegalTransition, match="retired"):
        write(replace(record, retire_reason=RetireReason.SPOT_NOTICE), event, L)
    assert not write(record, event, L).condition.is_met_by(replace(record, retire_reason=RetireReason.SPOT_NOTICE))


def test_second_claim_of_the_same_message_is_rejected() -> None:
    """Two workers received the same message: the first claim makes the condition of the second false."""
    record = instance(state=State.IDLE)
    first = write(record, claim(), P).applied_to(record)
    assert not write(record, claim(claim="p-3/c"), P).condition.is_met_by(first)


@pytest.mark.parametrize("kind", [Release, Extend, ReturnToPool])
def test_write_that_sets_the_threshold_is_rejected_if_the_quarantine_was_changed(kind: type) -> None:
    record = in_state(State.RUNNING if kind is Release else State.RELEASING)
    condition = write(record, evidence(record)[kind], L).condition
    assert condition.is_met_by(record)
    assert not condition.is_met_by(replace(record, quarantined_until=at(60)))
    known = replace(record, quarantined_until=at(60))
    condition = write(known, evidence(known)[kind], L).condition
    assert condition.is_met_by(known)
    assert not condition.is_met_by(replace(known, quarantined_until=at(120)))
    assert not condition.is_met_by(replace(known, quarantined_until=at(30)))


@pytest.mark.parametrize(
    ("state", "reason", "spared"),
    [
        (State.RELEASING, RetireReason.TOO_OLD, True),
        (State.RELEASING, RetireReason.FAILED, True),
        (State.IDLE, RetireReason.TOO_OLD, True),
        (State.RUNNING, RetireReason.FAILED, False),
        (State.RELEASING, RetireReason.GONE, False),
    ],
)
def test_planned_end_is_rejected_after_a_later_quarantine(state: State, reason: RetireReason, *, spared: bool) -> None:
    record = in_state(state)
    condition = write(record, end(record, reason), R).condition
    assert condition.is_met_by(record)
    assert condition.is_met_by(replace(record, quarantined_until=at(60))) is not spared


def test_the_end_of_a_runner_does_not_overwrite_its_job() -> None:
    """An operator decides, a job is recorded, and the history would name the set instead of the run."""
    listening = in_set(State.RUNNING)
    event = End(reason=RetireReason.TERMINATED_BY_OPERATOR)
    change = advance(listening, event, by=Actor.OPERATOR, now=NOW, why="a test")
    assert change.condition.is_met_by(listening)
    assert not change.condition.is_met_by(replace(listening, holder=set_holder(run_id="77")))
