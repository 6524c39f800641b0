"""Reports of changes of files."""

# Blocking calls on local files are acceptable in these tests.
# ruff: noqa: ASYNC240

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from remuda import inotify
from tests.support.records import LONG_S, SHORT_S

MAX_QUEUED = Path("/proc/sys/fs/inotify/max_queued_events")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.touch()
    return path


async def arrives(event: asyncio.Event, within_s: float = LONG_S) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


async def test_changes_are_reported_until_the_end_of_the_watch(file: Path) -> None:
    changed = asyncio.Event()
    with inotify.watch(file, changed.set) as reported:
        assert reported
        os.utime(file)
        assert await arrives(changed)
        with file.open("a") as log:
            log.write("a line\n")
        assert await arrives(changed)
        os.truncate(file, 0)
        assert await arrives(changed)
        file.read_bytes()
        assert not await arrives(changed, SHORT_S), "a read is no change"
    os.utime(file)
    assert not await arrives(changed, SHORT_S)


async def test_watches_of_the_same_file_are_independent(file: Path) -> None:
    first, second = asyncio.Event(), asyncio.Event()
    with inotify.watch(file, first.set):
        with inotify.watch(file, second.set):
            os.utime(file)
            assert await arrives(first)
            assert await arrives(second)
        os.utime(file)
        assert await arrives(first)
        assert not second.is_set()


async def test_only_changes_of_the_watched_file_are_reported(file: Path) -> None:
    other = file.with_name("other")
    other.touch()
    first, second = asyncio.Event(), asyncio.Event()
    with inotify.watch(file, first.set), inotify.watch(other, second.set):
        os.utime(other)
        assert await arrives(second)
        assert not first.is_set()


async def test_file_that_is_deleted_during_the_watch(file: Path) -> None:
    changed = asyncio.Event()
    with inotify.watch(file, changed.set):
        file.unlink()
        assert await arrives(changed)
    file.touch()
    with inotify.watch(file, changed.set):
        os.utime(file)
        assert await arrives(changed)


async def test_missing_file_cannot_be_watched(file: Path) -> None:
    with inotify.watch(file.with_name("missing"), lambda: None) as reported:
        assert not reported


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_reached_limit_means_no_reports_and_is_not_remembered(file: Path) -> None:
    with no_descriptors_left(), inotify.watch(file, lambda: None) as reported:
        assert not reported
    with inotify.watch(file, lambda: None) as reported:
        assert reported


async def test_all_watches_are_called_if_events_were_lost(file: Path) -> None:
    others = [file.with_name(name) for name in ("one", "two")]
    changed = asyncio.Event()
    for other in others:
        other.touch()
    with ExitStack() as watches:
        for other in others:
            watches.enter_context(inotify.watch(other, lambda: None))
        watches.enter_context(inotify.watch(file, changed.set))
        # Alternating, because the kernel merges equal consecutive events.
        for number in range(int(MAX_QUEUED.read_text())):
            os.utime(others[number % 2])
        os.utime(file)
        assert await arrives(changed)


def test_descriptor_is_closed_with_the_loop(file: Path) -> None:
    async def watch_once() -> None:
        with inotify.watch(file, lambda: None) as reported:
            assert reported

    def open_descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    asyncio.run(watch_once())
    before = open_descriptors()
    for _ in range(5):
        asyncio.run(watch_once())
    assert open_descriptors() <= before
