"""Retries with exponential backoff and jitter, on the injected clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from remuda.domain.errors import RemudaError
from remuda.ports.clock import Clock, Ids

T = TypeVar("T")


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
    """Await `operation()` up to `attempts` times.

    `pause_s(error, attempt)` returns the seconds to wait before the next attempt, or None if the error is not worth a
    retry. The last error is raised.
    """
    for attempt in range(1, attempts + 1):
        try:
            return await operation()
        except RemudaError as error:
            wait_s = pause_s(error, attempt) if attempt < attempts else None
            if wait_s is None:
                raise
        await clock.sleep(wait_s)
    raise AssertionError  # pragma: no cover - the loop returns or raises
