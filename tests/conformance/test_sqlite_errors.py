"""Problems with the SQLite file, and the errors that they raise."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from remuda.adapters.sqlite.pool import SqliteResourcePool
from remuda.adapters.sqlite.schema import VERSION, translated
from remuda.adapters.sqlite.store import SqliteInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.instance import State
from remuda.ports.calls import CallCounter
from tests.support.records import LONG_S, NOW, birth, change, instance, instance_id, message

NOBODY = 65_534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "remuda.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteInstanceStore]:
    store = open_store(path)
    yield store
    await store.close()


def contents(path: Path, new: bytes | None = None) -> bytes:
    if new is not None:
        path.write_bytes(new)
    return path.read_bytes()


def make_folder(path: Path) -> None:
    path.mkdir()


def make_read_only(path: Path) -> None:
    path.chmod(0o400)


def damage(path: Path) -> None:
    """Overwrite all pages but the first."""
    whole = path.read_bytes()
    path.write_bytes(whole[:4_096] + b"\xa5" * (len(whole) - 4_096))


def execute(path: Path, statement: str) -> None:
    """Execute a statement through another connection."""
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.close()


def open_store(path: Path, *, busy_timeout_s: float = 5.0) -> SqliteInstanceStore:
    return SqliteInstanceStore(
        path=path, clock=SystemClock(), ids=SystemIds(), calls=CallCounter(), busy_timeout_s=busy_timeout_s
    )


def open_pool(path: Path) -> SqliteResourcePool:
    return SqliteResourcePool(path=path, clock=SystemClock(), ids=SystemIds(), calls=CallCounter())


async def error_of(store: SqliteInstanceStore) -> UserError:
    """Check that a read, a write and a wait raise the same error, and return it."""
    with pytest.raises(UserError) as reading:
        await store.get("i-1")
    with pytest.raises(UserError, match=r".") as writing:
        await store.apply(birth(instance()))
    with pytest.raises(UserError) as waiting:
        await store.wait_for_control("i-1", None, LONG_S)
    assert reading.value.message == writing.value.message == waiting.value.message
    assert reading.value.fix
    return reading.value


async def test_missing_file_is_not_created_implicitly(path: Path, store: SqliteInstanceStore) -> None:
    error = await error_of(store)
    assert str(path) in error.message
    assert "remuda up" in error.fix
    pool = open_pool(path)
    with pytest.raises(UserError, match="no store at"):
        await pool.receive("large", visibility_s=1)
    await pool.close()
    assert list(path.parent.iterdir()) == []
    await store.prepare()
    assert await store.get("i-1") is None


async def test_created_file_is_private_and_the_only_one(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "a?b#c%20.db"
    stores = [open_store(path) for _ in range(4)]
    created = await asyncio.gather(*(store.prepare() for store in stores))
    assert sum(len(each) for each in created) == 1
    await stores[0].apply(birth(instance()))
    assert {each.name: each.stat().st_mode & 0o777 for each in path.parent.iterdir()} == {
        path.name + suffix: 0o600 for suffix in ("", "-wal", "-shm")
    }
    await asyncio.gather(*(store.close() for store in stores))
    assert [each.name for each in path.parent.iterdir()] == [path.name]


async def test_store_and_pool_share_a_file_created_by_either(path: Path, store: SqliteInstanceStore) -> None:
    pool = open_pool(path)
    assert await pool.prepare(["large"]) == ["queue large"]
    assert await store.prepare() == []
    await pool.send([message()])
    await store.apply(birth(instance()))
    assert (await pool.depth("large"), await store.count_live()) == (1, 1)
    await pool.close()


@pytest.mark.parametrize("garbage", [b"hello", b"x" * 10_000, b"SQLite format 3\0" + b"\xff" * 9_000])
async def test_file_that_is_not_a_database(path: Path, store: SqliteInstanceStore, garbage: bytes) -> None:
    contents(path, garbage)
    error = await error_of(store)
    assert str(path) in error.message
    assert "move" in error.fix
    with pytest.raises(UserError):
        await store.prepare()
    assert contents(path) == garbage


async def test_damaged_database(path: Path, store: SqliteInstanceStore) -> None:
    await store.prepare()
    for number in range(200):
        await store.apply(birth(instance(number)))
    await store.close()
    damage(path)
    damaged = open_store(path)
    with pytest.raises(UserError, match="is damaged or not a SQLite database") as error:
        await damaged.find(list(State))
    assert "move remuda.db" in error.value.fix
    await damaged.close()


async def test_empty_or_foreign_database(path: Path, store: SqliteInstanceStore) -> None:
    contents(path, b"")
    assert "not a Remuda store" in (await error_of(store)).message
    execute(path, "CREATE TABLE accounts (name)")
    assert "not a Remuda store" in (await error_of(store)).message
    with pytest.raises(UserError, match="not a Remuda store"):
        await store.prepare()


async def test_newer_schema_version(path: Path, store: SqliteInstanceStore) -> None:
    await store.prepare()
    execute(path, f"PRAGMA user_version = {VERSION + 1}")
    newer = open_store(path)
    error = await error_of(newer)
    assert f"schema {VERSION + 1}" in error.message
    assert "upgrade" in error.fix
    with pytest.raises(UserError, match="newer Remuda"):
        await newer.prepare()
    await newer.close()


async def test_folder_in_place_of_the_file(path: Path, store: SqliteInstanceStore) -> None:
    make_folder(path)
    assert "folder" in (await error_of(store)).message
    with pytest.raises(UserError, match="folder"):
        await store.prepare()


async def test_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    store = open_store(tmp_path / "state" / "remuda.db")
    with pytest.raises(UserError, match="cannot create a store"):
        await store.prepare()
    await store.close()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("ROLLBACK")
    connection.close()


async def test_write_waits_for_the_lock_up_to_the_timeout(path: Path) -> None:
    impatient = open_store(path, busy_timeout_s=0.05)
    patient = open_store(path, busy_timeout_s=LONG_S)
    await impatient.prepare()
    with locked(path):
        with pytest.raises(Unavailable, match="locked"):
            await impatient.apply(birth(instance()))
        assert await impatient.get(instance_id(1)) is None, "reads need no lock"
        waiting = asyncio.create_task(patient.apply(birth(instance())))
        # The event loop is not blocked while the write waits.
        with pytest.raises(Unavailable, match="locked"):
            await impatient.beat("i-1", at=NOW, busy=False, listening=False, notice="", version="")
        assert not waiting.done()
    written = await waiting
    assert await impatient.get(instance_id(1)) == written
    await impatient.close()
    await patient.close()


async def test_cancelled_write_is_applied_completely_and_wakes_waiters(path: Path, store: SqliteInstanceStore) -> None:
    await store.prepare()
    record = await store.apply(birth(instance()))
    loop, begins = asyncio.get_running_loop(), asyncio.Event()

    def trace(statement: str) -> None:
        if statement.startswith("BEGIN"):
            loop.call_soon_threadsafe(begins.set)

    await store._file.run(lambda connection: connection.set_trace_callback(trace))
    with locked(path):
        waiting = asyncio.create_task(store.wait_for_control(record.instance_id, record, LONG_S))
        begun = asyncio.create_task(store.apply(change(record, uses=1)))
        queued = asyncio.create_task(store.apply(change(record, uses=2)))
        await begins.wait()
        begun.cancel()
        queued.cancel()
        await asyncio.wait({begun, queued})
    # The started write is applied although its caller was cancelled, and waiters see it.
    assert await waiting == replace(record, uses=1)
    assert len(await store.history(record.instance_id)) == 2
    assert (await store.apply(change(record, uses=3))).uses == 3


async def test_replaced_file_is_reopened(path: Path, store: SqliteInstanceStore) -> None:
    await store.prepare()
    await store.apply(birth(instance(1)))
    for each in path.parent.iterdir():
        each.unlink()
    with pytest.raises(UserError, match="no store at"):
        await store.get(instance_id(1))
    other = open_store(path)
    await other.prepare()
    written = await other.apply(birth(instance(2)))
    assert await store.get(instance_id(1)) is None
    assert await store.wait_for_control(instance_id(2), None, LONG_S) == written
    await other.close()


async def test_close_ends_waits(path: Path, store: SqliteInstanceStore) -> None:
    await store.prepare()
    waiting = asyncio.create_task(store.wait_for_control("i-1", None, LONG_S))
    await store.wait_for_control("i-2", None, 0.01)
    await store.close()
    with pytest.raises(Unavailable, match="closed"):
        await waiting
    with pytest.raises(Unavailable, match="closed"):
        await store.get("i-1")


@pytest.fixture
def unprivileged_folder() -> Iterator[Path]:
    """A folder that an unprivileged user can access. Root ignores read-only permissions."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@contextmanager
