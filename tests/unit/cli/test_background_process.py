"""Background processes of the local backend: none runs that no one can find."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from remuda import procfs
from remuda.adapters.local.layout import LocalLayout
from remuda.cli.local_backend import BackgroundProcess
from remuda.fake_github.__main__ import lock_folder

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_process_that_cannot_be_recorded_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = LocalLayout(tmp_path)
    places.logs.mkdir(parents=True)
    process = BackgroundProcess(places, "sweeper")

    def disk_is_full(*_given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", disk_is_full)
    before = {item.pid for item in procfs.descendants(os.getpid())}
    with pytest.raises(OSError, match="No space"):
        process.start(SLEEP)
    assert {item.pid for item in procfs.descendants(os.getpid())} <= before
    assert not process.is_running()


def test_second_local_github_does_not_serve_the_same_folder(tmp_path: Path) -> None:
    descriptor = lock_folder(tmp_path)
    with pytest.raises(SystemExit, match="another local GitHub uses"):
        lock_folder(tmp_path)
    os.close(descriptor)
    os.close(lock_folder(tmp_path))
