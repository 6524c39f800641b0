"""Waiting for changes of the SQLite file: all waiters share one poll of the file's version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Generic, TypeVar, cast

from remuda.adapters.polling import Poller, Waiter
from remuda.ports.clock import Clock, Ids

K = TypeVar("K")
V = TypeVar("V")

#: Seconds between two polls: the first interval after a change, which then grows to the last one.
FIRST_INTERVAL_S = 0.010
LAST_INTERVAL_S = 0.050
GROWTH = 1.3

#: Reads the values of all keys (first argument). Unchanged values may be left out, but not for new keys (second one).
ReadValues = Callable[[Collection[K], Collection[K]], Awaitable[Mapping[K, V]]]


class ChangePoller(Poller[Waiter[K, V]], Generic[K, V]):
    def __init__(self, *, read_values: ReadValues[K, V], clock: Clock, ids: Ids) -> None:
        super().__init__(clock=clock, ids=ids)
        self._read_values = read_values
        self._new_keys: set[K] = set()

    async def wait(self, key: K, accepts: Callable[[V], bool], timeout_s: float) -> V:
        """Return the first value for which `accepts` is true, including the current one, or raise `TimeoutError`."""
        answer: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        self._new_keys.add(key)
        return cast("V", await self._wait_for_answer(Waiter(key=key, accepts=accepts, answer=answer), timeout_s))

    def wake(self) -> None:
        """Poll now, because this process has written to the file."""
        self._wake()

    def _stop(self) -> asyncio.Task[None] | None:
        self._new_keys.clear()
        return super()._stop()

    async def _poll(self) -> None:
        interval_s = FIRST_INTERVAL_S
        while self._waiters:
            try:
                changed = await self._poll_once()
            except Exception as error:  # noqa: BLE001 - waiters must not hang if polling fails
                self._poll_task = None
                for waiter in self._waiters:
                    waiter.fail(error)
                return
            interval_s = FIRST_INTERVAL_S if changed else min(interval_s * GROWTH, LAST_INTERVAL_S)
            if not self._woken:
                await self._sleep(interval_s * (1 + self._ids.jitter()) / 2)

    async def _poll_once(self) -> bool:
        self._woken = False
        new_keys, self._new_keys = self._new_keys, set()
        found = await self._read_values({waiter.key for waiter in self._waiters}, new_keys)
        for waiter in self._waiters:
            if waiter.key in found:
                waiter.offer(found[waiter.key])
        return bool(found)
