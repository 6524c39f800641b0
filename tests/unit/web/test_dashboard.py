"""The dashboard: access control, error handling of its routes, its change log and its page files."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import Route

from remuda.controlplane.read.feed import KnownInstance
from remuda.domain.errors import UserError
from remuda.domain.instance import LIVE, RetireReason, State
from remuda.domain.reporting.timeline import MachinePhase
from remuda.web.dashboard import app as routes
from remuda.web.dashboard import connections, serialize
from remuda.web.dashboard.app import MAX_STREAMS, build_app
from remuda.web.dashboard.auth import CONTENT_SECURITY_POLICY, SESSION_COOKIE, AccessToken, is_loopback_host
from remuda.web.dashboard.feed import Feed
from remuda.web.dashboard.serialize import PHASES, ChangeLog
from remuda.web.dashboard.server import TOKEN_VARIABLE, ListenAddress, listen, parse_listen_address
from tests.support.dashboard import feed_without_store
from tests.support.mutations import fuzzed
from tests.support.records import LONG_S, at, instance

TEXT = "0123456789abcdef"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8421", "LOCALHOST", "[::1]:8421", "127.9.9.9:1"])
def test_loopback_host_headers(host: str) -> None:
    assert is_loopback_host(host)


@pytest.mark.parametrize(
    "host", ["", "evil.example", "127.0.0.1.evil.example:8421", "localhost.evil.example", "192.168.0.1", "[::2]", "["]
)
def test_other_host_headers_are_not_loopback(host: str) -> None:
    assert not is_loopback_host(host)


def test_token_is_accepted_as_bearer_header_or_session_cookie_only() -> None:
    token = AccessToken(TEXT)
    assert token.admits(Headers({"authorization": f"Bearer {TEXT}"}))
    assert token.admits(Headers({"authorization": f"bearer {TEXT}"}))
    assert token.admits(Headers({"cookie": f"other=1; {SESSION_COOKIE}={token.session}"}))
    for odd in ('{"json": [1, 2]}', "a b=c d", "no-value", 'open="quote', "a@b=(c)", "=", "x=\x01"):
        assert token.admits(Headers({"cookie": f"{odd}; {SESSION_COOKIE}={token.session}; {odd}"})), odd
    for headers in (
        {},
        {"authorization": f"Basic {TEXT}"},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {TEXT}x"},
        {"authorization": f"Bearer {token.session}"},
        {"cookie": f"{SESSION_COOKIE}={TEXT}"},
        {"cookie": f"{SESSION_COOKIE}="},
        {"cookie": '{SESSION_COOKIE}="\x01'},
    ):
        assert not token.admits(Headers(headers))
    assert TEXT not in repr(token) + token.session


def test_session_is_invalid_for_another_token() -> None:
    assert not AccessToken(TEXT).admits(Headers({"cookie": f"{SESSION_COOKIE}={AccessToken('another' * 3).session}"}))


def test_other_addresses_than_loopback_require_a_token(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):  # noqa: S104 - rejected without a token
        with pytest.raises(UserError, match="requires a token"):
            parse_listen_address(host, 0, None, {})
        assert parse_listen_address(host, 0, None, {TOKEN_VARIABLE: TEXT}).token is not None
    assert parse_listen_address("::1", 0, None, {}).token is None


@pytest.mark.parametrize("text", ["", "short", "with a space inside it", "ünicode-is-no-token", "x" * 1_025])
def test_invalid_token_is_rejected_without_being_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    for name, environ in ((str(file), {}), (None, {TOKEN_VARIABLE: text})):
        with pytest.raises(UserError) as raised:
            parse_listen_address("127.0.0.1", 0, name, environ)
        assert not text or text not in raised.value.message + raised.value.fix


def test_token_file_must_be_private(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TEXT}\n")
    file.chmod(0o644)
    with pytest.raises(UserError, match="can be read by other users"):
        parse_listen_address("127.0.0.1", 0, str(file), {})
    file.chmod(0o600)
    address = parse_listen_address("127.0.0.1", 0, str(file), {TOKEN_VARIABLE: "another-token-that-is-not-used"})
    assert address.token is not None
    assert address.token.matches(TEXT)
    with pytest.raises(UserError, match="cannot be read"):
        parse_listen_address("127.0.0.1", 0, str(tmp_path / "none"), {})


@pytest.mark.parametrize("host", ["", "example.com", "127.0.0.1:80", "999.1.1.1", "http://127.0.0.1"])
def test_host_must_be_an_ip_address(host: str) -> None:
    with pytest.raises(UserError, match="--host"):
        parse_listen_address(host, 0, None, {})


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette.datastructures", None)
    monkeypatch.delitem(sys.modules, "remuda.web.dashboard.auth")
    with pytest.raises(UserError, match="not installed: starlette") as raised:
        parse_listen_address("127.0.0.1", 0, None, {})
    assert raised.value.fix == "install starlette and uvicorn"


def client(feed: Feed, *extra: Route) -> httpx.AsyncClient:
    built = build_app(feed, token=None, loopback=True, extra_routes=[lambda _: extra])
    # Like a server: exceptions after the response only go to the log.
    transport = httpx.ASGITransport(app=built, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def test_internal_error_has_security_headers_and_hides_details() -> None:
    async def fail(_: Request) -> NoReturn:
        raise ZeroDivisionError("a secret")

    async with client(feed_without_store(), Route("/api/fail", fail)) as opened:
        response = await opened.get("/api/fail")
    assert (response.status_code, response.headers["content-security-policy"]) == (500, CONTENT_SECURITY_POLICY)
    assert response.json()["error"]["message"] == "internal error: ZeroDivisionError"
    assert "secret" not in response.text


async def test_too_many_streams_are_rejected() -> None:
    feed = feed_without_store()
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
    feed = feed_without_store()
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


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_snapshot_is_new_after_each_change(encoding: str) -> None:
    feed = feed_without_store()
    feed._first_poll_done.set()
    async with client(feed) as opened:
        for number in ("1", "2"):
            feed.change_log.put("x", "y", number)
            feed.change_log.commit()
            response = await opened.get("/api/snapshot", headers={"accept-encoding": encoding})
            assert response.headers.get("content-encoding", "identity") == encoding
            assert response.text == feed.change_log.snapshot()
            assert response.headers["etag"] == f'"{feed.change_log.tag}"'


# Connections: real sockets ---------------------------------------------------------------------------------------


@asynccontextmanager
async def served(feed: Feed) -> AsyncIterator[int]:
    """The port of a server with the dashboard's limits."""
    listener = listen(ListenAddress(host="127.0.0.1", port=0, token=None))
    server = connections.make_server(build_app(feed, token=AccessToken(TEXT), loopback=True))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def status_of(port: int) -> int:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LONG_S) as opened:
        return (await opened.get("/login")).status_code


