"""Charts as inline SVG, without scripts or inline styles. CSS classes set the colours, and all names are escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from html import escape

WIDTH, HEIGHT = 720.0, 260.0
#: The values are at the right, beside the newest time, which a narrow screen shows first.
LEFT, RIGHT, TOP, BOTTOM = 12.0, 62.0, 12.0, 34.0
#: Most times at the axis, and the room that one of them needs at its left.
TIME_TICKS = 6
TIME_ROOM = 24.0
#: Steps between times at the axis, in seconds: from one second to 90 days.
TIME_STEPS = tuple(
    unit * count
    for unit, counts in ((1, (1, 2, 5, 10, 15, 30)), (60, (1, 2, 5, 10, 15, 30)), (3_600, (1, 2, 3, 6, 12)))
    for count in counts
) + tuple(86_400 * days for days in (1, 2, 7, 14, 30, 90))
VALUE_TICKS = 4
#: Minimum top of a scale, in instances. A smaller scale would only magnify noise.
MIN_TOP = 0.1
#: Up to this number of decades, there is room for ticks between powers of ten.
FINE_DECADES = 2
#: Maximum number of points drawn; more would only overlap.
MAX_POINTS = 1_500


@dataclass(frozen=True, kw_only=True, slots=True)
class ScatterPoint:
    at: datetime
    value: float
    kind: str
    #: Tooltip.
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    since: datetime
    until: datetime
    #: Maps a value to its height, 0 to 1.
    scale: Callable[[float], float]

    def x(self, at: datetime) -> float:
        whole = (self.until - self.since).total_seconds() or 1.0
        part = (at - self.since).total_seconds() / whole
        return LEFT + (WIDTH - LEFT - RIGHT) * min(max(part, 0.0), 1.0)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(max(self.scale(value), 0.0), 1.0)


def scatter(points: Sequence[ScatterPoint], *, since: datetime, until: datetime, label: str) -> str:
    """Draw seconds over time on a logarithmic scale."""
    shown = _thinned(points)
    values = [max(point.value, 0.01) for point in shown] or [0.1, 1.0]
    low = math.floor(math.log10(min(values)))
    high = max(math.ceil(math.log10(max(values))), low + 1)
    frame = _Frame(since=since, until=until, scale=lambda value: (math.log10(max(value, 0.01)) - low) / (high - low))
    fine = (1, 2, 5) if high - low <= FINE_DECADES else (1,)
    ticks = [10.0**power * factor for power in range(low, high) for factor in fine] + [10.0**high]
    parts = [_grid(frame, [(tick, f"{tick:g} s") for tick in ticks])]
    parts += [_symbol(point.kind, frame.x(point.at), frame.y(point.value), point.title) for point in shown]
    return _svg(parts, label)


def stacked(
    steps: Sequence[Mapping[str, float]], order: Sequence[str], *, since: datetime, until: datetime, label: str
) -> str:
    """Draw a stacked area chart of the counts per kind."""
    highest = max([MIN_TOP, *(sum(step.values()) for step in steps)])
    top, ticks = _nice_scale(highest)
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
    """Draw one horizontal bar, divided by share."""
    total = sum(shares.values()) or 1.0
    height, at, parts = 28.0, 0.0, []
    for kind in order:
        part = WIDTH * shares.get(kind, 0.0) / total
        if part > 0:
            title = escape(f"{kind}: {shares[kind]:.3g} {unit}")
            parts.append(
                f'<rect class="k-{_class_name(kind)}" x="{at:.1f}" y="0" width="{part:.1f}" height="{height:g}">'
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


# Helpers ----------------------------------------------------------------------------------------------------------


def _thinned(points: Sequence[ScatterPoint]) -> Sequence[ScatterPoint]:
    """Keep the slowest third of `MAX_POINTS` and a regular sample of the rest."""
    if len(points) <= MAX_POINTS:
        return points
    slow = sorted(points, key=lambda point: point.value)[-MAX_POINTS // 3 :]
    kept = {id(point) for point in slow}
    rest = [point for point in points if id(point) not in kept]
    step = math.ceil(len(rest) / (MAX_POINTS - len(slow)))
    return [*rest[::step], *slow]


def _svg(parts: Sequence[str], label: str) -> str:
    return (
        f'<div class="chart"><div class="plot" tabindex="0" role="group" aria-label="{escape(label)}">'
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg></div>'
        '<p class="hint">Scroll sideways for earlier times.</p></div>'
    )


def _grid(frame: _Frame, ticks: Sequence[tuple[float, str]]) -> str:
    right = WIDTH - RIGHT
    lines = [
        f'<line class="grid" x1="{LEFT:g}" x2="{right:g}" y1="{frame.y(value):.1f}" y2="{frame.y(value):.1f}"/>'
        f'<text x="{right + 8:g}" y="{frame.y(value) + 4:.1f}">{escape(text)}</text>'
        for value, text in ticks
    ]
    step, times = _round_times(frame.since, frame.until)
    lines += [
        f'<text class="x" x="{frame.x(at):.1f}" y="{HEIGHT - 12:g}">{_time(at, step)}</text>'
        for at in times
        if frame.x(at) >= LEFT + TIME_ROOM
    ]
    return "".join(lines)


def _round_times(since: datetime, until: datetime) -> tuple[timedelta, list[datetime]]:
    """Return a round step and its multiples in the period, counted from midnight UTC."""
    span_s = (until - since).total_seconds()
    step_s = next((step for step in TIME_STEPS if span_s / step <= TIME_TICKS), TIME_STEPS[-1])
    first = math.ceil(since.timestamp() / step_s)
    last = math.floor(until.timestamp() / step_s)
    times = [datetime.fromtimestamp(number * step_s, tz=UTC) for number in range(first, last + 1)]
    return timedelta(seconds=step_s), times


def _time(at: datetime, step: timedelta) -> str:
    if step >= timedelta(days=1):
        return f"{at:%d %b}"
    return f"{at:%H:%M}" if step >= timedelta(minutes=1) else f"{at:%H:%M:%S}"


def _nice_scale(highest: float) -> tuple[float, list[float]]:
    """Return a round maximum and the ticks up to it."""
    step = 10.0 ** math.floor(math.log10(highest / VALUE_TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if step * factor * VALUE_TICKS >= highest)
    count = math.ceil(highest / step)
    return step * count, [step * number for number in range(count + 1)]


def _area(frame: _Frame, kind: str, low: Sequence[float], high: Sequence[float]) -> str:
    outline = [*_upper_edge(frame, high), *reversed(_upper_edge(frame, low))]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
    return f'<polygon class="k-{_class_name(kind)}" points="{points}"><title>{escape(kind)}</title></polygon>'


def _upper_edge(frame: _Frame, values: Sequence[float]) -> list[tuple[float, float]]:
    """Return the corners of the upper edge, with steps of equal width."""
    width = (frame.until - frame.since) / len(values)
    edges = []
    for number, value in enumerate(values):
        y = frame.y(value)
        edges += [(frame.x(frame.since + number * width), y), (frame.x(frame.since + (number + 1) * width), y)]
    return edges


def _symbol(kind: str, x: float, y: float, title: str) -> str:
    """Draw the shape of a kind, so that kinds do not differ by colour alone."""
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    shape = _SHAPES.get(kind)
    if shape is None:
        return f'<circle class="k-{_class_name(kind)}" cx="{x:.1f}" cy="{y:.1f}" r="4">{tooltip}</circle>'
    return f'<path class="k-{_class_name(kind)}" transform="translate({x:.1f} {y:.1f})" d="{shape}">{tooltip}</path>'


_SHAPES = {
    "cold": "M-4 -4H4V4H-4Z",
    "mixed": "M0 -5L5 4H-5Z",
    "failed": "M-5 -3L-3 -5L0 -2L3 -5L5 -3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z",
}


def _class_name(kind: str) -> str:
    """Turn a kind into a valid CSS class."""
    return "".join(letter for letter in kind if letter.isascii() and letter.isalnum()) or "other"
