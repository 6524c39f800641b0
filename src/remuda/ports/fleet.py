"""Runner machines selected by their tags, regardless of the software that launched them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from remuda.domain.scale_down.fleet import FleetMachine


class TaggedFleet(Protocol):
    """The machines of one environment.

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
