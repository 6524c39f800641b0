"""Switches that make the local GitHub misbehave the way the real one does."""

import dataclasses
from enum import StrEnum
from typing import Any

from remuda.fake_github.model import ApiError


class FaultKind(StrEnum):
    #: The write is applied, then the connection is dropped (or answered with `status`, if given).
    LOST_ANSWER = "lost_answer"
    #: The list comes from a snapshot up to `seconds` old.
    STALE_LIST = "stale_list"
    #: A page lacks its last runner, and `total_count` counts it all the same.
    SHORT_LIST = "short_list"
    #: `busy` is told the wrong way round.
    WRONG_BUSY = "wrong_busy"
    #: An online runner is told to be offline.
    TRANSIENT_OFFLINE = "transient_offline"
    #: 403 (or `status`) with `retry-after: seconds`.
    RATE_LIMIT = "rate_limit"
    #: An idle online runner gets a job just before its DELETE is looked at.
    JOB_ON_DELETE = "job_on_delete"
    #: `status` instead of doing anything.
    STATUS = "status"
    #: The answer takes `seconds` longer, unless it is cleared before.
    DELAY = "delay"


#: Every REST operation. What the runners themselves call has to be named: their polls would use a fault up.
ANY_OPERATION = "*"
RUNNER_PREFIX = "runner."


@dataclasses.dataclass(kw_only=True, slots=True)
class ApiFault:
    id: int
    kind: FaultKind
    operation: str = ANY_OPERATION
    #: How often it still strikes; None means until it is cleared.
    times: int | None = 1
    status: int | None = None
    message: str | None = None
    seconds: float | None = None
    #: Only requests for the runner of this name (kinds that are about one runner).
    runner: str | None = None

    def document(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(kw_only=True, slots=True)
class Snapshot:
    taken_at: float
    #: Scope in lower case to the runner documents of then.
    runners: dict[str, list[dict[str, Any]]]


class FaultBoard:
    def __init__(self) -> None:
        self._faults: list[ApiFault] = []
        self._last_id = 0
        self.snapshot: Snapshot | None = None

    def add(self, document: dict[str, Any]) -> ApiFault:
        known = {field.name for field in dataclasses.fields(ApiFault)} - {"id"}
        if unknown := sorted(set(document) - known):
            raise ApiError(422, f"A fault has no {', '.join(unknown)}.")
        if document.get("kind") not in set(FaultKind):
            raise ApiError(422, f"kind must be one of {', '.join(FaultKind)}.")
        self._last_id += 1
        fault = ApiFault(**{**document, "id": self._last_id, "kind": FaultKind(document["kind"])})
        self._faults.append(fault)
        return fault

    def all(self) -> list[ApiFault]:
        return list(self._faults)

    def clear(self) -> None:
        self._faults.clear()
        self.snapshot = None

    def take(self, kind: FaultKind, operation: str, *, runner: str | None = None) -> ApiFault | None:
        """The first switch that applies, counted down."""
        for fault in self._faults:
            if fault.kind is not kind or not _concerns(fault, operation):
                continue
            if fault.runner is not None and fault.runner != runner:
                continue
            if fault.times is not None:
                fault.times -= 1
                if fault.times <= 0:
                    self._faults.remove(fault)
            return fault
        return None


def _concerns(fault: ApiFault, operation: str) -> bool:
    if fault.operation == ANY_OPERATION:
        return not operation.startswith(RUNNER_PREFIX)
    return fault.operation == operation
