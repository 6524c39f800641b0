"""A listener that ends while it handles a message, or while it follows an interrupted job: the next one continues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from remuda.controlplane.demand import DemandListener
from remuda.controlplane.demand.rerun import GIVE_UP
from remuda.domain.demand import DemandMessage, JobEvent, JobEventKind
from remuda.domain.errors import Unavailable
from remuda.domain.instance import State
from remuda.domain.pool_config import parse_runner_name
from remuda.domain.runner_set import RunnerSet
from remuda.ports.github import GitHubRun
from simulation.invariants import POOL, SCOPE
from simulation.memory.github import MemoryDemandJob
from tests.support.set_world import DemandWorld, runner_set
from tests.support.virtual_time import Call, Cut, CutKind, failing

#: More calls than the listener makes to handle a message.
MAX_CALLS = 20
#: Longer than the lease and the session of the first listener.
JOB_S = 80.0
RUN = GitHubRun(run_id=77, status="in_progress", conclusion="", head_repository=SCOPE)


@pytest.fixture
def served_sets() -> tuple[RunnerSet, ...]:
    return (runner_set(rerun_on_interruption=True),)


class MessageCut(Cut):
    """Kills a listener at its n-th call after a message with such an event, and judges each acknowledgement."""

    def __init__(self, sets: DemandWorld, event: JobEventKind, at: int, kind: CutKind) -> None:
        super().__init__(at, kind)
        self._sets = sets
        self._event = event
        self._message: DemandMessage | None = None
        self._is_due = False

    async def __call__(self, name: str, call: Call) -> Any:
        if name == "session.acknowledge" and self._message is not None and not self.dead.is_set():
            for event in self._message.events:
                self._check_stored(event)
        if self._is_due or self.dead.is_set():
            return await super().__call__(name, call)
        answer = await call()
        if name == "session.receive":
            self._message = answer
            self._is_due = answer is not None and any(event.kind is self._event for event in answer.events)
        return answer

    def _check_stored(self, event: JobEvent) -> None:
        """GitHub tells it once: what is not stored now is lost if the listener ends."""
        database = self._sets.database
        job = database.jobs[event.job_id]
        if event.kind is JobEventKind.STARTED:
            assert job.started_at is not None
            epoch, instance_id = parse_runner_name(POOL, event.runner_name) or (0, "")
            instance = database.instances[instance_id]
            assert instance.is_bound or (instance.state, instance.epoch) != (State.RUNNING, epoch)
        if event.kind is JobEventKind.COMPLETED:
            assert job.completed_at is not None


@pytest.mark.parametrize("kind", [CutKind.CRASH_BEFORE, CutKind.CRASH_AFTER], ids=["before", "after"])
@pytest.mark.parametrize("event", [JobEventKind.STARTED, JobEventKind.COMPLETED])
async def test_what_a_message_says_is_stored_although_the_listener_ends(event: JobEventKind, kind: CutKind) -> None:
    """Whatever call was its last one, the job is bound to its run and recorded as completed in the end."""
    for at in range(1, MAX_CALLS):
        sets = DemandWorld()
        await sets.configure_sets()
        cut = MessageCut(sets, event, at, kind)
        first = asyncio.create_task(cut.run(DemandListener(sets.demand(cut, owner="first")).run()))
        (job,) = sets.queue(seconds=JOB_S)
        await asyncio.wait({first}, timeout=JOB_S + 10.0)
        is_killed = first.done()
        if is_killed:
            # As soon as the lease of the first one has expired.
            sets.listen()
        await sets.wait_for_jobs([job])
        await sets.wait_for(partial(_is_over, sets, job), 100.0)
        (record,) = sets.database.instances.values()
        assert (record.last_subject, record.tier) == ("77", "trusted"), f"after {cut.calls}"
        sets.check()
        await cut.discard()
        await sets.end()
        if "session.acknowledge" in cut.calls[:-2]:
            return
    raise AssertionError("the listener makes more calls than expected")


def _is_over(sets: DemandWorld, job: MemoryDemandJob) -> bool:
    held = sets.in_state(State.CREATED, State.RUNNING, State.RELEASING)
    return not held and sets.database.jobs[job.key].completed_at is not None


async def test_limit_for_the_end_of_the_run_counts_from_the_interruption(sets: DemandWorld) -> None:
    """The job had waited for longer than that before."""
    sets.github.runs[SCOPE, 77] = RUN
    first = sets.listen(failing("compute.launch", Unavailable("no capacity")))
    (job,) = sets.queue(seconds=300.0)
    await sets.wait_for(lambda: job.key in sets.database.jobs)
    await first.stop()
    await asyncio.sleep(GIVE_UP.total_seconds())
    sets.listen()
    await sets.wait_for(lambda: job.started)
    await asyncio.sleep(5.0)
    sets.machines[sets.in_state(State.RUNNING)[0]].give_spot_notice()
    await sets.wait_for(lambda: job.is_over, 200.0)
    sets.github.runs[SCOPE, 77] = replace(RUN, status="completed", conclusion="failure")
    await asyncio.sleep(200.0)
    assert sets.github.reruns == [77]


def _is_recorded(sets: DemandWorld, job: MemoryDemandJob) -> bool:
    record = sets.database.jobs.get(job.key)
    return record is not None and record.interrupted_at is not None


def _is_completed(sets: DemandWorld, job: MemoryDemandJob) -> bool:
    record = sets.database.jobs.get(job.key)
    return record is not None and record.completed_at is not None


#: What has happened when the listener restarts.
STAGES: dict[str, Callable[[DemandWorld, MemoryDemandJob], bool]] = {
    "the job has started": lambda _sets, job: job.started,
    "the interruption is recorded": _is_recorded,
    "the job has ended": lambda _sets, job: job.is_over,
    "the end of the job is recorded": _is_completed,
    "the run has ended": lambda sets, _job: sets.github.runs[SCOPE, 77].has_ended,
    "the re-run is requested": lambda sets, _job: bool(sets.github.reruns),
}


@pytest.mark.parametrize("is_away", [False, True], ids=["restarted", "away for a while"])
@pytest.mark.parametrize("stage", STAGES)
async def test_interrupted_job_is_run_again_once_whenever_the_listener_restarts(
    sets: DemandWorld,
    stage: str,
    is_away: bool,  # noqa: FBT001
) -> None:
    sets.github.runs[SCOPE, 77] = RUN
    first = sets.listen()
    (job,) = sets.queue(seconds=300.0)

    async def restart() -> None:
        await sets.wait_for(lambda: STAGES[stage](sets, job), 600.0)
        await first.stop()
        # Not so long that the job is interrupted and has ended without any listener.
        await asyncio.sleep(15.0 * is_away)
        sets.listen()

    restarting = asyncio.create_task(restart())
    await sets.wait_for(lambda: job.started)
    await asyncio.sleep(20.0)
    sets.machines[sets.in_state(State.RUNNING)[0]].give_spot_notice()
    await sets.wait_for(lambda: job.is_over, 200.0)
    await asyncio.sleep(90.0)
    sets.github.runs[SCOPE, 77] = replace(RUN, status="completed", conclusion="failure")
    await asyncio.sleep(200.0)
    await restarting
    assert sets.github.reruns == [77]
