"""Records as DynamoDB items and back: keys, attributes, and the attributes that put an item into an index.

| item | pk | sk | `live` index | `by_provision` index |
|---|---|---|---|---|
| control | `control#<role's id>:<id>` | `control` | `live#<shard>`, threshold, until terminated | its provision, id |
| report | `report#<role's id>:<id>` | `report` | `troubled#<shard>`, id, where it tells of trouble | |
| history | `history#<id>` | time, epoch, sequence | | |
| provision | `run#<run id>` | provision id | `unsettled`, deadline, or first once released | `provisions`, creation |
| configuration, sightings, prefixes of keys | `pool` | `config`, `sightings`, `prefixes` | | |
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

from remuda.domain import serialization, timestamps
from remuda.domain.instance import HistoryEntry, Instance
from remuda.domain.provision import Provision, ProvisionStatus
from remuda.domain.signals import Report
from remuda.domain.text import truncate

T = TypeVar("T")

#: An item or an attribute as DynamoDB spells it: `{"S": "text"}`.
Attribute = Mapping[str, Any]
Item = Mapping[str, Attribute]

PK, SK, TTL = "pk", "sk", "ttl"
LIVE_INDEX, LIVE_PK, LIVE_SK = "live", "gsi1pk", "gsi1sk"
PROVISION_INDEX, PROVISION_PK, PROVISION_SK = "by_provision", "gsi2pk", "gsi2sk"
#: Live records, and troubled reports, are spread over so many partitions of the index: one would be hot. A move in the
#: index costs two of the 1,000 writes that each takes in a second, so these take the claims of the largest provision at
#: once; every sweep and every count of the live ones is a query to each.
SHARDS = 4
UNSETTLED = "unsettled"
PROVISIONS = "provisions"
#: Sorts before every time: a released provision is always due.
ALWAYS_DUE = "0"
#: How long history is kept after it was written where the pool's configuration was not seen, and a report after the
#: last beat of a machine whose end nobody confirms.
KEPT = timedelta(days=30)

CONTROL, CONTROL_PREFIX = "control", "control#"
REPORT, REPORT_PREFIX = "report", "report#"

#: What a record's attributes are, and how botocore hands them over. There are others; no record has them.
_KINDS: Mapping[str, Any] = {"NULL": bool, "S": str, "BOOL": bool, "N": str, "M": dict, "L": list}
_WHOLE = re.compile(r"-?\d{1,38}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """The keys of one pool's items. The prefix lets a policy bind an instance to its own two (`${aws:userid}`)."""

    prefix: str = ""

    def control(self, instance_id: str) -> Item:
        return key(f"{CONTROL_PREFIX}{self.prefix}{instance_id}", CONTROL)

    def report(self, instance_id: str) -> Item:
        return key(f"{REPORT_PREFIX}{self.prefix}{instance_id}", REPORT)


def key(pk: str, sk: str) -> Item:
    return {PK: {"S": pk}, SK: {"S": sk}}


def history_pk(instance_id: str) -> str:
    return f"history#{instance_id}"


def run_pk(run_id: str) -> str:
    return f"run#{run_id}"


CONFIG = key("pool", "config")
SIGHTINGS = key("pool", "sightings")
#: What the keys of instances begin with.
PREFIXES = key("pool", "prefixes")


def shard_of(instance_id: str) -> str:
    return shard(_number_of(instance_id))


def shard(number: int) -> str:
    return f"live#{number}"


def troubled_of(instance_id: str) -> str:
    return troubled(_number_of(instance_id))


def troubled(number: int) -> str:
    """Where reports are that a sweep has to look into: after a bad update of an image, those of all machines."""
    return f"troubled#{number}"


def _number_of(instance_id: str) -> int:
    return zlib.crc32(instance_id.encode()) % SHARDS


def provision_partition(provision_id: str) -> str:
    return f"provision#{provision_id}"


