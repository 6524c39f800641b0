"""Stale hints: messages about instances that have ended, moved on, or are announced twice.

A provision drops such a message when it meets it; this sweep does so for those that nobody meets. It looks only where
a queue held more hints than the class has idle instances at two sweeps: while it looks, hints are hidden from
provisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable
from remuda.controlplane.refresh.machines import FirstSeen
from remuda.controlplane.refresh.result import Tally
from remuda.domain.errors import NotFound, RemudaError
from remuda.domain.instance import Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.ports.pool import BATCH, Delivery

VISIBILITY_S = 10.0
#: How many messages of a class one sweep looks at.
MAX_LOOKS = 200


class PoolMessageSweep:
    def __init__(self, context: Context, config: PoolConfig, tally: Tally, sightings: FirstSeen) -> None:
        self._context = context
        self._config = config
        self._tally = tally
        self._sightings = sightings

    async def run(self, idle_instances: Iterable[Instance]) -> None:
        idle = Counter(item.resource_class for item in idle_instances)
        names = [resource_class.name for resource_class in self._config.classes]
        for name, depth in zip(names, await map_concurrently(names, self._context.pool.depth), strict=True):
            try:
                if isinstance(depth, RemudaError):
                    raise depth
                if depth > idle[name] and self._again(name):
                    await self._clean(name, min(depth, MAX_LOOKS))
            except NotFound:
                self._tally.error(f"class {name} has no queue; run remuda refresh")

    def _again(self, name: str) -> bool:
        """A message that is being claimed is counted too: only what was too much at the last sweep as well is stale."""
        return self._sightings.again(f"hints:{name}")

    async def _clean(self, name: str, most: int) -> None:
        pool = self._context.pool
        held: set[str] = set()
        seen: dict[tuple[str, int], float] = {}
        looked = 0
        try:
            while looked < most:
                asked_at = self._context.clock.monotonic()
                batch = await pool.receive(name, limit=BATCH, visibility_s=VISIBILITY_S)
                if not batch:
                    break
                looked += len(batch)
                held.update(delivery.receipt for delivery in batch)
                stale = await self._stale(batch, seen, asked_at)
                await pool.delete(name, stale)
                held.difference_update(stale)
                self._tally.dropped += len(stale)
        finally:
            # What was not judged, too: provisions need not wait for it because a sweep was stopped or failed.
            await pool.hand_back(name, held)

    async def _stale(self, batch: Iterable[Delivery], seen: dict[tuple[str, int], float], asked_at: float) -> list[str]:
        """`seen` says when the good ones were asked for. Past its visibility one comes back, and is no second."""
        came_at = self._context.clock.monotonic()
        messages = [(delivery.receipt, delivery.message) for delivery in batch]
        read = self._context.store.get_many({message.id for _, message in messages if message is not None})
        records, unreadable = await skip_unreadable(read, self._tally.error)
        stale: list[str] = []
        for receipt, message in messages:
            if message is not None and message.id in unreadable:
                continue
            record = records.get(message.id) if message is not None else None
            if (
                message is None
                or record is None
                or record.state is not State.IDLE
                or record.message() != message
                or came_at - seen.get((message.id, message.epoch), -inf) < VISIBILITY_S
            ):
                stale.append(receipt)
            else:
                seen[message.id, message.epoch] = asked_at
        return stale
