"""The SQLite store: problems with its file, waiting for changes of the file, and a model of all changes."""

# Blocking calls on local files are acceptable in these tests.
# ruff: noqa: ASYNC240

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remuda.adapters.sqlite import tables
from remuda.adapters.sqlite.connection import FIRST_INTERVAL_S, LAST_INTERVAL_S, REPORTED_INTERVAL_S
from remuda.adapters.sqlite.pool import SqliteResourcePool
from remuda.adapters.sqlite.schema import VERSION, translated
from remuda.adapters.sqlite.store import SqliteInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.errors import Conflict, DiskFull, Unavailable, UserError
from remuda.domain.instance import Instance, RetireReason, State
from remuda.domain.resources import Tier
from remuda.domain.transitions import Change, WriteCondition
from remuda.ports.calls import CallCounter
from remuda.ports.store import InstanceStore
from tests.conformance.conftest import STORES, SqliteStores, Stores
from tests.support.records import LONG_S, NOW, SHORT_S, assignment, at, birth, change, instance, instance_id, message
from tests.support.virtual_time import AdjustableClock

NOBODY = 65_534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "remuda.db"


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[SqliteStores]:
    stores = SqliteStores(tmp_path)
    yield stores
    await stores.close()


@pytest.fixture
def store(stores: SqliteStores) -> Any:
    """A store whose file does not exist yet."""
    return stores.open()


def open_pool(path: Path, clock: SystemClock | None = None) -> SqliteResourcePool:
    return SqliteResourcePool(path=path, clock=clock or SystemClock(), ids=SystemIds(), calls=CallCounter())


# Problems with the file -----------------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    """Overwrite all pages but the first."""
    whole = path.read_bytes()
    path.write_bytes(whole[:4_096] + b"\xa5" * (len(whole) - 4_096))


def execute(path: Path, statement: str) -> None:
    """Execute a statement through another connection."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(statement)
    connection.close()


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


async def test_created_file_is_private_and_the_only_one(tmp_path: Path, stores: SqliteStores) -> None:
    path = tmp_path / "new folder" / "a?b#c%20.db"
    opened = [stores.open(path=path) for _ in range(4)]
    created = await asyncio.gather(*(store.prepare() for store in opened))
    assert sum(len(each) for each in created) == 1
    await opened[0].apply(birth(instance()))
    assert {each.name: each.stat().st_mode & 0o777 for each in path.parent.iterdir()} == {
        path.name + suffix: 0o600 for suffix in ("", "-wal", "-shm")
    }
    await stores.close()
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
    path.write_bytes(garbage)
    error = await error_of(store)
    assert str(path) in error.message
    assert "move" in error.fix
    with pytest.raises(UserError):
        await store.prepare()
    assert path.read_bytes() == garbage


async def test_damaged_database(path: Path, store: SqliteInstanceStore, stores: SqliteStores) -> None:
    await store.prepare()
    for number in range(200):
        await store.apply(birth(instance(number)))
    await store.close()
    damage(path)
    damaged = stores.open()
    with pytest.raises(UserError, match="is damaged or not a SQLite database") as error:
        await damaged.find(list(State))
    assert "move remuda.db" in error.value.fix


async def test_empty_or_foreign_database(path: Path, store: SqliteInstanceStore) -> None:
    path.touch()
    assert "not a Remuda store" in (await error_of(store)).message
    execute(path, "CREATE TABLE accounts (name)")
    assert "not a Remuda store" in (await error_of(store)).message
    with pytest.raises(UserError, match="not a Remuda store"):
        await store.prepare()


async def test_newer_schema_version(path: Path, store: SqliteInstanceStore, stores: SqliteStores) -> None:
    await store.prepare()
    execute(path, f"PRAGMA user_version = {VERSION + 1}")
    newer = stores.open()
    error = await error_of(newer)
    assert f"schema {VERSION + 1}" in error.message
    assert "upgrade" in error.fix
    with pytest.raises(UserError, match="newer Remuda"):
        await newer.prepare()


async def test_older_schema_version(path: Path, store: SqliteInstanceStore, stores: SqliteStores) -> None:
    await store.prepare()
    execute(path, f"PRAGMA user_version = {VERSION - 1}")
    error = await error_of(stores.open())
    assert (
        error.message == f"{path} has schema {VERSION - 1} of an older Remuda; this version supports schema {VERSION}"
    )
    assert "move remuda.db and its -wal and -shm files away" in error.fix


async def test_folder_in_place_of_the_file(path: Path, store: SqliteInstanceStore) -> None:
    path.mkdir()
    assert "folder" in (await error_of(store)).message
    with pytest.raises(UserError, match="folder"):
        await store.prepare()


async def test_file_in_place_of_the_folder(tmp_path: Path, stores: SqliteStores) -> None:
    (tmp_path / "state").touch()
    store = stores.open(path=tmp_path / "state" / "remuda.db")
    with pytest.raises(UserError, match="cannot create a store"):
        await store.prepare()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("ROLLBACK")
    connection.close()


async def test_write_waits_for_the_lock_up_to_the_timeout(path: Path, stores: SqliteStores) -> None:
    impatient = stores.open(busy_timeout_s=0.05)
    patient = stores.open(busy_timeout_s=LONG_S)
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


async def test_replaced_file_is_reopened(path: Path, store: SqliteInstanceStore, stores: SqliteStores) -> None:
    await store.prepare()
    await store.apply(birth(instance(1)))
    for each in path.parent.iterdir():
        each.unlink()
    with pytest.raises(UserError, match="no store at"):
        await store.get(instance_id(1))
    other = stores.open()
    await other.prepare()
    written = await other.apply(birth(instance(2)))
    assert await store.get(instance_id(1)) is None
    assert await store.wait_for_control(instance_id(2), None, LONG_S) == written


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
async def unprivileged_folder(stores: SqliteStores) -> AsyncIterator[Path]:
    """A folder with a store that an unprivileged user can access. Root ignores read-only permissions."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        store = stores.open(path=Path(name) / "remuda.db")
        await store.prepare()
        await store.close()
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


