"""Outcome of a provision: acquired runners, rejected candidates and launches. Stored in its record for later reports.

The lists are bounded so that records stay small; the counts cover everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

#: Maximum number of listed runners, rejected candidates and launches.
MAX_ACQUIRED = 100
MAX_REJECTIONS = 20
MAX_LAUNCHES = 10
#: Maximum characters of a reason.
MAX_REASON = 200


class ProvisionKind(StrEnum):
    #: All runners came from the pool.
    WARM = "warm"
    MIXED = "mixed"
    #: All runners were created.
    COLD = "cold"
    FAILED = "failed"


class RunnerSource(StrEnum):
    POOL = "pool"
    CREATED = "created"


class RejectionKind(StrEnum):
    #: The pool message does not match the request.
    MISMATCH = "mismatch"
    #: The record did not meet the claim's condition.
    CLAIM_LOST = "claim-lost"
    #: Claimed, but it did not register.
    REGISTRATION_FAILED = "registration-failed"
    #: The pool message cannot be parsed.
    MALFORMED = "malformed"
    #: The instance's record cannot be parsed.
    UNREADABLE = "unreadable"
    #: The pool message was delivered before.
    DUPLICATE = "duplicate"


@dataclass(frozen=True, kw_only=True, slots=True)
class AcquiredRunner:
    instance_id: str
    source: RunnerSource
    #: Seconds from the start of the provision to the registration.
    seconds: float
    #: Seconds that the registration took on the machine, if the agent reported it.
    registration_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedCandidate:
    """A pool message that did not become a runner."""

    kind: RejectionKind
    #: Free text for people.
    why: str
    #: Seconds from the start of the provision.
    seconds: float
    instance_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchAttempt:
    #: Requested machines.
    count: int
    launched: int
    #: Seconds from the start of the provision to the response.
    seconds: float
    errors: tuple[str, ...] = ()
    #: Why the pool was not used, or empty.
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionOutcome:
    ended_at: datetime
    seconds: float
    reused: int = 0
    created: int = 0
    #: Seconds per phase, in order.
    phases: Mapping[str, float] = field(default_factory=dict)
    acquired: tuple[AcquiredRunner, ...] = ()
    #: Number of rejected candidates per `RejectionKind`.
    rejected: Mapping[str, int] = field(default_factory=dict)
    rejections: tuple[RejectedCandidate, ...] = ()
    launches: tuple[LaunchAttempt, ...] = ()
    #: Why the provision failed, or empty.
    error: str = ""

    @property
    def kind(self) -> ProvisionKind:
        if self.error:
            return ProvisionKind.FAILED
        if not self.created:
            return ProvisionKind.WARM
        return ProvisionKind.MIXED if self.reused else ProvisionKind.COLD
