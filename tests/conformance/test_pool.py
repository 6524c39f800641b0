"""Contract of the resource pool (`remuda.ports.pool`) for every adapter, and specifics of the SQS pool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remuda.adapters.aws.clients import AwsClients
from remuda.adapters.aws.sqs import MAX_REASON, RETENTION_S, VISIBILITY_S, SqsResourcePool, _delivery
from remuda.domain.errors import NotFound, Throttled, Unavailable, UserError
from remuda.domain.resources import PoolMessage, Tier, UsageClass
from remuda.ports.calls import CallCounter
from remuda.ports.pool import BATCH, Delivery, ResourcePool
from tests.conformance.conftest import POOLS_WITH_EXPIRING_RECEIPTS, Pools, SqsPools
from tests.support.aws.fault_proxy import FaultProxy, fail, fault_proxy, respond
from tests.support.aws.servers import LOOPBACK, Ministack, unused_port
from tests.support.records import LONG_S, SHORT_S, message

HIDDEN_S = 30.0


def receipts(deliveries: Sequence[Delivery]) -> list[str]:
    return [delivery.receipt for delivery in deliveries]


def numbers(deliveries: Sequence[Delivery]) -> list[int]:
    """The numbers of the messages, sorted because queues do not keep the order."""
    return sorted(int(delivery.message.id.removeprefix("i-"), 16) for delivery in deliveries if delivery.message)


async def drain(pool: ResourcePool, resource_class: str = "large") -> list[Delivery]:
    """Receive until the queue is empty."""
    found: list[Delivery] = []
    while batch := await pool.receive(resource_class, visibility_s=HIDDEN_S):
        found.extend(batch)
    return found


async def test_prepare_is_idempotent_and_returns_its_changes(pools: Pools) -> None:
    pool = pools.open()
    assert len(await pool.prepare(["large", "xlarge"])) == 2
    assert await pool.prepare(["xlarge", "large"]) == []
    assert len(await pool.prepare(["large", "huge"])) == 1
    assert await pool.depth("huge") == 0
    await pool.close()
    await pool.close()


async def test_unknown_class_raises_not_found(pool: ResourcePool) -> None:
    for call in (
        pool.receive("small", visibility_s=1),
        pool.send([message(1), message(2, resource_class="small")]),
        pool.delete("small", ["r-1"]),
        pool.make_visible("small", ["r-1"]),
        pool.depth("small"),
    ):
        with pytest.raises(NotFound):
            await call


async def test_message_is_received_as_sent(pool: ResourcePool, other_pool: ResourcePool) -> None:
    sent = PoolMessage(
        id="i-0123456789abcdef0",
        epoch=7,
        resource_class="large",
        instance_type="m6i.metal",
        usage_class=UsageClass.SPOT,
        cpu=128,
        memory_mib=524_288,
        tier=Tier.UNTRUSTED,
        repository="octo/repo",
    )
    await pool.send([sent])
    (delivery,) = await other_pool.receive("large", visibility_s=HIDDEN_S)
    assert (delivery.message, delivery.malformed) == (sent, "")
    assert delivery.receipt


async def test_message_goes_to_the_queue_of_its_class(pool: ResourcePool) -> None:
    await pool.send([message(1), message(2, resource_class="xlarge")])
    await pool.send([])
    assert numbers(await pool.receive("large", visibility_s=HIDDEN_S)) == [1]
    assert numbers(await pool.receive("xlarge", visibility_s=HIDDEN_S)) == [2]


async def test_receive_respects_its_limit(pool: ResourcePool) -> None:
    await pool.send([message(number) for number in range(25)])
    assert await pool.depth("large") == 25
    assert 1 <= len(await pool.receive("large", limit=3, visibility_s=0)) <= 3
    assert 1 <= len(await pool.receive("large", limit=50, visibility_s=0)) <= BATCH
    assert numbers(await drain(pool)) == list(range(25))


async def test_received_message_is_invisible_to_all(pool: ResourcePool, other_pool: ResourcePool) -> None:
    await pool.send([message(1)])
    assert numbers(await pool.receive("large", visibility_s=HIDDEN_S)) == [1]
    assert await pool.receive("large", visibility_s=HIDDEN_S) == []
    assert await other_pool.receive("large", visibility_s=HIDDEN_S) == []
    assert await pool.depth("large") == 1


async def test_invisible_message_returns_unless_deleted(pools: Pools, pool: ResourcePool) -> None:
    await pool.send([message(1), message(2)])
    deliveries = await drain(pool)
    await pool.delete("large", [each.receipt for each in deliveries if numbers([each]) == [1]])
    assert await pool.depth("large") == 1
    await pools.advance(HIDDEN_S + 1)
    assert numbers(await drain(pool)) == [2]


async def test_more_messages_than_a_batch_are_deleted(pool: ResourcePool) -> None:
    await pool.send([message(number) for number in range(23)])
    await pool.delete("large", receipts(await drain(pool)))
    assert await pool.depth("large") == 0
    await pool.delete("large", [])


async def test_message_made_visible_is_received_at_once(pool: ResourcePool, other_pool: ResourcePool) -> None:
    await pool.send([message(number) for number in range(12)])
    deliveries = await drain(pool)
    await pool.make_visible("large", receipts(deliveries))
    again = await drain(other_pool)
    assert numbers(again) == list(range(12))
    assert set(receipts(again)).isdisjoint(receipts(deliveries))
    await pool.make_visible("large", [])


async def test_stale_receipt_is_ignored(pools: Pools, pool: ResourcePool, other_pool: ResourcePool) -> None:
    await pool.send([message(1)])
    (first,) = await pool.receive("large", visibility_s=HIDDEN_S)
    await pools.advance(HIDDEN_S + 1)
    (second,) = await other_pool.receive("large", visibility_s=HIDDEN_S)
    await pool.delete("large", [first.receipt])
    await pool.make_visible("large", [first.receipt])
    assert await pool.receive("large", visibility_s=HIDDEN_S) == []
    await other_pool.delete("large", [second.receipt])
    await other_pool.delete("large", [second.receipt])
    await other_pool.make_visible("large", [second.receipt])
    assert await pool.depth("large") == 0


async def test_receipt_of_another_queue_is_ignored(pool: ResourcePool) -> None:
    await pool.send([message(1)])
    (delivery,) = await pool.receive("large", visibility_s=HIDDEN_S)
    await pool.delete("xlarge", [delivery.receipt])
    assert await pool.depth("large") == 1


@pytest.mark.parametrize("pools", POOLS_WITH_EXPIRING_RECEIPTS, indirect=True)
async def test_receipt_is_valid_until_the_message_returns(pools: Pools, pool: ResourcePool) -> None:
    await pool.send([message(1)])
    (delivery,) = await pool.receive("large", visibility_s=HIDDEN_S)
    await pools.advance(HIDDEN_S + 1)
    await pool.delete("large", [delivery.receipt])
    assert await pool.depth("large") == 1


async def test_delayed_message_is_delivered_later(pools: Pools, pool: ResourcePool) -> None:
    await pool.send([message(1)], delay_s=HIDDEN_S)
    assert await pool.receive("large", visibility_s=HIDDEN_S) == []
    assert await pool.depth("large") == 1
    await pools.advance(HIDDEN_S + 1)
    assert numbers(await pool.receive("large", visibility_s=HIDDEN_S)) == [1]


async def test_same_message_can_be_queued_twice(pool: ResourcePool) -> None:
    await pool.send([message(1)])
    await pool.send([message(1)])
    assert numbers(await drain(pool)) == [1, 1]


async def test_receive_from_empty_queue_returns_immediately_or_after_its_wait(pool: ResourcePool) -> None:
    assert await pool.receive("large", visibility_s=HIDDEN_S) == []
    assert await pool.receive("large", visibility_s=HIDDEN_S, wait_s=SHORT_S) == []


@pytest.mark.parametrize("sender", ["own", "other"])
async def test_waiting_receive_returns_a_new_message(pool: ResourcePool, other_pool: ResourcePool, sender: str) -> None:
    by = pool if sender == "own" else other_pool
    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
        waiting = group.create_task(pool.receive("large", visibility_s=HIDDEN_S, wait_s=2 * LONG_S))
        assert await pool.receive("large", visibility_s=HIDDEN_S, wait_s=SHORT_S) == []
        await by.send([message(1, resource_class="xlarge")])
        await by.send([message(2)])
        assert numbers(await waiting) == [2]


async def test_waiting_receive_returns_a_message_made_visible(pool: ResourcePool, other_pool: ResourcePool) -> None:
    await pool.send([message(1)])
    await pool.receive("large", visibility_s=SHORT_S)
    async with asyncio.timeout(LONG_S):
        (again,) = await pool.receive("large", visibility_s=HIDDEN_S, wait_s=2 * LONG_S)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(other_pool.receive("large", visibility_s=HIDDEN_S, wait_s=2 * LONG_S))
            assert await other_pool.receive("large", visibility_s=HIDDEN_S, wait_s=SHORT_S) == []
            await pool.make_visible("large", [again.receipt])
            assert numbers(await waiting) == [1]


async def test_each_message_is_delivered_to_one_receiver(pools: Pools, pool: ResourcePool) -> None:
    receivers = [pools.open() for _ in range(4)]
    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
        waits = [
            group.create_task(each.receive("large", limit=1, visibility_s=HIDDEN_S, wait_s=2 * LONG_S))
            for each in receivers
            for _ in range(3)
        ]
        await pool.send([message(number) for number in range(12)])
        deliveries = [delivery for wait in waits for delivery in await wait]
    assert numbers(deliveries) == list(range(12))


async def test_cancelled_receive_loses_no_message(pools: Pools, pool: ResourcePool) -> None:
    waiting = asyncio.create_task(pool.receive("large", visibility_s=HIDDEN_S, wait_s=LONG_S))
    assert await pool.receive("large", visibility_s=HIDDEN_S, wait_s=SHORT_S) == []
    waiting.cancel()
    await pool.send([message(1)])
    await asyncio.wait({waiting})
    again: list[int] = []
    for _ in range(12):
        # A server may deliver to the cancelled receive until its wait ends, which hides the message once more.
        await pools.advance(HIDDEN_S + 1)
        again = numbers(await pool.receive("large", visibility_s=HIDDEN_S, wait_s=LONG_S / 12))
        if again:
            break
    assert again == [1]


SECRET = "ghp_0123456789"


@pytest.mark.parametrize(
    "body",
    [
        SECRET,
        "",
        "[]",
        json.dumps({"id": "i-1", "note": SECRET}),
        "[" * 100_000,
        json.dumps({"id": "nonsense", "epoch": 1}),
    ],
    ids=["text", "empty", "list", "object", "deep", "bad-id"],
)
async def test_malformed_body_is_delivered_with_its_reason(pools: Pools, pool: ResourcePool, body: str) -> None:
    await pools.send_raw("large", body)
    (delivery,) = await pool.receive("large", visibility_s=HIDDEN_S)
    assert delivery.message is None
    assert delivery.malformed
    assert SECRET not in delivery.malformed
    await pool.delete("large", [delivery.receipt])
    assert await pool.depth("large") == 0


async def test_calls_are_counted_per_batch(pools: Pools, pool: ResourcePool) -> None:
    await pool.send([message(number, resource_class="large" if number < 11 else "xlarge") for number in range(13)])
    deliveries = [
        *await pool.receive("large", visibility_s=HIDDEN_S),
        *await pool.receive("large", visibility_s=HIDDEN_S),
    ]
    await pool.make_visible("large", receipts(deliveries)[:1])
    await pool.delete("large", receipts(deliveries))
    counts = pools.calls.by_service()
    counted = {operation: counts[service][name] for operation, (service, name) in pools.counted.items()}
    assert counted == {"send": 3, "receive": 2, "make_visible": 1, "delete": 2}


# SQS: changed queues, partial batches, short polls, malformed bodies --------------------------------------------------


@pytest.fixture
async def sqs_proxy(server: Ministack, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FaultProxy]:
    async with fault_proxy(server.url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", proxy.url)
        yield proxy


@pytest.fixture
async def sqs(sqs_proxy: FaultProxy, sqs_pools: SqsPools) -> SqsPools:
    """Pools that call SQS through the proxy."""
    return sqs_pools


@pytest.fixture
async def sqs_pool(sqs: SqsPools) -> SqsResourcePool:
    pool: SqsResourcePool = sqs.open()
    await pool.prepare(["large"])
    return pool


async def attributes(sqs: SqsPools, resource_class: str) -> dict[str, str]:
    url = await sqs.url(resource_class)
    found: dict[str, str] = (await sqs.client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"]))["Attributes"]
    return found


# Queues ---------------------------------------------------------------------------------------------------------------


async def test_queue_attributes(sqs: SqsPools) -> None:
    assert await sqs.open().prepare(["large"]) == [f"queue {sqs.prefix}_large"]
    found = await attributes(sqs, "large")
    assert found["MessageRetentionPeriod"] == str(RETENTION_S)
    assert found["VisibilityTimeout"] == str(VISIBILITY_S)


async def test_changed_queue_is_repaired(sqs: SqsPools, sqs_pool: SqsResourcePool) -> None:
    changed = {"MessageRetentionPeriod": "60", "DelaySeconds": "900"}
    await sqs.client.set_queue_attributes(QueueUrl=await sqs.url("large"), Attributes=changed)
    assert await sqs_pool.prepare(["large"]) == [f"DelaySeconds, MessageRetentionPeriod of queue {sqs.prefix}_large"]
    assert await sqs_pool.prepare(["large"]) == []


async def test_queue_with_a_dead_letter_queue_is_rejected(sqs: SqsPools, sqs_pool: SqsResourcePool) -> None:
    await sqs_pool.prepare(["large", "grave"])
    arn = (await attributes(sqs, "grave"))["QueueArn"]
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 5})
    await sqs.client.set_queue_attributes(QueueUrl=await sqs.url("large"), Attributes={"RedrivePolicy": policy})
    with pytest.raises(UserError, match=f"queue {sqs.prefix}_large has a dead-letter queue") as refused:
        await sqs_pool.prepare(["large"])
    assert "redrive" in refused.value.fix


async def test_invalid_queue_name_is_rejected(sqs: SqsPools) -> None:
    for prefix in ("remuda " + "x", "p" * 80):
        with pytest.raises(UserError, match="is not a valid queue name"):
            await sqs.open(prefix=prefix).prepare(["large"])


async def test_deleted_queue_is_created_again(sqs: SqsPools, sqs_pool: SqsResourcePool) -> None:
    await sqs_pool.send([message(1)])
    await sqs.client.delete_queue(QueueUrl=await sqs.url("large"))
    for call in (sqs_pool.receive("large", visibility_s=1), sqs_pool.send([message(1)]), sqs_pool.depth("large")):
        with pytest.raises(NotFound, match=f"no queue {sqs.prefix}_large") as missing:
            await call
        assert "remuda refresh" in missing.value.fix
    assert await sqs_pool.prepare(["large"]) != []
    await sqs_pool.send([message(2)])
    assert await sqs_pool.depth("large") == 1


async def test_recently_deleted_queue_is_unavailable(sqs_pool: SqsResourcePool, sqs_proxy: FaultProxy) -> None:
    sqs_proxy.always["CreateQueue"] = fail(400, "QueueDeletedRecently")
    with pytest.raises(Unavailable, match="was deleted less than a minute ago") as refused:
        await sqs_pool.prepare(["xlarge"])
    assert "refresh" in refused.value.fix


async def test_queue_url_is_cached(sqs: SqsPools, sqs_pool: SqsResourcePool, sqs_proxy: FaultProxy) -> None:
    other = sqs.open()
    sqs_proxy.requests.clear()
    for _ in range(3):
        await other.depth("large")
    assert sqs_proxy.requests["GetQueueUrl"] == 1


# Calls ------------------------------------------------------------------------------------------------------------


async def test_empty_short_poll_is_repeated_once(
    sqs_pool: SqsResourcePool, sqs_proxy: FaultProxy, calls: CallCounter
) -> None:
    assert await sqs_pool.receive("large", visibility_s=1) == []
    assert sqs_proxy.requests["ReceiveMessage"] == calls.by_service()["sqs"]["ReceiveMessage"] == 2
    await sqs_pool.send([message(1)])
    sqs_proxy.then("ReceiveMessage", respond({}))  # a short poll that finds nothing
    assert len(await sqs_pool.receive("large", visibility_s=LONG_S)) == 1
    assert await sqs_pool.receive("large", visibility_s=LONG_S, wait_s=0.5) == []
    assert sqs_proxy.sent["ReceiveMessage"][-1]["WaitTimeSeconds"] == 1


GOOD = {
    "id": "i-0123456789abcdef0",
    "epoch": 1,
    "resourceClass": "large",
    "instanceType": "c6i.large",
    "usageClass": "spot",
    "cpu": 2,
    "mmem": 4096,
}


async def test_message_has_the_documented_fields(sqs_pool: SqsResourcePool, sqs_proxy: FaultProxy) -> None:
    await sqs_pool.send([message(1)])
    (entry,) = sqs_proxy.sent["SendMessageBatch"][-1]["Entries"]
    expected = {**GOOD, "id": "i-00000000000000001", "tier": "trusted", "repository": ""}
    assert json.loads(entry["MessageBody"]) == expected


async def test_many_messages_are_sent_in_batches(sqs_pool: SqsResourcePool, sqs_proxy: FaultProxy) -> None:
    await sqs_pool.send([message(number) for number in range(95)])
    assert sqs_proxy.requests["SendMessageBatch"] == 10
    assert await sqs_pool.depth("large") == 95


FAILED = {"Id": "1", "Code": "InternalError", "SenderFault": False}


@pytest.mark.parametrize(
    ("operation", "wire_name"),
    [("send", "SendMessageBatch"), ("delete", "DeleteMessageBatch"), ("make_visible", "ChangeMessageVisibilityBatch")],
)
async def test_rejected_entries_are_retried_once(
    sqs_pool: SqsResourcePool, sqs_proxy: FaultProxy, operation: str, wire_name: str
) -> None:
    async def call() -> None:
        if operation == "send":
            await sqs_pool.send([message(number) for number in range(3)])
        else:
            await getattr(sqs_pool, operation)("large", ["r-0", "r-1", "r-2"])

    sqs_proxy.then(wire_name, respond({"Successful": [], "Failed": [FAILED]}))
    await call()
    assert [entry["Id"] for entry in sqs_proxy.sent[wire_name][-1]["Entries"]] == ["1"], "only the rejected entry"
    sqs_proxy.always[wire_name] = respond({"Successful": [], "Failed": [FAILED]})
    with pytest.raises(Unavailable, match=r"rejected 1 of 3 entries.*InternalError"):
        await call()
    assert sqs_proxy.requests[wire_name] == 4


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, "ThrottlingException", Throttled),
        (403, "AccessDeniedException", UserError),
        (503, "ServiceUnavailable", Unavailable),
    ],
)
async def test_errors_are_translated(
    sqs_pool: SqsResourcePool, sqs_proxy: FaultProxy, status: int, code: str, error: type[Exception]
) -> None:
    sqs_proxy.always["ReceiveMessage"] = fail(status, code)
    with pytest.raises(error):
        await sqs_pool.receive("large", visibility_s=1)


async def test_unreachable_endpoint_is_named(
    clients: AwsClients, server: Ministack, calls: CallCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unused_port() as port:
        url = f"http://{LOOPBACK}:{port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", url)
        async with asyncio.timeout(LONG_S):
            with pytest.raises(Unavailable, match=f"SQS at {url}/? cannot be reached"):
                await SqsPools(await clients.sqs(), server, "remuda", calls).open().depth("large")


# Bodies -----------------------------------------------------------------------------------------------------------


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
    sqs: SqsPools, sqs_pool: SqsResourcePool, change: dict[str, Any]
) -> None:
    await sqs.send_raw("large", json.dumps({**GOOD, **change}))
    (delivery,) = await sqs_pool.receive("large", visibility_s=1)
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
