"""Compute and a tagged fleet of runner machines in memory, for unit tests and the simulation.

It has no timers and no tasks: the state of a machine follows from the clock. Wrap the ports to simulate failures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Protocol

from remuda.domain.errors import CapacityError, NotFound
from remuda.domain.resources import ResourceClass, RunnerRequest
from remuda.domain.scale_down.fleet import (
    GHR_APPLICATION,
    GHR_APPLICATION_TAG,
    GHR_ENVIRONMENT_TAG,
    GHR_ORPHAN_TAG,
    YES,
    FleetMachine,
)
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock
from remuda.ports.compute import (
    ENDED,
    POOL_TAG,
    PROVISION_TAG,
    Launched,
    LaunchRequest,
    LaunchResult,
    MachineState,
    MachineView,
)

SERVICE = "compute"
#: Maximum instances per call to describe or terminate, for the count of calls.
CALL_BATCH = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineType:
    name: str
    cpu: int
    #: MiB.
    memory_mib: int


#: In the order of preference: the first type that fits and has capacity is used.
TYPES = tuple(
    MachineType(name=f"{family}.{size}", cpu=cpu, memory_mib=cpu * gib * 1024)
    for size, cpu in (("large", 2), ("xlarge", 4), ("2xlarge", 8), ("4xlarge", 16), ("8xlarge", 32), ("16xlarge", 64))
    for family, gib in (("c6i", 2), ("m6i", 4), ("r6i", 8))
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryMachine:
    instance_id: str
    instance_type: str
    pool: str
    launched_at: datetime
    booted_at: datetime
    tags: Mapping[str, str]
    request: LaunchRequest
    #: Time of the dead-man timer, at which the machine ends in any case.
    dead_man_at: datetime
    #: When its termination was requested, and the reason.
    ending_at: datetime | None = None
    reason: str = ""

    @property
    def ends_at(self) -> datetime:
        return self.dead_man_at if self.ending_at is None else min(self.dead_man_at, self.ending_at)


class Watcher(Protocol):
    """Called within the call that launches or terminates a machine. Dead-man timers end machines without a call."""

    def launched(self, machine: MemoryMachine) -> None: ...

    def ending(self, machine: MemoryMachine) -> None: ...


class MemoryCloud:
    """The cloud that all compute objects share. Its clock is the true time, not that of a process."""

    def __init__(
        self,
        *,
        clock: Clock,
        types: Sequence[MachineType] = TYPES,
        capacity: Mapping[str, int] | None = None,
        boot_s: float = 0.0,
        ending_s: float = 0.0,
        remembers_s: float = 3_600.0,
    ) -> None:
        self.clock = clock
        self.types = tuple(types)
        #: Maximum number of live machines per type; no limit for other types.
        self.capacity = dict(capacity or {})
        self.boot = timedelta(seconds=boot_s)
        self.shutting_down = timedelta(seconds=ending_s)
        #: Time that a terminated machine is still listed.
        self.remembers = timedelta(seconds=remembers_s)
        self.machines: dict[str, MemoryMachine] = {}
        self.watchers: list[Watcher] = []
        #: Launch parameters of the last `prepare`.
        self.prepared: Mapping[str, str] = {}
        self._answers: dict[str, LaunchResult] = {}

    def state(self, instance_id: str) -> MachineState | None:
        """The state of a machine; None if it is unknown or no longer listed."""
        machine = self.machines.get(instance_id)
        if machine is None:
            return None
        now = self.clock.now()
        ending_at = machine.ends_at
        ended_at = ending_at + self.shutting_down
        if now >= ended_at:
            return MachineState.TERMINATED if now < ended_at + self.remembers else None
        if now >= ending_at:
            return MachineState.SHUTTING_DOWN
        return MachineState.PENDING if now < machine.booted_at else MachineState.RUNNING

    def is_alive(self, instance_id: str) -> bool:
        """Whether anything may still run on the machine."""
        machine = self.machines.get(instance_id)
        return machine is not None and self.clock.now() < machine.ends_at

    def view(self, instance_id: str) -> MachineView | None:
        state = self.state(instance_id)
        if state is None:
            return None
        machine = self.machines[instance_id]
        return MachineView(
            instance_id=instance_id,
            state=state,
            instance_type=machine.instance_type,
            launched_at=machine.launched_at,
            tags=machine.tags,
            end_reason=machine.reason if state in ENDED else "",
        )

    def launch(self, request: LaunchRequest, *, pool: str) -> LaunchResult:
        known = self._answers.get(request.client_token)
        if known is not None:
            return known
        chosen, errors = self._choose(request.request, request.count)
        if not chosen:
            raise CapacityError("; ".join(errors))
        launched = [self._add(request, kind, pool) for kind in chosen]
        answer = LaunchResult(
            instances=tuple(
                Launched(
                    instance_id=machine.instance_id,
                    instance_type=machine.instance_type,
                    usage_class=request.request.usage_class,
                )
                for machine in launched
            ),
            errors=tuple(errors),
        )
        self._answers[request.client_token] = answer
        for machine in launched:
            for watcher in self.watchers:
                watcher.launched(machine)
        return answer

    def arm(self, instance_id: str, at: datetime) -> None:
        """Set a machine's dead-man timer. A machine that has ended stays ended."""
        if self.is_alive(instance_id):
            self.machines[instance_id] = replace(self.machines[instance_id], dead_man_at=at)

    def end(self, instance_id: str, reason: str) -> None:
        """End a machine: by the control plane, by the machine itself, or by a power loss."""
        if not self.is_alive(instance_id):
            return
        machine = replace(self.machines[instance_id], ending_at=self.clock.now(), reason=reason)
        self.machines[instance_id] = machine
        for watcher in self.watchers:
            watcher.ending(machine)

    def retag(self, instance_id: str, change: Callable[[Mapping[str, str]], Mapping[str, str]]) -> bool:
        if self.state(instance_id) is None:
            return False
        machine = self.machines[instance_id]
        self.machines[instance_id] = replace(machine, tags=dict(change(machine.tags)))
        return True

    def _choose(self, request: RunnerRequest, count: int) -> tuple[list[MachineType], list[str]]:
        """A type for each machine, and the types without enough capacity."""
        wanted = request.resource_class
        fitting = [
            kind
            for kind in self.types
            if kind.cpu >= wanted.cpu and kind.memory_mib >= wanted.memory_mib and request.patterns.matches(kind.name)
        ]
        if not fitting:
            return [], [f"no type matches {request.patterns} with the cpu and memory of class {wanted.name}"]
        chosen: list[MachineType] = []
        errors: list[str] = []
        for kind in fitting:
            missing = count - len(chosen)
            free = self._free(kind.name, missing)
            chosen += [kind] * free
            if free == missing:
                break
            errors.append(f"{kind.name}: capacity for {free} of {missing}")
        return chosen, errors

    def _free(self, name: str, most: int) -> int:
        if name not in self.capacity:
            return most
        live = sum(machine.instance_type == name and self.is_alive(key) for key, machine in self.machines.items())
        return max(0, min(most, self.capacity[name] - live))

    def _add(self, request: LaunchRequest, kind: MachineType, pool: str) -> MemoryMachine:
        now = self.clock.now()
        machine = MemoryMachine(
            instance_id=f"i-{len(self.machines) + 1:017x}",
            instance_type=kind.name,
            pool=pool,
            launched_at=now,
            booted_at=now + self.boot,
            tags={**request.tags, POOL_TAG: pool, PROVISION_TAG: request.provision_id},
            request=request,
            dead_man_at=now + timedelta(seconds=request.first_life_s),
        )
        self.machines[machine.instance_id] = machine
        return machine


