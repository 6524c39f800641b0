"""Operator actions: drain, quarantine and terminate, each with a reason and idempotent."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from remuda.controlplane.operator import (
    InstanceSelector,
    OperatorResult,
    drain,
    quarantine,
    select_instances,
    terminate,
)
from remuda.controlplane.read.explain import explain
from remuda.domain.errors import UserError
from remuda.domain.holder import subject_of
from remuda.domain.instance import State
from remuda.domain.signals import Signal
from remuda.ports.compute import POOL_TAG
from remuda.ports.machine import StepResult
from tests.support.records import instance_id
from tests.support.virtual_time import Call
from tests.support.world import PoolWorld

ALL = InstanceSelector(everything=True)


async def drain_all(world: PoolWorld, selector: InstanceSelector = ALL, *, dry_run: bool = False) -> OperatorResult:
    process = world.process()
    return await drain(process, await select_instances(process, selector), reason="old image", dry_run=dry_run)


async def quarantine_one(
    world: PoolWorld, machine: str, for_s: float = 60.0, *, dry_run: bool = False
) -> OperatorResult:
    process = world.process()
    chosen = await select_instances(process, InstanceSelector(instance_ids=(machine,)))
    return await quarantine(process, chosen, for_s=for_s, reason="looks odd", dry_run=dry_run)


async def terminate_all(world: PoolWorld, selector: InstanceSelector = ALL, *, dry_run: bool = False) -> OperatorResult:
    process = world.process()
    return await terminate(process, await select_instances(process, selector), reason="enough", dry_run=dry_run)


# Drain --------------------------------------------------------------------------------------------------------------


async def test_drained_idle_instance_is_not_claimed_and_ends(world: PoolWorld) -> None:
    (old,) = await world.warm(1)
    result = await drain_all(world)
    assert [item.instance_id for item in result.done] == [old]
    made = await world.provision("7")
    assert (made.reused, made.created) == (0, 1)
    await world.sweep()
    assert world.record(old).state in {State.TERMINATING, State.TERMINATED}
    explanation = await explain(world.process(), old)
    assert "drained: old image" in " ".join(line.why for line in explanation.events)


async def test_drained_running_instance_finishes_its_run(world: PoolWorld) -> None:
    machine = (await world.one("7")).instance_id
    job = world.github.queue(run_id="7", labels=["7"], seconds=20.0)
    await asyncio.sleep(1)
    (outcome,) = (await drain_all(world)).outcomes
    assert (outcome.done, subject_of(outcome.holder)) == (True, "7")
    await world.pass_time(30)
    assert job.conclusion == "success"
    assert world.record(machine).state is State.RUNNING
    await world.release("7")
    assert world.record(machine).state in {State.TERMINATING, State.TERMINATED}
    assert world.record(machine).retire_text == "drained: old image"


async def test_drain_by_class(world: PoolWorld) -> None:
    await world.warm(1)
    await world.provision("7", resource_class="xlarge")
    result = await drain_all(world, InstanceSelector(resource_class="xlarge"))
    assert [item.state for item in result.done] == [State.RUNNING]
    assert [world.record(name).retire_text for name in world.in_state(State.IDLE)] == [""]
    assert (await drain_all(world, InstanceSelector(resource_class="16xlarge"))).outcomes == ()
    with pytest.raises(UserError, match="'xxlarge', which is not a class of pool") as failure:
        await drain_all(world, InstanceSelector(resource_class="xxlarge"))
    assert (failure.value.field, failure.value.fix) == ("--resource-class", "did you mean xlarge?")


async def test_drain_by_image(world: PoolWorld) -> None:
    await world.warm(1)
    assert (await drain_all(world, InstanceSelector(ami="ami-1"))).outcomes == ()


async def test_class_and_image_are_both_required(world: PoolWorld) -> None:
    large, other = await world.warm(2)
    xlarge = await world.one("7", resource_class="xlarge")
    images = {large: "ami-1", other: "ami-2", xlarge.instance_id: "ami-1"}

    async def hook(name: str, call: Call) -> Any:
        answer = await call()
        return [replace(view, image=images[view.instance_id]) for view in answer] if "list_pool" in name else answer

    async def selected(**given: Any) -> list[str]:
        return [item.instance_id for item in await select_instances(world.process(hook), InstanceSelector(**given))]

    assert await selected(resource_class="large", ami="ami-1") == [large]
    assert await selected(ami="ami-1") == [large, xlarge.instance_id]
    assert await selected(resource_class="large") == [large, other]
    assert await selected(resource_class="xlarge", ami="ami-2") == []


async def test_drain_is_idempotent_and_dry_run_changes_nothing(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    before = world.record(machine)
    plan = await drain_all(world, dry_run=True)
    assert [item.instance_id for item in plan.done] == [machine]
    assert world.record(machine) == before
    await drain_all(world)
    after = world.record(machine)
    again = await drain_all(world)
    assert (again.done, world.record(machine)) == ((), after)
    assert "already" in again.outcomes[0].why


# Quarantine ---------------------------------------------------------------------------------------------------------


async def test_quarantined_instance_is_kept_and_not_claimed(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    result = await quarantine_one(world, machine, for_s=150.0)
    assert [item.instance_id for item in result.done] == [machine]
    made = await world.provision("7")
    assert machine not in {item.instance.instance_id for item in made.instances}
    assert machine not in world.messages(), "a quarantined instance cannot be claimed"
    await world.release("7")
    # Idle instances of this pool end after 90 seconds; this one ends with its quarantine.
    await world.pass_time(120)
    assert world.record(machine).state is State.IDLE
    assert machine in world.alive()
    explanation = await explain(world.process(), machine)
    assert "is in quarantine until" in explanation.next_steps[0]
    await world.pass_time(60)
    assert world.record(machine).state is State.TERMINATED
    assert world.record(machine).retire_text == "quarantined: looks odd"


async def test_running_instance_is_quarantined_after_its_run(world: PoolWorld) -> None:
    machine = (await world.one("7")).instance_id
    await quarantine_one(world, machine, for_s=200.0)
    assert world.record(machine).threshold - world.clock.now() < timedelta(seconds=150)
    result = await world.release("7")
    assert not result.errors
    assert world.record(machine).state is State.IDLE
    assert not world.messages()
    assert (await world.provision("8")).created == 1
    await world.pass_time(150)
    assert world.record(machine).state is State.IDLE


async def test_instance_with_a_failed_reset_can_be_quarantined(world: PoolWorld) -> None:
    machine = (await world.one("7")).instance_id
    world.behaviour.resets[machine] = StepResult(ok=False, detail="a file would not go")
    await quarantine_one(world, machine, for_s=100.0)
    (outcome,) = (await world.release("7")).outcomes
    assert "kept: quarantined" in outcome.why
    await world.pass_time(80)
    assert world.record(machine).state is State.RELEASING
    report = world.database.reports[machine]
    assert report.signal is Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED
    await world.pass_time(60)
    assert world.record(machine).state is State.TERMINATED


async def test_instance_with_a_failed_reset_gets_no_further_credential(world: PoolWorld) -> None:
    machine = (await world.one("7")).instance_id
    world.behaviour.resets[machine] = StepResult(ok=False, detail="a file would not go")
    await quarantine_one(world, machine, for_s=7_200.0)
    await world.release("7")
    await world.pass_time(4_000)
    kept = world.record(machine)
    assert kept.state is State.RELEASING
    assert kept.assignment is not None
    assert kept.assignment.credential is not None
    assert kept.assignment.credential.expires_at < world.clock.now()
    await terminate(world.process(), [kept], reason="seen enough", dry_run=False)


async def test_second_quarantine_moves_the_end(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    await quarantine_one(world, machine, for_s=60.0)
    first = world.record(machine).threshold
    await quarantine_one(world, machine, for_s=120.0)
    assert world.record(machine).threshold > first
    plan = await quarantine_one(world, machine, for_s=999.0, dry_run=True)
    assert plan.done
    assert world.record(machine).threshold < first + timedelta(seconds=200)


async def test_drain_concurrent_with_quarantine_keeps_the_quarantine(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    before = world.record(machine)
    await quarantine_one(world, machine, for_s=150.0)
    result = await drain(world.process(), [before], reason="to be renewed", dry_run=False)
    assert not result.done
    assert not result.errors
    assert "already retired (quarantined: looks odd)" in result.outcomes[0].why
    assert world.record(machine).retire_text == "quarantined: looks odd"


# Terminate ----------------------------------------------------------------------------------------------------------


async def test_terminate_ends_an_idle_instance(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    plan = await terminate_all(world, dry_run=True)
    assert [item.instance_id for item in plan.done] == [machine]
    assert world.record(machine).state is State.IDLE
    result = await terminate_all(world, InstanceSelector(instance_ids=(machine,)))
    assert (len(result.done), result.errors) == (1, ())
    assert world.record(machine).retire_text == "terminated by operator: enough"
    await world.pass_time(10)
    assert world.record(machine).state is State.TERMINATED
    assert (await terminate_all(world, InstanceSelector(instance_ids=(machine,)))).done == ()


async def test_terminate_ends_a_running_instance(world: PoolWorld) -> None:
    await world.provision("7")
    world.github.queue(run_id="7", labels=["7"], seconds=50.0)
    await asyncio.sleep(10)
    (outcome,) = (await terminate_all(world)).outcomes
    assert (outcome.done, outcome.busy, subject_of(outcome.holder)) == (True, True, "7")
    await world.pass_time(10)
    assert not world.alive()
    assert world.in_state(State.TERMINATED)


async def test_machine_without_the_pool_tag_is_not_terminated(world: PoolWorld) -> None:
    world.ignore("S7")
    (machine,) = await world.warm(1)
    tags = dict(world.cloud.machines[machine].tags)
    await world.process().compute.tag([machine], {POOL_TAG: "another"})
    result = await terminate_all(world, InstanceSelector(instance_ids=(machine,)))
    assert machine in result.errors[0]
    assert world.cloud.is_alive(machine)
    await world.process().compute.tag([machine], tags)


# Selection ----------------------------------------------------------------------------------------------------------


async def test_unknown_instance_is_rejected_before_any_change(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    with pytest.raises(UserError, match=instance_id(99)):
        await terminate_all(world, InstanceSelector(instance_ids=(machine, instance_id(99))))
    assert world.record(machine).state is State.IDLE


async def test_unique_beginning_of_an_id_is_enough(world: PoolWorld) -> None:
    first, second = sorted(await world.warm(2))
    shared = next(size for size in range(len(first)) if first[: size + 1] != second[: size + 1])
    process = world.process()
    chosen = await select_instances(process, InstanceSelector(instance_ids=(first[: shared + 1], first)))
    assert [item.instance_id for item in chosen] == [first]
    assert (await explain(process, first[: shared + 1])).subject == first
    with pytest.raises(UserError, match="not known"):
        await select_instances(process, InstanceSelector(instance_ids=(first[:shared],)))
