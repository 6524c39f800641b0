"""The costs of a smoke run: an upper limit before it starts, and an estimate while it runs.

All figures are upper limits. Prices of machines come from the table of the package. The other prices are list prices of
us-east-1 that change rarely; they were not read from the pricing pages, so they are no basis for a bill.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from remuda.domain.errors import RemudaError, UserError
from remuda.domain.reporting.prices import PriceTable
from tests.smoke.settings import BUDGET

#: Instance types of the smoke pool. The sandboxes need no more.
TYPES = ("c6a.large", "c6i.large", "m6a.large", "m6i.large")
#: Limit of the pool: the reused machine and the spot machine.
MACHINES = 2
#: Hours until the run is stopped, and hours that the clean-up may take after that.
RUN_HOURS, CLEANUP_HOURS = 1.5, 0.5
#: Prices of us-east-1 times this are above those of every other region.
REGION_FACTOR = 2.0
VOLUME_GIB = 30
GP3_GIB_HOUR = 0.08 / 730
ADDRESS_HOUR = 0.005
LAMBDA_GB_S = 0.0000166667
#: Price of the listener's instance, with its volume and address, per hour.
LISTENER_HOUR = 0.0104 * REGION_FACTOR + 8 * GP3_GIB_HOUR * REGION_FACTOR + ADDRESS_HOUR
#: Two functions every five minutes, each up to its timeout with its memory.
SCHEDULED_GB_S_PER_HOUR = 2 * 12 * 240 * 1.0
#: Requests of three runs to the broker, each up to its timeout with its memory.
BROKER_GB_S = 12 * 900 * 1.73
#: FIS bills per minute of an action.
FIS_USD = 5 * 0.10
#: Secret, metrics, logs, table, queues, bucket and traffic: less than this for a day.
OTHER_USD = 0.50


class BudgetExceeded(RemudaError):
    """The run has reached its limit of costs or time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostItem:
    name: str
    usd: float


def machine_hour_usd(prices: PriceTable) -> float:
    """The price of the most expensive machine with its volume and address, on demand."""
    known = [prices.on_demand[name] for name in TYPES]
    return max(known) * REGION_FACTOR + VOLUME_GIB * GP3_GIB_HOUR * REGION_FACTOR + ADDRESS_HOUR


def fixed_items() -> tuple[CostItem, ...]:
    hours = RUN_HOURS + CLEANUP_HOURS
    functions = (SCHEDULED_GB_S_PER_HOUR * hours + BROKER_GB_S) * LAMBDA_GB_S * REGION_FACTOR
    return (
        CostItem(name="functions", usd=functions),
        CostItem(name="listener", usd=LISTENER_HOUR * hours),
        CostItem(name="spot notice by FIS", usd=FIS_USD),
        CostItem(name="secret, metrics, logs, table, queues, bucket, traffic", usd=OTHER_USD),
    )


def upper_limit(prices: PriceTable) -> tuple[CostItem, ...]:
    hours = RUN_HOURS + CLEANUP_HOURS
    machines = CostItem(
        name=f"{MACHINES} machines for {hours:g} hours", usd=MACHINES * hours * machine_hour_usd(prices)
    )
    return (machines, *fixed_items())


def check_budget(prices: PriceTable, limit_usd: float) -> float:
    """The most that the run may cost. Refuses a budget below that."""
    most = sum(item.usd for item in upper_limit(prices))
    if most > limit_usd:
        raise UserError(
            f"the run may cost up to {most:.2f} USD, more than {BUDGET}={limit_usd:g}",
            field=BUDGET,
            fix="raise the limit",
        )
    return most


@dataclass(kw_only=True)
class Meter:
    """The estimate of what a run has cost so far, by the machines that were seen."""

    limit_usd: float
    prices: PriceTable
    _spent_usd: float = field(init=False)
    _hours: float = 0.0

    def __post_init__(self) -> None:
        self._spent_usd = sum(item.usd for item in fixed_items())

    @property
    def spent_usd(self) -> float:
        return self._spent_usd

    def add(self, *, machines: int, seconds: float) -> None:
        """Count these seconds. At least the machines of the plan count, because one may have been missed."""
        hours = seconds / 3_600
        self._hours += hours
        self._spent_usd += max(machines, MACHINES) * hours * machine_hour_usd(self.prices)

    def check(self) -> None:
        """Raises `BudgetExceeded` as long as the limit still covers the clean-up."""
        cleanup_usd = MACHINES * CLEANUP_HOURS * machine_hour_usd(self.prices)
        if self._spent_usd + cleanup_usd > self.limit_usd:
            raise BudgetExceeded(f"the run may have cost {self._spent_usd:.2f} USD; the clean-up needs the rest")
        if self._hours > RUN_HOURS:
            raise BudgetExceeded(f"the run has taken {self._hours:.1f} hours, more than the {RUN_HOURS:g} of its plan")
