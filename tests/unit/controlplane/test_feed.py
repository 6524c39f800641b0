"""The fleet reader and the dashboard's feed: changes add up to the status, and an unwatched feed polls rarely."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, NoReturn

import pytest

from remuda.adapters.system.clock import SystemIds
from remuda.controlplane.context import Context
from remuda.controlplane.operator import drain
from remuda.controlplane.read.feed import NEWEST_PROVISIONS, FleetReader
from remuda.controlplane.read.status import Status, report
from remuda.controlplane.read.status import status as read_status
from remuda.domain.errors import Unavailable
from remuda.domain.instance import LIVE, HistoryEntry, Instance, State
from remuda.domain.provision import Provision, ProvisionStatus, released
from remuda.domain.reporting.prices import PriceTable
from remuda.web.dashboard.feed import Feed
from remuda.web.metrics import FleetMetrics
from tests.support.records import provision
from tests.support.virtual_time import EventRecorder
from tests.support.world import PoolWorld

DAY_S = 86_400.0
OPEN = ProvisionStatus.OPEN


class Page:
    """The state that results from all changes."""

    def __init__(self, context: Context, since_s: float = DAY_S) -> None:
        self.context = context
        self.reader = FleetReader(since_s=since_s)
        self.instances: dict[str, Instance] = {}
        self.histories: dict[str, Any] = {}
        self.runs: dict[str, Any] = {}

    async def poll(self, *, include_terminated: bool = False, with_status: bool = False) -> set[str]:
        found = await self.reader.poll(
            self.context, with_status=with_status, include_terminated=include_terminated, check_registrations=False
        )
        for name, seen in found.instances.items():
            self.instances[name] = seen.instance
            self.histories[name] = seen.history
        for name in found.removed_instances:
            del self.instances[name]
        self.runs |= {item.provision_id: item for item in found.provisions}
        for name in found.removed_provisions:
            del self.runs[name]
        return set(found.instances) | found.removed_instances


async def test_changes_add_up_to_the_current_state(world: PoolWorld) -> None:
    context = world.process()
    page = Page(context)
    await page.poll(include_terminated=True)
    await world.warm(2)
    changed = await page.poll()
    assert changed == set(page.instances) == {item.instance_id for item in (await read_status(context)).instances}
    await world.provision("7", count=3)
    await page.poll()
    # Histories are read again in the poll after a change; then there are no more changes.
    await page.poll()
    assert await page.poll() == set()
    everything = await read_status(context, include_terminated=True)
    assert page.instances == {item.instance_id: item for item in everything.instances}
    assert page.runs == {item.provision_id: item for item in everything.runs}
    assert page.histories == dict(await context.store.histories(list(page.instances)))
    await world.release("7")


async def test_terminations_are_reported_and_removed_after_a_time(world: PoolWorld) -> None:
    context = world.process()
    page = Page(context, since_s=3_600.0)
    await page.poll(include_terminated=True)
    (instance_id,) = await world.warm(1)
    await page.poll()
    world.machines[instance_id].power_off("test")
    for _ in range(200):
        await world.sweep()
        await page.poll()
        if page.instances[instance_id].state is State.TERMINATED:
            break
        await asyncio.sleep(10)
    history: list[HistoryEntry] = page.histories[instance_id]
    assert history[-1].target == "terminated"
    await asyncio.sleep(3_700)
    assert instance_id in await page.poll()
    assert instance_id not in page.instances
    assert await page.poll(include_terminated=True) == set()


async def test_changes_found_by_a_failed_poll_are_returned_by_the_next(
    world: PoolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = world.process()
    page = Page(context)
    await page.poll(include_terminated=True)
    (instance_id,) = await world.warm(1)

    async def fail(_: object) -> NoReturn:
        raise Unavailable("the line is cut")

    with monkeypatch.context() as cut:
        cut.setattr(context.store, "histories", fail)
        with pytest.raises(Unavailable):
            await page.poll()
    assert await page.poll() == {instance_id}
    assert page.histories[instance_id]


async def test_history_written_after_its_record_is_returned_by_the_next_poll(
    world: PoolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = world.process()
    page = Page(context)
    await page.poll(include_terminated=True)
    (instance_id,) = await world.warm(1)
    await page.poll()
    before = dict(page.histories)

    async def read_early(_: object) -> dict[str, Any]:
        return before

    await drain(context, [page.instances[instance_id]], reason="test", dry_run=False)
    with monkeypatch.context() as early:
        early.setattr(context.store, "histories", read_early)
        assert await page.poll() == {instance_id}
    assert await page.poll() == {instance_id}
    assert len(page.histories[instance_id]) > len(before[instance_id])
    assert await page.poll() == set()


def asked(world: PoolWorld, number: int, *, age_s: float = 0.0, status: ProvisionStatus = OPEN) -> Provision:
    """A stored provision."""
    now = world.process().clock.now() - timedelta(seconds=age_s)
    settled = status is ProvisionStatus.RELEASED
    return provision(
        number,
        run_id=str(number),
        count=1,
        created_at=now,
        deadline=now + timedelta(seconds=300),
        status=status,
        released_at=now if settled else None,
        settled=settled,
    )


async def test_open_provision_is_shown_regardless_of_newer_ones(world: PoolWorld) -> None:
    context = world.process()
    page = Page(context)
    first = asked(world, 1, age_s=200)
    await context.store.put_provision(first)
    for number in range(2, 2 + NEWEST_PROVISIONS):
        await context.store.put_provision(asked(world, number, status=ProvisionStatus.RELEASED))
    found = await read_status(context)
    assert [item.provision.provision_id for item in found.open_provisions] == ["p-1"]
    await page.poll(include_terminated=True)
    assert page.runs["p-1"].status is OPEN
    meters = FleetMetrics(started_at=context.clock.now())
    meters.on_status(found)
    assert b'remuda_open_provisions{pool="test"} 1.0' in meters.text(context.calls)[0]
    assert b'remuda_open_provision_age_max_seconds{pool="test"} 200.0' in meters.text(context.calls)[0]
    # Its end is reported, too.
    await context.store.replace_provision(first, released(first, now=context.clock.now(), why="given up"))
    await page.poll(with_status=True)
    assert page.runs["p-1"].status is ProvisionStatus.RELEASED


async def test_old_provisions_are_removed(world: PoolWorld) -> None:
    context = world.process()
    page = Page(context, since_s=3_600.0)
    for number, age_s in enumerate((3_000, 100), start=1):
        await context.store.put_provision(asked(world, number, age_s=age_s, status=ProvisionStatus.RELEASED))
    await context.store.put_provision(asked(world, 3, age_s=3_000))
    await page.poll(include_terminated=True)
    assert set(page.runs) == {"p-1", "p-2", "p-3"}
    await asyncio.sleep(1_000)
    for with_status in (False, True):
        await page.poll(with_status=with_status)
        assert set(page.runs) == {"p-2", "p-3"}, "open provisions stay"


async def test_old_decisions_and_times_are_removed(world: PoolWorld) -> None:
    context = world.process()
    feed = make_feed(context, [], since_s=600.0)
    running = asyncio.create_task(feed.run())
    (instance_id,) = await world.warm(1)
    await world.provision("7")
    with feed.watched():
        retired = [record for record in await context.store.find(LIVE) if record.instance_id == instance_id]
        await drain(context, retired, reason="an old image", dry_run=False)
        await asyncio.sleep(2)
        shown = json.loads(feed.change_log.snapshot())
        assert [item["instance"] for item in shown["decisions"].values()] == [instance_id]
        assert shown["facts"]["provision_times"]["warm"]["count"] == 1
        await asyncio.sleep(700)
        shown = json.loads(feed.change_log.snapshot())
        assert not any(shown.get("decisions", {}).values())
        assert shown["facts"]["provision_times"] == {}
    running.cancel()
    await world.release("7")


class CountingObserver:
    def __init__(self) -> None:
        self.failures = 0
        self.pools: list[str] = []
        self.runs: set[str] = set()
        self.steps: set[tuple[str, str, int]] = set()

    def on_status(self, status: Status) -> None:
        self.pools.append(status.pool)

    def on_poll_failed(self) -> None:
        self.failures += 1

    def add_provisions(self, provisions: Iterable[Provision]) -> None:
        self.runs |= {item.run_id for item in provisions}

    def add_histories(self, histories: Mapping[str, Sequence[HistoryEntry]]) -> None:
        self.steps |= {(name, item.transition, item.epoch) for name, each in histories.items() for item in each}


def make_feed(
    context: Context, failures: list[str], *observers: CountingObserver, since_s: float = DAY_S, **more: Any
) -> Feed:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Context]:
        if failures:
            raise Unavailable(failures.pop(0))
        yield context

    return Feed(
        open_context=opened,
        backend="local",
        interval_s=0.25,
        since_s=since_s,
        clock=context.clock,
        ids=SystemIds(),
        observers=observers,
        **more,
    )


async def test_page_shows_a_dead_agent(world: PoolWorld) -> None:
    instance_id = (await world.one("7")).instance_id
    feed = make_feed(world.process(), [])
    running = asyncio.create_task(feed.run())
    with feed.watched():
        for is_dead in (False, True):
            await asyncio.sleep(5)
            assert json.loads(feed.change_log.snapshot())["instances"][instance_id]["agent_dead"] == is_dead
            world.stop_agent(instance_id)
            await asyncio.sleep(30)
    running.cancel()


async def test_store_failure_is_reported_and_retried(world: PoolWorld) -> None:
    event_log = EventRecorder()
    feed = make_feed(world.process(), ["the disk is full", "the disk is full"], event_log=event_log)
    running = asyncio.create_task(feed.run())
    await asyncio.sleep(0.1)
    assert json.loads(feed.change_log.snapshot())["facts"]["error"] == "the disk is full"
    assert feed.last_success is None
    await asyncio.sleep(5)
    assert json.loads(feed.change_log.snapshot())["facts"]["error"] == ""
    assert feed.last_success is not None
    assert event_log.lines == [("poll-failed", "the disk is full"), ("poll-recovered", "last error: the disk is full")]
    running.cancel()


async def test_savings_equal_those_of_the_report(world: PoolWorld) -> None:
    context = world.process()
    prices = PriceTable(dated="2026-10", on_demand={"c6i.large": 3_600.0})
    feed = make_feed(context, [], prices=prices)
    running = asyncio.create_task(feed.run())
    with feed.watched():
        await world.provision("7")
        await world.release("7")
        await asyncio.sleep(30)
        await world.provision("8")
        await asyncio.sleep(5)
        shown = json.loads(feed.change_log.snapshot())["facts"]["usage"]
        expected = await report(context, since=context.clock.now() - timedelta(days=1), prices=prices)
    assert (shown["reused"], shown["created"], shown["runs"]) == (expected.reused, expected.created, 2) == (1, 1, 2)
    # Calculated slightly earlier. The price is 1 per second.
    assert 0 < shown["cost"] <= expected.costs.total <= shown["cost"] + 10
    assert shown["idle_cost"] == pytest.approx(expected.savings.idle_cost, abs=0.001)
    assert shown["saved_waiting_s"] == pytest.approx(expected.savings.waiting_s, abs=0.1)
    assert shown["saved_cost"].startswith("idle instances cost ")
    assert (shown["prices_as_of"], shown["unpriced"]) == ("2026-10", [])
    running.cancel()
    await world.release("8")


async def test_unwatched_feed_polls_rarely_and_wakes_for_a_client(world: PoolWorld) -> None:
    context = world.process()
    feed = make_feed(context, [])
    running = asyncio.create_task(feed.run())
    await asyncio.sleep(1)

    def searches() -> int:
        return context.calls.by_service()["store"]["find"]

    before = searches()
    await asyncio.sleep(60)
    unwatched = searches() - before
    assert unwatched <= 5
    version = feed.change_log.version
    with feed.watched():
        await world.warm(1)
        assert await feed.newer_than(version)
        before = searches()
        await asyncio.sleep(10)
        assert searches() - before >= 30
    running.cancel()


async def test_observer_gets_all_changes_and_a_request_wakes_the_poller(world: PoolWorld) -> None:
    context = world.process()
    heard = CountingObserver()
    feed = make_feed(context, ["the disk is full"], heard)
    running = asyncio.create_task(feed.run())
    await asyncio.sleep(2)
    assert (heard.failures, set(heard.pools)) == (1, {context.pool_name})
    (instance_id,) = await world.warm(1)
    await world.provision("7")
    await asyncio.sleep(5)
    began = context.clock.now()
    await feed.recent_status(max_age_s=1.0, timeout_s=5.0)
    assert feed.status is not None
    assert (began - feed.status.at).total_seconds() <= 1.0
    assert (context.clock.now() - began).total_seconds() < 1.0
    assert "7" in heard.runs
    assert {(instance_id, "claim", 2), (instance_id, "commit", 2)} <= heard.steps
    running.cancel()
    await world.release("7")


async def test_slow_client_gets_the_newest_state_and_blocks_no_other(world: PoolWorld) -> None:
    feed = make_feed(world.process(), [])
    running = asyncio.create_task(feed.run())
    with feed.watched():
        await feed.first_poll(5)
        slow = feed.change_log.version
        (instance_id,) = await world.warm(1)
        for number in range(5):
            await world.provision(str(number))
            await world.release(str(number))
            assert await feed.newer_than(slow)
        await asyncio.sleep(1)
        document = json.loads(feed.change_log.changes(slow))
        assert document["version"] - slow > 5
        assert document["instances"][instance_id]["state"] == "idle"
        assert document["instances"][instance_id]["uses"] == 6
        assert len(document["instances"]) == 1
    feed.close()
    assert not await feed.newer_than(feed.change_log.version)
    running.cancel()
