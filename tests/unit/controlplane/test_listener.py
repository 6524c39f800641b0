"""The listener: runner sets get machines for their jobs, and the machines return to the pool."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import pytest

from remuda.controlplane.context import transition
from remuda.controlplane.demand import DemandListener, reconciler
from remuda.controlplane.demand.binding import READ_ATTEMPTS
from remuda.controlplane.demand.context import BackgroundTasks
from remuda.controlplane.demand.ended import CHECK_S
from remuda.controlplane.demand.equipment import REGISTRATION_ATTEMPTS
from remuda.controlplane.demand.lease import LeaseLost
from remuda.controlplane.demand.listener import FINISH_S
from remuda.controlplane.demand.observer import SEARCH_S
from remuda.controlplane.demand.reconciler import DEFICIT_PAUSE_S
from remuda.controlplane.demand.rerun import POLL_S, InterruptedJobs
from remuda.controlplane.demand.sets import new_state
from remuda.controlplane.operator import drain
from remuda.controlplane.read.status import status
from remuda.domain.demand import DemandRecord, DemandStatistics, JobEvent, JobEventKind, JobRecord
from remuda.domain.errors import CapacityError, Conflict, Unavailable
from remuda.domain.holder import Holder, SetHolder, StartedJob
from remuda.domain.instance import Actor, RetireReason, State
from remuda.domain.provision import ProvisionStatus
from remuda.domain.resources import Tier
from remuda.domain.signals import REBALANCE_NOTICE, Signal
from remuda.domain.supply import RETURNS_WITHIN_S, SupplyPlan, decide_supply
from remuda.domain.thresholds import HEARTBEAT_DEAD_AFTER_S
from remuda.domain.transitions import End
from remuda.ports.github import GitHubRun
from remuda.ports.machine import StepResult
from simulation.invariants import SCOPE
from simulation.memory.demand import MemoryDemandSession
from simulation.memory.github import MemoryDemandJob
from tests.support.records import job_record
from tests.support.set_world import DemandWorld, runner_set, window
from tests.support.virtual_time import AmbiguousAnswer, Call, failing

#: Seconds for which GitHub keeps a job whose runner is gone.
LEASE_S = 600.0


async def test_job_gets_a_new_machine_which_returns_to_the_pool(sets: DemandWorld) -> None:
    sets.listen()
    jobs = sets.queue()
    await sets.wait_for_jobs(jobs)
    await sets.wait_for(lambda: sets.in_state(State.IDLE))
    assert sets.messages() == sets.in_state(State.IDLE)
    (record,) = sets.database.instances.values()
    assert (record.uses, record.last_subject, record.tier) == (1, "77", "trusted")


async def test_second_job_reuses_the_machine(sets: DemandWorld) -> None:
    sets.listen()
    await sets.wait_for_jobs(sets.queue())
    await sets.wait_for(lambda: sets.in_state(State.IDLE))
    await sets.wait_for_jobs(sets.queue())
    assert len(sets.database.instances) == 1
    outcomes = [item.outcome for item in sorted(sets.database.provisions.values(), key=lambda item: item.created_at)]
    assert [(item.created, item.reused) for item in outcomes if item] == [(1, 0), (0, 1)]


async def test_job_that_comes_when_another_ends_waits_for_its_machine(sets: DemandWorld) -> None:
    async def with_late_reports(name: str, call: Call) -> Any:
        # GitHub's message about the end of a job is faster than the report of its machine.
        await asyncio.sleep(1.0 if name == "store.get_reports" else 0.0)
        return await call()

    sets.listen(with_late_reports)
    (job,) = sets.queue()
    await sets.wait_for(lambda: job.is_over)
    await sets.wait_for_jobs(sets.queue())
    assert len(sets.database.instances) == 1


async def test_job_gets_a_new_machine_if_a_reset_takes_too_long(sets: DemandWorld) -> None:
    sets.behaviour.reset_s = 10 * RETURNS_WITHIN_S
    sets.listen()
    (job,) = sets.queue()
    await sets.wait_for(lambda: job.is_over)
    (second,) = sets.queue()
    waited_s = await sets.wait_for(lambda: second.started)
    assert RETURNS_WITHIN_S <= waited_s <= RETURNS_WITHIN_S + 10
    assert len(sets.database.instances) == 2


async def test_burst_is_served_within_the_maximum(sets: DemandWorld) -> None:
    sets.listen()
    jobs = sets.queue(7)
    await sets.wait_for_jobs(jobs)
    assert len(sets.database.instances) == 3
    assert len({job.runner_name for job in jobs}) == 7


async def test_hot_runner_listens_before_there_is_a_job(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=1)))
    sets.listen()
    await sets.wait_for(lambda: any(runner.take for runner in sets.github.runners.values()))
    (job,) = sets.queue()
    assert await sets.wait_for(lambda: job.started) < 0.1
    await sets.wait_for_jobs([job])
    await sets.wait_for(lambda: any(runner.take for runner in sets.github.runners.values()))


async def test_cancelled_job_leaves_its_machine_to_the_pool(sets: DemandWorld) -> None:
    sets.listen()
    (job,) = sets.queue()
    await sets.wait_for(lambda: sets.in_state(State.CREATED))
    sets.scale_sets.cancel(job)
    await sets.wait_for(lambda: sets.in_state(State.IDLE))
    assert not sets.registrations()


async def test_surplus_runner_returns_to_the_pool_after_the_grace(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=1)))
    listener = sets.listen()
    await sets.wait_for(lambda: sets.in_state(State.RUNNING))
    await sets.configure_sets()
    listener.listener.reload()
    assert await sets.wait_for(lambda: sets.in_state(State.IDLE)) >= sets.lifetimes.surplus_grace_s
    assert not sets.registrations()


async def test_hot_runner_is_kept_beyond_its_listening_time(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=1)))
    sets.listen()
    await sets.wait_for(lambda: sets.in_state(State.RUNNING))
    await sets.pass_time(3 * sets.lifetimes.listening_time_s)
    assert len(sets.database.instances) == 1
    (provision,) = sets.database.provisions.values()
    assert provision.settled, "the acquisition is over, and the set holds its machine by the machine's own record"


async def test_warm_machines_are_launched_kept_and_claimed(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(windows=window(warm=2)))
    sets.listen()
    await sets.wait_for(lambda: len(sets.in_state(State.IDLE)) == 2)
    await sets.pass_time(2 * sets.lifetimes.idle_time_s)
    assert len(sets.in_state(State.IDLE)) == 2
    warm = sets.in_state(State.IDLE)
    jobs = sets.queue(2)
    assert await sets.wait_for(lambda: all(job.started for job in jobs)) < 2.0
    assert {sets.record(item).state for item in warm} == {State.RUNNING}
    await sets.wait_for(lambda: len(sets.in_state(State.IDLE)) == 2)


async def test_machine_that_never_listens_is_replaced(sets: DemandWorld) -> None:
    sets.behaviour.registration["i-00000000000000001"] = StepResult(ok=False, detail="broken")
    sets.listen()
    await sets.wait_for_jobs(sets.queue())
    assert len(sets.database.instances) == 2


async def test_machine_whose_agent_dies_is_replaced(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=1)))
    sets.listen()
    await sets.wait_for(lambda: any(runner.take for runner in sets.github.runners.values()))
    await asyncio.sleep(6)
    (lost,) = sets.in_state(State.RUNNING)
    sets.stop_agent(lost)
    sets.machines[lost].power_off("a test")
    await sets.wait_for(lambda: [item for item in sets.in_state(State.RUNNING) if item != lost])
    await sets.wait_for_jobs(sets.queue())


async def lose_job(sets: DemandWorld) -> tuple[MemoryDemandJob, str]:
    """Let a job start, and end its instance. GitHub counts the job for ten minutes more."""
    sets.scale_sets.lease = timedelta(seconds=LEASE_S)
    (job,) = sets.queue(seconds=10_000)
    await sets.wait_for(lambda: job.started)
    (lost,) = sets.in_state(State.RUNNING)
    await sets.wait_for(lambda: sets.record(lost).is_bound and lost in sets.database.reports)
    sets.cut_power(lost, "a test")
    return job, lost


@pytest.mark.parametrize("finder", ["sweep", "listener"])
async def test_lost_job_is_recorded_and_gets_no_other_instance(sets: DemandWorld, finder: str) -> None:
    listener = sets.listen()
    job, lost = await lose_job(sets)
    if finder == "sweep":
        await sets.sweep()
    await sets.wait_for(lambda: sets.database.jobs[job.key].lost_at, HEARTBEAT_DEAD_AFTER_S + 2 * SEARCH_S)
    assert sets.record(lost).retire_reason is RetireReason.GONE
    record = sets.database.jobs[job.key]
    assert (record.is_running, record.is_lost) == (True, True)
    assert record.lost_detail.startswith(f"{lost} has ended: ")
    assert ("job-lost", record.lost_detail) in listener.events
    found = (await status(sets.process())).warnings
    about_loss = [item for item in found if item.kind in {"lost-instance", "provision-failed"}]
    assert [(item.kind, item.subject) for item in about_loss] == [("lost-instance", job.key)]
    await asyncio.sleep(LEASE_S / 2)
    assert set(sets.database.instances) == {lost}
    # A job that GitHub says is waiting is not taken for the lost one.
    await sets.wait_for_jobs(sets.queue())
    await sets.wait_for(lambda: job.is_over, LEASE_S)
    await sets.wait_for(lambda: sets.database.jobs[job.key].completed_at)
    record = sets.database.jobs[job.key]
    assert (record.result, record.is_lost) == ("failed", True)
    await sets.wait_for_jobs(sets.queue())


@pytest.mark.parametrize("is_noted", [True, False])
async def test_next_listener_knows_the_lost_jobs(sets: DemandWorld, *, is_noted: bool) -> None:
    listener = sets.listen()
    job, lost = await lose_job(sets)
    if is_noted:
        await sets.wait_for(lambda: sets.database.jobs[job.key].lost_at)
    await listener.stop()
    await sets.sweep()
    assert bool(sets.database.jobs[job.key].lost_at) is is_noted
    sets.listen()
    await sets.wait_for(lambda: sets.database.jobs[job.key].lost_at)
    await sets.wait_for(lambda: job.is_over, LEASE_S)
    assert set(sets.database.instances) == {lost}


@pytest.mark.parametrize(
    ("outcome", "is_lost"),
    [
        ("success", False),
        ("failed", False),
        # Its runner was told to stop, and its instance ended before it reported the end of the job.
        ("canceled", True),
    ],
)
async def test_job_that_ended_before_its_instance_is_lost_only_if_it_was_cut_short(
    sets: DemandWorld, outcome: str, *, is_lost: bool
) -> None:
    sets.listen()
    (job,) = sets.queue(outcome=outcome)
    await sets.wait_for(lambda: job.started)
    (instance_id,) = sets.in_state(State.RUNNING)
    await sets.wait_for(lambda: sets.record(instance_id).is_bound)
    sets.stop_agent(instance_id)
    await sets.wait_for(lambda: job.is_over)
    sets.cut_power(instance_id, "a test")
    await sets.sweep()
    await asyncio.sleep(2 * SEARCH_S)
    assert sets.record(instance_id).retire_reason is RetireReason.GONE
    assert sets.database.jobs[job.key].is_lost is is_lost


async def test_job_that_ended_without_a_listener_before_its_instance_is_not_lost(sets: DemandWorld) -> None:
    listener = sets.listen()
    (job,) = sets.queue(seconds=10.0, outcome="failed")
    await sets.wait_for(lambda: job.started)
    (instance_id,) = sets.in_state(State.RUNNING)
    await sets.wait_for(lambda: sets.record(instance_id).is_bound)
    await listener.stop()
    await sets.wait_for(lambda: sets.database.reports[instance_id].spent_epoch)
    sets.cut_power(instance_id, "a test")
    await transition(
        sets.process(), sets.record(instance_id), End(reason=RetireReason.GONE), by=Actor.REFRESH, why="it is gone"
    )
    # GitHub's message about its end is missing.
    sets.database.jobs[job.key] = replace(sets.database.jobs[job.key], completed_at=None)
    for scale_set in sets.scale_sets.sets.values():
        scale_set.messages.clear()
    sets.listen()
    await asyncio.sleep(2 * SEARCH_S)
    assert sets.database.jobs[job.key].lost_at is None
    await sets.wait_for_jobs(sets.queue())


@pytest.mark.parametrize("operation", ["store.recent_jobs", "store.histories"])
async def test_lost_jobs_that_cannot_be_read_do_not_stop_a_start(sets: DemandWorld, operation: str) -> None:
    listener = sets.listen()
    lost, _ = await lose_job(sets)
    await listener.stop()
    await sets.sweep()

    async def fail(name: str, call: Call) -> Any:
        if name == operation:
            if operation == "store.histories":
                await asyncio.sleep(50.0)
            raise Unavailable("the store does not answer")
        return await call()

    listener = sets.listen(fail)
    await sets.wait_for_jobs(sets.queue(), 40.0)
    await asyncio.sleep(50.0)
    assert ("lost-jobs-failed", "the store does not answer") in listener.events
    await sets.wait_for(lambda: lost.is_over, LEASE_S)


async def test_cloud_is_asked_once_about_all_silent_instances(sets: DemandWorld) -> None:
    listener = sets.listen()
    jobs = sets.queue(3, seconds=170.0)
    await sets.wait_for(lambda: all(job.started for job in jobs))
    for instance_id in sets.in_state(State.RUNNING):
        sets.stop_agent(instance_id)
    counts = listener.demand.context.calls
    await asyncio.sleep(2 * HEARTBEAT_DEAD_AFTER_S)
    before = counts.by_service()["compute"]["describe"]
    await asyncio.sleep(1.5 * CHECK_S)
    assert 1 <= counts.by_service()["compute"]["describe"] - before <= 2


async def test_job_whose_agent_alone_is_dead_is_not_lost_and_gets_no_other_instance(sets: DemandWorld) -> None:
    sets.listen()
    (job,) = sets.queue(seconds=100.0)
    await sets.wait_for(lambda: job.started)
    (instance_id,) = sets.in_state(State.RUNNING)
    sets.stop_agent(instance_id)
    await asyncio.sleep(4 * HEARTBEAT_DEAD_AFTER_S)
    assert set(sets.database.instances) == {instance_id}
    assert sets.database.jobs[job.key].lost_at is None
    assert sets.record(instance_id).state is State.RUNNING


async def test_sweep_ends_a_failed_machine(sets: DemandWorld) -> None:
    sets.behaviour.registration["i-00000000000000001"] = StepResult(ok=False, detail="broken")
    listener = sets.listen()
    sets.queue()
    await sets.wait_for(lambda: sets.in_state(State.RUNNING))
    await listener.stop()
    (failed,) = sets.in_state(State.RUNNING)
    await sets.wait_for(lambda: sets.database.reports[failed].signal is Signal.UD_REG_FAILED)
    await sets.sweep()
    assert sets.record(failed).retire_reason is RetireReason.FAILED


async def test_machine_that_never_boots_is_replaced_after_its_deadline(sets: DemandWorld) -> None:
    sets.behaviour.without_agent.add("i-00000000000000001")
    sets.listen()
    await sets.wait_for_jobs(sets.queue(), 3 * sets.lifetimes.provision_timeout_s)


async def test_job_without_messages_is_bound_late_and_its_machine_retired(sets: DemandWorld) -> None:
    send = sets.scale_sets.tell

    def without_starts(set_id: int, event: JobEvent) -> None:
        if event.kind is not JobEventKind.STARTED:
            send(set_id, event)

    sets.scale_sets.tell = without_starts  # type: ignore[method-assign]
    sets.listen()
    await sets.wait_for_jobs(sets.queue())
    (record,) = sets.database.instances.values()
    await sets.wait_for(lambda: sets.in_state(State.TERMINATING))
    record = sets.record(record.instance_id)
    assert record.retire_reason is RetireReason.UNTRUSTED_JOB
    assert has_unnamed_job(record.last_holder)


@pytest.mark.parametrize(
    ("event", "head", "tier"),
    [
        ("push", "", Tier.TRUSTED),
        ("pull_request", SCOPE, Tier.TRUSTED),
        ("pull_request", "stranger/fork", Tier.UNTRUSTED),
        ("pull_request", "", Tier.UNTRUSTED),
        ("pull_request_target", SCOPE, Tier.UNTRUSTED),
        ("workflow_run", SCOPE, Tier.UNTRUSTED),
    ],
)
async def test_trust_of_a_job_decides_whether_its_machine_is_reused(
    sets: DemandWorld, event: str, head: str, tier: Tier
) -> None:
    sets.github.runs[SCOPE, 77] = GitHubRun(run_id=77, status="in_progress", conclusion="", head_repository=head)
    sets.listen()
    await sets.wait_for_jobs(sets.queue(event=event))
    ended = State.IDLE if tier is Tier.TRUSTED else State.TERMINATING
    await sets.wait_for(lambda: sets.in_state(ended))
    (record,) = sets.database.instances.values()
    assert record.tier is tier


@pytest.mark.parametrize(("failures", "tier"), [(READ_ATTEMPTS - 1, Tier.TRUSTED), (READ_ATTEMPTS, Tier.UNTRUSTED)])
async def test_run_of_a_job_is_read_again_if_github_does_not_answer(
    sets: DemandWorld, failures: int, tier: Tier
) -> None:
    sets.github.runs[SCOPE, 77] = GitHubRun(run_id=77, status="in_progress", conclusion="", head_repository=SCOPE)
    reads = AmbiguousAnswer("github.get_run", applied=False, at=range(1, failures + 1))
    sets.listen(reads)
    (job,) = sets.queue(event="pull_request", seconds=30.0)
    await sets.wait_for(lambda: any(item.run_id == "77" for item in sets.database.instances.values()))
    (record,) = sets.database.instances.values()
    assert (record.tier, reads.count) == (tier, READ_ATTEMPTS)
    await sets.wait_for_jobs([job])


async def test_machine_that_is_drained_while_its_job_is_bound_keeps_both(sets: DemandWorld) -> None:
    sets.github.runs[SCOPE, 77] = GitHubRun(run_id=77, status="in_progress", conclusion="", head_repository="fork/app")

    async def drain_first(name: str, call: Call) -> Any:
        if name == "github.get_run" and not any(item.retire_reason for item in sets.database.instances.values()):
            await drain(sets.process(), tuple(sets.database.instances.values()), reason="old image", dry_run=False)
        return await call()

    sets.listen(drain_first)
    (job,) = sets.queue(event="pull_request", seconds=30)
    await sets.wait_for(lambda: job.started)
    await sets.wait_for(lambda: all(item.is_bound for item in sets.database.instances.values()), seconds=5)
    (record,) = sets.database.instances.values()
    assert (record.run_id, record.tier, record.retire_text) == ("77", Tier.UNTRUSTED, "drained: old image")
    await sets.wait_for_jobs([job])


async def test_registration_whose_answer_was_lost_is_replaced(sets: DemandWorld) -> None:
    lost = AmbiguousAnswer("source.register", applied=True)
    sets.listen(lost)
    await sets.wait_for_jobs(sets.queue())
    assert lost.count == 3
    assert len(sets.database.instances) == 1


async def test_machine_that_is_being_given_back_is_not_equipped(sets: DemandWorld) -> None:
    sets.listen()
    await sets.wait_for_jobs(sets.queue())
    await sets.wait_for(lambda: sets.in_state(State.IDLE))
    await sets.stop_listeners()
    registrations: list[str] = []

    async def hook(name: str, call: Call) -> Any:
        if name == "source.register":
            registrations.append(name)
            if len(registrations) <= REGISTRATION_ATTEMPTS:
                raise Unavailable("GitHub does not answer")
        # The rollback takes so long that the set decides meanwhile.
        if name == "store.apply" and registrations and len(registrations) <= REGISTRATION_ATTEMPTS:
            await asyncio.sleep(8.0)
            assert len(registrations) == REGISTRATION_ATTEMPTS
        return await call()

    sets.listen(hook)
    await sets.wait_for_jobs(sets.queue())
    assert len(registrations) > REGISTRATION_ATTEMPTS


async def test_set_that_github_deleted_is_created_again(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=1)))
    sets.listen()
    await sets.wait_for(lambda: any(runner.take for runner in sets.github.runners.values()))
    before = sets.scale_sets.named("large").scale_set_id
    sets.scale_sets.delete(before)
    await sets.wait_for(lambda: sets.scale_sets.find(SCOPE, "large"))
    await sets.wait_for_jobs(sets.queue())
    assert sets.database.demand["large"].scale_set_id != before


async def test_removed_set_is_drained_and_deleted(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=1)))
    listener = sets.listen()
    (job,) = sets.queue(seconds=30.0)
    await sets.wait_for(lambda: job.started)
    await sets.configure(runner_sets=(), lifetimes=sets.lifetimes)
    listener.listener.reload()
    await sets.wait_for_jobs([job])
    await sets.wait_for(lambda: not sets.scale_sets.sets)
    assert "large" not in sets.database.demand
    assert not sets.in_state(State.RUNNING)


@pytest.mark.parametrize("operation", ["source.create_set", "source.open_session"])
async def test_set_that_was_created_but_never_served_is_deleted(sets: DemandWorld, operation: str) -> None:
    """Also if the process ends before it gets an answer to the creation."""

    async def apply_and_lose(name: str, call: Call) -> Any:
        if name != operation:
            return await call()
        if name == "source.create_set":
            await call()
        raise Unavailable("no answer")

    listener = sets.listen(apply_and_lose)
    await sets.wait_for(lambda: sets.scale_sets.find(SCOPE, "large"))
    await listener.stop()
    await sets.configure_sets(runner_set(name="other", labels=("self-hosted", "other")))
    sets.listen()
    await sets.wait_for(lambda: not sets.scale_sets.find(SCOPE, "large"))
    assert "large" not in sets.database.demand


async def test_job_that_no_message_has_named_survives_the_end_of_its_set(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=1)))
    listener = sets.listen()
    await sets.wait_for(lambda: any(runner.take for runner in sets.github.runners.values()))
    await asyncio.sleep(7.0)
    sets.scale_sets.tell = lambda set_id, event: None  # type: ignore[method-assign]  # noqa: ARG005
    await sets.configure(runner_sets=(), lifetimes=sets.lifetimes)
    (job,) = sets.queue(seconds=20.0)
    listener.listener.reload()
    await sets.wait_for_jobs([job])
    assert ("kept", "it has a job") in listener.events
    await sets.wait_for(lambda: not sets.scale_sets.sets)


async def test_set_that_was_removed_while_no_listener_ran_is_deleted(sets: DemandWorld) -> None:
    first = sets.listen()
    await sets.wait_for(lambda: sets.scale_sets.find(SCOPE, "large"))
    await first.stop()
    await sets.configure(runner_sets=(), lifetimes=sets.lifetimes)
    sets.listen()
    await sets.wait_for(lambda: not sets.scale_sets.sets)


async def test_stopped_listener_leaves_machines_and_gives_up_session_and_lease(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=1)))
    listener = sets.listen()
    await sets.wait_for(lambda: sets.in_state(State.RUNNING))
    began = sets.loop.time()
    await listener.stop()
    assert sets.loop.time() - began < 10.0
    assert not sets.scale_sets.named("large").sessions
    assert sets.database.leases["listener"].owner == ""
    assert sets.in_state(State.RUNNING)
    sets.listen()
    await sets.wait_for_jobs(sets.queue(), 10.0)


async def test_lease_has_the_time_of_its_heartbeat(sets: DemandWorld) -> None:
    listener = sets.listen()
    await asyncio.sleep(100.0)
    beat_at = sets.database.leases["listener"].beat_at
    assert beat_at is not None
    assert timedelta() <= sets.clock.now() - beat_at <= timedelta(seconds=10.0)
    await listener.stop()
    assert sets.database.leases["listener"].beat_at == sets.clock.now()


async def test_second_listener_waits_until_the_first_has_ended(sets: DemandWorld) -> None:
    first, second = sets.listen(), sets.listen()
    await asyncio.sleep(100.0)
    assert "scale-sets" not in second.demand.context.calls.by_service()
    assert second.events == [("standby", "listener-1 serves the pool")]
    await first.stop()
    await sets.wait_for_jobs(sets.queue())


async def test_idle_set_makes_no_call_but_its_poll(sets: DemandWorld) -> None:
    listener = sets.listen()
    await asyncio.sleep(30.0)
    before = listener.demand.context.calls.by_service()
    await asyncio.sleep(200.0)
    after = listener.demand.context.calls.by_service()
    polls = after["scale-sets"]["GET message"] - before["scale-sets"]["GET message"]
    assert polls == 4
    changed = {
        (service, name): count - before.get(service, {}).get(name, 0)
        for service, counts in after.items()
        for name, count in counts.items()
        if count != before.get(service, {}).get(name, 0)
    }
    # The lease is renewed and the configuration read by the process, however many sets there are.
    assert set(changed) == {("scale-sets", "GET message"), ("store", "replace_lease"), ("store", "get_config")}


async def test_burst_needs_few_calls_per_job(sets: DemandWorld) -> None:
    count = 20
    await sets.configure_sets(runner_set(max=count), max_instances=100)
    await sets.warm(count)
    listener = sets.listen()
    await asyncio.sleep(5.0)
    before = listener.demand.context.calls.by_service()
    await sets.wait_for_jobs(sets.queue(count))
    await sets.wait_for(lambda: len(sets.in_state(State.IDLE)) == count)
    await asyncio.sleep(1.0)
    after = listener.demand.context.calls.by_service()
    made = {name: sum(after[name].values()) - sum(before.get(name, {}).values()) for name in after}
    polls = sum(
        after["scale-sets"][name] - before["scale-sets"].get(name, 0) for name in ("GET message", "DELETE message")
    )
    assert made["scale-sets"] - polls + made.get("github", 0) <= 2 * count
    assert made["store"] <= 12 * count
    assert made["pool"] <= 2 * count


async def test_known_idle_machine_is_claimed_without_its_message(sets: DemandWorld) -> None:
    listener = sets.listen()
    await sets.wait_for_jobs(sets.queue())
    await sets.wait_for(lambda: sets.in_state(State.IDLE))
    before = listener.demand.context.calls.by_service()["pool"].get("receive", 0)
    await sets.wait_for_jobs(sets.queue())
    assert listener.demand.context.calls.by_service()["pool"].get("receive", 0) == before
    assert len(sets.database.instances) == 1


async def test_known_idle_machine_that_another_process_has_claimed_is_replaced(sets: DemandWorld) -> None:
    listener = sets.listen()
    await sets.wait_for_jobs(sets.queue())
    await sets.wait_for(lambda: sets.in_state(State.IDLE))
    (first,) = sets.in_state(State.IDLE)
    await sets.provision("other")
    await sets.wait_for_jobs(sets.queue())
    assert "claim-lost" in dict(listener.events)
    assert len(sets.database.instances) == 2
    assert sets.states()[first] is State.RUNNING


async def test_message_of_a_known_idle_machine_stays_if_its_claim_fails(sets: DemandWorld) -> None:
    """Another worker may receive the message while the machine is being claimed without it."""

    async def fail_slowly(name: str, call: Call) -> Any:
        if name != "store.apply" or not is_failing:
            return await call()
        await asyncio.sleep(2)
        raise Unavailable("throttled")

    is_failing = False
    sets.listen(fail_slowly)
    await sets.wait_for_jobs(sets.queue())
    await sets.wait_for(lambda: sets.in_state(State.IDLE) and sets.messages())
    before = sets.messages()
    is_failing = True
    sets.queue(2)
    await sets.pass_time(45)
    assert sets.in_state(State.IDLE)
    assert sets.messages() == before


async def test_known_idle_machine_that_is_about_to_expire_is_not_claimed(sets: DemandWorld) -> None:
    listener = sets.listen()
    await sets.wait_for_jobs(sets.queue())
    await sets.wait_for(lambda: sets.in_state(State.IDLE))
    (first,) = sets.in_state(State.IDLE)
    left = sets.record(first).threshold - sets.clock.now()
    await asyncio.sleep(left.total_seconds() - sets.lifetimes.margin_s)
    await sets.wait_for_jobs(sets.queue())
    assert "claim-lost" in dict(listener.events)
    assert "bug" not in dict(listener.events)
    assert len(sets.database.instances) == 2


async def test_idle_machine_of_a_set_that_is_gone_is_recorded_as_terminated(sets: DemandWorld) -> None:
    listener = sets.listen()
    await sets.wait_for_jobs(sets.queue())
    await sets.wait_for(lambda: sets.in_state(State.IDLE))
    (first,) = sets.in_state(State.IDLE)
    await listener.stop()
    sets.cloud.end(first, "power loss")
    await sets.pass_time(sets.lifetimes.idle_time_s / 2)
    assert sets.record(first).state is State.TERMINATED


async def test_agents_are_not_dead_because_the_store_was_down(sets: DemandWorld) -> None:
    """Their next heartbeats come later than the listener's next read."""
    is_down = False

    async def hook(name: str, call: Call) -> Any:
        if is_down and name in {"store.get_reports", "store.beat"}:
            raise Unavailable("no answer of the store")
        return await call()

    await sets.configure_sets(runner_set(windows=window(hot=1)))
    sets.agent_hook = lambda _: hook
    sets.listen(hook)
    await sets.wait_for(lambda: sets.in_state(State.RUNNING))
    is_down = True
    await asyncio.sleep(HEARTBEAT_DEAD_AFTER_S + 1)
    is_down = False
    await asyncio.sleep(HEARTBEAT_DEAD_AFTER_S)
    assert len(sets.database.instances) == 1


