"""Asynchronous writer of history entries, so that a transition does not wait for its entry.

Entries are written when a batch is full, at the latest after a second, and on close. A failed write is recorded in the
event log and retried. Entries are lost if the process is killed, the queue overflows or the final flush fails; no
decision depends on them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.items import Item
from remuda.adapters.aws.dynamodb.table import WRITE_BATCH, Table
from remuda.domain.errors import RemudaError
from remuda.domain.instance import HistoryEntry
from remuda.ports.event_log import EventLog

#: Seconds that an entry waits for others, to be written in one call.
FLUSH_AFTER_S = 1.0
#: Maximum seconds before a failed write is retried. A new entry triggers it sooner if a batch is full.
RETRY_AFTER_S = 2.0
#: Maximum number of queued entries. Beyond it the oldest are dropped.
MAX_QUEUED = 2_000


class HistoryWriter:
    def __init__(self, *, table: Table, writer_id: str, event_log: EventLog) -> None:
        self._table = table
        self._event_log = event_log
        #: Time until an entry expires. The store sets it when it reads the pool configuration.
        self.retention = items.DEFAULT_RETENTION
        #: Distinguishes the entries that two processes write in the same millisecond.
        self._writer_id = writer_id
        self._sequence = 0
        self._queued: deque[Item] = deque()
        self._dropped = 0
        self._flush_lock = asyncio.Lock()
        self._batch_full = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, instance_id: str, entry: HistoryEntry) -> None:
        self._sequence += 1
        if len(self._queued) >= MAX_QUEUED:
            self._queued.popleft()
            self._dropped += 1
        self._queued.append(
            items.history_item(
                instance_id, entry, sequence=self._sequence, writer_id=self._writer_id, retention=self.retention
            )
        )
        if len(self._queued) >= WRITE_BATCH:
            self._batch_full.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._flush_until_empty())

    async def flush(self) -> None:
        """Write all queued entries."""
        async with self._flush_lock:
            while self._queued:
                batch = [self._queued.popleft() for _ in range(min(WRITE_BATCH, len(self._queued)))]
                try:
                    await self._table.put_all(batch)
                except BaseException:
                    # Some of the batch may be written already. Writing them again is safe: each entry keeps its key.
                    self._queued.extendleft(reversed(batch))
                    raise
            self._batch_full.clear()

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        try:
            await self.flush()
        except RemudaError as error:
            # Closing must succeed even if the table is unreachable.
            lost = self._dropped + len(self._queued)
            self._event_log.record("history-lost", error.message, entries=lost)
        else:
            if self._dropped:
                self._event_log.record("history-lost", "the table was unavailable for too long", entries=self._dropped)

    async def _flush_until_empty(self) -> None:
        pause_s = FLUSH_AFTER_S
        while self._queued:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._batch_full.wait()
            try:
                await self.flush()
                pause_s = FLUSH_AFTER_S
            except RemudaError as error:
                self._event_log.record("history-late", error.message, entries=len(self._queued))
                # Without this, the loop would retry at once.
                self._batch_full.clear()
                pause_s = RETRY_AFTER_S
