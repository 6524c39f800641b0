"""Who may see the dashboard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from remuda.domain.errors import UserError
from remuda.web.dashboard.auth import COOKIE, Token, names_loopback
from remuda.web.dashboard.command import parse_window
from remuda.web.dashboard.server import VARIABLE, find_place

TEXT = "0123456789abcdef"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8421", "LOCALHOST", "[::1]:8421", "127.9.9.9:1"])
def test_this_machine_is_known_by_its_names(host: str) -> None:
    assert names_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "evil.example", "127.0.0.1.evil.example:8421", "localhost.evil.example", "192.168.0.1", "[::2]", "["]
)
def test_other_names_that_lead_here_are_refused(host: str) -> None:
    assert not names_loopback(host)


def test_a_token_admits_by_header_and_by_session_alone() -> None:
    token = Token(TEXT)
    assert token.admits(Headers({"authorization": f"Bearer {TEXT}"}))
    assert token.admits(Headers({"authorization": f"bearer {TEXT}"}))
    assert token.admits(Headers({"cookie": f"other=1; {COOKIE}={token.session}"}))
    for odd in ('{"json": [1, 2]}', "a b=c d", "no-value", 'open="quote', "a@b=(c)", "=", "x=\x01"):
        assert token.admits(Headers({"cookie": f"{odd}; {COOKIE}={token.session}; {odd}"})), odd
    for headers in (
        {},
        {"authorization": f"Basic {TEXT}"},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {TEXT}x"},
        {"authorization": f"Bearer {token.session}"},
        {"cookie": f"{COOKIE}={TEXT}"},
        {"cookie": f"{COOKIE}="},
        {"cookie": '{COOKIE}="\x01'},
    ):
        assert not token.admits(Headers(headers))
    assert TEXT not in repr(token) + token.session


def test_a_session_is_worth_nothing_with_another_token() -> None:
    assert not Token(TEXT).admits(Headers({"cookie": f"{COOKIE}={Token('another' * 3).session}"}))


def test_elsewhere_there_must_be_a_token(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):  # noqa: S104 - what is refused
        with pytest.raises(UserError, match="there is no token"):
            find_place(host, 0, None, {})
        assert find_place(host, 0, None, {VARIABLE: TEXT}).token is not None
    assert find_place("::1", 0, None, {}).token is None


@pytest.mark.parametrize("text", ["", "short", "with a space inside it", "ünicode-is-no-token", "x" * 1_025])
def test_a_token_that_will_not_do_is_refused_unseen(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    for name, environ in ((str(file), {}), (None, {VARIABLE: text})):
        with pytest.raises(UserError) as refused:
            find_place("127.0.0.1", 0, name, environ)
        assert not text or text not in refused.value.message + refused.value.fix


def test_a_token_file_is_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TEXT}\n")
    file.chmod(0o644)
    with pytest.raises(UserError, match="can be read by others"):
        find_place("127.0.0.1", 0, str(file), {})
    file.chmod(0o600)
    place = find_place("127.0.0.1", 0, str(file), {VARIABLE: "another-token-that-is-not-used"})
    assert place.token is not None
    assert place.token.is_given(TEXT)
    with pytest.raises(UserError, match="cannot be read"):
        find_place("127.0.0.1", 0, str(tmp_path / "none"), {})


@pytest.mark.parametrize("host", ["", "example.com", "127.0.0.1:80", "999.1.1.1", "http://127.0.0.1"])
def test_a_host_is_an_address(host: str) -> None:
    with pytest.raises(UserError, match="--host"):
        find_place(host, 0, None, {})


@pytest.mark.parametrize("text", ["", "soon", "0m", "31d", "-1h", "1y"])
def test_how_far_back_it_goes_is_a_duration(text: str) -> None:
    with pytest.raises(UserError, match="--since"):
        parse_window(text)
    assert parse_window("90m") == 5_400


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette.datastructures", None)
    monkeypatch.delitem(sys.modules, "remuda.web.dashboard.auth")
    with pytest.raises(UserError, match="not installed: starlette") as refused:
        find_place("127.0.0.1", 0, None, {})
    assert refused.value.fix == "install starlette and uvicorn"
