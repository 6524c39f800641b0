"""A console that shows text as text, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from remuda.domain.text import sanitize


class PlainConsole(Console):
    """Rich's, which colours and moves by itself. What comes in a text does neither: it may be of GitHub, of a record
    that was written by hand, or of a machine that somebody has taken.
    """

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **options):
            yield segment if segment.control else Segment(_plain(segment.text), segment.style)


def _plain(text: str) -> str:
    return text if text.isprintable() else "\n".join(map(sanitize, text.split("\n")))
