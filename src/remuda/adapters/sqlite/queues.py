"""The statements on the queues: plain functions of a connection, run in its thread.

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
    #: Its place among others, by chance: nobody shall come to rely on an order that SQS does not keep.
    shuffle: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliveryReceipt:
    """What a received message is marked with: the receipt, and its place when it comes back."""

    receipt: str
    shuffle: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedMessage:
    receipt: str
    body: str


def check(connection: sqlite3.Connection, queue: str) -> None:
    if not connection.execute("SELECT 1 FROM queues WHERE name = ?", (queue,)).fetchall():
        raise NotFound(f"there is no queue for class {queue}")


def write_queues(connection: sqlite3.Connection, names: Sequence[str]) -> list[str]:
    """Those that did not exist."""
    return [name for name in names if connection.execute("INSERT OR IGNORE INTO queues VALUES (?)", (name,)).rowcount]


def write_new(connection: sqlite3.Connection, messages: Sequence[NewMessage]) -> None:
    for queue in sorted({message.queue for message in messages}):
        check(connection, queue)
    connection.executemany(
        "INSERT INTO messages (queue, visible_at, shuffle, body) VALUES (?, ?, ?, ?)",
        [(message.queue, message.visible_at, message.shuffle, message.body) for message in messages],
    )


def ready(connection: sqlite3.Connection, queues: Collection[str], now: float) -> list[str]:
    """Those of the queues that have something to receive."""
    found = connection.execute(
        "SELECT value FROM json_each(?) WHERE EXISTS (SELECT 1 FROM messages WHERE queue = value AND visible_at <= ?)",
        (json.dumps(sorted(queues)), now),
    )
    return [row[0] for row in found]


def write_taken(
    connection: sqlite3.Connection, queue: str, seals: Sequence[DeliveryReceipt], *, now: float, hidden_until: float
) -> list[ReceivedMessage]:
    """Hide as many messages as there are seals, or as there are messages."""
    found = connection.execute(
        "SELECT message_id, body FROM messages WHERE queue = ? AND visible_at <= ? ORDER BY shuffle LIMIT ?",
        (queue, now, len(seals)),
    ).fetchall()
    connection.executemany(
        "UPDATE messages SET receipt = ?, shuffle = ?, visible_at = ? WHERE message_id = ?",
        [
            (seal.receipt, seal.shuffle, hidden_until, message_id)
            for seal, (message_id, _) in zip(seals, found, strict=False)
        ],
    )
    return [ReceivedMessage(receipt=seal.receipt, body=body) for seal, (_, body) in zip(seals, found, strict=False)]


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
