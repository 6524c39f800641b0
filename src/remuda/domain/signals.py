"""What an agent reports, and how the control plane reads it.

Signals are ranked: a later OK implies the earlier ones, FAILED outranks OK within its phase, and a report never falls
back in (epoch, rank). A signal counts only for its own epoch and for the phase that is waited for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum, StrEnum

from remuda.domain.text import truncate


class Signal(StrEnum):
    UD_OK = "UD_OK"
    UD_FAILED = "UD_FAILED"
    UD_REG_OK = "UD_REG_OK"
    UD_REG_FAILED = "UD_REG_FAILED"
    UD_REMOVE_REG_OK = "UD_REMOVE_REG_OK"
    UD_REMOVE_REG_FAILED = "UD_REMOVE_REG_FAILED"
    UD_REMOVE_REG_REMOVE_RUN_OK = "UD_REMOVE_REG_REMOVE_RUN_OK"
    UD_REMOVE_REG_REMOVE_RUN_FAILED = "UD_REMOVE_REG_REMOVE_RUN_FAILED"

    @property
    def rank(self) -> int:
        return _ORDER.index(self) + 1

    @property
    def failed(self) -> bool:
        return self.value.endswith("_FAILED")


_ORDER = tuple(Signal)

#: What ends a wait for registration, and what ends a wait for a clean machine.
_REGISTRATION_FAILURES = frozenset({Signal.UD_FAILED, Signal.UD_REG_FAILED})
_REMOVAL_FAILURES = frozenset({Signal.UD_REMOVE_REG_FAILED, Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED})


#: How long a signal's detail may be.
MAX_DETAIL = 1_000

#: How a detail begins where the github refused the credential: trying more machines would only burn them.
CREDENTIAL_REFUSED = "credential refused"
#: How it begins where the github did not answer: no machine is to blame.
FORGE_UNREACHABLE = "GitHub out of reach"

_TOOK = re.compile(r"took (\d{1,7}\.\d{3}) s", re.ASCII)


def with_took(seconds: float, detail: str) -> str:
    """A detail that also says how long the machine itself worked on it."""
    took = f"took {seconds:.3f} s"
    return f"{took}; {detail}" if detail else took


def took_s(detail: str) -> float | None:
    found = _TOOK.match(detail)
    return float(found.group(1)) if found else None


def without_took(detail: str) -> str:
    """What the detail says beside how long it took."""
    return _TOOK.sub("", detail, count=1).removeprefix("; ") if _TOOK.match(detail) else detail


class Verdict(Enum):
    PENDING = "pending"
    OK = "ok"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What an instance says of itself. Only its agent writes it."""

    instance_id: str
    #: The assignment that `signal` speaks of; 0 before the first signal.
    epoch: int = 0
    signal: Signal | None = None
    #: The signal's story for a person.
    detail: str = ""
    #: Rises with each beat while the agent's main loop is healthy.
    beat: int = 0
    beat_at: datetime | None = None
    #: A job is running.
    busy: bool = False
    #: The runner's listener is up.
    listening: bool = False
    #: A spot notice, or empty.
    notice: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        # Whoever has taken a machine writes what he likes here: it is for people's eyes, and in every log.
        for name in ("detail", "notice", "version"):
            object.__setattr__(self, name, truncate(getattr(self, name), MAX_DETAIL))

    @property
    def rank(self) -> int:
        return self.signal.rank if self.signal else 0

    @property
    def troubled(self) -> bool:
        """It says something that a sweep has to look into, whatever it waits for."""
        return bool(self.notice) or (self.signal is not None and self.signal.failed)

    def may_become(self, epoch: int, signal: Signal) -> bool:
        """Whether a signal may be written over this report: (epoch, rank) must not fall."""
        return (epoch, signal.rank) >= (self.epoch, self.rank)

    def signalled(self, *, epoch: int, signal: Signal, detail: str) -> Report:
        return replace(self, epoch=epoch, signal=signal, detail=detail[:MAX_DETAIL])

    def beaten(self, *, at: datetime, busy: bool, listening: bool, notice: str, version: str) -> Report:
        return replace(
            self, beat=self.beat + 1, beat_at=at, busy=busy, listening=listening, notice=notice, version=version
        )


def registration_verdict(report: Report | None, epoch: int) -> Verdict:
    """Is the instance registered for this epoch, runner off?"""
    return _verdict(report, epoch, Signal.UD_REG_OK, _REGISTRATION_FAILURES)


def removal_verdict(report: Report | None, epoch: int) -> Verdict:
    """Is the instance deregistered and reset for this epoch? A failed registration does not matter here."""
    return _verdict(report, epoch, Signal.UD_REMOVE_REG_REMOVE_RUN_OK, _REMOVAL_FAILURES)


def _verdict(report: Report | None, epoch: int, wanted: Signal, failures: frozenset[Signal]) -> Verdict:
    if report is None or report.signal is None or report.epoch != epoch:
        return Verdict.PENDING
    if report.signal in failures:
        return Verdict.FAILED
    if not report.signal.failed and report.signal.rank >= wanted.rank:
        return Verdict.OK
    return Verdict.PENDING


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """A heartbeat as one reader sees it: judged by its change on the reader's own monotonic clock."""

    #: No change for so long: dead.
    dead_after_s: float
    #: A first beat stamped longer ago than this is dead at first sight (`dead_after_s` and clock skew).
    stale_after_s: float
    beat: int = 0
    changed_at: float = 0.0
    stale: bool = False

    def observe(self, report: Report | None, *, now: datetime, monotonic: float) -> Pulse:
        if report is None or report.beat_at is None:
            return self
        if report.beat == self.beat:
            return self
        first = self.beat == 0
        age_s = (now - report.beat_at).total_seconds()
        return Pulse(
            dead_after_s=self.dead_after_s,
            stale_after_s=self.stale_after_s,
            beat=report.beat,
            changed_at=monotonic,
            stale=first and age_s > self.stale_after_s,
        )

    def is_dead(self, monotonic: float) -> bool:
        """Never true before the first beat: a machine that boots has none yet."""
        return self.beat > 0 and (self.stale or monotonic - self.changed_at >= self.dead_after_s)
