"""The ports of the listener, and its background tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from datetime import tzinfo
from typing import Any, TypeVar

from remuda.controlplane.context import Context
from remuda.domain.errors import RemudaError
from remuda.ports.clock import retry
from remuda.ports.demand import DemandSource, DemandStore
from remuda.ports.launch import InstanceLaunch
from remuda.ports.metrics import MetricWriter

T = TypeVar("T")

#: Attempts of work that nothing else would do again, and the seconds between them: the two minutes of a spot notice.
INSIST_ATTEMPTS = 24
INSIST_PAUSE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class DemandContext:
    context: Context
    source: DemandSource
    store: DemandStore
    #: Raises `ValueError` for an unknown time zone.
    zone_of: Callable[[str], tzinfo]
    #: Identifies this process in the lease and in sessions.
    owner: str
    #: None if nothing stores metrics.
    metrics: MetricWriter | None = None
    #: None if no Auto Scaling group has launched the instance, for example in a container.
    launch: InstanceLaunch | None = None
    #: Whether the process with that owner's name is known to have ended.
    has_ended: Callable[[str], bool] = lambda _: False


async def insist(context: Context, name: str, work: Callable[[], Awaitable[T]]) -> T:
    """Repeat work that nothing else would do again, for about two minutes. Failures are logged as `name`-failed."""

    def pause_s(error: RemudaError, _attempt: int) -> float:
        context.event_log.record(f"{name}-failed", error.message)
        return INSIST_PAUSE_S

    return await retry(work, attempts=INSIST_ATTEMPTS, pause_s=pause_s, clock=context.clock)


@dataclass(kw_only=True, eq=False)
class BackgroundTasks:
    """Tasks that run beside the loops of the listener. An error ends only its own task."""

    context: Context
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guard(name, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except RemudaError as error:
            self.context.event_log.record(f"{name}-failed", error.message)
        except Exception as error:  # noqa: BLE001 - a bug in one task must not stop the others
            self.context.event_log.record(f"{name}-failed", f"a bug: {type(error).__name__}: {error}")

    async def drain(self, timeout_s: float) -> None:
        """Wait for the tasks, then cancel those that are left and wait until they have cleaned up."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        left = set(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
