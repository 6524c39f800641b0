"""Safe writes and removals in folders that jobs own and may change at the same time.

All functions work relative to the folder's descriptor and never follow links, so a job cannot redirect them to files
outside the folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remuda.agent.job_user import JobUser

#: O_NOFOLLOW: the folder itself must not be a symbolic link.
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Open the folder and yield its descriptor. Jobs must not be able to write to the parent folders."""
    descriptor = os.open(folder, FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def drop(folder: int, name: str) -> None:
    """Remove a file or a link. A folder is an error: root must not empty a folder that a job can change."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return


def put(folder: int, name: str, content: bytes, *, mode: int, owner: JobUser | None = None) -> None:
    """Replace a file or a link by a new file. An existing folder is an error."""
    draft = f".{name}.new"
    drop(folder, draft)
    descriptor = os.open(draft, _NEW, mode, dir_fd=folder)
    with open(descriptor, "wb") as file:  # noqa: PTH123  # a descriptor
        file.write(content)
        os.fchmod(descriptor, mode)
        if owner is not None:
            os.fchown(descriptor, owner.uid, owner.gid)
    os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
