"""The demo as a user runs it: it tells the story, checks its own claims and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from remuda.cli.demo import ENDED_ITSELF
from tests.support.dashboard import CHROMIUM, chromium

LIMIT_S = 600
#: Generous: nothing waits for it unless something is broken.
PAGE_LIMIT_MS = 120_000
STATES = {"created", "running", "releasing", "idle", "terminated"}
#: The same as the page calls it.
SHOWN = {"booting", "running", "releasing", "idle", "ended"}


def states_shown(url: str, until: Callable[[], bool]) -> set[str]:
    """What the live page shows in a browser, from the beginning to the end: it is opened once and updates itself."""
    seen: set[str] = set()
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(PAGE_LIMIT_MS)
        page.goto(url)
        page.wait_for_selector("html[data-ready] #link[data-state=live]")
        while not until():
            seen |= set(page.eval_on_selector_all("#tiles > :not(.none)", "all => all.map((tile) => tile.dataset.key)"))
            page.wait_for_timeout(100)
    return seen


def states_seen(url: str, until: Callable[[], bool]) -> set[str]:
    """What the live page's server says where there is no browser."""
    seen: set[str] = set()
    with httpx.Client(base_url=url) as client:
        while not until():
            try:
                document = client.get("/api/snapshot").json()
            except httpx.HTTPError:
                # It ends with the demo.
                continue
            seen |= {item["state"] for item in document.get("instances", {}).values()}
            time.sleep(0.1)  # noqa: TID251 - as a page that looks
    return seen


@pytest.mark.timeout(LIMIT_S + 60)
def test_demo(tmp_path: Path):
    command = [sys.executable, "-m", "remuda", "demo", "--dashboard", "--json", "--dir", str(tmp_path / "demo")]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        address = process.stderr.readline().removeprefix("live on ").strip()
        told: list[str] = []
        reading = threading.Thread(target=lambda: told.extend(process.communicate(timeout=LIMIT_S)))
        reading.start()
        if CHROMIUM.exists():
            seen, wanted = states_shown(address, lambda: not reading.is_alive()), SHOWN
        else:
            seen, wanted = states_seen(address, lambda: not reading.is_alive()), STATES
    out, said = told
    done = subprocess.CompletedProcess(command, process.returncode, out, said)
    assert wanted <= seen
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert [claim["text"] for claim in report["claims"] if not claim["holds"]] == []
    assert (report["leaked_processes"], report["foreign_jobs"]) == (0, 0)
    assert report["cold_seconds"] > report["warm_seconds"]
    assert report["reuse_rate"] > 0.5
    reasons = {item["state"]: item["machine_said"] for item in report["retired"]}
    assert reasons["releasing"] == "lost its power"
    assert any(word in reasons["idle"] for word in ENDED_ITSELF), reasons
    assert "every claim holds" in done.stderr
    page = tmp_path / "demo" / "report.html"
    assert report["report_page"] == str(page)
    assert f"the report of it all: {page}" in done.stderr
    text = page.read_text()
    assert "Content-Security-Policy" in text
    assert all(run in text for run in ("1001", "1004", "1006"))
