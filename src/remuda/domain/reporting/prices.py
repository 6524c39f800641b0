"""Hourly prices of machines: a configurable table, and spot prices from EC2."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from remuda.domain.errors import UserError
from remuda.domain.resources import UsageClass
from remuda.domain.text import quote

FIELD = "--prices"
MAX_TYPES = 5_000
#: Higher than the price of any machine: a larger value is a mistake.
MAX_PRICE = 10_000.0
MAX_TEXT = 40
#: Decimals of an amount below 1.
MONEY_DIGITS = 4

_FIX = (
    'give {"dated": "2026-10", "region": "us-east-1", "currency": "USD", "on-demand": {"c6i.large": 0.085}, '
    '"spot": {"c6i.large": 0.034}}'
)


def format_money(value: float, currency: str) -> str:
    """Format an amount, for example `12.50 USD` or `0.0442 USD`."""
    digits = 2 if abs(value) >= 1 or round(value, MONEY_DIGITS) == 0 else MONEY_DIGITS
    return f"{value:.{digits}f} {currency}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceTable:
    """Hourly prices by instance type."""

    #: Date and region of the prices.
    dated: str = ""
    region: str = ""
    currency: str = "USD"
    on_demand: Mapping[str, float] = field(default_factory=dict)
    spot: Mapping[str, float] = field(default_factory=dict)

    def with_spot(self, found: Mapping[str, float]) -> PriceTable:
        """Return the table with EC2's spot prices, which take precedence."""
        return PriceTable(
            dated=self.dated,
            region=self.region,
            currency=self.currency,
            on_demand=self.on_demand,
            spot={**self.spot, **found},
        )

    def hourly(self, instance_type: str, usage_class: UsageClass) -> float | None:
        """Return the hourly price, or None if unknown. Without a spot price, the on-demand price is the upper limit."""
        on_demand = self.on_demand.get(instance_type)
        if usage_class is UsageClass.SPOT:
            return self.spot.get(instance_type, on_demand)
        return on_demand


def parse_prices(document: Any, *, name: str = "prices") -> PriceTable:
    if not isinstance(document, Mapping):
        raise UserError(f"{name} must be an object", field=FIELD, fix=_FIX)
    unknown = set(document) - {"dated", "region", "currency", "on-demand", "spot"}
    if unknown:
        raise UserError(f"{name} has an unknown key {quote(min(map(str, unknown)), MAX_TEXT)}", field=FIELD, fix=_FIX)
    texts = {key: _text(document.get(key, default), f"{name}: {key}") for key, default in _TEXTS.items()}
    return PriceTable(
        **texts,
        on_demand=_prices(document.get("on-demand", {}), f"{name}: on-demand"),
        spot=_prices(document.get("spot", {}), f"{name}: spot"),
    )


_TEXTS = {"dated": "", "region": "", "currency": "USD"}


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise UserError(f"{where} must be a short string", field=FIELD, fix=_FIX)
    return value


def _prices(value: Any, where: str) -> dict[str, float]:
    if not isinstance(value, Mapping) or len(value) > MAX_TYPES:
        raise UserError(f"{where} must be an object of up to {MAX_TYPES} types", field=FIELD, fix=_FIX)
    found: dict[str, float] = {}
    for instance_type, price in value.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price <= MAX_PRICE:
            raise UserError(
                f"{where}: the price of {quote(instance_type, MAX_TEXT)} is {quote(price, MAX_TEXT)}",
                field=FIELD,
                fix=f"give an hourly price from 0 to {MAX_PRICE:g}",
            )
        found[str(instance_type)] = float(price)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotPrice:
    """Spot price of an instance type in a zone, valid from a time on."""

    instance_type: str
    zone: str
    at: datetime
    price: float


def mean_spot_prices(points: Iterable[SpotPrice], *, since: datetime, until: datetime) -> dict[str, float]:
    """Return the mean by type, over time and then over zones: records do not contain a machine's zone."""
    zones: dict[tuple[str, str], list[SpotPrice]] = defaultdict(list)
    for point in points:
        if math.isfinite(point.price) and point.price >= 0:
            zones[point.instance_type, point.zone].append(point)
    means: dict[str, list[float]] = defaultdict(list)
    for (instance_type, _), found in zones.items():
        means[instance_type].append(_mean_over_time(found, since, until))
    return {instance_type: sum(values) / len(values) for instance_type, values in means.items()}


def _mean_over_time(points: Sequence[SpotPrice], since: datetime, until: datetime) -> float:
    ordered = sorted(points, key=lambda point: point.at)
    ends = [*(min(max(point.at, since), until) for point in ordered[1:]), until]
    # The first known price is used for the time before it, too.
    begins = [since, *ends[:-1]]
    weights = [max((end - begin).total_seconds(), 0.0) for begin, end in zip(begins, ends, strict=True)]
    total = sum(weights)
    if not total:
        return ordered[-1].price
    return sum(point.price * weight for point, weight in zip(ordered, weights, strict=True)) / total
