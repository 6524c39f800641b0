"""Real agent loops in the test process, one per live instance on the EC2 server, with fake machines and runners.

The runners register on the fake GitHub, but accept no jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal

from remuda.adapters.aws.user_data import MARGIN_TAG
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent.loop import Agent
from remuda.domain.instance import Assignment, State
from remuda.ports.compute import POOL_TAG
from remuda.ports.event_log import SilentEventLog
from remuda.ports.machine import Identity, RemovalStatus, StepResult
from remuda.ports.store import InstanceStore
from tests.support.agents import RecordingMachine, RecordingRunner
from tests.support.aws.ec2 import instance_changes
from tests.support.aws.servers import service_client
from tests.support.aws.stack import AwsStack

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client

#: Seconds for a response of the fake GitHub. Generous: an agent that cannot register ends its machine.
LIMIT_S = 120.0
#: EC2 states of a machine that runs an agent.
LIVE = ("pending", "running")

Tags = Mapping[str, str]


class TerminatingMachine(RecordingMachine):
    def __init__(self, identity: Identity, terminate: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        super().__init__([], identity)
        self._terminate = terminate

    async def end(self, reason: str) -> None:
        """Power off. The launch template makes EC2 terminate a stopped instance."""
        await self._terminate((await self.identity()).instance_id)
        await super().end(reason)


class RegisteringRunner(RecordingRunner):
    def __init__(self, http: httpx.AsyncClient) -> None:
        super().__init__([])
        self._http = http
        self._runner_id = 0

    async def register(self, assignment: Assignment) -> StepResult:
        # GitHub has registered a just-in-time runner already.
        if self.configure_outcome.ok and not assignment.jit_config:
            body = {
                "url": assignment.url,
                "token": assignment.credential.token if assignment.credential else "",
                "name": assignment.runner_name,
                "labels": list(assignment.labels),
                "default_labels": False,
                "ephemeral": False,
                "replace": True,
                "work": None,
            }
            answer = await self._http.post("/_runner/register", json=body)
            if answer.status_code != 201:
                return StepResult(ok=False, detail=answer.text)
            self._runner_id = int(answer.json()["files"][".runner"]["agentId"])
        return await super().register(assignment)

    async def remove(self, assignment: Assignment) -> tuple[RemovalStatus, str]:
        if self.current.registered_as and not assignment.runner_id:
            token = assignment.credential.token if assignment.credential else ""
            body = {"url": assignment.url, "token": token, "runner_id": self._runner_id}
            answer = await self._http.post("/_runner/remove", json=body)
            if answer.status_code not in {204, 404}:
                return RemovalStatus.FAILED, answer.text
        return await super().remove(assignment)


class PoolAgents:
    """The agents of one pool."""

    def __init__(self, *, pool: str, store: InstanceStore, ec2: EC2Client, http: httpx.AsyncClient) -> None:
        self._pool = pool
        self._store = store
        self._ec2 = ec2
        self._http = http
        self._agents: dict[str, asyncio.Task[str]] = {}
        #: Whether new instances get no agent.
        self.paused = False
        #: The outcome of registrations.
        self.registration = StepResult(ok=True)

    def runner(self) -> RegisteringRunner:
        runner = RegisteringRunner(self._http)
        runner.configure_outcome = self.registration
        return runner

    async def live(self) -> set[str]:
        """Ids of the pool's live instances on EC2."""
        return set((await _live_instances(self._ec2)).get(self._pool, {}))

    async def reclaim(self, instance_id: str) -> None:
        """Terminate an instance like EC2 does when it reclaims it: its agent is not informed."""
        agent = self._agents[instance_id]
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)
        await self._terminate(instance_id)

    def update(self, live: Mapping[str, Tags]) -> None:
        """Start agents for new instances and stop those of terminated ones."""
        for instance_id, tags in live.items():
            if instance_id not in self._agents and not self.paused:
                self._agents[instance_id] = asyncio.create_task(self._run_agent(instance_id, tags))
        for instance_id in self._agents.keys() - live.keys():
            self._agents[instance_id].cancel()

    async def stop(self) -> None:
        tasks = list(self._agents.values())
        self._agents.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_agent(self, instance_id: str, tags: Tags) -> str:
        identity = Identity(instance_id=instance_id, pool=self._pool, margin_s=float(tags[MARGIN_TAG]))
        return await Agent(
            store=self._store,
            machine=TerminatingMachine(identity, self._terminate),
            runner=self.runner(),
            clock=SystemClock(),
            ids=SystemIds(),
            event_log=SilentEventLog(),
            version="1",
        ).run()

    async def _terminate(self, instance_id: str) -> None:
        await self._ec2.terminate_instances(InstanceIds=[instance_id])


