"""A provision's record: the intent that is written before anything is claimed or launched.

`open → committed` is the commit point and records the instances; `open | committed → released` takes them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from remuda.domain.errors import IllegalTransition
from remuda.domain.instance import ABSORBING, Instance
from remuda.domain.provision_outcome import ProvisionOutcome


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
    #: When it must be committed, and then: when its instances' time is up. Past it, anyone may release it.
    deadline: datetime
    status: ProvisionStatus = ProvisionStatus.OPEN
    #: Set by the commit: what a release gives back.
    instance_ids: tuple[str, ...] = ()
    #: What it requests of each instance, for people.
    request_summary: str = ""
    #: Why it has its status.
    why: str = ""
    #: How it went, written with its end: the commit, or the rollback.
    outcome: ProvisionOutcome | None = None
    released_at: datetime | None = None
    #: Released, and none of its instances is held any more: sweeps need not look again.
    settled: bool = False
    #: When a settled provision may be forgotten.
    forget_at: datetime | None = None

    def is_as_stored(self, current: Provision | None) -> bool:
        """Whether what is stored is still what this one was read as: what a replacement is conditional on."""
        return current is not None and (current.status, current.instance_ids, current.settled) == (
            self.status,
            self.instance_ids,
            self.settled,
        )

    def is_unsettled(self, deadline_before: datetime) -> bool:
        """Past its deadline and not released, or released and still to be looked after."""
        if self.status is ProvisionStatus.RELEASED:
            return not self.settled
        return self.deadline <= deadline_before


def machines_ended(provision: Provision, records: Mapping[str, Instance]) -> str:
    """That all machines of a committed run have ended, in words; empty while one lives, or its record is not known."""
    ids = provision.instance_ids
    if provision.status is not ProvisionStatus.COMMITTED or not ids:
        return ""
    if any(item not in records or records[item].state not in ABSORBING for item in ids):
        return ""
    return "its machine has ended" if len(ids) == 1 else f"all {len(ids)} of its machines have ended"


#: Which status may follow which.
_STATUS_AFTER = {
    ProvisionStatus.OPEN: frozenset({ProvisionStatus.COMMITTED, ProvisionStatus.RELEASED}),
    ProvisionStatus.COMMITTED: frozenset({ProvisionStatus.RELEASED}),
    ProvisionStatus.RELEASED: frozenset[ProvisionStatus](),
}


def _move(provision: Provision, status: ProvisionStatus) -> None:
    if status not in _STATUS_AFTER[provision.status]:
        raise IllegalTransition(
            f"provision {provision.provision_id} cannot go from {provision.status} to {status}", history=[provision]
        )


def committed(
    provision: Provision, instance_ids: tuple[str, ...], *, deadline: datetime, outcome: ProvisionOutcome | None = None
) -> Provision:
    _move(provision, ProvisionStatus.COMMITTED)
    return replace(
        provision,
        status=ProvisionStatus.COMMITTED,
        instance_ids=instance_ids,
        deadline=deadline,
        why="all instances are running",
        outcome=outcome,
    )


def released(provision: Provision, *, now: datetime, why: str, outcome: ProvisionOutcome | None = None) -> Provision:
    """`outcome` where it ends before the commit."""
    _move(provision, ProvisionStatus.RELEASED)
    # While it was open, claims may be under way until its deadline; after the commit there are none.
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
