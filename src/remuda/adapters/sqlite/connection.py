"""One connection in one thread: a wait for a lock never blocks the event loop."""

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

#: How long a write waits for the writers before it.
BUSY_TIMEOUT_S = 5.0

#: Tells one state of the file from another: connection, other processes' commits, our own.
FileVersion = tuple[int, int, int]


class SqliteFile:
    """Runs jobs on the file, one after another, each whole: a caller that is cancelled leaves its job to finish or,
    where it had not begun, to be dropped.
    """

    def __init__(self, *, path: Path, busy_timeout_s: float, thread_name: str) -> None:
        self.path = path
        self._busy_timeout_s = busy_timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=thread_name)
        self._closed = False
        # These belong to the thread.
        self._connection: sqlite3.Connection | None = None
        self._opened: tuple[int, int] | None = None
        self._openings = 0

    async def run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await self._submit(lambda: job(self._connected()))

    async def create(self, scratch: Path) -> bool:
        """Make the file where there is none and open it; whether this call made it."""

        def job() -> bool:
            created = schema.create(self.path, scratch)
            self._connected()
            return created

        return await self._submit(job)

    def token(self, connection: sqlite3.Connection) -> FileVersion:
        """For jobs: equal to an earlier one where nothing was committed in between."""
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        # The version is blind to this connection's own commits; its count of changed rows is not.
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
        """A file that was removed or replaced is not the store any more: writes to it would be lost in silence."""
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
    """All or nothing, alone from its first read on: what is read here is still so when it is written."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # A full disk may have ended the transaction already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