async def _live_instances(ec2: EC2Client) -> dict[str, dict[str, Tags]]:
    """Tags per instance per pool."""
    found: dict[str, dict[str, Tags]] = {}
    filters: Any = [{"Name": "instance-state-name", "Values": list(LIVE)}]
    async for page in ec2.get_paginator("describe_instances").paginate(Filters=filters):
        for reservation in page["Reservations"]:
            for item in reservation["Instances"]:
                tags = {tag["Key"]: tag["Value"] for tag in item.get("Tags", ())}
                found.setdefault(tags.get(POOL_TAG, ""), {})[item["InstanceId"]] = tags
    return found


class InProcessAgents:
    """The agents of all pools on one EC2 server."""

    def __init__(self, *, ec2_url: str, ec2: EC2Client, http: httpx.AsyncClient) -> None:
        self._ec2_url = ec2_url
        self._ec2 = ec2
        self._http = http
        self._pools: dict[str, PoolAgents] = {}

    async def run(self) -> None:
        async with aclosing(instance_changes(self._ec2_url)) as changes:
            async for _ in changes:
                live = await _live_instances(self._ec2)
                for pool, agents in self._pools.items():
                    agents.update(live.get(pool, {}))

    @asynccontextmanager
    async def of_pool(self, pool: str, store: InstanceStore) -> AsyncIterator[PoolAgents]:
        agents = self._pools[pool] = PoolAgents(pool=pool, store=store, ec2=self._ec2, http=self._http)
        try:
            yield agents
        finally:
            del self._pools[pool]
            await agents.stop()
            # Keeps the list of live instances short for the remaining pools.
            if left := await agents.live():
                await self._ec2.terminate_instances(InstanceIds=sorted(left))


@asynccontextmanager
async def in_process_agents(stack: AwsStack) -> AsyncIterator[InProcessAgents]:
    async with (
        stack.ec2.client() as ec2,
        httpx.AsyncClient(base_url=stack.github.url, timeout=LIMIT_S, trust_env=False) as http,
    ):
        agents = InProcessAgents(ec2_url=stack.ec2.url, ec2=ec2, http=http)
        running = asyncio.create_task(agents.run())
        try:
            yield agents
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


# In a thread ----------------------------------------------------------------------------------------------------------


class ThreadedAgents:
    """The agents of one pool in a thread, for tests without an event loop."""

    def __init__(self, portal: BlockingPortal, store: InstanceStore, pool_agents: PoolAgents) -> None:
        self._portal = portal
        self._store = store
        self.pool_agents = pool_agents

    def resume(self) -> None:
        self.pool_agents.paused = False

    def pause(self) -> None:
        """Stop all agents and start no others. Returns when no agent runs."""
        self.pool_agents.paused = True
        self._portal.call(self.pool_agents.stop)

    def states(self) -> dict[str, str]:
        """The recorded state per instance that is not terminated."""
        records = self._portal.call(self._store.find, [state for state in State if state is not State.TERMINATED])
        return {record.instance_id: record.state.value for record in records}

    def provisions(self, run_id: str) -> list[str]:
        """The status of each provision of a run."""
        return [provision.status.value for provision in self._portal.call(self._store.provisions_of_run, run_id)]


@contextmanager
def agents_in_thread(stack: AwsStack, pool: str) -> Iterator[ThreadedAgents]:
    @asynccontextmanager
    async def running() -> AsyncIterator[tuple[InstanceStore, PoolAgents]]:
        url = stack.environment()["AWS_ENDPOINT_URL_DYNAMODB"]
        async with service_client("dynamodb", url) as client, in_process_agents(stack) as agents:
            store = stack.instance_store(client, pool)
            async with agents.of_pool(pool, store) as pool_agents:
                yield store, pool_agents

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(running()) as (store, pool_agents):
        yield ThreadedAgents(portal, store, pool_agents)
