"""The pool: hints about idle instances, a queue for each resource class.

As SQS: at least once, in any order, possibly late, possibly lost, possibly twice. A received message is hidden for its
visibility timeout and then comes back, unless it was deleted; a receipt is good until then, and a stale one is
ignored. Messages are hints; the store is the truth.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from remuda.domain.resources import PoolMessage

#: What one receive, delete or hand-back call may carry.
BATCH = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    receipt: str
    #: None where the body could not be parsed.
    message: PoolMessage | None
    #: Why it could not, for the log. Never the body itself.
    malformed: str = ""


class ResourcePool(Protocol):
    async def prepare(self, classes: Collection[str]) -> Sequence[str]:
        """Create and verify a queue for each class. Idempotent. Returns what was created, for people."""
        ...

    async def close(self) -> None: ...

    async def send(self, messages: Collection[PoolMessage], *, delay_s: float = 0.0) -> None:
        """Each to the queue of its class, in batches. Raises `Unavailable` where some were not taken: then any of
        them may have been.
        """
        ...

    async def receive(
        self, resource_class: str, *, limit: int = BATCH, visibility_s: float, wait_s: float = 0.0
    ) -> Sequence[Delivery]:
        """Up to `limit` (at most `BATCH`) messages, at once or as soon as there is one within `wait_s`.

        An unknown class raises `NotFound`.
        """
        ...

    async def delete(self, resource_class: str, receipts: Collection[str]) -> None:
        """In batches. Stale receipts are ignored."""
        ...

    async def hand_back(self, resource_class: str, receipts: Collection[str]) -> None:
        """Make them visible again at once, in batches. Stale receipts are ignored."""
        ...

    async def depth(self, resource_class: str) -> int:
        """About how many messages there are, hidden ones included."""
        ...
