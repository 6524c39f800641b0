"""Answers of the filter, by an interpreter of BPF: for all architectures, whatever this computer has.

tests/conformance/test_kernel_surface.py installs it in this computer's kernel.
"""

from __future__ import annotations

import errno
import struct

import pytest

from remuda.agent import socket_filter

X86_64, I386, AARCH64, ARM, RISCV64 = 0xC000003E, 0x40000003, 0xC00000B7, 0x40000028, 0xC00000F3
X32 = 0x40000000
SOCKET = {X86_64: 41, I386: 359, AARCH64: 198, ARM: 281}
SOCKETPAIR = {X86_64: 53, I386: 360, AARCH64: 199, ARM: 288}
READ = {X86_64: 0, I386: 3, AARCH64: 63, ARM: 3}
USERFAULTFD = {X86_64: 323, I386: 374, AARCH64: 282, ARM: 388}
SOCKETCALL = 102
AF_UNIX, AF_INET, AF_NETLINK, AF_ALG, AF_VSOCK, AF_XDP = 1, 2, 16, 38, 40, 44
NETLINK_ROUTE, NETLINK_XFRM = 0, 6
ALLOWED = 0


def answer(architecture: int, number: int, *arguments: int, socketcall: bool = False) -> int:
    """The error number of a call, or ALLOWED."""
    program = list(struct.iter_unpack("=HBBI", socket_filter.build(socketcall=socketcall)))
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    position = word = 0
    while True:
        code, if_true, if_false, value = program[position]
        position += 1
        match code:
            case 0x20:
                (word,) = struct.unpack_from("<I", data, value)
            case 0x15 | 0x35:
                position += if_true if (word == value if code == 0x15 else word >= value) else if_false
            case 0x06:
                if value == 0x7FFF0000:
                    return ALLOWED
                assert value >> 16 == 5
                return int(value & 0xFFFF)
            case _:
                raise AssertionError(code)


@pytest.mark.parametrize("architecture", list(SOCKET))
def test_families_and_protocols(architecture: int) -> None:
    for call in (SOCKET, SOCKETPAIR):
        number = call[architecture]
        assert [family for family in range(100) if answer(architecture, number, family) == ALLOWED] == [
            *socket_filter.FAMILIES
        ]
        assert answer(architecture, number, AF_VSOCK, 1, 0) == errno.EAFNOSUPPORT
        # The kernel looks at the lower half of the argument only.
        assert answer(architecture, number, AF_VSOCK | 1 << 32, 1, 0) == errno.EAFNOSUPPORT
        assert answer(architecture, number, AF_NETLINK, 3, NETLINK_ROUTE) == ALLOWED
        assert answer(architecture, number, AF_NETLINK, 3, NETLINK_XFRM) == errno.EPROTONOSUPPORT
        # The protocols of other families are not those of netlink.
        assert answer(architecture, number, AF_INET, 3, 255) == ALLOWED


@pytest.mark.parametrize("architecture", list(SOCKET))
def test_ways_around_are_refused_and_other_calls_permitted(architecture: int) -> None:
    assert {answer(architecture, number) for number in (425, 426, 427)} == {errno.ENOSYS}
    assert answer(architecture, USERFAULTFD[architecture]) == errno.EPERM
    # With arguments that would be refused as those of socket.
    assert answer(architecture, READ[architecture], AF_VSOCK) == ALLOWED


def test_numbers_of_one_architecture_mean_nothing_on_another() -> None:
    assert answer(X86_64, SOCKET[I386], AF_VSOCK) == ALLOWED
    assert answer(X86_64, SOCKETCALL, 1) == ALLOWED
    assert answer(I386, SOCKET[X86_64], AF_VSOCK) == ALLOWED


@pytest.mark.parametrize("number", [0, SOCKET[X86_64], 512 + 5])
def test_x32_is_refused(number: int) -> None:
    assert answer(X86_64, X32 | number, AF_UNIX) == errno.ENOSYS


def test_unknown_architecture_is_refused() -> None:
    assert answer(RISCV64, 198, AF_UNIX) == errno.ENOSYS


@pytest.mark.parametrize(("operation", "opens"), [(1, True), (2, False), (3, False), (8, True), (20, False)])
def test_socketcall_hides_the_family(operation: int, *, opens: bool) -> None:
    assert answer(I386, SOCKETCALL, operation) == (errno.EAFNOSUPPORT if opens else ALLOWED)
    assert answer(I386, SOCKETCALL, operation, socketcall=True) == ALLOWED
    assert answer(I386, SOCKET[I386], AF_VSOCK, socketcall=True) == errno.EAFNOSUPPORT
