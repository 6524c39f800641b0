"""Machines without machines: for each instance that EC2 shows, the real agent loop in this process, on the real store.

Its runner really registers on the local GitHub, but takes no jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx

from remuda.adapters.aws.user_data import MARGIN_TAG
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent.loop import Agent
from remuda.domain.instance import Assignment
from remuda.ports.compute import POOL_TAG
from remuda.ports.event_log import SilentEventLog
from remuda.ports.machine import Identity, StepResult
from remuda.ports.runner import RemovalStatus
from remuda.ports.store import InstanceStore
from tests.support.agents import FakeMachine, FakeRunner

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client

LOOK_EVERY_S = 0.4
#: Generous: an agent whose GitHub does not answer would end.
ANSWER_S = 120.0
ALIVE = ("pending", "running")


class LightMachine(FakeMachine):
    def __init__(self, identity: Identity, terminate: Callable[[str], Any]) -> None:
        super().__init__([])
        self._identity = identity
        self._terminate = terminate

    async def identity(self) -> Identity:
        return self._identity

    async def end(self, reason: str) -> None:
        """Powered off: the launch template says that this terminates it."""
        await self._terminate(self._identity.instance_id)
        await super().end(reason)


class RegisteringRunner(FakeRunner):
    def __init__(self, http: httpx.AsyncClient) -> None:
        super().__init__([])
        self._http = http
        self._runner_id = 0

    async def configure(self, assignment: Assignment) -> StepResult:
        token = assignment.credential.token if assignment.credential else ""
        body = {
            "url": assignment.url,
            "token": token,
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
        return await super().configure(assignment)

    async def remove(self, assignment: Assignment) -> tuple[RemovalStatus, str]:
        if not self.current.configured_as:
            return await super().remove(assignment)
        token = assignment.credential.token if assignment.credential else ""
        body = {"url": assignment.url, "token": token, "runner_id": self._runner_id}
        answer = await self._http.post("/_runner/remove", json=body)
        if answer.status_code not in {204, 404}:
            return RemovalStatus.FAILED, answer.text
        return await super().remove(assignment)


class Herd:
    """The agents of one pool."""

    def __init__(self, *, pool: str, store: InstanceStore, ec2: EC2Client, http: httpx.AsyncClient) -> None:
        self._pool = pool
        self._store = store
        self._ec2 = ec2
        self._http = http
        self._agents: dict[str, asyncio.Task[str]] = {}

    def runner(self) -> RegisteringRunner:
        return RegisteringRunner(self._http)

    async def live(self) -> set[str]:
        """The pool's machines that EC2 shows."""
        return set((await _live(self._ec2)).get(self._pool, {}))

    async def pull(self, instance_id: str) -> None:
        """EC2 takes it away, without a word to its agent."""
        agent = self._agents[instance_id]
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)
        await self._terminate(instance_id)

    def follow(self, live: Mapping[str, Mapping[str, str]]) -> None:
        for instance_id, tags in live.items():
            if instance_id not in self._agents:
                self._agents[instance_id] = asyncio.create_task(self._agent(instance_id, tags))
        for instance_id in self._agents.keys() - live.keys():
            self._agents[instance_id].cancel()

    async def end(self) -> None:
        for agent in self._agents.values():
            agent.cancel()
        await asyncio.gather(*self._agents.values(), return_exceptions=True)

    async def _agent(self, instance_id: str, tags: Mapping[str, str]) -> str:
        identity = Identity(instance_id=instance_id, pool=self._pool, margin_s=float(tags[MARGIN_TAG]))
        return await Agent(
            store=self._store,
            machine=LightMachine(identity, self._terminate),
            runner=self.runner(),
            clock=SystemClock(),
            ids=SystemIds(),
            event_log=SilentEventLog(),
            version="1",
        ).run()

    async def _terminate(self, instance_id: str) -> None:
        await self._ec2.terminate_instances(InstanceIds=[instance_id])


async def _live(ec2: EC2Client) -> dict[str, dict[str, dict[str, str]]]:
    """Tags by machine, by pool."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    filters: Any = [{"Name": "instance-state-name", "Values": list(ALIVE)}]
    async for page in ec2.get_paginator("describe_instances").paginate(Filters=filters):
        for reservation in page["Reservations"]:
            for item in reservation["Instances"]:
                tags = {tag["Key"]: tag["Value"] for tag in item.get("Tags", ())}
                found.setdefault(tags.get(POOL_TAG, ""), {})[item["InstanceId"]] = tags
    return found


class Herds:
    """The agents of all pools on one EC2 server, with one look at it for all of them."""

    def __init__(self, *, ec2: EC2Client, http: httpx.AsyncClient) -> None:
        self._ec2 = ec2
        self._http = http
        self._herds: dict[str, Herd] = {}

    async def run(self) -> None:
        while True:
            live = await _live(self._ec2)
            for pool, herd in self._herds.items():
                herd.follow(live.get(pool, {}))
            await asyncio.sleep(LOOK_EVERY_S)

    @asynccontextmanager
    async def herd(self, pool: str, store: InstanceStore) -> AsyncIterator[Herd]:
        made = self._herds[pool] = Herd(pool=pool, store=store, ec2=self._ec2, http=self._http)
        try:
            yield made
        finally:
            del self._herds[pool]
            await made.end()
            # The look at all machines is for those that matter.
            if left := await made.live():
                await self._ec2.terminate_instances(InstanceIds=sorted(left))


@asynccontextmanager
async def herds(*, ec2: EC2Client, github_url: str) -> AsyncIterator[Herds]:
    async with httpx.AsyncClient(base_url=github_url, timeout=ANSWER_S, trust_env=False) as http:
        made = Herds(ec2=ec2, http=http)
        looking = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking
