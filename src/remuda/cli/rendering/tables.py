"""Tables for a terminal, all alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: frozenset[str] = frozenset(),
    whole: frozenset[str] = frozenset(),
) -> Table:
    """`numbers` stand to the right; `whole` columns are never cut: people copy them."""
    from rich import box  # noqa: PLC0415 - only where a table is shown
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        justify = "right" if column in numbers else "left"
        made.add_column(column, justify=justify, no_wrap=column in whole, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        # As text: what comes from outside is no markup.
        made.add_row(*(Text(clean(cell)) for cell in row))
    return made


def clean(text: str) -> str:
    """What comes from machines and from GitHub must not steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def duration(seconds: float) -> str:
    """As people say it: `40 s`, `7 min`, `3 h`, `2 d`."""
    for least, unit, name in ((172_800, 86_400, "d"), (7_200, 3_600, "h"), (600, 60, "min")):
        if seconds >= least:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
