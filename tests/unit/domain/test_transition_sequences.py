"""Invariants of the record for random sequences of events (lifecycle, section 6)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from remuda.domain.errors import IllegalTransition
from remuda.domain.instance import ABSORBING, ASSIGNED, Instance, State
from remuda.domain.pool_config import runner_name, stale_registration_reason
from remuda.domain.resources import Reuse, Tier
from remuda.domain.signals import Report, Signal
from remuda.domain.transitions import (
    Actor,
    Announce,
    Change,
    Claim,
    Commit,
    Confirm,
    End,
    Event,
    Extend,
    Release,
    Renew,
    RenewCredential,
    Retire,
    RetireReason,
    ReturnToPool,
    advance,
    create,
)
from tests.support.mutations import fuzzed
from tests.support.records import NOW, REMOVAL, assignment, in_state, instance_id, run_holder

SIGNALS = st.sampled_from([None, *Signal])


@dataclass(frozen=True)
class RandomEvent:
    """One event of a sequence. Its report may belong to another epoch than the record's."""

    kind: type
    by: Actor
    reason: RetireReason
    signal: Signal | None
    epoch_off: int
    busy: bool
    claim: str | None
    tier: Tier
    reuse: Reuse
    repository: str
    seconds: float
    #: Number of writes since the record was read, as by a paused process.
    lag: int


KINDS = (Claim, Commit, Release, Extend, RenewCredential, ReturnToPool, Announce, Renew, Retire, End, Confirm)
#: Events that lead to the next state are drawn more often, so that sequences get further.
FORWARD = (Commit, Release, ReturnToPool, Claim)

EVENTS = st.builds(
    RandomEvent,
    kind=st.sampled_from(KINDS + FORWARD * 6),
    by=st.sampled_from(Actor),
    reason=st.sampled_from(RetireReason),
    signal=st.sampled_from([Signal.UD_REG_OK, Signal.UD_REMOVE_REG_REMOVE_RUN_OK]) | SIGNALS,
    epoch_off=st.sampled_from([0, 0, 0, -1, 1]),
    busy=st.booleans(),
    claim=st.sampled_from([None, "own", "own", "p-9/other"]),
    tier=st.sampled_from([Tier.TRUSTED, Tier.TRUSTED, Tier.UNTRUSTED]),
    reuse=st.sampled_from(list(Reuse)),
    repository=st.sampled_from(["", "octo/one", "octo/two"]),
    seconds=st.sampled_from([0.0, 0.0, 1.0, 10.0, 400.0]),
    lag=st.sampled_from([0, 0, 0, 1, 2]),
)


def event_of(move: RandomEvent, record: Instance, now: datetime) -> Event:
    claim = record.claim if move.claim == "own" else move.claim
    report = Report(
        instance_id=record.instance_id, epoch=record.epoch + move.epoch_off, signal=move.signal, busy=move.busy
    )
    events: dict[type, Event] = {
        Claim: Claim(
            holder=run_holder(f"run-{record.epoch + 1}", f"p-{record.epoch + 1}"),
            claim=f"p-{record.epoch + 1}/a",
            scope="octo/repo",
            tier=move.tier,
            reuse=move.reuse,
            repository=move.repository,
            threshold=now + timedelta(seconds=300),
            assignment=assignment(record.epoch + 1),
            margin_s=1.0,
        ),
        Commit: Commit(claim=claim or "", report=report, max_runtime_s=600.0),
        Release: Release(release_time_s=60.0, credential=REMOVAL, claim=claim),
        Extend: Extend(report=report, extension_s=60.0, margin_s=0.0),
        RenewCredential: RenewCredential(credential=REMOVAL),
        ReturnToPool: ReturnToPool(report=report, idle_time_s=60.0),
        Announce: Announce(),
        Renew: Renew(until=now + timedelta(seconds=60)),
        Retire: Retire(reason=move.reason),
        End: End(reason=move.reason, report=report, claim=claim),
        Confirm: Confirm(keep_records_s=60.0),
    }
    return events[move.kind]


def apply_events(events: list[RandomEvent]) -> list[tuple[Instance, Change | None]]:
    """Apply the events. Return each record with the write that created it."""
    created = create(in_state(State.CREATED, repository="octo/one"), by=Actor.PROVISION, why="launched")
    sequence: list[tuple[Instance, Change | None]] = [(created.applied_to(None), created)]
    now = NOW
    for move in events:
        now += timedelta(seconds=move.seconds)
        current = sequence[-1][0]
        seen = sequence[max(0, len(sequence) - 1 - move.lag)][0]
        try:
            change = advance(seen, event_of(move, seen, now), by=move.by, now=now, why="a test")
        except IllegalTransition:
            continue
        if change.condition.is_met_by(current):
            sequence.append((change.applied_to(current), change))
    return sequence


SEQUENCES = st.lists(EVENTS, max_size=60)


@given(SEQUENCES)
def test_epoch_rises_by_one_per_claim_and_never_falls(events: list[RandomEvent]) -> None:
    sequence = apply_events(events)
    for (before, _), (after, change) in itertools.pairwise(sequence):
        assert change is not None
        assert after.epoch == before.epoch + (change.entry.transition == "claim")


