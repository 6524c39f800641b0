"""Events that trigger a transition. Each carries the evidence that its row requires."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from remuda.domain.instance import Assignment, Credential, RetireReason
from remuda.domain.resources import Reuse, Tier
from remuda.domain.signals import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    run_id: str
    owner: str
    provision_id: str
    scope: str
    tier: Tier
    threshold: datetime
    assignment: Assignment
    #: The pool's policy.
    reuse: Reuse = Reuse.SAME_TRUST
    #: The run's repository in lower case.
    repository: str = ""
    #: Seconds that must remain until the instance's threshold.
    margin_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    owner: str
    report: Report | None
    max_runtime_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    release_time_s: float
    credential: Credential
    #: Set by a rollback, which may release only its own assignments.
    owner: str | None = None
    #: Whether GitHub confirmed the removal of a just-in-time registration.
    deregistered: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Extend:
    report: Report
    #: Seconds from now, limited by the run's deadline.
    extension_s: float
    #: Seconds after the threshold in which an extension is still accepted: no sweep terminates the instance earlier.
    margin_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RenewCredential:
    credential: Credential


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnToPool:
    report: Report | None
    idle_time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Announce:
    """A pool message was sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Renew:
    #: Absolute time, so that a delayed write does not prolong the decision.
    until: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Retire:
    reason: RetireReason
    #: Free text for people.
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    until: datetime
    #: Free text for people.
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    reason: RetireReason
    #: Free text for people.
    detail: str = ""
    #: Seconds after the threshold, for EXPIRED.
    margin_s: float = 0.0
    #: Evidence for FAILED, and for retirements from `releasing`.
    report: Report | None = None
    owner: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirm:
    keep_records_s: float


Event = (
    Claim
    | Commit
    | Release
    | Extend
    | RenewCredential
    | ReturnToPool
    | Announce
    | Renew
    | Retire
    | Quarantine
    | End
    | Confirm
)
