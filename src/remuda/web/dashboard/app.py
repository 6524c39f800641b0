"""Routes of the dashboard: page files, snapshot, event stream, explanations and sign-in."""

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

from remuda.cli.rendering.status import explanation_document
from remuda.controlplane.read.explain import check_subject, explain
from remuda.domain.errors import RemudaError, UserError
from remuda.web.dashboard import serialize
from remuda.web.dashboard.auth import LOGIN_PATH, SESSION_COOKIE, AccessControl, AccessToken
from remuda.web.dashboard.feed import Feed

#: Maximum number of event streams open at a time.
MAX_STREAMS = 100
#: Seconds to send one part of a stream; a client that does not read is disconnected after that.
SEND_TIMEOUT_S = 30.0
#: Seconds that a snapshot request waits for the first poll, so that the page does not show an empty pool.
FIRST_POLL_TIMEOUT_S = 15.0
#: Maximum size in bytes of the sign-in form.
MAX_FORM_BYTES = 4_096
#: Lifetime in seconds of the session cookie.
SESSION_LIFETIME_S = 30 * 86_400
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

#: Returns additional routes, which are served behind the same access control.
RouteFactory = Callable[[Feed], Sequence[BaseRoute]]


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


def build_app(
    feed: Feed, *, token: AccessToken | None, loopback: bool, extra_routes: Sequence[RouteFactory] = ()
) -> ASGIApp:
    """Build the ASGI application. Access control wraps everything, responses to internal errors included."""
    app = Starlette(
        routes=[*_routes(feed, token), *(route for make in extra_routes for route in make(feed))],
        exception_handlers={Exception: _internal_error},
    )
    return AccessControl(app, token=token, loopback=loopback)


def _internal_error(_: Request, error: Exception) -> Response:
    return _error_response(500, f"internal error: {type(error).__name__}", "see the dashboard's log")


def _routes(feed: Feed, token: AccessToken | None) -> list[BaseRoute]:
    pages = {f"/{name}": file for name, file in _page_files().items()}
    pages["/"] = pages.pop("/index.html")
    pages[LOGIN_PATH] = pages.pop("/login.html")
    return [
        *(Route(path, _serve_file(file), methods=["GET"]) for path, file in pages.items()),
        Route(LOGIN_PATH, _sign_in(token), methods=["POST"]),
        Route("/api/snapshot", _snapshot(feed), methods=["GET"]),
        Route("/api/events", _events(feed), methods=["GET"]),
        Route("/api/explanation", _explanation(feed), methods=["GET"]),
    ]


# Page files -------------------------------------------------------------------------------------------------------


def _page_files() -> dict[str, _File]:
    found = {}
    for item in files("remuda.web.dashboard").joinpath("page").iterdir():
        suffix = item.name.rpartition(".")[2]
        if suffix in _TYPES:
            content = item.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
            found[item.name] = _File(content, _TYPES[suffix], etag)
    return found


def _serve_file(file: _File) -> Callable[[Request], Response]:
    def serve(request: Request) -> Response:
        headers = {"etag": file.etag, "cache-control": "private, no-cache"}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return serve


# Data -------------------------------------------------------------------------------------------------------------


