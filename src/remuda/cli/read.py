"""Commands that only read: `remuda status`, `explain`, `report`, `doctor` and `config`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from remuda.adapters.system.clock import SystemClock
from remuda.adapters.system.prices import chosen_prices
from remuda.cli.advice import command_line
from remuda.cli.local_backend import background_processes, can_list_registrations, stopped_processes
from remuda.cli.output import Output
from remuda.cli.rendering import status as status_view
from remuda.cli.rendering.report import report_document, report_tables
from remuda.cli.rendering.results import config_rows, config_table, pool_config_rows, pool_config_table
from remuda.cli.rendering.table import FittedTable
from remuda.cli.run import EXIT_OK, plural, run_async
from remuda.config.declaration import DURATION_EXAMPLES, parse_duration
from remuda.config.settings import Settings
from remuda.config.sources import check_backend
from remuda.controlplane.doctor import exit_code, run_checks
from remuda.controlplane.read.explain import check_subject, explain
from remuda.controlplane.read.status import REGISTRATION_CHECK_INTERVAL_S, Status, keep_github_warnings, report, status
from remuda.disk import describe_low, existing
from remuda.domain.errors import RemudaError, UserError
from remuda.domain.pool_config import PoolConfig
from remuda.domain.reporting.explanation import Explanation
from remuda.domain.reporting.usage import UsageReport
from remuda.domain.reporting.warnings import PoolWarning, WarningKind
from remuda.domain.text import sanitize
from remuda.ports.doctor import CheckResult, CheckStatus
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import open_context

#: Default seconds between two updates of --watch, by backend. On AWS each update costs API calls.
WATCH_INTERVAL_S = {"local": 1.0, "aws": 5.0}
#: Longest period of a report in days.
MAX_DAYS = 3_650
_STYLES = {CheckStatus.OK: "green", CheckStatus.WARNING: "yellow", CheckStatus.PROBLEM: "bold red"}


def run_status(settings: Settings, output: Output, *, everything: bool, watch: bool, every: float | None) -> int:
    if every is not None and not watch:
        raise UserError("--every requires --watch", field="--every", fix="add --watch, or omit --every")
    if watch:
        return run_async(lambda: watch_status(settings, output, everything=everything, interval_s=every))

    async def work() -> Status:
        async with open_context(
            settings,
            output.event_log(SystemClock()),
            needs_github=can_list_registrations(settings),
            require_local_github=False,
        ) as context:
            found = await status(output.guarded(context), include_terminated=everything)
            return _with_all_warnings(settings, output, found)

    result = run_async(work)
    output.say_errors(result.unreadable)
    if output.as_json or not sys.stdout.isatty():
        # Nobody may see the table, which begins with the warnings.
        for line in status_view.warning_lines(result):
            output.say(line, style="bold yellow")
    if sys.stdout.isatty() and not output.wide:
        # Leaves a line for the prompt and one for a message on stderr.
        output.answer(*status_view.status_screen(result, width=output.width, height=output.height - 2))
    elif not output.as_json:
        output.answer(*status_view.status_tables(result))
    output.result(status_view.status_document(result))
    return EXIT_OK


def _with_all_warnings(settings: Settings, output: Output, found: Status) -> Status:
    """Add the warnings about the computer of the local backend: its disk, and background processes that do not run.

    The commands of all warnings become complete.
    """
    stopped = [
        PoolWarning(
            kind=WarningKind.STOPPED_PROCESS,
            subject="",
            text=f"{name} is not running; run {command_line(settings, 'up')} to start it",
        )
        for name in stopped_processes(settings)
    ]
    warnings = (*_disk_warnings(settings), *stopped, *found.warnings)
    return replace(found, warnings=tuple(replace(item, text=output.complete(item.text)) for item in warnings))


def _disk_warnings(settings: Settings) -> Iterator[PoolWarning]:
    if settings.backend != "local":
        return
    folder = settings.dir.absolute()
    with suppress(OSError):
        if low := describe_low(folder, shutil.disk_usage(existing(folder))):
            text = f"{low}; free space: a full disk stops every change of the pool"
            yield PoolWarning(kind=WarningKind.DISK, subject="", text=text)


def run_explain(settings: Settings, output: Output, *, subject: str) -> int:
    check_subject(subject)

    async def work() -> Explanation:
        event_log = output.event_log(SystemClock())
        async with open_context(settings, event_log, needs_github=False, require_local_github=False) as context:
            command = "deploy" if settings.backend == "aws" else "refresh"
            return await explain(output.guarded(context), subject, command=command)

    found = run_async(work)
    found = replace(found, next_steps=tuple(map(output.complete, found.next_steps)))
    if not output.as_json:
        wide = output.wide or not sys.stdout.isatty()
        output.answer(*status_view.explanation_lines(found, wide=wide), soft_wrap=wide)
    output.result(status_view.explanation_document(found))
    return EXIT_OK


class StatusScreen:
    """The status in place, on the terminal's alternate screen."""

    def __init__(self) -> None:
        from rich.live import Live  # noqa: PLC0415 - rich is slow to import

        from remuda.cli.terminal import PlainConsole  # noqa: PLC0415 - as above

        self._console = PlainConsole()
        self._live = Live(console=self._console, screen=True, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, current: Status) -> None:
        from rich.console import Group  # noqa: PLC0415 - as above

        tables = status_view.status_screen(current, width=self._console.width, height=self._console.height - 1)
        self._live.update(Group(sanitize(status_view.headline(current)), *tables), refresh=True)

    def show_error(self, error: RemudaError) -> None:
        self._live.update(sanitize(_retry_message(error)), refresh=True)


