"""Every operation of the store with every class of errors of DynamoDB."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from remuda.adapters.aws.clients import MAX_ATTEMPTS
from remuda.adapters.aws.dynamodb.schema import INDEXES, KEYS
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.domain import provision as provisions
from remuda.domain.demand import Lease
from remuda.domain.errors import Conflict, RemudaError, Throttled, Unavailable, UserError
from remuda.domain.instance import LIVE, State
from remuda.domain.signals import Signal
from remuda.domain.sweep_record import SweepRecord
from remuda.http import ClientResponse
from remuda.ports.calls import CallCounter
from simulation.loop import SeededIds
from tests.support.aws.contract import service_model
from tests.support.aws.failures import CONNECTION, connection_failures, deviations
from tests.support.aws.scripted_http import AwsScript, ScriptedClient, answer, refusal
from tests.support.failure_tables import Expected, Failing, Outcome, Scripted
from tests.support.records import (
    NOW,
    birth,
    demand_record,
    instance,
    instance_id,
    job_record,
    pool_config,
    provision,
    run_holder,
)
from tests.support.virtual_time import FixedClock

TABLE = "remuda-ci"
FIRST, SECOND = instance_id(1), instance_id(2)


async def raise_first(results: Awaitable[Sequence[RemudaError | None]]) -> None:
    for result in await results:
        if result is not None:
            raise result


DYNAMODB_OUTCOMES: dict[str, Outcome] = {
    **connection_failures(),
    "throttled": refusal("dynamodb", "ThrottlingException"),
    "throughput": refusal("dynamodb", "ProvisionedThroughputExceededException"),
    "limit": refusal("dynamodb", "RequestLimitExceeded"),
    "server": refusal("dynamodb", "InternalServerError", 500),
    "denied": refusal("dynamodb", "AccessDeniedException"),
    "expired": refusal("dynamodb", "ExpiredTokenException"),
    "unknown key": refusal("dynamodb", "UnrecognizedClientException"),
    "clock": refusal("dynamodb", "InvalidSignatureException"),
    "invalid": refusal("dynamodb", "ValidationException"),
    "missing": refusal("dynamodb", "ResourceNotFoundException"),
    "in a transaction": refusal("dynamodb", "TransactionConflictException"),
    "condition": refusal("dynamodb", "ConditionalCheckFailedException"),
    "new": refusal("dynamodb", "SomethingNew"),
}
DYNAMODB_EXPECTED = {
    **CONNECTION,
    "throttled": Expected(Throttled, MAX_ATTEMPTS),
    "throughput": Expected(Throttled, MAX_ATTEMPTS),
    "limit": Expected(Throttled, MAX_ATTEMPTS),
    "server": Expected(Unavailable, MAX_ATTEMPTS),
    "denied": Expected(UserError, 1),
    "expired": Expected(UserError, 1),
    "unknown key": Expected(UserError, 1),
    "clock": Expected(UserError, 1),
    "invalid": Expected(UserError, 1),
    "missing": Expected(UserError, 1),
    "in a transaction": Expected(Unavailable, 1),
    "condition": Expected(Conflict, 1),
    "new": Expected(Unavailable, 1),
}
UNCONDITIONAL: dict[str, Expected | None] = {"condition": None}
READ: dict[str, Expected | None] = {**UNCONDITIONAL, "in a transaction": None}
ITEM = {"pk": {"S": "control#x"}, "sk": {"S": "control"}}
CHANGE, OTHER_CHANGE = birth(instance(1)), birth(instance(2))
OPENED = provision()
RELEASED = provisions.released(OPENED, now=NOW, why="done")
LEASE = Lease(owner="a", beat=1, beat_at=NOW)
TABLE_DESCRIPTION = {
    "TableStatus": "ACTIVE",
    "AttributeDefinitions": [
        {"AttributeName": name, "AttributeType": "S"}
        for name in dict.fromkeys(name for keys in (KEYS, *INDEXES.values()) for name in keys)
    ],
    "KeySchema": [{"AttributeName": name, "KeyType": kind} for name, kind in KEYS.items()],
    "GlobalSecondaryIndexes": [
        {
            "IndexName": index,
            "KeySchema": [{"AttributeName": name, "KeyType": kind} for name, kind in keys.items()],
            "Projection": {"ProjectionType": "ALL"},
        }
        for index, keys in INDEXES.items()
    ],
}
EXISTS: Scripted = {"DescribeTable": [answer("dynamodb", "DescribeTable", {"Table": TABLE_DESCRIPTION})]}
DISABLED: Scripted = {
    "DescribeTimeToLive": [answer("dynamodb", "", {"TimeToLiveDescription": {"TimeToLiveStatus": "DISABLED"}})]
}
#: The first description finds no table. That of a missing table later stands for a table that does not appear.
CREATED: Scripted = {
    "DescribeTable": [
        refusal("dynamodb", "ResourceNotFoundException"),
        answer("dynamodb", "DescribeTable", {"Table": TABLE_DESCRIPTION}),
    ],
    **DISABLED,
    "UpdateTimeToLive": [answer("dynamodb", "", {})],
}
BEAT: dict[str, Any] = {"at": NOW, "busy": False, "listening": False, "notice": "", "version": "1"}
STORE_OPERATIONS = [
    Failing("get", "GetItem", lambda store: store.get(FIRST), but=READ),
    Failing("get_many", "BatchGetItem", lambda store: store.get_many([FIRST, SECOND]), but=READ),
    Failing("get_report", "GetItem", lambda store: store.get_report(FIRST), but=READ),
    Failing("get_reports", "BatchGetItem", lambda store: store.get_reports([FIRST, SECOND]), but=READ),
    Failing("find", "Query", lambda store: store.find(LIVE), but=READ),
    Failing("find terminated", "Scan", lambda store: store.find([State.TERMINATED]), but=READ),
    Failing("find_by_provision", "Query", lambda store: store.find_by_provision("p-1"), but=READ),
    Failing("count_live", "Query", lambda store: store.count_live(), but=READ),
    Failing("history", "Query", lambda store: store.history(FIRST), but=READ),
    Failing("histories", "Query", lambda store: store.histories([FIRST, SECOND]), but=READ),
    Failing("troubled_reports", "Query", lambda store: store.troubled_reports(), but=READ),
    Failing("wait_for_control", "GetItem", lambda store: store.wait_for_control(FIRST, instance(1), 5.0), but=READ),
    Failing("wait_for_report", "GetItem", lambda store: store.wait_for_report(FIRST, None, 0.5), but=READ),
    Failing("get_provision", "GetItem", lambda store: store.get_provision(run_holder("1", "p-1")), but=READ),
    Failing("provisions_of_run", "Query", lambda store: store.provisions_of_run("1"), but=READ),
    Failing("unsettled_provisions", "Query", lambda store: store.unsettled_provisions(NOW), but=READ),
    Failing("recent_provisions", "Query", lambda store: store.recent_provisions(3), but=READ),
    Failing("get_demand", "Query", lambda store: store.get_demand(), but=READ),
    Failing("get_lease", "GetItem", lambda store: store.get_lease("listener"), but=READ),
    Failing("get_jobs", "BatchGetItem", lambda store: store.get_jobs(["1", "2"]), but=READ),
    Failing("jobs_of_run", "Query", lambda store: store.jobs_of_run("1"), but=READ),
    Failing("recent_jobs", "Query", lambda store: store.recent_jobs(3), but=READ),
    Failing("get_config", "GetItem", lambda store: store.get_config(), but=READ),
    Failing("get_sweep_record", "GetItem", lambda store: store.get_sweep_record(), but=READ),
    Failing("apply", "UpdateItem", lambda store: store.apply(CHANGE)),
    Failing("apply_all of one", "UpdateItem", lambda store: raise_first(store.apply_all([CHANGE]))),
    Failing(
        "apply_all",
        "TransactWriteItems",
        lambda store: raise_first(store.apply_all([CHANGE, OTHER_CHANGE])),
        # Each change is applied alone.
        {"UpdateItem": [refusal("dynamodb", "ConditionalCheckFailedException")]},
        {"in a transaction": Expected(Conflict, 1), "condition": None},
    ),
    Failing(
        "write_signal",
        "UpdateItem",
        lambda store: store.write_signal(FIRST, epoch=1, signal=Signal.UD_OK),
        {"GetItem": [answer("dynamodb", "GetItem", {})]},
    ),
    Failing("beat", "UpdateItem", lambda store: store.beat(FIRST, **BEAT), but=UNCONDITIONAL),
    Failing("put_provision", "PutItem", lambda store: store.put_provision(OPENED)),
    Failing("replace_provision", "PutItem", lambda store: store.replace_provision(OPENED, RELEASED)),
    Failing("replace_lease", "PutItem", lambda store: store.replace_lease("listener", None, LEASE)),
    Failing("put_config", "PutItem", lambda store: store.put_config(pool_config())),
    Failing("put_sweep_record", "PutItem", lambda store: store.put_sweep_record(SweepRecord()), but=UNCONDITIONAL),
    Failing("put_demand", "PutItem", lambda store: store.put_demand(demand_record())),
    Failing(
        "put_demand with jobs",
        "TransactWriteItems",
        lambda store: store.put_demand(demand_record(), [job_record()]),
        but=UNCONDITIONAL,
    ),
    Failing("put_jobs", "PutItem", lambda store: store.put_jobs([job_record()])),
    Failing("delete_demand", "BatchWriteItem", lambda store: store.delete_demand("large"), but=UNCONDITIONAL),
    Failing("try_writes", "UpdateItem", lambda store: store.try_writes(), but={"condition": None}),
    Failing("inspect", "DescribeTable", lambda store: store.inspect(), but=READ),
    Failing("inspect expiry", "DescribeTimeToLive", lambda store: store.inspect(), EXISTS, READ),
    Failing("prepare", "DescribeTable", lambda store: store.prepare(), but={**READ, "missing": None}),
    Failing("prepare expiry", "DescribeTimeToLive", lambda store: store.prepare(), EXISTS, READ),
    Failing("prepare new", "CreateTable", lambda store: store.prepare(), CREATED, READ),
    Failing(
        "prepare new expiry",
        "UpdateTimeToLive",
        lambda store: store.prepare(),
        {**EXISTS, **DISABLED},
        # Another process enabled it, or it was changed within the hour.
        {**READ, "invalid": Expected(None, 1)},
    ),
]


@asynccontextmanager
async def open_store(http: AwsScript) -> AsyncIterator[DynamoInstanceStore]:
    written = [answer("dynamodb", "BatchWriteItem", {})]
    http.outcomes.setdefault("BatchWriteItem", [*written])
    client: Any = ScriptedClient(http)
    store = DynamoInstanceStore(client=client, table=TABLE, clock=FixedClock(), ids=SeededIds(), calls=CallCounter())
    try:
        yield store
    finally:
        http.outcomes["BatchWriteItem"] = [*written]
        await store.close()


async def use_store(http: AwsScript, failing: Failing) -> None:
    async with open_store(http) as store:
        await failing.call(store)


@pytest.mark.parametrize("failing", STORE_OPERATIONS, ids=str)
async def test_store(failing: Failing) -> None:
    assert not await deviations("dynamodb", failing, DYNAMODB_OUTCOMES, DYNAMODB_EXPECTED, use_store)


#: Errors of botocore's model that the table above does not have.
MODEL_ERRORS = {
    # The earlier attempt is still running, and may yet succeed.
    "TransactionInProgressException": Expected(Unavailable, MAX_ATTEMPTS),
    "IdempotentParameterMismatchException": Expected(Unavailable, 1),
    # Of tables with local indexes, or with replicas in other regions.
    "ItemCollectionSizeLimitExceededException": Expected(Unavailable, 1),
    "ReplicatedWriteConflictException": Expected(Unavailable, 1),
    "LimitExceededException": Expected(Unavailable, MAX_ATTEMPTS),
    "ResourceInUseException": Expected(Unavailable, 1),
}
#: Codes of which the reasons decide, see below.
BY_REASON = {"TransactionCanceledException"}


@pytest.mark.parametrize("failing", STORE_OPERATIONS, ids=str)
async def test_store_with_each_error_of_the_model(failing: Failing) -> None:
    """Each error that botocore's model declares for the operation is in one of the tables."""
    known = {code_of_refusal(each) for each in DYNAMODB_OUTCOMES.values()}
    shapes = service_model("dynamodb").operation_model(failing.operation).error_shapes
    names = {shape.name for shape in shapes} - known - BY_REASON
    expected = {name: MODEL_ERRORS[name] for name in names}
    if failing.operation == "CreateTable":
        # Another process has created it.
        expected["ResourceInUseException"] = Expected(None, 1)
    outcomes = {name: refusal("dynamodb", name) for name in names}
    assert not await deviations("dynamodb", failing._replace(but={}), outcomes, expected, use_store)


