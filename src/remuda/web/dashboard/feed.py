"""Feed of the dashboard: one poller for all pages. It writes what changed to the change log and wakes the pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from datetime import datetime, timedelta
from heapq import nlargest
from typing import Protocol

from remuda.controlplane.context import Context
from remuda.controlplane.read.feed import FleetChanges, FleetReader, KnownInstance
from remuda.controlplane.read.status import REGISTRATION_CHECK_INTERVAL_S, Status, keep_github_warnings
from remuda.domain.errors import RemudaError, Unavailable
from remuda.domain.instance import HistoryEntry
from remuda.domain.provision import Provision
from remuda.domain.reporting.prices import PriceTable
from remuda.domain.reporting.usage import instance_cost, usage_summary
from remuda.ports.clock import Clock, Ids
from remuda.ports.event_log import EventLog, SilentEventLog
from remuda.web.dashboard import serialize
from remuda.web.dashboard.serialize import ChangeLog

#: Number of decisions to keep: terminations and quarantines, and (separately) instances that scale-down kept.
MAX_DECISIONS = 200
MAX_KEPT_DECISIONS = 20
#: Seconds between polls of reports, queues and warnings.
STATUS_INTERVAL_S = {"local": 1.0, "aws": 10.0}
#: Seconds between polls that also read terminated instances.
FULL_INTERVAL_S = {"local": 60.0, "aws": 600.0}
#: Seconds between polls while no page is open.
UNWATCHED_INTERVAL_S = {"local": 15.0, "aws": 120.0}
#: Seconds before a failed poll is repeated. The delay doubles with each further failure, up to the maximum.
RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.5, 10.0
#: Minimum seconds between two calculations of costs and savings, and the maximum share of time that they may take.
USAGE_INTERVAL_S = {"local": 2.0, "aws": 30.0}
MAX_USAGE_SHARE = 0.05
#: Instances per step of that calculation; pages are served between two steps.
USAGE_BATCH = 50
#: Seconds after which an open stream sends an update even if nothing changed.
KEEP_ALIVE_S = 5.0

OpenContext = Callable[[], AbstractAsyncContextManager[Context]]


class Observer(Protocol):
    """Receives what each poll read, before the pages do."""

    def on_status(self, status: Status) -> None: ...

    def on_poll_failed(self) -> None: ...

    def add_provisions(self, provisions: Iterable[Provision]) -> None:
        """Receive new and changed provisions. The same provision may be passed again."""
        ...

    def add_histories(self, histories: Mapping[str, Sequence[HistoryEntry]]) -> None:
        """Receive the whole histories of changed instances. Most entries have been passed before."""
        ...


class Feed:
    def __init__(
        self,
        *,
        open_context: OpenContext,
        backend: str,
        interval_s: float,
        since_s: float,
        clock: Clock,
        ids: Ids,
        prices: PriceTable | None = None,
        observers: Sequence[Observer] = (),
        event_log: EventLog | None = None,
    ) -> None:
        self._observers = observers
        self._event_log = event_log or SilentEventLog()
        self._prices = prices or PriceTable()
        self._open = open_context
        self._backend = backend
        self._interval_s = interval_s
        self._since_s = since_s
        self._clock = clock
        self.change_log = ChangeLog(process_id=ids.new(""))
        #: The newest status; None before the first poll.
        self.status: Status | None = None
        self.last_success: datetime | None = None
        #: Message of the last failed poll; empty after a successful one.
        self.error = ""
        #: Number of open pages.
        self.watching = 0
        self.closed = False
        self._context: Context | None = None
        self._reader = FleetReader(since_s=since_s)
        self._provisions: dict[str, Provision] = {}
        self._new_version = asyncio.Event()
        self._poll_requested = asyncio.Event()
        self._first_poll_done = asyncio.Event()
        self._poll_done = asyncio.Event()
        self._busy: frozenset[str] = frozenset()
        self._dead: frozenset[str] = frozenset()
        self._seen: dict[str, KnownInstance] = {}
        self._decided: dict[str, datetime] = {}
        self._usage_task: asyncio.Task[None] | None = None
        self._usage_due = self._status_due = self._full_due = self._stale_registrations_due = clock.monotonic()

    # For pages --------------------------------------------------------------------------------------------------

    @property
    def context(self) -> Context:
        """The ports, for requests beyond the feed. Raises `Unavailable` while they cannot be opened."""
        if self._context is None:
            raise Unavailable(self.error or "the store has not been opened yet")
        return self._context

    @property
    def now(self) -> datetime:
        return self._clock.now()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count one open page while the block runs."""
        self.watching += 1
        self._poll_requested.set()
        try:
            yield
        finally:
            self.watching -= 1

    async def first_poll(self, timeout_s: float) -> None:
        """Wait until the first poll has ended, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._first_poll_done.wait()

    async def recent_status(self, *, max_age_s: float, timeout_s: float) -> None:
        """Wait until the status is at most `max_age_s` old, polling if necessary, at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.status is None or (self.now - self.status.at).total_seconds() > max_age_s:
                    self._poll_requested.set()
                    await self._poll_done.wait()

    async def newer_than(self, version: int) -> bool:
        """Wait for a newer version. Return False after `KEEP_ALIVE_S` without one, or if the feed is closed."""
        if self.change_log.version <= version and not self.closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await self._new_version.wait()
        return self.change_log.version > version

    def close(self) -> None:
        """End every stream."""
        self.closed = True
        self._wake_pages()

    # Polling ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Poll until cancelled. After a failed poll, open the ports again and retry."""
        failures = 0
        while True:
            try:
                async with self._open() as context:
                    self._context = context
                    while True:
                        began = self._clock.monotonic()
                        await self._poll(context)
                        failures = 0
                        await self._pause(self._clock.monotonic() - began)
            except RemudaError as error:
                self._fail(error.message)
            except Exception as error:  # noqa: BLE001 - the page must stay up and show the error
                self._fail(f"internal error: {type(error).__name__}: {error}")
            finally:
                self._context = None
                if self._usage_task is not None:
                    self._usage_task.cancel()
                    self._usage_task = None
            failures += 1
            await self._clock.sleep(min(RETRY_DELAY_S * 2 ** (failures - 1), MAX_RETRY_DELAY_S))

    async def _pause(self, took_s: float) -> None:
        """Wait until the next poll is due. A slow store gets a pause of at least a quarter of the poll's duration."""
        if self._reader.is_behind:
            await self._clock.sleep(0)
            return
        if self.watching:
            await self._clock.sleep(max(self._interval_s - took_s, took_s / 4))
            return
        self._poll_requested.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(UNWATCHED_INTERVAL_S[self._backend]):
                await self._poll_requested.wait()

    async def _poll(self, context: Context) -> None:
        began = self._clock.monotonic()
        everything, with_status, registrations = (
            began >= due for due in (self._full_due, self._status_due, self._stale_registrations_due)
        )
        changes = await self._reader.poll(
            context,
            with_status=with_status,
            include_terminated=everything,
            check_registrations=with_status and registrations,
        )
        # Intervals start at the end of the poll, so that a slow store gets a pause.
        ended = self._clock.monotonic()
        if changes.status is not None:
            self.status = changes.status if registrations else keep_github_warnings(changes.status, self.status)
            self._status_due = ended + STATUS_INTERVAL_S[self._backend]
            if registrations:
                self._stale_registrations_due = ended + REGISTRATION_CHECK_INTERVAL_S
        if everything:
            self._full_due = ended + FULL_INTERVAL_S[self._backend]
        self._notify_observers(changes)
        self._record(context, changes)
        self._start_usage_if_due()
        poll_done, self._poll_done = self._poll_done, asyncio.Event()
        poll_done.set()

    def _start_usage_if_due(self) -> None:
        """Calculate costs and savings in a task beside the polls, only while a page is open."""
        if self._usage_task is not None and self._usage_task.done():
            done, self._usage_task = self._usage_task, None
            done.result()
        due = self.watching and not self._reader.is_behind and self._clock.monotonic() >= self._usage_due
        if due and self._usage_task is None:
            self._usage_task = asyncio.create_task(self._calculate_usage())

    async def _calculate_usage(self) -> None:
        """Record costs and savings over all known instances, in batches so that the event loop stays responsive."""
        until = self._clock.now()
        since = until - timedelta(seconds=self._since_s)
        seen, costs, used_s = list(self._seen.values()), [], 0.0
        for begin in range(0, len(seen), USAGE_BATCH):
            began = self._clock.monotonic()
            costs += [
                instance_cost(item.instance, item.history or (), self._prices, since=since, until=until)
                for item in seen[begin : begin + USAGE_BATCH]
            ]
            used_s += self._clock.monotonic() - began
            await self._clock.sleep(0)
        instances = [item.instance for item in seen]
        found = usage_summary(list(self._provisions.values()), instances, costs, self._prices, since=since, until=until)
        self._usage_due = self._clock.monotonic() + max(USAGE_INTERVAL_S[self._backend], used_s / MAX_USAGE_SHARE)
        self.change_log.put("facts", "usage", serialize.usage_text(found))
        self._commit()

    def _notify_observers(self, changes: FleetChanges) -> None:
        histories = {name: seen.history for name, seen in changes.instances.items() if seen.history is not None}
        for observer in self._observers:
            if changes.status is not None and self.status is not None:
                observer.on_status(self.status)
            observer.add_provisions(changes.provisions)
            observer.add_histories(histories)

    def _record(self, context: Context, changes: FleetChanges) -> None:
        now = self._clock.now()
        log = self.change_log
        self._record_instances(changes, now)
        config = self.status.config if self.status else None
        for provision in changes.provisions:
            self._provisions[provision.provision_id] = provision
            log.put("provisions", provision.provision_id, serialize.provision_text(provision, config))
        for name in changes.removed_provisions:
            self._provisions.pop(name, None)
            log.drop("provisions", name)
        if changes.provisions or changes.removed_provisions:
            log.put("facts", "provision_times", serialize.provision_times_text(list(self._provisions.values())))
        if changes.status is not None and self.status is not None:
            for name, text in serialize.status_texts(self.status).items():
                log.put("facts", name, text)
        if self.error:
            self._event_log.record("poll-recovered", f"last error: {self.error}")
        self.error, self.last_success = "", now
        about = {"pool": context.pool_name, "backend": self._backend, "since_s": self._since_s}
        log.put("facts", "about", serialize.encode(about))
        log.put("facts", "error", '""')
        self._commit()
        self._first_poll_done.set()

    def _record_instances(self, changes: FleetChanges, now: datetime) -> None:
        if changes.status is not None:
            busy = frozenset(name for name, report in changes.status.reports.items() if report.busy)
            dead = frozenset(item.instance_id for item in changes.status.instances if changes.status.agent_death(item))
            toggled, self._busy, self._dead = (self._busy ^ busy) | (self._dead ^ dead), busy, dead
        else:
            toggled = frozenset()
        self._seen |= changes.instances
        for name in changes.removed_instances:
            self._seen.pop(name, None)
            self.change_log.drop("instances", name)
        for name in {*changes.instances, *(name for name in toggled if name in self._seen)}:
            text = serialize.instance_text(
                self._seen[name], now=now, busy=name in self._busy, agent_dead=name in self._dead
            )
            self.change_log.put("instances", name, text)
        self._record_decisions(changes, horizon=now - timedelta(seconds=self._since_s))

    def _record_decisions(self, changes: FleetChanges, *, horizon: datetime) -> None:
        """Record new decisions; drop those before `horizon` and those beyond the maximum numbers."""
        new = {name: (at, text) for seen in changes.instances.values() for at, name, text in serialize.decisions(seen)}
        known = self._decided | {name: at for name, (at, _) in new.items()}
        times = {name: at for name, at in known.items() if at >= horizon}
        if times == self._decided and not new:
            return
        kept_by_scale_down = {name for name in times if name.endswith(serialize.KEPT_SUFFIX)}
        shown = {
            name
            for names, limit in (
                (times.keys() - kept_by_scale_down, MAX_DECISIONS),
                (kept_by_scale_down, MAX_KEPT_DECISIONS),
            )
            for name in nlargest(limit, names, key=lambda name: (times[name], name))
        }
        for name in self._decided.keys() - shown:
            self.change_log.drop("decisions", name)
        for name in shown & new.keys():
            self.change_log.put("decisions", name, new[name][1])
        self._decided = {name: times[name] for name in shown}

    def _fail(self, message: str) -> None:
        for observer in self._observers:
            observer.on_poll_failed()
        if not self.error:
            # Only the first failure in a row is logged.
            self._event_log.record("poll-failed", message)
        self.error = message
        self.change_log.put("facts", "error", serialize.encode(message))
        self._commit()
        self._first_poll_done.set()

    def _commit(self) -> None:
        if self.change_log.commit():
            self._wake_pages()

    def _wake_pages(self) -> None:
        new_version, self._new_version = self._new_version, asyncio.Event()
        new_version.set()
