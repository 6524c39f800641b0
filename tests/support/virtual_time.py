"""Helpers for tests in virtual time: running a coroutine, waiting for a condition, hooks around port calls."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, ParamSpec, TypeVar, cast

from remuda.adapters.github.client import TIMEOUT_S as GITHUB_TIMEOUT_S
from remuda.adapters.system.clock import SystemClock
from remuda.domain.errors import TimedOut, Unavailable
from simulation.fake_machine import FakeMachine
from simulation.loop import START, new_loop

T = TypeVar("T")
P = ParamSpec("P")
Call = Callable[[], Awaitable[Any]]
#: Called with the name of an operation ("store.apply") and the call itself; makes the call or does something else.
Hook = Callable[[str, Call], Awaitable[Any]]


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(work)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorate an asynchronous property: each of its examples runs in its own virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return run


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


# Hooks that interrupt a process at its n-th port call, or lose the answers of calls ---------------------------------


class CutKind(Enum):
    CANCEL_BEFORE = "cancelled, the call not made"
    CANCEL_AFTER = "cancelled, the call made and its answer lost"
    CRASH_BEFORE = "killed, the call not made"
    CRASH_AFTER = "killed, the call made and its answer lost"


class Cut:
    """Interrupts a process at its n-th call. A killed process makes no further call."""

    def __init__(self, at: int, kind: CutKind) -> None:
        self._at = at
        self._kind = kind
        self.calls: list[str] = []
        self.dead = asyncio.Event()
        self._discarded = False
        self._task: asyncio.Task[Any] | None = None

    async def run(self, work: Coroutine[Any, Any, Any]) -> BaseException | None:
        """Run a use case until it ends or is killed. Return its exception; None if it was killed or succeeded."""
        self._task = asyncio.create_task(work)
        dead = asyncio.create_task(self.dead.wait())
        await asyncio.wait({self._task, dead}, return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        if not self._task.done():
            return None
        return asyncio.CancelledError() if self._task.cancelled() else self._task.exception()

    async def discard(self) -> None:
        """Cancel the tasks of a killed process without letting them make a call."""
        self._discarded = True
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1)

    async def __call__(self, name: str, call: Call) -> Any:
        if self.dead.is_set():
            await self._hang_forever()
        self.calls.append(name)
        if len(self.calls) != self._at:
            answer = await call()
            if self.dead.is_set():
                await self._hang_forever()
            return answer
        if self._kind is CutKind.CRASH_BEFORE:
            await self._die()
        if self._kind is CutKind.CANCEL_BEFORE:
            await self._cancel()
        answer = await call()
        if self._kind is CutKind.CRASH_AFTER:
            await self._die()
        if self._kind is CutKind.CANCEL_AFTER:
            await self._cancel()
        return answer

    async def _die(self) -> None:
        self.dead.set()
        await self._hang_forever()

    async def _hang_forever(self) -> None:
        if self._discarded:
            raise Killed
        try:
            await asyncio.Future[None]()
        except asyncio.CancelledError:
            raise Killed from None

    async def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()
        # Let the cancellation arrive. Shielded code continues.
        for _ in range(3):
            await asyncio.sleep(0)


class AmbiguousAnswer:
    """Selected calls raise `Unavailable`, whether or not they were applied."""

    def __init__(self, operation: str, *, applied: bool, at: Collection[int] = (1,)) -> None:
        self._operation = operation
        self._applied = applied
        self._at = at
        self.count = 0

    async def __call__(self, name: str, call: Call) -> Any:
        if name != self._operation:
            return await call()
        self.count += 1
        if self.count not in self._at:
            return await call()
        if self._applied:
            await call()
        raise Unavailable(f"no answer to {name}")


def failing(operations: str, error: BaseException) -> Hook:
    """Fails each call whose name starts with this text."""

    async def hook(name: str, call: Call) -> Any:
        if name.startswith(operations):
            raise error
        return await call()

    return hook


def hanging(operations: str) -> Hook:
    """Lets each call whose name starts with this text hang until the client of GitHub gives up."""

    async def hook(name: str, call: Call) -> Any:
        if not name.startswith(operations):
            return await call()
        await asyncio.sleep(GITHUB_TIMEOUT_S)
        raise TimedOut(f"no answer to {name}")

    return hook


class AgentCut:
    """Kills the agent that makes the n-th call of all agents. Its machine starts a new one."""

    def __init__(self, at: int, *, applied: bool) -> None:
        self._at = at
        self._applied = applied
        self.calls: list[str] = []

    def __call__(self, machine: FakeMachine) -> Hook:
        alive = True

        async def hook(name: str, call: Call) -> Any:
            nonlocal alive
            if not alive:
                raise Killed
            self.calls.append(name)
            if len(self.calls) != self._at:
                return await call()
            if self._applied:
                await call()
            alive = False
            if machine.agent is not None and machine.agent.task is not None:
                machine.agent.task.cancel()
            raise Killed

        return hook
