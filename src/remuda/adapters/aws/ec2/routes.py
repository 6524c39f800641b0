"""Routes of subnets to the internet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def outbound_route(subnet: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> str:
    """The route of machines in the subnet to the internet: `public`, `nat`, or `none`."""
    name = subnet["SubnetId"]
    own = [table for table in tables if any(item.get("SubnetId") == name for item in table.get("Associations") or ())]
    main = [table for table in tables if any(item.get("Main") for item in table.get("Associations") or ())]
    for table in own or main:
        for route in table.get("Routes") or ():
            if route.get("DestinationCidrBlock") != "0.0.0.0/0" or route.get("State") == "blackhole":
                continue
            if str(route.get("GatewayId") or "").startswith("igw-"):
                # A machine without a public address cannot use an internet gateway.
                return "public" if subnet.get("MapPublicIpOnLaunch") else "none"
            return "nat"
    return "none"
