"""A tagged fleet of runner machines in memory, for unit tests and the simulation. Wrap it to simulate failures."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from remuda.domain.scale_down.fleet import (
    GHR_APPLICATION,
    GHR_APPLICATION_TAG,
    GHR_ENVIRONMENT_TAG,
    GHR_ORPHAN_TAG,
    YES,
    FleetMachine,
)
from remuda.ports.calls import CallCounter

SERVICE = "compute"


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
