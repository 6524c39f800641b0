"""Sweeps of machines and stale registrations: lists of EC2 and GitHub may lag behind the records."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from remuda.controlplane.refresh import refresh
from remuda.controlplane.release import ReleaseStatus
from remuda.domain.errors import Unavailable, Unreadable
from remuda.domain.instance import Instance, State
from remuda.domain.resources import DEFAULT_CLASSES, RunnerRequest, Tier, TypePatterns, UsageClass
from remuda.domain.sweep_record import AnomalyKind
from remuda.ports.compute import POOL_TAG, LaunchRequest, MachineState
from simulation.invariants import SCOPE
from simulation.memory.store import MemoryInstanceStore
from tests.support.records import birth
from tests.support.records import instance as make_record
from tests.support.virtual_time import Call, failing
from tests.support.world import LIFETIMES, PoolWorld, number_of


async def launch_unrecorded(world: PoolWorld) -> str:
    """Launch a machine of this pool without a record."""
    world.ignore("S8")
    request = RunnerRequest(
        resource_class=DEFAULT_CLASSES[0],
        usage_class=UsageClass.ON_DEMAND,
        patterns=TypePatterns(("*",)),
        tier=Tier.TRUSTED,
    )
    launch = LaunchRequest(
        provision_id="p-lost",
        client_token=f"t{len(world.cloud.machines)}",
        count=1,
        request=request,
        scope="octo/repo",
        first_life_s=600.0,
        margin_s=LIFETIMES.margin_s,
    )
    result = await world.process().compute.launch(launch)
    return result.instances[0].instance_id


async def test_unrecorded_machine_is_terminated_after_the_grace_period(world: PoolWorld) -> None:
    lost = await launch_unrecorded(world)
    await asyncio.sleep(world.lifetimes.unrecorded_grace_s - 1)
    await world.sweep()
    assert lost not in world.database.instances
    assert world.cloud.is_alive(lost)
    await asyncio.sleep(2)
    result = await world.sweep()
    assert list(result.retired) == [lost]
    assert not world.cloud.is_alive(lost)
    assert world.record(lost).claim == "p-lost"
    await asyncio.sleep(2)
    assert (await world.sweep()).terminated == (lost,)


async def test_machine_of_another_pool_is_never_terminated(world: PoolWorld) -> None:
    world.ignore("S7", "S8")
    foreign = await launch_unrecorded(world)
    world.cloud.retag(foreign, lambda tags: {**tags, POOL_TAG: "other"})
    world.stop_agent(foreign)
    await world.pass_time(100)
    assert world.cloud.is_alive(foreign)
    # Not even if a record of this pool names it.
    await world.process().store.apply(birth(make_record(number_of(foreign), threshold=world.clock.now())))
    await asyncio.sleep(5)
    result = await world.sweep()
    assert any("could not be terminated" in error for error in result.errors)
    assert world.cloud.is_alive(foreign)
    world.cloud.retag(foreign, lambda tags: {**tags, POOL_TAG: "test"})


async def test_record_of_a_missing_machine_is_closed_by_the_second_sweep(world: PoolWorld) -> None:
    world.ignore("S7")
    record = make_record(
        0xFA, created_at=world.clock.now() - timedelta(hours=1), threshold=world.clock.now() + timedelta(hours=1)
    )
    await world.process().store.apply(birth(record))
    assert not (await world.sweep()).retired
    await asyncio.sleep(world.lifetimes.gone_after_s + world.lifetimes.margin_s - 1)
    assert not (await world.sweep()).retired
    await asyncio.sleep(2)
    result = await world.sweep()
    assert "no longer exists" in result.retired[record.instance_id]
    await world.sweep()
    assert world.record(record.instance_id).state is State.TERMINATED


async def test_lagging_list_closes_no_record(world: PoolWorld) -> None:
    """The machine is missing in every second list, never in two consecutive ones."""
    key = (await world.one(max_runtime_s=300.0)).instance_id
    hidden = False

    async def hook(name: str, call: Call) -> Any:
        answer = await call()
        return [] if hidden and name == "compute.list_pool" else answer

    for _ in range(6):
        hidden = not hidden
        await asyncio.sleep(world.lifetimes.gone_after_s)
        assert not (await world.sweep(hook)).retired
    assert world.record(key).state is State.RUNNING


async def test_failed_list_closes_no_record(world: PoolWorld) -> None:
    key = (await world.one(max_runtime_s=300.0)).instance_id
    for _ in range(4):
        await asyncio.sleep(world.lifetimes.gone_after_s)
        result = await world.sweep(failing("compute.list_pool", Unavailable("no list today")))
        assert (dict(result.retired), len(result.errors)) == ({}, 1)
    assert world.record(key).state is State.RUNNING


async def test_new_machine_is_not_missing(world: PoolWorld) -> None:
    """The list was read before the record was written, and lags."""
    key = (await world.one()).instance_id

    async def hook(name: str, call: Call) -> Any:
        answer = await call()
        return [] if name == "compute.list_pool" else answer

    await world.sweep(hook)
    await asyncio.sleep(world.lifetimes.gone_after_s - 4)
    assert not (await world.sweep(hook)).retired
    assert world.record(key).state is State.RUNNING


@pytest.mark.parametrize("state", [State.RUNNING, State.IDLE, State.RELEASING])
async def test_record_of_a_terminated_machine_is_closed_at_once(world: PoolWorld, state: State) -> None:
    key = (await world.one()).instance_id
    if state is State.IDLE:
        await world.release()
    elif state is State.RELEASING:
        world.stop_agent(key)
        await world.release()
    assert world.record(key).state is state
    world.cloud.end(key, "power loss")
    result = await world.sweep()
    assert key in result.retired
    await asyncio.sleep(3)
    await world.sweep()
    assert world.record(key).state is State.TERMINATED


async def test_record_is_terminated_only_after_its_machine(world: PoolWorld) -> None:
    world.cloud.shutting_down = timedelta(seconds=40)
    key = (await world.one()).instance_id
    await asyncio.sleep(1)
    world.stop_agent(key)
    await world.pass_time(world.lifetimes.max_runtime_s + 15)
    assert (world.record(key).state, world.cloud.state(key)) == (State.TERMINATING, MachineState.SHUTTING_DOWN)
    await world.pass_time(60, sweeps=False)
    await world.sweep()
    assert world.record(key).state is State.TERMINATED


async def test_running_machine_with_a_terminated_record_is_terminated(world: PoolWorld) -> None:
    lost = await launch_unrecorded(world)
    record = make_record(number_of(lost), state=State.TERMINATED, threshold=world.clock.now())
    await world.process().store.apply(birth(record))
    await world.sweep()
    assert not world.cloud.is_alive(lost)
    assert world.record(lost).state is State.TERMINATED


class WrongSearchStore(MemoryInstanceStore):
    """Searches return every record in a wrong state; reads by key are correct."""

    wrong_state = State.TERMINATING

    async def find(self, states: Collection[State], *, threshold_before: datetime | None = None) -> Sequence[Instance]:
        found = await super().find(states, threshold_before=threshold_before)
        return [replace(item, state=self.wrong_state) for item in found]


@pytest.mark.parametrize("says", [State.TERMINATING, State.TERMINATED])
async def test_no_machine_is_terminated_because_of_a_search_result(world: PoolWorld, says: State) -> None:
    key = (await world.one()).instance_id
    context = world.process(credentialed=True)
    store = WrongSearchStore(clock=world.clock, calls=context.calls, database=world.database)
    store.wrong_state = says
    await refresh(replace(context, store=store), None)
    assert world.cloud.is_alive(key)
    assert world.record(key).state is State.RUNNING


# Stale registrations -------------------------------------------------------------------------------------------------


def add_registration(world: PoolWorld, epoch: int, instance_id: str, *, pool: str = "test") -> str:
    name = f"remuda-{pool}-{epoch}-{instance_id}"
    world.github.add(SCOPE, name)
    return name


def names(world: PoolWorld) -> set[str]:
    return {runner.name for runner in world.github.runners.values()}


async def test_registration_without_a_record_is_removed_after_the_grace_period(world: PoolWorld) -> None:
    name = add_registration(world, 1, "i-0000000000000beef")
    await world.sweep()
    await asyncio.sleep(world.lifetimes.stale_registration_grace_s - 1)
    assert not (await world.sweep()).stale_registrations
    await asyncio.sleep(2)
    assert (await world.sweep()).stale_registrations == (name,)
    assert name not in names(world)


async def test_registration_without_a_record_stays_while_its_machine_exists(world: PoolWorld) -> None:
    """Just-in-time runners are registered before their record is written."""
    await world.configure(lifetimes=replace(world.lifetimes, stale_registration_grace_s=0.0, unrecorded_grace_s=500.0))
    machine = await launch_unrecorded(world)
    name = add_registration(world, 1, machine)
    for _ in range(3):
        await asyncio.sleep(world.lifetimes.missing_after_s)
        assert not (await world.sweep()).stale_registrations
    assert world.database.sweep.anomalies == ()
    await asyncio.sleep(500)
    assert list((result := await world.sweep()).retired) == [machine], "tombstone written, and its registration removed"
    assert result.stale_registrations == (name,)


async def test_without_a_machine_list_unrecorded_registrations_stay(world: PoolWorld) -> None:
    name = add_registration(world, 1, "i-0000000000000beef")
    hook = failing("compute.list_pool", Unavailable("EC2 is down"))
    for _ in range(3):
        await asyncio.sleep(world.lifetimes.registration_stale_after_s)
        assert not (await world.sweep(hook)).stale_registrations
    assert names(world) == {name}
    # A failed list does not reset the time when it was first seen.
    await world.sweep()
    await asyncio.sleep(world.lifetimes.registration_stale_after_s)
    assert not (await world.sweep(hook)).stale_registrations
    assert (await world.sweep()).stale_registrations == (name,)


async def test_paused_sweep_counts_as_one_sighting(world: PoolWorld) -> None:
    name = add_registration(world, 1, "i-0000000000000beef")

    async def hook(operation: str, call: Call) -> Any:
        if operation == "store.get_sweep_record":
            seen = await call()
            await asyncio.sleep(2 * world.lifetimes.registration_stale_after_s)
            return seen
        if operation == "store.troubled_reports":
            await asyncio.sleep(2 * world.lifetimes.registration_stale_after_s)
        return await call()

    assert not (await world.sweep(hook)).stale_registrations
    assert names(world) == {name}
    world.github.runners.clear()


async def test_registration_of_a_terminated_instance_is_removed(world: PoolWorld) -> None:
    world.ignore("S7")
    record = make_record(0xE, state=State.TERMINATED)
    await world.process().store.apply(birth(record))
    name = add_registration(world, 1, record.instance_id)
    assert (await world.sweep()).stale_registrations == (name,)


async def test_registration_of_an_earlier_epoch_is_removed(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    await world.provision()
    old = add_registration(world, 1, warm)
    assert (await world.sweep()).stale_registrations == (old,)
    assert names(world) == {f"remuda-test-2-{warm}"}


async def test_registration_of_an_idle_instance_is_removed(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    name = add_registration(world, 1, warm)
    assert (await world.sweep()).stale_registrations == (name,)


async def test_registration_of_the_current_epoch_stays(world: PoolWorld) -> None:
    """Runners are listed before records are read, so a record of this epoch owns its registration."""
    result = await world.provision(count=2)
    for _ in range(3):
        assert not (await world.sweep()).stale_registrations
    assert len(names(world)) == len(result.instances) == 2


async def test_busy_stale_registration_stays_until_its_job_ends(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    name = add_registration(world, 1, warm)
    runner = world.github.find(SCOPE, name)
    assert runner is not None
    runner.labels = ("odd",)
    world.github.connect(runner.runner_id, lambda _job: None)
    job = world.github.queue(run_id="odd", labels=["odd"])
    assert not (await world.sweep()).stale_registrations
    assert name in names(world)
    world.github.finish(job)
    assert (await world.sweep()).stale_registrations == (name,)


async def test_other_runners_are_never_removed(world: PoolWorld) -> None:
    others = {
        "build-box",
        "remuda-other-1-i-0000000000000beef",
        "remuda-test-x-i-0000000000000beef",
        "remuda-test-1-",
    }
    for name in others:
        world.github.add(SCOPE, name)
    await world.pass_time(3 * world.lifetimes.stale_registration_grace_s)
    assert names(world) == others


async def test_runners_of_a_pool_with_a_similar_name_stay(world: PoolWorld) -> None:
    """The prefix `remuda-test-2-` of pool `test-2` parses as epoch 2 of pool `test`."""
    name = add_registration(world, 5, "i-0000000000000beef", pool="test-2")
    await world.pass_time(3 * world.lifetimes.stale_registration_grace_s)
    assert names(world) == {name}
    world.github.runners.clear()


async def test_resolved_anomalies_are_dropped(world: PoolWorld) -> None:
    name = add_registration(world, 1, "i-0000000000000beef")
    await world.sweep()
    (anomaly,) = world.database.sweep.anomalies
    assert (anomaly.kind, anomaly.subject) == (AnomalyKind.STALE_REGISTRATION, name)
    world.github.runners.clear()
    await world.sweep()
    assert world.database.sweep.anomalies == ()


class CorruptedStore(MemoryInstanceStore):
    """A store in which some records cannot be parsed."""

    corrupted: frozenset[str] = frozenset()

    async def get_many(self, instance_ids: Collection[str]) -> Mapping[str, Instance]:
        found = await super().get_many(instance_ids)
        bad = {name: "Instance lacks epoch" for name in found if name in self.corrupted}
        if bad:
            good = {name: item for name, item in found.items() if name not in bad}
            raise Unreadable("the store", bad, records=good)
        return found

    async def find(self, states: Collection[State], *, threshold_before: datetime | None = None) -> Sequence[Instance]:
        found = await super().find(states, threshold_before=threshold_before)
        return [item for item in found if item.instance_id not in self.corrupted]


async def test_unreadable_record_is_reported_and_others_are_swept(world: PoolWorld) -> None:
    """The record exists, so its machine, registration and pool message stay."""
    corrupted = (await world.provision(count=2)).instances[0].instance.instance_id
    lost = await launch_unrecorded(world)
    await asyncio.sleep(world.lifetimes.unrecorded_grace_s + world.lifetimes.stale_registration_grace_s)
    context = world.process(credentialed=True)
    store = CorruptedStore(clock=world.clock, calls=context.calls, database=world.database)
    store.corrupted = frozenset({corrupted})
    registered = world.registrations(corrupted)
    for _ in range(2):
        result = await refresh(replace(context, store=store), None)
        assert len([error for error in result.errors if corrupted in error]) == 1
        assert not [error for error in result.errors if corrupted not in error]
        await asyncio.sleep(world.lifetimes.stale_registration_grace_s + 1)
    assert world.cloud.is_alive(corrupted)
    assert world.registrations(corrupted) == registered
    assert len(registered) == 1
    assert not world.cloud.is_alive(lost), "other machines are swept"


async def test_release_continues_with_readable_records(world: PoolWorld) -> None:
    corrupted, other = [item.instance.instance_id for item in (await world.provision(count=2)).instances]
    context = world.process()
    store = CorruptedStore(clock=world.clock, calls=context.calls, database=world.database)
    store.corrupted = frozenset({corrupted})
    done = await world.release(process=replace(context, store=store))
    assert [outcome.instance_id for outcome in done.of(ReleaseStatus.RELEASED)] == [other]
    (error,) = done.errors
    assert corrupted in error
