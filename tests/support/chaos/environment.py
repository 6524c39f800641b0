"""Environment of the processes of a chaos run: clocks that can be stepped, and a disk that can be filled."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import site
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

from tests.support.chaos import clock_offset

CLONE_NEWNS = 0x20000
#: Bytes of the blocks that fill the disk; the smaller ones use up what is left.
BLOCKS = (1 << 20, 1 << 12, 1)


class SteppedClocks:
    """An interpreter whose processes have wall clocks that can be stepped one by one.

    It is a virtual environment with the packages of this one and a `sitecustomize`, so the product needs no hook.
    Processes that skip the site packages keep the real time: the supervisors of machines and the fake runners.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True, with_pip=False)
        self.python = folder / "bin" / "python"
        self._offsets = folder / clock_offset.FOLDER
        self._offsets.mkdir()
        (packages,) = folder.glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
        (packages / "outer.pth").write_text("\n".join(lines) + "\n")
        shutil.copyfile(clock_offset.__file__, packages / "sitecustomize.py")

    def step(self, pid: int, seconds: float) -> None:
        draft = self._offsets / f".{pid}"
        draft.write_text(str(seconds))
        # Replaced at once: a process that reads half a file would see another time.
        draft.replace(self._offsets / str(pid))

    def restore(self, pid: int) -> None:
        (self._offsets / str(pid)).unlink(missing_ok=True)


class SmallDisk:
    """A file system of limited size, which can be filled until writes fail with ENOSPC."""

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            for size in BLOCKS:
                block = bytes(size)
                try:
                    while True:
                        file.write(block)
                except OSError as problem:
                    if problem.errno != errno.ENOSPC:
                        raise

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path, size_mb: int, *, spared: Path) -> Iterator[SmallDisk]:
    """Mount a small file system, visible to this process and its children only.

    The subfolder `spared` is on another disk: it belongs to somebody else. Must be called before any thread starts.
    """
    folder.mkdir()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _mount("--make-rprivate", "/")
    _mount("-t", "tmpfs", "-o", f"size={size_mb}m,mode=700", "chaos", folder)
    try:
        other = folder.with_name(f"{folder.name}-{spared.name}")
        for path in (other, spared):
            path.mkdir()
        _mount("--bind", other, spared)
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", folder], check=False)


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)
