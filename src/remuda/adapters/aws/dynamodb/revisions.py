"""Writes of records with revisions: each must follow the stored one, so one that is applied late changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from remuda.adapters.aws.calls import REASON_CONDITION_FAILED, chunks, gather
from remuda.adapters.aws.dynamodb import expressions, items
from remuda.adapters.aws.dynamodb.items import Item
from remuda.adapters.aws.dynamodb.table import ConditionFailed, Table, TransactionCancelled
from remuda.domain.demand import DemandRecord, JobRecord
from remuda.domain.errors import Conflict, Unavailable

#: Jobs that are written in one transaction with their demand: as many as a message of GitHub contains. A transaction
#: may have 4 MB, and the texts of a job up to 40 kB.
JOBS_PER_TRANSACTION = 50


async def put_jobs(table: Table, jobs: Collection[JobRecord], demand: DemandRecord | None = None) -> None:
    """Write the jobs, and with the last of them their demand. Raises `Conflict` if one does not follow the stored one.

    One call, in which all are written or none, unless there are more jobs than a transaction takes. It is not a batch:
    that could write the demand and lose the jobs, whose message is then not delivered again.
    """
    # DynamoDB rejects a call that writes an item twice.
    *first, last = [*chunks([*{job.job_id: job for job in jobs}.values()], JOBS_PER_TRANSACTION)] or [[]]
    await gather(_put(table, part, [_condition(job) for job in part]) for part in first)
    records: list[DemandRecord | JobRecord] = [*last]
    if demand is not None:
        records.append(demand)
    if records:
        await _put(table, records, [_condition(record) for record in records])


def _condition(record: DemandRecord | JobRecord) -> Mapping[str, Any]:
    return expressions.if_revision_is(record.revision - 1)


async def _put(
    table: Table, records: Sequence[DemandRecord | JobRecord], conditions: Sequence[Mapping[str, Any]]
) -> None:
    puts = [(_item_of(record), condition) for record, condition in zip(records, conditions, strict=True)]
    try:
        if len(puts) == 1:
            await table.put(*puts[0])
        else:
            await table.put_together(puts)
    except ConditionFailed as failed:
        refused = {0: failed.item}
    except TransactionCancelled as cancelled:
        reasons = zip(cancelled.reasons, cancelled.items, strict=True)
        refused = {n: item for n, (reason, item) in enumerate(reasons) if reason == REASON_CONDITION_FAILED}
        if not refused:
            # Another process writes one of the items at this moment.
            raise Unavailable(f"DynamoDB cancelled a transaction of table {table.name}") from None
    else:
        return
    unreadable = {number for number, item in refused.items() if item and not _is_readable(records[number], item)}
    if unreadable != set(refused):
        raise Conflict(f"table {table.name} has other revisions of the demand or its jobs")
    # Replaced, as nobody could continue from them.
    await _put(table, records, [{} if n in unreadable else each for n, each in enumerate(conditions)])


def _item_of(record: DemandRecord | JobRecord) -> Item:
    if isinstance(record, JobRecord):
        return items.job_item(record)
    return items.document_item(items.demand_key(record.runner_set), record)


def _is_readable(record: DemandRecord | JobRecord, stored: Item) -> bool:
    try:
        items.record_of(type(record), stored)
    except ValueError:
        return False
    return True
