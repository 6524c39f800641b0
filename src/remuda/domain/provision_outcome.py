"""How a provision went: what it saw, refused, took and launched. Kept on its record, so that it can be told days later.

Bounded: a record is read whole, and a run with a thousand runners must not make it a book. Counts are of all; what is
told one by one is the first so many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

#: How many runners, rejections and launches are told one by one.
MAX_ACQUIRED = 100
MAX_REJECTIONS = 20
MAX_LAUNCHES = 10
#: How much of a reason is kept.
MAX_REASON = 200


class RunnerSource(StrEnum):
    """Where a runner came from."""

    POOL = "pool"
    CREATED = "created"


class RejectionKind(StrEnum):
    """Why a pool message did not become a runner."""

    MISMATCH = "mismatch"
    CLAIM_LOST = "claim-lost"
    REGISTRATION_FAILED = "registration-failed"
    MALFORMED = "malformed"
    UNREADABLE = "unreadable"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, kw_only=True, slots=True)
class AcquiredRunner:
    """One runner that the run got."""

    instance_id: str
    source: RunnerSource
    #: From the provision's begin until it was registered.
    seconds: float
    #: The runner's own part of it, on the machine, where it said so.
    registration_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedCandidate:
    """One hint of the pool that did not become a runner."""

    kind: RejectionKind
    why: str
    #: From the provision's begin.
    seconds: float
    instance_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchAttempt:
    """One launch: how many were asked for and came, how long the answer took, and who had none."""

    count: int
    launched: int
    #: From the provision's begin to the answer.
    seconds: float
    errors: tuple[str, ...] = ()
    #: Why nothing was taken from the pool instead, where that was not tried.
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionOutcome:
    ended_at: datetime
    seconds: float
    reused: int = 0
    created: int = 0
    #: Seconds of each phase, in order.
    phases: Mapping[str, float] = field(default_factory=dict)
    acquired: tuple[AcquiredRunner, ...] = ()
    #: Hints that were not used, counted by kind.
    rejected: Mapping[str, int] = field(default_factory=dict)
    rejections: tuple[RejectedCandidate, ...] = ()
    launches: tuple[LaunchAttempt, ...] = ()
    #: Why it gave up, or empty.
    error: str = ""

    @property
    def kind(self) -> str:
        """`warm`: all from the pool; `cold`: none; `mixed`; `failed` where it gave up."""
        if self.error:
            return "failed"
        if not self.created:
            return "warm"
        return "mixed" if self.reused else "cold"
