"""Time, unique ids and random numbers, and retries that use them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol, TypeVar

from remuda.domain.errors import RemudaError

T = TypeVar("T")

HTTP_DATE = "%a, %d %b %Y %H:%M:%S GMT"
#: Clock difference in seconds that the lifecycle tolerates. Beyond it, thresholds are misjudged.
MAX_NORMAL_SKEW_S = 30.0
#: What to do about a wrong clock.
CLOCK_FIX = "set this computer's clock (chrony, systemd-timesyncd)"


class Clock(Protocol):
    """Clocks of one process. The wall clock may be wrong by the margin; safety never depends on it."""

    def now(self) -> datetime:
        """Return the wall-clock time in UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never decrease, for waits and heartbeats."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class ServerDates:
    """How far the clock of this computer is off, by the `Date` header of the answers of AWS and GitHub.

    The adapters observe every answer, so that no call is made for this. Example: GitHub answers at 12:00:00 by its
    clock, and it is 12:20:03 here: this clock is 1,203 s ahead.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: By system, the seconds by which this clock was ahead at the last answer.
        self._ahead_s: dict[str, float] = {}

    def observe(self, system: str, date: str) -> None:
        """`date` is the header of an answer that has just arrived. One that cannot be parsed is ignored."""
        ahead_s = clock_skew_s(date, self._clock.now()) if date else None
        if ahead_s is not None:
            self._ahead_s[system] = ahead_s

    def error(self) -> ClockError | None:
        """None if the clock is right as far as anybody said, or nobody has answered yet.

        If the systems disagree, the nearest one counts: a server may have a wrong clock, too.
        """
        system, ahead_s = min(self._ahead_s.items(), key=lambda item: abs(item[1]), default=("", 0.0))
        return ClockError(system=system, ahead_s=ahead_s) if abs(ahead_s) > MAX_NORMAL_SKEW_S else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockError:
    """A clock of this computer that is off by more than is normal."""

    #: Whose clock it was compared with.
    system: str
    #: Negative if it is behind.
    ahead_s: float

    def __str__(self) -> str:
        off_s = abs(self.ahead_s)
        amount = f"{off_s / 60:.0f} min" if off_s >= 120 else f"{off_s:.0f} s"
        return f"the clock of this computer is {amount} {'ahead of' if self.ahead_s > 0 else 'behind'} {self.system}'s"


class CorrectedClock:
    """A clock without its known error, to judge times that other computers have written."""

    def __init__(self, clock: Clock, error: ClockError) -> None:
        self._clock = clock
        self._ahead = timedelta(seconds=error.ahead_s)

    def now(self) -> datetime:
        return self._clock.now() - self._ahead

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


def clock_skew_s(date: str, now: datetime) -> float | None:
    """Return the seconds by which `now` is ahead of a `Date` header, or None if the header cannot be parsed."""
    try:
        theirs = datetime.strptime(date, HTTP_DATE).replace(tzinfo=UTC)
    except ValueError:
        return None
    return (now - theirs).total_seconds()


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