def _snapshot(feed: Feed) -> Callable[[Request], object]:
    cached: tuple[str, bytes] = ("", b"")

    def compressed() -> bytes:
        """Return the compressed snapshot, made once per version for all clients."""
        nonlocal cached
        if cached[0] != feed.change_log.tag:
            content = gzip.compress(feed.change_log.snapshot().encode(), compresslevel=1, mtime=0)
            cached = (feed.change_log.tag, content)
        return cached[1]

    async def serve(request: Request) -> Response:
        with feed.watched():
            await feed.first_poll(FIRST_POLL_TIMEOUT_S)
        headers = {"etag": f'"{feed.change_log.tag}"', "cache-control": "private, no-cache", "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(compressed(), media_type="application/json", headers=headers)
        return Response(feed.change_log.snapshot(), media_type="application/json", headers=headers)

    return serve


def _events(feed: Feed) -> Callable[[Request], object]:
    # Most clients are at the same version, so the last encoded change is cached with its range of versions.
    cached: tuple[tuple[int, int], str] = ((-1, -1), "")

    def changes(since: int) -> str:
        nonlocal cached
        versions = (since, feed.change_log.version)
        if cached[0] != versions:
            cached = (versions, feed.change_log.changes(since))
        return cached[1]

    async def stream(known_tag: str) -> AsyncIterator[str]:
        since = feed.change_log.version_of(known_tag)
        yield "retry: 1000\n\n"
        if since is None:
            # Tells the client to fetch a snapshot before it applies changes.
            since = feed.change_log.version
            yield _event("reset", "{}", feed.change_log.tag)
        yield _event("update", _poll_times(feed))
        while not feed.closed:
            if not await feed.newer_than(since):
                yield _event("update", _poll_times(feed))
                continue
            # Merges all versions that were committed while the previous event was being sent.
            text, tag, reached = changes(since), feed.change_log.tag, feed.change_log.version
            yield _event("change", f'{{"since":{since},"poll":{_poll_times(feed)},"changes":{text}}}', tag)
            since = reached

    async def serve(request: Request) -> Response:
        if feed.watching >= MAX_STREAMS:
            return _error_response(503, f"too many pages are open: {feed.watching}", "close one of them")
        known_tag = request.headers.get("last-event-id") or request.query_params.get("since", "")
        return _EventStream(feed, stream(known_tag))

    return serve


class _EventStream(StreamingResponse):
    """Counts as a watched page while it is open, and ends if the client stops reading."""

    def __init__(self, feed: Feed, content: AsyncIterator[str]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_timeout(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        with self._feed.watched(), suppress(TimeoutError, ClientDisconnect):
            await super().__call__(scope, receive, send_with_timeout)


def _event(name: str, data: str, tag: str = "") -> str:
    return f"event: {name}\n{f'id: {tag}{chr(10)}' if tag else ''}data: {data}\n\n"


def _poll_times(feed: Feed) -> str:
    """Return the server's time and the time of the last successful poll."""
    return serialize.encode(
        {"now": serialize.milliseconds(feed.now), "last_success": serialize.milliseconds(feed.last_success)}
    )


def _explanation(feed: Feed) -> Callable[[Request], object]:
    async def serve(request: Request) -> Response:
        subject = request.query_params.get("subject", "").strip()
        try:
            explanation = await explain(feed.context, check_subject(subject))
        except UserError as error:
            return _error_response(404, error.message, error.fix)
        except RemudaError as error:
            return _error_response(503, error.message, error.fix)
        return JSONResponse(explanation_document(explanation))

    return serve


# Sign-in ----------------------------------------------------------------------------------------------------------


def _sign_in(token: AccessToken | None) -> Callable[[Request], object]:
    async def serve(request: Request) -> Response:
        submitted = await _submitted_token(request)
        if token is None:
            return RedirectResponse("/", status_code=303)
        if submitted is None or not token.matches(submitted):
            return RedirectResponse(f"{LOGIN_PATH}?invalid=1", status_code=303)
        response = RedirectResponse("/", status_code=303)
        # A TLS proxy sets the header. A client that forges it only gets a cookie that its browser restricts to TLS.
        forwarded = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
        secure = "https" in {request.url.scheme, forwarded}
        response.set_cookie(
            SESSION_COOKIE,
            token.session,
            max_age=SESSION_LIFETIME_S,
            path="/",
            httponly=True,
            samesite="strict",
            secure=secure,
        )
        return response

    return serve


async def _submitted_token(request: Request) -> str | None:
    """Read the token from the form, at most `MAX_FORM_BYTES` of it."""
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_FORM_BYTES:
                return None
    except ClientDisconnect:
        return None
    values = parse_qs(body.decode("utf-8", errors="replace")).get("token", [])
    return values[0].strip() if values else None


def _error_response(code: int, message: str, fix: str = "") -> Response:
    return JSONResponse({"error": {"message": message, "fix": fix or None}}, status_code=code)
