"""`remuda up` and `remuda down`: concurrently, repeatedly, and with another pool."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from remuda import procfs
from remuda.agent.processes import command
from tests.support.local_backend import run_local

LIMIT_S = 120


def start(folder: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "remuda", *arguments, "--dir", str(folder), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


def done(process: subprocess.Popen[str]) -> tuple[int, Any]:
    out, err = process.communicate(timeout=LIMIT_S)
    return answer(process.returncode, out, err)


def answer(code: int, out: str, err: str) -> tuple[int, Any]:
    assert "Traceback" not in err, err
    return code, json.loads(out) if out else err


def remuda(folder: Path, *arguments: str, **env: str) -> tuple[int, Any]:
    result = run_local(folder, *arguments, environment={**os.environ, **env})
    return answer(result.code, result.stdout, result.stderr)


def processes_of(folder: Path) -> list[tuple[str, ...]]:
    lines = (command(pid) for pid in procfs.all_processes() if pid != os.getpid())
    return [words for words in lines if any(str(folder) in word for word in words)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    state = tmp_path / "a folder with blanks"
    yield state
    remuda(state, "down")
    assert processes_of(state) == []


def test_concurrent_ups_start_one_backend(folder: Path):
    outcomes = [done(process) for process in [start(folder, "up") for _ in range(3)]]
    assert [code for code, _ in outcomes] == [0, 0, 0]
    assert sorted(len(answer["started"]) for _, answer in outcomes) == [0, 0, 2]
    assert len({answer["github_url"] for _, answer in outcomes}) == 1
    assert len(processes_of(folder)) == 2
    code, answer = remuda(folder, "down")
    assert (code, answer["left"], sorted(answer["stopped"])) == (0, [], ["github", "sweeper"])
    assert processes_of(folder) == []
    assert remuda(folder, "down")[0] == 0


def test_provision_after_down_reports_that_the_backend_is_down(folder: Path):
    remuda(folder, "up")
    remuda(folder, "refresh")
    remuda(folder, "down")
    code, answer = remuda(folder, "provision", "--run-id", "1")
    assert (code, answer["error"]["type"]) == (2, "UserError")
    assert "remuda up" in answer["error"]["fix"]
    assert remuda(folder, "status")[1]["instances"] == []


def test_purge_removes_only_files_of_the_backend(folder: Path):
    remuda(folder, "up")
    mine = folder / "mine.txt"
    mine.write_text("keep me")
    assert remuda(folder, "down", "--purge")[0] == 0
    assert [item.name for item in folder.iterdir()] == ["mine.txt"]


def test_folder_belongs_to_one_pool(folder: Path):
    """With another pool name, all machines would look orphaned and their jobs would be killed."""
    remuda(folder, "up")
    assert remuda(folder, "refresh", REMUDA_POOL="ci")[0] == 0
    code, provisioned = remuda(folder, "provision", "--run-id", "1")
    assert code == 0, provisioned
    assert remuda(folder, "refresh", "--sweep-only")[1]["retired"] == []
    code, answer = remuda(folder, "refresh", "--pool", "default")
    assert (code, answer["error"]["field"]) == (2, "--pool")
    assert [item["state"] for item in remuda(folder, "status")[1]["instances"]] == ["running"]
    code, answer = remuda(folder, "down")
    assert len(answer["terminated"]) == 1
    (ended,) = remuda(folder, "status", "--all")[1]["instances"]
    assert (ended["state"], ended["retire_reason"], ended["retire_detail"]) == (
        "terminated",
        "terminated-by-operator",
        "remuda down",
    )
    assert remuda(folder, "explain", "1")[1]["title"] == "Run 1: committed; its instance is terminated"


def test_agent_killed_during_registration_leaves_one_registration(folder: Path):
    """A registration that the killed agent started must not finish later and replace the next one."""
    remuda(folder, "up")
    remuda(folder, "refresh", "--provision-timeout-sec", "60")
    endpoint = json.loads((folder / "github" / "endpoint.json").read_text())
    fault = {"kind": "delay", "operation": "runner.register", "times": 1, "seconds": 4.0}
    headers = {"authorization": f"Bearer {endpoint['token']}"}
    assert httpx.post(f"{endpoint['url']}/_admin/faults", json=fault, headers=headers).is_success
    provisioning = start(folder, "provision", "--run-id", "7")
    configuring = wait_for_registration(folder)
    agents = [pid for pid in procfs.all_processes() if "agent" in command(pid)[1:4] and str(folder) in command(pid)]
    assert agents
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    code, answer = done(provisioning)
    assert code == 0, answer
    assert procfs.read_process(configuring) is None
    runners = httpx.get(f"{endpoint['url']}/_admin/runners", headers=headers).json()["runners"]
    assert len(runners) == 1


def wait_for_registration(folder: Path) -> int:
    """Return the pid of a running `config.sh` on a machine in this folder."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        for pid in procfs.all_processes():
            words = command(pid)
            if "configure" in words and any(word.startswith(str(folder)) for word in words):
                return pid
        threading.Event().wait(0.02)
    raise AssertionError("no registration was seen")
