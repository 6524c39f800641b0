"""Properties of pauses after failures, the same for each of them: a pause belongs to one case.

A row says how long the pauses are and runs a pattern of outcomes on the real object. From the pattern follows the
number of failures in a row at each failure, and so the pause that must follow, neither shorter nor longer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from remuda.domain.errors import RemudaError, Unavailable
from tests.support.virtual_time import Call, Hook

#: Seconds of tolerance of a measured pause.
TICK_S = 0.001
#: Outcomes: of this case, of its next one (the next use of a machine, the next process), and of others beside it.
FAILS, SUCCEEDS, NEXT, OTHER_FAILS, OTHER_SUCCEEDS = "FSNGT"
#: Patterns for all rows, and for those that know the letter.
PATTERNS = ("FFFFFFFFFF", "FFFFFSF", "FSFSFSF", "SSSF", "FFSFFF")
_LETTER_PATTERNS = {
    NEXT: ("FFFFNF", "FFFFNFF", "FNFNF"),
    OTHER_FAILS: ("GGGGF", "FGGGF", "FFGF"),
    OTHER_SUCCEEDS: ("FFFTF", "FFFTTF", "TF"),
}

Run = Callable[[str], Awaitable[Sequence[float]]]
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """The pauses of one object after failures."""

    name: str
    #: Least and most seconds after the first failure in a row, the second one and so on. The last one stays.
    pauses: Sequence[Range]
    #: Runs a pattern on new objects. Returns the seconds from each failure to the next attempt.
    run: Run
    #: Which of the letters for the next case and for others the row knows.
    letters: str = ""
    #: The most failures in a row, if it gives up after more.
    most_failures: int = 10
    #: Whether an attempt can follow a success of the same case.
    can_succeed: bool = True

    def patterns(self) -> Iterator[str]:
        for pattern in PATTERNS + tuple(item for letter in self.letters for item in _LETTER_PATTERNS[letter]):
            if self.can_succeed or SUCCEEDS not in pattern:
                yield re.sub("F+", lambda found: found[0][: self.most_failures], pattern)

    def expected(self, pattern: str) -> list[Range]:
        failures, expected = 0, []
        for letter in pattern:
            if letter in {SUCCEEDS, NEXT}:
                failures = 0
            elif letter == FAILS:
                expected.append(self.pauses[min(failures, len(self.pauses) - 1)])
                failures += 1
        return expected

    async def check(self, pattern: str) -> None:
        found, expected = await self.run(pattern), self.expected(pattern)
        assert len(found) == len(expected), f"{self.name}, {pattern}: {len(found)} pauses {found}"
        for number, (pause_s, (least_s, most_s)) in enumerate(zip(found, expected, strict=True), 1):
            assert least_s - TICK_S <= pause_s <= most_s + TICK_S, (
                f"{self.name}, {pattern}: {pause_s:.2f} s after failure {number}, expected {least_s} to {most_s} s"
            )


def doubled(first: Range, count: int, *, most_s: float) -> list[Range]:
    """Pauses that are doubled with each failure, up to a maximum."""
    least_s, longest_s = first
    return [(min(most_s, least_s * 2**number), min(most_s, longest_s * 2**number)) for number in range(count)]


LOST = Unavailable("no answer")


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Outcomes:
    """Lets the attempts of something fail by a pattern, and measures the seconds from a failure to the next attempt."""

    def __init__(self, pattern: str, *, error: BaseException = LOST) -> None:
        self._letters = list(pattern)
        self._error = error
        self._failed_at: float | None = None
        self.pauses: list[float] = []
        self.over = asyncio.Event()

    def begin(self) -> None:
        """An attempt begins."""
        if self._failed_at is not None:
            self.pauses.append(now_s() - self._failed_at)
            self._failed_at = None

    @property
    def following(self) -> str:
        """The outcome of the next attempt; empty if the pattern is over."""
        return self._letters[0] if self._letters else ""

    def next(self) -> str:
        """The outcome of an attempt that ends now; empty if the pattern is over."""
        letter = self._letters.pop(0) if self._letters else ""
        if letter == FAILS:
            self._failed_at = now_s()
        elif not letter:
            self.over.set()
        return letter

    def end(self) -> None:
        """An attempt ends: raise its error."""
        if self.next() == FAILS:
            raise self._error

    def hook(self, operation: str) -> Hook:
        """Each call of the operation is an attempt."""

        async def hook(name: str, call: Call) -> Any:
            if name == operation:
                self.begin()
                self.end()
            return await call()

        return hook

    async def run(self, *work: Coroutine[Any, Any, Any], within_s: float = 100_000.0) -> list[float]:
        """Run tasks until the pattern is over."""
        tasks = [asyncio.create_task(item) for item in work]
        over = asyncio.create_task(self.over.wait())
        await asyncio.wait({*tasks, over}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, over):
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, RemudaError):
                await task
        return self.pauses
