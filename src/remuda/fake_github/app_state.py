"""State shared by the HTTP routes: the core, its storage, injected faults, and waiting for changes."""

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from remuda.fake_github.faults import ApiFault, FaultKind
from remuda.fake_github.registry import GitHubCore, not_accessible
from remuda.fake_github.state import ApiError, DocumentStore, IssuedToken

DOCUMENTATION_URL = "https://docs.github.com/rest/actions/self-hosted-runners"
#: The version of the REST API whose responses these are. GitHub supports newer ones, too.
API_VERSION = "2022-11-28"
#: Key of waiters that wake up with every change.
ANYTHING = "*"
#: Longest wait of a request in seconds.
MAX_WAIT_S = 120.0
#: Status of a response that is cut off on purpose.
DROPPED_STATUS = 502


class AppState:
    def __init__(self, *, core: GitHubCore, store: DocumentStore) -> None:
        self.core = core
        self.store = store
        self.faults = core.faults
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

    async def respond(
        self,
        operation: str,
        answer: Callable[[], Awaitable[Response]],
        *,
        refuse: Callable[[ApiError], Response] | None = None,
    ) -> Response:
        """The response to a request, with the faults of its operation. `refuse` makes error responses."""
        refuse = refuse or _refuse
        response = await self._apply_faults_before(operation, refuse)
        if response is None:
            try:
                response = await answer()
            except ApiError as problem:
                response = refuse(problem)
            self.commit_changes()
        return self._apply_faults_after(operation, response, refuse)

    async def _apply_faults_before(self, operation: str, refuse: Callable[[ApiError], Response]) -> Response | None:
        """Apply faults that precede the operation: a delay, or an error response instead of the operation."""
        if fault := self.faults.take(FaultKind.DELAY, operation):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._cleared.wait(), fault.seconds or 0.0)
        if fault := self.faults.take(FaultKind.RATE_LIMIT, operation):
            message = fault.message or "You have exceeded a secondary rate limit."
            response = refuse(ApiError(fault.status or 403, message))
            if fault.seconds is not None:
                response.headers["retry-after"] = str(int(fault.seconds))
            return response
        if fault := self.faults.take(FaultKind.STATUS, operation):
            return refuse(_error_of(fault, 500))
        return None

    def _apply_faults_after(
        self, operation: str, response: Response, refuse: Callable[[ApiError], Response]
    ) -> Response:
        """Apply faults that follow the operation: it takes effect, but its response is lost or replaced."""
        fault = self.faults.take(FaultKind.LOST_ANSWER, operation)
        if fault is None:
            return response
        if fault.status is not None:
            return refuse(_error_of(fault, fault.status))
        return DroppedResponse()


class DroppedResponse(Response):
    """Announces a body but sends none, so that the server closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        headers = [(b"content-length", b"1"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": DROPPED_STATUS, "headers": headers})


def error_response(status: int, message: str) -> JSONResponse:
    body = {"message": message, "documentation_url": DOCUMENTATION_URL, "status": str(status)}
    return JSONResponse(body, status_code=status)


def _refuse(problem: ApiError) -> Response:
    return error_response(problem.status, problem.message)


def _error_of(fault: ApiFault, status: int) -> ApiError:
    """The error of a fault. A message that is the name of an exception becomes the error's type."""
    message = fault.message or "Server Error"
    return ApiError(fault.status or status, message, type_name=message if message.endswith("Exception") else "")


def bearer(request: Request) -> str:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if not scheme:
        raise ApiError(401, "Requires authentication")
    if scheme.lower() not in {"bearer", "token"} or not value.strip():
        raise ApiError(401, "Bad credentials")
    return value.strip()


def administrator(app: AppState, request: Request) -> IssuedToken:
    token = app.core.registry.access(bearer(request))
    if token.scopes or token.permissions is not None:
        raise not_accessible(token)
    return token


def check_headers(request: Request) -> None:
    """Refuse a request to the REST API without a User-Agent, or for another version of the API.

    https://docs.github.com/rest/using-the-rest-api/getting-started-with-the-rest-api#user-agent; the message about the
    version is that of expipiplus1/update-nix-fetchgit#79.
    """
    check_user_agent(request)
    version = request.headers.get("x-github-api-version", API_VERSION)
    if version != API_VERSION:
        raise ApiError(
            400,
            f'The version you specified in the "X-GitHub-API-Version" request header, "{version}", is not a supported '
            f'version. The following versions are currently supported: "{API_VERSION}" (most recent).\n\n'
            "See also: https://docs.github.com/rest",
        )


def check_user_agent(request: Request) -> None:
    if not request.headers.get("user-agent"):
        raise ApiError(403, "Request forbidden by administrative rules. A User-Agent header is needed.")


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
