"""Provision records: the recorded intent of a run, written before anything is claimed or launched.

`open → committed` is the commit point and records the instances; `open | committed → released` gives them back.
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
