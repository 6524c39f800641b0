"""Benchmarks run at the smallest size, and their counts stay within the limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from tests.support.aws.servers import ROOT
from tests.support.sandbox_host import missing

#: Benchmarks that together use every part, each with one of its figures.
EXPECTED = {
    "dashboard": "dashboard of 40 instances: updates never received",
    "processes": "process: warm provision, N = 1",
    "refresh": "next refresh",
    "warm": "warm provision, N = 1, registration 0",
    "workflow-step": "broker: step starts → request sent",
    "demand": "set, hot machine: job queued → job started",
    "idle": "idle agent: writes per minute",
    # Skipped where sandboxes cannot be made.
    **({} if missing() else {"sandbox": "sandbox: releasing read → OK signal"}),
    "growth": "refresh: additional calls with 30 old records, 3 live",
}


@pytest.mark.timeout(900)
def test_benchmarks_run(tmp_path: Path) -> None:
    assert EXPECTED.keys() <= BENCHMARKS.keys()
    written = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--tiny", "--json", str(written), *EXPECTED],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(written.read_text(encoding="utf-8"))
    found = {figure["name"]: figure for figure in document["figures"]}
    assert set(EXPECTED.values()) <= found.keys()
    assert all(figure["measured"] >= 0 for figure in found.values() if figure["kind"] == "time")
    assert {point["operation"] for point in document["growth"]} == {
        "provision",
        "release",
        "refresh",
        "scale-down",
        "status",
    }
    assert all(sum(point["calls"].values()) > 0 for point in document["growth"])
