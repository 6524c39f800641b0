"""Every benchmark still runs, at a size that takes no time, and its counts keep their limits even there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.__main__ import MEASURES
from support.servers import ROOT

#: Of what each of them is about, a figure that it has to give.
GIVES = {
    "footprint": "memory of an agent process",
    "dashboard": "dashboard of 40 machines: updates never heard of",
    "sweeps": "next refresh",
    "warm": "warm provision, N = 1, registration 0",
    "cold": "cold provision, N = 1, agent ready after 0.1 s",
    "idle": "idle agent: writes in a minute",
    "claims": "3 provisions of 1 at once, 4 warm: conflicts",
    "fleet": "scale-down of 120 busy runners: GitHub calls",
    "growth": "refresh: calls more with 30 old records, 3 live",
}


def test_every_benchmark_runs(tmp_path: Path) -> None:
    assert GIVES.keys() == MEASURES.keys()
    written = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--tiny", "--json", str(written)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
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
