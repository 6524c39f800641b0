"""What the suites run on. An adapter joins with one class here and one line in its table."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

import pytest

from remuda.adapters.memory.pool import MemoryQueues, MemoryResourcePool
from remuda.adapters.memory.store import MemoryDatabase, MemoryInstanceStore
from remuda.adapters.sqlite.pool import SqliteResourcePool
from remuda.adapters.sqlite.store import SqliteInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.ports.calls import CallCounter
from remuda.ports.pool import ResourcePool
from remuda.ports.store import InstanceStore
from support.records import instance_id


class ShiftedClock(SystemClock):
    """The real clock, some seconds ahead: visibility and delays pass without waiting."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.ahead_s)


class Stores(Protocol):
    """A database, and as many store objects over it as there are processes."""

    calls: CallCounter

    def open(self) -> InstanceStore: ...

    def spoil(self, number: int) -> None:
        """Make the control record, the report and the provision of this number something that cannot be parsed."""
        ...


class MemoryStores:
    def __init__(self, _folder: Path) -> None:
        self.calls = CallCounter()
        self._database = MemoryDatabase()

    def open(self) -> InstanceStore:
        return MemoryInstanceStore(clock=SystemClock(), calls=self.calls, database=self._database)

    def spoil(self, number: int) -> None:
        raise NotImplementedError("records in memory are never parsed")


class SqliteStores:
    def __init__(self, folder: Path) -> None:
        self.calls = CallCounter()
        self._path = folder / "remuda.db"

    def open(self) -> InstanceStore:
        return SqliteInstanceStore(path=self._path, clock=SystemClock(), ids=SystemIds(), calls=self.calls)

    def spoil(self, number: int) -> None:
        connection = sqlite3.connect(self._path)
        with connection:
            connection.execute("UPDATE instances SET doc = '{' WHERE instance_id = ?", (instance_id(number),))
            connection.execute("UPDATE reports SET doc = '[]' WHERE instance_id = ?", (instance_id(number),))
            connection.execute(
                "UPDATE provisions SET doc = CAST(x'ff' AS TEXT) WHERE provision_id = ?", (f"p-{number}",)
            )
        connection.close()


class Pools(Protocol):
    """A queue service, and as many pool objects over it as there are processes."""

    calls: CallCounter

    def open(self) -> ResourcePool: ...

    async def let_pass(self, seconds: float) -> None:
        """Time, as the queues see it."""
        ...

    def send_raw(self, resource_class: str, body: str) -> None:
        """Put something into the queue that is no message."""
        ...


class MemoryPools:
    def __init__(self, _folder: Path) -> None:
        self.calls = CallCounter()
        self._clock = ShiftedClock()
        self._queues = MemoryQueues(clock=self._clock)

    def open(self) -> ResourcePool:
        return MemoryResourcePool(clock=SystemClock(), ids=SystemIds(), calls=self.calls, queues=self._queues)

    async def let_pass(self, seconds: float) -> None:
        self._clock.ahead_s += seconds

    def send_raw(self, resource_class: str, body: str) -> None:
        self._queues.put(resource_class, None, shuffle=0.5, malformed=f"{len(body)} characters that are no message")


class SqlitePools:
    def __init__(self, folder: Path) -> None:
        self.calls = CallCounter()
        self._clock = ShiftedClock()
        self._path = folder / "remuda.db"

    def open(self) -> ResourcePool:
        return SqliteResourcePool(path=self._path, clock=self._clock, ids=SystemIds(), calls=self.calls)

    async def let_pass(self, seconds: float) -> None:
        self._clock.ahead_s += seconds

    def send_raw(self, resource_class: str, body: str) -> None:
        connection = sqlite3.connect(self._path)
        with connection:
            connection.execute(
                "INSERT INTO messages (queue, visible_at, shuffle, body) VALUES (?, 0, 0.5, ?)", (resource_class, body)
            )
        connection.close()


STORES: dict[str, Callable[[Path], Stores]] = {"memory": MemoryStores, "sqlite": SqliteStores}
#: Those whose records somebody else could have written.
PARSING_STORES = ["sqlite"]
POOLS: dict[str, Callable[[Path], Pools]] = {"memory": MemoryPools, "sqlite": SqlitePools}
#: SQS lets an expired receipt delete until the message is received again.
POOLS_WITH_EXPIRING_RECEIPTS = ["memory", "sqlite"]


@pytest.fixture(params=list(STORES))
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    return STORES[request.param](tmp_path)


@pytest.fixture
async def store(stores: Stores) -> AsyncIterator[InstanceStore]:
    store = stores.open()
    await store.prepare()
    yield store
    await store.close()


@pytest.fixture
async def other(stores: Stores, store: InstanceStore) -> AsyncIterator[InstanceStore]:
    """Another process's store."""
    other = stores.open()
    yield other
    await other.close()


@pytest.fixture(params=list(POOLS))
def pools(request: pytest.FixtureRequest, tmp_path: Path) -> Pools:
    return POOLS[request.param](tmp_path)


@pytest.fixture
async def pool(pools: Pools) -> AsyncIterator[ResourcePool]:
    pool = pools.open()
    await pool.prepare(["large", "xlarge"])
    yield pool
    await pool.close()


@pytest.fixture
async def other_pool(pools: Pools, pool: ResourcePool) -> AsyncIterator[ResourcePool]:
    """Another process's pool."""
    other = pools.open()
    yield other
    await other.close()
