"""What benchmarks make of their figures: verdicts, tables, plots."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from benchmarks.figures import Figure, Kind, Point, Results, percentile
from benchmarks.report import BEGIN, END, Run, first_number, plots, show, write_docs


def figure(**changed: Any) -> Figure:
    values: dict[str, Any] = {
        "name": "warm provision, N = 1",
        "unit": "s",
        "before": "0.9 s",
        "most": 0.35,
        "ours": 0.3,
        "kind": Kind.TIME,
    }
    return Figure(**{**values, **changed})


def point(live: int, old: int, operation: str = "refresh") -> Point:
    return Point(operation=operation, live=live, old=old, seconds=0.1 * live, calls={"dynamodb": live, "ec2": 4})


RUN = Run(
    at=datetime(2026, 1, 5, tzinfo=UTC),
    seconds=60.0,
    results=Results(
        figures=(figure(), figure(name="calls <much>", unit="calls", kind=Kind.COUNT, most=3, ours=4)),
        points=tuple(point(live, old) for live in (10, 100) for old in (0, 1_000)),
    ),
)


@pytest.mark.parametrize(
    ("changed", "met"),
    [
        ({}, True),
        ({"ours": 0.36}, False),
        ({"floor_with_waits": 0.1, "most_floors": 3.0}, True),
        ({"floor_with_waits": 0.09, "most_floors": 3.0}, False),
        ({"floor_with_waits": 0.09}, True),
    ],
)
def test_a_figure_is_met_where_both_of_its_limits_are(changed: dict[str, Any], met: bool) -> None:  # noqa: FBT001
    assert figure(**changed).met is met


def test_only_counts_fail_a_run_that_is_not_strict() -> None:
    late, many = figure(ours=1.0), figure(kind=Kind.COUNT, ours=1.0)
    results = Results(figures=(figure(), late, many))
    assert results.missed(strict=False) == [many]
    assert results.missed(strict=True) == [late, many]


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(number) for number in range(100)], 0.99) == 99.0


@pytest.mark.parametrize(
    ("text", "number"), [("10\u201311 s", 10.0), ("1,503", 1503.0), ("—", None), ("10·⌈t/10⌉ s", None), ("~1 s", 1.0)]
)
def test_what_was_measured_elsewhere_is_read(text: str, number: float | None) -> None:
    assert first_number(text) == number


def test_the_tables_name_what_is_not_met() -> None:
    said = io.StringIO()
    show(RUN.results, Console(file=said, width=170))
    lines = {line.split("  ")[1]: line for line in said.getvalue().splitlines() if "met" in line}
    assert "not met" not in lines["warm provision, N = 1"]
    assert "not met" in lines["calls <much>"]


def test_plots_are_well_formed() -> None:
    drawn = plots(RUN.results)
    assert set(drawn) == {
        "against.svg",
        "growth-calls.svg",
        "growth-calls-old.svg",
        "growth-seconds.svg",
        "growth-seconds-old.svg",
    }
    for text in drawn.values():
        assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314 - our own


def test_the_docs_are_written_between_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        write_docs(RUN, tmp_path)
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"before\n{BEGIN}\nMeasured on 05 January 2026")
        assert text.endswith(f"{END}\nafter\n")
        assert "old\n" not in text
        assert "1 of 2 limits are met" in text
    assert (tmp_path / "benchmarks" / "figures.json").exists()