#: Clients that never complete a request: nothing, half of the headers, half of a form, half of a second request.
INCOMPLETE = (
    b"",
    b"GET /login HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\ntoken=",
    b"GET /login HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /lo",
)


@pytest.mark.parametrize("sent", INCOMPLETE, ids=["nothing", "headers", "form", "second request"])
async def test_incomplete_request_is_ended(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", 0.2)
    async with served(feed_without_store()) as port, asyncio.timeout(LONG_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        with suppress(ConnectionError):
            await reader.read()
        writer.close()


@pytest.mark.parametrize("sent", INCOMPLETE, ids=["nothing", "headers", "form", "second request"])
async def test_incomplete_requests_lock_nobody_out(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """More connections than the server's limit, opened before anybody's timeout."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 20)
    monkeypatch.setattr(connections, "MAX_WAITING", 10)
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", 1_000.0)
    async with served(feed_without_store()) as port, asyncio.timeout(LONG_S):
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        for _, writer in opened:
            writer.write(sent)
        # The oldest connection ends because of the others: the server has seen all of them.
        with suppress(ConnectionError):
            await opened[0][0].read()
        assert await status_of(port) == 200
        for _, writer in opened:
            writer.close()


async def test_open_stream_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request is complete, so other clients do not end it, and neither does the timeout."""
    monkeypatch.setattr(connections, "MAX_WAITING", 1)
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", 0.1)
    feed = feed_without_store()
    async with served(feed) as port, asyncio.timeout(LONG_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TEXT}\r\n\r\n"
        writer.write(head.encode())
        await reader.readuntil(b"event: update")
        for _ in range(3):
            silent, other = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionError):
                await silent.read()
            other.close()
        feed.change_log.put("x", "y", "1")
        feed.change_log.commit()
        feed._wake_pages()
        await reader.readuntil(b"event: change")
        writer.close()
        feed.close()


# Change log: a client that applies the changes, however seldom, ends with the snapshot --------------------------------


Kinds = dict[str, dict[str, Any]]

STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("123"), st.one_of(st.none(), st.integers(0, 3)), st.booleans()),
    max_size=40,
)


def kinds(text: str) -> Kinds:
    return {name: items for name, items in json.loads(text).items() if name not in {"version", "tag"}}


def apply_changes(known: Kinds, text: str) -> None:
    for kind, items in kinds(text).items():
        for name, value in items.items():
            if value is None:
                known.get(kind, {}).pop(name, None)
            else:
                known.setdefault(kind, {})[name] = value


def without_empty(known: Kinds) -> Kinds:
    return {kind: items for kind, items in known.items() if items}


