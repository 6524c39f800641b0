"""All tests here run in virtual time: hours cost nothing, and nothing depends on how fast this computer is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from simulation.loop import new_loop
from tests.support.world import PoolWorld


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], Any]]:
    return {"virtual": new_loop}


@pytest.fixture
async def world() -> AsyncIterator[PoolWorld]:
    """A configured pool without instances. At the end all time passes, and nothing may be left."""
    world = PoolWorld()
    await world.configure()
    yield world
    world.check()
    await world.end()
