"""Status (instances, open provisions, warnings) and usage report of a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from io import StringIO

import pytest

from remuda.cli.rendering.status import changes, headline, status_document, status_tables, warning_lines
from remuda.cli.terminal import PlainConsole
from remuda.controlplane.context import Context
from remuda.controlplane.read.status import Status, report, status
from remuda.controlplane.refresh import refresh
from remuda.domain.errors import CapacityError, UserError
from remuda.domain.instance import RetireReason, State
from remuda.domain.reporting.prices import PriceTable, SpotPrice
from remuda.domain.reporting.usage import UsageReport
from remuda.domain.reporting.warnings import MAX_SWEEP_PAUSE_S, MIN_SWEEP_PAUSE_S
from remuda.domain.resources import Tier, TypePatterns, UsageClass
from simulation.invariants import SCOPE
from tests.support.world import PoolWorld


async def read_status(world: PoolWorld, *, credentialed: bool = False) -> Status:
    return await status(world.process(credentialed=credentialed))


def shown(found: Status, width: int = 160) -> str:
    console = PlainConsole(file=StringIO(), width=width)
    for part in status_tables(found):
        console.print(part)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


async def test_status_limits_the_number_of_runs(world: PoolWorld) -> None:
    await world.provision("1")
    found = await read_status(world)
    assert "more" not in shown(found)
    for count, says in ((12, "  and 2 more\n"), (60, "  and at least 50 more\n")):
        assert shown(replace(found, runs=[*found.runs] * count)).endswith(says)


async def test_status_of_a_working_pool(world: PoolWorld) -> None:
    idle = await world.warm(2)
    await world.provision("7", resource_class="xlarge")
    found = await read_status(world)
    assert found.by_state() == {"running": 1, "idle": 2}
    assert (found.pools["large"].idle, found.pools["large"].messages) == (2, 2)
    assert not found.warnings
    text = shown(found)
    assert all(instance_id in text for instance_id in idle)
    assert "Open provisions" not in text
    document = status_document(found)
    assert [item["seconds_left"] > 0 for item in document["instances"]] == [True] * 3
    assert document["warnings"] == document["open_provisions"] == []
    assert (document["reuse"], "pool test, reuse same-trust" in text) == ("same-trust", True)


async def test_table_shows_the_trust_tier(world: PoolWorld) -> None:
    await world.provision("7", tier=Tier.UNTRUSTED)
    assert "untrusted" in shown(await read_status(world), width=80)


async def test_open_provision_shows_its_instances(world: PoolWorld) -> None:
    world.behaviour.boot_s = 30.0
    provisioning = asyncio.create_task(world.provision("9", count=2))
    await asyncio.sleep(5)
    found = await read_status(world)
    assert [(item.provision.run_id, item.instances) for item in found.open_provisions] == [("9", {"created": 2})]
    assert "2 created" in shown(found)
    assert status_document(found)["open_provisions"][0]["instances"] == {"created": 2}
    await provisioning
    assert (await read_status(world)).open_provisions == ()


async def test_dead_machine_is_a_warning(world: PoolWorld) -> None:
    (instance_id,) = await world.warm(1)
    world.machines[instance_id].power_off("test")
    await asyncio.sleep(25)
    found = await read_status(world)
    assert [(item.kind, item.subject) for item in found.warnings] == [("stale-heartbeat", instance_id)]
    assert "stale-heartbeat" in shown(found, width=80)


async def test_sweeper_that_stops_is_a_warning(world: PoolWorld) -> None:
    for interval_s, pause_s in ((None, MAX_SWEEP_PAUSE_S), (5.0, MIN_SWEEP_PAUSE_S), (100.0, 300.0)):
        await refresh(world.process(credentialed=True), None, interval_s=interval_s)
        await asyncio.sleep(pause_s / 3)
        if interval_s is not None:
            # Not written again before half of the time has passed.
            before = world.database.sweep
            await refresh(world.process(credentialed=True), None, interval_s=interval_s)
            assert world.database.sweep == before
        await asyncio.sleep(pause_s * 2 / 3 - 1)
        assert not (await read_status(world)).warnings
        await asyncio.sleep(2)
        (warning,) = (await read_status(world)).warnings
        assert (warning.kind, "the sweeper does not run" in warning.text) == ("sweeper", True)
    await world.sweep()
    assert not (await read_status(world)).warnings


async def test_warnings_are_in_json_and_in_lines(world: PoolWorld) -> None:
    world.cloud.capacity = {"c6i.large": 0}
    with pytest.raises(CapacityError):
        await world.provision("7", patterns=TypePatterns(("c6i.large",)))
    found = await read_status(world)
    assert [(item["kind"], item["subject"]) for item in status_document(found)["warnings"]] == [
        ("provision-failed", "7")
    ]
    (line,) = warning_lines(found)
    assert line.startswith("warning: provision-failed 7: failed at ")


async def test_stale_registrations_are_found_only_with_a_credential(world: PoolWorld) -> None:
    world.ignore("S3")
    (instance_id,) = await world.warm(1)
    name = f"remuda-test-1-{instance_id}"
    github = world.process(credentialed=True).github
    assert github is not None
    await github.jit_config(SCOPE, name=name, labels=["x"])
    assert not (await read_status(world)).warnings
    (warning,) = (await read_status(world, credentialed=True)).warnings
    assert (warning.kind, warning.subject) == ("stale-registration", name)
    assert "idle" in warning.text


async def test_unreachable_github_is_a_warning(world: PoolWorld) -> None:
    await world.warm(1)
    good, world.token = world.token, "r3voked"
    found = await read_status(world, credentialed=True)
    world.token = good
    assert [item.kind for item in found.warnings] == ["github"]
    assert found.by_state() == {"idle": 1}


async def test_watch_lines_show_only_changes(world: PoolWorld) -> None:
    (instance_id,) = await world.warm(1)
    first = await read_status(world)
    assert changes(None, first)[0] == headline(first)
    assert changes(first, await read_status(world)) == []
    await world.provision("8")
    second = await read_status(world)
    assert any(f"{instance_id} is running for run 8 (was idle)" in line for line in changes(first, second))
    assert any("is gone" in line for line in changes(second, replace(second, instances=[])))


@pytest.mark.parametrize("name", ["[bold]x[/bold]", "[/nope]"])
async def test_markup_in_names_is_escaped(world: PoolWorld, name: str) -> None:
    await world.warm(1)
    found = await read_status(world)
    hostile = [
        replace(item, retire_reason=RetireReason.DRAINED, retire_detail=name, state=State.IDLE)
        for item in found.instances
    ]
    assert name in shown(replace(found, instances=hostile))


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