async def test_listener_that_is_stopped_twice_gives_back_what_it_has_acquired(sets: DemandWorld) -> None:
    """The stop cancels a rollback that is in progress already."""
    is_slow = asyncio.Event()

    async def hook(name: str, call: Call) -> Any:
        if name == "compute.launch":
            raise CapacityError("no capacity")
        if name == "store.replace_provision":
            is_slow.set()
            await asyncio.sleep(FINISH_S + 1)
        return await call()

    listener = sets.listen(hook)
    sets.queue()
    await is_slow.wait()
    await listener.stop()
    (provision,) = sets.database.provisions.values()
    assert provision.status is not ProvisionStatus.OPEN


async def test_machine_that_is_being_claimed_is_left_to_its_acquisition(sets: DemandWorld) -> None:
    """The answer to the claim is lost. A search finds the record before the write is repeated."""
    await sets.warm(2)
    slow: list[str] = []

    async def hook(name: str, call: Call) -> Any:
        answer = await call()
        if name == "store.apply" and not slow:
            slow.append(name)
            await asyncio.sleep(3 * SEARCH_S)
            raise Unavailable("the answer was lost")
        return answer

    listener = sets.listen(hook)
    # The second machine lets the listener search often.
    await sets.wait_for_jobs(sets.queue(2, seconds=50.0))
    assert slow
    assert "claim-lost" not in dict(listener.events)
    assert len(sets.database.instances) == 2


