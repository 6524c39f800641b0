"""Stale pool messages: messages about instances that are no longer idle, and duplicates.

A provision drops such messages when it receives them; the sweep removes those that no provision receives. Receiving
hides messages from provisions, so it receives only if a queue held more messages than its class has idle instances in
two consecutive sweeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable
from remuda.controlplane.refresh.observe import Observed
from remuda.controlplane.refresh.result import RefreshResult, combined, for_each, seen
from remuda.domain.errors import NotFound, RemudaError
from remuda.domain.instance import State
from remuda.domain.sweep_record import AnomalyKind
from remuda.ports.pool import BATCH, Delivery

#: Seconds that a received message stays hidden.
VISIBILITY_S = 10.0
#: Messages of a class that one sweep receives.
MAX_MESSAGES = 200


async def delete_stale_messages(observed: Observed) -> RefreshResult:
    """Delete stale messages of the classes whose queues have held too many twice."""
    context = observed.context
    idle = Counter(item.resource_class for item in observed.records.values() if item.state is State.IDLE)
    names = [resource_class.name for resource_class in observed.config.classes]
    surplus, parts = {}, []
    for name, depth in zip(names, await map_concurrently(names, context.pool.depth), strict=True):
        if isinstance(depth, NotFound):
            parts.append(RefreshResult(errors=(f"class {name} has no queue; run remuda refresh",)))
        elif isinstance(depth, RemudaError):
            parts.append(RefreshResult(errors=(f"stale pool messages: {depth.message}",)))
        elif depth > idle[name]:
            surplus[observed.sighting(AnomalyKind.SURPLUS_MESSAGES, name)] = depth
    # A message that is being claimed is counted, too, so a single surplus proves nothing.
    lasting = {item.subject: depth for item, depth in surplus.items() if observed.was_seen_before(item)}
    deleted = await for_each(
        lasting,
        lambda name: _delete_stale(context, name, min(lasting[name], MAX_MESSAGES)),
        name=lambda _: "stale pool messages",
    )
    return combined([*parts, seen(surplus), deleted])


async def _delete_stale(context: Context, name: str, limit: int) -> RefreshResult:
    held: set[str] = set()
    valid: dict[tuple[str, int], float] = {}
    errors: list[str] = []
    received = deleted = 0
    try:
        while received < limit:
            receive_at = context.clock.monotonic()
            batch = await context.pool.receive(name, limit=BATCH, visibility_s=VISIBILITY_S)
            if not batch:
                break
            received += len(batch)
            held.update(delivery.receipt for delivery in batch)
            stale = await _find_stale(context, batch, valid, receive_at, errors)
            await context.pool.delete(name, stale)
            held.difference_update(stale)
            deleted += len(stale)
    finally:
        # Also after an error or a cancellation: provisions need not wait for the visibility timeout.
        await context.pool.make_visible(name, held)
    return RefreshResult(stale_messages=deleted, errors=tuple(errors))


async def _find_stale(
    context: Context,
    batch: Iterable[Delivery],
    valid: dict[tuple[str, int], float],
    receive_at: float,
    errors: list[str],
) -> list[str]:
    """Return the receipts of stale messages and add the others to `valid`, with the time of their receive call.

    A valid message that returns after its visibility timeout is the same message, not a duplicate.
    """
    received_at = context.clock.monotonic()
    messages = [(delivery.receipt, delivery.message) for delivery in batch]
    read = context.store.get_many({message.id for _, message in messages if message is not None})
    records, unreadable = await skip_unreadable(read, errors.append)
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
