"""Runs a program as root in the namespaces of another process and exits with its exit code. Standard library only.

Unlike nsenter(1), it does not stop when the program is stopped: a container that shuts down stops all its processes,
and no one would continue this one, which is outside. The program also gets the system call filter of the container and
the capability bounding set of the other process; neither belongs to a namespace.
"""

from __future__ import annotations

import ctypes
import os
import sys

#: The user namespace first: from then on there are only the privileges of a sandbox.
KINDS = ("user", "mnt", "net", "ipc", "uts", "cgroup")
CANNOT_START = 126

# From linux/prctl.h and linux/seccomp.h.
_SET_DUMPABLE, _SET_SECCOMP, _CAPBSET_READ, _CAPBSET_DROP = 4, 22, 23, 24
_MODE_FILTER = 2
#: Size of `struct sock_filter`.
_INSTRUCTION_BYTES = 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = (ctypes.c_int, *([ctypes.c_ulong] * 4))


class _Program(ctypes.Structure):
    """`struct sock_fprog` of seccomp(2)."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def main(target: str, filters: str, *command: str) -> int:
    """`filters` is the path of a file with one BPF program per line, in hexadecimal digits."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    namespaces = [os.open(f"/proc/{target}/ns/{kind}", flags) for kind in KINDS]
    with open(filters, encoding="ascii") as file:  # noqa: PTH123  # pathlib is slow to import
        programs = [bytes.fromhex(line) for line in file]
    with open(f"/proc/{target}/status", encoding="utf-8") as file:  # noqa: PTH123  # as above
        bounding = next(int(line.split()[1], 16) for line in file if line.startswith("CapBnd:"))
    # Root of the sandbox must not trace the child or use its /proc/PID/root, which is the host's at first.
    _check(_libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0))
    # Only children enter this one.
    _check(_libc.setns(os.open(f"/proc/{target}/ns/pid", flags), 0))
    child = os.fork()
    if not child:
        try:
            for namespace in namespaces:
                _check(_libc.setns(namespace, 0))
            _restrict(programs, bounding)
            os.execv(command[0], command)  # noqa: S606  # from an argument list, as everywhere
        finally:
            # Python must not load anything from here on: the files are the sandbox's.
            os._exit(CANNOT_START)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _restrict(programs: list[bytes], bounding: int) -> None:
    """Become what the container's own processes are. A new user namespace has reset the bounding set."""
    os.setgroups([])
    os.setgid(0)
    os.setuid(0)
    capability = 0
    while _libc.prctl(_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        if not bounding >> capability & 1:
            _check(_libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0))
        capability += 1
    # Permitted without no_new_privs, with which sudo would fail, to those with CAP_SYS_ADMIN in their user namespace.
    for program in programs:
        code = _Program(len(program) // _INSTRUCTION_BYTES, program)
        _check(_libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(code), 0, 0))


def _check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), "the sandbox cannot be entered")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
