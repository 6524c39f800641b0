"""The listener under what GitHub, operators and failures may do to it: no job is lost, nothing is repeated at once."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from remuda.controlplane.demand.equipment import LAST_STEP_RETRY_S, STEP_RETRY_S
from remuda.controlplane.demand.sets import CONCURRENT_REGISTRATIONS, FIRST_RETRY_S
from remuda.domain.demand import JobEvent, JobEventKind
from remuda.domain.errors import CapacityError, Throttled, Unavailable
from remuda.domain.instance import State
from remuda.domain.resources import Tier
from tests.support.set_world import LABELS, DemandWorld, runner_set, window
from tests.support.virtual_time import Call, Killed


async def test_started_job_is_bound_although_its_message_could_not_be_recorded(sets: DemandWorld) -> None:
    failing_until = 0.0

    async def hook(name: str, call: Call) -> Any:
        if name == "store.put_demand" and sets.loop.time() < failing_until:
            raise Unavailable("no answer")
        return await call()

    sets.listen(hook)
    (job,) = sets.queue(seconds=60)
    await sets.wait_for(lambda: sets.in_state(State.RUNNING))
    failing_until = sets.loop.time() + 20
    await sets.wait_for_jobs([job])
    await sets.wait_for(lambda: sets.in_state(State.IDLE))
    (record,) = sets.database.instances.values()
    assert (record.last_subject, record.tier) == ("77", "trusted")


async def test_started_job_is_bound_by_the_next_listener(sets: DemandWorld) -> None:
    """The first one is killed after it has recorded the message, before it has bound the job."""
    is_killed = False

    async def hook(name: str, call: Call) -> Any:
        nonlocal is_killed
        if is_killed:
            raise Killed
        is_killed = name == "store.put_demand" and any(job.started for job in sets.scale_sets.jobs)
        return await call()

    first = sets.listen(hook)
    (job,) = sets.queue(seconds=60)
    await sets.wait_for(lambda: job.started)
    await sets.wait_for(lambda: is_killed)
    await first.stop()
    sets.listen()
    await sets.wait_for_jobs([job])
    await sets.wait_for(lambda: sets.in_state(State.IDLE))
    (record,) = sets.database.instances.values()
    assert (record.last_subject, record.tier) == ("77", "trusted")


@pytest.mark.parametrize(("before", "after"), [(Tier.UNTRUSTED, Tier.TRUSTED), (Tier.TRUSTED, Tier.UNTRUSTED)])
async def test_machine_does_not_listen_on_after_its_set_has_another_trust(
    sets: DemandWorld, before: Tier, after: Tier
) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=1), trust=before))
    listener = sets.listen()
    await sets.wait_for_jobs(sets.queue())
    await sets.wait_for(lambda: sets.in_state(State.RUNNING))
    used = set(sets.database.instances)
    await sets.configure_sets(runner_set(windows=window(hot=1), trust=after))
    listener.listener.reload()
    await sets.pass_time(5)
    jobs = sets.queue(2)
    await sets.wait_for_jobs(jobs)
    assert not [job.runner_name for job in jobs if any(instance_id in job.runner_name for instance_id in used)]


async def test_message_of_one_set_cannot_bind_a_machine_of_another(sets: DemandWorld) -> None:
    other = runner_set(name="other", labels=("self-hosted", "other"), trust=Tier.UNTRUSTED)
    await sets.configure_sets(runner_set(windows=window(hot=1)), other)
    sets.listen()
    await sets.wait_for(lambda: any(runner.take for runner in sets.github.runners.values()))
    (runner,) = sets.github.runners.values()
    event = JobEvent(kind=JobEventKind.STARTED, job_id="forged", run_id="99", runner_name=runner.name)
    sets.scale_sets.send("other", event)
    await sets.pass_time(2)
    (record,) = sets.database.instances.values()
    assert (record.subject, record.tier) == ("set.large", "trusted")


async def test_polls_that_are_answered_at_once_are_not_repeated_at_once(sets: DemandWorld) -> None:
    polls = 0

    async def hook(name: str, call: Call) -> Any:
        nonlocal polls
        if name != "session.receive":
            return await call()
        polls += 1
        if polls > 1_000:
            await asyncio.Event().wait()
        return None

    sets.listen(hook)
    await sets.pass_time(60)
    assert 30 < polls <= 62


async def test_refused_registrations_are_repeated_ever_more_slowly(sets: DemandWorld) -> None:
    calls: list[float] = []

    async def hook(name: str, call: Call) -> Any:
        if name == "source.register":
            calls.append(sets.loop.time())
            raise Throttled("too many requests", retry_after_s=9.0)
        return await call()

    sets.listen(hook)
    sets.queue()
    await sets.wait_for(lambda: calls)
    await sets.pass_time(40)
    assert all(later - earlier >= 9 for earlier, later in itertools.pairwise(calls))


async def test_failed_step_is_repeated_ever_more_slowly(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=1)))
    calls: list[float] = []

    async def hook(name: str, call: Call) -> Any:
        if name == "source.deregister":
            calls.append(sets.loop.time())
            raise Unavailable("GitHub does not answer")
        return await call()

    listener = sets.listen(hook)
    await sets.wait_for(lambda: any(runner.take for runner in sets.github.runners.values()))
    await sets.configure_sets()
    listener.listener.reload()
    await sets.wait_for(lambda: len(calls) == 6, 100)
    pauses = [later - earlier for earlier, later in itertools.pairwise(calls)]
    assert pauses == pytest.approx([STEP_RETRY_S, 4, 8, LAST_STEP_RETRY_S, LAST_STEP_RETRY_S])


async def test_set_that_is_back_is_served_although_an_earlier_job_runs(sets: DemandWorld) -> None:
    listener = sets.listen()
    (long,) = sets.queue(seconds=100)
    await sets.wait_for(lambda: long.started)
    await sets.configure(runner_sets=(), lifetimes=sets.lifetimes)
    listener.listener.reload()
    await sets.pass_time(5)
    await sets.configure_sets()
    listener.listener.reload()
    (job,) = sets.queue(labels=LABELS)
    await sets.wait_for_jobs([job], 60)
    assert not long.conclusion
    await sets.wait_for_jobs([long])
    assert sets.scale_sets.named("large")


async def test_returning_machines_do_not_repeat_a_failing_launch(sets: DemandWorld) -> None:
    launches: list[float] = []

    async def hook(name: str, call: Call) -> Any:
        if name == "compute.launch":
            launches.append(sets.loop.time())
            if len(launches) > 1:
                raise CapacityError("there is no capacity")
        return await call()

    sets.listen(hook)
    (first,) = sets.queue(seconds=1)
    await sets.wait_for_jobs([first])
    jobs = sets.queue(20, seconds=1)
    await sets.wait_for_jobs(jobs, 300)
    assert len(sets.database.instances) == 1
    assert all(later - earlier >= 2.5 for earlier, later in itertools.pairwise(launches[1:]))
    assert len(launches) <= 12


async def test_pool_that_cannot_be_filled_does_not_delay_jobs(sets: DemandWorld) -> None:
    launches = 0

    async def hook(name: str, call: Call) -> Any:
        nonlocal launches
        if name == "compute.launch":
            launches += 1
            if launches > 1:
                raise CapacityError("there is no capacity")
        return await call()

    listener = sets.listen(hook)
    await sets.wait_for_jobs(sets.queue(seconds=1))
    await sets.wait_for(lambda: sets.in_state(State.IDLE))
    await sets.configure_sets(runner_set(windows=window(warm=2)))
    listener.listener.reload()
    # With growing pauses.
    assert await sets.wait_for(lambda: launches > 3, 200) >= FIRST_RETRY_S
    (job,) = sets.queue(seconds=1)
    assert await sets.wait_for(lambda: job.started) < 5


async def test_set_of_another_pool_is_not_deleted(sets: DemandWorld) -> None:
    foreign = runner_set(name="foreign", labels=("self-hosted", "foreign"))
    scale_set = sets.scale_sets.create(foreign)
    sets.scale_sets.open_session(scale_set, owner="another pool", session_id="")
    await sets.configure_sets(runner_set(), foreign)
    listener = sets.listen()
    await sets.pass_time(5)
    await sets.configure_sets()
    listener.listener.reload()
    await sets.pass_time(60)
    assert sets.scale_sets.named("foreign") is scale_set


async def test_set_whose_registrations_hang_does_not_delay_another(sets: DemandWorld) -> None:
    stuck = runner_set(name="stuck", labels=("self-hosted", "stuck"), max=40, windows=window(hot=40))
    await sets.configure_sets(runner_set(), stuck)

    calls = 0

    async def hook(name: str, call: Call) -> Any:
        nonlocal calls
        if name == "source.register":
            calls += 1
            # All calls that one set makes at a time.
            if calls <= CONCURRENT_REGISTRATIONS:
                await asyncio.sleep(100)
        return await call()

    sets.listen(hook)
    await sets.wait_for(lambda: calls == CONCURRENT_REGISTRATIONS)
    (job,) = sets.queue(seconds=1)
    await sets.wait_for_jobs([job], 30)


async def test_throttled_withdrawal_does_not_delay_the_end_of_a_job(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=1)))

    async def hook(name: str, call: Call) -> Any:
        if name == "source.deregister":
            raise Throttled("too many requests", retry_after_s=3_600.0)
        return await call()

    listener = sets.listen(hook)
    await sets.wait_for(lambda: any(runner.take for runner in sets.github.runners.values()))
    await sets.configure_sets()
    listener.listener.reload()
    await sets.pass_time(sets.lifetimes.surplus_grace_s + 2)
    (job,) = sets.queue(seconds=5)
    await sets.wait_for_jobs([job], 10)
    await sets.wait_for(lambda: sets.in_state(State.IDLE), 90)
