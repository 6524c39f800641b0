"""Screenshots of the dashboard and the report at three widths, light and dark; each is also checked by axe-core."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from remuda.adapters.system.clock import SystemClock
from remuda.domain.budget import Spending
from remuda.domain.demand import JobRecord
from remuda.domain.provision import Provision, ProvisionEnding
from remuda.domain.timestamps import to_milliseconds
from tests.support.browser import accessibility_violations, opened, ready, wait
from tests.support.dashboard import (
    SAMPLE_SETS,
    Dashboard,
    SampleInstance,
    chromium,
    environment,
    in_sets,
    prepare_store,
    requires_browser,
    sample_fleet,
    sample_provisions,
    with_quarantine,
    write_demand,
    write_reports,
    write_samples,
    write_sweep,
)
from tests.support.namespace_machine.machine import quiet_network

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = requires_browser

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
#: Set by `make screenshots`.
IS_RENEWAL = bool(os.environ.get("REMUDA_WRITE_SCREENSHOTS"))
INSTANCES, TRANSITIONS = 90, 1_900
WIDE: dict[str, Any] = {"viewport": {"width": 1440, "height": 1150}}
MEDIUM: dict[str, Any] = {"viewport": {"width": 1024, "height": 768}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
SIZES = {"1440": WIDE, "1024": MEDIUM, "390": PHONE}
SCHEMES = ("light", "dark")
#: Instances with their histories, and jobs.
Fleet = tuple[list[SampleInstance], list[JobRecord]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with quiet_network(), chromium() as started:
        yield started


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    now = SystemClock().now()
    machines = sample_fleet(INSTANCES, TRANSITIONS, now=now, seed=7, ended=0.35)
    return in_sets(with_quarantine(machines, now=now), pool="ci", now=now)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, fleet: Fleet) -> Path:
    """A pool with runs of several repositories, runner sets with waiting jobs, machines in quarantine, and warnings."""
    folder, now = tmp_path_factory.mktemp("pool") / "state", SystemClock().now()
    spending = Spending(until=to_milliseconds(now), amount=421.37)
    file = prepare_store(
        folder,
        pool="ci",
        runner_sets=SAMPLE_SETS,
        applied_at=to_milliseconds(now),
        monthly_budget=500.0,
        spending=spending,
    )
    samples, jobs = fleet
    names = cycle(record.instance_id for record, _ in samples)
    runs = [_on_instances(run, names) for run in sample_provisions(120, now=now, span_s=5_000)]
    runs[-14] = _failed(runs[-14], now=now)
    write_samples(file, samples, runs, now=now)
    write_demand(file, jobs, now=now)
    write_sweep(file, now=now)
    return folder


@pytest.fixture(autouse=True)
def _heartbeats(folder: Path, fleet: Fleet) -> None:
    """Without new heartbeats, the agents of the sample would count as dead after a while."""
    write_reports(folder / "remuda.db", fleet[0], now=SystemClock().now())


def _on_instances(run: Provision, names: Iterator[str]) -> Provision:
    """Replace the sample runners' instance ids by existing ones, so that their prices are known."""
    assert run.outcome is not None
    acquired = tuple(replace(item, instance_id=next(names)) for item in run.outcome.acquired)
    return replace(run, outcome=replace(run.outcome, acquired=acquired))


def _failed(run: Provision, *, now: datetime) -> Provision:
    assert run.outcome is not None
    error = "no capacity for c6i.large in eu-central-1a, eu-central-1b"
    outcome = replace(run.outcome, error=error, acquired=(), reused=0, created=0)
    at = to_milliseconds(now - timedelta(minutes=6))
    return replace(run, ending=ProvisionEnding.FAILED, why=error, outcome=outcome, released_at=at)


@pytest.fixture(scope="module")
def dashboard(folder: Path) -> Iterator[Dashboard]:
    with Dashboard(folder) as started:
        yield started


@pytest.fixture(scope="module")
def report(folder: Path) -> str:
    file = folder.parent / "report.html"
    command = [sys.executable, "-m", "remuda", "report", "--dir", str(folder), "--html", str(file), "--quiet"]
    subprocess.run(command, check=True, env={**environment(), "PATH": os.environ["PATH"]})
    return file.as_uri()


def drawn(page: Page) -> None:
    """Wait until the page shows all that it gets after the first records: histories, costs and prices."""
    ready(page)
    wait(page, "document.getElementById('reuse-rate').textContent.endsWith('%')")
    wait(page, "document.getElementById('decisions').children.length > 20")


