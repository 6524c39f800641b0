"""What is particular to the SQS pool: queues by hand, partial batches, sampled polls, bodies that anybody can send."""

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


async def test_a_queue_is_as_the_pool_needs_it(pool: SqsResourcePool, client: Any, table_name: str) -> None:
    assert await pool.prepare(["large"]) == [f"queue {table_name}-large"]
    found = await attributes(client, f"{table_name}-large")
    assert found["MessageRetentionPeriod"] == str(RETENTION_S)
    assert found["VisibilityTimeout"] == str(VISIBILITY_S)


async def test_a_queue_that_somebody_changed_is_put_right(pool: SqsResourcePool, client: Any, table_name: str) -> None:
    await pool.prepare(["large"])
    url = (await client.get_queue_url(QueueName=f"{table_name}-large"))["QueueUrl"]
    await client.set_queue_attributes(QueueUrl=url, Attributes={"MessageRetentionPeriod": "60", "DelaySeconds": "900"})
    assert await pool.prepare(["large"]) == [f"DelaySeconds, MessageRetentionPeriod of queue {table_name}-large"]
    assert await pool.prepare(["large"]) == []


async def test_a_queue_that_would_lose_hints_is_refused(pool: SqsResourcePool, client: Any, table_name: str) -> None:
    await pool.prepare(["large", "grave"])
    arn = (await attributes(client, f"{table_name}-grave"))["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 5})
    url = (await client.get_queue_url(QueueName=f"{table_name}-large"))["QueueUrl"]
    await client.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": policy})
    with pytest.raises(UserError, match=f"queue {table_name}-large has a dead-letter queue") as refused:
        await pool.prepare(["large"])
    assert "redrive" in refused.value.fix


async def test_a_name_that_no_queue_can_have(client: Any, calls: CallCounter) -> None:
    for prefix in ("remuda " + "x", "p" * 80):
        with pytest.raises(UserError, match="is not a valid queue name"):
            await open_pool(client, prefix, calls).prepare(["large"])


async def test_a_queue_deleted_by_hand(pool: SqsResourcePool, client: Any, table_name: str) -> None:
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


async def test_a_queue_that_was_deleted_a_moment_ago_is_to_be_waited_for(
    pool: SqsResourcePool, between: FaultProxy
) -> None:
    between.always["CreateQueue"] = fail(400, "QueueDeletedRecently")
    with pytest.raises(Unavailable, match="was deleted less than a minute ago") as refused:
        await pool.prepare(["large"])
    assert "refresh" in refused.value.fix


async def test_an_address_is_asked_for_once(
    pool: SqsResourcePool, table_name: str, between: FaultProxy, client: Any
) -> None:
    await pool.prepare(["large"])
    other = open_pool(client, table_name, CallCounter())
    between.requests.clear()
    for _ in range(3):
        await other.depth("large")
    assert between.requests["GetQueueUrl"] == 1


# Calls ------------------------------------------------------------------------------------------------------------


async def test_an_empty_short_poll_is_repeated_once(
    pool: SqsResourcePool, between: FaultProxy, calls: CallCounter
) -> None:
    await pool.prepare(["large"])
    assert await pool.receive("large", visibility_s=1) == []
    assert between.requests["ReceiveMessage"] == calls.by_service()["sqs"]["ReceiveMessage"] == 2
    await pool.send([message(1)])
    between.then("ReceiveMessage", respond({}))  # the hosts that were asked had none
    assert len(await pool.receive("large", visibility_s=LONG_S)) == 1
    assert await pool.receive("large", visibility_s=LONG_S, wait_s=0.5) == []
    assert between.sent["ReceiveMessage"][-1]["WaitTimeSeconds"] == 1


async def test_a_message_has_the_fields_that_others_know(pool: SqsResourcePool, between: FaultProxy) -> None:
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


async def test_a_large_herd_goes_in_tens(pool: SqsResourcePool, between: FaultProxy) -> None:
    await pool.prepare(["large"])
    await pool.send([message(number) for number in range(95)])
    assert between.requests["SendMessageBatch"] == 10
    assert await pool.depth("large") == 95


FAILED = {"Id": "1", "Code": "InternalError", "SenderFault": False}


@pytest.mark.parametrize("operation", ["send", "delete", "hand_back"])
async def test_what_a_batch_refused_is_tried_once_more(
    pool: SqsResourcePool, between: FaultProxy, operation: str
) -> None:
    await pool.prepare(["large"])
    wire_name = {
        "send": "SendMessageBatch",
        "delete": "DeleteMessageBatch",
        "hand_back": "ChangeMessageVisibilityBatch",
    }[operation]

    async def call() -> None:
        if operation == "send":
            await pool.send([message(number) for number in range(3)])
        else:
            await getattr(pool, operation)("large", ["r-0", "r-1", "r-2"])

    between.then(wire_name, respond({"Successful": [], "Failed": [FAILED]}))
    await call()
    assert [entry["Id"] for entry in between.sent[wire_name][-1]["Entries"]] == ["1"], "only what was refused"
    between.always[wire_name] = respond({"Successful": [], "Failed": [FAILED]})
    with pytest.raises(Unavailable, match=r"rejected 1 of 3 entries.*InternalError"):
        await call()
    assert between.requests[wire_name] == 4


async def test_failures_are_translated(pool: SqsResourcePool, between: FaultProxy) -> None:
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


async def test_an_endpoint_that_is_down_is_named(
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
async def test_a_body_of_wrong_types_is_malformed(
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
def test_no_body_is_too_strange(body: str) -> None:
    delivery = _delivery({"ReceiptHandle": "r-1", "Body": body})
    assert isinstance(delivery.message, PoolMessage) or delivery.malformed


def test_a_good_body_with_more_in_it_than_we_know() -> None:
    body = json.dumps({**GOOD, "colour": "bay"})
    assert _delivery({"ReceiptHandle": "r-1", "Body": body}).message is not None
    for hostile in ("[" * 100_000, "1" * 5_000, '{"id": 1e999}', "\ud800"):
        assert _delivery({"ReceiptHandle": "r-1", "Body": hostile}).malformed
