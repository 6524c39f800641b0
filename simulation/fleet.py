"""The pool's machines as a tagged fleet, for scale-down."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any

from remuda.domain.errors import NotFound
from remuda.domain.scale_down.fleet import (
    GHR_APPLICATION,
    GHR_APPLICATION_TAG,
    GHR_ENVIRONMENT_TAG,
    GHR_ORPHAN_TAG,
    GHR_OWNER_TAG,
    GHR_TYPE_TAG,
    REPO,
    YES,
    FleetMachine,
)
from remuda.ports.compute import MachineState, MachineView
from simulation.names import POOL, SCOPE

#: Tags of every machine that the pool launches.
TAGS = {
    GHR_ENVIRONMENT_TAG: POOL,
    GHR_APPLICATION_TAG: GHR_APPLICATION,
    GHR_OWNER_TAG: SCOPE,
    GHR_TYPE_TAG: REPO,
}
_ALIVE = frozenset({MachineState.PENDING, MachineState.RUNNING})


class CloudFleet:
    def __init__(self, compute: Any) -> None:
        self._compute = compute

    async def close(self) -> None:
        """Nothing to close."""

    async def list_machines(self, *, orphans: bool = False) -> Sequence[FleetMachine]:
        views: Sequence[MachineView] = await self._compute.list_pool()
        found = [
            FleetMachine(instance_id=view.instance_id, launched_at=view.launched_at, tags={**TAGS, **view.tags})
            for view in views
            if view.state in _ALIVE
        ]
        return [machine for machine in found if machine.is_orphan or not orphans]

    async def mark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        return await self._change(instance_ids, self._compute.tag(instance_ids, {GHR_ORPHAN_TAG: YES}))

    async def unmark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        return await self._change(instance_ids, self._compute.untag(instance_ids, {GHR_ORPHAN_TAG}))

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        refused: Mapping[str, str] = await self._compute.terminate(instance_ids)
        return refused

    @staticmethod
    async def _change(instance_ids: Collection[str], change: Awaitable[None]) -> Mapping[str, str]:
        try:
            await change
        except NotFound as error:
            return dict.fromkeys(instance_ids, error.message)
        return {}
