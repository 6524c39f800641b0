from __future__ import annotations

import itertools

import pytest

from remuda.domain.errors import IllegalTransition
from remuda.domain.provision import Provision, ProvisionStatus, committed, released, settled
from tests.support.records import at, provision

OPEN, COMMITTED, RELEASED = ProvisionStatus.OPEN, ProvisionStatus.COMMITTED, ProvisionStatus.RELEASED
FORGET_AT = at(600)
LEGAL = {(OPEN, COMMITTED), (OPEN, RELEASED), (COMMITTED, RELEASED)}


def move(before: Provision, status: ProvisionStatus) -> Provision:
    if status is COMMITTED:
        return committed(before, ("i-1", "i-2"), deadline=at(50))
    return released(before, now=at(5), why="cancelled")


@pytest.mark.parametrize(("source", "target"), list(itertools.product(ProvisionStatus, (COMMITTED, RELEASED))))
def test_provision_status_only_moves_forward(source: ProvisionStatus, target: ProvisionStatus) -> None:
    before = provision(status=source)
    if (source, target) in LEGAL:
        assert move(before, target).status is target
    else:
        with pytest.raises(IllegalTransition) as refused:
            move(before, target)
        assert refused.value.history == (before,)


def test_commit_records_the_instances_and_release_keeps_them() -> None:
    done = committed(provision(), ("i-1", "i-2"), deadline=at(50))
    assert (done.instance_ids, done.deadline) == (("i-1", "i-2"), at(50))
    after = released(done, now=at(5), why="given back")
    assert (after.instance_ids, after.released_at, after.why) == (("i-1", "i-2"), at(5), "given back")
    assert not after.settled


@pytest.mark.parametrize("status", [OPEN, COMMITTED])
def test_only_a_released_provision_can_be_settled(status: ProvisionStatus) -> None:
    with pytest.raises(IllegalTransition):
        settled(provision(status=status), forget_at=FORGET_AT)
    after = settled(provision(status=RELEASED), forget_at=FORGET_AT)
    assert (after.settled, after.forget_at) == (True, FORGET_AT)
