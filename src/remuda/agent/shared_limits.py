"""Limits of the kernel that sandboxes share with the machine, raised so far that jobs reach the limit of memory first.

What a sandbox creates counts for root of the machine as well, who has created its user namespace: inotify and
namespaces. The neighbours of all network namespaces count together. With the limits of the kernel, a job needs a second
until the machine reaches no further host of its subnet, and cannot watch files.
"""

from __future__ import annotations

from pathlib import Path

_SYS = Path("/proc/sys")
#: Not network namespaces: a reset waits until the kernel has removed all of them, some thousand per second.
_KINDS = ("cgroup", "ipc", "mnt", "pid", "time", "user", "uts")
LIMITS = (
    *(f"user/max_{kind}_namespaces" for kind in _KINDS),
    *("fs/inotify/max_user_instances", "fs/inotify/max_user_watches"),
    # From gc_thresh2 on, the kernel removes neighbours that others need; from gc_thresh1 on, those that no one does.
    *(f"net/{family}/neigh/default/gc_thresh{number}" for family in ("ipv4", "ipv6") for number in (2, 3)),
)
#: The highest value of all of them.
_UNLIMITED = str(2**31 - 1)


def raise_all() -> None:
    for path in (_SYS / name for name in LIMITS):
        # Not each kernel has all of them.
        if path.exists():
            path.write_text(_UNLIMITED, encoding="ascii")
