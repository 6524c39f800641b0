"""Fixtures of the conformance suites. To add an adapter, add one class here and one entry to its table."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import pytest
from aiobotocore.session import AioSession
from botocore.model import OperationModel
from hypothesis import settings

from remuda.adapters.aws import clients as aws_clients
from remuda.adapters.aws.clients import AwsClients, ClientConfig, open_session
from remuda.adapters.aws.dynamodb.items import ItemKeys, demand_key, job_key, key, lease_key, provisions_pk
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.aws.service import ServiceClient
from remuda.adapters.aws.sqs import SqsResourcePool
from remuda.adapters.github import client as github_client
from remuda.adapters.sqlite.pool import SqliteResourcePool
from remuda.adapters.sqlite.store import SqliteInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.fake_github import Endpoint
from remuda.ports.calls import CallCounter
from remuda.ports.pool import ResourcePool
from remuda.ports.store import InstanceStore
from simulation.memory.pool import MemoryQueues, MemoryResourcePool
from simulation.memory.store import MemoryDatabase, MemoryInstanceStore
from tests.support.aws.contract import check_request
from tests.support.aws.fault_proxy import FaultProxy, fault_proxy
from tests.support.aws.request_rules import RequestSequence
from tests.support.aws.scripted_api import check_api_request
from tests.support.aws.servers import Fauxqs, Ministack, fake_github, fauxqs, ministack
from tests.support.github_connections import JudgedConnections
from tests.support.records import LONG_S, instance_id
from tests.support.virtual_time import AdjustableClock

#: Hypothesis uses the same examples each time and has no deadline, so that slow machines do not fail.
settings.load_profile("ci")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ministack]:
    """DynamoDB and SQS for this worker, with the environment variables of their endpoints."""
    with ministack(tmp_path_factory.mktemp("ministack")) as started, pytest.MonkeyPatch.context() as patch:
        for name, value in started.environment().items():
            patch.setenv(name, value)
        # The server may be slow; a slow response must not count as lost.
        patch.setattr(aws_clients, "CONNECT_TIMEOUT_S", LONG_S)
        patch.setattr(aws_clients.config, "__kwdefaults__", {"read_timeout_s": LONG_S})
        yield started


@pytest.fixture(scope="session")
def aws_session(server: Ministack) -> AioSession:
    """Shared by all tests of a worker, because loading botocore's models is slow."""
    return open_session()


@pytest.fixture
async def clients(aws_session: AioSession) -> AsyncIterator[AwsClients]:
    async with AwsClients(session=aws_session) as clients:
        yield clients


@pytest.fixture
def table_name() -> str:
    """A table name unique to this test."""
    return f"remuda-{secrets.token_hex(6)}"


@pytest.fixture
def calls() -> CallCounter:
    return CallCounter()


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A local GitHub."""
    with fake_github(tmp_path_factory.mktemp("github")) as endpoint:
        yield endpoint


@pytest.fixture
def patient_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long timeout: a slow local GitHub must not count as a lost response."""
    monkeypatch.setattr(github_client, "TIMEOUT_S", LONG_S)


class Adapters:
    """Opens adapters of one service. Each is like that of another process; all are closed together."""

    #: Service and operation under which calls are counted.
    counted: ClassVar[Mapping[str, tuple[str, str]]]

    def __init__(self, adapter: Callable[..., Any], *, calls: CallCounter | None = None, **arguments: Any) -> None:
        self.calls = calls or CallCounter()
        #: Arguments of all adapters, unless `open` gets others.
        self.arguments = {"calls": self.calls, **arguments}
        self._adapter = adapter
        self._opened: list[Any] = []

    def open(self, **changed: Any) -> Any:
        self._opened.append(self._adapter(**{**self.arguments, **changed}))
        return self._opened[-1]

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._opened))


class Stores(Adapters):
    counted: ClassVar = {name: ("store", name) for name in ("apply", "get", "poll")}

    async def corrupt(self, number: int) -> None:
        """Make the control record, the report, the provision and the job of this number unreadable.

        And the demand of the runner set `set-<number>`, and the lease `lease-<number>`.
        """
        raise NotImplementedError("records in memory are never parsed")

    async def forget_revisions(self, number: int) -> None:
        """Remove the revisions of the job and of the demand of this number, as older versions wrote them."""
        raise NotImplementedError("records in memory have all fields")


class MemoryStores(Stores):
    def __init__(self, _folder: Path) -> None:
        super().__init__(MemoryInstanceStore, database=MemoryDatabase(), clock=SystemClock())


