"""The demo as a user runs it: it tells the story, checks its own claims and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LIMIT_S = 240


def test_demo(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "remuda", "demo", "--json", "--dir", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert [claim["text"] for claim in report["claims"] if not claim["holds"]] == []
    assert (report["leaked_processes"], report["foreign_jobs"]) == (0, 0)
    assert report["cold_seconds"] > report["warm_seconds"]
    assert report["reuse_rate"] > 0.5
    reasons = {item["state"]: item["machine_said"] for item in report["retired"]}
    assert reasons["releasing"] == "lost its power"
    assert "time in idle is up" in reasons["idle"]
    assert "every claim holds" in done.stderr
    page = tmp_path / "demo" / "report.html"
    assert report["report_page"] == str(page)
    assert f"the report of it all: {page}" in done.stderr
    text = page.read_text()
    assert "Content-Security-Policy" in text
    assert all(run in text for run in ("1001", "1004", "1006"))
