"""Every use case cut at every one of its port calls: cancelled or killed, the call made or not.

After that sweeps and time pass, and nothing may be held, stuck or left (S10, L1, L2, L5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from remuda.domain.errors import RemudaError
from remuda.domain.instance import ASSIGNED
from remuda.domain.provision import ProvisionStatus
from tests.support.virtual_time import run_virtual
from tests.support.world import PoolWorld
from tests.unit.controlplane.cuts import AgentCut, Cut, How

#: More than any of them makes; the enumeration ends where a use case ends before the cut.
MOST_CALLS = 400
#: Two assignments of an agent; what follows is idleness.
MOST_AGENT_CALLS = 90

Scenario = Callable[[PoolWorld, Cut], Awaitable[None]]


def cut_everywhere(how: How, scenario: Scenario, *, least: int) -> None:
    for at in range(1, MOST_CALLS):
        try:
            calls = run_virtual(_cut_once(at, how, scenario))
        except BaseException as error:
            error.add_note(f"cut at call {at}: {how.value}")
            raise
        if len(calls) < at:
            assert at > least, f"only {at} calls were cut: {calls}"
            return
    pytest.fail("the use case makes more calls than that")


async def _cut_once(at: int, how: How, scenario: Scenario) -> list[str]:
    world = PoolWorld()
    await world.configure()
    cut = Cut(at, how)
    await scenario(world, cut)
    world.check()
    await world.end()
    await cut.bury()
    return cut.calls


async def provision_scenario(world: PoolWorld, cut: Cut) -> None:
    """Two warm, one cold."""
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


@pytest.mark.parametrize("how", How)
def test_a_provision_is_cut(how: How) -> None:
    cut_everywhere(how, provision_scenario, least=20)


async def ephemeral_scenario(world: PoolWorld, cut: Cut) -> None:
    """Whatever is cut, no registration outlives its machine (the world's end looks)."""
    process = world.process(cut, credentialed=True)
    ended = await cut.run(world.provision("cut", count=2, ephemeral=True, process=process))
    if ended is not None and not cut.dead.is_set():
        assert isinstance(ended, RemudaError | asyncio.CancelledError), repr(ended)
        world.check_holds_nothing("cut")


@pytest.mark.parametrize("how", How)
def test_an_ephemeral_provision_is_cut(how: How) -> None:
    cut_everywhere(how, ephemeral_scenario, least=12)


async def ephemeral_release_scenario(world: PoolWorld, cut: Cut) -> None:
    """One has served its job, one has not."""
    await world.provision("cut", count=2, ephemeral=True, process=world.process(credentialed=True))
    world.github.queue(run_id="cut", labels=["cut"], seconds=2)
    await asyncio.sleep(4)
    await cut.run(world.release("cut", process=world.process(cut, credentialed=True)))


@pytest.mark.parametrize("how", How)
def test_the_release_of_ephemeral_ones_is_cut(how: How) -> None:
    cut_everywhere(how, ephemeral_release_scenario, least=10)


async def release_scenario(world: PoolWorld, cut: Cut) -> None:
    await world.provision("cut", count=2)
    world.github.queue(run_id="cut", labels=["cut"], seconds=8)
    await asyncio.sleep(1)
    await cut.run(world.release("cut", process=world.process(cut)))
    again = await world.release("cut")
    assert not again.errors
    assert not [item for item in world.database.instances.values() if item.state in ASSIGNED]


@pytest.mark.parametrize("how", How)
def test_a_release_is_cut(how: How) -> None:
    cut_everywhere(how, release_scenario, least=15)


async def refresh_scenario(world: PoolWorld, cut: Cut) -> None:
    """Something for each sweep to do: expired, idle unannounced, releasing, unrecorded, ghosts, open provisions."""
    await world.warm(1)
    (kept,) = (await world.provision("kept")).instances
    lost = Cut(6, How.CRASH_AFTER)
    await lost.run(world.provision("lost", count=2, process=world.process(lost)))
    (gone,) = (await world.provision("gone")).instances
    world.cloud.end(gone.instance.instance_id, "power loss")
    world.github.add("octo/repo", "remuda-test-1-i-0000000000000beef")
    await asyncio.sleep(70)
    world.github.queue(run_id="kept", labels=["kept"], seconds=20)
    await asyncio.sleep(1)
    await cut.run(world.sweep(cut))
    assert world.states()[kept.instance.instance_id] in ASSIGNED
    await lost.bury()


@pytest.mark.parametrize("how", How)
def test_a_refresh_is_cut(how: How) -> None:
    cut_everywhere(how, refresh_scenario, least=15)


async def _agent_cut_once(at: int, *, applied: bool) -> list[str]:
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
        # A listener outlives its agent, and so does its job.
        assert job.conclusion == "success"
    world.check()
    await world.end()
    return cut.calls


@pytest.mark.parametrize("applied", [False, True])
def test_an_agent_is_killed_and_its_machine_starts_another(*, applied: bool) -> None:
    for at in range(1, MOST_CALLS):
        try:
            calls = run_virtual(_agent_cut_once(at, applied=applied))
        except BaseException as error:
            error.add_note(f"killed at call {at} of the agents")
            raise
        if len(calls) < at or at == MOST_AGENT_CALLS:
            return
