"""The outcome on a provision's record: bounded, and present whether it succeeded or failed."""

from __future__ import annotations

import asyncio

import pytest

from remuda.controlplane.provision.outcome import OutcomeRecorder
from remuda.controlplane.provision.registration import RegisteredInstance
from remuda.domain.errors import CapacityError, Conflict, RemudaError
from remuda.domain.instance import State
from remuda.domain.provision import (
    MAX_ACQUIRED,
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
from simulation.loop import VirtualClock
from tests.support.records import instance, instance_id, message
from tests.support.world import PoolWorld


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
    assert (outcome.kind, outcome.error) == ("failed", failure.value.message[:MAX_REASON])
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
    registered = RegisteredInstance(instance=instance(1), source=RunnerSource.POOL, report=None)
    for number in range(2 * MAX_ACQUIRED):
        recorder.acquire(registered)
        recorder.reject(RejectionKind.CLAIM_LOST, "x" * 1_000, instance_id(number))
        recorder.launch(1, 0, ("y" * 1_000,) * 50)
    outcome = recorder.outcome(error="z" * 1_000)
    assert (len(outcome.acquired), len(outcome.rejections), len(outcome.launches)) == (
        MAX_ACQUIRED,
        MAX_REJECTIONS,
        MAX_LAUNCHES,
    )
    assert (outcome.reused, outcome.rejected["claim-lost"]) == (2 * MAX_ACQUIRED, 2 * MAX_ACQUIRED)
    assert {len(outcome.error), len(outcome.rejections[0].why), len(outcome.launches[0].errors[0])} == {MAX_REASON}
    assert len(outcome.launches[0].errors) == MAX_LAUNCHES
