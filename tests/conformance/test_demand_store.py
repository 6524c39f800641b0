"""Contract of the records of runner sets (`remuda.ports.demand.DemandStore`), for every adapter."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, Protocol

import pytest

from remuda.adapters.aws.dynamodb.items import demand_key, job_item, job_key
from remuda.adapters.aws.dynamodb.revisions import JOBS_PER_TRANSACTION
from remuda.domain.demand import (
    DEFAULT_RETENTION,
    MAX_JOB_LABELS,
    MAX_TEXT,
    DemandStatistics,
    JobEvent,
    JobEventKind,
    JobRecord,
    Lease,
    merge_events,
)
from remuda.domain.errors import Conflict, Unavailable, Unreadable, UserError
from remuda.domain.instance import Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.resources import Tier
from remuda.domain.runner_set import CapacityWindow, RunnerSet
from remuda.domain.serialization import from_document, to_document
from remuda.domain.signals import Report
from remuda.domain.sweep_record import SweepRecord
from remuda.domain.transitions import WriteCondition
from remuda.ports.demand import DemandStore
from remuda.ports.store import InstanceStore
from tests.conformance.conftest import PARSING_STORES, DynamoStores, Stores
from tests.support.aws.fault_proxy import FaultProxy, after_forwarding, cut_connection, fail, respond
from tests.support.iam import denied_requests, iam_requests
from tests.support.records import (
    NOW,
    at,
    birth,
    change,
    demand_record,
    in_set,
    in_state,
    instance_id,
    job_record,
    pool_config,
    provision,
    run_holder,
    set_holder,
)
from tests.support.virtual_time import AdjustableClock

ID = instance_id(1)


class Store(InstanceStore, DemandStore, Protocol):
    """Every adapter implements both ports."""


async def conflict(awaitable: Any) -> Any:
    """The stored record in the `Conflict` of a write."""
    with pytest.raises(Conflict) as refused:
        await awaitable
    return refused.value.current


def ids(jobs: Any) -> list[str]:
    return [job.job_id for job in jobs]


# Demand -----------------------------------------------------------------------------------------------------------


async def test_demand_is_read_as_written(store: Store, other: Store) -> None:
    assert await store.get_demand() == {}
    full = demand_record(
        session_id="5d1c",
        owner="listener-1",
        last_message_id=2**40,
        statistics=DemandStatistics(available=1, acquired=2, assigned=3, running=4, registered=5, busy=6, idle=7),
        updated_at=at(1.0005),
        failing_since=at(2),
        error="GitHub answered 502",
    )
    await store.put_demand(full)
    await other.put_demand(demand_record("small"))
    stored = replace(full, updated_at=at(1))
    assert await other.get_demand() == {"large": stored, "small": demand_record("small")}
    after = replace(stored, revision=2, owner="", error="", failing_since=None)
    await store.put_demand(after)
    assert (await other.get_demand())["large"] == after


async def test_deleted_demand_is_gone_and_may_be_deleted_again(store: Store, other: Store) -> None:
    await store.put_demand(demand_record("large"), [job_record()])
    await store.put_demand(demand_record("large2"))
    for _ in range(2):
        await other.delete_demand("large")
        assert list(await store.get_demand()) == ["large2"]
    assert ids(await store.recent_jobs(9)) == ["job-1"], "the history of jobs outlives the set"


async def test_demand_is_written_with_its_jobs(store: Store, other: Store) -> None:
    jobs = [job_record(number) for number in range(1, 51)]
    await store.put_demand(demand_record(last_message_id=7), jobs)
    assert (await other.get_demand())["large"].last_message_id == 7
    assert await other.get_jobs(ids(jobs)) == {job.job_id: job for job in jobs}
    # More jobs than one message of GitHub contains.
    many = [
        job_record(number, result="succeeded", revision=2 if number <= len(jobs) else 1)
        for number in range(1, 2 * JOBS_PER_TRANSACTION)
    ]
    await other.put_demand(demand_record(last_message_id=8, revision=2), many)
    assert (await store.get_demand())["large"].last_message_id == 8
    assert await store.get_jobs(ids(many)) == {job.job_id: job for job in many}


async def test_demand_is_separate_from_the_pool_configuration(store: Store) -> None:
    await store.put_config(pool_config())
    await store.put_sweep_record(SweepRecord(next_due_at=NOW))
    await store.put_demand(demand_record("config"))
    await store.replace_lease("config", None, Lease(owner="a", beat=1))
    await store.delete_demand("config")
    assert await store.get_config() == pool_config()
    assert await store.get_sweep_record() == SweepRecord(next_due_at=NOW)
    assert await store.get_lease("config") == Lease(owner="a", beat=1)


async def test_write_that_is_applied_late_takes_nothing_back(store: Store, other: Store) -> None:
    """A process has given up on a write, and written again. The first request is still under way."""
    started = job_record(started_at=at(3))
    for writes in range(1, 4):
        await store.put_demand(demand_record(last_message_id=7, revision=writes), [replace(started, revision=writes)])
        for revision in range(writes + 1):
            late = job_record(revision=revision)
            assert isinstance(await conflict(other.put_jobs([late])), JobRecord | None)
            await conflict(other.put_demand(demand_record(revision=writes + 1), [job_record(2), late]))
            await conflict(other.put_demand(demand_record(revision=revision), [replace(started, revision=writes + 1)]))
            await conflict(other.put_demand(demand_record(revision=revision)))
        assert (await store.get_demand())["large"].last_message_id == 7
        assert await store.get_jobs(["job-1", "job-2"]) == {"job-1": replace(started, revision=writes)}


async def test_one_of_two_writers_of_a_job_wins(stores: Stores, store: Store) -> None:
    await store.put_jobs([job_record()])
    rivals = [job_record(revision=2, result=f"process-{number}") for number in range(5)]
    outcomes = await asyncio.gather(*(stores.open().put_jobs([job]) for job in rivals), return_exceptions=True)
    assert sum(isinstance(each, Conflict) for each in outcomes) == 4
    (winner,) = (rival for rival, outcome in zip(rivals, outcomes, strict=True) if outcome is None)
    assert await store.get_jobs(["job-1"]) == {"job-1": winner}


async def test_record_follows_one_that_is_gone(store: Store) -> None:
    await store.put_demand(demand_record())
    await store.delete_demand("large")
    await conflict(store.put_demand(demand_record(revision=2)))
    await store.put_demand(demand_record())
    await conflict(store.put_jobs([job_record(revision=2)]))


@pytest.mark.parametrize("stores", PARSING_STORES, indirect=True)
async def test_records_of_older_versions_have_no_revision(stores: Stores, store: Store) -> None:
    await store.put_demand(demand_record("set-1"), [job_record()])
    await stores.forget_revisions(1)
    assert (await store.get_demand())["set-1"].revision == 0
    assert (await store.get_jobs(["job-1"]))["job-1"].revision == 0
    await conflict(store.put_demand(demand_record("set-1", revision=2), [job_record()]))
    await store.put_demand(demand_record("set-1"), [job_record()])
    assert (await store.get_demand())["set-1"].revision == 1


# Lease ------------------------------------------------------------------------------------------------------------


async def test_lease_is_replaced_under_a_condition(store: Store, other: Store) -> None:
    assert await store.get_lease("listener") is None
    assert await conflict(store.replace_lease("listener", Lease(owner="a", beat=0), Lease(owner="a", beat=1))) is None
    first = Lease(owner="a", beat=1)
    await store.replace_lease("listener", None, first)
    assert await conflict(other.replace_lease("listener", None, Lease(owner="b", beat=1))) == first
    second = Lease(owner="a", beat=2)
    await store.replace_lease("listener", first, second)
    assert await conflict(other.replace_lease("listener", first, Lease(owner="b", beat=2))) == second
    rival = Lease(owner="b", beat=2)
    assert await conflict(other.replace_lease("listener", replace(second, owner="b"), rival)) == second
    given_up = Lease(owner="", beat=3)
    await store.replace_lease("listener", second, given_up)
    await other.replace_lease("listener", given_up, rival)
    assert await store.get_lease("listener") == rival
    assert await store.get_lease("another") is None


async def test_concurrent_takeovers_have_one_winner(stores: Stores, store: Store) -> None:
    before = Lease(owner="dead", beat=9)
    await store.replace_lease("listener", None, before)
    rivals = [Lease(owner=f"process-{number}", beat=10) for number in range(5)]
    processes = [stores.open() for _ in rivals]
    outcomes = await asyncio.gather(
        *(each.replace_lease("listener", before, rival) for each, rival in zip(processes, rivals, strict=True)),
        return_exceptions=True,
    )
    (winner,) = (rival for rival, outcome in zip(rivals, outcomes, strict=True) if outcome is None)
    assert [each.current for each in outcomes if isinstance(each, Conflict)] == [winner] * 4
    assert await store.get_lease("listener") == winner


async def test_lease_with_an_end_is_forgotten(store: Store) -> None:
    await store.replace_lease("listener", None, Lease(owner="a", beat=1))
    until = [Lease(owner="a", beat=1, forget_at=at(seconds), job_ids=("job-1", "job-2")) for seconds in (10, 11)]
    for name, lease in zip(("short", "long"), until, strict=True):
        await store.replace_lease(name, None, lease)
        assert await store.get_lease(name) == lease
    if not await store.forget(at(10)):
        pytest.skip("this store forgets by itself, in its own time")
    assert await store.get_lease("short") is None
    assert await store.get_lease("long") == until[1]
    assert await store.get_lease("listener") == Lease(owner="a", beat=1)


# Jobs -------------------------------------------------------------------------------------------------------------


async def test_job_is_read_as_written(store: Store, other: Store) -> None:
    full = JobRecord(
        job_id="5f0c",
        runner_set="large",
        revision=1,
        run_id="77",
        repository="octo/repo",
        workflow="octo/repo/.github/workflows/ci.yml@refs/heads/main",
        display_name="build (ü, 3.12)",
        event="push",
        labels=("self-hosted", "large"),
        queued_at=at(1),
        assigned_at=at(2),
        started_at=at(3),
        completed_at=at(4),
        result="failed",
        runner_name=f"remuda-test-1-{ID}",
        instance_id=ID,
        interrupted_at=at(5),
        rerun_at=at(6),
        rerun_detail="run again once",
        lost_at=at(7),
        lost_detail="it has ended",
        seen_at=at(1.0009),
        forget_at=at(600),
    )
    await store.put_jobs([full])
    stored = replace(full, seen_at=at(1))
    assert await other.get_jobs(["5f0c", "unknown"]) == {"5f0c": stored}
    assert await other.get_jobs([]) == {}
    ended = replace(stored, revision=2, result="succeeded")
    await other.put_jobs([ended])
    await other.put_jobs([])
    assert await store.get_jobs(["5f0c", "5f0c"]) == {"5f0c": ended}


async def test_many_jobs_at_once(store: Store) -> None:
    jobs = [job_record(number, run_id=str(number % 3)) for number in range(2 * JOBS_PER_TRANSACTION + 3)]
    await store.put_jobs([*jobs, replace(jobs[0], result="succeeded")])
    found = await store.get_jobs(ids(jobs))
    assert len(found) == len(jobs)
    assert found["job-0"].result == "succeeded", "the last of two records of one job wins"
    assert ids(await store.jobs_of_run("1")) == [f"job-{number}" for number in range(1, len(jobs), 3)]


async def test_jobs_of_a_run_are_oldest_first(store: Store) -> None:
    await store.put_jobs([job_record(number) for number in (3, 1, 2)])
    await store.put_jobs([job_record(4, run_id="771"), job_record(5, run_id="")])
    assert ids(await store.jobs_of_run("77")) == ["job-1", "job-2", "job-3"]
    assert await store.jobs_of_run("7") == []
    # A job whose run becomes known later.
    await store.put_jobs([job_record(5, revision=2)])
    assert ids(await store.jobs_of_run("77")) == ["job-1", "job-2", "job-3", "job-5"]


async def test_recent_jobs_are_newest_first(store: Store) -> None:
    await store.put_provision(provision())
    await store.put_jobs([job_record(number, run_id=f"run-{number}") for number in (3, 1, 4, 2)])
    assert ids(await store.recent_jobs(3)) == ["job-4", "job-3", "job-2"]
    assert len(await store.recent_jobs(10)) == 4
    assert await store.recent_jobs(0) == []
    assert ids(await store.recent_jobs(10, since=at(3))) == ["job-4", "job-3"]
    assert ids(await store.recent_jobs(1, since=at(2))) == ["job-4"]
    assert await store.recent_jobs(10, since=at(5)) == []
    assert [each.provision_id for each in await store.recent_provisions(9)] == ["p-1"]


async def test_texts_of_jobs_are_bounded_and_printable(store: Store) -> None:
    """GitHub's texts are untrusted: one message must not make a set unusable."""
    hostile = "\ud800\x1b[31m" + "\U0001f600" * 10_000
    event = JobEvent(
        kind=JobEventKind.STARTED,
        job_id=hostile,
        run_id=hostile,
        repository=hostile,
        workflow=hostile,
        display_name=hostile,
        event=hostile,
        labels=(hostile,) * 100,
        result=hostile,
        runner_name=hostile,
    )
    (job,) = merge_events({}, [event], runner_set="large", now=NOW).values()
    assert len(job.job_id) == MAX_TEXT
    assert len(job.labels) == MAX_JOB_LABELS
    job = replace(job, revision=1, rerun_detail=hostile)
    await store.put_demand(demand_record(error=hostile), [job])
    assert await store.get_jobs([job.job_id]) == {job.job_id: job}
    assert await store.jobs_of_run(job.run_id) == [job]
    assert await store.recent_jobs(1) == [job]
    assert len((await store.get_demand())["large"].error) == MAX_TEXT


