"""Number of AWS calls of a warm provision and its release, counted by a proxy, and unreliable queue deliveries.

The real control plane with in-process agents.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, timedelta
from typing import Any

import pytest
from aiobotocore.session import AioSession
from aiohttp import web

from remuda.adapters.aws.clients import AwsClients
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.aws.sqs import SqsResourcePool
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.controlplane.context import Context
from remuda.controlplane.demand import DemandContext, DemandListener
from remuda.controlplane.provision import ProvisionRequest, provision
from remuda.controlplane.release import ReleaseStatus, release
from remuda.domain.errors import TimedOut
from remuda.domain.instance import Credential, Instance, State
from remuda.domain.pool_config import ScopeTokens, runner_name
from remuda.domain.resources import Tier, TypePatterns, UsageClass
from remuda.domain.runner_set import RunnerSet
from remuda.domain.signals import Signal
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import SilentEventLog
from remuda.ports.pool import BATCH
from remuda.ports.store import InstanceStore
from simulation.memory.compute import MemoryCloud, MemoryCompute
from simulation.memory.demand import MemoryDemandSource, MemoryScaleSets
from simulation.memory.github import MemoryGitHubServer
from tests.conformance.conftest import DynamoStores
from tests.support.aws.fault_proxy import JSON, Fault, FaultProxy, fault_proxy, hold_until, respond, respond_together
from tests.support.aws.servers import Ministack
from tests.support.iam import denied_requests, iam_requests
from tests.support.records import LONG_S, birth, instance, message, pool_config

N = 10
RUN = "4711"
SCOPE = "octo/repo"
#: Signal that an agent writes when it reads this state. Registration and removal take no time here.
SIGNALS = {State.CLAIMED: Signal.UD_REG_OK, State.RELEASING: Signal.UD_REMOVE_REG_REMOVE_RUN_OK}
ORDER = ProvisionRequest(
    run_id=RUN,
    attempt=1,
    count=N,
    resource_class="large",
    usage_class=UsageClass.ON_DEMAND,
    patterns=TypePatterns.parse("*"),
    scope=SCOPE,
    tier=Tier.TRUSTED,
)


#: Prefix of instance keys.
PREFIX = "AROAEXAMPLEEXAMPLE:"


async def newest_prefix() -> str:
    return PREFIX


class SignalCounter:
    """Counts the agents that have not signalled yet, per state."""

    def __init__(self, agents: int) -> None:
        self._missing = dict.fromkeys(SIGNALS, agents)
        self.all_signalled = {state: asyncio.Event() for state in SIGNALS}

    def record(self, state: State) -> None:
        self._missing[state] -= 1
        if not self._missing[state]:
            self.all_signalled[state].set()


@dataclass(frozen=True, kw_only=True)
class ProxiedAws:
    """The control plane's context, and the counting proxies between it and the servers."""

    context: Context
    dynamodb: FaultProxy
    sqs: FaultProxy

    def clear(self) -> None:
        self.dynamodb.requests.clear()
        self.sqs.requests.clear()

    def expect(self, signals: SignalCounter, state: State) -> None:
        """Start counting, and hold reads of reports until all agents have signalled."""
        self.clear()
        held = hold_until(signals.all_signalled[state], b'"report#')
        self.dynamodb.always = {"GetItem": held, "BatchGetItem": held}

    def polls(self) -> int:
        """Number of polling reads. They are counted separately because they depend on the duration."""
        counts = self.context.calls.by_service()["dynamodb"]
        return sum(count for name, count in counts.items() if name.startswith("poll:"))


def in_use(number: int) -> Instance:
    """An idle instance whose threshold is in the future on the real clock."""
    now = to_milliseconds(SystemClock().now())
    return replace(instance(number), created_at=now, threshold=now + timedelta(hours=1))


async def agent(store: InstanceStore, known: Instance, signals: SignalCounter) -> None:
    """A minimal agent: signals when its state changes."""
    current: Instance | None = known
    while True:
        current = await store.wait_for_control(known.instance_id, current, LONG_S)
        if current is not None and current.state in SIGNALS:
            await store.write_signal(known.instance_id, epoch=current.epoch, signal=SIGNALS[current.state])
            signals.record(current.state)


@asynccontextmanager
async def agents(store: InstanceStore, instances: list[Instance]) -> AsyncIterator[SignalCounter]:
    signals = SignalCounter(len(instances))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(agent(store, each, signals)) for each in instances]
        yield signals
        for task in tasks:
            task.cancel()


