"""Idle configuration: how many idle runners to keep, and when. The first open window applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from enum import StrEnum
from typing import Any

from remuda.domain.errors import UserError
from remuda.domain.resources import MAX_SHOWN
from remuda.domain.scale_down.cron import Cron, parse_cron
from remuda.domain.text import quote

MAX_WINDOWS = 100
MAX_IDLE = 100_000
FIELD = "idle-config"
EXAMPLE = '[{"cron": "* * 9-17 * * 1-5", "timeZone": "Europe/Berlin", "idleCount": 2}]'
FIX = f"give a list such as {EXAMPLE}"


class Eviction(StrEnum):
    """Eviction strategy. `oldest_first` evicts the oldest, so the newest are kept."""

    OLDEST_FIRST = "oldest_first"
    NEWEST_FIRST = "newest_first"


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleWindow:
    cron: Cron
    zone: tzinfo
    zone_name: str
    idle_count: int
    eviction: Eviction = Eviction.OLDEST_FIRST


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """Idle quota at one moment."""

    idle_count: int = 0
    eviction: Eviction = Eviction.OLDEST_FIRST
    #: Description of the window, for people; empty if none is open.
    window: str = ""


def quota_at(windows: Sequence[IdleWindow], now: datetime) -> Quota:
    for window in windows:
        if window.cron.is_open(now, window.zone):
            description = f"{window.cron.text!r} {window.zone_name}"
            return Quota(idle_count=window.idle_count, eviction=window.eviction, window=description)
    return Quota()


def parse_idle_config(document: Any, *, zone_of: Callable[[str], tzinfo]) -> tuple[IdleWindow, ...]:
    """Parse a document from JSON or TOML. `zone_of` raises `ValueError` for an unknown time zone."""
    if not isinstance(document, list) or len(document) > MAX_WINDOWS:
        raise UserError(f"{FIELD} must be a list of up to {MAX_WINDOWS} windows", field=FIELD, fix=FIX)
    return tuple(_window(f"{FIELD}[{number}]", body, zone_of) for number, body in enumerate(document))


def _window(where: str, body: Any, zone_of: Callable[[str], tzinfo]) -> IdleWindow:
    if not isinstance(body, Mapping):
        raise UserError(f"{where} is {quote(body, MAX_SHOWN)}, not a window", field=FIELD, fix=FIX)
    zone_name = body.get("timeZone") or "UTC"
    try:
        cron = parse_cron(_text(body.get("cron")))
    except ValueError as error:
        raise UserError(
            f"{where}: cron is {quote(body.get('cron'), MAX_SHOWN)}: {error}",
            field=FIELD,
            fix="give five fields, or six with seconds first, such as '* * 9-17 * * 1-5'",
        ) from None
    try:
        zone = zone_of(_text(zone_name))
    except ValueError:
        raise UserError(
            f"{where}: timeZone is {quote(zone_name, MAX_SHOWN)}",
            field=FIELD,
            fix="name a time zone such as Europe/Berlin",
        ) from None
    return IdleWindow(
        cron=cron,
        zone=zone,
        zone_name=str(zone_name),
        idle_count=_count(where, body.get("idleCount")),
        eviction=_eviction(where, body.get("evictionStrategy")),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("it is not a string")
    return value


def _count(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_IDLE:
        raise UserError(
            f"{where}: idleCount is {quote(value, MAX_SHOWN)}",
            field=FIELD,
            fix=f"give an integer from 0 to {MAX_IDLE}",
        )
    return value


def _eviction(where: str, value: Any) -> Eviction:
    if value is None:
        return Eviction.OLDEST_FIRST
    try:
        return Eviction(value)
    except ValueError:
        raise UserError(
            f"{where}: evictionStrategy is {quote(value, MAX_SHOWN)}",
            field=FIELD,
            fix="use oldest_first or newest_first",
        ) from None
