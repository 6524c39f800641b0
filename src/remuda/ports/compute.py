"""Machines: launch, list, tag and terminate; spot prices. Responses lag and may be incomplete."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from remuda.domain.resources import ResourceClass, RunnerRequest, UsageClass
from remuda.domain.scale_down.fleet import FleetMachine

if TYPE_CHECKING:
    from remuda.domain.reporting.prices import SpotPrice

#: Tags of every launched machine. Machines without them are never terminated.
POOL_TAG = "remuda:pool"
PROVISION_TAG = "remuda:provision"


class MachineState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SHUTTING_DOWN = "shutting-down"
    TERMINATED = "terminated"


#: States of machines that run no more jobs.
ENDED = frozenset({MachineState.SHUTTING_DOWN, MachineState.TERMINATED})


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    provision_id: str
    #: Requests with the same token launch only once.
    client_token: str
    count: int
    request: RunnerRequest
    #: Scope of the run: an organisation, or owner/repo.
    scope: str
    #: Launch parameters of the pool's configuration.
    launch: Mapping[str, str] = field(default_factory=dict)
    #: Seconds after which the machine shuts itself down, until the agent sets its dead-man timer.
    first_life_s: float
    #: The pool's clock margin in seconds, for the agent.
    margin_s: float
    #: Tags in addition to the pool's and the provision's.
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    instance_id: str
    instance_type: str
    #: The actual usage class: spot may fall back to on-demand.
    usage_class: UsageClass


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchResult:
    instances: tuple[Launched, ...]
    #: One sentence per type or zone without capacity.
    errors: tuple[str, ...] = ()
    #: What can be done about the errors, as an imperative, or empty.
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineView:
    instance_id: str
    state: MachineState
    instance_type: str
    launched_at: datetime
    tags: Mapping[str, str]
    #: Image id, or empty if the backend has no images.
    image: str = ""
    #: Why it ended, such as "Client.InternalError: Client error on launch", and what can be done about it, as an
    #: imperative. Empty if it has not ended, or if the backend does not know.
    end_reason: str = ""
    end_fix: str = ""

    def describe_end(self) -> str:
        """Example: "the instance is terminated: Client.InternalError: Client error on launch"."""
        return f"the instance is {self.state}{f': {self.end_reason}' if self.end_reason else ''}"


class Compute(Protocol):
    """The machines of one pool."""

    async def prepare(self, launch: Mapping[str, str], classes: Sequence[ResourceClass] = ()) -> Sequence[str]:
        """Check and apply the launch parameters (launch template, image, subnets). Returns the changes, for people.

        Also checks the images of the classes.
        """
        ...

    async def close(self) -> None: ...

    async def launch(self, request: LaunchRequest) -> LaunchResult:
        """Launch `count` machines. May launch fewer; `errors` says why.

        Raises `CapacityError` if no machine can be launched, `UserError` if the request can never succeed, and
        `Unavailable` if the result is unknown: launched machines can be found by their tags.
        """
        ...

    async def describe(self, instance_ids: Collection[str]) -> Mapping[str, MachineView]:
        """Return the known machines by id. A machine may be missing for seconds after its launch."""
        ...

    async def list_pool(self) -> Sequence[MachineView]:
        """Return all machines with the pool's tag, including terminated ones that are still known. May lag."""
        ...

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        """Request the termination of machines, in batches. Return the reasons of failures by id.

        A machine that does not exist any more is a success. A machine without the pool's tag is a failure.
        Does not wait until the machines are terminated.
        """
        ...

    async def tag(self, instance_ids: Collection[str], tags: Mapping[str, str]) -> None: ...

    async def untag(self, instance_ids: Collection[str], keys: Collection[str]) -> None: ...


class SpotPrices(Protocol):
    """Source of spot prices."""

    async def spot_history(
        self, instance_types: Collection[str], *, since: datetime, until: datetime
    ) -> Sequence[SpotPrice]:
        """Return the price at `since` and every change until `until`, per type and zone.

        Unknown types are omitted. Raises `UserError` if the caller lacks the permission.
        """
        ...


class TaggedFleet(Protocol):
    """The runner machines of one environment, selected by their tags, regardless of the software that launched them.

    Only machines tagged `ghr:environment=<environment>` and `ghr:Application=github-action-runner` are listed, tagged
    or terminated.
    """

    async def close(self) -> None: ...

    async def list_machines(self, *, orphans: bool = False) -> Sequence[FleetMachine]:
        """Return all running and pending machines in EC2's order; with `orphans` only those tagged as orphans."""
        ...

    async def mark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        """Tag machines as orphans, in batches. Return the reasons of failures by id."""
        ...

    async def unmark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        """Remove the orphan tag, in batches. Return the reasons of failures by id."""
        ...

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        """Request the termination of machines, in batches. Return the reasons of failures by id.

        A machine that does not exist any more is a success. A machine that this fleet has not listed is a failure.
        """
        ...
