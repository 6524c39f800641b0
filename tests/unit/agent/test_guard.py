"""The guard: when it kills, what it says, and that a kill needs nothing new."""

from __future__ import annotations

import builtins
import os
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from remuda.agent import guard
from remuda.agent.guard import Guard

MIB = 1024**2
#: As on a machine with 2 GiB, from Linux 6.1. The lines have this order.
MEMINFO = """\
MemTotal:        2000000 kB
MemFree:          100000 kB
MemAvailable:    {available} kB
Buffers:           10000 kB
SReclaimable:      50000 kB
SUnreclaim:      {slab} kB
VmallocTotal:   34359738367 kB
VmallocUsed:     {vmalloc} kB
VmallocChunk:          0 kB
Percpu:             1000 kB
HugePages_Total:       0
"""


@dataclass
class FakeDisk:
    """File system with blocks of 4 KiB."""

    mib: int = 10_000
    files: int = 1_000_000
    free_files: int = 500_000

    @property
    def status(self) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=self.mib * 256, f_frsize=4096, f_files=self.files, f_favail=self.free_files)


class Guarded:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        for name in ("cgroup", "storage", "log"):
            (folder / name).mkdir()
        self.kills = folder / "cgroup" / "cgroup.kill"
        self.kills.touch()
        self.spaces = {"storage": FakeDisk(), "log": FakeDisk(mib=30)}
        self.set_sandbox()
        self.set_memory()
        self.page = guard.open_page(str(folder / "page"))
        monkeypatch.setattr(os, "fstatvfs", self._status)
        self.guard = Guard(
            cgroup=str(folder / "cgroup"),
            storage=str(folder / "storage"),
            log=str(folder / "log"),
            page=self.page,
            memory=64 * MIB,
            kernel=500 * MIB,
            disk=512 * MIB,
            files=20_000,
            log_space=MIB,
            meminfo=str(folder / "meminfo"),
        )
        self.set_number(guard.USED, 1)

    def _status(self, descriptor: int) -> SimpleNamespace:
        return self.spaces[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name].status  # noqa: PTH115  # of a link

    def set_sandbox(self, *, exists: bool = True) -> None:
        (self._folder / "cgroup" / "cgroup.events").write_text(f"populated {exists:d}\nfrozen 0\n")

    def set_memory(self, available: int = 1_000_000, slab: int = 60_000, vmalloc: int = 20_000) -> None:
        text = MEMINFO.format(available=available, slab=slab, vmalloc=vmalloc)
        (self._folder / "meminfo").write_text(text)

    def number(self, offset: int) -> int:
        return int(guard.NUMBER.unpack_from(self.page, offset)[0])

    def set_number(self, offset: int, value: int) -> None:
        guard.NUMBER.pack_into(self.page, offset, value)

    def reason(self) -> tuple[str, int] | None:
        """Check. Return the reason and the amount of a new kill."""
        is_new, _ = self.guard.check()
        return (guard.REASONS[self.number(guard.REASON)][0], self.number(guard.AMOUNT)) if is_new else None


@pytest.fixture
def fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    made = Guarded(tmp_path, monkeypatch)
    yield made
    made.page.close()


def test_a_machine_with_enough_of_everything_is_left_alone(fixture: Guarded) -> None:
    assert fixture.reason() is None
    assert (fixture.kills.read_text(), fixture.number(guard.KILLS)) == ("", 0)


@pytest.mark.parametrize(
    ("memory", "amount"),
    [
        ({"available": 65_535}, 65_535),
        # Memory of the kernel: queues of network interfaces, neighbours.
        ({"vmalloc": 20_000 + 500 * 1024 + 1}, 81_000 + 500 * 1024 + 1),
        ({"slab": 60_000 + 500 * 1024 + 1}, 81_000 + 500 * 1024 + 1),
    ],
)
def test_kills_for_memory(fixture: Guarded, memory: dict[str, int], amount: int) -> None:
    fixture.set_memory(**memory)
    assert fixture.reason() == ("memory-low", amount)
    assert fixture.kills.read_text() == "1"


@pytest.mark.parametrize(
    ("name", "space", "reason"),
    [
        ("storage", FakeDisk(mib=511), ("disk-full", 511 * 1024)),
        ("storage", FakeDisk(free_files=19_999), ("disk-full", 10_000 * 1024)),
        ("log", FakeDisk(mib=0), ("log-full", 0)),
    ],
)
def test_kills_for_space_that_jobs_have_used(
    fixture: Guarded, name: str, space: FakeDisk, reason: tuple[str, int]
) -> None:
    fixture.spaces[name] = space
    fixture.set_number(guard.USED, 0)
    assert fixture.reason() is None
    fixture.set_number(guard.USED, 1)
    assert fixture.reason() == reason


def test_file_system_that_does_not_count_files_has_enough(fixture: Guarded) -> None:
    fixture.spaces["storage"] = FakeDisk(files=0, free_files=0)
    assert fixture.reason() is None


def test_unused_sandbox_is_killed_for_memory(fixture: Guarded) -> None:
    fixture.set_number(guard.USED, 0)
    fixture.set_memory(available=1)
    assert fixture.reason() == ("memory-low", 1)


def test_kill_is_repeated_until_nothing_is_left_and_counts_once(fixture: Guarded) -> None:
    fixture.set_memory(available=1)
    fixture.guard.check()
    fixture.guard.check()
    assert (fixture.kills.read_text(), fixture.number(guard.KILLS)) == ("11", 1)
    fixture.set_sandbox(exists=False)
    fixture.guard.check()
    assert (fixture.kills.read_text(), fixture.number(guard.KILLS)) == ("11", 1)
    fixture.set_sandbox()
    fixture.guard.check()
    assert (fixture.kills.read_text(), fixture.number(guard.KILLS)) == ("111", 2)


def test_looks_more_often_the_less_is_left(fixture: Guarded) -> None:
    pauses = []
    for available in (64_000_000, 1_000_000, 500_000, 66_000, 1):
        fixture.set_memory(available=available)
        pauses.append(fixture.guard.check()[1])
    assert (pauses[0], pauses[-1]) == (guard.MAX_PAUSE_S, guard.MIN_PAUSE_S)
    assert pauses == sorted(pauses, reverse=True)
    # A job must not use up all that is left before the next look.
    fixture.set_memory(available=65_536 + 200_000)
    assert fixture.guard.check()[1] * guard.FILL_RATE <= 200_000


def test_opens_nothing_and_takes_no_new_memory(fixture: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("opened")

    fixture.set_memory(available=1)
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(builtins, "open", refuse)
    assert fixture.reason() == ("memory-low", 1)
    monkeypatch.undo()
    monkeypatch.setattr(os, "fstatvfs", lambda _: FakeDisk().status)
    fixture.guard.check()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(100):
            fixture.guard.check()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # Of tracemalloc and of the replaced call.
    assert grown < 4096
