"""Specifics of the DynamoDB store: keys, indexes, expiry, pages, number of calls."""

from __future__ import annotations

import asyncio
import random  # noqa: TID251 - seeded: the same cases map_concurrently time
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.changes import CHANGES_PER_TRANSACTION, CONCURRENT_WRITES
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.aws.dynamodb.table import WRITE_BATCH
from remuda.controlplane.context import map_concurrently
from remuda.domain import provision as provisions
from remuda.domain.errors import Conflict, Unavailable, Unreadable, UserError
from remuda.domain.instance import LIVE, Instance, RetireReason, State
from remuda.domain.resources import Tier
from remuda.domain.serialization import to_document
from remuda.domain.signals import Report, Signal
from remuda.domain.sweep_record import SweepRecord
from remuda.domain.transitions import Change, WriteCondition
from remuda.ports.calls import CallCounter
from remuda.ports.poll_intervals import (
    BUSY,
    BUSY_REPORT,
    CONTROL,
    LONG_IDLE,
    REPORT,
    WARM_FOR_S,
    PollIntervals,
)
from tests.conformance.conftest import DynamoStores
from tests.support.aws.fault_proxy import FaultProxy, fail, respond_together
from tests.support.aws.servers import Ministack, ministack
from tests.support.iam import denied_requests, iam_requests
from tests.support.records import (
    LONG_S,
    NOW,
    SHORT_S,
    at,
    birth,
    change,
    claim_change,
    instance,
    instance_id,
    pool_config,
    provision,
)
from tests.support.virtual_time import FixedClock

ID = instance_id(1)
BEAT: dict[str, Any] = {"at": NOW, "busy": False, "listening": True, "notice": "", "version": "1"}
#: As in production: the id of the instances' role, so that a policy can use `control#${aws:userid}`.
PREFIX = "AROAEXAMPLE:"


@pytest.fixture
def stores(between: FaultProxy, dynamo_stores: DynamoStores) -> DynamoStores:
    dynamo_stores.arguments["key_prefix"] = PREFIX
    return dynamo_stores


@pytest.fixture
def store(between: FaultProxy, store: DynamoInstanceStore) -> DynamoInstanceStore:
    between.requests.clear()
    return store


async def scanned(stores: DynamoStores, **more: Any) -> dict[str, dict[str, Any]]:
    """All items by partition key."""
    return {item["pk"]["S"]: item for item in (await stores.client.scan(TableName=stores.table, **more))["Items"]}


def ended(record: Instance) -> Change:
    return change(record, state=State.TERMINATED, forget_at=at(600))


# Items ------------------------------------------------------------------------------------------------------------


async def test_control_record_and_report_have_separate_partitions(
    store: DynamoInstanceStore, stores: DynamoStores
) -> None:
    await store.apply(birth(instance()))
    await store.beat(ID, **BEAT)
    await store.history(ID)
    assert set(await scanned(stores)) == {f"control#{PREFIX}{ID}", f"report#{PREFIX}{ID}", f"history#{ID}"}


async def test_record_of_the_last_sweep_is_stored_with_the_pools_configuration(
    store: DynamoInstanceStore, stores: DynamoStores
) -> None:
    """Another version of Remuda finds it there."""
    await store.put_sweep_record(SweepRecord(next_due_at=NOW))
    key = {"pk": {"S": "pool"}, "sk": {"S": "sweep"}}
    item = (await stores.client.get_item(TableName=stores.table, Key=key))["Item"]
    assert item["nextDueAt"] == {"S": "2025-05-31T12:00:00.000Z"}


