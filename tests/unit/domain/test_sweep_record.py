"""The record of a sweep: anomalies keep the time of their first sighting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from remuda.domain.serialization import from_document, to_document
from remuda.domain.sweep_record import Anomaly, AnomalyKind, SweepRecord
from tests.support.records import NOW, at, sweep_record

SPENT = Anomaly(kind=AnomalyKind.SPENT, subject="i-1", epoch=3, first_seen_at=at(-60))


def test_anomaly_that_is_seen_again_keeps_its_time() -> None:
    record = SweepRecord(anomalies=(SPENT,))
    assert record.first_seen(SPENT.kind, "i-1", 3) == at(-60)
    assert record.sighting(SPENT.kind, "i-1", 3, now=NOW) == SPENT


@pytest.mark.parametrize("changed", [{"kind": AnomalyKind.UNBOUND_JOB}, {"subject": "i-2"}, {"epoch": 4}])
def test_another_kind_subject_or_assignment_is_another_anomaly(changed: dict[str, Any]) -> None:
    record, other = SweepRecord(anomalies=(SPENT,)), replace(SPENT, first_seen_at=NOW, **changed)
    assert record.first_seen(*other.key) is None
    assert record.sighting(*other.key, now=NOW) == other


def test_record_survives_its_storage() -> None:
    assert from_document(SweepRecord, to_document(sweep_record())) == sweep_record()