async def test_read_only_file(unprivileged_folder: Path, stores: SqliteStores) -> None:
    path = unprivileged_folder / "remuda.db"
    path.chmod(0o400)
    with unprivileged(unprivileged_folder):
        reopened = stores.open(path=path)
        with pytest.raises(UserError, match="is not writable") as error:
            await reopened.apply(birth(instance()))
        assert "writable" in error.value.fix


async def test_read_only_folder(unprivileged_folder: Path, stores: SqliteStores) -> None:
    with unprivileged(unprivileged_folder, mode=0o500):
        reopened = stores.open(path=unprivileged_folder / "remuda.db")
        with pytest.raises(UserError, match="is not writable"):
            await reopened.apply(birth(instance()))
        another = stores.open(path=unprivileged_folder / "another.db")
        with pytest.raises(UserError, match="is not writable"):
            await another.prepare()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (sqlite3.SQLITE_FULL, DiskFull),
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


async def test_file_that_cannot_be_opened(unprivileged_folder: Path) -> None:
    """SQLite reports the same code for missing permissions and for a lack of file handles, which is temporary."""
    path = unprivileged_folder / "remuda.db"
    error = sqlite3.OperationalError("unable to open database file")
    error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
    with pytest.raises(Unavailable, match="temporarily unusable"), translated(path):
        raise error
    with (
        unprivileged(unprivileged_folder, mode=0o500),
        pytest.raises(UserError, match="is not writable"),
        translated(path),
    ):
        raise error


# Clocks ---------------------------------------------------------------------------------------------------------------


async def test_message_of_a_process_with_a_fast_clock_is_visible_at_once(path: Path) -> None:
    clock = AdjustableClock()
    clock.ahead_s = 400.0
    fast, other = open_pool(path, clock), open_pool(path)
    await fast.prepare(["large"])
    await fast.send([message()])
    for pool in (other, fast, other):
        (delivery,) = await pool.receive("large", visibility_s=30)
        await pool.make_visible("large", [delivery.receipt])
    await fast.close()
    await other.close()


