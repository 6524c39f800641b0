"""The routes: the page's files, a snapshot, a stream of changes, stories, and the way in."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from remuda.cli.rendering.explanation import story_document
from remuda.controlplane.read.explain import check_subject, explain
from remuda.domain.errors import RemudaError, UserError
from remuda.web.dashboard import serialize
from remuda.web.dashboard.auth import COOKIE, LOGIN, Guard, Token
from remuda.web.dashboard.feed import Feed

#: At most so many streams at a time.
MAX_STREAMS = 100
#: How long one part of a stream may take to be sent: who reads nothing is let go.
SEND_S = 30.0
#: How long a first view waits for the first look: an empty page would say that nothing lives.
FIRST_LOOK_S = 15.0
#: A token's form is not longer.
MAX_FORM = 4_096
SESSION_S = 30 * 86_400
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

#: Adds routes of its own to the page's: they stand behind the same guard.
MoreRoutes = Callable[[Feed], Sequence[BaseRoute]]


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    tag: str


def build_app(feed: Feed, *, token: Token | None, loopback: bool, more: Sequence[MoreRoutes] = ()) -> ASGIApp:
    """The guard is around all of it, the answer to a bug included."""
    app = Starlette(
        routes=[*_routes(feed, token), *(route for make in more for route in make(feed))],
        exception_handlers={Exception: _stumbled},
    )
    return Guard(app, token=token, loopback=loopback)


def _stumbled(_: Request, error: Exception) -> Response:
    return _refused(500, f"a bug: {type(error).__name__}", "the dashboard's log says more")


def _routes(feed: Feed, token: Token | None) -> list[BaseRoute]:
    """All of them stand behind the guard. What others add comes by `more`: a page of metrics made by an `Observer`."""
    pages = {f"/{name}": file for name, file in _page_files().items()}
    pages["/"] = pages.pop("/index.html")
    pages[LOGIN] = pages.pop("/login.html")
    return [
        *(Route(path, _serve_file(file), methods=["GET"]) for path, file in pages.items()),
        Route(LOGIN, _sign_in(token), methods=["POST"]),
        Route("/api/snapshot", _snapshot(feed), methods=["GET"]),
        Route("/api/events", _events(feed), methods=["GET"]),
        Route("/api/story", _story(feed), methods=["GET"]),
    ]


# The page's files -------------------------------------------------------------------------------------------------


def _page_files() -> dict[str, _File]:
    found = {}
    for item in files("remuda.web.dashboard").joinpath("page").iterdir():
        kind = item.name.rpartition(".")[2]
        if kind in _TYPES:
            content = item.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
            found[item.name] = _File(content, _TYPES[kind], tag)
    return found


def _serve_file(file: _File) -> Callable[[Request], Response]:
    def serve(request: Request) -> Response:
        headers = {"etag": file.tag, "cache-control": "private, no-cache"}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return serve


# What is shown ----------------------------------------------------------------------------------------------------


def _snapshot(feed: Feed) -> Callable[[Request], object]:
    kept: dict[str, tuple[str, bytes]] = {}

    def packed() -> bytes:
        """Made once a version, whoever asks."""
        tag, content = kept.get("", ("", b""))
        if tag != feed.board.tag:
            content = gzip.compress(feed.board.snapshot().encode(), compresslevel=1, mtime=0)
            kept[""] = (feed.board.tag, content)
        return content

    async def serve(request: Request) -> Response:
        with feed.watched():
            await feed.first_look(FIRST_LOOK_S)
        headers = {"etag": f'"{feed.board.tag}"', "cache-control": "private, no-cache", "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(packed(), media_type="application/json", headers=headers)
        return Response(feed.board.snapshot(), media_type="application/json", headers=headers)

    return serve


def _events(feed: Feed) -> Callable[[Request], object]:
    # Clients are mostly at the same version: what they get is encoded once.
    last: dict[str, tuple[tuple[int, int], str]] = {}

    def changes(since: int) -> str:
        span = (since, feed.board.version)
        if last.get("", ((-1, -1), ""))[0] != span:
            last[""] = (span, feed.board.changes(since))
        return last[""][1]

    async def stream(asked: str) -> AsyncIterator[str]:
        since = feed.board.version_of(asked)
        yield "retry: 1000\n\n"
        if since is None:
            # It has what cannot be continued from: it takes a snapshot, and goes on from there.
            since = feed.board.version
            yield _event("reset", "{}", feed.board.tag)
        yield _event("look", _look(feed))
        while not feed.closed:
            if not await feed.newer_than(since):
                yield _event("look", _look(feed))
                continue
            # What came while the last one was being sent goes with this one.
            text, tag, reached = changes(since), feed.board.tag, feed.board.version
            yield _event("change", f'{{"since":{since},"look":{_look(feed)},"board":{text}}}', tag)
            since = reached

    async def serve(request: Request) -> Response:
        if feed.watching >= MAX_STREAMS:
            return _refused(503, f"too many pages are open: {feed.watching}", "close one of them")
        asked = request.headers.get("last-event-id") or request.query_params.get("since", "")
        return _Stream(feed, stream(asked))

    return serve


class _Stream(StreamingResponse):
    """Counts from its beginning to its end, and does not wait for ever for who reads nothing."""

    def __init__(self, feed: Feed, content: AsyncIterator[str]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        with self._feed.watched(), suppress(TimeoutError, ClientDisconnect):
            await super().__call__(scope, receive, send_in_time)


def _event(name: str, data: str, tag: str = "") -> str:
    return f"event: {name}\n{f'id: {tag}{chr(10)}' if tag else ''}data: {data}\n\n"


def _look(feed: Feed) -> str:
    """When the store was last read well, and whose clock says so."""
    return serialize.encode({"now": serialize.milliseconds(feed.now), "good": serialize.milliseconds(feed.last_good)})


def _story(feed: Feed) -> Callable[[Request], object]:
    async def serve(request: Request) -> Response:
        subject = request.query_params.get("of", "").strip()
        try:
            story = await explain(feed.context, check_subject(subject))
        except UserError as error:
            return _refused(404, error.message, error.fix)
        except RemudaError as error:
            return _refused(503, error.message, error.fix)
        return JSONResponse(story_document(story))

    return serve


# The way in -------------------------------------------------------------------------------------------------------


def _sign_in(token: Token | None) -> Callable[[Request], object]:
    async def serve(request: Request) -> Response:
        given = await _given_token(request)
        if token is None:
            return RedirectResponse("/", status_code=303)
        if given is None or not token.is_given(given):
            return RedirectResponse(f"{LOGIN}?refused=1", status_code=303)
        response = RedirectResponse("/", status_code=303)
        # A proxy that speaks TLS says so. Whoever lies here keeps a cookie that is sent by TLS alone.
        forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
        secure = "https" in {request.url.scheme, forwarded}
        response.set_cookie(
            COOKIE, token.session, max_age=SESSION_S, path="/", httponly=True, samesite="strict", secure=secure
        )
        return response

    return serve


async def _given_token(request: Request) -> str | None:
    """Of a form, which is read only as far as a form may go."""
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_FORM:
                return None
    except ClientDisconnect:
        return None
    given = parse_qs(body.decode("utf-8", errors="replace")).get("token", [])
    return given[0].strip() if given else None


def _refused(code: int, message: str, fix: str = "") -> Response:
    return JSONResponse({"error": {"message": message, "fix": fix or None}}, status_code=code)