class SqliteStores(Stores):
    def __init__(self, folder: Path) -> None:
        self._path = folder / "remuda.db"
        super().__init__(SqliteInstanceStore, path=self._path, clock=SystemClock(), ids=SystemIds())

    async def corrupt(self, number: int) -> None:
        connection = sqlite3.connect(self._path)
        with connection:
            connection.execute("UPDATE instances SET doc = '{' WHERE instance_id = ?", (instance_id(number),))
            connection.execute("UPDATE reports SET doc = '[]' WHERE instance_id = ?", (instance_id(number),))
            connection.execute(
                "UPDATE provisions SET doc = CAST(x'ff' AS TEXT) WHERE provision_id = ?", (f"p-{number}",)
            )
            connection.execute("UPDATE jobs SET doc = '{}' WHERE job_id = ?", (f"job-{number}",))
            names = (f"demand/set-{number}", f"lease/lease-{number}")
            connection.execute("UPDATE singles SET doc = 'null' WHERE name IN (?, ?)", names)
        connection.close()

    async def forget_revisions(self, number: int) -> None:
        connection = sqlite3.connect(self._path)
        with connection:
            removed = "SET doc = json_remove(doc, '$.revision')"
            connection.execute(f"UPDATE jobs {removed} WHERE job_id = ?", (f"job-{number}",))
            connection.execute(f"UPDATE singles {removed} WHERE name = ?", (f"demand/set-{number}",))
        connection.close()


class DynamoStores(Stores):
    counted: ClassVar = {
        "apply": ("dynamodb", "UpdateItem"),
        "get": ("dynamodb", "GetItem"),
        "poll": ("dynamodb", "poll:GetItem"),
    }

    def __init__(self, client: Any, table: str, calls: CallCounter) -> None:
        self.client = client
        self.table = table
        given: dict[str, Any] = {"client": client, "table": table, "clock": SystemClock(), "ids": SystemIds()}
        super().__init__(DynamoInstanceStore, calls=calls, **given)

    async def corrupt(self, number: int) -> None:
        for where, field in (
            (ItemKeys().control(instance_id(number)), "cpu"),
            (ItemKeys().report(instance_id(number)), "beat"),
            (key(provisions_pk("1234"), f"p-{number}"), "count"),
            (job_key(f"job-{number}"), "labels"),
            (demand_key(f"set-{number}"), "statistics"),
            (lease_key(f"lease-{number}"), "beat"),
        ):
            await self.client.update_item(
                TableName=self.table,
                Key=where,
                UpdateExpression="SET #field = :bad",
                ExpressionAttributeNames={"#field": field},
                ExpressionAttributeValues={":bad": {"B": b"\xff"}},
            )

    async def forget_revisions(self, number: int) -> None:
        for where in (job_key(f"job-{number}"), demand_key(f"set-{number}")):
            await self.client.update_item(TableName=self.table, Key=where, UpdateExpression="REMOVE revision")


class Pools(Adapters):
    counted: ClassVar = {name: ("pool", name) for name in ("send", "receive", "make_visible", "delete")}

    def __init__(self, adapter: Callable[..., Any], **arguments: Any) -> None:
        self._clock = AdjustableClock()
        super().__init__(adapter, clock=SystemClock(), ids=SystemIds(), **arguments)

    async def advance(self, seconds: float) -> None:
        """Let time pass for the queues."""
        self._clock.ahead_s += seconds

    async def send_raw(self, resource_class: str, body: str) -> None:
        """Send an arbitrary message body."""
        raise NotImplementedError


class MemoryPools(Pools):
    def __init__(self, _folder: Path) -> None:
        super().__init__(MemoryResourcePool)
        self._queues = self.arguments["queues"] = MemoryQueues(clock=self._clock)

    async def send_raw(self, resource_class: str, body: str) -> None:
        self._queues.put(resource_class, None, shuffle=0.5, malformed=f"{len(body)} characters that are no message")


class SqlitePools(Pools):
    def __init__(self, folder: Path) -> None:
        self._path = folder / "remuda.db"
        super().__init__(SqliteResourcePool, path=self._path)
        self.arguments["clock"] = self._clock

    async def send_raw(self, resource_class: str, body: str) -> None:
        connection = sqlite3.connect(self._path)
        with connection:
            connection.execute(
                "INSERT INTO messages (queue, visible_at, shuffle, body) VALUES (?, 0, 0.5, ?)", (resource_class, body)
            )
        connection.close()


class SqsPools(Pools):
    counted: ClassVar = {
        "send": ("sqs", "SendMessageBatch"),
        "receive": ("sqs", "ReceiveMessage"),
        "make_visible": ("sqs", "ChangeMessageVisibilityBatch"),
        "delete": ("sqs", "DeleteMessageBatch"),
    }

    def __init__(self, client: Any, server: Ministack | Fauxqs, prefix: str, calls: CallCounter) -> None:
        self.client = client
        self.prefix = prefix
        self._server = server
        super().__init__(SqsResourcePool, client=client, prefix=prefix, calls=calls)

    async def advance(self, seconds: float) -> None:
        self._server.advance_clock(seconds)

    async def send_raw(self, resource_class: str, body: str) -> None:
        # SQS rejects empty bodies.
        await self.client.send_message(QueueUrl=await self.url(resource_class), MessageBody=body or " ")

    async def url(self, resource_class: str) -> str:
        """The URL of the queue of a class."""
        return str((await self.client.get_queue_url(QueueName=f"{self.prefix}_{resource_class}"))["QueueUrl"])


