"""Descriptions of EC2 instances and their tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from remuda.adapters.aws.ec2.calls import Ec2Calls
from remuda.domain.errors import Unavailable
from remuda.domain.resources import is_instance_id
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.compute import MachineState, MachineView

DESCRIBE_PAGE = 1_000
#: Tags with this prefix are set by AWS and cannot be changed.
RESERVED_PREFIX = "aws:"

#: Remuda never stops an instance. One that was stopped by hand counts as shutting down, so that it gets terminated.
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


async def describe_machines(calls: Ec2Calls, filters: Filters) -> list[MachineView]:
    """All matching instances, each once."""
    found: dict[str, MachineView] = {}
    async for page in calls.pages("DescribeInstances", Filters=filters, MaxResults=DESCRIBE_PAGE):
        for reservation in page.get("Reservations", ()):
            for item in reservation.get("Instances", ()):
                view = machine_view(item)
                found[view.instance_id] = view
    return list(found.values())


async def tags_by_id(calls: Ec2Calls, key: str, instance_ids: Sequence[str]) -> dict[str, str]:
    """The value of one tag by instance id. Instances without the tag are missing."""
    filters: Filters = [{"Name": "resource-id", "Values": list(instance_ids)}, {"Name": "key", "Values": [key]}]
    wanted = set(instance_ids)
    found: dict[str, str] = {}
    async for page in calls.pages("DescribeTags", Filters=filters, MaxResults=DESCRIBE_PAGE):
        for item in page.get("Tags", ()):
            name = str(item.get("ResourceId", ""))
            if name in wanted and item.get("Key") == key:
                found[name] = str(item.get("Value", ""))
    return found


def instance_id_of(item: Mapping[str, Any]) -> str:
    """The instance id. A list with an invalid id is rejected as a whole: a skipped instance would count as gone."""
    name = str(item.get("InstanceId", ""))
    if not is_instance_id(name):
        raise Unavailable("EC2 returned an instance without a valid id")
    return name


def tags_of(item: Mapping[str, Any]) -> dict[str, str]:
    return {str(tag.get("Key", "")): str(tag.get("Value", "")) for tag in item.get("Tags") or ()}


def utc(at: datetime) -> datetime:
    try:
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except OverflowError:
        raise Unavailable("EC2 returned an instance with an invalid launch time") from None


def machine_view(item: Mapping[str, Any]) -> MachineView:
    state = str((item.get("State") or {}).get("Name", ""))
    launched_at = item.get("LaunchTime")
    # The grace period of instances without a record starts at the launch time, so it must be known.
    if launched_at is None:
        raise Unavailable("EC2 returned an instance without a launch time")
    return MachineView(
        instance_id=instance_id_of(item),
        # An unknown state counts as running, so that the instance is not taken for terminated.
        state=_STATES.get(state, MachineState.RUNNING),
        instance_type=str(item.get("InstanceType", "")),
        launched_at=to_milliseconds(utc(launched_at)),
        image=str(item.get("ImageId", "")),
        tags={key: value for key, value in tags_of(item).items() if not key.startswith(RESERVED_PREFIX)},
    )