def code_of_refusal(outcome: Outcome) -> str:
    body = outcome.body if isinstance(outcome, ClientResponse) else b""
    return str(json.loads(body)["__type"]).rpartition("#")[2] if body.startswith(b'{"__type') else ""


def cancelled(*codes: str) -> Outcome:
    reasons = [{"Code": code} for code in codes]
    return refusal("dynamodb", "TransactionCanceledException", CancellationReasons=reasons)


@pytest.mark.parametrize(
    "codes",
    [
        ["TransactionConflict", "None"],
        ["None", "ThrottlingError"],
        ["ProvisionedThroughputExceeded", "None"],
        ["None", "ValidationError"],
        [],
    ],
)
async def test_transaction_that_is_cancelled_for_another_reason_than_its_conditions(codes: list[str]) -> None:
    """The reasons say nothing about the records: each change is applied alone, and its own answer counts."""
    http = AwsScript(
        "dynamodb",
        {
            "TransactWriteItems": [cancelled(*codes)] * 9,
            "UpdateItem": [refusal("dynamodb", "ConditionalCheckFailedException")] * 2,
        },
    )
    async with open_store(http) as store:
        failures = await store.apply_all([CHANGE, OTHER_CHANGE])
    assert [type(failure) for failure in failures] == [Conflict, Conflict]