async def test_jobs_are_forgotten(store: Store) -> None:
    old = NOW - DEFAULT_RETENTION + timedelta(seconds=10)
    await store.put_jobs([job_record(1, forget_at=at(10)), job_record(2, forget_at=at(11))])
    await store.put_jobs([job_record(3), job_record(4, seen_at=old)])
    await store.put_demand(demand_record())
    if not await store.forget(at(10)):
        pytest.skip("this store forgets by itself, in its own time")
    assert sorted(await store.get_jobs([f"job-{number}" for number in range(1, 5)])) == ["job-2", "job-3"]
    assert ids(await store.recent_jobs(9)) == ["job-3", "job-2"]
    assert await store.forget(at(11)) == 1
    assert list(await store.get_demand()) == ["large"]


# Malformed records ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stores", PARSING_STORES, indirect=True)
async def test_malformed_records_do_not_hide_the_others(stores: Stores, store: Store) -> None:
    for number in (1, 2):
        await store.put_demand(demand_record(f"set-{number}"), [job_record(number)])
        await store.replace_lease(f"lease-{number}", None, Lease(owner="a", beat=1))
    await stores.corrupt(1)
    for read, name, others in (
        (store.get_demand(), "set-1", {"set-2": demand_record("set-2")}),
        (store.get_jobs(["job-1", "job-2"]), "job-1", {"job-2": job_record(2)}),
        (store.get_lease("lease-1"), "lease-1", {}),
        (store.replace_lease("lease-1", Lease(owner="a", beat=1), Lease(owner="a", beat=2)), "lease-1", {}),
    ):
        with pytest.raises(Unreadable, match=f"record of .*{name}") as refused:
            await read
        assert all(name in each for each in refused.value.unreadable)
        assert refused.value.records == others
    assert store.malformed_records == {}
    assert ids(await store.jobs_of_run("77")) == ["job-2"]
    assert ids(await store.recent_jobs(1)) == ids(await store.recent_jobs(2)) == ["job-2"]
    assert ["job-1" in name for name in store.malformed_records] == [True]
    # The listener writes its records again, which repairs them.
    await store.put_demand(demand_record("set-1"), [job_record(1)])
    assert sorted(await store.get_demand()) == ["set-1", "set-2"]
    assert ids(await store.jobs_of_run("77")) == ["job-1", "job-2"]


