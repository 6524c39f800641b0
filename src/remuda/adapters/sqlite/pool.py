"""The resource pool in a SQLite file, with the queue semantics of SQS, shared by the processes of one computer."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from operator import ne
from pathlib import Path

from remuda.adapters.sqlite.connection import BUSY_TIMEOUT_S, ChangePoller, SqliteFile, transaction
from remuda.adapters.sqlite.documents import decode, encode
from remuda.domain.errors import NotFound
from remuda.domain.resources import PoolMessage
from remuda.domain.text import truncate
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids
from remuda.ports.pool import BATCH, Delivery

#: Maximum length of the parse error of a malformed message.
MAX_REASON = 200

# Times in the table are seconds since 1970. 0 is visible at once, also for a process whose clock is behind that of the
# sender.
_VISIBLE = "SELECT message_id, body FROM messages WHERE queue = ? AND visible_at <= ? ORDER BY shuffle LIMIT ?"
_NEXT = "SELECT min(visible_at) FROM messages WHERE queue = ?"
_HIDDEN = "WHERE receipt IN (SELECT value FROM json_each(?1)) AND queue = ?2 AND visible_at > ?3"
_DELETE = f"DELETE FROM messages {_HIDDEN}"  # noqa: S608 - constant
_MAKE_VISIBLE = f"UPDATE messages SET receipt = NULL, visible_at = 0 {_HIDDEN}"  # noqa: S608 - constant

#: Receipt and body.
ReceivedMessage = tuple[str, str]


class SqliteResourcePool:
    def __init__(
        self, *, path: Path, clock: Clock, ids: Ids, calls: CallCounter, busy_timeout_s: float = BUSY_TIMEOUT_S
    ) -> None:
        self._file = SqliteFile(path=path, busy_timeout_s=busy_timeout_s, thread_name="remuda-pool")
        self._clock = clock
        self._ids = ids
        self._calls = calls
        self._poller: ChangePoller[str, float | None] = ChangePoller(
            file=self._file, read_values=_next_visible, on_read=partial(calls.add, "pool", "poll"), clock=clock, ids=ids
        )

    async def prepare(self, classes: Collection[str]) -> Sequence[str]:
        self._calls.add("pool", "prepare")
        path = self._file.path
        await self._file.create(path.with_name(self._ids.new(f".{path.name}-")))

        def job(connection: sqlite3.Connection) -> list[str]:
            insert = "INSERT OR IGNORE INTO queues VALUES (?)"
            return [name for name in sorted(set(classes)) if connection.execute(insert, (name,)).rowcount]

        return [f"queue {name}" for name in await self._file.write(job)]

    async def close(self) -> None:
        await self._poller.close()
        await self._file.close()

    async def send(self, messages: Collection[PoolMessage], *, delay_s: float = 0.0) -> None:
        visible_at = self._now() + delay_s if delay_s else 0.0
        # A random sort key: like SQS, the queue keeps no order.
        rows = [(message.resource_class, visible_at, self._ids.jitter(), encode(message)) for message in messages]
        sizes = Counter(message.resource_class for message in messages)

        def job(connection: sqlite3.Connection) -> None:
            for queue in sorted(sizes):
                _check_queue(connection, queue)
            connection.executemany("INSERT INTO messages (queue, visible_at, shuffle, body) VALUES (?, ?, ?, ?)", rows)

        with self._counted("send", sum(_batches(size) for size in sizes.values())):
            if rows:
                await self._file.write(job, changed=sizes)

    async def receive(
        self, resource_class: str, *, limit: int = BATCH, visibility_s: float, wait_s: float = 0.0
    ) -> Sequence[Delivery]:
        give_up_at = self._clock.monotonic() + wait_s
        with self._counted("receive"):
            taken, next_at = await self._take(resource_class, limit, visibility_s)
        while not taken:
            remaining_s = give_up_at - self._clock.monotonic()
            if remaining_s <= 0:
                return []
            # Messages also become visible without a write, when their time-out passes.
            until_next_s = remaining_s if next_at is None else max(0.0, next_at - self._now())
            with suppress(TimeoutError):
                await self._poller.wait(resource_class, partial(ne, next_at), min(remaining_s, until_next_s))
            taken, next_at = await self._take(resource_class, limit, visibility_s)
        return [_delivery(*message) for message in taken]

    async def delete(self, resource_class: str, receipts: Collection[str]) -> None:
        await self._change("delete", _DELETE, resource_class, receipts)

    async def make_visible(self, resource_class: str, receipts: Collection[str]) -> None:
        await self._change("make_visible", _MAKE_VISIBLE, resource_class, receipts)

    async def depth(self, resource_class: str) -> int:
        def job(connection: sqlite3.Connection) -> int:
            _check_queue(connection, resource_class)
            found = connection.execute("SELECT count(*) FROM messages WHERE queue = ?", (resource_class,))
            return int(found.fetchone()[0])

        with self._counted("depth"):
            return await self._file.run(job)

    async def _change(self, operation: str, statement: str, queue: str, receipts: Collection[str]) -> None:
        """Execute a statement on the messages of these receipts."""
        parameters = (json.dumps(sorted(receipts)), queue, self._now())

        def job(connection: sqlite3.Connection) -> None:
            _check_queue(connection, queue)
            connection.execute(statement, parameters)

        with self._counted(operation, _batches(len(receipts))):
            await self._file.write(job, changed=[queue])

    async def _take(
        self, queue: str, limit: int, visibility_s: float
    ) -> tuple[Sequence[ReceivedMessage], float | None]:
        """Receive and hide messages. If there are none, return also when the next one becomes visible.

        A new sort key applies if a message becomes visible again.
        """
        new = [(self._ids.new("r-"), self._ids.jitter()) for _ in range(max(0, min(limit, BATCH)))]
        now = self._now()

        def job(connection: sqlite3.Connection) -> tuple[Sequence[ReceivedMessage], float | None]:
            _check_queue(connection, queue)
            # Queues are often empty, so check without the write lock first.
            next_at = _next_visible(connection, [queue])[queue]
            if next_at is None or next_at > now:
                return [], next_at
            with transaction(connection):
                found = connection.execute(_VISIBLE, (queue, now, len(new))).fetchall()
                taken = [(*key, *message) for key, message in zip(new, found, strict=False)]
                connection.executemany(
                    "UPDATE messages SET receipt = ?, shuffle = ?, visible_at = ? WHERE message_id = ?",
                    [(receipt, shuffle, now + visibility_s, message_id) for receipt, shuffle, message_id, _ in taken],
                )
                return [(receipt, body) for receipt, _, _, body in taken], None

        return await self._file.run(job)

    def _counted(self, operation: str, count: int = 1) -> AbstractContextManager[None]:
        return self._calls.counted("pool", operation, count)

    def _now(self) -> float:
        return self._clock.now().timestamp()


def _batches(items: int) -> int:
    return -(-items // BATCH)


def _check_queue(connection: sqlite3.Connection, queue: str) -> None:
    if not connection.execute("SELECT 1 FROM queues WHERE name = ?", (queue,)).fetchall():
        raise NotFound(f"no queue for resource class {queue}")


def _next_visible(connection: sqlite3.Connection, queues: Collection[str]) -> dict[str, float | None]:
    """Return for each queue when its next message becomes or became visible, or None if it is empty."""
    return {queue: connection.execute(_NEXT, (queue,)).fetchone()[0] for queue in queues}


def _delivery(receipt: str, body: str) -> Delivery:
    try:
        return Delivery(receipt=receipt, message=decode(PoolMessage, body))
    except ValueError as error:
        return Delivery(receipt=receipt, message=None, malformed=truncate(str(error), MAX_REASON))
