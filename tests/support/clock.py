"""Virtual time: an event loop that never waits. When nothing is ready it jumps to its next timer."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any, TypeVar

from tests.support.records import NOW

T = TypeVar("T")

#: A test that lives so long in virtual time has lost its way.
LIMIT_S = 30 * 86_400.0


class Stuck(AssertionError):
    """Nothing is ready and no timer is set: real code would wait for ever."""


class _Jumps(selectors.SelectSelector):
    """Looks at its files without waiting; the time that it should have waited is added to the clock."""

    elapsed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise Stuck
        self.elapsed_s += max(0.0, timeout)
        if self.elapsed_s > LIMIT_S:
            raise Stuck
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.elapsed_s


class VirtualClock:
    """The clock port over the running loop's time. It starts at NOW; `skew_s` moves the wall clock alone."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s

    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.monotonic() + self.skew_s)

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class PlainIds:
    """No chance at all: names count up, jitter is always the same."""

    def __init__(self) -> None:
        self._count = 0

    def new(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def jitter(self) -> float:
        return 1.0


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


async def until(holds: Callable[[], bool], *, within_s: float = 60.0, every_s: float = 0.01) -> None:
    """Let time pass until something holds; fail where it never does."""
    limit = asyncio.get_running_loop().time() + within_s
    while not holds():
        if asyncio.get_running_loop().time() >= limit:
            raise AssertionError(f"not within {within_s:g} s")
        await asyncio.sleep(every_s)


class FixedClock:
    """A wall clock that stands still, as in a frozen process. Waits are cut short; seconds still only rise."""

    def __init__(self, at: datetime) -> None:
        self._at = at
        self.slept_s = 0.0

    def now(self) -> datetime:
        return self._at

    def monotonic(self) -> float:
        return time.monotonic() + self.slept_s

    async def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        await asyncio.sleep(0)
