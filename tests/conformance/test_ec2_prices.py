"""Spot prices from EC2: pages, unknown instance types, missing permission."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from remuda.adapters.aws.ec2.compute import Ec2SpotPrices
from remuda.adapters.system.clock import SystemIds
from remuda.domain.errors import UserError
from remuda.ports.compute import SpotPrices
from tests.support.aws.ec2 import Ec2Fixture, ec2_fixture


@pytest.fixture
async def world() -> AsyncIterator[Ec2Fixture]:
    async with ec2_fixture() as made:
        yield made


@pytest.fixture
def market(world: Ec2Fixture) -> SpotPrices:
    return Ec2SpotPrices(client=world.client, clock=world.clock, ids=SystemIds(), calls=world.calls)


async def test_prices_by_type_and_zone(world: Ec2Fixture, market: SpotPrices) -> None:
    until = world.clock.now()
    points = await market.spot_history(
        ["c6i.large", "m5.large", "zz9.huge"], since=until - timedelta(days=1), until=until
    )
    assert {point.instance_type for point in points} == {"c6i.large", "m5.large"}
    assert len({point.zone for point in points}) > 1
    assert all(point.price > 0 and point.at.tzinfo is not None for point in points)
    assert world.calls.by_service()["ec2"]["DescribeSpotPriceHistory"] >= 1


async def test_no_types_make_no_call(world: Ec2Fixture, market: SpotPrices) -> None:
    until = world.clock.now()
    assert not await market.spot_history([], since=until - timedelta(days=1), until=until)
    assert "ec2" not in world.calls.by_service()


async def test_missing_permission_is_reported(world: Ec2Fixture, market: SpotPrices) -> None:
    until = world.clock.now()
    world.server.configure(
        faults=[{"action": "DescribeSpotPriceHistory", "code": "UnauthorizedOperation", "status": 403, "times": 9}]
    )
    with pytest.raises(UserError):
        await market.spot_history(["c6i.large"], since=until - timedelta(days=1), until=until)
