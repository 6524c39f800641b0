"""Commands behind proxies that inject network and service faults: no instance is lost or leaked.

The commands are real processes behind proxies that throttle, fail, cut and delay requests. The agents run in this
process, without proxies. After the faults and some sweeps, every record must agree with EC2 and GitHub, and every idle
instance must serve the next run.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from remuda.config.declaration import variable
from remuda.config.settings import Settings
from remuda.config.sources import load
from remuda.controlplane.context import Context, read_config
from remuda.controlplane.provision import ProvisionResult, provision
from remuda.controlplane.refresh import refresh
from remuda.controlplane.release import release
from remuda.domain.instance import Assignment, State
from remuda.domain.pool_config import runner_name
from remuda.domain.provision import ProvisionStatus
from remuda.domain.resources import ResourceClass
from remuda.domain.timestamps import to_milliseconds
from remuda.domain.transitions import Actor, Release, advance
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import desired, open_context
from tests.support.aws.fault_proxy import (
    ANY,
    Fault,
    FaultProxy,
    FaultSchedule,
    after_forwarding,
    cut_connection,
    fail,
    fault_proxy,
    first_of_every,
    first_per_operation,
    never_respond,
    respond_late,
)
from tests.support.aws.in_process_agents import InProcessAgents, PoolAgents, in_process_agents
from tests.support.aws.stack import AwsStack
from tests.support.cli import LIMIT_S, CommandResult, run_cli
from tests.support.records import launch_request
from tests.support.records import provision as provision_record
from tests.support.world import provision_request

#: Many commands run one after the other, on a computer that may be busy with other tests.
pytestmark = pytest.mark.timeout(900)

POLL_S = 0.5
#: Cases that run in parallel. More would mostly wait for each other.
AT_ONCE = 5
#: Threads that wait for commands. Separate from those of the event loop, which agents and proxies need.
COMMAND_THREADS = ThreadPoolExecutor(AT_ONCE)
#: The states in which an instance may stay.
SETTLED = frozenset({State.IDLE, State.RUNNING})
RUN = "4711"
#: Success or a temporary failure.
EXPECTED_CODES = frozenset({0, 4})
TIMES: dict[str, float] = {
    "idle_time_sec": 600,
    "release_time_sec": 60,
    "margin_sec": 0.5,
    "unrecorded_grace_sec": 1,
    "stale_registration_grace_sec": 1,
    "gone_after_sec": 1,
    "republish_sec": 1,
}
CLASSES = ("--resource-class-config", '{"large": {"cpu": 2, "mmem": 4096}}')
LARGE = ResourceClass(name="large", cpu=2, memory_mib=4096)
SERVICES = ("dynamodb", "sqs", "ec2")
#: By kind and service.
FAULTS: dict[str, dict[str, Fault]] = {
    "throttled": {
        "dynamodb": fail(400, "ProvisionedThroughputExceededException"),
        "sqs": fail(400, "RequestThrottled"),
        "ec2": fail(503, "RequestLimitExceeded"),
    },
    "server error": {name: fail(500, "InternalError" if name == "ec2" else "InternalServerError") for name in SERVICES},
    "response lost": dict.fromkeys(SERVICES, after_forwarding(cut_connection)),
}

Schedules = Mapping[str, FaultSchedule]


@pytest.fixture(scope="module")
def stack(stack: AwsStack) -> Iterator[AwsStack]:
    aws = {name: value for name, value in stack.environment().items() if name.startswith("AWS_")}
    with patch.dict(os.environ, aws):
        yield stack


@dataclass(kw_only=True)
class PoolBehindProxies:
    """A pool on the shared servers, with its control plane in this process, without proxies, and its agents."""

    stack: AwsStack
    settings: Settings
    context: Context
    agents: PoolAgents
    #: By service, for the commands only.
    proxies: Mapping[str, FaultProxy]

    @property
    def name(self) -> str:
        return self.settings.pool

    async def run_with_faults(self, schedules: Schedules, *arguments: str, **variables: str) -> CommandResult:
        """Run a command while faults are injected by service."""
        urls = {f"AWS_ENDPOINT_URL_{service.upper()}": proxy.url for service, proxy in self.proxies.items()}
        environment = self.stack.environment(**urls, **variables)
        command = partial(run_cli, [*arguments, "--pool", self.name, "--json"], environment=environment)
        for service, schedule in schedules.items():
            self.proxies[service].always[ANY] = schedule
        try:
            result = await asyncio.get_running_loop().run_in_executor(COMMAND_THREADS, command)
        finally:
            for proxy in self.proxies.values():
                proxy.always.clear()
        assert "Traceback" not in result.stderr, result.stderr
        assert result.code in EXPECTED_CODES, result
        return result

    async def provision(self, run_id: str, count: int) -> ProvisionResult:
        return await provision(self.context, provision_request(run_id, count=count, scope=self.settings.github_scope))

    async def release(self, run_id: str) -> None:
        result = await release(self.context, run_id=run_id, attempt=1)
        assert not result.errors, result.errors

    def flags(self) -> list[str]:
        """The configuration of the pool as flags of `refresh`."""
        return ["--github-scope", self.settings.github_scope, *self.stack.flags(), *CLASSES]

    async def settle(self) -> None:
        """Sweep until all records agree with EC2 and GitHub."""
        deadline = self.context.clock.monotonic() + LIMIT_S
        while True:
            swept = await refresh(self.context, None)
            assert not swept.errors, swept.errors
            problems = await self._problems()
            if not problems:
                return
            assert self.context.clock.monotonic() < deadline, problems
            await asyncio.sleep(POLL_S)

    async def _problems(self) -> list[str]:
        records = {item.instance_id: item for item in await self.context.store.find(frozenset(State))}
        kept = {key: item for key, item in records.items() if item.state is not State.TERMINATED}
        problems = [f"{key} is {item.state}" for key, item in kept.items() if item.state not in SETTLED]
        live = await self.agents.live()
        problems += [f"{key} is on EC2 without a record" for key in live - kept.keys()]
        problems += [f"{key} is {kept[key].state}, but not on EC2" for key in kept.keys() - live]
        running = [item for item in kept.values() if item.state is State.RUNNING]
        for item in running:
            held = await self.context.store.get_provision(item.holder) if item.holder is not None else None
            if (
                held is None
                or held.status is not ProvisionStatus.COMMITTED
                or item.instance_id not in held.instance_ids
            ):
                problems.append(f"{item.instance_id} is running for {held}")
        async with self.stack.github_client() as github:
            names = {item.name for item in await github.runners() if item.scope == self.settings.github_scope}
        expected = {runner_name(self.name, item.epoch, item.instance_id) for item in running}
        if names != expected:
            problems.append(f"GitHub has {sorted(names)}, not {sorted(expected)}")
        return problems

    async def check(self, *run_ids: str) -> None:
        """Check that no instance leaked and that all idle instances serve the next run."""
        await self.settle()
        for run_id in run_ids:
            await self.release(run_id)
        await self.settle()
        idle = await self.context.store.find({State.IDLE})
        assert await self.context.store.find({State.RUNNING}) == []
        if idle:
            assert (await self.provision("next", len(idle))).reused == len(idle)


@asynccontextmanager
async def new_pool(stack: AwsStack, agents: InProcessAgents) -> AsyncIterator[PoolBehindProxies]:
    name = secrets.token_hex(5)
    given: dict[str, Any] = {**{key.replace("-", "_"): value for key, value in stack.launch.items()}, **TIMES}
    given |= {
        "backend": "aws",
        "pool": name,
        "github_scope": f"octo/{name}",
        "github_api_url": stack.github.url,
        "github_token": stack.github.token,
        # A single class, so that refresh creates a single queue.
        "resource_class_config": {LARGE.name: {"cpu": LARGE.cpu, "mmem": LARGE.memory_mib}},
    }
    settings = load(given, environ={})
    urls = {"dynamodb": os.environ["AWS_ENDPOINT_URL_DYNAMODB"], "sqs": stack.store.url, "ec2": stack.ec2.url}
    async with AsyncExitStack() as exits:
        proxies = {service: await exits.enter_async_context(fault_proxy(url)) for service, url in urls.items()}
        context = await exits.enter_async_context(open_context(settings, SilentEventLog(), needs_github=True))
        await refresh(context, desired(settings, pool=name))
        pool_agents = await exits.enter_async_context(agents.of_pool(name, context.store))
        yield PoolBehindProxies(stack=stack, settings=settings, context=context, agents=pool_agents, proxies=proxies)


# Commands with faults. Each returns the result of the command after it has checked the pool.

CommandWithFaults = Callable[[PoolBehindProxies, Schedules, float], Awaitable[CommandResult]]


async def provision_with_faults(pool: PoolBehindProxies, schedules: Schedules, timeout_s: float) -> CommandResult:
    """Provision two runners while one instance is idle."""
    await pool.provision("before", 1)
    await pool.release("before")
    scope = pool.settings.github_scope
    result = await pool.run_with_faults(
        schedules,
        *("provision", "--run-id", RUN, "--instance-count", "2", "--github-scope", scope),
        *("--provision-timeout-sec", f"{timeout_s:g}"),
    )
    await pool.settle()
    running = {item.instance_id for item in await pool.context.store.find({State.RUNNING})}
    if result.code == 0:
        assert running == {item["instance_id"] for item in result.document["instances"]}
        assert len(running) == 2
    await pool.check(RUN)
    return result


async def release_with_faults(pool: PoolBehindProxies, schedules: Schedules, timeout_s: float) -> CommandResult:
    await pool.provision(RUN, 2)
    result = await pool.run_with_faults(schedules, "release", "--run-id", RUN)
    if result.code == 0:
        assert len(result.document["released"]) == 2, result
    await pool.check(RUN)
    assert len(await pool.context.store.find({State.RUNNING})) == 2, "the next run has both"
    return result


async def refresh_with_faults(pool: PoolBehindProxies, schedules: Schedules, timeout_s: float) -> CommandResult:
    """Refresh a pool in which each sweep has something to do."""
    reclaimed, releasing = [item.instance.instance_id for item in (await pool.provision("before", 2)).instances]
    await interrupt_release(pool, releasing)
    await pool.agents.reclaim(reclaimed)
    await launch_unrecorded_instance(pool)
    await register_stale_runner(pool)
    await abandon_provision(pool)
    # Wait for the grace periods to end.
    await asyncio.sleep(TIMES["gone_after_sec"] + TIMES["margin_sec"])
    times = {variable(name): f"{value:g}" for name, value in TIMES.items()}
    result = await pool.run_with_faults(schedules, "refresh", *pool.flags(), **times)
    if result.code == 0:
        assert result.document["errors"] == [], result
    await pool.check("before")
    return result


async def interrupt_release(pool: PoolBehindProxies, instance_id: str) -> None:
    """Leave an instance like a process that dies during its release."""
    context = pool.context
    record = await context.store.get(instance_id)
    assert record is not None
    config = await read_config(context)
    event = Release(
        release_time_s=TIMES["release_time_sec"], credential=config.tokens_for(pool.settings.github_scope).removal
    )
    await context.store.apply(advance(record, event, by=Actor.RELEASE, now=context.clock.now(), why="a test"))


async def launch_unrecorded_instance(pool: PoolBehindProxies) -> None:
    config = await read_config(pool.context)
    await pool.context.compute.launch(
        launch_request(
            secrets.token_hex(8),
            launch=config.launch,
            scope=pool.settings.github_scope,
            margin_s=TIMES["margin_sec"],
        )
    )


async def register_stale_runner(pool: PoolBehindProxies) -> None:
    """Register a runner of an instance that does not exist."""
    config = await read_config(pool.context)
    scope = pool.settings.github_scope
    assignment = Assignment(
        url=f"{pool.stack.github.url}/{scope}",
        runner_name=runner_name(pool.name, 1, "i-0123456789abcdef0"),
        labels=("stale",),
        credential=config.tokens_for(scope).registration,
    )
    assert (await pool.agents.runner().register(assignment)).ok


async def abandon_provision(pool: PoolBehindProxies) -> None:
    now = to_milliseconds(pool.context.clock.now())
    created_at, deadline = now - timedelta(seconds=60), now - timedelta(seconds=30)
    abandoned = provision_record(run_id="abandoned", count=1, created_at=created_at, deadline=deadline)
    await pool.context.store.put_provision(abandoned)


COMMANDS: dict[str, CommandWithFaults] = {
    "provision": provision_with_faults,
    "release": release_with_faults,
    "refresh": refresh_with_faults,
}
#: The services that each command uses.
USED_SERVICES = {
    "provision": SERVICES,
    "release": ("dynamodb", "sqs"),
    "refresh": SERVICES,
}


@dataclass(frozen=True, kw_only=True)
class FaultCase:
    command: str
    schedules: Schedules
    timeout_s: float
    name: str = ""

    async def run(self, stack: AwsStack, agents: InProcessAgents) -> CommandResult:
        try:
            async with new_pool(stack, agents) as pool:
                result = await COMMANDS[self.command](pool, self.schedules, self.timeout_s)
                unused = {name: pool.proxies[name].requests for name, item in self.schedules.items() if not item.hits}
                assert not unused, f"no fault was injected: {unused} {result}"
                return result
        except Exception as error:
            error.add_note(f"{self.command}: {self.name}")
            raise


async def run_all(stack: AwsStack, cases: Sequence[FaultCase]) -> list[CommandResult]:
    """Run several cases in parallel, each with its own pool: much of the time passes in pauses between retries."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def run_limited(case: FaultCase, agents: InProcessAgents) -> CommandResult:
        async with limit:
            return await case.run(stack, agents)

    async with in_process_agents(stack) as agents, asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_limited(case, agents)) for case in cases]
    return [task.result() for task in tasks]


