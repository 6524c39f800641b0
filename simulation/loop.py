"""Virtual time: an event loop that never waits, and processes that can die or stop between any two steps.

When nothing is ready, time jumps to the next timer. Of what is ready, chance with a seed picks the next, so that one
seed is one history. Every callback belongs to the process in whose context it was made: a process that has crashed runs
nothing more, not even its clean-up; one that is paused goes on later, where it was.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import random
import sys
import warnings
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

T = TypeVar("T")

#: When every simulated world begins.
START = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)


class Stuck(AssertionError):
    """Nothing is ready and no timer is set: real code would wait for ever."""


class _Callback(asyncio.TimerHandle):
    """What will be called, and in whose context. Lighter than what asyncio has: there are millions of them."""

    __slots__ = ("call", "given", "of", "off", "process")

    def __init__(self, call: Callable[..., object], given: tuple[Any, ...], of: Context) -> None:
        self.call = call
        self.given = given
        self.of = of
        self.off = False
        self.process = of.get(_PROCESS)

    def cancel(self) -> None:
        self.off = True
        self.call = _nothing
        self.given = ()

    def cancelled(self) -> bool:
        return self.off

    def __repr__(self) -> str:
        return f"<{self.call} of {self.process}>"


class _Task(asyncio.Task[T]):
    """Hashes by its number: asyncio keeps tasks in sets, and cancels them in the order of those."""

    def __init__(self, work: Coroutine[Any, Any, T], loop: VirtualLoop, name: str, context: Context | None) -> None:
        # First: asyncio hashes it while it is being made.
        self._number = loop.next_number()
        super().__init__(work, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


def _nothing() -> None:
    """In place of what was cancelled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Before its n-th step a process crashes, or stands still for so long."""

    step: int
    #: 0: it crashes.
    pause_s: float = 0.0


class Process:
    """What lives and dies together: one run of a command, or one agent. Its wall clock may be off."""

    def __init__(self, loop: VirtualLoop, name: str, *, skew_s: float = 0.0, cuts: Sequence[Cut] = ()) -> None:
        self.loop = loop
        self.name = name
        self.skew_s = skew_s
        self.dead = False
        self.paused = False
        self.steps = 0
        #: Told when a cut happens, with what it is.
        self.on_cut: Callable[[Cut], None] = lambda _cut: None
        #: Told when it ends, however it does.
        self.on_end: Callable[[], None] = lambda: None
        self.task: asyncio.Task[Any] | None = None
        self._cuts = sorted(cuts, key=lambda cut: cut.step, reverse=True)
        #: The loop looks at these two before each step.
        self.next_cut = self._cuts[-1].step if self._cuts else 0
        self.goes_on = True
        self._parked: list[_Callback] = []
        self._context = contextvars.copy_context()
        self._context.run(_PROCESS.set, self)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        self.task = self.loop.create_task(work, context=self._context)
        self.task.add_done_callback(lambda _: self.on_end(), context=self.loop.outside)

    def crash(self) -> None:
        """As kill -9 does: no clean-up, no answer, whatever it was about to do."""
        if self.dead or (self.task is not None and self.task.done()):
            return
        self.dead, self.goes_on = True, False
        self.loop.keep(self._parked)
        self.loop.call_soon(self.on_end, context=self.loop.outside)

    def pause(self, seconds: float) -> None:
        """As SIGSTOP does, or a starved machine: time goes on without it."""
        if not self.paused:
            self.paused, self.goes_on = True, False
            self.loop.call_later(seconds, self._resume, context=self.loop.outside)

    def _resume(self) -> None:
        self.paused, self.goes_on = False, not self.dead
        parked, self._parked = self._parked, []
        self.loop.take_up(parked)

    def hold(self, callback: _Callback) -> None:
        """A step that it can't take now, or ever."""
        if self.dead:
            self.loop.keep([callback])
        else:
            self._parked.append(callback)

    def cut(self, callback: _Callback) -> None:
        """The step before which it was to crash or to pause."""
        cut = self._cuts.pop()
        self.next_cut = self._cuts[-1].step if self._cuts else 0
        self._parked.append(callback)
        self.on_cut(cut)
        if cut.pause_s:
            self.pause(cut.pause_s)
        else:
            self.crash()

    def __repr__(self) -> str:
        return self.name


_PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


def current_process() -> Process | None:
    return _PROCESS.get()


