"""The DynamoDB store with failing services and networks: one clear error each, no partial writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiobotocore.session import AioSession
from aiohttp import web

from remuda.adapters.aws.clients import MAX_ATTEMPTS, AwsClients, config
from remuda.adapters.aws.dynamodb.changes import CHANGES_PER_TRANSACTION
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.aws.dynamodb.table import BATCH_ATTEMPTS
from remuda.controlplane.context import is_applied
from remuda.domain import provision as provisions
from remuda.domain.errors import Conflict, Throttled, TimedOut, Unavailable, UserError
from remuda.domain.instance import Instance, State
from remuda.domain.signals import Signal
from remuda.ports.calls import CallCounter
from tests.conformance.conftest import DynamoStores
from tests.support.aws.fault_proxy import FaultProxy, after_forwarding, cut_connection, fail, never_respond, respond
from tests.support.aws.servers import LOOPBACK, Ministack, unused_port
from tests.support.records import (
    LONG_S,
    NOW,
    at,
    birth,
    change,
    claim_change,
    instance,
    instance_id,
    job_record,
    provision,
)
from tests.support.virtual_time import AdjustableClock, EventRecorder

ID = instance_id(1)


@pytest.fixture
def stores(between: FaultProxy, dynamo_stores: DynamoStores) -> DynamoStores:
    dynamo_stores.arguments["clock"] = AdjustableClock(longest_sleep_s=0.01)
    return dynamo_stores


@pytest.fixture
def store(between: FaultProxy, store: DynamoInstanceStore) -> DynamoInstanceStore:
    """A prepared store that calls DynamoDB through the proxy."""
    between.requests.clear()
    return store


# The table --------------------------------------------------------------------------------------------------------


async def test_missing_table_is_reported(stores: DynamoStores) -> None:
    store = stores.open()
    for call in (
        store.apply(birth(instance())),
        store.get(ID),
        store.get_many([ID, instance_id(2)]),
        store.find([State.IDLE]),
        store.wait_for_control(ID, None, LONG_S),
        store.get_config(),
    ):
        with pytest.raises(UserError, match=f"no table {stores.table}") as refused:
            await call
        assert "remuda refresh" in refused.value.fix


def key_schema(pk: str, sk: str) -> list[dict[str, str]]:
    return [{"AttributeName": pk, "KeyType": "HASH"}, {"AttributeName": sk, "KeyType": "RANGE"}]


async def test_table_with_other_keys_is_rejected(stores: DynamoStores, table_name: str) -> None:
    await stores.client.create_table(
        TableName=table_name,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[
            {"AttributeName": "id", "AttributeType": "S"},
            {"AttributeName": "at", "AttributeType": "N"},
            {"AttributeName": "gsi1pk", "AttributeType": "S"},
        ],
        KeySchema=key_schema("id", "at"),
        GlobalSecondaryIndexes=[
            {
                "IndexName": "live",
                "KeySchema": key_schema("gsi1pk", "at"),
                "Projection": {"ProjectionType": "KEYS_ONLY"},
            }
        ],
    )
    with pytest.raises(UserError) as refused:
        await stores.open().prepare()
    for difference in (
        f"table {table_name} is not a Remuda store",
        "its keys are id (S, HASH), at (N, RANGE), not pk (S, HASH), sk (S, RANGE)",
        "the keys of index live are gsi1pk (S, HASH), at (N, RANGE)",
        "index live projects KEYS_ONLY",
        "it has no index by_provision",
    ):
        assert difference in refused.value.message


async def test_invalid_table_name_is_rejected(stores: DynamoStores) -> None:
    with pytest.raises(UserError, match="my pool"):
        await stores.open(table="my pool").prepare()


async def test_concurrent_prepare(stores: DynamoStores) -> None:
    opened = [stores.open() for _ in range(4)]
    created = await asyncio.gather(*(store.prepare() for store in opened))
    assert sum(f"table {stores.table}" in each for each in created) == 1
    assert await opened[0].prepare() == []


# Credentials and endpoints ----------------------------------------------------------------------------------------


async def test_unreachable_endpoint_is_named(
    clients: AwsClients, table_name: str, calls: CallCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unused_port() as port:
        url = f"http://{LOOPBACK}:{port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", url)
        async with asyncio.timeout(LONG_S):
            store = DynamoStores(await clients.dynamodb(), table_name, calls).open()
            with pytest.raises(Unavailable, match=f"DynamoDB at {url}/? cannot be reached"):
                await store.get(ID)
            await store.close()


async def test_missing_credentials(stores: DynamoStores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    async with AwsClients() as clients:
        with pytest.raises(UserError, match="credentials"):
            await stores.open(client=await clients.dynamodb()).get(ID)


async def test_missing_region(server: Ministack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    async with AwsClients() as clients:
        with pytest.raises(UserError) as refused:
            await clients.dynamodb()
    assert "AWS_REGION" in refused.value.fix


async def test_invalid_endpoint(server: Ministack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", "nonsense")
    async with AwsClients() as clients:
        with pytest.raises(UserError) as refused:
            await clients.dynamodb()
    assert "AWS_ENDPOINT_URL" in refused.value.fix


@pytest.mark.parametrize("variable", ["AWS_REGION", "AWS_DEFAULT_REGION"])
async def test_both_region_variables_are_read(
    server: Ministack, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, "eu-west-1")
    async with AwsClients() as clients:
        client: Any = await clients.dynamodb()
        assert clients.region() == client.region == "eu-west-1"


@pytest.mark.parametrize("code", ["AccessDeniedException", "ExpiredTokenException", "UnrecognizedClientException"])
async def test_rejected_credentials_are_not_retried(store: DynamoInstanceStore, between: FaultProxy, code: str) -> None:
    between.always["GetItem"] = fail(400, code)
    with pytest.raises(UserError):
        await store.get(ID)
    assert between.requests["GetItem"] == 1, "a retry would not help"


# Throttling, outages, lost responses ------------------------------------------------------------------------------


async def test_throttled_call_is_retried_and_counted(
    store: DynamoInstanceStore, between: FaultProxy, calls: CallCounter
) -> None:
    between.then("UpdateItem", fail(400, "ProvisionedThroughputExceededException"))
    await store.apply(birth(instance()))
    assert between.requests["UpdateItem"] == calls.by_service()["dynamodb"]["UpdateItem"] == 2
    assert calls.outcomes()["dynamodb", "UpdateItem"] == (1, 1)
    with pytest.raises(Conflict):
        await store.apply(birth(instance()))
    assert calls.outcomes()["dynamodb", "UpdateItem"] == (2, 1), "a failed condition is not a failed call"


async def test_lasting_throttling(store: DynamoInstanceStore, between: FaultProxy, calls: CallCounter) -> None:
    between.always["UpdateItem"] = fail(400, "ThrottlingException")
    with pytest.raises(Throttled) as throttled:
        await store.apply(birth(instance()))
    assert throttled.value.retry_after_s > 0
    assert between.requests["UpdateItem"] == calls.by_service()["dynamodb"]["UpdateItem"] == MAX_ATTEMPTS
    assert calls.outcomes()["dynamodb", "UpdateItem"] == (0, MAX_ATTEMPTS)
    assert await store.get(ID) is None


async def test_lasting_outage(store: DynamoInstanceStore, between: FaultProxy) -> None:
    between.always["Query"] = fail(500, "InternalServerError")
    with pytest.raises(Unavailable, match="InternalServerError"):
        await store.provisions_of_run("1234")


async def test_an_unknown_refusal_is_unavailable(store: DynamoInstanceStore, between: FaultProxy) -> None:
    between.always["GetItem"] = fail(400, "SomethingNew")
    with pytest.raises(Unavailable, match="SomethingNew"):
        await store.get(ID)


@pytest.mark.parametrize("fault", [cut_connection, fail(503, "ServiceUnavailable")], ids=["cut", "503"])
async def test_write_with_a_lost_response_is_recognised(
    store: DynamoInstanceStore, between: FaultProxy, fault: Any
) -> None:
    """The condition of botocore's retry fails because of its first attempt; the conflict shows the written record."""
    idle = await store.apply(birth(instance()))
    between.then("UpdateItem", after_forwarding(fault))
    ours = claim_change(idle, "p-1/a")
    with pytest.raises(Conflict) as refused:
        await store.apply(ours)
    current: Instance = refused.value.current
    assert is_applied(ours, current)
    assert not is_applied(claim_change(idle, "p-1/b"), current)
    assert [entry.transition for entry in await store.history(ID)] == ["birth", "claim"], "with its history entry"


