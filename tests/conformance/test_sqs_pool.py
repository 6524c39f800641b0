"""Specifics of the SQS pool: changed queues, partial batches, short polls, malformed bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiobotocore.session import AioSession
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remuda.adapters.aws.clients import AwsClients
from remuda.adapters.aws.sqs import MAX_REASON, RETENTION_S, VISIBILITY_S, SqsResourcePool, _delivery
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.errors import NotFound, Throttled, Unavailable, UserError
from remuda.domain.resources import PoolMessage
from remuda.ports.calls import CallCounter
from tests.support.aws.fault_proxy import FaultProxy, fail, fault_proxy, respond
from tests.support.aws.servers import LOOPBACK, Ministack, unused_port
from tests.support.records import LONG_S, message


@pytest.fixture
async def between(server: Ministack, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FaultProxy]:
    async with fault_proxy(server.url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", proxy.url)
        yield proxy


@pytest.fixture
async def client(between: FaultProxy, clients: AwsClients) -> Any:
    return await clients.sqs()


@pytest.fixture
def calls() -> CallCounter:
    return CallCounter()


@pytest.fixture
def pool(client: Any, table_name: str, calls: CallCounter) -> SqsResourcePool:
    return open_pool(client, table_name, calls)


def open_pool(client: Any, prefix: str, calls: CallCounter) -> SqsResourcePool:
    return SqsResourcePool(client=client, prefix=prefix, clock=SystemClock(), ids=SystemIds(), calls=calls)


async def attributes(client: Any, name: str) -> dict[str, str]:
    url = (await client.get_queue_url(QueueName=name))["QueueUrl"]
    found: dict[str, str] = (await client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"]))["Attributes"]
    return found


# Queues -----------------------------------------------------------------------------------------------------------


async def test_queue_attributes(pool: SqsResourcePool, client: Any, table_name: str) -> None:
    assert await pool.prepare(["large"]) == [f"queue {table_name}-large"]
    found = await attributes(client, f"{table_name}-large")
    assert found["MessageRetentionPeriod"] == str(RETENTION_S)
    assert found["VisibilityTimeout"] == str(VISIBILITY_S)


async def test_changed_queue_is_repaired(pool: SqsResourcePool, client: Any, table_name: str) -> None:
    await pool.prepare(["large"])
    url = (await client.get_queue_url(QueueName=f"{table_name}-large"))["QueueUrl"]
    await client.set_queue_attributes(QueueUrl=url, Attributes={"MessageRetentionPeriod": "60", "DelaySeconds": "900"})
    assert await pool.prepare(["large"]) == [f"DelaySeconds, MessageRetentionPeriod of queue {table_name}-large"]
    assert await pool.prepare(["large"]) == []


async def test_queue_with_a_dead_letter_queue_is_rejected(pool: SqsResourcePool, client: Any, table_name: str) -> None:
    await pool.prepare(["large", "grave"])
    arn = (await attributes(client, f"{table_name}-grave"))["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 5})
    url = (await client.get_queue_url(QueueName=f"{table_name}-large"))["QueueUrl"]
    await client.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": policy})
    with pytest.raises(UserError, match=f"queue {table_name}-large has a dead-letter queue") as refused:
        await pool.prepare(["large"])
    assert "redrive" in refused.value.fix


async def test_invalid_queue_name_is_rejected(client: Any, calls: CallCounter) -> None:
    for prefix in ("remuda " + "x", "p" * 80):
        with pytest.raises(UserError, match="is not a valid queue name"):
            await open_pool(client, prefix, calls).prepare(["large"])


async def test_deleted_queue_is_created_again(pool: SqsResourcePool, client: Any, table_name: str) -> None:
    await pool.prepare(["large"])
    await pool.send([message(1)])
    await client.delete_queue(QueueUrl=(await client.get_queue_url(QueueName=f"{table_name}-large"))["QueueUrl"])
    for call in (pool.receive("large", visibility_s=1), pool.send([message(1)]), pool.depth("large")):
        with pytest.raises(NotFound, match=f"no queue {table_name}-large") as missing:
            await call
        assert "remuda refresh" in missing.value.fix
    assert await pool.prepare(["large"]) != []
    await pool.send([message(2)])
    assert await pool.depth("large") == 1


async def test_recently_deleted_queue_is_unavailable(pool: SqsResourcePool, between: FaultProxy) -> None:
    between.always["CreateQueue"] = fail(400, "QueueDeletedRecently")
    with pytest.raises(Unavailable, match="was deleted less than a minute ago") as refused:
        await pool.prepare(["large"])
    assert "refresh" in refused.value.fix


async def test_queue_url_is_cached(pool: SqsResourcePool, table_name: str, between: FaultProxy, client: Any) -> None:
    await pool.prepare(["large"])
    other = open_pool(client, table_name, CallCounter())
    between.requests.clear()
    for _ in range(3):
        await other.depth("large")
    assert between.requests["GetQueueUrl"] == 1


# Calls ------------------------------------------------------------------------------------------------------------


async def test_empty_short_poll_is_repeated_once(
    pool: SqsResourcePool, between: FaultProxy, calls: CallCounter
) -> None:
    await pool.prepare(["large"])
    assert await pool.receive("large", visibility_s=1) == []
    assert between.requests["ReceiveMessage"] == calls.by_service()["sqs"]["ReceiveMessage"] == 2
    await pool.send([message(1)])
    between.then("ReceiveMessage", respond({}))  # a short poll that finds nothing
    assert len(await pool.receive("large", visibility_s=LONG_S)) == 1
    assert await pool.receive("large", visibility_s=LONG_S, wait_s=0.5) == []
    assert between.sent["ReceiveMessage"][-1]["WaitTimeSeconds"] == 1


async def test_message_has_the_documented_fields(pool: SqsResourcePool, between: FaultProxy) -> None:
    await pool.prepare(["large"])
    await pool.send([message(1)])
    (entry,) = between.sent["SendMessageBatch"][-1]["Entries"]
    assert json.loads(entry["MessageBody"]) == {
        "id": "i-00000000000000001",
        "epoch": 1,
        "resourceClass": "large",
        "instanceType": "c6i.large",
        "usageClass": "spot",
        "cpu": 2,
        "mmem": 4096,
        "tier": "trusted",
        "repository": "",
    }


async def test_many_messages_are_sent_in_batches(pool: SqsResourcePool, between: FaultProxy) -> None:
    await pool.prepare(["large"])
    await pool.send([message(number) for number in range(95)])
    assert between.requests["SendMessageBatch"] == 10
    assert await pool.depth("large") == 95


FAILED = {"Id": "1", "Code": "InternalError", "SenderFault": False}


@pytest.mark.parametrize("operation", ["send", "delete", "make_visible"])
async def test_rejected_entries_are_retried_once(pool: SqsResourcePool, between: FaultProxy, operation: str) -> None:
    await pool.prepare(["large"])
    wire_name = {
        "send": "SendMessageBatch",
        "delete": "DeleteMessageBatch",
        "make_visible": "ChangeMessageVisibilityBatch",
    }[operation]

    async def call() -> None:
        if operation == "send":
            await pool.send([message(number) for number in range(3)])
        else:
            await getattr(pool, operation)("large", ["r-0", "r-1", "r-2"])

    between.then(wire_name, respond({"Successful": [], "Failed": [FAILED]}))
    await call()
    assert [entry["Id"] for entry in between.sent[wire_name][-1]["Entries"]] == ["1"], "only the rejected entry"
    between.always[wire_name] = respond({"Successful": [], "Failed": [FAILED]})
    with pytest.raises(Unavailable, match=r"rejected 1 of 3 entries.*InternalError"):
        await call()
    assert between.requests[wire_name] == 4


async def test_errors_are_translated(pool: SqsResourcePool, between: FaultProxy) -> None:
    await pool.prepare(["large"])
    between.always["ReceiveMessage"] = fail(400, "ThrottlingException")
    with pytest.raises(Throttled):
        await pool.receive("large", visibility_s=1)
    between.always["ReceiveMessage"] = fail(403, "AccessDeniedException")
    with pytest.raises(UserError):
        await pool.receive("large", visibility_s=1)
    between.always["ReceiveMessage"] = fail(503, "ServiceUnavailable")
    with pytest.raises(Unavailable):
        await pool.receive("large", visibility_s=1)


async def test_unreachable_endpoint_is_named(
    server: Ministack, aws_session: AioSession, calls: CallCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unused_port() as port:
        url = f"http://{LOOPBACK}:{port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", url)
        async with asyncio.timeout(LONG_S), AwsClients(session=aws_session) as clients:
            with pytest.raises(Unavailable, match=f"SQS at {url}/? cannot be reached"):
                await open_pool(await clients.sqs(), "remuda", calls).depth("large")


# Bodies -----------------------------------------------------------------------------------------------------------

GOOD = {
    "id": "i-0123456789abcdef0",
    "epoch": 1,
    "resourceClass": "large",
    "instanceType": "c6i.large",
    "usageClass": "spot",
    "cpu": 2,
    "mmem": 4096,
}


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "1"},
        {"epoch": 0},
        {"epoch": True},
        {"epoch": 1.5},
        {"cpu": None},
        {"mmem": []},
        {"id": 7},
        {"id": "i-" + "f" * 100_000},
        {"usageClass": "free"},
        {"usageClass": {}},
        {"tier": "root"},
        {"resourceClass": {"a": "b"}},
    ],
)
async def test_body_with_wrong_types_is_malformed(
    pool: SqsResourcePool, client: Any, table_name: str, change: dict[str, Any]
) -> None:
    await pool.prepare(["large"])
    url = (await client.get_queue_url(QueueName=f"{table_name}-large"))["QueueUrl"]
    await client.send_message(QueueUrl=url, MessageBody=json.dumps({**GOOD, **change}))
    (delivery,) = await pool.receive("large", visibility_s=1)
    assert delivery.message is None
    assert 0 < len(delivery.malformed) <= MAX_REASON


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(list(GOOD)) | st.text(), inner),
    max_leaves=10,
)


@given(body=st.text() | JSONS.map(json.dumps) | st.dictionaries(st.sampled_from(list(GOOD)), JSONS).map(json.dumps))
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_any_body_is_parsed_or_malformed(body: str) -> None:
    delivery = _delivery({"ReceiptHandle": "r-1", "Body": body})
    assert isinstance(delivery.message, PoolMessage) or delivery.malformed


def test_unknown_fields_of_a_body_are_ignored() -> None:
    body = json.dumps({**GOOD, "colour": "bay"})
    assert _delivery({"ReceiptHandle": "r-1", "Body": body}).message is not None
    for hostile in ("[" * 100_000, "1" * 5_000, '{"id": 1e999}', "\ud800"):
        assert _delivery({"ReceiptHandle": "r-1", "Body": hostile}).malformed
