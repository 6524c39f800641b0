"""Provision records: the recorded intent of a run, written before anything is claimed or launched.

`open → committed` is the commit point and records the instances; `open | committed → released` gives them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from remuda.domain.errors import IllegalTransition
from remuda.domain.instance import ABSORBING, Instance

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
    """Acquired runners, rejected candidates and launches. Stored in the record for later reports.

    The lists are bounded so that records stay small; the counts cover everything.
    """

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
    #: Exit code of the command that failed.
    exit_code: int = 0

    @property
    def kind(self) -> ProvisionKind:
        if self.error:
            return ProvisionKind.FAILED
        if not self.created:
            return ProvisionKind.WARM
        return ProvisionKind.MIXED if self.reused else ProvisionKind.COLD


class ProvisionStatus(StrEnum):
    OPEN = "open"
    COMMITTED = "committed"
    RELEASED = "released"


@dataclass(frozen=True, kw_only=True, slots=True)
class Provision:
    provision_id: str
    run_id: str
    attempt: int
    resource_class: str
    count: int
    created_at: datetime
    #: The runner set that holds it, whose holder id is the run id; empty for a run.
    runner_set: str = ""
    #: The run's repository as owner/name; empty if unknown, and for a set.
    repository: str = ""
    #: Time limit of the commit; after the commit, of the instances' use. A sweep releases a provision past it.
    deadline: datetime
    status: ProvisionStatus = ProvisionStatus.OPEN
    #: Set by the commit.
    instance_ids: tuple[str, ...] = ()
    #: Description of the request, for people.
    request_summary: str = ""
    #: Why it has its status, for people.
    why: str = ""
    #: Written with the commit or the rollback.
    outcome: ProvisionOutcome | None = None
    released_at: datetime | None = None
    #: Released, and it holds no instance any more: sweeps skip it.
    settled: bool = False
    #: Time after which a settled record may be deleted.
    forget_at: datetime | None = None

    def is_as_stored(self, current: Provision | None) -> bool:
        """Whether the stored record is unchanged in the fields that a replacement is conditional on."""
        return current is not None and (current.status, current.instance_ids, current.settled) == (
            self.status,
            self.instance_ids,
            self.settled,
        )

    def is_unsettled(self, deadline_before: datetime) -> bool:
        """Whether a sweep must handle it: past its deadline and not released, or released and not settled."""
        if self.status is ProvisionStatus.RELEASED:
            return not self.settled
        return self.deadline <= deadline_before


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionChange:
    """The replacement of a provision, if the stored one is as `before`."""

    before: Provision
    after: Provision


def describe_ended(provision: Provision, records: Mapping[str, Instance]) -> str:
    """Say that all instances of a committed run are terminated. Empty if one is live or its record is unknown."""
    ids = provision.instance_ids
    if provision.status is not ProvisionStatus.COMMITTED or not ids:
        return ""
    if any(item not in records or records[item].state not in ABSORBING for item in ids):
        return ""
    return "its instance is terminated" if len(ids) == 1 else f"all {len(ids)} of its instances are terminated"


_NEXT_STATUS = {
    ProvisionStatus.OPEN: frozenset({ProvisionStatus.COMMITTED, ProvisionStatus.RELEASED}),
    ProvisionStatus.COMMITTED: frozenset({ProvisionStatus.RELEASED}),
    ProvisionStatus.RELEASED: frozenset[ProvisionStatus](),
}


def _check_next(provision: Provision, status: ProvisionStatus) -> None:
    if status not in _NEXT_STATUS[provision.status]:
        raise IllegalTransition(
            f"provision {provision.provision_id} cannot go from {provision.status} to {status}", history=[provision]
        )


def committed(
    provision: Provision, instance_ids: tuple[str, ...], *, deadline: datetime, outcome: ProvisionOutcome | None = None
) -> Provision:
    _check_next(provision, ProvisionStatus.COMMITTED)
    return replace(
        provision,
        status=ProvisionStatus.COMMITTED,
        instance_ids=instance_ids,
        deadline=deadline,
        why="all instances are running",
        outcome=outcome,
    )


def released(provision: Provision, *, now: datetime, why: str, outcome: ProvisionOutcome | None = None) -> Provision:
    """Return the released record. A provision that ends before its commit passes its `outcome`."""
    _check_next(provision, ProvisionStatus.RELEASED)
    # An open provision may still have claims in progress until its deadline; a committed one has none.
    deadline = provision.deadline if provision.status is ProvisionStatus.OPEN else now
    return replace(
        provision,
        status=ProvisionStatus.RELEASED,
        released_at=now,
        deadline=deadline,
        why=why,
        outcome=outcome or provision.outcome,
    )


def settled(provision: Provision, *, forget_at: datetime) -> Provision:
    if provision.status is not ProvisionStatus.RELEASED:
        raise IllegalTransition(f"provision {provision.provision_id} is {provision.status}, not released")
    return replace(provision, settled=True, forget_at=forget_at)
