"""Runs a program as root in the namespaces of another process and exits with its exit code. Standard library only.

Unlike nsenter(1), it does not stop when the program is stopped: a container that shuts down stops all its processes,
and nobody would continue this one, which is outside.
"""

from __future__ import annotations

import ctypes
import os
import sys

#: The user namespace first: from then on there are only the privileges of a sandbox.
KINDS = ("user", "mnt", "net", "ipc", "uts", "cgroup")
CANNOT_START = 126

#: From linux/prctl.h.
_SET_DUMPABLE = 4

_libc = ctypes.CDLL(None, use_errno=True)


def main(target: str, *command: str) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC
    namespaces = [os.open(f"/proc/{target}/ns/{kind}", flags) for kind in KINDS]
    # Root of the sandbox must not trace the child or use its /proc/PID/root, which is the host's at first.
    _check(_libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0))
    # Only children enter this one.
    _check(_libc.setns(os.open(f"/proc/{target}/ns/pid", flags), 0))
    child = os.fork()
    if not child:
        try:
            _become(namespaces, command)
        finally:
            # Python must not load anything from here on: the files are the sandbox's.
            os._exit(CANNOT_START)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _become(namespaces: list[int], command: tuple[str, ...]) -> None:
    for namespace in namespaces:
        _check(_libc.setns(namespace, 0))
    os.setgroups([])
    os.setgid(0)
    os.setuid(0)
    os.execv(command[0], command)  # noqa: S606  # from an argument list, as everywhere


def _check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "the sandbox cannot be entered")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
