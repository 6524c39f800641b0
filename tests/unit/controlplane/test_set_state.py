"""State of a runner set in the listener: which jobs count."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from remuda.controlplane.demand.machines import SEARCH_LAG_S, KnownMachine, MachineTable
from remuda.controlplane.demand.sets import ENDED_COUNTS_FOR_S, LOST_COUNTS_FOR_S, SetState, new_state
from remuda.domain.demand import DemandRecord, DemandStatistics, JobRecord
from remuda.domain.instance import State
from remuda.domain.runner_set import RunnerSet
from remuda.domain.signals import Report
from tests.support.records import NOW, in_set, instance
from tests.support.set_world import DemandWorld
from tests.support.virtual_time import FixedClock
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
    used = instance(1, state=State.CLAIMED, epoch=2)
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


async def test_what_was_amended_is_forgotten_with_the_end_of_the_job() -> None:
    world = DemandWorld()
    demand = world.demand()
    state = state_with(JOB)
    await state.save(demand, {JOB.job_id: JOB})
    await state.amend_job(demand, JOB.job_id, lost_at=NOW)
    ended = replace(JOB, completed_at=NOW)
    await state.save(demand, {JOB.job_id: ended})
    await state.amend_job(demand, JOB.job_id, rerun_at=NOW)
    assert state._amended == {}
    stored = (await demand.store.get_jobs([JOB.job_id]))[JOB.job_id]
    assert (stored.lost_at, stored.rerun_at, stored.completed_at) == (NOW, NOW, NOW)
    await world.end()
