"""Benchmark environment: AWS and GitHub servers, the real control plane with AWS adapters, and an agent host."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from benchmarks.agents import AgentGroup, AgentHostProcess, agent_host
from remuda.adapters.aws.calls import chunks, gather
from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.items import Item, ItemKeys
from remuda.adapters.aws.dynamodb.keys import role_key_prefix
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.aws.ec2.calls import client_config
from remuda.adapters.aws.ec2.compute import Ec2Compute
from remuda.adapters.aws.service import ServiceClient
from remuda.adapters.aws.sqs import SqsResourcePool
from remuda.adapters.github.client import GitHubClient
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.config.settings import Settings
from remuda.config.sources import load
from remuda.controlplane.context import Context
from remuda.controlplane.provision import ProvisionRequest, ProvisionResult, provision
from remuda.controlplane.refresh import RefreshResult, refresh
from remuda.controlplane.release import ReleaseResult, ReleaseStatus, release
from remuda.domain.instance import Instance, State
from remuda.domain.resources import Tier, TypePatterns, UsageClass
from remuda.domain.signals import Report
from remuda.domain.timestamps import to_milliseconds, to_text
from remuda.http import ClientResponse
from remuda.ports.calls import CallCounter
from remuda.ports.compute import LaunchRequest, LaunchResult
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import desired
from tests.support.aws.stack import AwsStack
from tests.support.records import instance

ROOT = Path(__file__).parents[1]
SCOPE = "octo/repo"
CLASS = "large"
WRITE_BATCH = 25
#: Number of concurrent batch writes while a table is filled.
WRITERS = 8
#: Larger groups of agents share a store and its polling; a single test server could not serve them otherwise.
MAX_SEPARATE_STORES = 10
#: Long enough that nothing expires unintentionally.
SETTINGS: dict[str, Any] = {"idle_time_sec": 3_000, "margin_sec": 1, "max_instances": 10_000}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Numbers of samples, instances and records that the benchmarks use."""

    #: Samples of each time.
    samples: int = 5
    #: Numbers of instances per provision.
    counts: tuple[int, ...] = (1, 10, 50)
    registration_s: float = 2.5
    #: Seconds until the agent of a new instance is ready.
    boots_s: tuple[float, ...] = (2.0, 7.3)
    expired: int = 50
    mismatches: int = 100
    claims: int = 256
    warm: int = 300
    busy_runners: int = 1_000
    reactions: int = 120
    #: Simulated minutes of an idle agent.
    idle_min: float = 13.0
    live: tuple[int, ...] = (10, 100, 1_000, 5_000)
    old: int = 100_000
    starts: int = 9
    #: The runner software in sandboxes: as many files and megabytes as actions/runner with its versions of node.
    runner_files: int = 14_000
    runner_mb: int = 650
    #: Instances and transitions on the dashboard, and seconds of updates.
    shown: int = 2_000
    shown_transitions: int = 50_000
    shown_s: float = 10.0
    shown_in_browser: bool = True
    #: Jobs of a runner set, one after the other.
    jobs: int = 20
    #: Numbers of runner sets and of their machines.
    sets: tuple[int, ...] = (1, 10, 50)
    set_machines: tuple[int, ...] = (10, 100, 1_000)
    #: Jobs per second of the largest listener, and of each of the others, and seconds of both loads.
    job_rate: float = 10.0
    grow_rate: float = 1.0
    load_s: float = 10.0
    grow_s: float = 10.0
    #: Polls of each idle set.
    idle_polls: int = 7


FULL = Size()
QUICK = Size(
    samples=3,
    boots_s=(2.0,),
    reactions=40,
    live=(10, 100, 1_000),
    old=10_000,
    starts=3,
    shown_s=5.0,
    jobs=10,
    sets=(1, 10),
)
TINY = Size(
    samples=1,
    counts=(1,),
    registration_s=0.1,
    boots_s=(0.1,),
    expired=2,
    mismatches=12,
    claims=3,
    warm=4,
    busy_runners=120,
    reactions=2,
    idle_min=0.2,
    live=(3,),
    old=30,
    starts=1,
    runner_files=100,
    runner_mb=1,
    shown=40,
    shown_transitions=400,
    shown_s=1.0,
    shown_in_browser=False,
    jobs=2,
    sets=(2,),
    set_machines=(4,),
    job_rate=2.0,
    load_s=1.0,
    grow_s=1.0,
    idle_polls=2,
)


def watch_requests(client: ServiceClient, sent: Callable[[str, str], None]) -> None:
    """Call `sent` with service and operation of each request of the client, from now on."""
    send: Callable[..., Awaitable[ClientResponse]] = client.http.request

    async def watched(method: str, path: str, *, headers: Mapping[str, str], body: bytes) -> ClientResponse:
        target = headers.get("x-amz-target") or dict(parse_qsl(body.decode()))["Action"]
        sent(client.name, target.rpartition(".")[2])
        return await send(method, path, headers=headers, body=body)

    client.http.request = watched  # type: ignore[assignment,method-assign]


