"""Polling for stores without notifications: one task polls for all waiters, and only while there are waiters.

Each store decides the polling interval and what one poll reads.
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
        self._woken = False
        self._poll_task: asyncio.Task[None] | None = None
        self._sleep_task: asyncio.Task[None] | None = None

    @abstractmethod
    async def _poll(self) -> None:
        """Read, resolve the waiters, sleep; repeat until there are no waiters."""

    async def close(self) -> None:
        for waiter in self._waiters:
            waiter.fail(Unavailable("the store was closed during a wait for a change"))
        poll_task = self._stop()
        if poll_task is not None:
            with suppress(asyncio.CancelledError):
                await poll_task

    async def _wait_for_answer(self, waiter: W, timeout_s: float) -> Any:
        """Wait for the answer. Raises `TimeoutError` at the timeout."""
        self._waiters.append(waiter)
        if self._poll_task is None:
            self._poll_task = asyncio.create_task(self._poll())
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
        self._woken = True
        if self._sleep_task is not None:
            self._sleep_task.cancel()

    def _stop(self) -> asyncio.Task[None] | None:
        poll_task, self._poll_task = self._poll_task, None
        if poll_task is not None:
            poll_task.cancel()
        return poll_task

    async def _sleep(self, seconds: float) -> None:
        """Sleep until the time is over or `_wake` is called."""
        if seconds <= 0:
            return
        sleep_task = asyncio.create_task(self._clock.sleep(seconds))
        self._sleep_task = sleep_task
        try:
            await asyncio.wait({sleep_task})
        finally:
            sleep_task.cancel()
            if self._sleep_task is sleep_task:
                self._sleep_task = None
