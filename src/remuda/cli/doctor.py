"""`remuda doctor`: every check with what was found and what to fix."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from remuda.cli.local_backend import running
from remuda.cli.output import Output
from remuda.config.settings import Loaded
from remuda.controlplane.doctor import exit_code, run_checks
from remuda.ports.doctor import CheckResult, CheckStatus
from remuda.wiring_doctor import open_doctor

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {CheckStatus.OK: "green", CheckStatus.WARNING: "yellow", CheckStatus.PROBLEM: "bold red"}


async def run_doctor(loaded: Loaded, output: Output) -> int:
    async with open_doctor(loaded, running(loaded.settings)) as checks:
        results = await run_checks(checks)
    if sys.stdout.isatty():
        output.answer(_table(results))
    elif not output.as_json:
        # Never wrapped: whoever reads a log takes it by lines.
        sys.stdout.write(_lines(results))
    output.result({"checks": [document(name, result) for name, result in results.items()]})
    return exit_code(results.values())


def document(name: str, result: CheckResult) -> dict[str, Any]:
    return {"name": name, "status": result.health.value, "found": result.found, "fix": result.fix or None}


def _one_line(text: str) -> str:
    """Whatever another program's message brings along."""
    return " ".join(text.splitlines())


def _lines(results: Mapping[str, CheckResult]) -> str:
    text = ""
    for name, result in results.items():
        fix = f" -> {result.fix}" if result.fix else ""
        text += _one_line(f"{result.health:<8} {name}: {result.found}{fix}") + "\n"
    return text


def _table(results: Mapping[str, CheckResult]) -> Table:
    from rich import box  # noqa: PLC0415 - only where a table is shown
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("check", "status", "found", "fix"):
        table.add_column(column, no_wrap=column in {"check", "status"}, overflow="fold")
    for name, result in results.items():
        status = Text(result.health.value, style=_STYLES[result.health])
        table.add_row(Text(name), status, Text(_one_line(result.found)), Text(_one_line(result.fix)))
    return table
