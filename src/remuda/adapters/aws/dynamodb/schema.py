"""Schema of the DynamoDB table: creation, verification and inspection."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import TABLE_BUSY, TABLE_MISSING, VALIDATION, code_of, no_table, wrong_table
from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.table import Table
from remuda.domain.errors import TimedOut, UserError

#: Seconds to wait for a table to become active. A new one takes seconds; an index of a large one takes longer.
ACTIVE_WITHIN_S = 120.0
#: First and longest pause in seconds between two checks.
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 2.0
REJECTED = "Rejected"

_NAME = re.compile(r"[A-Za-z0-9_.-]{3,255}")
KEYS = {items.PK: "HASH", items.SK: "RANGE"}
INDEXES = {
    items.LIVE_INDEX: {items.LIVE_PK: "HASH", items.LIVE_SK: "RANGE"},
    items.PROVISION_INDEX: {items.PROVISION_PK: "HASH", items.PROVISION_SK: "RANGE"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TableInspection:
    """State of a table that has the right keys and indexes."""

    active: bool
    #: Expiry of old items (TTL) is enabled.
    expires: bool
    on_demand: bool


async def prepare(table: Table) -> Sequence[str]:
    """Create the table if it is missing, and verify it. Return the changes for people."""
    if not _NAME.fullmatch(table.name):
        raise UserError(
            f"{table.name!r} is not a valid table name", fix="use 3 to 255 letters, digits, '_', '.' and '-'"
        )
    description = await _describe(table)
    created = [] if description else await _create(table)
    description = await _wait_until_active(table, description)
    differences = list(_differences(description))
    if differences:
        raise wrong_table(table.name, differences)
    return [*created, *await _enable_expiry(table)]


async def inspect(table: Table) -> TableInspection:
    """The state of the table. Read-only; raises the errors that `prepare` would raise."""
    description = await _describe(table)
    if not description:
        raise no_table(table.name)
    differences = _differences(description)
    if differences:
        raise wrong_table(table.name, differences)
    answer = await table.call("DescribeTimeToLive", table.client.describe_time_to_live, TableName=table.name)
    expiry = answer["TimeToLiveDescription"]
    billing = description.get("BillingModeSummary", {}).get("BillingMode", "PROVISIONED")
    return TableInspection(
        active=_is_active(description),
        expires=expiry.get("TimeToLiveStatus") in {"ENABLED", "ENABLING"} and expiry.get("AttributeName") == items.TTL,
        on_demand=billing == "PAY_PER_REQUEST",
    )


def _rejectable(method: Callable[..., Awaitable[Any]], code: str) -> Callable[..., Awaitable[Any]]:
    """The method, which returns a response with the key `REJECTED` instead of raising an error with this code."""

    async def call(**arguments: Any) -> Any:
        try:
            return await method(**arguments)
        except ClientError as error:
            if code_of(error) == code:
                return {**error.response, REJECTED: True}
            raise

    return call


async def _describe(table: Table) -> Mapping[str, Any]:
    """The description of the table; empty if it does not exist."""
    describe = _rejectable(table.client.describe_table, TABLE_MISSING)
    answer = await table.call("DescribeTable", describe, TableName=table.name)
    return {} if REJECTED in answer else answer["Table"]


async def _create(table: Table) -> list[str]:
    keys = [KEYS, *INDEXES.values()]
    answer = await table.call(
        "CreateTable",
        # Rejected if another process created it.
        _rejectable(table.client.create_table, TABLE_BUSY),
        TableName=table.name,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for each in keys for name in each],
        KeySchema=_schema(KEYS),
        GlobalSecondaryIndexes=[
            {"IndexName": name, "KeySchema": _schema(each), "Projection": {"ProjectionType": "ALL"}}
            for name, each in INDEXES.items()
        ],
    )
    return [] if REJECTED in answer else [f"table {table.name}"]


async def _wait_until_active(table: Table, description: Mapping[str, Any]) -> Mapping[str, Any]:
    deadline = table.clock.monotonic() + ACTIVE_WITHIN_S
    pause_s = FIRST_PAUSE_S
    while not _is_active(description):
        if table.clock.monotonic() >= deadline:
            raise TimedOut(f"table {table.name} did not become active within {ACTIVE_WITHIN_S:g} s")
        description = await _describe(table)
        if not _is_active(description):
            await table.clock.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
    return description


def _is_active(description: Mapping[str, Any]) -> bool:
    # A table that is UPDATING serves all calls.
    return description.get("TableStatus") in {"ACTIVE", "UPDATING"} and all(
        index.get("IndexStatus", "ACTIVE") in {"ACTIVE", "UPDATING"}
        for index in description.get("GlobalSecondaryIndexes", [])
    )


async def _enable_expiry(table: Table) -> list[str]:
    """Enable the expiry of old items (TTL)."""
    answer = await table.call("DescribeTimeToLive", table.client.describe_time_to_live, TableName=table.name)
    found = answer["TimeToLiveDescription"]
    if found.get("TimeToLiveStatus") in {"ENABLED", "ENABLING"}:
        if found.get("AttributeName") != items.TTL:
            raise wrong_table(table.name, [f"its TTL attribute is {found.get('AttributeName')}, not {items.TTL}"])
        return []
    answer = await table.call(
        "UpdateTimeToLive",
        # Rejected if another process enabled it, or it was changed within the last hour. The next refresh tries again.
        _rejectable(table.client.update_time_to_live, VALIDATION),
        TableName=table.name,
        TimeToLiveSpecification={"Enabled": True, "AttributeName": items.TTL},
    )
    return [] if REJECTED in answer else [f"expiry of old items in table {table.name}"]


def _schema(keys: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"AttributeName": name, "KeyType": kind} for name, kind in keys.items()]


def _differences(description: Mapping[str, Any]) -> list[str]:
    kinds = {each["AttributeName"]: each["AttributeType"] for each in description.get("AttributeDefinitions", [])}
    found = _key_differences("its keys", description.get("KeySchema", []), KEYS, kinds)
    indexes = {each["IndexName"]: each for each in description.get("GlobalSecondaryIndexes", [])}
    for name, keys in INDEXES.items():
        if name not in indexes:
            found.append(f"it has no index {name}")
            continue
        found += _key_differences(f"the keys of index {name}", indexes[name].get("KeySchema", []), keys, kinds)
        projection = indexes[name].get("Projection", {}).get("ProjectionType", "ALL")
        if projection != "ALL":
            found.append(f"index {name} projects {projection}, not ALL")
    return found


def _key_differences(
    what: str, schema: Sequence[Mapping[str, str]], wanted: Mapping[str, str], kinds: Mapping[str, str]
) -> list[str]:
    present = [
        f"{each['AttributeName']} ({kinds.get(each['AttributeName'], '?')}, {each['KeyType']})" for each in schema
    ]
    expected = [f"{name} (S, {kind})" for name, kind in wanted.items()]
    return [] if present == expected else [f"{what} are {', '.join(present)}, not {', '.join(expected)}"]
