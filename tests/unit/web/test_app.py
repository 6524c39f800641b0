"""Error handling of the dashboard's routes: internal errors, too many pages, clients that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import httpx
import pytest
from starlette.requests import Request
from starlette.routing import Route

from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.controlplane.context import Context
from remuda.domain.errors import Unavailable
from remuda.web.dashboard import app as routes
from remuda.web.dashboard.app import MAX_STREAMS, build_app
from remuda.web.dashboard.auth import CONTENT_SECURITY_POLICY
from remuda.web.dashboard.feed import Feed


@asynccontextmanager
async def no_store() -> AsyncIterator[Context]:
    raise Unavailable("no store")
    yield


def make_feed() -> Feed:
    return Feed(
        open_context=no_store, backend="local", interval_s=1.0, since_s=60.0, clock=SystemClock(), ids=SystemIds()
    )


def client(feed: Feed, *extra: Route) -> httpx.AsyncClient:
    built = build_app(feed, token=None, loopback=True, extra_routes=[lambda _: extra])
    # Like a server: exceptions after the response only go to the log.
    transport = httpx.ASGITransport(app=built, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def test_internal_error_has_security_headers_and_hides_details() -> None:
    async def fail(_: Request) -> NoReturn:
        raise ZeroDivisionError("a secret")

    async with client(make_feed(), Route("/api/fail", fail)) as opened:
        response = await opened.get("/api/fail")
    assert (response.status_code, response.headers["content-security-policy"]) == (500, CONTENT_SECURITY_POLICY)
    assert response.json()["error"]["message"] == "internal error: ZeroDivisionError"
    assert "secret" not in response.text


async def test_too_many_streams_are_rejected() -> None:
    feed = make_feed()
    feed.watching = MAX_STREAMS
    async with client(feed) as opened:
        response = await opened.get("/api/events")
    assert (response.status_code, response.json()["error"]["message"]) == (
        503,
        f"too many pages are open: {MAX_STREAMS}",
    )
    assert feed.watching == MAX_STREAMS


async def test_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SEND_TIMEOUT_S", 0.02)
    feed = make_feed()
    counted: list[int] = []

    async def stuck(message: MutableMapping[str, Any]) -> None:
        counted.append(feed.watching)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def silent() -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    headers = [(b"host", b"127.0.0.1")]
    scope = {"type": "http", "method": "GET", "path": "/api/events", "query_string": b"", "headers": headers}
    async with asyncio.timeout(30):
        await build_app(feed, token=None, loopback=True)({**scope, "asgi": {"spec_version": "2.3"}}, silent, stuck)
    assert counted[0] == 1, "counted before the first byte is sent"
    assert feed.watching == 0
