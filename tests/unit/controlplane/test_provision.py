"""Provision: reuses instances of the pool, creates the rest, and holds nothing if it fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from remuda.controlplane.operator import terminate
from remuda.controlplane.provision import ProvisionResult
from remuda.controlplane.provision.outcome import OutcomeRecorder
from remuda.domain.errors import CapacityError, Conflict, RemudaError, TimedOut, Unavailable, UserError
from remuda.domain.instance import State
from remuda.domain.provision import (
    MAX_ACQUIRED,
    MAX_ERROR,
    MAX_LAUNCHES,
    MAX_REASON,
    MAX_REJECTIONS,
    Provision,
    ProvisionOutcome,
    ProvisionStatus,
    RejectionKind,
    RunnerSource,
)
from remuda.domain.resources import TypePatterns, UsageClass
from remuda.ports.compute import LaunchRequest, LaunchResult
from remuda.ports.machine import StepResult
from simulation.invariants import POOL, SCOPE
from simulation.loop import VirtualClock
from simulation.memory.compute import MemoryCompute
from tests.support.records import instance_id, message
from tests.support.virtual_time import Call, Cut, CutKind, EventRecorder, Hook, failing
from tests.support.world import PoolWorld


async def assert_fails(world: PoolWorld, kind: type[RemudaError], run_id: str = "1", **changed: Any) -> RemudaError:
    """Check that the provision fails with this error and holds nothing."""
    with pytest.raises(kind) as failure:
        await world.provision(run_id, **changed)
    world.check_holds_nothing(run_id)
    statuses = {item.status for item in world.database.provisions.values() if item.run_id == run_id}
    assert statuses <= {ProvisionStatus.RELEASED}
    return failure.value


async def test_empty_pool_causes_one_launch(world: PoolWorld) -> None:
    result = await world.provision(count=3)
    assert (result.created, result.reused) == (3, 0)
    assert result.calls["compute"] == {"launch": 1}
    assert world.in_state(State.RUNNING) == sorted(world.cloud.machines)
    assert {runner.labels for runner in world.registrations()} == {("1", "1/large")}


async def test_full_pool_is_reused(world: PoolWorld) -> None:
    ids = await world.warm(3)
    result = await world.provision(count=3)
    assert (result.created, result.reused) == (0, 3)
    assert sorted(item.instance.instance_id for item in result.instances) == ids
    assert "compute" not in result.calls
    assert not world.messages()
    assert {item.instance.epoch for item in result.instances} == {2}


async def test_missing_instances_are_created(world: PoolWorld) -> None:
    await world.warm(2)
    result = await world.provision(count=5)
    assert (result.created, result.reused) == (3, 2)
    assert result.calls["compute"] == {"launch": 1}


async def test_jobs_run_and_registration_credential_is_removed(world: PoolWorld) -> None:
    result = await world.provision(count=2)
    jobs = [world.github.queue(run_id="1", labels=["1/large"]) for _ in range(4)]
    others = [world.github.queue(run_id="2", labels=[label]) for label in ("2", "2/large", "large")]
    await world.pass_time(5)
    assert [job.conclusion for job in jobs] == ["success"] * 4
    assert [job.runner_name for job in others] == [""] * 3
    for item in result.instances:
        assert item.instance.assignment is not None
        assert item.instance.assignment.credential is None


async def test_concurrent_runs_get_different_machines(world: PoolWorld) -> None:
    await world.warm(6)
    runs = await asyncio.gather(*(world.provision(f"r{number}", count=3) for number in range(4)))
    ids = [item.instance.instance_id for run in runs for item in run.instances]
    assert len(set(ids)) == 12
    assert sum(run.reused for run in runs) == 6


async def test_run_can_provision_two_classes(world: PoolWorld) -> None:
    await world.provision(count=1)
    second = await world.provision(count=1, resource_class="xlarge")
    assert {runner.labels for runner in world.registrations()} == {("1", "1/large"), ("1", "1/xlarge")}
    assert second.instances[0].instance.cpu == 4
    released = await world.release()
    assert len(released.outcomes) == 2


async def test_missing_capacity_names_the_instance_types(world: PoolWorld) -> None:
    world.cloud.capacity = dict.fromkeys([kind.name for kind in world.cloud.types], 0)
    error = await assert_fails(world, CapacityError, count=2)
    assert "c6i.large: capacity for 0 of 2" in error.message


async def test_partial_capacity_is_terminated_and_reported(world: PoolWorld) -> None:
    world.cloud.capacity = dict.fromkeys([kind.name for kind in world.cloud.types], 0) | {"m6i.large": 2}
    await world.warm(1)
    error = await assert_fails(world, CapacityError, count=4)
    assert "1 of 3" in error.message
    assert "m6i.large: capacity for 1 of 3" in error.message
    assert "c6i.large" in error.message
    assert len(world.in_state(State.TERMINATING)) == 1
    # The claimed instance returns to the pool.
    await world.pass_time(15)
    assert len(world.in_state(State.IDLE)) == 1


async def test_failed_new_machine_fails_the_provision(world: PoolWorld) -> None:
    await world.warm(1)
    world.behaviour.registration["i-00000000000000003"] = StepResult(ok=False, detail="no network")
    error = await assert_fails(world, Unavailable, count=3)
    assert "no network" in error.message
    assert "i-00000000000000003" in error.message


async def test_machine_from_the_pool_that_fails_late_is_replaced_by_another_launch(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    world.behaviour.registration[warm] = StepResult(ok=False, detail="no network")
    result = await world.provision("7", count=2)
    ids = {item.instance.instance_id for item in result.instances}
    assert (len(ids), warm in ids, result.calls["compute"]["launch"]) == (2, False, 2)


async def test_failed_pre_runner_script_fails_the_provision(world: PoolWorld) -> None:
    world.behaviour.script = StepResult(ok=False, detail="line 3: no such package")
    error = await assert_fails(world, UserError, count=2)
    assert isinstance(error, UserError)
    assert error.field == "pre-runner-script"
    assert "no such package" in error.message


async def test_machine_that_never_boots_times_out(world: PoolWorld) -> None:
    world.behaviour.without_agent.add("i-00000000000000001")
    began = world.loop.time()
    await assert_fails(world, TimedOut, count=1)
    assert world.loop.time() - began < world.lifetimes.provision_timeout_s


async def test_token_that_expires_early_is_rejected_before_any_claim(world: PoolWorld) -> None:
    await world.warm(2)
    config = world.database.config
    assert config is not None
    left = config.tokens_for(SCOPE).registration.expires_at - world.clock.now()
    # Without sweeps, so that the token is not renewed.
    await world.pass_time(left.total_seconds() - 50, sweeps=False)
    error = await assert_fails(world, UserError, count=2)
    assert "registration token" in error.message
    assert not world.database.provisions or all(item.run_id != "1" for item in world.database.provisions.values())


async def test_credential_of_the_process_replaces_the_pool_token(world: PoolWorld) -> None:
    result = await world.provision(process=world.process(credentialed=True))
    assert result.calls["github"] == {"POST registration-token": 1}


async def test_unknown_class_and_scope_are_rejected_first(world: PoolWorld) -> None:
    for changed in ({"resource_class": "giant"}, {"scope": "octo/other"}):
        await assert_fails(world, UserError, **changed)
    assert not world.database.provisions


async def test_provision_requires_a_configuration() -> None:
    world = PoolWorld()
    with pytest.raises(UserError, match="no configuration"):
        await world.provision()


async def test_max_instances_counts_live_instances(world: PoolWorld) -> None:
    await world.configure(max_instances=4)
    await world.provision("1", count=3)
    error = await assert_fails(world, CapacityError, "2", count=2)
    assert "max-instances is 4" in error.message
    await assert_fails(world, CapacityError, "3", count=5)
    await world.provision("4", count=1)


async def test_provision_may_need_all_instances_of_the_limit(world: PoolWorld) -> None:
    await world.configure(max_instances=2)
    assert (await world.provision(count=2)).created == 2


async def test_max_instances_holds_for_concurrent_provisions(world: PoolWorld) -> None:
    await world.configure(max_instances=4)
    outcomes = await asyncio.gather(*(world.provision(str(run), count=2) for run in range(4)), return_exceptions=True)
    assert all(isinstance(item, ProvisionResult | CapacityError) for item in outcomes)
    assert sum(isinstance(item, ProvisionResult) for item in outcomes) <= 2
    assert len(world.in_state(State.RUNNING)) <= 4


async def test_no_claim_after_the_deadline(world: PoolWorld) -> None:
    """An instance claimed after the deadline would only be given back."""
    ids = await world.warm(6)
    world.behaviour.configure_s = 50.0
    await assert_fails(world, RemudaError, count=1, timeout_s=10.0)
    claimed = [key for key in ids if world.record(key).epoch > 1]
    assert len(claimed) == 1


async def test_no_launch_after_the_deadline(world: PoolWorld) -> None:
    """A machine launched after the deadline would only be terminated."""
    await world.warm(1)
    world.behaviour.configure_s = 50.0
    await assert_fails(world, RemudaError, count=1, timeout_s=10.0)
    assert len(world.cloud.machines) == 1


async def test_no_launch_if_the_deadline_passes_while_instances_are_counted(world: PoolWorld) -> None:
    await assert_fails(world, RemudaError, count=1, timeout_s=10.0, process=world.process(slow_count(50.0)))
    assert not world.cloud.machines


async def test_no_launch_if_the_clock_is_set_forward_past_the_deadline(world: PoolWorld) -> None:
    process = world.process(slow_count(1.0))
    process = replace(process, clock=SteppedClock(step_s=3_600.0, at=0.5))
    await assert_fails(world, RemudaError, count=1, timeout_s=10.0, process=process)
    assert not world.cloud.machines
    world.violations.clear()  # The judge knows no clock that is set.


def slow_count(seconds: float) -> Hook:
    """A process that counts live instances with a delay."""

    async def hook(name: str, call: Call) -> Any:
        if name == "store.count_live":
            await asyncio.sleep(seconds)
        return await call()

    return hook


class SteppedClock(VirtualClock):
    """A clock whose wall time is set forward."""

    def __init__(self, *, step_s: float, at: float) -> None:
        super().__init__()
        self._step = timedelta(seconds=step_s)
        self._at = at

    def now(self) -> datetime:
        return super().now() + (self._step if self.monotonic() >= self._at else timedelta())


async def test_release_stops_a_provision_in_progress(world: PoolWorld) -> None:
    world.behaviour.boot_s = 20.0
    provisioning = asyncio.create_task(world.provision(count=2))
    await asyncio.sleep(5)
    released = await world.release()
    assert {outcome.status.value for outcome in released.outcomes} == {"retired"}
    with pytest.raises((Conflict, Unavailable)):
        await provisioning
    world.check_holds_nothing("1")


async def test_release_just_before_the_commit_wins(world: PoolWorld) -> None:
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


async def test_rollback_returns_claimed_instances_to_the_pool(world: PoolWorld) -> None:
    ids = await world.warm(2)
    world.cloud.capacity = dict.fromkeys([kind.name for kind in world.cloud.types], 0)
    await assert_fails(world, CapacityError, count=3)
    assert world.in_state(State.RELEASING) == ids
    await world.pass_time(15)
    assert world.in_state(State.IDLE) == ids


async def test_rollback_uses_the_pool_token_if_github_is_down(world: PoolWorld) -> None:
    """A provision with a GitHub credential mints a removal token; the pool's token is the fallback."""
    ids = await world.warm(1)
    world.cloud.capacity = dict.fromkeys([kind.name for kind in world.cloud.types], 0) | {"c6i.large": 2}
    hook = failing("github.removal_token", Unavailable("GitHub is down"))
    process = world.process(hook, credentialed=True)
    with pytest.raises(CapacityError):
        await world.provision(count=4, process=process)
    world.check_holds_nothing("1")
    await world.pass_time(15)
    assert world.in_state(State.IDLE) == ids


