"""The pool's budget: keep account of what its machines cost, and change the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from remuda.controlplane.context import CONFLICT_ATTEMPTS, Context, read_config
from remuda.domain.budget import Spending, add_spending, month_start, next_month
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import LIVE, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.reporting.prices import PriceTable, mean_spot_prices
from remuda.domain.resources import UsageClass
from remuda.domain.timestamps import to_milliseconds


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetStatus:
    """The budget of a pool in this month."""

    pool: str
    at: datetime
    #: Per month; 0 if none exists.
    limit: float
    spending: Spending
    #: Cost of the month if its days go on like those that have passed.
    projected: float
    #: A sentence from 80 % on, otherwise empty.
    warning: str
    #: Whether machines may be launched.
    is_launching: bool


async def budget_status(context: Context) -> BudgetStatus:
    config = await read_config(context)
    return _status_of(config, await measure_spending(context, config))


async def set_budget(context: Context, limit: float) -> BudgetStatus:
    """Store another limit. 0 removes it."""
    for _ in range(CONFLICT_ATTEMPTS):
        config = await read_config(context)
        spending = await measure_spending(context, config)
        changed = replace(
            config,
            monthly_budget=limit,
            spending=spending if limit else config.spending,
            revision=config.revision + 1,
        )
        try:
            await context.store.put_config(changed)
        except Conflict:
            # A refresh has renewed tokens or the spending.
            continue
        why = f"{limit:.2f} per month" if limit else "no limit"
        context.event_log.record("budget", why, before=config.monthly_budget)
        return _status_of(changed, spending)
    raise _keeps_changing()


async def update_spending(context: Context, config: PoolConfig) -> PoolConfig:
    """Store what the machines have cost up to now, if there is a budget.

    Must be called before terminations are confirmed: confirmed ones are no longer found.
    """
    for _ in range(CONFLICT_ATTEMPTS):
        if not config.monthly_budget:
            return config
        spending = await measure_spending(context, config)
        changed = replace(config, spending=spending, revision=config.revision + 1)
        try:
            await context.store.put_config(changed)
        except Conflict as conflict:
            # Another process wrote first. It may have counted nothing, and this sweep will confirm terminations.
            if not isinstance(conflict.current, PoolConfig):
                return config
            config = conflict.current
        else:
            return changed
    raise _keeps_changing()


def _keeps_changing() -> Conflict:
    return Conflict("the pool's configuration keeps changing; check whether another refresh is running")


async def measure_spending(context: Context, config: PoolConfig) -> Spending:
    now = to_milliseconds(context.clock.now())
    before = config.spending if config.monthly_budget else None
    # Live machines are enough if the cost was known at any time before: terminations are confirmed after it is updated.
    states = LIVE if before is not None else frozenset(State)
    instances = await context.store.find(states)
    since = before.until if before is not None and before.is_of(now) else month_start(now)
    prices, _ = await with_spot_prices(context, context.read_prices(), instances, since=since, until=now)
    return add_spending(before, instances, prices, now=now)


async def with_spot_prices(
    context: Context, prices: PriceTable, instances: Sequence[Instance], *, since: datetime, until: datetime
) -> tuple[PriceTable, list[str]]:
    """Add EC2's spot prices if there were spot machines. Return notes about missing prices."""
    types = {item.instance_type for item in instances if item.usage_class is UsageClass.SPOT}
    if not types:
        return prices, []
    notes: list[str] = []
    if context.spot_prices is not None:
        try:
            points = await context.spot_prices.spot_history(types, since=since, until=until)
        except RemudaError as error:
            notes.append(f"EC2's spot prices could not be read: {error.message}")
        else:
            prices = prices.with_spot(mean_spot_prices(points, since=since, until=until))
    missing = sorted(types - set(prices.spot))
    if missing:
        notes.append(f"spot counts as on-demand, which is more than was paid, for {', '.join(missing)}")
    return prices, notes


def _status_of(config: PoolConfig, spending: Spending) -> BudgetStatus:
    now = spending.until
    current = replace(config, spending=spending).budget
    passed = (now - month_start(now)) / (next_month(now) - month_start(now))
    return BudgetStatus(
        pool=config.pool,
        at=now,
        limit=config.monthly_budget,
        spending=spending,
        projected=spending.amount / passed if passed else spending.amount,
        warning=current.warning(now),
        is_launching=not current.is_used_up(now),
    )
