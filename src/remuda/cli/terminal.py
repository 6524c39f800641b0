"""A rich console for texts from outside: it interprets no markup and escapes control characters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console  # noqa: TID251 - the only user
from rich.segment import Segment

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


def _plain(text: str) -> str:
    """The text with its lines, without other control characters."""
    return text if text.isprintable() else "\n".join(map(sanitize, text.split("\n")))
