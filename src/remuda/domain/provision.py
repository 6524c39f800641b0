"""Provision records: the recorded intent of a run, written before anything is claimed or launched.

`open → committed` is the commit point and records the instances; `open | committed → released` gives them back. People
see how a released provision ended: `Provision.shown_status`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

from remuda.domain.errors import IllegalTransition
from remuda.domain.holder import Holder, RunHolder, SetHolder
from remuda.domain.instance import ABSORBING, Instance

#: Maximum number of listed runners, rejected candidates and launches.
MAX_ACQUIRED = 100
MAX_REJECTIONS = 20
MAX_LAUNCHES = 10
#: Maximum characters of a reason.
MAX_REASON = 200
#: Maximum characters of the error of a failed provision, with its fix.
MAX_ERROR = 400


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
    #: Why the provision failed and what a person can do about it, or empty.
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


class ProvisionEnding(StrEnum):
    """Ending of a provision that has the status `released`."""

    #: Its instances were given back in time.
    RELEASED = "released"
    #: It could not acquire its instances.
    FAILED = "failed"
    #: Its workflow run ended without a release, and a sweep gave its instances back. Example: a workflow without a
    #: release job.
    UNRELEASED = "unreleased"
    #: It held its instances until their time was up.
    EXPIRED = "expired"
    #: It was cancelled or released, or its process died, before its commit.
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Provision:
    #: The run that asks for the instances, or a runner set. Each of them gets it as its holder.
    holder: Holder
    #: Tells two processes apart that write a provision with the same id at the same moment.
    nonce: str = ""
    resource_class: str
    count: int
    created_at: datetime
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
    #: Set with the status `released`.
    ending: ProvisionEnding | None = None
    #: Instances that ended before the run was released; recorded when it is settled.
    lost_ids: tuple[str, ...] = ()
    #: Released, and it holds no instance any more: sweeps skip it.
    settled: bool = False
    #: Time after which a settled record may be deleted.
    forget_at: datetime | None = None

    @property
    def provision_id(self) -> str:
        return self.holder.provision_id

    @property
    def run_id(self) -> str:
        """Empty for a runner set."""
        return self.holder.run_id

    @property
    def attempt(self) -> int:
        """The attempt of the run. A runner set makes one for each job."""
        return self.holder.attempt if isinstance(self.holder, RunHolder) else 1

    @property
    def runner_set(self) -> str:
        """Empty for a run."""
        return self.holder.name if isinstance(self.holder, SetHolder) else ""

    @property
    def subject(self) -> str:
        """What people call its holder: a run or a runner set."""
        return self.holder.subject

    @property
    def shown_status(self) -> str:
        """The status for people: `open` or `committed`, or how it ended."""
        if self.status is ProvisionStatus.RELEASED and self.ending is not None:
            return self.ending.value
        return self.status.value

    @property
    def reason(self) -> str:
        """Why it failed, or has its status."""
        return self.outcome.error if self.outcome and self.outcome.error else self.why

    def is_as_stored(self, current: Provision | None) -> bool:
        """Whether the stored record is unchanged in the fields that a replacement is conditional on."""
        return current is not None and (current.nonce, current.status, current.instance_ids, current.settled) == (
            self.nonce,
            self.status,
            self.instance_ids,
            self.settled,
        )

    def is_unsettled(self, deadline_before: datetime) -> bool:
        """Whether a sweep must handle it: past its deadline and not released, or released and not settled."""
        if self.status is ProvisionStatus.RELEASED:
            return not self.settled
        return self.deadline <= deadline_before


def exclusive_id(run_id: str, attempt: int, resource_class: str, stored_ids: Collection[str]) -> str:
    """Return the id of the next provision that is to be the only one of its run, attempt and class.

    Processes that see the same stored provisions get the same id, so only one of them can write its record.
    """
    for number in itertools.count():
        key = json.dumps([run_id, attempt, resource_class, number])
        provision_id = f"p-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        if provision_id not in stored_ids:
            return provision_id
    raise AssertionError


def lost_instances(provision: Provision, records: Mapping[str, Instance]) -> tuple[str, ...]:
    """Return the committed instances that ended before the run was released, as far as their records are known."""
    if provision.settled:
        return provision.lost_ids
    return tuple(item for item in provision.instance_ids if item in records and _is_lost(provision, records[item]))


def _is_lost(provision: Provision, instance: Instance) -> bool:
    """The threshold of an instance that ended is the time when its end was decided."""
    if instance.state not in ABSORBING or instance.provision_id != provision.provision_id:
        return False
    return provision.released_at is None or instance.threshold <= provision.released_at


def describe_status(provision: Provision, lost: Sequence[str]) -> str:
    """Say why a provision has its shown status, and which instances it lost."""
    if not lost:
        return provision.why
    total = len(provision.instance_ids)
    if len(lost) == total:
        sentence = "it lost its only instance" if total == 1 else f"it lost all {total} of its instances"
    else:
        sentence = f"it lost {len(lost)} of its {total} instances: {', '.join(lost)}"
    # The reason of a commit is that all instances started.
    return sentence if provision.status is ProvisionStatus.COMMITTED else f"{provision.why}; {sentence}"


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
        why="all instances started",
        outcome=outcome,
    )


def released(
    provision: Provision,
    *,
    now: datetime,
    why: str,
    ending: ProvisionEnding | None = None,
    outcome: ProvisionOutcome | None = None,
) -> Provision:
    """Return the released record. A provision that ends before its commit passes its `outcome`.

    Without an `ending`, the record decides: it was interrupted before its commit, expired at its deadline, or released.
    """
    _check_next(provision, ProvisionStatus.RELEASED)
    was_open = provision.status is ProvisionStatus.OPEN
    if ending is None:
        held = ProvisionEnding.EXPIRED if now >= provision.deadline else ProvisionEnding.RELEASED
        ending = ProvisionEnding.INTERRUPTED if was_open else held
    return replace(
        provision,
        status=ProvisionStatus.RELEASED,
        ending=ending,
        released_at=now,
        # An open provision may still have claims in progress until its deadline; a committed one has none.
        deadline=provision.deadline if was_open else now,
        why=why,
        outcome=outcome or provision.outcome,
    )


def settled(provision: Provision, *, forget_at: datetime, lost: tuple[str, ...] = ()) -> Provision:
    if provision.status is not ProvisionStatus.RELEASED:
        raise IllegalTransition(f"provision {provision.provision_id} is {provision.status}, not released")
    return replace(provision, settled=True, lost_ids=lost, forget_at=forget_at)
