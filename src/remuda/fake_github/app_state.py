"""What the HTTP routes share: the core, its store, and waiting for a change."""

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from remuda.fake_github.core import GitHubCore
from remuda.fake_github.faults import FaultBoard, FaultKind
from remuda.fake_github.model import ApiError, IssuedToken
from remuda.fake_github.store import DocumentStore

DOCUMENTATION_URL = "https://docs.github.com/rest/actions/self-hosted-runners"
#: Woken by every change.
ANYTHING = "*"
#: No request waits longer than this, whatever it asks for.
MAX_WAIT_S = 120.0
#: Answers of server and proxy that carry no body of their own.
LOST = 502


class AppState:
    def __init__(self, *, core: GitHubCore, store: DocumentStore) -> None:
        self.core = core
        self.store = store
        self.faults = FaultBoard()
        self._waiters: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._timer_moved = asyncio.Event()
        #: Set, and another one put in its place, when the faults are cleared.
        self._cleared = asyncio.Event()
        self._closing = False

    def settle(self) -> None:
        """Store what changed and wake who waits for it. Call after every change, before answering."""
        changes = self.core.state.take_changes()
        self.store.write(changes)
        woken = self.core.state.take_woken()
        for key in (*woken, ANYTHING) if changes else woken:
            self._wake(key)
        self._timer_moved.set()

    def touch_timer(self) -> None:
        self._timer_moved.set()

    def close(self) -> None:
        """End every wait at once: the server is going down."""
        self._closing = True
        for key in list(self._waiters):
            self._wake(key)
        self._cleared.set()

    async def until(self, ready: Callable[[], bool], *, key: str, timeout_s: float, request: Request) -> bool:
        """Wait until it is ready, the time is over, the client is gone, or the server closes."""
        if ready():
            return True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(timeout_s, MAX_WAIT_S)
        hangup = asyncio.create_task(_hangup(request))
        try:
            while not self._closing and not hangup.done() and (left := deadline - loop.time()) > 0:
                change: asyncio.Future[None] = loop.create_future()
                self._waiters[key].add(change)
                try:
                    await asyncio.wait({change, hangup}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    self._forget(key, change)
                if ready():
                    return True
            return False
        finally:
            hangup.cancel()

    async def keep_time(self) -> None:
        """Tick the core whenever something is due: leases, pick-ups, vanished sessions."""
        while True:
            self._timer_moved.clear()
            due = self.core.next_due()
            left = None if due is None else max(0.0, due - self.core.clock.now())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._timer_moved.wait(), timeout=left)
                continue
            self.core.tick()
            self.settle()

    def _wake(self, key: str) -> None:
        for waiter in self._waiters.get(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _forget(self, key: str, waiter: asyncio.Future[None]) -> None:
        self._waiters[key].discard(waiter)
        if not self._waiters[key]:
            del self._waiters[key]

    def clear_faults(self) -> None:
        """A delay that is under way ends, too."""
        self.faults.clear()
        cleared, self._cleared = self._cleared, asyncio.Event()
        cleared.set()

    async def apply_faults_before(self, operation: str) -> Response | None:
        """Faults that come before the operation: a delay, or an answer instead of it."""
        if fault := self.faults.take(FaultKind.DELAY, operation):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._cleared.wait(), fault.seconds or 0.0)
        if fault := self.faults.take(FaultKind.RATE_LIMIT, operation):
            message = fault.message or "You have exceeded a secondary rate limit."
            response = error(fault.status or 403, message)
            if fault.seconds is not None:
                response.headers["retry-after"] = str(int(fault.seconds))
            return response
        if fault := self.faults.take(FaultKind.STATUS, operation):
            return error(fault.status or 500, fault.message or "Server Error")
        return None

    def apply_faults_after(self, operation: str, response: Response) -> Response:
        """Faults that come after it: what was done stays done, but the answer does not arrive."""
        fault = self.faults.take(FaultKind.LOST_ANSWER, operation)
        if fault is None:
            return response
        if fault.status is not None:
            return error(fault.status, fault.message or "Server Error")
        return DroppedResponse()


class DroppedResponse(Response):
    """Promises a body and ends without it, so that the server closes the connection on the client."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        headers = [(b"content-length", b"1"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": LOST, "headers": headers})


def error(status: int, message: str) -> JSONResponse:
    body = {"message": message, "documentation_url": DOCUMENTATION_URL, "status": str(status)}
    return JSONResponse(body, status_code=status)


def bearer(request: Request) -> str:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if not scheme:
        raise ApiError(401, "Requires authentication")
    if scheme.lower() not in {"bearer", "token"} or not value.strip():
        raise ApiError(401, "Bad credentials")
    return value.strip()


def administrator(hub: AppState, request: Request) -> IssuedToken:
    token = hub.core.registry.access(bearer(request))
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


async def _hangup(request: Request) -> None:
    await request.body()
    while (await request.receive())["type"] != "http.disconnect":
        pass
