"""The listener after rare turns: failed writes, interruptions that are named late, sets that are restored."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from remuda.controlplane.demand.machines import TAKEN_FOR_S
from remuda.controlplane.demand.sets import SetState
from remuda.domain.demand import JobRecord
from remuda.domain.errors import RemudaError, Throttled, Unavailable, UserError
from remuda.domain.holder import SetHolder, StartedJob
from remuda.domain.instance import State
from remuda.domain.runner_set import CapacityWindow, RunnerSet
from remuda.ports.github import Deletion, GitHubRun
from simulation.invariants import SCOPE
from simulation.memory.github import MemoryDemandJob
from tests.support.set_world import SET_LIFETIMES, DemandWorld, runner_set
from tests.support.virtual_time import Call, Hook

FAILED = GitHubRun(run_id=77, status="completed", conclusion="failure", head_repository=SCOPE)


@pytest.fixture
def served_sets() -> tuple[RunnerSet, ...]:
    return (runner_set(rerun_on_interruption=True),)


class Outage:
    """Lets calls of these names fail while it lasts."""

    def __init__(self, *names: str, error: RemudaError | None = None) -> None:
        self.names = names
        self.error = error or Unavailable("no answer")
        self.lasts = False

    @property
    def hook(self) -> Hook:
        async def hook(name: str, call: Call) -> Any:
            if self.lasts and name in self.names:
                raise self.error
            return await call()

        return hook


async def interrupt(sets: DemandWorld, job: MemoryDemandJob) -> None:
    await sets.wait_for(lambda: job.started)
    await asyncio.sleep(1.0)
    sets.github.runs[SCOPE, 77] = replace(FAILED, status="in_progress", conclusion="")
    sets.machines[sets.in_state(State.RUNNING)[0]].give_spot_notice()


def record_of(sets: DemandWorld, job: MemoryDemandJob) -> JobRecord:
    return sets.database.jobs[job.key]


async def test_jobs_of_a_message_that_comes_again_after_a_failed_write_are_stored(sets: DemandWorld) -> None:
    """The message is acknowledged the second time, although it changes nothing that the listener knows."""
    sets.behaviour.boot_s = 50.0
    outage = Outage("store.put_demand")
    sets.listen(outage.hook)
    await sets.wait_for(lambda: sets.scale_sets.sets)
    await asyncio.sleep(2.0)
    outage.lasts = True
    (job,) = sets.queue(seconds=100.0)
    await asyncio.sleep(20.0)
    assert not sets.database.jobs
    outage.lasts = False
    await sets.wait_for(lambda: job.key in sets.database.jobs, 20.0)
    assert not job.started


async def test_interruption_is_recorded_although_the_store_did_not_answer_at_first(sets: DemandWorld) -> None:
    outage = Outage("store.put_jobs")
    sets.listen(outage.hook)
    (job,) = sets.queue(seconds=300.0)
    await sets.wait_for(lambda: job.started)
    outage.lasts = True
    await interrupt(sets, job)
    await asyncio.sleep(30.0)
    outage.lasts = False
    await asyncio.sleep(200.0)
    sets.github.runs[SCOPE, 77] = FAILED
    await asyncio.sleep(100.0)
    assert sets.github.reruns == [77]


@pytest.mark.parametrize("is_repeated", [False, True], ids=["once", "repeated"])
async def test_interruption_of_a_job_that_is_told_after_the_end_of_its_instance_is_recorded(
    sets: DemandWorld,
    is_repeated: bool,  # noqa: FBT001
) -> None:
    """GitHub's messages came late, and a sweep noted that the job of an unknown run is lost (seed 51000110).

    Also if each message comes again, because its acknowledgement has failed: the second time, it says nothing new.
    """
    is_late, acknowledgements = False, 0

    async def hook(name: str, call: Call) -> Any:
        nonlocal acknowledgements
        acknowledgements += name == "session.acknowledge"
        if is_repeated and name == "session.acknowledge" and acknowledgements % 2:
            raise Throttled("too many requests", retry_after_s=1.0)
        answer = await call()
        if is_late and name == "session.receive":
            raise Unavailable("no answer")
        return answer

    sets.listen(hook)
    (job,) = sets.queue(seconds=300.0)
    await sets.wait_for(lambda: sets.in_state(State.RUNNING))
    is_late = True
    await interrupt(sets, job)
    (instance_id,) = sets.database.instances
    while sets.machines[instance_id].alive:
        await sets.sweep()
        await asyncio.sleep(20.0)
    await sets.sweep()
    last = sets.database.instances[instance_id].last_holder
    assert isinstance(last, SetHolder)
    assert last.job == StartedJob()
    assert record_of(sets, job).started_at is None
    is_late = False
    await sets.wait_for(lambda: record_of(sets, job).lost_at is not None, 100.0)
    await sets.wait_for(lambda: record_of(sets, job).interrupted_at is not None, 20.0)
    sets.github.runs[SCOPE, 77] = FAILED
    await asyncio.sleep(100.0)
    assert sets.github.reruns == [77]


@pytest.mark.parametrize("fails", ["store.histories", "store.get_jobs", "store.put_jobs"])
@pytest.mark.parametrize("error", [Unavailable("no answer"), UserError("refused")], ids=["no answer", "refused"])
@pytest.mark.parametrize("restarts", [False, True], ids=["same listener", "next listener"])
async def test_lost_job_is_recorded_although_the_store_fails_for_a_while(
    sets: DemandWorld,
    fails: str,
    error: RemudaError,
    restarts: bool,  # noqa: FBT001
) -> None:
    sets.scale_sets.lease = timedelta(seconds=300.0)
    outage = Outage(fails, error=error)
    sets.listen(outage.hook)
    (job,) = sets.queue(seconds=300.0)
    await interrupt(sets, job)
    await asyncio.sleep(5.0)
    (lost,) = sets.in_state(State.RUNNING)
    outage.lasts = True
    if restarts:
        await sets.stop_listeners()
    sets.cut_power(lost, "a test")
    await sets.sweep()
    if restarts:
        sets.listen(outage.hook)
    await asyncio.sleep(30.0)
    assert record_of(sets, job).lost_at is None
    outage.lasts = False
    await sets.wait_for(lambda: record_of(sets, job).lost_at is not None, 30.0)
    await sets.wait_for(lambda: job.is_over, 400.0)


@pytest.mark.parametrize("error", [Unavailable("no answer"), UserError("refused")], ids=["no answer", "refused"])
async def test_interrupted_jobs_are_found_although_the_first_search_fails(
    sets: DemandWorld, error: RemudaError
) -> None:
    sets.listen()
    (job,) = sets.queue(seconds=300.0)
    await interrupt(sets, job)
    await sets.wait_for(lambda: job.is_over, 200.0)
    await sets.stop_listeners()
    outage = Outage("store.recent_jobs", error=error)
    outage.lasts = True
    sets.listen(outage.hook)
    await asyncio.sleep(20.0)
    outage.lasts = False
    sets.github.runs[SCOPE, 77] = FAILED
    await asyncio.sleep(100.0)
    assert sets.github.reruns == [77]


async def test_records_of_jobs_that_run_or_may_be_run_again_outlast_those_of_others() -> None:
    sets = DemandWorld(lifetimes=replace(SET_LIFETIMES, keep_records_s=5.0))
    await sets.configure_sets(runner_set(rerun_on_interruption=True))
    sets.listen()
    (job,) = sets.queue(seconds=300.0)
    await sets.wait_for(lambda: job.started)
    await asyncio.sleep(20.0)
    await sets.sweep()
    assert record_of(sets, job).started_at is not None
    await interrupt(sets, job)
    await sets.wait_for(lambda: job.is_over, 200.0)
    await asyncio.sleep(20.0)
    await sets.sweep()
    sets.github.runs[SCOPE, 77] = FAILED
    await asyncio.sleep(100.0)
    assert sets.github.reruns == [77]
    sets.check()
    await sets.end()


async def test_set_that_was_restored_is_not_deleted(sets: DemandWorld) -> None:
    """The listener reads the configuration once a minute, and may have waited for hours until the set was empty."""
    listener = sets.listen()
    (job,) = sets.queue(seconds=40.0)
    await sets.wait_for(lambda: job.started)
    before = next(iter(sets.scale_sets.sets))
    await sets.configure_sets(runner_set(name="other", labels=("other",)))
    listener.listener.reload()
    await asyncio.sleep(5.0)
    await sets.configure_sets(runner_set(rerun_on_interruption=True))
    await sets.wait_for(lambda: job.is_over, 100.0)
    await asyncio.sleep(30.0)
    assert before in sets.scale_sets.sets
    jobs = sets.queue()
    await sets.wait_for_jobs(jobs)


async def start_after_failures(sets: DemandWorld, count: int, *, is_paused: bool) -> SetState:
    """Acquire machines of a set whose last four launches have failed."""
    listener = sets.listen()
    await sets.wait_for(lambda: sets.scale_sets.sets)
    await asyncio.sleep(2.0)
    service = listener.listener._service
    assert service is not None
    state = service._states()["large"]
    state.failures, state.retry_at = 4, sets.clock.monotonic() + 60.0 * is_paused
    service._acquisitions.start(state, service.config(), count)
    await sets.wait_for(lambda: sets.in_state(State.CREATED))
    await asyncio.sleep(1.0)
    return state


async def test_launch_that_succeeds_during_the_pause_after_a_failure_ends_the_pause(sets: DemandWorld) -> None:
    """An acquisition of a machine that came to the pool launches one instead, if another process was first."""
    state = await start_after_failures(sets, 1, is_paused=True)
    assert (state.failures, state.retry_at) == (0, 0.0)


async def test_failure_beside_a_launch_that_succeeds_is_the_first_in_a_row() -> None:
    sets = DemandWorld(max_instances=1)
    await sets.configure_sets()
    state = await start_after_failures(sets, 2, is_paused=False)
    assert state.failures == 1
    sets.check()
    await sets.end()


@pytest.mark.parametrize(("hot", "warm"), [(1, 0), (0, 1)], ids=["hot", "warm"])
async def test_capacity_is_there_soon_after_its_window_opens(sets: DemandWorld, hot: int, warm: int) -> None:
    """Nothing else happens then that would wake the listener."""
    window = CapacityWindow(cron="11-59 * * * *", hot=hot, warm=warm)
    await sets.configure_sets(runner_set(windows=(window,)))
    await asyncio.sleep(20.0)
    sets.listen()
    await asyncio.sleep(660.0 - sets.loop.time() - 1.0)
    assert not sets.machines
    await sets.wait_for(lambda: sets.machines, 3.0)


async def test_idle_machines_are_launched_as_soon_as_the_configuration_wants_them(sets: DemandWorld) -> None:
    await asyncio.sleep(20.0)
    listener = sets.listen()
    await asyncio.sleep(75.0)
    await sets.configure_sets(runner_set(windows=(CapacityWindow(warm=1),)))
    listener.listener.reload()
    await sets.wait_for(lambda: sets.machines, 3.0)


async def test_runner_that_github_keeps_for_an_unknown_job_is_given_up_as_soon_as_it_may_be(sets: DemandWorld) -> None:
    """GitHub refused to remove its registration because of a job that never started."""
    await sets.configure_sets(runner_set(windows=(CapacityWindow(hot=1),)))
    asked: list[float] = []

    async def hook(name: str, call: Call) -> Any:
        if name == "source.deregister":
            asked.append(sets.loop.time())
            return Deletion.BUSY if len(asked) == 1 else await call()
        return await call()

    sets.listen(hook)
    await sets.wait_for(lambda: sets.in_state(State.RUNNING))
    await sets.configure_sets(runner_set())
    sets.listeners[0].listener.reload()
    await sets.wait_for(lambda: len(asked) == 2, 90.0)
    waits_s = TAKEN_FOR_S + SET_LIFETIMES.surplus_grace_s
    assert waits_s <= asked[1] - asked[0] < waits_s + 1.0


async def test_claimed_machine_whose_registration_github_keeps_is_asked_about_ever_more_slowly(
    sets: DemandWorld,
) -> None:
    """Its listener has died after the registration, and GitHub has given a job to the runner that never starts."""
    await sets.warm(1)
    is_dead, asked, test_is_over = False, 0, asyncio.Event()

    async def die_after_the_registration(name: str, call: Call) -> Any:
        nonlocal is_dead
        if is_dead:
            await test_is_over.wait()
        answer = await call()
        is_dead = is_dead or name == "source.register"
        if is_dead:
            await test_is_over.wait()
        return answer

    async def keep_the_registration(name: str, call: Call) -> Any:
        nonlocal asked
        if name == "source.deregister":
            asked += 1
            return Deletion.BUSY
        return await call()

    sets.listen(die_after_the_registration)
    (job,) = sets.queue()
    await sets.wait_for(lambda: is_dead)
    sets.scale_sets.ended(job, "canceled")
    second = sets.listen(keep_the_registration)
    await sets.wait_for(lambda: asked, 60.0)
    await asyncio.sleep(10.0)
    assert asked <= 4
    assert any(event == "step-failed" and "keeps its registration" in why for event, why in second.events)
    test_is_over.set()
