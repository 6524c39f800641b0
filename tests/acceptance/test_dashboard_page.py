"""The dashboard's page in a real browser: it follows what happens, and nothing that is planted runs in it."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from remuda.domain.instance import HistoryEntry, State
from tests.support import sample_records
from tests.support.dashboard import LIMIT_S, Dashboard, Records, chromium, living, remuda, without_browser
from tests.support.sample_records import Life

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = without_browser

LIMIT_MS = LIMIT_S * 1_000
PAUSE_MS = 40
IMAGE = '<img src=x onerror="window.hit=1">'
SCRIPT = "<script>window.hit=1</script>"
#: How far words stand out from their card, as WCAG counts it.
LIGHT = """
  const parse = (text) => text.match(/[0-9.]+/g).slice(0, 3).map((part) => Number(part) / 255);
  const part = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b) + 0.05;
"""
#: A state's letter from its chip.
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Records:
    return Records(tmp_path_factory.mktemp("records") / "state")


@pytest.fixture(scope="module")
def lives(records: Records) -> list[Life]:
    return records.fleet(60, 900)


@pytest.fixture(scope="module")
def dashboard(records: Records, lives: list[Life]) -> Iterator[Dashboard]:
    with Dashboard(records.folder) as started:
        yield started


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """A page that must not stumble: errors of scripts, and what the policy had to stop, fail the test."""
    context = browser.new_context(**options)
    context.set_default_timeout(LIMIT_MS)
    context.add_init_script(
        "window.stopped=[];addEventListener('securitypolicyviolation',e=>window.stopped.push(e.violatedDirective))"
    )
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        page.goto(url)
        yield page
        assert errors == []
        assert page.evaluate("window.stopped") == []
    finally:
        context.close()


def ready(page: Page) -> None:
    page.wait_for_selector("html[data-ready] #link[data-state=live]")


def until(page: Page, phase: str, wanted: int) -> None:
    wait(page, f"document.querySelector('#tiles [data-key={phase}] .count').textContent === '{wanted}'")


def wait(page: Page, expression: str) -> None:
    """Asked from outside: the page's own policy forbids what playwright would put into it."""
    until = time.monotonic() + LIMIT_S
    while not page.evaluate(expression):
        assert time.monotonic() < until, f"waited in vain: {expression}; {page.inner_text('body')[:2_000]}"
        page.wait_for_timeout(PAUSE_MS)


# While a story runs -------------------------------------------------------------------------------------------------


