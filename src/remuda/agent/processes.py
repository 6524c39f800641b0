"""Processes of a machine: lookup, commands with a time limit, and killing all processes of a tree."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import resource
import signal
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from remuda import procfs, scripts
from remuda.ports.clock import Clock
from remuda.procfs import Process, all_processes, descendants

#: Seconds until killing gives up on processes that do not end.
KILL_LIMIT_S = 10.0
#: Maximum seconds to wait for the end of each killed process before /proc is scanned again.
KILL_PAUSE_S = 0.1
#: Bytes kept from the end of a command's output.
MAX_OUTPUT_BYTES = 64 * 1024
#: Consecutive empty scans after which all processes count as killed. One scan can miss a process whose parent ends
#: during it.
EMPTY_SCANS = 2
#: The number of the system call keyctl by architecture, and one of its operations.
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_JOIN_SESSION_KEYRING = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _with_ancestors(pid: int, processes: Mapping[int, Process]) -> set[int]:
    found: set[int] = set()
    while pid in processes and pid not in found:
        found.add(pid)
        pid = processes[pid].ppid
    return found


def disable_core_dumps() -> None:
    """Disable core dumps for this process, which holds tokens, and its children. The hard limit cannot be raised."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def join_new_session_keyring() -> None:
    """Give this thread an empty session keyring of the kernel. The processes that it starts inherit it."""
    number = _KEYCTL.get(platform.machine())
    if number is None or _libc.syscall(number, _JOIN_SESSION_KEYRING, None) >= 0:
        return
    code = ctypes.get_errno()
    if code != errno.ENOSYS:
        raise OSError(code, f"cannot create a session keyring: {os.strerror(code)}")


def send_signal(process: Process, number: signal.Signals) -> int | None:
    """Signal this process. Return a pidfd that becomes readable when it ends, or None if it has ended already."""
    return procfs.send_signal(process.pid, process.started, number)


@dataclass(frozen=True, kw_only=True, slots=True)
class KillResult:
    #: Program names of all processes that were signalled, including the survivors.
    killed: tuple[str, ...]
    #: Processes that still existed at the time limit.
    survivors: tuple[Process, ...]


def kill_descendants(root: int, *, keep: Collection[int], clock: Clock, limit_s: float = KILL_LIMIT_S) -> KillResult:
    """Kill all descendants of `root` except those in `keep` until none is left or the time limit is reached. Blocks.

    The processes between `root` and the kept ones (interpreters, wrappers) are kept, too. Descendants of a kept process
    are killed unless `keep` lists them. If `root` is a subreaper, no process can escape: neither a
    double fork nor a new session nor a changed environment removes it from the tree.
    """
    deadline = clock.monotonic() + limit_s
    killed: dict[tuple[int, int], str] = {}
    empty_scans = 0
    while True:
        present = all_processes()
        kept = {ancestor for pid in keep for ancestor in _with_ancestors(pid, present)}
        found = [process for process in descendants(root, present) if process.pid not in kept]
        empty_scans = 0 if found else empty_scans + 1
        if empty_scans == EMPTY_SCANS:
            return KillResult(killed=tuple(killed.values()), survivors=())
        if found and clock.monotonic() >= deadline:
            return KillResult(killed=tuple(killed.values()), survivors=tuple(found))
        for process in found:
            killed.setdefault((process.pid, process.started), process.name)
        kill(found)


def kill(processes: Iterable[Process]) -> None:
    procfs.kill(processes, KILL_PAUSE_S)


async def wait_for_end(descriptor: int, timeout_s: float, event: asyncio.Event | None = None) -> bool:
    """Wait for the end of a process, given its pidfd, or for an event. Return whether the process has ended."""
    loop = asyncio.get_running_loop()
    event = event or asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return procfs.wait_for(descriptor, 0)


async def run(
    arguments: Sequence[str], *, cwd: Path, environment: Mapping[str, str], timeout_s: float, temp_dir: Path
) -> tuple[int | None, str]:
    """Run a command. Return its exit code (None if it was killed at the time limit) and the end of its output."""
    with tempfile.TemporaryFile(dir=temp_dir) as output:
        try:
            exit_code = await scripts.run_command(
                arguments, output=output, folder=cwd, environment=environment, timeout_s=timeout_s
            )
        except OSError as problem:
            return scripts.CANNOT_START, str(problem)
        output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_OUTPUT_BYTES))
        return exit_code, output.read().decode(errors="replace")