async def test_applied_write_with_a_lost_response_has_one_history_entry(
    store: DynamoInstanceStore, between: FaultProxy
) -> None:
    idle = await store.apply(birth(instance()))
    ours = claim_change(idle, "p-1/a")
    between.then("UpdateItem", *[after_forwarding(fail(400, "SomethingNew"))])
    with pytest.raises(Unavailable):
        await store.apply(ours)
    for _ in range(2):
        with pytest.raises(Conflict):
            await store.apply(ours)
    assert [entry.transition for entry in await store.history(ID)] == ["birth", "claim"]


LOST_TRANSACTIONS = {
    "cut": [after_forwarding(cut_connection)],
    "rejected by its own first attempt": [
        after_forwarding(cut_connection),
        fail(400, "TransactionCanceledException", CancellationReasons=[{"Code": "ConditionalCheckFailed"}] * 4),
    ],
    "unknown error": [after_forwarding(fail(400, "SomethingNew"))],
    "in progress": [after_forwarding(fail(400, "TransactionInProgressException"))] * MAX_ATTEMPTS,
}


@pytest.mark.parametrize("lost", LOST_TRANSACTIONS)
async def test_transaction_with_a_lost_response_has_one_history_entry_per_change(
    store: DynamoInstanceStore, between: FaultProxy, lost: str
) -> None:
    records = [await store.apply(birth(instance(number))) for number in (1, 2)]
    for record in records:
        await store.write_signal(record.instance_id, epoch=1, signal=Signal.UD_OK)
    changes = [change(each, transition="end", state=State.TERMINATED, forget_at=at(600)) for each in records]
    between.then("TransactWriteItems", *LOST_TRANSACTIONS[lost])
    failures = await store.apply_all(changes)
    if lost in {"unknown error", "in progress"}:
        assert [type(failure) for failure in failures] == [Unavailable, Unavailable], "it may have been applied"
        failures = await store.apply_all(changes)
    for made, failure in zip(changes, failures, strict=True):
        assert failure is None or (isinstance(failure, Conflict) and is_applied(made, failure.current))
        assert [entry.transition for entry in await store.history(made.instance_id)] == ["birth", "end"]