async def test_rollback_repeats_a_lost_write_of_the_provision(world: PoolWorld) -> None:
    world.cloud.capacity = dict.fromkeys([kind.name for kind in world.cloud.types], 0)
    writes = 0

    async def hook(name: str, call: Call) -> Any:
        nonlocal writes
        if name == "store.replace_provision":
            writes += 1
            if writes == 1:
                raise Unavailable("the store did not answer")
        return await call()

    with pytest.raises(CapacityError):
        await world.provision(process=world.process(hook))
    assert [item.status for item in world.database.provisions.values()] == [ProvisionStatus.RELEASED]


async def test_rollback_repeats_a_lost_write_of_a_tombstone(world: PoolWorld) -> None:
    """One of two machines was launched, and has no record yet."""
    world.cloud.capacity = dict.fromkeys([kind.name for kind in world.cloud.types], 0) | {"m6i.large": 1}
    writes = 0

    async def hook(name: str, call: Call) -> Any:
        nonlocal writes
        if name == "store.apply":
            writes += 1
            if writes == 1:
                raise Unavailable("the store did not answer")
        return await call()

    with pytest.raises(CapacityError):
        await world.provision(count=2, process=world.process(hook))
    assert len(world.in_state(State.TERMINATING)) == 1


async def test_cancellation_during_a_rollback_does_not_end_it(world: PoolWorld) -> None:
    await world.warm(1)
    world.cloud.capacity = dict.fromkeys([kind.name for kind in world.cloud.types], 0)
    rolls_back = asyncio.Event()

    async def hook(name: str, call: Call) -> Any:
        if name == "github.removal_token":
            rolls_back.set()
            await asyncio.sleep(2)
        return await call()

    provisioning = asyncio.create_task(world.provision(count=2, process=world.process(hook, credentialed=True)))
    await rolls_back.wait()
    provisioning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await provisioning
    world.check_holds_nothing("1")
    (failed,) = (item for item in world.database.provisions.values() if item.run_id == "1")
    assert failed.status is ProvisionStatus.RELEASED


