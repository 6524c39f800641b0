"""Injected faults: how the fake GitHub misbehaves on request, like the original did at times."""

import dataclasses
from enum import StrEnum
from typing import Any

from remuda.fake_github.state import ApiError

#: All REST operations. It excludes the operations of runners and scale sets, because their polls would consume it.
ANY_OPERATION = "*"
RUNNER_PREFIX = "runner."
SCALE_SET_PREFIX = "scale-set."


class FaultKind(StrEnum):
    #: The write is applied, then the connection is dropped (or answered with `status`, if given).
    LOST_ANSWER = "lost_answer"
    #: The list comes from a snapshot up to `seconds` old.
    STALE_LIST = "stale_list"
    #: A page lacks its last runner, but `total_count` includes it.
    SHORT_LIST = "short_list"
    #: `busy` is inverted.
    WRONG_BUSY = "wrong_busy"
    #: An online runner is reported as offline.
    TRANSIENT_OFFLINE = "transient_offline"
    #: 403 (or `status`) with `retry-after: seconds`.
    RATE_LIMIT = "rate_limit"
    #: An idle online runner gets a job just before its DELETE is processed.
    JOB_ON_DELETE = "job_on_delete"
    #: The operation does nothing and returns `status`.
    STATUS = "status"
    #: The response is delayed by `seconds`, or until the faults are cleared.
    DELAY = "delay"
    # Messages of scale sets. The operation is the type of the message, such as JobCompleted, or "*".
    #: The message comes `seconds` later.
    LATE_MESSAGE = "late_message"
    #: The message never comes.
    MISSING_MESSAGE = "missing_message"
    #: The message comes again, `seconds` later.
    DUPLICATE_MESSAGE = "duplicate_message"
    #: JobCompleted comes when the job starts. The operation is JobStarted or "*".
    FALSE_COMPLETION = "false_completion"
    #: A poll is answered with status 200 and without a body, or with `message` as the body.
    BAD_MESSAGE = "bad_message"
    #: The number of assigned jobs in statistics is `value`. The operation is the set's name or "*".
    WRONG_STATISTICS = "wrong_statistics"


@dataclasses.dataclass(kw_only=True, slots=True)
class ApiFault:
    id: int
    kind: FaultKind
    operation: str = ANY_OPERATION
    #: Remaining number of requests that it affects; None means until it is cleared.
    times: int | None = 1
    status: int | None = None
    message: str | None = None
    seconds: float | None = None
    #: Name of the only runner that it affects. For kinds that concern one runner.
    runner: str | None = None
    value: int | None = None

    def document(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(kw_only=True, slots=True)
class Snapshot:
    taken_at: float
    #: Runner documents by lower-case scope.
    runners: dict[str, list[dict[str, Any]]]


class FaultBoard:
    def __init__(self) -> None:
        self._faults: list[ApiFault] = []
        self._last_id = 0
        self.snapshot: Snapshot | None = None

    def add(self, document: dict[str, Any]) -> ApiFault:
        known = {field.name for field in dataclasses.fields(ApiFault)} - {"id"}
        if unknown := sorted(set(document) - known):
            raise ApiError(422, f"Unknown fields of a fault: {', '.join(unknown)}.")
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
        """Return the first fault that applies, and decrement its count."""
        for fault in self._faults:
            if fault.kind is not kind or not _applies_to(fault, operation):
                continue
            if fault.runner is not None and fault.runner != runner:
                continue
            if fault.times is not None:
                fault.times -= 1
                if fault.times <= 0:
                    self._faults.remove(fault)
            return fault
        return None


def _applies_to(fault: ApiFault, operation: str) -> bool:
    if fault.operation == ANY_OPERATION:
        return not operation.startswith((RUNNER_PREFIX, SCALE_SET_PREFIX))
    return fault.operation == operation