#: Command, service, operation and kind of fault. Lost responses matter most for writes.
PERSISTENT_FAULTS = (
    ("provision", "dynamodb", "PutItem", "response lost"),
    ("provision", "dynamodb", "UpdateItem", "response lost"),
    ("provision", "sqs", "ReceiveMessage", "response lost"),
    ("provision", "ec2", "CreateFleet", "response lost"),
    ("release", "dynamodb", "UpdateItem", "throttled"),
    ("release", "sqs", "SendMessageBatch", "response lost"),
    ("refresh", "dynamodb", "Query", "throttled"),
    ("refresh", "ec2", "DescribeInstances", "throttled"),
    ("refresh", "ec2", "TerminateInstances", "response lost"),
)


async def test_persistent_faults_lose_and_leak_nothing(stack: AwsStack):
    """More faults in a row than retries: commands may fail, with an error."""
    cases = [
        FaultCase(
            command=command,
            schedules={service: first_of_every(12, operation, FAULTS[kind][service], hits=8)},
            timeout_s=30,
            name=f"{service} {operation} {kind}",
        )
        for command, service, operation, kind in PERSISTENT_FAULTS
    ]
    codes = [result.code for result in await run_all(stack, cases)]
    assert any(codes), "no command failed: the faults were not persistent enough"


