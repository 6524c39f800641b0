"""Polling of DynamoDB items: each waiter has its own interval, and due waiters share one read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from remuda.adapters.polling import Poller, Waiter
from remuda.ports.clock import Clock, Ids
from remuda.ports.poll_intervals import JITTER, PollInterval

K = TypeVar("K")
V = TypeVar("V")

#: A read includes waiters that are due within this fraction of their interval, which saves calls.
SHARED_FRACTION = 0.5

#: Reads the present values of these keys.
ReadItems = Callable[[Collection[K]], Awaitable[Mapping[K, V]]]


@dataclass(kw_only=True, slots=True, eq=False)
class _TimedWaiter(Waiter[K, V], Generic[K, V]):
    interval: PollInterval
    #: Monotonic time of the next read. The first one is immediate.
    due: float
    interval_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.interval_s = self.interval.first_s


class ItemPoller(Poller[_TimedWaiter[K, V]], Generic[K, V]):
    def __init__(self, *, read: ReadItems[K, V], clock: Clock, ids: Ids) -> None:
        super().__init__(clock=clock, ids=ids)
        self._read = read

    async def wait(self, key: K, accepts: Callable[[V], bool], *, interval: PollInterval, timeout_s: float) -> V:
        """The first value that `accepts` returns True for, which may be the present one. Raises `TimeoutError`."""
        answer: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        waiter = _TimedWaiter(key=key, accepts=accepts, interval=interval, answer=answer, due=self._clock.monotonic())
        return cast("V", await self._wait_for_answer(waiter, timeout_s))

    def wake(self, key: K) -> None:
        """Read this key now if it has waiters. Called after this process wrote it."""
        now = self._clock.monotonic()
        waiting = [waiter for waiter in self._waiters if waiter.key == key]
        for waiter in waiting:
            waiter.due = now
        if waiting:
            self._wake()

    async def _poll(self) -> None:
        while self._waiters:
            self._woken = False
            now = self._clock.monotonic()
            if any(waiter.due <= now for waiter in self._waiters):
                await self._read_for([each for each in self._waiters if each.due <= now + self._shared_s(each)])
            waiting = [waiter for waiter in self._waiters if not waiter.answer.done()]
            if waiting and not self._woken:
                await self._sleep(min(waiter.due for waiter in waiting) - self._clock.monotonic())
            elif not waiting:
                # Let the answered waiters run: they remove themselves from the list.
                await asyncio.sleep(0)

    @staticmethod
    def _shared_s(waiter: _TimedWaiter[K, V]) -> float:
        return waiter.interval_s * SHARED_FRACTION

    async def _read_for(self, waiters: Collection[_TimedWaiter[K, V]]) -> None:
        now = self._clock.monotonic()
        factor = 1 + JITTER * (2 * self._ids.jitter() - 1)
        for waiter in waiters:
            # Set before the read, so that a wake-up during the read is not lost.
            waiter.due = now + waiter.interval_s * factor
            waiter.interval_s = waiter.interval.after(waiter.interval_s)
        try:
            found = await self._read({waiter.key for waiter in waiters})
        except Exception as error:  # noqa: BLE001 - a failed read must end the wait of all its waiters
            for waiter in waiters:
                waiter.fail(error)
            return
        for waiter in waiters:
            waiter.offer(found[waiter.key])
