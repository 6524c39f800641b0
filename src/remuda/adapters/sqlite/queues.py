"""SQL statements on the queues: functions of a connection, called in its thread.

Functions named `write_…` must be called inside a transaction. Times are seconds since 1970.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from remuda.domain.errors import NotFound


@dataclass(frozen=True, kw_only=True, slots=True)
class NewMessage:
    queue: str
    body: str
    visible_at: float
    #: Random sort key: like SQS, the queue keeps no order.
    shuffle: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliveryReceipt:
    """The receipt of a delivery, and the message's new sort key if it becomes visible again."""

    receipt: str
    shuffle: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedMessage:
    receipt: str
    body: str


def check(connection: sqlite3.Connection, queue: str) -> None:
    if not connection.execute("SELECT 1 FROM queues WHERE name = ?", (queue,)).fetchall():
        raise NotFound(f"no queue for resource class {queue}")


def write_queues(connection: sqlite3.Connection, names: Sequence[str]) -> list[str]:
    """Create missing queues. Return the names of those created."""
    return [name for name in names if connection.execute("INSERT OR IGNORE INTO queues VALUES (?)", (name,)).rowcount]


def write_new(connection: sqlite3.Connection, messages: Sequence[NewMessage]) -> None:
    for queue in sorted({message.queue for message in messages}):
        check(connection, queue)
    connection.executemany(
        "INSERT INTO messages (queue, visible_at, shuffle, body) VALUES (?, ?, ?, ?)",
        [(message.queue, message.visible_at, message.shuffle, message.body) for message in messages],
    )


def ready(connection: sqlite3.Connection, queues: Collection[str], now: float) -> list[str]:
    """Return the queues that have a visible message."""
    found = connection.execute(
        "SELECT value FROM json_each(?) WHERE EXISTS (SELECT 1 FROM messages WHERE queue = value AND visible_at <= ?)",
        (json.dumps(sorted(queues)), now),
    )
    return [row[0] for row in found]


def write_taken(
    connection: sqlite3.Connection, queue: str, receipts: Sequence[DeliveryReceipt], *, now: float, hidden_until: float
) -> list[ReceivedMessage]:
    """Receive and hide up to one message per receipt."""
    found = connection.execute(
        "SELECT message_id, body FROM messages WHERE queue = ? AND visible_at <= ? ORDER BY shuffle LIMIT ?",
        (queue, now, len(receipts)),
    ).fetchall()
    connection.executemany(
        "UPDATE messages SET receipt = ?, shuffle = ?, visible_at = ? WHERE message_id = ?",
        [
            (new.receipt, new.shuffle, hidden_until, message_id)
            for new, (message_id, _) in zip(receipts, found, strict=False)
        ],
    )
    return [ReceivedMessage(receipt=new.receipt, body=body) for new, (_, body) in zip(receipts, found, strict=False)]


def write_deleted(connection: sqlite3.Connection, queue: str, receipts: Collection[str], now: float) -> None:
    check(connection, queue)
    connection.execute(
        "DELETE FROM messages WHERE receipt IN (SELECT value FROM json_each(?)) AND queue = ? AND visible_at > ?",
        (json.dumps(sorted(receipts)), queue, now),
    )


def write_handed_back(connection: sqlite3.Connection, queue: str, receipts: Collection[str], now: float) -> None:
    check(connection, queue)
    connection.execute(
        "UPDATE messages SET receipt = NULL, visible_at = ?3"
        " WHERE receipt IN (SELECT value FROM json_each(?1)) AND queue = ?2 AND visible_at > ?3",
        (json.dumps(sorted(receipts)), queue, now),
    )


def depth(connection: sqlite3.Connection, queue: str) -> int:
    check(connection, queue)
    return int(connection.execute("SELECT count(*) FROM messages WHERE queue = ?", (queue,)).fetchone()[0])
