"""Plots as inline SVG: no scripts, no styles of their own, nothing fetched. Classes carry the colours.

Everything that comes from outside is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from html import escape

WIDTH, HEIGHT = 720.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 12.0, 34.0
TIME_TICKS = 6
VALUE_TICKS = 4
#: A tenth of a machine: what is less would only be noise, drawn large.
LEAST_TOP = 0.1
#: Up to so many powers of ten there is room for marks between them.
FINE_DECADES = 2
#: Marks beyond this would only lie on each other.
MAX_MARKS = 1_500


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    at: datetime
    value: float
    kind: str
    #: Shown where the pointer rests.
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    since: datetime
    until: datetime
    #: From a value to its height, 0 to 1.
    scale: Callable[[float], float]

    def x(self, at: datetime) -> float:
        whole = (self.until - self.since).total_seconds() or 1.0
        part = (at - self.since).total_seconds() / whole
        return LEFT + (WIDTH - LEFT - RIGHT) * min(max(part, 0.0), 1.0)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(max(self.scale(value), 0.0), 1.0)


def scatter(marks: Sequence[Mark], *, since: datetime, until: datetime, label: str) -> str:
    """Seconds over time, on a scale where ten times as long is one step higher."""
    shown = _thinned(marks)
    values = [max(mark.value, 0.01) for mark in shown] or [0.1, 1.0]
    low = math.floor(math.log10(min(values)))
    high = max(math.ceil(math.log10(max(values))), low + 1)
    frame = _Frame(since=since, until=until, scale=lambda value: (math.log10(max(value, 0.01)) - low) / (high - low))
    fine = (1, 2, 5) if high - low <= FINE_DECADES else (1,)
    ticks = [10.0**power * factor for power in range(low, high) for factor in fine] + [10.0**high]
    parts = [_grid(frame, [(tick, f"{tick:g} s") for tick in ticks])]
    parts += [_symbol(mark.kind, frame.x(mark.at), frame.y(mark.value), mark.title) for mark in shown]
    return _svg(parts, label)


def stacked(
    steps: Sequence[Mapping[str, float]], order: Sequence[str], *, since: datetime, until: datetime, label: str
) -> str:
    """How many of each kind there were, one on the other."""
    most = max([LEAST_TOP, *(sum(step.values()) for step in steps)])
    top, ticks = _nice(most)
    frame = _Frame(since=since, until=until, scale=lambda value: value / top)
    parts = [_grid(frame, [(tick, f"{tick:g}") for tick in ticks])]
    base = [0.0] * len(steps)
    for kind in order:
        above = [low + step.get(kind, 0.0) for low, step in zip(base, steps, strict=True)]
        if above != base:
            parts.append(_area(frame, kind, base, above))
        base = above
    return _svg(parts, label)


def bar(shares: Mapping[str, float], order: Sequence[str], *, label: str, unit: str) -> str:
    """One bar, cut into what it is made of."""
    total = sum(shares.values()) or 1.0
    height, at, parts = 28.0, 0.0, []
    for kind in order:
        part = WIDTH * shares.get(kind, 0.0) / total
        if part > 0:
            title = escape(f"{kind}: {shares[kind]:.3g} {unit}")
            parts.append(
                f'<rect class="k-{_name(kind)}" x="{at:.1f}" y="0" width="{part:.1f}" height="{height:g}">'
                f"<title>{title}</title></rect>"
            )
        at += part
    return (
        f'<svg class="bar" viewBox="0 0 {WIDTH:g} {height:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def legend(kinds: Sequence[str]) -> str:
    items = "".join(
        f'<li><svg class="key" viewBox="-6 -6 12 12" aria-hidden="true">{_symbol(kind, 0, 0, "")}</svg>'
        f"{escape(kind)}</li>"
        for kind in kinds
    )
    return f'<ul class="legend">{items}</ul>'


# Inside -----------------------------------------------------------------------------------------------------------


def _thinned(marks: Sequence[Mark]) -> Sequence[Mark]:
    """The slowest are what people look for: they stay; of the rest every so manieth."""
    if len(marks) <= MAX_MARKS:
        return marks
    slow = sorted(marks, key=lambda mark: mark.value)[-MAX_MARKS // 3 :]
    kept = {id(mark) for mark in slow}
    rest = [mark for mark in marks if id(mark) not in kept]
    step = math.ceil(len(rest) / (MAX_MARKS - len(slow)))
    return [*rest[::step], *slow]


def _svg(parts: Sequence[str], label: str) -> str:
    return (
        f'<div class="plot"><svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg></div>"
    )


def _grid(frame: _Frame, ticks: Sequence[tuple[float, str]]) -> str:
    right = WIDTH - RIGHT
    lines = [
        f'<line class="grid" x1="{LEFT:g}" x2="{right:g}" y1="{frame.y(value):.1f}" y2="{frame.y(value):.1f}"/>'
        f'<text class="y" x="{LEFT - 10:g}" y="{frame.y(value) + 4:.1f}">{escape(text)}</text>'
        for value, text in ticks
    ]
    span = frame.until - frame.since
    for number in range(TIME_TICKS + 1):
        at = frame.since + span * number / TIME_TICKS
        place = "start" if number == 0 else "end" if number == TIME_TICKS else "middle"
        lines.append(f'<text class="x {place}" x="{frame.x(at):.1f}" y="{HEIGHT - 12:g}">{_time(at, span)}</text>')
    return "".join(lines)


def _time(at: datetime, span: timedelta) -> str:
    if span <= timedelta(minutes=20):
        return f"{at:%H:%M:%S}"
    return f"{at:%H:%M}" if span <= timedelta(days=2) else f"{at:%d %b}"


def _nice(most: float) -> tuple[float, list[float]]:
    """A round top, and the marks below it."""
    step = 10.0 ** math.floor(math.log10(most / VALUE_TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if step * factor * VALUE_TICKS >= most)
    count = math.ceil(most / step)
    return step * count, [step * number for number in range(count + 1)]


def _area(frame: _Frame, kind: str, low: Sequence[float], high: Sequence[float]) -> str:
    outline = [*_along(frame, high), *reversed(_along(frame, low))]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
    return f'<polygon class="k-{_name(kind)}" points="{points}"><title>{escape(kind)}</title></polygon>'


def _along(frame: _Frame, values: Sequence[float]) -> list[tuple[float, float]]:
    """The upper edge of equal steps."""
    width = (frame.until - frame.since) / len(values)
    edges = []
    for number, value in enumerate(values):
        y = frame.y(value)
        edges += [(frame.x(frame.since + number * width), y), (frame.x(frame.since + (number + 1) * width), y)]
    return edges


def _symbol(kind: str, x: float, y: float, title: str) -> str:
    """Each kind has a shape of its own, so that colour is not all there is."""
    told = f"<title>{escape(title)}</title>" if title else ""
    shape = _SHAPES.get(kind)
    if shape is None:
        return f'<circle class="k-{_name(kind)}" cx="{x:.1f}" cy="{y:.1f}" r="4">{told}</circle>'
    return f'<path class="k-{_name(kind)}" transform="translate({x:.1f} {y:.1f})" d="{shape}">{told}</path>'


_SHAPES = {
    "cold": "M-4 -4H4V4H-4Z",
    "mixed": "M0 -5L5 4H-5Z",
    "failed": "M-5 -3L-3 -5L0 -2L3 -5L5 -3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z",
}


def _name(kind: str) -> str:
    """As a class: only what a class may be."""
    return "".join(letter for letter in kind if letter.isascii() and letter.isalnum()) or "other"
