"""Spot prices from EC2's price history: ninety days back, by zone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from remuda.adapters.aws.ec2.calls import Ec2Calls, batches
from remuda.domain.reporting.prices import SpotPoint
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client

#: Types in one call.
BATCH = 100
LINUX = "Linux/UNIX"


class Ec2SpotPrices:
    def __init__(self, *, client: EC2Client, clock: Clock, ids: Ids, calls: CallCounter) -> None:
        self._calls = Ec2Calls(client=client, clock=clock, ids=ids, calls=calls)

    async def spot_history(
        self, instance_types: Collection[str], *, since: datetime, until: datetime
    ) -> Sequence[SpotPoint]:
        found: list[SpotPoint] = []
        for part in batches(sorted(set(instance_types)), BATCH):
            pages = self._calls.pages(
                "DescribeSpotPriceHistory",
                # As a filter: a type that EC2 does not know would else fail the call for all.
                Filters=[{"Name": "instance-type", "Values": list(part)}],
                ProductDescriptions=[LINUX],
                StartTime=since,
                EndTime=until,
            )
            async for page in pages:
                found += (point for item in page.get("SpotPriceHistory", []) if (point := _point(item)) is not None)
        return found


def _point(item: Mapping[str, Any]) -> SpotPoint | None:
    """None where EC2's answer is not as it should be."""
    at = item.get("Timestamp")
    try:
        price = float(item.get("SpotPrice", ""))
    except (TypeError, ValueError, OverflowError):
        return None
    if not isinstance(at, datetime):
        return None
    return SpotPoint(
        instance_type=str(item.get("InstanceType", "")),
        zone=str(item.get("AvailabilityZone", "")),
        at=at if at.tzinfo else at.replace(tzinfo=UTC),
        price=price,
    )
