"""Reading the system call filter of another process, with real filters of this kernel."""

from __future__ import annotations

import errno
import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from remuda.agent import system_call_filter

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="reading filters needs root"),
    pytest.mark.skipif("\nSeccomp:\t0\n" not in Path("/proc/self/status").read_text(), reason="has a filter itself"),
]

ALLOW = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
LOAD = struct.pack("=HBBI", 0x20, 0, 0, 0)
#: Of which some happen while the process receives a signal.
READS = 1_000
LIMIT_S = 5.0
#: Installs the programs, and writes the number of each signal until its input ends. The interpreter's handler in C does
#: that: one in Python does not run if the signal arrives right before `read` blocks.
TARGET = """
import ctypes, os, signal, sys
class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))
signal.signal(signal.SIGUSR1, lambda *_: None)
for program in map(bytes.fromhex, sys.argv[1:]):
    code = Program(len(program) // 8, program)
    assert not ctypes.CDLL(None).prctl(22, ctypes.c_ulong(2), ctypes.byref(code), 0, 0)
os.set_blocking(1, False)
signal.set_wakeup_fd(1)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def process(*programs: bytes) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-IS", "-c", TARGET, *(program.hex() for program in programs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None
        assert made.stdout.readline() == "ready\n"
        yield made


def test_read_returns_programs_in_the_order_of_their_installation() -> None:
    programs = [ALLOW, LOAD + ALLOW, LOAD + LOAD + ALLOW]
    with process(*programs) as target:
        assert system_call_filter.read(target.pid) == programs
        assert system_call_filter.read(target.pid) == programs


def test_read_loses_no_signal() -> None:
    with process(ALLOW) as target, ThreadPoolExecutor(1) as thread:
        assert target.stdout is not None
        reading = thread.submit(lambda: [system_call_filter.read(target.pid) for _ in range(READS)])
        while not reading.done():
            # Not by `Popen`, which would wait for the process and take the notification about its stop.
            os.kill(target.pid, signal.SIGUSR1)
            assert select.select([target.stdout], [], [], LIMIT_S)[0], "the signal is lost"
            assert os.read(target.stdout.fileno(), 2) == bytes([signal.SIGUSR1])
        assert reading.result() == [[ALLOW]] * READS


def test_read_fails_without_a_filter() -> None:
    with (
        process() as target,
        pytest.raises(OSError, match="it has none, or the kernel lacks CONFIG_CHECKPOINT_RESTORE"),
    ):
        system_call_filter.read(target.pid)


def test_read_fails_for_a_process_that_has_ended() -> None:
    with process(ALLOW) as target:
        target.communicate()
        with pytest.raises(OSError, match="cannot read the system call filter") as problem:
            system_call_filter.read(target.pid)
    assert problem.value.errno == errno.ESRCH