async def test_single_write_that_a_transaction_delays_is_unavailable(
    store: DynamoInstanceStore, between: FaultProxy
) -> None:
    """DynamoDB rejects the write of an item that a transaction is writing at this moment. A retry succeeds."""
    running = await store.apply(birth(instance(state=State.RUNNING)))
    opened = provision()
    await store.put_provision(opened)
    ours = change(running, transition="release", state=State.RELEASING)
    writes: list[tuple[str, Callable[[], Awaitable[object]]]] = [
        ("UpdateItem", lambda: store.apply(ours)),
        ("UpdateItem", lambda: store.write_signal(ID, epoch=1, signal=Signal.UD_OK)),
        ("PutItem", lambda: store.replace_provision(opened, provisions.released(opened, now=NOW, why="done"))),
        ("PutItem", lambda: store.put_jobs([job_record()])),
    ]
    for operation, write in writes:
        between.then(operation, fail(400, "TransactionConflictException"))
        with pytest.raises(Unavailable, match="TransactionConflictException"):
            await write()
        await write()
    assert await store.get(ID) == ours.applied_to(running)


async def test_failed_transaction_does_not_affect_the_others(store: DynamoInstanceStore, between: FaultProxy) -> None:
    records = await asyncio.gather(
        *(store.apply(birth(instance(number))) for number in range(CHANGES_PER_TRANSACTION + 2))
    )
    between.then("TransactWriteItems", fail(400, "AccessDeniedException"))
    failures = await store.apply_all([change(record, uses=7) for record in records])
    made = [record.instance_id for record, failure in zip(records, failures, strict=True) if failure is None]
    assert len(made) in {2, CHANGES_PER_TRANSACTION}
    assert {type(failure) for failure in failures} == {type(None), UserError}
    found = await store.get_many([record.instance_id for record in records])
    assert [name for name, record in found.items() if record.uses == 7] == sorted(made)


async def test_hanging_write_times_out_and_may_have_been_applied(
    aws_session: AioSession, between: FaultProxy, stores: DynamoStores, store: DynamoInstanceStore
) -> None:
    made = asyncio.Event()

    async def apply_later(forward: Callable[[], Awaitable[web.Response]]) -> None:
        await forward()
        made.set()

    async def fault(request: web.Request, forward: Callable[[], Awaitable[web.Response]]) -> web.Response:
        # Forwarded even after the client has given up.
        await asyncio.shield(asyncio.ensure_future(apply_later(forward)))
        return await never_respond(request, forward)

    async with AwsClients(session=aws_session) as clients:
        hasty = stores.open(client=await clients.service("dynamodb", "DynamoDB", config(read_timeout_s=0.2)))
        between.always["UpdateItem"] = fault
        with pytest.raises(TimedOut):
            await hasty.apply(birth(instance()))
        await hasty.close()
    async with asyncio.timeout(LONG_S):
        await made.wait()
    assert await store.get(ID) == instance()


