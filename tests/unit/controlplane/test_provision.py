"""Provision: from the pool if it can, created if it must, all or nothing, and held by nobody if it fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from remuda.controlplane.context import Context
from remuda.controlplane.provision import ProvisionResult
from remuda.domain.errors import CapacityError, Conflict, RemudaError, TimedOut, Unavailable, UserError
from remuda.domain.instance import State
from remuda.domain.provision import ProvisionStatus
from remuda.domain.resources import UsageClass
from remuda.ports.compute import LaunchRequest, LaunchResult
from remuda.ports.machine import StepResult
from simulation.memory.compute import MemoryCompute
from simulation.names import POOL, SCOPE
from tests.support.virtual_time import Call, EventRecorder
from tests.support.world import PoolWorld
from tests.unit.controlplane.cuts import Unsure


async def refused(world: PoolWorld, kind: type[RemudaError], run_id: str = "1", **changed: Any) -> RemudaError:
    """The provision fails so, and holds nothing."""
    with pytest.raises(kind) as failure:
        await world.provision(run_id, **changed)
    world.check_holds_nothing(run_id)
    statuses = {item.status for item in world.database.provisions.values() if item.run_id == run_id}
    assert statuses <= {ProvisionStatus.RELEASED}
    return failure.value


async def test_an_empty_pool_means_cold_starts_in_one_launch(world: PoolWorld) -> None:
    result = await world.provision(count=3)
    assert (result.created, result.reused) == (3, 0)
    assert result.calls["compute"] == {"launch": 1}
    assert world.in_state(State.RUNNING) == sorted(world.cloud.machines)
    assert {runner.labels for runner in world.registrations()} == {("1", "large")}


async def test_a_full_pool_means_warm_starts(world: PoolWorld) -> None:
    ids = await world.warm(3)
    result = await world.provision(count=3)
    assert (result.created, result.reused) == (0, 3)
    assert sorted(item.instance.instance_id for item in result.instances) == ids
    assert "compute" not in result.calls
    assert not world.messages()
    assert {item.instance.epoch for item in result.instances} == {2}


async def test_what_the_pool_lacks_is_created(world: PoolWorld) -> None:
    await world.warm(2)
    result = await world.provision(count=5)
    assert (result.created, result.reused) == (3, 2)
    assert result.calls["compute"] == {"launch": 1}


async def test_jobs_run_and_the_registration_credential_is_gone(world: PoolWorld) -> None:
    result = await world.provision(count=2)
    jobs = [world.github.queue(run_id="1", labels=["1", "large"]) for _ in range(4)]
    other = world.github.queue(run_id="2", labels=["2"])
    await world.pass_time(5)
    assert [job.conclusion for job in jobs] == ["success"] * 4
    assert not other.runner_name
    for item in result.instances:
        assert item.instance.assignment is not None
        assert item.instance.assignment.credential is None


async def test_two_runs_never_get_the_same_machine(world: PoolWorld) -> None:
    await world.warm(6)
    runs = await asyncio.gather(*(world.provision(f"r{number}", count=3) for number in range(4)))
    ids = [item.instance.instance_id for run in runs for item in run.instances]
    assert len(set(ids)) == 12
    assert sum(run.reused for run in runs) == 6


async def test_a_run_takes_a_second_class_beside_the_first(world: PoolWorld) -> None:
    await world.provision(count=1)
    second = await world.provision(count=1, resource_class="xlarge")
    assert {runner.labels for runner in world.registrations()} == {("1", "large"), ("1", "xlarge")}
    assert second.instances[0].instance.cpu == 4
    released = await world.release()
    assert len(released.outcomes) == 2


async def test_no_capacity_says_who_had_none(world: PoolWorld) -> None:
    world.cloud.capacity = dict.fromkeys([kind.name for kind in world.cloud.types], 0)
    error = await refused(world, CapacityError, count=2)
    assert "c6i.large: capacity for 0 of 2" in error.message


async def test_partial_capacity_is_ended_and_named(world: PoolWorld) -> None:
    world.cloud.capacity = dict.fromkeys([kind.name for kind in world.cloud.types], 0) | {"m6i.large": 2}
    await world.warm(1)
    error = await refused(world, CapacityError, count=4)
    assert "1 of 3" in error.message
    assert "m6i.large: capacity for 1 of 3" in error.message
    assert "c6i.large" in error.message
    assert len(world.in_state(State.TERMINATING)) == 1
    # The warm one comes back to the pool.
    await world.pass_time(15)
    assert len(world.in_state(State.IDLE)) == 1


async def test_a_new_machine_that_fails_takes_all_with_it(world: PoolWorld) -> None:
    await world.warm(1)
    world.behaviour.registration["i-00000000000000003"] = StepResult(ok=False, detail="no network")
    error = await refused(world, Unavailable, count=3)
    assert "no network" in error.message
    assert "i-00000000000000003" in error.message


async def test_a_failing_script_stops_everything_and_says_so(world: PoolWorld) -> None:
    world.behaviour.script = StepResult(ok=False, detail="line 3: no such package")
    error = await refused(world, UserError, count=2)
    assert isinstance(error, UserError)
    assert error.field == "pre-runner-script"
    assert "no such package" in error.message


async def test_a_machine_that_never_boots_ends_with_the_deadline(world: PoolWorld) -> None:
    world.behaviour.without_agent.add("i-00000000000000001")
    began = world.loop.time()
    await refused(world, TimedOut, count=1)
    assert world.loop.time() - began < world.lifetimes.provision_timeout_s


async def test_a_token_that_runs_out_too_early_is_refused_before_any_claim(world: PoolWorld) -> None:
    await world.warm(2)
    config = world.database.config
    assert config is not None
    left = config.tokens_for(SCOPE).registration.expires_at - world.clock.now()
    # No sweep meanwhile, and the idle ones are renewed by hand: only the token gets old.
    await world.pass_time(left.total_seconds() - 50, sweeps=False)
    error = await refused(world, UserError, count=2)
    assert "registration token" in error.message
    assert not world.database.provisions or all(item.run_id != "1" for item in world.database.provisions.values())


async def test_an_own_credential_needs_no_token_of_the_pool(world: PoolWorld) -> None:
    result = await world.provision(process=world.process(credentialed=True))
    assert result.calls["github"] == {"POST registration-token": 1}


async def test_an_unknown_class_and_scope_are_refused_first(world: PoolWorld) -> None:
    for changed in ({"resource_class": "giant"}, {"scope": "octo/other"}):
        await refused(world, UserError, **changed)
    assert not world.database.provisions


async def test_without_configuration_there_is_no_provision() -> None:
    world = PoolWorld()
    with pytest.raises(UserError, match="no configuration"):
        await world.provision()


async def test_max_instances_counts_all_that_live() -> None:
    world = PoolWorld(max_instances=4)
    await world.configure()
    await world.provision("1", count=3)
    error = await refused(world, CapacityError, "2", count=2)
    assert "max-instances is 4" in error.message
    await refused(world, CapacityError, "3", count=5)
    await world.provision("4", count=1)
    await world.end()


async def test_max_instances_holds_for_provisions_at_the_same_moment() -> None:
    world = PoolWorld(max_instances=4)
    await world.configure()
    outcomes = await asyncio.gather(*(world.provision(str(run), count=2) for run in range(4)), return_exceptions=True)
    assert all(isinstance(item, ProvisionResult | CapacityError) for item in outcomes)
    assert sum(isinstance(item, ProvisionResult) for item in outcomes) <= 2
    assert len(world.in_state(State.RUNNING)) <= 4
    await world.end()


async def test_the_deadline_burns_no_machine_of_the_pool(world: PoolWorld) -> None:
    """When time is up nothing more is claimed: it would only be ended again."""
    ids = await world.warm(6)
    world.behaviour.configure_s = 50.0
    await refused(world, RemudaError, count=1, timeout_s=10.0)
    claimed = [key for key in ids if world.record(key).epoch > 1]
    assert len(claimed) == 1


async def test_a_new_run_is_not_started_when_time_is_up(world: PoolWorld) -> None:
    """A launch past the deadline would be money for nothing."""
    await world.warm(1)
    world.behaviour.configure_s = 50.0
    await refused(world, RemudaError, count=1, timeout_s=10.0)
    assert len(world.cloud.machines) == 1


async def test_a_release_stops_a_provision_that_is_at_work(world: PoolWorld) -> None:
    world.behaviour.boot_s = 20.0
    provisioning = asyncio.create_task(world.provision(count=2))
    await asyncio.sleep(5)
    released = await world.release()
    assert {outcome.status.value for outcome in released.outcomes} == {"retired"}
    with pytest.raises((Conflict, Unavailable)):
        await provisioning
    world.check_holds_nothing("1")


async def test_a_release_just_before_the_commit_wins(world: PoolWorld) -> None:
    release: asyncio.Task[object] | None = None

    async def hook(name: str, call: Call) -> Any:
        nonlocal release
        if name == "store.replace_provision" and release is None:
            release = asyncio.create_task(world.release())
            await asyncio.sleep(0.1)
        return await call()

    with pytest.raises(Conflict, match="released while"):
        await world.provision(count=2, process=world.process(hook))
    assert release is not None
    await release
    world.check_holds_nothing("1")


async def test_a_claimed_machine_is_given_back_not_ended(world: PoolWorld) -> None:
    ids = await world.warm(2)
    world.cloud.capacity = dict.fromkeys([kind.name for kind in world.cloud.types], 0)
    await refused(world, CapacityError, count=3)
    assert world.in_state(State.RELEASING) == ids
    await world.pass_time(15)
    assert world.in_state(State.IDLE) == ids


async def test_a_rollback_goes_on_where_github_is_down(world: PoolWorld) -> None:
    """With a credential of its own, the provision wants a fresh removal token; the pool's will do."""
    ids = await world.warm(1)
    world.cloud.capacity = dict.fromkeys([kind.name for kind in world.cloud.types], 0) | {"c6i.large": 2}

    class Down(Unsure):
        async def __call__(self, name: str, call: Call) -> Any:
            if name == "github.removal_token":
                raise Unavailable("GitHub is down")
            return await call()

    process: Context = world.process(Down("", applied=False), credentialed=True)
    with pytest.raises(CapacityError):
        await world.provision(count=4, process=process)
    world.check_holds_nothing("1")
    await world.pass_time(15)
    assert world.in_state(State.IDLE) == ids


