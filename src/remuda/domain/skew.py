"""How far two clocks are apart, as far as an HTTP answer tells."""

from __future__ import annotations

from datetime import UTC, datetime

HTTP_DATE = "%a, %d %b %Y %H:%M:%S GMT"
#: What the lifecycle allows for: beyond it, thresholds are judged wrongly.
NORMAL_S = 30.0
#: Beyond it AWS refuses signatures, and GitHub an App's tokens soon.
MOST_S = 240.0


def skew_s(date: str, now: datetime) -> float | None:
    """Seconds that our clock is ahead of a `Date` header; None where that cannot be read."""
    try:
        theirs = datetime.strptime(date, HTTP_DATE).replace(tzinfo=UTC)
    except ValueError:
        return None
    return (now - theirs).total_seconds()
