"""Agent host: runs the agents of a benchmark as coroutines in one process, with the real agent loop on fake machines.

Runners of sets take their job from the local GitHub. The host reads one JSON request per line from standard input and
writes one JSON response per line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from benchmarks.json_lines import MAX_LINE, JsonProcess, json_process, respond
from remuda.adapters.aws.calls import chunks
from remuda.adapters.aws.clients import AwsClients
from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.items import ItemKeys
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.github.client import open_connections
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent.loop import Agent
from remuda.domain.instance import Assignment
from remuda.domain.signals import Report, Signal
from remuda.domain.thresholds import HEARTBEAT_INTERVAL_S
from remuda.domain.timestamps import to_milliseconds
from remuda.fake_github.fake_runner import VERSION
from remuda.fake_github.fake_runner.credentials import secret_of, unpack
from remuda.http import HttpConnections
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock
from remuda.ports.event_log import SilentEventLog
from remuda.ports.machine import Identity, StepResult
from tests.support.agents import RecordingMachine, RecordingRunner

MARGIN_S = 1.0
#: Seconds of a poll for a job.
JOB_POLL_S = 30.0
#: Runners that may poll at the same time.
JOB_CONNECTIONS = 500
#: Reports per call.
WRITE_BATCH = 25


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
    #: Seconds that each job of a runner set takes.
    job_s: float = 0.0
    #: Whether the agents share one store and its polling, to reduce the load of large groups.
    shared: bool = False


class BenchmarkMachine(RecordingMachine):
    def __init__(self, instance_id: str, pool: str) -> None:
        super().__init__([])
        self._identity = Identity(instance_id=instance_id, pool=pool, margin_s=MARGIN_S)

    async def identity(self) -> Identity:
        return self._identity


class JobService:
    """The local GitHub as runners see it, and when they began what."""

    def __init__(self) -> None:
        self._connections: dict[str, HttpConnections] = {}
        #: Monotonic times by runner: of its registration, its listener's start and its job's start. All processes of a
        #: machine share this clock.
        self.registered: dict[str, float] = {}
        self.listening: dict[str, float] = {}
        self.working: dict[str, float] = {}

    async def call(
        self, runner: Mapping[str, str], method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Send a request of a runner. Return status and document."""
        url = runner["url"]
        if url not in self._connections:
            self._connections[url] = open_connections(url, connections=JOB_CONNECTIONS)
        response = await self._connections[url].request(
            *(method, f"/_runner/sessions{path}"),
            headers={"Authorization": f"Bearer {runner['secret']}", "Content-Type": "application/json"},
            body=b"" if body is None else json.dumps(body).encode(),
            timeout_s=2 * JOB_POLL_S,
        )
        return response.status, json.loads(response.body) if response.body else {}

    async def close(self) -> None:
        for connections in self._connections.values():
            await connections.close()


class TimedRunner(RecordingRunner):
    """Runner whose registration takes a fixed time, and which runs one job if it is registered just in time."""

    def __init__(self, registration_s: float, service: JobService, job_s: float = 0.0) -> None:
        super().__init__([])
        self._registration_s = registration_s
        self._service = service
        self._job_s = job_s
        self._job: asyncio.Task[None] | None = None

    async def register(self, assignment: Assignment) -> StepResult:
        self._service.registered[assignment.runner_name] = SystemClock().monotonic()
        await asyncio.sleep(self._registration_s)
        return await super().register(assignment)

    async def start(self, assignment: Assignment) -> None:
        await super().start(assignment)
        self._service.listening[assignment.runner_name] = SystemClock().monotonic()
        if assignment.jit_config:
            self._job = asyncio.create_task(self._run_job(assignment))

    async def stop(self) -> None:
        if self._job is not None:
            self._job.cancel()
        await super().stop()

    async def _run_job(self, assignment: Assignment) -> None:
        service, runner = self._service, _identity(assignment.jit_config)
        _, opened = await service.call(runner, "POST", "", {"version": VERSION})
        session = f"/{opened['session']}"
        status, message = 204, dict[str, Any]()
        while status == 204:
            status, message = await service.call(runner, "GET", f"{session}/message?wait={JOB_POLL_S:g}")
        if status != 200:
            # Its registration was removed.
            self.become(listening=False, exit_code=1, unused=True)
            return
        job = f"{session}/jobs/{message['job_id']}"
        await service.call(runner, "POST", f"{job}/acknowledge")
        service.working[assignment.runner_name] = SystemClock().monotonic()
        self.become(busy=True)
        await asyncio.sleep(self._job_s)
        await service.call(runner, "POST", f"{job}/complete", {"conclusion": "success"})
        await service.call(runner, "DELETE", session)
        self.finish_only_job()


def _identity(jit_config: str) -> dict[str, str]:
    """The server and the secret of a just-in-time registration."""
    files = {name: json.loads(content) for name, content in unpack(jit_config).items()}
    return {"url": files[".runner"]["ServerUrl"], "secret": secret_of(files[".credentials_rsaparams"])}