async def test_the_same_run_id_may_provision_again(world: PoolWorld) -> None:
    await world.provision(count=1, attempt=1)
    await world.release(attempt=1)
    again = await world.provision(count=1, attempt=2)
    assert again.reused == 1
    late = await world.release(attempt=1)
    assert [outcome.status.value for outcome in late.outcomes] == ["skipped"]
    assert world.in_state(State.RUNNING) == [again.instances[0].instance.instance_id]


async def test_the_run_may_ask_for_its_own_times(world: PoolWorld) -> None:
    result = await world.provision(max_runtime_s=1_000.0, timeout_s=100.0)
    threshold = result.instances[0].instance.threshold
    assert threshold - world.clock.now() == timedelta(seconds=1_000)
    await world.release()


class FallsBack(MemoryCompute):
    """A cloud without spot, which gives on-demand machines in its place."""

    async def launch(self, request: LaunchRequest) -> LaunchResult:
        result = await super().launch(request)
        instances = tuple(replace(each, usage_class=UsageClass.ON_DEMAND) for each in result.instances)
        return LaunchResult(instances=instances, errors=("subnet-1 c6i.large (spot): no capacity",))


async def test_what_falls_back_to_on_demand_is_recorded_and_pooled_as_such(world: PoolWorld) -> None:
    context = world.process()
    context = replace(context, compute=FallsBack(cloud=world.cloud, pool=POOL, calls=context.calls))
    made = await world.provision("1", process=context, usage_class=UsageClass.SPOT)
    assert [item.instance.usage_class for item in made.instances] == [UsageClass.ON_DEMAND]
    assert isinstance(context.event_log, EventRecorder)
    assert context.event_log.count("launch-refused") == 1, "the user hears of it"
    await world.release("1")
    (hint,) = [item.message for item in world.queues.named("large").messages]
    assert hint is not None
    assert hint.usage_class is UsageClass.ON_DEMAND
    # It does not serve who wants spot, and does serve who wants on-demand.
    assert (await world.provision("2", usage_class=UsageClass.SPOT)).reused == 0
    assert (await world.provision("3")).reused == 1
