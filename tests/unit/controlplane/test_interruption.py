"""Each use case interrupted at each of its port calls: cancelled or killed, before or after the call.

Afterwards sweeps run and time passes; no instance may stay assigned, stuck or unrecorded (S10, L1, L2, L5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from remuda.domain.errors import RemudaError
from remuda.domain.instance import ASSIGNED
from remuda.domain.provision import ProvisionStatus
from tests.support.virtual_time import AgentCut, Cut, CutKind, run_virtual
from tests.support.world import PoolWorld

#: More than any use case makes. The enumeration ends when a use case ends before the interruption.
MAX_CALLS = 400
#: The calls of two assignments; later ones are those of an idle agent.
MAX_AGENT_CALLS = 90

Scenario = Callable[[PoolWorld, Cut], Awaitable[None]]


async def _interrupt_once(at: int, kind: CutKind, scenario: Scenario) -> list[str]:
    world = PoolWorld()
    await world.configure()
    cut = Cut(at, kind)
    await scenario(world, cut)
    world.check()
    await world.end()
    await cut.discard()
    return cut.calls


async def provision_scenario(world: PoolWorld, cut: Cut) -> None:
    """Two instances from the pool, one created."""
    await world.warm(2)
    ended = await cut.run(world.provision("cut", count=3, process=world.process(cut)))
    if cut.dead.is_set():
        return
    assert ended is None or isinstance(ended, RemudaError | asyncio.CancelledError), repr(ended)
    committed = [
        item
        for item in world.database.provisions.values()
        if item.run_id == "cut" and item.status is ProvisionStatus.COMMITTED
    ]
    if ended is None:
        assert committed
    else:
        assert not committed
        world.check_holds_nothing("cut")


async def ephemeral_scenario(world: PoolWorld, cut: Cut) -> None:
    """No registration may outlive its machine; the end of the world checks that."""
    process = world.process(cut, credentialed=True)
    ended = await cut.run(world.provision("cut", count=2, ephemeral=True, process=process))
    if ended is not None and not cut.dead.is_set():
        assert isinstance(ended, RemudaError | asyncio.CancelledError), repr(ended)
        world.check_holds_nothing("cut")


async def ephemeral_release_scenario(world: PoolWorld, cut: Cut) -> None:
    """One instance has run its job, the other has not."""
    await world.provision("cut", count=2, ephemeral=True, process=world.process(credentialed=True))
    world.github.queue(run_id="cut", labels=["cut"], seconds=2)
    await asyncio.sleep(4)
    await cut.run(world.release("cut", process=world.process(cut, credentialed=True)))


async def release_scenario(world: PoolWorld, cut: Cut) -> None:
    await world.provision("cut", count=2)
    world.github.queue(run_id="cut", labels=["cut"], seconds=8)
    await asyncio.sleep(1)
    await cut.run(world.release("cut", process=world.process(cut)))
    again = await world.release("cut")
    assert not again.errors
    assert not [item for item in world.database.instances.values() if item.state in ASSIGNED]


async def refresh_scenario(world: PoolWorld, cut: Cut) -> None:
    """Work for each sweep: expired, unpublished, releasing and unrecorded instances, and stale registrations."""
    await world.warm(1)
    (kept,) = (await world.provision("kept")).instances
    lost = Cut(6, CutKind.CRASH_AFTER)
    await lost.run(world.provision("lost", count=2, process=world.process(lost)))
    (gone,) = (await world.provision("gone")).instances
    world.cloud.end(gone.instance.instance_id, "power loss")
    world.github.add("octo/repo", "remuda-test-1-i-0000000000000beef")
    await asyncio.sleep(70)
    world.github.queue(run_id="kept", labels=["kept"], seconds=20)
    await asyncio.sleep(1)
    await cut.run(world.sweep(cut))
    assert world.states()[kept.instance.instance_id] in ASSIGNED
    await lost.discard()


#: Scenarios, and the number of calls that each makes at least.
SCENARIOS: dict[Scenario, int] = {
    provision_scenario: 20,
    ephemeral_scenario: 12,
    ephemeral_release_scenario: 10,
    release_scenario: 15,
    refresh_scenario: 15,
}


@pytest.mark.parametrize("kind", CutKind)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.removesuffix("_scenario"))
def test_use_case_interrupted_at_each_call(scenario: Scenario, kind: CutKind) -> None:
    for at in range(1, MAX_CALLS):
        try:
            calls = run_virtual(_interrupt_once(at, kind, scenario))
        except BaseException as error:
            error.add_note(f"interrupted at call {at}: {kind.value}")
            raise
        if len(calls) < at:
            assert at > SCENARIOS[scenario], f"only {at} calls were interrupted: {calls}"
            return
    pytest.fail("the use case makes more calls than MAX_CALLS")


async def _kill_agent_once(at: int, *, applied: bool) -> list[str]:
    world = PoolWorld()
    await world.configure()
    world.agent_hook = cut = AgentCut(at, applied=applied)
    for run_id in ("first", "second"):
        await world.provision(run_id, count=1)
        job = world.github.queue(run_id=run_id, labels=[run_id], seconds=3)
        async with asyncio.timeout(30):
            while not job.started:  # noqa: ASYNC110 - in virtual time
                await asyncio.sleep(0.1)
        await world.release(run_id)
        # The listener and its job survive the agent.
        assert job.conclusion == "success"
    world.check()
    await world.end()
    return cut.calls


@pytest.mark.parametrize("applied", [False, True])
def test_agent_killed_at_each_call(*, applied: bool) -> None:
    for at in range(1, MAX_CALLS):
        try:
            calls = run_virtual(_kill_agent_once(at, applied=applied))
        except BaseException as error:
            error.add_note(f"killed at call {at} of the agents")
            raise
        if len(calls) < at or at == MAX_AGENT_CALLS:
            return
