"""Virtual time, chance with a seed, and ports that a test can reach into."""

from __future__ import annotations

import asyncio
import random  # noqa: TID251 - chance with a seed
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast

from tests.support.records import NOW

T = TypeVar("T")
Call = Callable[[], Awaitable[Any]]
#: Given the operation ("store.apply") and the call itself: does it, or something else.
Hook = Callable[[str, Call], Awaitable[Any]]


class Gone(BaseException):
    """Raised inside a process that a test has killed: whatever it catches, it cannot go on."""


class _NoWait(selectors.DefaultSelector):
    """Instead of waiting, the time is moved."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: nothing will ever happen again")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _NoWait()
        super().__init__(self._virtual)
        self.set_exception_handler(_complain)

    def time(self) -> float:
        return self._virtual.now


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Nobody asks what became of the tasks of a killed process."""
    if not isinstance(context.get("exception"), Gone):
        loop.default_exception_handler(context)


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class VirtualClock:
    def now(self) -> datetime:
        return NOW + timedelta(seconds=self.monotonic())

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SeededIds:
    def __init__(self, seed: int = 1) -> None:
        self._chance = random.Random(seed)  # noqa: S311 - a simulation
        self._last = 0

    def new(self, prefix: str) -> str:
        self._last += 1
        return f"{prefix}{self._last:06d}"

    def jitter(self) -> float:
        return self._chance.random()


class Notes:
    """A event_log that remembers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def record(self, action: str, why: str = "", **facts: Any) -> None:  # noqa: ARG002
        self.lines.append((action, why))

    def count(self, action: str) -> int:
        return sum(line[0] == action for line in self.lines)


class _Hooked:
    def __init__(self, port: Any, name: str, hook: Hook) -> None:
        self._port, self._name, self._hook = port, name, hook

    def __getattr__(self, operation: str) -> Any:
        inner = getattr(self._port, operation)
        if not asyncio.iscoroutinefunction(inner):
            return inner

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._hook(f"{self._name}.{operation}", lambda: inner(*args, **kwargs))

        return call


def hooked(port: T, name: str, hook: Hook | None) -> T:
    return port if hook is None else cast("T", _Hooked(port, name, hook))