#: Adapters that need only a directory.
STORES: dict[str, Callable[[Path], Stores]] = {"memory": MemoryStores, "sqlite": SqliteStores}
POOLS: dict[str, Callable[[Path], Pools]] = {"memory": MemoryPools, "sqlite": SqlitePools}
#: Stores that parse records, which may therefore be malformed.
PARSING_STORES = ["sqlite", "dynamodb"]
#: Pools whose receipts expire with the visibility timeout. With SQS an expired receipt works until the next receive.
POOLS_WITH_EXPIRING_RECEIPTS = ["memory", "sqlite"]


@pytest.fixture(params=[*STORES, "dynamodb"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    if request.param in STORES:
        return STORES[request.param](tmp_path)
    found: Stores = request.getfixturevalue("dynamo_stores")
    return found


@pytest.fixture
async def dynamo_stores(clients: AwsClients, table_name: str, calls: CallCounter) -> AsyncIterator[DynamoStores]:
    stores = DynamoStores(await clients.dynamodb(), table_name, calls)
    yield stores
    await stores.close()


@pytest.fixture
async def between(server: Ministack, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FaultProxy]:
    """A proxy in front of DynamoDB, for the clients that are opened later."""
    async with fault_proxy(os.environ["AWS_ENDPOINT_URL_DYNAMODB"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", proxy.url)
        yield proxy


@pytest.fixture
async def sqs_pools(clients: AwsClients, server: Ministack, table_name: str, calls: CallCounter) -> SqsPools:
    return SqsPools(await clients.sqs(), server, table_name, calls)


@pytest.fixture(scope="session")
def other_sqs() -> Iterator[Fauxqs]:
    with fauxqs() as started:
        yield started


@pytest.fixture
async def fauxqs_pools(
    clients: AwsClients, other_sqs: Fauxqs, table_name: str, calls: CallCounter, monkeypatch: pytest.MonkeyPatch
) -> SqsPools:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", other_sqs.url)
    return SqsPools(await clients.sqs(), other_sqs, table_name, calls)


@pytest.fixture
async def store(stores: Stores) -> AsyncIterator[InstanceStore]:
    store: InstanceStore = stores.open()
    await store.prepare()
    yield store
    await stores.close()


@pytest.fixture
def other(stores: Stores, store: InstanceStore) -> Any:
    """The store of another process."""
    return stores.open()


@pytest.fixture(params=[*POOLS, "sqs", "fauxqs"])
def pools(request: pytest.FixtureRequest, tmp_path: Path) -> Pools:
    if request.param in POOLS:
        return POOLS[request.param](tmp_path)
    found: Pools = request.getfixturevalue(f"{request.param}_pools")
    return found


@pytest.fixture
async def pool(pools: Pools) -> AsyncIterator[ResourcePool]:
    pool: ResourcePool = pools.open()
    await pool.prepare(["large", "xlarge"])
    yield pool
    await pools.close()


@pytest.fixture
def other_pool(pools: Pools, pool: ResourcePool) -> Any:
    """The pool of another process."""
    return pools.open()


# Requests to AWS and GitHub -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="session")
def _checked_requests() -> Iterator[None]:
    """Check every request of this process to AWS: models, documented limits, and rules that servers do not check.

    Tests that use a client themselves, for example to spoil a record, need not keep the rules. Those for requests to
    GitHub are always kept.
    """
    send = ServiceClient.call
    sequences: WeakKeyDictionary[ServiceClient, RequestSequence] = WeakKeyDictionary()

    async def check_and_send(client: ServiceClient, operation: str, parameters: Any) -> Any:
        check_request(client.name, operation, parameters)
        if not _is_called_by_an_adapter():
            return await send(client, operation, parameters)
        sequence = sequences.setdefault(client, RequestSequence())
        sequence.judge(client.name, operation, parameters)
        answer = await send(client, operation, parameters)
        sequence.observe(client.name, operation, parameters, answer)
        return answer

    open_client = AwsClients._client

    async def open_checked(clients: AwsClients, name: str, settings: ClientConfig) -> Any:
        client = await open_client(clients, name, settings)
        client.meta.events.register("provide-client-params", _check_parameters)
        return client

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ServiceClient, "call", check_and_send)
        patched.setattr(AwsClients, "_client", open_checked)
        patched.setattr(github_client, "HttpConnections", JudgedConnections)
        yield


def _check_parameters(params: dict[str, Any], model: OperationModel, **_: Any) -> None:
    """Check a request of a client of botocore that the product makes. Its event names the arguments."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals["__name__"]).startswith(_BETWEEN):
        frame = frame.f_back
    if frame is not None and str(frame.f_globals["__name__"]).startswith("remuda."):
        check_api_request(model.service_model.service_name, model.name, params)


#: Modules between who makes a request and botocore's event.
_BETWEEN = ("aiobotocore.", "botocore.", "remuda.adapters.aws.calls", "remuda.deployment.api")


def _is_called_by_an_adapter() -> bool:
    """Of the frames: this function, the check, the client's method, and who awaits it."""
    return str(sys._getframe(3).f_globals["__name__"]).startswith("remuda.")
