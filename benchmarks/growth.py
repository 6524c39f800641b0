"""How calls and times grow with what lives, and that they do not with what is over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import count
from typing import Any

from benchmarks.figures import Figure, Kind, Point, Results
from benchmarks.floor import Floor
from benchmarks.outside import Outside, outside
from benchmarks.warm import polls
from benchmarks.world import Pool, World, beating, control_item, idle
from remuda.adapters.aws.calls import chunks
from remuda.adapters.aws.clients import open_session
from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.items import Item, ItemKeys
from remuda.adapters.aws.ec2.calls import client_config
from remuda.adapters.aws.ec2.tagged_fleet import Ec2Fleet
from remuda.adapters.github.client import GitHubClient
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.config.settings import Settings
from remuda.controlplane.read.status import status
from remuda.controlplane.refresh import refresh
from remuda.controlplane.scale_down import FleetContext, scale_down
from remuda.domain.instance import Instance, State
from remuda.domain.provision import Provision, ProvisionStatus, settled
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import SilentEventLog
from tests.support.fleet_world import TOKEN
from tests.support.records import entry, instance_id

#: Machines that a provision asks for.
ASKED = 10
#: What has expired at each refresh.
EXPIRED = 10
#: Of the old records, so many are instances, and as many lines of history; the rest are provisions. Few: to find the
#: newest ones, the test server sorts them all, which DynamoDB does not.
OLD_INSTANCES_PART = 0.495
#: Records that are written before the next are made.
PART = 2_000
#: What calls more may be: a second page of each of the four shards that hold what lives, and where history goes in
#: one batch more.
SLACK_CALLS = 5


async def run(world: World, _floor: Floor) -> Results:
    points: list[Point] = []
    for old in (0, world.size.old):
        points += await series(world, old)
    return Results(points=tuple(points), figures=tuple(verdicts(points)))


async def series(world: World, old: int) -> list[Point]:
    """With a world around it that knows of nothing else."""
    await world.clear()
    async with outside() as around, herd(world, around) as grown:
        await grown.bury(old)
        points = []
        for live in world.size.live:
            await grown.grow(live)
            points += [await grown.measure(name, work, old) for name, work in grown.operations()]
        return points


@dataclass(kw_only=True)
class GrowingHerd:
    world: World
    pool: Pool
    around: Outside
    numbers: Any = field(default_factory=count)
    live: int = 0
    warm: int = 0
    run_id: str = ""
    _github: int = 0
    _polls: int = 0

    def operations(self) -> Sequence[tuple[str, Callable[[], Awaitable[float]]]]:
        return (
            ("provision", self._provision),
            ("release", self._release),
            ("refresh", self._refresh),
            ("scale-down", self._scale_down),
            ("status", self._status),
        )

    async def measure(self, name: str, work: Callable[[], Awaitable[float]], old: int) -> Point:
        if name == "refresh":
            await self._settle()
            await self._expire(EXPIRED)
        with self.world.wire.during() as counted:
            self._github = self._polls = 0
            seconds = await work()
        calls = {service: counted.of(service) for service in ("dynamodb", "sqs", "ec2")}
        # Looks while it waited hang on how quick this computer is.
        calls["dynamodb"] -= self._polls
        return Point(
            operation=name,
            live=self.live,
            old=old,
            seconds=round(seconds, 4),
            calls={name: number for name, number in {**calls, "github": self._github}.items() if number},
        )

    # What there is ----------------------------------------------------------------------------------------------

    async def bury(self, old: int) -> None:
        """What has been: instances, their histories, provisions."""
        keys, now = ItemKeys(prefix=self.pool.prefix), to_milliseconds(SystemClock().now())
        instances = int(old * OLD_INSTANCES_PART)
        for part in chunks(range(instances), PART):
            await self.pool.put([item for number in part for item in _ended(keys, 10_000_000 + number, now)])
        for part in chunks(range(old - 2 * instances), PART):
            await self.pool.put([items.provision_item(_settled(number, now)) for number in part])

    async def grow(self, live: int) -> None:
        """A few are idle and have agents; a run has the others."""
        new = [idle(next(self.numbers)) for _ in range(live - self.live)]
        warm = [] if self.warm else new[:ASKED]
        self.warm += len(warm)
        running = [_running(record) for record in new[len(warm) :]]
        herd = [*warm, *running]
        await self.pool.write(herd, [replace(beating(record), busy=True) for record in herd])
        await self.around.add(
            self.pool.name,
            [record.instance_id for record in herd],
            [record.instance_id for record in running],
        )
        if warm:
            await self.pool.follow([record.instance_id for record in warm])
            async with self.pool.context() as context:
                await context.pool.send([record.message() for record in warm])
        self.live = live

    async def _settle(self) -> None:
        """As a minute later: else each refresh would look after the run that was released a moment ago, too."""
        forget_at = to_milliseconds(SystemClock().now() + timedelta(days=1))
        async with self.pool.context() as context:
            for item in await context.store.provisions_of_run(self.run_id):
                await context.store.replace_provision(item, settled(item, forget_at=forget_at))

    async def _expire(self, number: int) -> None:
        past = to_milliseconds(SystemClock().now() - timedelta(hours=1))
        gone = [idle(next(self.numbers), threshold=past) for _ in range(number)]
        await self.pool.write(gone, [beating(record) for record in gone])
        await self.around.add(self.pool.name, [record.instance_id for record in gone])

    # What is done -----------------------------------------------------------------------------------------------

    async def _provision(self) -> float:
        made = await self.pool.provision(self.warm)
        if made.created:
            raise RuntimeError(f"{made.created} machines were created")
        self.run_id = made.run_id
        self._polls = polls(made.calls)
        return made.seconds

    async def _release(self) -> float:
        done = await self.pool.release(self.run_id)
        self._polls = polls(done.calls)
        return done.seconds

    async def _refresh(self) -> float:
        async with self.pool.context(credentialed=True) as context:
            done = await refresh(context, None)
            self._github = sum(context.calls.by_service().get("github", {}).values())
        if done.errors or len(done.terminated) != EXPIRED:
            raise RuntimeError(f"a refresh went wrong: {done}")
        return done.seconds

    async def _status(self) -> float:
        clock = SystemClock()
        async with self.pool.context(credentialed=True) as context:
            started = clock.monotonic()
            seen = await status(context)
            spent = clock.monotonic() - started
            self._github = sum(context.calls.by_service().get("github", {}).values())
        if len(seen.instances) != self.live:
            raise RuntimeError(f"a status shows {len(seen.instances)} of {self.live}")
        return spent

    async def _scale_down(self) -> float:
        clock, ids, calls = SystemClock(), SystemIds(), CallCounter()
        github = _github(self.around.github_url, calls)
        context = FleetContext(
            environment=self.pool.name,
            fleet=Ec2Fleet(client=self.pool.ec2, environment=self.pool.name, clock=clock, ids=ids, calls=calls),
            github=github,
            clock=clock,
            event_log=SilentEventLog(),
            calls=calls,
            open_pool=self.pool.context,
            has_pool=True,
        )
        done = await scale_down(context, Settings().scale_down_policy)
        await github.close()
        self._github = sum(calls.by_service().get("github", {}).values())
        if done.errors:
            raise RuntimeError(f"a scale-down went wrong: {done.errors}")
        return done.seconds


def _github(url: str, calls: CallCounter) -> GitHubClient:
    return GitHubClient(api_url=url, token=TOKEN, clock=SystemClock(), ids=SystemIds(), calls=calls)


@asynccontextmanager
async def herd(world: World, around: Outside) -> AsyncIterator[GrowingHerd]:
    pool = await world.pool()
    async with open_session().create_client("ec2", config=client_config(), endpoint_url=around.ec2_url) as client:
        world.wire.watch(client)
        pool.ec2 = client
        pool.github = lambda calls: _github(around.github_url, calls)
        yield GrowingHerd(world=world, pool=pool, around=around)


def _running(record: Instance) -> Instance:
    return replace(record, state=State.RUNNING, run_id="1", owner="p-1/w-1", provision_id="p-1", announced_at=None)


def _ended(keys: ItemKeys, number: int, now: datetime) -> list[Item]:
    over = replace(
        idle(number), state=State.TERMINATED, provision_id=f"p-{number % 997}", forget_at=now + timedelta(days=30)
    )
    line = items.history_item(instance_id(number), entry(at=now), sequence=1, writer="w")
    return [control_item(keys, over), line]


def _settled(number: int, now: datetime) -> Provision:
    return Provision(
        provision_id=f"p-old-{number}",
        run_id=f"old-{number % 5_003}",
        attempt=1,
        resource_class="large",
        count=1,
        created_at=now - timedelta(days=1),
        deadline=now - timedelta(hours=23),
        status=ProvisionStatus.RELEASED,
        settled=True,
        forget_at=now + timedelta(days=30),
    )


# What must hold ---------------------------------------------------------------------------------------------------


def verdicts(points: Sequence[Point]) -> list[Figure]:
    """Calls may not grow with what is over; those of a refresh to the store not with what lives either."""
    old = max(point.old for point in points)
    few, many = min(point.live for point in points), max(point.live for point in points)
    calls = {(point.operation, point.live, point.old): sum(point.calls.values()) for point in points}
    figures = [
        Figure(
            name=f"{name}: calls more with {old:,} old records, {many:,} live",
            unit="calls",
            before="—",
            most=SLACK_CALLS,
            ours=calls[name, many, old] - calls[name, many, 0],
            kind=Kind.COUNT,
        )
        for name in dict.fromkeys(point.operation for point in points)
    ]
    store = {point.live: point.calls.get("dynamodb", 0) for point in points if point.operation == "refresh"}
    figures.append(
        Figure(
            name=f"refresh: DynamoDB calls more with {many:,} live than with {few:,}",
            unit="calls",
            before="—",
            most=SLACK_CALLS,
            ours=store[many] - store[few],
            kind=Kind.COUNT,
            note=f"{EXPIRED} have expired each time",
        )
    )
    return figures
