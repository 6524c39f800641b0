"""Usage report as JSON document and as terminal tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from remuda.cli.output import format_duration
from remuda.cli.rendering.table import FittedTable, spaced
from remuda.domain.reporting.prices import format_money
from remuda.domain.reporting.timeline import MachinePhase
from remuda.domain.reporting.usage import NO_BOOT_TIME, DurationStats, RunnerSetUsage, UsageReport
from remuda.domain.serialization import to_jsonable

#: Maximum rows of a table; the rest is summed up.
MAX_ROWS = 15
KINDS = ("warm", "mixed", "cold", "failed")
PHASES = tuple(phase.value for phase in MachinePhase)
NO_RUN = "(no run)"
DURATION_COLUMNS = ("kind", "count", "p50", "p95")
SET_COLUMNS = ("set", "jobs", "wait p50", "wait p95", "reused", "results")
PHASE_COLUMNS = ("state", "time", "share", "cost")

_NUMERIC = frozenset({"count", "p50", "p95", "time", "cost", "share", "jobs", "wait p50", "wait p95", "reused"})
#: Maximum number of results in a row; the rest is summed up.
MAX_RESULTS = 5


def report_document(usage: UsageReport, *, pool: str) -> dict[str, Any]:
    savings, costs = usage.savings, usage.costs
    return {
        "pool": pool,
        "since": to_jsonable(usage.since),
        "until": to_jsonable(usage.until),
        "instances": usage.instances,
        "provisions": {"count": usage.provisions, "kinds": dict(usage.kinds)},
        "reuse": {"reused": usage.reused, "created": usage.created, "rate": _rounded(usage.reuse_rate)},
        "provision_seconds": {kind: _times(times) for kind, times in usage.provision_times.items()},
        "ready_seconds": {source: _times(times) for source, times in usage.registration_times.items()},
        "instance_hours": _all_rounded(usage.hours),
        "cost": {
            "currency": usage.currency,
            "prices": usage.prices_as_of,
            "total": _rounded(costs.total),
            "by_state": _all_rounded(costs.by_phase),
            "by_class": _all_rounded(costs.by_class),
            "by_usage": _all_rounded(costs.by_usage),
            "by_type": _all_rounded(costs.by_type),
            "by_run": _all_rounded(costs.by_run),
            "by_repository": _all_rounded(usage.jobs.cost_by_repository),
            "by_workflow": _all_rounded(usage.jobs.cost_by_workflow),
            "unpriced_hours": _all_rounded(costs.unpriced_hours),
        },
        "savings": {
            "boot_seconds": _rounded(savings.boot_s),
            "waiting_seconds": _rounded(savings.waiting_s),
            "boot_hours": _rounded(savings.boot_hours),
            "boot_cost": _rounded(savings.boot_cost),
            "idle_cost": _rounded(savings.idle_cost),
            "net": _rounded(savings.net),
        },
        "runner_sets": {name: _set_document(item) for name, item in usage.jobs.by_set.items()},
        "failures": dict(usage.failures),
        "retirements": dict(usage.retirements),
        "notes": list(usage.notes),
    }


def _set_document(item: RunnerSetUsage) -> dict[str, Any]:
    return {
        "jobs": item.jobs,
        "queue_wait_seconds": _times(item.queue_wait) if item.queue_wait else None,
        "results": dict(item.results),
        "reuse": {"reused": item.reused, "created": item.created, "rate": _rounded(item.reuse_rate)},
    }


def _times(times: DurationStats) -> dict[str, Any]:
    return {"count": times.count, "p50": _rounded(times.p50), "p95": _rounded(times.p95)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _all_rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in values.items()}


# Text -------------------------------------------------------------------------------------------------------------


def format_hours(value: float) -> str:
    return f"{value:.1f} h" if value >= 1 else f"{value * 60:.1f} min"


def largest_first(values: Mapping[str, float], limit: int = MAX_ROWS) -> list[tuple[str, float]]:
    """Sort by value, largest first, and sum up what exceeds the limit."""
    ordered = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    rest = ordered[limit:]
    return [*ordered[:limit], *([(f"{len(rest)} others", sum(value for _, value in rest))] if rest else [])]


def in_order(values: Mapping[str, Any], order: Sequence[str]) -> list[str]:
    return [name for name in order if name in values]


def headlines(usage: UsageReport) -> list[tuple[str, str]]:
    """Return the key figures, as pairs of label and value."""
    rate = usage.reuse_rate
    warm, cold = usage.provision_times.get("warm"), usage.provision_times.get("cold")
    savings = usage.savings
    saved = format_duration(savings.waiting_s) if savings.boot_s is not None else NO_BOOT_TIME
    return [
        ("reused", "no runners yet" if rate is None else f"{rate:.0%} of {usage.reused + usage.created} runners"),
        ("warm provision", f"{warm.p50:.2f} s, p95 {warm.p95:.2f} s" if warm else "none"),
        ("cold provision", f"{cold.p50:.2f} s, p95 {cold.p95:.2f} s" if cold else "none"),
        ("instance time", f"{format_hours(sum(usage.hours.values()))} on {usage.instances} instances"),
        ("cost", format_money(usage.costs.total, usage.currency)),
        ("waiting saved", saved),
        ("cost saved", savings.describe_cost(usage.currency)),
    ]


def report_tables(usage: UsageReport, *, pool: str) -> list[Any]:
    return list(spaced(_tables(usage, pool)))


def _tables(usage: UsageReport, pool: str) -> Iterator[Any]:
    title = f"Pool {pool}, {usage.since:%Y-%m-%d %H:%M} to {usage.until:%Y-%m-%d %H:%M} UTC"
    yield FittedTable(title, ("figure", "value"), headlines(usage))
    if times := duration_rows(usage):
        yield FittedTable("Provisions", DURATION_COLUMNS, times, numeric=_NUMERIC, no_wrap=_NUMERIC)
    if sets := set_rows(usage):
        yield FittedTable("Runner sets", SET_COLUMNS, sets, numeric=_NUMERIC, no_wrap=_NUMERIC)
    if usage.hours:
        yield FittedTable(
            "Instance hours by state", PHASE_COLUMNS, phase_rows(usage), numeric=_NUMERIC, no_wrap=_NUMERIC
        )
    for heading, columns, rows in breakdowns(usage):
        yield FittedTable(heading, columns, rows, numeric=_NUMERIC, no_wrap=_NUMERIC)
    yield from (f"note: {note}" for note in usage.notes)
    if usage.prices_as_of:
        yield f"hourly prices: {usage.prices_as_of}; set your own with --prices"


def duration_rows(usage: UsageReport) -> list[tuple[str, ...]]:
    times = [(kind, usage.provision_times[kind]) for kind in in_order(usage.provision_times, KINDS)]
    return [(kind, str(stats.count), f"{stats.p50:.2f} s", f"{stats.p95:.2f} s") for kind, stats in times]


def set_rows(usage: UsageReport) -> list[tuple[str, ...]]:
    return [(name, *_set_cells(item)) for name, item in usage.jobs.by_set.items()]


def _set_cells(item: RunnerSetUsage) -> tuple[str, ...]:
    wait, rate = item.queue_wait, item.reuse_rate
    results = ", ".join(f"{count} {name}" for name, count in largest_first(item.results, MAX_RESULTS))
    return (
        str(item.jobs),
        f"{wait.p50:.2f} s" if wait else "",
        f"{wait.p95:.2f} s" if wait else "",
        "" if rate is None else f"{rate:.0%}",
        results,
    )


def phase_rows(usage: UsageReport) -> list[tuple[str, ...]]:
    total = sum(usage.hours.values())
    return [
        (
            phase,
            format_hours(usage.hours[phase]),
            f"{usage.hours[phase] / total:.0%}",
            format_money(usage.costs.by_phase.get(phase, 0.0), usage.currency),
        )
        for phase in in_order(usage.hours, PHASES)
    ]


def breakdowns(usage: UsageReport) -> Iterator[tuple[str, tuple[str, str], list[tuple[str, str]]]]:
    """Yield title, columns and rows of each table of costs or reasons that is not empty."""
    by_run = {run or NO_RUN: value for run, value in usage.costs.by_run.items()}
    costs = {
        "class": usage.costs.by_class,
        "usage": usage.costs.by_usage,
        "run": by_run,
        "repository": usage.jobs.cost_by_repository,
        "workflow": usage.jobs.cost_by_workflow,
    }
    for dimension, values in costs.items():
        if values:
            rows = [(name, format_money(value, usage.currency)) for name, value in largest_first(values)]
            yield f"Cost by {dimension}", (dimension, "cost"), rows
    for title, counts in (("Failed provisions", usage.failures), ("Retired instances", usage.retirements)):
        if counts:
            yield title, ("reason", "count"), [(name, str(int(count))) for name, count in largest_first(counts)]
