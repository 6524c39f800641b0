"""Waiting for a change of the file: all who wait share one pace, and one look at the file's version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Generic, TypeVar, cast

from remuda.adapters.polling import Poller, Waiter
from remuda.ports.clock import Clock, Ids

K = TypeVar("K")
V = TypeVar("V")

#: The time between two looks: short after something happened, longer while nothing does.
FIRST_INTERVAL_S = 0.010
LAST_INTERVAL_S = 0.050
GROWTH = 1.3

#: What there is for these keys, and for the second ones in any case: they are new. May leave out what did not change.
Look = Callable[[Collection[K], Collection[K]], Awaitable[Mapping[K, V]]]


class ChangePoller(Poller[Waiter[K, V]], Generic[K, V]):
    def __init__(self, *, look: Look[K, V], clock: Clock, ids: Ids) -> None:
        super().__init__(clock=clock, ids=ids)
        self._look = look
        self._new: set[K] = set()

    async def wait(self, key: K, accepts: Callable[[V], bool], timeout_s: float) -> V:
        """The first value that `accepts` takes, be it the present one; `TimeoutError` where none came in time."""
        answer: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        self._new.add(key)
        return cast("V", await self._answered(Waiter(key=key, accepts=accepts, answer=answer), timeout_s))

    def nudge(self) -> None:
        """Something was written by this process: look now."""
        self._wake()

    def _stop(self) -> asyncio.Task[None] | None:
        self._new.clear()
        return super()._stop()

    async def _poll(self) -> None:
        interval_s = FIRST_INTERVAL_S
        while self._waiters:
            try:
                news = await self._look_once()
            except Exception as error:  # noqa: BLE001 - nobody may be left waiting for a poller that has died
                self._poller = None
                for waiter in self._waiters:
                    waiter.fail(error)
                return
            interval_s = FIRST_INTERVAL_S if news else min(interval_s * GROWTH, LAST_INTERVAL_S)
            if not self._nudged:
                await self._rest(interval_s * (1 + self._ids.jitter()) / 2)

    async def _look_once(self) -> bool:
        self._nudged = False
        new, self._new = self._new, set()
        found = await self._look({waiter.key for waiter in self._waiters}, new)
        for waiter in self._waiters:
            if waiter.key in found:
                waiter.offer(found[waiter.key])
        return bool(found)
