"""Faults at the wire: whatever DynamoDB, SQS and EC2 do to a command, nothing is lost and nothing leaks.

The commands are real processes behind proxies that throttle, fail, cut and delay. The machines are the real agent loop
in this process, past the proxies. When the weather has cleared and sweeps have run, every record must agree with EC2
and GitHub, and every idle machine must be there for the next run.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from pydantic import SecretStr

from remuda.config.settings import Settings
from remuda.controlplane.context import Context, read_config
from remuda.controlplane.provision import ProvisionRequest, ProvisionResult, provision
from remuda.controlplane.refresh import refresh
from remuda.controlplane.release import release
from remuda.domain.instance import Assignment, State
from remuda.domain.pool_config import runner_name
from remuda.domain.provision import Provision, ProvisionStatus
from remuda.domain.resources import ResourceClass, RunnerRequest, Tier, TypePatterns, UsageClass
from remuda.domain.timestamps import to_milliseconds
from remuda.domain.transitions import Actor, Release, advance
from remuda.ports.compute import LaunchRequest
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import desired, open_context
from tests.support.aws_servers import LIMIT_S, AwsServers, Done, aws_servers, forked, settings_of
from tests.support.fault_schedule import Weather, first_of_each, late, refuses, storm
from tests.support.in_process_agents import Herd, Herds, herds
from tests.support.wire import ANY, Fault, Wire, after_success, cut, hang, wire

#: Many commands, one after the other, on a machine that may be busy with other tests.
pytestmark = pytest.mark.timeout(900)

PAUSE_S = 0.5
#: More would mostly wait for each other.
AT_ONCE = 5
#: Where everything must come to rest.
SETTLED = frozenset({State.IDLE, State.RUNNING})
RUN = "4711"
#: Success, or a typed error: try again later.
HONEST = frozenset({0, 4})
TIMES: dict[str, float] = {
    "idle_time_sec": 600,
    "release_time_sec": 60,
    "margin_sec": 0.5,
    "unrecorded_grace_sec": 1,
    "ghost_grace_sec": 1,
    "gone_after_sec": 1,
    "reannounce_sec": 1,
}
CLASSES = ("--resource-class-config", '{"large": {"cpu": 2, "mmem": 4096}}')
#: What each service says when it is asked too much.
THROTTLES = {
    "dynamodb": refuses(400, "ProvisionedThroughputExceededException"),
    "sqs": refuses(400, "RequestThrottled"),
    "ec2": refuses(503, "RequestLimitExceeded"),
}
BROKEN = {name: refuses(500, "InternalError" if name == "ec2" else "InternalServerError") for name in THROTTLES}


def everywhere(fault: Fault) -> dict[str, Fault]:
    return dict.fromkeys(THROTTLES, fault)


FAULTS: dict[str, dict[str, Fault]] = {
    "throttled": THROTTLES,
    "broken": BROKEN,
    "answer lost": everywhere(after_success(cut)),
}


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AwsServers]:
    with aws_servers(tmp_path_factory.mktemp("cloud")) as started, pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment().items():
            if name.startswith("AWS_"):
                patch.setenv(name, value)
        yield started


@dataclass(kw_only=True)
class Pool:
    """A pool of its own on the shared servers: its control plane here, past the proxies, and its agents."""

    cloud: AwsServers
    settings: Settings
    context: Context
    herd: Herd
    #: Before each service, for the commands only.
    wires: Mapping[str, Wire]

    @property
    def name(self) -> str:
        return self.settings.pool

    async def command(self, weather: Mapping[str, Weather], *arguments: str) -> Done:
        """In this weather, which ends with it."""
        urls = {f"AWS_ENDPOINT_URL_{service.upper()}": between.url for service, between in self.wires.items()}
        for service, fault in weather.items():
            self.wires[service].always[ANY] = fault
        try:
            done = await forked(*arguments, "--pool", self.name, environment=self.cloud.environment(**urls))
        finally:
            for between in self.wires.values():
                between.always.clear()
        assert "Traceback" not in done.told, done.told
        assert done.code in HONEST, done
        return done

    async def provision(self, run_id: str, count: int) -> ProvisionResult:
        return await provision(self.context, self._order(run_id, count))

    async def release(self, run_id: str) -> None:
        result = await release(self.context, run_id=run_id, attempt=1)
        assert not result.errors, result.errors

    def _order(self, run_id: str, count: int) -> ProvisionRequest:
        return ProvisionRequest(
            run_id=run_id,
            attempt=1,
            count=count,
            resource_class="large",
            usage_class=UsageClass.ON_DEMAND,
            patterns=TypePatterns.parse("*"),
            scope=self.settings.github_scope,
            tier=Tier.TRUSTED,
        )

    def flags(self) -> list[str]:
        """Of refresh: as the pool is configured."""
        return [*("--github-scope", self.settings.github_scope), *self.cloud.flags(), *settings_of(**TIMES), *CLASSES]

    async def settle(self) -> None:
        """Sweeps, until there is nothing to complain about."""
        limit = self.context.clock.monotonic() + LIMIT_S
        while True:
            swept = await refresh(self.context, None)
            assert not swept.errors, swept.errors
            problems = await self._problems()
            if not problems:
                return
            assert self.context.clock.monotonic() < limit, problems
            await asyncio.sleep(PAUSE_S)

    async def _problems(self) -> list[str]:
        records = {item.instance_id: item for item in await self.context.store.find(frozenset(State))}
        kept = {key: item for key, item in records.items() if item.state is not State.TERMINATED}
        problems = [f"{key} is {item.state}" for key, item in kept.items() if item.state not in SETTLED]
        live = await self.herd.live()
        problems += [f"EC2 has {key}, no record does" for key in live - kept.keys()]
        problems += [f"{key} is {kept[key].state}, and not on EC2" for key in kept.keys() - live]
        running = [item for item in kept.values() if item.state is State.RUNNING]
        for item in running:
            held = await self.context.store.get_provision(item.run_id, item.provision_id)
            if (
                held is None
                or held.status is not ProvisionStatus.COMMITTED
                or item.instance_id not in held.instance_ids
            ):
                problems.append(f"{item.instance_id} is running for {held}")
        async with self.cloud.sim() as sim:
            names = {item.name for item in await sim.runners() if item.scope == self.settings.github_scope}
        expected = {runner_name(self.name, item.epoch, item.instance_id) for item in running}
        if names != expected:
            problems.append(f"GitHub has {sorted(names)}, not {sorted(expected)}")
        return problems

    async def prove(self, *run_ids: str) -> None:
        """Nothing is left over, and nothing is lost: all that is idle serves the next run."""
        await self.settle()
        for run_id in run_ids:
            await self.release(run_id)
        await self.settle()
        idle = await self.context.store.find({State.IDLE})
        assert await self.context.store.find({State.RUNNING}) == []
        if idle:
            assert (await self.provision("next", len(idle))).reused == len(idle)


@asynccontextmanager
async def pool_on(cloud: AwsServers, machines: Herds) -> AsyncIterator[Pool]:
    name = secrets.token_hex(5)
    given: dict[str, Any] = {**{key.replace("-", "_"): value for key, value in cloud.launch.items()}, **TIMES}
    settings = Settings(
        backend="aws",
        pool=name,
        github_scope=f"octo/{name}",
        github_api_url=cloud.github.url,
        github_token=SecretStr(cloud.github.token),
        # One queue is enough.
        resource_class_config=(ResourceClass(name="large", cpu=2, memory_mib=4096),),
        **given,
    )
    urls = {"dynamodb": os.environ["AWS_ENDPOINT_URL_DYNAMODB"], "sqs": cloud.store.url, "ec2": cloud.ec2.url}
    async with AsyncExitStack() as stack:
        wires = {service: await stack.enter_async_context(wire(url)) for service, url in urls.items()}
        context = await stack.enter_async_context(open_context(settings, SilentEventLog(), credentialed=True))
        await refresh(context, desired(settings, pool=name))
        agents = await stack.enter_async_context(machines.herd(name, context.store))
        yield Pool(cloud=cloud, settings=settings, context=context, herd=agents, wires=wires)


# What is done in bad weather. Each returns what the command said, after having proven that all is well again.

Act = Callable[[Pool, Mapping[str, Weather], float], Awaitable[Done]]


async def act_provision(pool: Pool, weather: Mapping[str, Weather], timeout_s: float) -> Done:
    """One machine is warm, one more is needed."""
    await pool.provision("before", 1)
    await pool.release("before")
    scope = pool.settings.github_scope
    done = await pool.command(
        weather,
        *("provision", "--run-id", RUN, "--instance-count", "2", "--github-scope", scope),
        *("--provision-timeout-sec", f"{timeout_s:g}"),
    )
    await pool.settle()
    running = {item.instance_id for item in await pool.context.store.find({State.RUNNING})}
    if done.code == 0:
        assert running == {item["instance_id"] for item in done.document["instances"]}
        assert len(running) == 2
    await pool.prove(RUN)
    return done


async def act_release(pool: Pool, weather: Mapping[str, Weather], timeout_s: float) -> Done:
    await pool.provision(RUN, 2)
    done = await pool.command(weather, "release", "--run-id", RUN)
    if done.code == 0:
        assert len(done.document["released"]) == 2, done
    await pool.prove(RUN)
    assert len(await pool.context.store.find({State.RUNNING})) == 2  # the next run's
    return done


async def act_refresh(pool: Pool, weather: Mapping[str, Weather], timeout_s: float) -> Done:
    """There is something to do for each sweep."""
    gone, waiting = [item.instance.instance_id for item in (await pool.provision("before", 2)).instances]
    await interrupt_release(pool, waiting)
    await pool.herd.pull(gone)
    await launch_stray(pool)
    await register_ghost(pool)
    await abandon_provision(pool)
    # Past the graces.
    await asyncio.sleep(TIMES["gone_after_sec"] + TIMES["margin_sec"])
    done = await pool.command(weather, "refresh", *pool.flags())
    if done.code == 0:
        assert done.document["errors"] == [], done
    await pool.prove("before")
    return done


async def interrupt_release(pool: Pool, instance_id: str) -> None:
    """Somebody began to release it and is gone."""
    context = pool.context
    record = await context.store.get(instance_id)
    assert record is not None
    config = await read_config(context)
    event = Release(
        release_time_s=TIMES["release_time_sec"], credential=config.tokens_for(pool.settings.github_scope).removal
    )
    await context.store.apply(advance(record, event, by=Actor.RELEASE, now=context.clock.now(), why="a test"))


async def launch_stray(pool: Pool) -> None:
    """A machine of this pool that no record knows."""
    config = await read_config(pool.context)
    large = ResourceClass(name="large", cpu=2, memory_mib=4096)
    request = RunnerRequest(
        resource_class=large,
        usage_class=UsageClass.ON_DEMAND,
        patterns=TypePatterns.parse("*"),
        tier=Tier.TRUSTED,
    )
    await pool.context.compute.launch(
        LaunchRequest(
            provision_id="p-lost",
            client_token=secrets.token_hex(8),
            count=1,
            request=request,
            launch=config.launch,
            scope=pool.settings.github_scope,
            first_life_s=600,
            margin_s=TIMES["margin_sec"],
        )
    )


async def register_ghost(pool: Pool) -> None:
    config = await read_config(pool.context)
    scope = pool.settings.github_scope
    ghost = Assignment(
        url=f"{pool.cloud.github.url}/{scope}",
        runner_name=runner_name(pool.name, 1, "i-0123456789abcdef0"),
        labels=("ghost",),
        credential=config.tokens_for(scope).registration,
    )
    assert (await pool.herd.runner().configure(ghost)).ok


async def abandon_provision(pool: Pool) -> None:
    now = to_milliseconds(pool.context.clock.now())
    await pool.context.store.put_provision(
        Provision(
            provision_id="p-abandoned",
            run_id="abandoned",
            attempt=1,
            resource_class="large",
            count=1,
            created_at=now - timedelta(seconds=60),
            deadline=now - timedelta(seconds=30),
        )
    )


#: What each command talks to.
TOUCHED = {
    "provision": ("dynamodb", "sqs", "ec2"),
    "release": ("dynamodb", "sqs"),
    "refresh": ("dynamodb", "sqs", "ec2"),
}
ACTS: dict[str, Act] = {"provision": act_provision, "release": act_release, "refresh": act_refresh}


#: What is struck, in which command, and how: an answer that is lost matters most where something was written.
STRUCK = (
    ("provision", "dynamodb", "PutItem", "answer lost"),
    ("provision", "dynamodb", "UpdateItem", "answer lost"),
    ("provision", "sqs", "ReceiveMessage", "answer lost"),
    ("provision", "ec2", "CreateFleet", "answer lost"),
    ("release", "dynamodb", "UpdateItem", "throttled"),
    ("release", "sqs", "SendMessageBatch", "answer lost"),
    ("refresh", "dynamodb", "Query", "throttled"),
    ("refresh", "ec2", "DescribeInstances", "throttled"),
    ("refresh", "ec2", "TerminateInstances", "answer lost"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    act: str
    weather: Mapping[str, Weather]
    timeout_s: float
    name: str = ""

    async def run(self, cloud: AwsServers, machines: Herds) -> Done:
        try:
            async with pool_on(cloud, machines) as pool:
                done = await ACTS[self.act](pool, self.weather, self.timeout_s)
                missed = {name: pool.wires[name].requests for name, it in self.weather.items() if not it.struck}
                assert not missed, f"no fault: {missed} {done}"
                return done
        except Exception as error:
            error.add_note(f"{self.act}: {self.name}")
            raise


async def all_of(cloud: AwsServers, cases: Sequence[Case]) -> list[Done]:
    """Some side by side, each on a pool of its own: much of the time is spent waiting for the weather to pass."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def in_turn(case: Case, machines: Herds) -> Done:
        async with turns:
            return await case.run(cloud, machines)

    async with (
        cloud.ec2.client() as ec2,
        herds(ec2=ec2, github_url=cloud.github.url) as machines,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(in_turn(case, machines)) for case in cases]
    return [task.result() for task in tasks]


