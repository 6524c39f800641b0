"""Helpers for tests in virtual time: running a coroutine, waiting for a condition, hooks around port calls."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime
from typing import Any, TypeVar, cast

from simulation.loop import new_loop

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


class FixedClock:
    """A wall clock that stands still. Sleeps return at once and advance the monotonic time."""

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