@pytest.mark.parametrize("first", [0, 1])
async def test_one_fault_per_operation_is_retried(stack: AwsStack, first: int):
    """Each command meets each kind of fault, though not at each service."""
    kinds = list(FAULTS)
    cases = [
        FaultCase(
            command=command,
            schedules={
                service: first_per_operation(FAULTS[kinds[(first + number) % len(kinds)]][service])
                for number, service in enumerate(USED_SERVICES[command])
            },
            timeout_s=100,
            name=f"single faults, starting with {kinds[first]}",
        )
        for command in COMMANDS
    ]
    assert {result.code for result in await run_all(stack, cases)} == {0}


@pytest.mark.parametrize("command", ["provision", "refresh"])
async def test_slow_responses_do_not_fail_a_command(stack: AwsStack, command: str):
    slow = {service: first_per_operation(respond_late(0.3)) for service in USED_SERVICES[command]}
    (result,) = await run_all(stack, [FaultCase(command=command, schedules=slow, timeout_s=100)])
    assert result.code == 0, result


async def test_write_without_response_is_not_applied_twice(stack: AwsStack):
    """After its timeout the client finds that the write was its own."""
    unanswered = first_per_operation(after_forwarding(never_respond), only="UpdateItem")
    case = FaultCase(command="provision", schedules={"dynamodb": unanswered}, timeout_s=100)
    (result,) = await run_all(stack, [case])
    assert result.code == 0, result
