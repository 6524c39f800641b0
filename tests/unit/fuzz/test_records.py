"""Arbitrary records and messages in their three storage forms: an invalid one is rejected by name, alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.sqs import _delivery
from remuda.adapters.sqlite import documents as sqlite_documents
from remuda.adapters.sqlite.pool import _delivery as sqlite_delivery
from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.pool_config import PoolConfig, runner_name
from remuda.domain.provision import Provision
from remuda.domain.resources import PoolMessage
from remuda.domain.serialization import from_document, to_document
from remuda.domain.signals import MAX_DETAIL, Report, Signal
from remuda.domain.sweep_record import SweepRecord
from tests.support.mutations import ESCAPES, LONE, any_json, check_shown, fuzzed, mutated, spoiled_text
from tests.support.records import NOW, assignment, at, entry, instance, message, pool_config, provision, sweep_record

GOOD: dict[type[Any], Any] = {
    Instance: instance(state=State.RELEASING, assignment=assignment(), run_deadline=at(9), forget_at=at(9)),
    Report: Report(instance_id="i-1", epoch=3, signal=Signal.UD_REG_OK, detail="took 0.125 s", beat=9, beat_at=NOW),
    HistoryEntry: entry(),
    Provision: provision(instance_ids=("i-1",), released_at=at(1)),
    PoolConfig: pool_config(),
    PoolMessage: message(),
    SweepRecord: sweep_record(),
}
#: Maximum length of a parse error: it is logged and stored in provision records.
MAX_REFUSAL = 500
DAY = timedelta(days=365)

kinds = pytest.mark.parametrize("kind", list(GOOD), ids=lambda kind: kind.__name__)


def parsed(parse: Callable[[], Any]) -> Any:
    """The parsed record, or None if it was rejected with a printable message."""
    try:
        return parse()
    except ValueError as error:
        check_shown(str(error), MAX_REFUSAL)
        return None


def check_usable(record: Any) -> None:
    """A parsed record can be stored again, printed, and used in calculations."""
    assert from_document(type(record), json.loads(json.dumps(to_document(record)))) == record
    json.dumps(to_document(record), allow_nan=False).encode()
    for value in to_document(record).values():
        items.value_of(items.attribute(value))
    match record:
        case Instance():
            assert record.threshold - DAY < record.threshold < record.threshold + DAY
            assert record.state is not State.IDLE or record.message()
        case Report():
            for text in (record.detail, record.notice, record.version):
                check_shown(text, MAX_DETAIL)
        case PoolConfig():
            spans = to_document(record.lifetimes).values()
            assert all(NOW + timedelta(seconds=span) > NOW - DAY for span in spans)
        case PoolMessage():
            check_shown(f"{record.resource_class} {record.instance_type}", 200)
            assert runner_name("p" * 20, record.epoch + 1, record.id)
        case SweepRecord():
            times = [item.first_seen_at for item in record.anomalies]
            assert all(NOW - since < NOW - since + DAY for since in times)
        case _:
            pass


def check_parsed(parse: Callable[[], Any]) -> None:
    record = parsed(parse)
    if record is not None:
        check_usable(record)


@kinds
@fuzzed()
@given(data=st.data())
def test_document(kind: type[Any], data: st.DataObject) -> None:
    document: Any = data.draw(mutated(to_document(GOOD[kind])) | any_json)
    check_parsed(lambda: from_document(kind, document))


@kinds
@fuzzed()
@given(data=st.data())
def test_sqlite_text(kind: type[Any], data: st.DataObject) -> None:
    text = data.draw(spoiled_text(to_document(GOOD[kind])))
    # An SQLite column may also contain bytes.
    body: Any = data.draw(st.sampled_from([text, text.decode(errors="replace"), None, 7]))
    check_parsed(lambda: sqlite_documents.decode(kind, body))


@kinds
@fuzzed()
@given(data=st.data())
def test_dynamodb_item(kind: type[Any], data: st.DataObject) -> None:
    """Items as botocore returns them: each attribute has one of DynamoDB's types and any content."""
    document = data.draw(mutated(to_document(GOOD[kind])))
    where = items.key("control#i-1", "control")
    wrong = mutated(_item(to_document(GOOD[kind])))
    item = {**where, **data.draw(st.just(_item(document)) | wrong.filter(lambda found: isinstance(found, dict)))}
    check_parsed(lambda: items.record_of(kind, item))
    records, unreadable = items.parse_all(kind, [("bad", item), ("good", _whole(kind))])
    assert "good" in records
    assert "good" not in unreadable


def _item(document: Any) -> dict[str, Any]:
    fields = document.items() if isinstance(document, dict) else ()
    return {str(key): items.attribute(value) for key, value in fields}


def _whole(kind: type[Any]) -> Any:
    record = GOOD[kind]
    match record:
        case Instance():
            where = items.key(f"control#{record.instance_id}", "control")
        case Report():
            where = items.key(f"report#AROA:{record.instance_id}", "report")
        case Provision():
            where = items.key(f"run#{record.run_id}", record.provision_id)
        case _:
            where = items.CONFIG
    return items.document_item(where, record)


@fuzzed(200)
@given(spoiled_text(to_document(message())))
@example(b'{"id":"i-00000000000000001","epoch":' + b"9" * 4_000 + b"}")
@example(json.dumps({**to_document(message()), "instanceType": ESCAPES}).encode())
@example(json.dumps({**to_document(message()), "resourceClass": LONE}).encode())
@example(json.dumps({**to_document(message()), "epoch": 10**18}).encode())
@example(b"[" * 100_000)
def test_pool_message(body: bytes) -> None:
    """A delivery contains a message, or the reason why it is malformed."""
    text = body.decode(errors="replace")
    for delivery in (
        _delivery({"ReceiptHandle": "r", "Body": text}),
        sqlite_delivery("r", text),
    ):
        assert delivery.receipt == "r"
        assert bool(delivery.malformed) is (delivery.message is None)
        check_shown(delivery.malformed, 200)
        if delivery.message is not None:
            check_usable(delivery.message)


def test_invalid_number_is_not_quoted() -> None:
    with pytest.raises(ValueError, match=r"^an attribute of type N is not a number$"):
        items.value_of({"N": "a secret"})
