"""`python -m simulation`: simulate many seeds, or one seed with its trace."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import click

from remuda.cli.main import run_app
from remuda.cli.output import Output
from remuda.cli.run import EXIT_OK
from remuda.domain.errors import InvariantViolated, UserError
from simulation.campaign import COUNTED, CampaignSettings, CampaignSummary, run_many, simulate, worker_pool
from simulation.faults import Fault, parse_faults
from simulation.invariants import Violation
from simulation.shrink import report, report_seed

#: Default number of violations that are shrunk and reported in full.
REPORTS = 3

#: Seconds between two lines of progress in a log.
LINE_S = 60.0


@click.command("simulation", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seeds", type=click.IntRange(1, 10_000_000), default=100, help="Number of worlds. (default: 100)")
@click.option(
    "--hours", type=click.FloatRange(0.01, 1_000), default=0.5, help="Simulated hours per world. (default: 0.5)"
)
@click.option("--instances", type=click.IntRange(1, 500), default=10, help="Maximum instances per world. (default: 10)")
@click.option(
    "--faults",
    default="swarm",
    help="swarm (each seed draws half of the faults), few (one to six), all, none, or comma-separated names.",
)
@click.option("--demand", is_flag=True, help="Simulate worlds with runner sets, their jobs and listeners.")
@click.option("--seed", type=click.IntRange(0, 2**63), help="Run this seed only.")
@click.option("--trace", is_flag=True, help="Print every event; requires --seed.")
@click.option("--first-seed", type=click.IntRange(0, 2**63), help="First seed. (default: random)")
@click.option("--workers", type=click.IntRange(1, 256), help="Worker processes. (default: 2)")
@click.option(
    "--reports",
    type=click.IntRange(0, 1_000),
    default=REPORTS,
    help=f"Number of violations to shrink and report in full; the others are only listed. (default: {REPORTS})",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--quiet", "-q", is_flag=True, help="Print the result only.")
def main(
    *,
    seeds: int,
    hours: float,
    instances: int,
    faults: str,
    demand: bool,
    seed: int | None,
    trace: bool,
    first_seed: int | None,
    workers: int | None,
    reports: int,
    as_json: bool,
    quiet: bool,
) -> int:
    """Run the control plane and its agents in virtual time under faults and check every invariant."""
    settings = CampaignSettings(hours=hours, instances=instances, faults=parse_faults(faults), demand=demand)
    output = Output(as_json=as_json, quiet=quiet)
    if seed is not None:
        return run_one(seed, settings, output, trace=trace, reports=reports)
    if trace:
        raise UserError("--trace requires --seed", field="--trace", fix="pass --seed, too")
    first = first_seed if first_seed is not None else secrets.randbelow(10**9)
    workers = workers or min(2, os.cpu_count() or 1)
    return _run_campaign(range(first, first + seeds), settings, workers, output, reports=reports)


def run_one(
    seed: int, settings: CampaignSettings, output: Output, *, trace: bool = False, reports: int = REPORTS
) -> int:
    started = time.perf_counter()
    result = simulate(settings.plan(seed), keep_trace=trace)
    seconds = time.perf_counter() - started
    summary = CampaignSummary()
    summary.add(result)
    lines = [str(line) for line in result.lines]
    for line in lines:
        output.say(line)
    found = [report(result, settings)] if result.violation and reports else []
    _print_reports(found, output)
    document = {**_document(summary, settings, seconds), "seed": seed, "trace_hash": result.digest, "reports": found}
    if trace:
        document["trace"] = lines
    output.result(document)
    return _end(summary, f"seed {seed}: trace {result.digest}", seconds, output)


def _run_campaign(seeds: range, settings: CampaignSettings, workers: int, output: Output, *, reports: int) -> int:
    started = time.perf_counter()
    summary = _run_with_progress(seeds, settings, workers, output)
    seconds = time.perf_counter() - started
    violating = sorted(summary.violations)[:reports]
    found: list[list[str]] = []
    if violating:
        with worker_pool(min(workers, len(violating))) as pool:
            found = _print_reports(pool.map(report_seed, violating, repeat(settings)), output)
    output.result(
        {**_document(summary, settings, seconds), "first_seed": seeds[0], "workers": workers, "reports": found}
    )
    return _end(summary, f"seeds {seeds[0]} to {seeds[-1]}", seconds, output)


def _run_with_progress(
    seeds: Sequence[int], settings: CampaignSettings, workers: int, output: Output
) -> CampaignSummary:
    shown: set[int] = set()

    def show_violations(so_far: CampaignSummary) -> None:
        for seed in sorted(so_far.violations.keys() - shown):
            shown.add(seed)
            output.say(_violation_line(seed, so_far.violations[seed]), style="red")

    if output.is_quiet:
        return run_many(seeds, settings, workers=workers)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]} seeds/s, {task.fields[found]} violations"),
        TimeRemainingColumn(),
    )
    started = time.perf_counter()
    with Progress(*columns, console=output.console) as progress:
        bar = progress.add_task("", total=len(seeds), rate="-", found=0)
        line_due = started + LINE_S

        def done(so_far: CampaignSummary) -> None:
            nonlocal line_due
            show_violations(so_far)
            now = time.perf_counter()
            rate = so_far.seeds / max(1e-9, now - started)
            # A log does not show the bar.
            if not output.console.is_terminal and now >= line_due:
                line_due = now + LINE_S
                output.say(f"{so_far.seeds} of {len(seeds)} seeds, {rate:.1f} seeds/s")
            progress.update(bar, completed=so_far.seeds, rate=f"{rate:.1f}", found=len(so_far.violations))

        return run_many(seeds, settings, workers=workers, done=done)


def _print_reports(reports: Iterable[list[str]], output: Output) -> list[list[str]]:
    """Print each report as soon as it is done. Return all of them."""
    done = []
    for lines in reports:
        for line in lines:
            output.say(line, style="red" if line.startswith("seed ") else None)
        done.append(lines)
    return done


def _violation_line(seed: int, violation: Violation) -> str:
    return f"seed {seed}: {violation}"


def _document(summary: CampaignSummary, settings: CampaignSettings, seconds: float) -> dict[str, Any]:
    return {
        "hours": settings.hours,
        "instances": settings.instances,
        "seconds": round(seconds, 3),
        "seeds_per_s": round(summary.seeds / max(seconds, 1e-9), 2),
        "simulated_s_per_s": round(summary.simulated_s / max(seconds, 1e-9)),
        **summary.document(),
    }


def _text(summary: CampaignSummary, seconds: float) -> list[str]:
    counts = ", ".join(f"{summary.stats[statistic]} {name}" for name, statistic in COUNTED.items())
    faults = ", ".join(f"{fault} {summary.faults[fault]}" for fault in Fault if summary.faults[fault])
    pace = (
        f"{summary.seeds} seeds in {seconds:.1f} s: {summary.seeds / max(seconds, 1e-9):.1f} seeds/s, "
        f"{summary.simulated_s / max(seconds, 1e-9):.0f} simulated seconds per second"
    )
    return [
        pace,
        f"{counts}; {summary.checks} invariant checks",
        f"faults: {faults or 'none'}",
        *(_violation_line(seed, found) for seed, found in sorted(summary.violations.items())),
        verdict(summary),
    ]


def verdict(summary: CampaignSummary) -> str:
    result = "FAILED" if summary.violations else "passed"
    return f"verdict: {result} ({len(summary.violations)} violations in {summary.seeds} seeds)"


def _end(summary: CampaignSummary, title: str, seconds: float, output: Output) -> int:
    """End with the verdict: on stdout, or on stderr if stdout is a JSON document."""
    output.answer(title, *_text(summary, seconds))
    if output.as_json:
        output.say(verdict(summary), style="bold red" if summary.violations else "bold green")
    return InvariantViolated.exit_code if summary.violations else EXIT_OK


if __name__ == "__main__":
    sys.exit(run_app(main, sys.argv[1:]))