def unprivileged(folder: Path, *, mode: int = 0o700) -> Iterator[None]:
    """Become an unprivileged user who owns the folder, which gets this mode."""
    folder.chmod(mode)
    root = os.geteuid() == 0
    if root:
        for each in (folder, *folder.iterdir()):
            os.chown(each, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)


async def test_read_only_file(unprivileged_folder: Path) -> None:
    path = unprivileged_folder / "remuda.db"
    store = open_store(path)
    await store.prepare()
    await store.close()
    make_read_only(path)
    with unprivileged(unprivileged_folder):
        reopened = open_store(path)
        with pytest.raises(UserError, match="is not writable") as error:
            await reopened.apply(birth(instance()))
        assert "writable" in error.value.fix
        await reopened.close()


async def test_read_only_folder(unprivileged_folder: Path) -> None:
    path = unprivileged_folder / "remuda.db"
    store = open_store(path)
    await store.prepare()
    await store.close()
    with unprivileged(unprivileged_folder, mode=0o500):
        reopened = open_store(path)
        with pytest.raises(UserError, match="is not writable"):
            await reopened.apply(birth(instance()))
        await reopened.close()
        another = open_store(unprivileged_folder / "another.db")
        with pytest.raises(UserError, match="is not writable"):
            await another.prepare()
        await another.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (sqlite3.SQLITE_FULL, Unavailable),
        (sqlite3.SQLITE_IOERR | 10 << 8, Unavailable),
        (sqlite3.SQLITE_BUSY | 2 << 8, Unavailable),
        (sqlite3.SQLITE_CORRUPT | 1 << 8, UserError),
        (sqlite3.SQLITE_READONLY | 4 << 8, UserError),
        (sqlite3.SQLITE_MISUSE, sqlite3.OperationalError),
    ],
)
def test_translation_of_error_codes(path: Path, code: int, expected: type[Exception]) -> None:
    error = sqlite3.OperationalError("as SQLite says it")
    error.sqlite_errorcode = code
    with pytest.raises(expected), translated(path):
        raise error
