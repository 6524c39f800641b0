"""`remuda budget`."""

from __future__ import annotations

from typing import Any

from remuda.adapters.system.clock import SystemClock
from remuda.cli.output import Output
from remuda.cli.run import EXIT_OK, run_async
from remuda.config.declaration import InvalidValue
from remuda.config.settings import SETTINGS, Settings
from remuda.controlplane.budget import BudgetStatus, budget_status, set_budget
from remuda.domain.budget import month_start, next_month
from remuda.domain.errors import UserError
from remuda.wiring import open_context


def run_budget(settings: Settings, output: Output, *, amount: str | None) -> int:
    limit = _parse(amount) if amount is not None else None

    async def work() -> BudgetStatus:
        event_log = output.event_log(SystemClock())
        async with open_context(settings, event_log, needs_github=False, require_local_github=False) as context:
            guarded = output.guarded(context)
            return await budget_status(guarded) if limit is None else await set_budget(guarded, limit)

    found = run_async(work)
    if not output.as_json:
        output.answer(*map(output.complete, _lines(found)))
    output.result(_document(found))
    return EXIT_OK


def _parse(amount: str) -> float:
    kind = SETTINGS["monthly_budget"].kind
    try:
        return float(kind.parse(amount))
    except InvalidValue:
        raise UserError(
            f"DOLLARS must be {kind.expected}, got {amount[:40]!r}", field="DOLLARS", fix="such as remuda budget 500"
        ) from None


def _lines(found: BudgetStatus) -> list[str]:
    spending, currency = found.spending, found.spending.currency
    spent = f"{spending.amount:.2f} {currency} spent since {month_start(found.at):%Y-%m-%d}"
    expected = f"about {found.projected:.2f} {currency} expected by {next_month(found.at):%Y-%m-%d}"
    if not found.limit:
        lines = [f"pool {found.pool}: no budget; {spent}, {expected}", "set one per month: remuda budget 500"]
    else:
        share = spending.amount / found.limit
        lines = [f"pool {found.pool}: {spent} of {found.limit:.2f} ({share:.0%}), {expected}"]
        if not found.is_launching:
            lines.append("no machine is launched until the next month; idle ones are used, and running jobs continue")
    if spending.unpriced:
        lines.append(f"no price is known for {', '.join(spending.unpriced)}: it counts as free (--prices)")
    return lines


def _document(found: BudgetStatus) -> dict[str, Any]:
    return {
        "pool": found.pool,
        "at": found.at.isoformat(),
        "budget": found.limit or None,
        "spent": round(found.spending.amount, 2),
        "currency": found.spending.currency,
        "projected": round(found.projected, 2),
        "launching": found.is_launching,
        "warning": found.warning,
        "unpriced": list(found.spending.unpriced),
    }
