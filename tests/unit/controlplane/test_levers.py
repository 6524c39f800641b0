"""The operator's levers: drain, quarantine, terminate; each with a reason, each pulled twice is pulled once."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from remuda.controlplane.operator import InstanceSelector, OperatorResult, choose, drain, quarantine, terminate
from remuda.controlplane.read.explain import explain
from remuda.domain.errors import UserError
from remuda.domain.instance import State
from remuda.domain.signals import Signal
from remuda.ports.compute import POOL_TAG
from remuda.ports.machine import StepResult
from tests.support.records import instance_id
from tests.support.world import PoolWorld

ALL = InstanceSelector(everything=True)


async def drained(world: PoolWorld, choice: InstanceSelector = ALL, *, dry_run: bool = False) -> OperatorResult:
    process = world.process()
    return await drain(process, await choose(process, choice), reason="old image", dry_run=dry_run)


async def held(world: PoolWorld, machine: str, for_s: float = 60.0, *, dry_run: bool = False) -> OperatorResult:
    process = world.process()
    chosen = await choose(process, InstanceSelector(instance_ids=(machine,)))
    return await quarantine(process, chosen, for_s=for_s, reason="looks odd", dry_run=dry_run)


async def ended(world: PoolWorld, choice: InstanceSelector = ALL, *, dry_run: bool = False) -> OperatorResult:
    process = world.process()
    return await terminate(process, await choose(process, choice), reason="enough", dry_run=dry_run)


# Drain


async def test_a_drained_idle_machine_is_not_claimed_and_goes(world: PoolWorld) -> None:
    (old,) = await world.warm(1)
    result = await drained(world)
    assert [item.instance_id for item in result.done] == [old]
    made = await world.provision("7")
    assert (made.reused, made.created) == (0, 1)
    await world.sweep()
    assert world.record(old).state in {State.TERMINATING, State.TERMINATED}
    story = await explain(world.process(), old)
    assert "drained: old image" in " ".join(line.why for line in story.events)


async def test_a_drained_machine_at_work_finishes_its_run_first(world: PoolWorld) -> None:
    await world.provision("7")
    (machine,) = world.in_state(State.RUNNING)
    job = world.github.queue(run_id="7", labels=["7"], seconds=20.0)
    await asyncio.sleep(1)
    (pulled,) = (await drained(world)).pulled
    assert (pulled.done, pulled.run_id) == (True, "7")
    await world.pass_time(30)
    assert job.conclusion == "success"
    assert world.record(machine).state is State.RUNNING
    await world.release("7")
    assert world.record(machine).state in {State.TERMINATING, State.TERMINATED}
    assert world.record(machine).retire_text == "drained: old image"


async def test_a_drain_by_class_leaves_the_others(world: PoolWorld) -> None:
    await world.warm(1)
    await world.provision("7", resource_class="xlarge")
    result = await drained(world, InstanceSelector(resource_class="xlarge"))
    assert [item.state for item in result.done] == [State.RUNNING]
    assert [world.record(name).retire_text for name in world.in_state(State.IDLE)] == [""]
    assert (await drained(world, InstanceSelector(resource_class="none-such"))).pulled == ()


async def test_a_drain_by_image_asks_the_cloud(world: PoolWorld) -> None:
    await world.warm(1)
    assert (await drained(world, InstanceSelector(ami="ami-1"))).pulled == ()


async def test_twice_is_once_and_a_dry_run_changes_nothing(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    before = world.record(machine)
    plan = await drained(world, dry_run=True)
    assert [item.instance_id for item in plan.done] == [machine]
    assert world.record(machine) == before
    await drained(world)
    after = world.record(machine)
    again = await drained(world)
    assert (again.done, world.record(machine)) == ((), after)
    assert "already" in again.pulled[0].why


# Quarantine


async def test_a_machine_in_quarantine_is_kept_and_not_claimed(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    result = await held(world, machine, for_s=150.0)
    assert [item.instance_id for item in result.done] == [machine]
    made = await world.provision("7")
    assert machine not in {item.instance.instance_id for item in made.instances}
    assert machine not in world.messages(), "nobody can claim it: its message would only come again and again"
    await world.release("7")
    # Idle machines of this pool last ninety seconds: this one lasts as long as it was told to.
    await world.pass_time(120)
    assert world.record(machine).state is State.IDLE
    assert machine in world.alive()
    story = await explain(world.process(), machine)
    assert "is in quarantine until" in story.next_steps[0]
    await world.pass_time(60)
    assert world.record(machine).state is State.TERMINATED
    assert world.record(machine).retire_text == "quarantined: looks odd"


async def test_one_at_work_goes_into_quarantine_after_its_run(world: PoolWorld) -> None:
    await world.provision("7")
    (machine,) = world.in_state(State.RUNNING)
    await held(world, machine, for_s=200.0)
    assert world.record(machine).threshold - world.clock.now() < timedelta(seconds=150)
    result = await world.release("7")
    assert not result.errors
    assert world.record(machine).state is State.IDLE
    assert not world.messages()
    assert (await world.provision("8")).created == 1
    await world.pass_time(150)
    assert world.record(machine).state is State.IDLE


async def test_one_that_failed_to_reset_can_be_looked_at(world: PoolWorld) -> None:
    await world.provision("7")
    (machine,) = world.in_state(State.RUNNING)
    world.behaviour.resets[machine] = StepResult(ok=False, detail="a file would not go")
    await held(world, machine, for_s=100.0)
    (outcome,) = (await world.release("7")).outcomes
    assert "kept: quarantined" in outcome.why
    await world.pass_time(80)
    assert world.record(machine).state is State.RELEASING
    report = world.database.reports[machine]
    assert report.signal is Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED
    await world.pass_time(60)
    assert world.record(machine).state is State.TERMINATED


async def test_a_quarantine_again_moves_its_limit(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    await held(world, machine, for_s=60.0)
    first = world.record(machine).threshold
    await held(world, machine, for_s=120.0)
    assert world.record(machine).threshold > first
    plan = await held(world, machine, for_s=999.0, dry_run=True)
    assert plan.done
    assert world.record(machine).threshold < first + timedelta(seconds=200)


async def test_a_drain_that_read_before_a_quarantine_leaves_it_one(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    before = world.record(machine)
    await held(world, machine, for_s=150.0)
    result = await drain(world.process(), [before], reason="to be renewed", dry_run=False)
    assert not result.done
    assert not result.errors
    assert "retired already (quarantined: looks odd)" in result.pulled[0].why
    assert world.record(machine).retire_text == "quarantined: looks odd"


# Terminate


async def test_terminate_ends_an_idle_machine_now(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    plan = await ended(world, dry_run=True)
    assert [item.instance_id for item in plan.done] == [machine]
    assert world.record(machine).state is State.IDLE
    result = await ended(world, InstanceSelector(instance_ids=(machine,)))
    assert (len(result.done), result.errors) == (1, ())
    assert world.record(machine).retire_text == "terminated by operator: enough"
    await world.pass_time(10)
    assert world.record(machine).state is State.TERMINATED
    assert (await ended(world, InstanceSelector(instance_ids=(machine,)))).done == ()


async def test_terminate_ends_a_run_where_a_person_says_so(world: PoolWorld) -> None:
    await world.provision("7")
    world.github.queue(run_id="7", labels=["7"], seconds=50.0)
    await asyncio.sleep(10)
    (pulled,) = (await ended(world)).pulled
    assert (pulled.done, pulled.busy, pulled.run_id) == (True, True, "7")
    await world.pass_time(10)
    assert not world.alive()
    assert world.in_state(State.TERMINATED)


async def test_only_what_carries_the_pools_tag_is_ended(world: PoolWorld) -> None:
    world.ignore("S7")
    (machine,) = await world.warm(1)
    tags = dict(world.cloud.machines[machine].tags)
    await world.process().compute.tag([machine], {POOL_TAG: "another"})
    result = await ended(world, InstanceSelector(instance_ids=(machine,)))
    assert machine in result.errors[0]
    assert world.cloud.is_alive(machine)
    await world.process().compute.tag([machine], tags)


# What is chosen


async def test_an_unknown_instance_is_refused_before_anything_is_done(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    with pytest.raises(UserError, match=instance_id(99)):
        await ended(world, InstanceSelector(instance_ids=(machine, instance_id(99))))
    assert world.record(machine).state is State.IDLE
