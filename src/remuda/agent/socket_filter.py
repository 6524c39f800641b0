"""A system call filter for sandboxes: the socket families that jobs may use, and calls that reach around it.

systemd-nspawn has a filter of its own (`--system-call-filter`), which permits calls by name only. This one also looks
at the arguments of socket(2): without it, `AF_VSOCK` connects to the host past all rules of iptables. The kernel
applies both, and the stricter answer counts. The program is classic BPF over `struct seccomp_data`, see seccomp(2).
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

#: AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, AF_PACKET. All others get the answer of a kernel that does not have them.
#: AF_PACKET is for tools such as tcpdump.
FAMILIES = (1, 2, 10, 16, 17)
#: NETLINK_ROUTE, NETLINK_SOCK_DIAG, NETLINK_NETFILTER, NETLINK_KOBJECT_UEVENT, NETLINK_GENERIC: those of iproute2,
#: docker, iptables and udev. Not NETLINK_XFRM, whose states and policies the kernel charges to no one.
NETLINK_PROTOCOLS = (0, 4, 12, 15, 16)
_NETLINK = 16
#: Operations of socketcall(2), with which 32-bit x86 programs open sockets: socket and socketpair. The family is in
#: memory, where a filter cannot look.
_SOCKETCALL_OPERATIONS = (1, 8)
#: AF_VSOCK, AF_QIPCRTR, AF_BLUETOOTH, AF_NFC: they reach beyond the network namespace.
_SHARED_FAMILIES = (40, 42, 31, 39)
_MODULES_DISABLED = Path("/proc/sys/kernel/modules_disabled")

# From linux/audit.h.
_X86_64, _I386, _AARCH64, _ARM = 0xC000003E, 0x40000003, 0xC00000B7, 0x40000028
#: Calls of x32, another way to call the kernel of x86_64, have this bit.
_X32 = 0x40000000

# From linux/bpf_common.h and linux/seccomp.h: load a word, compare with a constant, return.
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
# Offsets in `struct seccomp_data`. Arguments have 64 bits; those compared here are of type int, in the lower half.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class _Numbers:
    """Numbers of system calls on one architecture."""

    #: socket and socketpair.
    sockets: tuple[int, ...]
    #: 0: the architecture has no such call, or it is permitted.
    socketcall: int = 0
    userfaultfd: int
    #: io_uring_setup, io_uring_enter, io_uring_register: a ring opens sockets without the call socket.
    io_uring: tuple[int, ...] = (425, 426, 427)


_CALLS = {
    _X86_64: _Numbers(sockets=(41, 53), userfaultfd=323),
    _I386: _Numbers(sockets=(359, 360), socketcall=102, userfaultfd=374),
    _AARCH64: _Numbers(sockets=(198, 199), userfaultfd=282),
    _ARM: _Numbers(sockets=(281, 288), userfaultfd=388),
}

Instruction = tuple[int, int, int, int]


def permits_socketcall() -> bool:
    """Whether sandboxes may use socketcall(2): if this kernel has none of the shared families, and cannot get any.

    Refused, 32-bit x86 programs of glibc and Go have no network, for example in containers that build i686 wheels.
    """
    try:
        if _MODULES_DISABLED.read_text(encoding="ascii").strip() != "1":
            return False
    except FileNotFoundError:
        # A kernel without modules.
        pass
    return not any(map(_exists, _SHARED_FAMILIES))


def _exists(family: int) -> bool:
    try:
        socket.socket(family, socket.SOCK_DGRAM).close()
    except OSError as problem:
        return problem.errno != errno.EAFNOSUPPORT
    return True


def build(*, socketcall: bool) -> bytes:
    """Return the program, for all architectures. `socketcall`: see `permits_socketcall`."""
    program: list[Instruction] = [(_LOAD, 0, 0, _ARCHITECTURE)]
    for architecture, numbers in _CALLS.items():
        calls = _calls(architecture, replace(numbers, socketcall=0) if socketcall else numbers)
        program += [*_unless(architecture, calls), *calls]
    # Any other architecture.
    program.append(_refuse(errno.ENOSYS))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _calls(architecture: int, numbers: _Numbers) -> list[Instruction]:
    """Judge a call of this architecture. Ends in an answer."""
    program: list[Instruction] = [(_LOAD, 0, 0, _NUMBER)]
    if architecture == _X86_64:
        program += [(_AT_LEAST, 0, 1, _X32), _refuse(errno.ENOSYS)]
    for number in numbers.io_uring:
        program += [(_EQUAL, 0, 1, number), _refuse(errno.ENOSYS)]
    program += [(_EQUAL, 0, 1, numbers.userfaultfd), _refuse(errno.EPERM)]
    for number in numbers.sockets:
        program += [*_unless(number, _SOCKET), *_SOCKET]
    if numbers.socketcall:
        operation: list[Instruction] = [
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            *_one_of(_SOCKETCALL_OPERATIONS, [_refuse(errno.EAFNOSUPPORT)]),
            _answer(_ALLOW),
        ]
        program += [*_unless(numbers.socketcall, operation), *operation]
    return [*program, _answer(_ALLOW)]


def _answer(value: int) -> Instruction:
    return (_RETURN, 0, 0, value)


def _refuse(code: int) -> Instruction:
    return _answer(_ERRNO | code)


def _unless(value: int, skipped: list[Instruction]) -> list[Instruction]:
    """Skip these instructions unless the loaded word is this value."""
    return [(_EQUAL, 0, len(skipped), value)]


def _one_of(values: Iterable[int], then: list[Instruction]) -> list[Instruction]:
    """Execute these instructions, which end in an answer, if the loaded word is one of the values."""
    return [instruction for value in values for instruction in (*_unless(value, then), *then)]


#: Judges socket(family, type, protocol) and socketpair.
_SOCKET: list[Instruction] = [
    (_LOAD, 0, 0, _FIRST_ARGUMENT),
    *_one_of((family for family in FAMILIES if family != _NETLINK), [_answer(_ALLOW)]),
    (_EQUAL, 1, 0, _NETLINK),
    _refuse(errno.EAFNOSUPPORT),
    (_LOAD, 0, 0, _THIRD_ARGUMENT),
    *_one_of(NETLINK_PROTOCOLS, [_answer(_ALLOW)]),
    _refuse(errno.EPROTONOSUPPORT),
]
