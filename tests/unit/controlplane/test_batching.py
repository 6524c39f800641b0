"""Batches: items that come soon after each other share a call, and none is lost; deletions of used pool messages."""

from __future__ import annotations

import asyncio

import pytest

from remuda.controlplane.batching import Batcher
from remuda.controlplane.provision.pickup import DELETE_AFTER_S, STALE_FOR_S, UsedMessages
from remuda.domain.errors import Unavailable
from remuda.ports.pool import BATCH
from tests.support.records import message
from tests.support.virtual_time import EventRecorder, failing
from tests.support.world import PoolWorld

WINDOW_S = 10.0


class Handled:
    """Batches with the times at which they were handled."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self.batches: list[tuple[float, list[int]]] = []

    async def __call__(self, batch: list[int]) -> None:
        self.batches.append((self._loop.time(), batch))
        await asyncio.sleep(self._seconds)


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_items_of_one_window_share_a_call() -> None:
    handled, began = Handled(), now()
    batcher = Batcher(handled, size=5, window_s=WINDOW_S)
    batcher.add(1)
    await asyncio.sleep(WINDOW_S - 1)
    batcher.add(2)
    await asyncio.sleep(2)
    batcher.add(3)
    await asyncio.sleep(WINDOW_S + 1)
    assert [(round(at - began), items) for at, items in handled.batches] == [(10, [1, 2]), (21, [3])]


@pytest.mark.parametrize("size", [1, 3])
async def test_full_batch_does_not_wait(size: int) -> None:
    handled, began = Handled(), now()
    batcher = Batcher(handled, size=size, window_s=WINDOW_S)
    for _ in range(2):
        for item in range(size):
            batcher.add(item)
        await asyncio.sleep(1)
    assert [(round(at - began), items) for at, items in handled.batches] == [
        (0, list(range(size))),
        (1, list(range(size))),
    ]


async def test_items_that_come_during_a_call_get_the_next_one() -> None:
    handled = Handled(seconds=5.0)
    batcher = Batcher(handled, size=2, window_s=WINDOW_S)
    batcher.add(1)
    batcher.add(2)
    await asyncio.sleep(1)
    batcher.add(3)
    await asyncio.sleep(20)
    assert [items for _, items in handled.batches] == [[1, 2], [3]]


async def test_close_handles_the_rest_at_once() -> None:
    handled, began = Handled(), now()
    batcher = Batcher(handled, size=5, window_s=WINDOW_S)
    batcher.add(1)
    await batcher.close()
    assert [(round(at - began), items) for at, items in handled.batches] == [(0, [1])]


async def test_used_messages_are_deleted_in_one_call_per_class(world: PoolWorld) -> None:
    await world.warm(2)
    context = world.process()
    used = UsedMessages(context)
    for delivery in await context.pool.receive("large", limit=BATCH, visibility_s=30.0):
        used.add("large", delivery.receipt)
    used.add("xlarge", "unknown receipt")
    await asyncio.sleep(DELETE_AFTER_S + 1)
    assert not world.queues.named("large").messages
    assert context.calls.by_service()["pool"]["delete"] == 2


async def test_failed_deletion_is_recorded_and_stops_nothing(world: PoolWorld) -> None:
    context = world.process(failing("pool.delete", Unavailable("throttled")))
    used = UsedMessages(context)
    used.add("large", "receipt")
    await used.close()
    assert isinstance(context.event_log, EventRecorder)
    assert ("delete-failed", "throttled") in context.event_log.lines


async def test_stale_messages_are_counted_by_class_and_for_a_time(world: PoolWorld) -> None:
    used = UsedMessages(world.process())
    used.add_stale(message(1))
    await asyncio.sleep(STALE_FOR_S - 1)
    used.add_stale(message(2))
    used.add_stale(message(3, resource_class="xlarge"))
    assert (used.count_stale("large"), used.count_stale("xlarge")) == (2, 1)
    await asyncio.sleep(2)
    assert used.count_stale("large") == 1
    assert used.take_stale(message(2))
    assert not used.take_stale(message(2))
    assert used.count_stale("large") == 0
