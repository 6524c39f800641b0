"""What the dashboard's routes answer where something is wrong: a bug, too many pages, somebody who reads nothing."""

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
from remuda.web.dashboard.auth import POLICY
from remuda.web.dashboard.feed import Feed


@asynccontextmanager
async def nothing() -> AsyncIterator[Context]:
    raise Unavailable("there is no store")
    yield


def make_feed() -> Feed:
    return Feed(open_context=nothing, backend="local", every_s=1.0, since_s=60.0, clock=SystemClock(), ids=SystemIds())


def client(feed: Feed, *more: Route) -> httpx.AsyncClient:
    built = build_app(feed, token=None, loopback=True, more=[lambda _: more])
    # As a server does it: what is raised after the answer is the log's.
    transport = httpx.ASGITransport(app=built, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def test_the_answer_to_a_bug_is_guarded_and_says_so() -> None:
    async def stumble(_: Request) -> NoReturn:
        raise ZeroDivisionError("a secret of ours")

    async with client(make_feed(), Route("/api/stumble", stumble)) as opened:
        answer = await opened.get("/api/stumble")
    assert (answer.status_code, answer.headers["content-security-policy"]) == (500, POLICY)
    assert answer.json()["error"]["message"] == "a bug: ZeroDivisionError"
    assert "secret" not in answer.text


async def test_too_many_pages_are_told_so() -> None:
    feed = make_feed()
    feed.watching = MAX_STREAMS
    async with client(feed) as opened:
        answer = await opened.get("/api/events")
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, f"too many pages are open: {MAX_STREAMS}")
    assert feed.watching == MAX_STREAMS


async def test_who_reads_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SEND_S", 0.02)
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
    assert counted[0] == 1, "it counts before anything is sent"
    assert feed.watching == 0
