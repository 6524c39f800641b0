"""Standalone SVG plots for light and dark mode. Lines differ by dashes as well as by colour."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from remuda.cli.rendering.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH

#: Width of the column with the names of the lines.
NAMES_WIDTH = 150.0
BAR_HEIGHT, ROW_HEIGHT = 12.0, 26.0
TITLE_HEIGHT = 22.0
#: Smallest value on the logarithmic scale.
MIN_VALUE = 0.01

_COLOURS = ("#0072b2", "#c2500a", "#00805c", "#a6598a", "#b57a00")
_DARK = ("#4aa3df", "#f0763a", "#2fbf93", "#cc79a7", "#e69f00")
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2")
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#57606a}.t{font-weight:600;fill:#1b1f24}.g{stroke:#d8dee4}"
    ".e{text-anchor:end}.m{text-anchor:middle}.miss{fill:#c2500a}.lim{stroke:#1b1f24;stroke-width:2}.past{fill:#8b949e}"
    + "".join(f".l{n}{{stroke:{c};fill:none;stroke-width:2}}.f{n}{{fill:{c}}}" for n, c in enumerate(_COLOURS))
    + "@media(prefers-color-scheme:dark){text{fill:#9198a1}.t{fill:#e6edf3}.g{stroke:#30363d}.lim{stroke:#e6edf3}"
    + "".join(f".l{n}{{stroke:{c}}}.f{n}{{fill:{c}}}" for n, c in enumerate(_DARK))
    + "}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    name: str
    measured: float
    limit: float
    #: None if the predecessor was not measured.
    predecessor: float | None = None


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(title)}">\n<style>{_STYLE}</style>\n'
        f'<text class="t" x="{LEFT:g}" y="16">{escape(title)}</text>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def lines(curves: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x_label: str) -> str:
    """Draw curves with logarithmic axes."""
    points = [point for curve in curves.values() for point in curve]
    x_low, x_high = _decades([x for x, _ in points])
    y_low, y_high = _decades([y for _, y in points])
    right, top = WIDTH - RIGHT - NAMES_WIDTH, TOP + TITLE_HEIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        across_part = (math.log10(max(x, MIN_VALUE)) - x_low) / (x_high - x_low)
        up_part = (math.log10(max(y, MIN_VALUE)) - y_low) / (y_high - y_low)
        return LEFT + (right - LEFT) * across_part, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - top) * up_part

    parts = []
    for power in range(y_low, y_high + 1):
        _, y = place(10.0**x_low, 10.0**power)
        parts.append(f'<line class="g" x1="{LEFT:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="e" x="{LEFT - 8:g}" y="{y + 4:.1f}">{10.0**power:,.10g}</text>')
    for x in sorted({x for x, _ in points}):
        at, _ = place(x, 10.0**y_low)
        parts.append(f'<text class="m" x="{at:.1f}" y="{HEIGHT - BOTTOM + 18:g}">{x:,.10g}</text>')
    parts.append(f'<text class="e" x="{right:g}" y="{HEIGHT - 2:g}">{escape(x_label)}</text>')
    heights = _apart({name: place(*curve[-1])[1] for name, curve in curves.items()})
    for number, (name, curve) in enumerate(curves.items()):
        kind = number % len(_COLOURS)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        dash = f' stroke-dasharray="{_DASHES[kind]}"' if _DASHES[kind] else ""
        parts.append(f'<polyline class="l{kind}" points="{path}"{dash}><title>{escape(name)}</title></polyline>')
        parts.append(f'<text class="f{kind}" x="{right + 10:g}" y="{heights[name] + 4:.1f}">{escape(name)}</text>')
    return _svg(WIDTH, HEIGHT, title, parts)


def bars(shown: Sequence[Bar], *, title: str, unit: str) -> str:
    """Draw one bar per figure on a logarithmic scale, with its limit as a line and its predecessor below."""
    values = [value for bar in shown for value in (bar.measured, bar.limit, bar.predecessor) if value]
    low, high = _decades(values)
    left, right, top = 350.0, WIDTH - 60.0, TITLE_HEIGHT + 12.0
    height = top + ROW_HEIGHT * len(shown) + 26.0

    def x(value: float) -> float:
        return left + (right - left) * (math.log10(max(value, 10.0**low)) - low) / (high - low)

    parts = []
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<line class="g" x1="{at:.1f}" x2="{at:.1f}" y1="{top:g}" y2="{height - 22:g}"/>')
        parts.append(f'<text class="m" x="{at:.1f}" y="{height - 6:g}">{10.0**power:g}{unit}</text>')
    for number, bar in enumerate(shown):
        y = top + ROW_HEIGHT * number
        parts.append(f'<text class="e" x="{left - 8:g}" y="{y + 12:.1f}">{escape(bar.name)}</text>')
        if bar.predecessor:
            wide = x(bar.predecessor) - left
            parts.append(f'<rect class="past" x="{left:g}" y="{y + 13:.1f}" width="{wide:.1f}" height="5"/>')
        kind = "f0" if bar.measured <= bar.limit else "miss"
        wide = max(1.0, x(bar.measured) - left)
        parts.append(
            f'<rect class="{kind}" x="{left:g}" y="{y + 1:.1f}" width="{wide:.1f}" height="{BAR_HEIGHT:g}">'
            f"<title>{bar.measured:g}{unit}</title></rect>"
        )
        at = x(bar.limit)
        parts.append(f'<line class="lim" x1="{at:.1f}" x2="{at:.1f}" y1="{y:.1f}" y2="{y + 19:.1f}"/>')
    return _svg(WIDTH, height, title, parts)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    shown = [max(value, MIN_VALUE) for value in values] or [1.0]
    low = math.floor(math.log10(min(shown)))
    return low, max(math.ceil(math.log10(max(shown))), low + 1)


def _apart(heights: Mapping[str, float], distance: float = 15.0) -> dict[str, float]:
    """Spread the labels at the ends of the lines so that they do not overlap."""
    placed: dict[str, float] = {}
    last = -math.inf
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        last = placed[name] = max(height, last + distance)
    return placed
