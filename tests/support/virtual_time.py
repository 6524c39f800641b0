"""Helpers for tests in virtual time: running a coroutine, waiting for a condition, hooks around port calls."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast

from remuda.adapters.system.clock import SystemClock
from simulation.loop import START, new_loop

T = TypeVar("T")
Call = Callable[[], Awaitable[Any]]
#: Called with the name of an operation ("store.apply") and the call itself; makes the call or does something else.
Hook = Callable[[str, Call], Awaitable[Any]]


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(work)


async def until(holds: Callable[[], bool], *, within_s: float = 60.0, every_s: float = 0.01) -> None:
    """Wait until a condition holds, in the time of the running loop."""
    limit = asyncio.get_running_loop().time() + within_s
    while not holds():
        if asyncio.get_running_loop().time() >= limit:
            raise AssertionError(f"not within {within_s:g} s")
        await asyncio.sleep(every_s)


class AdjustableClock(SystemClock):
    """The real clock, moved by `ahead_s`. Sleeps are recorded and shortened to a limit."""

    def __init__(self, *, longest_sleep_s: float = math.inf) -> None:
        self.ahead_s = 0.0
        self.slept: list[float] = []
        self._longest_sleep_s = longest_sleep_s

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.ahead_s)

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(min(seconds, self._longest_sleep_s))


class FixedClock:
    """A clock that only `passed_s` moves. Sleeps return at once and advance the monotonic time alone."""

    def __init__(self, at: datetime = START) -> None:
        self._at = at
        self.passed_s = 0.0
        self.slept_s = 0.0

    def now(self) -> datetime:
        return self._at + timedelta(seconds=self.passed_s)

    def monotonic(self) -> float:
        return self.passed_s + self.slept_s

    async def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        await asyncio.sleep(0)


class EventRecorder:
    """An event log that keeps its events in memory."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def record(self, action: str, why: str = "", **facts: Any) -> None:  # noqa: ARG002
        self.lines.append((action, why))

    def count(self, action: str) -> int:
        return sum(line[0] == action for line in self.lines)


class Killed(BaseException):
    """Raised inside a process that a test has killed, so that it cannot continue whatever it catches."""


class _HookedPort:
    def __init__(self, port: Any, name: str, hook: Hook) -> None:
        self._port, self._name, self._hook = port, name, hook

    def __getattr__(self, operation: str) -> Any:
        inner = getattr(self._port, operation)
        if not inspect.iscoroutinefunction(inner):
            return inner

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._hook(f"{self._name}.{operation}", lambda: inner(*args, **kwargs))

        return call


def hooked(port: T, name: str, hook: Hook | None) -> T:
    """The port with a hook around each of its calls."""
    return port if hook is None else cast("T", _HookedPort(port, name, hook))