class MemoryCompute:
    def __init__(self, *, cloud: MemoryCloud, pool: str, calls: CallCounter) -> None:
        self._cloud = cloud
        self._pool = pool
        self._calls = calls

    async def prepare(
        self,
        launch: Mapping[str, str],
        classes: Sequence[ResourceClass] = (),  # noqa: ARG002 - any classes are accepted
    ) -> Sequence[str]:
        self._calls.add(SERVICE, "prepare")
        self._cloud.prepared = dict(launch)
        return []

    async def close(self) -> None:
        """Nothing to close."""

    async def launch(self, request: LaunchRequest) -> LaunchResult:
        self._calls.add(SERVICE, "launch")
        return self._cloud.launch(request, pool=self._pool)

    async def describe(self, instance_ids: Collection[str]) -> Mapping[str, MachineView]:
        self._count("describe", len(instance_ids))
        views = (self._cloud.view(instance_id) for instance_id in sorted(set(instance_ids)))
        return {view.instance_id: view for view in views if view is not None}

    async def list_pool(self) -> Sequence[MachineView]:
        self._calls.add(SERVICE, "list_pool")
        views = (self._cloud.view(instance_id) for instance_id in sorted(self._cloud.machines))
        return [view for view in views if view is not None and view.tags.get(POOL_TAG) == self._pool]

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        self._count("terminate", len(instance_ids))
        refused: dict[str, str] = {}
        for instance_id in sorted(set(instance_ids)):
            view = self._cloud.view(instance_id)
            if view is not None and view.tags.get(POOL_TAG) != self._pool:
                refused[instance_id] = f"it does not carry the tag {POOL_TAG}={self._pool}"
            else:
                self._cloud.end(instance_id, "terminated")
        return refused

    async def tag(self, instance_ids: Collection[str], tags: Mapping[str, str]) -> None:
        self._retag("tag", instance_ids, lambda present: {**present, **tags})

    async def untag(self, instance_ids: Collection[str], keys: Collection[str]) -> None:
        self._retag(
            "untag",
            instance_ids,
            lambda present: {key: value for key, value in present.items() if key not in keys},
        )

    def _retag(
        self,
        operation: str,
        instance_ids: Collection[str],
        change: Callable[[Mapping[str, str]], Mapping[str, str]],
    ) -> None:
        self._count(operation, len(instance_ids))
        unknown = [instance_id for instance_id in instance_ids if not self._cloud.retag(instance_id, change)]
        if unknown:
            raise NotFound(f"there is no machine {', '.join(unknown)}")

    def _count(self, operation: str, items: int) -> None:
        for _ in range(0, max(1, items), CALL_BATCH):
            self._calls.add(SERVICE, operation)


