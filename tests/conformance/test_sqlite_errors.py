"""What can be wrong with the file, and what the user hears of it."""

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

from remuda.adapters.sqlite.errors import translated
from remuda.adapters.sqlite.pool import SqliteResourcePool
from remuda.adapters.sqlite.schema import VERSION
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
    """All but the first page."""
    whole = path.read_bytes()
    path.write_bytes(whole[:4_096] + b"\xa5" * (len(whole) - 4_096))


def execute(path: Path, statement: str) -> None:
    """As somebody else, with their own tools."""
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.close()


def open_store(path: Path, *, busy_timeout_s: float = 5.0) -> SqliteInstanceStore:
    return SqliteInstanceStore(
        path=path, clock=SystemClock(), ids=SystemIds(), calls=CallCounter(), busy_timeout_s=busy_timeout_s
    )


def open_pool(path: Path) -> SqliteResourcePool:
    return SqliteResourcePool(path=path, clock=SystemClock(), ids=SystemIds(), calls=CallCounter())


async def refused(store: SqliteInstanceStore) -> UserError:
    """What a read, a write and a wait say: the same."""
    with pytest.raises(UserError) as reading:
        await store.get("i-1")
    with pytest.raises(UserError, match=r".") as writing:
        await store.apply(birth(instance()))
    with pytest.raises(UserError) as waiting:
        await store.wait_for_control("i-1", None, LONG_S)
    assert reading.value.message == writing.value.message == waiting.value.message
    assert reading.value.fix
    return reading.value


async def test_a_missing_file_is_not_created_by_use(path: Path, store: SqliteInstanceStore) -> None:
    error = await refused(store)
    assert str(path) in error.message
    assert "remuda up" in error.fix
    pool = open_pool(path)
    with pytest.raises(UserError, match="no store at"):
        await pool.receive("large", visibility_s=1)
    await pool.close()
    assert list(path.parent.iterdir()) == []
    await store.prepare()
    assert await store.get("i-1") is None


async def test_the_file_is_private_and_has_no_leftovers(tmp_path: Path) -> None:
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


async def test_store_and_pool_share_a_file_in_either_order(path: Path, store: SqliteInstanceStore) -> None:
    pool = open_pool(path)
    assert await pool.prepare(["large"]) == ["queue large"]
    assert await store.prepare() == []
    await pool.send([message()])
    await store.apply(birth(instance()))
    assert (await pool.depth("large"), await store.count_live()) == (1, 1)
    await pool.close()


@pytest.mark.parametrize("garbage", [b"hello", b"x" * 10_000, b"SQLite format 3\0" + b"\xff" * 9_000])
async def test_a_file_that_is_no_database(path: Path, store: SqliteInstanceStore, garbage: bytes) -> None:
    contents(path, garbage)
    error = await refused(store)
    assert str(path) in error.message
    assert "move" in error.fix
    with pytest.raises(UserError):
        await store.prepare()
    assert contents(path) == garbage


async def test_a_damaged_database(path: Path, store: SqliteInstanceStore) -> None:
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


async def test_an_empty_or_foreign_database(path: Path, store: SqliteInstanceStore) -> None:
    contents(path, b"")
    assert "not a Remuda store" in (await refused(store)).message
    execute(path, "CREATE TABLE accounts (name)")
    assert "not a Remuda store" in (await refused(store)).message
    with pytest.raises(UserError, match="not a Remuda store"):
        await store.prepare()


async def test_a_schema_of_the_future(path: Path, store: SqliteInstanceStore) -> None:
    await store.prepare()
    execute(path, f"PRAGMA user_version = {VERSION + 1}")
    newer = open_store(path)
    error = await refused(newer)
    assert f"schema {VERSION + 1}" in error.message
    assert "upgrade" in error.fix
    with pytest.raises(UserError, match="newer Remuda"):
        await newer.prepare()
    await newer.close()


async def test_a_folder_in_place_of_the_file(path: Path, store: SqliteInstanceStore) -> None:
    make_folder(path)
    assert "folder" in (await refused(store)).message
    with pytest.raises(UserError, match="folder"):
        await store.prepare()


async def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
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


async def test_a_lock_is_waited_for_and_then_given_up(path: Path) -> None:
    impatient = open_store(path, busy_timeout_s=0.05)
    patient = open_store(path, busy_timeout_s=LONG_S)
    await impatient.prepare()
    with locked(path):
        with pytest.raises(Unavailable, match="locked"):
            await impatient.apply(birth(instance()))
        assert await impatient.get(instance_id(1)) is None, "reads need no lock"
        waiting = asyncio.create_task(patient.apply(birth(instance())))
        # The loop turns while the write waits.
        with pytest.raises(Unavailable, match="locked"):
            await impatient.beat("i-1", at=NOW, busy=False, listening=False, notice="", version="")
        assert not waiting.done()
    written = await waiting
    assert await impatient.get(instance_id(1)) == written
    await impatient.close()
    await patient.close()


async def test_a_cancelled_write_harms_nothing_and_waiters_hear_of_it(path: Path, store: SqliteInstanceStore) -> None:
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
    # Nobody awaits the write that had begun; it is applied all the same, and seen.
    assert await waiting == replace(record, uses=1)
    assert len(await store.history(record.instance_id)) == 2
    assert (await store.apply(change(record, uses=3))).uses == 3


async def test_a_file_that_was_replaced_is_opened_anew(path: Path, store: SqliteInstanceStore) -> None:
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


async def test_closing_ends_the_waits(path: Path, store: SqliteInstanceStore) -> None:
    await store.prepare()
    waiting = asyncio.create_task(store.wait_for_control("i-1", None, LONG_S))
    await store.wait_for_control("i-2", None, 0.01)
    await store.close()
    with pytest.raises(Unavailable, match="closed"):
        await waiting
    with pytest.raises(Unavailable, match="closed"):
        await store.get("i-1")


@pytest.fixture
def nobodys_folder() -> Iterator[Path]:
    """A folder that a user without privileges may reach; root's rights would hide what is read-only."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@contextmanager
def unprivileged(folder: Path, *, mode: int = 0o700) -> Iterator[None]:
    """As a user who owns the folder, which has this mode."""
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


async def test_a_read_only_file(nobodys_folder: Path) -> None:
    path = nobodys_folder / "remuda.db"
    store = open_store(path)
    await store.prepare()
    await store.close()
    make_read_only(path)
    with unprivileged(nobodys_folder):
        reopened = open_store(path)
        with pytest.raises(UserError, match="is not writable") as error:
            await reopened.apply(birth(instance()))
        assert "writable" in error.value.fix
        await reopened.close()


async def test_a_read_only_folder(nobodys_folder: Path) -> None:
    path = nobodys_folder / "remuda.db"
    store = open_store(path)
    await store.prepare()
    await store.close()
    with unprivileged(nobodys_folder, mode=0o500):
        reopened = open_store(path)
        with pytest.raises(UserError, match="is not writable"):
            await reopened.apply(birth(instance()))
        await reopened.close()
        another = open_store(nobodys_folder / "another.db")
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
def test_codes_that_cannot_be_brought_about(path: Path, code: int, expected: type[Exception]) -> None:
    error = sqlite3.OperationalError("as SQLite says it")
    error.sqlite_errorcode = code
    with pytest.raises(expected), translated(path):
        raise error
