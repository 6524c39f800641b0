"""Waiting on a store that does not notify: one task looks for all who wait, and only while somebody does.

How often it looks, and for whom, is each store's own.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from remuda.domain.errors import Unavailable
from remuda.ports.clock import Clock, Ids

K = TypeVar("K")
V = TypeVar("V")
W = TypeVar("W", bound="Waiter[Any, Any]")


@dataclass(kw_only=True, slots=True, eq=False)
class Waiter(Generic[K, V]):
    key: K
    accepts: Callable[[V], bool]
    answer: asyncio.Future[V]

    def offer(self, value: V) -> None:
        if not self.answer.done() and self.accepts(value):
            self.answer.set_result(value)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Poller(ABC, Generic[W]):
    def __init__(self, *, clock: Clock, ids: Ids) -> None:
        self._clock = clock
        self._ids = ids
        self._waiters: list[W] = []
        self._nudged = False
        self._poller: asyncio.Task[None] | None = None
        self._nap: asyncio.Task[None] | None = None

    @abstractmethod
    async def _poll(self) -> None:
        """Look, answer, rest, until nobody waits any more."""

    async def close(self) -> None:
        for waiter in self._waiters:
            waiter.fail(Unavailable("the store was closed while somebody waited for a change"))
        poller = self._stop()
        if poller is not None:
            with suppress(asyncio.CancelledError):
                await poller

    async def _answered(self, waiter: W, timeout_s: float) -> Any:
        """`TimeoutError` where no answer came in time."""
        self._waiters.append(waiter)
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll())
        else:
            self._wake()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.answer
        finally:
            self._waiters.remove(waiter)
            if not self._waiters:
                self._stop()

    def _wake(self) -> None:
        self._nudged = True
        if self._nap is not None:
            self._nap.cancel()

    def _stop(self) -> asyncio.Task[None] | None:
        poller, self._poller = self._poller, None
        if poller is not None:
            poller.cancel()
        return poller

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
