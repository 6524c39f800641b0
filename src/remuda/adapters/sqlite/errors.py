"""What SQLite and the file system say, as Remuda's errors: the one place that knows their codes."""

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
#: PROTOCOL: two processes met too often over the locks of the write-ahead log.
_LOCKED = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
_TROUBLE = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_CANTOPEN})

_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_WRONG_KIND = frozenset({errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG})

#: The extended codes keep the primary one in their lowest byte.
_PRIMARY = 0xFF


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Errors of SQLite and of the file system leave as Remuda's. What no row knows is a bug and leaves as it is."""
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
    return UserError(f"{path} is a folder, not a store", fix="name a file for the store")


def not_a_store(path: Path) -> UserError:
    return UserError(f"{path} is a database, but not a Remuda store", fix="name another file for the store")


def too_new(path: Path, found: int, known: int) -> UserError:
    return UserError(
        f"{path} has schema {found}, written by a newer Remuda; this one knows {known}",
        fix="upgrade Remuda, or name another file for the store",
    )


def _from_sqlite(error: sqlite3.Error, path: Path) -> RemudaError | None:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return None
    code &= _PRIMARY
    if code in _CORRUPT:
        return UserError(
            f"{path} cannot be read as a store: {error}",
            fix=f"move {path.name} and its -wal and -shm files away, then run remuda up or remuda refresh",
        )
    if code in _FORBIDDEN or (code == sqlite3.SQLITE_CANTOPEN and not _accessible(path)):
        return _not_writable(path, str(error))
    if code in _LOCKED:
        return Unavailable(f"{path} is locked by another process: {error}")
    if code in _TROUBLE:
        return Unavailable(f"{path} cannot be used now: {error}")
    return None


def _from_system(error: OSError, path: Path) -> RemudaError:
    reason = error.strerror or type(error).__name__
    if error.errno in _REFUSED:
        return _not_writable(path, reason)
    if error.errno in _WRONG_KIND:
        return UserError(f"there can be no store at {path}: {reason}", fix="name another file for the store")
    return Unavailable(f"{path} cannot be used now: {reason}")


def _not_writable(path: Path, reason: str) -> UserError:
    return UserError(
        f"the store {path} cannot be written: {reason}", fix="make the file and its folder writable for this user"
    )


def _accessible(path: Path) -> bool:
    """SQLite says "unable to open" for a lack of rights and for a lack of file handles alike."""
    effective = os.access in os.supports_effective_ids
    wanted = os.R_OK | os.W_OK
    return all(os.access(place, wanted, effective_ids=effective) for place in (path, path.parent))