# New fields of other records --------------------------------------------------------------------------------------


SET = RunnerSet(
    name="large",
    labels=("self-hosted", "large"),
    resource_class="large",
    scope="octo",
    runner_group="group",
    max=20,
    trust=Tier.UNTRUSTED,
    strict=True,
    rerun_on_interruption=True,
    windows=(CapacityWindow(cron="* 9-17 * * 1-5", time_zone="Europe/Berlin", hot=1, warm=2),),
)


async def test_records_keep_their_runner_set(store: Store, other: Store) -> None:
    listening = in_set(State.RUNNING)
    await store.apply(birth(listening))
    assert await other.get(ID) == listening
    with_job = set_holder("large", "77")
    moved = await other.apply(
        change(
            listening,
            WriteCondition(state=State.RUNNING, epoch=2, equals=(("holder", listening.holder),)),
            holder=with_job,
        )
    )
    assert await store.get(ID) == moved == replace(listening, holder=with_job)
    await store.put_provision(provision(runner_set="large"))
    assert await other.get_provision(with_job) == provision(runner_set="large")
    assert await other.get_provision(run_holder("large", "p-1")) is None
    await store.put_config(pool_config(runner_sets=(SET,)))
    assert await other.get_config() == pool_config(runner_sets=(SET,))


async def test_heartbeat_reports_a_used_up_registration(store: Store, other: Store) -> None:
    beat: dict[str, Any] = {"at": NOW, "busy": False, "listening": False, "notice": "", "version": "1"}
    await store.beat(ID, **beat, spent_epoch=3)
    report = await other.get_report(ID)
    assert report is not None
    assert report.spent_epoch == 3
    await store.beat(ID, **beat)
    report = await other.get_report(ID)
    assert report is not None
    assert report.spent_epoch == 0


