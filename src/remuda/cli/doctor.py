"""`remuda doctor` and `remuda config`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from remuda.cli.local_backend import background_processes
from remuda.cli.output import Output
from remuda.cli.rendering.results import config_rows, config_table
from remuda.cli.run import EXIT_OK, run_async
from remuda.config.settings import Settings
from remuda.controlplane.doctor import exit_code, run_checks
from remuda.ports.doctor import CheckResult, CheckStatus
from remuda.wiring.doctor import open_doctor

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {CheckStatus.OK: "green", CheckStatus.WARNING: "yellow", CheckStatus.PROBLEM: "bold red"}


def run_doctor(settings: Settings, output: Output) -> int:
    async def work() -> Mapping[str, CheckResult]:
        async with open_doctor(settings, background_processes(settings)) as checks:
            return await run_checks(checks)

    results = run_async(work)
    if sys.stdout.isatty():
        output.answer(_table(results))
    elif not output.as_json:
        # One line per check, never wrapped, for logs and grep.
        sys.stdout.write(_lines(results))
    output.result({"checks": [document(name, result) for name, result in results.items()]})
    return exit_code(results.values())


def run_config(settings: Settings, output: Output) -> int:
    rows = config_rows(settings)
    if not output.as_json:
        output.answer(config_table(rows))
    output.result({"settings": rows})
    return EXIT_OK


def document(name: str, result: CheckResult) -> dict[str, Any]:
    return {"name": name, "status": result.status.value, "message": result.message, "fix": result.fix or None}


def _one_line(text: str) -> str:
    """Remove line breaks, which messages of other programs may contain."""
    return " ".join(text.splitlines())


def _lines(results: Mapping[str, CheckResult]) -> str:
    text = ""
    for name, result in results.items():
        fix = f" -> {result.fix}" if result.fix else ""
        text += _one_line(f"{result.status:<8} {name}: {result.message}{fix}") + "\n"
    return text


def _table(results: Mapping[str, CheckResult]) -> Table:
    from rich import box  # noqa: PLC0415 - rich is slow to import
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("check", "status", "message", "fix"):
        table.add_column(column, no_wrap=column in {"check", "status"}, overflow="fold")
    for name, result in results.items():
        status = Text(result.status.value, style=_STYLES[result.status])
        table.add_row(Text(name), status, Text(_one_line(result.message)), Text(_one_line(result.fix)))
    return table
