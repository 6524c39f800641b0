"""A full disk: commands say that their work is not done, background processes go on, and the doctor warns before."""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from remuda.adapters.local.layout import LocalDoctor
from remuda.cli import lifecycle
from remuda.cli.output import Output
from remuda.controlplane.doctor import run_checks
from remuda.controlplane.refresh import RefreshResult, refresh
from remuda.controlplane.release import ReleaseResult, release
from remuda.disk import describe_low, full_disk_explained
from remuda.domain.errors import DiskFull, Unavailable
from tests.support.virtual_time import Call, EventRecorder, Hook
from tests.support.world import PoolWorld

READS = ("store.get", "store.find", "store.provisions", "store.unsettled", "store.troubled", "store.recent")


def full_disk() -> Hook:
    """Fails every write to the store. The deletion of old records writes nothing if there are none."""

    async def hook(name: str, call: Call) -> Any:
        if name.startswith("store.") and not name.startswith(
            (*READS, "store.malformed", "store.histor", "store.forget")
        ):
            raise Unavailable("database or disk is full")
        return await call()

    return hook


@dataclass
class ShownOutput:
    """Collects what a command says."""

    said: list[str]

    def say(self, *lines: str, **_style: Any) -> None:
        self.said += lines

    def say_errors(self, errors: tuple[str, ...]) -> None:
        self.said += [f"error: {error}" for error in errors]

    def result(self, _document: Any) -> None:
        pass


async def test_release_does_not_say_that_there_is_no_provision(world: PoolWorld) -> None:
    await world.provision("7")
    process = world.process(full_disk())
    result: ReleaseResult = await release(process, run_id="7", attempt=1)
    assert isinstance(process.event_log, EventRecorder)
    assert not any("no provision" in why for _, why in process.event_log.lines)
    output: Any = ShownOutput([])
    assert lifecycle.show_release(output, result) == 4
    assert any("disk is full" in line for line in output.said)
    assert output.said[-1].startswith("run 7: nothing was released, in ")
    # Only a run without a provision has nothing to release.
    output = ShownOutput([])
    assert lifecycle.show_release(output, await world.release("8")) == 0
    assert output.said[-1].startswith("run 8: nothing to release, in ")


async def test_refresh_that_has_nothing_to_do_still_finds_a_full_disk(world: PoolWorld) -> None:
    await world.sweep()
    await asyncio.sleep(1)
    result: RefreshResult = await refresh(world.process(full_disk(), credentialed=True), None)
    assert result.errors == ("anomalies: database or disk is full",)
    output: Any = ShownOutput([])
    lifecycle._say_refresh(output, result)
    assert output.said[0].startswith("refresh: incomplete, 1 error; no changes (")


class FullFile:
    """A log on a full disk."""

    def __init__(self, number: int) -> None:
        self._number = number

    def isatty(self) -> bool:
        return False

    def write(self, _text: str) -> int:
        raise OSError(self._number, "no")

    def flush(self) -> None:
        pass


def test_background_process_survives_a_log_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output(as_json=False, quiet=False)
    monkeypatch.setattr(sys, "stderr", FullFile(errno.ENOSPC))
    output.log_line("a line")
    monkeypatch.setattr(sys, "stderr", FullFile(errno.EIO))
    with pytest.raises(OSError, match="no"):
        output.log_line("a line")


@dataclass
class Disk:
    total: int
    free: int


def disk_checks(root: Path, free: int) -> Iterator[Any]:
    doctor = LocalDoctor(root=root, runner=root, background={}, disk_usage=lambda _folder: Disk(100 * 2**20, free))
    return (check for check in doctor.checks() if check.name == "disk")


@pytest.mark.parametrize(
    ("free_mib", "status"), [(11, "ok"), (10, "warning"), (5, "warning"), (4, "problem"), (0, "problem")]
)
async def test_doctor_warns_before_the_disk_is_full(tmp_path: Path, free_mib: int, status: str) -> None:
    results = await run_checks(list(disk_checks(tmp_path / "missing", free_mib * 2**20)))
    assert (results["disk"].status.value, str(tmp_path) in results["disk"].message) == (status, True)


@pytest.mark.parametrize(
    ("total_gib", "free_mib", "text"),
    [
        (1_000, 256, ""),
        (1_000, 255, "the disk of /pool is full: only 255 MiB are free"),
        (1, 52, ""),
        (1, 51, "the disk of /pool is full: only 51 MiB are free"),
        (1, 0, "the disk of /pool is full: no space is left"),
    ],
)
def test_large_disks_are_full_by_their_free_bytes_and_small_ones_by_their_share(
    total_gib: int, free_mib: int, text: str
) -> None:
    assert describe_low(Path("/pool"), Disk(total_gib * 2**30, free_mib * 2**20)) == text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_error_of_a_full_disk_names_folder_and_fix(tmp_path: Path, number: int) -> None:
    with pytest.raises(DiskFull) as without_name, full_disk_explained(tmp_path, has_services=True):
        raise ExceptionGroup("two tasks", [ValueError(), OSError(number, "full")])
    assert without_name.value.message.startswith(f"the disk of {tmp_path} is full")
    assert without_name.value.fix == f"free space on the disk of {tmp_path}, and run the command again"
    assert without_name.value.exit_code == 2
    with (
        pytest.raises(DiskFull, match="the disk of /elsewhere is full"),
        full_disk_explained(tmp_path, has_services=True),
    ):
        raise OSError(number, "full", "/elsewhere/file")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "no"), ExceptionGroup("one task", [OSError(errno.EIO, "no")])])
def test_other_errors_are_left_alone(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)), full_disk_explained(tmp_path, has_services=True):
        raise error


def test_service_that_fails_is_no_full_disk_unless_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unavailable, match="500"), full_disk_explained(tmp_path, has_services=True):
        raise Unavailable("the local GitHub answers 500")
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: Disk(100, 0))
    said = "is full.*the local GitHub answers 500"
    with pytest.raises(DiskFull, match=said), full_disk_explained(tmp_path, has_services=True):
        raise Unavailable("the local GitHub answers 500")
    # Services that keep nothing on this disk.
    with (
        pytest.raises(Unavailable, match=r"^AWS cannot be reached$"),
        full_disk_explained(tmp_path, has_services=False),
    ):
        raise Unavailable("AWS cannot be reached")