async def test_run_id_can_be_provisioned_again(world: PoolWorld) -> None:
    await world.provision(count=1, attempt=1)
    await world.release(attempt=1)
    again = await world.provision(count=1, attempt=2)
    assert again.reused == 1
    late = await world.release(attempt=1)
    assert [outcome.status.value for outcome in late.outcomes] == ["skipped"]
    assert world.in_state(State.RUNNING) == [again.instances[0].instance.instance_id]


async def test_request_overrides_pool_times(world: PoolWorld) -> None:
    result = await world.provision(max_runtime_s=1_000.0, timeout_s=100.0)
    threshold = result.instances[0].instance.threshold
    assert threshold - world.clock.now() == timedelta(seconds=1_000)
    await world.release()


@pytest.mark.parametrize(("limit_s", "is_limited"), [(50.0, True), (60.0, False)])
async def test_caller_limits_the_time_of_a_provision(world: PoolWorld, limit_s: float, *, is_limited: bool) -> None:
    process, started = world.process(), world.clock.now()
    world.behaviour.boot_s = 1_000.0
    with pytest.raises(TimedOut):
        await world.provision(max_timeout_s=limit_s, process=process)
    assert world.clock.now() - started <= timedelta(seconds=limit_s)
    assert isinstance(process.event_log, EventRecorder)
    assert process.event_log.count("limit") == is_limited


