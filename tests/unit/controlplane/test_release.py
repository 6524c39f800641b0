"""Release: idempotent, resumable and concurrent; a running job may finish."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from remuda.cli.rendering.results import release_document
from remuda.controlplane.context import CONCURRENCY, CONFLICT_ATTEMPTS, transition
from remuda.controlplane.release import ReleaseResult, ReleaseStatus
from remuda.domain.decide.next_step import MIN_EXTENSION_S
from remuda.domain.errors import Unreadable
from remuda.domain.instance import RetireReason, State
from remuda.domain.resources import Reuse
from remuda.domain.signals import Signal
from remuda.domain.transitions import Actor, Extend
from remuda.ports.machine import StepResult
from simulation.invariants import SCOPE
from tests.support.virtual_time import Call, Cut, CutKind, Hook, until
from tests.support.world import LIFETIMES, PoolWorld


def statuses(result: ReleaseResult) -> list[str]:
    assert not result.errors
    return sorted(outcome.status.value for outcome in result.outcomes)


def answers_after(seconds: float) -> Hook:
    """A process that reads signals with a delay."""

    async def hook(name: str, call: Call) -> Any:
        answer = await call()
        if name == "store.wait_for_report":
            await asyncio.sleep(seconds)
        return answer

    return hook


async def test_release_resets_pools_and_publishes(world: PoolWorld) -> None:
    ids = sorted(item.instance.instance_id for item in (await world.provision(count=3)).instances)
    result = await world.release()
    assert statuses(result) == ["released"] * 3
    assert world.in_state(State.IDLE) == ids
    assert world.messages() == ids
    assert not world.registrations()
    for instance_id in ids:
        record = world.record(instance_id)
        assert (record.holder, record.last_subject, record.uses, record.assignment) == (None, "1", 1, None)
        assert record.announced_at is not None
        assert record.threshold - world.clock.now() <= timedelta(seconds=world.lifetimes.idle_time_s)


async def test_pool_messages_are_sent_in_batches(world: PoolWorld) -> None:
    await world.provision(count=12)
    result = await world.release()
    assert statuses(result) == ["released"] * 12
    assert result.calls["pool"]["send"] <= 3


async def test_release_of_a_run_without_provision(world: PoolWorld) -> None:
    assert statuses(await world.release("unknown")) == []


async def test_release_twice_is_idempotent(world: PoolWorld) -> None:
    await world.one()
    assert statuses(await world.release()) == ["released"]
    assert statuses(await world.release()) == ["skipped"]
    assert len(world.messages()) == 1


async def test_concurrent_releases_agree(world: PoolWorld) -> None:
    await world.provision(count=3)
    slow = [world.process(answers_after(seconds)) for seconds in (0.0, 0.1, 0.2)]
    results = await asyncio.gather(*(world.release(process=process) for process in slow))
    assert not [error for result in results for error in result.errors]
    assert len(world.in_state(State.IDLE)) == 3
    assert len(set(world.messages())) == 3
    # Both releases report the same outcome.
    assert {fate for result in results for fate in statuses(result)} == {"released"}


async def test_release_finished_by_a_sweep_counts_as_released(world: PoolWorld) -> None:
    await world.provision(count=2)

    async def sweep_often() -> None:
        while True:
            await world.sweep()
            await asyncio.sleep(0.05)

    sweeping = asyncio.create_task(sweep_often())
    result = await world.release(process=world.process(answers_after(0.3)))
    sweeping.cancel()
    assert statuses(result) == ["released"] * 2


async def test_release_resumes_after_a_crash(world: PoolWorld) -> None:
    await world.provision(count=2)
    cut = Cut(5, CutKind.CRASH_AFTER)
    await cut.run(world.release(process=world.process(cut)))
    assert world.in_state(State.RELEASING)
    assert set(statuses(await world.release())) <= {"released", "skipped"}
    assert len(world.in_state(State.IDLE)) == 2
    await cut.discard()


async def test_release_covers_attempts_up_to_its_own(world: PoolWorld) -> None:
    first = await world.one(attempt=1)
    second = await world.one(attempt=2)
    assert statuses(await world.release(attempt=1)) == ["released"]
    assert world.in_state(State.RUNNING) == [second.instance_id]
    assert statuses(await world.release(attempt=3)) == ["released", "skipped"]
    assert world.in_state(State.IDLE) == sorted([first.instance_id, second.instance_id])


async def test_instance_of_another_run_is_skipped(world: PoolWorld) -> None:
    instance = await world.one()
    await world.release()
    assert (await world.one("2")).instance_id == instance.instance_id
    result = await world.release()
    assert statuses(result) == ["skipped"]
    assert "another provision" in result.outcomes[0].why
    assert world.in_state(State.RUNNING) == [instance.instance_id]


@pytest.mark.parametrize("is_late", [False, True], ids=["before a call", "after a call"])
async def test_instance_that_another_run_gets_meanwhile_is_left_to_it(is_late: bool) -> None:  # noqa: FBT001
    """Another release of the run and a claim of another one, at each call of the release."""
    for at_call in range(1, 30):
        world = PoolWorld()
        await world.configure()
        instance = await world.one()
        calls = 0

        async def hook(_name: str, call: Call, world: PoolWorld = world, at_call: int = at_call) -> Any:
            nonlocal calls
            calls += 1
            answer = await call() if is_late else None
            if calls == at_call:
                await world.release()
                if world.in_state(State.IDLE):
                    await world.one("2")
            return answer if is_late else await call()

        await world.release(process=world.process(hook))
        record = world.record(instance.instance_id)
        assert (record.state, record.run_id) in {(State.RUNNING, "2"), (State.IDLE, "")}, f"at call {at_call}"
        world.check()
        await world.end()
        if calls < at_call:
            assert at_call > 4
            return
    raise AssertionError("the release makes more calls than expected")


async def test_unexpected_states_are_reported_and_others_released(world: PoolWorld) -> None:
    first, second = (item.instance for item in (await world.provision(count=2)).instances)
    world.cloud.end(first.instance_id, "power loss")
    await world.sweep()
    assert world.record(first.instance_id).state in {State.TERMINATING, State.TERMINATED}
    result = await world.release()
    assert statuses(result) == ["released", "skipped"]
    assert world.in_state(State.IDLE) == [second.instance_id]


async def test_release_waits_for_a_running_job(world: PoolWorld) -> None:
    instance = await world.one()
    job = world.github.queue(run_id="1", labels=["1"], seconds=70)
    await asyncio.sleep(1)
    deadline = world.record(instance.instance_id).threshold
    releasing = asyncio.create_task(world.release())
    seen = set()
    while not releasing.done():
        await asyncio.sleep(5)
        record = world.record(instance.instance_id)
        if record.state is State.RELEASING:
            assert record.threshold <= deadline
            seen.add(record.threshold)
    assert statuses(await releasing) == ["released"]
    assert job.conclusion == "success"
    assert deadline in seen, "extended up to the run's deadline"


async def test_running_jobs_do_not_delay_the_release_of_other_instances(world: PoolWorld) -> None:
    await world.provision(count=CONCURRENCY + 2)
    await asyncio.sleep(1)
    for _ in range(CONCURRENCY):
        world.github.queue(run_id="1", labels=["1"], seconds=60)
    await asyncio.sleep(1)
    releasing = asyncio.create_task(world.release())
    await asyncio.sleep(10)
    assert len(world.in_state(State.IDLE)) == 2
    assert statuses(await releasing) == ["released"] * (CONCURRENCY + 2)


async def test_release_goes_on_if_another_one_extends_the_job_each_time(world: PoolWorld) -> None:
    instance = await world.one(max_runtime_s=20_000.0)
    job = world.github.queue(run_id="1", labels=["1"], seconds=3_000)
    await asyncio.sleep(1)
    conflicts = 0

    async def hook(name: str, call: Call) -> Any:
        """Another process extends the release while this one's write is on its way."""
        nonlocal conflicts
        record, report = world.record(instance.instance_id), world.database.reports[instance.instance_id]
        if name == "store.apply" and record.state is State.RELEASING and report.busy:
            await asyncio.sleep(0.01)
            extend = Extend(report=report, extension_s=MIN_EXTENSION_S, margin_s=0.0)
            await transition(world.process(), record, extend, by=Actor.REFRESH, why="a job is still running")
            conflicts += 1
        return await call()

    assert statuses(await world.release(process=world.process(hook))) == ["released"]
    assert job.conclusion == "success"
    assert conflicts > CONFLICT_ATTEMPTS


