"""A ledger as one page: nothing fetched, no script, names from outside escaped, a policy that says so."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from remuda.cli.rendering import plots
from remuda.cli.rendering.report import KINDS, PHASES, biggest, cost_cuts, headlines, hours, in_order, money
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
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
dl div { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; }
dt { color: var(--soft); font-size: .875rem; } dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.plot, .scroll { overflow-x: auto; } .plot svg { width: 100%; min-width: 38rem; display: block; }
.bar { width: 100%; height: 1.75rem; display: block; border-radius: .25rem; }
.grid { stroke: var(--line); stroke-width: 1; }
text { fill: var(--soft); font: 14px system-ui, sans-serif; }
.y, .end { text-anchor: end; } .middle { text-anchor: middle; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; margin: .5rem 0;
  font-size: .875rem; }
.key { width: .875rem; height: .875rem; margin-right: .375rem; vertical-align: -.0625rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; font-size: .875rem; } .n { text-align: right; white-space: nowrap; }
.k-booting { fill: var(--booting); } .k-claimed { fill: var(--claimed); } .k-running, .k-cold { fill: var(--running); }
.k-releasing, .k-mixed { fill: var(--releasing); } .k-idle, .k-warm { fill: var(--idle); }
.k-ending, .k-failed { fill: var(--ending); } .k-unknown, .k-other { fill: var(--unknown); }
"""


def report_page(ledger: UsageReport, *, pool: str) -> str:
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    span = f"{ledger.since:%Y-%m-%d %H:%M} to {ledger.until:%Y-%m-%d %H:%M} UTC"
    title = f"Remuda: pool {pool}, {span}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>Pool {escape(pool)}</h1>\n<p>{escape(span)}</p>\n"
        + "\n".join(_sections(ledger))
        + "\n</main>\n</body>\n</html>\n"
    )


def _sections(ledger: UsageReport) -> Iterator[str]:
    cards = "".join(f"<div><dt>{escape(what)}</dt><dd>{escape(value)}</dd></div>" for what, value in headlines(ledger))
    yield f"<dl>{cards}</dl>"
    yield from _provisions(ledger)
    yield from _machines(ledger)
    for what, costs in cost_cuts(ledger):
        yield f"<h2>Cost by {escape(what)}</h2>"
        yield _table((what, "cost"), [(name, money(value, ledger.currency)) for name, value in biggest(costs)])
    for title, counts in (("Provisions that failed", ledger.failures), ("Machines retired", ledger.retirements)):
        if counts:
            yield f"<h2>{title}</h2>"
            yield _table(("why", "count"), [(why, str(int(count))) for why, count in biggest(counts)])
    yield "<h2>Notes</h2>"
    priced = f"Prices an hour: {ledger.priced}. " if ledger.priced else ""
    yield f'<p class="note">{escape(priced)}Time is counted to the second, as the records have it.</p>'
    yield from (f'<p class="note">{escape(note)}</p>' for note in ledger.notes)


def _provisions(ledger: UsageReport) -> Iterator[str]:
    yield "<h2>How long runs waited for their runners</h2>"
    if not ledger.points:
        yield "<p>No run asked for any in this time.</p>"
        return
    marks = [
        plots.Mark(
            at=point.at,
            value=point.seconds,
            kind=point.kind,
            title=f"run {point.run_id}: {point.count} in {point.seconds:.2f} s, {point.kind}",
        )
        for point in ledger.points
    ]
    kinds = in_order(ledger.times, KINDS)
    yield plots.legend(kinds)
    label = "Seconds of each provision over time, cold ones apart from warm ones"
    yield plots.scatter(marks, since=ledger.drawn_from, until=ledger.until, label=label)
    rows = [
        (kind, str(ledger.times[kind].count), f"{ledger.times[kind].p50:.2f} s", f"{ledger.times[kind].p95:.2f} s")
        for kind in kinds
    ]
    yield _table(("kind", "count", "p50", "p95"), rows)


def _machines(ledger: UsageReport) -> Iterator[str]:
    yield "<h2>What machines did</h2>"
    if not ledger.hours:
        yield "<p>There was no machine in this time.</p>"
        return
    phases = in_order(ledger.hours, PHASES)
    steps: Sequence[Mapping[str, float]] = [
        {phase.value: count for phase, count in step.items()} for step in ledger.fleet
    ]
    yield plots.legend(phases)
    label = "How many machines there were in each state over time"
    yield plots.stacked(steps, phases, since=ledger.drawn_from, until=ledger.until, label=label)
    yield plots.bar(ledger.hours, phases, label="Machine hours by state", unit="hours")
    total = sum(ledger.hours.values())
    rows = [
        (
            phase,
            hours(ledger.hours[phase]),
            f"{ledger.hours[phase] / total:.0%}",
            money(ledger.costs.by_phase.get(phase, 0.0), ledger.currency),
        )
        for phase in phases
    ]
    yield _table(("state", "time", "share", "cost"), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column says what; the others are numbers."""
    head = "".join(f"<th{_numeric(number)}>{escape(name)}</th>" for number, name in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(f"<td{_numeric(number)}>{escape(cell)}</td>" for number, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _numeric(number: int) -> str:
    return ' class="n"' if number else ""
