"""Space on disks, in bytes and in files (inodes), of which a file system has a limited number; deletion of folders."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from remuda.agent import mounts

#: Files that jobs must leave free on a disk, for the agent and the next sandbox.
FILE_RESERVE = 10_000
#: Files that can still be created on a disk without a limit of them.
UNLIMITED = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    bytes: int
    files: int

    def __add__(self, other: Space) -> Space:
        return Space(bytes=self.bytes + other.bytes, files=self.files + other.files)

    def __sub__(self, other: Space) -> Space:
        return Space(bytes=self.bytes - other.bytes, files=self.files - other.files)

    def covers(self, other: Space) -> bool:
        """Whether this is at least as much as the other, in both respects."""
        return self.bytes >= other.bytes and self.files >= other.files


NONE = Space(bytes=0, files=0)


def free_space(folder: Path) -> Space:
    """Return what is free on the disk of a folder for other users than root."""
    status = os.statvfs(folder)
    return Space(bytes=status.f_bavail * status.f_frsize, files=status.f_favail if status.f_files else UNLIMITED)


def delete(folders: Sequence[Path]) -> None:
    # Not rmtree, which fails for folders that a job has nested too deeply.
    mounts.run("rm", "-rf", "--", *folders)


def start_deletion(folders: Sequence[Path]) -> None:
    """Delete folders in the background."""
    start_idle(["rm", "-rf", "--", *map(str, folders)])


def start_idle(command: Sequence[str]) -> None:
    """Start a command that yields disk and processor to all others, and outlives this process."""
    priority = ("ionice", "-c", "3", "nice") if shutil.which("ionice") else ("nice",)
    subprocess.run(
        ["setsid", "--fork", *priority, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
