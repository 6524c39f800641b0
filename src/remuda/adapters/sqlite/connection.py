"""A SQLite connection in a separate thread, so that waiting for a lock does not block the event loop."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from remuda.adapters.sqlite import schema
from remuda.adapters.sqlite.errors import translated
from remuda.domain.errors import Unavailable

T = TypeVar("T")

#: Seconds that a write waits for the lock.
BUSY_TIMEOUT_S = 5.0

#: Version of the file's content: connection number, commits of other connections, rows changed by this connection.
FileVersion = tuple[int, int, int]


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
