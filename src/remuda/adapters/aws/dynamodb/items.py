"""Conversion of records to DynamoDB items and back, including their keys and index attributes.

| item | pk | sk | `live` index | `by_provision` index |
|---|---|---|---|---|
| control | `control#<role's id>:<id>` | `control` | `live#<shard>`, threshold; not if terminated | provision, id |
| report | `report#<role's id>:<id>` | `report` | | |
| history | `history#<id>` | time, epoch, sequence | | |
| provision | `run#<holder's key>` | provision id | `unsettled`, deadline or `0` (released) | `provisions`, creation |
| demand of a runner set | `demand` | name of the set | | |
| job of a runner set | `job#<job id>` | `job` | `jobs-of-run#<run id>`, first seen | `jobs`, first seen |
| lease | `lease` | name | | |
| configuration, last sweep, key prefixes | `pool` | `config`, `sweep`, `prefixes` | | |

Reports with a failure or spot notice are also in the index `troubled`: `troubled#<shard>`, `sk`. Machines write their
reports, so reports have their own index, and its sort key is that of the table: a machine can add any number of
items to the partition of its report, but only one with the sort key `report`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, TypeVar

from remuda.domain import serialization, timestamps
from remuda.domain.demand import DemandRecord, JobRecord, Lease
from remuda.domain.holder import Holder
from remuda.domain.instance import HistoryEntry, Instance
from remuda.domain.provision import Provision, ProvisionStatus
from remuda.domain.signals import Report
from remuda.domain.text import truncate

T = TypeVar("T")

#: Attributes in DynamoDB's notation: `{"S": "text"}`.
Attribute = Mapping[str, Any]
Item = Mapping[str, Attribute]

PK, SK, TTL = "pk", "sk", "ttl"
LIVE_INDEX, LIVE_PK, LIVE_SK = "live", "gsi1pk", "gsi1sk"
PROVISION_INDEX, PROVISION_PK, PROVISION_SK = "by_provision", "gsi2pk", "gsi2sk"
TROUBLED_INDEX, TROUBLED_PK = "troubled", "gsi3pk"
#: Number of index partitions for live records and for troubled reports. A partition takes 1,000 writes per second and
#: an index update counts as two, so four partitions take the claims of the largest provision at once. Every sweep and
#: every count of live records makes one query per partition.
SHARDS = 4
UNSETTLED = "unsettled"
PROVISIONS = "provisions"
JOBS = "jobs"
#: Sorts before every timestamp: a released provision is always due.
ALWAYS_DUE = "0"
#: Time until history entries expire if the pool configuration was not read yet, and until reports expire after the
#: last heartbeat if the instance's end is never confirmed.
DEFAULT_RETENTION = timedelta(days=30)

CONTROL, CONTROL_PREFIX = "control", "control#"
REPORT, REPORT_PREFIX = "report", "report#"
#: Partitions of the runner sets' records. No agent's policy matches them.
DEMAND, LEASE = "demand", "lease"
JOB, JOB_PREFIX = "job", "job#"
#: Maximum characters of a job id in a sort key, which DynamoDB limits to 1,024 bytes.
MAX_SORTED_ID = 200
#: Attributes that an agent names when it writes its report. Its policy allows no others.
REPORT_ATTRIBUTES = (PK, SK, TTL, TROUBLED_PK, "rank", *(serialization.camel(each.name) for each in fields(Report)))

#: DynamoDB's attribute types used in records, with the Python types that botocore returns for them.
_TYPES: Mapping[str, Any] = {"NULL": bool, "S": str, "BOOL": bool, "N": str, "M": dict, "L": list}
_WHOLE = re.compile(r"-?\d{1,38}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemKeys:
    """Keys of an instance's control record and report. See `dynamodb.keys` for the prefix."""

    prefix: str = ""

    def control(self, instance_id: str) -> Item:
        return key(f"{CONTROL_PREFIX}{self.prefix}{instance_id}", CONTROL)

    def report(self, instance_id: str) -> Item:
        return key(f"{REPORT_PREFIX}{self.prefix}{instance_id}", REPORT)


def key(pk: str, sk: str) -> Item:
    return {PK: {"S": pk}, SK: {"S": sk}}


def history_pk(instance_id: str) -> str:
    return f"history#{instance_id}"


def provisions_pk(holder_key: str) -> str:
    """Partition of the provisions of a run or of a runner set."""
    return f"run#{holder_key}"


def provision_key(holder: Holder) -> Item:
    return key(provisions_pk(holder.key), holder.provision_id)


def demand_key(runner_set: str) -> Item:
    return key(DEMAND, runner_set)


def lease_key(name: str) -> Item:
    return key(LEASE, name)


def job_key(job_id: str) -> Item:
    return key(f"{JOB_PREFIX}{job_id}", JOB)


def jobs_of_run_partition(run_id: str) -> str:
    return f"jobs-of-run#{run_id}"


CONFIG = key("pool", "config")
SWEEP = key("pool", "sweep")
#: The prefixes of instance keys.
PREFIXES = key("pool", "prefixes")


def shard_of(instance_id: str) -> str:
    return shard(_number_of(instance_id))


def shard(number: int) -> str:
    return f"live#{number}"


def troubled_of(instance_id: str) -> str:
    return troubled(_number_of(instance_id))


def troubled(number: int) -> str:
    """Index partition of the reports that a sweep must handle. After a bad image update these may be all reports."""
    return f"troubled#{number}"


def _number_of(instance_id: str) -> int:
    return zlib.crc32(instance_id.encode()) % SHARDS


def provision_partition(provision_id: str) -> str:
    return f"provision#{provision_id}"


def seconds(at: datetime) -> Attribute:
    """Unix time, as required for the TTL attribute."""
    return {"N": str(int(at.timestamp()))}


