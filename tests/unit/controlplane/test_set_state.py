"""State of a runner set in the listener: which jobs count."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from remuda.controlplane.context import WRITE_RETRIES
from remuda.controlplane.demand.context import DemandContext
from remuda.controlplane.demand.machines import SEARCH_LAG_S, KnownMachine, MachineTable
from remuda.controlplane.demand.sets import ENDED_COUNTS_FOR_S, LOST_COUNTS_FOR_S, SetState, new_state
from remuda.domain.demand import DemandRecord, DemandStatistics, JobRecord
from remuda.domain.errors import Conflict, Unavailable
from remuda.domain.instance import State
from remuda.domain.runner_set import RunnerSet
from remuda.domain.signals import Report
from remuda.domain.supply import JOB_COUNTS_FOR_S
from tests.support.records import NOW, in_set, instance
from tests.support.set_world import DemandWorld
from tests.support.virtual_time import Call, FixedClock
from tests.support.world import PoolWorld

SET = RunnerSet(name="large", labels=("large",), resource_class="large", scope="octo/repo", max=4)
JOB = JobRecord(job_id="j-1", runner_set="large", seen_at=NOW, started_at=NOW)


def state_with(*jobs: JobRecord) -> SetState:
    state = SetState(runner_set=SET, record=DemandRecord(runner_set="large", updated_at=NOW))
    state.note_jobs({job.job_id: job for job in jobs})
    return state


def test_a_job_that_ended_by_its_machine_counts_until_the_message_about_it() -> None:
    state = state_with(JOB)
    state.note_ended(JOB.job_id, NOW)
    assert state.ended_jobs(NOW) == 1
    state.note_jobs({JOB.job_id: replace(JOB, completed_at=NOW)})
    assert state.ended_jobs(NOW) == 0


def test_a_job_whose_message_never_comes_counts_for_a_while() -> None:
    state, limit = state_with(JOB), timedelta(seconds=ENDED_COUNTS_FOR_S)
    state.note_ended(JOB.job_id, NOW)
    # The report is read again and again.
    state.note_ended(JOB.job_id, NOW + limit)
    assert state.ended_jobs(NOW + limit) == 1
    assert state.ended_jobs(NOW + limit + timedelta(seconds=1)) == 0


def test_a_job_that_is_completed_or_unknown_is_not_counted_again() -> None:
    state = state_with()
    state.note_ended(JOB.job_id, NOW)
    state.note_ended("", NOW)
    assert state.ended_jobs(NOW) == 0


def test_a_lost_job_counts_until_the_message_about_its_end_or_for_a_while() -> None:
    job = replace(JOB, runner_name="runner-1")
    state, limit = state_with(job), timedelta(seconds=LOST_COUNTS_FOR_S)
    state.note_lost("runner-1", NOW)
    assert state.lost_jobs(NOW + limit) == 1
    state.note_jobs({JOB.job_id: replace(job, completed_at=NOW)})
    assert state.lost_jobs(NOW) == 0
    state.note_lost("runner-2", NOW)
    assert state.lost_jobs(NOW + limit + timedelta(seconds=1)) == 0


def test_the_next_job_that_stops_counting_is_known() -> None:
    ends, losses, waits = (
        timedelta(seconds=each) for each in (ENDED_COUNTS_FOR_S, LOST_COUNTS_FOR_S, JOB_COUNTS_FOR_S)
    )
    state = state_with(JOB, replace(JOB, job_id="j-2", started_at=None))
    state.note_lost("runner-1", NOW)
    assert state.recheck_at(NOW) == NOW + min(losses, waits)
    state.note_ended(JOB.job_id, NOW)
    assert state.recheck_at(NOW) == NOW + ends
    assert state.recheck_at(NOW + ends + timedelta(seconds=1)) == NOW + min(losses, waits)
    assert state.recheck_at(NOW + timedelta(days=1)) is None


async def test_statistics_of_an_earlier_process_count_for_ten_minutes(world: PoolWorld) -> None:
    context = world.process()
    stored = DemandRecord(
        runner_set="large", updated_at=context.clock.now(), statistics=DemandStatistics(assigned=2, running=1)
    )
    recent = replace(stored, updated_at=stored.updated_at - timedelta(minutes=9, seconds=59))
    old = replace(stored, updated_at=stored.updated_at - timedelta(minutes=10, seconds=1))
    assert new_state(context, SET, recent).record.statistics == stored.statistics
    assert new_state(context, SET, old).record.statistics == DemandStatistics()


def test_the_report_of_an_earlier_use_does_not_count() -> None:
    used = instance(1, state=State.CLAIMED, epoch=2, runner_set="large")
    machine = KnownMachine(used, now=NOW)
    for epoch, silent_since in ((1, NOW), (2, None)):
        report = Report(instance_id=used.instance_id, epoch=epoch, listening=True)
        machine.observe(report, now=NOW + timedelta(seconds=9), monotonic=9.0)
        assert machine.silent_since == silent_since


def test_a_machine_that_was_pooled_is_idle_until_the_search_must_have_found_it() -> None:
    machines = MachineTable(FixedClock(NOW))
    machines.add_idle(instance(1), 100.0)
    machines.set_idle([], 100.0 + SEARCH_LAG_S - 1)
    assert machines.idle() == [instance(1)]
    machines.set_idle([], 100.0 + SEARCH_LAG_S)
    assert machines.idle() == []


def test_a_record_that_came_late_does_not_replace_a_newer_one() -> None:
    machines = MachineTable(FixedClock(NOW))
    running = instance(1, state=State.RUNNING, epoch=2, runner_set="large")
    known = machines.put(running)
    for late in (
        replace(running, state=State.CLAIMED),
        replace(running, state=State.RELEASING, epoch=1),
        replace(running, state=State.IDLE, epoch=1),
    ):
        assert machines.put(late) is known
        assert machines.get(running.instance_id) is known
        assert known is not None
        assert known.instance == running


def test_each_use_of_a_machine_is_known_apart() -> None:
    machines = MachineTable(FixedClock(NOW))
    first = machines.put(instance(1, state=State.RELEASING, epoch=1, runner_set="large"))
    assert first is not None
    first.handled = True
    first.observe(Report(instance_id=first.instance.instance_id, epoch=1), now=NOW, monotonic=1.0)
    second = machines.put(instance(1, state=State.CLAIMED, epoch=2, runner_set="large"))
    assert second is not None
    assert (first.instance.epoch, first.handled) == (1, True)
    assert (second.instance.epoch, second.handled, second.acquisition) == (2, False, None)
    assert (second.report, second.pulse) == (first.report, first.pulse)


def test_machine_that_another_process_moved_to_the_pool_is_known_to_be_idle() -> None:
    """The pool message of a sweep comes later than its write."""
    table = MachineTable(FixedClock(NOW))
    table.put(in_set(State.RELEASING))
    idle = in_set(State.IDLE)
    assert table.put(idle) is None
    assert table.idle() == [idle]
    assert table.is_idle(idle)


def test_the_oldest_lost_job_is_forgotten_when_fewer_run_without_a_message() -> None:
    state = state_with()
    state.note_statistics(DemandStatistics(assigned=3, running=3))
    for number in (2, 1):
        state.note_lost(f"runner-{number}", NOW + timedelta(seconds=number))
    # The end of another job.
    state.note_statistics(DemandStatistics(assigned=2, running=2), completed=1)
    assert sorted(state.lost) == ["runner-1", "runner-2"]
    state.note_statistics(DemandStatistics(assigned=2, running=1))
    assert sorted(state.lost) == ["runner-2"]
    state.note_statistics(DemandStatistics(assigned=2, running=2))
    assert state.lost_jobs(NOW) == 1


# Writes


STARTED = replace(JOB, started_at=NOW)
ASSIGNED = replace(JOB, started_at=None, assigned_at=NOW)


async def stored_job(demand: DemandContext) -> JobRecord:
    return (await demand.store.get_jobs([JOB.job_id]))[JOB.job_id]


async def test_amendments_stay_when_messages_come_later() -> None:
    world = DemandWorld()
    demand = world.demand()
    state = state_with(JOB)
    await state.save(demand, {JOB.job_id: JOB})
    await state.amend_job(demand, JOB.job_id, lost_at=NOW)
    ended = replace(state.jobs[JOB.job_id], completed_at=NOW)
    state.note_jobs({JOB.job_id: ended})
    await state.save(demand, {JOB.job_id: ended})
    await state.amend_job(demand, JOB.job_id, rerun_at=NOW)
    stored = await stored_job(demand)
    assert (stored.lost_at, stored.rerun_at, stored.completed_at, stored.revision) == (NOW, NOW, NOW, 4)
    await world.end()


@pytest.mark.parametrize("attempts", [1, WRITE_RETRIES + 1])
async def test_write_that_is_applied_late_does_not_take_back_the_start_of_a_job(attempts: int) -> None:
    """Its answer was lost, and the next message was stored and acknowledged (seeds 51000700 and 51000993)."""
    world, late = DemandWorld(), list[Call]()

    async def hook(name: str, call: Call) -> Any:
        if name == "store.put_demand" and len(late) < attempts:
            late.append(call)
            raise Unavailable("no answer")
        return await call()

    demand, state = world.demand(hook), state_with()
    with suppress(Unavailable):
        await state.save(demand, {JOB.job_id: ASSIGNED})
    started = replace(state._unwritten.get(JOB.job_id, ASSIGNED), started_at=NOW)
    await state.save(demand, {JOB.job_id: started}, last_message_id=2)
    for write in late:
        with pytest.raises(Conflict):
            await write()
    assert (await stored_job(demand)).started_at == NOW
    assert (await demand.store.get_demand())["large"].last_message_id == 2
    await world.end()


async def test_write_that_is_applied_between_two_others_is_continued() -> None:
    world, late = DemandWorld(), list[Call]()

    async def hook(name: str, call: Call) -> Any:
        if name == "store.put_demand" and len(late) <= WRITE_RETRIES:
            late.append(call)
            raise Unavailable("no answer")
        return await call()

    demand, state = world.demand(hook), state_with(ASSIGNED)
    with pytest.raises(Unavailable):
        await state.save(demand, {JOB.job_id: ASSIGNED})
    await late[0]()
    await state.save(demand, {JOB.job_id: STARTED}, last_message_id=2)
    stored = await stored_job(demand)
    assert (stored.started_at, stored.assigned_at, stored.revision) == (NOW, NOW, 2)
    assert state.jobs[JOB.job_id].revision == 2
    assert (await demand.store.get_demand())["large"].last_message_id == 2
    await world.end()


async def test_two_listeners_keep_what_the_other_one_has_written() -> None:
    """One was paused, and does not know yet that the other one has its lease."""
    world = DemandWorld()
    demand = world.demand()
    paused, present = state_with(ASSIGNED), state_with(ASSIGNED)
    await paused.save(demand, {JOB.job_id: ASSIGNED})
    await present.save(demand, {JOB.job_id: replace(ASSIGNED, runner_name="runner-1")})
    await present.amend_job(demand, JOB.job_id, interrupted_at=NOW)
    await paused.save(demand, {JOB.job_id: STARTED})
    await present.amend_job(demand, JOB.job_id, lost_at=NOW)
    stored = await stored_job(demand)
    assert (stored.started_at, stored.runner_name, stored.interrupted_at) == (NOW, "runner-1", NOW)
    assert stored.lost_at == NOW
    await world.end()


async def test_job_whose_record_has_expired_is_written_as_a_new_one() -> None:
    world = DemandWorld()
    demand = world.demand()
    state = state_with(ASSIGNED)
    await state.save(demand, {JOB.job_id: ASSIGNED})
    world.database.jobs.clear()
    world.database.demand.clear()
    await state.save(demand, {JOB.job_id: STARTED})
    stored = await stored_job(demand)
    assert (stored.started_at, stored.revision) == (NOW, 1)
    assert state.record.revision == 1
    await world.end()
