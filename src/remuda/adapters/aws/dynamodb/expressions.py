"""DynamoDB expressions: pure functions that build the arguments of conditional writes and queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.items import Attribute, attribute
from remuda.domain import timestamps
from remuda.domain.demand import Lease
from remuda.domain.instance import State
from remuda.domain.provision import Provision
from remuda.domain.serialization import camel, to_jsonable
from remuda.domain.signals import Report
from remuda.domain.transitions import Change, WriteCondition


class ExpressionBuilder:
    """Builder of an expression. Names and values become placeholders, so reserved words and quoting cannot matter."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.values: dict[str, Attribute] = {}
        self._sets: list[str] = []
        self._removes: list[str] = []
        self._adds: list[str] = []

    def name(self, attribute_name: str) -> str:
        """Return the placeholder of an attribute name."""
        placeholder = f"#{attribute_name}"
        self.names[placeholder] = attribute_name
        return placeholder

    def value(self, value: Any) -> str:
        """Return the placeholder of a value that JSON can represent."""
        return self.raw(attribute(to_jsonable(value)))

    def raw(self, value: Attribute) -> str:
        """Return the placeholder of a value in DynamoDB's notation."""
        placeholder = f":v{len(self.values)}"
        self.values[placeholder] = value
        return placeholder

    def set(self, attribute_name: str, value: Any) -> None:
        """Set an attribute. None removes it: optional fields that are None are not stored."""
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
        """Return the arguments of the call, without those that are empty."""
        clauses = [
            f"{word} {', '.join(parts)}"
            for word, parts in (("SET", self._sets), ("REMOVE", self._removes), ("ADD", self._adds))
            if parts
        ]
        arguments = {
            "UpdateExpression": " ".join(clauses),
            "ConditionExpression": condition,
            "ExpressionAttributeNames": self.names,
            "ExpressionAttributeValues": self.values,
        }
        # DynamoDB rejects empty arguments.
        return {name: argument for name, argument in arguments.items() if argument}


def change_arguments(change: Change) -> dict[str, Any]:
    """Arguments of the UpdateItem that applies a change under its condition."""
    expression = ExpressionBuilder()
    for name, value in change.sets.items():
        expression.set(camel(name), value)
    _set_indexes(expression, change)
    return expression.arguments(_condition(expression, change.condition))


def _set_indexes(expression: ExpressionBuilder, change: Change) -> None:
    sets = change.sets
    state = sets.get("state")
    if state is State.TERMINATED:
        expression.remove(items.LIVE_PK)
    elif state is not None:
        expression.set(items.LIVE_PK, items.shard_of(change.instance_id))
    if "threshold" in sets:
        expression.set(items.LIVE_SK, sets["threshold"])
    if (holder := sets.get("holder") or sets.get("last_holder")) is not None:
        # Kept when nobody holds the instance any more: the index has the holder that it has, or had last.
        expression.set(items.PROVISION_PK, items.provision_partition(holder.provision_id))
        expression.set(items.PROVISION_SK, change.instance_id)
    if state is State.TERMINATED and sets.get("forget_at") is not None:
        expression.set_raw(items.TTL, items.seconds(sets["forget_at"]))


def _condition(expression: ExpressionBuilder, condition: WriteCondition) -> str:
    """`WriteCondition.is_met_by` as an expression that DynamoDB checks atomically with the write."""
    if condition.state is None:
        return f"attribute_not_exists({expression.name(items.PK)})"
    terms = [_equal(expression, "state", condition.state), _equal(expression, "epoch", condition.epoch)]
    terms += [_same(expression, camel(name), value) for name, value in condition.equals]
    if condition.claim is not None:
        terms.append(_equal(expression, "claim", condition.claim))
    # Timestamps are stored as fixed-width text with milliseconds, so text order is time order.
    if condition.threshold_after is not None:
        terms.append(f"{expression.name('threshold')} > {expression.value(condition.threshold_after)}")
    if condition.threshold_at_or_before is not None:
        terms.append(f"{expression.name('threshold')} <= {expression.value(condition.threshold_at_or_before)}")
    if condition.not_retired:
        terms.append(f"attribute_not_exists({expression.name(camel('retire_reason'))})")
    if condition.max_quarantined_until is not None:
        until = expression.name(camel("quarantined_until"))
        terms.append(
            f"(attribute_not_exists({until}) OR {until} <= {expression.value(condition.max_quarantined_until)})"
        )
    if condition.tiers:
        terms.append(one_of(expression, "tier", condition.tiers))
    # None allows any repository; an empty one requires a record without a repository.
    if condition.repository:
        terms.append(_equal(expression, "repository", condition.repository))
    elif condition.repository is not None:
        terms.append(_empty(expression, "repository"))
    return " AND ".join(terms)


