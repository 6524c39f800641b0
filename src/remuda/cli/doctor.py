"""`remuda doctor`: every check with what was found and what to fix."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from remuda.cli.local_backend import running
from remuda.cli.output import Output
from remuda.config.settings import Loaded
from remuda.controlplane.doctor import Checked, examine, exit_code
from remuda.ports.doctor import CheckStatus
from remuda.wiring_doctor import open_doctor

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {CheckStatus.OK: "green", CheckStatus.WARNING: "yellow", CheckStatus.PROBLEM: "bold red"}


async def run_doctor(loaded: Loaded, output: Output) -> int:
    async with open_doctor(loaded, running(loaded.settings)) as checks:
        checked = await examine(checks)
    if sys.stdout.isatty():
        output.answer(_table(checked))
    elif not output.as_json:
        # Never wrapped: whoever reads a log takes it by lines.
        sys.stdout.write(_lines(checked))
    output.result({"checks": [document(item) for item in checked]})
    return exit_code(checked)


def document(item: Checked) -> dict[str, Any]:
    finding = item.finding
    return {"name": item.name, "status": finding.health.value, "found": finding.found, "fix": finding.fix or None}


def _one_line(text: str) -> str:
    """Whatever another program's message brings along."""
    return " ".join(text.splitlines())


def _lines(checked: tuple[Checked, ...]) -> str:
    text = ""
    for item in checked:
        fix = f" -> {item.finding.fix}" if item.finding.fix else ""
        text += _one_line(f"{item.finding.health:<8} {item.name}: {item.finding.found}{fix}") + "\n"
    return text


def _table(checked: tuple[Checked, ...]) -> Table:
    from rich import box  # noqa: PLC0415 - only where a table is shown
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("check", "status", "found", "fix"):
        table.add_column(column, no_wrap=column in {"check", "status"}, overflow="fold")
    for item in checked:
        finding = item.finding
        status = Text(finding.health.value, style=_STYLES[finding.health])
        table.add_row(Text(item.name), status, Text(_one_line(finding.found)), Text(_one_line(finding.fix)))
    return table
