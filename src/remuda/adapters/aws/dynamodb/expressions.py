"""Conditional writes in DynamoDB's words: pure functions from a change to the arguments of one UpdateItem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.items import Attribute, attribute
from remuda.domain import timestamps
from remuda.domain.instance import State
from remuda.domain.provision import Provision
from remuda.domain.serialization import camel, to_jsonable
from remuda.domain.signals import Report
from remuda.domain.transitions import Change, WriteCondition


class Expression:
    """Collects names and values, so that no reserved word and no value ever stands in an expression itself."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.values: dict[str, Attribute] = {}
        self._sets: list[str] = []
        self._removes: list[str] = []
        self._adds: list[str] = []

    def name(self, attribute_name: str) -> str:
        short = f"#{attribute_name}"
        self.names[short] = attribute_name
        return short

    def value(self, value: Any) -> str:
        return self.raw(attribute(to_jsonable(value)))

    def raw(self, value: Attribute) -> str:
        short = f":v{len(self.values)}"
        self.values[short] = value
        return short

    def set(self, attribute_name: str, value: Any) -> None:
        """None removes it: a record's optional fields are absent where they are None."""
        if value is None:
            self.remove(attribute_name)
        else:
            self._sets.append(f"{self.name(attribute_name)} = {self.value(value)}")

    def set_raw(self, attribute_name: str, value: Attribute) -> None:
        self._sets.append(f"{self.name(attribute_name)} = {self.raw(value)}")

    def remove(self, attribute_name: str) -> None:
        self._removes.append(self.name(attribute_name))

    def add(self, attribute_name: str, amount: int) -> None:
        self._adds.append(f"{self.name(attribute_name)} {self.value(amount)}")

    def arguments(self, condition: str = "") -> dict[str, Any]:
        clauses = [
            f"{word} {', '.join(parts)}"
            for word, parts in (("SET", self._sets), ("REMOVE", self._removes), ("ADD", self._adds))
            if parts
        ]
        found = {
            "UpdateExpression": " ".join(clauses),
            "ConditionExpression": condition,
            "ExpressionAttributeNames": self.names,
            "ExpressionAttributeValues": self.values,
        }
        return {name: part for name, part in found.items() if part}


def change_arguments(change: Change) -> dict[str, Any]:
    """Only what the change sets is written, if its condition is met; the index attributes follow."""
    expression = Expression()
    for name, value in change.sets.items():
        expression.set(camel(name), value)
    _set_indexes(expression, change)
    return expression.arguments(_condition(expression, change.condition))


def _set_indexes(expression: Expression, change: Change) -> None:
    sets = change.sets
    state = sets.get("state")
    if state is State.TERMINATED:
        expression.remove(items.LIVE_PK)
    elif state is not None:
        expression.set(items.LIVE_PK, items.shard_of(change.instance_id))
    if "threshold" in sets:
        expression.set(items.LIVE_SK, sets["threshold"])
    if "provision_id" in sets:
        # An index key cannot be empty.
        provision_id = sets["provision_id"]
        expression.set(items.PROVISION_PK, items.provision_partition(provision_id) if provision_id else None)
        expression.set(items.PROVISION_SK, change.instance_id)
    if state is State.TERMINATED and sets.get("forget_at") is not None:
        expression.set_raw(items.TTL, items.seconds(sets["forget_at"]))


def _condition(expression: Expression, condition: WriteCondition) -> str:
    """`WriteCondition.is_met_by`, as the table checks it in the same step as the write."""
    if condition.state is None:
        return f"attribute_not_exists({expression.name(items.PK)})"
    terms = [_equal(expression, "state", condition.state), _equal(expression, "epoch", condition.epoch)]
    terms += [_equal(expression, camel(name), value) for name, value in condition.equals]
    if condition.owner is not None:
        terms.append(_equal(expression, "owner", condition.owner))
    # Stored times have milliseconds, and text order is time order: the text of the limit, cut, compares the same.
    if condition.threshold_after is not None:
        terms.append(f"{expression.name('threshold')} > {expression.value(condition.threshold_after)}")
    if condition.threshold_at_or_before is not None:
        terms.append(f"{expression.name('threshold')} <= {expression.value(condition.threshold_at_or_before)}")
    if condition.not_retired:
        terms.append(f"attribute_not_exists({expression.name(camel('retire_reason'))})")
    if condition.max_quarantined_until is not None:
        held = expression.name(camel("quarantined_until"))
        terms.append(f"(attribute_not_exists({held}) OR {held} <= {expression.value(condition.max_quarantined_until)})")
    if condition.tiers:
        terms.append(one_of(expression, "tier", condition.tiers))
    if condition.repository:
        terms.append(_equal(expression, "repository", condition.repository))
    elif condition.repository is not None:
        terms.append(_empty(expression, "repository"))
    return " AND ".join(terms)


