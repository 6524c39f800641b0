"""A rich console that escapes control characters in texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from remuda.cli.output import plain_text


class PlainConsole(Console):
    """Styles and cursor movements come from rich alone, never from a text.

    Texts may come from GitHub, from a record edited by hand, or from a compromised instance.
    """

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **options):
            yield segment if segment.control else Segment(plain_text(segment.text), segment.style)