@pytest.mark.parametrize(
    ("record", "key"),
    [
        (in_state(State.IDLE), "lastHolder"),
        (provision(), "nonce"),
        (Report(instance_id=ID, beat=1), "spentEpoch"),
        (pool_config(), "runnerSets"),
    ],
    ids=["instance", "provision", "report", "configuration"],
)
def test_records_of_older_versions_are_read(record: Instance | Provision | Report | PoolConfig, key: str) -> None:
    document = to_document(record)
    older = {name: value for name, value in document.items() if name != key}
    read = to_document(from_document(type(record), older))
    assert not read[key]
    assert {**read, key: document[key]} == document


# DynamoDB ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def table(between: FaultProxy, dynamo_stores: DynamoStores) -> Any:
    dynamo_stores.arguments["clock"] = AdjustableClock(longest_sleep_s=0.01)
    store = dynamo_stores.open()
    await store.prepare()
    between.requests.clear()
    return store


async def test_a_message_costs_one_call(table: Any, between: FaultProxy) -> None:
    await table.put_demand(demand_record(), [job_record(number) for number in range(50)])
    assert between.requests == {"TransactWriteItems": 1}
    between.requests.clear()
    await table.put_demand(demand_record(revision=2))
    await table.put_jobs([job_record(1, revision=2)])
    assert between.requests == {"PutItem": 2}
    between.requests.clear()
    await table.get_jobs([f"job-{number}" for number in range(50)])
    await table.get_demand()
    await table.jobs_of_run("77")
    await table.recent_jobs(50)
    await table.get_lease("listener")
    assert between.requests == {"BatchGetItem": 1, "Query": 3, "GetItem": 1}


