"""Tables that fit the terminal: columns are dropped, ids shortened and texts wrapped, in this order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from remuda.domain.text import sanitize

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

#: In the order of reductions: shorten the ids.
SHORTEN = "(shorten the ids)"
#: Least characters of a shortened id, without the ellipsis: `i-` and eight digits.
MIN_ID = 10
#: Columns of text are not made narrower than this before another column is dropped, and then not than this.
MIN_TEXT = 20
LEAST_TEXT = 8
#: Characters between two columns.
GAP = 2


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table that chooses its columns when it is rendered, by the width of the console."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    _: KW_ONLY
    #: Columns that are right-aligned.
    numeric: frozenset[str] = frozenset()
    #: Columns that stay on one line, for copying.
    no_wrap: frozenset[str] = frozenset()
    ids: frozenset[str] = frozenset()
    #: What to give up if the table is too wide, one after the other: names of columns, or `SHORTEN`.
    reductions: Sequence[str] = ()
    #: Whether each row is one line: texts are cut instead of wrapped.
    cuts: bool = False
    #: Styles of cells by their text.
    styles: Mapping[str, str] = field(default_factory=dict)

    def __rich_console__(self, _console: object, options: ConsoleOptions) -> Iterable[RenderableType]:
        from rich.text import Text  # noqa: PLC0415 - slow to import

        if self.title:
            yield Text(sanitize(self.title), style="bold")
        yield self._made(options.max_width)

    def _made(self, width: int) -> Table:
        from rich.table import Table  # noqa: PLC0415 - slow to import

        names, cells, fits = self._fitted(width)
        if self.cuts and fits:
            cells |= self._cut(names, cells, width)
        made = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="underline")
        for name in names:
            made.add_column(
                name,
                justify="right" if name in self.numeric else "left",
                # A name that does not even fit alone is folded.
                no_wrap=fits and name in self.no_wrap,
                overflow="fold",
            )
        for row in zip(*(cells[name] for name in names), strict=True):
            made.add_row(*(self._cell(text) for text in row))
        return made

    def _cut(self, names: Sequence[str], cells: Mapping[str, Sequence[str]], width: int) -> dict[str, list[str]]:
        """The cells of the columns of text, narrowest column first, each cut to its share of the remaining width."""
        widths = {name: self._column_width(name, cells) for name in names}
        texts = sorted((name for name in names if name not in self.no_wrap), key=widths.__getitem__)
        left = width - GAP * (len(names) - 1) - sum(widths[name] for name in names if name in self.no_wrap)
        found: dict[str, list[str]] = {}
        for index, name in enumerate(texts):
            share = min(widths[name], left // (len(texts) - index))
            found[name] = [_truncated(text, share) for text in cells[name]]
            left -= share
        return found

    def _cell(self, text: str) -> Text:
        from rich.text import Text  # noqa: PLC0415 - slow to import

        return Text(text, style=self.styles.get(text, ""))

    def _fitted(self, width: int) -> tuple[list[str], dict[str, list[str]], bool]:
        """The columns to show, the cells of all columns, and whether the columns that may not wrap have room."""
        cells = {name: [sanitize(row[index]) for row in self.rows] for index, name in enumerate(self.columns)}
        names = list(self.columns)
        for reduction in ("", *self.reductions):
            if reduction == SHORTEN:
                cells |= {name: shorten_ids(cells[name]) for name in self.ids if name in cells}
            else:
                names = [name for name in names if name != reduction]
            if self._least_width(names, cells, MIN_TEXT) <= width:
                return names, cells, True
        return names, cells, self._least_width(names, cells, LEAST_TEXT) <= width

    def _least_width(self, names: Sequence[str], cells: Mapping[str, Sequence[str]], text_width: int) -> int:
        widths = {name: self._column_width(name, cells) for name in names}
        least = (width if name in self.no_wrap else min(width, text_width) for name, width in widths.items())
        return sum(least) + GAP * (len(names) - 1)

    @staticmethod
    def _column_width(name: str, cells: Mapping[str, Sequence[str]]) -> int:
        from rich.cells import cell_len  # noqa: PLC0415 - slow to import

        return max((len(name), *map(cell_len, cells[name])))


def _truncated(text: str, width: int) -> str:
    from rich.cells import cell_len, set_cell_size  # noqa: PLC0415 - slow to import

    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"


def spaced(parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    """The parts with an empty line before each table but the first."""
    for index, part in enumerate(parts):
        if index and isinstance(part, FittedTable):
            yield ""
        yield part


def fit_height(build: Callable[[int], list[Any]], *, width: int, height: int) -> list[Any]:
    """The parts that `build` makes with the highest limit of rows at which they need at most `height` lines."""
    from remuda.cli.terminal import PlainConsole  # noqa: PLC0415 - slow to import

    console = PlainConsole(width=width)
    best, low, high = build(1), 2, height
    while low <= high:
        limit = (low + high) // 2
        parts = build(limit)
        if sum(len(console.render_lines(part, pad=False)) for part in parts) <= height:
            best, low = parts, limit + 1
        else:
            high = limit - 1
    return best


def shorten_ids(ids: Sequence[str]) -> list[str]:
    """The beginnings of the ids, as long as needed to tell them apart, with an ellipsis if that saves anything."""
    known = sorted(set(ids))
    shared = max((_shared_prefix(one, other) for one, other in itertools.pairwise(known)), default=0)
    length = max(MIN_ID, shared + 1)
    return [f"{each[:length]}…" if len(each) > length + 1 else each for each in ids]


def _shared_prefix(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
