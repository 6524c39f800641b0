"""Virtual time: an event loop that never waits, processes that can crash or pause at any step, clock and ids.

When nothing is ready, time jumps to the next timer. With a random generator the loop picks the next callback at random,
so that one seed gives one history; without one it runs callbacks in order. Every callback belongs to the process in
whose context it was created: a crashed process runs nothing more, not even its clean-up, and a paused one continues
later.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import random
import sys
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

T = TypeVar("T")

#: Time at which every simulated world begins.
START = datetime(2025, 5, 31, 12, 0, tzinfo=UTC)
#: Steps at one time after which they will not end.
MAX_STEPS_AT_ONCE = 500_000


class Deadlock(AssertionError):
    """Nothing is ready and no timer is set: real code would wait forever."""


class Livelock(AssertionError):
    """Steps follow each other without an end, and time stands still: real code would use a core for nothing.

    The time limit of a test does not end it: the error that it raises ends only the task that runs at the moment.
    """


class _Callback(asyncio.TimerHandle):
    """A callback and its context. Lighter than asyncio's handle, because there are millions of them."""

    __slots__ = ("args", "context", "function", "is_cancelled", "process")

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...], context: Context) -> None:
        self.function = function
        self.args = args
        self.context = context
        self.is_cancelled = False
        self.process = context.get(_PROCESS)

    def cancel(self) -> None:
        self.is_cancelled = True
        self.function = _nothing
        self.args = ()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def __repr__(self) -> str:
        return f"<{self.function} of {self.process}>"


