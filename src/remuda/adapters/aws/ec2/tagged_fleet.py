"""EC2 instances with the tags of terraform-aws-github-runner, for scale-down."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from remuda.adapters.aws.calls import chunks
from remuda.adapters.aws.ec2.calls import Ec2Calls, by_tag, describe_instances, instance_id_of, tags_of, utc
from remuda.domain.errors import NotFound, RemudaError, Unavailable
from remuda.domain.scale_down.fleet import (
    GHR_APPLICATION,
    GHR_APPLICATION_TAG,
    GHR_ENVIRONMENT_TAG,
    GHR_ORPHAN_TAG,
    YES,
    FleetMachine,
)
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client

#: Instances per call.
BATCH = 100
#: Read timeout of the client. No call of this module takes long.
READ_TIMEOUT_S = 10.0
#: Consecutive failed calls after which the remaining instances are left to the next cycle.
MAX_CONSECUTIVE_FAILURES = 8
_STATES = ("pending", "running")
_WINDOWS = "windows"


class Ec2Fleet:
    def __init__(self, *, client: EC2Client, environment: str, clock: Clock, ids: Ids, calls: CallCounter) -> None:
        """The caller closes `client`."""
        self._calls = Ec2Calls(client=client, clock=clock, ids=ids, calls=calls, retry_timeouts=False)
        self._environment = environment
        self._listed: set[str] = set()

    async def close(self) -> None:
        """Does nothing: the client belongs to the caller."""

    async def list_machines(self, *, orphans: bool = False) -> Sequence[FleetMachine]:
        filters = [
            {"Name": "instance-state-name", "Values": list(_STATES)},
            *by_tag(GHR_ENVIRONMENT_TAG, self._environment),
            *by_tag(GHR_APPLICATION_TAG, GHR_APPLICATION),
            *(by_tag(GHR_ORPHAN_TAG, YES) if orphans else ()),
        ]
        found: dict[str, FleetMachine] = {}
        async for item in describe_instances(self._calls, filters):
            machine = _machine(item)
            if self._is_ours(item, machine, orphans=orphans):
                found[machine.instance_id] = machine
        self._listed.update(found)
        return list(found.values())

    async def mark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        tags = [{"Key": GHR_ORPHAN_TAG, "Value": YES}]
        return await self._change("CreateTags", "Resources", instance_ids, Tags=tags)

    async def unmark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        return await self._change("DeleteTags", "Resources", instance_ids, Tags=[{"Key": GHR_ORPHAN_TAG}])

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        return await self._change("TerminateInstances", "InstanceIds", instance_ids)

    def _is_ours(self, item: Mapping[str, Any], machine: FleetMachine, *, orphans: bool) -> bool:
        """Whether the instance belongs to this fleet. Checked in addition to EC2's filters, before any termination."""
        state = str((item.get("State") or {}).get("Name", ""))
        return (
            state in _STATES
            and machine.tags.get(GHR_ENVIRONMENT_TAG) == self._environment
            and machine.tags.get(GHR_APPLICATION_TAG) == GHR_APPLICATION
            and (machine.is_orphan or not orphans)
        )

    async def _change(
        self, operation: str, parameter: str, instance_ids: Collection[str], **more: Any
    ) -> dict[str, str]:
        wanted = list(dict.fromkeys(instance_ids))
        failures = {name: "not an instance of this fleet" for name in wanted if name not in self._listed}
        ours = [name for name in wanted if name in self._listed]
        breaker = _CircuitBreaker()
        for batch in chunks(ours, BATCH):
            failures |= await self._change_batch(operation, parameter, list(batch), more, breaker)
        return failures

    async def _change_batch(
        self, operation: str, parameter: str, names: list[str], more: Mapping[str, Any], breaker: _CircuitBreaker
    ) -> dict[str, str]:
        """Change one batch. EC2 rejects a whole call for one instance, so a failed batch is halved and retried."""
        if breaker.is_open:
            return dict.fromkeys(names, breaker.last_error)
        parameters: dict[str, Any] = {parameter: names, **more}
        try:
            await self._calls.call(operation, **parameters)
        except RemudaError as error:
            breaker.record_failure(error)
            if len(names) == 1:
                # An instance that no longer exists needs no change.
                return {} if isinstance(error, NotFound) else {names[0]: error.message}
            middle = len(names) // 2
            first = await self._change_batch(operation, parameter, names[:middle], more, breaker)
            return first | await self._change_batch(operation, parameter, names[middle:], more, breaker)
        breaker.reset()
        return {}


class _CircuitBreaker:
    """Stops further calls after several consecutive failures of EC2 itself."""

    def __init__(self) -> None:
        self._failures = 0
        self.last_error = ""

    @property
    def is_open(self) -> bool:
        return self._failures >= MAX_CONSECUTIVE_FAILURES

    def record_failure(self, error: RemudaError) -> None:
        if isinstance(error, Unavailable):
            self._failures += 1
            self.last_error = error.message

    def reset(self) -> None:
        self._failures = 0


def _machine(item: Mapping[str, Any]) -> FleetMachine:
    launched_at = item.get("LaunchTime")
    return FleetMachine(
        instance_id=instance_id_of(item),
        launched_at=None if launched_at is None else utc(launched_at),
        tags=tags_of(item),
        os="windows" if str(item.get("Platform", "")).lower() == _WINDOWS else "linux",
    )
