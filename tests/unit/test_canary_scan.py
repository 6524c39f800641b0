"""The scanner of the canary test finds what was planted, however it was dressed, and nothing else."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from urllib.parse import quote

import pytest

from tests.support.canary import Canaries, Processes

TOKEN = 'ghs_A1b2+C3d4/E5f6"G7h8\\I9j0&K1l2M3n4O5p6'
PEM = (
    "-----BEGIN PRIVATE KEY-----\n"
    + "\n".join(f"{number:02d}" * 32 for number in range(11, 41))
    + "\n-----END PRIVATE KEY-----\n"
)
LOG = "2026-01-01T00:00:00Z refresh tokens for octo/repo, 3 machines, sha256:" + "0123456789abcdef" * 4

PLANTED = {
    "plain": f"Authorization: Bearer {TOKEN}",
    "in bytes": f"{TOKEN}".encode(),
    "in a url": f"https://x-access-token:{quote(TOKEN, safe='')}@github.com",
    "in json": json.dumps({"token": TOKEN}),
    "in json in json": json.dumps(json.dumps({"value": [TOKEN]})),
    "in hex": TOKEN.encode().hex(),
    "wrapped": "\n    ".join(TOKEN[start : start + 7] for start in range(0, len(TOKEN), 7)),
    "cut at the end": f"token {TOKEN[:20]}…",
    "cut at the beginning": f"token …{TOKEN[-20:]}",
    "the middle of it": TOKEN[9:30],
    **{f"base64 after {count}": base64.b64encode(b"x" * count + TOKEN.encode()).decode() for count in range(3)},
    "basic": "Basic " + base64.urlsafe_b64encode(f"user:{TOKEN}".encode()).decode(),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_what_was_planted_is_found(planted: str | bytes) -> None:
    canaries = Canaries({"token": TOKEN})
    text = planted.decode() if isinstance(planted, bytes) else planted
    leaks = canaries.find(f"{LOG}\n{text}\n{LOG}", "a log")
    assert {(leak.name, leak.place) for leak in leaks} == {("token", "a log")}


def test_of_a_key_any_line_is_found_and_its_frame_is_none() -> None:
    canaries = Canaries({"key": PEM})
    assert canaries.find(PEM.splitlines()[7], "log")
    assert canaries.find(PEM.replace("\n", "\\n"), "log")
    assert not canaries.find("-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----", "log")


def test_what_is_none_is_not_found() -> None:
    canaries = Canaries({"token": TOKEN, "key": PEM})
    assert canaries.find_all({"log": LOG, "short": TOKEN[:10], "masked": "ghs_***", "digest": str(hash(TOKEN))}) == []


def test_a_canary_must_be_long_enough() -> None:
    with pytest.raises(ValueError, match="too short"):
        Canaries({"token": "short"})


def test_processes_are_seen_with_their_arguments_and_environment() -> None:
    sleeper = "import sys; print('here', flush=True); sys.stdin.read()"
    seen = Processes()
    with subprocess.Popen(
        [sys.executable, "-c", sleeper, TOKEN],
        env={"SECRET": TOKEN[::-1]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        # Before that it may be a copy of this one.
        assert process.stdout.readline() == b"here\n"
        seen.look()
    canaries = Canaries({"argument": TOKEN, "variable": TOKEN[::-1]})
    assert {leak.name for leak in canaries.find_all(seen.argv())} == {"argument"}
    assert {leak.name for leak in canaries.find_all(seen.environ_of({os.getuid()}))} == {"variable"}
    assert canaries.find_all(seen.environ_of({os.getuid() + 1})) == []
