"""Contract of the resource pool (`remuda.ports.pool`), for every adapter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from remuda.domain.errors import NotFound
from remuda.domain.resources import PoolMessage, Tier, UsageClass
from remuda.ports.pool import BATCH, Delivery, ResourcePool
from tests.conformance.conftest import POOLS_WITH_EXPIRING_RECEIPTS, Pools
from tests.support.records import LONG_S, SHORT_S, message

HIDDEN_S = 30.0


def receipts(deliveries: Sequence[Delivery]) -> list[str]:
    return [delivery.receipt for delivery in deliveries]


def numbers(deliveries: Sequence[Delivery]) -> list[int]:
    """The numbers of the messages, sorted because queues do not keep the order."""
    return sorted(int(delivery.message.id.removeprefix("i-"), 16) for delivery in deliveries if delivery.message)


async def drain(pool: ResourcePool, resource_class: str = "large") -> list[Delivery]:
    """Receive until the queue is empty."""
    found: list[Delivery] = []
    while batch := await pool.receive(resource_class, visibility_s=HIDDEN_S):
        found.extend(batch)
    return found


async def test_prepare_is_idempotent_and_returns_its_changes(pools: Pools) -> None:
    pool = pools.open()
    assert len(await pool.prepare(["large", "xlarge"])) == 2
    assert await pool.prepare(["xlarge", "large"]) == []
    assert len(await pool.prepare(["large", "huge"])) == 1
    assert await pool.depth("huge") == 0
    await pool.close()
    await pool.close()


async def test_unknown_class_raises_not_found(pool: ResourcePool) -> None:
    for call in (
        pool.receive("small", visibility_s=1),
        pool.send([message(1), message(2, resource_class="small")]),
        pool.delete("small", ["r-1"]),
        pool.make_visible("small", ["r-1"]),
        pool.depth("small"),
    ):
        with pytest.raises(NotFound):
            await call


async def test_message_is_received_as_sent(pool: ResourcePool, other_pool: ResourcePool) -> None:
    sent = PoolMessage(
        id="i-0123456789abcdef0",
        epoch=7,
        resource_class="large",
        instance_type="m6i.metal",
        usage_class=UsageClass.SPOT,
        cpu=128,
        memory_mib=524_288,
        tier=Tier.UNTRUSTED,
        repository="octo/repo",
    )
    await pool.send([sent])
    (delivery,) = await other_pool.receive("large", visibility_s=HIDDEN_S)
    assert (delivery.message, delivery.malformed) == (sent, "")
    assert delivery.receipt


async def test_message_goes_to_the_queue_of_its_class(pool: ResourcePool) -> None:
    await pool.send([message(1), message(2, resource_class="xlarge")])
    await pool.send([])
    assert numbers(await pool.receive("large", visibility_s=HIDDEN_S)) == [1]
    assert numbers(await pool.receive("xlarge", visibility_s=HIDDEN_S)) == [2]


async def test_receive_respects_its_limit(pool: ResourcePool) -> None:
    await pool.send([message(number) for number in range(25)])
    assert await pool.depth("large") == 25
    assert 1 <= len(await pool.receive("large", limit=3, visibility_s=0)) <= 3
    assert 1 <= len(await pool.receive("large", limit=50, visibility_s=0)) <= BATCH
    assert numbers(await drain(pool)) == list(range(25))


async def test_received_message_is_invisible_to_all(pool: ResourcePool, other_pool: ResourcePool) -> None:
    await pool.send([message(1)])
    assert numbers(await pool.receive("large", visibility_s=HIDDEN_S)) == [1]
    assert await pool.receive("large", visibility_s=HIDDEN_S) == []
    assert await other_pool.receive("large", visibility_s=HIDDEN_S) == []
    assert await pool.depth("large") == 1


async def test_invisible_message_returns_unless_deleted(pools: Pools, pool: ResourcePool) -> None:
    await pool.send([message(1), message(2)])
    deliveries = await drain(pool)
    await pool.delete("large", [each.receipt for each in deliveries if numbers([each]) == [1]])
    assert await pool.depth("large") == 1
    await pools.advance(HIDDEN_S + 1)
    assert numbers(await drain(pool)) == [2]


async def test_more_messages_than_a_batch_are_deleted(pool: ResourcePool) -> None:
    await pool.send([message(number) for number in range(23)])
    await pool.delete("large", receipts(await drain(pool)))
    assert await pool.depth("large") == 0
    await pool.delete("large", [])


async def test_message_made_visible_is_received_at_once(pool: ResourcePool, other_pool: ResourcePool) -> None:
    await pool.send([message(number) for number in range(12)])
    deliveries = await drain(pool)
    await pool.make_visible("large", receipts(deliveries))
    again = await drain(other_pool)
    assert numbers(again) == list(range(12))
    assert set(receipts(again)).isdisjoint(receipts(deliveries))
    await pool.make_visible("large", [])


async def test_stale_receipt_is_ignored(pools: Pools, pool: ResourcePool, other_pool: ResourcePool) -> None:
    await pool.send([message(1)])
    (first,) = await pool.receive("large", visibility_s=HIDDEN_S)
    await pools.advance(HIDDEN_S + 1)
    (second,) = await other_pool.receive("large", visibility_s=HIDDEN_S)
    await pool.delete("large", [first.receipt])
    await pool.make_visible("large", [first.receipt])
    assert await pool.receive("large", visibility_s=HIDDEN_S) == []
    await other_pool.delete("large", [second.receipt])
    await other_pool.delete("large", [second.receipt])
    await other_pool.make_visible("large", [second.receipt])
    assert await pool.depth("large") == 0


async def test_receipt_of_another_queue_is_ignored(pool: ResourcePool) -> None:
    await pool.send([message(1)])
    (delivery,) = await pool.receive("large", visibility_s=HIDDEN_S)
    await pool.delete("xlarge", [delivery.receipt])
    assert await pool.depth("large") == 1


@pytest.mark.parametrize("pools", POOLS_WITH_EXPIRING_RECEIPTS, indirect=True)
async def test_receipt_is_valid_until_the_message_returns(pools: Pools, pool: ResourcePool) -> None:
    await pool.send([message(1)])
    (delivery,) = await pool.receive("large", visibility_s=HIDDEN_S)
    await pools.advance(HIDDEN_S + 1)
    await pool.delete("large", [delivery.receipt])
    assert await pool.depth("large") == 1


async def test_delayed_message_is_delivered_later(pools: Pools, pool: ResourcePool) -> None:
    await pool.send([message(1)], delay_s=HIDDEN_S)
    assert await pool.receive("large", visibility_s=HIDDEN_S) == []
    assert await pool.depth("large") == 1
    await pools.advance(HIDDEN_S + 1)
    assert numbers(await pool.receive("large", visibility_s=HIDDEN_S)) == [1]


async def test_same_message_can_be_queued_twice(pool: ResourcePool) -> None:
    await pool.send([message(1)])
    await pool.send([message(1)])
    assert numbers(await drain(pool)) == [1, 1]


async def test_receive_from_empty_queue_returns_immediately_or_after_its_wait(pool: ResourcePool) -> None:
    assert await pool.receive("large", visibility_s=HIDDEN_S) == []
    assert await pool.receive("large", visibility_s=HIDDEN_S, wait_s=SHORT_S) == []


@pytest.mark.parametrize("sender", ["own", "other"])
async def test_waiting_receive_returns_a_new_message(pool: ResourcePool, other_pool: ResourcePool, sender: str) -> None:
    by = pool if sender == "own" else other_pool
    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
        waiting = group.create_task(pool.receive("large", visibility_s=HIDDEN_S, wait_s=2 * LONG_S))
        assert await pool.receive("large", visibility_s=HIDDEN_S, wait_s=SHORT_S) == []
        await by.send([message(1, resource_class="xlarge")])
        await by.send([message(2)])
        assert numbers(await waiting) == [2]


async def test_waiting_receive_returns_a_message_made_visible(pool: ResourcePool, other_pool: ResourcePool) -> None:
    await pool.send([message(1)])
    await pool.receive("large", visibility_s=SHORT_S)
    async with asyncio.timeout(LONG_S):
        (again,) = await pool.receive("large", visibility_s=HIDDEN_S, wait_s=2 * LONG_S)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(other_pool.receive("large", visibility_s=HIDDEN_S, wait_s=2 * LONG_S))
            assert await other_pool.receive("large", visibility_s=HIDDEN_S, wait_s=SHORT_S) == []
            await pool.make_visible("large", [again.receipt])
            assert numbers(await waiting) == [1]


async def test_each_message_is_delivered_to_one_receiver(pools: Pools, pool: ResourcePool) -> None:
    receivers = [pools.open() for _ in range(4)]
    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
        waits = [
            group.create_task(each.receive("large", limit=1, visibility_s=HIDDEN_S, wait_s=2 * LONG_S))
            for each in receivers
            for _ in range(3)
        ]
        await pool.send([message(number) for number in range(12)])
        deliveries = [delivery for wait in waits for delivery in await wait]
    assert numbers(deliveries) == list(range(12))
    await asyncio.gather(*(each.close() for each in receivers))


async def test_cancelled_receive_loses_no_message(pools: Pools, pool: ResourcePool) -> None:
    waiting = asyncio.create_task(pool.receive("large", visibility_s=HIDDEN_S, wait_s=LONG_S))
    assert await pool.receive("large", visibility_s=HIDDEN_S, wait_s=SHORT_S) == []
    waiting.cancel()
    await pool.send([message(1)])
    await asyncio.wait({waiting})
    again: list[int] = []
    for _ in range(12):
        # A server may deliver to the cancelled receive until its wait ends, which hides the message once more.
        await pools.advance(HIDDEN_S + 1)
        again = numbers(await pool.receive("large", visibility_s=HIDDEN_S, wait_s=LONG_S / 12))
        if again:
            break
    assert again == [1]


SECRET = "ghp_0123456789"


@pytest.mark.parametrize(
    "body",
    [
        SECRET,
        "",
        "[]",
        json.dumps({"id": "i-1", "note": SECRET}),
        "[" * 100_000,
        json.dumps({"id": "nonsense", "epoch": 1}),
    ],
    ids=["text", "empty", "list", "object", "deep", "bad-id"],
)
async def test_malformed_body_is_delivered_with_its_reason(pools: Pools, pool: ResourcePool, body: str) -> None:
    await pools.send_raw("large", body)
    (delivery,) = await pool.receive("large", visibility_s=HIDDEN_S)
    assert delivery.message is None
    assert delivery.malformed
    assert SECRET not in delivery.malformed
    await pool.delete("large", [delivery.receipt])
    assert await pool.depth("large") == 0


async def test_calls_are_counted_per_batch(pools: Pools, pool: ResourcePool) -> None:
    await pool.send([message(number, resource_class="large" if number < 11 else "xlarge") for number in range(13)])
    deliveries = [
        *await pool.receive("large", visibility_s=HIDDEN_S),
        *await pool.receive("large", visibility_s=HIDDEN_S),
    ]
    await pool.make_visible("large", receipts(deliveries)[:1])
    await pool.delete("large", receipts(deliveries))
    counts = pools.calls.by_service()
    counted = {operation: counts[service][name] for operation, (service, name) in pools.counted.items()}
    assert counted == {"send": 3, "receive": 2, "make_visible": 1, "delete": 2}
