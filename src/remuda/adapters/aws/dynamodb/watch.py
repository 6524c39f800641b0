"""Waiting for changes of items: those who wait have a pace each, and share the calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from remuda.adapters.polling import Poller, Waiter
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
class _Paced(Waiter[K, V], Generic[K, V]):
    pace: Pace
    #: Looked at at once, then by its pace.
    due: float
    interval_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.interval_s = self.pace.first_s


class Watch(Poller[_Paced[K, V]], Generic[K, V]):
    def __init__(self, *, look: Look[K, V], clock: Clock, ids: Ids) -> None:
        super().__init__(clock=clock, ids=ids)
        self._look = look

    async def wait(self, key: K, accepts: Callable[[V], bool], *, pace: Pace, timeout_s: float) -> V:
        """The first value that `accepts` takes, be it the present one; `TimeoutError` where none came in time."""
        answer: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        waiter = _Paced(key=key, accepts=accepts, pace=pace, answer=answer, due=self._clock.monotonic())
        return cast("V", await self._wait_for_answer(waiter, timeout_s))

    def nudge(self, key: K) -> None:
        """Look now, if somebody waits for it: this process wrote it."""
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
                await self._look_once([each for each in self._waiters if each.due <= now + self._shared_s(each)])
            waiting = [waiter for waiter in self._waiters if not waiter.answer.done()]
            if waiting and not self._woken:
                await self._sleep(min(waiter.due for waiter in waiting) - self._clock.monotonic())
            elif not waiting:
                # Those who were answered have yet to run: they take themselves off the list.
                await asyncio.sleep(0)

    @staticmethod
    def _shared_s(waiter: _Paced[K, V]) -> float:
        return waiter.interval_s * SHARED_PART

    async def _look_once(self, waiters: Collection[_Paced[K, V]]) -> None:
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
