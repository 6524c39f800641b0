"""The resource pool in memory, for unit tests and the simulation. Waits use events and timers of the loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from remuda.domain.errors import NotFound
from remuda.domain.resources import PoolMessage
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids
from remuda.ports.pool import BATCH, Delivery


@dataclass(kw_only=True, slots=True, eq=False)
class _Message:
    message: PoolMessage | None
    malformed: str
    visible_at: datetime
    #: Random position in the queue: SQS keeps no order.
    shuffle: float
    receipt: str = ""


class _Queue:
    def __init__(self) -> None:
        self.messages: list[_Message] = []
        self._waiting: dict[asyncio.Future[None], None] = {}

    def visible(self, now: datetime, limit: int) -> list[_Message]:
        found = [message for message in self.messages if message.visible_at <= now]
        return sorted(found, key=lambda message: message.shuffle)[:limit]

    def held(self, receipts: Collection[str], now: datetime) -> list[_Message]:
        return [message for message in self.messages if message.receipt in receipts and message.visible_at > now]

    async def change(self, now: datetime) -> None:
        """Wait until a message arrives or becomes visible again."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        self._waiting[woken] = None
        back_in_s = [(message.visible_at - now).total_seconds() for message in self.messages]
        timer = loop.call_later(min(back_in_s), _wake, woken) if back_in_s else None
        try:
            await woken
        finally:
            self._waiting.pop(woken, None)
            if timer is not None:
                timer.cancel()

    def notify(self) -> None:
        for woken in self._waiting:
            _wake(woken)


class MemoryQueues:
    """The queues that all pool objects share. Their clock is the true time, not that of a process."""

    def __init__(self, *, clock: Clock) -> None:
        self.clock = clock
        self._queues: dict[str, _Queue] = {}

    @property
    def names(self) -> Collection[str]:
        return self._queues.keys()

    def create(self, name: str) -> bool:
        if name in self._queues:
            return False
        self._queues[name] = _Queue()
        return True

    def named(self, name: str) -> _Queue:
        try:
            return self._queues[name]
        except KeyError:
            raise NotFound(f"there is no queue for class {name}") from None

    def put(
        self,
        name: str,
        message: PoolMessage | None,
        *,
        shuffle: float,
        delay_s: float = 0.0,
        malformed: str = "",
    ) -> None:
        """Add a message. `malformed` without a message stands for a body that cannot be parsed."""
        queue = self.named(name)
        visible_at = self.clock.now() + timedelta(seconds=delay_s)
        queue.messages.append(_Message(message=message, malformed=malformed, visible_at=visible_at, shuffle=shuffle))
        queue.notify()


class MemoryResourcePool:
    def __init__(self, *, clock: Clock, ids: Ids, calls: CallCounter, queues: MemoryQueues | None = None) -> None:
        self._ids = ids
        self._calls = calls
        self._queues = queues or MemoryQueues(clock=clock)

    async def prepare(self, classes: Collection[str]) -> Sequence[str]:
        self._calls.add("pool", "prepare")
        return [f"queue {name}" for name in sorted(set(classes)) if self._queues.create(name)]

    async def close(self) -> None:
        """Nothing to close."""

    async def send(self, messages: Collection[PoolMessage], *, delay_s: float = 0.0) -> None:
        for name, count in Counter(message.resource_class for message in messages).items():
            self._queues.named(name)
            self._count("send", count)
        for message in messages:
            self._queues.put(message.resource_class, message, shuffle=self._ids.jitter(), delay_s=delay_s)

    async def receive(
        self, resource_class: str, *, limit: int = BATCH, visibility_s: float, wait_s: float = 0.0
    ) -> Sequence[Delivery]:
        self._calls.add("pool", "receive")
        queue = self._queues.named(resource_class)
        taken = self._take(queue, limit, visibility_s)
        if taken or wait_s <= 0:
            return taken
        try:
            async with asyncio.timeout(wait_s):
                while not taken:
                    await queue.change(self._now())
                    taken = self._take(queue, limit, visibility_s)
        except TimeoutError:
            pass
        return taken

    async def delete(self, resource_class: str, receipts: Collection[str]) -> None:
        self._count("delete", len(receipts))
        queue = self._queues.named(resource_class)
        for message in queue.held(receipts, self._now()):
            queue.messages.remove(message)

    async def make_visible(self, resource_class: str, receipts: Collection[str]) -> None:
        self._count("make_visible", len(receipts))
        queue = self._queues.named(resource_class)
        for message in queue.held(receipts, self._now()):
            message.receipt = ""
            message.visible_at = self._now()
        queue.notify()

    async def depth(self, resource_class: str) -> int:
        self._calls.add("pool", "depth")
        return len(self._queues.named(resource_class).messages)

    def _take(self, queue: _Queue, limit: int, visibility_s: float) -> list[Delivery]:
        now = self._now()
        return [
            self._hide(message, now + timedelta(seconds=visibility_s))
            for message in queue.visible(now, max(0, min(limit, BATCH)))
        ]

    def _hide(self, message: _Message, until: datetime) -> Delivery:
        message.receipt = self._ids.new("r-")
        message.shuffle = self._ids.jitter()
        message.visible_at = until
        return Delivery(receipt=message.receipt, message=message.message, malformed=message.malformed)

    def _now(self) -> datetime:
        return self._queues.clock.now()

    def _count(self, operation: str, items: int) -> None:
        for _ in range(0, items, BATCH):
            self._calls.add("pool", operation)


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
