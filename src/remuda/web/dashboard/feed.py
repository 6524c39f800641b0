"""One poller for all pages: it looks while somebody watches, seldom otherwise, and tells everybody what has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from datetime import datetime, timedelta
from heapq import nlargest
from typing import Protocol

from remuda.controlplane.context import Context
from remuda.controlplane.read.feed import Changes, FleetReader, Seen
from remuda.controlplane.read.status import GHOSTS_EVERY_S, Status, with_ghosts
from remuda.domain.errors import RemudaError, Unavailable
from remuda.domain.instance import HistoryEntry
from remuda.domain.provision import Provision
from remuda.domain.reporting.prices import PriceTable
from remuda.domain.reporting.usage import bill, worth
from remuda.ports.clock import Clock, Ids
from remuda.ports.event_log import EventLog, SilentEventLog
from remuda.web.dashboard import serialize
from remuda.web.dashboard.change_log import Board

#: How many decisions are kept in sight: ends, and machines that scale-down kept.
DECISIONS = 200
RENEWALS = 20
#: Reports, pools and warnings are read only so often, and what ended unseen still less.
THOROUGH_S = {"local": 1.0, "aws": 10.0}
EVERYTHING_S = {"local": 60.0, "aws": 600.0}
#: Between looks where nobody watches.
UNWATCHED_S = {"local": 15.0, "aws": 120.0}
#: After a failure; twice as long after each further one, up to the last.
RETRY_S, RETRY_MOST_S = 0.5, 10.0
#: What reuse is worth is reckoned only so often, and it is at most this part of the time that goes by.
RECKON_S = {"local": 2.0, "aws": 30.0}
RECKON_PART = 0.05
#: So many machines' lives in one go: pages do not wait for all of them.
RECKONED_AT_ONCE = 50
#: An open stream says at least so often that it is alive.
ALIVE_S = 5.0

Open = Callable[[], AbstractAsyncContextManager[Context]]


class Observer(Protocol):
    """Is told what each look found, before the pages are: metrics count it."""

    def look(self, status: Status) -> None:
        """A thorough one."""
        ...

    def look_failed(self) -> None: ...

    def add_provisions(self, provisions: Iterable[Provision]) -> None:
        """Those that are new or have changed; the same one may come again."""
        ...

    def add_histories(self, histories: Mapping[str, Sequence[HistoryEntry]]) -> None:
        """Whole ones, of instances that have changed: most of it was told before."""
        ...


class Feed:
    def __init__(
        self,
        *,
        open_context: Open,
        backend: str,
        every_s: float,
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
        self._every_s = every_s
        self._since_s = since_s
        self._clock = clock
        self.board = Board(life=ids.new(""))
        #: What the last thorough look found; None before the first.
        self.status: Status | None = None
        self.last_good: datetime | None = None
        self.trouble = ""
        self.watching = 0
        self.closed = False
        self._context: Context | None = None
        self._reader = FleetReader(since_s=since_s)
        self._provisions: dict[str, Provision] = {}
        self._news = asyncio.Event()
        self._wanted = asyncio.Event()
        self._first = asyncio.Event()
        self._looked = asyncio.Event()
        self._busy: frozenset[str] = frozenset()
        self._seen: dict[str, Seen] = {}
        self._decided: dict[str, datetime] = {}
        self._reckoning: asyncio.Task[None] | None = None
        self._reckon_at = self._thorough_at = self._everything_at = self._ghosts_at = clock.monotonic()

    # For pages --------------------------------------------------------------------------------------------------

    @property
    def context(self) -> Context:
        """The ports, for a question of its own. `Unavailable` while they cannot be opened."""
        if self._context is None:
            raise Unavailable(self.trouble or "the store has not been opened yet")
        return self._context

    @property
    def now(self) -> datetime:
        return self._clock.now()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While a stream is open."""
        self.watching += 1
        self._wanted.set()
        try:
            yield
        finally:
            self.watching -= 1

    async def first_look(self, timeout_s: float) -> None:
        """Wait for something to show, but not for long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._first.wait()

    async def recent(self, *, age_s: float, timeout_s: float) -> None:
        """Wait for a thorough look that is not older, but not for long: for who asks now and then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.status is None or (self.now - self.status.at).total_seconds() > age_s:
                    self._wanted.set()
                    await self._looked.wait()

    async def newer_than(self, version: int) -> bool:
        """Whether there is a newer version, waited for; False as a sign of life. At the feed's end at once."""
        if self.board.version <= version and not self.closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_S):
                    await self._news.wait()
        return self.board.version > version

    def close(self) -> None:
        """Every stream ends now."""
        self.closed = True
        self._tell()

    # Looking ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled. A look that fails is told of, and tried again with ports opened afresh."""
        failures = 0
        while True:
            try:
                async with self._open() as context:
                    self._context = context
                    while True:
                        began = self._clock.monotonic()
                        await self._look(context)
                        failures = 0
                        await self._pause(self._clock.monotonic() - began)
            except RemudaError as error:
                self._fail(error.message)
            except Exception as error:  # noqa: BLE001 - the page must go on, and say so
                self._fail(f"a bug: {type(error).__name__}: {error}")
            finally:
                self._context = None
                if self._reckoning is not None:
                    self._reckoning.cancel()
                    self._reckoning = None
            failures += 1
            await self._clock.sleep(min(RETRY_S * 2 ** (failures - 1), RETRY_MOST_S))

    async def _pause(self, took_s: float) -> None:
        """Until the next look: they begin so often, but a store that is slow is not asked without a pause."""
        if self._reader.is_behind:
            await self._clock.sleep(0)
            return
        if self.watching:
            await self._clock.sleep(max(self._every_s - took_s, took_s / 4))
            return
        self._wanted.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(UNWATCHED_S[self._backend]):
                await self._wanted.wait()

    async def _look(self, context: Context) -> None:
        began = self._clock.monotonic()
        everything, thorough, ghosts = (
            began >= due for due in (self._everything_at, self._thorough_at, self._ghosts_at)
        )
        changes = await self._reader.look(context, thorough=thorough, everything=everything, ghosts=thorough and ghosts)
        # Counted from the end: a store that is slow is not asked without a pause.
        ended = self._clock.monotonic()
        if changes.status is not None:
            self.status = changes.status if ghosts else with_ghosts(changes.status, self.status)
            self._thorough_at = ended + THOROUGH_S[self._backend]
            if ghosts:
                self._ghosts_at = ended + GHOSTS_EVERY_S
        if everything:
            self._everything_at = ended + EVERYTHING_S[self._backend]
        self._observe(changes)
        self._show(context, changes)
        self._reckon_when_due()
        looked, self._looked = self._looked, asyncio.Event()
        looked.set()

    def _reckon_when_due(self) -> None:
        """Beside the looks, and only for somebody who watches."""
        if self._reckoning is not None and self._reckoning.done():
            done, self._reckoning = self._reckoning, None
            done.result()
        due = self.watching and not self._reader.is_behind and self._clock.monotonic() >= self._reckon_at
        if due and self._reckoning is None:
            self._reckoning = asyncio.create_task(self._reckon())

    async def _reckon(self) -> None:
        """What reuse is worth, of all that is in sight: in parts, for it goes over every machine's life."""
        until = self._clock.now()
        since = until - timedelta(seconds=self._since_s)
        seen, bills, used_s = list(self._seen.values()), [], 0.0
        for begin in range(0, len(seen), RECKONED_AT_ONCE):
            began = self._clock.monotonic()
            bills += [
                bill(item.instance, item.history or (), self._prices, since=since, until=until)
                for item in seen[begin : begin + RECKONED_AT_ONCE]
            ]
            used_s += self._clock.monotonic() - began
            await self._clock.sleep(0)
        instances = [item.instance for item in seen]
        found = worth(list(self._provisions.values()), instances, bills, self._prices, since=since, until=until)
        self._reckon_at = self._clock.monotonic() + max(RECKON_S[self._backend], used_s / RECKON_PART)
        self.board.put("facts", "worth", serialize.worth_text(found))
        if self.board.commit():
            self._tell()

    def _observe(self, changes: Changes) -> None:
        read = {name: seen.history for name, seen in changes.instances.items() if seen.history is not None}
        for observer in self._observers:
            if changes.status is not None and self.status is not None:
                observer.look(self.status)
            observer.add_provisions(changes.provisions)
            observer.add_histories(read)

    def _show(self, context: Context, changes: Changes) -> None:
        now = self._clock.now()
        board = self.board
        self._show_instances(changes, now)
        for provision in changes.provisions:
            self._provisions[provision.provision_id] = provision
            board.put("provisions", provision.provision_id, serialize.provision_text(provision))
        for name in changes.lapsed:
            self._provisions.pop(name, None)
            board.drop("provisions", name)
        if changes.provisions or changes.lapsed:
            board.put("facts", "times", serialize.times_text(list(self._provisions.values())))
        if changes.status is not None and self.status is not None:
            for name, text in serialize.status_texts(self.status).items():
                board.put("facts", name, text)
        if self.trouble:
            self._event_log.record("look-works-again", f"before: {self.trouble}")
        self.trouble, self.last_good = "", now
        about = {"pool": context.pool_name, "backend": self._backend, "since_s": self._since_s}
        board.put("facts", "about", serialize.encode(about))
        board.put("facts", "trouble", '""')
        if board.commit():
            self._tell()
        self._first.set()

    def _show_instances(self, changes: Changes, now: datetime) -> None:
        if changes.status is not None:
            busy = frozenset(name for name, report in changes.status.reports.items() if report.busy)
            turned, self._busy = self._busy ^ busy, busy
        else:
            turned = frozenset()
        self._seen |= changes.instances
        for name in changes.gone:
            self._seen.pop(name, None)
            self.board.drop("instances", name)
        for name in {*changes.instances, *(name for name in turned if name in self._seen)}:
            text = serialize.instance_text(self._seen[name], now=now, busy=name in self._busy)
            self.board.put("instances", name, text)
        self._show_decisions(changes, horizon=now - timedelta(seconds=self._since_s))

    def _show_decisions(self, changes: Changes, *, horizon: datetime) -> None:
        fresh = {
            name: (at, text) for seen in changes.instances.values() for at, name, text in serialize.decisions(seen)
        }
        known = self._decided | {name: at for name, (at, _) in fresh.items()}
        times = {name: at for name, at in known.items() if at >= horizon}
        if times == self._decided and not fresh:
            return
        renewed = {name for name in times if name.endswith(serialize.KEPT)}
        kept = {
            name
            for names, most in ((times.keys() - renewed, DECISIONS), (renewed, RENEWALS))
            for name in nlargest(most, names, key=lambda name: (times[name], name))
        }
        for name in self._decided.keys() - kept:
            self.board.drop("decisions", name)
        for name in kept & fresh.keys():
            self.board.put("decisions", name, fresh[name][1])
        self._decided = {name: times[name] for name in kept}

    def _fail(self, sentence: str) -> None:
        for observer in self._observers:
            observer.look_failed()
        if not self.trouble:
            # Once: who watches the log is not told again and again.
            self._event_log.record("look-failed", sentence)
        self.trouble = sentence
        self.board.put("facts", "trouble", serialize.encode(sentence))
        if self.board.commit():
            self._tell()
        self._first.set()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
