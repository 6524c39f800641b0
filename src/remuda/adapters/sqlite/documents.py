"""Conversion between records and the text of a JSON column."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, TypeVar

from remuda.domain import serialization, timestamps
from remuda.domain.demand import DemandRecord, JobRecord
from remuda.domain.instance import Instance
from remuda.domain.provision import Provision
from remuda.domain.signals import Report

T = TypeVar("T")


def encode(record: Any) -> str:
    return json.dumps(serialization.to_jsonable(record), separators=(",", ":"))


def decode(kind: type[T], text: str, name: str = "") -> T:
    """Parse a record. Raises `ValueError` if the text is malformed or holds the record of another key than `name`."""
    record = serialization.from_document(kind, _load(text))
    match record:
        case Instance() | Report():
            own = record.instance_id
        case Provision():
            own = record.provision_id
        case JobRecord():
            own = record.job_id
        case DemandRecord():
            own = record.runner_set
        case _:
            own = name
    if name and own != name:
        raise ValueError("the record's id differs from its key")
    return record


def time_text(at: datetime | None) -> str | None:
    return None if at is None else timestamps.to_text(at)


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a JSON text: {type(error).__name__}") from None
