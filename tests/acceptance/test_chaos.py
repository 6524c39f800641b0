"""A short run of the chaos test per backend, and its means: a disk that is full, and clocks that step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos.environment import SteppedClocks
from tests.support.cli import ROOT

#: Seconds that a short run may take. Generous: only a broken one reaches it.
LIMIT_S = 600.0
CLOCK = """
import sys
from remuda.adapters.system.clock import SystemClock
for _ in sys.stdin:
    print(SystemClock().now().timestamp(), flush=True)
"""
DISK = """
import sqlite3, sys
from pathlib import Path
from tests.support.chaos.environment import small_disk
folder = Path(sys.argv[1]) / "state"
with small_disk(folder, 4, spared=folder / "github") as disk:
    connection = sqlite3.connect(folder / "remuda.db")
    connection.execute("CREATE TABLE t (x)")
    disk.fill()
    (folder / "github" / "file").write_text("on another disk")
    try:
        connection.execute("INSERT INTO t VALUES (zeroblob(10000))")
        connection.commit()
    except sqlite3.OperationalError as error:
        print(error)
    disk.empty()
    connection.execute("INSERT INTO t VALUES (zeroblob(10000))")
    connection.commit()
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


def chaos(*arguments: str) -> dict[str, Any]:
    # A separate process, because it changes its mounts and the interpreter of its commands.
    command = [sys.executable, "-m", "tests.support.chaos", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S - 10, check=False)
    assert done.stdout, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["passed"], {rule: found for rule, found in document["violations"].items() if found}
    return document


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("backend", ["local", "aws-servers"])
def test_short_run_with_faults_kills_no_job_and_leaves_nothing(backend: str) -> None:
    document = chaos("--backend", backend, "--minutes", "0.2", "--machines", "3", "--seed", "1")
    figures = document["figures"]
    assert figures["jobs"] >= figures["succeeded"] > 0
    assert figures["faults"] > 0
    # In twelve seconds, faults may hit every provision.
    assert sum(count for name, count in figures.items() if name.startswith("provision: ")) > 0


def test_clock_of_one_process_steps(tmp_path: Path) -> None:
    clocks = SteppedClocks(tmp_path / "python")
    with (
        subprocess.Popen([clocks.python, "-c", CLOCK], stdin=-1, stdout=-1, text=True) as stepped,
        subprocess.Popen([clocks.python, "-c", CLOCK], stdin=-1, stdout=-1, text=True) as other,
    ):
        clocks.step(stepped.pid, 1_000.0)
        assert 900 < _read(stepped) - _read(other) < 1_100
        clocks.restore(stepped.pid)
        assert -100 < _read(stepped) - _read(other) < 100


def _read(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


@needs_root
def test_writes_fail_while_the_disk_is_full(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DISK, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "database or disk is full\n"