async def test_jobs_are_written_before_the_demand(table: Any, between: FaultProxy) -> None:
    """A listener that is killed between the two writes gets the message again."""
    between.then("TransactWriteItems", after_forwarding(respond({})))
    between.then("TransactWriteItems", fail(400, "AccessDeniedException"))
    jobs = [job_record(number) for number in range(JOBS_PER_TRANSACTION + 2)]
    with pytest.raises(UserError, match="AccessDenied"):
        await table.put_demand(demand_record(), jobs)
    assert len(await table.recent_jobs(100)) == JOBS_PER_TRANSACTION
    assert await table.get_demand() == {}


async def test_a_concurrent_writer_of_a_job_delays_the_message(table: Any, between: FaultProxy) -> None:
    between.then("TransactWriteItems", fail(400, "TransactionCanceledException"))
    with pytest.raises(Unavailable, match="cancelled a transaction"):
        await table.put_demand(demand_record(), [job_record()])
    assert await table.recent_jobs(1) == []
    await table.put_demand(demand_record(), [job_record()])
    assert await table.get_demand() == {"large": demand_record()}


async def test_failed_message_writes_nothing(table: Any, between: FaultProxy) -> None:
    between.always["TransactWriteItems"] = fail(500, "InternalServerError")
    with pytest.raises(Unavailable):
        await table.put_demand(demand_record(), [job_record()])
    assert await table.get_demand() == {}
    assert await table.recent_jobs(1) == []


async def test_lost_answer_to_a_message_is_repeated(table: Any, between: FaultProxy) -> None:
    between.then("TransactWriteItems", after_forwarding(cut_connection))
    await table.put_demand(demand_record(), [job_record()])
    assert between.requests["TransactWriteItems"] == 2
    assert await table.get_demand() == {"large": demand_record()}


