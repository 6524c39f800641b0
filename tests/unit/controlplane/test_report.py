"""Usage report of a pool's records."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from remuda.controlplane.context import Context
from remuda.controlplane.read.status import report
from remuda.domain.errors import UserError
from remuda.domain.reporting.prices import PriceTable, SpotPrice
from remuda.domain.reporting.usage import UsageReport
from remuda.domain.resources import UsageClass
from tests.support.world import PoolWorld

PRICES = PriceTable(on_demand={"c6i.large": 3_600.0})


class FakeSpotPrices:
    def __init__(self, price: float | None) -> None:
        self._price = price
        self.requested: list[str] = []

    async def spot_history(
        self, instance_types: Collection[str], *, since: datetime, until: datetime
    ) -> Sequence[SpotPrice]:
        assert since < until
        self.requested += sorted(instance_types)
        if self._price is None:
            raise UserError("not authorised: ec2:DescribeSpotPriceHistory")
        return [SpotPrice(instance_type=name, zone="a", at=since, price=self._price) for name in instance_types]


async def usage_of(world: PoolWorld, process: Context | None = None, last_s: float = 86_400) -> UsageReport:
    process = process or world.process()
    return await report(process, since=process.clock.now() - timedelta(seconds=last_s), prices=PRICES)


async def test_usage_of_a_cold_and_a_warm_run(world: PoolWorld) -> None:
    await world.provision("7", count=2)
    await world.pass_time(20)
    await world.release("7")
    await world.pass_time(10)
    await world.provision("8", count=2)
    await world.release("8")
    found = await usage_of(world)
    assert (found.reused, found.created, found.instances, found.provisions) == (2, 2, 2, 2)
    assert found.provision_times["cold"].p50 > found.provision_times["warm"].p50
    assert found.savings.waiting_s == pytest.approx(
        found.provision_times["cold"].p50 - found.provision_times["warm"].p50, abs=0.2
    )
    assert set(found.hours) >= {"booting", "claimed", "running", "releasing", "idle"}
    # At a price of 1 per second, the cost equals the seconds that machines existed.
    alive_s = sum(found.hours.values()) * 3_600
    assert found.costs.total == pytest.approx(alive_s)
    assert set(found.costs.by_run) == {"7", "8", ""}
    assert not found.notes


async def test_instances_that_ended_before_the_period_are_not_counted(world: PoolWorld) -> None:
    await world.provision("7")
    await world.release("7")
    await world.end()
    assert (await usage_of(world)).instances == 1
    before = await usage_of(world, last_s=1.0)
    assert (before.instances, before.provisions, before.costs.total) == (0, 0, 0)


@pytest.mark.parametrize(
    ("price", "spent", "note"), [(360.0, 0.1, ""), (None, 1.0, "not authorised: ec2:DescribeSpotPriceHistory")]
)
async def test_spot_prices_are_used_if_permitted(
    world: PoolWorld, price: float | None, spent: float, note: str
) -> None:
    await world.provision("7", usage_class=UsageClass.SPOT)
    spot_prices = FakeSpotPrices(price)
    found = await usage_of(world, replace(world.process(), spot_prices=spot_prices))
    assert spot_prices.requested == ["c6i.large"]
    assert found.costs.total == pytest.approx(spent * sum(found.hours.values()) * 3_600)
    assert note in " ".join(found.notes)
    assert ("more than was paid" in " ".join(found.notes)) == (price is None)


async def test_spot_prices_are_not_read_without_spot_instances(world: PoolWorld) -> None:
    await world.provision("7")
    spot_prices = FakeSpotPrices(1.0)
    await usage_of(world, replace(world.process(), spot_prices=spot_prices))
    assert not spot_prices.requested
