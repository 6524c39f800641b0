"""Machines and their tags as EC2 tells of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from remuda.adapters.aws.ec2.calls import Ec2Calls
from remuda.adapters.aws.tags import RESERVED_PREFIX
from remuda.domain.errors import Unavailable
from remuda.domain.resources import is_instance_id
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.compute import MachineState, MachineView

DESCRIBE_PAGE = 1_000

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
                view = machine_view(item)
                found[view.instance_id] = view
    return list(found.values())


async def tags_by_id(calls: Ec2Calls, key: str, instance_ids: Sequence[str]) -> dict[str, str]:
    """The values of a tag, of those that have it."""
    filters: Filters = [{"Name": "resource-id", "Values": list(instance_ids)}, {"Name": "key", "Values": [key]}]
    asked = set(instance_ids)
    found: dict[str, str] = {}
    async for page in calls.pages("DescribeTags", Filters=filters, MaxResults=DESCRIBE_PAGE):
        for item in page.get("Tags", ()):
            name = str(item.get("ResourceId", ""))
            if name in asked and item.get("Key") == key:
                found[name] = str(item.get("Value", ""))
    return found


def instance_id_of(item: Mapping[str, Any]) -> str:
    """A list with a machine that cannot be named is no list: what is left out would look gone."""
    name = str(item.get("InstanceId", ""))
    if not is_instance_id(name):
        raise Unavailable("EC2 lists a machine without a usable id")
    return name


def tags_of(item: Mapping[str, Any]) -> dict[str, str]:
    return {str(tag.get("Key", "")): str(tag.get("Value", "")) for tag in item.get("Tags") or ()}


def utc(at: datetime) -> datetime:
    try:
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except OverflowError:
        raise Unavailable("EC2 lists a machine with a time that cannot be one") from None


def machine_view(item: Mapping[str, Any]) -> MachineView:
    state = str((item.get("State") or {}).get("Name", ""))
    launched_at = item.get("LaunchTime")
    # It has a grace from then on: without it, what was just launched would look old.
    if launched_at is None:
        raise Unavailable("EC2 lists a machine without the time of its launch")
    return MachineView(
        instance_id=instance_id_of(item),
        # A state that we do not know yet is no reason to think that it has ended.
        state=_STATES.get(state, MachineState.RUNNING),
        instance_type=str(item.get("InstanceType", "")),
        launched_at=to_milliseconds(utc(launched_at)),
        image=str(item.get("ImageId", "")),
        tags={key: value for key, value in tags_of(item).items() if not key.startswith(RESERVED_PREFIX)},
    )
