"""The resource pool: one queue of messages about idle instances per resource class.

Delivery is that of SQS: at least once, in any order, possibly late or lost. A received message is hidden for its
visibility timeout and is delivered again afterwards unless it was deleted. A receipt is valid until then; stale ones
are ignored. A message may be stale: only the record in the store proves the state of an instance.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from remuda.domain.resources import PoolMessage

#: Maximum messages per receive, delete or make-visible call.
BATCH = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    receipt: str
    #: None if the body cannot be parsed.
    message: PoolMessage | None
    #: Why the body cannot be parsed, without the body itself.
    malformed: str = ""


class ResourcePool(Protocol):
    """Queues of a pool."""

    async def prepare(self, classes: Collection[str]) -> Sequence[str]:
        """Create and verify a queue per class. Idempotent. Returns the created queues, for people."""
        ...

    async def close(self) -> None: ...

    async def send(self, messages: Collection[PoolMessage], *, delay_s: float = 0.0) -> None:
        """Send each message to the queue of its class, in batches.

        Raises `Unavailable` if some were not accepted; any of them may have been sent then.
        """
        ...

    async def receive(
        self, resource_class: str, *, limit: int = BATCH, visibility_s: float, wait_s: float = 0.0
    ) -> Sequence[Delivery]:
        """Receive up to `limit` (at most `BATCH`) messages. Wait up to `wait_s` for the first one.

        Raises `NotFound` for an unknown class.
        """
        ...

    async def delete(self, resource_class: str, receipts: Collection[str]) -> None:
        """Delete messages, in batches. Stale receipts are ignored."""
        ...

    async def make_visible(self, resource_class: str, receipts: Collection[str]) -> None:
        """Make messages visible again at once, in batches. Stale receipts are ignored."""
        ...

    async def depth(self, resource_class: str) -> int:
        """Return the approximate number of messages, including hidden ones."""
        ...
