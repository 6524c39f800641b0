"""Records of jobs: events of GitHub are merged in any order."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from itertools import permutations
from typing import Any

import pytest

from remuda.domain.demand import JobEvent, JobEventKind, JobRecord, merge_events
from tests.support.records import NOW

QUEUED, STARTED, FINISHED = NOW, NOW + timedelta(minutes=1), NOW + timedelta(minutes=2)
JOB: Any = {"job_id": "j-1", "run_id": "7", "repository": "octo/app", "queued_at": QUEUED}
EVENTS = (
    JobEvent(kind=JobEventKind.ASSIGNED, assigned_at=QUEUED, **JOB),
    JobEvent(kind=JobEventKind.STARTED, started_at=STARTED, runner_name="r-1", **JOB),
    JobEvent(kind=JobEventKind.COMPLETED, finished_at=FINISHED, result="success", runner_name="r-1", **JOB),
)


def test_events_of_a_job_are_merged_in_any_order() -> None:
    expected = merge_events({}, EVENTS, runner_set="large", now=NOW)["j-1"]
    assert (expected.assigned_at, expected.started_at, expected.completed_at) == (QUEUED, STARTED, FINISHED)
    assert (expected.runner_name, expected.result) == ("r-1", "success")
    for events in permutations(EVENTS):
        assert merge_events({}, events, runner_set="large", now=NOW) == {"j-1": expected}


def test_event_that_comes_twice_changes_nothing() -> None:
    known = merge_events({}, EVENTS, runner_set="large", now=NOW)
    for event in EVENTS:
        assert merge_events(known, [event], runner_set="large", now=FINISHED) == {}


def test_event_without_details_leaves_what_is_known() -> None:
    known = merge_events({}, EVENTS[:1], runner_set="large", now=NOW)
    bare = JobEvent(kind=JobEventKind.COMPLETED, job_id="j-1", finished_at=FINISHED, result="success")
    (record,) = merge_events(known, [bare], runner_set="large", now=FINISHED).values()
    assert (record.run_id, record.repository, record.queued_at) == ("7", "octo/app", QUEUED)


def test_details_that_come_later_are_added() -> None:
    bare = JobEvent(kind=JobEventKind.ASSIGNED, job_id="j-1")
    known = merge_events({}, [bare], runner_set="large", now=NOW)
    (record,) = merge_events(known, EVENTS[1:2], runner_set="large", now=FINISHED).values()
    assert (record.run_id, record.queued_at, record.started_at) == ("7", QUEUED, STARTED)


@pytest.mark.parametrize(
    ("completed_at", "result", "is_lost"),
    [
        (None, "", True),
        # Its instance ended after it, spent, while no listener ran.
        (STARTED, "failed", False),
        (STARTED, "canceled", True),
        (FINISHED, "failed", True),
        (FINISHED, "success", False),
    ],
)
def test_job_that_had_ended_before_its_instance_is_not_lost(
    completed_at: datetime | None, result: str, *, is_lost: bool
) -> None:
    job = JobRecord(job_id="j-1", runner_set="large", seen_at=NOW, lost_at=STARTED + timedelta(seconds=1))
    assert replace(job, completed_at=completed_at, result=result).is_lost is is_lost
