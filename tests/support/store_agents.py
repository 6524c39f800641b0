"""Agents for the machines of a pool on AWS servers: the real agent in this process, on machines that do nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aiobotocore.session import get_session

from remuda.adapters.aws.clients import config
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent.loop import Agent
from remuda.domain.errors import RemudaError
from remuda.domain.instance import State
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import SilentEventLog
from remuda.ports.machine import Identity, StepResult
from tests.support.agents import MARGIN_S, FakeMachine, FakeRunner
from tests.support.servers import ENVIRONMENT

LOOK_S = 0.2
#: Generous: nothing waits for it unless something is broken.
LIMIT_S = 120.0
LIVE = [state for state in State if state not in {State.TERMINATING, State.TERMINATED}]


async def _never_asked() -> str:
    """Where records are, the table says: only a refresh asks AWS."""
    raise AssertionError


class NamedMachine(FakeMachine):
    def __init__(self, instance_id: str, pool: str) -> None:
        super().__init__([])
        self._identity = Identity(instance_id=instance_id, pool=pool, margin_s=MARGIN_S)

    async def identity(self) -> Identity:
        return self._identity


class Herd:
    """A thread that finds new machines by their records and runs an agent for each."""

    def __init__(self, *, dynamodb_url: str, pool: str) -> None:
        self._url = dynamodb_url
        self._pool = pool
        self._loop = asyncio.new_event_loop()
        self._agents: dict[str, asyncio.Task[str]] = {}
        self._store: DynamoInstanceStore | None = None
        #: Whether agents run: set and cleared by the test.
        self.awake = True
        #: How a registration ends.
        self.registration = StepResult(ok=True)

    def run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._watch())
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(self._loop)])

    def fall_asleep(self) -> None:
        """Returns when no agent runs any more."""
        self.awake = False
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result(LIMIT_S)

    def states(self) -> dict[str, str]:
        """What the records say of every machine that has not ended."""
        assert self._store is not None
        found = asyncio.run_coroutine_threadsafe(self._store.find([*LIVE, State.TERMINATING]), self._loop)
        return {record.instance_id: record.state.value for record in found.result(LIMIT_S)}

    def provisions(self, run_id: str) -> list[str]:
        """How the provisions of a run stand."""
        assert self._store is not None
        found = asyncio.run_coroutine_threadsafe(self._store.provisions_of_run(run_id), self._loop)
        return [provision.status.value for provision in found.result(LIMIT_S)]

    async def _watch(self) -> None:
        async with get_session().create_client(
            "dynamodb",
            region_name=ENVIRONMENT["AWS_REGION"],
            endpoint_url=self._url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=config(),
        ) as client:
            store = self._store = DynamoInstanceStore(
                client=client,
                table=f"remuda-{self._pool}",
                clock=SystemClock(),
                ids=SystemIds(),
                calls=CallCounter(),
                newest_prefix=_never_asked,
            )
            try:
                while True:
                    # Before the first refresh there is no table.
                    with suppress(RemudaError):
                        await self._look(store)
                    await asyncio.sleep(LOOK_S)
            finally:
                await self._end_all()

    async def _look(self, store: DynamoInstanceStore) -> None:
        if not self.awake:
            return
        for record in await store.find(LIVE):
            if record.instance_id not in self._agents and self.awake:
                self._agents[record.instance_id] = asyncio.create_task(self._agent(store, record.instance_id).run())

    def _agent(self, store: DynamoInstanceStore, instance_id: str) -> Agent:
        runner = FakeRunner([])
        runner.configure_outcome = self.registration
        return Agent(
            store=store,
            machine=NamedMachine(instance_id, self._pool),
            runner=runner,
            clock=SystemClock(),
            ids=SystemIds(),
            event_log=SilentEventLog(),
            version="1",
        )

    async def _end_all(self) -> None:
        tasks = list(self._agents.values())
        self._agents.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def herd(*, dynamodb_url: str, pool: str) -> Iterator[Herd]:
    made = Herd(dynamodb_url=dynamodb_url, pool=pool)
    thread = threading.Thread(target=made.run, name="herd")
    thread.start()
    try:
        yield made
    finally:
        made.stop()
        thread.join(LIMIT_S)
