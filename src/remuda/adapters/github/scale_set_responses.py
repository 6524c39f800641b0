"""Parsing of the Actions service's responses: scale sets, sessions, messages about jobs, and errors.

Field names are those of github.com/actions/scaleset (types.go, errors.go). A response that cannot be used raises
`Unavailable`. Parts of a message that cannot be used are left out and named: a message that fails as a whole would be
delivered again forever and block its set (cloudbase/garm#812).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from remuda.adapters.github import responses
from remuda.domain.demand import DemandMessage, DemandStatistics, JobEvent, JobEventKind
from remuda.domain.errors import Conflict, NotFound, RemudaError, Unavailable, UserError
from remuda.domain.serialization import EARLIEST, LATEST
from remuda.domain.text import quote, truncate
from remuda.domain.timestamps import to_milliseconds
from remuda.http import ClientResponse
from remuda.ports.github import JitRunner

MESSAGE_TYPE = "RunnerScaleSetJobMessages"
MAX_COUNT = 1_000_000
#: Characters of a text of the service in an error message.
MAX_SHOWN = 200

_SESSION_ID = re.compile(r"[0-9A-Za-z-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_EXCEPTION = re.compile(r"\w+Exception\b")
_CONFLICTS = ("AgentExistsException", "RunnerScaleSetExistsException", "SessionConflictException")
#: A session that has ended is answered with status 400 (actions-runner-controller#4285).
_MISSING = ("NotFoundException", "SessionExpiredException")
_KINDS = {
    "JobAvailable": JobEventKind.AVAILABLE,
    "JobAssigned": JobEventKind.ASSIGNED,
    "JobStarted": JobEventKind.STARTED,
    "JobCompleted": JobEventKind.COMPLETED,
}
_COUNTS = {
    "available": "totalAvailableJobs",
    "acquired": "totalAcquiredJobs",
    "assigned": "totalAssignedJobs",
    "running": "totalRunningJobs",
    "registered": "totalRegisteredRunners",
    "busy": "totalBusyRunners",
    "idle": "totalIdleRunners",
}


class JobStillRunning(Conflict):
    """A runner has a job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleSetDescription:
    scale_set_id: int
    #: None if the response lists none: a set always has at least one (client.go, ensureLabels).
    labels: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionAccess:
    session_id: str
    queue_url: str
    token: str = field(repr=False)
    #: None if the response has none.
    statistics: DemandStatistics | None


def parse_object(response: ClientResponse) -> dict[str, Any]:
    # `json.loads` skips the byte order mark that the service's responses begin with.
    return responses.json_object(response)


def parse_list(response: ClientResponse) -> list[Any]:
    values = parse_object(response).get("value")
    if not isinstance(values, list):
        raise Unavailable("GitHub's list has no value")
    return values


def parse_scale_set(body: Any) -> ScaleSetDescription:
    number = responses.parse_id(body, "runner scale set")
    labels = body.get("labels")
    names = [label.get("name") for label in labels if isinstance(label, dict)] if isinstance(labels, list) else []
    known = tuple(name for name in names if isinstance(name, str))
    return ScaleSetDescription(scale_set_id=number, labels=known or None)


def parse_session(body: Mapping[str, Any], *, is_local: bool) -> SessionAccess:
    session_id = body.get("sessionId")
    if not is_session_id(session_id):
        raise Unavailable("GitHub's message session has no valid sessionId")
    return SessionAccess(
        session_id=str(session_id),
        queue_url=responses.parse_service_url(body.get("messageQueueUrl"), is_local=is_local),
        token=responses.parse_token(body.get("messageQueueAccessToken"), "messageQueueAccessToken"),
        statistics=parse_statistics(body.get("statistics")),
    )


def is_session_id(value: Any) -> bool:
    return isinstance(value, str) and _SESSION_ID.fullmatch(value) is not None


def parse_jit_runner(body: Mapping[str, Any]) -> JitRunner:
    return JitRunner(
        runner_id=responses.parse_id(body.get("runner"), "JIT configuration's runner"),
        config=responses.parse_token(body.get("encodedJITConfig"), "encodedJITConfig"),
    )


def parse_request_ids(response: ClientResponse) -> list[int]:
    return [number for number in parse_list(response) if type(number) is int]


def parse_statistics(body: Any) -> DemandStatistics | None:
    if not isinstance(body, dict):
        return None
    return DemandStatistics(**{name: _count(body.get(key)) for name, key in _COUNTS.items()})


def _count(value: Any) -> int:
    return min(value, MAX_COUNT) if type(value) is int else 0


