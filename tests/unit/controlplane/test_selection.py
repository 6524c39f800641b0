"""Selection: matching, handing back and dropping of pool messages, and failed registrations."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from remuda.controlplane.operator import drain
from remuda.controlplane.provision.selection import EXTRA_FAILURES_ALLOWED
from remuda.domain.errors import CapacityError, TimedOut, Unavailable, UserError
from remuda.domain.instance import State
from remuda.domain.resources import PoolMessage, Tier, TypePatterns, UsageClass
from remuda.domain.signals import FailureKind, Signal
from remuda.ports.machine import StepResult
from simulation.loop import VirtualClock
from tests.support.records import message
from tests.support.virtual_time import Call, failing
from tests.support.world import PoolWorld, number_of

MISMATCHES: dict[str, dict[str, Any]] = {
    "usage": {"usage_class": UsageClass.SPOT},
    "type": {"instance_type": "t3.large"},
    "cpu": {"cpu": 1},
    "memory": {"memory_mib": 1_024},
    "tier": {"tier": Tier.UNTRUSTED},
    "class": {"resource_class": "xlarge"},
}


def put(world: PoolWorld, pool_message: PoolMessage | None, *, queue: str = "large", malformed: str = "") -> None:
    world.queues.put(queue, pool_message, shuffle=0.5, malformed=malformed)


def put_first(world: PoolWorld, pool_message: PoolMessage) -> None:
    """Received first: after a mismatch, the provision receives more messages than it needs."""
    world.queues.put("large", pool_message, shuffle=-1.0)


def matching(number: int = 1, **changed: Any) -> PoolMessage:
    return message(number, **{"usage_class": UsageClass.ON_DEMAND, **changed})


async def warm_with_failing_registration(
    world: PoolWorld, count: int, detail: str, failure: FailureKind | None = None
) -> list[str]:
    ids = await world.warm(count)
    world.behaviour.registration |= dict.fromkeys(ids, StepResult(ok=False, detail=detail, failure=failure))
    return ids


@pytest.mark.parametrize("kind", MISMATCHES)
async def test_mismatch_is_made_visible_again(world: PoolWorld, kind: str) -> None:
    pool_message = matching(0xABC, **MISMATCHES[kind])
    put(world, pool_message)
    result = await world.provision(patterns=TypePatterns(("c*", "m*")))
    assert (result.created, dict(result.rejected)) == (1, {"mismatch": 1})
    (left,) = world.queues.named("large").messages
    assert (left.message, left.receipt) == (pool_message, "")
    assert left.visible_at <= world.clock.now()


async def test_hundred_mismatches_cost_few_calls(world: PoolWorld) -> None:
    for number in range(100):
        put(world, matching(number, **list(MISMATCHES.values())[number % 6]))
    result = await world.provision(count=4, patterns=TypePatterns(("c*",)))
    assert result.created == 4
    assert sum(result.calls["pool"].values()) <= 30
    assert len(world.messages()) == 100


async def test_match_among_mismatches_is_found(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    for number in range(60):
        put(world, matching(0x1000 + number, usage_class=UsageClass.SPOT))
    result = await world.provision()
    assert [item.instance.instance_id for item in result.instances] == [warm]
    assert len(world.messages()) == 60


async def test_search_ends_with_more_mismatches_than_the_limit(world: PoolWorld) -> None:
    for number in range(450):
        put(world, matching(number, usage_class=UsageClass.SPOT))
    result = await world.provision()
    assert result.created == 1
    assert sum(result.calls["pool"].values()) <= 400
    assert len(world.messages()) == 450


async def test_surplus_messages_stay_in_the_pool(world: PoolWorld) -> None:
    await world.warm(8)
    put_first(world, matching(0xABC, usage_class=UsageClass.SPOT))
    result = await world.provision(count=2)
    assert result.reused == 2
    visible = [item for item in world.queues.named("large").messages if item.visible_at <= world.clock.now()]
    assert len(visible) == 7


async def test_surplus_messages_are_handed_back_at_once(world: PoolWorld) -> None:
    """Not when the provision ends: other runs need them while its machines register."""
    await world.warm(8)
    put_first(world, matching(0xABC, usage_class=UsageClass.SPOT))
    world.behaviour.configure_s = 40.0
    provisioning = asyncio.create_task(world.provision(count=2))
    await asyncio.sleep(5)
    assert len(world.in_state(State.CLAIMED)) == 2
    visible = [item for item in world.queues.named("large").messages if item.visible_at <= world.clock.now()]
    assert len(visible) == 7
    assert (await provisioning).reused == 2


async def test_malformed_messages_are_dropped_and_counted(world: PoolWorld) -> None:
    for _ in range(3):
        put(world, None, malformed="not JSON")
    result = await world.provision()
    assert (result.created, dict(result.rejected)) == (1, {"malformed": 3})
    assert not world.queues.named("large").messages


async def test_stale_message_is_deleted(world: PoolWorld) -> None:
    """An older epoch, a record that is not idle, and no record."""
    await world.warm(1)
    running = (await world.provision("busy", count=2)).instances
    ids = {item.instance.epoch: item.instance.instance_id for item in running}
    put(world, matching(number_of(ids[2]), epoch=1))
    put(world, matching(number_of(ids[1]), epoch=1))
    put(world, matching(0xDEAD))
    result = await world.provision("2")
    assert (result.created, dict(result.rejected)) == (1, {"claim-lost": 3})
    assert not world.queues.named("large").messages
    assert world.in_state(State.RUNNING) == sorted([*ids.values(), result.instances[0].instance.instance_id])


async def test_lost_claims_say_why(world: PoolWorld) -> None:
    (retired,) = await world.warm(1)
    process = world.process()
    await drain(process, (world.record(retired),), reason="old image", dry_run=False)
    running = await world.one("busy")
    for instance_id in (retired, running.instance_id):
        put(world, matching(number_of(instance_id), epoch=1))
    await world.provision("2")
    (provision,) = (item for item in world.database.provisions.values() if item.run_id == "2")
    assert provision.outcome is not None
    assert {item.instance_id: item.why for item in provision.outcome.rejections} == {
        retired: "the instance is retired: drained: old image",
        running.instance_id: "the instance is running, or about to expire",
    }


async def test_message_of_a_later_epoch_does_not_claim(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    world.queues.named("large").messages.clear()
    put(world, matching(number_of(warm), epoch=7))
    result = await world.provision()
    assert result.created == 1
    assert world.record(warm).state is State.IDLE


async def test_stale_message_does_not_drop_another_workers_claim(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    await world.provision("again")
    await world.release("again")
    good = world.record(warm).message()
    world.queues.named("large").messages.clear()
    world.queues.put("large", good, shuffle=0.1)
    world.queues.put("large", replace(good, epoch=good.epoch - 1), shuffle=0.9)
    world.cloud.capacity = {kind.name: 0 for kind in world.cloud.types}
    with pytest.raises(CapacityError):
        await world.provision("last", count=2)
    world.check_holds_nothing("last")


async def test_duplicate_message_is_deleted(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    for _ in range(3):
        put(world, world.record(warm).message())
    result = await world.provision(count=2)
    assert (result.reused, result.created) == (1, 1)
    assert result.rejected["duplicate"] == 3
    assert not world.queues.named("large").messages


async def test_expiring_instance_is_not_claimed(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    await world.pass_time(world.lifetimes.idle_time_s - 1, sweeps=False)
    result = await world.provision()
    assert result.created == 1
    assert world.record(warm).epoch == 1
    (left,) = world.queues.named("large").messages
    assert left.visible_at <= world.clock.now()


async def test_message_of_a_cancelled_worker_is_made_visible_again(world: PoolWorld) -> None:
    await world.warm(1)
    claims = asyncio.Event()

    async def hook(name: str, call: Call) -> Any:
        if name == "store.apply" and not claims.is_set():
            claims.set()
            await asyncio.Event().wait()
        return await call()

    provisioning = asyncio.create_task(world.provision(process=world.process(hook)))
    await claims.wait()
    provisioning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await provisioning
    (left,) = world.queues.named("large").messages
    assert left.visible_at <= world.clock.now()


async def test_cancelled_call_to_make_messages_visible_is_repeated(world: PoolWorld) -> None:
    put(world, matching(0xABC, usage_class=UsageClass.SPOT))
    called = asyncio.Event()

    async def hook(name: str, call: Call) -> Any:
        if name == "pool.make_visible" and not called.is_set():
            called.set()
            await asyncio.Event().wait()
        return await call()

    provisioning = asyncio.create_task(world.provision(process=world.process(hook)))
    await called.wait()
    provisioning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await provisioning
    (left,) = world.queues.named("large").messages
    assert left.visible_at <= world.clock.now()


async def test_worker_that_waits_while_messages_are_made_visible_gets_the_next_one(world: PoolWorld) -> None:
    """Two instances are about to expire; their messages are handed back while the worker asks again."""
    *expiring, good = await world.warm(3)
    for item in world.queues.named("large").messages:
        item.shuffle = 1.0 if item.message is not None and item.message.id == good else 0.0
    soon = world.clock.now() + timedelta(seconds=1)
    world.ignore("T1")
    for key in expiring:
        world.database.instances[key] = replace(world.record(key), threshold=soon)

    async def hook(name: str, call: Call) -> Any:
        if name == "pool.make_visible":
            await asyncio.sleep(1)
        return await call()

    result = await world.provision(process=world.process(hook))
    assert [item.instance.instance_id for item in result.instances] == [good]


async def test_worker_continues_after_a_lost_claim(world: PoolWorld) -> None:
    """Two runs receive the same messages; each machine goes to one of them."""
    ids = await world.warm(4)
    for instance_id in ids:
        put(world, world.record(instance_id).message())
    one, two = await asyncio.gather(world.provision("1", count=2), world.provision("2", count=2))
    assert one.reused + two.reused == 4
    assert not {item.instance.instance_id for item in one.instances} & {
        item.instance.instance_id for item in two.instances
    }


async def test_dead_heartbeat_ends_the_wait_early(world: PoolWorld) -> None:
    dead, good = await world.warm(2)
    world.stop_agent(dead)
    await asyncio.sleep(20)
    began = world.loop.time()
    result = await world.provision(count=2)
    assert world.loop.time() - began < 25
    assert (result.reused, result.created, result.rejected["registration-failed"]) == (1, 1, 1)
    assert good in {item.instance.instance_id for item in result.instances}
    assert world.record(dead).state is State.TERMINATING


async def test_old_heartbeat_ends_the_wait_at_once(world: PoolWorld) -> None:
    (dead,) = await world.warm(1)
    world.stop_agent(dead)
    await asyncio.sleep(80)
    began = world.loop.time()
    result = await world.provision()
    assert world.loop.time() - began < 5
    assert result.created == 1


async def test_unreachable_store_does_not_count_as_dead_heartbeat(world: PoolWorld) -> None:
    """No report can be read for 20 seconds although the machine is healthy."""
    (warm,) = await world.warm(1)
    world.behaviour.configure_s = 30.0
    began = world.loop.time()

    async def hook(name: str, call: Call) -> Any:
        if name == "store.wait_for_report" and 2 < world.loop.time() - began < 22:
            raise Unavailable("the store is out of reach")
        return await call()

    result = await world.provision(process=world.process(hook))
    assert [item.instance.instance_id for item in result.instances] == [warm]


async def test_failed_registration_terminates_the_machine_and_continues(world: PoolWorld) -> None:
    bad, _good = await world.warm(2)
    world.behaviour.registration[bad] = StepResult(ok=False, detail="disk full")
    result = await world.provision(count=2)
    assert (result.reused, result.created, result.rejected["registration-failed"]) == (1, 1, 1)
    history = world.database.histories[bad]
    assert (history[-1].transition, "disk full" in history[-1].why) == ("end-claimed", True)


async def test_slow_machine_is_replaced(world: PoolWorld) -> None:
    slow, _ = await world.warm(2)
    world.stop_agent(slow)

    async def beat_for_ever() -> None:
        store = world.process().store
        while True:
            await store.beat(slow, at=world.clock.now(), busy=False, listening=False, notice="", version="")
            await asyncio.sleep(5)

    beating = asyncio.create_task(beat_for_ever())
    result = await world.provision(count=2, timeout_s=200.0)
    beating.cancel()
    assert world.record(slow).state is State.TERMINATING
    assert (result.reused, result.created) == (1, 1)


async def test_rejected_credential_stops_without_consuming_the_pool(world: PoolWorld) -> None:
    ids = await warm_with_failing_registration(world, 5, "401", FailureKind.CREDENTIAL_REFUSED)
    with pytest.raises(UserError, match="refused the registration") as error:
        await world.provision(count=3)
    assert error.value.field == "github-token"
    world.check_holds_nothing("1")
    assert world.in_state(State.TERMINATING) == []
    await world.pass_time(15)
    assert world.in_state(State.IDLE) == ids


async def test_refused_version_stops_without_consuming_the_pool(world: PoolWorld) -> None:
    ids = await warm_with_failing_registration(world, 3, "too old", FailureKind.VERSION_REFUSED)
    with pytest.raises(UserError, match="GitHub refused runner of the image: too old") as error:
        await world.provision(count=2)
    assert (error.value.field, "latest" in error.value.fix) == ("actions-runner-version", True)
    assert world.in_state(State.TERMINATING) == []
    await world.pass_time(15)
    assert world.in_state(State.IDLE) == ids


async def test_unreachable_github_stops_without_consuming_the_pool(world: PoolWorld) -> None:
    ids = await warm_with_failing_registration(world, 5, "no route", FailureKind.GITHUB_UNREACHABLE)
    with pytest.raises(Unavailable, match="cannot register: no route"):
        await world.provision(count=2)
    assert world.in_state(State.TERMINATING) == []
    await world.pass_time(15)
    assert world.in_state(State.IDLE) == ids


async def test_repeated_failures_do_not_consume_the_whole_pool(world: PoolWorld) -> None:
    await warm_with_failing_registration(world, 12, "no route to host")
    with pytest.raises(Unavailable, match="no route to host"):
        await world.provision(count=1)
    world.check_holds_nothing("1")
    assert len(world.in_state(State.TERMINATING)) == 1 + EXTRA_FAILURES_ALLOWED + 1
    assert len(world.in_state(State.IDLE)) == 12 - (1 + EXTRA_FAILURES_ALLOWED + 1)


async def test_late_signal_of_an_earlier_epoch_is_ignored(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    world.behaviour.configure_s = 5.0
    provisioning = asyncio.create_task(world.provision())
    await asyncio.sleep(1)
    report = world.database.reports[warm]
    assert (world.record(warm).epoch, report.epoch) == (2, 1)
    assert report.signal is Signal.UD_REMOVE_REG_REMOVE_RUN_OK
    assert world.record(warm).state is State.CLAIMED
    assert (await provisioning).reused == 1


async def test_failure_of_an_earlier_epoch_does_not_stop_the_provision(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    world.stop_agent(warm)
    earlier = world.database.reports[warm]
    world.database.reports[warm] = replace(earlier, failure=FailureKind.GITHUB_UNREACHABLE)
    result = await world.provision()
    assert (result.reused, result.created) == (0, 1)
    assert world.record(warm).state is State.TERMINATING


async def test_tiers_do_not_mix(world: PoolWorld) -> None:
    await world.warm(1, tier=Tier.UNTRUSTED)
    trusted = await world.provision("1", tier=Tier.TRUSTED)
    untrusted = await world.provision("2", tier=Tier.UNTRUSTED)
    assert (trusted.created, untrusted.reused) == (1, 1)


async def test_unreachable_pool_fails_the_provision(world: PoolWorld) -> None:
    await world.warm(1)
    with pytest.raises(Unavailable, match="queue is down"):
        await world.provision(process=world.process(failing("pool.receive", Unavailable("the queue is down"))))
    world.check_holds_nothing("1")


class SuspendedClock(VirtualClock):
    """The clock of a process on a computer that was suspended: only its wall clock went on."""

    suspended_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() - self.suspended_s


@pytest.mark.parametrize("is_suspended", [False, True])
async def test_nothing_is_claimed_or_launched_past_the_deadline(
    world: PoolWorld,
    is_suspended: bool,  # noqa: FBT001
) -> None:
    (idle,) = await world.warm(1)
    clock = SuspendedClock()
    pause_s = world.lifetimes.provision_timeout_s + 1.0

    async def hook(name: str, call: Call) -> Any:
        answer = await call()
        if name == "pool.receive":
            await asyncio.sleep(pause_s)
            clock.suspended_s = pause_s if is_suspended else 0.0
        return answer

    with pytest.raises(TimedOut):
        await world.provision(process=replace(world.process(hook), clock=clock))
    assert world.states() == {idle: State.IDLE}
    assert (await world.one("next")).instance_id == idle
    await world.release("next")
