"""Access control of the dashboard: Host header, token, listening address."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from remuda.domain.errors import UserError
from remuda.web.dashboard.auth import SESSION_COOKIE, AccessToken, is_loopback_host
from remuda.web.dashboard.server import TOKEN_VARIABLE, parse_listen_address, parse_window

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


@pytest.mark.parametrize("text", ["", "soon", "0m", "31d", "-1h", "1y"])
def test_since_must_be_a_duration(text: str) -> None:
    with pytest.raises(UserError, match="--since"):
        parse_window(text)
    assert parse_window("90m") == 5_400


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette.datastructures", None)
    monkeypatch.delitem(sys.modules, "remuda.web.dashboard.auth")
    with pytest.raises(UserError, match="not installed: starlette") as raised:
        parse_listen_address("127.0.0.1", 0, None, {})
    assert raised.value.fix == "install starlette and uvicorn"
