"""Dashboard page in a browser: live updates, failures, accessibility, and no execution of injected markup."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from remuda.adapters.system.clock import SystemClock
from remuda.domain.instance import HistoryEntry, RetireReason, State
from remuda.domain.provision import ProvisionEnding, ProvisionStatus
from tests.support.browser import PAUSE_MS, opened, ready, wait
from tests.support.dashboard import (
    SAMPLE_SETS,
    Dashboard,
    SampleInstance,
    SampleStore,
    chromium,
    in_sets,
    live_instances,
    prepare_store,
    remuda,
    requires_browser,
    sample_fleet,
    sample_provisions,
    write_demand,
    write_samples,
)
from tests.support.namespace_machine.machine import quiet_network
from tests.support.records import run_holder

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = requires_browser

IMAGE = '<img src=x onerror="window.hit=1">'
SCRIPT = "<script>window.hit=1</script>"
#: Relative luminance as defined by WCAG.
LIGHT = """
  const parse = (text) => text.match(/[0-9.]+/g).slice(0, 3).map((part) => Number(part) / 255);
  const part = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b) + 0.05;
"""
#: Contrast of each state's letter.
CHIPS = f"""() => {{
  {LIGHT}
  return Object.fromEntries([...document.querySelectorAll('#tiles .chip')].map((chip) => {{
    const style = getComputedStyle(chip);
    const [ink, paper] = [light(parse(style.color)), light(parse(style.backgroundColor))];
    return [chip.className, Math.max(ink, paper) / Math.min(ink, paper)];
  }}));
}}"""
CONTRAST = f"""() => {{
  {LIGHT}
  const paper = light(parse(getComputedStyle(document.querySelector('.card')).backgroundColor));
  return ['.card h2', '.card .soft', '#runs-empty', 'th'].map((name) => {{
    const ink = light(parse(getComputedStyle(document.querySelector(name)).color));
    return Math.max(ink, paper) / Math.min(ink, paper);
  }});
}}"""


@pytest.fixture(scope="module", autouse=True)
def network() -> Iterator[None]:
    with quiet_network():
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def samples(store: SampleStore) -> list[SampleInstance]:
    return store.fleet(60, 900)


def wait_for_count(page: Page, phase: str, count: int) -> None:
    wait(page, f"document.querySelector('#tiles [data-key={phase}] .count').textContent === '{count}'")


# Live updates -------------------------------------------------------------------------------------------------------


def test_the_page_follows_a_real_pool(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    remuda(folder, "up")
    try:
        remuda(folder, "refresh", "--idle-time-sec", "600")
        with Dashboard(folder) as dashboard, opened(browser, dashboard.url) as page:
            ready(page)
            wait(page, "document.getElementById('lanes-empty').textContent.startsWith('No instances yet')")
            remuda(folder, "provision", "--run-id", "41", "--instance-count", "2")
            wait_for_count(page, "running", 2)
            assert page.inner_text("#runs [data-key] button.name") == "41"
            # The provision is committed after its instances run; a poll may happen in between.
            wait(page, "document.querySelector('#kinds tr:first-child td')?.textContent === 'cold'")
            remuda(folder, "release", "--run-id", "41")
            wait_for_count(page, "idle", 2)

            page.fill("#subject", "41")
            page.press("#subject", "Enter")
            wait(page, "document.querySelectorAll('#explanation-lines li').length > 6")
            text = page.inner_text("#explanation")
            assert "attempt 1 requests 2 large runners" in text
            assert "the run releases its runners" in text
            assert text.count("idle, clean, in the pool") == 2
            page.reload()
            wait(page, "document.getElementById('explanation').open")
            page.press("#explanation-close", "Enter")

            page.fill("#subject", "42")
            page.press("#subject", "Enter")
            wait(page, "document.getElementById('explanation-error').textContent.includes('known are 41')")
            page.press("#explanation-close", "Enter")

            remuda(folder, "terminate", "--all", "--yes", "--reason", "the test is over")
            wait(page, "document.getElementById('decisions').textContent.includes('the test is over')")
            # Instances are terminated one after the other; a poll may happen in between.
            wait_for_count(page, "idle", 0)
    finally:
        remuda(folder, "down")


# Filters ------------------------------------------------------------------------------------------------------------


def test_filters_apply_and_survive_a_reload(
    browser: Browser, dashboard: Dashboard, samples: list[SampleInstance]
) -> None:
    running = live_instances(samples, State.RUNNING)
    large = [item for item in running if item.resource_class == "large"]
    with opened(browser, dashboard.url + "?time=0") as page:
        ready(page)
        assert page.inner_text("#live") == str(len(live_instances(samples)))
        assert page.inner_text("#shown") == f"{len(samples)} instances"
        page.click("#tiles [data-key=running]")
        wait(page, f"document.getElementById('shown').textContent === '{len(running)} of {len(samples)} instances'")
        page.select_option("#class", "large")
        wait(page, f"document.getElementById('shown').textContent === '{len(large)} of {len(samples)} instances'")
        page.click("#as-table")
        names = page.eval_on_selector_all(
            "#instances button.name[data-subject^=i-]", "all => all.map(e => e.textContent)"
        )
        assert sorted(names) == sorted(item.instance_id for item in large)
        page.fill("#text", running[0].run_id)
        page.reload()
        ready(page)
        assert page.input_value("#text") == running[0].run_id
        assert page.input_value("#class") == "large"
        assert page.get_attribute("#tiles [data-key=running]", "aria-pressed") == "true"
        assert page.is_visible("#table")
        page.click("#clear")
        wait(page, f"document.getElementById('shown').textContent === '{len(samples)} instances'")


# Failures -----------------------------------------------------------------------------------------------------------


def test_page_reports_a_lost_server_and_reconnects(browser: Browser, tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "state")
    samples = store.fleet(8, 80)
    first = Dashboard(store.folder)
    try:
        with opened(browser, first.url) as page:
            ready(page)
            wait(page, f"document.getElementById('live').textContent === '{len(live_instances(samples))}'")
            first.kill()
            wait(page, "document.getElementById('banner').textContent.startsWith('No connection to the server')")
            assert page.inner_text("#link") == "connection lost"
            # The last known data stays on the page.
            assert page.inner_text("#live") == str(len(live_instances(samples)))
            moved = store.advance(live_instances(samples)[0].instance_id)
            with Dashboard(store.folder, port=first.port):
                wait(page, "document.getElementById('banner').hidden")
                page.click("#as-table")
                state = f"#instances [data-key='{moved.instance_id}'] td:nth-child(2)"
                wait(page, f"document.querySelector(\"{state}\").textContent.endsWith('{moved.state.value}')")
                # Updates continue after that.
                moved = store.advance(moved.instance_id)
                wait(page, f"document.querySelector(\"{state}\").textContent.endsWith('{moved.state.value}')")
    finally:
        first.kill()


def test_page_backs_off_from_a_failing_proxy_and_reconnects(browser: Browser, tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "state")
    store.fleet(4, 40)
    requests: list[float] = []

    def refuse(route: Route) -> None:
        requests.append(time.monotonic())
        route.fulfill(status=502, body="Bad Gateway")

    first = Dashboard(store.folder)
    try:
        with opened(browser, first.url) as page:
            page.clock.install()
            page.reload()
            ready(page)
            # The server behind the proxy is down; the proxy rejects every request.
            page.route("**/api/**", refuse)
            first.kill()
            wait(page, "document.getElementById('link').dataset.state === 'lost'")
            for _ in range(60):
                page.clock.run_for(1_000)
                page.wait_for_timeout(PAUSE_MS)
            # One request at a time with a growing delay. Retries that multiply would exceed 100 in a minute.
            # The bound allows for a busy machine: the page's clock also advances by itself.
            assert len(requests) <= 40, len(requests)
            while len(requests) < 2:
                page.clock.run_for(1_000)
                page.wait_for_timeout(PAUSE_MS)
            with Dashboard(store.folder, port=first.port):
                page.unroute("**/api/**")
                page.clock.run_for(8_000)
                wait(page, "document.getElementById('link').dataset.state === 'live'")
                assert page.is_hidden("#banner")
    finally:
        first.kill()


def test_page_reports_that_too_many_pages_are_open(
    browser: Browser, dashboard: Dashboard, samples: list[SampleInstance]
) -> None:
    rejection = {"error": {"message": "too many pages are open: 100", "fix": "close one of them"}}
    with opened(browser, "about:blank") as page:
        page.route("**/api/events*", lambda route: route.fulfill(status=503, json=rejection))
        page.goto(dashboard.url)
        wait(page, "document.getElementById('banner')?.textContent.includes('too many pages are open: 100')")
        page.wait_for_selector("html[data-ready]")  # The banner may stand before the first frame is drawn.
        assert page.inner_text("#live") == str(len(live_instances(samples)))
        page.unroute("**/api/events*")
        wait(page, "document.getElementById('banner').hidden")
        ready(page)


def test_unreadable_store_shows_a_banner(browser: Browser, tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "state")
    store.fleet(4, 40)
    with Dashboard(store.folder) as dashboard, opened(browser, dashboard.url) as page:
        ready(page)
        shutil.move(store.file, tmp_path / "away.db")
        wait(page, "document.getElementById('banner').textContent.startsWith('The store cannot be read')")
        assert re.search(r"Last successful read: \d\d:\d\d:\d\d UTC", page.inner_text("#banner"))
        shutil.move(tmp_path / "away.db", store.file)
        wait(page, "document.getElementById('banner').hidden")


def test_hidden_page_closes_its_connection(
    browser: Browser, dashboard: Dashboard, store: SampleStore, samples: list[SampleInstance]
) -> None:
    def set_hidden(page: Page, hidden: str) -> None:
        page.evaluate(
            f"Object.defineProperty(document, 'hidden', {{ value: {hidden}, configurable: true }});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )

    with opened(browser, dashboard.url + "?view=table") as page:
        ready(page)
        set_hidden(page, "true")
        page.wait_for_selector("#link[data-state=paused]")
        name = live_instances(samples)[-1].instance_id
        moved = store.advance(name)
        set_hidden(page, "false")
        page.wait_for_selector("#link[data-state=live]")
        state = f"#instances [data-key='{name}'] td:nth-child(2)"
        wait(page, f"document.querySelector(\"{state}\").textContent.endsWith('{moved.state.value}')")


# Untrusted names ----------------------------------------------------------------------------------------------------


def test_injected_markup_is_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "state")
    ((record, entries), *_) = store.fleet(3, 30)
    last = entries[-1]
    hostile = replace(
        record,
        state=State.RUNNING,
        holder=run_holder(IMAGE),
        last_holder=run_holder(SCRIPT),
        resource_class=SCRIPT,
        instance_type=IMAGE,
        retire_reason=RetireReason.DRAINED,
        retire_detail=IMAGE + SCRIPT,
    )
    store.write((hostile, [*entries, _retirement(last)]))
    # A run chooses its class label, and a job's output can appear in reasons.
    provision, *_ = sample_provisions(1, now=last.at, span_s=60)
    outcome = replace(provision.outcome, error=f"the job {SCRIPT} failed") if provision.outcome else None
    job = replace(
        provision, holder=run_holder(SCRIPT), resource_class=IMAGE, why=IMAGE, request_summary=SCRIPT, outcome=outcome
    )
    job = replace(job, repository=f"octo/{IMAGE}", status=ProvisionStatus.RELEASED, ending=ProvisionEnding.FAILED)
    write_samples(store.file, [], [job], now=last.at)
    with Dashboard(store.folder) as dashboard, opened(browser, dashboard.url + "?view=table") as page:
        ready(page)
        text = page.inner_text(f"#runs [data-key='{job.provision_id}']")
        assert (SCRIPT in text, IMAGE in text, f"the job {SCRIPT} failed" in text) == (True, True, True)
        assert page.inner_text(f"#runs [data-key='{job.provision_id}'] .repository") == job.repository
        assert page.locator("#runs a").count() == 0, "neither the run id nor the repository is one of GitHub's"
        row = f"#instances [data-key='{record.instance_id}']"
        values = page.eval_on_selector_all(f"{row} td", "all => all.map(e => e.textContent)")
        assert values[2] == IMAGE
        assert (values[3], values[4]) == (SCRIPT, IMAGE)
        assert values[8] == f"drained: {IMAGE}{SCRIPT}"
        # Histories are read after the records.
        wait(page, f"document.getElementById('decisions').textContent.includes({json.dumps(SCRIPT)})")
        assert SCRIPT in page.eval_on_selector_all("#class option", "all => all.map(e => e.value)")
        page.select_option("#class", SCRIPT)
        page.click(f"{row} button.name >> nth=0")
        wait(page, "document.querySelectorAll('#explanation-lines li').length > 5")
        assert SCRIPT in page.inner_text("#explanation")
        page.press("#explanation-close", "Enter")
        page.click(f"{row} td:nth-child(3) button.name")
        wait(page, "!document.getElementById('explanation-error').hidden")
        page.press("#explanation-close", "Enter")
        page.click("#as-lanes")
        page.hover("#lanes-canvas", position={"x": 30, "y": 30})
        wait(page, "!document.getElementById('tip').hidden")
        assert IMAGE in page.inner_text("#tip")
        page.goto(dashboard.url + f"#explain={IMAGE}")
        wait(page, "document.getElementById('explanation').open")
        assert page.evaluate("window.hit") is None
        assert page.eval_on_selector_all("main img, dialog img, #tip img, body script", "all => all.length") == 0


def test_jobs_of_runner_sets_and_their_hostile_names(browser: Browser, tmp_path: Path) -> None:
    folder, now = tmp_path / "state", SystemClock().now()
    file = prepare_store(folder, runner_sets=SAMPLE_SETS)
    samples, jobs = in_sets(sample_fleet(20, 200, now=now), pool="default", now=now)
    write_samples(file, samples, now=now)
    running = next(job for job in jobs if job.instance_id)
    hostile = replace(running, display_name=SCRIPT, repository=IMAGE, workflow=SCRIPT)
    lost = replace(jobs[-1], job_id="lost", result=IMAGE)
    write_demand(file, [lost, *(hostile if job is running else job for job in jobs)], now=now)
    phone = {"viewport": {"width": 390, "height": 844}}
    with Dashboard(folder) as dashboard, opened(browser, dashboard.url, **phone) as page:
        ready(page)
        wait(page, "document.querySelectorAll('#sets tr').length === 2")
        counts = page.eval_on_selector_all("#sets tr:nth-child(2) td", "all => all.map(e => e.textContent)")
        assert (counts[0], counts[1], counts[7], counts[8]) == ("medium-forks", "4", "yes, 1", "open")
        assert "4 wait: at max 1" in page.inner_text("#sets-reasons")
        states = page.eval_on_selector_all("#jobs tr td:nth-child(4)", "all => all.map(e => e.textContent)")
        assert states[:5] == ["waits"] * 5, "waiting jobs first"
        assert IMAGE in states
        row = f"#jobs [data-key='{hostile.job_id}']"
        assert (SCRIPT in page.inner_text(row), IMAGE in page.inner_text(row)) == (True, True)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.click(f"{row} button.name >> nth=0")
        wait(page, "document.querySelectorAll('#explanation-lines li').length > 3")
        assert f"job {SCRIPT} started" in page.inner_text("#explanation")
        page.press("#explanation-close", "Enter")
        page.fill("#text", hostile.instance_id)
        wait(page, "document.getElementById('shown').textContent.startsWith('1 of')")
        page.hover("#lanes-canvas", position={"x": 30, "y": 30})
        wait(page, "!document.getElementById('tip').hidden")
        assert f"job {SCRIPT}" in page.inner_text("#tip")
        assert page.evaluate("window.hit") is None
        assert page.eval_on_selector_all("main img, dialog img, #tip img, body script", "all => all.length") == 0


def test_only_web_addresses_become_links(browser: Browser, dashboard: Dashboard) -> None:
    with opened(browser, dashboard.url) as page:
        ready(page)
        script = """async (urls) => {
          const { make, runLink } = await import("/text.js");
          const cell = make("td");
          return urls.map((url) => {
            runLink(cell, url, "41");
            return cell.querySelector("a")?.href;
          });
        }"""
        urls = ["https://github.com/a", "javascript:window.hit=1", "http://ghe/a", "data:text/html,x", "//ghe/a", ""]
        links = ["https://github.com/a", None, "http://ghe/a", None, None, None]
        assert page.evaluate(script, urls) == links


def _retirement(last: HistoryEntry) -> HistoryEntry:
    return replace(
        last, transition="retire", source=last.target, target=last.target, why=SCRIPT + IMAGE, holder=run_holder(SCRIPT)
    )


# Accessibility ------------------------------------------------------------------------------------------------------


def test_page_can_be_used_with_the_keyboard_only(browser: Browser, dashboard: Dashboard) -> None:
    def wait_for_focus(page: Page, target: str) -> None:
        """Wait, because a browser may move the focus only with its next frame."""
        wait(page, f"(document.activeElement.id || document.activeElement.className) === '{target}'")

    with opened(browser, dashboard.url) as page:
        ready(page)
        page.keyboard.press("Tab")
        wait_for_focus(page, "skip")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        page.keyboard.press("Enter")
        wait_for_focus(page, "lanes")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        selected = page.inner_text("#selected")
        assert re.match(r"i-[0-9a-f]{17}: \w+", selected)
        page.keyboard.press("Enter")
        wait(page, "document.getElementById('explanation-lines').children.length > 2")
        assert selected.partition(":")[0] in page.inner_text("#explanation-title")
        page.keyboard.press("Escape")
        wait(page, "!document.getElementById('explanation').open")
        wait_for_focus(page, "lanes")
        page.keyboard.press("t")
        assert page.is_visible("#table")
        page.keyboard.press("/")
        wait_for_focus(page, "subject")
        page.focus("#tiles [data-key=idle]")
        page.keyboard.press("Space")
        assert page.get_attribute("#tiles [data-key=idle]", "aria-pressed") == "true"


def test_focus_survives_inserted_removed_and_moved_rows(browser: Browser, dashboard: Dashboard) -> None:
    with opened(browser, dashboard.url) as page:
        ready(page)
        result = page.evaluate("""async () => {
          const { make, syncChildren } = await import("/text.js");
          const list = document.body.appendChild(make("ol"));
          const show = (names) => syncChildren(list, names, {
            key: (name) => name,
            create: (name) => { const row = make("li"); row.append(make("button", "", name)); return row; },
            update: () => {},
          });
          show(["a", "b", "c", "d"]);
          list.children[2].firstChild.focus();
          let lost = 0;
          list.addEventListener("focusout", () => (lost += 1));
          const found = [];
          for (const names of ["bcd", "nbcd", "dcbn", "cdbn", "nbdc", "c", "xcy", "yxc", "cc"]) {
            show([...names]);
            found.push([...list.children].map((row) => row.textContent).join(""));
          }
          show(["c"]);
          found.push(list.textContent);
          const kept = [lost, document.activeElement.textContent];
          list.remove();
          return [found, kept];
        }""")
        assert result == [["bcd", "nbcd", "dcbn", "cdbn", "nbdc", "c", "xcy", "yxc", "cc", "c"], [0, "c"]]


def test_warnings_come_first_and_their_number_is_in_the_title(browser: Browser, dashboard: Dashboard) -> None:
    with opened(browser, dashboard.url) as page:
        ready(page)
        page.wait_for_function(
            "() => { const count = parseInt(document.querySelector('#warnings-count').textContent);"
            " return count > 0 && document.title.startsWith(`(${count}) Remuda`); }"
        )
        assert page.evaluate("document.querySelector('main').firstElementChild.id") == "warnings-card"
        assert page.locator("#warnings-card").is_visible()


def test_phone_layout_needs_no_horizontal_scrolling(browser: Browser, dashboard: Dashboard) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
    with opened(browser, dashboard.url, **phone) as page:
        ready(page)
        for view in ("#as-table", "#as-lanes"):
            page.tap(view)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
        low = page.eval_on_selector_all(
            "button:not(.name), select, input", "all => all.filter(e => e.offsetHeight && e.offsetHeight < 36).length"
        )
        assert low == 0


def test_light_and_dark_themes_have_enough_contrast(browser: Browser, dashboard: Dashboard) -> None:
    papers: list[str] = []
    for scheme in ("light", "dark"):
        with opened(browser, dashboard.url, color_scheme=scheme) as page:
            ready(page)
            papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert all(ratio >= 4.5 for ratio in page.evaluate(CONTRAST))
            assert all(ratio >= 4.5 for ratio in page.evaluate(CHIPS).values()), page.evaluate(CHIPS)
    assert papers[0] != papers[1]


# Sign-in ------------------------------------------------------------------------------------------------------------


def test_sign_in_leaves_no_token_behind(browser: Browser, store: SampleStore, samples: list[SampleInstance]) -> None:
    token = "a-token-for-the-tests"
    with Dashboard(store.folder, REMUDA_DASHBOARD_TOKEN=token) as dashboard:
        with opened(browser, dashboard.url) as page:
            page.fill("#token", "not the token at all")
            page.press("#token", "Enter")
            page.wait_for_selector("#invalid:visible")
            page.fill("#token", token)
            page.press("#token", "Enter")
            ready(page)
            (cookie,) = page.context.cookies()
            assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
            assert token not in str(cookie["value"])
        with opened(browser, f"{dashboard.url}#token={token}") as page:
            ready(page)
            assert page.url == dashboard.url
            # Also if the session is signed in already.
            page.goto("about:blank")
            page.goto(f"{dashboard.url}?view=table#token={token}")
            ready(page)
            assert page.url == f"{dashboard.url}?view=table"
            page.evaluate(f"location.hash = 'explain=7&token={token}'")
            wait(page, "document.getElementById('explanation').open")
            page.evaluate(f"location.hash = 'token={token}'")
            wait(page, "!document.getElementById('explanation').open")
            page.fill("#text", "7")
            wait(page, "location.search.includes('text=7')")
            assert page.url == f"{dashboard.url}?text=7&view=table"
        code, stderr = dashboard.interrupt()
        assert (code, token in stderr) == (130, False)