async def test_the_remainder_of_a_batch_is_read_as_consistently() -> None:
    """Whatever the answer repeats of the request; the rules check each request."""
    rest = {TABLE: {"Keys": [{"pk": {"S": f"control#{SECOND}"}, "sk": {"S": "control"}}]}}
    first = {"Responses": {TABLE: []}, "UnprocessedKeys": rest}
    outcomes: list[Outcome] = [answer("dynamodb", "", first), answer("dynamodb", "", {"Responses": {TABLE: []}})]
    http = AwsScript("dynamodb", {"BatchGetItem": outcomes})
    async with open_store(http) as store:
        assert await store.get_many([FIRST, SECOND]) == {}
    assert len(http.sent) == 2


@pytest.mark.parametrize("failing", [each for each in STORE_OPERATIONS if each.operation in {"Query", "Scan"}], ids=str)
async def test_all_pages_are_read_alike(failing: Failing) -> None:
    """The rules compare each page with the one before: its consistency, index, condition and order."""
    key = {**ITEM, "gsi1pk": {"S": "live#0"}, "gsi1sk": {"S": "x"}}
    pages: list[Outcome] = [
        answer("dynamodb", "", {"Items": [], "LastEvaluatedKey": {**key, "gsi1sk": {"S": str(number)}}})
        for number in range(2)
    ]
    http = AwsScript("dynamodb", {failing.operation: [*pages, answer("dynamodb", "", {"Items": []})]})
    await use_store(http, failing)
    assert len(http.sent) >= 3
