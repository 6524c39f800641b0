"""What a doctor may ask of one part of the world: independent looks that change nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from remuda.domain.skew import MOST_S, NORMAL_S, skew_s
from remuda.ports.clock import Clock


class CheckStatus(StrEnum):
    OK = "ok"
    #: It works, but not for everything, or not for long.
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    health: CheckStatus
    #: What was found, as one line. No credentials.
    found: str
    #: What to do about it, as one line; empty where there is nothing to do.
    fix: str = ""
    #: Nothing is known to be wrong: there was no answer.
    unreachable: bool = False


def ok(found: str) -> CheckResult:
    return CheckResult(health=CheckStatus.OK, found=found)


def warning(found: str, fix: str) -> CheckResult:
    return CheckResult(health=CheckStatus.WARNING, found=found, fix=fix)


def problem(found: str, fix: str) -> CheckResult:
    return CheckResult(health=CheckStatus.PROBLEM, found=found, fix=fix)


def clocks(who: str, date: str, clock: Clock) -> CheckResult:
    """What the `Date` of somebody's answer says of our clock."""
    ahead_s = skew_s(date, clock.now())
    if ahead_s is None:
        return ok(f"{who} does not tell its time")
    apart = f"this clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} {who}'s"
    fix = "set this machine's clock (chrony, systemd-timesyncd)"
    if abs(ahead_s) > MOST_S:
        return problem(apart, fix)
    if abs(ahead_s) > NORMAL_S:
        return warning(apart, fix)
    return ok(f"within {NORMAL_S:g} s of {who}'s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    #: Short and stable: programs tell checks apart by it.
    name: str
    look: Callable[[], Awaitable[CheckResult]]
    #: Checks that must not have found a problem: it would only be found again.
    needs: tuple[str, ...] = ()


class Doctor(Protocol):
    """One for each part of the world that an adapter reaches."""

    def checks(self) -> Sequence[Check]:
        """Looks at this part. Each only reads, may run at the same time as any other, and raises the errors of the
        ports (`UserError` with its fix, `Unavailable`) where it has no finding of its own.
        """
        ...
