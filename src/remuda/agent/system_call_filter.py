"""System call filters of processes: those of another one, and a new one for a program that is started. Root only.

`read` uses PTRACE_SECCOMP_GET_FILTER of ptrace(2). The caller must have no filter, and the kernel needs
CONFIG_CHECKPOINT_RESTORE.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# From linux/ptrace.h, equal on all architectures.
_DETACH, _SEIZE, _INTERRUPT, _GET_FILTER = 17, 0x4206, 0x4207, 0x420C
_EVENT_STOP = 128
# From linux/prctl.h and linux/seccomp.h.
_SET_SECCOMP, _MODE_FILTER = 22, 2
#: Size of `struct sock_filter`.
_INSTRUCTION_BYTES = 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long
_libc.prctl.argtypes = (ctypes.c_int, *([ctypes.c_ulong] * 4))


class _Program(ctypes.Structure):
    """`struct sock_fprog` of seccomp(2)."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def start_filtered(program: bytes, start: Callable[[], T]) -> T:
    """Call `start` in a thread of its own with this filter, which the processes that it starts inherit."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(_install, program).result()
        return thread.submit(start).result()


def _install(program: bytes) -> None:
    code = _Program(len(program) // _INSTRUCTION_BYTES, program)
    # Permitted to root without no_new_privs, with which sudo would fail.
    if _libc.prctl(_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(code), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot install the system call filter: {os.strerror(number)}")


def read(pid: int) -> list[bytes]:
    """Return the BPF programs of a process in the order of their installation. Stops the process for a moment.

    Waits for the process, so that it must not be one that jobs control. Raises `OSError` if it has no filter.
    """
    _ptrace(_SEIZE, pid)
    signal = 0
    try:
        _ptrace(_INTERRUPT, pid)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
        if status >> 16 != _EVENT_STOP:
            # It was about to receive a signal, which must not get lost.
            signal = os.WSTOPSIG(status)
        return list(_programs(pid))
    finally:
        _libc.ptrace(_DETACH, pid, None, signal)


def _programs(pid: int) -> Iterator[bytes]:
    """The first one has the number 0: `get_nth_filter` in kernel/seccomp.c, other than the manual page says."""
    for number in range(2**31):
        try:
            length = _ptrace(_GET_FILTER, pid, number)
        except FileNotFoundError:
            return
        program = ctypes.create_string_buffer(length * _INSTRUCTION_BYTES)
        _ptrace(_GET_FILTER, pid, number, program)
        yield program.raw


def _ptrace(request: int, pid: int, address: int = 0, data: ctypes.Array[ctypes.c_char] | None = None) -> int:
    result: int = _libc.ptrace(request, pid, address, data)
    if result < 0:
        code = ctypes.get_errno()
        # The kernel's answer in both cases.
        reason = "it has none, or the kernel lacks CONFIG_CHECKPOINT_RESTORE" if code == errno.EINVAL else ""
        raise OSError(code, f"cannot read the system call filter of process {pid}: {reason or os.strerror(code)}")
    return result
