"""Mounts of sandboxes: read-only clones of folders with shifted owners, and overlays on top of them. Needs root.

An idmapped mount shows each owner `n` of the original as `first_id + n`, so that root inside a user namespace whose ids
begin at `first_id` owns the files of root. Idmapped layers below an overlay need Linux 5.19.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

#: Number of user and group ids of a sandbox.
ID_COUNT = 65_536

# Numbers of the system calls, equal on all architectures. Neither Python nor Debian 12's mount(8) has them.
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD = -100
_OPEN_TREE_CLONE = 0x1
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_AT_EMPTY_PATH = 0x1000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_IDMAP = 0x1, 0x100000
_MS_PRIVATE = 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    """`struct mount_attr` of mount_setattr(2)."""

    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def mount_idmapped(source: Path, target: Path, first_id: int) -> None:
    """Mount a read-only clone of `source`, without the mounts below it, whose owners are shifted by `first_id`."""
    tree = open_idmapped(source, first_id, read_only=True)
    try:
        _call(_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(tree)


def open_idmapped(source: Path, first_id: int, *, read_only: bool) -> int:
    """Clone `source` with shifted owners. Return the descriptor of the clone, which is not mounted yet."""
    tree = _call(_OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    try:
        namespace = _user_namespace(first_id)
        try:
            attributes = _MountAttributes(
                attr_set=_MOUNT_ATTR_IDMAP | (_MOUNT_ATTR_RDONLY if read_only else 0),
                propagation=_MS_PRIVATE,
                userns_fd=namespace,
            )
            size = ctypes.c_size_t(ctypes.sizeof(attributes))
            _call(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attributes), size)
        finally:
            os.close(namespace)
    except OSError:
        os.close(tree)
        raise
    return tree


def mount_overlay(target: Path, *, lower: Path, upper: Path, work: Path, volatile: bool = True) -> None:
    """Mount an overlay. With `volatile` nothing is synced to disk, for an upper layer that is discarded later.

    With `redirect_dir`, folders of the lower layer can be renamed, as on any other file system. A self-update of
    actions/runner does so.

    The kernel accesses the layers with the rights of the process that mounts the overlay. With CAP_SYS_RESOURCE, quotas
    of ext4 would not limit what jobs write.
    """
    options = f"lowerdir={lower},upperdir={upper},workdir={work},redirect_dir=on" + (",volatile" if volatile else "")
    run("setpriv", "--bounding-set=-sys_resource", "mount", "-t", "overlay", "-o", options, "remuda", target)


def unmount(target: Path) -> None:
    run("umount", target)


def mounts_below(folder: Path) -> list[Path]:
    """Return the mount points in `folder`, the innermost first."""
    with open("/proc/self/mountinfo", "rb") as file:  # noqa: PTH123  # not decoded: paths may be any bytes
        points = [line.split()[4].decode("unicode_escape").encode("latin-1") for line in file]
    prefix = os.fsencode(folder) + b"/"
    return [Path(os.fsdecode(point)) for point in reversed(points) if point.startswith(prefix)]


def run(*command: str | Path) -> None:
    """Run a command of the system. Raises `OSError` with its output if it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command[0]} {command[-1]}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def _user_namespace(first_id: int) -> int:
    """Return a descriptor of a new user namespace. It exists as long as a descriptor or a mount refers to it."""
    # The shell prints a line when it is in the namespace, and ends when its input is closed.
    command = ["unshare", "--user", "sh", "-c", "echo; read _"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        if child.stdout is None or not child.stdout.readline():
            raise OSError("unshare cannot create a user namespace")
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{child.pid}/{kind}").write_text(f"0 {first_id} {ID_COUNT}")
        return os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result
