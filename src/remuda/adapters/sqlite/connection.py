"""A SQLite connection in a separate thread, so that waiting for a lock does not block the event loop.

Waiting for changes of the file: all waiters share one poll of its version.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar, cast

from remuda.adapters.polling import Poller, Waiter
from remuda.adapters.sqlite import schema
from remuda.adapters.sqlite.schema import translated
from remuda.domain.errors import Unavailable
from remuda.ports.clock import Clock, Ids

K = TypeVar("K")
V = TypeVar("V")

T = TypeVar("T")

#: Seconds that a write waits for the lock.
BUSY_TIMEOUT_S = 5.0

#: Version of the file's content: connection number, commits of other connections, rows changed by this connection.
FileVersion = tuple[int, int, int]
#: Seconds between two polls: the first interval after a change, which then grows to the last one.
FIRST_INTERVAL_S = 0.010
LAST_INTERVAL_S = 0.050
GROWTH = 1.3
#: Reads the values of all keys (first argument). Unchanged values may be left out, but not for new keys (second one).
ReadValues = Callable[[Collection[K], Collection[K]], Awaitable[Mapping[K, V]]]


class SqliteFile:
    """Runs jobs on the file one after another. If the caller is cancelled, a job that has started still completes and
    a job that has not started is dropped.
    """

    def __init__(self, *, path: Path, busy_timeout_s: float, thread_name: str) -> None:
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=thread_name)
        self._closed = False
        # Used in the thread only.
        self._connection: sqlite3.Connection | None = None
        self._opened: tuple[int, int] | None = None
        self._openings = 0

    async def run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await self._submit(lambda: job(self._connected()))

    async def create(self, scratch: Path) -> bool:
        """Create the file if it does not exist, and open it. Return whether this call created it."""

        def job() -> bool:
            created = schema.create(self.path, scratch)
            self._connected()
            return created

        return await self._submit(job)

    def version(self, connection: sqlite3.Connection) -> FileVersion:
        """Return the file's version. Called by jobs. Two equal versions mean that nothing was committed in between."""
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        # data_version ignores commits of this connection; total_changes counts them.
        return self._openings, int(version), connection.total_changes

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        finally:
            self._thread.shutdown(wait=False)

    async def _submit(self, job: Callable[[], T]) -> T:
        if self._closed:
            raise Unavailable(f"{self.path} was closed by this process")

        def guarded() -> T:
            with translated(self.path):
                return job()

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    def _connected(self) -> sqlite3.Connection:
        """Return the connection. Reopen the file if it was replaced, because writes to the old one would be lost."""
        identity = self._identity()
        if self._connection is not None and identity != self._opened:
            self._disconnect()
        if self._connection is None:
            self._connection = schema.connect(self.path, busy_timeout_s=self._busy_timeout_s)
            self._opened = identity
            self._openings += 1
        return self._connection

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction that takes the write lock at its start, so that its reads stay valid until the commit."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # A full disk may have ended the transaction already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class ChangePoller(Poller[Waiter[K, V]], Generic[K, V]):
    def __init__(self, *, read_values: ReadValues[K, V], clock: Clock, ids: Ids) -> None:
        super().__init__(clock=clock, ids=ids)
        self._read_values = read_values
        self._new_keys: set[K] = set()

    async def wait(self, key: K, accepts: Callable[[V], bool], timeout_s: float) -> V:
        """Return the first value for which `accepts` is true, including the current one, or raise `TimeoutError`."""
        answer: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        self._new_keys.add(key)
        return cast("V", await self._wait_for_answer(Waiter(key=key, accepts=accepts, answer=answer), timeout_s))

    def wake(self) -> None:
        """Poll now, because this process has written to the file."""
        self._wake()

    def _stop(self) -> asyncio.Task[None] | None:
        self._new_keys.clear()
        return super()._stop()

    async def _poll(self) -> None:
        interval_s = FIRST_INTERVAL_S
        while self._waiters:
            try:
                changed = await self._poll_once()
            except Exception as error:  # noqa: BLE001 - waiters must not hang if polling fails
                self._poll_task = None
                for waiter in self._waiters:
                    waiter.fail(error)
                return
            interval_s = FIRST_INTERVAL_S if changed else min(interval_s * GROWTH, LAST_INTERVAL_S)
            if not self._woken:
                await self._sleep(interval_s * (1 + self._ids.jitter()) / 2)

    async def _poll_once(self) -> bool:
        self._woken = False
        new_keys, self._new_keys = self._new_keys, set()
        found = await self._read_values({waiter.key for waiter in self._waiters}, new_keys)
        for waiter in self._waiters:
            if waiter.key in found:
                waiter.offer(found[waiter.key])
        return bool(found)
