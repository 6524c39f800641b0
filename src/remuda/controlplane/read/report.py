"""Usage report: reads the provisions, instances, histories and spot prices of a period. Reads only."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from remuda.controlplane.context import Context
from remuda.domain.errors import RemudaError
from remuda.domain.instance import Instance, State
from remuda.domain.reporting.prices import PriceTable, mean_spot_prices
from remuda.domain.reporting.usage import UsageReport, usage_report
from remuda.domain.resources import UsageClass

#: Maximum number of provisions in a report; the newest are taken.
MAX_PROVISIONS = 50_000
#: Maximum seconds between the decision to end a machine and its confirmed termination.
MAX_TERMINATION_S = 3_600.0


async def report(context: Context, *, since: datetime, prices: PriceTable) -> UsageReport:
    store = context.store
    until = context.clock.now()
    provisions = await store.recent_provisions(MAX_PROVISIONS, since=since)
    # The threshold of a terminated instance is the time when its end was decided. Skip those that ended earlier.
    ended_before = since - timedelta(seconds=MAX_TERMINATION_S)
    found = await store.find(frozenset(State))
    instances = [item for item in found if item.state is not State.TERMINATED or item.threshold >= ended_before]
    histories = await store.histories([item.instance_id for item in instances])
    prices, notes = await _with_spot_prices(context, prices, instances, since=since, until=until)
    if len(provisions) == MAX_PROVISIONS:
        notes.append(f"only the newest {MAX_PROVISIONS} provisions are counted")
    if store.malformed_records:
        notes.append(f"{len(store.malformed_records)} records cannot be parsed and are left out")
    usage = usage_report(provisions, instances, histories, prices, since=since, until=until)
    notes += (f"no price is known for {name}: it counts as free" for name in sorted(usage.costs.unpriced_hours))
    return replace(usage, notes=tuple(notes))


async def _with_spot_prices(
    context: Context, prices: PriceTable, instances: list[Instance], *, since: datetime, until: datetime
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
