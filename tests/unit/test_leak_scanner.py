"""The leak scanner finds credentials in all encodings; errors quote GitHub's response, never the credential."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from base64 import b64encode
from datetime import UTC, datetime
from urllib.parse import quote

import pytest

from remuda.adapters.github.responses import translate
from remuda.http import ClientResponse
from tests.support.leak_scanner import LeakScanner, ObservedProcesses

TOKEN = 'ghs_A1b2+C3d4/E5f6"G7h8\\I9j0&K1l2M3n4O5p6'
PEM = (
    "-----BEGIN PRIVATE KEY-----\n"
    + "\n".join(f"{number:02d}" * 32 for number in range(11, 41))
    + "\n-----END PRIVATE KEY-----\n"
)
LOG = "2026-01-01T00:00:00Z refresh tokens for octo/repo, 3 machines, sha256:" + "0123456789abcdef" * 4

LEAKS = {
    "plain": f"Authorization: Bearer {TOKEN}",
    "in bytes": f"{TOKEN}".encode(),
    "in a url": f"https://x-access-token:{quote(TOKEN, safe='')}@github.com",
    "in json": json.dumps({"token": TOKEN}),
    "in json in json": json.dumps(json.dumps({"value": [TOKEN]})),
    "in hex": TOKEN.encode().hex(),
    "wrapped": "\n    ".join(TOKEN[start : start + 7] for start in range(0, len(TOKEN), 7)),
    "truncated at the end": f"token {TOKEN[:20]}…",
    "truncated at the beginning": f"token …{TOKEN[-20:]}",
    "the middle of it": TOKEN[9:30],
    **{f"base64 after {count}": base64.b64encode(b"x" * count + TOKEN.encode()).decode() for count in range(3)},
    "basic": "Basic " + base64.urlsafe_b64encode(f"user:{TOKEN}".encode()).decode(),
}


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_leak_is_found(leak: str | bytes) -> None:
    scanner = LeakScanner({"token": TOKEN})
    text = leak.decode() if isinstance(leak, bytes) else leak
    leaks = scanner.find(f"{LOG}\n{text}\n{LOG}", "a log")
    assert {(found.name, found.place) for found in leaks} == {("token", "a log")}


def test_any_line_of_a_key_is_a_leak_but_not_its_header() -> None:
    scanner = LeakScanner({"key": PEM})
    assert scanner.find(PEM.splitlines()[7], "log")
    assert scanner.find(PEM.replace("\n", "\\n"), "log")
    assert not scanner.find("-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----", "log")


def test_harmless_text_is_no_leak() -> None:
    scanner = LeakScanner({"token": TOKEN, "key": PEM})
    assert scanner.find_all({"log": LOG, "short": TOKEN[:10], "masked": "ghs_***", "digest": str(hash(TOKEN))}) == []


def test_short_credential_is_rejected() -> None:
    with pytest.raises(ValueError, match="too short"):
        LeakScanner({"token": "short"})


def test_processes_are_observed_with_arguments_and_environment() -> None:
    sleeper = "import sys; print('here', flush=True); sys.stdin.read()"
    seen = ObservedProcesses()
    with subprocess.Popen(
        [sys.executable, "-c", sleeper, TOKEN],
        env={"SECRET": TOKEN[::-1]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        # Until then the process may be a fork of this one.
        assert process.stdout.readline() == b"here\n"
        seen.poll()
    scanner = LeakScanner({"argument": TOKEN, "variable": TOKEN[::-1]})
    assert {leak.name for leak in scanner.find_all(seen.argv())} == {"argument"}
    assert {leak.name for leak in scanner.find_all(seen.environ_of({os.getuid()}))} == {"variable"}
    assert scanner.find_all(seen.environ_of({os.getuid() + 1})) == []


# Errors of the GitHub client ------------------------------------------------------------------------------------------


GITHUB_TOKEN = "ghs_a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
NOW = datetime(2030, 1, 1, tzinfo=UTC)
ECHOES = {
    "as it is": f"bad header: Bearer {GITHUB_TOKEN}",
    "where it is cut": "x" * 185 + GITHUB_TOKEN,
    "in an address": f"https://x:{quote(GITHUB_TOKEN, safe='')}@github.com",
    "encoded": b64encode(GITHUB_TOKEN.encode()).decode(),
}


@pytest.mark.parametrize("status", [401, 403, 404, 409, 422, 429, 500])
@pytest.mark.parametrize("said", ECHOES.values(), ids=ECHOES)
def test_echoed_credential_is_redacted(said: str, status: int) -> None:
    answer = ClientResponse(status, {}, json.dumps({"message": said}).encode())
    error = translate(answer, "a test", NOW, credential=GITHUB_TOKEN)
    assert LeakScanner({"token": GITHUB_TOKEN}).find(f"{error} {error!r}", "the error") == []


def test_other_text_is_quoted() -> None:
    answer = ClientResponse(422, {}, json.dumps({"message": "labels: must be an array"}).encode())
    assert "labels: must be an array" in translate(answer, "a test", NOW).message