class _Task(asyncio.Task[T]):
    """Hashes by its number: asyncio keeps tasks in sets and cancels them in the order of the set."""

    def __init__(self, work: Coroutine[Any, Any, T], loop: VirtualLoop, name: str, context: Context | None) -> None:
        # Set first: asyncio hashes the task in its constructor.
        self._number = loop.next_number()
        super().__init__(work, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


def _nothing() -> None:
    """Replaces a cancelled callback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruption:
    """A crash or a pause of a process before its step of this number."""

    step: int
    #: Length of the pause in seconds; 0 for a crash.
    pause_s: float = 0.0


class VirtualProcess:
    """Tasks and timers that crash and pause together: one run of a command, or one agent. Its wall clock may be off."""

    def __init__(
        self, loop: VirtualLoop, name: str, *, skew_s: float = 0.0, interruptions: Sequence[Interruption] = ()
    ) -> None:
        self.loop = loop
        self.name = name
        self.skew_s = skew_s
        self.dead = False
        self.paused = False
        self.steps = 0
        #: Called with each interruption when it happens.
        self.on_interruption: Callable[[Interruption], None] = lambda _interruption: None
        #: Called when the process ends or crashes.
        self.on_end: Callable[[], None] = lambda: None
        self.task: asyncio.Task[Any] | None = None
        self._interruptions = sorted(interruptions, key=lambda item: item.step, reverse=True)
        # The loop checks these two before each step.
        self.next_interruption = self._interruptions[-1].step if self._interruptions else 0
        self.runnable = True
        self._held: list[_Callback] = []
        self._context = contextvars.copy_context()
        self._context.run(_PROCESS.set, self)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        self.task = self.loop.create_task(work, context=self._context)
        self.task.add_done_callback(lambda _: self.on_end(), context=self.loop.outside)

    def crash(self) -> None:
        """Stop at once, like `kill -9`: no clean-up runs."""
        if self.dead or (self.task is not None and self.task.done()):
            return
        self.dead, self.runnable = True, False
        self.loop.keep_alive(self._held)
        self.loop.call_soon(self.on_end, context=self.loop.outside)

    def pause(self, seconds: float) -> None:
        """Stop for this time, like SIGSTOP or a starved machine."""
        if self.stop():
            self.loop.call_later(seconds, self.resume, context=self.loop.outside)

    def stop(self) -> bool:
        """Stop until `resume` is called. Return False if it is stopped already."""
        if self.paused:
            return False
        self.paused, self.runnable = True, False
        return True

    def resume(self) -> None:
        self.paused, self.runnable = False, not self.dead
        held, self._held = self._held, []
        self.loop.resume(held)

    def hold(self, callback: _Callback) -> None:
        """Take a callback that the process cannot run now, or ever."""
        if self.dead:
            self.loop.keep_alive([callback])
        else:
            self._held.append(callback)

    def interrupt(self, callback: _Callback) -> None:
        """Crash or pause before the step `callback`."""
        interruption = self._interruptions.pop()
        self.next_interruption = self._interruptions[-1].step if self._interruptions else 0
        self._held.append(callback)
        self.on_interruption(interruption)
        if interruption.pause_s:
            self.pause(interruption.pause_s)
        else:
            self.crash()

    def __repr__(self) -> str:
        return self.name


_PROCESS: ContextVar[VirtualProcess | None] = ContextVar("process", default=None)


def current_process() -> VirtualProcess | None:
    return _PROCESS.get()


class VirtualLoop(asyncio.AbstractEventLoop):
    def __init__(self, rng: random.Random | None = None) -> None:
        self._random = rng.random if rng is not None else None
        self._now = 0.0
        self._ready: list[_Callback] = []
        #: Callbacks, and the futures of `sleep`.
        self._timers: list[tuple[float, int, _Callback | asyncio.Future[None]]] = []
        self._count = 0
        self.steps = 0
        #: Context of callbacks that belong to no process: machines, GitHub, users.
        self.outside = contextvars.copy_context()
        self.outside.run(_PROCESS.set, None)
        #: Exceptions of callbacks; the first one ends `run`.
        self.errors: list[BaseException] = []
        self._kept: list[_Callback] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._closed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run until `work` ends. Other tasks never continue after that."""
        return self._run(self.create_task(work, context=self.outside))

    def _run(self, until: asyncio.Future[T]) -> T:
        asyncio._set_running_loop(self)  # noqa: SLF001 - every event loop calls this
        try:
            while not until.done():
                self._run_ready()
                if self.errors:
                    raise self.errors[0]
                if self._ready:
                    raise Livelock
            return until.result()
        finally:
            asyncio._set_running_loop(None)  # noqa: SLF001

    def _run_ready(self) -> None:
        """Run everything that is ready now or becomes ready through it; move time only if nothing is ready."""
        ready, pick = self._ready, self._random
        if not ready:
            self._advance()
        last_step = self.steps + MAX_STEPS_AT_ONCE
        while ready and self.steps < last_step:
            if pick is None:
                callback = ready.pop(0)
            else:
                count = len(ready)
                if count > 1:
                    chosen = int(pick() * count)
                    ready[chosen], ready[-1] = ready[-1], ready[chosen]
                callback = ready.pop()
            if callback.is_cancelled:
                continue
            process = callback.process
            if process is not None and not process.runnable:
                process.hold(callback)
                continue
            if process is not None:
                process.steps += 1
                if process.steps == process.next_interruption:
                    process.interrupt(callback)
                    continue
            self.steps += 1
            try:
                callback.context.run(callback.function, *callback.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - raised by `run`
                self.errors.append(error)
            if self.errors:
                return

    def _advance(self) -> None:
        timers, ready = self._timers, self._ready
        if not timers:
            raise Deadlock
        now = self._now = timers[0][0]
        while timers and timers[0][0] <= now:
            due = heapq.heappop(timers)[2]
            if isinstance(due, _Callback):
                if not due.is_cancelled:
                    ready.append(due)
            elif not due.done():
                due.set_result(None)

    def sleep(self, seconds: float) -> asyncio.Future[None]:
        """An awaitable like `asyncio.sleep`, but with one step to wake up instead of two."""
        over: asyncio.Future[None] = asyncio.Future(loop=self)
        self._count += 1
        heapq.heappush(self._timers, (self._now + seconds, self._count, over))
        return over

    def resume(self, callbacks: Sequence[_Callback]) -> None:
        self._ready.extend(callbacks)

    def keep_alive(self, callbacks: Sequence[_Callback]) -> None:
        """Keep references to callbacks of a crashed process: if they were collected, their clean-up would run."""
        self._kept.extend(callbacks)

    def keep_task(self, task: asyncio.Task[Any]) -> None:
        """Keep a reference to a task of no process until the loop ends."""
        self._tasks.append(task)

    # The interface of asyncio. Its types tie the arguments to the callback; here any arguments are accepted.

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

    #: Every new future and task calls it. `bool()` is False, and needs no frame.
    get_debug = staticmethod(bool)

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self  # noqa: SLF001

    def is_closed(self) -> bool:
        return self._closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ignored: tasks of a crashed process are never awaited."""

    # Used by `asyncio.Runner`, and so by tests.

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        try:
            return self._run(cast("asyncio.Future[T]", asyncio.ensure_future(cast("Awaitable[T]", future), loop=self)))
        finally:
            sys.set_asyncgen_hooks(*hooks)

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.keep_task(self.create_task(generator.aclose()))

    async def shutdown_asyncgens(self) -> None:
        """Nothing to do: generators are closed when they are collected."""

    async def shutdown_default_executor(self) -> None:
        """There is no executor."""

    def run_in_executor(  # type: ignore[override]
        self, _executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run at once: threads would bring real time back."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            done.set_exception(error)
        return done

    def set_debug(self, enabled: bool) -> None:  # noqa: FBT001 - of the interface
        """Ignored."""

    def close(self) -> None:
        self._closed = True


def new_loop(rng: random.Random | None = None) -> VirtualLoop:
    # The other abstract methods concern files, sockets and signals.
    return VirtualLoop(rng)  # type: ignore[abstract]


class VirtualClock:
    """The clock port over the time of a loop, by default the running one. Skew moves the wall clock only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        process: VirtualProcess | None = None,
        *,
        skew_s: float = 0.0,
    ) -> None:
        self._loop = loop
        self._skew_s = process.skew_s if process is not None else skew_s
        self._cached_at = 0.0
        self._cached = START

    def now(self) -> datetime:
        at = (self._loop or asyncio.get_running_loop()).time() + self._skew_s
        if at != self._cached_at:
            self._cached_at, self._cached = at, START + timedelta(0, at)
        return self._cached

    def monotonic(self) -> float:
        return (self._loop or asyncio.get_running_loop()).time()

    async def sleep(self, seconds: float) -> None:
        loop = self._loop or asyncio.get_running_loop()
        await (loop.sleep(seconds) if isinstance(loop, VirtualLoop) else asyncio.sleep(seconds))


class SeededIds:
    """The ids port: names count up, jitter is fixed or comes from a seeded generator."""

    def __init__(self, rng: random.Random | None = None, *, jitter: float | None = None) -> None:
        self._rng = rng or random.Random(1)
        self._jitter = jitter
        self._last = 0

    def new(self, prefix: str) -> str:
        self._last += 1
        return f"{prefix}{self._last:06d}"

    def jitter(self) -> float:
        return self._rng.random() if self._jitter is None else self._jitter


@contextmanager
def without_gc() -> Generator[None]:
    """Disable garbage collection while a world runs, then collect what its crashed processes left, silently.

    Collected coroutines run their clean-up, at a time that no seed decides.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # Twice: tasks that the first clean-ups started still refer to the world.
                for _ in range(2):
                    with _temporary_loop():
                        gc.collect()
        finally:
            sys.unraisablehook = hook
            if was_enabled:
                gc.enable()


@contextmanager
def _temporary_loop() -> Generator[None]:
    """A loop for clean-ups that start tasks. Without it asyncio would create one that exists as long as the
    interpreter, and its tasks would keep every world alive.
    """
    before = asyncio._get_running_loop()  # noqa: SLF001 - as in `VirtualLoop.run`
    asyncio._set_running_loop(new_loop())  # noqa: SLF001
    try:
        yield
    finally:
        asyncio._set_running_loop(before)  # noqa: SLF001
