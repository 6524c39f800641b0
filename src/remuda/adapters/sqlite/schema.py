"""The database schema, and creating and opening the file.

Each record is a JSON document with additional columns for searches. Times in columns are fixed-width text that sorts
chronologically.
"""

from __future__ import annotations

import os
import sqlite3
from functools import partial
from pathlib import Path

from remuda.adapters.sqlite import errors

#: Incremented with each change that older versions cannot read.
VERSION = 1

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
  run_id TEXT NOT NULL,
  provision_id TEXT NOT NULL,
  created_at TEXT NOT NULL,
  deadline TEXT NOT NULL,
  status TEXT NOT NULL,
  settled INTEGER NOT NULL,
  forget_at TEXT,
  doc TEXT NOT NULL,
  PRIMARY KEY (run_id, provision_id)
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
        raise errors.not_a_file(path)
    if not path.exists():
        raise errors.missing(path)
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
        raise errors.too_new(path, found, VERSION)
    if found != VERSION:
        raise errors.not_a_store(path)