async def test_job_ends_at_the_run_deadline(world: PoolWorld) -> None:
    instance = await world.one()
    job = world.github.queue(run_id="1", labels=["1"], seconds=10_000)
    await asyncio.sleep(1)
    deadline = world.record(instance.instance_id).threshold
    result = await world.release()
    assert statuses(result) == ["expired"]
    assert world.record(instance.instance_id).threshold == deadline
    assert world.clock.now() >= deadline
    await world.pass_time(25)
    assert world.record(instance.instance_id).state is State.TERMINATED
    assert job.conclusion == "failure"


async def test_expiring_removal_credential_is_renewed(world: PoolWorld) -> None:
    """The release starts with the pool's token; a sweep renews it while a job runs."""
    instance = await world.one(max_runtime_s=6_000.0)
    world.github.queue(run_id="1", labels=["1"], seconds=3_800)
    await world.pass_time(3_000, sweeps=False)
    releasing = asyncio.create_task(world.release())
    await until(lambda: bool(world.in_state(State.RELEASING)))
    first = world.record(instance.instance_id).assignment
    await world.pass_time(700)
    assert (world.record(instance.instance_id).state, releasing.done()) == (State.RELEASING, False)
    second = world.record(instance.instance_id).assignment
    assert first is not None
    assert second is not None
    assert first.credential is not None
    assert second.credential is not None
    assert first.credential.expires_at < world.clock.now() < second.credential.expires_at
    await world.pass_time(200)
    assert statuses(await releasing) == ["released"]


