"""The database schema, creating and opening the file, and its errors.

Each record is a JSON document with additional columns for searches. Times in columns are fixed-width text that sorts
chronologically.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from remuda.disk import FULL, full_disk, is_full
from remuda.domain.errors import RemudaError, Unavailable, UserError

#: Incremented with each change that older versions cannot read.
VERSION = 2

_TABLES = """
CREATE TABLE instances (
  instance_id TEXT PRIMARY KEY,
  state TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  threshold TEXT NOT NULL,
  provision_id TEXT NOT NULL,
  forget_at TEXT,
  doc TEXT NOT NULL
);
CREATE INDEX instances_by_state ON instances (state, threshold);
CREATE INDEX instances_by_provision ON instances (provision_id) WHERE provision_id <> '';

CREATE TABLE history (
  instance_id TEXT NOT NULL,
  seq INTEGER NOT NULL,
  doc TEXT NOT NULL,
  PRIMARY KEY (instance_id, seq)
) WITHOUT ROWID;

CREATE TABLE reports (
  instance_id TEXT PRIMARY KEY,
  doc TEXT NOT NULL
);

CREATE TABLE provisions (
  holder TEXT NOT NULL,
  provision_id TEXT NOT NULL,
  created_at TEXT NOT NULL,
  deadline TEXT NOT NULL,
  status TEXT NOT NULL,
  settled INTEGER NOT NULL,
  forget_at TEXT,
  doc TEXT NOT NULL,
  PRIMARY KEY (holder, provision_id)
);
CREATE INDEX provisions_unsettled ON provisions (status, deadline) WHERE settled = 0;
CREATE INDEX provisions_by_age ON provisions (created_at);

CREATE TABLE singles (
  name TEXT PRIMARY KEY,
  doc TEXT NOT NULL
);

CREATE TABLE queues (
  name TEXT PRIMARY KEY
);

CREATE TABLE messages (
  message_id INTEGER PRIMARY KEY,
  queue TEXT NOT NULL,
  visible_at REAL NOT NULL,
  shuffle REAL NOT NULL,
  receipt TEXT UNIQUE,
  body TEXT NOT NULL
);
CREATE INDEX messages_by_queue ON messages (queue, visible_at);

CREATE TABLE jobs (
  job_id TEXT PRIMARY KEY,
  run_id TEXT NOT NULL,
  seen_at TEXT NOT NULL,
  expires_at TEXT NOT NULL,
  doc TEXT NOT NULL
);
CREATE INDEX jobs_by_run ON jobs (run_id, seen_at);
CREATE INDEX jobs_by_age ON jobs (seen_at);
"""


def create(path: Path, scratch: Path) -> bool:
    """Create the store if it does not exist. Return whether this call created it.

    The file is built under another name and then linked to its path, so that no process opens an incomplete store or
    competes for the exclusive lock that the switch to the write-ahead log needs.
    """
    if path.exists():
        return False
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    try:
        _build(scratch)
        return _link(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _build(path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
    finally:
        connection.close()


def _link(scratch: Path, path: Path) -> bool:
    try:
        os.link(scratch, path)
    except FileExistsError:
        return False  # another process created the store first
    return True


def connect(path: Path, *, busy_timeout_s: float) -> sqlite3.Connection:
    """Open an existing store and check its schema version."""
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a store", fix="give the path of a file for the store")
    if not path.exists():
        raise UserError(f"no store at {path}", fix="run remuda up first")
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=busy_timeout_s, isolation_level=None
    )
    # Invalid UTF-8 must fail the parsing of one record only, not the whole query.
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
        _check(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection, path: Path) -> None:
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if found > VERSION:
        raise UserError(
            f"{path} has schema {found} of a newer Remuda; this version supports schema {VERSION}",
            fix="upgrade Remuda, or use another file for the store",
        )
    if 0 < found < VERSION:
        raise UserError(
            f"{path} has schema {found} of an older Remuda; this version supports schema {VERSION}",
            fix=f"stop its machines with remuda down, then move {path.name} and its -wal and -shm files away",
        )
    if found != VERSION:
        raise UserError(f"{path} is a database, but not a Remuda store", fix="use another file for the store")


# SQLite's and the file system's error codes as Remuda's errors ------------------------------------------------------

_CORRUPT = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})
_FORBIDDEN = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH})
#: SQLITE_PROTOCOL: too many conflicts over the locks of the write-ahead log.
_LOCKED = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
_TEMPORARY = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_CANTOPEN})

_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_WRONG_KIND = frozenset({errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG})

#: The lowest byte of an extended code is the primary code.
_PRIMARY = 0xFF


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise SQLite and file system errors as Remuda's. Unknown SQLite errors are bugs and are raised unchanged."""
    try:
        yield
    except sqlite3.Error as error:
        known = _from_sqlite(error, path)
        if known is None:
            raise
        raise known from error
    except OSError as error:
        raise _from_system(error, path) from error


def _from_sqlite(error: sqlite3.Error, path: Path) -> RemudaError | None:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return None
    code &= _PRIMARY
    if code in _CORRUPT:
        return UserError(
            f"{path} is damaged or not a SQLite database: {error}",
            fix=f"move {path.name} and its -wal and -shm files away, then run remuda up",
        )
    if code in _FORBIDDEN or (code == sqlite3.SQLITE_CANTOPEN and not _accessible(path)):
        return _not_writable(path, str(error))
    if code == sqlite3.SQLITE_FULL or (code in _TEMPORARY and is_full(path.parent)):
        # Without space, also the files of the write-ahead log cannot be created or grow: SQLITE_IOERR.
        return full_disk(path.parent)
    if code in _LOCKED:
        return Unavailable(f"{path} is locked by another process: {error}")
    if code in _TEMPORARY:
        return Unavailable(f"{path} is temporarily unusable: {error}")
    return None


def _from_system(error: OSError, path: Path) -> RemudaError:
    reason = error.strerror or type(error).__name__
    if error.errno in FULL:
        return full_disk(path.parent)
    if error.errno in _REFUSED:
        return _not_writable(path, reason)
    if error.errno in _WRONG_KIND:
        return UserError(f"cannot create a store at {path}: {reason}", fix="use another file for the store")
    return Unavailable(f"{path} is temporarily unusable: {reason}")


def _not_writable(path: Path, reason: str) -> UserError:
    return UserError(
        f"the store {path} is not writable: {reason}", fix="make the file and its folder writable for this user"
    )


def _accessible(path: Path) -> bool:
    """Whether file and folder are writable. SQLite reports "unable to open" also for a lack of file handles."""
    effective = os.access in os.supports_effective_ids
    wanted = os.R_OK | os.W_OK
    return all(os.access(place, wanted, effective_ids=effective) for place in (path, path.parent))
