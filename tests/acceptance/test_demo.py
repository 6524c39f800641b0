"""`remuda demo` and the demo on AWS: their checks pass, the live page follows, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from remuda.cli.demo import SELF_TERMINATED
from tests.support import aws_demo
from tests.support.aws.servers import ROOT
from tests.support.dashboard import CHROMIUM, chromium
from tests.support.namespace_machine.machine import quiet_network
from tests.support.namespace_machine.requirements import unsupported_reason

#: Seconds for a demo. Generous: only a broken demo reaches it.
LIMIT_S = 600
pytestmark = pytest.mark.timeout(LIMIT_S + 60)
#: Only reached if something is broken.
PAGE_LIMIT_MS = 120_000
STATES = {"created", "running", "releasing", "idle", "terminated"}
#: The corresponding phases on the page.
PHASES = {"booting", "running", "releasing", "idle", "ended"}


def phases_on_page(url: str, until: Callable[[], bool]) -> set[str]:
    """Open the live page in a browser and collect the phases that it shows until the demo ends."""
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


def states_in_snapshots(url: str, until: Callable[[], bool]) -> set[str]:
    """Collect the states from the live page's API, if there is no browser."""
    seen: set[str] = set()
    with httpx.Client(base_url=url) as client:
        while not until():
            try:
                document = client.get("/api/snapshot").json()
            except httpx.HTTPError:
                # The server stops with the demo.
                continue
            seen |= {item["state"] for item in document.get("instances", {}).values()}
            time.sleep(0.1)  # noqa: TID251 - polls like a page
    return seen


def test_demo(tmp_path: Path):
    command = [sys.executable, "-m", "remuda", "demo", "--dashboard", "--json", "--dir", str(tmp_path / "demo")]
    with (
        quiet_network(),
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stderr is not None
        address = process.stderr.readline().removeprefix("dashboard: ").strip()
        outputs: list[str] = []
        reading = threading.Thread(target=lambda: outputs.extend(process.communicate(timeout=LIMIT_S)))
        reading.start()
        if CHROMIUM.exists():
            seen, expected = phases_on_page(address, lambda: not reading.is_alive()), PHASES
        else:
            seen, expected = states_in_snapshots(address, lambda: not reading.is_alive()), STATES
    out, err = outputs
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    assert expected <= seen
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert [check["text"] for check in report["checks"] if not check["passed"]] == []
    assert (report["leaked_processes"], report["foreign_jobs"]) == (0, 0)
    assert report["cold_seconds"] > report["warm_seconds"]
    assert report["reuse_rate"] > 0.5
    assert [(item["kind"], len(item["waits"])) for item in report["runner_set_runs"]] == [
        ("cold", 3),
        ("warm", 3),
        ("warm", 1),
        ("hot", 1),
    ]
    reasons = {item["state"]: item["stop_reason"] for item in report["retired"]}
    assert reasons["releasing"] == "lost power"
    assert any(text in reasons["idle"] for text in SELF_TERMINATED), reasons
    assert "all checks passed" in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) <= 45
    assert max(len(line) for line in lines if not line.startswith("usage report: ")) <= 80
    chapters = [line.partition(":")[0] for line in lines if ": " in line and not line.startswith(" ")]
    assert chapters[:5] == ["Start", *(f"Runner set, {kind}" for kind in ("cold", "warm", "hot", "cancelled"))]
    assert chapters[5:8] == [f"Provision, {kind}" for kind in ("cold", "two at once", "warm")]
    assert chapters[8:12] == ["Crash", "Expiry", "Scale-down", "End"]
    assert not [line for line in lines if re.search(r"\d\d:\d\d:\d\d", line)]
    page = tmp_path / "demo" / "report.html"
    assert report["report_page"] == str(page)
    assert f"usage report: {page}" in done.stderr
    text = page.read_text()
    assert "Content-Security-Policy" in text
    assert all(run in text for run in ("1001", "1004", "1006"))


# `make demo-aws` in its short form ------------------------------------------------------------------------------------

requires_machines = pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason())
DEMO = (sys.executable, "-m", "tests.support.aws_demo", "--short", "--json")


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "HOME": str(folder)}


@pytest.mark.namespaces
@requires_machines
def test_demo_passes_its_checks_and_leaves_nothing(tmp_path: Path):
    done = subprocess.run(DEMO, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr[-10_000:]
    report = json.loads(done.stdout)
    assert [check["text"] for check in report["checks"] if not check["passed"]] == []
    assert len(report["checks"]) >= 12
    assert [(item["kind"], item["reused"], item["created"]) for item in report["provisions"]] == [
        ("cold", 0, 2),
        ("warm", 2, 0),
        ("warm", 1, 0),
    ]
    idle = {item["stop_reason"] for item in report["retired"] if item["state"] == "idle"}
    assert idle & set(aws_demo.SELF_TERMINATED)
    assert [*tmp_path.iterdir(), *aws_demo.leftovers(tmp_path)] == []


@pytest.mark.namespaces
@requires_machines
def test_interrupted_demo_leaves_nothing(tmp_path: Path):
    with subprocess.Popen(
        DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(tmp_path)
    ) as demo:
        assert demo.stderr is not None
        # A provision waits for a machine that boots.
        line = next((line for line in demo.stderr if " boots " in line), "")
        assert line, "no machine booted"
        demo.send_signal(signal.SIGINT)
        _, rest = demo.communicate(timeout=LIMIT_S)
    assert (demo.returncode, "interrupted" in rest) == (130, True), rest[-5_000:]
    assert [*tmp_path.iterdir(), *aws_demo.leftovers(tmp_path)] == []