def _same(expression: ExpressionBuilder, attribute_name: str, value: Any) -> str:
    """The attribute has the value. Attributes without one are not stored."""
    if value is None:
        return f"attribute_not_exists({expression.name(attribute_name)})"
    return _equal(expression, attribute_name, value)


def _empty(expression: ExpressionBuilder, attribute_name: str) -> str:
    """The attribute is empty, or missing because an older version did not write it."""
    name = expression.name(attribute_name)
    return f"(attribute_not_exists({name}) OR {name} = {expression.value('')})"


def _equal(expression: ExpressionBuilder, attribute_name: str, value: Any) -> str:
    return f"{expression.name(attribute_name)} = {expression.value(value)}"


# Reports ----------------------------------------------------------------------------------------------------------


#: Fields of a report that a signal writes.
_SIGNAL_FIELDS = ("instance_id", "epoch", "signal", "rank", "detail", "duration_s", "failure")


def signal_arguments(report: Report, *, now: datetime) -> dict[str, Any]:
    """Arguments of the UpdateItem that writes a signal.

    It is rejected if the stored report has a later epoch, or the same epoch and a higher rank.
    """
    expression = ExpressionBuilder()
    new_epoch, new_rank = expression.value(report.epoch), expression.value(report.rank)
    for name in _SIGNAL_FIELDS:
        expression.set(camel(name), getattr(report, name))
    # This report has no spot notice. If the stored one has, the next heartbeat marks it as troubled again.
    _set_troubled(expression, report.instance_id, troubled=report.troubled)
    expression.set_raw(items.TTL, items.seconds(now + items.DEFAULT_RETENTION))
    stored_epoch, stored_rank = expression.name("epoch"), expression.name("rank")
    return expression.arguments(
        f"attribute_not_exists({stored_epoch}) OR {stored_epoch} < {new_epoch}"
        f" OR ({stored_epoch} = {new_epoch} AND {stored_rank} <= {new_rank})"
    )


def beat_arguments(instance_id: str, fields: Mapping[str, Any], *, now: datetime) -> dict[str, Any]:
    expression = ExpressionBuilder()
    expression.set("instanceId", instance_id)
    for name, value in fields.items():
        expression.set(camel(name), value)
    expression.set_raw(items.TTL, items.seconds(now + items.DEFAULT_RETENTION))
    if fields.get("notice"):
        _set_troubled(expression, instance_id, troubled=True)
    expression.add("beat", 1)
    return expression.arguments()


def _set_troubled(expression: ExpressionBuilder, instance_id: str, *, troubled: bool) -> None:
    """Add the report to the sparse index of troubled reports, or remove it. An unchanged key costs no index write.

    Troubled reports are those that a sweep must handle: with a failed signal or a spot notice.
    """
    expression.set(items.TROUBLED_PK, items.troubled_of(instance_id) if troubled else None)


def report_expiry(at: datetime) -> dict[str, Any]:
    """Arguments of the UpdateItem that lets the report of a terminated instance expire and no longer be troubled.

    The report expires at `at`, like its control record. The update is rejected if the report does not exist.
    """
    expression = ExpressionBuilder()
    expression.remove(items.TROUBLED_PK)
    expression.set_raw(items.TTL, items.seconds(at))
    return expression.arguments(f"attribute_exists({expression.name(items.PK)})")