# Waiting: one poller, which runs only with waiters and reads only possible changes ------------------------------------


class ManualClock(SystemClock):
    """The test ends each sleep, and can wait for the start of the next one."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._sleeping: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

    async def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeping.put_nowait(over)
        await over

    async def next_sleep(self) -> asyncio.Future[None]:
        """Wait for the start of the next sleep and return it."""
        while True:
            over = await self._sleeping.get()
            if not over.done():
                return over

    async def end_sleep(self) -> None:
        """End the current sleep."""
        (await self.next_sleep()).set_result(None)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def polling(stores: SqliteStores, clock: ManualClock, calls: CallCounter) -> SqliteInstanceStore:
    """A store whose sleeps the test ends."""
    store: SqliteInstanceStore = stores.open(clock=clock, calls=calls)
    await store.prepare()
    return store


@pytest.fixture
def unreported(path: Path) -> None:
    """Prevent reports of changes: a file takes the place of their folder."""
    path.with_name("remuda.db-changes").touch()


def polls(calls: CallCounter) -> int:
    return calls.by_service()["store"].get("poll", 0)


#: Writes a heartbeat and a signal of the instance in its second argument to the store in its first one.
BEAT = """
import asyncio, sys
from pathlib import Path
from remuda.adapters.sqlite.store import SqliteInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.ports.calls import CallCounter

async def main(path, instance_id):
    clock = SystemClock()
    store = SqliteInstanceStore(path=Path(path), clock=clock, ids=SystemIds(), calls=CallCounter())
    await store.beat(instance_id, at=clock.now(), busy=False, listening=True, notice="", version="other process")
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_write_of_another_process_is_seen_without_a_sleep(
    path: Path, polling: SqliteInstanceStore, clock: ManualClock
) -> None:
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(polling.wait_for_report("i-1", None, 2 * LONG_S))
        asleep = await clock.next_sleep()
        other = await asyncio.create_subprocess_exec(sys.executable, "-c", BEAT, path, "i-1")
        assert await other.wait() == 0
        report = await waiting
        assert report is not None
        assert report.version == "other process"
        assert asleep.cancelled()


async def test_only_writes_of_the_awaited_record_wake_a_waiter(
    polling: SqliteInstanceStore, store: SqliteInstanceStore, clock: ManualClock, calls: CallCounter
) -> None:
    record = await polling.apply(birth(instance()))
    await store.apply(birth(instance(2)))
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(polling.wait_for_control(record.instance_id, record, 2 * LONG_S))
        asleep = await clock.next_sleep()
        for number in range(1, 5):
            await store.beat(instance_id(number), at=NOW, busy=False, listening=True, notice="", version="1")
        await store.apply(change(instance(2), uses=1))
        with pytest.raises(Conflict):
            await store.apply(change(record, WriteCondition(state=State.TERMINATED, epoch=1)))
        assert not asleep.done()
        assert polls(calls) == 1
        written = await store.apply(change(record, uses=1))
        assert await waiting == written
    assert polls(calls) == 2


async def test_unreported_change_is_found_by_the_next_poll(
    path: Path, polling: SqliteInstanceStore, clock: ManualClock
) -> None:
    record = await polling.apply(birth(instance()))
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(polling.wait_for_control(record.instance_id, record, 2 * LONG_S))
        await clock.end_sleep()
        asleep = await clock.next_sleep()
        execute(path, "DELETE FROM instances")
        asleep.set_result(None)
        assert await waiting is None
    assert all(REPORTED_INTERVAL_S / 2 <= each <= REPORTED_INTERVAL_S for each in clock.asked)


async def test_message_that_becomes_visible_is_received_without_a_sleep(path: Path, clock: ManualClock) -> None:
    pool, other = open_pool(path, clock), open_pool(path)
    await pool.prepare(["large"])
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(pool.receive("large", visibility_s=SHORT_S, wait_s=2 * LONG_S))
        await clock.next_sleep()
        await other.send([message()], delay_s=SHORT_S)
        assert len(await waiting) == 1, "sent during the wait with a delay"
        assert len(await pool.receive("large", visibility_s=30, wait_s=2 * LONG_S)) == 1, "hidden before the wait"
    await pool.close()
    await other.close()


