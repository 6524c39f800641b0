"""Time, unique ids and random numbers."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol


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
