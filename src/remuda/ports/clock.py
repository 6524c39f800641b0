"""Time, unique ids and random numbers, and retries that use them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Protocol, TypeVar

from remuda.domain.errors import RemudaError

T = TypeVar("T")


class Clock(Protocol):
    """Clocks of one process. The wall clock may be wrong by the margin; safety never depends on it."""

    def now(self) -> datetime:
        """Return the wall-clock time in UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never decrease, for waits and heartbeats."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class Ids(Protocol):
    """Unique ids and random numbers."""

    def new(self, prefix: str) -> str:
        """Return `prefix` followed by a globally unique part."""
        ...

    def jitter(self) -> float:
        """Return a random number from 0 to 1, to spread retries of concurrent processes."""
        ...


def backoff_s(attempt: int, *, first_s: float, ids: Ids) -> float:
    """Seconds to wait after the failed attempt number `attempt` (from 1): doubled each time, ±50 % jitter."""
    return first_s * float(2 ** (attempt - 1)) * (0.5 + ids.jitter())


async def retry(
    operation: Callable[[], Awaitable[T]],
    *,
    attempts: int,
    pause_s: Callable[[RemudaError, int], float | None],
    clock: Clock,
) -> T:
    """Await `operation()` up to `attempts` times, on the injected clock.

    `pause_s(error, attempt)` returns the seconds to wait before the next attempt, or None if the error is not worth a
    retry. It is called after each failed attempt, also after the last one, whose error is raised.
    """
    for attempt in range(1, attempts + 1):
        try:
            return await operation()
        except RemudaError as error:
            wait_s = pause_s(error, attempt)
            if wait_s is None or attempt == attempts:
                raise
        await clock.sleep(wait_s)
    raise AssertionError  # pragma: no cover - the loop returns or raises
