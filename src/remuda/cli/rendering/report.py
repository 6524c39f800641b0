"""A ledger for programs and as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from remuda.cli.rendering.tables import duration, table
from remuda.domain.reporting.timeline import MachinePhase
from remuda.domain.reporting.usage import DurationStats, UsageReport
from remuda.domain.serialization import to_jsonable

#: How many runs, reasons and types a table shows; the others are summed up.
MAX_ROWS = 15
KINDS = ("warm", "mixed", "cold", "failed")
PHASES = tuple(phase.value for phase in MachinePhase)
NO_RUN = "(no run)"

_NUMBERS = frozenset({"count", "p50", "p95", "time", "cost", "share"})


def report_document(ledger: UsageReport, *, pool: str) -> dict[str, Any]:
    savings, costs = ledger.savings, ledger.costs
    return {
        "pool": pool,
        "since": to_jsonable(ledger.since),
        "until": to_jsonable(ledger.until),
        "instances": ledger.instances,
        "provisions": {"count": ledger.provisions, "kinds": dict(ledger.kinds)},
        "reuse": {"reused": ledger.reused, "created": ledger.created, "rate": _rounded(ledger.reuse_rate)},
        "provision_seconds": {kind: _times(times) for kind, times in ledger.times.items()},
        "ready_seconds": {source: _times(times) for source, times in ledger.ready.items()},
        "machine_hours": _all_rounded(ledger.hours),
        "cost": {
            "currency": ledger.currency,
            "prices": ledger.priced,
            "total": _rounded(costs.total),
            "by_state": _all_rounded(costs.by_phase),
            "by_class": _all_rounded(costs.by_class),
            "by_usage": _all_rounded(costs.by_usage),
            "by_type": _all_rounded(costs.by_type),
            "by_run": _all_rounded(costs.by_run),
            "unpriced_hours": _all_rounded(costs.unpriced_hours),
        },
        "saved": {
            "boot_seconds": _rounded(savings.boot_s),
            "waiting_seconds": _rounded(savings.waiting_s),
            "boot_hours": _rounded(savings.boot_hours),
            "boot_cost": _rounded(savings.boot_cost),
            "idle_cost": _rounded(savings.idle_cost),
            "net": _rounded(savings.net),
        },
        "failures": dict(ledger.failures),
        "retirements": dict(ledger.retirements),
        "notes": list(ledger.notes),
    }


def _times(times: DurationStats) -> dict[str, Any]:
    return {"count": times.count, "p50": _rounded(times.p50), "p95": _rounded(times.p95)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _all_rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in values.items()}


# For people -------------------------------------------------------------------------------------------------------


def money(value: float, currency: str) -> str:
    digits = 2 if abs(value) >= 1 or value == 0 else 4
    return f"{value:.{digits}f} {currency}"


def hours(value: float) -> str:
    return f"{value:.1f} h" if value >= 1 else f"{value * 60:.1f} min"


def biggest(values: Mapping[str, float], limit: int = MAX_ROWS) -> list[tuple[str, float]]:
    """The biggest first; what is left over in one."""
    ordered = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    rest = ordered[limit:]
    return [*ordered[:limit], *([(f"{len(rest)} others", sum(value for _, value in rest))] if rest else [])]


def in_order(values: Mapping[str, Any], order: Sequence[str]) -> list[str]:
    return [name for name in order if name in values]


def headlines(ledger: UsageReport) -> list[tuple[str, str]]:
    """What a person asks first: the question and the answer."""
    rate = ledger.reuse_rate
    warm, cold = ledger.times.get("warm"), ledger.times.get("cold")
    savings = ledger.savings
    waited = duration(savings.waiting_s) if savings.boot_s is not None else "not known: nothing was booted"
    return [
        ("reused", "no runner yet" if rate is None else f"{rate:.0%} of {ledger.reused + ledger.created} runners"),
        ("warm provision", f"{warm.p50:.2f} s, p95 {warm.p95:.2f} s" if warm else "none"),
        ("cold provision", f"{cold.p50:.2f} s, p95 {cold.p95:.2f} s" if cold else "none"),
        ("machine time", f"{hours(sum(ledger.hours.values()))} of {ledger.instances} machines"),
        ("cost", money(ledger.costs.total, ledger.currency)),
        ("waiting saved", waited),
        ("machine cost saved", f"{money(savings.net, ledger.currency)} (boots less idle time)"),
    ]


def report_tables(ledger: UsageReport, *, pool: str) -> list[Any]:
    return list(_tables(ledger, pool))


def _tables(ledger: UsageReport, pool: str) -> Iterator[Any]:
    title = f"Pool {pool}, {ledger.since:%Y-%m-%d %H:%M} to {ledger.until:%Y-%m-%d %H:%M} UTC"
    yield table(title, ("what", "value"), headlines(ledger))
    times = [
        (kind, str(ledger.times[kind].count), f"{ledger.times[kind].p50:.2f} s", f"{ledger.times[kind].p95:.2f} s")
        for kind in in_order(ledger.times, KINDS)
    ]
    if times:
        yield table("Provisions", ("kind", "count", "p50", "p95"), times, numbers=_NUMBERS)
    if ledger.hours:
        total = sum(ledger.hours.values())
        rows = [
            (
                phase,
                hours(ledger.hours[phase]),
                f"{ledger.hours[phase] / total:.0%}",
                money(ledger.costs.by_phase.get(phase, 0.0), ledger.currency),
            )
            for phase in in_order(ledger.hours, PHASES)
        ]
        yield table("Machine hours by state", ("state", "time", "share", "cost"), rows, numbers=_NUMBERS)
    for what, costs in cost_cuts(ledger):
        rows_of = [(name, money(value, ledger.currency)) for name, value in biggest(costs)]
        yield table(f"Cost by {what}", (what, "cost"), rows_of, numbers=_NUMBERS)
    for title, counts in (("Failed provisions", ledger.failures), ("Retired machines", ledger.retirements)):
        if counts:
            found = [(why, str(int(count))) for why, count in biggest(counts)]
            yield table(title, ("why", "count"), found, numbers=_NUMBERS)
    yield from (f"note: {note}" for note in ledger.notes)
    if ledger.priced:
        yield f"prices an hour: {ledger.priced}; set your own with --prices"


def cost_cuts(ledger: UsageReport) -> list[tuple[str, Mapping[str, float]]]:
    costs = ledger.costs
    by_run = {run or NO_RUN: value for run, value in costs.by_run.items()}
    cuts = [("class", costs.by_class), ("usage", costs.by_usage), ("run", by_run)]
    return [(what, values) for what, values in cuts if values]