async def test_process_with_a_credential_mints_the_removal_token(world: PoolWorld) -> None:
    await world.one()
    result = await world.release(process=world.process(credentialed=True))
    assert statuses(result) == ["released"]
    assert result.calls["github"]["POST remove-token"] == 1


async def test_removal_token_of_a_long_process_is_renewed(world: PoolWorld) -> None:
    """One token serves all releases of a process, until it is about to expire."""
    process = world.process(credentialed=True)
    tokens = []
    for run_id, pause_s in (("1", 0.0), ("2", 10.0), ("3", 3_600.0)):
        await asyncio.sleep(pause_s)
        instance = await world.one(run_id, process=world.process(credentialed=True))
        releasing = asyncio.create_task(world.release(run_id, process=process))
        await until(lambda: bool(world.in_state(State.RELEASING)))
        record = world.record(instance.instance_id)
        assert record.assignment is not None
        assert record.assignment.credential is not None
        assert record.assignment.credential.expires_at > record.threshold
        tokens.append(record.assignment.credential.token)
        assert statuses(await releasing) == ["released"]
    assert tokens[0] == tokens[1] != tokens[2]


async def test_instance_with_max_uses_is_retired(world: PoolWorld) -> None:
    await world.configure(lifetimes=replace(LIFETIMES, max_uses=2))
    instance = await world.one()
    assert statuses(await world.release()) == ["released"]
    assert (await world.one("2")).instance_id == instance.instance_id
    result = await world.release("2")
    assert statuses(result) == ["retired"]
    assert "used up: 2 of 2 uses" in result.outcomes[0].why


async def test_too_old_instance_is_retired(world: PoolWorld) -> None:
    await world.configure(lifetimes=replace(LIFETIMES, max_age_s=20.0))
    await world.one()
    await world.pass_time(25, sweeps=False)
    result = await world.release()
    assert statuses(result) == ["retired"]
    assert "too old" in result.outcomes[0].why


async def test_spot_notice_retires_after_the_job(world: PoolWorld) -> None:
    instance = await world.one()
    job = world.github.queue(run_id="1", labels=["1"], seconds=10)
    world.machines[instance.instance_id].notice = "terminate at 12:10"
    await world.pass_time(8)
    assert world.record(instance.instance_id).retire_reason is RetireReason.SPOT_NOTICE
    assert world.record(instance.instance_id).state is State.RUNNING
    result = await world.release()
    assert (statuses(result), job.conclusion) == (["retired"], "success")


