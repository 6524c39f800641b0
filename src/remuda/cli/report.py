"""`remuda report`."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from remuda.adapters.system.clock import SystemClock
from remuda.adapters.system.prices import chosen_prices
from remuda.cli.output import Output
from remuda.cli.rendering.formatting import DAY_S, parse_duration
from remuda.cli.rendering.report import report_document, report_tables
from remuda.cli.rendering.report_page import report_page
from remuda.cli.run import EXIT_OK, run_async
from remuda.config.settings import Settings
from remuda.controlplane.read.status import report
from remuda.domain.errors import UserError
from remuda.domain.reporting.usage import UsageReport
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import open_context

#: Longest period of a report in days.
MAX_DAYS = 3_650


def parse_since(text: str, *, now: datetime) -> datetime:
    """`90m`, `12h`, `7d`, `2w`, or a day such as 2026-11-01."""
    period_s = parse_duration(text)
    if period_s is not None:
        if 0 < period_s <= MAX_DAYS * DAY_S:
            return now - timedelta(seconds=period_s)
    else:
        try:
            day = datetime.strptime(text.strip(), "%Y-%m-%d").replace(tzinfo=UTC)
        except ValueError:
            pass
        else:
            if now - timedelta(days=MAX_DAYS) <= day < now:
                return day
    raise UserError(
        f"--since must be a duration such as 90m, 12h, 7d or 2w, or a past date such as 2026-11-01, got {text[:40]!r}",
        field="--since",
    )


def run_report(settings: Settings, output: Output, *, since: str, html: str | None) -> int:
    began = parse_since(since, now=SystemClock().now())
    prices = chosen_prices(settings.prices)
    page = _page_path(html) if html is not None else None

    async def work() -> tuple[UsageReport, str]:
        async with open_context(settings, SilentEventLog(), needs_github=False, require_local_github=False) as context:
            return await report(context, since=began, prices=prices), context.pool_name

    ledger, pool = run_async(work)
    document = report_document(ledger, pool=pool)
    if page is not None:
        _write(page, report_page(ledger, pool=pool))
        document["page"] = str(page)
    if not output.as_json and page is None:
        output.answer(*report_tables(ledger, pool=pool))
    elif page is not None:
        output.say(f"report: {page}")
    output.result(document)
    return EXIT_OK


def _page_path(text: str) -> Path:
    """Check that the file can be written before any record is read."""
    path = Path(text).absolute() if text.strip() and "\0" not in text else None
    if path is None or path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(
            f"--html {text[:80]!r} cannot be written",
            field="--html",
            fix="name a file in a directory that you can write to",
        )
    return path


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {str(path)[:80]!r} cannot be written: {error.strerror}", field="--html") from None
