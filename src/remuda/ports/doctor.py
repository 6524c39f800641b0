"""Doctor checks: independent read-only checks of one external system."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from remuda.ports.clock import CLOCK_FIX, MAX_NORMAL_SKEW_S, Clock, ClockError, clock_skew_s

#: Clock difference in seconds beyond which AWS rejects signatures, and GitHub soon rejects an App's tokens.
MAX_SKEW_S = 240.0


class CheckStatus(StrEnum):
    OK = "ok"
    #: It works, but not for everything or not for long.
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    status: CheckStatus
    #: One line without credentials.
    message: str
    #: What to do about it, as one line; empty if there is nothing to do.
    fix: str = ""
    #: Whether the system did not respond, so that the check found nothing out.
    unreachable: bool = False


def ok(message: str) -> CheckResult:
    return CheckResult(status=CheckStatus.OK, message=message)


def warning(message: str, fix: str) -> CheckResult:
    return CheckResult(status=CheckStatus.WARNING, message=message, fix=fix)


def problem(message: str, fix: str) -> CheckResult:
    return CheckResult(status=CheckStatus.PROBLEM, message=message, fix=fix)


def compare_clocks(system: str, date: str, clock: Clock) -> CheckResult:
    """Compare the local clock with the `Date` header of a system's response."""
    ahead_s = clock_skew_s(date, clock.now())
    if ahead_s is None:
        return ok(f"{system} does not send its time")
    difference = str(ClockError(system=system, ahead_s=ahead_s))
    if abs(ahead_s) > MAX_SKEW_S:
        return problem(difference, CLOCK_FIX)
    if abs(ahead_s) > MAX_NORMAL_SKEW_S:
        return warning(difference, CLOCK_FIX)
    return ok(f"within {MAX_NORMAL_SKEW_S:g} s of {system}'s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    #: Short and stable: programs identify checks by it.
    name: str
    run: Callable[[], Awaitable[CheckResult]]
    #: Names of checks without which this one is skipped: it would only repeat their problem.
    needs: tuple[str, ...] = ()


class Doctor(Protocol):
    """Checks of one external system."""

    def checks(self) -> Sequence[Check]:
        """Return the checks. Each only reads and may run concurrently with the others.

        Instead of returning a result, a check may raise `UserError` with its fix, or `Unavailable`.
        """
        ...
