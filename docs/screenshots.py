"""Take the screenshots of the dashboard and the report for the docs, from seeded sample records."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

from remuda.adapters.system.clock import SystemClock
from remuda.domain.provision import Provision
from tests.support.dashboard import (
    SAMPLE_SETS,
    Dashboard,
    chromium,
    environment,
    in_sets,
    prepare_store,
    sample_fleet,
    sample_provisions,
    write_demand,
    write_samples,
)

PICTURES = Path(__file__).parent / "pictures"
MAX_BYTES = 200_000
INSTANCES, TRANSITIONS = 90, 1_900
WIDE = {"viewport": {"width": 1280, "height": 880}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}


def main() -> int:
    PICTURES.mkdir(exist_ok=True)
    now = SystemClock().now()
    with tempfile.TemporaryDirectory(prefix="remuda-pictures-") as name:
        folder = Path(name) / "state"
        file = prepare_store(folder, pool="ci", runner_sets=SAMPLE_SETS)
        fleet = sample_fleet(INSTANCES, TRANSITIONS, now=now + timedelta(seconds=5), seed=7, ended=0.35)
        samples, jobs = in_sets(fleet, pool="ci", now=now)
        names = cycle(record.instance_id for record, _ in samples)
        runs = [on_instances(run, names) for run in sample_provisions(120, now=now, span_s=5_000)]
        write_samples(file, samples, runs, now=now)
        write_demand(file, jobs, now=now)
        with Dashboard(folder) as dashboard, chromium() as browser:
            take_screenshot(browser, dashboard.url, "dashboard-light", color_scheme="light", **WIDE)
            take_screenshot(browser, dashboard.url, "dashboard-dark", color_scheme="dark", **WIDE)
            take_screenshot(browser, dashboard.url, "dashboard-phone", color_scheme="light", **PHONE)
            ended = next(record for record, _ in samples if record.retire_reason)
            explanation = f"{dashboard.url}#explain={ended.instance_id}"
            take_screenshot(
                browser,
                explanation,
                "dashboard-explanation",
                color_scheme="light",
                viewport={"width": 1080, "height": 720},
            )
            report = Path(name) / "report.html"
            command = [sys.executable, "-m", "remuda", "report", "--dir", str(folder), "--html", str(report), "--quiet"]
            subprocess.run(command, check=True, env={**environment(), "PATH": os.environ["PATH"]})
            take_screenshot(browser, report.as_uri(), "report", wait="main", color_scheme="light", **WIDE)
    return 0


def on_instances(run: Provision, names: Iterator[str]) -> Provision:
    """Replace the sample runners' instance ids by existing ones, so that their prices are known."""
    if run.outcome is None:
        return run
    acquired = tuple(replace(item, instance_id=next(names)) for item in run.outcome.acquired)
    return replace(run, outcome=replace(run.outcome, acquired=acquired))


def take_screenshot(browser: Any, url: str, name: str, *, wait: str = "html[data-ready]", **options: Any) -> None:
    context = browser.new_context(**options)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector(wait)
    # Wait until every lane is drawn.
    page.wait_for_timeout(2_500)
    file = PICTURES / f"{name}.png"
    page.screenshot(path=file)
    context.close()
    size = file.stat().st_size
    sys.stdout.write(f"{file.name}: {size} bytes\n")
    if size > MAX_BYTES:
        raise SystemExit(f"{file.name} is larger than {MAX_BYTES} bytes")


if __name__ == "__main__":
    sys.exit(main())
