"""Durations as people write them: 90m, 12h, 7d, 2w."""

from __future__ import annotations

import re

DAY_S = 86_400.0
_SHAPE = re.compile(r"(\d{1,7})\s*([mhdw])", re.ASCII)
_UNITS = {"m": 60.0, "h": 3_600.0, "d": DAY_S, "w": 7 * DAY_S}


def parse_duration(text: str) -> float | None:
    """Seconds, or None where it is no duration."""
    found = _SHAPE.fullmatch(text.strip())
    return int(found.group(1)) * _UNITS[found.group(2)] if found else None