class StatusLines:
    """One line per change, or one JSON document per update."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._previous: Status | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, current: Status) -> None:
        if self._output.as_json:
            lines = [json.dumps(status_view.status_document(current), default=str)]
        else:
            lines = status_view.changes(self._previous, current)
        self._previous = current
        sys.stdout.writelines(f"{sanitize(line)}\n" for line in lines)
        sys.stdout.flush()

    def show_error(self, error: RemudaError) -> None:
        self._output.say(_retry_message(error), style="yellow")


def _retry_message(error: RemudaError) -> str:
    return f"cannot read the status: {error.message}; retrying"


async def watch_status(settings: Settings, output: Output, *, everything: bool, interval_s: float | None) -> int:
    """Show the status until interrupted."""
    interval_s = interval_s or WATCH_INTERVAL_S[settings.backend]
    in_place = sys.stdout.isatty() and not output.as_json
    needs_github = can_list_registrations(settings)
    async with open_context(
        settings, SilentEventLog(), needs_github=needs_github, require_local_github=False
    ) as context:
        clock = context.clock
        registrations_due_at = clock.monotonic()
        with StatusScreen() if in_place else StatusLines(output) as view:
            current: Status | None = None
            while True:
                # Listing registrations on GitHub is slow and rate-limited, so it happens less often.
                due = clock.monotonic() >= registrations_due_at
                if due:
                    registrations_due_at = clock.monotonic() + REGISTRATION_CHECK_INTERVAL_S
                try:
                    fresh = await status(context, include_terminated=everything, check_registrations=due)
                    current = fresh if due else keep_github_warnings(fresh, current)
                    view.show(_with_all_warnings(settings, output, current))
                except UserError:
                    raise
                except RemudaError as error:
                    view.show_error(error)
                await clock.sleep(interval_s)


def parse_since(text: str, *, now: datetime) -> datetime:
    """A duration before now, or a day such as 2026-11-01."""
    with suppress(ValueError, OverflowError):
        began = now - timedelta(seconds=parse_duration(text))
        if now - timedelta(days=MAX_DAYS) <= began < now:
            return began
    with suppress(ValueError):
        day = datetime.strptime(text.strip(), "%Y-%m-%d").replace(tzinfo=UTC)
        if now - timedelta(days=MAX_DAYS) <= day < now:
            return day
    raise UserError(
        f"--since must be a duration such as {DURATION_EXAMPLES}, or a past date such as 2026-11-01, got {text[:40]!r}",
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
        from remuda.cli.rendering.report_page import report_page  # noqa: PLC0415 - only for --html

        _write_page(page, report_page(ledger, pool=pool))
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


def _write_page(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {str(path)[:80]!r} cannot be written: {error.strerror}", field="--html") from None


def run_doctor(settings: Settings, output: Output) -> int:
    from remuda.wiring.doctor import open_doctor  # noqa: PLC0415 - httpx is slow to import

    for warning in check_backend(settings):
        output.say(f"warning: {warning}", style="yellow")

    async def work() -> Mapping[str, CheckResult]:
        async with open_doctor(settings, background_processes(settings)) as checks:
            return await run_checks(checks)

    found = run_async(work)
    found = {name: replace(result, fix=output.complete(result.fix)) for name, result in found.items()}
    results = problems_first(found)
    if sys.stdout.isatty():
        output.answer(check_table(results))
    elif not output.as_json:
        # One line per check, never wrapped, for logs and grep.
        sys.stdout.writelines(f"{line}\n" for line in check_lines(results))
    output.result({"checks": [check_document(name, result) for name, result in results.items()]})
    counts = Counter(result.status for result in results.values())
    shown = (plural(counts[status], status.value) for status in (CheckStatus.PROBLEM, CheckStatus.WARNING))
    output.say(f"{', '.join(shown)}, {counts[CheckStatus.OK]} ok")
    return exit_code(results.values())


def problems_first(results: Mapping[str, CheckResult]) -> dict[str, CheckResult]:
    order = (CheckStatus.PROBLEM, CheckStatus.WARNING, CheckStatus.OK)
    return dict(sorted(results.items(), key=lambda item: order.index(item[1].status)))


def run_config(settings: Settings, output: Output, *, pool: str | None) -> int:
    if pool is not None:
        origins = {**settings.origins, "pool": "--pool"}
        return _show_pool_config(replace(settings, pool=pool, origins=origins) if pool else settings, output)
    if not output.as_json:
        output.answer(config_table(settings))
    output.result({"settings": config_rows(settings)})
    return EXIT_OK


def _show_pool_config(settings: Settings, output: Output) -> int:
    async def work() -> PoolConfig | None:
        event_log = output.event_log(SystemClock())
        async with open_context(settings, event_log, needs_github=False, require_local_github=False) as context:
            return await output.guarded(context).store.get_config()

    stored = run_async(work)
    if stored is None:
        raise UserError(
            f"pool {settings.pool} has no configuration yet", field="--pool", fix="run remuda refresh, or name a pool"
        )
    rows = pool_config_rows(stored, settings)
    if not output.as_json:
        output.answer(pool_config_table(stored, rows))
    differing = sum(row["differs"] for row in rows.values())
    output.say(
        f"{plural(differing, 'setting')} here {'differs' if differing == 1 else 'differ'} from the pool: "
        f"{command_line(settings, 'refresh')} would apply the values of here"
        if differing
        else "the settings here do not differ from the pool; refresh keeps what they do not name"
    )
    output.result({"pool": stored.pool, "applied_at": stored.applied_at, "revision": stored.revision, "settings": rows})
    return EXIT_OK


def check_document(name: str, result: CheckResult) -> dict[str, Any]:
    return {"name": name, "status": result.status.value, "message": result.message, "fix": result.fix or None}


def check_lines(results: Mapping[str, CheckResult]) -> list[str]:
    """One line per check."""
    fixes = {name: f" -> {result.fix}" if result.fix else "" for name, result in results.items()}
    return [sanitize(f"{item.status:<8} {name}: {item.message}{fixes[name]}") for name, item in results.items()]


def check_table(results: Mapping[str, CheckResult]) -> FittedTable:
    rows = [(name, item.status.value, item.message, item.fix) for name, item in results.items()]
    columns, one_line = ("check", "status", "message", "fix"), frozenset({"check", "status"})
    styles = {status.value: style for status, style in _STYLES.items()}
    return FittedTable("", columns, rows, no_wrap=one_line, styles=styles)