async def test_table_is_billed_on_demand(store: DynamoInstanceStore, stores: DynamoStores) -> None:
    table = (await stores.client.describe_table(TableName=stores.table))["Table"]
    assert table["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"


async def test_indexes_contain_whole_items(store: DynamoInstanceStore, stores: DynamoStores) -> None:
    table = (await stores.client.describe_table(TableName=stores.table))["Table"]
    assert {index["Projection"].get("ProjectionType") for index in table["GlobalSecondaryIndexes"]} == {"ALL"}


async def test_fields_are_stored_as_attributes(store: DynamoInstanceStore, stores: DynamoStores) -> None:
    await store.apply(birth(instance(provision_id="p-1")))
    item = (await scanned(stores))[f"control#{PREFIX}{ID}"]
    assert item["state"] == {"S": "idle"}
    assert item["resourceClass"] == {"S": "large"}
    assert item["epoch"] == {"N": "1"}
    assert item["threshold"] == item["gsi1sk"] == {"S": "2025-05-31T12:07:00.000Z"}
    assert item["gsi2pk"] == {"S": "provision#p-1"}
    assert "assignment" not in item


async def test_change_writes_only_its_fields(store: DynamoInstanceStore, between: FaultProxy) -> None:
    record = await store.apply(birth(instance()))
    await store.apply(change(record, uses=4))
    update = between.sent["UpdateItem"][-1]
    assert update["UpdateExpression"] == "SET #uses = :v0"


CLAIMS = ("", "p-1/a", "p-1/b")
REPOSITORIES = ("", "octo/one", "octo/two")
TIMES = (None, at(9.9995), at(10), at(10.0005), at(11))


async def test_condition_expression_matches_the_write_condition(store: DynamoInstanceStore) -> None:
    """Compares each condition with `WriteCondition.is_met_by`, for records that differ in its fields."""
    chance = random.Random(3)  # noqa: S311
    records = [
        instance(
            number,
            state=chance.choice([State.IDLE, State.RUNNING]),
            epoch=chance.choice([1, 2]),
            claim=chance.choice(CLAIMS),
            threshold=at(10),
            retire_reason=chance.choice([None, None, RetireReason.TOO_OLD]),
            quarantined_until=chance.choice([None, None, at(10)]),
            tier=chance.choice(list(Tier)),
            repository=chance.choice(REPOSITORIES),
        )
        for number in range(150)
    ]
    guards = [
        WriteCondition(
            state=chance.choice([record.state, record.state, record.state, State.IDLE, None]),
            epoch=chance.choice([record.epoch, record.epoch, 1]),
            claim=chance.choice([None, record.claim, *CLAIMS]),
            threshold_after=chance.choice(TIMES),
            threshold_at_or_before=chance.choice([None, None, *TIMES]),
            not_retired=chance.choice([True, False]),
            max_quarantined_until=chance.choice([None, None, *TIMES]),
            tiers=chance.choice([(), (record.tier,), (Tier.TRUSTED,), tuple(Tier)]),
            repository=chance.choice([None, None, record.repository, *REPOSITORIES]),
        )
        for record in records
    ]

    async def admitted(case: tuple[Instance, WriteCondition]) -> bool:
        record, guard = case
        await store.apply(birth(record))
        try:
            return (await store.apply(change(record, guard, uses=9))).uses == 9
        except Conflict as conflict:
            return bool(conflict.current != record)

    verdicts = await map_concurrently(zip(records, guards, strict=True), admitted)
    assert verdicts == [guard.is_met_by(record) for record, guard in zip(records, guards, strict=True)]
    assert {True, False} <= set(verdicts)


async def test_agents_only_get_and_update(store: DynamoInstanceStore, between: FaultProxy, table_name: str) -> None:
    """The agent policy permits no other calls, and only on two keys."""
    between.sent.clear()
    async with asyncio.timeout(LONG_S):
        assert await store.wait_for_control(ID, None, 0.3) is None
        await store.beat(ID, **BEAT)
        await store.write_signal(ID, epoch=1, signal=Signal.UD_OK)
    await store.close()
    assert set(between.requests) == {"GetItem", "UpdateItem"}
    assert {sent["Key"]["pk"]["S"] for sent in between.sent["GetItem"]} == {f"control#{PREFIX}{ID}"}
    assert {sent["Key"]["pk"]["S"] for sent in between.sent["UpdateItem"]} == {f"report#{PREFIX}{ID}"}
    user = {"aws:userid": f"{PREFIX}{ID}"}
    assert not denied_requests("agent", table_name.removeprefix("remuda-"), iam_requests(between.sent, user))


async def test_a_rejected_signal_is_read_by_a_request_of_its_own(
    store: DynamoInstanceStore, between: FaultProxy, table_name: str
) -> None:
    """IAM may count what a failed write returns as `dynamodb:ReturnValues`, which the agent policy restricts."""
    between.sent.clear()
    await store.write_signal(ID, epoch=2, signal=Signal.UD_OK)
    with pytest.raises(Conflict) as rejected:
        await store.write_signal(ID, epoch=1, signal=Signal.UD_OK)
    assert isinstance(rejected.value.current, Report)
    assert rejected.value.current.epoch == 2
    user = {"aws:userid": f"{PREFIX}{ID}"}
    assert not denied_requests("agent", table_name.removeprefix("remuda-"), iam_requests(between.sent, user))


async def test_tried_writes_need_the_permissions_of_a_provision_and_write_nothing(
    store: DynamoInstanceStore, stores: DynamoStores, between: FaultProxy, table_name: str
) -> None:
    before = await scanned(stores)
    between.sent.clear()
    await store.try_writes()
    assert await scanned(stores) == before
    tried = {name: between.sent[name] for name in ("UpdateItem", "PutItem")}
    assert {name: len(sent) for name, sent in tried.items()} == {"UpdateItem": 2, "PutItem": 1}
    requests = list(iam_requests(tried))
    pool = table_name.removeprefix("remuda-")
    assert not denied_requests("provision", pool, requests)
    assert denied_requests("workflow", pool, requests) == requests
    for operation in tried:
        between.then(operation, fail(400, "AccessDeniedException"))
        with pytest.raises(UserError) as refused:
            await store.try_writes()
        assert refused.value.field == "aws-permission"


async def forge_report(stores: DynamoStores, name: str, document: Any, **indexed: str) -> None:
    """Write any attributes into the machine's own report, which its role permits."""
    written = {
        **{name: items.attribute(value) for name, value in to_document(document).items()},
        **{name: {"S": value} for name, value in indexed.items()},
    }
    await stores.client.update_item(
        TableName=stores.table,
        Key=items.ItemKeys(prefix=PREFIX).report(name),
        UpdateExpression="SET " + ", ".join(f"#{name} = :{name}" for name in written),
        ExpressionAttributeNames={f"#{name}": name for name in written},
        ExpressionAttributeValues={f":{name}": value for name, value in written.items()},
    )


async def test_report_cannot_pose_as_another_instances_record(store: DynamoInstanceStore, stores: DynamoStores) -> None:
    victim = await store.apply(birth(instance(1, state=State.RUNNING, provision_id="p-1")))
    ended = replace(victim, state=State.TERMINATING)
    await forge_report(stores, instance_id(2), ended, gsi1pk="live#0", gsi1sk="0", gsi2pk="provision#p-1", gsi2sk="0")
    assert await store.find(LIVE) == [victim]
    assert await store.find([State.TERMINATING]) == []
    assert await store.find_by_provision("p-1") == [victim]
    (name,) = store.malformed_records
    assert f"report#{PREFIX}{instance_id(2)}" in name


async def test_report_cannot_pose_as_its_own_control_record(store: DynamoInstanceStore, stores: DynamoStores) -> None:
    await forge_report(stores, ID, instance(1), gsi1pk="live#1", gsi1sk="0")
    assert await store.find(LIVE) == []
    assert len(store.malformed_records) == 1


async def test_report_cannot_mark_another_instance_as_troubled(
    store: DynamoInstanceStore, stores: DynamoStores
) -> None:
    await store.beat(ID, **{**BEAT, "notice": "terminate"})
    (partition,) = {item["gsi3pk"]["S"] for item in (await scanned(stores)).values()}
    lie = Report(instance_id=instance_id(3), notice="terminate")
    await forge_report(stores, instance_id(2), lie, gsi3pk=partition)
    assert [report.instance_id for report in await store.troubled_reports()] == [ID]
    assert len(store.malformed_records) == 1
    with pytest.raises(Unreadable):
        await store.get_report(instance_id(2))


async def add_items(stores: DynamoStores, name: str, count: int, **indexed: str) -> None:
    """Add items with other sort keys to the partition of the machine's report, which its role permits."""
    own = items.ItemKeys(prefix=PREFIX).report(name)[items.PK]["S"]
    for number in range(count):
        more = {
            **items.key(own, f"{'aqz'[number % 3]}-{number}"),
            **{key: {"S": text} for key, text in indexed.items()},
        }
        await stores.client.put_item(TableName=stores.table, Item=more)


async def test_other_items_of_a_machine_are_not_read_as_troubled_reports(
    store: DynamoInstanceStore, stores: DynamoStores, between: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IAM cannot restrict sort keys, so one machine can fill the index. A sweep must not pay for that."""
    await store.beat(ID, **{**BEAT, "notice": "terminate"})
    partition = items.troubled_of(ID)
    await add_items(stores, ID, 30, gsi3pk=partition, gsi1pk=partition, gsi1sk="0")
    between.requests.clear()
    read: list[int] = []

    query = stores.client.query

    async def count(**parameters: Any) -> Any:
        page = await query(**parameters)
        read.append(page["ScannedCount"])
        return page

    monkeypatch.setattr(stores.client, "query", count, raising=False)
    assert [report.instance_id for report in await store.troubled_reports()] == [ID]
    assert sum(read) == 1
    assert between.requests["Query"] == items.SHARDS
    assert not store.malformed_records


async def test_forget_deletes_unreadable_reports_with_other_items_of_the_machine(
    store: DynamoInstanceStore, stores: DynamoStores
) -> None:
    await store.beat(instance_id(2), **{**BEAT, "notice": "terminate"})
    lie = Report(instance_id=instance_id(3), notice="terminate")
    await forge_report(stores, ID, lie, gsi3pk=items.troubled_of(ID))
    await add_items(stores, ID, 3)
    assert len(await store.troubled_reports()) == 1
    assert await store.forget(NOW) == 4
    assert not store.malformed_records
    assert set(await scanned(stores)) == {f"report#{PREFIX}{instance_id(2)}"}
    assert await store.forget(NOW) == 0
    # An agent that is healthy again writes a new report.
    await store.beat(ID, **BEAT)
    assert await store.get_report(ID) is not None


async def test_forget_deletes_an_unreadable_report_that_was_read_by_key(
    store: DynamoInstanceStore, stores: DynamoStores
) -> None:
    await forge_report(stores, ID, Report(instance_id=instance_id(3)))
    with pytest.raises(Unreadable):
        await store.get_reports([ID])
    # More items than one batch: the report is deleted first.
    await add_items(stores, ID, WRITE_BATCH)
    assert await store.forget(NOW) == WRITE_BATCH
    assert await store.get_reports([ID]) == {}


async def test_report_cannot_pose_as_a_provision(store: DynamoInstanceStore, stores: DynamoStores) -> None:
    await store.put_provision(provision(1, deadline=NOW))
    lie = provisions.released(provision(2), now=NOW, why="so it says")
    await forge_report(stores, ID, lie, gsi1pk="unsettled", gsi1sk="0", gsi2pk="provisions", gsi2sk="9")
    assert [each.provision_id for each in await store.unsettled_provisions(NOW)] == ["p-1"]
    assert [each.provision_id for each in await store.recent_provisions(1)] == ["p-1"], "it does not count"
    assert len(store.malformed_records) == 1


# Expiry -----------------------------------------------------------------------------------------------------------


async def test_expiry_is_enabled(store: DynamoInstanceStore, stores: DynamoStores) -> None:
    found = await stores.client.describe_time_to_live(TableName=stores.table)
    assert found["TimeToLiveDescription"] == {"TimeToLiveStatus": "ENABLED", "AttributeName": "ttl"}
    assert await store.forget(at(1e9)) == 0


async def test_expiry_by_another_attribute_is_not_taken_for_that_of_records(
    store: DynamoInstanceStore, stores: DynamoStores
) -> None:
    assert (await store.inspect()).expires
    for enabled, name in ((False, "ttl"), (True, "other")):
        specification: Any = {"Enabled": enabled, "AttributeName": name}
        await stores.client.update_time_to_live(TableName=stores.table, TimeToLiveSpecification=specification)
        assert not (await store.inspect()).expires


async def test_terminated_records_and_settled_provisions_expire(
    store: DynamoInstanceStore, stores: DynamoStores
) -> None:
    idle = await store.apply(birth(instance(1, forget_at=at(5))))
    record = await store.apply(birth(instance(2)))
    await store.apply(ended(record))
    await store.beat(ID, **BEAT)
    open_one, released = provision(1, run_id="1"), provision(2, run_id="2")
    released = provisions.released(released, now=NOW, why="done")
    await store.put_provision(open_one)
    await store.put_provision(released)
    await store.replace_provision(released, provisions.settled(released, forget_at=at(900)))
    await store.history(ID)

    ends = {pk: item.get("ttl", {}).get("N") for pk, item in (await scanned(stores)).items()}
    start = int(NOW.timestamp())
    assert idle.forget_at == at(5)
    assert ends[f"control#{PREFIX}{ID}"] is None, "a live record does not expire"
    assert ends[f"control#{PREFIX}{instance_id(2)}"] == str(start + 600)
    assert ends["run#1"] is None
    assert ends["run#2"] == str(start + 900)
    assert ends[f"history#{ID}"] == str(start + int(items.DEFAULT_RETENTION.total_seconds()))
    assert int(ends[f"report#{PREFIX}{ID}"] or 0) > start


async def test_history_and_reports_are_kept_as_long_as_records(
    store: DynamoInstanceStore, stores: DynamoStores
) -> None:
    lifetimes = replace(pool_config().lifetimes, keep_records_s=1_234.0)
    await store.put_config(pool_config(lifetimes=lifetimes))
    record = await store.apply(birth(instance()))
    await store.beat(ID, **BEAT)
    await store.apply(change(record, state=State.TERMINATED, forget_at=at(2_000)))
    other = await store.apply(birth(instance(2)))
    await store.apply(change(other, state=State.TERMINATED, forget_at=at(2_000)))
    await store.history(ID)
    ends = {pk: item.get("ttl", {}).get("N") for pk, item in (await scanned(stores)).items()}
    start = int(NOW.timestamp())
    assert ends[f"history#{ID}"] == str(start + 1_234)
    assert ends[f"report#{PREFIX}{ID}"] == ends[f"control#{PREFIX}{ID}"] == str(start + 2_000)
    assert f"report#{PREFIX}{instance_id(2)}" not in ends, "no report is created for an instance that sent none"


@pytest.fixture
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ministack]:
    """A separate server, for the clients that are opened later."""
    with ministack(tmp_path, starts_at=NOW) as own:
        monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", own.url)
        yield own


async def test_server_removes_expired_items(own_server: Ministack, dynamo_stores: DynamoStores) -> None:
    """The clock of the server is moved by a month."""
    store = dynamo_stores.open()
    async with asyncio.timeout(3 * LONG_S):
        await store.prepare()
        for number, state in ((1, State.TERMINATED), (2, State.IDLE)):
            await store.apply(birth(instance(number, state=state, forget_at=at(86_400))))
            await store.history(instance_id(number))
        own_server.advance_clock(31 * 86_400)
        while await store.get(ID) is not None or await store.history(ID):
            await store.count_live()
        assert await store.get(instance_id(2)) is not None


async def test_dead_server_ends_all_waits(own_server: Ministack, dynamo_stores: DynamoStores) -> None:
    store = dynamo_stores.open()
    async with asyncio.timeout(LONG_S):
        await store.prepare()
        record = await store.apply(birth(instance()))
        waiting = asyncio.create_task(store.wait_for_control(ID, record, 2 * LONG_S))
        assert await store.wait_for_control(ID, None, LONG_S) == record
        own_server.process.kill()
        with pytest.raises(Unavailable):
            await waiting


# Indexes and pages ------------------------------------------------------------------------------------------------


async def test_live_index_contains_live_records(store: DynamoInstanceStore, stores: DynamoStores) -> None:
    for number, state in enumerate(State):
        await store.apply(birth(instance(number, state=state)))
    opened = provision(1)
    await store.put_provision(opened)
    live = await scanned(stores, IndexName="live")
    assert len(live) == len(LIVE) + 1
    committed = provisions.committed(opened, (ID,), deadline=at(900))
    await store.replace_provision(opened, committed)
    record = await store.get(instance_id(0))
    assert record is not None
    await store.apply(change(record, state=State.TERMINATED))
    assert len(await scanned(stores, IndexName="live")) == len(LIVE), "without the terminated instance"
    released = provisions.released(committed, now=NOW, why="done")
    await store.replace_provision(committed, released)
    assert await store.unsettled_provisions(NOW) == [released], "a released provision is due regardless of its deadline"
    done = provisions.settled(released, forget_at=at(999))
    await store.replace_provision(released, done)
    assert len(await scanned(stores, IndexName="live")) == len(LIVE) - 1


async def test_troubled_reports_are_sharded(store: DynamoInstanceStore, stores: DynamoStores) -> None:
    """An index partition takes 1,000 writes per second, and all instances may be troubled at once."""
    for number in range(4 * items.SHARDS):
        await store.beat(instance_id(number), **{**BEAT, "notice": "terminate"})
    troubled = await scanned(stores, IndexName="troubled")
    assert len({item["gsi3pk"]["S"] for item in troubled.values()}) == items.SHARDS
    assert not await scanned(stores, IndexName="live")
    assert len(await store.troubled_reports()) == 4 * items.SHARDS


async def test_extra_items_of_a_machine_do_not_count_as_instances(
    store: DynamoInstanceStore, stores: DynamoStores
) -> None:
    """The agent policy restricts it to a partition, not to one item."""
    await store.apply(birth(instance()))
    own = items.ItemKeys(prefix=PREFIX).report(ID)
    for number in range(items.SHARDS):
        more = items.key(own[items.PK]["S"], f"more-{number}")
        indexed = {items.LIVE_PK: {"S": items.shard(number)}, items.LIVE_SK: {"S": "0"}}
        await stores.client.put_item(TableName=stores.table, Item={**more, **indexed})
    assert await store.count_live() == 1
    assert [found.instance_id for found in await store.find(LIVE)] == [ID]


async def test_every_call_of_an_agent_is_permitted_by_its_policy(
    store: DynamoInstanceStore, other: DynamoInstanceStore, between: FaultProxy, table_name: str
) -> None:
    record = await store.apply(birth(instance()))
    between.sent.clear()
    await other.beat(ID, **BEAT)
    await other.write_signal(ID, epoch=1, signal=Signal.UD_OK)
    with pytest.raises(Conflict):
        await other.write_signal(ID, epoch=0, signal=Signal.UD_OK)
    assert await other.wait_for_control(ID, None, LONG_S) == record
    assert await other.wait_for_control(ID, record, SHORT_S) == record
    pool = table_name.removeprefix("remuda-")
    requests = [iam_requests(between.sent, {"aws:userid": f"{PREFIX}{instance_id(number)}"}) for number in (1, 2)]
    assert not denied_requests("agent", pool, requests[0])
    others = list(requests[1])
    assert denied_requests("agent", pool, others) == others, "the policy permits none of them to another instance"


async def _small_pages(read: Callable[..., Awaitable[Any]], **parameters: Any) -> Any:
    return await read(**{**parameters, "Limit": 2})


async def test_an_agent_may_write_only_the_attributes_of_a_report(
    store: DynamoInstanceStore, other: DynamoInstanceStore, between: FaultProxy, table_name: str
) -> None:
    """With the keys of the other indexes, a machine could add any number of items to what every refresh reads."""
    between.sent.clear()
    await other.beat(ID, **BEAT)
    (sent,) = between.sent["UpdateItem"]
    pool, agent = table_name.removeprefix("remuda-"), {"aws:userid": f"{PREFIX}{ID}"}
    assert not denied_requests("agent", pool, iam_requests({"UpdateItem": [sent]}, agent))
    for name in ("gsi1pk", "gsi1sk", "gsi2pk", "gsi2sk", "state"):
        forged = {**sent, "ExpressionAttributeNames": {**sent["ExpressionAttributeNames"], "#x": name}}
        assert denied_requests("agent", pool, iam_requests({"UpdateItem": [forged]}, agent)), name


async def test_every_query_reads_all_pages(
    between: FaultProxy, stores: DynamoStores, store: DynamoInstanceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        state = State.TERMINATED if number % 4 == 0 else State.IDLE
        await store.apply(birth(instance(number, state=state, provision_id="p-1")))
    for number in range(7):
        await store.put_provision(provision(number, deadline=NOW))
    for number in range(6):
        await store.apply(change(instance(1, provision_id="p-1"), transition=f"step-{number}", uses=number))

    for name in ("query", "scan"):
        monkeypatch.setattr(stores.client, name, partial(_small_pages, getattr(stores.client, name)), raising=False)
    paged = stores.open()
    await store.history(ID)
    between.requests.clear()
    assert len(await paged.find([State.IDLE])) == 15
    assert between.requests["Query"] > items.SHARDS
    assert len(await paged.find([State.TERMINATED])) == 5
    assert await paged.count_live() == 15
    assert len(await paged.find_by_provision("p-1")) == 20
    assert len(await paged.provisions_of_run("1234")) == 7
    assert len(await paged.unsettled_provisions(NOW)) == 7
    assert [each.provision_id for each in await paged.recent_provisions(5)] == [f"p-{n}" for n in (6, 5, 4, 3, 2)]
    assert [entry.transition for entry in await paged.history(ID)][-2:] == ["step-4", "step-5"]


# Calls ------------------------------------------------------------------------------------------------------------


async def test_conflict_needs_no_second_read(store: DynamoInstanceStore, between: FaultProxy) -> None:
    idle = await store.apply(birth(instance()))
    winner = await store.apply(claim_change(idle, "p-1/a"))
    opened = provision()
    await store.put_provision(opened)
    between.requests.clear()
    shown = []
    for call in (store.apply(claim_change(idle, "p-2/b")), store.put_provision(opened)):
        with pytest.raises(Conflict) as refused:
            await call
        shown.append(refused.value.current)
    assert shown == [winner, opened]
    assert {name: count for name, count in between.requests.items() if name != "BatchWriteItem"} == {
        "UpdateItem": 1,
        "PutItem": 1,
    }


async def test_terminations_are_confirmed_in_one_call(
    store: DynamoInstanceStore, stores: DynamoStores, between: FaultProxy
) -> None:
    records = [await store.apply(birth(instance(number))) for number in range(CHANGES_PER_TRANSACTION)]
    for record in records:
        await store.beat(record.instance_id, **BEAT)
    between.requests.clear()
    assert await store.apply_all([ended(record) for record in records]) == [None] * CHANGES_PER_TRANSACTION
    assert between.requests["TransactWriteItems"] == 1
    assert "UpdateItem" not in between.requests
    report = await stores.client.get_item(TableName=stores.table, Key=items.ItemKeys(prefix=PREFIX).report(ID))
    assert report["Item"]["ttl"] == items.seconds(at(600)), "a report expires with its record"
    assert await store.count_live() == 0


async def test_instance_without_a_report_costs_one_more_call(
    store: DynamoInstanceStore, stores: DynamoStores, between: FaultProxy
) -> None:
    records = [await store.apply(birth(instance(number))) for number in range(4)]
    await store.beat(ID, **BEAT)
    between.requests.clear()
    assert await store.apply_all([ended(record) for record in records]) == [None] * 4
    assert between.requests["TransactWriteItems"] == 2
    assert "UpdateItem" not in between.requests
    ends = {pk: item.get("ttl") for pk, item in (await scanned(stores)).items() if "report#" in pk}
    assert ends == {f"report#{PREFIX}{ID}": items.seconds(at(600))}
    assert await store.count_live() == 0


async def test_conflicting_change_is_written_alone_and_the_others_together(
    store: DynamoInstanceStore, between: FaultProxy
) -> None:
    records = [await store.apply(birth(instance(number))) for number in range(6)]
    for record in records[:4]:
        await store.beat(record.instance_id, **BEAT)
    moved = await store.apply(claim_change(records[2], "p-1/a"))
    between.requests.clear()
    failures = await store.apply_all([ended(record) for record in records])
    assert [failure.current for failure in failures if isinstance(failure, Conflict)] == [moved]
    assert failures.count(None) == 5
    assert (between.requests["TransactWriteItems"], between.requests["UpdateItem"]) == (2, 1)


async def test_single_writes_are_limited_in_concurrency(
    store: DynamoInstanceStore, between: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = await asyncio.gather(
        *(store.apply(birth(instance(number))) for number in range(3 * CHANGES_PER_TRANSACTION))
    )
    between.always["TransactWriteItems"] = fail(400, "TransactionConflictException")
    at_once: list[int] = []
    apply, under_way = store._changes.apply, set[str]()

    async def counted(wanted: Change) -> Instance:
        under_way.add(wanted.instance_id)
        at_once.append(len(under_way))
        try:
            return await apply(wanted)
        finally:
            under_way.remove(wanted.instance_id)

    monkeypatch.setattr(store._changes, "apply", counted)
    assert await store.apply_all([change(record, uses=7) for record in records]) == [None] * len(records)
    assert max(at_once) == CONCURRENT_WRITES


async def test_history_entries_share_calls(store: DynamoInstanceStore, between: FaultProxy) -> None:
    record = await store.apply(birth(instance()))
    # A long window, so that the entries share calls even on a slow machine.
    between.always["UpdateItem"] = respond_together(2 * WRITE_BATCH, b"UpdateExpression")
    await asyncio.gather(*(store.apply(change(record, uses=number)) for number in range(2 * WRITE_BATCH)))
    assert len(await store.history(ID)) == 2 * WRITE_BATCH + 1
    assert between.requests["BatchWriteItem"] <= 6
    assert all(len(next(iter(sent["RequestItems"].values()))) <= WRITE_BATCH for sent in between.sent["BatchWriteItem"])


async def test_history_is_written_in_the_background(store: DynamoInstanceStore, other: DynamoInstanceStore) -> None:
    await store.apply(birth(instance()))
    async with asyncio.timeout(LONG_S):
        found = await other.history(ID)
        while not found:
            found = await other.history(ID)


async def test_waiters_share_reads(
    store: DynamoInstanceStore,
    other: DynamoInstanceStore,
    between: FaultProxy,
    calls: CallCounter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 130
    read, reads = store._poller._read, 0

    async def counted(keys: Collection[tuple[str, str]]) -> Any:
        nonlocal reads
        reads += 1
        return await read(keys)

    monkeypatch.setattr(store._poller, "_read", counted)
    for number in range(count):
        await other.beat(instance_id(number), **BEAT)
    reports = await store.get_reports([instance_id(number) for number in range(count)])
    between.requests.clear()
    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as group:
        waits = [group.create_task(store.wait_for_report(key, report, 2 * LONG_S)) for key, report in reports.items()]
        await store.wait_for_report(ID, None, LONG_S)
        assert between.requests["BatchGetItem"] <= 4, "two batches per read, two reads"
        await asyncio.gather(*(other.beat(key, **BEAT) for key in reports))
        for wait in waits:
            report = await wait
            assert report is not None
            assert report.beat == 2
    made = calls.by_service()["dynamodb"]
    assert made["poll:BatchGetItem"] == between.requests["BatchGetItem"]
    assert between.requests["BatchGetItem"] <= 2 * reads, "at most two batches per read"
    assert "GetItem" not in made


async def test_a_closed_store_has_written_everything_and_can_be_used_again(
    store: DynamoInstanceStore, stores: DynamoStores
) -> None:
    """As the broker does between two requests, when its process may be frozen."""
    for number in (1, 2):
        await store.apply(birth(instance(number)))
        waiting = asyncio.create_task(store.wait_for_report(instance_id(number), None, LONG_S))
        await asyncio.sleep(0)
        await store.write_signal(instance_id(number), epoch=1, signal=Signal.UD_OK)
        assert (await waiting) is not None
        await store.close()
        assert f"history#{instance_id(number)}" in await scanned(stores)


def test_poll_interval_depends_on_the_state() -> None:
    clock = FixedClock()
    intervals = PollIntervals(clock=clock)
    running = instance(state=State.RUNNING)
    assert intervals.for_report(None) is REPORT
    assert intervals.for_report(Report(instance_id=ID)) is REPORT
    assert intervals.for_report(Report(instance_id=ID, busy=True)) is BUSY_REPORT
    assert intervals.for_control(ID, None, urgent=True) is CONTROL
    assert intervals.for_control(ID, running, urgent=False) is BUSY
    assert intervals.for_control(ID, running, urgent=True) is CONTROL, "it may be released at any time"
    assert intervals.for_control(ID, instance(state=State.RELEASING), urgent=True) is CONTROL
    assert intervals.for_control(ID, instance(), urgent=True) is CONTROL
    clock.passed_s = WARM_FOR_S
    assert intervals.for_control(ID, instance(), urgent=True) is LONG_IDLE
    assert intervals.for_control(ID, running, urgent=True) is LONG_IDLE
    assert intervals.for_control(ID, instance(epoch=2), urgent=True) is CONTROL, "idle again"


def test_poll_interval_grows_to_its_maximum() -> None:
    interval, intervals = REPORT.first_s, []
    for _ in range(80):
        intervals.append(interval)
        interval = REPORT.after(interval)
    assert intervals == sorted(intervals)
    assert interval == REPORT.last_s