async def test_write_of_this_process_is_seen_without_a_sleep(polling: SqliteInstanceStore, clock: ManualClock) -> None:
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(polling.wait_for_control(instance_id(1), None, 2 * LONG_S))
        asleep = await clock.next_sleep()
        written = await polling.apply(birth(instance()))
        assert await waiting == written
        assert asleep.cancelled()


async def test_message_of_this_process_is_received_without_a_sleep(path: Path, clock: ManualClock) -> None:
    pool = open_pool(path, clock)
    await pool.prepare(["large"])
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(pool.receive("large", visibility_s=30, wait_s=2 * LONG_S))
        await clock.next_sleep()
        await pool.send([message()])
        assert len(await waiting) == 1
    await pool.close()


async def test_close_ends_the_wait_for_a_message(path: Path, clock: ManualClock) -> None:
    pool = open_pool(path, clock)
    await pool.prepare(["large"])
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(pool.receive("large", visibility_s=30, wait_s=2 * LONG_S))
        await clock.next_sleep()
        await pool.close()
        with pytest.raises(Unavailable, match="closed"):
            await waiting


async def test_replacement_of_the_file_is_seen_by_a_wait(
    path: Path, stores: SqliteStores, polling: SqliteInstanceStore, clock: ManualClock
) -> None:
    other = stores.open(path=path.with_name("other.db"))
    await other.prepare()
    written = await other.apply(birth(instance()))
    await other.close()
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(polling.wait_for_control(written.instance_id, None, 2 * LONG_S))
        asleep = await clock.next_sleep()
        path.with_name("other.db").replace(path)
        asleep.set_result(None)
        assert await waiting == written


@pytest.mark.usefixtures("unreported")
async def test_documents_are_read_again_only_after_a_commit(
    polling: SqliteInstanceStore, store: SqliteInstanceStore, clock: ManualClock, calls: CallCounter
) -> None:
    record = await polling.apply(birth(instance()))
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(polling.wait_for_control(record.instance_id, record, 2 * LONG_S))
        for _ in range(12):
            await clock.end_sleep()
        asleep = await clock.next_sleep()
        assert polls(calls) == 1
        await store.apply(birth(instance(2)))
        asleep.set_result(None)
        asleep = await clock.next_sleep()
        assert polls(calls) == 2
        written = await store.apply(change(record, uses=1))
        asleep.set_result(None)
        assert await waiting == written
        assert polls(calls) == 3


