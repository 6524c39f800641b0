"""Benchmarks still run, at a size that takes no time, and their counts keep their limits even there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import MEASURES
from tests.support.aws.servers import ROOT

#: Those that between them use every part, each with a figure that it has to give.
GIVES = {
    "dashboard": "dashboard of 40 machines: updates never heard of",
    "sweeps": "next refresh",
    "warm": "warm provision, N = 1, registration 0",
    "idle": "idle agent: writes in a minute",
    "growth": "refresh: calls more with 30 old records, 3 live",
}


@pytest.mark.timeout(900)
def test_benchmarks_run(tmp_path: Path) -> None:
    assert GIVES.keys() <= MEASURES.keys()
    written = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--tiny", "--json", str(written), *GIVES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(written.read_text(encoding="utf-8"))
    found = {figure["name"]: figure for figure in document["figures"]}
    assert set(GIVES.values()) <= found.keys()
    assert all(figure["ours"] >= 0 for figure in found.values() if figure["kind"] == "time")
    assert {point["operation"] for point in document["growth"]} == {
        "provision",
        "release",
        "refresh",
        "scale-down",
        "status",
    }
    assert all(sum(point["calls"].values()) > 0 for point in document["growth"])
