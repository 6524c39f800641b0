"""Usage report as a self-contained HTML page without scripts, protected by a content security policy."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from remuda.cli.rendering import plots
from remuda.cli.rendering.report import (
    DURATION_COLUMNS,
    KINDS,
    PHASE_COLUMNS,
    PHASES,
    SET_COLUMNS,
    breakdowns,
    duration_rows,
    headlines,
    in_order,
    phase_rows,
    set_rows,
)
from remuda.domain.reporting.usage import UsageReport

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --card: #f6f8fa;
  --booting: #b57a00; --claimed: #a6598a; --running: #0072b2; --releasing: #2f93c9; --idle: #00805c; --ending: #c2500a;
  --unknown: #7d8590; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #30363d;
  --card: #161b22; --booting: #e69f00; --claimed: #cc79a7; --running: #4aa3df; --releasing: #7cc7f2; --idle: #2fbf93;
  --ending: #f0763a; --unknown: #8b949e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.25rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p, .note { color: var(--soft); margin: .25rem 0; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(13rem, 45%), 1fr)); gap: .75rem;
  margin: 1.25rem 0; }
dl div { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; }
dt { color: var(--soft); font-size: .875rem; } dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.chart { container-type: inline-size; } .hint { display: none; font-size: .875rem; }
@container (max-width: 38rem) { .hint { display: block; } }
/* From right to left: a scrolled chart shows the newest time first. */
.plot, .scroll { overflow-x: auto; } .plot { direction: rtl; }
.plot svg { direction: ltr; width: 100%; min-width: 38rem; display: block; }
.bar { width: 100%; height: 1.75rem; display: block; border-radius: .25rem; }
.grid { stroke: var(--line); stroke-width: 1; }
text { fill: var(--soft); font: 14px system-ui, sans-serif; }
.x { text-anchor: middle; } a { color: inherit; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; margin: .5rem 0;
  font-size: .875rem; }
.key { width: .875rem; height: .875rem; margin-right: .375rem; vertical-align: -.0625rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: break-word; max-width: min(24rem, 60vw); }
th { color: var(--soft); font-weight: 500; font-size: .875rem; } .n { text-align: right; white-space: nowrap; }
.k-booting { fill: var(--booting); } .k-claimed { fill: var(--claimed); } .k-running, .k-cold { fill: var(--running); }
.k-releasing, .k-mixed { fill: var(--releasing); } .k-idle, .k-warm { fill: var(--idle); }
.k-ending, .k-failed { fill: var(--ending); } .k-unknown, .k-other { fill: var(--unknown); }
"""


def report_page(usage: UsageReport, *, pool: str) -> str:
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    span = f"{usage.since:%Y-%m-%d %H:%M} to {usage.until:%Y-%m-%d %H:%M} UTC"
    title = f"Remuda: pool {pool}, {span}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>Remuda: pool {escape(pool)}</h1>\n<p>{escape(span)}</p>\n"
        + "\n".join(_sections(usage))
        + "\n</main>\n</body>\n</html>\n"
    )


def _sections(usage: UsageReport) -> Iterator[str]:
    cards = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in headlines(usage))
    yield f"<dl>{cards}</dl>"
    yield from _provisions(usage)
    if sets := set_rows(usage):
        yield "<h2>Runner sets</h2>"
        yield _table(SET_COLUMNS, sets, label="Runner sets")
    yield from _instances(usage)
    for title, columns, rows in breakdowns(usage):
        yield f"<h2>{escape(title)}</h2>"
        links = usage.run_urls if columns[0] == "run" else {}
        yield _table(columns, rows, label=title, links=links)
    yield "<h2>Notes</h2>"
    priced = f"Hourly prices: {usage.prices_as_of}. " if usage.prices_as_of else ""
    yield f'<p class="note">{escape(priced)}Time is counted per second.</p>'
    yield from (f'<p class="note">{escape(note)}</p>' for note in usage.notes)


def _provisions(usage: UsageReport) -> Iterator[str]:
    yield "<h2>Provision times</h2>"
    if not usage.points:
        yield "<p>No provisions in this period.</p>"
        return
    points = [
        plots.ScatterPoint(
            at=point.at,
            value=point.seconds,
            kind=point.kind,
            title=f"run {point.run_id}: {point.count} in {point.seconds:.2f} s, {point.kind}",
        )
        for point in usage.points
    ]
    kinds = in_order(usage.provision_times, KINDS)
    yield plots.legend(kinds)
    label = "Duration of each provision over time, by kind"
    yield plots.scatter(points, since=usage.chart_start, until=usage.until, label=label)
    yield _table(DURATION_COLUMNS, duration_rows(usage), label="Provision times by kind")


def _instances(usage: UsageReport) -> Iterator[str]:
    yield "<h2>Instances by state</h2>"
    if not usage.hours:
        yield "<p>No instances in this period.</p>"
        return
    phases = in_order(usage.hours, PHASES)
    steps: Sequence[Mapping[str, float]] = [
        {phase.value: count for phase, count in step.items()} for step in usage.fleet
    ]
    yield plots.legend(phases)
    label = "Number of instances in each state over time"
    yield plots.stacked(steps, phases, since=usage.chart_start, until=usage.until, label=label)
    yield plots.bar(usage.hours, phases, label="Instance hours by state", unit="hours")
    yield _table(PHASE_COLUMNS, phase_rows(usage), label="Instance hours by state")


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, label: str, links: Mapping[str, str] | None = None
) -> str:
    """Build a table whose first column is text, with links if given, and whose other columns are numbers."""
    head = "".join(f"<th{_numeric(number)}>{escape(name)}</th>" for number, name in enumerate(columns))
    body = "".join(
        f"<tr><td>{_linked(row[0], links or {})}</td>"
        + "".join(f'<td class="n">{escape(value)}</td>' for value in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _linked(name: str, links: Mapping[str, str]) -> str:
    url = links.get(name)
    return f'<a href="{escape(url)}" rel="noreferrer">{escape(name)}</a>' if url else escape(name)


def _numeric(number: int) -> str:
    return ' class="n"' if number else ""
