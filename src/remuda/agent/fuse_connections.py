"""FUSE connections of sandboxes. Without their end, a process that serves its own requests outlives SIGKILL.

One thread waits for an answer, which the kernel lets no signal interrupt once the request was read. The other threads,
which have been killed, would answer. As long as the first one waits, it keeps the descriptor open whose end would abort
the connection, its memory, and its sockets.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from remuda.agent import mounts

#: Where the kernel shows its connections, and systemd mounts them. Nothing below belongs to a job or waits for one.
_FOLDER = Path("/sys/fs/fuse/connections")


def abort(users: range) -> None:
    """Abort all connections of these user ids. Raises `OSError` if the kernel does not show any."""
    if not _FOLDER.is_dir():
        # A kernel without FUSE.
        return
    if not _FOLDER.is_mount():
        mounts.run("mount", "-t", "fusectl", "fusectl", _FOLDER)
    for connection in _FOLDER.iterdir():
        # It can end at any time.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if connection.stat().st_uid in users:
                (connection / "abort").write_text("1", encoding="ascii")