def parse_message(body: Mapping[str, Any], *, statistics: DemandStatistics) -> tuple[DemandMessage, Sequence[str]]:
    """The message, and what it contains that cannot be used. `statistics` stand in for missing ones."""
    message_id = _number(body.get("messageId"))
    if not message_id:
        raise Unavailable("GitHub's message has no valid messageId")
    problems: list[str] = []
    events: tuple[JobEvent, ...] = ()
    if body.get("messageType") != MESSAGE_TYPE:
        problems.append(f"its type is {quote(body.get('messageType'), MAX_SHOWN)}")
    else:
        events = _parse_body(body.get("body"), problems)
    counts = parse_statistics(body.get("statistics"))
    if counts is None:
        problems.append("it has no statistics")
    return DemandMessage(message_id=message_id, statistics=counts or statistics, events=events), problems


def _parse_body(body: Any, problems: list[str]) -> tuple[JobEvent, ...]:
    """The events in the text of a message. It may be empty: then only the statistics have changed."""
    try:
        items = json.loads(body) if body else []
    except (ValueError, TypeError, RecursionError):
        items = None
    if not isinstance(items, list):
        problems.append("its body is not a list of job messages")
        return ()
    return parse_events(items, problems)


def parse_events(items: Sequence[Any], problems: list[str], *, default_type: str = "") -> tuple[JobEvent, ...]:
    """`default_type` is the type of items without one."""
    events: list[JobEvent] = []
    for item in items:
        kind = (item.get("messageType") or default_type) if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in _KINDS:
            problems.append(f"a job message has the type {quote(kind, MAX_SHOWN)}")
            continue
        event = _parse_event(_KINDS[kind], item)
        if not event.job_id:
            problems.append(f"a {kind} names no job")
            continue
        events.append(event)
    return tuple(events)


def _parse_event(kind: JobEventKind, body: Mapping[str, Any]) -> JobEvent:
    request_id = _number(body.get("runnerRequestId"))
    run_id = _number(body.get("workflowRunId"))
    owner, name = _text(body.get("ownerName")), _text(body.get("repositoryName"))
    is_valid = _NAME.fullmatch(owner) is not None and _NAME.fullmatch(name) is not None
    labels = body.get("requestLabels")
    return JobEvent(
        kind=kind,
        # Older servers identify jobs by the request alone.
        job_id=_text(body.get("jobId")) or (str(request_id) if request_id else ""),
        request_id=request_id,
        run_id=str(run_id) if run_id else "",
        repository=f"{owner}/{name}" if is_valid else "",
        workflow=_text(body.get("jobWorkflowRef")),
        display_name=_text(body.get("jobDisplayName")),
        event=_text(body.get("eventName")),
        labels=tuple(_text(label) for label in labels) if isinstance(labels, list) else (),
        queued_at=_time(body.get("queueTime")),
        assigned_at=_time(body.get("scaleSetAssignTime")),
        started_at=_time(body.get("runnerAssignTime")),
        finished_at=_time(body.get("finishTime")),
        result=_text(body.get("result")),
        runner_id=_number(body.get("runnerId")),
        runner_name=_text(body.get("runnerName")),
    )


def _number(value: Any) -> int:
    return value if type(value) is int and 0 < value < 2**63 else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _time(value: Any) -> datetime | None:
    """A time, or None for the year 1, which stands for an unknown time."""
    try:
        found = datetime.fromisoformat(_text(value))
        found = (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return to_milliseconds(found) if EARLIEST <= found <= LATEST else None


# Errors -------------------------------------------------------------------------------------------------------------


def translate_service(response: ClientResponse, what: str, now: datetime, *, credential: str) -> RemudaError:
    """The error for a response. The service names an exception, or answers with plain text."""
    text = response.body.decode("utf-8-sig", errors="replace")
    name, message = _exception(text)
    # Redacted before truncation, which could leave part of a credential.
    message = truncate(responses.without_credential(message, credential), MAX_SHOWN)
    request_id = response.headers.get("x-github-request-id") or response.headers.get("activityid", "")
    what = f"{what}, request {truncate(request_id, MAX_SHOWN)}" if request_id else what
    shown = f"GitHub: {message or 'no explanation'} ({response.status}, {what})"
    if "JobStillRunningException" in name:
        return JobStillRunning(shown)
    if response.status == 409 or any(each in name for each in _CONFLICTS):
        return Conflict(shown)
    if response.status == 404 or any(each in name for each in _MISSING):
        return NotFound(shown)
    error = responses.translate(response, what, now, credential=credential)
    if isinstance(error, UserError):
        return UserError(shown, field=error.field, fix=error.fix)
    return error if type(error) is not Unavailable else Unavailable(shown)


def _exception(text: str) -> tuple[str, str]:
    """The name of the exception and the message. A gateway may wrap the document in the text of another."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        return "", text
    name = document.get("typeName")
    return (name if isinstance(name, str) else " ".join(_EXCEPTION.findall(text))), _text(
        document.get("message")
    ) or text
