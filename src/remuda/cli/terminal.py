"""A rich console for texts from outside: it interprets no markup and escapes control characters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console  # noqa: TID251 - the only user
from rich.segment import Segment
from rich.text import Text

from remuda.domain.text import sanitize


class PlainConsole(Console):
    """Styles, links and cursor movements come from this program alone, never from a text.

    Texts may come from GitHub, from a record edited by hand, or from a compromised instance.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, markup=False, emoji=False, highlight=False)

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **options):
            yield segment if segment.control else Segment(_plain(segment.text), segment.style)


def wrap_line(console: Console, line: str, *, width: int, indent: int) -> list[str]:
    """Break a line at words, or within a word that is wider than a line. All but the first part are indented.

    Example with a width of 40 and an indent of 17: `14:02:11 test    queued for large, but no set has it` becomes
    `14:02:11 test    queued for large, but` and, indented by 17, `no set has it`.
    """
    # At least half of the width is for the text.
    margin = " " * min(indent, width // 2)
    first = Text(line).wrap(console, width, overflow="fold")[0].plain
    rest = Text(line[len(first) :].lstrip())
    parts = rest.wrap(console, width - len(margin), overflow="fold")
    return [first.rstrip(), *(f"{margin}{part.plain.rstrip()}" for part in parts if part)]


def _plain(text: str) -> str:
    """The text with its lines, without other control characters."""
    return text if text.isprintable() else "\n".join(map(sanitize, text.split("\n")))
