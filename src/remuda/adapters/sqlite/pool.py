"""The resource pool in a SQLite file, with the queue semantics of SQS, shared by the processes of one computer."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TypeVar

from remuda.adapters.sqlite import queues
from remuda.adapters.sqlite.connection import BUSY_TIMEOUT_S, ChangePoller, SqliteFile, transaction
from remuda.adapters.sqlite.documents import decode, encode
from remuda.adapters.sqlite.queues import DeliveryReceipt, NewMessage, ReceivedMessage
from remuda.domain.resources import PoolMessage
from remuda.domain.text import truncate
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids
from remuda.ports.pool import BATCH, Delivery

T = TypeVar("T")

#: Maximum length of the parse error of a malformed message.
MAX_REASON = 200


class SqliteResourcePool:
    def __init__(
        self, *, path: Path, clock: Clock, ids: Ids, calls: CallCounter, busy_timeout_s: float = BUSY_TIMEOUT_S
    ) -> None:
        self._file = SqliteFile(path=path, busy_timeout_s=busy_timeout_s, thread_name="remuda-pool")
        self._clock = clock
        self._ids = ids
        self._calls = calls
        self._poller: ChangePoller[str, bool] = ChangePoller(read_values=self._read_values, clock=clock, ids=ids)

    async def prepare(self, classes: Collection[str]) -> Sequence[str]:
        self._calls.add("pool", "prepare")
        path = self._file.path
        await self._file.create(path.with_name(self._ids.new(f".{path.name}-")))
        created = await self._write(partial(queues.write_queues, names=sorted(set(classes))))
        return [f"queue {name}" for name in created]

    async def close(self) -> None:
        await self._poller.close()
        await self._file.close()

    async def send(self, messages: Collection[PoolMessage], *, delay_s: float = 0.0) -> None:
        visible_at = self._now() + delay_s
        outgoing = [
            NewMessage(
                queue=message.resource_class,
                body=encode(message),
                visible_at=visible_at,
                shuffle=self._ids.jitter(),
            )
            for message in messages
        ]
        sizes = Counter(message.resource_class for message in messages).values()
        with self._counted("send", sum(_batches(size) for size in sizes)):
            if outgoing:
                await self._write(partial(queues.write_new, messages=outgoing))

    async def receive(
        self, resource_class: str, *, limit: int = BATCH, visibility_s: float, wait_s: float = 0.0
    ) -> Sequence[Delivery]:
        give_up_at = self._clock.monotonic() + wait_s
        with self._counted("receive"):
            taken = await self._take(resource_class, limit, visibility_s)
        while not taken:
            remaining_s = give_up_at - self._clock.monotonic()
            if remaining_s <= 0:
                return []
            try:
                await self._poller.wait(resource_class, bool, remaining_s)
            except TimeoutError:
                return []
            taken = await self._take(resource_class, limit, visibility_s)
        return [_delivery(message) for message in taken]

    async def delete(self, resource_class: str, receipts: Collection[str]) -> None:
        job = partial(queues.write_deleted, queue=resource_class, receipts=receipts, now=self._now())
        with self._counted("delete", _batches(len(receipts))):
            await self._write(job)

    async def hand_back(self, resource_class: str, receipts: Collection[str]) -> None:
        job = partial(queues.write_handed_back, queue=resource_class, receipts=receipts, now=self._now())
        with self._counted("hand_back", _batches(len(receipts))):
            await self._write(job)

    async def depth(self, resource_class: str) -> int:
        with self._counted("depth"):
            return await self._file.run(partial(queues.depth, queue=resource_class))

    async def _take(self, queue: str, limit: int, visibility_s: float) -> Sequence[ReceivedMessage]:
        receipts = [
            DeliveryReceipt(receipt=self._ids.new("r-"), shuffle=self._ids.jitter())
            for _ in range(max(0, min(limit, BATCH)))
        ]
        now = self._now()

        def job(connection: sqlite3.Connection) -> Sequence[ReceivedMessage]:
            queues.check(connection, queue)
            # Empty queues are polled often, so check without the write lock first.
            if not queues.ready(connection, [queue], now):
                return []
            with transaction(connection):
                return queues.write_taken(connection, queue, receipts, now=now, hidden_until=now + visibility_s)

        return await self._file.run(job)

    async def _read_values(self, names: Collection[str], new: Collection[str]) -> Mapping[str, bool]:  # noqa: ARG002
        # Read even without a commit, because messages also become visible when their time-out passes.
        ready = await self._file.run(partial(queues.ready, queues=names, now=self._now()))
        return dict.fromkeys(ready, True)

    async def _write(self, job: Callable[[sqlite3.Connection], T]) -> T:
        def in_transaction(connection: sqlite3.Connection) -> T:
            with transaction(connection):
                return job(connection)

        result = await self._file.run(in_transaction)
        self._poller.wake()
        return result

    def _counted(self, operation: str, count: int = 1) -> AbstractContextManager[None]:
        return self._calls.counted("pool", operation, count)

    def _now(self) -> float:
        return self._clock.now().timestamp()


def _batches(items: int) -> int:
    return -(-items // BATCH)


def _delivery(message: ReceivedMessage) -> Delivery:
    try:
        return Delivery(receipt=message.receipt, message=decode(PoolMessage, message.body))
    except ValueError as error:
        return Delivery(receipt=message.receipt, message=None, malformed=truncate(str(error), MAX_REASON))
