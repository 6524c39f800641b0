"""Whatever happens, in whatever order: the invariants of the record hold (lifecycle, section 6)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from remuda.domain.errors import IllegalTransition
from remuda.domain.instance import ABSORBING, ASSIGNED, Instance, State
from remuda.domain.pool_config import runner_name
from remuda.domain.resources import Reuse, Tier
from remuda.domain.signals import Report, Signal
from remuda.domain.stale_registrations import stale_registration_reason
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
from tests.support.builders import REMOVAL, in_state
from tests.support.records import NOW, assignment, instance_id

#: A story is a list of these. The report speaks of an epoch near the record's, true or not.
SIGNALS = st.sampled_from([None, *Signal])


@dataclass(frozen=True)
class Move:
    kind: type
    by: Actor
    reason: RetireReason
    signal: Signal | None
    epoch_off: int
    busy: bool
    owner: str | None
    tier: Tier
    reuse: Reuse
    repository: str
    seconds: float
    #: Seen some writes ago: a worker that slept meanwhile.
    lag: int


KINDS = (Claim, Commit, Release, Extend, RenewCredential, ReturnToPool, Announce, Renew, Retire, End, Confirm)
#: What leads on is drawn more often, or most stories would stay where they began.
FORWARD = (Commit, Release, ReturnToPool, Claim)

MOVES = st.builds(
    Move,
    kind=st.sampled_from(KINDS + FORWARD * 6),
    by=st.sampled_from(Actor),
    reason=st.sampled_from(RetireReason),
    signal=st.sampled_from([Signal.UD_REG_OK, Signal.UD_REMOVE_REG_REMOVE_RUN_OK]) | SIGNALS,
    epoch_off=st.sampled_from([0, 0, 0, -1, 1]),
    busy=st.booleans(),
    owner=st.sampled_from([None, "own", "own", "p-9/other"]),
    tier=st.sampled_from([Tier.TRUSTED, Tier.TRUSTED, Tier.UNTRUSTED]),
    reuse=st.sampled_from(list(Reuse)),
    repository=st.sampled_from(["", "octo/one", "octo/two"]),
    seconds=st.sampled_from([0.0, 0.0, 1.0, 10.0, 400.0]),
    lag=st.sampled_from([0, 0, 0, 1, 2]),
)


def event_of(move: Move, record: Instance, now: datetime) -> Event:
    owner = record.owner if move.owner == "own" else move.owner
    report = Report(
        instance_id=record.instance_id, epoch=record.epoch + move.epoch_off, signal=move.signal, busy=move.busy
    )
    events: dict[type, Event] = {
        Claim: Claim(
            run_id=f"run-{record.epoch + 1}",
            owner=f"p-{record.epoch + 1}/a",
            provision_id=f"p-{record.epoch + 1}",
            scope="octo/repo",
            tier=move.tier,
            reuse=move.reuse,
            repository=move.repository,
            threshold=now + timedelta(seconds=300),
            assignment=assignment(record.epoch + 1),
            margin_s=1.0,
        ),
        Commit: Commit(owner=owner or "", report=report, max_runtime_s=600.0),
        Release: Release(release_time_s=60.0, credential=REMOVAL, owner=owner),
        Extend: Extend(report=report, extension_s=60.0, margin_s=0.0),
        RenewCredential: RenewCredential(credential=REMOVAL),
        ReturnToPool: ReturnToPool(report=report, idle_time_s=60.0),
        Announce: Announce(),
        Renew: Renew(until=now + timedelta(seconds=60)),
        Retire: Retire(reason=move.reason),
        End: End(reason=move.reason, report=report, owner=owner),
        Confirm: Confirm(keep_records_s=60.0),
    }
    return events[move.kind]


def tell(moves: list[Move]) -> list[tuple[Instance, Change | None]]:
    """Every record of a story, with the write that led to it."""
    born = create(in_state(State.CREATED, repository="octo/one"), by=Actor.PROVISION, why="launched")
    story: list[tuple[Instance, Change | None]] = [(born.applied_to(None), born)]
    now = NOW
    for move in moves:
        now += timedelta(seconds=move.seconds)
        current = story[-1][0]
        seen = story[max(0, len(story) - 1 - move.lag)][0]
        try:
            change = advance(seen, event_of(move, seen, now), by=move.by, now=now, why="a test")
        except IllegalTransition:
            continue
        if change.condition.is_met_by(current):
            story.append((change.applied_to(current), change))
    return story


STORIES = st.lists(MOVES, max_size=60)


@given(STORIES)
def test_epochs_never_fall_and_rise_by_one_at_a_claim_only(moves: list[Move]) -> None:
    story = tell(moves)
    for (before, _), (after, change) in itertools.pairwise(story):
        assert change is not None
        assert after.epoch == before.epoch + (change.entry.transition == "claim")


@given(STORIES)
def test_a_state_that_was_left_never_recurs_in_its_epoch(moves: list[Move]) -> None:
    places = [(record.epoch, record.state) for record, _ in tell(moves)]
    visits = [place for place, earlier in zip(places, [None, *places], strict=False) if place != earlier]
    assert len(visits) == len(set(visits))


@given(STORIES)
@settings(max_examples=200)
def test_each_state_holds_what_it_should_and_nothing_else(moves: list[Move]) -> None:
    for record, _ in tell(moves):
        if record.state in ASSIGNED:
            assert record.run_id
            assert record.owner
            assert record.assignment is not None
            assert record.assignment.runner_name.startswith(f"remuda-test-{record.epoch}-")
        else:
            assert record.run_id == ""
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


@given(STORIES)
def test_what_absorbs_keeps(moves: list[Move]) -> None:
    states = [record.state for record, _ in tell(moves)]
    for before, after in itertools.pairwise(states):
        if before in ABSORBING:
            assert (before, after) == (State.TERMINATING, State.TERMINATED)


@given(STORIES)
def test_a_tier_never_rises_and_falls_only_where_the_policy_is_always(moves: list[Move]) -> None:
    """S11, whatever policies come one after the other."""
    story = tell(moves)
    for (before, _), (after, change) in itertools.pairwise(story):
        if before.tier is Tier.UNTRUSTED:
            assert after.tier is Tier.UNTRUSTED
        if after.tier is not before.tier:
            assert change is not None
            assert change.entry.transition == "claim"
            assert len(change.condition.tiers) == 2


@given(STORIES)
def test_the_only_repository_that_a_record_names_is_the_only_one(moves: list[Move]) -> None:
    """A claim can keep it or lose it: none can bring one in."""
    for (before, _), (after, _) in itertools.pairwise(tell([*moves])):
        assert after.repository in {before.repository, ""}


@given(STORIES)
def test_uses_count_the_ways_back_to_the_pool(moves: list[Move]) -> None:
    story = tell(moves)
    pooled = sum(change is not None and change.entry.transition == "pool" for _, change in story)
    assert story[-1][0].uses == pooled


@given(STORIES)
def test_one_owner_at_a_time(moves: list[Move]) -> None:
    """S1: within an epoch the owner never changes."""
    owners: dict[int, set[str]] = {}
    for record, _ in tell(moves):
        owners.setdefault(record.epoch, set()).add(record.owner)
    assert all(len(each) == 1 for each in owners.values())


@given(STORIES)
def test_a_released_run_is_remembered(moves: list[Move]) -> None:
    story = tell(moves)
    for (before, _), (after, _) in itertools.pairwise(story):
        if before.run_id and not after.run_id:
            assert after.last_run_id == before.run_id


@given(STORIES, st.integers(1, 6))
@settings(max_examples=200)
def test_once_a_ghost_always_a_ghost(moves: list[Move], epoch: int) -> None:
    """Deleting a registration is safe after a look however long ago."""
    name = runner_name("test", epoch, instance_id(1))
    known = [record for record, _ in tell(moves) if record.epoch >= epoch]
    verdicts = [
        stale_registration_reason(name, record, pool="test", unrecorded_since=None, now=NOW, grace_s=900.0) is not None
        for record in known
    ]
    assert verdicts == sorted(verdicts)


def test_stories_get_far() -> None:
    """A check of the checks: such stories do reach a second and a third epoch, and the end."""

    def move(kind: type, by: Actor, signal: Signal | None = None) -> Move:
        return Move(
            kind=kind, by=by, reason=RetireReason.GONE, signal=signal, epoch_off=0, busy=False, owner="own",
            tier=Tier.TRUSTED, reuse=Reuse.SAME_TRUST, repository="", seconds=1.0, lag=0,
        )  # fmt: skip

    use = [
        move(Commit, Actor.PROVISION, Signal.UD_REG_OK),
        move(Release, Actor.RELEASE),
        move(ReturnToPool, Actor.RELEASE, Signal.UD_REMOVE_REG_REMOVE_RUN_OK),
        move(Claim, Actor.PROVISION),
    ]
    stale = replace(use[2], lag=2)
    story = tell([*use, stale, *use, move(End, Actor.REFRESH), move(Confirm, Actor.REFRESH)])
    assert [record.epoch for record, _ in story] == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert story[-1][0].state is State.TERMINATED