class RequestCounter:
    """Counts every request that a client sends, retries included, by service and operation."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()

    def watch(self, client: ServiceClient) -> None:
        """Count the client's requests from now on."""
        watch_requests(client, self._sent)

    def _sent(self, service: str, operation: str) -> None:
        self._seen[service, operation] += 1

    @contextmanager
    def during(self) -> Iterator[RequestCounts]:
        """Count the requests of the block. The result is complete when the block ends."""
        before = Counter(self._seen)
        counted = RequestCounts()
        try:
            yield counted
        finally:
            for (service, operation), count in (self._seen - before).items():
                counted.by_operation[service, operation] = count


class RequestCounts:
    def __init__(self) -> None:
        self.by_operation: Counter[tuple[str, str]] = Counter()

    def of(self, service: str) -> int:
        return sum(count for (name, _), count in self.by_operation.items() if name == service)

    def describe(self) -> str:
        """Return operations with counts, the most frequent first."""
        return ", ".join(f"{count} {operation}" for (_, operation), count in self.by_operation.most_common())


class BootingCompute(Ec2Compute):
    """EC2 adapter that calls `on_launch` with the ids of new instances."""

    on_launch: Callable[[Sequence[str]], Awaitable[None]]

    async def launch(self, request: LaunchRequest) -> LaunchResult:
        result = await super().launch(request)
        await self.on_launch([launched.instance_id for launched in result.instances])
        return result


@dataclass(kw_only=True)
class BenchmarkPool:
    """A pool with its own table, queues and launch template."""

    name: str
    environment: BenchmarkEnvironment
    settings: Settings
    prefix: str = ""
    #: Behaviour of new instances.
    boot_s: float = 0.0
    registration_s: float = 0.0
    #: Replacements for the environment's clients.
    ec2: Any = None
    github: Callable[[CallCounter], GitHubClient] | None = None

    @property
    def table(self) -> str:
        return f"remuda-{self.name}"

    @asynccontextmanager
    async def context(self, *, credentialed: bool = False) -> AsyncIterator[Context]:
        """Open a context without cached state, like in a new process, but with existing clients."""
        clock, ids, calls, environment = SystemClock(), SystemIds(), CallCounter(), self.environment
        store = self.store(calls)
        compute = BootingCompute(
            client=self.ec2 or environment.ec2,
            pool=self.name,
            clock=clock,
            ids=ids,
            calls=calls,
            read_parameter=_no_parameter,
        )
        compute.on_launch = self.start_agents
        github = (self.github or environment.github)(calls) if credentialed else None
        try:
            yield Context(
                pool_name=self.name,
                store=store,
                pool=SqsResourcePool(client=environment.sqs, prefix=self.table, clock=clock, ids=ids, calls=calls),
                compute=compute,
                github=github,
                clock=clock,
                ids=ids,
                event_log=SilentEventLog(),
                calls=calls,
            )
        finally:
            await store.close()
            if github is not None:
                await github.close()

    def store(self, calls: CallCounter) -> DynamoInstanceStore:
        async def newest_prefix() -> str:
            return await role_key_prefix(self.environment.iam, self.settings.launch_options(), calls)

        return DynamoInstanceStore(
            client=self.environment.dynamodb,
            table=self.table,
            clock=SystemClock(),
            ids=SystemIds(),
            calls=calls,
            newest_prefix=newest_prefix,
        )

    async def refresh(self, *, sweep_only: bool = False) -> RefreshResult:
        async with self.context(credentialed=True) as context:
            done = await refresh(context, None if sweep_only else desired(self.settings, pool=self.name))
        if done.errors:
            raise RuntimeError(f"refresh failed: {done.errors}")
        if not self.prefix:
            self.prefix = await role_key_prefix(self.environment.iam, self.settings.launch_options(), CallCounter())
        return done

    def request(self, number: int, **changed: Any) -> ProvisionRequest:
        values: dict[str, Any] = {
            "run_id": self.environment.next_run(),
            "attempt": 1,
            "count": number,
            "resource_class": CLASS,
            "usage_class": UsageClass.ON_DEMAND,
            "patterns": TypePatterns.parse("*"),
            "scope": SCOPE,
            "tier": Tier.TRUSTED,
        }
        return ProvisionRequest(**{**values, **changed})

    async def provision(self, number: int, **changed: Any) -> ProvisionResult:
        async with self.context() as context:
            return await provision(context, self.request(number, **changed))

    async def release(self, run_id: str) -> ReleaseResult:
        async with self.context() as context:
            done = await release(context, run_id=run_id, attempt=1)
        if done.errors or len(done.of(ReleaseStatus.RELEASED)) != len(done.outcomes):
            raise RuntimeError(f"release failed: {done.errors or done.outcomes}")
        return done

    async def fill(self, number: int) -> list[Instance]:
        """Create, use and release `number` instances, so that they are warm."""
        made = await self.provision(number)
        await self.release(made.run_id)
        return [item.instance for item in made.instances]

    async def start_agents(self, instance_ids: Sequence[str]) -> None:
        await self.environment.agents.start(
            AgentGroup(
                pool=self.name,
                prefix=self.prefix,
                instance_ids=instance_ids,
                ready_after_s=self.boot_s,
                registration_s=self.registration_s,
                shared=len(instance_ids) > MAX_SEPARATE_STORES,
            )
        )

    async def write(self, records: Collection[Instance], reports: Collection[Report] = ()) -> None:
        """Write records directly, in the form that regular changes leave behind."""
        keys = ItemKeys(prefix=self.prefix)
        await self.put([control_item(keys, record) for record in records])
        await self.put(
            [items.document_item(keys.report(report.instance_id), report) for report in reports],
        )

    async def put(self, new: Sequence[Item]) -> None:
        requests: list[Any] = [{"PutRequest": {"Item": without_nulls(item)}} for item in new]
        batches = list(chunks(requests, WRITE_BATCH))
        for part in chunks(batches, WRITERS):
            await gather(self.environment.dynamodb.batch_write_item(RequestItems={self.table: batch}) for batch in part)


