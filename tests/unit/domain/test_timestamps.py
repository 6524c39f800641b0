from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.domain.timestamps import after, from_text, to_milliseconds, to_text

TIMES = st.datetimes(timezones=st.just(UTC))


@given(TIMES)
def test_text_has_a_fixed_width_and_keeps_milliseconds(at: datetime) -> None:
    assert len(to_text(at)) == len("2025-05-31T12:00:00.000Z")
    assert from_text(to_text(at)) == to_milliseconds(at)


@given(TIMES, TIMES)
def test_text_order_is_time_order(one: datetime, other: datetime) -> None:
    assert (to_text(one) < to_text(other)) == (to_milliseconds(one) < to_milliseconds(other))


def test_text_is_utc() -> None:
    assert to_text(datetime(2025, 5, 31, 14, tzinfo=timezone(timedelta(hours=2)))) == "2025-05-31T12:00:00.000Z"


def test_time_without_a_zone_is_rejected() -> None:
    with pytest.raises(ValueError, match="zone"):
        to_text(datetime(2025, 5, 31))  # noqa: DTZ001


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2025-05-31T12:00:00Z",
        "2025-05-31T12:00:00.000",
        "2025-05-31T12:00:00.000000Z",
        "2025-05-31T12:00:00.000+00:00",
        "2025-05-31 12:00:00.000Z",
        "2025-13-31T12:00:00.000Z",
        "2025-02-30T12:00:00.000Z",
        "2025-05-31T24:00:00.000Z",
        "2025-05-31T12:00:60.000Z",
        "2025-05-31T12:00:00.000Z\n",
        "\uff12025-05-31T12:00:00.000Z",
        "0000-05-31T12:00:00.000Z",
    ],
)
def test_other_formats_are_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        from_text(text)


@given(TIMES.filter(lambda at: at.year < 9_000), st.floats(0, 1e8))
def test_computed_times_survive_text(at: datetime, seconds: float) -> None:
    later = after(at, seconds)
    assert from_text(to_text(later)) == later
    assert timedelta(0) <= at + timedelta(seconds=seconds) - later < timedelta(milliseconds=1)
