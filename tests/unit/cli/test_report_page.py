"""The report as a page: self-contained, escaped, under a policy of its own, well-formed, whatever the numbers are."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from datetime import timedelta
from html.parser import HTMLParser
from io import StringIO
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from remuda.cli.rendering import plots
from remuda.cli.rendering.report import MAX_ROWS, biggest, report_document, report_tables
from remuda.cli.rendering.report_page import report_page
from remuda.domain.instance import State
from remuda.domain.provision_outcome import AcquiredRunner, ProvisionOutcome, RunnerSource
from remuda.domain.reporting.prices import PriceTable
from remuda.domain.reporting.usage import UsageReport, usage_report
from tests.support.records import at, entry, instance, instance_id, provision

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=y>"


def made(run_id: str = "41", why: str = "its time is up", error: str = "") -> UsageReport:
    life = instance(state=State.TERMINATED, created_at=at(0), threshold=at(900), resource_class="large")
    history = [
        entry("create", at=at(0), source="", target="created", run_id=run_id),
        entry("commit", at=at(60), source="created", target="running", run_id=run_id),
        entry("end-running", at=at(900), source="running", target="terminating", run_id=run_id, why=why),
        entry("confirm", at=at(960), source="terminating", target="terminated", run_id=run_id),
    ]
    taken = AcquiredRunner(instance_id=instance_id(1), source=RunnerSource.CREATED, seconds=60)
    cold = ProvisionOutcome(ended_at=at(60), seconds=60.0, created=1, taken=(taken,), error=error)
    warm = ProvisionOutcome(ended_at=at(60), seconds=0.5, reused=1, taken=(replace(taken, source=RunnerSource.POOL),))
    provisions = [provision(1, run_id=run_id, course=cold), provision(2, run_id=run_id, course=warm)]
    prices = PriceTable(region="us-east-1", dated="2026-10", on_demand={"c6i.large": 0.085})
    return usage_report(provisions, [life], {life.instance_id: history}, prices, since=at(-3_600), until=at(3_600))


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.policy = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = {name: value or "" for name, value in attrs}
        self.attributes += named.items()
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = named["content"]


def test_it_fetches_nothing_and_runs_nothing() -> None:
    text = report_page(made(), pool="default")
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "form", "base"} & set(page.tags)
    assert not {name for name, _ in page.attributes if name in {"style", "src", "href"} or name.startswith("on")}
    assert "http://" not in text
    assert "https://" not in text


def test_its_policy_allows_its_own_style_and_nothing_else() -> None:
    text = report_page(made(), pool="default")
    found = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert found is not None
    digest = base64.b64encode(hashlib.sha256(found.group(1).encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert Page(text).policy == policy


def test_names_from_outside_are_escaped_everywhere() -> None:
    hostile = made(run_id=HOSTILE, why=HOSTILE, error=HOSTILE)
    text = report_page(replace(hostile, notes=(HOSTILE,)), pool=HOSTILE)
    page = Page(text)
    assert not {"script", "img"} & set(page.tags)
    assert "<script" not in text
    assert HOSTILE.replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;").replace("'", "&#x27;") in text


def test_every_plot_is_well_formed_and_has_a_name() -> None:
    text = report_page(made(), pool="default")
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    named = [ET.fromstring(drawing) for drawing in drawings]  # noqa: S314 - our own
    assert sum(bool(drawing.get("aria-label")) for drawing in named) == 3


def test_it_is_made_for_small_screens_and_dark_rooms() -> None:
    text = report_page(made(), pool="default")
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert '<html lang="en">' in text


def test_an_empty_time_is_a_page_too() -> None:
    nothing = usage_report([], [], {}, PriceTable(), since=at(0), until=at(1))
    text = report_page(nothing, pool="default")
    assert "No run asked for any in this time." in text
    assert "There was no machine in this time." in text
    assert "no runner yet" in text


def test_tables_and_documents_say_the_same() -> None:
    found = made()
    console = Console(file=StringIO(), width=100, highlight=False)
    for part in report_tables(found, pool="default"):
        console.print(part)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    document = report_document(found, pool="default")
    assert "50% of 2 runners" in text
    assert document["reuse"] == {"reused": 1, "created": 1, "rate": 0.5}
    assert document["provision_seconds"]["cold"] == {"count": 1, "p50": 60.0, "p95": 60.0}
    assert document["cost"]["total"] == pytest.approx(0.085 * 960 / 3_600, abs=1e-6)
    assert sum(document["cost"]["by_run"].values()) == pytest.approx(document["cost"]["total"], abs=1e-5)
    assert document["saved"]["waiting_seconds"] == 59.5


def test_what_does_not_fit_is_summed_up() -> None:
    shown = biggest({str(number): float(number) for number in range(100)})
    assert len(shown) == MAX_ROWS + 1
    assert shown[0] == ("99", 99.0)
    assert shown[-1] == ("85 others", sum(range(85)))


def test_many_marks_are_thinned_and_the_slowest_stay() -> None:
    marks = [plots.Mark(at=at(number), value=float(number), kind="warm", title="") for number in range(20_000)]
    drawing = plots.scatter(marks, since=at(0), until=at(20_000), label="x")
    assert drawing.count("<circle") <= plots.MAX_MARKS
    assert len(drawing) < 300_000
    kept = {mark.value for mark in plots._thinned(marks)}
    assert set(range(19_900, 20_000)) <= kept


@given(
    st.lists(st.dictionaries(st.sampled_from(["idle", "running"]), st.floats(0, 1e5)), min_size=1, max_size=9),
    st.lists(st.tuples(st.floats(-10, 100), st.floats(0, 1e6)), max_size=9),
    st.floats(0, 90),
)
def test_plots_stay_inside_their_frame(
    steps: list[dict[str, float]], marks: list[tuple[float, float]], length_s: float
) -> None:
    until = at(0) + timedelta(seconds=length_s)
    area = plots.stacked(steps, ["idle", "running"], since=at(0), until=until, label="x")
    dots = [plots.Mark(at=at(seconds), value=value, kind="warm", title="t") for seconds, value in marks]
    dotted = plots.scatter(dots, since=at(0), until=until, label="x")
    for drawing in (area, dotted):
        ET.fromstring(drawing)  # noqa: S314 - our own
    numbers = re.findall(r"([\d.]+),([\d.]+)", " ".join(re.findall(r'points="([^"]*)"', area)))
    numbers += re.findall(r'cx="([\d.-]+)" cy="([\d.-]+)"', dotted)
    assert all(plots.LEFT <= float(x) <= plots.WIDTH and 0 <= float(y) <= plots.HEIGHT for x, y in numbers)
