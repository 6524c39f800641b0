"""Price tables are validated, and spot prices are means over time and zones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.adapters.system.prices import read_prices, shipped_prices
from remuda.domain.errors import UserError
from remuda.domain.reporting.prices import PriceTable, SpotPrice, mean_spot_prices, parse_prices
from remuda.domain.resources import UsageClass
from tests.support.records import at

TABLE = PriceTable(on_demand={"c6i.large": 0.085, "m6i.large": 0.096}, spot={"c6i.large": 0.03})


@pytest.mark.parametrize(
    ("instance_type", "usage", "price"),
    [
        ("c6i.large", UsageClass.ON_DEMAND, 0.085),
        ("c6i.large", UsageClass.SPOT, 0.03),
        ("m6i.large", UsageClass.SPOT, 0.096),
        ("x9.large", UsageClass.ON_DEMAND, None),
        ("x9.large", UsageClass.SPOT, None),
    ],
)
def test_hourly_price(instance_type: str, usage: UsageClass, price: float | None) -> None:
    assert TABLE.hourly(instance_type, usage) == price


def test_spot_prices_of_ec2_take_precedence() -> None:
    table = TABLE.with_spot({"c6i.large": 0.05})
    assert table.hourly("c6i.large", UsageClass.SPOT) == 0.05
    assert table.hourly("c6i.large", UsageClass.ON_DEMAND) == 0.085


@pytest.mark.parametrize(
    "document",
    [
        [],
        None,
        {"on-demand": []},
        {"on-demand": {"c6i.large": "0.1"}},
        {"on-demand": {"c6i.large": True}},
        {"on-demand": {"c6i.large": -1}},
        {"on-demand": {"c6i.large": float("nan")}},
        {"on-demand": {"c6i.large": float("inf")}},
        {"spot": {"c6i.large": 1e9}},
        {"currency": 5},
        {"currency": "x" * 41},
        {"dated": "a\x1bb"},
        {"ondemand": {}},
        {"on-demand": {str(number): 1 for number in range(5_001)}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_table_is_rejected_with_a_fix(document: Any) -> None:
    with pytest.raises(UserError) as failure:
        parse_prices(document)
    assert failure.value.field == "--prices"
    assert failure.value.fix.startswith("give ")


def test_custom_table(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({"currency": "EUR", "on-demand": {"c6i.large": 1}}))
    assert read_prices(file) == PriceTable(currency="EUR", on_demand={"c6i.large": 1.0})


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\xff"], ids=["empty", "cut", "deep", "odd"])
def test_file_that_is_not_a_table(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prices.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="not JSON"):
        read_prices(file)


@pytest.mark.parametrize("name", ["missing.json", ".", "a\0b"])
def test_unreadable_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_prices(tmp_path / name)


def test_default_table_is_dated_and_has_the_common_types() -> None:
    shipped = shipped_prices()
    assert (shipped.currency, shipped.region, bool(shipped.dated)) == ("USD", "us-east-1", True)
    families = {name.partition(".")[0] for name in shipped.on_demand}
    assert {"t3", "m5", "m6i", "m7i", "m7g", "c5", "c6i", "c7i", "c7g", "r6i"} <= families
    assert shipped.on_demand["c6i.xlarge"] == pytest.approx(2 * shipped.on_demand["c6i.large"])


def point(price: float, seconds: float, zone: str = "a", name: str = "c6i.large") -> SpotPrice:
    return SpotPrice(instance_type=name, zone=zone, at=at(seconds), price=price)


def test_mean_over_time() -> None:
    """The price was 0.1 before the period and in its first half, then 0.3."""
    points = [point(0.3, 50), point(0.1, -1_000)]
    assert mean_spot_prices(points, since=at(0), until=at(100)) == {"c6i.large": pytest.approx(0.2)}


def test_mean_over_zones_and_by_type() -> None:
    points = [point(0.1, 0), point(0.3, 0, "b"), point(7.0, 0, name="m6i.large")]
    assert mean_spot_prices(points, since=at(0), until=at(100)) == {
        "c6i.large": pytest.approx(0.2),
        "m6i.large": pytest.approx(7.0),
    }


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(-500, 500), st.sampled_from("ab")), min_size=1),
    st.floats(0, 300),
)
def test_mean_lies_between_the_prices(changes: list[tuple[float, float, str]], length_s: float) -> None:
    points = [point(price, seconds, zone) for price, seconds, zone in changes]
    found = mean_spot_prices(points, since=at(0), until=at(length_s))["c6i.large"]
    assert min(item[0] for item in changes) - 1e-9 <= found <= max(item[0] for item in changes) + 1e-9
