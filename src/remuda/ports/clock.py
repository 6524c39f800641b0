"""Time, ids and chance: the only way they come in."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol


class Clock(Protocol):
    """What time it is, for one process. Its wall clock may be off by the margin; safety never rests on it."""

    def now(self) -> datetime:
        """The wall clock, in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that only rise: for waits and for judging heartbeats."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class Ids(Protocol):
    """New names and chance."""

    def new(self, prefix: str) -> str:
        """`prefix` and a part that nobody else has."""
        ...

    def jitter(self) -> float:
        """A number from 0 up to 1, to spread what would else happen at once."""
        ...
