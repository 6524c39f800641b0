"""Files of the agent's in a folder that jobs own, while their processes may still change it.

All goes by the folder's descriptor, and nothing but a name is ever removed: whatever a job puts there, no link is
followed and nothing elsewhere is touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from remuda.agent.job_user import JobUser

#: Never through a link in the folder's own place.
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Its descriptor. The folders above must not be the jobs'."""
    descriptor = os.open(folder, FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def drop(folder: int, name: str) -> None:
    """Remove a file or a link. A folder is an error: emptying one that changes meanwhile is not for root."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return


def put(folder: int, name: str, content: bytes, *, mode: int, owner: JobUser | None = None) -> None:
    """A new file in the place of whatever was there, but for a folder: that is an error."""
    draft = f".{name}.new"
    drop(folder, draft)
    descriptor = os.open(draft, _NEW, mode, dir_fd=folder)
    with open(descriptor, "wb") as file:  # noqa: PTH123  # a descriptor
        file.write(content)
        os.fchmod(descriptor, mode)
        if owner is not None:
            os.fchown(descriptor, owner.uid, owner.gid)
    os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
