"""Contract of the instance store (`remuda.ports.store`), for every adapter."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from remuda.domain import provision as provisions
from remuda.domain.errors import Conflict, Unreadable, UserError
from remuda.domain.instance import LIVE, Instance, RetireReason, State
from remuda.domain.pool_config import RECORD_VERSION
from remuda.domain.provision import (
    AcquiredRunner,
    LaunchAttempt,
    ProvisionOutcome,
    ProvisionStatus,
    RejectedCandidate,
    RejectionKind,
    RunnerSource,
)
from remuda.domain.resources import Tier
from remuda.domain.signals import MAX_DETAIL, Report, Signal
from remuda.domain.sweep_record import SweepRecord
from remuda.domain.transitions import WriteCondition
from remuda.ports.store import HISTORY_LIMIT, InstanceStore
from tests.conformance.conftest import PARSING_STORES, Stores
from tests.support.records import (
    LONG_S,
    NOW,
    SHORT_S,
    assignment,
    at,
    birth,
    change,
    claim_change,
    instance,
    instance_id,
    pool_config,
    provision,
    run_holder,
    set_holder,
    sweep_record,
)

ID = instance_id(1)
BEAT: dict[str, Any] = {"at": NOW, "busy": False, "listening": True, "notice": "", "version": "1"}
MS = timedelta(milliseconds=1)


async def conflict(awaitable: Any) -> Any:
    """The stored record in the `Conflict` of a write."""
    with pytest.raises(Conflict) as refused:
        await awaitable
    return refused.value.current


# Changes ----------------------------------------------------------------------------------------------------------


async def test_prepare_is_idempotent_and_returns_its_changes(stores: Stores) -> None:
    store = stores.open()
    assert await store.prepare() != []
    assert await store.prepare() == []
    await store.close()
    await store.close()


async def test_record_is_read_as_written(store: InstanceStore, other: InstanceStore) -> None:
    full = instance(
        holder=set_holder("large", "1234"),
        last_holder=run_holder("1233", "p-0", attempt=2),
        claim="p-1/a",
        scope="octo/repo",
        tier=Tier.UNTRUSTED,
        repository="octo/repo",
        uses=3,
        run_deadline=at(9),
        retire_reason=RetireReason.SPOT_NOTICE,
        retire_detail="Ünïcode",
        quarantined_until=at(8),
        announced_at=at(5),
        assignment=assignment(),
        forget_at=at(7),
    )
    assert await store.apply(birth(full)) == full
    assert await store.get(ID) == full
    assert await other.get(ID) == full
    assert await store.get(instance_id(2)) is None


async def test_write_returns_the_stored_record(store: InstanceStore) -> None:
    written = await store.apply(birth(instance(threshold=NOW + timedelta(microseconds=1_999))))
    assert written.threshold == NOW + MS
    assert await store.get(ID) == written


async def test_create_conflicts_with_an_existing_record(store: InstanceStore) -> None:
    first = await store.apply(birth(instance(claim="first")))
    assert await conflict(store.apply(birth(instance(claim="second")))) == first
    assert await store.get(ID) == first
    assert len(await store.history(ID)) == 1


async def test_change_of_a_missing_record_conflicts(store: InstanceStore) -> None:
    assert await conflict(store.apply(change(instance(), uses=1))) is None
    assert await store.get(ID) is None
    assert not await store.history(ID)


OWNED = instance(claim="p-1/a", threshold=at(10), tier=Tier.TRUSTED, repository="octo/one")
RETIRED = instance(retire_reason=RetireReason.SPOT_NOTICE)
QUARANTINED = instance(quarantined_until=at(10))


@pytest.mark.parametrize(
    ("record", "guard", "admitted"),
    [
        (OWNED, {}, True),
        (OWNED, {"state": State.RUNNING}, False),
        (OWNED, {"epoch": 2}, False),
        (OWNED, {"epoch": 0}, False),
        (OWNED, {"claim": "p-1/a"}, True),
        (OWNED, {"claim": "p-1/b"}, False),
        (OWNED, {"claim": ""}, False),
        (OWNED, {"threshold_after": at(10) - MS}, True),
        (OWNED, {"threshold_after": at(10)}, False),
        (OWNED, {"threshold_after": at(10) - timedelta(microseconds=1)}, True),
        (OWNED, {"threshold_at_or_before": at(10)}, True),
        (OWNED, {"threshold_at_or_before": at(10) + timedelta(microseconds=1)}, True),
        (OWNED, {"threshold_at_or_before": at(10) - MS}, False),
        (OWNED, {"threshold_at_or_before": at(10) - timedelta(microseconds=1)}, False),
        (OWNED, {"not_retired": True}, True),
        (OWNED, {"tiers": (Tier.TRUSTED,)}, True),
        (OWNED, {"tiers": (Tier.UNTRUSTED,)}, False),
        (OWNED, {"tiers": (Tier.TRUSTED, Tier.UNTRUSTED)}, True),
        (OWNED, {"repository": "octo/one"}, True),
        (OWNED, {"repository": "octo/two"}, False),
        (OWNED, {"repository": ""}, False),
        (OWNED, {"claim": "p-1/a", "threshold_after": at(9), "not_retired": True, "tiers": (Tier.TRUSTED,)}, True),
        (OWNED, {"claim": "p-1/a", "threshold_after": at(11), "not_retired": True, "tiers": (Tier.TRUSTED,)}, False),
        (RETIRED, {"not_retired": True}, False),
        (RETIRED, {}, True),
        (OWNED, {"max_quarantined_until": at(0)}, True),
        (QUARANTINED, {"max_quarantined_until": at(0)}, False),
        (QUARANTINED, {"max_quarantined_until": at(10) - MS}, False),
        (QUARANTINED, {"max_quarantined_until": at(10)}, True),
    ],
)
async def test_write_conditions(
    store: InstanceStore,
    record: Instance,
    guard: dict[str, Any],
    admitted: bool,  # noqa: FBT001
) -> None:
    await store.apply(birth(record))
    wanted = change(record, WriteCondition(**{"state": State.IDLE, "epoch": 1, **guard}), uses=7)
    if admitted:
        assert await store.apply(wanted) == replace(record, uses=7)
    else:
        assert await conflict(store.apply(wanted)) == record
        assert await store.get(ID) == record
        assert len(await store.history(ID)) == 1


async def test_change_writes_only_its_fields(store: InstanceStore, other: InstanceStore) -> None:
    seen = await store.apply(birth(instance()))
    await other.apply(change(seen, retire_reason=RetireReason.SPOT_NOTICE))
    written = await store.apply(change(seen, threshold=at(900), assignment=assignment()))
    assert written == replace(seen, retire_reason=RetireReason.SPOT_NOTICE, threshold=at(900), assignment=assignment())
    cleared = await store.apply(change(seen, assignment=None))
    assert cleared == replace(written, assignment=None)
    assert await other.get(ID) == cleared


async def test_apply_all_reports_each_change_separately(store: InstanceStore, other: InstanceStore) -> None:
    records = [await store.apply(birth(instance(number, uses=1))) for number in range(1, 5)]
    moved = await other.apply(change(records[2], epoch=2))
    wanted = [*(change(record, uses=7) for record in records), change(instance(9), uses=7)]
    refused = await store.apply_all(wanted)
    assert [conflict is None for conflict in refused] == [True, True, False, True, False]
    assert [conflict.current for conflict in refused if isinstance(conflict, Conflict)] == [moved, None]
    uses = {
        name: record.uses
        for name, record in (await other.get_many([instance_id(number) for number in range(1, 10)])).items()
    }
    assert uses == {instance_id(1): 7, instance_id(2): 7, instance_id(3): 1, instance_id(4): 7}
    assert len(await store.history(instance_id(1))) == 2
    assert await store.apply_all([]) == []


async def test_concurrent_claims_have_one_winner(stores: Stores, store: InstanceStore) -> None:
    idle = await store.apply(birth(instance()))
    contenders = [stores.open() for _ in range(6)]
    outcomes = await asyncio.gather(
        *(each.apply(claim_change(idle, f"p-{number}/w")) for number, each in enumerate(contenders)),
        return_exceptions=True,
    )
    (winner,) = (outcome for outcome in outcomes if not isinstance(outcome, BaseException))
    assert winner.epoch == 2
    losers = [outcome for outcome in outcomes if isinstance(outcome, Conflict)]
    assert [loser.current for loser in losers] == [winner] * 5
    assert await store.get(ID) == winner


# History ----------------------------------------------------------------------------------------------------------


async def test_histories_of_several_instances(store: InstanceStore, other: InstanceStore) -> None:
    for number in (1, 2, 3):
        record = await store.apply(birth(instance(number)))
        for step in range(number):
            await store.apply(change(record, transition=f"step-{step}", uses=step))
    # History is written asynchronously; reading one history flushes it.
    for number in (1, 2, 3):
        await store.history(instance_id(number))
    found = await other.histories([instance_id(number) for number in (1, 3, 9)])
    assert {key: [entry.transition for entry in entries] for key, entries in found.items()} == {
        instance_id(1): ["birth", "step-0"],
        instance_id(3): ["birth", "step-0", "step-1", "step-2"],
    }
    assert not await other.histories([])


async def test_history_is_ordered_and_bounded(store: InstanceStore) -> None:
    record = await store.apply(birth(instance()))
    for number in range(HISTORY_LIMIT + 4):
        await store.apply(change(record, transition=f"step-{number}", uses=number))
    entries = await store.history(ID)
    assert [entry.transition for entry in entries] == [f"step-{number}" for number in range(4, HISTORY_LIMIT + 4)]
    assert entries[0] == replace(change(record).entry, transition="step-4")
    assert not await store.history(instance_id(2))


# Searches ---------------------------------------------------------------------------------------------------------


async def test_get_many_returns_existing_records(store: InstanceStore) -> None:
    records = [await store.apply(birth(instance(number))) for number in range(1, 131)]
    wanted = [record.instance_id for record in records]
    assert await store.get_many([*wanted, instance_id(999), wanted[0]]) == dict(zip(wanted, records, strict=True))
    assert await store.get_many([]) == {}


async def test_find_by_state_and_threshold(store: InstanceStore) -> None:
    for number, state in enumerate(State):
        await store.apply(birth(instance(number, state=state, threshold=at(number))))

    async def found(*states: State, **limits: Any) -> set[State]:
        return {record.state for record in await store.find(states, **limits)}

    assert await found(State.IDLE, State.RUNNING) == {State.IDLE, State.RUNNING}
    assert await found(*State) == set(State)
    assert await found() == set()
    assert await found(*State, threshold_before=at(1)) == {State.CREATED, State.CLAIMED}
    assert await found(*State, threshold_before=at(1) - MS) == {State.CREATED}
    assert await found(State.IDLE, threshold_before=at(1)) == set()
    assert await store.count_live() == len(LIVE)


async def test_find_returns_all_pages(store: InstanceStore) -> None:
    for number in range(300):
        await store.apply(birth(instance(number, assignment=assignment(number=number))))
    assert len(await store.find([State.IDLE])) == 300


async def test_searches_follow_changes(store: InstanceStore) -> None:
    record = await store.apply(birth(instance(provision_id="p-1")))
    moved = await store.apply(
        change(record, state=State.TERMINATED, last_holder=run_holder(provision_id="p-2"), threshold=at(1))
    )
    assert await store.find([State.IDLE]) == []
    assert await store.find([State.TERMINATED], threshold_before=at(1)) == [moved]
    assert await store.find_by_provision("p-1") == []
    assert await store.find_by_provision("p-2") == [moved]
    assert await store.find_by_provision("") == []
    assert await store.count_live() == 0


# Waiting ----------------------------------------------------------------------------------------------------------


async def test_wait_returns_immediately_if_the_record_differs(store: InstanceStore) -> None:
    record = await store.apply(birth(instance()))
    await store.beat(ID, **BEAT)
    report = await store.get_report(ID)
    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
        # A pending waiter must not hide the present record from later ones.
        in_vain = group.create_task(store.wait_for_control(ID, record, 2 * LONG_S))
        assert await store.wait_for_control(ID, record, SHORT_S) == record
        assert await store.wait_for_control(ID, None, 2 * LONG_S) == record
        assert await store.wait_for_control(ID, replace(record, uses=9), 2 * LONG_S) == record
        assert await store.wait_for_control(ID, None, 0) == record
        assert await store.wait_for_report(ID, None, 2 * LONG_S) == report
        assert await store.wait_for_report(ID, Report(instance_id=ID), 2 * LONG_S) == report
        in_vain.cancel()


async def test_wait_returns_the_present_record_at_its_timeout(store: InstanceStore) -> None:
    assert await store.wait_for_control(ID, None, SHORT_S) is None
    assert await store.wait_for_report(ID, None, SHORT_S) is None
    record = await store.apply(birth(instance()))
    assert await store.wait_for_control(ID, record, SHORT_S) == record
    assert await store.wait_for_control(ID, record, 0) == record


@pytest.mark.parametrize("writer", ["own", "other"])
async def test_wait_ends_on_a_change(store: InstanceStore, other: InstanceStore, writer: str) -> None:
    by = store if writer == "own" else other
    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
        seen = None
        for uses in range(3):
            waiting = group.create_task(store.wait_for_control(ID, seen, 2 * LONG_S))
            await store.wait_for_control(ID, seen, SHORT_S / 10)
            written = await by.apply(birth(instance()) if seen is None else change(seen, uses=uses))
            assert await waiting == written
            seen = written
        waiting_for_report = group.create_task(store.wait_for_report(ID, None, 2 * LONG_S))
        await store.wait_for_report(ID, None, SHORT_S / 10)
        await by.write_signal(ID, epoch=1, signal=Signal.UD_OK)
        assert await waiting_for_report == Report(instance_id=ID, epoch=1, signal=Signal.UD_OK)


async def test_each_waiter_gets_its_own_record(store: InstanceStore, other: InstanceStore) -> None:
    records = [await store.apply(birth(instance(number))) for number in range(20)]
    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
        waits = [
            group.create_task(store.wait_for_control(record.instance_id, record, 2 * LONG_S))
            for record in records
            for _ in range(3)
        ]
        for record in records[1:]:
            await other.apply(change(record, uses=1))
        assert [await wait for wait in waits[3:]] == [replace(each, uses=1) for each in records[1:] for _ in range(3)]
        assert not any(wait.done() for wait in waits[:3])
        waits[0].cancel()
        await store.apply(change(records[0], uses=2))
        assert [await wait for wait in waits[1:3]] == [replace(records[0], uses=2)] * 2


async def test_write_of_another_record_does_not_end_a_wait(store: InstanceStore, other: InstanceStore) -> None:
    record = await store.apply(birth(instance()))
    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
        waiting = group.create_task(store.wait_for_control(ID, record, 2 * LONG_S))
        witness = group.create_task(store.wait_for_report(ID, None, 2 * LONG_S))
        await other.apply(birth(instance(2)))
        await other.beat(ID, **BEAT)
        await witness
        assert not waiting.done()
        assert await conflict(other.apply(birth(instance()))) == record
        last = await other.apply(change(record, uses=1))
        assert await waiting == last


# Reports ----------------------------------------------------------------------------------------------------------


async def test_signal_rank_never_decreases(store: InstanceStore) -> None:
    await store.write_signal(ID, epoch=2, signal=Signal.UD_REG_OK, detail="first")
    await store.write_signal(ID, epoch=2, signal=Signal.UD_REG_OK, detail="again")
    report = await store.get_report(ID)
    assert report == Report(instance_id=ID, epoch=2, signal=Signal.UD_REG_OK, detail="again")
    assert await conflict(store.write_signal(ID, epoch=2, signal=Signal.UD_FAILED)) == report
    assert await conflict(store.write_signal(ID, epoch=1, signal=Signal.UD_REMOVE_REG_OK)) == report
    assert await store.get_report(ID) == report
    await store.write_signal(ID, epoch=2, signal=Signal.UD_REG_FAILED)
    await store.write_signal(ID, epoch=3, signal=Signal.UD_OK)
    assert await store.get_report(ID) == Report(instance_id=ID, epoch=3, signal=Signal.UD_OK)


async def test_long_details_are_truncated(store: InstanceStore) -> None:
    await store.write_signal(ID, epoch=1, signal=Signal.UD_FAILED, detail="x" * (MAX_DETAIL + 1))
    report = await store.get_report(ID)
    assert report is not None
    assert report.detail == "x" * MAX_DETAIL


async def test_heartbeat_counts_and_keeps_the_signal(store: InstanceStore, other: InstanceStore) -> None:
    await store.beat(ID, at=at(1), busy=True, listening=True, notice="rebalance", version="1")
    await other.write_signal(ID, epoch=1, signal=Signal.UD_REG_OK, detail="ready")
    expected = Report(
        instance_id=ID,
        epoch=1,
        signal=Signal.UD_REG_OK,
        detail="ready",
        beat=1,
        beat_at=at(1),
        busy=True,
        listening=True,
        notice="rebalance",
        version="1",
    )
    assert await store.get_report(ID) == expected
    await store.beat(ID, at=at(2), busy=False, listening=False, notice="", version="2")
    after = replace(expected, beat=2, beat_at=at(2), busy=False, listening=False, notice="", version="2")
    assert await other.get_report(ID) == after


async def test_concurrent_heartbeats_and_signals_are_all_stored(store: InstanceStore, other: InstanceStore) -> None:
    ladder = [Signal.UD_OK, Signal.UD_REG_OK, Signal.UD_REMOVE_REG_OK]
    async with asyncio.TaskGroup() as group:
        for _ in range(10):
            group.create_task(store.beat(ID, **BEAT))
            group.create_task(other.beat(ID, **BEAT))
        for signal in ladder:
            await other.write_signal(ID, epoch=1, signal=signal)
    report = await store.get_report(ID)
    assert report is not None
    assert (report.beat, report.signal) == (20, ladder[-1])


async def test_reports_by_id(store: InstanceStore) -> None:
    await store.beat(ID, **BEAT)
    assert await store.get_report(instance_id(2)) is None
    assert await store.get_reports([ID, instance_id(2)]) == {ID: await store.get_report(ID)}
    assert await store.get_reports([]) == {}


# Provisions -------------------------------------------------------------------------------------------------------


async def test_troubled_reports(store: InstanceStore, other: InstanceStore) -> None:
    """A report is troubled by a failed signal or a spot notice, until that is over."""
    quiet: dict[str, Any] = {"at": NOW, "busy": False, "listening": True, "version": "1"}
    for number in range(1, 5):
        await store.beat(instance_id(number), **quiet, notice="")
    assert not await other.troubled_reports()
    await store.write_signal(instance_id(1), epoch=1, signal=Signal.UD_REG_FAILED)
    await store.beat(instance_id(2), **quiet, notice="terminate")
    await store.write_signal(instance_id(3), epoch=1, signal=Signal.UD_REG_OK)
    # A heartbeat without a notice does not make a failed signal good.
    await store.beat(instance_id(1), **quiet, notice="")
    found = sorted(await other.troubled_reports(), key=lambda report: report.instance_id)
    assert found == [await store.get_report(instance_id(1)), await store.get_report(instance_id(2))]
    await store.write_signal(instance_id(1), epoch=2, signal=Signal.UD_REG_OK)
    await store.write_signal(instance_id(2), epoch=2, signal=Signal.UD_REG_OK)
    await store.beat(instance_id(2), **quiet, notice="terminate")
    assert [report.instance_id for report in await other.troubled_reports()] == [instance_id(2)]


async def test_provision_can_be_created_once(store: InstanceStore, other: InstanceStore) -> None:
    first = provision()
    await store.put_provision(first)
    assert await conflict(other.put_provision(provision(count=9))) == first
    assert await other.get_provision(run_holder("1234", "p-1")) == first
    assert await store.get_provision(run_holder("1235", "p-1")) is None
    assert await store.get_provision(run_holder("1234", "p-2")) is None


async def test_replacing_a_provision_is_conditional(store: InstanceStore, other: InstanceStore) -> None:
    opened = provision()
    assert await conflict(store.replace_provision(opened, opened)) is None
    await store.put_provision(opened)
    committed = provisions.committed(opened, (ID,), deadline=at(99))
    await store.replace_provision(opened, committed)
    assert (
        await conflict(other.replace_provision(opened, provisions.released(opened, now=NOW, why="late"))) == committed
    )
    assert await conflict(other.replace_provision(replace(committed, instance_ids=()), opened)) == committed
    assert await conflict(other.replace_provision(replace(committed, settled=True), opened)) == committed
    assert await conflict(other.replace_provision(replace(committed, nonce="other"), opened)) == committed
    released = provisions.released(committed, now=at(1), why="done")
    # Fields that are not part of the condition may differ.
    await other.replace_provision(replace(committed, why="another reason"), released)
    await store.replace_provision(released, provisions.settled(released, forget_at=at(99)))
    assert await other.get_provision(run_holder("1234", "p-1")) == provisions.settled(released, forget_at=at(99))


async def test_change_of_a_runner_set_depends_on_its_job(store: InstanceStore) -> None:
    listening = await store.apply(birth(instance(state=State.RUNNING, holder=set_holder())))
    assert listening.holder == set_holder()
    guard = WriteCondition(state=State.RUNNING, epoch=1, equals=(("holder", listening.holder),))
    unnamed = await store.apply(change(listening, guard, holder=set_holder(run_id="")))
    assert unnamed.holder == set_holder(run_id="")
    for late in (set_holder(run_id="77"), None):
        assert await conflict(store.apply(change(listening, guard, holder=late))) == unnamed
    guard = replace(guard, equals=(("holder", unnamed.holder),))
    assert (await store.apply(change(unnamed, guard, holder=None))).holder is None
    assert await conflict(store.apply(change(unnamed, guard, holder=None))) is not None


async def test_concurrent_replacements_have_one_winner(stores: Stores, store: InstanceStore) -> None:
    opened = provision()
    await store.put_provision(opened)
    rivals = [provisions.committed(opened, (instance_id(number),), deadline=at(99)) for number in range(5)]
    processes = [stores.open() for _ in rivals]
    outcomes = await asyncio.gather(
        *(each.replace_provision(opened, rival) for each, rival in zip(processes, rivals, strict=True)),
        return_exceptions=True,
    )
    (winner,) = (rival for rival, outcome in zip(rivals, outcomes, strict=True) if outcome is None)
    assert [each.current for each in outcomes if isinstance(each, Conflict)] == [winner] * 4
    assert await store.get_provision(run_holder("1234", "p-1")) == winner


async def test_provisions_of_a_run_are_oldest_first(store: InstanceStore) -> None:
    for number in (3, 1, 2):
        await store.put_provision(provision(number))
    await store.put_provision(provision(4, run_id="12345"))
    assert [each.provision_id for each in await store.provisions_of_run("1234")] == ["p-1", "p-2", "p-3"]
    assert await store.provisions_of_run("1") == []


async def test_recent_provisions_are_newest_first(store: InstanceStore) -> None:
    for number in (3, 1, 4, 2):
        await store.put_provision(provision(number, run_id=f"run-{number}"))
    assert [each.provision_id for each in await store.recent_provisions(3)] == ["p-4", "p-3", "p-2"]
    assert len(await store.recent_provisions(10)) == 4
    assert [each.provision_id for each in await store.recent_provisions(10, since=at(3))] == ["p-4", "p-3"]
    assert [each.provision_id for each in await store.recent_provisions(1, since=at(2))] == ["p-4"]
    assert not await store.recent_provisions(10, since=at(5))


async def test_provision_outcome_is_stored(store: InstanceStore, other: InstanceStore) -> None:
    opened = provision(request_summary="on-demand, types *", repository="octo/app")
    await store.put_provision(opened)
    outcome = ProvisionOutcome(
        ended_at=at(2),
        seconds=2.125,
        reused=1,
        phases={"intent": 0.1, "commit": 2.0},
        acquired=(AcquiredRunner(instance_id=ID, source=RunnerSource.POOL, seconds=1.5, registration_s=None),),
        rejected={"claim-lost": 2},
        rejections=(
            RejectedCandidate(kind=RejectionKind.CLAIM_LOST, why="stale", seconds=0.25, instance_id=instance_id(2)),
        ),
        launches=(LaunchAttempt(count=2, launched=1, seconds=1.0, errors=("no room",), why="reuse is never"),),
    )
    committed = provisions.committed(opened, (ID,), deadline=at(99), outcome=outcome)
    await store.replace_provision(opened, committed)
    assert await conflict(other.replace_provision(opened, committed)) == committed
    released = provisions.released(committed, now=at(3), why="done")
    await other.replace_provision(committed, released)
    found = await store.get_provision(run_holder("1234", "p-1"))
    assert found == released
    assert found is not None
    assert found.outcome == outcome


async def test_unsettled_provisions(store: InstanceStore) -> None:
    released = {"status": ProvisionStatus.RELEASED, "released_at": NOW}
    for each in (
        provision(1, deadline=at(1)),
        provision(2, deadline=at(2)),
        provision(3, deadline=at(3)),
        provision(4, deadline=at(1), status=ProvisionStatus.COMMITTED),
        provision(5, deadline=at(9), **released),
        provision(6, deadline=at(1), **released, settled=True),
    ):
        await store.put_provision(each)
    assert {each.provision_id for each in await store.unsettled_provisions(at(2))} == {"p-1", "p-2", "p-4", "p-5"}


# Configuration, record of the last sweep, expiry ------------------------------------------------------------------


async def test_configuration_revisions_are_consecutive(store: InstanceStore, other: InstanceStore) -> None:
    assert await store.get_config() is None
    assert await conflict(store.put_config(pool_config(2))) is None
    await store.put_config(pool_config(1))
    assert await conflict(other.put_config(pool_config(1, pool="rival"))) == pool_config(1)
    await other.put_config(pool_config(2, max_instances=5))
    assert await conflict(store.put_config(pool_config(2))) == pool_config(2, max_instances=5)
    assert await conflict(store.put_config(pool_config(4))) == pool_config(2, max_instances=5)
    assert await store.get_config() == pool_config(2, max_instances=5)


async def test_records_of_another_version_are_refused(store: InstanceStore, other: InstanceStore) -> None:
    await store.put_config(pool_config(1, record_version=RECORD_VERSION - 1))
    for reader in (store, other):
        with pytest.raises(UserError, match="the records of pool test have version"):
            await reader.get_config()


async def test_record_of_the_last_sweep_is_replaced_completely(store: InstanceStore, other: InstanceStore) -> None:
    assert await store.get_sweep_record() == SweepRecord()
    await store.put_sweep_record(sweep_record())
    assert await other.get_sweep_record() == sweep_record()
    await other.put_sweep_record(SweepRecord(next_due_at=at(3)))
    assert await store.get_sweep_record() == SweepRecord(next_due_at=at(3))


async def test_forget_removes_due_records(store: InstanceStore) -> None:
    for number, state, forget_at in (
        (1, State.TERMINATED, at(10)),
        (2, State.TERMINATED, at(11)),
        (3, State.TERMINATED, None),
        (4, State.IDLE, at(1)),
    ):
        await store.apply(birth(instance(number, state=state, forget_at=forget_at)))
        await store.beat(instance_id(number), **BEAT)
    released = {"status": ProvisionStatus.RELEASED, "released_at": at(10)}
    await store.put_provision(provision(1, **released, settled=True, forget_at=at(610)))
    await store.put_provision(provision(2, **released))
    await store.put_provision(provision(3))
    if not await store.forget(at(10)):
        pytest.skip("this store forgets by itself, in its own time")
    assert await store.get(ID) is None
    assert await store.get_report(ID) is None
    assert not await store.history(ID)
    others = [instance_id(number) for number in (2, 3, 4)]
    assert sorted(await store.get_many(others)) == others
    assert sorted(await store.get_reports(others)) == others
    assert await store.forget(at(609)) == 1  # the second record
    assert await store.forget(at(610)) == 1  # the settled provision
    assert [each.provision_id for each in await store.provisions_of_run("1234")] == ["p-2", "p-3"]


@pytest.mark.parametrize(
    "lie", [{"cpu": 64}, {"memory_mib": 1}, {"resource_class": "xlarge"}, {"instance_type": "m6i.large"}]
)
async def test_claim_with_a_false_message_conflicts(store: InstanceStore, lie: dict[str, Any]) -> None:
    record = instance()
    await store.apply(birth(record))
    assert await conflict(store.apply(claim_change(replace(record, **lie), "p-1/a"))) == record
    assert (await store.apply(claim_change(record, "p-1/a"))).state is State.CLAIMED


# Malformed records -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stores", PARSING_STORES, indirect=True)
async def test_malformed_records(stores: Stores, store: InstanceStore) -> None:
    for number in (1, 2):
        await store.apply(birth(instance(number, provision_id="p-9")))
        await store.beat(instance_id(number), **BEAT)
        await store.put_provision(provision(number, deadline=NOW))
    good = await store.get(instance_id(2))
    await stores.corrupt(1)
    other_report = await store.get_report(instance_id(2))
    for read, name, others in (
        (store.get(ID), ID, {}),
        (store.get_many([ID, instance_id(2)]), ID, {instance_id(2): good}),
        (store.get_report(ID), ID, {}),
        (store.get_reports([ID, instance_id(2)]), ID, {instance_id(2): other_report}),
        (store.get_provision(run_holder("1234", "p-1")), "p-1", {}),
        (store.provisions_of_run("1234"), "p-1", {"p-2": provision(2, deadline=NOW)}),
        (store.wait_for_control(ID, None, LONG_S), ID, {}),
        (store.wait_for_report(ID, None, LONG_S), ID, {}),
    ):
        with pytest.raises(Unreadable, match=f"record of .*{name} in .* cannot be read") as refused:
            await read
        assert all(name in each for each in refused.value.unreadable)
        assert refused.value.records == others
        assert refused.value.fix
    assert store.malformed_records == {}
    assert await store.find([State.IDLE]) == [good]
    assert await store.find_by_provision("p-9") == [good]
    assert [each.provision_id for each in await store.unsettled_provisions(NOW)] == ["p-2"]
    assert [each.provision_id for each in await store.recent_provisions(9)] == ["p-2"]
    assert sorted(any(part in name for part in (ID, "p-1")) for name in store.malformed_records) == [True, True]
    assert all(store.malformed_records.values())


# Counting ---------------------------------------------------------------------------------------------------------


async def test_calls_are_counted(stores: Stores, store: InstanceStore) -> None:
    record = await store.apply(birth(instance()))
    await store.get(ID)
    await store.wait_for_control(ID, None, LONG_S)

    def count(operation: str) -> int:
        service, name = stores.counted[operation]
        return stores.calls.by_service()[service].get(name, 0)

    assert [count(operation) for operation in ("apply", "get", "poll")] == [1, 1, 1]
    await conflict(store.apply(birth(record)))
    assert count("apply") == 2
    assert count("get") == 1, "a conflict already contains the stored record"
