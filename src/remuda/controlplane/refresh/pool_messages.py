"""Sweep of stale pool messages: messages about instances that are no longer idle, and duplicates.

A provision drops such messages when it receives them; this sweep removes those that no provision receives. Receiving
hides messages from provisions, so the sweep receives only if a queue held more messages than its class has idle
instances in two consecutive sweeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable
from remuda.controlplane.refresh.first_seen import FirstSeen
from remuda.controlplane.refresh.result import RefreshResultBuilder
from remuda.domain.errors import NotFound, RemudaError
from remuda.domain.instance import Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.ports.pool import BATCH, Delivery

#: Seconds that a received message stays hidden.
VISIBILITY_S = 10.0
#: Messages of a class that one sweep receives.
MAX_MESSAGES = 200


class PoolMessageSweep:
    def __init__(
        self, context: Context, config: PoolConfig, result: RefreshResultBuilder, first_seen: FirstSeen
    ) -> None:
        self._context = context
        self._config = config
        self._result = result
        self._first_seen = first_seen

    async def run(self, idle_instances: Iterable[Instance]) -> None:
        idle = Counter(item.resource_class for item in idle_instances)
        names = [resource_class.name for resource_class in self._config.classes]
        depths = await map_concurrently(names, self._context.pool.depth)
        for name, depth in zip(names, depths, strict=True):
            try:
                if isinstance(depth, RemudaError):
                    raise depth
                # A message that is being claimed is counted, too, so a single surplus proves nothing.
                if depth > idle[name] and self._first_seen.was_seen_before(f"surplus-messages:{name}"):
                    await self._delete_stale(name, min(depth, MAX_MESSAGES))
            except NotFound:
                self._result.error(f"class {name} has no queue; run remuda refresh")

    async def _delete_stale(self, name: str, limit: int) -> None:
        pool = self._context.pool
        held: set[str] = set()
        valid: dict[tuple[str, int], float] = {}
        received = 0
        try:
            while received < limit:
                receive_at = self._context.clock.monotonic()
                batch = await pool.receive(name, limit=BATCH, visibility_s=VISIBILITY_S)
                if not batch:
                    break
                received += len(batch)
                held.update(delivery.receipt for delivery in batch)
                stale = await self._find_stale(batch, valid, receive_at)
                await pool.delete(name, stale)
                held.difference_update(stale)
                self._result.stale_messages += len(stale)
        finally:
            # Also after an error or a cancellation: provisions need not wait for the visibility timeout.
            await pool.hand_back(name, held)

    async def _find_stale(
        self, batch: Iterable[Delivery], valid: dict[tuple[str, int], float], receive_at: float
    ) -> list[str]:
        """Return the receipts of stale messages and add the others to `valid`, with the time of their receive call.

        A valid message that returns after its visibility timeout is the same message, not a duplicate.
        """
        received_at = self._context.clock.monotonic()
        messages = [(delivery.receipt, delivery.message) for delivery in batch]
        read = self._context.store.get_many({message.id for _, message in messages if message is not None})
        records, unreadable = await skip_unreadable(read, self._result.error)
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
                or received_at - valid.get((message.id, message.epoch), -inf) < VISIBILITY_S
            ):
                stale.append(receipt)
            else:
                valid[message.id, message.epoch] = receive_at
        return stale