def test_the_page_follows_a_real_pool(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    remuda(folder, "up")
    try:
        remuda(folder, "refresh", "--idle-time-sec", "600")
        with Dashboard(folder) as dashboard, opened(browser, dashboard.url) as page:
            ready(page)
            wait(page, "document.getElementById('lanes-empty').textContent.startsWith('No machine yet')")
            remuda(folder, "provision", "--run-id", "41", "--instance-count", "2")
            until(page, "running", 2)
            assert page.inner_text("#runs [data-key] button.name") == "41"
            # The commit comes after the machines run: a look may have come between.
            wait(page, "document.querySelector('#kinds tr:first-child td')?.textContent === 'cold'")
            remuda(folder, "release", "--run-id", "41")
            until(page, "idle", 2)

            page.fill("#subject", "41")
            page.press("#subject", "Enter")
            wait(page, "document.querySelectorAll('#story-lines li').length > 6")
            told = page.inner_text("#story")
            assert "attempt 1 asks for 2 large runners" in told
            assert "the run gives its runners back" in told
            assert told.count("idle, clean, in the pool") == 2
            page.reload()
            wait(page, "document.getElementById('story').open")
            page.press("#story-close", "Enter")

            page.fill("#subject", "42")
            page.press("#subject", "Enter")
            wait(page, "document.getElementById('story-trouble').textContent.includes('known are 41')")
            page.press("#story-close", "Enter")

            remuda(folder, "terminate", "--all", "--yes", "--reason", "the test is over")
            wait(page, "document.getElementById('decisions').textContent.includes('the test is over')")
            # One after the other: a look may have come between.
            until(page, "idle", 0)
    finally:
        remuda(folder, "down")


# Filters ------------------------------------------------------------------------------------------------------------


def test_filters_show_what_is_asked_for_and_survive_a_reload(
    browser: Browser, dashboard: Dashboard, lives: list[Life]
) -> None:
    running = living(lives, State.RUNNING)
    large = [item for item in running if item.resource_class == "large"]
    with opened(browser, dashboard.url) as page:
        ready(page)
        assert page.inner_text("#live") == str(len(living(lives)))
        assert page.inner_text("#shown") == f"{len(lives)} machines"
        page.click("#tiles [data-key=running]")
        wait(page, f"document.getElementById('shown').textContent === '{len(running)} of {len(lives)} machines'")
        page.select_option("#class", "large")
        wait(page, f"document.getElementById('shown').textContent === '{len(large)} of {len(lives)} machines'")
        page.click("#as-table")
        names = page.eval_on_selector_all(
            "#machines button.name[data-subject^=i-]", "all => all.map(e => e.textContent)"
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
        wait(page, f"document.getElementById('shown').textContent === '{len(lives)} machines'")


# Failures -----------------------------------------------------------------------------------------------------------


def test_a_lost_server_is_told_of_and_come_back_to(browser: Browser, tmp_path: Path) -> None:
    records = Records(tmp_path / "state")
    lives = records.fleet(8, 80)
    first = Dashboard(records.folder)
    try:
        with opened(browser, first.url) as page:
            ready(page)
            wait(page, f"document.getElementById('live').textContent === '{len(living(lives))}'")
            first.kill()
            wait(page, "document.getElementById('banner').textContent.startsWith('No connection to the server')")
            assert page.inner_text("#link") == "connection lost"
            # What was known is still there to be read.
            assert page.inner_text("#live") == str(len(living(lives)))
            moved = records.move(living(lives)[0].instance_id)
            with Dashboard(records.folder, port=first.port):
                wait(page, "document.getElementById('banner').hidden")
                page.click("#as-table")
                state = f"#machines [data-key='{moved.instance_id}'] td:nth-child(2)"
                wait(page, f"document.querySelector(\"{state}\").textContent.endsWith('{moved.state.value}')")
                # And it goes on from there.
                moved = records.move(moved.instance_id)
                wait(page, f"document.querySelector(\"{state}\").textContent.endsWith('{moved.state.value}')")
    finally:
        first.kill()


def test_a_proxy_that_refuses_is_asked_seldom_and_come_back_to(browser: Browser, tmp_path: Path) -> None:
    records = Records(tmp_path / "state")
    records.fleet(4, 40)
    asked: list[float] = []

    def refuse(route: Route) -> None:
        asked.append(time.monotonic())
        route.fulfill(status=502, body="Bad Gateway")

    first = Dashboard(records.folder)
    try:
        with opened(browser, first.url) as page:
            page.clock.install()
            page.reload()
            ready(page)
            # The server behind the proxy goes; whatever is asked for meanwhile is refused.
            page.route("**/api/**", refuse)
            first.kill()
            wait(page, "document.getElementById('link').dataset.state === 'lost'")
            for _ in range(60):
                page.clock.run_for(1_000)
                page.wait_for_timeout(PAUSE_MS)
            # One thing at a time, ever more seldom: in a minute, retries that multiplied would be a hundred and more.
            # The page's clock goes on by itself, too: on a busy computer it was more than a minute.
            assert len(asked) <= 40, len(asked)
            while len(asked) < 2:
                page.clock.run_for(1_000)
                page.wait_for_timeout(PAUSE_MS)
            with Dashboard(records.folder, port=first.port):
                page.unroute("**/api/**")
                page.clock.run_for(8_000)
                wait(page, "document.getElementById('link').dataset.state === 'live'")
                assert page.is_hidden("#banner")
    finally:
        first.kill()


def test_a_server_with_too_many_pages_is_told_of(browser: Browser, dashboard: Dashboard, lives: list[Life]) -> None:
    refusal = {"error": {"message": "too many pages are open: 100", "fix": "close one of them"}}
    with opened(browser, "about:blank") as page:
        page.route("**/api/events*", lambda route: route.fulfill(status=503, json=refusal))
        page.goto(dashboard.url)
        wait(page, "document.getElementById('banner')?.textContent.includes('too many pages are open: 100')")
        assert page.inner_text("#live") == str(len(living(lives)))
        page.unroute("**/api/events*")
        wait(page, "document.getElementById('banner').hidden")
        ready(page)


def test_a_store_that_cannot_be_read_is_a_banner(browser: Browser, tmp_path: Path) -> None:
    records = Records(tmp_path / "state")
    records.fleet(4, 40)
    with Dashboard(records.folder) as dashboard, opened(browser, dashboard.url) as page:
        ready(page)
        shutil.move(records.file, tmp_path / "away.db")
        wait(page, "document.getElementById('banner').textContent.startsWith('The store cannot be read')")
        assert re.search(r"The last good look was at \d\d:\d\d:\d\d UTC", page.inner_text("#banner"))
        shutil.move(tmp_path / "away.db", records.file)
        wait(page, "document.getElementById('banner').hidden")


def test_a_page_that_nobody_sees_gives_its_connection_back(
    browser: Browser, dashboard: Dashboard, records: Records, lives: list[Life]
) -> None:
    def turn(page: Page, hidden: str) -> None:
        page.evaluate(
            f"Object.defineProperty(document, 'hidden', {{ value: {hidden}, configurable: true }});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )

    with opened(browser, dashboard.url + "?view=table") as page:
        ready(page)
        turn(page, "true")
        page.wait_for_selector("#link[data-state=paused]")
        name = living(lives)[-1].instance_id
        moved = records.move(name)
        turn(page, "false")
        page.wait_for_selector("#link[data-state=live]")
        state = f"#machines [data-key='{name}'] td:nth-child(2)"
        wait(page, f"document.querySelector(\"{state}\").textContent.endsWith('{moved.state.value}')")


# Names from outside ---------------------------------------------------------------------------------------------------


def test_planted_markup_is_only_text(browser: Browser, tmp_path: Path) -> None:
    records = Records(tmp_path / "state")
    ((record, entries), *_) = records.fleet(3, 30)
    last = entries[-1]
    planted = records.name(
        (record, [*entries, _ending(last)]),
        state=State.RUNNING,
        run_id=IMAGE,
        last_run_id=SCRIPT,
        resource_class=SCRIPT,
        instance_type=IMAGE,
        retire=IMAGE + SCRIPT,
    )
    records.write(planted)
    # What a run asks for and says: a class is its label, and a job's words reach reasons.
    asked, *_ = sample_records.provisions(1, now=last.at, span_s=60)
    course = replace(asked.course, error=f"the job {SCRIPT} failed") if asked.course else None
    job = replace(asked, run_id=SCRIPT, resource_class=IMAGE, why=IMAGE, asked=SCRIPT, course=course)
    sample_records.write(records.file, [], [job], now=last.at)
    with Dashboard(records.folder) as dashboard, opened(browser, dashboard.url + "?view=table") as page:
        ready(page)
        told = page.inner_text(f"#runs [data-key='{job.provision_id}']")
        assert (SCRIPT in told, IMAGE in told, f"the job {SCRIPT} failed" in told) == (True, True, True)
        row = f"#machines [data-key='{record.instance_id}']"
        cells = page.eval_on_selector_all(f"{row} td", "all => all.map(e => e.textContent)")
        assert cells[2] == IMAGE
        assert (cells[3], cells[4]) == (SCRIPT, IMAGE)
        assert cells[8] == IMAGE + SCRIPT
        # Histories come after the records.
        wait(page, f"document.getElementById('decisions').textContent.includes({json.dumps(SCRIPT)})")
        assert SCRIPT in page.eval_on_selector_all("#class option", "all => all.map(e => e.value)")
        page.select_option("#class", SCRIPT)
        page.click(f"{row} button.name >> nth=0")
        wait(page, "document.querySelectorAll('#story-lines li').length > 5")
        assert SCRIPT in page.inner_text("#story")
        page.press("#story-close", "Enter")
        page.click(f"{row} td:nth-child(3) button.name")
        wait(page, "!document.getElementById('story-trouble').hidden")
        page.press("#story-close", "Enter")
        page.click("#as-lanes")
        page.hover("#lanes-canvas", position={"x": 30, "y": 30})
        wait(page, "!document.getElementById('tip').hidden")
        assert IMAGE in page.inner_text("#tip")
        page.goto(dashboard.url + f"#of={IMAGE}")
        wait(page, "document.getElementById('story').open")
        assert page.evaluate("window.hit") is None
        assert page.eval_on_selector_all("main img, dialog img, #tip img, body script", "all => all.length") == 0


def _ending(last: HistoryEntry) -> HistoryEntry:
    return replace(last, transition="retire", source=last.target, target=last.target, why=SCRIPT + IMAGE, run_id=SCRIPT)


# People ---------------------------------------------------------------------------------------------------------------


def test_the_keyboard_is_enough(browser: Browser, dashboard: Dashboard) -> None:
    def focus(page: Page, wanted: str) -> None:
        """A browser may follow a link, and move the focus, only with its next frame."""
        wait(page, f"(document.activeElement.id || document.activeElement.className) === '{wanted}'")

    with opened(browser, dashboard.url) as page:
        ready(page)
        page.keyboard.press("Tab")
        focus(page, "skip")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        page.keyboard.press("Enter")
        focus(page, "lanes")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        chosen = page.inner_text("#chosen")
        assert re.match(r"i-[0-9a-f]{17}: \w+", chosen)
        page.keyboard.press("Enter")
        wait(page, "document.getElementById('story-lines').children.length > 2")
        assert chosen.partition(":")[0] in page.inner_text("#story-title")
        page.keyboard.press("Escape")
        wait(page, "!document.getElementById('story').open")
        focus(page, "lanes")
        page.keyboard.press("t")
        assert page.is_visible("#table")
        page.keyboard.press("/")
        focus(page, "subject")
        page.focus("#tiles [data-key=idle]")
        page.keyboard.press("Space")
        assert page.get_attribute("#tiles [data-key=idle]", "aria-pressed") == "true"


def test_what_has_the_focus_keeps_it_while_rows_come_go_and_move(browser: Browser, dashboard: Dashboard) -> None:
    with opened(browser, dashboard.url) as page:
        ready(page)
        told = page.evaluate("""async () => {
          const { keep, make } = await import("/text.js");
          const list = document.body.appendChild(make("ol"));
          const show = (names) => keep(list, names, {
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
        assert told == [["bcd", "nbcd", "dcbn", "cdbn", "nbdc", "c", "xcy", "yxc", "cc", "c"], [0, "c"]]


def test_a_phone_shows_it_without_scrolling_sideways(browser: Browser, dashboard: Dashboard) -> None:
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


def test_light_and_dark_can_both_be_read(browser: Browser, dashboard: Dashboard) -> None:
    papers: list[str] = []
    for scheme in ("light", "dark"):
        with opened(browser, dashboard.url, color_scheme=scheme) as page:
            ready(page)
            papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert all(ratio >= 4.5 for ratio in page.evaluate(CONTRAST))
            assert all(ratio >= 4.5 for ratio in page.evaluate(CHIPS).values()), page.evaluate(CHIPS)
    assert papers[0] != papers[1]


# The way in -----------------------------------------------------------------------------------------------------------


def test_a_token_is_asked_for_and_leaves_no_trace(browser: Browser, records: Records, lives: list[Life]) -> None:
    token = "a-token-of-the-tests"
    with Dashboard(records.folder, REMUDA_DASHBOARD_TOKEN=token) as dashboard:
        with opened(browser, dashboard.url) as page:
            page.fill("#token", "not the token at all")
            page.press("#token", "Enter")
            page.wait_for_selector("#refused:visible")
            page.fill("#token", token)
            page.press("#token", "Enter")
            ready(page)
            (cookie,) = page.context.cookies()
            assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
            assert token not in str(cookie["value"])
        with opened(browser, f"{dashboard.url}#token={token}") as page:
            ready(page)
            assert page.url == dashboard.url
            # Also where nobody needs to sign in any more.
            page.goto("about:blank")
            page.goto(f"{dashboard.url}?view=table#token={token}")
            ready(page)
            assert page.url == f"{dashboard.url}?view=table"
            page.evaluate(f"location.hash = 'of=7&token={token}'")
            wait(page, "document.getElementById('story').open")
            page.evaluate(f"location.hash = 'token={token}'")
            wait(page, "!document.getElementById('story').open")
            page.fill("#text", "7")
            wait(page, "location.search.includes('text=7')")
            assert page.url == f"{dashboard.url}?text=7&view=table"
        code, told = dashboard.interrupt()
        assert (code, token in told) == (130, False)
