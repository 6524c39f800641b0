"""Report: reads what the ledger of a time needs. Reads only."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from remuda.controlplane.context import Context
from remuda.domain.errors import RemudaError
from remuda.domain.instance import Instance, State
from remuda.domain.reporting.prices import PriceTable, mean_spot
from remuda.domain.reporting.usage import UsageReport, usage_report
from remuda.domain.resources import UsageClass

#: How many provisions a report looks at; the newest.
MAX_PROVISIONS = 50_000
#: From the decision to end a machine until that is confirmed, at most.
ENDING_LASTS_S = 3_600.0


async def report(context: Context, *, since: datetime, prices: PriceTable) -> UsageReport:
    store = context.store
    until = context.clock.now()
    provisions = await store.recent_provisions(MAX_PROVISIONS, since=since)
    # A terminated instance's threshold is the time when its end was decided: earlier ones are not read any further.
    ended = since - timedelta(seconds=ENDING_LASTS_S)
    found = await store.find(frozenset(State))
    instances = [item for item in found if item.state is not State.TERMINATED or item.threshold >= ended]
    histories = await store.histories([item.instance_id for item in instances])
    prices, notes = await _with_spot(context, prices, instances, since=since, until=until)
    if len(provisions) == MAX_PROVISIONS:
        notes.append(f"only the newest {MAX_PROVISIONS} provisions are counted")
    if store.malformed_records:
        notes.append(f"{len(store.malformed_records)} records cannot be parsed and are left out")
    made = usage_report(provisions, instances, histories, prices, since=since, until=until)
    notes += (f"no price is known for {name}: it counts as free" for name in sorted(made.costs.unpriced_hours))
    return replace(made, notes=tuple(notes))


async def _with_spot(
    context: Context, prices: PriceTable, instances: list[Instance], *, since: datetime, until: datetime
) -> tuple[PriceTable, list[str]]:
    """With the market's own prices where there were spot machines and EC2 may be asked."""
    types = {item.instance_type for item in instances if item.usage_class is UsageClass.SPOT}
    if not types:
        return prices, []
    notes: list[str] = []
    if context.spot is not None:
        try:
            points = await context.spot.spot_history(types, since=since, until=until)
        except RemudaError as error:
            notes.append(f"EC2's spot prices could not be read: {error.message}")
        else:
            prices = prices.with_spot(mean_spot(points, since=since, until=until))
    dear = sorted(types - set(prices.spot))
    if dear:
        notes.append(f"spot counts as on-demand, which is more than was paid, for {', '.join(dear)}")
    return prices, notes
