"""Batches: items that come soon after each other and share a call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Batcher(Generic[T]):
    def __init__(self, handle: Callable[[list[T]], Awaitable[None]], *, size: int, window_s: float) -> None:
        """`handle` gets the items that have come `window_s` after the first of them, or as soon as there are `size`."""
        self._handle = handle
        self._size = size
        self._window_s = window_s
        self._waiting: list[T] = []
        self._is_full = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, item: T) -> None:
        if self._task is None or self._task.done():
            self._is_full.clear()
            self._task = asyncio.create_task(self._handle_soon())
        self._waiting.append(item)
        if len(self._waiting) >= self._size:
            self._is_full.set()

    async def close(self) -> None:
        """Handle what is left."""
        self._is_full.set()
        if self._task is not None:
            await self._task
        await self._handle_all()

    async def _handle_soon(self) -> None:
        try:
            async with asyncio.timeout(self._window_s):
                await self._is_full.wait()
        except TimeoutError:
            pass
        await self._handle_all()

    async def _handle_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            await self._handle(batch)