async def test_paused_listener_leaves_its_launch_to_the_listener_that_has_taken_over(sets: DemandWorld) -> None:
    """It is paused after the record of the machine was written, before it gets the answer."""
    is_launched, is_paused, resumed = False, False, asyncio.Event()

    async def pause_after_the_record(name: str, call: Call) -> Any:
        nonlocal is_launched, is_paused
        if is_paused:
            await resumed.wait()
        answer = await call()
        is_launched = is_launched or name == "compute.launch"
        if is_launched and name == "store.apply" and not resumed.is_set():
            is_paused = True
            await resumed.wait()
            raise Unavailable("the answer was lost")
        return answer

    sets.listen(pause_after_the_record)
    (job,) = sets.queue(seconds=60.0)
    await sets.wait_for(lambda: is_paused)
    sets.listen()
    await sets.wait_for(lambda: job.started, seconds=120.0)
    resumed.set()
    await sets.pass_time(20)
    await sets.wait_for_jobs([job])
    assert len(sets.database.instances) == 1


async def test_late_answer_about_an_earlier_use_does_not_end_the_present_one(sets: DemandWorld) -> None:
    """The answer to the return to the pool comes after a sweep has published the machine and a job has taken it."""
    resumed = asyncio.Event()

    async def answer_late(name: str, call: Call) -> Any:
        before = sets.states()
        answer = await call()
        if name == "store.apply" and State.IDLE in set(sets.states().values()) - set(before.values()):
            await resumed.wait()
        return answer

    sets.listen(answer_late)
    await sets.wait_for_jobs(sets.queue())
    await sets.wait_for(lambda: sets.in_state(State.IDLE))
    (machine,) = sets.in_state(State.IDLE)
    await sets.sweep()
    # One job waits for the machine that is on its way to the pool, as far as the listener knows; the other takes it.
    jobs = sets.queue(2, seconds=60.0)
    await sets.wait_for(lambda: sets.states()[machine] is State.RUNNING)
    assert sets.database.instances[machine].epoch == 2
    resumed.set()
    await sets.pass_time(10)
    assert sets.states()[machine] is State.RUNNING
    await sets.wait_for_jobs(jobs)