@pytest.fixture
async def aws(
    server: Ministack, aws_session: AioSession, table_name: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ProxiedAws]:
    clock, ids, calls = SystemClock(), SystemIds(), CallCounter()
    async with (
        fault_proxy(os.environ["AWS_ENDPOINT_URL_DYNAMODB"]) as dynamodb,
        fault_proxy(server.url) as sqs,
        AwsClients(session=aws_session) as clients,
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", dynamodb.url)
        monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", sqs.url)
        given: dict[str, Any] = {
            "client": await clients.dynamodb(),
            "table": table_name,
            "clock": clock,
            "ids": ids,
            "calls": calls,
        }
        await DynamoInstanceStore(**given, newest_prefix=newest_prefix).prepare()
        # A new process, with empty caches, unlike the one that prepared the table.
        store = DynamoInstanceStore(**given, newest_prefix=newest_prefix)
        pool = SqsResourcePool(client=await clients.sqs(), prefix=table_name, clock=clock, ids=ids, calls=calls)
        await pool.prepare(["large"])
        token = Credential(token="t0ken", expires_at=clock.now() + timedelta(hours=1))
        tokens = (ScopeTokens(scope=SCOPE, registration=token, removal=token),)
        await store.put_config(replace(pool_config(), tokens=tokens))
        yield ProxiedAws(
            context=Context(
                pool_name="test",
                store=store,
                pool=pool,
                compute=MemoryCompute(cloud=MemoryCloud(clock=clock), pool="test", calls=calls),
                github=None,
                clock=clock,
                ids=ids,
                event_log=SilentEventLog(),
                calls=calls,
            ),
            dynamodb=dynamodb,
            sqs=sqs,
        )
        await store.close()


@pytest.fixture
def agent_store(dynamo_stores: DynamoStores) -> Any:
    """The store of the agents, which bypasses the proxy. Opened before the proxy."""
    return dynamo_stores.open(calls=CallCounter(), key_prefix=PREFIX)


@pytest.fixture
def no_periodic_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable periodic work, whose number of calls depends on the speed of the test machine."""
    for pause in (
        "remuda.adapters.aws.dynamodb.changes.FLUSH_AFTER_S",
        "remuda.controlplane.provision.selection.OPEN_CHECK_TTL_S",
        "remuda.controlplane.provision.selection.OPEN_CHECK_INTERVAL_S",
        "remuda.controlplane.release.RECHECK_INTERVAL_S",
    ):
        monkeypatch.setattr(pause, 3 * LONG_S)


@pytest.mark.usefixtures("no_periodic_work")
async def test_warm_provision_and_release_stay_within_their_call_budget(
    agent_store: InstanceStore, aws: ProxiedAws
) -> None:
    instances = [await agent_store.apply(birth(in_use(number))) for number in range(N)]
    await aws.context.pool.send([each.message() for each in instances])
    async with asyncio.timeout(3 * LONG_S), agents(agent_store, instances) as signals:
        aws.expect(signals, State.CLAIMED)
        provisioned = await provision(aws.context, ORDER)
        assert (provisioned.reused, provisioned.created) == (N, 0)
        await aws.context.store.history(instances[0].instance_id)  # flushes the history, which counts too
        spent = aws.dynamodb.requests.total() - aws.polls()
        assert spent <= 3 * N + 10, dict(aws.dynamodb.requests)
        assert aws.sqs.requests.total() <= N / 5 + 4, dict(aws.sqs.requests)
        assert "compute" not in aws.context.calls.by_service()

        aws.expect(signals, State.RELEASING)
        # A long window, so that instances that become idle together share calls even on a slow machine.
        aws.dynamodb.always["UpdateItem"] = respond_together(N, b'"idle"')
        polls = aws.polls()
        released = await release(aws.context, run_id=RUN, attempt=1)
        assert len(released.of(ReleaseStatus.RELEASED)) == N
        await aws.context.store.history(instances[0].instance_id)
        spent = aws.dynamodb.requests.total() - (aws.polls() - polls)
        assert spent <= 3 * N + 10, dict(aws.dynamodb.requests)
        assert aws.sqs.requests.total() <= N / 10 + 2, dict(aws.sqs.requests)


async def test_counter_matches_the_requests_seen_by_the_proxy(agent_store: InstanceStore, aws: ProxiedAws) -> None:
    instances = [await agent_store.apply(birth(in_use(number))) for number in range(2)]
    before = aws.context.calls.by_service()
    assert sum(before["dynamodb"].values()) == aws.dynamodb.requests.total()
    await aws.context.pool.send([each.message() for each in instances])
    async with asyncio.timeout(3 * LONG_S), agents(agent_store, instances):
        await provision(aws.context, replace(ORDER, count=2))
    await aws.context.store.close()
    counts = aws.context.calls.by_service()
    seen = dict(aws.dynamodb.requests)
    assert {name: counts["dynamodb"].get(name, 0) + counts["dynamodb"].get(f"poll:{name}", 0) for name in seen} == seen
    assert counts["sqs"] == dict(aws.sqs.requests)


async def test_every_call_is_permitted_by_the_provision_policy(
    agent_store: InstanceStore, aws: ProxiedAws, table_name: str
) -> None:
    pool = table_name.removeprefix("remuda-")
    configuring = list(iam_requests({"PutItem": aws.dynamodb.sent["PutItem"]}))
    assert denied_requests("provision", pool, configuring) == configuring, "only refresh may write these"
    assert not denied_requests("refresh", pool, configuring)
    aws.dynamodb.sent.clear()
    # Ids that differ from those of the memory compute adapter, which the third provision uses.
    instances = [await agent_store.apply(birth(in_use(number))) for number in (100, 101)]
    await aws.context.pool.send([each.message() for each in instances])
    async with asyncio.timeout(3 * LONG_S), agents(agent_store, instances):
        await provision(aws.context, replace(ORDER, count=2))
        await release(aws.context, run_id=RUN, attempt=1)
        with pytest.raises(TimedOut):
            await provision(aws.context, replace(ORDER, count=1, usage_class=UsageClass.SPOT, timeout_s=0.5))
    await aws.context.store.close()
    sent = aws.dynamodb.sent
    assert {"UpdateItem", "PutItem", "BatchWriteItem", "Query"} <= set(sent)
    assert not denied_requests("provision", pool, iam_requests(sent))


async def set_agent(store: InstanceStore, known: Instance, scale_sets: MemoryScaleSets) -> None:
    """An agent of a runner set: its runner listens, takes the assigned job, ends it and is spent."""
    current: Instance | None = known

    async def beat(**reported: Any) -> None:
        values = {"at": SystemClock().now(), "busy": False, "listening": False, "notice": "", "version": "1"}
        await store.beat(known.instance_id, **{**values, **reported})

    while True:
        current = await store.wait_for_control(known.instance_id, current, LONG_S)
        if current is None:
            return
        match current.state:
            case State.CLAIMED:
                await store.write_signal(known.instance_id, epoch=current.epoch, signal=Signal.UD_OK)
            case State.RUNNING if not current.is_bound:
                await store.write_signal(known.instance_id, epoch=current.epoch, signal=Signal.UD_REG_OK)
                await beat(listening=True)
                scale_sets.start("large", "job-1", runner_name("test", current.epoch, known.instance_id))
                await beat(busy=True)
            case State.RUNNING:
                scale_sets.complete("large", "job-1")
                await beat(spent_epoch=current.epoch)
            case State.RELEASING:
                signal = Signal.UD_REMOVE_REG_REMOVE_RUN_OK
                await store.write_signal(known.instance_id, epoch=current.epoch, signal=signal)
            case State.IDLE if current.epoch > known.epoch:
                return


async def test_every_call_of_the_listener_is_permitted_by_its_policies(
    agent_store: InstanceStore, aws: ProxiedAws, table_name: str
) -> None:
    """A job on an idle machine, from GitHub's message to the return to the pool, and the removal of the set."""
    pool, store = table_name.removeprefix("remuda-"), aws.context.store
    runner_set = RunnerSet(name="large", labels=("large",), resource_class="large", scope=SCOPE, max=1)
    config = await store.get_config()
    assert config is not None
    await store.put_config(replace(config, runner_sets=(runner_set,), revision=config.revision + 1))
    machine = await agent_store.apply(birth(in_use(1)))
    await aws.context.pool.send([machine.message()])
    scale_sets = MemoryScaleSets(github=MemoryGitHubServer(clock=aws.context.clock), poll_s=0.2)
    source = MemoryDemandSource(server=scale_sets, calls=aws.context.calls)
    demand = DemandContext(
        context=aws.context, source=source, store=store, zone_of=lambda _: UTC, owner="listener-1", metrics=None
    )
    aws.dynamodb.sent.clear()
    listener = DemandListener(demand)
    running = asyncio.create_task(listener.run())
    async with asyncio.timeout(3 * LONG_S):
        while not await agent_store.get_demand():  # noqa: ASYNC110 - another process would write it
            await asyncio.sleep(0.05)
        job = scale_sets.assign("large", "job-1", repository=SCOPE)
        await set_agent(agent_store, machine, scale_sets)
        assert job.conclusion
        await agent_store.put_config(replace(config, runner_sets=(), revision=config.revision + 2))
        listener.reload()
        while await agent_store.get_demand():  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await store.close()
    assert not scale_sets.sets
    requests = list(iam_requests(aws.dynamodb.sent))
    written = {
        key for each in requests if each.action.endswith("PutItem") for key in each.values("dynamodb:LeadingKeys")
    }
    assert {"lease", "demand", "job#job-1", "run#set#large"} <= written
    assert not denied_requests("provision listener", pool, requests)
    # The broker's policy alone is not enough.
    assert denied_requests("provision", pool, requests)


async def test_pool_without_a_match_costs_few_calls(agent_store: InstanceStore, aws: ProxiedAws) -> None:
    """A hundred messages that do not match are received once and made visible again."""
    await aws.context.pool.send([message(number, usage_class=UsageClass.SPOT) for number in range(100)])
    aws.clear()
    # It fails while checking the messages, or while waiting for a new one.
    with pytest.raises(TimedOut):
        await provision(aws.context, replace(ORDER, count=1, timeout_s=2.0))
    assert aws.sqs.requests["ReceiveMessage"] > 0
    assert aws.sqs.requests.total() <= 30, dict(aws.sqs.requests)


# Deliveries: at least once, in any order, late ---------------------------------------------------------------------


Message = dict[str, str]


def delivering(change: Callable[[list[Message]], list[Message]], delivered: list[Message]) -> Fault:
    """Changes the delivered messages, and records the original ones."""

    async def fault(request: web.Request, forward: Callable[[], Awaitable[web.Response]]) -> web.Response:
        answer = await forward()
        assert isinstance(answer.body, bytes)
        messages: list[Message] = json.loads(answer.body).get("Messages", [])
        delivered.extend(messages)
        return web.Response(body=json.dumps({"Messages": change(messages)}), content_type=JSON)

    return fault


def copies(messages: list[Message]) -> list[Message]:
    """The same messages with other receipts."""
    return [{**each, "ReceiptHandle": f"another-{each['ReceiptHandle']}"} for each in messages]


async def test_duplicate_late_and_reordered_messages(agent_store: InstanceStore, aws: ProxiedAws) -> None:
    instances = [await agent_store.apply(birth(in_use(number))) for number in range(N)]
    await aws.context.pool.send([each.message() for each in instances])
    aws.sqs.then("ReceiveMessage", respond({}))  # a short poll that finds nothing
    aws.sqs.always["ReceiveMessage"] = delivering(lambda found: [*reversed(copies(found)), *found], [])
    async with asyncio.timeout(3 * LONG_S), agents(agent_store, instances):
        made = await provision(aws.context, ORDER)
    assert (made.reused, made.created) == (N, 0)
    assert sorted(item.instance.instance_id for item in made.instances) == sorted(
        each.instance_id for each in instances
    )
    assert {item.instance.epoch for item in made.instances} == {2}, "claimed once each"
    assert made.rejected["duplicate"] > 0
    assert await aws.context.pool.depth("large") == 0, "used messages are deleted"


async def test_redelivered_message_of_a_claimed_instance(agent_store: InstanceStore, aws: ProxiedAws) -> None:
    half = N // 2
    instances = [await agent_store.apply(birth(in_use(number))) for number in range(N)]
    delivered: list[Message] = []
    aws.sqs.always["ReceiveMessage"] = delivering(list, delivered)
    async with asyncio.timeout(3 * LONG_S), agents(agent_store, instances):
        await aws.context.pool.send([each.message() for each in instances[:half]])
        first = await provision(aws.context, replace(ORDER, count=half))
        await aws.context.pool.send([each.message() for each in instances[half:]])
        aws.sqs.then("ReceiveMessage", respond({"Messages": copies(delivered)[:BATCH]}))
        second = await provision(aws.context, replace(ORDER, run_id="4712", count=half))
    ours, theirs = ({item.instance.instance_id for item in made.instances} for made in (first, second))
    assert (len(ours), len(theirs), ours & theirs) == (half, half, set())
    assert (second.reused, second.rejected["claim-lost"]) == (half, half)
    for instance_id in ours:
        record = await agent_store.get(instance_id)
        assert record is not None
        assert (record.run_id, record.epoch) == (RUN, 2), "the claim is kept"
