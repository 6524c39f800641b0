"""Tests in virtual time: simulated hours take no real time, and results do not depend on the machine's speed."""

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
    """A configured pool without instances. At the end time passes until every instance must be terminated."""
    world = PoolWorld()
    await world.configure()
    yield world
    world.check()
    await world.end()
