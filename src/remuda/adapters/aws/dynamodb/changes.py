"""Writes of control records (conditional updates, transactions for several instances) and of their history."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

from remuda.adapters.aws.calls import NOT_THE_CAUSE, REASON_CONDITION_FAILED, chunks, gather
from remuda.adapters.aws.dynamodb import expressions, items
from remuda.adapters.aws.dynamodb.items import Item, ItemKeys
from remuda.adapters.aws.dynamodb.keys import InstanceKeys
from remuda.adapters.aws.dynamodb.table import (
    TRANSACTION,
    WRITE_BATCH,
    ConditionFailed,
    Table,
    TransactionCancelled,
    key_of,
)
from remuda.domain.errors import Conflict, RemudaError, Unavailable
from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.transitions import Change
from remuda.ports.event_log import EventLog

#: Changes per transaction. Each may take two of its items: the control record and the report.
CHANGES_PER_TRANSACTION = TRANSACTION // 2
#: Attempts for a transaction. The second one omits the changes that caused the first cancellation.
TRANSACTION_ATTEMPTS = 2
#: Concurrent single writes.
CONCURRENT_WRITES = 64
#: Seconds that an entry waits for others, to be written in one call.
FLUSH_AFTER_S = 5.0
#: Maximum seconds before a failed write is retried. A new entry triggers it sooner if a batch is full.
RETRY_AFTER_S = 2.0
#: Maximum number of queued entries. Beyond it the oldest are dropped.
MAX_QUEUED = 2_000


class ChangeWriter:
    """Applies changes to control records and writes their history. Reports of terminated instances expire."""

    def __init__(
        self,
        *,
        table: Table,
        keys: InstanceKeys,
        history: HistoryWriter,
        event_log: EventLog,
        on_write: Callable[[tuple[str, str]], None],
        parse: Callable[[Item, str], Instance],
    ) -> None:
        """`on_write` is called with the key of each written record. `parse` converts the record of an instance id."""
        self._table = table
        self._keys = keys
        self._history = history
        self._event_log = event_log
        self._on_write = on_write
        self._parse = parse
        #: Changes by instance whose response was lost. They may have been applied.
        self._ambiguous: dict[str, Change] = {}
        self._write_slots = asyncio.Semaphore(CONCURRENT_WRITES)

    async def apply(self, change: Change) -> Instance:
        key = (await self._keys_of(change.instance_id)).control(change.instance_id)
        arguments = expressions.change_arguments(change)
        try:
            item = await self._table.update(key, arguments)
        except ConditionFailed as failed:
            raise self._conflict(change, failed.item, retried=failed.retried) from None
        except Unavailable:
            self._ambiguous[change.instance_id] = change
            raise
        self._note_applied(change, key)
        if expires_at := _report_expiry(change):
            await self._expire_report(change.instance_id, expires_at)
        return self._parse(item, change.instance_id)

    def _note_applied(self, change: Change, key: Item) -> None:
        self._ambiguous.pop(change.instance_id, None)
        self._history.add(change.instance_id, change.entry)
        self._on_write(key_of(key))

    def _conflict(self, change: Change, item: Item | None, *, retried: bool) -> Conflict:
        current = None if item is None else self._parse(item, change.instance_id)
        self._resolve_ambiguous(change, current, retried=retried)
        message = f"{change.instance_id} is not in the state that {change.entry.transition} requires"
        return Conflict(message, current=current)

    async def apply_all(self, changes: Sequence[Change]) -> Sequence[RemudaError | None]:
        if not changes:
            return []
        keys = await self._keys.of([change.instance_id for change in changes])
        results: dict[str, RemudaError | None] = {}
        for part in await gather(
            self._apply_transaction(part, keys) for part in chunks(changes, CHANGES_PER_TRANSACTION)
        ):
            results |= part
        return [results[change.instance_id] for change in changes]

    async def _apply_transaction(
        self,
        changes: Sequence[Change],
        keys: Mapping[str, ItemKeys],
        *,
        without_report: frozenset[str] = frozenset(),
        attempts: int = TRANSACTION_ATTEMPTS,
    ) -> Mapping[str, RemudaError | None]:
        """Apply changes in one transaction.

        If it is cancelled, the changes that caused it are applied one by one, which returns their stored records. The
        others are tried once more together, without the reports that turned out not to exist.
        """
        if len(changes) == 1 or not attempts:
            return dict(await gather(map(self._apply_one, changes)))
        records = [change.instance_id for change in changes]
        expiries = {change.instance_id: at for change in changes if (at := _report_expiry(change))}
        reports = [name for name in expiries if name not in without_report]
        updates: list[tuple[Item, Mapping[str, Any]]] = [
            *(
                (keys[each.instance_id].control(each.instance_id), expressions.change_arguments(each))
                for each in changes
            ),
            *((keys[name].report(name), expressions.report_expiry(expiries[name])) for name in reports),
        ]
        try:
            await self._table.update_together(updates)
        except TransactionCancelled as cancelled:
            if cancelled.retried:
                self._mark_ambiguous(changes)
            causes, missing = _causes(cancelled.reasons, records, reports)
            rest = [change for change in changes if change.instance_id not in causes]
            parts = [self._apply_transaction([change], keys) for change in changes if change.instance_id in causes]
            if rest:
                parts.append(
                    self._apply_transaction(rest, keys, without_report=without_report | missing, attempts=attempts - 1)
                )
            return {name: failure for part in await gather(parts) for name, failure in part.items()}
        except RemudaError as error:
            if isinstance(error, Unavailable):
                self._mark_ambiguous(changes)
            return dict.fromkeys(records, error)
        for change in changes:
            self._note_applied(change, keys[change.instance_id].control(change.instance_id))
        return dict.fromkeys(records)

    async def _apply_one(self, change: Change) -> tuple[str, RemudaError | None]:
        async with self._write_slots:
            try:
                await self.apply(change)
            except RemudaError as error:
                return change.instance_id, error
        return change.instance_id, None

    def _mark_ambiguous(self, changes: Iterable[Change]) -> None:
        self._ambiguous |= {change.instance_id: change for change in changes}

    def _resolve_ambiguous(self, change: Change, current: Instance | None, *, retried: bool) -> None:
        """Add the history entry of a change whose response was lost, if the stored record shows that it was applied."""
        ambiguous = retried or self._ambiguous.get(change.instance_id) == change
        self._ambiguous.pop(change.instance_id, None)
        if ambiguous and current is not None and replace(current, **change.sets) == current:
            self._history.add(change.instance_id, change.entry)

    async def _expire_report(self, instance_id: str, expires_at: datetime) -> None:
        """Let the report expire with its control record. If this fails, the report keeps its own, later expiry."""
        try:
            key = (await self._keys_of(instance_id)).report(instance_id)
            await self._table.update_unread(key, expressions.report_expiry(expires_at))
        except ConditionFailed:
            return  # there is no report
        except RemudaError as error:
            self._event_log.record("report-kept", error.message, instance_id=instance_id)

    async def _keys_of(self, instance_id: str) -> ItemKeys:
        return (await self._keys.of([instance_id]))[instance_id]


def _causes(
    reasons: Sequence[str], records: Sequence[str], reports: Sequence[str]
) -> tuple[Collection[str], frozenset[str]]:
    """The instances whose record caused a cancellation, and those whose report does not exist.

    `reasons` lists one reason per item of the transaction: first the records, then the reports.
    """
    if len(reasons) != len(records) + len(reports):
        return records, frozenset()
    report_reasons = zip(reports, reasons[len(records) :], strict=True)
    return (
        [name for name, reason in zip(records, reasons, strict=False) if reason != NOT_THE_CAUSE],
        frozenset(name for name, reason in report_reasons if reason == REASON_CONDITION_FAILED),
    )


def _report_expiry(change: Change) -> datetime | None:
    """The time at which the report expires if the change terminates the instance."""
    forget_at: datetime | None = change.sets.get("forget_at") if change.sets.get("state") is State.TERMINATED else None
    return forget_at


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
                self._event_log.record("history-write-failed", error.message, entries=len(self._queued))
                # Without this, the loop would retry at once.
                self._batch_full.clear()
                pause_s = RETRY_AFTER_S