class VirtualLoop(asyncio.AbstractEventLoop):
    def __init__(self, chance: random.Random) -> None:
        self._random = chance.random
        self._now = 0.0
        self._ready: list[_Callback] = []
        #: Callbacks, and futures of those who only rest.
        self._timers: list[tuple[float, int, _Callback | asyncio.Future[None]]] = []
        self._count = 0
        self.steps = 0
        #: The context of what belongs to no process: machines, GitHub, people.
        self.outside = contextvars.copy_context()
        self.outside.run(_PROCESS.set, None)
        #: What went wrong where nobody could catch it.
        self.complaints: list[BaseException] = []
        self._kept: list[_Callback] = []
        self._tasks: list[asyncio.Task[Any]] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end of `work`. What still waits then never goes on."""
        asyncio._set_running_loop(self)  # noqa: SLF001 - what every event loop calls
        try:
            task = self.create_task(work, context=self.outside)
            while not task.done():
                self._run_some()
                if self.complaints:
                    raise self.complaints[0]
            return task.result()
        finally:
            asyncio._set_running_loop(None)  # noqa: SLF001

    def _run_some(self) -> None:
        """All that is ready at this time, and what becomes ready through it; then time moves."""
        ready, chance = self._ready, self._random
        if not ready:
            self._advance()
        while ready:
            count = len(ready)
            if count > 1:
                chosen = int(chance() * count)
                ready[chosen], ready[-1] = ready[-1], ready[chosen]
            callback = ready.pop()
            if callback.off:
                continue
            process = callback.process
            if process is not None and not process.goes_on:
                process.hold(callback)
                continue
            if process is not None:
                process.steps += 1
                if process.steps == process.next_cut:
                    process.cut(callback)
                    continue
            self.steps += 1
            try:
                callback.of.run(callback.call, *callback.given)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - kept, and raised by `run`
                self.complaints.append(error)
            if self.complaints:
                return

    def _advance(self) -> None:
        timers, ready = self._timers, self._ready
        if not timers:
            raise Stuck
        now = self._now = timers[0][0]
        while timers and timers[0][0] <= now:
            due = heapq.heappop(timers)[2]
            if isinstance(due, _Callback):
                if not due.off:
                    ready.append(due)
            elif not due.done():
                due.set_result(None)

    def rest(self, seconds: float) -> asyncio.Future[None]:
        """To be awaited, as `asyncio.sleep` is; but waking up is one step of the sleeper, and not two."""
        over: asyncio.Future[None] = asyncio.Future(loop=self)
        self._count += 1
        heapq.heappush(self._timers, (self._now + seconds, self._count, over))
        return over

    def take_up(self, callbacks: Sequence[_Callback]) -> None:
        self._ready.extend(callbacks)

    def keep(self, callbacks: Sequence[_Callback]) -> None:
        """What a dead process would have run: kept, for what is let go of would run its clean-up."""
        self._kept.extend(callbacks)

    def keep_task(self, task: asyncio.Task[Any]) -> None:
        """A task of nobody: it lives until it is done."""
        self._tasks.append(task)

    # What asyncio asks of a loop. It ties the arguments to the callback; here any will do.

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Callback:
        made = _Callback(callback, args, context or contextvars.copy_context())
        self._ready.append(made)
        return made

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Callback:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Callback:
        made = _Callback(callback, args, context or contextvars.copy_context())
        self._count += 1
        heapq.heappush(self._timers, (max(when, self._now), self._count, made))
        return made

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None, **_: Any
    ) -> asyncio.Task[T]:
        return _Task(coro, self, name or "", context)

    def next_number(self) -> int:
        self._count += 1
        return self._count

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Nobody asks what became of a dead process's tasks."""


def new_loop(chance: random.Random) -> VirtualLoop:
    # Of what asyncio calls abstract, nothing is asked of a loop without files, sockets and signals.
    return VirtualLoop(chance)  # type: ignore[abstract]


class VirtualClock:
    """The clock port over a loop's time. A process's skew moves its wall clock alone."""

    def __init__(self, loop: VirtualLoop, process: Process | None = None) -> None:
        self._loop = loop
        self._process = process
        self._shown_at = 0.0
        self._shown = START

    def now(self) -> datetime:
        at = self._loop.time() + (self._process.skew_s if self._process else 0.0)
        if at != self._shown_at:
            self._shown_at, self._shown = at, START + timedelta(seconds=at)
        return self._shown

    def monotonic(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await self._loop.rest(seconds)


class SeededIds:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._last = 0

    def new(self, prefix: str) -> str:
        self._last += 1
        return f"{prefix}{self._last:06d}"

    def jitter(self) -> float:
        return self._chance.random()


@contextmanager
def undisturbed() -> Generator[None]:
    """Nothing is collected while a world lives; afterwards, what its dead processes left behind goes silently.

    What is collected runs its clean-up, at a time that no seed decides.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # Twice: what the first clean-ups began is still tied to the world.
                for _ in range(2):
                    with _nobodys_loop():
                        gc.collect()
        finally:
            sys.unraisablehook = hook
            if was_on:
                gc.enable()


@contextmanager
def _nobodys_loop() -> Generator[None]:
    """For clean-ups that start tasks: without a loop of their own, asyncio would make one that lives as long as the
    interpreter, and through its tasks every world that ever was would live on with it.
    """
    before = asyncio._get_running_loop()  # noqa: SLF001 - as in `VirtualLoop.run`
    asyncio._set_running_loop(new_loop(random.Random(0)))  # noqa: SLF001
    try:
        yield
    finally:
        asyncio._set_running_loop(before)  # noqa: SLF001
