"""Spot prices from EC2's price history, which covers the last 90 days per availability zone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from remuda.adapters.aws.calls import chunks
from remuda.adapters.aws.ec2.calls import Ec2Calls
from remuda.domain.reporting.prices import SpotPrice
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client

#: Instance types per call.
BATCH = 100
LINUX = "Linux/UNIX"


class Ec2SpotPrices:
    def __init__(self, *, client: EC2Client, clock: Clock, ids: Ids, calls: CallCounter) -> None:
        self._calls = Ec2Calls(client=client, clock=clock, ids=ids, calls=calls)

    async def spot_history(
        self, instance_types: Collection[str], *, since: datetime, until: datetime
    ) -> Sequence[SpotPrice]:
        found: list[SpotPrice] = []
        for part in chunks(sorted(set(instance_types)), BATCH):
            pages = self._calls.pages(
                "DescribeSpotPriceHistory",
                # Passed as a filter: an unknown value of InstanceTypes would fail the whole call.
                Filters=[{"Name": "instance-type", "Values": list(part)}],
                ProductDescriptions=[LINUX],
                StartTime=since,
                EndTime=until,
            )
            async for page in pages:
                found += (point for item in page.get("SpotPriceHistory", []) if (point := _point(item)) is not None)
        return found


def _point(item: Mapping[str, Any]) -> SpotPrice | None:
    """The price in an entry, or None if the entry is malformed."""
    at = item.get("Timestamp")
    try:
        price = float(item.get("SpotPrice", ""))
    except (TypeError, ValueError, OverflowError):
        return None
    if not isinstance(at, datetime):
        return None
    return SpotPrice(
        instance_type=str(item.get("InstanceType", "")),
        zone=str(item.get("AvailabilityZone", "")),
        at=at if at.tzinfo else at.replace(tzinfo=UTC),
        price=price,
    )