class OnDemandFallback(MemoryCompute):
    """Launches on-demand machines instead of spot."""

    async def launch(self, request: LaunchRequest) -> LaunchResult:
        result = await super().launch(request)
        instances = tuple(replace(each, usage_class=UsageClass.ON_DEMAND) for each in result.instances)
        return LaunchResult(instances=instances, errors=("subnet-1 c6i.large (spot): no capacity",))


async def test_on_demand_fallback_is_recorded_and_pooled_as_on_demand(world: PoolWorld) -> None:
    context = world.process()
    context = replace(context, compute=OnDemandFallback(cloud=world.cloud, pool=POOL, calls=context.calls))
    made = await world.provision("1", process=context, usage_class=UsageClass.SPOT)
    assert [item.instance.usage_class for item in made.instances] == [UsageClass.ON_DEMAND]
    assert isinstance(context.event_log, EventRecorder)
    assert context.event_log.count("launch-refused") == 1, "the fallback is logged"
    await world.release("1")
    (pool_message,) = [item.message for item in world.queues.named("large").messages]
    assert pool_message is not None
    assert pool_message.usage_class is UsageClass.ON_DEMAND
    # It matches requests for on-demand, not for spot.
    assert (await world.provision("2", usage_class=UsageClass.SPOT)).reused == 0
    assert (await world.provision("3")).reused == 1


# Outcome on the record: bounded, and present whether the provision succeeded or failed --------------------------------


def provision_of(world: PoolWorld, run_id: str = "1") -> Provision:
    (found,) = [item for item in world.database.provisions.values() if item.run_id == run_id]
    return found


def outcome_of(world: PoolWorld, run_id: str = "1") -> ProvisionOutcome:
    outcome = provision_of(world, run_id).outcome
    assert outcome is not None
    return outcome


