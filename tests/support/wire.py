"""A proxy before an AWS server: it counts what goes over the wire and does there what networks and services do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import aiohttp
from aiohttp import web

JSON = "application/x-amz-json-1.0"
#: In place of an operation: all that have no fault of their own.
ANY = "*"
#: Generous: nothing waits for it unless something is broken.
LIMIT_S = 60.0

#: What happens to one request: it may be sent on, and must be answered or cut off.
Fault = Callable[[web.Request, Callable[[], Awaitable[web.Response]]], Awaitable[web.Response]]


def says(status: int, code: str, **more: Any) -> Fault:
    """An error in place of an answer; the server hears nothing."""
    return answers({"__type": f"com.amazonaws.test#{code}", "message": "injected", **more}, status=status)


def answers(document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Fault:
    async def fault(request: web.Request, forward: Callable[[], Awaitable[web.Response]]) -> web.Response:
        return web.Response(status=status, body=json.dumps(document), content_type=JSON, headers=headers)

    return fault


def after_success(then: Fault) -> Fault:
    """The server does what it was asked to; the answer is another."""

    async def fault(request: web.Request, forward: Callable[[], Awaitable[web.Response]]) -> web.Response:
        await forward()
        return await then(request, forward)

    return fault


async def cut(request: web.Request, forward: Callable[[], Awaitable[web.Response]]) -> web.Response:
    """The connection breaks."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response(status=500)


async def hang(request: web.Request, forward: Callable[[], Awaitable[web.Response]]) -> web.Response:
    """No answer: it ends when whoever asked has gone."""
    await asyncio.Event().wait()
    return web.Response(status=500)


def quarantined_until(event: asyncio.Event, mention: bytes) -> Fault:
    """A request that mentions this is sent on only then."""

    async def fault(request: web.Request, forward: Callable[[], Awaitable[web.Response]]) -> web.Response:
        if mention in await request.read():
            await event.wait()
        return await forward()

    return fault


def together(count: int, mention: bytes) -> Fault:
    """So many requests that mention this are answered at the same time."""
    done: list[None] = []
    all_done = asyncio.Event()

    async def fault(request: web.Request, forward: Callable[[], Awaitable[web.Response]]) -> web.Response:
        answer = await forward()
        if mention in await request.read():
            done.append(None)
            if len(done) >= count:
                all_done.set()
            await all_done.wait()
        return answer

    return fault


#: What EC2 is asked with.
FORM = "application/x-www-form-urlencoded"


def operation_of(request: web.Request, body: bytes) -> str:
    if request.content_type == FORM:
        return dict(_form(body)).get("Action", "")
    return request.headers.get("X-Amz-Target", "").rpartition(".")[2]


def _form(body: bytes) -> list[tuple[str, str]]:
    return parse_qsl(body.decode(), keep_blank_values=True)


@dataclass(kw_only=True)
class Wire:
    url: str = ""
    #: By operation, such as `UpdateItem`: one for each of the next requests.
    faults: dict[str, deque[Fault]] = field(default_factory=dict)
    #: By operation: for every request, when those above are used up.
    always: dict[str, Fault] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    #: The documents that were sent, by operation.
    sent: dict[str, list[Any]] = field(default_factory=dict)

    def then(self, operation: str, *faults: Fault) -> None:
        self.faults.setdefault(operation, deque()).extend(faults)

    def next_fault(self, operation: str) -> Fault | None:
        waiting = self.faults.get(operation)
        return waiting.popleft() if waiting else self.always.get(operation, self.always.get(ANY))


@asynccontextmanager
async def wire(server_url: str) -> AsyncIterator[Wire]:
    between = Wire()
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def handle(request: web.Request) -> web.Response:
            body = await request.read()
            operation = operation_of(request, body)
            between.requests[operation] += 1
            sent = dict(_form(body)) if request.content_type == FORM else json.loads(body or b"null")
            between.sent.setdefault(operation, []).append(sent)

            async def forward() -> web.Response:
                headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
                url = f"{server_url}{request.path_qs}"
                async with session.request(request.method, url, data=body, headers=headers) as answer:
                    kept = {name: value for name, value in answer.headers.items() if name.lower().startswith("x-amz")}
                    return web.Response(
                        status=answer.status, body=await answer.read(), content_type=answer.content_type, headers=kept
                    )

            fault = between.next_fault(operation)
            return await (fault(request, forward) if fault else forward())

        application = web.Application(client_max_size=2**24)
        application.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        between.url = f"http://{host}:{port}"
        try:
            yield between
        finally:
            await runner.cleanup()


@contextmanager
def wire_in_a_thread(server_url: str) -> Iterator[Wire]:
    """The same for tests without an event loop, of other processes."""
    ready = threading.Event()
    made: list[Wire] = []
    stop: list[Callable[[], object]] = []

    async def serve() -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(ended.set))
        async with wire(server_url) as between:
            made.append(between)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(LIMIT_S)
    try:
        yield made[0]
    finally:
        stop[0]()
        thread.join(LIMIT_S)
