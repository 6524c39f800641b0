"""Full disks: which errors they cause, and what to say about them.

The local backend keeps everything in one folder. On AWS only the logs and pages of a command need a disk.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from remuda.domain.errors import DiskFull, Unavailable

#: Error numbers of a full disk and of a user's quota that is used up.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
#: A disk with less free space than this, in bytes and as a share of its size, is about to stop every change.
LOW_BYTES = 256 * 2**20
LOW_SHARE = 0.05


class DiskUsage(Protocol):
    """Size and free space of a disk in bytes."""

    @property
    def total(self) -> int: ...

    @property
    def free(self) -> int: ...


def full_disk(folder: Path, failed: str = "") -> DiskFull:
    """`failed` is what a service said."""
    return DiskFull(
        f"the disk of {folder} is full: no space is left on it, or in your quota{f' ({failed})' if failed else ''}",
        fix=f"free space on the disk of {folder}, and run the command again",
    )


def is_full(folder: Path) -> bool:
    """Whether nothing can be written to the disk of this folder."""
    try:
        return shutil.disk_usage(existing(folder)).free == 0
    except OSError:
        return False


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((item for item in (folder, *folder.parents) if item.is_dir()), folder)


def describe_low(folder: Path, usage: DiskUsage) -> str:
    """Say that the disk is full or almost full, or return an empty string."""
    if usage.free >= min(LOW_BYTES, LOW_SHARE * usage.total):
        return ""
    left = f"only {usage.free / 2**20:,.0f} MiB are free" if usage.free >= 2**20 else "no space is left"
    return f"the disk of {folder} is full: {left}"


@contextmanager
def full_disk_explained(folder: Path, *, has_services: bool) -> Iterator[None]:
    """Raise the errors of a full disk as `DiskFull`: `OSError`, also in a group, and a service that is unavailable.

    `folder` is the one that is written to, unless the error names another. `has_services` says that services keep their
    state there, too: those of the local backend fail if its disk is full, those of AWS do not.
    """
    try:
        yield
    except DiskFull:
        raise
    except Unavailable as error:
        # For example the local GitHub, which keeps its state in the same folder.
        if not has_services or not is_full(folder):
            raise
        raise full_disk(folder, error.message) from error
    except (OSError, BaseExceptionGroup) as error:
        found = _find(error)
        if found is None:
            raise
        named = Path(found.filename).absolute().parent if isinstance(found.filename, str) else folder
        raise full_disk(named) from error


def _find(error: BaseException) -> OSError | None:
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := _find(each)) is not None), None)
    return error if isinstance(error, OSError) and error.errno in FULL else None
