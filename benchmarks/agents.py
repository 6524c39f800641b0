"""All agents of a benchmark as coroutines in one process: the real agent loop, on machines that do nothing.

Told what to do by one JSON document a line on its standard input; answers with one a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.lines import answered, ask
from remuda.adapters.aws.clients import AwsClients
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent.loop import Agent
from remuda.domain.instance import Assignment
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import SilentEventLog
from remuda.ports.machine import Identity, StepResult
from tests.support.agents import FakeMachine, FakeRunner

WHOSE = "the agents'"
MARGIN_S = 1.0
#: A line of either side names every machine of a pool.
MAX_LINE = 2**24


@dataclass(frozen=True, kw_only=True)
class Following:
    """Machines that get an agent."""

    pool: str
    prefix: str
    instance_ids: Sequence[str]
    #: How long after now the agents are there.
    ready_after_s: float = 0.0
    #: What a registration takes.
    registration_s: float = 0.0
    #: One store for all, so that they share calls: for herds that one computer could not carry otherwise.
    shared: bool = False


class IdleMachine(FakeMachine):
    def __init__(self, instance_id: str, pool: str) -> None:
        super().__init__([])
        self._identity = Identity(instance_id=instance_id, pool=pool, margin_s=MARGIN_S)

    async def identity(self) -> Identity:
        return self._identity


class TimedRunner(FakeRunner):
    """Registers nowhere, in the time that it is told; remembers when it was asked to."""

    def __init__(self, registration_s: float, asked: dict[str, float]) -> None:
        super().__init__([])
        self._registration_s = registration_s
        self._asked = asked

    async def configure(self, assignment: Assignment) -> StepResult:
        self._asked[assignment.runner_name] = SystemClock().monotonic()
        await asyncio.sleep(self._registration_s)
        return await super().configure(assignment)


class Agents:
    def __init__(self, clients: AwsClients) -> None:
        self._clients = clients
        self._tasks: list[asyncio.Task[str]] = []
        self._stores: dict[str, DynamoInstanceStore] = {}
        self._all_stores: list[DynamoInstanceStore] = []
        #: When registrations began, by runner: all processes of one computer have the same monotonic clock.
        self._asked: dict[str, float] = {}

    async def do(self, document: dict[str, Any]) -> dict[str, Any]:
        what = document.pop("do")
        if what == "follow":
            await self.follow(Following(**document))
        elif what == "asked":
            asked, self._asked = dict(self._asked), {}
            return {"asked": asked}
        elif what == "end":
            await self.end()
        return {}

    async def follow(self, following: Following) -> None:
        for instance_id in following.instance_ids:
            store = await self._store(following)
            self._tasks.append(asyncio.create_task(self._live(instance_id, following, store)))

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for store in self._all_stores:
            await store.close()
        self._tasks, self._stores, self._all_stores = [], {}, []

    async def _live(self, instance_id: str, following: Following, store: DynamoInstanceStore) -> str:
        await asyncio.sleep(following.ready_after_s)
        return await Agent(
            store=store,
            machine=IdleMachine(instance_id, following.pool),
            runner=TimedRunner(following.registration_s, self._asked),
            clock=SystemClock(),
            ids=SystemIds(),
            event_log=SilentEventLog(),
            version="1",
        ).run()

    async def _store(self, following: Following) -> DynamoInstanceStore:
        if following.shared and following.pool in self._stores:
            return self._stores[following.pool]
        store = DynamoInstanceStore(
            client=await self._clients.dynamodb(),
            table=f"remuda-{following.pool}",
            clock=SystemClock(),
            ids=SystemIds(),
            calls=CallCounter(),
            key_prefix=following.prefix,
        )
        self._all_stores.append(store)
        self._stores[following.pool] = store
        return store


async def serve() -> None:
    reader = asyncio.StreamReader(limit=MAX_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with AwsClients() as clients:
        agents = Agents(clients)
        await clients.dynamodb()
        answer({})
        while line := await reader.readline():
            answer(await agents.do(json.loads(line)))
        await agents.end()


def answer(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


class AgentsProcess:
    """The other end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()

    async def follow(self, following: Following) -> None:
        await self.ask("follow", **{**vars(following), "instance_ids": list(following.instance_ids)})

    async def asked(self) -> dict[str, float]:
        """When registrations began since the last time this was asked for, by runner."""
        found: dict[str, float] = (await self.ask("asked"))["asked"]
        return found

    async def end(self) -> None:
        await self.ask("end")

    async def ask(self, what: str, **more: Any) -> dict[str, Any]:
        async with self._turn:
            return await ask(self._process, {"do": what, **more}, whose=WHOSE)

    async def answered(self) -> dict[str, Any]:
        return await answered(self._process, whose=WHOSE)


@asynccontextmanager
async def agents_process() -> AsyncIterator[AgentsProcess]:
    """The environment leads it to the same servers."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.agents"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ),
        limit=MAX_LINE,
        # Ctrl-C is for whoever started it.
        start_new_session=True,
    )
    try:
        made = AgentsProcess(process)
        await made.answered()
        yield made
    finally:
        assert process.stdin is not None  # noqa: S101 - it was started with one
        process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    asyncio.run(serve())