def take(page: Page, name: str, folder: Path) -> None:
    # The browser paints what scrolled into view a little later.
    page.wait_for_timeout(500)
    content = recompressed(page.screenshot())
    ((PICTURES if IS_RENEWAL else folder) / f"{name}.png").write_bytes(content)


def recompressed(png: bytes) -> bytes:
    """Compress a picture better than the browser does, which prefers speed."""
    head, place, parts, pixels = png[:8], 8, [], b""
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        kind, data = png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        place += length + 12
        if kind == b"IDAT":
            pixels += data
        else:
            parts.append((kind, data))
    parts.insert(-1, (b"IDAT", zlib.compress(zlib.decompress(pixels), 9)))
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return head + b"".join(chunks)


#: The number of lines of text in each element, and the tables and pages that are wider than their room.
LINES = """(all) => all.map((element) => {
  const range = document.createRange();
  range.selectNodeContents(element);
  return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size;
})"""
#: The name of the column before each cell, its text, and its place.
SHOWN_CELLS = """(all) => all.map((e) => {
  const { left, right } = e.getBoundingClientRect();
  return [getComputedStyle(e, '::before').content, e.innerText, left, right];
})"""
TOO_WIDE = """() => [...document.querySelectorAll('.scroll'), document.documentElement]
  .filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.getAttribute('aria-label'))"""


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", SIZES)
def test_dashboard(browser: Browser, dashboard: Dashboard, tmp_path: Path, width: str, scheme: str) -> None:
    with opened(browser, dashboard.url, color_scheme=scheme, **SIZES[width]) as page:
        drawn(page)
        kinds = page.eval_on_selector_all("#warnings .kind", "all => all.map(e => e.textContent)")
        assert set(kinds) >= {"budget", "stale-heartbeat", "spot-notice", "waiting-job", "provision-failed"}
        if (width, scheme) == ("390", "dark"):
            page.evaluate("document.getElementById('timeline-title').scrollIntoView()")
        take(page, f"dashboard-{width}-{scheme}", tmp_path)
        assert accessibility_violations(page) == {}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", SIZES)
def test_report(browser: Browser, report: str, tmp_path: Path, width: str, scheme: str) -> None:
    with opened(browser, report, color_scheme=scheme, **SIZES[width]) as page:
        take(page, f"report-{width}-{scheme}", tmp_path)
        assert accessibility_violations(page) == {}


def test_explanation(browser: Browser, dashboard: Dashboard, tmp_path: Path) -> None:
    with opened(browser, dashboard.url, **MEDIUM) as page:
        drawn(page)
        page.click("#decisions li:first-child button.name")
        wait(page, "document.querySelectorAll('#explanation-lines li').length > 3")
        take(page, "dashboard-explanation", tmp_path)
        assert accessibility_violations(page) == {}


def test_run_ids_and_repositories_fit_from_1024_pixels_up(browser: Browser, dashboard: Dashboard) -> None:
    with opened(browser, dashboard.url + "?view=table") as page:
        drawn(page)
        names = page.eval_on_selector_all("#runs .name", "all => all.map(e => e.textContent)")
        assert {len(name) for name in names} == {len("17534000119")}
        for width in (1024, 1200, 1280, 1344, 1360, 1440, 1920):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(TOO_WIDE) == [], width
            for cells in ("#runs", "#instances td:nth-child(3)", "#sets", "#jobs td:nth-child(2)"):
                assert set(page.eval_on_selector_all(f"{cells} .name", LINES)) == {1}, (width, cells)
            # The longest name takes two lines.
            assert max(page.eval_on_selector_all(".repository", LINES)) <= 2, width
        assert accessibility_violations(page) == {}