async def test_a_storm_loses_and_leaks_nothing(cloud: AwsServers):
    """More faults in a row than calls are repeated: commands may fail, and say so."""
    cases = [
        Case(
            act=act,
            weather={service: storm(operation, FAULTS[fault][service], hits=8, of=12)},
            timeout_s=30,
            name=f"{service} {operation} {fault}",
        )
        for act, service, operation, fault in STRUCK
    ]
    codes = [done.code for done in await all_of(cloud, cases)]
    assert any(codes), "no command was impressed: this is no storm"


#: Each command meets each kind, though not at each service.
HICCUPS = ("throttled", "broken", "answer lost")


@pytest.mark.parametrize("first", [0, 1])
async def test_a_hiccup_of_every_call_is_not_noticed(cloud: AwsServers, first: int):
    cases = [
        Case(
            act=act,
            weather={
                service: first_of_each(FAULTS[HICCUPS[(first + number) % len(HICCUPS)]][service])
                for number, service in enumerate(TOUCHED[act])
            },
            timeout_s=100,
            name=f"hiccups from {HICCUPS[first]}",
        )
        for act in ACTS
    ]
    assert {done.code for done in await all_of(cloud, cases)} == {0}


@pytest.mark.parametrize("act", ["provision", "refresh"])
async def test_slow_answers_are_waited_for(cloud: AwsServers, act: str):
    slow = {service: first_of_each(late(0.3)) for service in TOUCHED[act]}
    (done,) = await all_of(cloud, [Case(act=act, weather=slow, timeout_s=100)])
    assert done.code == 0, done


async def test_a_write_that_is_done_but_never_answered_is_not_done_twice(cloud: AwsServers):
    """The client waits in vain for its answer, then finds what it wrote itself."""
    unanswered = first_of_each(after_success(hang), only="UpdateItem")
    (done,) = await all_of(cloud, [Case(act="provision", weather={"dynamodb": unanswered}, timeout_s=100)])
    assert done.code == 0, done
