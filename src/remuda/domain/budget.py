"""Monthly budget of a pool: what its machines have cost in this month, and whether more may be launched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from remuda.domain.instance import ABSORBING, Instance
from remuda.domain.reporting.prices import PriceTable

#: Share of the budget from which on people are warned.
WARNING_SHARE = 0.8
#: Types without a price that are kept for people.
MAX_UNPRICED = 10


def month_start(now: datetime) -> datetime:
    """Months are those of UTC, as in the bills of AWS."""
    return now.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def next_month(now: datetime) -> datetime:
    start = month_start(now)
    return start.replace(year=start.year + start.month // 12, month=start.month % 12 + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spending:
    """Cost of the pool's machines from the begin of a month on."""

    #: The time up to which the cost is known.
    until: datetime
    amount: float
    currency: str = "USD"
    #: Instance types and usage classes without a known price, which count as free.
    unpriced: tuple[str, ...] = ()

    def is_of(self, month: datetime) -> bool:
        return month_start(self.until) == month_start(month)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """A limit per month and what is known to be spent."""

    #: 0 if none exists.
    limit: float
    spending: Spending | None

    def spent(self, now: datetime) -> float:
        """The cost of this month; 0 if only that of an earlier month is known."""
        return self.spending.amount if self.spending and self.spending.is_of(now) else 0.0

    def is_used_up(self, now: datetime) -> bool:
        return bool(self.limit) and self.spent(now) >= self.limit

    def warning(self, now: datetime) -> str:
        """A sentence from 80 % on, otherwise empty."""
        spent = self.spent(now)
        if not self.limit or self.spending is None or spent < WARNING_SHARE * self.limit:
            return ""
        used = f"{spent:.2f} of {self.limit:.2f} {self.spending.currency} are spent this month"
        if self.is_used_up(now):
            until = f"{next_month(now):%Y-%m-%d}"
            return f"{used}: no machine is launched before {until}, unless remuda budget raises it; idle ones are used"
        return f"{used} ({spent / self.limit:.0%}): at 100 % no machine is launched"


def add_spending(
    before: Spending | None, instances: Iterable[Instance], prices: PriceTable, *, now: datetime
) -> Spending:
    """Add the cost of the machines since `before`, or since the begin of the month.

    The machines are all that lived in this time: those that are live, among them those whose end is not confirmed, and
    without `before` also the terminated ones of this month.
    """
    known = before if before is not None and before.is_of(now) else None
    begin = known.until if known else month_start(now)
    amount, unpriced = (known.amount, set(known.unpriced)) if known else (0.0, set[str]())
    for instance in instances:
        # The threshold of an ending machine is the time when its end was decided.
        end = min(now, instance.threshold) if instance.state in ABSORBING else now
        hours = (end - max(begin, instance.created_at)) / timedelta(hours=1)
        if hours <= 0:
            continue
        price = prices.hourly(instance.instance_type, instance.usage_class)
        if price is None:
            unpriced.add(f"{instance.instance_type} {instance.usage_class}")
        amount += hours * (price or 0.0)
    return Spending(until=now, amount=amount, currency=prices.currency, unpriced=tuple(sorted(unpriced)[:MAX_UNPRICED]))
