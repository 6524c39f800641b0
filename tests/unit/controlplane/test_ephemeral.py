"""Ephemeral instances: registered just in time for one job each, and terminated after it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from remuda.controlplane.release import ReleaseStatus
from remuda.domain.errors import Conflict, RemudaError, Throttled, Unavailable, UserError
from remuda.domain.instance import RetireReason, State
from tests.support.virtual_time import Call
from tests.support.world import PoolWorld


async def provisioned(world: PoolWorld, count: int = 1, hook: Any = None) -> list[str]:
    process = world.process(hook, credentialed=True)
    made = await world.provision("1", count=count, ephemeral=True, process=process)
    assert (made.created, made.ephemeral) == (count, True)
    return sorted(item.instance.instance_id for item in made.instances)


async def test_ephemeral_provision_requires_a_credential(world: PoolWorld) -> None:
    process = world.process()
    with pytest.raises(UserError, match="ephemeral runners need a GitHub credential") as refused:
        await world.provision("1", ephemeral=True, process=process)
    assert (refused.value.field, "REMUDA_GITHUB_TOKEN" in refused.value.fix) == ("ephemeral", True)
    assert not any(process.calls.by_service().values())


async def test_scope_outside_the_pool_is_rejected(world: PoolWorld) -> None:
    with pytest.raises(UserError, match="octo/other"):
        await world.provision("1", ephemeral=True, scope="octo/other", process=world.process(credentialed=True))
    assert not world.registrations()


async def test_ephemeral_provision_takes_nothing_from_the_pool(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    (machine,) = await provisioned(world)
    assert machine != warm
    assert world.record(warm).state is State.IDLE
    record = world.record(machine)
    assert (record.retire_reason, record.state) == (RetireReason.EPHEMERAL, State.RUNNING)


@pytest.mark.parametrize("credentialed", [True, False])
async def test_ephemeral_instance_runs_one_job_and_is_terminated(world: PoolWorld, credentialed: bool) -> None:  # noqa: FBT001
    machines = await provisioned(world, 2)
    jobs = [world.github.queue(run_id="1", labels=("1",)) for _ in range(3)]
    await asyncio.sleep(20)
    # Each has run one job. The third job stays queued, and no listener has failed.
    assert sorted(job.conclusion for job in jobs) == ["", "success", "success"]
    assert world.registrations() == []
    await world.sweep()
    assert world.in_state(State.RUNNING) == machines
    done = await world.release("1", process=world.process(credentialed=credentialed))
    assert {(item.status, item.why) for item in done.outcomes} == {(ReleaseStatus.RETIRED, "ephemeral")}
    assert world.in_state(State.TERMINATING) == machines
    assert {world.database.histories[machine][-1].retire_reason for machine in machines} == {RetireReason.EPHEMERAL}


async def test_release_with_a_credential_removes_unused_registration(world: PoolWorld) -> None:
    (machine,) = await provisioned(world)
    assert len(world.registrations(machine)) == 1
    done = await world.release("1", process=world.process(credentialed=True))
    assert [(item.status, item.why) for item in done.outcomes] == [(ReleaseStatus.RETIRED, "ephemeral")]
    assert world.registrations() == []


async def test_without_a_credential_a_sweep_removes_the_registration(world: PoolWorld) -> None:
    (machine,) = await provisioned(world)
    done = await world.release("1")
    assert [item.status for item in done.outcomes] == [ReleaseStatus.RETIRED]
    assert world.record(machine).state is State.TERMINATING
    await world.sweep()
    assert world.registrations() == []


async def test_release_waits_for_the_job(world: PoolWorld) -> None:
    (machine,) = await provisioned(world)
    job = world.github.queue(run_id="1", labels=("1",), seconds=15.0)
    await asyncio.sleep(5)
    done = await world.release("1", process=world.process(credentialed=True))
    assert job.conclusion == "success"
    assert [(item.status, item.why) for item in done.outcomes] == [(ReleaseStatus.RETIRED, "ephemeral")]
    assert world.record(machine).state is State.TERMINATING


async def test_release_before_boot_removes_the_registration(world: PoolWorld) -> None:
    world.behaviour.boot_s = 30.0
    provisioning = asyncio.create_task(provisioned(world))
    await asyncio.sleep(5)
    assert len(world.registrations()) == 1
    await world.release("1", process=world.process(credentialed=True))
    with pytest.raises(RemudaError):
        await provisioning
    assert world.registrations() == []


async def test_jit_config_is_removed_from_the_record_after_its_step(world: PoolWorld) -> None:
    seen: set[tuple[State, bool]] = set()
    tell = world.database.changes.notify

    def watch(key: tuple[type, str]) -> None:
        record = world.database.instances.get(key[1])
        if record is not None and record.assignment is not None:
            seen.add((record.state, bool(record.assignment.jit_config)))
        tell(key)

    world.database.changes.notify = watch  # type: ignore[method-assign]
    await provisioned(world)
    await world.release("1", process=world.process(credentialed=True))
    assert seen == {(State.CREATED, True), (State.RUNNING, False), (State.RELEASING, False)}


FAILURES = [Throttled("slowly"), Unavailable("GitHub is away"), Conflict("it exists"), UserError("403", field="x")]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda item: type(item).__name__)
async def test_failed_jit_registration_leaves_nothing(world: PoolWorld, failure: RemudaError) -> None:
    asked = 0

    async def hook(name: str, call: Call) -> Any:
        nonlocal asked
        if name == "github.jit_config":
            asked += 1
            if asked == 2:
                raise failure
        return await call()

    with pytest.raises(RemudaError) as raised:
        await provisioned(world, 3, hook)
    assert not isinstance(raised.value, Conflict)
    assert asked == 3
    world.check_holds_nothing("1")
    assert world.registrations() == []
    assert len(world.in_state(State.TERMINATING)) == 3


async def test_failed_provision_leaves_no_registration(world: PoolWorld) -> None:
    world.behaviour.boot_s = 1_000.0
    with pytest.raises(Unavailable):
        await provisioned(world, 2)
    world.check_holds_nothing("1")
    assert world.registrations() == []


async def test_provision_interrupted_during_commit_leaves_no_registration(world: PoolWorld) -> None:
    async def hook(name: str, call: Call) -> Any:
        result = await call()
        if name == "store.apply" and State.RUNNING in world.states().values():
            raise asyncio.CancelledError
        return result

    with pytest.raises(asyncio.CancelledError):
        await provisioned(world, 2, hook)
    await asyncio.sleep(20)
    await world.sweep()
    assert world.registrations() == []
    assert not world.in_state(State.CREATED, State.RUNNING)
