"""Compute: machines that cost money. Answers lag and may be partial."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from remuda.domain.resources import RunnerRequest, UsageClass

#: Every machine that we launch carries these; nothing else is ever terminated.
POOL_TAG = "remuda:pool"
PROVISION_TAG = "remuda:provision"


class MachineState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SHUTTING_DOWN = "shutting-down"
    TERMINATED = "terminated"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    provision_id: str
    #: The same token never launches twice.
    client_token: str
    count: int
    request: RunnerRequest
    #: Whose jobs it is launched for: an organisation, or owner/repo.
    scope: str
    #: What the pool's configuration holds for the backend.
    launch: Mapping[str, str] = field(default_factory=dict)
    #: The dead-man timer that the machine starts with: it ends itself after so long unless told otherwise.
    first_life_s: float
    #: The pool's clock margin, for the agent.
    margin_s: float
    #: More tags; the pool's and the provision's are always there.
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    instance_id: str
    instance_type: str
    #: What it is: spot that falls back to on-demand gives other than was asked for.
    usage_class: UsageClass


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchResult:
    instances: tuple[Launched, ...]
    #: Who had no capacity and what it said, one sentence each.
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineView:
    instance_id: str
    state: MachineState
    instance_type: str
    launched_at: datetime
    tags: Mapping[str, str]
    #: What it was made of, where the cloud has images.
    image: str = ""


class Compute(Protocol):
    async def prepare(self, launch: Mapping[str, str]) -> Sequence[str]:
        """Check and apply what launches need (launch template, image, subnets). Returns what changed."""
        ...

    async def close(self) -> None: ...

    async def launch(self, request: LaunchRequest) -> LaunchResult:
        """Ask for `count` machines at once. May launch fewer, or none, and then says why in `errors`.

        Raises `CapacityError` where nothing can be launched, `UserError` where the request can never work,
        `Unavailable` where it may have launched without saying so: the tags find those.
        """
        ...

    async def describe(self, instance_ids: Collection[str]) -> Mapping[str, MachineView]:
        """Those that compute knows. One that was just launched may be missing for seconds."""
        ...

    async def list_pool(self) -> Sequence[MachineView]:
        """Every machine with this pool's tag, terminated ones included as long as they are known. May lag."""
        ...

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        """Ask for their end, in batches; one that is gone already is a success. Returns by id why some could not be
        asked for. One without this pool's tag is refused, never ended. The end itself may take a while.
        """
        ...

    async def tag(self, instance_ids: Collection[str], tags: Mapping[str, str]) -> None: ...

    async def untag(self, instance_ids: Collection[str], keys: Collection[str]) -> None: ...
