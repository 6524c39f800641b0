"""Signals and reports of agents, and the verdicts that the control plane derives from them.

Signals are ranked: a later OK implies the earlier ones, FAILED outranks OK within its phase, and a report never falls
back in (epoch, rank). A signal counts only for its own epoch and for the phase that is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum, StrEnum

from remuda.domain.text import truncate

#: Maximum characters of a report's texts.
MAX_DETAIL = 1_000
#: Seconds: longer durations in a report are ignored.
MAX_DURATION_S = 10_000_000.0
#: Beginning of the notice of a machine that the cloud may take away. Many of them run to their end.
REBALANCE_NOTICE = "spot: rebalance recommended"


class Signal(StrEnum):
    """Steps of a machine, in order. `UD_` stands for user data, the script with which a machine starts.

    `REG` is the registration of the runner, `REMOVE_REG` its removal, and `REMOVE_RUN` the reset after the run.
    """

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
        return _RANKS[self]

    @property
    def failed(self) -> bool:
        return self in _FAILURES

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_RANKS = {signal: rank for rank, signal in enumerate(Signal, start=1)}
#: Signals that end a wait for the registration.
_REGISTRATION_FAILURES = frozenset({Signal.UD_FAILED, Signal.UD_REG_FAILED})
#: Signals that end a wait for the reset machine.
_REMOVAL_FAILURES = frozenset({Signal.UD_REMOVE_REG_FAILED, Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED})
_FAILURES = _REGISTRATION_FAILURES | _REMOVAL_FAILURES
_MEANINGS = {
    Signal.UD_OK: "the pre-runner script is done",
    Signal.UD_FAILED: "the pre-runner script failed",
    Signal.UD_REG_OK: "it is registered",
    Signal.UD_REG_FAILED: "it has no working runner",
    Signal.UD_REMOVE_REG_OK: "its registration is removed",
    Signal.UD_REMOVE_REG_FAILED: "its registration could not be removed",
    Signal.UD_REMOVE_REG_REMOVE_RUN_OK: "it is reset",
    Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED: "it could not be reset",
}


class FailureKind(StrEnum):
    """Failures of a registration that are not the machine's fault. More machines would fail in the same way."""

    CREDENTIAL_REFUSED = "credential-refused"
    GITHUB_UNREACHABLE = "github-unreachable"
    #: The version of the runner is too old.
    VERSION_REFUSED = "version-refused"


class Verdict(Enum):
    PENDING = "pending"
    OK = "ok"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """An instance's report about itself. Only its agent writes it."""

    instance_id: str
    #: Epoch that `signal` belongs to; 0 before the first signal.
    epoch: int = 0
    signal: Signal | None = None
    #: Free text about the signal, for people.
    detail: str = ""
    #: Seconds that the machine worked on the step that the signal reports.
    duration_s: float | None = None
    #: Set by a failed signal if the machine is not to blame.
    failure: FailureKind | None = None
    #: Heartbeat counter. Rises while the agent's main loop is healthy.
    beat: int = 0
    beat_at: datetime | None = None
    #: Whether a job is running.
    busy: bool = False
    #: Whether the runner's listener is running.
    listening: bool = False
    #: Epoch whose just-in-time registration is used up: its only job has ended. 0 if none exists.
    spent_epoch: int = 0
    #: Spot notice, or empty.
    notice: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        # A compromised machine can write any text, and it is shown on terminals and in logs.
        for name in ("detail", "notice", "version"):
            text = getattr(self, name)
            if (safe := truncate(text, MAX_DETAIL)) != text:
                object.__setattr__(self, name, safe)
        if self.duration_s is not None and not 0 <= self.duration_s <= MAX_DURATION_S:
            object.__setattr__(self, "duration_s", None)

    @property
    def rank(self) -> int:
        return self.signal.rank if self.signal else 0

    @property
    def troubled(self) -> bool:
        """Whether a sweep must handle this report: a failed signal or a spot notice."""
        return bool(self.notice) or (self.signal is not None and self.signal.failed)

    @property
    def is_interrupted(self) -> bool:
        """Whether the cloud has announced the end of the machine, not only a risk of it."""
        return bool(self.notice) and not self.notice.startswith(REBALANCE_NOTICE)

    def describe_signal(self) -> str:
        """Return the signal for people: its meaning, its name, and the detail."""
        if self.signal is None:
            return "no signal yet"
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.signal.meaning} ({self.signal}, epoch {self.epoch}){detail}"

    def may_become(self, epoch: int, signal: Signal) -> bool:
        """Whether a signal may replace this report's: (epoch, rank) must not fall."""
        return (epoch, signal.rank) >= (self.epoch, self.rank)

    def with_signal(
        self,
        *,
        epoch: int,
        signal: Signal,
        detail: str,
        duration_s: float | None = None,
        failure: FailureKind | None = None,
    ) -> Report:
        return replace(
            self, epoch=epoch, signal=signal, detail=detail[:MAX_DETAIL], duration_s=duration_s, failure=failure
        )

    def with_heartbeat(
        self, *, at: datetime, busy: bool, listening: bool, notice: str, version: str, spent_epoch: int = 0
    ) -> Report:
        return replace(
            self,
            beat=self.beat + 1,
            beat_at=at,
            busy=busy,
            listening=listening,
            spent_epoch=spent_epoch,
            notice=notice,
            version=version,
        )


def boot_verdict(report: Report | None, epoch: int) -> Verdict:
    """Whether the instance has booted and its pre-runner script is done."""
    return _verdict(report, epoch, Signal.UD_OK, _REGISTRATION_FAILURES)


def registration_verdict(report: Report | None, epoch: int) -> Verdict:
    """Whether the instance is registered for this epoch, with the runner off."""
    return _verdict(report, epoch, Signal.UD_REG_OK, _REGISTRATION_FAILURES)


def removal_verdict(report: Report | None, epoch: int) -> Verdict:
    """Whether the instance is deregistered and reset in this epoch. A failed registration does not matter here."""
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
    """One reader's view of a heartbeat, judged by its change on the reader's own monotonic clock."""

    #: Seconds without a change after which the heartbeat is dead.
    dead_after_s: float
    #: Age in seconds beyond which the first observed beat is dead at once: `dead_after_s` plus clock skew.
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
        """Never true before the first beat: a booting machine has none yet."""
        return self.beat > 0 and (self.stale or monotonic - self.changed_at >= self.dead_after_s)
