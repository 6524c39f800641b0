"""A fleet of runner machines, known by its tags alone: whoever launched them.

Bound to one environment. Nothing without `ghr:environment=<environment>` and `ghr:Application=github-action-runner` is
ever listed, tagged or ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from remuda.domain.scale_down.fleet import FleetMachine


class TaggedFleet(Protocol):
    async def close(self) -> None: ...

    async def list_machines(self, *, orphans: bool = False) -> Sequence[FleetMachine]:
        """Those that run or boot, all pages, in compute's own order; with `orphans` those tagged as orphans only."""
        ...

    async def mark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        """Tag them as orphans, in batches. Returns by id why some could not be."""
        ...

    async def unmark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        """Remove that tag. As above."""
        ...

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        """Ask for their end, in batches; one that is gone already is a success. Returns by id why some could not be
        asked for. One that this fleet has not listed is refused.
        """
        ...