@fuzzed()
@given(steps=STEPS, intervals=st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_a_slow_client_gets_the_newest_text_of_every_item(
    steps: list[tuple[str, str, int | None, bool]], intervals: list[int]
) -> None:
    log = ChangeLog(process_id="x")
    known: Kinds = {}
    at = 0
    for number, (kind, name, value, commit) in enumerate(steps):
        if value is None:
            log.drop(kind, name)
        else:
            log.put(kind, name, str(value))
        if commit:
            log.commit()
        if commit and number % (intervals[number % len(intervals)] + 1) == 0:
            apply_changes(known, log.changes(at))
            at = log.version
    log.commit()
    apply_changes(known, log.changes(at))
    assert without_empty(known) == kinds(log.snapshot())


def test_unchanged_items_do_not_make_a_version() -> None:
    log = ChangeLog(process_id="x")
    log.put("a", "1", "5")
    assert log.commit()
    log.put("a", "1", "5")
    log.drop("a", "2")
    assert not log.commit()
    assert log.tag == "x-1"


@pytest.mark.parametrize("tag", ["", "x", "y-1", "x-2", "x--1", "x-1.0", "x-" + "9" * 40, "x-٣"])
def test_unknown_tags_have_no_version(tag: str) -> None:
    log = ChangeLog(process_id="x")
    log.put("a", "1", "5")
    log.commit()
    assert log.version_of(tag) is None
    assert log.version_of("x-1") == 1


def test_old_removals_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialize, "MAX_TOMBSTONES", 4)
    log = ChangeLog(process_id="x")
    for number in range(12):
        log.put("a", str(number), "1")
        log.commit()
        log.drop("a", str(number))
        log.commit()
    assert log.version_of("x-1") is None
    recent = log.version_of(f"x-{log.version - 1}")
    assert recent is not None
    assert kinds(log.changes(recent)) == {"a": {"11": None}}


def test_names_are_escaped() -> None:
    log = ChangeLog(process_id="x")
    name = 'a"},"facts":{"error":"injected\n'
    log.put("instances", name, "1")
    log.commit()
    assert kinds(log.snapshot()) == {"instances": {name: 1}}
    assert "\n" not in log.snapshot()


def test_only_live_instances_are_in_quarantine() -> None:
    marked = set()
    for state in State:
        record = instance(state=state, quarantined_until=at(60), retire_reason=RetireReason.QUARANTINED)
        text = serialize.instance_text(
            KnownInstance(instance=record, history=None), now=at(0), busy=False, agent_dead=False
        )
        if json.loads(text)["quarantined_until"]:
            marked.add(state)
    assert marked == LIVE - {State.TERMINATING}


# Page files: complete, self-contained, and without ways to turn a name into markup ------------------------------------


PAGE = files("remuda.web.dashboard").joinpath("page")
TEXTS = {item.name: item.read_text() for item in PAGE.iterdir()}
SCRIPTS = sorted(name for name in TEXTS if name.endswith(".js"))
PAGES = sorted(name for name in TEXTS if name.endswith(".html"))
#: Functions and attributes that turn text into markup or code.
UNSAFE = (
    *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "createContextualFragment", "DOMParser"),
    *("eval(", "new Function", "setHTML", "srcdoc", 'setAttribute("style"', "javascript:"),
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_insert_names_as_text_only(script: str) -> None:
    assert [name for name in UNSAFE if name in TEXTS[script]] == []


@pytest.mark.parametrize("name", PAGES)
def test_pages_have_no_inline_script_or_style(name: str) -> None:
    text = TEXTS[name]
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", text) == []
    assert all(body.strip() == "" for body in re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL))
    assert text.startswith('<!doctype html>\n<html lang="en">')


def test_pages_use_no_external_resources() -> None:
    for name, text in TEXTS.items():
        found = [url for url in re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", text) if "www.w3.org" not in url]
        assert found == [], name
    wanted = {path for text in TEXTS.values() for path in re.findall(r'(?:src|href)="/([\w.]+)"', text)}
    wanted |= {path for text in TEXTS.values() for path in re.findall(r'from "\./([\w.]+)"', text)}
    assert wanted <= set(TEXTS)
    assert set(TEXTS) - wanted == {"index.html", "login.html"}


def test_phases_of_page_and_domain_are_equal() -> None:
    (listed,) = re.findall(r"export const PHASES = \[(.*?)\]", TEXTS["model.js"])
    assert (
        re.findall(r'"(\w+)"', listed) == [phase.value for phase in PHASES] == [phase.value for phase in MachinePhase]
    )
    (renamed,) = re.findall(r"const PHASE_OF = \{(.*?)\}", TEXTS["model.js"])
    words = {*re.findall(r"(\w+):", renamed), *(phase.value for phase in MachinePhase)}
    assert {state.value for state in State} <= words


def test_every_element_used_by_scripts_exists() -> None:
    used = {name for script in SCRIPTS for name in re.findall(r'find\("([\w-]+)"\)', TEXTS[script])}
    existing = set(re.findall(r'\sid="([\w-]+)"', TEXTS["index.html"]))
    assert used <= existing


def test_footer_is_constant() -> None:
    found = re.search(r"<footer.*?</footer>", TEXTS["index.html"], re.DOTALL)
    assert found is not None
    assert "id=" not in found.group()


def test_docs_show_every_picture_and_none_is_large() -> None:
    docs = Path(__file__).parents[3] / "docs"
    shown = set(re.findall(r"\.\./pictures/([\w.-]+)", (docs / "howto" / "dashboard.md").read_text()))
    sizes = {file.name: file.stat().st_size for file in (docs / "pictures").iterdir()}
    assert shown == set(sizes)
    assert all(size < 200_000 for size in sizes.values())
    assert sum(sizes.values()) < 1_500_000