async def test_lost_answer_to_a_lease_shows_the_new_lease(table: Any, between: FaultProxy) -> None:
    mine = Lease(owner="a", beat=1)
    between.then("PutItem", after_forwarding(cut_connection))
    assert await conflict(table.replace_lease("listener", None, mine)) == mine


async def test_the_listener_may_read_and_write_them_and_an_agent_may_not(
    table: Any, between: FaultProxy, table_name: str
) -> None:
    between.sent.clear()
    for call in (
        table.put_demand(demand_record(), [job_record()]),
        table.put_demand(demand_record(revision=2)),
        table.put_jobs([job_record(revision=2)]),
        table.replace_lease("listener", None, Lease(owner="a", beat=1)),
        table.get_demand(),
        table.get_lease("listener"),
        table.get_jobs(["job-1"]),
        table.get_jobs(["job-1", "job-2"]),
        table.jobs_of_run("77"),
        table.recent_jobs(1),
        table.delete_demand("large"),
    ):
        await call
    sent = list(iam_requests(between.sent, {"aws:userid": f"AROAEXAMPLE:{ID}"}))
    assert {each.action.partition(":")[2] for each in sent} == {
        *("PutItem", "BatchWriteItem", "GetItem", "BatchGetItem", "Query")
    }
    pool = table_name.removeprefix("remuda-")
    assert denied_requests("agent", pool, sent) == sent
    assert not denied_requests("provision listener", pool, sent)
    writing = [each for each in sent if each.action in {"dynamodb:PutItem", "dynamodb:BatchWriteItem"}]
    assert denied_requests("provision", pool, sent) == writing, "only the listener may write them"


def test_largest_job_fits_into_an_item() -> None:
    """DynamoDB limits partition keys to 2,048 bytes, sort keys to 1,024, and a transaction to 4 MB."""
    wide = "\U0001f600" * MAX_TEXT
    texts: Any = {each.name: wide for each in fields(JobRecord) if each.type == "str"}
    item = job_item(job_record(**texts, labels=(wide,) * MAX_JOB_LABELS))
    assert max(len(item[name]["S"].encode()) for name in ("pk", "gsi1pk", "gsi2pk")) <= 2_048
    assert max(len(item[name]["S"].encode()) for name in ("sk", "gsi1sk", "gsi2sk")) <= 1_024
    size = len(json.dumps(item, ensure_ascii=False).encode())
    assert size * (JOBS_PER_TRANSACTION + 1) < 4 * 1024 * 1024


async def test_set_and_its_jobs_are_written_in_one_call(table: Any, between: FaultProxy) -> None:
    between.requests.clear()
    await table.put_demand(demand_record(), [job_record(number) for number in range(JOBS_PER_TRANSACTION)])
    assert between.requests == {"TransactWriteItems": 1}


async def test_jobs_expire_by_their_ttl(table: Any, dynamo_stores: DynamoStores) -> None:
    await table.put_jobs([job_record(1, forget_at=at(600)), job_record(2)])
    scanned = await dynamo_stores.client.scan(TableName=dynamo_stores.table)
    found = {item["pk"]["S"]: item["ttl"] for item in scanned["Items"]}
    assert found["job#job-1"] == {"N": str(int(at(600).timestamp()))}
    assert found["job#job-2"] == {"N": str(int((at(2) + DEFAULT_RETENTION).timestamp()))}


async def test_another_item_cannot_pose_as_a_job_or_a_demand(table: Any, dynamo_stores: DynamoStores) -> None:
    """Only keys prove what a record is: content can be copied."""
    await table.put_demand(demand_record(), [job_record()])
    client, name = dynamo_stores.client, dynamo_stores.table
    for source, target in ((job_key("job-1"), job_key("job-9")), (demand_key("large"), demand_key("other"))):
        item = (await client.get_item(TableName=name, Key=source))["Item"]
        await client.put_item(TableName=name, Item={**item, **target})
    with pytest.raises(Unreadable) as refused:
        await table.get_demand()
    assert list(refused.value.unreadable) == ["other"]
    assert ids(await table.recent_jobs(9)) == ids(await table.jobs_of_run("77")) == ["job-1"]
