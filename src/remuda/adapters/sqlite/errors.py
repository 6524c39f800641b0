"""Translation of SQLite's and the file system's error codes into Remuda's errors."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remuda.domain.errors import RemudaError, Unavailable, UserError

_CORRUPT = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})
_FORBIDDEN = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH})
#: SQLITE_PROTOCOL: too many conflicts over the locks of the write-ahead log.
_LOCKED = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
_TEMPORARY = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_CANTOPEN})

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


def missing(path: Path) -> UserError:
    return UserError(f"no store at {path}", fix="run remuda up or remuda refresh first")


def not_a_file(path: Path) -> UserError:
    return UserError(f"{path} is a folder, not a store", fix="give the path of a file for the store")


def not_a_store(path: Path) -> UserError:
    return UserError(f"{path} is a database, but not a Remuda store", fix="use another file for the store")


def too_new(path: Path, found: int, known: int) -> UserError:
    return UserError(
        f"{path} has schema {found} of a newer Remuda; this version supports schema {known}",
        fix="upgrade Remuda, or use another file for the store",
    )


def _from_sqlite(error: sqlite3.Error, path: Path) -> RemudaError | None:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return None
    code &= _PRIMARY
    if code in _CORRUPT:
        return UserError(
            f"{path} is damaged or not a SQLite database: {error}",
            fix=f"move {path.name} and its -wal and -shm files away, then run remuda up or remuda refresh",
        )
    if code in _FORBIDDEN or (code == sqlite3.SQLITE_CANTOPEN and not _accessible(path)):
        return _not_writable(path, str(error))
    if code in _LOCKED:
        return Unavailable(f"{path} is locked by another process: {error}")
    if code in _TEMPORARY:
        return Unavailable(f"{path} is temporarily unusable: {error}")
    return None


def _from_system(error: OSError, path: Path) -> RemudaError:
    reason = error.strerror or type(error).__name__
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
