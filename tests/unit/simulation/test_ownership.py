"""Owners of fields: every change of a field by an operation that does not own it is found."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from remuda.domain.demand import DemandStatistics, RepositoryQueue
from remuda.domain.instance import Instance, RetireReason, State
from remuda.domain.provision import Provision, ProvisionOutcome, ProvisionStatus
from remuda.domain.transitions.table import TRANSITIONS
from simulation.faults import Fault
from simulation.ownership import OWNED_BY_ROW, Ownership
from tests.support.records import (
    NOW,
    at,
    demand_record,
    entry,
    in_set,
    instance,
    job_record,
    pool_config,
    provision,
    run_holder,
    set_holder,
)

ROWS = [row.name for row in TRANSITIONS if row.sources != frozenset({None})]
#: Another value of each field of an instance.
OTHER: dict[str, Any] = {
    **{item.name: "other" for item in fields(Instance)},
    "holder": None,
    "last_holder": run_holder("other"),
    "epoch": 9,
    "cpu": 9,
    "memory_mib": 9,
    "uses": 9,
    "state": State.TERMINATED,
    "assignment": None,
    "threshold": at(1),
    "created_at": at(1),
    "run_deadline": at(1),
    "quarantined_until": at(1),
    "announced_at": at(1),
    "forget_at": at(1),
    "retire_reason": RetireReason.DRAINED,
}


def process(**known: Any) -> Any:
    return SimpleNamespace(task=object(), desired=None, skew_s=0.0, **known)


@pytest.fixture
def ownership() -> Ownership:
    clock = SimpleNamespace(now=lambda: at(100))
    world: Any = SimpleNamespace(delayed_writer=None, faults=SimpleNamespace(counts=Counter[Fault]()), clock=clock)
    return Ownership(world)


def test_every_row_has_owned_fields() -> None:
    assert set(ROWS) <= set(OWNED_BY_ROW)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_changes_only_its_fields(row: str, ownership: Ownership) -> None:
    before = in_set(State.RUNNING)
    for name, value in OTHER.items():
        after = replace(before, **{name: value})
        found = [text for _, text in ownership.instance_written(before, after, entry(row)) if "changed" in text]
        assert bool(found) is (name not in OWNED_BY_ROW[row]), name


def test_a_renewed_credential_leaves_the_rest_of_the_assignment(ownership: Ownership) -> None:
    before = in_set(State.RUNNING)
    assert before.assignment is not None
    renewed = replace(before, assignment=replace(before.assignment, jit_config="new"))
    assert not list(ownership.instance_written(before, renewed, entry("credential")))
    forgotten = replace(before, assignment=replace(before.assignment, runner_id=5))
    assert list(ownership.instance_written(before, forgotten, entry("credential")))


@pytest.mark.parametrize("row", ["release", "end-running"])
def test_the_last_run_is_that_of_the_record_when_it_is_written(row: str, ownership: Ownership) -> None:
    bound = instance(state=State.RUNNING, run_id="77")
    right = replace(bound, holder=None, last_holder=bound.holder)
    assert not list(ownership.instance_written(bound, right, entry(row)))
    assert list(ownership.instance_written(bound, replace(right, last_holder=set_holder()), entry(row)))


@pytest.mark.parametrize(
    ("before", "changed"),
    [
        (provision(), {"deadline": at(9)}),
        (provision(), {"status": ProvisionStatus.COMMITTED, "repository": "octo/other"}),
        (provision(status=ProvisionStatus.COMMITTED), {"instance_ids": ("i-1",)}),
        (provision(status=ProvisionStatus.COMMITTED, deadline=at(90)), {"deadline": at(80)}),
        (provision(status=ProvisionStatus.RELEASED, settled=True), {"why": "other"}),
        (
            provision(status=ProvisionStatus.RELEASED, outcome=ProvisionOutcome(ended_at=NOW, seconds=1.0)),
            {"settled": True, "outcome": None},
        ),
    ],
    ids=["open", "committed", "prolonged", "shortened", "settled", "outcome lost"],
)
def test_a_provision_changes_with_its_status(before: Provision, changed: Any, ownership: Ownership) -> None:
    assert list(ownership.provision_written(before, replace(before, **changed)))


def test_a_sweep_changes_no_configuration(ownership: Ownership) -> None:
    before = pool_config()
    renewed = replace(before, revision=2, applied_at=at(1))
    assert not list(ownership.configured(before, renewed, process()))
    assert list(ownership.configured(before, replace(renewed, max_instances=3), process()))
    assert list(ownership.configured(before, replace(renewed, tokens=()), process()))


def test_the_record_of_a_set_does_not_go_back(ownership: Ownership) -> None:
    writer = process()
    queue = RepositoryQueue(repository="octo/repo", read_at=at(20))
    before = demand_record(
        session_id="s", last_message_id=7, counted_at=at(20), has_created=True, queues=(queue,), error="", shortage=""
    )
    list(ownership.demand_written(None, before, writer))
    for changed in (
        {"last_message_id": 6},
        {"scale_set_id": 2},
        {"counted_at": at(19)},
        {"counted_at": None},
        {"statistics": DemandStatistics(assigned=1)},
        {"has_created": False},
        {"queues": (replace(queue, read_at=at(19)),)},
        {"error": "it fails"},
    ):
        assert list(ownership.demand_written(before, replace(before, **changed), writer)), changed
    newer = replace(before, last_message_id=8, counted_at=at(30), statistics=DemandStatistics(assigned=1))
    assert not list(ownership.demand_written(before, newer, writer))
    # Two counts in the same millisecond.
    recent = replace(newer, last_message_id=9, counted_at=at(100), statistics=DemandStatistics(assigned=2))
    assert not list(ownership.demand_written(newer, recent, writer))
    more = replace(recent, statistics=DemandStatistics(assigned=3))
    assert not list(ownership.demand_written(recent, more, writer))
    # Another listener may have read an earlier record, and by another clock.
    assert not list(ownership.demand_written(newer, before, process()))


def test_what_is_known_of_a_job_is_not_taken_back(ownership: Ownership) -> None:
    writer, before = process(), job_record(completed_at=at(5), result="succeeded")
    list(ownership.job_written(None, before, writer))
    assert not list(ownership.job_written(before, replace(before, interrupted_at=at(6)), writer))
    assert list(ownership.job_written(before, replace(before, completed_at=None), writer))
    ownership._world.faults.counts[Fault.EVENT_LATE] += 1
    assert not list(ownership.job_written(before, replace(before, completed_at=None), writer))
