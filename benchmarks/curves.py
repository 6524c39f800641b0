"""Plots as SVG files that stand alone: in light and in dark, and where colours cannot be told apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from remuda.cli.rendering.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH

#: Room for the names of the lines.
NAMES = 150.0
BAR, GAP = 12.0, 26.0
TITLE = 22.0
#: On a scale of powers of ten there is nothing below.
LEAST = 0.01

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
    ours: float
    limit: float
    #: None where nothing was measured.
    before: float | None = None


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(title)}">\n<style>{_STYLE}</style>\n'
        f'<text class="t" x="{LEFT:g}" y="16">{escape(title)}</text>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def lines(curves: Mapping[str, Sequence[tuple[float, float]]], *, title: str, across: str, unit: str) -> str:
    """Each curve over a common scale; ten times as much is one step, on both axes."""
    points = [point for curve in curves.values() for point in curve]
    x_low, x_high = _decades([x for x, _ in points])
    y_low, y_high = _decades([y for _, y in points])
    right, top = WIDTH - RIGHT - NAMES, TOP + TITLE

    def place(x: float, y: float) -> tuple[float, float]:
        across_part = (math.log10(max(x, LEAST)) - x_low) / (x_high - x_low)
        up_part = (math.log10(max(y, LEAST)) - y_low) / (y_high - y_low)
        return LEFT + (right - LEFT) * across_part, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - top) * up_part

    parts = []
    for power in range(y_low, y_high + 1):
        _, y = place(10.0**x_low, 10.0**power)
        parts.append(f'<line class="g" x1="{LEFT:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="e" x="{LEFT - 8:g}" y="{y + 4:.1f}">{10.0**power:,.10g}{unit}</text>')
    for x in sorted({x for x, _ in points}):
        at, _ = place(x, 10.0**y_low)
        parts.append(f'<text class="m" x="{at:.1f}" y="{HEIGHT - BOTTOM + 18:g}">{x:,.10g}</text>')
    parts.append(f'<text class="e" x="{right:g}" y="{HEIGHT - 2:g}">{escape(across)}</text>')
    heights = _apart({name: place(*curve[-1])[1] for name, curve in curves.items()})
    for number, (name, curve) in enumerate(curves.items()):
        kind = number % len(_COLOURS)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        dash = f' stroke-dasharray="{_DASHES[kind]}"' if _DASHES[kind] else ""
        parts.append(f'<polyline class="l{kind}" points="{path}"{dash}><title>{escape(name)}</title></polyline>')
        parts.append(f'<text class="f{kind}" x="{right + 10:g}" y="{heights[name] + 4:.1f}">{escape(name)}</text>')
    return _svg(WIDTH, HEIGHT, title, parts)


def bars(shown: Sequence[Bar], *, title: str, unit: str) -> str:
    """Ours, the limit as a mark, and its predecessor behind; ten times as much is one step."""
    values = [value for bar in shown for value in (bar.ours, bar.limit, bar.before) if value]
    low, high = _decades(values)
    left, right, top = 350.0, WIDTH - 60.0, TITLE + 12.0
    height = top + GAP * len(shown) + 26.0

    def x(value: float) -> float:
        return left + (right - left) * (math.log10(max(value, 10.0**low)) - low) / (high - low)

    parts = []
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<line class="g" x1="{at:.1f}" x2="{at:.1f}" y1="{top:g}" y2="{height - 22:g}"/>')
        parts.append(f'<text class="m" x="{at:.1f}" y="{height - 6:g}">{10.0**power:g}{unit}</text>')
    for number, bar in enumerate(shown):
        y = top + GAP * number
        parts.append(f'<text class="e" x="{left - 8:g}" y="{y + 12:.1f}">{escape(bar.name)}</text>')
        if bar.before:
            wide = x(bar.before) - left
            parts.append(f'<rect class="past" x="{left:g}" y="{y + 13:.1f}" width="{wide:.1f}" height="5"/>')
        kind = "f0" if bar.ours <= bar.limit else "miss"
        wide = max(1.0, x(bar.ours) - left)
        parts.append(
            f'<rect class="{kind}" x="{left:g}" y="{y + 1:.1f}" width="{wide:.1f}" height="{BAR:g}">'
            f"<title>{bar.ours:g}{unit}</title></rect>"
        )
        at = x(bar.limit)
        parts.append(f'<line class="lim" x1="{at:.1f}" x2="{at:.1f}" y1="{y:.1f}" y2="{y + 19:.1f}"/>')
    return _svg(WIDTH, height, title, parts)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    shown = [max(value, LEAST) for value in values] or [1.0]
    low = math.floor(math.log10(min(shown)))
    return low, max(math.ceil(math.log10(max(shown))), low + 1)


def _apart(heights: Mapping[str, float], least: float = 15.0) -> dict[str, float]:
    """Names beside the ends of their lines, none on another."""
    placed: dict[str, float] = {}
    last = -math.inf
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        last = placed[name] = max(height, last + least)
    return placed
