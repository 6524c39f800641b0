"""Cron expressions: when windows are open, in each time zone, and invalid expressions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.domain.scale_down.idle_config import parse_cron


def is_open(cron: str, at: str, zone: str = "UTC") -> bool:
    return parse_cron(cron).is_open(datetime.fromisoformat(at).astimezone(UTC), ZoneInfo(zone))


@pytest.mark.parametrize(
    ("cron", "at", "zone", "wanted"),
    [
        ("* * 9-17 * * 1-5", "2026-03-11T09:00:00Z", "UTC", True),
        ("* * 9-17 * * 1-5", "2026-03-11T17:59:58Z", "UTC", True),
        # A window opens five seconds early and closes a second early, as in terraform-aws-github-runner.
        ("* * 9-17 * * 1-5", "2026-03-11T08:59:55.001Z", "UTC", True),
        ("* * 9-17 * * 1-5", "2026-03-11T08:59:55Z", "UTC", False),
        ("* * 9-17 * * 1-5", "2026-03-11T17:59:59Z", "UTC", False),
        ("* * 9-17 * * 1-5", "2026-03-14T10:00:00Z", "UTC", False),
        ("* * 9-17 * * 1-5", "2026-03-15T21:00:00Z", "Pacific/Auckland", True),
        ("* * 9-17 * * 1-5", "2026-03-11T03:30:00Z", "Asia/Kolkata", True),
        ("* * 9 * * *", "2026-03-08T13:30:00Z", "America/New_York", True),
        ("* * 9 * * *", "2026-03-07T13:30:00Z", "America/New_York", False),
        # The hour that the end of summer time repeats matches twice.
        ("* * 1 * * *", "2026-11-01T05:30:00Z", "America/New_York", True),
        ("* * 1 * * *", "2026-11-01T06:30:00Z", "America/New_York", True),
        # Seconds in the expression are respected.
        ("0 * * * * *", "2026-03-11T10:00:30Z", "UTC", False),
        ("0 * * * * *", "2026-03-11T10:00:57Z", "UTC", True),
        # Without seconds, the whole minute and the seconds before it match.
        ("* 9-17 * * 1-5", "2026-03-11T10:00:30Z", "UTC", True),
        ("* 9-17 * * 1-5", "2026-03-11T17:59:59.9Z", "UTC", True),
        ("* 9-17 * * 1-5", "2026-03-11T08:59:57Z", "UTC", True),
        ("* 9-17 * * 1-5", "2026-03-11T18:00:00Z", "UTC", False),
        ("*/15 * * * *", "2026-03-11T10:45:20Z", "UTC", True),
        ("*/15 * * * *", "2026-03-11T10:46:20Z", "UTC", False),
        ("* * * 11 * 1", "2026-03-11T10:00:00Z", "UTC", True),
        ("* * * 12 * 3", "2026-03-11T10:00:00Z", "UTC", True),
        ("* * * 12 * 1", "2026-03-11T10:00:00Z", "UTC", False),
        ("* * * ? * WED", "2026-03-11T10:00:00Z", "UTC", True),
        ("* * * 11 MAR ?", "2026-03-11T10:00:00Z", "UTC", True),
        ("* * * * * mon-fri", "2026-03-11T10:00:00Z", "UTC", True),
        ("* * * * * 7", "2026-03-15T10:00:00Z", "UTC", True),
        ("* * * * * 5-7", "2026-03-15T10:00:00Z", "UTC", True),
        ("* * 22,23,0-6 * * *", "2026-03-11T23:00:00Z", "UTC", True),
        ("* * 8/4 * * *", "2026-03-11T12:00:00Z", "UTC", True),
        ("* * * L * *", "2026-02-28T10:00:00Z", "UTC", True),
        ("* * * L * *", "2026-02-27T10:00:00Z", "UTC", False),
        ("* * * * * 5L", "2026-03-27T10:00:00Z", "UTC", True),
        ("* * * * * 5L", "2026-03-20T10:00:00Z", "UTC", False),
        ("* * * * * FRI#2", "2026-03-13T10:00:00Z", "UTC", True),
        ("* * * * * FRI#2", "2026-03-20T10:00:00Z", "UTC", False),
    ],
)
def test_window_is_open(cron: str, at: str, zone: str, *, wanted: bool) -> None:
    assert is_open(cron, at, zone) is wanted


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "not a cron",
            "* * * *",
            "* * * * * * *",
            "60 * * * *",
            "* 24 * * *",
            "* * 0 * *",
            "* * * 13 *",
            "* * * * 8",
        ),
        *("a * * * *", "5-1 * * * *", "*/0 * * * *", "*/x * * * *", "1- * * * *", ", * * * *", "@daily", "1.5 * * * *"),
        *("-1 * * * *", "* * * * 5#6", "٣ * * * *", "00009999 * * * *", "9" * 300),
    ],
)
def test_invalid_cron_is_rejected_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_cron(text)
    assert str(refused.value)


@given(st.text(max_size=40))
def test_any_text_parses_or_raises_value_error(text: str) -> None:
    try:
        cron = parse_cron(text)
    except ValueError:
        return
    cron.is_open(datetime(2026, 3, 11, tzinfo=UTC), UTC)


@given(
    st.datetimes(min_value=datetime(2000, 1, 1), max_value=datetime(2100, 1, 1)),  # noqa: DTZ001 - hypothesis wants so
    st.sampled_from(["UTC", "America/New_York", "Asia/Kolkata", "Pacific/Auckland", "Europe/London"]),
)
def test_window_of_a_second_is_open_at_that_second_in_its_zone(at: datetime, zone: str) -> None:
    now = at.replace(tzinfo=UTC)
    local = (now.replace(microsecond=0) + timedelta(seconds=1)).astimezone(ZoneInfo(zone))
    text = f"{local.second} {local.minute} {local.hour} {local.day} {local.month} *"
    assert parse_cron(text).is_open(now, ZoneInfo(zone))
    assert not parse_cron(text).is_open(now - timedelta(seconds=5), ZoneInfo(zone))
    assert not parse_cron(text).is_open(now + timedelta(seconds=1), ZoneInfo(zone))