def test_phone_shows_the_newest_time_first(browser: Browser, dashboard: Dashboard, report: str) -> None:
    at_end = "e => e.scrollWidth - e.clientWidth > 100 && {place} < 2"
    with opened(browser, dashboard.url, **PHONE) as page:
        drawn(page)
        wait(page, "document.getElementById('lanes').scrollLeft > 0")
        assert page.eval_on_selector("#lanes", at_end.format(place="e.scrollWidth - e.clientWidth - e.scrollLeft"))
        for chart in page.locator(".sideways").all():
            assert chart.evaluate(at_end.format(place="Math.abs(e.scrollLeft)"))
        assert page.locator(".hint:visible").count() == 3
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    with opened(browser, dashboard.url, **MEDIUM) as page:
        drawn(page)
        assert page.locator(".hint:visible").count() == 0
        assert page.eval_on_selector("#lanes", "e => e.scrollWidth === e.clientWidth")
    with opened(browser, report, **PHONE) as page:
        for chart in page.locator(".plot").all():
            assert chart.evaluate(at_end.format(place="Math.abs(e.scrollLeft)"))
        assert page.locator(".hint:visible").count() == 2
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [360, 375, 390])
def test_phone_shows_all_columns_without_scrolling(browser: Browser, dashboard: Dashboard, width: int) -> None:
    phone = {**PHONE, "viewport": {"width": width, "height": 844}}
    with opened(browser, dashboard.url + "?view=table", **phone) as page:
        drawn(page)
        assert page.evaluate(TOO_WIDE) == []
        states = page.eval_on_selector_all("#jobs td:nth-child(4)", SHOWN_CELLS)
        assert len(states) > 3
        for heading, text, left, right in states:
            assert heading == '"State "'
            assert re.fullmatch("waits|runs for .+|succeeded|failed|canceled", text)
            assert 0 < left < right < width
        # Only the two charts go on sideways.
        assert page.locator(".hint:visible").count() == 2
        assert accessibility_violations(page) == {}


def test_quarantine_is_marked_on_live_machines_only(browser: Browser, dashboard: Dashboard) -> None:
    with opened(browser, dashboard.url + "?view=table&time=0", **WIDE) as page:
        drawn(page)
        assert "in quarantine" in str(page.text_content("#legend"))
        rows = "#instances tr"
        states = page.eval_on_selector_all(
            rows, "all => all.filter(e => e.textContent.includes('in quarantine')).map(e => e.children[1].textContent)"
        )
        assert states == ["Iidle"]


def test_ended_machines_leave_the_window(browser: Browser, dashboard: Dashboard) -> None:
    shown = "document.getElementById('shown').textContent"
    with opened(browser, dashboard.url + "?time=0", **WIDE) as page:
        drawn(page)
        assert page.evaluate(shown) == f"{INSTANCES} instances"
        page.select_option("#window", "300")
        wait(page, f"{shown}.includes('ended earlier')")
        shown_now, earlier = (int(part) for part in re.findall(r"\d+", page.evaluate(shown)))
        assert shown_now + earlier == INSTANCES
        live = int(page.inner_text("#live"))
        assert live <= shown_now < INSTANCES
        # Time passes, and nothing else changes: the last ended machine leaves too.
        page.clock.install()
        page.reload()
        drawn(page)
        # An update would set the time of the page back to that of the server.
        page.context.set_offline(offline=True)
        page.clock.fast_forward(300_000)
        wait(page, f"{shown} === '{live} instances; {INSTANCES - live} ended earlier'")


def test_pool_level_is_listed_at_round_times(browser: Browser, dashboard: Dashboard) -> None:
    with opened(browser, dashboard.url, **WIDE) as page:
        drawn(page)
        page.click("#level-details summary")
        wait(page, "document.getElementById('level-rows').children.length > 5")
        times = page.eval_on_selector_all("#level-rows td:first-child", "all => all.map(e => e.textContent)")
        assert all(re.fullmatch(r"\d\d:\d[05]:00", text) for text in times)
        live = page.eval_on_selector_all("#level-rows tr:first-child td.n", "all => all.map(e => +e.textContent)")
        assert 0 < sum(live) <= INSTANCES


def test_runs_link_to_github(browser: Browser, dashboard: Dashboard, report: str) -> None:
    with opened(browser, dashboard.url, **WIDE) as page:
        drawn(page)
        for table in ("#runs", "#jobs"):
            link = page.locator(f"{table} tr:first-child a.out")
            url = str(link.get_attribute("href"))
            assert re.fullmatch(r"https://github\.com/acme-[\w-]+/[\w-]+/actions/runs/17534000\d{3}", url)
            assert link.get_attribute("rel") == "noopener noreferrer"
            assert link.get_attribute("aria-label") == f"Run {url.rpartition('/')[2]} on GitHub"
    with opened(browser, report) as page:
        links = page.eval_on_selector_all("td a", "all => all.map(e => [e.href, e.textContent])")
        assert links
        assert all(url.startswith("https://github.com/acme-") and url.endswith(run) for url, run in links)