async def test_listener_ends_if_a_loop_of_a_set_cannot_continue(
    sets: DemandWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look alive and serve nothing."""
    listener = sets.listen()
    await asyncio.sleep(1.0)

    def fail(action: str, why: str = "", **_facts: Any) -> None:
        if action in {"supply", "reconcile-failed"}:
            raise OSError(errno.EIO, f"the log is broken: {why}")

    monkeypatch.setattr(listener.demand.context.event_log, "record", fail)
    sets.queue()
    with pytest.raises(OSError, match="the log is broken"):
        await asyncio.wait_for(listener.task, 60.0)
    sets.listeners.remove(listener)
    sets.listen()
    await sets.wait_for_jobs(sets.queue())


async def test_refresh_releases_a_spent_runner_without_a_listener(sets: DemandWorld) -> None:
    listener = sets.listen()
    (job,) = sets.queue(seconds=20.0)
    await sets.wait_for(lambda: job.started)
    await asyncio.sleep(2.0)
    await listener.stop()
    await sets.wait_for_jobs([job])
    await sets.pass_time(40.0)
    assert sets.in_state(State.IDLE)


async def spend_without_a_listener(sets: DemandWorld) -> str:
    """Let a runner serve a job that nobody records. Return the id of its machine."""
    await sets.configure_sets(runner_set(windows=window(hot=1)))
    listener = sets.listen()
    await sets.wait_for(lambda: any(runner.take for runner in sets.github.runners.values()))
    sets.scale_sets.tell = lambda set_id, event: None  # type: ignore[method-assign]  # noqa: ARG005
    jobs = sets.queue()
    await listener.stop()
    await sets.wait_for_jobs(jobs)
    (record,) = sets.database.instances.values()
    await sets.wait_for(lambda: sets.database.reports[record.instance_id].spent_epoch == record.epoch)
    return record.instance_id


async def test_second_sweep_releases_a_spent_runner_whose_job_no_listener_has_recorded(sets: DemandWorld) -> None:
    spent = await spend_without_a_listener(sets)
    await sets.sweep()
    assert sets.record(spent).state is State.RUNNING
    await sets.sweep()
    assert sets.record(spent).state is State.RELEASING
    assert has_unnamed_job(sets.record(spent).last_holder)


async def test_first_sweep_ends_a_spent_runner_whose_time_is_over(sets: DemandWorld) -> None:
    spent = await spend_without_a_listener(sets)
    # Otherwise its agent ends it.
    sets.stop_agent(spent)
    left = sets.record(spent).threshold - sets.clock.now()
    await asyncio.sleep(left.total_seconds() + sets.lifetimes.margin_s + 0.1)
    assert spent in sets.alive()
    result = await sets.sweep()
    assert spent in result.retired


async def test_refresh_keeps_a_job_that_no_listener_has_recorded(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=1)))
    listener = sets.listen()
    await sets.wait_for(lambda: any(runner.take for runner in sets.github.runners.values()))
    sets.scale_sets.tell = lambda set_id, event: None  # type: ignore[method-assign]  # noqa: ARG005
    (job,) = sets.queue(seconds=sets.lifetimes.listening_time_s + 40.0)
    await listener.stop()
    await sets.wait_for(lambda: job.started)
    await sets.pass_time(sets.lifetimes.listening_time_s + 30.0)
    (record,) = (item for item in sets.database.instances.values() if item.state is State.RUNNING)
    assert has_unnamed_job(record.holder)
    await sets.wait_for_jobs([job])


async def test_job_lost_to_a_spot_interruption_is_run_again_once(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(rerun_on_interruption=True))
    sets.listen()
    (job,) = sets.queue(seconds=300.0)
    await sets.wait_for(lambda: job.started)
    await asyncio.sleep(1.0)
    sets.machines[sets.in_state(State.RUNNING)[0]].give_spot_notice()
    key = (SCOPE, 77)
    sets.github.runs[key] = GitHubRun(run_id=77, status="in_progress", conclusion="", head_repository=SCOPE)
    await asyncio.sleep(200.0)
    assert not sets.github.reruns
    sets.github.runs[key] = GitHubRun(run_id=77, status="completed", conclusion="failure", head_repository=SCOPE)
    await asyncio.sleep(100.0)
    assert sets.github.reruns == [77]
    await sets.stop_listeners()
    sets.listen()
    await asyncio.sleep(200.0)
    assert sets.github.reruns == [77]


async def test_job_that_failed_after_a_rebalance_recommendation_is_not_run_again(sets: DemandWorld) -> None:
    """The recommendation is about a risk: the machine may run its job to the end, and the job may fail by itself."""
    await sets.configure_sets(runner_set(rerun_on_interruption=True))
    sets.listen()
    key = (SCOPE, 77)
    sets.github.runs[key] = GitHubRun(run_id=77, status="in_progress", conclusion="", head_repository=SCOPE)
    (job,) = sets.queue(seconds=60.0, outcome="failure")
    await sets.wait_for(lambda: job.started)
    sets.machines[sets.in_state(State.RUNNING)[0]].notice = f"{REBALANCE_NOTICE} at 2026-01-01T00:00:00Z"
    await sets.wait_for(lambda: job.is_over, 100.0)
    sets.github.runs[key] = GitHubRun(run_id=77, status="completed", conclusion="failure", head_repository=SCOPE)
    await asyncio.sleep(3 * POLL_S)
    assert not sets.github.reruns


async def test_jobs_of_a_run_that_are_lost_together_are_run_again_together_once(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(rerun_on_interruption=True, max=4))
    listener = sets.listen()
    key = (SCOPE, 77)
    sets.github.runs[key] = GitHubRun(run_id=77, status="in_progress", conclusion="", head_repository=SCOPE)
    jobs = sets.queue(2, seconds=300.0)
    await sets.wait_for(lambda: all(job.started for job in jobs))
    await asyncio.sleep(1.0)
    for instance_id in sets.in_state(State.RUNNING):
        sets.machines[instance_id].give_spot_notice()
    await sets.wait_for(lambda: all(job.is_over for job in jobs), 200.0)
    sets.github.runs[key] = GitHubRun(run_id=77, status="completed", conclusion="failure", head_repository=SCOPE)
    await sets.wait_for(lambda: all(sets.database.jobs[job.key].rerun_at for job in jobs), 200.0)
    await asyncio.sleep(100.0)
    assert sets.github.reruns == [77]
    assert "rerun-refused" not in dict(listener.events)


@pytest.mark.parametrize("operation", ["store.get_lease", "store.jobs_of_run", "github.get_run", "store.replace_lease"])
async def test_listener_that_was_paused_does_not_run_a_run_again_after_another_one(
    sets: DemandWorld, operation: str
) -> None:
    job = job_record(repository=SCOPE, interrupted_at=sets.clock.now(), seen_at=sets.clock.now())
    await sets.process().store.put_jobs([job])
    failed = GitHubRun(run_id=77, status="completed", conclusion="failure", head_repository=SCOPE)
    sets.github.runs[SCOPE, 77] = failed
    goes_on = asyncio.Event()

    async def pause(name: str, call: Call) -> Any:
        answer = await call()
        if name == operation:
            await goes_on.wait()
        return answer

    runner = runner_set(rerun_on_interruption=True)
    for hook in (pause, None):
        demand = sets.demand(hook, owner=f"listener {hook}")
        state = new_state(demand.context, runner, None)
        InterruptedJobs(demand, BackgroundTasks(context=demand.context), {runner.name: state}.get).follow(job)
    await asyncio.sleep(10.0)
    # The second attempt has failed as well, for another reason.
    sets.github.runs[SCOPE, 77] = failed
    goes_on.set()
    await asyncio.sleep(3 * POLL_S)
    assert sets.github.reruns == [77]


@pytest.mark.parametrize("is_later", [True, False])
async def test_job_is_not_run_again_twice_although_an_earlier_write_of_it_is_applied_late(
    sets: DemandWorld, *, is_later: bool
) -> None:
    now = sets.clock.now()
    job = job_record(repository=SCOPE, display_name="test", interrupted_at=now, seen_at=now)
    demand = sets.demand()
    await demand.store.put_jobs([job])
    failed = GitHubRun(run_id=77, status="completed", conclusion="failure", head_repository=SCOPE)
    sets.github.runs[SCOPE, 77] = failed
    state = new_state(demand.context, runner_set(rerun_on_interruption=True), None)
    jobs = InterruptedJobs(demand, BackgroundTasks(context=demand.context), lambda _: state)
    jobs.follow(job)
    await sets.wait_for(lambda: sets.github.reruns)
    # A write of its end, whose answer was lost, is applied after that of the re-run.
    with pytest.raises(Conflict):
        await demand.store.put_jobs([job])
    second = job_record(2, repository=SCOPE, display_name="test", interrupted_at=sets.clock.now(), seen_at=now)
    if is_later:
        await demand.store.put_jobs([second])
    sets.github.runs[SCOPE, 77] = failed
    jobs.follow(second if is_later else job)
    await asyncio.sleep(3 * POLL_S)
    assert sets.github.reruns == [77]


def follow_alone(sets: DemandWorld, job: JobRecord, **changed: Any) -> None:
    """Follow a job of the set without a listener."""
    demand = sets.demand()
    state = new_state(demand.context, runner_set(rerun_on_interruption=True, **changed), None)
    InterruptedJobs(demand, BackgroundTasks(context=demand.context), lambda _: state).follow(job)


def has_unnamed_job(holder: Holder | None) -> bool:
    return isinstance(holder, SetHolder) and holder.job == StartedJob()


async def test_job_of_a_repository_in_an_organisation_is_run_again(sets: DemandWorld) -> None:
    job = job_record(repository=SCOPE, interrupted_at=sets.clock.now(), seen_at=sets.clock.now())
    await sets.process().store.put_jobs([job])
    sets.github.runs[SCOPE, 77] = GitHubRun(run_id=77, status="completed", conclusion="failure", head_repository=SCOPE)
    follow_alone(sets, job, scope=SCOPE.partition("/")[0])
    await sets.wait_for(lambda: sets.github.reruns == [77])


@pytest.mark.parametrize("changed", [{"run_id": "unknown"}, {"repository": ""}])
async def test_job_whose_run_is_unknown_is_not_run_again(sets: DemandWorld, changed: dict[str, Any]) -> None:
    values = {"repository": SCOPE, "interrupted_at": sets.clock.now(), "seen_at": sets.clock.now(), **changed}
    job = job_record(**values)
    await sets.process().store.put_jobs([job])
    follow_alone(sets, job)
    await asyncio.sleep(1.0)
    stored = sets.database.jobs[job.job_id]
    assert (stored.rerun_detail, stored.rerun_at) == ("its run is unknown", None)


@pytest.mark.parametrize("applied", [True, False])
async def test_right_to_run_again_whose_answer_was_lost_is_used(sets: DemandWorld, *, applied: bool) -> None:
    job = job_record(repository=SCOPE, interrupted_at=sets.clock.now(), seen_at=sets.clock.now())
    await sets.process().store.put_jobs([job])
    sets.github.runs[SCOPE, 77] = GitHubRun(run_id=77, status="completed", conclusion="failure", head_repository=SCOPE)
    demand = sets.demand(AmbiguousAnswer("store.replace_lease", applied=applied))
    state = new_state(demand.context, runner_set(rerun_on_interruption=True), None)
    InterruptedJobs(demand, BackgroundTasks(context=demand.context), lambda _: state).follow(job)
    await asyncio.sleep(3 * POLL_S)
    assert sets.github.reruns == [77]


async def test_decision_about_a_second_interruption_survives_later_messages(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(rerun_on_interruption=True))
    sets.listen()
    key = (SCOPE, 77)
    sets.github.runs[key] = GitHubRun(run_id=77, status="in_progress", conclusion="", head_repository=SCOPE)
    (first,) = sets.queue(seconds=300.0)
    await sets.wait_for(lambda: first.started)
    await asyncio.sleep(1.0)
    sets.machines[sets.in_state(State.RUNNING)[0]].give_spot_notice()
    await sets.wait_for(lambda: first.is_over, 200.0)
    sets.github.runs[key] = GitHubRun(run_id=77, status="completed", conclusion="failure", head_repository=SCOPE)
    await sets.wait_for(lambda: sets.github.reruns == [77], 200.0)
    (second,) = (job for job in sets.scale_sets.jobs if job is not first)
    await sets.wait_for(lambda: second.started, 200.0)
    await asyncio.sleep(1.0)
    next(machine for machine in sets.machines.values() if machine.job is second).give_spot_notice()
    await sets.wait_for(lambda: sets.database.jobs[second.key].rerun_detail)
    await sets.wait_for(lambda: sets.database.jobs[second.key].completed_at, 200.0)
    assert sets.database.jobs[second.key].rerun_detail == "it was run again once"
    # Longer than other records: a later attempt must not be run again, either.
    assert sets.database.jobs[first.key].expires_at > sets.database.jobs[second.key].expires_at


async def test_once_reconciles_and_gives_everything_up(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=2)))
    result = await DemandListener(sets.demand()).run_once()
    assert (result.errors, result.sets["large"]["desired"]) == ((), 2)
    assert len(sets.in_state(State.CREATED)) == 2
    assert not sets.scale_sets.named("large").sessions
    assert sets.database.leases["listener"].owner == ""
    await asyncio.sleep(5.0)
    # The machines have booted: the next one lets them listen.
    await DemandListener(sets.demand(owner="second")).run_once()
    assert len(sets.in_state(State.RUNNING)) == 2


async def test_session_without_statistics_does_not_lose_the_recorded_demand(
    sets: DemandWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message about the job is acknowledged: no other one comes until something changes."""
    demand = sets.demand()
    recorded = DemandRecord(
        runner_set="large",
        revision=1,
        statistics=DemandStatistics(assigned=1),
        updated_at=demand.context.clock.now(),
    )
    await demand.store.put_demand(recorded)
    monkeypatch.setattr(MemoryDemandSession, "statistics", None)
    result = await DemandListener(demand).run_once()
    assert result.sets["large"]["desired"] == 1


async def test_once_records_why_a_set_cannot_be_served(sets: DemandWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    demand = sets.demand()

    async def fail(*_: object, **__: object) -> NoReturn:
        raise Unavailable("GitHub is down")

    monkeypatch.setattr(demand.source, "open_session", fail)
    result = await DemandListener(demand).run_once()
    assert result.errors == ("large: GitHub is down",)
    assert (await demand.store.get_demand())["large"].error == "GitHub is down"


async def test_refresh_leaves_a_runner_without_a_report_alone(sets: DemandWorld) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=1)))
    listener = sets.listen()
    await sets.wait_for(lambda: sets.in_state(State.RUNNING))
    await listener.stop()
    sets.database.reports.clear()
    await sets.sweep()
    assert sets.in_state(State.RUNNING)


