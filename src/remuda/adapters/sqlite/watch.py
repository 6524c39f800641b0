"""Waiting for a change of the file: one task looks for all who wait, and only while somebody does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from remuda.domain.errors import Unavailable
from remuda.ports.clock import Clock, Ids

K = TypeVar("K")
V = TypeVar("V")

#: The time between two looks: short after something happened, longer while nothing does.
FIRST_INTERVAL_S = 0.010
LAST_INTERVAL_S = 0.050
GROWTH = 1.3

#: What there is for these keys, and for the second ones in any case: they are new. May leave out what did not change.
Look = Callable[[Collection[K], Collection[K]], Awaitable[Mapping[K, V]]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Waiter(Generic[K, V]):
    key: K
    accepts: Callable[[V], bool]
    answer: asyncio.Future[V]

    def offer(self, value: V) -> None:
        if not self.answer.done() and self.accepts(value):
            self.answer.set_result(value)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Watch(Generic[K, V]):
    def __init__(self, *, look: Look[K, V], clock: Clock, ids: Ids) -> None:
        self._look = look
        self._clock = clock
        self._ids = ids
        self._waiters: list[_Waiter[K, V]] = []
        self._new: set[K] = set()
        self._poller: asyncio.Task[None] | None = None
        self._nap: asyncio.Task[None] | None = None
        self._nudged = False

    async def wait(self, key: K, accepts: Callable[[V], bool], timeout_s: float) -> V:
        """The first value that `accepts` takes, be it the present one; `TimeoutError` where none came in time."""
        answer: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(key=key, accepts=accepts, answer=answer)
        self._waiters.append(waiter)
        self._new.add(key)
        self._start()
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._waiters.remove(waiter)
            if not self._waiters:
                self._stop()

    def nudge(self) -> None:
        """Something was written by this process: look now."""
        self._nudged = True
        if self._nap is not None:
            self._nap.cancel()

    async def close(self) -> None:
        for waiter in self._waiters:
            waiter.fail(Unavailable("the store was closed while somebody waited for a change"))
        poller = self._stop()
        if poller is not None:
            with suppress(asyncio.CancelledError):
                await poller

    def _start(self) -> None:
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll())
        else:
            self.nudge()

    def _stop(self) -> asyncio.Task[None] | None:
        poller, self._poller = self._poller, None
        self._new.clear()
        if poller is not None:
            poller.cancel()
        return poller

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
                await self._rest(interval_s)

    async def _look_once(self) -> bool:
        self._nudged = False
        new, self._new = self._new, set()
        found = await self._look({waiter.key for waiter in self._waiters}, new)
        for waiter in self._waiters:
            if waiter.key in found:
                waiter.offer(found[waiter.key])
        return bool(found)

    async def _rest(self, interval_s: float) -> None:
        """A sleep that a nudge ends."""
        nap = asyncio.create_task(self._clock.sleep(interval_s * (1 + self._ids.jitter()) / 2))
        self._nap = nap
        try:
            await asyncio.wait({nap})
        finally:
            nap.cancel()
            if self._nap is nap:
                self._nap = None