@dataclass(kw_only=True, slots=True)
class MemoryMachines:
    """The machines that all fleets share, in the order of their launch."""

    alive: dict[str, FleetMachine] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)

    def add(self, machine: FleetMachine) -> None:
        self.alive[machine.instance_id] = machine

    def end(self, instance_id: str) -> None:
        if self.alive.pop(instance_id, None) is not None:
            self.ended.append(instance_id)


class MemoryFleet:
    def __init__(self, *, machines: MemoryMachines, environment: str, calls: CallCounter) -> None:
        self._machines = machines
        self._environment = environment
        self._calls = calls
        self._listed: set[str] = set()

    async def close(self) -> None:
        """Nothing to close."""

    async def list_machines(self, *, orphans: bool = False) -> Sequence[FleetMachine]:
        self._calls.add(SERVICE, "list_machines")
        found = [
            machine
            for machine in self._machines.alive.values()
            if machine.tags.get(GHR_ENVIRONMENT_TAG) == self._environment
            and machine.tags.get(GHR_APPLICATION_TAG) == GHR_APPLICATION
            and (machine.is_orphan or not orphans)
        ]
        self._listed.update(machine.instance_id for machine in found)
        return found

    async def mark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        return self._retag("mark_orphans", instance_ids, {GHR_ORPHAN_TAG: YES})

    async def unmark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        return self._retag("unmark_orphans", instance_ids, {})

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        self._calls.add(SERVICE, "terminate")
        refused = self._refused(instance_ids)
        for name in instance_ids:
            if name not in refused:
                self._machines.end(name)
        return refused

    def _retag(self, operation: str, instance_ids: Collection[str], added: Mapping[str, str]) -> Mapping[str, str]:
        self._calls.add(SERVICE, operation)
        refused = self._refused(instance_ids)
        for name in instance_ids:
            machine = self._machines.alive.get(name)
            if machine is not None and name not in refused:
                kept = {key: value for key, value in machine.tags.items() if key != GHR_ORPHAN_TAG}
                self._machines.alive[name] = replace(machine, tags={**kept, **added})
        return refused

    def _refused(self, instance_ids: Collection[str]) -> dict[str, str]:
        return {name: "it is not of this fleet" for name in instance_ids if name not in self._listed}