async def test_once_fails_if_another_listener_serves_the_pool(sets: DemandWorld) -> None:
    sets.listen()
    await asyncio.sleep(5.0)
    with pytest.raises(LeaseLost):
        await DemandListener(sets.demand(owner="second")).run_once()


async def test_message_that_could_not_be_persisted_comes_again(sets: DemandWorld) -> None:
    # All attempts of one write fail: the first job is assigned by then.
    failing_writes = AmbiguousAnswer("store.put_demand", applied=False, at=range(2, 8))
    sets.listen(failing_writes)
    jobs = sets.queue(2)
    await sets.wait_for_jobs(jobs)
    assert failing_writes.count > 8
    await sets.wait_for(lambda: len(sets.database.jobs) == 2)
    await sets.wait_for(lambda: not sets.scale_sets.named("large").messages)
    assert {job.result for job in sets.database.jobs.values()} <= {"success", "succeeded"}


async def test_acknowledged_message_is_recorded_with_the_next_one(sets: DemandWorld) -> None:
    sets.listen()
    for _ in range(2):
        await sets.wait_for_jobs(sets.queue())
    scale_set = sets.scale_sets.named("large")
    await sets.wait_for(lambda: not scale_set.messages)
    assert sets.database.demand["large"].last_message_id == scale_set.last_message_id - 1 > 0