async def test_failed_reset_terminates_the_machine(world: PoolWorld) -> None:
    instance = await world.one()
    world.behaviour.resets[instance.instance_id] = StepResult(ok=False, detail="a process would not die")
    result = await world.release()
    assert statuses(result) == ["retired"]
    assert "would not die" in world.database.histories[instance.instance_id][-1].why
    assert not world.messages()


async def test_dead_machine_ends_at_its_threshold(world: PoolWorld) -> None:
    instance = await world.one()
    world.stop_agent(instance.instance_id)
    result = await world.release()
    assert statuses(result) == ["expired"]
    assert world.record(instance.instance_id).state is State.RELEASING


async def test_signal_of_an_earlier_epoch_is_ignored(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    assert world.database.reports[warm].signal is Signal.UD_REMOVE_REG_REMOVE_RUN_OK
    await world.provision()
    world.stop_agent(warm)
    result = await world.release()
    assert statuses(result) == ["expired"]
    await world.sweep()
    assert world.record(warm).state is not State.IDLE


async def test_release_terminates_a_booting_machine(world: PoolWorld) -> None:
    cut = Cut(8, CutKind.CRASH_AFTER)
    await cut.run(world.provision(process=world.process(cut)))
    assert world.in_state(State.CREATED)
    result = await world.release()
    assert statuses(result) == ["retired"]
    assert world.in_state(State.TERMINATING)
    await cut.discard()


async def test_claimed_instances_of_a_crashed_provision_are_released(world: PoolWorld) -> None:
    ids = await world.warm(2)
    cut = Cut(8, CutKind.CRASH_AFTER)
    await cut.run(world.provision(count=2, process=world.process(cut)))
    assert world.in_state(State.CLAIMED)
    await world.release()
    await world.sweep()
    assert world.in_state(State.IDLE) == ids
    await cut.discard()


async def test_unreadable_provision_is_reported_and_the_others_are_released(world: PoolWorld) -> None:
    await world.one()

    async def hook(name: str, call: Call) -> Any:
        found = await call()
        if name == "store.provisions_of_run":
            raise Unreadable("the store", {"p-bad": "not JSON"}, records={item.provision_id: item for item in found})
        return found

    result = await world.release(process=world.process(hook))
    assert [outcome.status for outcome in result.outcomes] == [ReleaseStatus.RELEASED]
    assert len(result.errors) == 1
    assert "p-bad" in result.errors[0]


async def test_one_error_does_not_stop_the_others(world: PoolWorld) -> None:
    first, second = (item.instance for item in (await world.provision(count=2)).instances)
    world.database.instances[first.instance_id] = replace(world.record(first.instance_id), scope="octo/gone")
    result = await world.release()
    assert len(result.errors) == 1
    assert first.instance_id in result.errors[0]
    assert [outcome.status for outcome in result.outcomes] == [ReleaseStatus.RELEASED]
    assert world.in_state(State.IDLE) == [second.instance_id]
    world.database.instances[first.instance_id] = replace(world.record(first.instance_id), scope=SCOPE)


async def test_reset_detail_is_reported_for_pooled_and_retired_instances(world: PoolWorld) -> None:
    for reuse, fate in ((Reuse.SAME_TRUST, ReleaseStatus.RELEASED), (Reuse.NEVER, ReleaseStatus.RETIRED)):
        await world.configure(reuse=reuse)
        instance_id = (await world.one(run_id=fate.value)).instance_id
        world.behaviour.resets[instance_id] = StepResult(ok=True, detail="1 process (sleep 9)")
        result = await world.release(fate.value)
        (outcome,) = result.outcomes
        assert (outcome.status, outcome.detail) == (fate, "1 process (sleep 9)")
        document = release_document(result)
        assert document["details"] == {instance_id: "1 process (sleep 9)"}
        assert document["reasons"] == {instance_id: outcome.why}
        assert instance_id in document["deregistration_seconds"]
        last = [entry for entry in await world.process().store.history(instance_id) if entry.subject == fate.value]
        assert any(entry.why.endswith("1 process (sleep 9)") for entry in last)
