"""Sweeps of records, provisions and pool messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from remuda.controlplane.context import transition_all
from remuda.controlplane.refresh.provisions import SETTLE_AFTER_S
from remuda.domain.errors import RemudaError, Unavailable, UserError
from remuda.domain.instance import LIVE, State
from remuda.domain.provision import ProvisionStatus
from remuda.domain.signals import Signal
from remuda.domain.transitions import Actor, Change, Confirm
from simulation.memory.store import MemoryInstanceStore
from tests.support.records import birth, message, provision
from tests.support.records import instance as make_record
from tests.support.virtual_time import AmbiguousAnswer, Call, Cut, CutKind, EventRecorder, failing
from tests.support.world import LIFETIMES, PoolWorld

MARGIN_S = LIFETIMES.margin_s


@pytest.mark.parametrize("state", sorted(LIVE - {State.TERMINATING}))
async def test_expired_instances_end_in_every_live_state(world: PoolWorld, state: State) -> None:
    """Not before the clock margin has passed."""
    world.ignore("S7", "T1")
    threshold = world.clock.now()
    record = make_record(7, state=state, threshold=threshold, provision_id="p-7", claim="p-7/w", run_id="1")
    await world.process().store.apply(birth(record))
    await asyncio.sleep(MARGIN_S - 0.1)
    result = await world.sweep()
    assert (dict(result.retired), world.record(record.instance_id).state) == ({}, state)
    await asyncio.sleep(0.2)
    result = await world.sweep()
    assert list(result.retired) == [record.instance_id]
    assert world.record(record.instance_id).run_id == ""
    assert world.record(record.instance_id).assignment is None


@pytest.mark.parametrize("applied", [True, False], ids=["applied", "lost"])
async def test_ambiguous_batch_confirmation_is_repeated_one_by_one(world: PoolWorld, *, applied: bool) -> None:
    ids = await world.warm(3)
    for instance_id in ids:
        world.cloud.end(instance_id, "stopped by the test")
    hook = AmbiguousAnswer("store.apply_all", applied=applied, at=(1,))
    done: set[str] = set()
    for _ in range(3):
        result = await world.sweep(hook)
        done |= set(result.terminated)
        await asyncio.sleep(world.lifetimes.gone_after_s + MARGIN_S)
    assert done == set(ids)
    assert hook.count >= 1
    assert {world.record(instance_id).state for instance_id in ids} == {State.TERMINATED}


async def test_provision_killed_before_its_commit_is_rolled_back(world: PoolWorld) -> None:
    ids = await world.warm(1)
    cut = Cut(17, CutKind.CRASH_BEFORE)
    await cut.run(world.provision("lost", count=2, process=world.process(cut)))
    held = world.in_state(State.CREATED, State.CLAIMED, State.RUNNING)
    assert held
    await world.pass_time(world.lifetimes.provision_timeout_s + MARGIN_S + 20)
    (stored,) = [item for item in world.database.provisions.values() if item.run_id == "lost"]
    assert stored.status is ProvisionStatus.RELEASED
    assert "deadline" in stored.why
    assert not world.in_state(State.CREATED, State.CLAIMED, State.RUNNING)
    await cut.discard()
    assert ids


async def test_running_instances_of_an_uncommitted_provision_are_released(world: PoolWorld) -> None:
    """The process was killed between the first transition to `running` and the commit."""
    await world.warm(2)

    async def hook(name: str, call: Call) -> Any:
        if name == "store.replace_provision":
            cut.dead.set()
        return await cut(name, call)

    cut = Cut(1_000, CutKind.CRASH_BEFORE)
    await cut.run(world.provision("lost", count=2, process=world.process(hook)))
    assert len(world.in_state(State.RUNNING)) == 2
    await asyncio.sleep(world.lifetimes.provision_timeout_s + MARGIN_S)
    result = await world.sweep()
    assert len(result.rolled_back) == 2
    await world.pass_time(12)
    assert len(world.in_state(State.IDLE)) == 2
    await cut.discard()


async def test_interrupted_release_is_finished(world: PoolWorld) -> None:
    await world.provision(count=1)
    cut = Cut(6, CutKind.CRASH_BEFORE)
    await cut.run(world.release(process=world.process(cut)))
    assert len(world.in_state(State.RELEASING)) == 1
    await asyncio.sleep(3)
    result = await world.sweep()
    assert len(result.finished_releases) == len(result.published) == len(world.messages()) == 1
    await cut.discard()


async def test_instances_of_a_crashed_release_are_taken_back(world: PoolWorld) -> None:
    await world.provision()
    cut = Cut(3, CutKind.CRASH_AFTER)
    await cut.run(world.release(process=world.process(cut)))
    assert cut.calls[-1] == "store.replace_provision"
    assert world.in_state(State.RUNNING)
    result = await world.sweep()
    assert len(result.rolled_back) == 1
    assert world.in_state(State.RELEASING)
    await cut.discard()


async def test_unpublished_idle_instance_is_published(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    world.queues.named("large").messages.clear()
    world.database.instances[warm] = replace(world.record(warm), announced_at=None)
    result = await world.sweep()
    assert (list(result.published), world.messages()) == ([warm], [warm])
    assert (await world.sweep()).published == ()


async def test_lost_pool_message_is_sent_again(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    world.queues.named("large").messages.clear()
    await world.pass_time(world.lifetimes.republish_s - 11)
    assert not world.messages()
    await world.pass_time(21)
    assert world.messages() == [warm]


async def test_failed_pool_message_is_reported_and_sent_again(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    world.queues.named("large").messages.clear()
    world.database.instances[warm] = replace(world.record(warm), announced_at=None)
    result = await world.sweep(AmbiguousAnswer("pool.send", applied=False))
    assert any("pool messages" in error for error in result.errors)
    assert result.published == ()
    assert world.record(warm).announced_at is None
    assert (await world.sweep()).published == (warm,)


async def test_pool_message_that_could_not_be_recorded_is_reported(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    world.queues.named("large").messages.clear()
    world.database.instances[warm] = replace(world.record(warm), announced_at=None)
    result = await world.sweep(failing("store.apply", Unavailable("the store is down")))
    assert result.errors == ("pool messages: the store is down",)
    assert (result.published, world.messages()) == ((), [warm])


async def test_failed_runner_ends_its_machine(world: PoolWorld) -> None:
    # The signal is not the agent's own: its runner starts.
    world.ignore("S16", "W1")
    key = (await world.one()).instance_id
    await world.process().store.write_signal(key, epoch=1, signal=Signal.UD_REG_FAILED, detail="runner too old")
    result = await world.sweep()
    assert "runner too old" in result.retired[key]


async def test_failure_of_an_earlier_epoch_is_ignored(world: PoolWorld) -> None:
    world.ignore("S4", "W1")
    (warm,) = await world.warm(1)
    world.behaviour.without_agent.add(warm)
    await world.provision()
    world.database.reports[warm] = replace(world.database.reports[warm], epoch=1, signal=Signal.UD_REG_FAILED)
    result = await world.sweep()
    assert not result.retired


@pytest.mark.parametrize("why", ["too old", "used", "spot notice"])
async def test_idle_instance_beyond_its_limits_is_retired(world: PoolWorld, why: str) -> None:
    (warm,) = await world.warm(1)
    if why == "spot notice":
        world.machines[warm].notice = "terminate"
        await asyncio.sleep(6)
    else:
        changed = {"max_age_s": 1.0} if why == "too old" else {"max_uses": 1}
        await world.configure(lifetimes=replace(LIFETIMES, **changed))
    await world.sweep()
    assert world.record(warm).state in {State.TERMINATING, State.TERMINATED}
    assert why in world.record(warm).retire_text


async def test_settled_provision_is_not_read_again(world: PoolWorld) -> None:
    await world.provision()
    await world.release()
    await world.pass_time(world.lifetimes.provision_timeout_s + 100)
    assert all(item.settled for item in world.database.provisions.values())
    result = await world.sweep()
    assert "find_by_provision" not in result.calls["store"]


async def test_unreleased_run_is_closed_after_its_deadline(world: PoolWorld) -> None:
    await world.provision()
    (provision_,) = world.database.provisions.values()
    assert provision_.deadline == max(item.threshold for item in world.database.instances.values())
    await world.pass_time(world.lifetimes.max_runtime_s + 300)
    (provision_,) = world.database.provisions.values()
    assert provision_.settled
    assert "not released before its deadline" in provision_.why


async def test_late_claim_of_a_released_provision_is_taken_back(world: PoolWorld) -> None:
    """A claim of a killed process is applied after its provision was closed."""
    (warm,) = await world.warm(1)
    closed = provision(9, created_at=world.clock.now(), deadline=world.clock.now())
    await world.process().store.put_provision(closed)
    await asyncio.sleep(MARGIN_S + 1)
    await world.sweep()
    late: dict[str, Any] = {"holder": closed.holder, "claim": "p-9/w", "scope": "octo/repo"}
    world.database.instances[warm] = replace(world.record(warm), state=State.CLAIMED, epoch=2, **late)
    await world.sweep()
    assert world.record(warm).state is State.RELEASING
    world.violations.clear()  # The record was written without a transition.


async def test_provision_is_not_settled_before_its_deadline(world: PoolWorld) -> None:
    """A claim of a paused process may be applied until the deadline, however early the provision was released."""
    (warm,) = await world.warm(1)
    now = world.clock.now()
    closed = provision(
        9, created_at=now, deadline=now + timedelta(seconds=600), status=ProvisionStatus.RELEASED, released_at=now
    )
    store = world.process().store

    async def is_settled() -> bool:
        stored = await store.get_provision(closed.holder)
        assert stored is not None
        return stored.settled

    await store.put_provision(closed)
    await asyncio.sleep(SETTLE_AFTER_S + MARGIN_S + 5)
    await world.sweep()
    assert not await is_settled()
    late: dict[str, Any] = {"holder": closed.holder, "claim": "p-9/w", "scope": "octo/repo"}
    world.database.instances[warm] = replace(
        world.record(warm), state=State.CLAIMED, epoch=2, threshold=closed.deadline, **late
    )
    await world.sweep()
    assert world.record(warm).state is State.RELEASING
    world.violations.clear()  # The record was written without a transition.
    await world.pass_time(600 + SETTLE_AFTER_S)
    assert await is_settled()


async def test_old_records_are_deleted() -> None:
    world = PoolWorld(lifetimes=replace(LIFETIMES, keep_records_s=100.0))
    await world.configure()
    await world.provision()
    await world.release()
    await world.end()
    await world.pass_time(200)
    assert not world.database.instances
    assert not world.database.provisions


FAILING = {
    "compute.list_pool": "machines",
    "compute.terminate": "machines",
    "github.list_runners": "runners of",
    "github.delete_runner": "stale registrations",
    "store.unsettled_provisions": "provisions",
    "store.troubled_reports": "reports with a problem",
    "store.get_reports": "reports: ",
    "pool.send": "pool messages",
    "store.forget": "old records",
    "store.put_sweep_record": "anomalies",
}


@pytest.mark.parametrize("operation", FAILING)
async def test_failing_sweep_does_not_stop_the_others(world: PoolWorld, operation: str) -> None:
    """Each sweep has something to do. If one fails, all others still do it."""
    world.ignore("S7")
    (announce_me,) = await world.warm(1)
    expired = make_record(0xE1, state=State.IDLE, threshold=world.clock.now())
    await world.process().store.apply(birth(expired))
    await world.process().store.put_provision(provision(9, created_at=world.clock.now(), deadline=world.clock.now()))
    world.github.add("octo/repo", f"remuda-test-1-{expired.instance_id}")
    world.database.instances[announce_me] = replace(world.record(announce_me), announced_at=None)
    await asyncio.sleep(MARGIN_S + 1)
    result = await world.sweep(failing(operation, Unavailable(f"{operation} is down")))
    assert any(FAILING[operation] in error for error in result.errors), result.errors
    assert expired.instance_id in result.retired
    assert operation == "pool.send" or result.published
    assert operation.startswith("github") or len(result.stale_registrations) == 1
    (stored,) = [item for item in world.database.provisions.values() if item.provision_id == "p-9"]
    assert (stored.status is ProvisionStatus.RELEASED) == (operation != "store.unsettled_provisions")


async def test_surplus_messages_are_deleted_only_by_the_second_sweep(world: PoolWorld) -> None:
    """However long the sweep takes, because the surplus may be a message that is being claimed."""
    world.queues.put("large", message(0xBAD), shuffle=0.5)

    async def slow(name: str, call: Call) -> Any:
        await asyncio.sleep(0.5)
        return await call()

    assert [(await world.sweep(slow)).stale_messages for _ in range(3)] == [0, 1, 0]


async def test_queue_that_fails_does_not_stop_the_sweep_of_the_others(world: PoolWorld) -> None:
    for name in ("large", "xlarge"):
        world.queues.put(name, message(0xBAD, resource_class=name), shuffle=0.5)
    await world.sweep()
    has_failed = False

    async def fail_once(name: str, call: Call) -> Any:
        nonlocal has_failed
        if name == "pool.receive" and not has_failed:
            has_failed = True
            raise Unavailable("no answer")
        return await call()

    result = await world.sweep(fail_once)
    assert (result.errors, result.stale_messages) == (("stale pool messages: no answer",), 1)
    assert (await world.sweep()).stale_messages == 1, "the surplus of the other was not forgotten"


async def test_message_sweep_receives_no_more_messages_than_it_has_counted(world: PoolWorld) -> None:
    """Others arrive all the time, and each one that it receives is hidden from provisions."""
    world.queues.put("large", message(0xBAD), shuffle=0.5)
    await world.sweep()
    receives = 0

    async def hook(name: str, call: Call) -> Any:
        nonlocal receives
        answer = await call()
        if name == "pool.receive" and receives < 10:
            receives += 1
            world.queues.put("large", message(0xBAD + receives), shuffle=0.5)
        return answer

    assert (await world.sweep(hook)).stale_messages == 1
    assert receives == 1


async def test_interrupted_message_sweep_hands_messages_back(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    world.queues.put("large", message(0xBAD), shuffle=0.5)
    await world.sweep()
    received = False

    async def stopped(name: str, call: Call) -> Any:
        nonlocal received
        received |= name == "pool.receive"
        if received and name == "store.get_many":
            raise asyncio.CancelledError
        return await call()

    with pytest.raises(asyncio.CancelledError):
        await world.sweep(stopped)
    assert received
    result = await world.provision("next", count=1)
    assert [item.instance.instance_id for item in result.instances] == [warm]


async def test_failed_list_cancels_the_other_list(world: PoolWorld) -> None:
    ended: list[str] = []

    async def hook(name: str, call: Call) -> Any:
        if name == "compute.list_pool":
            await asyncio.sleep(1)
            raise RuntimeError("a bug")
        if name == "github.list_runners":
            try:
                await asyncio.sleep(3_600)
            finally:
                ended.append(name)
        return await call()

    with pytest.raises(ExceptionGroup):
        await world.sweep(hook)
    assert ended == ["github.list_runners"]


class HalfWritten(MemoryInstanceStore):
    """Applies a third of the writes, rejects a third, and loses the answers of the last third."""

    async def apply_all(self, changes: Sequence[Change]) -> Sequence[RemudaError | None]:
        written, refused, lost = changes
        await self.apply(written)
        await self.apply(lost)
        assert refused
        return [None, UserError("not allowed"), Unavailable("no answer")]


async def test_successful_writes_of_a_failed_batch_are_logged(world: PoolWorld) -> None:
    world.ignore("S7", "T1")
    context = world.process()
    store = HalfWritten(clock=world.clock, calls=context.calls, database=world.database)
    records = [make_record(number, state=State.TERMINATING, threshold=world.clock.now()) for number in (1, 2, 3)]
    for record in records:
        await store.apply(birth(record))
    notes = EventRecorder()
    context = replace(context, store=store, event_log=notes)
    event = Confirm(keep_records_s=60.0)
    results = await transition_all(context, records, event, by=Actor.REFRESH, why="over")
    assert [type(result) for result in results] == [type(None), UserError, type(None)]
    assert notes.count("confirm") == 2


async def test_concurrent_refreshes(world: PoolWorld) -> None:
    await world.warm(2)
    await world.provision("1", count=1)
    cut = Cut(6, CutKind.CRASH_AFTER)
    await world.provision("2", count=1)
    await cut.run(world.release("2", process=world.process(cut)))
    await asyncio.sleep(70)

    async def slow(name: str, call: Call) -> Any:
        await asyncio.sleep(0.05 * (1 + len(name) % 3))
        return await call()

    results = await asyncio.gather(*(world.sweep(slow) for _ in range(4)))
    assert not [error for result in results for error in result.errors]
    world.check()
    await cut.discard()
