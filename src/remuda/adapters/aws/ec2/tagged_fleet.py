"""A fleet of runner machines on EC2, found by the tags of terraform-aws-github-runner."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from remuda.adapters.aws.ec2.calls import Ec2Calls, batches
from remuda.adapters.aws.ec2.describe import DESCRIBE_PAGE, by_tag, instance_id_of, tags_of, utc
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

BATCH = 100
#: For the client: no call of this fleet takes long.
READ_TIMEOUT_S = 10.0
#: After so many calls in a row without a usable answer, the rest is left for the next cycle.
PATIENCE = 8
_STATES = ("pending", "running")
_WINDOWS = "windows"


class Ec2RunnerFleet:
    def __init__(self, *, client: EC2Client, environment: str, clock: Clock, ids: Ids, calls: CallCounter) -> None:
        """`client` is closed by whoever made it."""
        self._calls = Ec2Calls(client=client, clock=clock, ids=ids, calls=calls, waits_again=False)
        self._environment = environment
        self._listed: set[str] = set()

    async def close(self) -> None:
        """Nothing is held: the client is its maker's."""

    async def list_machines(self, *, orphans: bool = False) -> Sequence[FleetMachine]:
        filters = [
            {"Name": "instance-state-name", "Values": list(_STATES)},
            *by_tag(GHR_ENVIRONMENT_TAG, self._environment),
            *by_tag(GHR_APPLICATION_TAG, GHR_APPLICATION),
            *(by_tag(GHR_ORPHAN_TAG, YES) if orphans else ()),
        ]
        found: dict[str, FleetMachine] = {}
        async for page in self._calls.pages("DescribeInstances", Filters=filters, MaxResults=DESCRIBE_PAGE):
            for reservation in page.get("Reservations", ()):
                for item in reservation.get("Instances", ()):
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
        """The filters say so already; what is ended on their word is worth a second look."""
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
        failures = {name: "it is not of this fleet" for name in wanted if name not in self._listed}
        ours = [name for name in wanted if name in self._listed]
        patience = _Patience()
        for batch in batches(ours, BATCH):
            failures |= await self._change_all(operation, parameter, list(batch), more, patience)
        return failures

    async def _change_all(
        self, operation: str, parameter: str, names: list[str], more: Mapping[str, Any], patience: _Patience
    ) -> dict[str, str]:
        """One machine that cannot be changed fails a whole call: halve, and go on."""
        if patience.is_over:
            return dict.fromkeys(names, patience.why)
        parameters: dict[str, Any] = {parameter: names, **more}
        try:
            await self._calls.ask(operation, **parameters)
        except RemudaError as error:
            patience.note(error)
            if len(names) == 1:
                # What is gone is not to be ended any more, nor an orphan.
                return {} if isinstance(error, NotFound) else {names[0]: error.message}
            middle = len(names) // 2
            first = await self._change_all(operation, parameter, names[:middle], more, patience)
            return first | await self._change_all(operation, parameter, names[middle:], more, patience)
        patience.renew()
        return {}


class _Patience:
    """Where EC2 itself does not work, asking for each machine alone only takes time."""

    def __init__(self) -> None:
        self._left = PATIENCE
        self.why = ""

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    def note(self, error: RemudaError) -> None:
        if isinstance(error, Unavailable):
            self._left -= 1
            self.why = error.message

    def renew(self) -> None:
        self._left = PATIENCE


def _machine(item: Mapping[str, Any]) -> FleetMachine:
    launched_at = item.get("LaunchTime")
    return FleetMachine(
        instance_id=instance_id_of(item),
        launched_at=None if launched_at is None else utc(launched_at),
        tags=tags_of(item),
        os="windows" if str(item.get("Platform", "")).lower() == _WINDOWS else "linux",
    )
