"""A release whose calls are held while others change the instance: its outcome agrees with the record.

GitHub does not answer the agent for longer than the release may take. What others do meanwhile may give it more time or
end the instance; what the release has read before is old then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from remuda.controlplane import operator
from remuda.controlplane.release import ReleaseOutcome, ReleaseStatus, release
from remuda.domain.instance import ABSORBING, Instance, State
from remuda.ports.machine import RemovalStatus
from tests.support.virtual_time import Call
from tests.support.world import LIFETIMES, PoolWorld

Meanwhile = Callable[[PoolWorld, str], Awaitable[object]]
#: Seconds in which GitHub does not answer the agent, more than the release may take.
SILENT_S = LIFETIMES.release_time_s + 20.0
KEPT_S = 4 * LIFETIMES.release_time_s


async def _chosen(world: PoolWorld, instance_id: str) -> Any:
    return await operator.select_instances(world.process(), operator.InstanceSelector(instance_ids=(instance_id,)))


async def quarantine(world: PoolWorld, instance_id: str) -> None:
    chosen = await _chosen(world, instance_id)
    await operator.quarantine(world.process(), chosen, for_s=KEPT_S, reason="look", dry_run=False)


async def drain(world: PoolWorld, instance_id: str) -> None:
    await operator.drain(world.process(), await _chosen(world, instance_id), reason="old", dry_run=False)


async def terminate(world: PoolWorld, instance_id: str) -> None:
    await operator.terminate(world.process(), await _chosen(world, instance_id), reason="now", dry_run=False)


async def sweep(world: PoolWorld, _instance_id: str) -> None:
    await world.sweep()


OTHERS: dict[str, Meanwhile] = {item.__name__: item for item in (quarantine, drain, terminate, sweep)}


def agrees(outcome: ReleaseOutcome, record: Instance, world: PoolWorld) -> bool:
    match outcome.status:
        case ReleaseStatus.RELEASED:
            return record.state is State.IDLE
        case ReleaseStatus.RETIRED:
            return record.state in ABSORBING
        case ReleaseStatus.EXPIRED:
            return record.threshold <= world.clock.now()
        case ReleaseStatus.SKIPPED:
            return record.state in ABSORBING


async def run_held(meanwhile: Meanwhile, *, at_call: int, applied: bool) -> list[str]:
    """Release a run, with the operation of others in one call. Return the names of the calls."""
    world = PoolWorld()
    await world.configure()
    calls: list[str] = []

    async def of_agent(name: str, call: Call) -> Any:
        if name == "runner.remove" and world.loop.time() < silent_until:
            await asyncio.sleep(1.0)
            return RemovalStatus.UNREACHABLE, "GitHub does not answer"
        return await call()

    world.agent_hook = lambda _machine: of_agent
    instance_id = (await world.one()).instance_id
    silent_until = world.loop.time() + SILENT_S

    async def hook(name: str, call: Call) -> Any:
        calls.append(name)
        if len(calls) != at_call:
            return await call()
        answer = await call() if applied else None
        await meanwhile(world, instance_id)
        return answer if applied else await call()

    result = await release(world.process(hook, credentialed=True), run_id="1", attempt=1)
    record = world.record(instance_id)
    (outcome,) = result.outcomes
    assert agrees(outcome, record, world), f"{outcome} at {world.clock.now()}, and the record is {record}"
    world.check()
    return calls


@pytest.mark.parametrize("name", OTHERS)
async def test_the_outcome_agrees_with_the_record_whatever_others_do_meanwhile(name: str) -> None:
    calls = await run_held(OTHERS[name], at_call=0, applied=False)
    assert len(calls) > 10
    for at_call in range(1, len(calls) + 1):
        for applied in (False, True):
            await run_held(OTHERS[name], at_call=at_call, applied=applied)
