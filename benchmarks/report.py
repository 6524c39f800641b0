"""Results of a benchmark run as tables, JSON, plots and docs page."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from benchmarks import curves
from benchmarks.curves import Bar
from benchmarks.figures import Figure, FigureKind, GrowthPoint, ListenerPoint, Results
from remuda.cli.terminal import PlainConsole

BEGIN = "<!-- generated: figures -->"
END = "<!-- end of figures -->"
#: Columns of the growth table, and their alignment.
GROWTH_COLUMNS: Mapping[str, Literal["left", "right"]] = {
    "operation": "left",
    "live": "right",
    "old records": "right",
    "calls": "right",
    "× time of the smallest pool": "right",
    "by service": "left",
}
LISTENER_COLUMNS = ("sets", "machines", "jobs/s", "cores", "memory", "DynamoDB / min", "SQS / min", "GitHub / min")
_NUMBER = re.compile(r"[\d.,]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkRun:
    """One run of the benchmarks."""

    at: datetime
    seconds: float
    results: Results

    def document(self) -> dict[str, Any]:
        return {
            "at": self.at.isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 1),
            "machine": machine(),
            "figures": [figure.document() for figure in self.results.figures],
            "growth": [asdict(point) for point in self.results.points],
            "listeners": [asdict(point) for point in self.results.listeners],
        }


def machine() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


# Tables -----------------------------------------------------------------------------------------------------------


def show(results: Results, console: PlainConsole) -> None:
    for section, figures in _sections(results).items():
        table = Table(box=box.SIMPLE_HEAD, title=section or "Figures", title_justify="left")
        for name in ("figure", "predecessor"):
            table.add_column(name, overflow="fold")
        for name in ("limit", "measured", "floor", "× floor", "× with waits"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("")
        for figure in figures:
            verdict = Text("met", style="green") if figure.met else Text("missed", style="bold red")
            table.add_row(*_cells(figure), verdict)
        console.print(table)
    if results.points:
        console.print(_growth_table(results))
    if results.listeners:
        table = Table(box=box.SIMPLE_HEAD, title="Growth of the listener", title_justify="left")
        for name in LISTENER_COLUMNS:
            table.add_column(name, justify="right")
        for point in results.listeners:
            table.add_row(*_listener_cells(point))
        console.print(table)


def _sections(results: Results) -> Mapping[str, Sequence[Figure]]:
    """The figures by heading, those without one first."""
    headings = sorted({figure.section for figure in results.figures})
    return {each: [figure for figure in results.figures if figure.section == each] for each in headings}


def _growth_table(results: Results) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Growth", title_justify="left")
    for name, justify in GROWTH_COLUMNS.items():
        table.add_column(name, justify=justify)
    for point in results.points:
        table.add_row(*_growth_cells(results, point))
    return table


def _growth_cells(results: Results, point: GrowthPoint) -> tuple[str, ...]:
    by_service = ", ".join(f"{service} {number}" for service, number in point.calls.items())
    ratio = f"{results.ratio(point):.1f}"
    return point.operation, f"{point.live:,}", f"{point.old:,}", f"{point.total:,}", ratio, by_service


def _listener_cells(point: ListenerPoint) -> tuple[str, ...]:
    calls = (f"{point.calls.get(service, 0):,}" for service in ("dynamodb", "sqs", "github"))
    cost = f"{point.cpu_share:.2f}", f"{point.memory_mb:.0f} MB"
    return f"{point.sets:,}", f"{point.machines:,}", f"{point.jobs_per_s:g}", *cost, *calls


def _cells(figure: Figure) -> tuple[str, ...]:
    limit = f"≤ {_shown(figure.limit, figure)}"
    if figure.max_floors is not None:
        limit += f", {figure.max_floors:g} ×"
    return (
        figure.name,
        figure.predecessor,
        limit,
        _shown(figure.measured, figure),
        "" if figure.floor is None else _shown(figure.floor, figure),
        "" if figure.ratio is None else f"{figure.ratio:.1f}",
        "" if figure.ratio_with_waits is None else f"{figure.ratio_with_waits:.1f}",
    )


def _shown(value: float, figure: Figure) -> str:
    if figure.unit == "s":
        return f"{value:.2f} s"
    number = f"{value:,.1f}".removesuffix(".0")
    return f"{number} {figure.unit}" if figure.unit in {"MB", "%"} else number


# Docs page --------------------------------------------------------------------------------------------------------


def write_docs(run: BenchmarkRun, docs: Path) -> None:
    folder = docs / "benchmarks"
    folder.mkdir(exist_ok=True)
    (folder / "figures.json").write_text(json.dumps(run.document(), indent=1) + "\n", encoding="utf-8")
    for name, drawing in plots(run.results).items():
        (folder / name).write_text(drawing, encoding="utf-8")
    page = docs / "benchmarks.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{markdown(run)}\n{END}{after}", encoding="utf-8")


def markdown(run: BenchmarkRun) -> str:
    host = machine()
    found = run.results.figures
    met = sum(figure.met for figure in found)
    lines = [
        (
            f"Measured on {run.at:%d %B %Y}, {host['system']} {host['processor']} with {host['cores']} cores, Python "
            f"{host['python']}, in {run.seconds / 60:.0f} minutes: {met} of {len(found)} limits are met."
        ),
        "",
    ]
    sections = dict(_sections(run.results))
    lines += _figure_lines(sections.pop("", ()))
    if run.results.points:
        rule = ("--:" if justify == "right" else "---" for justify in GROWTH_COLUMNS.values())
        lines += ["", f"| {' | '.join(GROWTH_COLUMNS)} |", f"|{'|'.join(rule)}|"]
        lines += [f"| {' | '.join(_growth_cells(run.results, point))} |" for point in run.results.points]
    for section, figures in sections.items():
        lines += ["", f"### {section}", "", *_figure_lines(figures)]
    if run.results.listeners:
        lines += ["", "### Growth of the listener", ""]
        lines += [f"| {' | '.join(LISTENER_COLUMNS)} |", f"|{'|'.join('--:' for _ in LISTENER_COLUMNS)}|"]
        lines += [f"| {' | '.join(_listener_cells(point))} |" for point in run.results.listeners]
    return "\n".join(lines)


def _figure_lines(figures: Sequence[Figure]) -> list[str]:
    notes = [f"- {figure.name}: {figure.note}." for figure in figures if figure.note]
    return [
        "| figure | predecessor | limit | measured | floor | × floor | × with waits | |",
        "|---|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(_cells(figure))} | {'met' if figure.met else '**missed**'} |" for figure in figures),
        *(["", *notes] if notes else ()),
    ]


def plots(results: Results) -> dict[str, str]:
    """Return the plots by file name."""
    bars = [
        Bar(name=each.name, measured=each.measured, limit=each.limit, predecessor=first_number(each.predecessor))
        for each in results.figures
        if each.kind is FigureKind.TIME and first_number(each.predecessor)
    ]
    drawn: dict[str, str] = {}
    if bars:
        title = "Seconds: measured, limit (line), predecessor (grey)"
        drawn["predecessor.svg"] = curves.bars(bars, title=title, unit=" s")
    old = max((point.old for point in results.points), default=0)
    for name, quantity, value in (
        ("growth-calls", "Calls", lambda point: float(point.total)),
        ("growth-time", "Time relative to the smallest pool", results.ratio),
    ):
        for number, suffix in ((0, ""), (old, "-old")) if old else ():
            lines: dict[str, list[tuple[float, float]]] = {}
            for point in results.points:
                if point.old == number:
                    lines.setdefault(point.operation, []).append((float(point.live), value(point)))
            title = f"{quantity} by live instances, {number:,} old records"
            drawn[f"{name}{suffix}.svg"] = curves.lines(lines, title=title, x_label="live instances")
    by_sets: dict[str, list[ListenerPoint]] = {}
    for listener in results.listeners:
        by_sets.setdefault(f"{listener.sets} sets" if listener.sets > 1 else "1 set", []).append(listener)
    if by_sets:
        cores = {name: [(float(each.machines), each.cpu_share) for each in group] for name, group in by_sets.items()}
        calls = {
            name: [(float(each.machines), float(sum(each.calls.values()))) for each in group]
            for name, group in by_sets.items()
        }
        label = "machines of the sets"
        drawn["listener-cores.svg"] = curves.lines(cores, title="Cores used by a listener", x_label=label)
        drawn["listener-calls.svg"] = curves.lines(calls, title="Calls per minute of a listener", x_label=label)
    return drawn


def first_number(text: str) -> float | None:
    """Return the first number of a predecessor's result, which is the smaller one of a range."""
    found = _NUMBER.search(text)
    return float(found[0].replace(",", "")) if found and "·" not in text else None