async def test_outcome_names_the_source_of_each_runner(world: PoolWorld) -> None:
    warm = await world.warm(2)
    result = await world.provision(count=3)
    outcome = outcome_of(world)
    assert (outcome.reused, outcome.created, outcome.kind, outcome.error) == (2, 1, "mixed", "")
    assert {item.instance_id for item in outcome.acquired if item.source is RunnerSource.POOL} == set(warm)
    assert [(item.count, item.launched) for item in outcome.launches] == [(1, 1)]
    assert list(outcome.phases) == ["intent", "instances", "commit"]
    assert max(item.seconds for item in outcome.acquired) <= outcome.seconds <= result.seconds
    assert provision_of(world).request_summary == "on-demand, trusted, for octo/repo, types *"
    assert provision_of(world).repository == "octo/repo"


async def test_outcome_names_rejected_messages_with_reasons(world: PoolWorld) -> None:
    await world.process().pool.send(
        [message(7, usage_class=UsageClass.SPOT), message(8, usage_class=UsageClass.ON_DEMAND)]
    )
    await world.provision()
    outcome = outcome_of(world)
    assert {item.kind: (item.instance_id, item.why) for item in outcome.rejections} == {
        "mismatch": (instance_id(7), "spot, not on-demand"),
        "claim-lost": (instance_id(8), "stale pool message: the instance has no record"),
    }
    assert outcome.rejected == {"mismatch": 1, "claim-lost": 1}


async def test_failed_provision_has_an_outcome(world: PoolWorld) -> None:
    world.cloud.capacity = {"c6i.large": 1}
    with pytest.raises(CapacityError) as failure:
        await world.provision(count=2, patterns=TypePatterns(("c6i.large",)))
    outcome = outcome_of(world)
    assert (outcome.kind, outcome.error) == ("failed", failure.value.describe(MAX_ERROR))
    assert [(item.count, item.launched) for item in outcome.launches] == [(2, 1)]


async def test_release_keeps_the_outcome(world: PoolWorld) -> None:
    await world.provision()
    before = outcome_of(world)
    await world.release()
    assert provision_of(world).status is ProvisionStatus.RELEASED
    assert outcome_of(world) == before


async def test_provision_released_while_in_progress_has_an_outcome(world: PoolWorld) -> None:
    world.behaviour.boot_s = 30.0
    provisioning = asyncio.create_task(world.provision())
    await asyncio.sleep(5)
    assert world.in_state(State.CREATED)
    await world.release()
    with pytest.raises(RemudaError) as failure:
        await provisioning
    assert isinstance(failure.value, Conflict)
    assert outcome_of(world).error == failure.value.message


async def test_outcome_is_bounded(world: PoolWorld) -> None:
    recorder = OutcomeRecorder(VirtualClock())
    for number in range(2 * MAX_ACQUIRED):
        recorder.acquire(instance_id(number), RunnerSource.POOL)
        recorder.reject(RejectionKind.CLAIM_LOST, "x" * 1_000, instance_id(number))
        recorder.launch(1, 0, ("y" * 1_000,) * 50)
    outcome = recorder.outcome(error="z" * 1_000)
    assert (len(outcome.acquired), len(outcome.rejections), len(outcome.launches)) == (
        MAX_ACQUIRED,
        MAX_REJECTIONS,
        MAX_LAUNCHES,
    )
    assert (outcome.reused, outcome.rejected["claim-lost"]) == (2 * MAX_ACQUIRED, 2 * MAX_ACQUIRED)
    assert len(outcome.error) == MAX_ERROR
    assert {len(outcome.rejections[0].why), len(outcome.launches[0].errors[0])} == {MAX_REASON}
    assert len(outcome.launches[0].errors) == MAX_LAUNCHES


async def test_second_provision_of_a_run_is_refused_unless_it_adds_runners(world: PoolWorld) -> None:
    await world.provision("7", count=2)
    with pytest.raises(UserError, match=r"run 7 has 2 runners of class large already \(p-") as refused:
        await world.provision("7")
    assert (refused.value.exit_code, "--add" in refused.value.fix) == (2, True)
    assert len(world.database.provisions) == 1, "refused before anything is recorded"
    assert len((await world.provision("7", add=True)).instances) == 1
    # Another class, another label and the next attempt are different requests.
    await world.provision("7", resource_class="xlarge")
    await world.provision("7-tests")
    await world.provision("7", attempt=2)
    await world.release("7", attempt=2)
    await world.provision("7", attempt=2)