async def test_statistics_of_yesterday_launch_nothing(sets: DemandWorld) -> None:
    sets.database.demand["large"] = DemandRecord(
        runner_set="large",
        scope=SCOPE,
        scale_set_id=1,
        statistics=DemandStatistics(assigned=3),
        updated_at=sets.clock.now() - timedelta(hours=12),
    )
    sets.listen(failing("source.find_set", Unavailable("GitHub does not answer")))
    await asyncio.sleep(60.0)
    assert not sets.database.instances
    record = sets.database.demand["large"]
    assert record.error == "GitHub does not answer"
    assert record.failing_since is not None


async def test_set_that_cannot_get_runners_yet_is_decided_at_intervals(
    sets: DemandWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set does not exist on GitHub yet, so nothing can be acquired for its jobs."""
    sets.database.demand["large"] = DemandRecord(
        runner_set="large", scope=SCOPE, statistics=DemandStatistics(assigned=3), updated_at=sets.clock.now()
    )
    decisions = 0

    def counted(*arguments: Any, **named: Any) -> SupplyPlan:
        nonlocal decisions
        decisions += 1
        return decide_supply(*arguments, **named)

    monkeypatch.setattr(reconciler, "decide_supply", counted)
    sets.listen(failing("source.find_set", Unavailable("GitHub does not answer")))
    await asyncio.sleep(60.0)
    assert not sets.database.instances
    assert 60 / DEFICIT_PAUSE_S / 2 < decisions < 60


async def test_a_set_whose_instances_end_before_they_boot_tells_why_and_waits(sets: DemandWorld) -> None:
    """Without a key that EC2 can use, every launch succeeds and every instance ends."""
    reason = "Client.InternalError: Client error on launch"
    sets.behaviour.boot_s = 1_000.0
    listener = sets.listen()
    (job,) = sets.queue()
    started, ended = sets.clock.now(), 0
    while sets.clock.now() - started < timedelta(minutes=10):
        for instance_id in sets.in_state(State.CREATED):
            ended += sets.cloud.is_alive(instance_id)
            sets.cut_power(instance_id, reason)
        await asyncio.sleep(1)
    assert 3 < ended < 15, "the pause grows to a minute"
    (record,) = {sets.record(key).retire_text for key in sets.database.instances}
    assert record == f"gone: {reason}"
    (known,) = sets.database.demand.values()
    assert reason in known.shortage
    still_open = [item for item in sets.database.provisions.values() if item.status is ProvisionStatus.OPEN]
    assert len(still_open) <= 1, "only the newest launch boots"
    assert any(event == "acquisition-failed" and reason in why for event, why in listener.events)
    # As soon as instances boot, the set is well.
    sets.behaviour.boot_s = 2.0
    await sets.wait_for_jobs([job])
    await sets.wait_for(lambda: not sets.database.demand[known.runner_set].shortage)