def _empty(expression: Expression, attribute_name: str) -> str:
    """Older versions have not written it at all."""
    name = expression.name(attribute_name)
    return f"(attribute_not_exists({name}) OR {name} = {expression.value('')})"


def _equal(expression: Expression, attribute_name: str, value: Any) -> str:
    return f"{expression.name(attribute_name)} = {expression.value(value)}"


# Reports ----------------------------------------------------------------------------------------------------------


#: Fields of a report that a signal writes.
_SIGNAL_FIELDS = ("instance_id", "epoch", "signal", "rank", "detail", "duration_s", "failure")


def signal_arguments(report: Report, *, now: datetime) -> dict[str, Any]:
    expression = Expression()
    at_epoch, rank = expression.value(report.epoch), expression.value(report.rank)
    for name in _SIGNAL_FIELDS:
        expression.set(camel(name), getattr(report, name))
    # A notice that it was there for comes back with the next beat.
    _set_troubled(expression, report.instance_id, troubled=report.troubled)
    expression.set_raw(items.TTL, items.seconds(now + items.KEPT))
    stored_epoch, stored_rank = expression.name("epoch"), expression.name("rank")
    return expression.arguments(
        f"attribute_not_exists({stored_epoch}) OR {stored_epoch} < {at_epoch}"
        f" OR ({stored_epoch} = {at_epoch} AND {stored_rank} <= {rank})"
    )


def beat_arguments(instance_id: str, fields: Mapping[str, Any], *, now: datetime) -> dict[str, Any]:
    expression = Expression()
    expression.set("instanceId", instance_id)
    for name, value in fields.items():
        expression.set(camel(name), value)
    expression.set_raw(items.TTL, items.seconds(now + items.KEPT))
    if fields.get("notice"):
        _set_troubled(expression, instance_id, troubled=True)
    expression.add("beat", 1)
    return expression.arguments()


def _set_troubled(expression: Expression, instance_id: str, *, troubled: bool) -> None:
    """The table moves an item in an index only where these differ from what they were."""
    expression.set(items.LIVE_PK, items.troubled_of(instance_id) if troubled else None)
    expression.set(items.LIVE_SK, instance_id if troubled else None)


def report_end(at: datetime) -> dict[str, Any]:
    """A report goes with its record, and is no trouble any more."""
    expression = Expression()
    expression.remove(items.LIVE_PK)
    expression.remove(items.LIVE_SK)
    expression.set_raw(items.TTL, items.seconds(at))
    return expression.arguments(f"attribute_exists({expression.name(items.PK)})")


# Whole items ------------------------------------------------------------------------------------------------------


def absent() -> dict[str, Any]:
    expression = Expression()
    return expression.arguments(f"attribute_not_exists({expression.name(items.PK)})")


def as_stored(before: Provision) -> dict[str, Any]:
    """`Provision.is_as_stored`."""
    expression = Expression()
    terms = [
        _equal(expression, "status", before.status),
        _equal(expression, "instanceIds", before.instance_ids),
        _equal(expression, "settled", before.settled),
    ]
    return expression.arguments(" AND ".join(terms))


def is_still(attribute_name: str, value: Any) -> dict[str, Any]:
    expression = Expression()
    return expression.arguments(_equal(expression, attribute_name, value))


def revision_is(revision: int) -> dict[str, Any]:
    return is_still("revision", revision)


# Searches ---------------------------------------------------------------------------------------------------------


def partition(
    pk_name: str, pk: str, *, up_to: tuple[str, str] | None = None, since: tuple[str, str] | None = None
) -> tuple[Expression, str]:
    """A key condition: one partition of the table or of an index, and its sort keys up to one, or from one on."""
    expression = Expression()
    condition = _equal(expression, pk_name, pk)
    if up_to is not None:
        sort_key, limit = up_to
        condition += f" AND {expression.name(sort_key)} <= {expression.value(limit)}"
    elif since is not None:
        sort_key, limit = since
        condition += f" AND {expression.name(sort_key)} >= {expression.value(limit)}"
    return expression, condition


def query_arguments(expression: Expression, key_condition: str, filtered: str = "") -> dict[str, Any]:
    found = {**expression.arguments(), "KeyConditionExpression": key_condition}
    return {**found, "FilterExpression": filtered} if filtered else found


def one_of(expression: Expression, attribute_name: str, values: Sequence[str]) -> str:
    return f"{expression.name(attribute_name)} IN ({', '.join(expression.value(value) for value in values)})"


def terminated_scan(before: datetime | None) -> dict[str, Any]:
    expression = Expression()
    terms = [
        f"begins_with({expression.name(items.PK)}, {expression.value(items.CONTROL_PREFIX)})",
        _equal(expression, "state", State.TERMINATED),
    ]
    if before is not None:
        terms.append(f"{expression.name('threshold')} <= {expression.value(timestamps.to_text(before))}")
    return {**expression.arguments(), "FilterExpression": " AND ".join(terms)}
