"""Arbitrary external text in output: terminal lines, tables, log lines, and requests to the dashboard."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import MutableMapping
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from rich.table import Table

from remuda.adapters.system.clock import SystemClock
from remuda.cli.output import ConsoleEventLog, Output, error_line, record_line
from remuda.cli.terminal import PlainConsole
from remuda.domain.errors import MAX_MESSAGE, Unavailable, UserError
from remuda.domain.text import quote, sanitize, truncate
from remuda.web.dashboard.app import build_app
from remuda.web.dashboard.auth import AccessToken, is_loopback_host
from remuda.web.dashboard.serialize import ChangeLog
from tests.support.dashboard import feed_without_store
from tests.support.mutations import ESCAPES, LONE, TEXTS, any_json, check_shown, fuzzed
from tests.support.records import NOW

texts = st.sampled_from(TEXTS) | st.text(max_size=40) | st.text(alphabet=ESCAPES + LONE + "a", max_size=10)
octets = texts.map(lambda text: text.encode(errors="replace")) | st.binary(max_size=30)


@fuzzed(100)
@given(texts, st.integers(0, 50))
@example(LONE, 5)
@example("\x9b2J\u2028\u202e", 50)
def test_text(text: str, most: int) -> None:
    check_shown(sanitize(text), 10 * len(text) + 10)
    check_shown(truncate(text, most), most)
    for error in (UserError(text, fix=text), Unavailable(text * 500)):
        check_shown(error.message, MAX_MESSAGE)
        check_shown(error.fix, MAX_MESSAGE)
        assert error_line(NOW, error).isprintable()


@fuzzed()
@given(any_json, st.integers(0, 50))
@example(10**5_000, 50)
def test_quoted_value(value: Any, most: int) -> None:
    check_shown(quote(value, most), most)


@fuzzed()
@given(action=texts, why=texts, name=texts)
@example(action="claim", why=ESCAPES, name="i-1")
def test_event_lines_on_a_terminal(action: str, why: str, name: str) -> None:
    """One printable line per event, without escape sequences."""
    shown = io.StringIO()
    output = Output(as_json=False)
    output._console = PlainConsole(file=shown, width=10_000, soft_wrap=True, force_terminal=False)
    ConsoleEventLog(output, SystemClock()).record(action, why, instance_id=name)
    assert shown.getvalue().count("\n") <= 1
    check_shown(shown.getvalue().rstrip("\n"), 20_000)
    assert record_line(NOW, action, why, {"instance_id": name}).isprintable()


@fuzzed()
@given(st.lists(texts, max_size=3))
def test_tables(values: list[str]) -> None:
    shown = io.StringIO()
    table = Table("name", "why")
    for value in values:
        table.add_row(value, "x")
    PlainConsole(file=shown, width=100, force_terminal=False).print(table)
    for line in shown.getvalue().splitlines():
        assert line.isprintable()


# The dashboard ----------------------------------------------------------------------------------------------------


FEED = feed_without_store()
# Requests must not wait for the first poll.
FEED._first_poll_done.set()
COOKIE = (b"cookie", b"remuda_session=\xff;;=;")
APPS = [build_app(FEED, token=token, loopback=True) for token in (None, AccessToken("t0ken"))]
PATHS = (
    *("/", "/login", "/api/snapshot", "/api/events", "/api/explanation", "/style.css", "/metrics", "/../x"),
    *("/api/%00", "//"),
)
NAMES = (
    *(b"cookie", b"authorization", b"host", b"last-event-id", b"if-none-match", b"sec-fetch-site"),
    b"x-forwarded-proto",
)


async def send_request(app: Any, scope: dict[str, Any], body: bytes) -> int:
    sent: list[MutableMapping[str, Any]] = []
    received = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        return next(received, {"type": "http.disconnect"})

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    FEED.change_log.put("x", "y", "1")
    FEED.change_log.commit()
    async with asyncio.timeout(20):
        await app(scope, receive, send)
    start = next(message for message in sent if message["type"] == "http.response.start")
    return int(start["status"])


@fuzzed(80)
@given(
    which=st.sampled_from([0, 1]),
    method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "OPTIONS", "X"]),
    path=st.sampled_from(PATHS) | texts.map(lambda text: f"/{text}"),
    query=octets | octets.map(lambda octet: b"subject=" + octet) | octets.map(lambda octet: b"since=" + octet),
    headers=st.lists(st.tuples(st.sampled_from(NAMES), octets), max_size=4),
    body=octets | octets.map(lambda octet: b"token=" + octet) | st.just(b"token=" + b"x" * 9_000),
    known=st.booleans(),
)
@example(which=0, method="GET", path="/api/explanation", query=b"subject=%ed%a0%80", headers=[], body=b"", known=True)
@example(which=1, method="POST", path="/login", query=b"", headers=[], body=b"token=%ff%00", known=True)
@example(which=1, method="GET", path="/", query=b"", headers=[COOKIE], body=b"", known=True)
def test_dashboard_request(
    which: int,
    method: str,
    path: str,
    query: bytes,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    known: bool,  # noqa: FBT001 - drawn
) -> None:
    """No request causes a server error; without the token only the login page is served."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": path.encode(errors="replace").decode(),
        "raw_path": path.encode(errors="replace"),
        "query_string": query,
        "headers": [*([(b"host", b"127.0.0.1")] if known else []), *headers],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
    }
    status = asyncio.run(send_request(APPS[which], scope, body))
    assert status != 500
    if which == 1 and path not in {"/", "/login", "/login.js", "/style.css", "/icon.svg"}:
        assert status in {401, 403, 404, 405}


@fuzzed()
@given(texts)
@example("[::1")
@example("[" * 1_000)
@example("127.0.0.1" * 1_000)
def test_host_header_and_event_id(text: str) -> None:
    assert is_loopback_host(text) in {True, False}
    change_log = ChangeLog(process_id="l")
    assert change_log.version_of(text) is None or text.startswith("l-")
    assert change_log.version_of(f"l-{text}") in {None, 0}
    json.loads(change_log.snapshot())