async def test_provisions_that_start_at_the_same_moment_get_runners_once(world: PoolWorld) -> None:
    """All have read that the run has no provision before the first records its intent."""
    all_ready = asyncio.Barrier(3)

    async def hook(name: str, call: Call) -> Any:
        if name == "store.put_provision":
            await all_ready.wait()
        return await call()

    results = await asyncio.gather(
        *(world.provision("7", count=2, process=world.process(hook)) for _ in range(3)), return_exceptions=True
    )
    (provisioned,) = (item for item in results if isinstance(item, ProvisionResult))
    refused = [item for item in results if isinstance(item, UserError)]
    text = f"run 7 is being provisioned with 2 runners of class large ({provisioned.provision_id}, started 0 s ago)"
    assert [(item.message, "--add" in item.fix) for item in refused] == [(text, True)] * 2
    assert [item.status for item in world.database.provisions.values()] == [ProvisionStatus.COMMITTED]
    assert len(world.cloud.machines) == 2


async def test_failed_intent_leaves_the_provision_of_another_process_alone(world: PoolWorld) -> None:
    """The writes of the second process do not arrive, so it does not know whose record has the id."""

    async def hook(name: str, call: Call) -> Any:
        if name == "store.put_provision":
            if not world.database.provisions:
                rivals.append(asyncio.create_task(world.provision("7")))
                await asyncio.sleep(0.1)
            raise Unavailable("no answer")
        return await call()

    rivals: list[asyncio.Task[ProvisionResult]] = []
    with pytest.raises(Unavailable):
        await world.provision("7", process=world.process(hook))
    assert (await rivals[0]).created == 1
    assert [item.status for item in world.database.provisions.values()] == [ProvisionStatus.COMMITTED]


async def test_provision_may_be_repeated_after_a_crash_or_a_loss(world: PoolWorld) -> None:
    cut = Cut(12, CutKind.CRASH_BEFORE)
    await cut.run(world.provision("7", process=world.process(cut)))
    assert {item.status for item in world.database.provisions.values()} == {ProvisionStatus.OPEN}
    await asyncio.sleep(3)
    with pytest.raises(UserError, match=r"being provisioned with 1 runner of class large \(p-\w+, started 6 s ago\)"):
        await world.provision("7")
    await world.release("7")
    instance = await world.one("7")
    await terminate(world.process(), [instance], reason="enough", dry_run=False)
    await world.provision("7")
    await cut.discard()
    assert len(world.database.provisions) == 3, "each has its own record"


async def test_provision_may_be_repeated_when_the_time_of_a_crashed_one_is_up(world: PoolWorld) -> None:
    cut = Cut(12, CutKind.CRASH_BEFORE)
    await cut.run(world.provision("7", process=world.process(cut)))
    await asyncio.sleep(world.lifetimes.provision_timeout_s)
    await world.provision("7")
    await cut.discard()


async def test_run_that_expired_may_be_provisioned_again(world: PoolWorld) -> None:
    await world.provision("7")
    await asyncio.sleep(world.lifetimes.max_runtime_s + 1)
    await world.provision("7")


# Instances that the cloud ends before they have registered ------------------------------------------------------------

KEY_UNUSABLE = "Client.InternalError: Client error on launch"


async def test_an_early_end_fails_the_provision_at_once_with_the_reason(world: PoolWorld) -> None:
    """CreateFleet returns the ids, and the instances end seconds later: EC2 cannot use the key of their disks."""
    world.behaviour.boot_s = 1_000.0
    process, started = world.process(), world.clock.now()
    provisioning = asyncio.create_task(assert_fails(world, Unavailable, count=3, process=process))
    await asyncio.sleep(5)
    lost, *others = sorted(world.cloud.machines)
    world.cloud.end(lost, KEY_UNUSABLE)
    error = await provisioning

    assert world.clock.now() - started < timedelta(seconds=30)
    assert f"new instance {lost} ended before it had registered: the instance is" in error.message
    assert error.message.endswith(KEY_UNUSABLE)
    assert KEY_UNUSABLE in outcome_of(world).error
    record = world.database.instances[lost]
    assert record.state is State.TERMINATING
    assert record.retire_text == f"gone: {KEY_UNUSABLE}"
    assert {world.database.instances[key].retire_text for key in others} == {"released"}
    assert process.calls.by_service()["compute"]["describe"] == 1, "one call for all"


async def test_a_failed_question_does_not_end_the_provision(world: PoolWorld) -> None:
    world.behaviour.boot_s = 25.0
    process = world.process(failing("compute.describe", Unavailable("EC2 does not answer")))
    assert (await world.provision(count=2, process=process)).created == 2
