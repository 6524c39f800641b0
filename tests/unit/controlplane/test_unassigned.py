"""Jobs that GitHub has given to no set: the listener counts and reads them, with few calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from remuda.controlplane.demand.unassigned import COUNT_S, LIVE_S, MAX_CALLS, MAX_STORED, QUEUES_S, RUNNERS_S
from remuda.controlplane.job_queue import QueueReader
from remuda.controlplane.read.explain import explain
from remuda.controlplane.read.status import status
from remuda.domain.demand import DemandStatistics
from remuda.domain.errors import NotFound, Unavailable, UserError
from remuda.domain.reporting.demand import DemandStatus, RunnerSetStatus, WaitReason
from remuda.domain.reporting.job_queue import stored_size
from simulation.invariants import SCOPE
from simulation.memory.github import MemoryGitHub
from tests.support.set_world import DemandWorld, RunningListener, runner_set

#: What the issue asks for.
COUNT_SHOWN_S = 30.0
LABEL_SHOWN_S = 60.0
OWNER = SCOPE.partition("/")[0]
GPU = ("self-hosted", "gpu")


@pytest.fixture
async def sets() -> AsyncIterator[DemandWorld]:
    """A pool with a runner set of at most one runner."""
    world = DemandWorld()
    await world.configure_sets(runner_set(max=1))
    yield world
    world.check()
    await world.end()


async def demand(sets: DemandWorld) -> DemandStatus:
    return (await status(sets.process())).demand


async def large(sets: DemandWorld) -> RunnerSetStatus:
    return (await demand(sets)).sets[0]


async def fill(sets: DemandWorld, *, seconds: float = 100.0) -> RunningListener:
    """Let a job run on the only runner of the set."""
    listener = sets.listen()
    (job,) = sets.queue(seconds=seconds, run_id="70")
    await sets.wait_for(lambda: job.started)
    return listener


def calls_of(listener: RunningListener, service: str) -> dict[str, int]:
    return dict(listener.demand.context.calls.by_service().get(service, {}))


def made(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


async def test_jobs_above_the_maximum_are_shown_within_half_a_minute(sets: DemandWorld) -> None:
    assert (await demand(sets)).sets[0].summary.startswith("it is not known whether jobs wait")
    await fill(sets)
    assert (await large(sets)).summary.startswith("no job waited at ")
    waiting = sets.queue(3, run_id="71", seconds=1.0)
    await asyncio.sleep(COUNT_SHOWN_S)
    found = await large(sets)
    assert (found.summary, found.waiting, found.reason) == ("3 wait: at max 1", 3, WaitReason.AT_CAPACITY)
    explanation = await explain(sets.process(), "set.large")
    assert explanation.next_steps[0] == "3 wait: at max 1"
    assert "no job waits" not in explanation.next_steps
    # GitHub sends no message about a job that is cancelled before a set has got it.
    sets.scale_sets.cancel(waiting[0])
    await asyncio.sleep(COUNT_SHOWN_S)
    assert (await large(sets)).summary == "2 wait: at max 1"
    await sets.wait_for_jobs(waiting[1:], 300.0)
    await asyncio.sleep(COUNT_SHOWN_S)
    assert (await large(sets)).summary == "no job waits"


async def test_full_set_costs_one_call_per_count_and_a_write_per_half_minute(sets: DemandWorld) -> None:
    listener = await fill(sets)
    await asyncio.sleep(1.0)
    service, store = calls_of(listener, "scale-sets"), calls_of(listener, "store")
    await asyncio.sleep(4 * COUNT_S)
    assert made(service, calls_of(listener, "scale-sets"))["GET runnerscalesets"] == 4
    assert made(store, calls_of(listener, "store"))["put_demand"] <= 3
    assert (await large(sets)).is_current


async def test_set_with_room_is_not_counted(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(max=2))
    listener = await fill(sets)
    before = calls_of(listener, "scale-sets")
    await asyncio.sleep(4 * COUNT_S)
    assert "GET runnerscalesets" not in made(before, calls_of(listener, "scale-sets"))
    found = await large(sets)
    assert (found.is_current, found.summary) == (True, "no job waits")


async def test_count_that_fails_makes_the_shown_one_old(sets: DemandWorld) -> None:
    listener = await fill(sets, seconds=300.0)
    sets.queue(3, run_id="71")
    await asyncio.sleep(COUNT_SHOWN_S)

    async def fail(*_: Any, **__: Any) -> Any:
        raise Unavailable("GitHub answers 502")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(listener.demand.source), "count_jobs", fail)
        await asyncio.sleep(120.0)
        found = await large(sets)
        assert not found.is_current
        assert found.summary.startswith("it is not known whether jobs wait; 3 did at ")
        assert [line for line in listener.events if line[0] == "queue-failed"] == [
            ("queue-failed", "the count of large: GitHub answers 502")
        ]
    await asyncio.sleep(COUNT_SHOWN_S)
    assert (await large(sets)).summary == "3 wait: at max 1"


async def test_counts_of_a_killed_listener_are_old_after_a_minute(sets: DemandWorld) -> None:
    listener = await fill(sets, seconds=30.0)
    listener.task.cancel()
    lease = sets.database.leases["listener"]
    await listener.stop()
    # Killed: it could not give up the lease and its session.
    sets.database.leases["listener"] = lease
    await asyncio.sleep(61.0)
    found = await large(sets)
    assert (found.is_current, found.session.value) == (False, "silent")
    assert "no job waits" not in found.summary
    sets.listen()


async def test_answer_that_is_older_than_a_message_is_ignored(sets: DemandWorld) -> None:
    listener = await fill(sets)
    count_jobs = type(listener.demand.source).count_jobs
    unassigned = listener.listener._service._unassigned  # type: ignore[union-attr]
    (state,) = unassigned._states()
    newer = replace(state.record, counted_at=sets.clock.now())

    async def late(self: Any, *given: Any) -> Any:
        await count_jobs(self, *given)
        state.record = newer
        return DemandStatistics(available=9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(listener.demand.source), "count_jobs", late)
        await unassigned._count(state)
    assert state.statistics.available == 0


# Queues


@pytest.fixture
async def live(sets: DemandWorld) -> DemandWorld:
    """A set of an organisation, with a run that lasts."""
    await sets.configure_sets(runner_set(max=2, scope=OWNER))
    return sets


@pytest.mark.parametrize("run_id", ["70", "71"])
async def test_job_that_no_set_serves_is_shown_within_a_minute(live: DemandWorld, run_id: str) -> None:
    await fill(live, seconds=200.0)
    live.queue(run_id=run_id, labels=GPU)
    await asyncio.sleep(LABEL_SHOWN_S)
    (found,) = (await demand(live)).queued
    assert (found.run_id, found.reason) == (run_id, WaitReason.NO_SET)
    assert found.detail == "no runner has label gpu; sets: large (self-hosted, remuda, large)"
    assert f"job {found.name} waits: {found.detail}" in (await explain(live.process(), run_id)).next_steps
    (job,) = [job for job in live.scale_sets.jobs if job.labels == GPU]
    live.scale_sets.cancel(job)
    await asyncio.sleep(LABEL_SHOWN_S)
    assert (await demand(live)).queued == ()


async def test_job_that_another_runner_serves_is_none_of_ours(live: DemandWorld) -> None:
    live.ignore("S3")
    live.github.add(OWNER, "own-machine", ["self-hosted", "GPU", "linux"])
    listener = await fill(live, seconds=200.0)
    live.queue(labels=GPU)
    await asyncio.sleep(3 * LABEL_SHOWN_S)
    assert (await demand(live)).queued == ()
    assert calls_of(listener, "github")["GET runners"] <= 3
    live.scale_sets.cancel(live.scale_sets.jobs[-1])


async def test_job_for_the_runners_of_its_run_is_left_to_the_audit(live: DemandWorld) -> None:
    await fill(live, seconds=200.0)
    live.queue(run_id="71", labels=("self-hosted", "71"))
    await live.provision("72", repository=SCOPE)
    live.queue(run_id="72", labels=("self-hosted", "big"))
    await asyncio.sleep(LABEL_SHOWN_S)
    assert [job for record in live.database.demand.values() for queue in record.queues for job in queue.jobs] == []
    await live.release("72")
    for job in live.scale_sets.jobs[-2:]:
        live.scale_sets.cancel(job)


async def test_unchanged_queues_are_read_by_conditional_requests(live: DemandWorld) -> None:
    await live.configure_sets(runner_set(max=1, scope=OWNER))
    answers: list[Any] = []
    await fill(live, seconds=200.0)
    await asyncio.sleep(2 * QUEUES_S)
    with recorded(answers):
        await asyncio.sleep(3 * QUEUES_S)
    # Two lists of runs, and one of the jobs of the run.
    assert len(answers) == 9
    assert {answer is None for answer in answers} == {True}


async def test_live_run_of_a_set_with_room_costs_one_conditional_call_a_minute(live: DemandWorld) -> None:
    live.lifetimes = replace(live.lifetimes, max_runtime_s=1_000.0)
    await live.configure_sets(runner_set(max=2, scope=OWNER))
    answers: list[Any] = []
    await fill(live, seconds=700.0)
    await asyncio.sleep(3 * LIVE_S)
    with recorded(answers):
        await asyncio.sleep(5 * LIVE_S)
    assert answers == [None] * 5
    # A run that is added is read.
    live.queue(run_id="71", labels=GPU)
    await asyncio.sleep(LABEL_SHOWN_S + QUEUES_S)
    assert [job.run_id for job in (await demand(live)).queued] == ["71"]
    live.scale_sets.cancel(live.scale_sets.jobs[-1])


async def test_change_that_could_not_be_read_is_read_later(live: DemandWorld) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise Unavailable("GitHub answers 502")

    live.lifetimes = replace(live.lifetimes, max_runtime_s=1_000.0)
    await live.configure_sets(runner_set(max=2, scope=OWNER))
    await fill(live, seconds=500.0)
    await asyncio.sleep(2 * LIVE_S)
    live.queue(run_id="71", labels=GPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryGitHub, "list_jobs", fail)
        await asyncio.sleep(LIVE_S + QUEUES_S)
    await asyncio.sleep(LIVE_S + QUEUES_S)
    assert [job.run_id for job in (await demand(live)).queued] == ["71"]
    live.scale_sets.cancel(live.scale_sets.jobs[-1])


async def test_failed_list_of_runners_is_not_repeated_and_all_its_calls_are_charged(live: DemandWorld) -> None:
    pages, began = 30, []

    async def fail(self: Any, scope: str) -> Any:
        began.append(live.loop.time())
        self._calls.add("github", "GET runners", pages)
        raise Unavailable("GitHub's list of runners is incomplete")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryGitHub, "list_runners", fail)
        listener = await fill(live, seconds=1_000.0)
        live.queue(run_id="71", labels=GPU)
        before = sum(calls_of(listener, "github").values())
        await asyncio.sleep(600.0)
        assert sum(calls_of(listener, "github").values()) - before <= MAX_CALLS * 600 / QUEUES_S + pages
    assert len(began) >= 2
    assert min(later - earlier for earlier, later in pairwise(began)) >= RUNNERS_S
    live.scale_sets.cancel(live.scale_sets.jobs[-1])


async def test_provisions_of_a_run_are_read_once_per_turn(live: DemandWorld) -> None:
    listener = await fill(live, seconds=1_000.0)
    for _ in range(10):
        live.queue(run_id="71", labels=GPU)
    await asyncio.sleep(3 * QUEUES_S)
    before = calls_of(listener, "store").get("provisions_of_run", 0)
    await asyncio.sleep(3 * QUEUES_S)
    assert 1 <= calls_of(listener, "store")["provisions_of_run"] - before <= 3
    for job in live.scale_sets.jobs[1:]:
        live.scale_sets.cancel(job)


async def test_deleted_repository_is_not_shown_and_not_read_again(live: DemandWorld) -> None:
    async def find_nothing(*_: Any, **__: Any) -> Any:
        calls.append(1)
        raise NotFound("GitHub answers 404")

    listener = await fill(live, seconds=30.0)
    live.queue(run_id="71", labels=GPU)
    await asyncio.sleep(LABEL_SHOWN_S + QUEUES_S)
    assert len((await demand(live)).queued) == 1
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryGitHub, "list_runs", find_nothing)
        await asyncio.sleep(LABEL_SHOWN_S)
        assert (await demand(live)).queued == ()
        count = len(calls)
        await asyncio.sleep(LABEL_SHOWN_S)
        assert len(calls) == count
        reader = listener.listener._service._unassigned._reader  # type: ignore[union-attr]
        assert reader is not None
        assert [*reader._runs, *reader._live, *reader._all_runs] == []
    live.scale_sets.cancel(live.scale_sets.jobs[-1])


async def test_jobs_that_were_not_read_again_are_as_old_as_their_reading(sets: DemandWorld) -> None:
    for run_id in range(100, 103):
        sets.queue(run_id=str(run_id), labels=GPU)
    github, began = sets.process(credentialed=True).github, sets.clock.now()
    assert github is not None
    reader = QueueReader(github, calls=4)
    ages = []
    for number in range(4):
        reader.calls_left = 4
        reading = await reader.read(SCOPE, SCOPE, share=4, now=began + timedelta(seconds=20 * number))
        ages.append((20 * number - (reading.read_at - began).total_seconds(), len(reading.unread), len(reading.jobs)))
    # Two lists of runs leave calls for two of the three runs.
    assert ages == [(0.0, 1, 2), (20.0, 0, 3), (20.0, 0, 3), (20.0, 0, 3)]
    for job in sets.scale_sets.jobs:
        sets.scale_sets.cancel(job)


async def test_answers_without_counts_are_logged_once(sets: DemandWorld) -> None:
    async def tell_nothing(*_: Any, **__: Any) -> None:
        return None

    listener = await fill(sets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(listener.demand.source), "count_jobs", tell_nothing)
        await asyncio.sleep(4 * COUNT_S)
    assert [line for line in listener.events if line[0] == "queue-failed"] == [
        ("queue-failed", "the count of large: GitHub answers without counts of jobs")
    ]


def recorded(answers: list[Any]) -> Any:
    class Recording:
        def __enter__(self) -> None:
            self.patch = pytest.MonkeyPatch()
            for name in ("list_runs", "list_jobs"):
                self.patch.setattr(MemoryGitHub, name, _recording(getattr(MemoryGitHub, name), answers))

        def __exit__(self, *_: object) -> None:
            self.patch.undo()

    return Recording()


def _recording(inner: Any, answers: list[Any]) -> Any:
    async def call(self: Any, *given: Any, **named: Any) -> Any:
        answers.append(await inner(self, *given, **named))
        return answers[-1]

    return call


async def test_calls_per_reading_are_limited_and_every_run_is_read_in_turn(live: DemandWorld) -> None:
    await fill(live, seconds=1_000.0)
    for number in range(20):
        live.queue(run_id=str(100 + number), labels=GPU)
    await asyncio.sleep(QUEUES_S)
    answers: list[Any] = []
    with recorded(answers):
        await asyncio.sleep(4 * QUEUES_S)
    assert len(answers) <= 4 * MAX_CALLS
    assert len((await demand(live)).queued) == 20
    for job in live.scale_sets.jobs[1:]:
        live.scale_sets.cancel(job)


async def test_stored_jobs_of_all_repositories_are_limited(live: DemandWorld) -> None:
    await fill(live, seconds=1_000.0)
    labels = ("self-hosted", *(f"{number}{'x' * 250}" for number in range(19)))
    for number in range(30):
        live.queue(run_id=str(100 + number // 2), labels=labels, repository=f"{OWNER}/other-{number % 2}")
        if number < 2:
            # The repository has a live run.
            live.queue(run_id="99", repository=f"{OWNER}/other-{number}", seconds=1_000.0)
    await asyncio.sleep(20 * QUEUES_S)
    queues = live.database.demand["large"].queues
    stored = [job for queue in queues for job in queue.jobs]
    assert 0 < len(stored) < 30
    assert sum(map(stored_size, stored)) <= MAX_STORED
    for job in live.scale_sets.jobs:
        live.scale_sets.cancel(job)


async def test_no_live_run_costs_no_call(live: DemandWorld) -> None:
    listener = live.listen()
    await asyncio.sleep(5 * QUEUES_S)
    assert "GET runs" not in calls_of(listener, "github")


async def test_missing_permission_is_logged_once(live: DemandWorld) -> None:
    async def refuse(*_: Any, **__: Any) -> Any:
        raise UserError("GitHub refuses the credential", fix="grant it to read Actions")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryGitHub, "list_runs", refuse)
        listener = await fill(live)
        await asyncio.sleep(4 * QUEUES_S)
    assert [line for line in listener.events if line[0] == "queue-failed"] == [
        ("queue-failed", f"{SCOPE}: GitHub refuses the credential")
    ]
