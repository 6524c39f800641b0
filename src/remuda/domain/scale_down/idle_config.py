"""Idle configuration: how many idle runners to keep, and when. The first open window applies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from enum import StrEnum
from typing import Any

from remuda.domain.errors import UserError
from remuda.domain.resources import MAX_SHOWN
from remuda.domain.text import quote, suggest

MAX_WINDOWS = 100
MAX_IDLE = 100_000
_KEYS = ("cron", "timeZone", "idleCount", "evictionStrategy")
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
    for key in body:
        if key not in _KEYS:
            raise UserError(
                f"{where} has an unknown key {quote(key, MAX_SHOWN)}", field=FIELD, fix=suggest(str(key), _KEYS)
            )
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


# Cron expressions of idle windows -----------------------------------------------------------------------------------
#
# Five fields (minute, hour, day, month, weekday), or six with seconds first. Lists, ranges, steps, names, `?`, the last
# day (`L`), the last or the n-th weekday of a month (`5L`, `5#2`). If both day and weekday are given, one must match.
#
# Our own parser keeps the domain free of dependencies, and a window only needs to know whether a given second matches.

#: Seconds in which the next match must lie for a window to be open, as in terraform-aws-github-runner.
AHEAD_S = 5
MAX_TEXT = 200
DAYS_IN_WEEK = 7

_MONTH_NAMES = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_MONTHS = {name: number for number, name in enumerate(_MONTH_NAMES, 1)}
_DAYS = {"SUN": 0, "MON": 1, "TUE": 2, "WED": 3, "THU": 4, "FRI": 5, "SAT": 6}
_ANY = frozenset({"*", "?"})
_NUMBER = re.compile(r"[0-9]{1,4}")
_LAST_WEEKDAY = re.compile(r"([0-7]|[A-Z]{3})L")
_NTH_WEEKDAY = re.compile(r"([0-7]|[A-Z]{3})#([1-5])")


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    least: int
    most: int
    names: dict[str, int]

    def parse(self, text: str) -> frozenset[int]:
        return frozenset(value for part in text.split(",") for value in self._part(part))

    def value(self, text: str) -> int:
        if text in self.names:
            return self.names[text]
        if not _NUMBER.fullmatch(text) or not self.least <= int(text) <= self.most:
            raise ValueError(f"{self.name} {text!r} is not one of {self.least} to {self.most}")
        return int(text)

    def _part(self, part: str) -> range:
        base, slash, step = part.partition("/")
        if slash and (not _NUMBER.fullmatch(step) or int(step) == 0):
            raise ValueError(f"{self.name} {part!r} has an invalid step")
        first, dash, last = base.partition("-")
        if base in _ANY:
            low, high = self.least, self.most
        elif dash:
            low, high = self.value(first), self.value(last)
        else:
            # A step without an end of the range continues to the maximum.
            low = self.value(base)
            high = self.most if slash else low
        if low > high:
            raise ValueError(f"{self.name} {base!r} is a reversed range")
        return range(low, high + 1, int(step) if slash else 1)


_SECOND = _Field("second", 0, 59, {})
_MINUTE = _Field("minute", 0, 59, {})
_HOUR = _Field("hour", 0, 23, {})
_DAY = _Field("day", 1, 31, {})
_MONTH = _Field("month", 1, 12, _MONTHS)
_WEEKDAY = _Field("weekday", 0, 7, _DAYS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cron:
    text: str
    #: None if the expression has no seconds.
    seconds: frozenset[int] | None
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    last_day: bool
    months: frozenset[int]
    #: Sunday is 0.
    weekdays: frozenset[int]
    #: (weekday, n): the n-th of the month, or the last if n is 0.
    nth_weekdays: frozenset[tuple[int, int]]

    def is_open(self, now: datetime, zone: tzinfo) -> bool:
        """Whether the cron matches within the next `AHEAD_S` seconds or, if it has no seconds, this minute."""
        if self.seconds is None and self._matches_minute(now.astimezone(zone)):
            return True
        whole = now.replace(microsecond=0)
        ahead = (whole + timedelta(seconds=number) for number in range(1, AHEAD_S + 1))
        return any(
            self._matches_second(second.astimezone(zone))
            for second in ahead
            if second - now < timedelta(seconds=AHEAD_S)
        )

    def _matches_second(self, local: datetime) -> bool:
        seconds = self.seconds if self.seconds is not None else frozenset({0})
        return local.second in seconds and self._matches_minute(local)

    def _matches_minute(self, local: datetime) -> bool:
        return (
            local.minute in self.minutes
            and local.hour in self.hours
            and local.month in self.months
            and self._matches_day(local)
        )

    def _matches_day(self, local: datetime) -> bool:
        every_day = len(self.days) == _DAY.most
        every_weekday = len(self.weekdays) == DAYS_IN_WEEK
        by_day, by_weekday = self._is_day(local), self._is_weekday(local)
        if every_day or every_weekday:
            return (every_day or by_day) and (every_weekday or by_weekday)
        return by_day or by_weekday

    def _is_day(self, local: datetime) -> bool:
        return local.day in self.days or (self.last_day and local.day == _days_of(local))

    def _is_weekday(self, local: datetime) -> bool:
        weekday = (local.weekday() + 1) % DAYS_IN_WEEK
        if weekday in self.weekdays:
            return True
        is_last = local.day + DAYS_IN_WEEK > _days_of(local)
        which = {(local.day - 1) // DAYS_IN_WEEK + 1} | ({0} if is_last else set())
        return any((weekday, number) in self.nth_weekdays for number in which)


def parse_cron(text: str) -> Cron:
    """Parse an expression. Raise `ValueError` if it is invalid."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"it is {len(text)} characters long, more than {MAX_TEXT}")
    fields = text.upper().split()
    if len(fields) not in {5, 6}:
        raise ValueError(f"it has {len(fields)} fields, not 5 or 6")
    seconds = _SECOND.parse(fields[0]) if len(fields) == 6 else None
    minute, hour, day, month, weekday = fields[-5:]
    days = [part for part in day.split(",") if part != "L"]
    every, nth = _weekdays(weekday)
    return Cron(
        text=" ".join(text.split()),
        seconds=seconds,
        minutes=_MINUTE.parse(minute),
        hours=_HOUR.parse(hour),
        days=_DAY.parse(",".join(days)) if days else frozenset(),
        last_day="L" in day.split(","),
        months=_MONTH.parse(month),
        weekdays=every,
        nth_weekdays=nth,
    )


def _weekdays(text: str) -> tuple[frozenset[int], frozenset[tuple[int, int]]]:
    every: set[int] = set()
    nth: set[tuple[int, int]] = set()
    for part in text.split(","):
        if last := _LAST_WEEKDAY.fullmatch(part):
            nth.add((_WEEKDAY.value(last[1]) % DAYS_IN_WEEK, 0))
        elif numbered := _NTH_WEEKDAY.fullmatch(part):
            nth.add((_WEEKDAY.value(numbered[1]) % DAYS_IN_WEEK, int(numbered[2])))
        else:
            every |= {value % DAYS_IN_WEEK for value in _WEEKDAY.parse(part)}
    return frozenset(every), frozenset(nth)


def _days_of(local: datetime) -> int:
    import calendar  # noqa: PLC0415 - slow to import, and idle windows are rare

    return calendar.monthrange(local.year, local.month)[1]
