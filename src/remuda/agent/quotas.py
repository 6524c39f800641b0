"""Project quotas: limits of bytes and files for all that is below a folder, counted by the file system. Needs root.

ext4 and XFS have them if they are mounted with `prjquota`. Where they are missing, `limit` returns False and `usage`
returns None.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from remuda.agent.disk_space import Space

#: Number of the system call quotactl_fd, equal on all architectures. Linux 5.14 and newer have it.
_QUOTACTL_FD = 443
#: linux/quota.h: the command for projects (type 2), and `struct if_dqblk`.
_Q_GETQUOTA, _Q_SETQUOTA = (command << 8 | 2 for command in (0x800007, 0x800008))
_DQBLK = struct.Struct("=8QI4x")
_BLOCK = 1024
#: A smaller limit would count as none.
MIN_BYTES = _BLOCK
_QIF_LIMITS = 1 | 4
#: linux/fs.h: `struct fsxattr` and its operations.
_FSXATTR = struct.Struct("=5I8x")
_FS_IOC_FSGETXATTR, _FS_IOC_FSSETXATTR = 0x801C581F, 0x401C5820
_FS_XFLAG_PROJINHERIT = 0x200

_libc = ctypes.CDLL(None, use_errno=True)


def limit(folder: Path, project: int, space: Space) -> bool:
    """Put a folder into a project and limit what it takes. What is created in it later belongs to the project, too.

    Return False if the file system has no project quotas. A limit of 0 is none.
    """
    limits = _DQBLK.pack(space.bytes // _BLOCK, 0, 0, space.files, 0, 0, 0, 0, _QIF_LIMITS)
    try:
        with _opened(folder) as descriptor:
            _quotactl(descriptor, _Q_SETQUOTA, project, limits)
            flags, *rest = _FSXATTR.unpack(_attributes(descriptor))
            rest[2] = project
            fcntl.ioctl(descriptor, _FS_IOC_FSSETXATTR, _FSXATTR.pack(flags | _FS_XFLAG_PROJINHERIT, *rest))
    except OSError:
        return False
    return True


def usage(folder: Path) -> Space | None:
    """Return what the project of a folder takes, or None if the folder has none. Nothing in the folder is read."""
    try:
        with _opened(folder) as descriptor:
            project = _FSXATTR.unpack(_attributes(descriptor))[3]
            if not project:
                return None
            quota = _DQBLK.unpack(_quotactl(descriptor, _Q_GETQUOTA, project, bytes(_DQBLK.size)))
    except OSError:
        return None
    return Space(bytes=quota[2], files=quota[5])


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _attributes(descriptor: int) -> bytes:
    return fcntl.ioctl(descriptor, _FS_IOC_FSGETXATTR, bytes(_FSXATTR.size))


def _quotactl(descriptor: int, command: int, project: int, content: bytes) -> bytes:
    buffer = ctypes.create_string_buffer(content, len(content))
    if _libc.syscall(_QUOTACTL_FD, descriptor, ctypes.c_uint(command), ctypes.c_uint(project), buffer) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"quotactl: {os.strerror(code)}")
    return buffer.raw