def agent_store(
    client: Any, pool: str, prefix: str, clock: Clock | None = None, calls: CallCounter | None = None
) -> DynamoInstanceStore:
    return DynamoInstanceStore(
        client=client,
        table=f"remuda-{pool}",
        clock=clock or SystemClock(),
        ids=SystemIds(),
        calls=calls or CallCounter(),
        key_prefix=prefix,
    )


def agent(
    store: DynamoInstanceStore, machine: BenchmarkMachine, runner: TimedRunner | None = None, clock: Clock | None = None
) -> Agent:
    return Agent(
        store=store,
        machine=machine,
        runner=runner or TimedRunner(0.0, JobService()),
        clock=clock or SystemClock(),
        ids=SystemIds(),
        event_log=SilentEventLog(),
        version="1",
    )


class AgentHost:
    def __init__(self, clients: AwsClients) -> None:
        self._clients = clients
        self._tasks: list[asyncio.Task[Any]] = []
        self._stores: dict[str, DynamoInstanceStore] = {}
        self._all_stores: list[DynamoInstanceStore] = []
        self._service = JobService()
        self._calls = CallCounter()
        self._gate = asyncio.Event()
        self._gate.set()
        self._gated: Any = None

    async def handle(self, document: dict[str, Any]) -> dict[str, Any]:
        command = document.pop("command")
        if command == "start":
            await self.start(AgentGroup(**document))
        elif command == "beat":
            self._tasks.append(asyncio.create_task(self._beat(AgentGroup(**document))))
        elif command == "times":
            service = self._service
            return {"registered": service.registered, "listening": service.listening, "working": service.working}
        elif command == "calls":
            return self._calls.by_service()
        elif command == "gate":
            (self._gate.set if document["is_open"] else self._gate.clear)()
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
        await self._service.close()
        self._service = JobService()
        self._tasks, self._stores, self._all_stores = [], {}, []

    async def _run_agent(self, instance_id: str, group: AgentGroup, store: DynamoInstanceStore) -> str:
        await asyncio.sleep(group.ready_after_s)
        runner = TimedRunner(group.registration_s, self._service, group.job_s)
        return await agent(store, BenchmarkMachine(instance_id, group.pool), runner).run()

    async def _beat(self, group: AgentGroup) -> None:
        """Write the heartbeats of machines that have a long job, without agents: as many calls could not be served."""
        keys, client = ItemKeys(prefix=group.prefix), await self._clients.dynamodb()
        reports = [
            Report(instance_id=each, epoch=1, signal=Signal.UD_REG_OK, busy=True, listening=True)
            for each in group.instance_ids
        ]
        parts = list(chunks(reports, WRITE_BATCH))
        for beat in count(1):
            began = SystemClock().monotonic()
            for number, part in enumerate(parts):
                now = to_milliseconds(SystemClock().now())
                new = [replace(report, beat=beat, beat_at=now) for report in part]
                requests: list[Any] = [{"PutRequest": {"Item": report_item(keys, report)}} for report in new]
                await client.batch_write_item(RequestItems={f"remuda-{group.pool}": requests})
                # Spread over the interval.
                due = began + HEARTBEAT_INTERVAL_S * (number + 1) / len(parts)
                await asyncio.sleep(max(0.0, due - SystemClock().monotonic()))

    async def _store(self, group: AgentGroup) -> DynamoInstanceStore:
        if group.shared and group.pool in self._stores:
            return self._stores[group.pool]
        store = agent_store(await self._client(), group.pool, group.prefix, calls=self._calls)
        self._all_stores.append(store)
        self._stores[group.pool] = store
        return store

    async def _client(self) -> Any:
        """The client of the agents, whose requests wait while the gate is closed."""
        if self._gated is None:
            self._gated = await self._clients.dynamodb()
            send = self._gated.http.request

            async def gated(*given: Any, **named: Any) -> Any:
                await self._gate.wait()
                return await send(*given, **named)

            self._gated.http.request = gated
        return self._gated


def report_item(keys: ItemKeys, report: Report) -> dict[str, Any]:
    """The stored form of a report, without attributes that have no value."""
    item = items.document_item(keys.report(report.instance_id), report)
    return {name: value for name, value in item.items() if "NULL" not in value}


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

    async def beat(self, group: AgentGroup) -> None:
        """Write heartbeats of machines that have a job of a set in their first epoch, without agents."""
        await self._process.request(command="beat", **{**vars(group), "instance_ids": list(group.instance_ids)})

    async def times(self) -> dict[str, dict[str, float]]:
        """Return when runners registered, listened and began their jobs, by runner."""
        return await self._process.request(command="times")

    async def calls(self) -> dict[str, dict[str, int]]:
        """Return the calls of all agents."""
        return await self._process.request(command="calls")

    async def gate(self, *, is_open: bool) -> None:
        """Let the agents' calls pass, or hold them back."""
        await self._process.request(command="gate", is_open=is_open)

    async def stop(self) -> None:
        await self._process.request(command="stop")


@asynccontextmanager
async def agent_host() -> AsyncIterator[AgentHostProcess]:
    async with json_process("benchmarks.agents") as process:
        yield AgentHostProcess(process)


if __name__ == "__main__":
    asyncio.run(serve())