async def test_wait_fails_if_the_server_fails(store: DynamoInstanceStore, between: FaultProxy) -> None:
    record = await store.apply(birth(instance()))
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(store.wait_for_control(ID, record, 2 * LONG_S))
        other = asyncio.create_task(store.wait_for_report(ID, None, 2 * LONG_S))
        assert await store.wait_for_control(ID, None, LONG_S) == record
        between.always["BatchGetItem"] = between.always["GetItem"] = fail(400, "ThrottlingException")
        for wait in (waiting, other):
            with pytest.raises(Throttled):
                await wait
        between.always.clear()
        assert await store.wait_for_control(ID, None, LONG_S) == record


# Batches ----------------------------------------------------------------------------------------------------------


async def test_unprocessed_keys_are_retried(store: DynamoInstanceStore, between: FaultProxy, table_name: str) -> None:
    records = {number: await store.apply(birth(instance(number))) for number in (1, 2, 3)}
    keys = [{"pk": {"S": f"control#{record.instance_id}"}, "sk": {"S": "control"}} for record in records.values()]
    left = {"Responses": {}, "UnprocessedKeys": {table_name: {"Keys": keys, "ConsistentRead": True}}}
    between.then("BatchGetItem", respond(left), respond(left))
    found = await store.get_many([record.instance_id for record in records.values()])
    assert found == {record.instance_id: record for record in records.values()}
    assert between.requests["BatchGetItem"] == 3
    between.always["BatchGetItem"] = respond(left)
    with pytest.raises(Throttled):
        await store.get_many([instance_id(1), instance_id(2)])
    assert between.requests["BatchGetItem"] == 3 + BATCH_ATTEMPTS


async def test_parts_of_a_batch_read_are_joined(
    store: DynamoInstanceStore, between: FaultProxy, table_name: str
) -> None:
    records = [await store.apply(birth(instance(number))) for number in (1, 2, 3)]

    async def first_only(request: web.Request, forward: Callable[[], Awaitable[web.Response]]) -> web.Response:
        first, *rest = json.loads((await forward()).text or "")["Responses"][table_name]
        keys = [{"pk": item["pk"], "sk": item["sk"]} for item in rest]
        unread = {table_name: {"Keys": keys, "ConsistentRead": True}}
        return await respond({"Responses": {table_name: [first]}, "UnprocessedKeys": unread})(request, forward)

    between.then("BatchGetItem", first_only, first_only)
    ids = [record.instance_id for record in records]
    assert await store.get_many(ids) == dict(zip(ids, records, strict=True))
    assert between.requests["BatchGetItem"] == 3


async def test_unwritable_history_does_not_block_writes(store: DynamoInstanceStore, between: FaultProxy) -> None:
    between.always["BatchWriteItem"] = fail(400, "AccessDeniedException")
    record = await store.apply(birth(instance()))
    with pytest.raises(UserError):
        await store.history(ID)
    between.always.clear()
    await store.apply(change(record, transition="second", uses=1))
    assert [entry.transition for entry in await store.history(ID)] == ["birth", "second"]


async def test_store_closes_with_unwritable_history(
    between: FaultProxy, stores: DynamoStores, store: DynamoInstanceStore
) -> None:
    notes = EventRecorder()
    other = stores.open(event_log=notes)
    between.always["BatchWriteItem"] = fail(400, "AccessDeniedException")
    await other.apply(birth(instance()))
    await other.close()
    assert notes.count("history-lost") == 1


async def test_delayed_history_is_recorded_in_the_event_log(
    between: FaultProxy, stores: DynamoStores, store: DynamoInstanceStore
) -> None:
    notes = EventRecorder()
    other = stores.open(event_log=notes)
    between.then("BatchWriteItem", fail(400, "AccessDeniedException"))
    record = await other.apply(birth(instance()))
    async with asyncio.timeout(LONG_S):
        while not notes.count("history-write-failed"):
            await store.get(ID)
    await other.apply(change(record, transition="second", uses=1))
    await other.close()
    assert notes.count("history-lost") == 0
    assert [entry.transition for entry in await store.history(ID)] == ["birth", "second"]


async def test_interrupted_history_write_is_finished_on_close(
    between: FaultProxy, stores: DynamoStores, store: DynamoInstanceStore
) -> None:
    other = stores.open()
    await other.apply(birth(instance()))
    between.then("BatchWriteItem", never_respond)
    reading = asyncio.create_task(other.history(ID))
    async with asyncio.timeout(LONG_S):
        while not between.requests["BatchWriteItem"]:
            await store.get(ID)
    reading.cancel()
    await asyncio.wait({reading})
    await other.close()
    assert [entry.transition for entry in await store.history(ID)] == ["birth"]
