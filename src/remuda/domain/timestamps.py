"""Timestamps as text: UTC, ISO-8601, fixed width, milliseconds and Z. Text order equals time order."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_FORMAT = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z", re.ASCII)


def to_text(at: datetime) -> str:
    if at.tzinfo is None:
        raise ValueError("a time without a time zone has no timestamp")
    return at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def from_text(text: str) -> datetime:
    if not _FORMAT.fullmatch(text):
        raise ValueError(f"{text!r} is not a time of the form 2025-05-31T12:00:00.000Z")
    return datetime.fromisoformat(text)


def to_milliseconds(at: datetime) -> datetime:
    """Cut to milliseconds, the precision of the text."""
    return at - timedelta(microseconds=at.microsecond % 1000)


def after(at: datetime, seconds: float) -> datetime:
    return to_milliseconds(at + timedelta(seconds=seconds))


def seconds_to_minute(now: datetime) -> float:
    """Seconds until the next full minute, more than 0."""
    return 60.0 - now.second - now.microsecond / 1e6
