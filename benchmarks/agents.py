"""Agent host: runs the agents of a benchmark as coroutines in one process, with the real agent loop on fake machines.

It reads one JSON request per line from standard input and writes one JSON response per line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.json_lines import MAX_LINE, JsonProcess, json_process, respond
from remuda.adapters.aws.clients import AwsClients
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent.loop import Agent
from remuda.domain.instance import Assignment
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock
from remuda.ports.event_log import SilentEventLog
from remuda.ports.machine import Identity, StepResult
from tests.support.agents import RecordingMachine, RecordingRunner

MARGIN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class AgentGroup:
    """Instances to start agents for."""

    pool: str
    prefix: str
    instance_ids: Sequence[str]
    #: Seconds until the agents are ready.
    ready_after_s: float = 0.0
    #: Seconds that a registration takes.
    registration_s: float = 0.0
    #: Whether the agents share one store and its polling, to reduce the load of large groups.
    shared: bool = False


class BenchmarkMachine(RecordingMachine):
    def __init__(self, instance_id: str, pool: str) -> None:
        super().__init__([])
        self._identity = Identity(instance_id=instance_id, pool=pool, margin_s=MARGIN_S)

    async def identity(self) -> Identity:
        return self._identity


class TimedRunner(RecordingRunner):
    """Runner whose registration takes a fixed time. Records when each registration began."""

    def __init__(self, registration_s: float, began: dict[str, float]) -> None:
        super().__init__([])
        self._registration_s = registration_s
        self._began = began

    async def register(self, assignment: Assignment) -> StepResult:
        self._began[assignment.runner_name] = SystemClock().monotonic()
        await asyncio.sleep(self._registration_s)
        return await super().register(assignment)


def agent_store(client: Any, pool: str, prefix: str, clock: Clock | None = None) -> DynamoInstanceStore:
    return DynamoInstanceStore(
        client=client,
        table=f"remuda-{pool}",
        clock=clock or SystemClock(),
        ids=SystemIds(),
        calls=CallCounter(),
        key_prefix=prefix,
    )


def agent(
    store: DynamoInstanceStore, machine: BenchmarkMachine, runner: TimedRunner | None = None, clock: Clock | None = None
) -> Agent:
    return Agent(
        store=store,
        machine=machine,
        runner=runner or TimedRunner(0.0, {}),
        clock=clock or SystemClock(),
        ids=SystemIds(),
        event_log=SilentEventLog(),
        version="1",
    )


class AgentHost:
    def __init__(self, clients: AwsClients) -> None:
        self._clients = clients
        self._tasks: list[asyncio.Task[str]] = []
        self._stores: dict[str, DynamoInstanceStore] = {}
        self._all_stores: list[DynamoInstanceStore] = []
        #: Monotonic time at which each registration began, by runner. All processes of a machine share this clock.
        self._began: dict[str, float] = {}

    async def handle(self, document: dict[str, Any]) -> dict[str, Any]:
        command = document.pop("command")
        if command == "start":
            await self.start(AgentGroup(**document))
        elif command == "registrations":
            began, self._began = dict(self._began), {}
            return {"began": began}
        elif command == "stop":
            await self.stop()
        return {}

    async def start(self, group: AgentGroup) -> None:
        for instance_id in group.instance_ids:
            store = await self._store(group)
            self._tasks.append(asyncio.create_task(self._run_agent(instance_id, group, store)))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for store in self._all_stores:
            await store.close()
        self._tasks, self._stores, self._all_stores = [], {}, []

    async def _run_agent(self, instance_id: str, group: AgentGroup, store: DynamoInstanceStore) -> str:
        await asyncio.sleep(group.ready_after_s)
        runner = TimedRunner(group.registration_s, self._began)
        return await agent(store, BenchmarkMachine(instance_id, group.pool), runner).run()

    async def _store(self, group: AgentGroup) -> DynamoInstanceStore:
        if group.shared and group.pool in self._stores:
            return self._stores[group.pool]
        store = agent_store(await self._clients.dynamodb(), group.pool, group.prefix)
        self._all_stores.append(store)
        self._stores[group.pool] = store
        return store


async def serve() -> None:
    reader = asyncio.StreamReader(limit=MAX_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with AwsClients() as clients:
        host = AgentHost(clients)
        await clients.dynamodb()
        respond({})
        while line := await reader.readline():
            respond(await host.handle(json.loads(line)))
        await host.stop()


class AgentHostProcess:
    """Client of the agent host's process."""

    def __init__(self, process: JsonProcess) -> None:
        self._process = process

    async def start(self, group: AgentGroup) -> None:
        await self._process.request(command="start", **{**vars(group), "instance_ids": list(group.instance_ids)})

    async def registrations(self) -> dict[str, float]:
        """Return when registrations began since the last call, by runner."""
        found: dict[str, float] = (await self._process.request(command="registrations"))["began"]
        return found

    async def stop(self) -> None:
        await self._process.request(command="stop")


@asynccontextmanager
async def agent_host() -> AsyncIterator[AgentHostProcess]:
    async with json_process("benchmarks.agents") as process:
        yield AgentHostProcess(process)


if __name__ == "__main__":
    asyncio.run(serve())