def without_nulls(item: Item) -> Item:
    """Remove attributes without a value; the store omits them."""
    return {name: value for name, value in item.items() if "NULL" not in value}


def control_item(keys: ItemKeys, record: Instance) -> Item:
    item = {**items.document_item(keys.control(record.instance_id), record)}
    if record.provision_id:
        item[items.PROVISION_PK] = items.attribute(items.provision_partition(record.provision_id))
        item[items.PROVISION_SK] = items.attribute(record.instance_id)
    if record.state is not State.TERMINATED:
        item[items.LIVE_PK] = items.attribute(items.shard_of(record.instance_id))
        item[items.LIVE_SK] = items.attribute(to_text(record.threshold))
    if record.forget_at is not None:
        item[items.TTL] = items.seconds(record.forget_at)
    return item


def idle(number: int, **changed: Any) -> Instance:
    """An idle instance that is published and has time left."""
    now = to_milliseconds(SystemClock().now())
    warm = instance(number, created_at=now, threshold=now + timedelta(hours=1), announced_at=now, scope=SCOPE)
    return replace(warm, **changed)


def fresh_report(record: Instance) -> Report:
    now = to_milliseconds(SystemClock().now())
    return Report(instance_id=record.instance_id, beat=1, beat_at=now)


@dataclass(kw_only=True)
class BenchmarkEnvironment:
    servers: AwsStack
    size: Size
    clients: AwsClients
    agents: AgentHostProcess
    requests: RequestCounter
    dynamodb: Any
    sqs: Any
    ec2: Any
    iam: Any
    _runs: Any = None
    _pools: Any = None

    def __post_init__(self) -> None:
        self._runs = count(7_001)
        self._pools = count(1)

    def next_run(self) -> str:
        return str(next(self._runs))

    def new_pool(self, **changed: Any) -> BenchmarkPool:
        """Configure a pool without creating its resources."""
        name = f"bench{next(self._pools)}"
        return BenchmarkPool(name=name, environment=self, settings=self.new_settings(name, **changed))

    def new_settings(self, pool: str, **changed: Any) -> Settings:
        flags = {"backend": "aws", "pool": pool, "github_scope": SCOPE, **SETTINGS, **changed}
        flags |= {key.replace("-", "_"): value for key, value in self.servers.launch.items()}
        return load(flags, environ=self.servers.environment())

    async def pool(self, **changed: Any) -> BenchmarkPool:
        made = self.new_pool(**changed)
        await made.refresh()
        return made

    def github(self, calls: CallCounter) -> GitHubClient:
        return GitHubClient(
            api_url=self.servers.github.url,
            token=self.servers.github.token,
            clock=SystemClock(),
            ids=SystemIds(),
            calls=calls,
        )

    async def clear(self) -> None:
        """Stop all agents. Instances of earlier benchmarks belong to other pools."""
        await self.agents.stop()


@asynccontextmanager
async def open_environment(servers: AwsStack, size: Size) -> AsyncIterator[BenchmarkEnvironment]:
    os.environ.update(servers.environment())
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(AwsClients())
        agents = await stack.enter_async_context(agent_host())
        requests = RequestCounter()
        environment = BenchmarkEnvironment(
            servers=servers,
            size=size,
            clients=clients,
            agents=agents,
            requests=requests,
            dynamodb=await clients.dynamodb(),
            sqs=await clients.sqs(),
            ec2=await clients.service("ec2", "EC2", client_config()),
            iam=await clients.service("iam", "IAM", config()),
        )
        for client in (environment.dynamodb, environment.sqs, environment.ec2, environment.iam):
            requests.watch(client)
        yield environment


async def _no_parameter(name: str) -> str:
    raise AssertionError(f"the image is an id, not the parameter {name}")
