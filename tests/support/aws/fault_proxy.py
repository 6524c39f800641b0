"""An HTTP proxy in front of an AWS server that counts and records requests and injects faults."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import aiohttp
from aiohttp import web
from anyio.from_thread import start_blocking_portal

JSON = "application/x-amz-json-1.0"
#: The content type of requests to EC2.
FORM = "application/x-www-form-urlencoded"
#: In place of an operation: all operations without a specific fault.
ANY = "*"

Forward = Callable[[], Awaitable[web.Response]]
#: Handles one request: may forward it, and must answer it or cut the connection.
Fault = Callable[[web.Request, Forward], Awaitable[web.Response]]


@dataclass(kw_only=True)
class FaultProxy:
    url: str = ""
    #: Faults per operation, such as `UpdateItem`: one for each of the next requests.
    faults: dict[str, deque[Fault]] = field(default_factory=dict)
    #: Fault per operation for every request, once those above are used up.
    always: dict[str, Fault] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    #: Request documents per operation.
    sent: dict[str, list[Any]] = field(default_factory=dict)

    def then(self, operation: str, *faults: Fault) -> None:
        self.faults.setdefault(operation, deque()).extend(faults)

    def next_fault(self, operation: str) -> Fault | None:
        waiting = self.faults.get(operation)
        return waiting.popleft() if waiting else self.always.get(operation, self.always.get(ANY))


@asynccontextmanager
async def fault_proxy(server_url: str) -> AsyncIterator[FaultProxy]:
    proxy = FaultProxy()
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def handle(request: web.Request) -> web.Response:
            body = await request.read()
            operation = operation_of(request, body)
            proxy.requests[operation] += 1
            document = dict(_form(body)) if request.content_type == FORM else json.loads(body or b"null")
            proxy.sent.setdefault(operation, []).append(document)

            async def forward() -> web.Response:
                headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
                url = f"{server_url}{request.path_qs}"
                async with session.request(request.method, url, data=body, headers=headers) as answer:
                    kept = {name: value for name, value in answer.headers.items() if name.lower().startswith("x-amz")}
                    return web.Response(
                        status=answer.status, body=await answer.read(), content_type=answer.content_type, headers=kept
                    )

            fault = proxy.next_fault(operation)
            return await (fault(request, forward) if fault else forward())

        application = web.Application(client_max_size=2**24)
        application.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        proxy.url = f"http://{host}:{port}"
        try:
            yield proxy
        finally:
            await runner.cleanup()


@contextmanager
def fault_proxy_in_thread(server_url: str) -> Iterator[FaultProxy]:
    """A proxy for tests without an event loop."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(fault_proxy(server_url)) as proxy:
        yield proxy


def operation_of(request: web.Request, body: bytes) -> str:
    if request.content_type == FORM:
        return dict(_form(body)).get("Action", "")
    return request.headers.get("X-Amz-Target", "").rpartition(".")[2]


def _form(body: bytes) -> list[tuple[str, str]]:
    return parse_qsl(body.decode(), keep_blank_values=True)


# Faults ---------------------------------------------------------------------------------------------------------------


def respond(document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Fault:
    """Respond with this document without forwarding the request."""

    async def fault(request: web.Request, forward: Forward) -> web.Response:
        return web.Response(status=status, body=json.dumps(document), content_type=JSON, headers=headers)

    return fault


def fail(status: int, code: str, **more: Any) -> Fault:
    """Respond with an error without forwarding the request. EC2 errors are XML, all others JSON."""
    xml = f"<Response><Errors><Error><Code>{code}</Code><Message>injected</Message></Error></Errors></Response>"
    as_json = respond({"__type": f"com.amazonaws.test#{code}", "message": "injected", **more}, status=status)

    async def fault(request: web.Request, forward: Forward) -> web.Response:
        if request.content_type == FORM:
            return web.Response(status=status, body=xml, content_type="text/xml")
        return await as_json(request, forward)

    return fault


def after_forwarding(then: Fault) -> Fault:
    """Let the server execute the request, but replace its response by that of another fault."""

    async def fault(request: web.Request, forward: Forward) -> web.Response:
        await forward()
        return await then(request, forward)

    return fault


async def cut_connection(request: web.Request, forward: Forward) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response(status=500)


async def never_respond(request: web.Request, forward: Forward) -> web.Response:
    """Wait until the client closes the connection."""
    await asyncio.Event().wait()
    return web.Response(status=500)


def respond_late(seconds: float) -> Fault:
    """Forward the request at once, but delay the response."""

    async def fault(request: web.Request, forward: Forward) -> web.Response:
        answer = await forward()
        await asyncio.sleep(seconds)
        return answer

    return fault


def hold_until(event: asyncio.Event, containing: bytes) -> Fault:
    """Delay requests that contain these bytes until the event is set."""

    async def fault(request: web.Request, forward: Forward) -> web.Response:
        if containing in await request.read():
            await event.wait()
        return await forward()

    return fault


def respond_together(count: int, containing: bytes) -> Fault:
    """Delay the responses to requests that contain these bytes until there are `count` of them."""
    forwarded = 0
    all_forwarded = asyncio.Event()

    async def fault(request: web.Request, forward: Forward) -> web.Response:
        nonlocal forwarded
        answer = await forward()
        if containing in await request.read():
            forwarded += 1
            if forwarded >= count:
                all_forwarded.set()
            await all_forwarded.wait()
        return answer

    return fault


# Schedules ------------------------------------------------------------------------------------------------------------


class FaultSchedule:
    """A fault for some requests, selected by their operation, and the number of those that it hit.

    Set as `proxy.always[ANY]`.
    """

    def __init__(self, fault: Fault, selects: Callable[[str], bool]) -> None:
        self._fault = fault
        self._selects = selects
        self.hits = 0

    async def __call__(self, request: web.Request, forward: Forward) -> web.Response:
        if not self._selects(operation_of(request, await request.read())):
            return await forward()
        self.hits += 1
        return await self._fault(request, forward)


def first_of_every(total: int, operation: str, fault: Fault, *, hits: int) -> FaultSchedule:
    """Hit the first `hits` of every `total` requests for this operation."""
    count = 0

    def selects(requested: str) -> bool:
        nonlocal count
        count += requested == operation
        return requested == operation and (count - 1) % total < hits

    return FaultSchedule(fault, selects)


def first_per_operation(fault: Fault, *, only: str = "") -> FaultSchedule:
    """Hit the first request of each operation, or of the operation `only`."""
    seen: set[str] = set()

    def selects(requested: str) -> bool:
        new = requested not in seen and only in {"", requested}
        seen.add(requested)
        return new

    return FaultSchedule(fault, selects)
