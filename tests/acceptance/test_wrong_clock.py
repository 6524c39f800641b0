"""The installed command on a computer whose clock is wrong, and next to an agent that hangs."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos import clock_offset
from tests.support.chaos.environment import SteppedClocks
from tests.support.local_backend import LIMIT_S, LocalBackend

#: Sets the offset of the process that it becomes.
WITH_OFFSET = 'echo "$1" > "$2/$$"; shift 2; exec "$@"'


def with_offset(clocks: SteppedClocks, seconds: float, *command: str | Path) -> Any:
    offsets = clocks.python.parents[1] / clock_offset.FOLDER
    words = ["sh", "-c", WITH_OFFSET, "sh", str(seconds), offsets, clocks.python, "-m", "remuda", *command, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode in {0, 2}, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("seconds", "text"), [(1_200.0, "20 min ahead of"), (-1_200.0, "20 min behind")])
async def test_status_and_doctor_name_the_clock_and_nobody_else(
    backend: LocalBackend, tmp_path: Path, seconds: float, text: str
) -> None:
    """The local GitHub runs with another clock, like the real one."""
    await backend.up(sweeper=True)
    await backend.provision("41")
    clocks = SteppedClocks(tmp_path / "python")
    found = with_offset(clocks, seconds, "status", "--dir", backend.folder)
    (warning,) = found["warnings"]
    assert warning["kind"] == "clock"
    assert warning["text"].startswith(f"the clock of this computer is {text} GitHub's: set this computer's clock")
    assert [item["agent_dead"] for item in found["instances"]] == [False]
    doctor = with_offset(clocks, seconds, "doctor", "--dir", backend.folder)
    (check,) = [item for item in doctor["checks"] if item["name"] == "github clock"]
    assert check["status"] == "problem"
    assert text in check["message"]


async def test_advice_about_a_hung_agent_works_when_it_is_pasted(backend: LocalBackend) -> None:
    await backend.up(sweeper=True)
    (instance,) = (await backend.provision("41")).document["instances"]
    agent = backend.agent(instance["instance_id"])
    assert agent is not None
    os.kill(agent, signal.SIGSTOP)
    watching = await backend.start("status", "--watch", "--every", "1", "--json")
    assert watching.stdout is not None
    texts: list[str] = []
    async with asyncio.timeout(LIMIT_S):
        while not texts:
            warnings = json.loads(await watching.stdout.readline())["warnings"]
            texts = [item["text"] for item in warnings if item["kind"] == "stale-heartbeat"]
        watching.terminate()
        await watching.communicate()
    command = texts[0].partition("to end it, run ")[2]
    assert command == f"remuda terminate --dir {shlex.quote(str(backend.folder))} {instance['instance_id']}"
    # At a terminal it asks first, because a job may be lost.
    person, terminal = pty.openpty()
    os.write(person, b"y\n")
    pasted = [sys.executable, "-m", *shlex.split(command)]
    done = await asyncio.to_thread(subprocess.run, pasted, stdin=terminal, capture_output=True, text=True, check=False)
    os.close(person)
    os.close(terminal)
    assert done.returncode == 0, done.stderr
    assert "1 terminating, 0 unchanged" in done.stderr
    await backend.until(lambda: instance["instance_id"] not in backend.machines(), "the instance to end")
