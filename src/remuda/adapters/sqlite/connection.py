"""A SQLite connection in a separate thread, so that waiting for a lock does not block the event loop.

Waiting for changes: the writer of a record touches a file, after its commit, that the waiting processes watch. SQLite's
own files would not do, because the last write to them precedes the moment at which readers see the commit.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import zlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar, cast

from remuda import inotify
from remuda.adapters.polling import Poller, Waiter
from remuda.adapters.sqlite import schema
from remuda.adapters.sqlite.schema import translated
from remuda.domain.errors import Unavailable
from remuda.ports.clock import Clock, Ids

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

T = TypeVar("T")

#: Seconds that a write waits for the lock.
BUSY_TIMEOUT_S = 5.0

#: Version of the file's content: connection number, commits of other connections, rows changed by this connection.
FileVersion = tuple[int, int, int]
#: Maximum number of watched files. Keys that share one also share their wake-ups; the files are never deleted.
TOPICS = 256
#: Seconds between two polls if changes are reported. They find changes whose writer was killed after its commit.
REPORTED_INTERVAL_S = 1.0
#: Without reports: the first interval after a change, which then grows to the last one.
FIRST_INTERVAL_S = 0.010
LAST_INTERVAL_S = 0.050
GROWTH = 1.3
#: Reads the values of these keys. Called in the connection's thread.
ReadValues = Callable[[sqlite3.Connection, Collection[K]], Mapping[K, V]]


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

    async def write(self, job: Callable[[sqlite3.Connection], T], changed: Collection[Hashable] = ()) -> T:
        """Run a job in a transaction, then wake the processes that wait for changes of these keys."""

        def in_transaction(connection: sqlite3.Connection) -> T:
            with transaction(connection):
                result = job(connection)
            for key in changed:
                # A missing file has no waiters, and those of one that cannot be changed poll.
                with suppress(OSError):
                    os.utime(self._topic(key))
            return result

        return await self.run(in_transaction)

    @contextmanager
    def watch(self, key: Hashable, on_change: Callable[[], object]) -> Iterator[bool]:
        """Call `on_change` after writes of this key. Yields False if they cannot be reported."""
        topic = self._topic(key)
        if self._identity() is not None:
            with suppress(OSError):  # without the file it cannot be watched
                topic.parent.mkdir(mode=0o700, exist_ok=True)
                os.close(os.open(topic, os.O_CREAT | os.O_RDONLY, 0o600))
        with inotify.watch(topic, on_change) as reported:
            yield reported

    def _topic(self, key: Hashable) -> Path:
        number = zlib.crc32(str(key).encode()) % TOPICS
        return self.path.with_name(f"{self.path.name}-changes") / f"{number:02x}"

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
    """Waits for values in the file. Documents are read only after a commit."""

    def __init__(
        self,
        *,
        file: SqliteFile,
        read_values: ReadValues[K, V],
        on_read: Callable[[], object],
        clock: Clock,
        ids: Ids,
    ) -> None:
        """`on_read` is called after each read of values."""
        super().__init__(clock=clock, ids=ids)
        self._file = file
        self._read_values = read_values
        self._on_read = on_read
        self._new_keys: set[K] = set()
        #: Number of waiters whose changes are not reported.
        self._unreported = 0
        #: Version of the file and values of the keys at the last poll.
        self._version: FileVersion | None = None
        self._values: dict[K, V] = {}

    async def wait(self, key: K, accepts: Callable[[V], bool], timeout_s: float) -> V:
        """Return the first value for which `accepts` is true, including the current one, or raise `TimeoutError`."""
        # Watched before the first read: a later change is either read or reported.
        with self._file.watch(key, self._wake) as reported:
            self._unreported += not reported
            try:
                answer: asyncio.Future[V] = asyncio.get_running_loop().create_future()
                self._new_keys.add(key)
                return cast(
                    "V", await self._wait_for_answer(Waiter(key=key, accepts=accepts, answer=answer), timeout_s)
                )
            finally:
                self._unreported -= not reported

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
                pause_s = interval_s if self._unreported else REPORTED_INTERVAL_S
                await self._sleep(pause_s * (1 + self._ids.jitter()) / 2)

    async def _poll_once(self) -> bool:
        """Offer changed values to the waiters. Return whether there were any."""
        self._woken = False
        new_keys, self._new_keys = self._new_keys, set()
        keys = {waiter.key for waiter in self._waiters}
        last_version = self._version

        def job(connection: sqlite3.Connection) -> tuple[FileVersion, Mapping[K, V]]:
            # Read the version first: a commit between the two reads is then read twice instead of never.
            version = self._file.version(connection)
            wanted = new_keys if version == last_version else keys
            return version, self._read_values(connection, wanted) if wanted else {}

        self._version, read = await self._file.run(job)
        if read:
            self._on_read()
        before = self._values
        self._values = {key: value for key, value in {**before, **read}.items() if key in keys}
        changed = {key for key, value in read.items() if key in new_keys or before.get(key) != value}
        for waiter in self._waiters:
            if waiter.key in changed:
                waiter.offer(read[waiter.key])
        return bool(changed)