# Conditions of writes of whole items --------------------------------------------------------------------------------


def if_absent() -> dict[str, Any]:
    expression = ExpressionBuilder()
    return expression.arguments(f"attribute_not_exists({expression.name(items.PK)})")


def never_updated() -> dict[str, Any]:
    """Arguments of an update whose condition is never met."""
    expression = ExpressionBuilder()
    expression.remove(items.TTL)
    return expression.arguments(_contradiction(expression))


def never_put() -> dict[str, Any]:
    """The condition of a write that is never met."""
    expression = ExpressionBuilder()
    return expression.arguments(_contradiction(expression))


def _contradiction(expression: ExpressionBuilder) -> str:
    key = expression.name(items.PK)
    return f"attribute_exists({key}) AND attribute_not_exists({key})"


def if_stored_is(before: Provision) -> dict[str, Any]:
    """The stored provision equals `before` in the fields that `Provision.is_as_stored` compares."""
    expression = ExpressionBuilder()
    terms = [
        _equal(expression, "status", before.status),
        _equal(expression, "instanceIds", before.instance_ids),
        _equal(expression, "settled", before.settled),
    ]
    if before.nonce:
        terms.append(_equal(expression, "nonce", before.nonce))
    return expression.arguments(" AND ".join(terms))


def if_lease_is(before: Lease | None) -> dict[str, Any]:
    """The stored lease equals `before`; none exists if that is None."""
    if before is None:
        return if_absent()
    expression = ExpressionBuilder()
    terms = [_equal(expression, "owner", before.owner), _equal(expression, "beat", before.beat)]
    return expression.arguments(" AND ".join(terms))


def if_equal(attribute_name: str, value: Any) -> dict[str, Any]:
    expression = ExpressionBuilder()
    return expression.arguments(_equal(expression, attribute_name, value))


def if_revision_is(revision: int) -> dict[str, Any]:
    """The stored record has this revision; 0 if none exists, or one of an older version that had no revisions."""
    if revision:
        return if_equal("revision", revision)
    expression = ExpressionBuilder()
    return expression.arguments(f"attribute_not_exists({expression.name('revision')})")


# Searches ---------------------------------------------------------------------------------------------------------


def key_condition(
    pk_name: str, pk: str, *, up_to: tuple[str, str] | None = None, since: tuple[str, str] | None = None
) -> tuple[ExpressionBuilder, str]:
    """Key condition for one partition of the table or an index, and the builder that holds its names and values.

    `up_to` or `since` is the name of the sort key and its last or first value (inclusive).
    """
    expression = ExpressionBuilder()
    condition = _equal(expression, pk_name, pk)
    if up_to is not None:
        sort_key, limit = up_to
        condition += f" AND {expression.name(sort_key)} <= {expression.value(limit)}"
    elif since is not None:
        sort_key, limit = since
        condition += f" AND {expression.name(sort_key)} >= {expression.value(limit)}"
    return expression, condition


def query_arguments(expression: ExpressionBuilder, condition: str, filter_expression: str = "") -> dict[str, Any]:
    arguments = {**expression.arguments(), "KeyConditionExpression": condition}
    return {**arguments, "FilterExpression": filter_expression} if filter_expression else arguments


def one_of(expression: ExpressionBuilder, attribute_name: str, values: Sequence[str]) -> str:
    return f"{expression.name(attribute_name)} IN ({', '.join(expression.value(value) for value in values)})"


def terminated_scan(before: datetime | None) -> dict[str, Any]:
    """Scan for terminated records, which the live index does not contain. `before` limits the threshold (inclusive)."""
    expression = ExpressionBuilder()
    terms = [
        f"begins_with({expression.name(items.PK)}, {expression.value(items.CONTROL_PREFIX)})",
        _equal(expression, "state", State.TERMINATED),
    ]
    if before is not None:
        terms.append(f"{expression.name('threshold')} <= {expression.value(timestamps.to_text(before))}")
    return {**expression.arguments(), "FilterExpression": " AND ".join(terms)}
