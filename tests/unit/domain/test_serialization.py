"""Records and times as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.domain.errors import Unreadable
from remuda.domain.instance import Credential, HistoryEntry, Instance, RetireReason, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionStatus
from remuda.domain.resources import PoolMessage
from remuda.domain.serialization import MAX_INTEGER, camel, from_document, to_document, to_jsonable
from remuda.domain.signals import Report, Signal
from remuda.domain.timestamps import after, from_text, to_milliseconds, to_text
from tests.support.records import NOW, assignment, at, entry, instance, message, pool_config, provision

RECORDS = [
    instance(),
    instance(
        state=State.RELEASING,
        assignment=assignment(),
        run_deadline=at(1.5),
        forget_at=at(2),
        retire_reason=RetireReason.SPOT_NOTICE,
    ),
    instance(retire_reason=RetireReason.QUARANTINED, retire_detail="odd", quarantined_until=at(9)),
    instance(assignment=replace(assignment(), credential=None, jit_config="secret", labels=())),
    entry(),
    Report(instance_id="i-1"),
    Report(instance_id="i-1", epoch=3, signal=Signal.UD_REG_OK, beat=9, beat_at=NOW, busy=True, notice="rebalance"),
    provision(),
    provision(status=ProvisionStatus.RELEASED, instance_ids=("i-1", "i-2"), released_at=at(1), settled=True),
    pool_config(),
    message(),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_record_survives_json(record: Any) -> None:
    text = json.dumps(to_document(record))
    assert from_document(type(record), json.loads(text)) == record


wholes = st.integers(-MAX_INTEGER, MAX_INTEGER)


@given(
    st.builds(HistoryEntry, at=st.just(NOW), epoch=wholes),
    st.builds(Report, beat_at=st.just(NOW), epoch=wholes, beat=wholes, detail=st.text(), notice=st.text()),
)
def test_any_text_survives_json(line: HistoryEntry, report: Report) -> None:
    for record in (line, report):
        assert from_document(type(record), json.loads(json.dumps(to_document(record)))) == record


def test_keys_are_camel_case() -> None:
    assert camel("instance_id") == "instanceId"
    assert camel("id") == "id"
    assert to_document(message()) == {
        "id": "i-00000000000000001",
        "epoch": 1,
        "resourceClass": "large",
        "instanceType": "c6i.large",
        "usageClass": "spot",
        "cpu": 2,
        "mmem": 4096,
        "tier": "trusted",
        "repository": "",
    }


def test_times_are_fixed_width_text() -> None:
    assert to_document(instance(threshold=at(0.0019)))["threshold"] == "2025-05-31T12:00:00.001Z"


def test_mappings_and_nested_records_become_json_types() -> None:
    assert to_jsonable({"a": (State.IDLE, NOW, None)}) == {"a": ["idle", "2025-05-31T12:00:00.000Z", None]}
    assert to_document(pool_config())["lifetimes"]["keepRecordsS"] == 600.0


def test_unknown_keys_are_ignored_and_defaults_filled_in() -> None:
    document = to_document(provision())
    del document["settled"], document["why"]
    assert from_document(Provision, {**document, "colour": "blue"}) == provision()


def test_integer_is_accepted_as_float() -> None:
    document = to_document(pool_config())
    document["lifetimes"]["idleTimeS"] = 7
    assert from_document(PoolConfig, document).lifetimes.idle_time_s == 7.0


def test_integers_are_those_that_json_represents_exactly() -> None:
    document = to_document(instance())
    for number in (2**53 - 1, -(2**53) + 1):
        assert from_document(Instance, {**document, "cpu": number}).cpu == number
    for number in (2**53, -(2**53)):
        with pytest.raises(ValueError, match="is larger than"):
            from_document(Instance, {**document, "cpu": number})


def test_tokens_are_not_part_of_a_representation() -> None:
    assert "opensesame" not in repr(Credential(token="opensesame", expires_at=NOW))


def test_unreadable_records_are_named_up_to_a_limit() -> None:
    def message(count: int) -> str:
        return Unreadable("the store", {f"r{number}": "bad" for number in range(count)}).message

    assert "more" not in message(Unreadable.MAX_NAMED)
    assert message(Unreadable.MAX_NAMED + 2).endswith("; and 2 more")
    assert message(Unreadable.MAX_NAMED + 2).count("cannot be read") == Unreadable.MAX_NAMED


REQUIRED = ["instanceId", "state", "epoch", "threshold", "resourceClass", "usageClass", "cpu", "createdAt"]


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_field_is_named(key: str) -> None:
    document = to_document(instance())
    del document[key]
    with pytest.raises(ValueError, match=f"Instance lacks {key}"):
        from_document(Instance, document)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("instanceId", 7),
        ("instanceId", None),
        ("state", "asleep"),
        ("state", None),
        ("state", ["idle"]),
        ("epoch", "1"),
        ("epoch", 1.5),
        ("epoch", True),
        ("threshold", 7),
        ("usageClass", "SPOT"),
        ("retireDetail", None),
        ("runDeadline", 7),
    ],
)
def test_wrong_field_is_named(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Instance\.{key}"):
        from_document(Instance, {**to_document(instance()), key: value})


@pytest.mark.parametrize("value", ["yesterday", "2025-05-31T12:00:00Z", "2025-02-30T12:00:00.000Z", ""])
def test_wrong_time_is_rejected(value: str) -> None:
    with pytest.raises(ValueError):
        from_document(Instance, {**to_document(instance()), "threshold": value})


@pytest.mark.parametrize("document", [None, 7, "text", [], [["instanceId", "i-1"]]])
def test_non_object_is_rejected(document: Any) -> None:
    with pytest.raises(ValueError, match="must be an object"):
        from_document(Instance, document)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("labels", "1234"),
        ("labels", [1234]),
        ("credential", []),
        ("credential", {"token": "t"}),
        ("credential", {"token": None, "expiresAt": "2025-05-31T12:00:00.000Z"}),
    ],
)
def test_nested_records_are_checked(key: str, value: Any) -> None:
    document = to_document(instance(assignment=assignment()))
    document["assignment"][key] = value
    with pytest.raises(ValueError):
        from_document(Instance, document)


@pytest.mark.parametrize("changed", [{"launch": []}, {"launch": {"image": 7}}, {"classes": {}}, {"classes": [7]}])
def test_collections_are_checked(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        from_document(PoolConfig, {**to_document(pool_config()), **changed})


@pytest.mark.parametrize("changed", [{"id": "nonsense"}, {"id": 7}, {"epoch": 0}, {"tier": "root"}])
def test_invalid_message_is_rejected(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        from_document(PoolMessage, {**to_document(message()), **changed})


# Times ----------------------------------------------------------------------------------------------------------------


TIMES = st.datetimes(timezones=st.just(UTC))


@given(TIMES)
def test_text_has_a_fixed_width_and_keeps_milliseconds(at: datetime) -> None:
    assert len(to_text(at)) == len("2025-05-31T12:00:00.000Z")
    assert from_text(to_text(at)) == to_milliseconds(at)


@given(TIMES, TIMES)
def test_text_order_is_time_order(one: datetime, other: datetime) -> None:
    assert (to_text(one) < to_text(other)) == (to_milliseconds(one) < to_milliseconds(other))


def test_text_is_utc() -> None:
    assert to_text(datetime(2025, 5, 31, 14, tzinfo=timezone(timedelta(hours=2)))) == "2025-05-31T12:00:00.000Z"


def test_time_without_a_zone_is_rejected() -> None:
    with pytest.raises(ValueError, match="zone"):
        to_text(datetime(2025, 5, 31))  # noqa: DTZ001


@pytest.mark.parametrize(
    "text",
    [
        *("", "now", "2025-05-31T12:00:00Z", "2025-05-31T12:00:00.000", "2025-05-31T12:00:00.000000Z"),
        *("2025-05-31T12:00:00.000+00:00", "2025-05-31 12:00:00.000Z", "2025-13-31T12:00:00.000Z"),
        *("2025-02-30T12:00:00.000Z", "2025-05-31T24:00:00.000Z", "2025-05-31T12:00:60.000Z"),
        *("2025-05-31T12:00:00.000Z\n", "\uff12025-05-31T12:00:00.000Z", "0000-05-31T12:00:00.000Z"),
    ],
)
def test_other_formats_are_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        from_text(text)


@given(TIMES.filter(lambda at: at.year < 9_000), st.floats(0, 1e8))
def test_computed_times_survive_text(at: datetime, seconds: float) -> None:
    later = after(at, seconds)
    assert from_text(to_text(later)) == later
    assert timedelta(0) <= at + timedelta(seconds=seconds) - later < timedelta(milliseconds=1)
