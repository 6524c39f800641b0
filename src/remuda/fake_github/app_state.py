"""State shared by the HTTP routes: the core, its storage, injected faults, and waiting for changes."""

import asyncio
import contextlib
import dataclasses
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from remuda.fake_github.registry import GitHubCore
from remuda.fake_github.state import ApiError, DocumentStore, IssuedToken

DOCUMENTATION_URL = "https://docs.github.com/rest/actions/self-hosted-runners"
#: Key of waiters that wake up with every change.
ANYTHING = "*"
#: Longest wait of a request in seconds.
MAX_WAIT_S = 120.0
#: Status of a response that is cut off on purpose.
DROPPED_STATUS = 502
#: All REST operations. It excludes the operations of runners, because their polls would consume the fault.
ANY_OPERATION = "*"
RUNNER_PREFIX = "runner."


class AppState:
    def __init__(self, *, core: GitHubCore, store: DocumentStore) -> None:
        self.core = core
        self.store = store
        self.faults = FaultBoard()
        self._waiters: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._timer_moved = asyncio.Event()
        #: Set and replaced when the faults are cleared.
        self._cleared = asyncio.Event()
        self._closing = False

    def commit_changes(self) -> None:
        """Store the changes and wake the waiters. Must be called after each change, before the response."""
        changes = self.core.state.take_changes()
        self.store.write(changes)
        woken = self.core.state.take_woken()
        for key in (*woken, ANYTHING) if changes else woken:
            self._wake(key)
        self._timer_moved.set()

    def touch_timer(self) -> None:
        self._timer_moved.set()

    def close(self) -> None:
        """End all waits, because the server shuts down."""
        self._closing = True
        for key in list(self._waiters):
            self._wake(key)
        self._cleared.set()

    async def until(self, ready: Callable[[], bool], *, key: str, timeout_s: float, request: Request) -> bool:
        """Wait until `ready()`, the timeout, a disconnect of the client or `close`. Return whether it is ready."""
        if ready():
            return True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(timeout_s, MAX_WAIT_S)
        disconnect = asyncio.create_task(_wait_for_disconnect(request))
        try:
            while not self._closing and not disconnect.done() and (left := deadline - loop.time()) > 0:
                change: asyncio.Future[None] = loop.create_future()
                self._waiters[key].add(change)
                try:
                    await asyncio.wait({change, disconnect}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self._forget(key, change)
                if ready():
                    return True
            return False
        finally:
            disconnect.cancel()

    async def run_timers(self) -> None:
        """Call the core's `tick` at each deadline: leases, pick-ups, lost sessions."""
        while True:
            self._timer_moved.clear()
            due = self.core.next_due()
            left = None if due is None else max(0.0, due - self.core.clock.now())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._timer_moved.wait(), timeout=left)
                continue
            self.core.tick()
            self.commit_changes()

    def _wake(self, key: str) -> None:
        for waiter in self._waiters.get(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _forget(self, key: str, waiter: asyncio.Future[None]) -> None:
        self._waiters[key].discard(waiter)
        if not self._waiters[key]:
            del self._waiters[key]

    def clear_faults(self) -> None:
        """Remove all faults. A delay in progress ends."""
        self.faults.clear()
        cleared, self._cleared = self._cleared, asyncio.Event()
        cleared.set()

    async def respond(self, operation: str, answer: Callable[[], Awaitable[Response]]) -> Response:
        """The response to a request, with the faults of its operation."""
        response = await self._apply_faults_before(operation)
        if response is None:
            try:
                response = await answer()
            except ApiError as problem:
                response = error_response(problem.status, problem.message)
            self.commit_changes()
        return self._apply_faults_after(operation, response)

    async def _apply_faults_before(self, operation: str) -> Response | None:
        """Apply faults that precede the operation: a delay, or an error response instead of the operation."""
        if fault := self.faults.take(FaultKind.DELAY, operation):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._cleared.wait(), fault.seconds or 0.0)
        if fault := self.faults.take(FaultKind.RATE_LIMIT, operation):
            message = fault.message or "You have exceeded a secondary rate limit."
            response = error_response(fault.status or 403, message)
            if fault.seconds is not None:
                response.headers["retry-after"] = str(int(fault.seconds))
            return response
        if fault := self.faults.take(FaultKind.STATUS, operation):
            return error_response(fault.status or 500, fault.message or "Server Error")
        return None

    def _apply_faults_after(self, operation: str, response: Response) -> Response:
        """Apply faults that follow the operation: it takes effect, but its response is lost or replaced."""
        fault = self.faults.take(FaultKind.LOST_ANSWER, operation)
        if fault is None:
            return response
        if fault.status is not None:
            return error_response(fault.status, fault.message or "Server Error")
        return DroppedResponse()


class DroppedResponse(Response):
    """Announces a body but sends none, so that the server closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        headers = [(b"content-length", b"1"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": DROPPED_STATUS, "headers": headers})


def error_response(status: int, message: str) -> JSONResponse:
    body = {"message": message, "documentation_url": DOCUMENTATION_URL, "status": str(status)}
    return JSONResponse(body, status_code=status)


def bearer(request: Request) -> str:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if not scheme:
        raise ApiError(401, "Requires authentication")
    if scheme.lower() not in {"bearer", "token"} or not value.strip():
        raise ApiError(401, "Bad credentials")
    return value.strip()


def administrator(app: AppState, request: Request) -> IssuedToken:
    token = app.core.registry.access(bearer(request))
    if token.scopes or not token.write:
        raise ApiError(403, "Resource not accessible by personal access token")
    return token


async def json_body(request: Request) -> dict[str, Any]:
    raw = await request.body()
    if not raw:
        return {}
    try:
        body = json.loads(raw)
    except ValueError as problem:
        raise ApiError(400, "Problems parsing JSON") from problem
    if not isinstance(body, dict):
        raise ApiError(400, "Body should be a JSON object")
    return body


def wait_of(request: Request) -> float:
    try:
        return float(request.query_params.get("wait", "0"))
    except ValueError as problem:
        raise ApiError(422, "wait must be a number of seconds") from problem


async def _wait_for_disconnect(request: Request) -> None:
    await request.body()
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
        return not operation.startswith(RUNNER_PREFIX)
    return fault.operation == operation