@pytest.mark.usefixtures("unreported")
async def test_commit_between_the_reads_of_a_poll_is_seen_by_the_next_one(
    polling: SqliteInstanceStore, store: SqliteInstanceStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await polling.apply(birth(instance()))
    loop = asyncio.get_running_loop()
    read = tables.by_keys
    written: list[Instance] = []

    def read_then_commit(*arguments: Any) -> Any:
        found = read(*arguments)
        if not written:
            writing = asyncio.run_coroutine_threadsafe(store.apply(change(record, uses=1)), loop)
            written.append(writing.result(LONG_S))
        return found

    monkeypatch.setattr(polling._poller, "_read_values", read_then_commit)
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(polling.wait_for_control(record.instance_id, record, 2 * LONG_S))
        await clock.end_sleep()
        asleep = asyncio.create_task(clock.next_sleep())
        await asyncio.wait({waiting, asleep}, return_when=asyncio.FIRST_COMPLETED)
        assert not asleep.done(), "the second poll has not seen the commit"
        assert [await waiting] == written
        asleep.cancel()


@pytest.mark.usefixtures("unreported")
async def test_polling_interval_grows_within_bounds(polling: SqliteInstanceStore, clock: ManualClock) -> None:
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(polling.wait_for_control("i-1", None, 2 * LONG_S))
        for _ in range(20):
            await clock.end_sleep()
        await clock.next_sleep()
        waiting.cancel()
        await asyncio.wait({waiting})
    assert FIRST_INTERVAL_S / 2 <= clock.asked[0] <= FIRST_INTERVAL_S
    assert all(LAST_INTERVAL_S / 2 <= each <= LAST_INTERVAL_S for each in clock.asked[10:])


async def test_finished_wait_does_not_shorten_the_polling_interval(
    polling: SqliteInstanceStore, clock: ManualClock
) -> None:
    async with asyncio.timeout(LONG_S):
        waiting = asyncio.create_task(polling.wait_for_control(instance_id(1), None, 2 * LONG_S))
        await clock.next_sleep()
        await polling.apply(birth(instance()))
        await waiting
        clock.asked.clear()
        waiting = asyncio.create_task(polling.wait_for_control("i-1", None, 2 * LONG_S))
        await clock.next_sleep()
        waiting.cancel()
        await asyncio.wait({waiting})
    assert [each >= REPORTED_INTERVAL_S / 2 for each in clock.asked] == [True]


async def test_waiters_share_one_poller_which_ends_with_them(
    polling: SqliteInstanceStore, clock: ManualClock, calls: CallCounter
) -> None:
    before = asyncio.all_tasks()
    async with asyncio.timeout(LONG_S):
        waits = [
            asyncio.create_task(polling.wait_for_control(instance_id(number), None, 2 * LONG_S)) for number in range(30)
        ]
        asleep = await clock.next_sleep()
        tasks = asyncio.all_tasks() - before - set(waits)
        assert len(tasks) == 2, "the poller and its nap"
        assert polls(calls) <= 2, "they are read together"
        for wait in waits:
            wait.cancel()
        await asyncio.wait({*waits, *tasks})
        assert asleep.cancelled()


async def test_error_ends_all_waits(polling: SqliteInstanceStore, clock: ManualClock, path: Path) -> None:
    async with asyncio.timeout(LONG_S):
        waits = [asyncio.create_task(polling.wait_for_control("i-1", None, 2 * LONG_S)) for _ in range(3)]
        asleep = await clock.next_sleep()
        path.unlink()
        asleep.set_result(None)
        for outcome in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(outcome, UserError)
    await polling.prepare()
    assert await polling.wait_for_control("i-1", None, 0) is None


# Model: after any sequence of changes, the records are those of `Change.applied_to`. Also for the memory store --------

PROCESSES = 3
INSTANCES = 2

# Few values per field, so that guards hold about as often as they fail.
STATES = st.sampled_from([State.IDLE, State.CLAIMED])
EPOCHS = st.sampled_from([1, 2])
CLAIMS = st.sampled_from(["", "a"])
TIMES = st.sampled_from([at(1), at(2), at(2.0005)])
TIERS = st.sampled_from(list(Tier))
REPOSITORIES = st.sampled_from(["", "octo/one"])
SETS = st.fixed_dictionaries(
    {},
    optional={
        "state": STATES,
        "epoch": EPOCHS,
        "claim": CLAIMS,
        "threshold": TIMES,
        "tier": TIERS,
        "repository": REPOSITORIES,
        "retire_reason": st.none() | st.sampled_from(RetireReason),
        "retire_detail": st.text(max_size=5),
        "quarantined_until": st.sampled_from([None, at(1), at(2)]),
        "assignment": st.sampled_from([None, assignment()]),
        "uses": st.integers(0, 9),
    },
)
GUARDS = st.builds(
    WriteCondition,
    state=STATES,
    epoch=EPOCHS,
    claim=st.none() | CLAIMS,
    threshold_after=st.none() | TIMES,
    threshold_at_or_before=st.none() | TIMES,
    not_retired=st.booleans(),
    max_quarantined_until=st.none() | TIMES,
    tiers=st.lists(TIERS, max_size=2).map(tuple),
    repository=st.none() | REPOSITORIES,
)


@dataclass(frozen=True, kw_only=True)
class StoreStep:
    number: int
    process: int
    creates: bool
    guard: WriteCondition
    sets: dict[str, Any]

    def change(self, name: str) -> Change:
        record = instance(self.number, **self.sets)
        made = birth(record) if self.creates else change(record, self.guard, **self.sets)
        return replace(made, entry=replace(made.entry, transition=name))


STEPS = st.lists(
    st.builds(
        StoreStep,
        number=st.integers(1, INSTANCES),
        process=st.integers(0, PROCESSES - 1),
        # One in four steps: most steps should find an existing record.
        creates=st.integers(0, 3).map(lambda number: number == 0),
        guard=GUARDS,
        sets=SETS,
    ),
    max_size=25,
).map(lambda steps: [replace(step, creates=True) if index < INSTANCES else step for index, step in enumerate(steps)])


def model(stored: Instance | None, step: Change) -> Instance | None:
    """Return the record after the step, or None if the step is rejected."""
    if not step.condition.is_met_by(stored):
        return None
    after = step.applied_to(stored)
    # The stores keep milliseconds.
    return replace(after, threshold=after.threshold.replace(microsecond=after.threshold.microsecond // 1000 * 1000))


async def attempt(store: InstanceStore, step: Change) -> tuple[bool, Instance | None]:
    """Apply the change. Return whether it was admitted, and the current record."""
    try:
        return True, await store.apply(step)
    except Conflict as conflict:
        return False, conflict.current


async def apply_sequentially(stores: Stores, steps: list[StoreStep]) -> None:
    processes = [stores.open() for _ in range(PROCESSES)]
    await processes[0].prepare()
    expected: dict[str, Instance] = {}
    names: dict[str, list[str]] = {}
    for index, step in enumerate(steps):
        wanted = step.change(f"step-{index}")
        before = expected.get(wanted.instance_id)
        after = model(before, wanted)
        assert await attempt(processes[step.process], wanted) == (after is not None, after or before)
        if after is not None:
            expected[wanted.instance_id] = after
            names.setdefault(wanted.instance_id, []).append(wanted.entry.transition)
    ids = [instance_id(number) for number in range(1, INSTANCES + 1)]
    assert await processes[-1].get_many(ids) == expected
    for each in ids:
        assert [entry.transition for entry in await processes[0].history(each)] == names.get(each, [])
    await stores.close()


async def apply_concurrently(stores: Stores, steps: list[StoreStep]) -> None:
    processes = [stores.open() for _ in range(PROCESSES)]
    await processes[0].prepare()
    changes = {f"step-{index}": step.change(f"step-{index}") for index, step in enumerate(steps)}
    outcomes = await asyncio.gather(
        *(attempt(processes[step.process], wanted) for step, wanted in zip(steps, changes.values(), strict=True))
    )
    # The history shows the order in which the changes were applied. The model must agree in that order.
    answers = dict(zip(changes, outcomes, strict=True))
    admitted = set()
    for number in range(1, INSTANCES + 1):
        record: Instance | None = None
        for entry in await processes[0].history(instance_id(number)):
            record = model(record, changes[entry.transition])
            assert record is not None
            assert answers[entry.transition] == (True, record)
            admitted.add(entry.transition)
        assert await processes[-1].get(instance_id(number)) == record
    assert admitted == {name for name, (applied, _) in answers.items() if applied}
    # A rejected change does not match the record that the conflict returned.
    for name, (applied, shown) in answers.items():
        assert applied or not changes[name].condition.is_met_by(shown)
    await stores.close()


@pytest.mark.parametrize("adapter", list(STORES))
@settings(max_examples=50, deadline=None)
@given(steps=STEPS)
def test_sequential_changes_match_the_model(adapter: str, steps: list[StoreStep]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(apply_sequentially(STORES[adapter](Path(folder)), steps))


@pytest.mark.parametrize("adapter", list(STORES))
@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
def test_concurrent_changes_match_the_model_in_some_order(adapter: str, steps: list[StoreStep]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(apply_concurrently(STORES[adapter](Path(folder)), steps))
