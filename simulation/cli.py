"""`remuda simulate`: many worlds in virtual time, or one of them to look into."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remuda.cli.output import Output
from remuda.cli.run import EXIT_OK
from remuda.domain.errors import InvariantViolated, UserError
from simulation.campaign import COUNTED, Settings, Summary, run_many
from simulation.coverage import IMPOSSIBLE, STATES, empty_cells
from simulation.faults import Fault, parse_faults, spelled
from simulation.run import Outcome, simulate
from simulation.shrink import shrink, tell

if TYPE_CHECKING:
    from rich.table import Table

#: How many violations are told in full.
MAX_TALES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    seeds: int
    hours: float
    instances: int
    faults: str
    #: One seed alone.
    seed: int | None
    trace: bool
    first: int | None
    workers: int | None


def run_simulate(request: Request, output: Output) -> int:
    faults = parse_faults(request.faults)
    if request.trace and request.seed is None:
        raise UserError("trace needs a seed", field="--trace", fix="give --seed too")
    settings = Settings(hours=request.hours, instances=request.instances, faults=faults)
    if request.seed is not None:
        return _run_one(request.seed, settings, output, trace=request.trace)
    return _run_many(request, settings, output)


def _run_one(seed: int, settings: Settings, output: Output, *, trace: bool) -> int:
    started = time.perf_counter()
    outcome = simulate(settings.plan(seed), keep_trace=trace)
    seconds = time.perf_counter() - started
    summary = Summary()
    summary.add(outcome)
    if trace:
        for line in outcome.lines:
            output.say(str(line))
    tales = [_tale(outcome, settings, output)] if outcome.violation else []
    document = {**_document(summary, settings, seconds), "seed": seed, "trace_hash": outcome.digest, "tales": tales}
    if trace:
        document["trace"] = [str(line) for line in outcome.lines]
    output.result(document)
    output.answer(f"seed {seed}: trace {outcome.digest}", *_story(summary, seconds))
    return InvariantViolated.exit_code if outcome.violation else EXIT_OK


def _run_many(request: Request, settings: Settings, output: Output) -> int:
    first = request.first if request.first is not None else secrets.randbelow(10**9)
    seeds = range(first, first + request.seeds)
    workers = request.workers or min(2, os.cpu_count() or 1)
    started = time.perf_counter()
    summary = _with_progress(seeds, settings, workers, output)
    seconds = time.perf_counter() - started
    found = sorted(summary.violations)[:MAX_TALES]
    tales = [_tale(simulate(settings.plan(seed)), settings, output) for seed in found]
    document = {**_document(summary, settings, seconds), "first_seed": first, "workers": workers, "tales": tales}
    output.result(document)
    told = [*_story(summary, seconds), _coverage(summary), *_unfilled(summary)]
    output.answer(f"seeds {first} to {first + request.seeds - 1}", *told)
    return InvariantViolated.exit_code if summary.violations else EXIT_OK


def _with_progress(seeds: Sequence[int], settings: Settings, workers: int, output: Output) -> Summary:
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

        def done(so_far: Summary) -> None:
            rate = so_far.seeds / max(1e-9, time.perf_counter() - started)
            progress.update(bar, completed=so_far.seeds, rate=f"{rate:.1f}", found=len(so_far.violations))

        return run_many(seeds, settings, workers=workers, done=done)


def _tale(found: Outcome, settings: Settings, output: Output) -> list[str]:
    """What happened, cut down to the least that shows it, and how to see the whole of it."""
    world = f"--seed {found.plan.seed} --hours {settings.hours:g} --instances {settings.instances}"
    again = f"see all of it: python -m simulation {world} --faults {spelled(settings.faults)} --trace"
    lines = [*tell(shrink(found)), again]
    for line in lines:
        output.say(line, style="red" if line.startswith("seed ") else None)
    return lines


def _document(summary: Summary, settings: Settings, seconds: float) -> dict[str, Any]:
    return {
        "hours": settings.hours,
        "instances": settings.instances,
        "seconds": round(seconds, 3),
        "seeds_per_s": round(summary.seeds / max(seconds, 1e-9), 2),
        "simulated_s_per_s": round(summary.simulated_s / max(seconds, 1e-9)),
        **summary.document(),
    }


def _story(summary: Summary, seconds: float) -> list[str]:
    counts = ", ".join(f"{summary.stats[note]} {name}" for name, note in COUNTED.items())
    faults = ", ".join(f"{fault} {summary.faults[fault]}" for fault in Fault if summary.faults[fault])
    pace = (
        f"{summary.seeds} seeds in {seconds:.1f} s: {summary.seeds / max(seconds, 1e-9):.1f} seeds/s, "
        f"{summary.simulated_s / max(seconds, 1e-9):.0f} simulated seconds a second"
    )
    return [
        pace,
        f"{counts}; {summary.checks} invariant checks",
        f"faults: {faults or 'none'}",
        *(f"seed {seed}: {found}" for seed, found in sorted(summary.violations.items())),
        f"{len(summary.violations)} violations",
    ]


def _coverage(summary: Summary) -> Table:
    """Which fault met an instance in which state, how often."""
    from rich.table import Table  # noqa: PLC0415 - rich is slow to import and often not needed

    table = Table(title="faults by the state of the instance they met", title_justify="left")
    table.add_column("fault")
    for state in STATES:
        table.add_column(state, justify="right")
    for fault in Fault:
        if any(summary.coverage[fault, state] for state in STATES):
            table.add_row(fault.value, *(_cell(summary, fault, state) for state in STATES))
    return table


def _cell(summary: Summary, fault: Fault, state: str) -> str:
    count = summary.coverage[fault, state]
    return str(count) if count else "-" if (fault, state) in IMPOSSIBLE else ""


def _unfilled(summary: Summary) -> list[str]:
    """What is empty, and why it cannot be otherwise, or that it could."""
    empty = empty_cells(summary.coverage)
    reasons: dict[str, list[Fault]] = {}
    for (fault, _), reason in IMPOSSIBLE.items():
        faults = reasons.setdefault(reason, [])
        if fault not in faults:
            faults.append(fault)
    return [
        *(f"- {', '.join(faults)}: {reason}" for reason, faults in reasons.items()),
        f"{len(empty)} cells that could be filled are empty: " + ", ".join(f"{fault} {state}" for fault, state in empty)
        if empty
        else "no cell that could be filled is empty",
    ]
