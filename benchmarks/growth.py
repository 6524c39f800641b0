"""Growth of calls with live instances, their independence of old records, and scale-down of a busy fleet."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import count
from typing import Any

from benchmarks.environment import BenchmarkEnvironment, BenchmarkPool, control_item, fresh_report, idle
from benchmarks.external_servers import ExternalServers, external_servers
from benchmarks.figures import Figure, GrowthPoint, Results
from benchmarks.floor import Floor
from benchmarks.warm import polls
from remuda.adapters.aws.calls import chunks
from remuda.adapters.aws.clients import service_client
from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.items import Item, ItemKeys
from remuda.adapters.aws.ec2.calls import client_config
from remuda.adapters.aws.ec2.tagged_fleet import Ec2Fleet
from remuda.adapters.aws.environment import AwsEndpoint, AwsEnvironment
from remuda.adapters.aws.service import ServiceClient
from remuda.adapters.github.client import GitHubClient
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.config.settings import Settings
from remuda.controlplane.read.status import status
from remuda.controlplane.refresh import refresh
from remuda.controlplane.scale_down import FleetContext, ScaleDownResult, scale_down
from remuda.domain.instance import Instance, State
from remuda.domain.provision import Provision, ProvisionStatus, settled
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import SilentEventLog
from tests.support.fleet_servers import TOKEN, FleetInstance, FleetState, serve_fleet
from tests.support.records import entry, instance_id, run_holder
from tests.support.scripted_fleet import ENVIRONMENT, ORG, tags

#: Instances per provision.
PROVISION_COUNT = 10
#: Expired instances at each refresh.
EXPIRED = 10
#: Share of instances among the old records; history entries have the same share, the rest are provisions. Those are
#: few, because the test server sorts all of them to find the newest.
OLD_INSTANCES_SHARE = 0.495
#: Number of records generated and written at a time.
CHUNK = 2_000
#: Allowed additional calls: a second page of each of the four shards of live records, and one more batch of history.
ADDITIONAL_CALLS_LIMIT = 5
#: GitHub calls of a scale-down of busy runners.
GITHUB_CALLS_LIMIT = 13


async def run(environment: BenchmarkEnvironment, _floor: Floor) -> Results:
    points: list[GrowthPoint] = []
    for old in (0, environment.size.old):
        points += await series(environment, old)
    return Results(points=tuple(points), figures=tuple(limits_on_growth(points)))


async def series(environment: BenchmarkEnvironment, old: int) -> list[GrowthPoint]:
    """Measure all operations at each number of live instances, with `old` old records."""
    await environment.clear()
    async with external_servers() as servers, growing_pool(environment, servers) as grown:
        await grown.write_old_records(old)
        points = []
        for live in environment.size.live:
            await grown.grow(live)
            points += [await grown.measure(name, work, old) for name, work in grown.operations()]
        return points


@dataclass(kw_only=True)
class GrowingPool:
    environment: BenchmarkEnvironment
    pool: BenchmarkPool
    servers: ExternalServers
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

    async def measure(self, name: str, work: Callable[[], Awaitable[float]], old: int) -> GrowthPoint:
        if name == "refresh":
            await self._settle()
            await self._expire(EXPIRED)
        with self.environment.requests.during() as counted:
            self._github = self._polls = 0
            seconds = await work()
        calls = {service: counted.of(service) for service in ("dynamodb", "sqs", "ec2")}
        # The number of polls depends on the machine's speed.
        calls["dynamodb"] -= self._polls
        return GrowthPoint(
            operation=name,
            live=self.live,
            old=old,
            seconds=round(seconds, 4),
            calls={name: number for name, number in {**calls, "github": self._github}.items() if number},
        )

    # Records ----------------------------------------------------------------------------------------------------

    async def write_old_records(self, old: int) -> None:
        """Write terminated instances with their histories, and settled provisions."""
        keys, now = ItemKeys(prefix=self.pool.prefix), to_milliseconds(SystemClock().now())
        instances = int(old * OLD_INSTANCES_SHARE)
        for part in chunks(range(instances), CHUNK):
            await self.pool.put([item for number in part for item in _terminated(keys, 10_000_000 + number, now)])
        for part in chunks(range(old - 2 * instances), CHUNK):
            await self.pool.put([items.provision_item(_settled(number, now)) for number in part])

    async def grow(self, live: int) -> None:
        """Add instances: the first ones are idle and have agents, the others belong to a run."""
        new = [idle(next(self.numbers)) for _ in range(live - self.live)]
        warm = [] if self.warm else new[:PROVISION_COUNT]
        self.warm += len(warm)
        running = [_running(record) for record in new[len(warm) :]]
        records = [*warm, *running]
        await self.pool.write(records, [replace(fresh_report(record), busy=True) for record in records])
        await self.servers.add(
            self.pool.name,
            [record.instance_id for record in records],
            [record.instance_id for record in running],
        )
        if warm:
            await self.pool.start_agents([record.instance_id for record in warm])
            async with self.pool.context() as context:
                await context.pool.send([record.message() for record in warm])
        self.live = live

    async def _settle(self) -> None:
        """Settle the released run, so that the refresh does not examine it again."""
        forget_at = to_milliseconds(SystemClock().now() + timedelta(days=1))
        async with self.pool.context() as context:
            for item in await context.store.provisions_of_run(self.run_id):
                await context.store.replace_provision(item, settled(item, forget_at=forget_at))

    async def _expire(self, number: int) -> None:
        past = to_milliseconds(SystemClock().now() - timedelta(hours=1))
        expired = [idle(next(self.numbers), threshold=past) for _ in range(number)]
        await self.pool.write(expired, [fresh_report(record) for record in expired])
        await self.servers.add(self.pool.name, [record.instance_id for record in expired])

    # Operations -------------------------------------------------------------------------------------------------

    async def _provision(self) -> float:
        made = await self.pool.provision(self.warm)
        if made.created:
            raise RuntimeError(f"{made.created} instances were created")
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
            raise RuntimeError(f"refresh failed: {done}")
        return done.seconds

    async def _status(self) -> float:
        clock = SystemClock()
        async with self.pool.context(credentialed=True) as context:
            started = clock.monotonic()
            seen = await status(context)
            seconds = clock.monotonic() - started
            self._github = sum(context.calls.by_service().get("github", {}).values())
        if len(seen.instances) != self.live:
            raise RuntimeError(f"status shows {len(seen.instances)} of {self.live} instances")
        return seconds

    async def _scale_down(self) -> float:
        calls = CallCounter()
        done = await _run_scale_down(
            *(self.pool.name, self.pool.ec2, self.servers.github_url, calls),
            open_pool=self.pool.context,
            has_pool=True,
        )
        self._github = sum(calls.by_service().get("github", {}).values())
        return done.seconds


def _github(url: str, calls: CallCounter) -> GitHubClient:
    return GitHubClient(api_url=url, token=TOKEN, clock=SystemClock(), ids=SystemIds(), calls=calls)


async def _run_scale_down(
    environment: str, ec2: Any, github_url: str, calls: CallCounter, **more: Any
) -> ScaleDownResult:
    clock, github = SystemClock(), _github(github_url, calls)
    context = FleetContext(
        environment=environment,
        fleet=Ec2Fleet(client=ec2, environment=environment, clock=clock, ids=SystemIds(), calls=calls),
        github=github,
        clock=clock,
        event_log=SilentEventLog(),
        calls=calls,
        **more,
    )
    done = await scale_down(context, Settings().scale_down_policy)
    await github.close()
    if done.errors:
        raise RuntimeError(f"scale-down failed: {done.errors}")
    return done


async def run_scale_down(environment: BenchmarkEnvironment, _floor: Floor) -> Results:
    """Scale-down of a fleet of busy runners without a pool."""
    number, fleet = environment.size.busy_runners, FleetState()
    fleet.owners.add(ORG)
    launched_at = SystemClock().now() - timedelta(hours=1)
    for each in range(number):
        name = instance_id(each)
        fleet.add_machine(FleetInstance(name, launched_at, "running", tags()))
        fleet.add_runner({"id": each + 1, "name": f"runner-{name}", "owner": ORG, "busy": True})
    with serve_fleet(fleet) as served:
        async with _ec2_client(served.ec2_url) as client:
            done = await _run_scale_down(ENVIRONMENT, client, served.github_url, CallCounter())
    if fleet.effects.terminated:
        raise RuntimeError(f"busy runners were terminated: {fleet.effects.terminated}")
    figure = Figure(
        *(f"scale-down of {number:,} busy runners: GitHub calls", "calls", fleet.effects.github_calls()),
        limit=GITHUB_CALLS_LIMIT,
        predecessor="1,012, in 23 s",
        note=f"{done.seconds:.2f} s",
    )
    return Results(figures=(figure,))


def _ec2_client(url: str) -> ServiceClient:
    endpoint = AwsEndpoint(url, os.environ["AWS_REGION"])
    return service_client("ec2", endpoint, client_config(), AwsEnvironment().credentials)


@asynccontextmanager
async def growing_pool(environment: BenchmarkEnvironment, servers: ExternalServers) -> AsyncIterator[GrowingPool]:
    pool = await environment.pool()
    async with _ec2_client(servers.ec2_url) as client:
        environment.requests.watch(client)
        pool.ec2 = client
        pool.github = lambda calls: _github(servers.github_url, calls)
        yield GrowingPool(environment=environment, pool=pool, servers=servers)


def _running(record: Instance) -> Instance:
    return replace(record, state=State.RUNNING, holder=run_holder("1"), claim="p-1/w-1", announced_at=None)


def _terminated(keys: ItemKeys, number: int, now: datetime) -> list[Item]:
    terminated = replace(
        idle(number),
        state=State.TERMINATED,
        last_holder=run_holder("1", f"p-{number % 997}"),
        forget_at=now + timedelta(days=30),
    )
    history = items.history_item(instance_id(number), entry(at=now), sequence=1, writer_id="w")
    return [control_item(keys, terminated), history]


def _settled(number: int, now: datetime) -> Provision:
    return Provision(
        holder=run_holder(f"old-{number % 5_003}", f"p-old-{number}"),
        resource_class="large",
        count=1,
        created_at=now - timedelta(days=1),
        deadline=now - timedelta(hours=23),
        status=ProvisionStatus.RELEASED,
        settled=True,
        forget_at=now + timedelta(days=30),
    )


# Limits -----------------------------------------------------------------------------------------------------------


def limits_on_growth(points: Sequence[GrowthPoint]) -> list[Figure]:
    """Calls must not grow with old records; a refresh's DynamoDB calls must not grow with live instances either."""
    old = max(point.old for point in points)
    few, many = min(point.live for point in points), max(point.live for point in points)
    calls = {(point.operation, point.live, point.old): sum(point.calls.values()) for point in points}
    figures = [
        Figure(
            *(f"{name}: additional calls with {old:,} old records, {many:,} live", "calls"),
            calls[name, many, old] - calls[name, many, 0],
            limit=ADDITIONAL_CALLS_LIMIT,
        )
        for name in dict.fromkeys(point.operation for point in points)
    ]
    store = {point.live: point.calls.get("dynamodb", 0) for point in points if point.operation == "refresh"}
    figures.append(
        Figure(
            *(f"refresh: additional DynamoDB calls with {many:,} live instead of {few:,}", "calls"),
            store[many] - store[few],
            limit=ADDITIONAL_CALLS_LIMIT,
            note=f"{EXPIRED} expired instances each time",
        )
    )
    return figures
