"""Machines as DescribeInstances tells of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from remuda.adapters.aws.ec2.calls import Ec2Calls
from remuda.adapters.aws.tags import RESERVED_PREFIX
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.compute import MachineState, MachineView

DESCRIBE_PAGE = 1_000
_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)

#: Nothing of ours is ever stopped; one that somebody stopped by hand will not run again: it is to be ended.
_STATES = {
    "pending": MachineState.PENDING,
    "running": MachineState.RUNNING,
    "shutting-down": MachineState.SHUTTING_DOWN,
    "terminated": MachineState.TERMINATED,
    "stopping": MachineState.SHUTTING_DOWN,
    "stopped": MachineState.SHUTTING_DOWN,
}

Filters = list[dict[str, Any]]


def by_id(instance_ids: Sequence[str]) -> Filters:
    return [{"Name": "instance-id", "Values": list(instance_ids)}]


def by_tag(key: str, value: str) -> Filters:
    return [{"Name": f"tag:{key}", "Values": [value]}]


async def views_of(calls: Ec2Calls, filters: Filters) -> list[MachineView]:
    """All pages, each machine once."""
    found: dict[str, MachineView] = {}
    async for page in calls.pages("DescribeInstances", Filters=filters, MaxResults=DESCRIBE_PAGE):
        for reservation in page.get("Reservations", ()):
            for item in reservation.get("Instances", ()):
                view = _view(item)
                found[view.instance_id] = view
    return list(found.values())


def _view(item: Mapping[str, Any]) -> MachineView:
    state = str((item.get("State") or {}).get("Name", ""))
    launched_at = item.get("LaunchTime") or _BEGINNING
    return MachineView(
        instance_id=str(item["InstanceId"]),
        # A state that we do not know yet is no reason to think that it has ended.
        state=_STATES.get(state, MachineState.RUNNING),
        instance_type=str(item.get("InstanceType", "")),
        launched_at=to_milliseconds(launched_at.astimezone(UTC)),
        image=str(item.get("ImageId", "")),
        tags={tag["Key"]: tag["Value"] for tag in item.get("Tags", ()) if not tag["Key"].startswith(RESERVED_PREFIX)},
    )