def seconds(at: datetime) -> Attribute:
    """As the table's TTL wants it."""
    return {"N": str(int(at.timestamp()))}


# Values -----------------------------------------------------------------------------------------------------------


def attribute(value: Any) -> Attribute:
    """One plain value (`serialization.plain`) as an attribute."""
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
    """`ValueError` for kinds that no record has."""
    if not isinstance(found, Mapping) or len(found) != 1:
        raise ValueError("an attribute is not one value of one kind")
    kind, value = next(iter(found.items()))
    if not isinstance(value, _KINDS.get(kind, ())):
        raise ValueError(f"an attribute of kind {truncate(str(kind), 20)} is in no record")
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
        raise ValueError("an attribute of kind N is no number") from None


def record_of(kind: type[T], item: Item) -> T:
    """`ValueError` where the item is not such a record, or lies where another's record belongs. A newer version may
    have added attributes.
    """
    record = serialization.from_document(kind, {name: value_of(found) for name, found in item.items()})
    if not _is_in_place(record, item):
        raise ValueError("its key is not that of the record that it claims to be")
    return record


def _is_in_place(record: object, item: Item) -> bool:
    """A machine may write whatever it likes into its own report, keys of indexes too; the item's own key it cannot
    choose. So the key says whose record an item is, and of which kind.
    """
    pk, sk = (str(item.get(name, {}).get("S", "")) for name in (PK, SK))
    match record:
        case Instance():
            return sk == CONTROL and _instance_in(pk, CONTROL_PREFIX) == record.instance_id
        case Report():
            return sk == REPORT and _instance_in(pk, REPORT_PREFIX) == record.instance_id
        case Provision():
            return (pk, sk) == (run_pk(record.run_id), record.provision_id)
        case _:
            return True


def is_control(item: Item) -> bool:
    """By its key alone. A machine can put as many items as it likes below its own report's partition, into every index;
    below a control record's it can put none.
    """
    return str(item[PK]["S"]).startswith(CONTROL_PREFIX)


def _instance_in(pk: str, prefix: str) -> str:
    """The instance that a partition key names, behind its role's id; empty where the key is of another kind."""
    return pk.removeprefix(prefix).rpartition(":")[2] if pk.startswith(prefix) else ""


def sorted_out(kind: type[T], found: Iterable[tuple[str, Item]]) -> tuple[dict[str, T], dict[str, str]]:
    """By name: what can be parsed, and why the others cannot."""
    records: dict[str, T] = {}
    unreadable: dict[str, str] = {}
    for name, item in found:
        try:
            records[name] = record_of(kind, item)
        except ValueError as error:
            unreadable[name] = str(error)
    return records, unreadable


def times_of(item: Item) -> Mapping[str, datetime]:
    found = value_of(item["sightings"]) if "sightings" in item else {}
    times: Mapping[str, datetime] = serialization.parse(Mapping[str, datetime], found, "sightings")
    return times


# Whole items ------------------------------------------------------------------------------------------------------


def document_item(where: Item, record: Any) -> Item:
    return {**where, **{name: attribute(value) for name, value in serialization.to_document(record).items()}}


def provision_item(provision: Provision) -> Item:
    item = {
        **document_item(key(run_pk(provision.run_id), provision.provision_id), provision),
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


def sightings_item(sightings: Mapping[str, datetime]) -> Item:
    return {**SIGHTINGS, "sightings": attribute(serialization.to_jsonable(sightings))}


def history_item(instance_id: str, entry: HistoryEntry, *, sequence: int, writer: str, kept: timedelta = KEPT) -> Item:
    """Sorted by time; within a millisecond by epoch and by the order in which one writer wrote them."""
    order = f"{timestamps.to_text(entry.at)}#{entry.epoch:09d}#{sequence:09d}#{writer}"
    return {**document_item(key(history_pk(instance_id), order), entry), TTL: seconds(entry.at + kept)}