@given(SEQUENCES)
def test_state_never_recurs_in_its_epoch(events: list[RandomEvent]) -> None:
    places = [(record.epoch, record.state) for record, _ in apply_events(events)]
    visits = [place for place, earlier in zip(places, [None, *places], strict=False) if place != earlier]
    assert len(visits) == len(set(visits))


@given(SEQUENCES)
@fuzzed(80)
def test_fields_per_state(events: list[RandomEvent]) -> None:
    for record, _ in apply_events(events):
        if record.state in ASSIGNED:
            assert record.holder is not None
            assert record.claim
            assert record.assignment is not None
            assert record.assignment.runner_name.startswith(f"remuda-test-{record.epoch}-")
        else:
            assert record.holder is None
        credential = record.assignment.credential if record.assignment else None
        if record.state is State.RUNNING:
            assert credential is None
        if record.state is State.RELEASING:
            assert credential == REMOVAL
            assert record.run_deadline is not None
        if record.state is State.IDLE or record.state in ABSORBING:
            assert record.assignment is None
        if record.state is not State.IDLE:
            assert record.announced_at is None


@given(SEQUENCES)
def test_absorbing_states_are_never_left(events: list[RandomEvent]) -> None:
    states = [record.state for record, _ in apply_events(events)]
    for before, after in itertools.pairwise(states):
        if before in ABSORBING:
            assert (before, after) == (State.TERMINATING, State.TERMINATED)


@given(SEQUENCES)
def test_tier_never_rises_and_falls_only_with_reuse_always(events: list[RandomEvent]) -> None:
    """S11, for any sequence of policies."""
    sequence = apply_events(events)
    for (before, _), (after, change) in itertools.pairwise(sequence):
        if before.tier is Tier.UNTRUSTED:
            assert after.tier is Tier.UNTRUSTED
        if after.tier is not before.tier:
            assert change is not None
            assert change.entry.transition == "claim"
            assert len(change.condition.tiers) == 2


@given(SEQUENCES)
def test_repository_of_a_record_is_the_only_one_it_served(events: list[RandomEvent]) -> None:
    """A claim may keep or clear the repository, but never set another."""
    for (before, _), (after, _) in itertools.pairwise(apply_events([*events])):
        assert after.repository in {before.repository, ""}


@given(SEQUENCES)
def test_uses_count_the_returns_to_the_pool(events: list[RandomEvent]) -> None:
    sequence = apply_events(events)
    pooled = sum(change is not None and change.entry.transition == "pool" for _, change in sequence)
    assert sequence[-1][0].uses == pooled


@given(SEQUENCES)
def test_instance_has_one_claim_per_epoch(events: list[RandomEvent]) -> None:
    """S1: within an epoch the claim never changes."""
    claims: dict[int, set[str]] = {}
    for record, _ in apply_events(events):
        claims.setdefault(record.epoch, set()).add(record.claim)
    assert all(len(each) == 1 for each in claims.values())


@given(SEQUENCES)
def test_last_holder_is_kept_after_a_release(events: list[RandomEvent]) -> None:
    sequence = apply_events(events)
    for (before, _), (after, _) in itertools.pairwise(sequence):
        if before.holder is not None and after.holder is None:
            assert after.last_holder == before.holder


@given(SEQUENCES, st.integers(1, 6))
@fuzzed(80)
def test_stale_registration_stays_stale(events: list[RandomEvent], epoch: int) -> None:
    """Deleting a stale registration is safe however old the read record is."""
    name = runner_name("test", epoch, instance_id(1))
    known = [record for record, _ in apply_events(events) if record.epoch >= epoch]
    verdicts = [
        stale_registration_reason(name, record, pool="test", unrecorded_since=None, now=NOW, grace_s=900.0) is not None
        for record in known
    ]
    assert verdicts == sorted(verdicts)


def test_generated_sequences_reach_later_epochs_and_the_end() -> None:
    """Checks the generator itself."""

    def move(kind: type, by: Actor, signal: Signal | None = None) -> RandomEvent:
        return RandomEvent(
            kind=kind, by=by, reason=RetireReason.GONE, signal=signal, epoch_off=0, busy=False, claim="own",
            tier=Tier.TRUSTED, reuse=Reuse.SAME_TRUST, repository="", seconds=1.0, lag=0,
        )  # fmt: skip

    use = [
        move(Commit, Actor.PROVISION, Signal.UD_REG_OK),
        move(Release, Actor.RELEASE),
        move(ReturnToPool, Actor.RELEASE, Signal.UD_REMOVE_REG_REMOVE_RUN_OK),
        move(Claim, Actor.PROVISION),
    ]
    stale = replace(use[2], lag=2)
    sequence = apply_events([*use, stale, *use, move(End, Actor.REFRESH), move(Confirm, Actor.REFRESH)])
    assert [record.epoch for record, _ in sequence] == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert sequence[-1][0].state is State.TERMINATED