# Values -----------------------------------------------------------------------------------------------------------


def attribute(value: Any) -> Attribute:
    """A JSON-like value as an attribute."""
    if value is None:
        return {"NULL": True}
    if isinstance(value, bool):
        return {"BOOL": value}
    if isinstance(value, str):
        return {"S": value}
    if isinstance(value, int | float):
        return {"N": repr(value)}
    if isinstance(value, Mapping):
        return {"M": {name: attribute(item) for name, item in value.items()}}
    return {"L": [attribute(item) for item in value]}


def value_of(found: Attribute) -> Any:
    """The value of an attribute. Raises `ValueError` for types that no record uses."""
    if not isinstance(found, Mapping) or len(found) != 1:
        raise ValueError("an attribute must have exactly one type")
    kind, value = next(iter(found.items()))
    if not isinstance(value, _TYPES.get(kind, ())):
        raise ValueError(f"unexpected attribute type {truncate(str(kind), 20)}")
    if kind == "NULL":
        return None
    if kind in {"S", "BOOL"}:
        return value
    if kind == "N":
        return _number(value)
    if kind == "M":
        return {name: value_of(item) for name, item in value.items()}
    return [value_of(item) for item in value]


def _number(text: str) -> int | float:
    try:
        return int(text) if _WHOLE.fullmatch(text) else float(text)
    except ValueError:
        raise ValueError("an attribute of type N is not a number") from None


def record_of(kind: type[T], item: Item) -> T:
    """The record in an item. Raises `ValueError` if the item is not such a record or has another record's key.

    Unknown attributes, written by a newer version, are ignored.
    """
    record = serialization.from_document(kind, {name: value_of(found) for name, found in item.items()})
    if not _has_own_key(record, item):
        raise ValueError("the item's key does not belong to the record in it")
    return record


def _has_own_key(record: object, item: Item) -> bool:
    """Whether the item's key matches its content.

    A machine can write any content into its own report, but its IAM policy fixes the partition key. Only the key is
    therefore proof of the record's type and instance.
    """
    pk, sk = (str(item.get(name, {}).get("S", "")) for name in (PK, SK))
    match record:
        case Instance():
            return sk == CONTROL and _instance_in(pk, CONTROL_PREFIX) == record.instance_id
        case Report():
            return sk == REPORT and _instance_in(pk, REPORT_PREFIX) == record.instance_id
        case Provision():
            return (pk, sk) == (provisions_pk(record.holder.key), record.provision_id)
        case JobRecord():
            return (pk, sk) == (f"{JOB_PREFIX}{record.job_id}", JOB)
        case DemandRecord():
            return (pk, sk) == (DEMAND, record.runner_set)
        case _:
            return True


def is_control(item: Item) -> bool:
    """Whether an item is a control record, by its key only. A machine cannot write to the partition of one."""
    return str(item[PK]["S"]).startswith(CONTROL_PREFIX)


def _instance_in(pk: str, prefix: str) -> str:
    """The instance id in a partition key, or an empty string for keys with another prefix."""
    return pk.removeprefix(prefix).rpartition(":")[2] if pk.startswith(prefix) else ""


def parse_all(kind: type[T], found: Iterable[tuple[str, Item]]) -> tuple[dict[str, T], dict[str, str]]:
    """The records by name, and the parse errors of the other items by name."""
    records: dict[str, T] = {}
    unreadable: dict[str, str] = {}
    for name, item in found:
        try:
            records[name] = record_of(kind, item)
        except ValueError as error:
            unreadable[name] = str(error)
    return records, unreadable


# Whole items ------------------------------------------------------------------------------------------------------


def document_item(item_key: Item, record: Any) -> Item:
    return {**item_key, **{name: attribute(value) for name, value in serialization.to_document(record).items()}}


def provision_item(provision: Provision) -> Item:
    item = {
        **document_item(provision_key(provision.holder), provision),
        PROVISION_PK: attribute(PROVISIONS),
        PROVISION_SK: attribute(f"{timestamps.to_text(provision.created_at)}#{provision.provision_id}"),
    }
    if not provision.settled:
        released = provision.status is ProvisionStatus.RELEASED
        due = ALWAYS_DUE if released else timestamps.to_text(provision.deadline)
        item |= {LIVE_PK: attribute(UNSETTLED), LIVE_SK: attribute(due)}
    if provision.forget_at is not None:
        item |= {TTL: seconds(provision.forget_at)}
    return item


def lease_item(name: str, lease: Lease) -> Item:
    expiry = {TTL: seconds(lease.forget_at)} if lease.forget_at is not None else {}
    return {**document_item(lease_key(name), lease), **expiry}


def job_item(job: JobRecord) -> Item:
    # Sort keys of an index need not be unique.
    order = attribute(f"{timestamps.to_text(job.seen_at)}#{job.job_id[:MAX_SORTED_ID]}")
    item = {
        **document_item(job_key(job.job_id), job),
        PROVISION_PK: attribute(JOBS),
        PROVISION_SK: order,
        TTL: seconds(job.expires_at),
    }
    if job.run_id:
        item |= {LIVE_PK: attribute(jobs_of_run_partition(job.run_id)), LIVE_SK: order}
    return item


def history_item(
    instance_id: str, entry: HistoryEntry, *, sequence: int, writer_id: str, retention: timedelta = DEFAULT_RETENTION
) -> Item:
    """The sort key orders entries by time, then by epoch and by the order in which one writer added them."""
    order = f"{timestamps.to_text(entry.at)}#{entry.epoch:09d}#{sequence:09d}#{writer_id}"
    return {**document_item(key(history_pk(instance_id), order), entry), TTL: seconds(entry.at + retention)}
