"""Formatting for terminals: tables, safe text and durations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

DAY_S = 86_400.0
_DURATION = re.compile(r"(\d{1,7})\s*([mhdw])", re.ASCII)
_UNITS_S = {"m": 60.0, "h": 3_600.0, "d": DAY_S, "w": 7 * DAY_S}


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numeric: frozenset[str] = frozenset(),
    no_wrap: frozenset[str] = frozenset(),
) -> Table:
    """Build a table. `numeric` columns are right-aligned; `no_wrap` columns stay on one line, for copying."""
    from rich import box  # noqa: PLC0415 - slow to import
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        justify = "right" if column in numeric else "left"
        made.add_column(column, justify=justify, no_wrap=column in no_wrap, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        # `Text` prevents rich from interpreting markup in names.
        made.add_row(*(Text(clean(value)) for value in row))
    return made


def clean(text: str) -> str:
    """Replace characters that could control the terminal. Instances and GitHub are untrusted sources."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def format_duration(seconds: float) -> str:
    """Format seconds as `40 s`, `7 min`, `3 h` or `2 d`."""
    for minimum, unit_s, name in ((172_800, 86_400, "d"), (7_200, 3_600, "h"), (600, 60, "min")):
        if seconds >= minimum:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.0f} s"


def parse_duration(text: str) -> float | None:
    """Parse a duration such as 90m, 12h, 7d or 2w into seconds. Return None if it is not one."""
    found = _DURATION.fullmatch(text.strip())
    return int(found.group(1)) * _UNITS_S[found.group(2)] if found else None
