"""Waiting for changes of the file: one poller, which runs only with waiters and reads only possible changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from remuda.adapters.sqlite.connection import FIRST_INTERVAL_S, LAST_INTERVAL_S
from remuda.adapters.sqlite.pool import SqliteResourcePool
from remuda.adapters.sqlite.store import SqliteInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.errors import UserError
from remuda.ports.calls import CallCounter
from tests.support.records import LONG_S, birth, change, instance, instance_id, message


class ManualClock(SystemClock):
    """The test ends each sleep, and can wait for the start of the next one."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._sleeping: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

    async def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeping.put_nowait(over)
        await over

    async def next_sleep(self) -> asyncio.Future[None]:
        """Wait for the start of the next sleep and return it."""
        while True:
            over = await self._sleeping.get()
            if not over.done():
                return over

    async def end_sleep(self) -> None:
        """End the current sleep."""
        (await self.next_sleep()).set_result(None)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def calls() -> CallCounter:
    return CallCounter()


@pytest.fixture
async def store(tmp_path: Path, clock: ManualClock, calls: CallCounter) -> AsyncIterator[SqliteInstanceStore]:
    store = SqliteInstanceStore(path=tmp_path / "remuda.db", clock=clock, ids=SystemIds(), calls=calls)
    await store.prepare()
    yield store
    await store.close()


@pytest.fixture
async def other(tmp_path: Path, store: SqliteInstanceStore) -> AsyncIterator[SqliteInstanceStore]:
    other = SqliteInstanceStore(path=tmp_path / "remuda.db", clock=SystemClock(), ids=SystemIds(), calls=CallCounter())
    yield other
    await other.close()


def polls(calls: CallCounter) -> int:
    return calls.by_service()["store"].get("poll", 0)


async def test_write_of_this_process_is_seen_without_a_sleep(store: SqliteInstanceStore, clock: ManualClock) -> None:
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(store.wait_for_control(instance_id(1), None, 2 * LONG_S))
        asleep = await clock.next_sleep()
        written = await store.apply(birth(instance()))
        assert await waiting == written
        assert asleep.cancelled()


async def test_message_of_this_process_is_received_without_a_sleep(tmp_path: Path, clock: ManualClock) -> None:
    pool = SqliteResourcePool(path=tmp_path / "remuda.db", clock=clock, ids=SystemIds(), calls=CallCounter())
    await pool.prepare(["large"])
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(pool.receive("large", visibility_s=30, wait_s=2 * LONG_S))
        await clock.next_sleep()
        await pool.send([message()])
        assert len(await waiting) == 1
    await pool.close()


async def test_documents_are_read_again_only_after_a_commit(
    store: SqliteInstanceStore, other: SqliteInstanceStore, clock: ManualClock, calls: CallCounter
) -> None:
    record = await store.apply(birth(instance()))
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(store.wait_for_control(record.instance_id, record, 2 * LONG_S))
        for _ in range(12):
            await clock.end_sleep()
        asleep = await clock.next_sleep()
        assert polls(calls) == 1
        await other.apply(birth(instance(2)))
        asleep.set_result(None)
        asleep = await clock.next_sleep()
        assert polls(calls) == 2
        written = await other.apply(change(record, uses=1))
        asleep.set_result(None)
        assert await waiting == written
        assert polls(calls) == 3


async def test_polling_interval_grows_within_bounds(store: SqliteInstanceStore, clock: ManualClock) -> None:
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(store.wait_for_control("i-1", None, 2 * LONG_S))
        for _ in range(20):
            await clock.end_sleep()
        await clock.next_sleep()
        waiting.cancel()
        await asyncio.wait({waiting})
    assert FIRST_INTERVAL_S / 2 <= clock.asked[0] <= FIRST_INTERVAL_S
    assert all(LAST_INTERVAL_S / 2 <= each <= LAST_INTERVAL_S for each in clock.asked[10:])


async def test_waiters_share_one_poller_which_ends_with_them(
    store: SqliteInstanceStore, clock: ManualClock, calls: CallCounter
) -> None:
    before = asyncio.all_tasks()
    async with asyncio.timeout(LONG_S):
        waits = [
            asyncio.create_task(store.wait_for_control(instance_id(number), None, 2 * LONG_S)) for number in range(30)
        ]
        asleep = await clock.next_sleep()
        tasks = asyncio.all_tasks() - before - set(waits)
        assert len(tasks) == 2, "the poller and its nap"
        assert polls(calls) <= 2, "they are read together"
        for wait in waits:
            wait.cancel()
        await asyncio.wait({*waits, *tasks})
        assert asleep.cancelled()


async def test_error_ends_all_waits(store: SqliteInstanceStore, clock: ManualClock, tmp_path: Path) -> None:
    async with asyncio.timeout(LONG_S):
        waits = [asyncio.create_task(store.wait_for_control("i-1", None, 2 * LONG_S)) for _ in range(3)]
        asleep = await clock.next_sleep()
        (tmp_path / "remuda.db").unlink()
        asleep.set_result(None)
        for outcome in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(outcome, UserError)
    await store.prepare()
    assert await store.wait_for_control("i-1", None, 0) is None
