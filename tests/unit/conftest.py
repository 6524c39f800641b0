"""Virtual time for tests of the control plane and the agent's loop; the profile of properties.

Simulated hours take no real time, and results do not depend on the machine's speed. Properties are tried with the same
examples each time, however slow this computer is; `make fuzz` tries new ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from hypothesis import settings

from remuda.domain.runner_set import RunnerSet
from simulation.loop import new_loop
from tests.support.agents import AgentFixture
from tests.support.mutations import LONG, SHORT
from tests.support.set_world import DemandWorld, runner_set
from tests.support.world import PoolWorld

settings.register_profile("new", deadline=None)
settings.register_profile("short", settings.get_profile("ci"), max_examples=SHORT)
settings.load_profile("new" if LONG else "short")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], Any]]:
    if item.path.parent.name == "controlplane" or item.path.name.startswith("test_agent_"):
        return {"virtual": new_loop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture
async def world() -> AsyncIterator[PoolWorld]:
    """A configured pool without instances. At the end time passes until every instance must be terminated."""
    world = PoolWorld()
    await world.configure()
    yield world
    world.check()
    await world.end()


@pytest.fixture
def served_sets() -> tuple[RunnerSet, ...]:
    """The runner sets of `sets`: `large`. Modules that need others override it."""
    return (runner_set(),)


@pytest.fixture
async def sets(served_sets: tuple[RunnerSet, ...]) -> AsyncIterator[DemandWorld]:
    """A pool with runner sets. At the end the listeners stop, and every instance ends."""
    world = DemandWorld()
    await world.configure_sets(*served_sets)
    yield world
    world.check()
    await world.end()


@pytest.fixture
async def fixture() -> AsyncIterator[AgentFixture]:
    """A machine whose agent is not yet started. At the end the agent is killed."""
    fixture = AgentFixture()
    yield fixture
    await fixture.crash()
