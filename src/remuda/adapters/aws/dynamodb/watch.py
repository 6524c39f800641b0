"""Waiting for changes of items: one task looks for all who wait, in batches, and only while somebody does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from remuda.domain.errors import Unavailable
from remuda.ports.clock import Clock, Ids

K = TypeVar("K")
V = TypeVar("V")

#: Intervals are spread by this much to either side, so that processes do not march in step.
SPREAD = 0.2
#: A look takes along what would be due within this part of its interval: those who wait share calls.
SHARED_PART = 0.5

#: What there is for these keys.
Look = Callable[[Collection[K]], Awaitable[Mapping[K, V]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How long from one look to the next."""

    first_s: float
    last_s: float
    growth: float = 1.0

    def after(self, interval_s: float) -> float:
        return min(interval_s * self.growth, self.last_s)


@dataclass(kw_only=True, slots=True, eq=False)
class _Waiter(Generic[K, V]):
    key: K
    accepts: Callable[[V], bool]
    pace: Pace
    answer: asyncio.Future[V]
    #: Looked at at once, then by its pace.
    due: float
    interval_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.interval_s = self.pace.first_s

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
        self._poller: asyncio.Task[None] | None = None
        self._nap: asyncio.Task[None] | None = None
        self._nudged = False

    async def wait(self, key: K, accepts: Callable[[V], bool], *, pace: Pace, timeout_s: float) -> V:
        """The first value that `accepts` takes, be it the present one; `TimeoutError` where none came in time."""
        answer: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(key=key, accepts=accepts, pace=pace, answer=answer, due=self._clock.monotonic())
        self._waiters.append(waiter)
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll())
        else:
            self._wake()
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._waiters.remove(waiter)
            if not self._waiters:
                self._stop()

    def nudge(self, key: K) -> None:
        """Look now, if somebody waits for it: this process wrote it."""
        now = self._clock.monotonic()
        waiting = [waiter for waiter in self._waiters if waiter.key == key]
        for waiter in waiting:
            waiter.due = now
        if waiting:
            self._wake()

    async def close(self) -> None:
        for waiter in self._waiters:
            waiter.fail(Unavailable("the store was closed while somebody waited for a change"))
        poller = self._stop()
        if poller is not None:
            with suppress(asyncio.CancelledError):
                await poller

    def _wake(self) -> None:
        self._nudged = True
        if self._nap is not None:
            self._nap.cancel()

    def _stop(self) -> asyncio.Task[None] | None:
        poller, self._poller = self._poller, None
        if poller is not None:
            poller.cancel()
        return poller

    async def _poll(self) -> None:
        while self._waiters:
            self._nudged = False
            now = self._clock.monotonic()
            if any(waiter.due <= now for waiter in self._waiters):
                await self._look_once([each for each in self._waiters if each.due <= now + self._shared_s(each)])
            waiting = [waiter for waiter in self._waiters if not waiter.answer.done()]
            if waiting and not self._nudged:
                await self._rest(min(waiter.due for waiter in waiting) - self._clock.monotonic())
            elif not waiting:
                # Those who were answered have yet to run: they take themselves off the list.
                await asyncio.sleep(0)

    @staticmethod
    def _shared_s(waiter: _Waiter[K, V]) -> float:
        return waiter.interval_s * SHARED_PART

    async def _look_once(self, waiters: Collection[_Waiter[K, V]]) -> None:
        now = self._clock.monotonic()
        spread = 1 + SPREAD * (2 * self._ids.jitter() - 1)
        for waiter in waiters:
            # Before the look: a nudge that comes meanwhile is not lost.
            waiter.due = now + waiter.interval_s * spread
            waiter.interval_s = waiter.pace.after(waiter.interval_s)
        try:
            found = await self._look({waiter.key for waiter in waiters})
        except Exception as error:  # noqa: BLE001 - nobody may be left waiting for a look that has failed
            for waiter in waiters:
                waiter.fail(error)
            return
        for waiter in waiters:
            waiter.offer(found[waiter.key])

    async def _rest(self, seconds: float) -> None:
        """A sleep that a nudge ends."""
        if seconds <= 0:
            return
        nap = asyncio.create_task(self._clock.sleep(seconds))
        self._nap = nap
        try:
            await asyncio.wait({nap})
        finally:
            nap.cancel()
            if self._nap is nap:
                self._nap = None
