"""Asynchronous writer of history entries, so that a transition does not wait for its entry.

Entries are written in batches: when a batch is full, after one second at most, and when the store is closed. A failed
write is recorded in the event log and retried. Entries not yet written are lost if the process is killed; no decision
depends on them.
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
#: Seconds before a failed write is retried.
RETRY_AFTER_S = 2.0
#: Maximum number of queued entries. Beyond it the oldest are dropped.
MAX_QUEUED = 2_000


class HistoryWriter:
    def __init__(self, *, table: Table, writer: str, event_log: EventLog) -> None:
        self._table = table
        self._event_log = event_log
        #: Time until an entry expires; set from the pool configuration once it was read.
        self.kept = items.KEPT
        #: Distinguishes the entries that two processes write in the same millisecond.
        self._writer = writer
        self._sequence = 0
        self._queued: deque[Item] = deque()
        self._dropped = 0
        self._flushing = asyncio.Lock()
        self._full = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, instance_id: str, entry: HistoryEntry) -> None:
        self._sequence += 1
        if len(self._queued) >= MAX_QUEUED:
            self._queued.popleft()
            self._dropped += 1
        self._queued.append(
            items.history_item(instance_id, entry, sequence=self._sequence, writer=self._writer, kept=self.kept)
        )
        if len(self._queued) >= WRITE_BATCH:
            self._full.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._flush_soon())

    async def flush(self) -> None:
        """Write all queued entries."""
        async with self._flushing:
            while self._queued:
                batch = [self._queued.popleft() for _ in range(min(WRITE_BATCH, len(self._queued)))]
                try:
                    await self._table.put_all(batch)
                except BaseException:
                    # Retrying the whole batch is safe: keys are fixed, so written entries are overwritten as they are.
                    self._queued.extendleft(reversed(batch))
                    raise
            self._full.clear()

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

    async def _flush_soon(self) -> None:
        pause_s = FLUSH_AFTER_S
        while self._queued:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._full.wait()
            try:
                await self.flush()
                pause_s = FLUSH_AFTER_S
            except RemudaError as error:
                self._event_log.record("history-late", error.message, entries=len(self._queued))
                self._full.clear()
                pause_s = RETRY_AFTER_S
