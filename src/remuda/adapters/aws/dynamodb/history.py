"""Histories on their way to the table: a claim does not wait for its line in the story.

Entries are written in batches: when there is a batch, after a second at most, and when the store is closed. A write
that fails is told of and tried again. What a process has not written when it is killed is lost: records and their
conditions never rest on a history.
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

#: How long an entry waits for others to share its call.
FLUSH_AFTER_S = 1.0
#: How long entries wait after a failed write.
RETRY_AFTER_S = 2.0
#: How many entries wait at most; the oldest are dropped while the table takes none.
MAX_WAITING = 2_000


class HistoryWriter:
    def __init__(self, *, table: Table, writer: str, event_log: EventLog) -> None:
        self._table = table
        self._event_log = event_log
        #: How long an entry is kept, as the pool's configuration says where it was seen.
        self.kept = items.KEPT
        #: Who writes: two processes may write in the same millisecond.
        self._writer = writer
        self._sequence = 0
        self._waiting: deque[Item] = deque()
        self._dropped = 0
        self._flushing = asyncio.Lock()
        self._full = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, instance_id: str, entry: HistoryEntry) -> None:
        self._sequence += 1
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(
            items.history_item(instance_id, entry, sequence=self._sequence, writer=self._writer, kept=self.kept)
        )
        if len(self._waiting) >= WRITE_BATCH:
            self._full.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._flush_soon())

    async def flush(self) -> None:
        """All that were added before are in the table."""
        async with self._flushing:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(WRITE_BATCH, len(self._waiting)))]
                try:
                    await self._table.put_all(batch)
                except BaseException:
                    # Keys are fixed: what was written already is written again as it is.
                    self._waiting.extendleft(reversed(batch))
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
            # A store that is closed because the table is out of reach is closed all the same.
            lost = self._dropped + len(self._waiting)
            self._event_log.record("history-lost", error.message, entries=lost)
        else:
            if self._dropped:
                self._event_log.record("history-lost", "the table took none for too long", entries=self._dropped)

    async def _flush_soon(self) -> None:
        pause_s = FLUSH_AFTER_S
        while self._waiting:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._full.wait()
            try:
                await self.flush()
                pause_s = FLUSH_AFTER_S
            except RemudaError as error:
                self._event_log.record("history-late", error.message, entries=len(self._waiting))
                self._full.clear()
                pause_s = RETRY_AFTER_S
