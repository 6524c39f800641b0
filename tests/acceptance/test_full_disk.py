"""The installed command while the disk of the local backend is full: what it says, and that it works again later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.cli import ROOT

WORKFLOW = """
jobs:
  one:
    runs-on: ubuntu-latest
    steps: [{run: "true"}]
"""
#: Runs the commands in a mount namespace of its own and prints their results as JSON.
SCRIPT = """
import json, subprocess, sys
from pathlib import Path
from tests.support.chaos.environment import small_disk
folder = Path(sys.argv[1])
def remuda(*words):
    command = [sys.executable, "-m", "remuda", *words, "--dir", str(folder / "disk" / "state")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    return [done.returncode, done.stdout, done.stderr]
found = {}
with small_disk(folder / "disk", 64, spared=folder / "disk" / "spared") as disk:
    try:
        found["up"] = remuda("up")
        # Used before: SQLite cannot even read if it has to make the index of its write-ahead log on a full disk.
        remuda("provision", "--run-id", "4", "--instance-count", "1")
        remuda("release", "--run-id", "4")
        found["status before"] = remuda("status", "--json")
        disk.fill()
        for words in sys.argv[2:]:
            found[words] = remuda(*words.split())
        disk.empty()
        found["status after"] = remuda("status", "--json")
        found["refresh after"] = remuda("refresh")
    finally:
        disk.empty()
        found["down"] = remuda("down")
print(json.dumps(found))
"""
PROVISION = "provision --run-id 5 --instance-count 1"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if os.geteuid() != 0:
        pytest.skip("mounts a file system")
    folder = tmp_path_factory.mktemp("full")
    (folder / "w.yml").write_text(WORKFLOW)
    commands = ["status --json", "status", "doctor --json", "run-workflow w.yml", "refresh", PROVISION]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder, *commands], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("mounts a file system")
    assert done.returncode == 0, done.stderr
    return {"folder": folder / "disk" / "state"} | json.loads(done.stdout)


def kinds(status: Any) -> list[str]:
    return [warning["kind"] for warning in json.loads(status[1])["warnings"]]


def test_status_warns(results: Any) -> None:
    assert kinds(results["status before"]) == []
    assert kinds(results["status --json"]) == ["disk"]
    assert kinds(results["status after"]) == []
    code, _, said = results["status"]
    assert code == 0
    text = f"the disk of {results['folder']} is full: no space is left; free space: a full disk stops every change"
    assert text in said


def test_doctor_has_a_problem(results: Any) -> None:
    code, document, _ = results["doctor --json"]
    assert code == 2
    (check,) = [item for item in json.loads(document)["checks"] if item["name"] == "disk"]
    assert check["status"] == "problem"
    assert str(results["folder"]) in check["fix"]


@pytest.mark.parametrize("command", ["run-workflow w.yml", PROVISION])
def test_commands_name_the_folder_and_the_fix(results: Any, command: str) -> None:
    code, _, said = results[command]
    folder = results["folder"]
    assert code == 2
    assert said.splitlines()[-1].startswith(f"remuda: the disk of {folder} is full: no space is left on it")
    assert said.rstrip().endswith(f"free space on the disk of {folder}, and run the command again")
    assert "a bug" not in said
    assert "write-unconfirmed" not in said


def test_refresh_is_incomplete_and_works_again_with_free_space(results: Any) -> None:
    code, _, said = results["refresh"]
    assert code == 4
    assert f"the disk of {results['folder']} is full" in said
    assert results["refresh after"][0] == results["down"][0] == 0
