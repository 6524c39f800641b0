"""The fleet port for local machines: lists the pool's machines and marks orphans by tags."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from remuda.domain.errors import NotFound, RemudaError
from remuda.domain.scale_down.fleet import (
    GHR_APPLICATION,
    GHR_APPLICATION_TAG,
    GHR_ENVIRONMENT_TAG,
    GHR_ORPHAN_TAG,
    YES,
    FleetMachine,
)
from remuda.ports.compute import Compute, MachineState

_ALIVE = frozenset({MachineState.PENDING, MachineState.RUNNING})


class LocalFleet:
    def __init__(self, *, compute: Compute, pool: str, environment: str) -> None:
        """Local machines without an environment tag belong to the environment with the pool's name."""
        self._compute = compute
        self._environment = environment
        self._default_tags = {GHR_ENVIRONMENT_TAG: pool, GHR_APPLICATION_TAG: GHR_APPLICATION}
        self._listed: set[str] = set()

    async def close(self) -> None:
        """Do nothing: the caller closes `compute`."""

    async def list_machines(self, *, orphans: bool = False) -> Sequence[FleetMachine]:
        machines = [
            FleetMachine(
                instance_id=view.instance_id, launched_at=view.launched_at, tags={**self._default_tags, **view.tags}
            )
            for view in await self._compute.list_pool()
            if view.state in _ALIVE
        ]
        found = [machine for machine in machines if self._is_ours(machine) and (machine.is_orphan or not orphans)]
        self._listed.update(machine.instance_id for machine in found)
        return found

    async def mark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        return await self._change(instance_ids, lambda name: self._compute.tag([name], {GHR_ORPHAN_TAG: YES}))

    async def unmark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        return await self._change(instance_ids, lambda name: self._compute.untag([name], [GHR_ORPHAN_TAG]))

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        unknown = self._not_listed(instance_ids)
        failed = await self._compute.terminate([name for name in instance_ids if name not in unknown])
        return {**unknown, **failed}

    def _is_ours(self, machine: FleetMachine) -> bool:
        return (
            machine.tags.get(GHR_ENVIRONMENT_TAG) == self._environment
            and machine.tags.get(GHR_APPLICATION_TAG) == GHR_APPLICATION
        )

    def _not_listed(self, instance_ids: Collection[str]) -> dict[str, str]:
        return {name: "not in this fleet" for name in instance_ids if name not in self._listed}

    async def _change(
        self, instance_ids: Collection[str], change: Callable[[str], Awaitable[None]]
    ) -> Mapping[str, str]:
        failures = self._not_listed(instance_ids)
        for name in instance_ids:
            if name in failures:
                continue
            try:
                await change(name)
            except NotFound:
                continue  # a terminated machine needs no mark
            except RemudaError as error:
                failures[name] = error.message
        return failures
