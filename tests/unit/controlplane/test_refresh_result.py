"""Results of the parts of a refresh: how they add up, and what happens to the errors of single items."""

from __future__ import annotations

from remuda.controlplane.refresh.result import RefreshResult, combined, for_each, seen, warned
from remuda.domain.errors import Conflict, Unavailable
from remuda.domain.reporting.warnings import WarningKind
from remuda.domain.sweep_record import Anomaly, AnomalyKind, QueueAudit, SweepRecord
from tests.support.records import NOW


def test_results_of_parts_add_up() -> None:
    anomalies = [Anomaly(kind=AnomalyKind.MISSING, subject=name, first_seen_at=NOW) for name in ("i-1", "i-2")]
    total = combined(
        [
            RefreshResult(applied=("a",), retired={"i-1": "old"}, stale_messages=2, live_instances={"idle": 1}),
            seen(anomalies[:1]),
            RefreshResult(applied=("b",), retired={"i-2": "gone"}, stale_messages=3),
            seen(anomalies[1:]),
            RefreshResult(record=SweepRecord(audit=QueueAudit(at=NOW))),
            warned(WarningKind.BUDGET, "spent"),
        ]
    )
    assert total == RefreshResult(
        applied=("a", "b"),
        retired={"i-1": "old", "i-2": "gone"},
        stale_messages=5,
        live_instances={"idle": 1},
        record=SweepRecord(anomalies=tuple(anomalies), audit=QueueAudit(at=NOW)),
        warnings=("spent",),
        warning_kinds=(WarningKind.BUDGET,),
    )
    assert combined([]) == RefreshResult()


async def test_error_of_one_item_stops_no_other_and_a_conflict_is_none() -> None:
    async def work(item: str) -> RefreshResult:
        if item == "down":
            raise Unavailable("no answer")
        if item == "moved on":
            raise Conflict("changed meanwhile")
        return RefreshResult(terminated=(item,))

    done = await for_each(["i-1", "down", "moved on", "i-2"], work, name=lambda item: f"the item {item}")
    assert done == RefreshResult(terminated=("i-1", "i-2"), errors=("the item down: no answer",))
