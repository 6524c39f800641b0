"""Process information from /proc, and signals to exactly one process. Linux only.

Uses the standard library only, because the supervisor of a local machine imports little else.

A process can make readers of its `cmdline`, `environ` or `maps` wait for ever: a page fault on a file of its own FUSE
daemon holds the lock of its memory. Of processes in a sandbox only files are read that do not need that lock: `stat`,
`status`, `comm`, `children` and `ns`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable, Mapping
from typing import NamedTuple

#: Environment variable of all processes of a local machine; its value is the instance id.
MARKER = "REMUDA_MACHINE"
#: Environment variable of a step that must not outlive its agent; its value names the step and its folder.
STEP = "REMUDA_STEP"
#: Attempts to kill such a step, and seconds to wait in each.
STEP_KILL_ATTEMPTS = 20
STEP_PAUSE_S = 0.1
#: Reads of the environment of a process that is executing a new program, and seconds between them.
EXEC_READS = 100
EXEC_PAUSE_S = 0.01
#: Whether the kernel lists the children of a process (CONFIG_PROC_CHILDREN).
LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")  # noqa: PTH110  # pathlib would slow each supervisor's start
#: Kernel states of processes that have ended but were not reaped by their parent yet.
_ENDED = frozenset({"Z", "X"})
#: Fields of `stat` behind the program name that are read here.
STAT_FIELDS = 20


class Process(NamedTuple):
    pid: int
    ppid: int
    #: Start time in clock ticks since boot. Together with the pid it identifies one process uniquely.
    started: int
    #: The name of its program, shortened to 15 bytes by the kernel. A process can choose any.
    name: str = ""
    #: Device number of its terminal, or 0 if it has none.
    terminal: int = 0
    #: Whether its first thread has ended while others still run.
    first_thread_ended: bool = False


def read_process(pid: int) -> Process | None:
    """Return the process, or None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123  # see above
            return parse_stat(file.read())
    except OSError:
        return None


def parse_stat(text: bytes) -> Process | None:
    """Return the process that the content of its `stat` describes, or None if it has ended. ValueError if malformed."""
    # The program name is in parentheses and may itself contain parentheses.
    pid, begin, end = int(text[: text.index(b"(")]), text.index(b"(") + 1, text.rindex(b")")
    fields = text[end + 2 :].split()
    if len(fields) < STAT_FIELDS:
        raise ValueError("a process has more fields")
    first_thread_ended = fields[0].decode() in _ENDED
    # A process whose first thread has ended looks like a zombie, but still runs if it has more threads.
    if first_thread_ended and int(fields[17]) <= 1:
        return None
    return Process(
        pid=pid,
        ppid=int(fields[1]),
        started=int(fields[19]),
        name=os.fsdecode(text[begin:end]),
        terminal=int(fields[4]),
        first_thread_ended=first_thread_ended,
    )


def is_alive(pid: int, started: int) -> bool:
    process = read_process(pid)
    return process is not None and process.started == started


def command(pid: int) -> tuple[str, ...]:
    """Return the command line, or an empty tuple if it cannot be read. Not for processes in sandboxes, see above."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123  # see above
            text = file.read()
    except OSError:
        return ()
    return tuple(os.fsdecode(part) for part in text.split(b"\0")[:-1])


def all_processes() -> dict[int, Process]:
    """Return all processes by pid."""
    names = os.listdir("/proc")  # noqa: PTH208  # see above
    found = (read_process(int(name)) for name in names if name.isdecimal())
    return {process.pid: process for process in found if process is not None}


def descendants(root: int, processes: Mapping[int, Process] | None = None) -> list[Process]:
    """Return all descendants of `root`, nearest first; only those among `processes`, if given."""
    if processes is None and not LISTS_CHILDREN:
        processes = all_processes()
    below_of = children if processes is None else _grouped_by_parent(processes).get
    found: dict[int, Process] = {}
    level = [root]
    while level:
        below = {child.pid: child for pid in level for child in below_of(pid) or () if child.pid not in found}
        found |= below
        level = list(below)
    return list(found.values())


def _grouped_by_parent(processes: Mapping[int, Process]) -> dict[int, list[Process]]:
    grouped: dict[int, list[Process]] = {}
    for process in processes.values():
        grouped.setdefault(process.ppid, []).append(process)
    return grouped


def children(pid: int) -> list[Process]:
    """Return the children of all threads of a process, which needs a kernel that `LISTS_CHILDREN`.

    Reads no other processes, of which a computer has hundreds.
    """
    pids: list[bytes] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  # see above
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:  # noqa: PTH123
                pids += file.read().split()
    found = (read_process(int(child)) for child in pids)
    return [process for process in found if process is not None]


def send_signal(pid: int, started: int, number: signal.Signals) -> int | None:
    """Signal exactly this process. Return a pidfd that becomes readable when it ends, or None if it has ended already.

    The pidfd refers to the process itself, so a reused pid is never signalled.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if is_alive(pid, started):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)
            return descriptor
    os.close(descriptor)
    return None


def kill(processes: Iterable[Process], wait_s: float) -> None:
    """Kill the processes and wait up to `wait_s` seconds for the end of each.

    All signals are sent before the first wait, so that the processes cannot restart each other.
    """
    descriptors = [send_signal(process.pid, process.started, signal.SIGKILL) for process in processes]
    for descriptor in descriptors:
        if descriptor is not None:
            wait_for(descriptor, wait_s)
            os.close(descriptor)


def wait_for(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0, round(timeout_s * 1000))))


def machine_processes(machine: str, folder: str, since: int) -> list[Process]:
    """Find the remaining processes of a machine whose supervisor is dead.

    A process belongs to the machine if its environment has the machine's marker, or if its working directory, program
    or root lies in the machine's folder. A shell that a person opened in the folder must not match, so the second rule
    excludes processes that have a terminal, are older than the machine, or carry the marker of another machine.
    Ancestors of this process are always excluded.
    """
    user = os.getuid()
    excluded = _ancestors()
    found = []
    for process in all_processes().values():
        if process.pid in excluded or users(process.pid) != {user}:
            continue
        proc_path = _proc_path(process)
        marker = _variable(proc_path, MARKER)
        may_match_folder = marker is None and process.terminal == 0 and process.started >= since
        if marker == machine or (may_match_folder and _runs_in(proc_path, folder)):
            found.append(process)
    return found


def _ancestors() -> set[int]:
    """Return the pids of this process and its ancestors."""
    found: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        process = read_process(pid)
        pid = 0 if process is None else process.ppid
    return found


def _proc_path(process: Process) -> str:
    """Return the /proc folder of a live thread: the kernel shows no details for a thread that has ended."""
    if process.first_thread_ended:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process.pid}/task"):  # noqa: PTH208  # see above
                if int(thread) != process.pid:
                    return f"/proc/{process.pid}/task/{thread}"
    return f"/proc/{process.pid}"


def users(pid: int) -> frozenset[int]:
    """Return its real, effective, saved and file system user ids, or an empty set if it has ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123  # see above
            text = file.read()
    except OSError:
        return frozenset()
    for line in text.split(b"\n"):
        if line.startswith(b"Uid:"):
            return frozenset(map(int, line.split()[1:]))
    return frozenset()


def kill_step(value: str) -> None:
    """Kill the remaining processes of a step that an earlier agent started before it was killed. Blocks."""
    user = os.getuid()
    for _ in range(STEP_KILL_ATTEMPTS):
        found = [
            process
            for process in all_processes().values()
            # Processes of sandboxes have other users.
            if users(process.pid) == {user} and _variable(_proc_path(process), STEP) == value
        ]
        if not found:
            return
        kill(found, STEP_PAUSE_S)


def _variable(proc_path: str, name: str) -> str | None:
    prefix = name.encode() + b"="
    for entry in _environment(proc_path).split(b"\0"):
        if entry.startswith(prefix):
            return os.fsdecode(entry[len(prefix) :])
    return None


def _environment(proc_path: str) -> bytes:
    """Return its environment. During an exec the kernel shows an empty one, so the read is repeated."""
    exec_finished = False
    try:
        for _ in range(EXEC_READS):
            with open(f"{proc_path}/environ", "rb") as file:  # noqa: PTH123  # see above
                environment = file.read()
            if environment or exec_finished:
                return environment
            exec_finished = not _is_in_exec(proc_path)
            if not exec_finished:
                select.select([], [], [], EXEC_PAUSE_S)
    except OSError:
        pass
    return b""


def _is_in_exec(proc_path: str) -> bool:
    """Whether it has a program whose code is not mapped yet. OSError for kernel threads and ending processes."""
    with open(f"{proc_path}/stat", "rb") as file:  # noqa: PTH123  # see above
        text = file.read()
    code_begins = int(text[text.rindex(b")") + 2 :].split()[23])
    return code_begins == 0 and bool(os.readlink(f"{proc_path}/exe"))  # noqa: PTH115  # see above


def _runs_in(proc_path: str, folder: str) -> bool:
    for link in ("cwd", "exe", "root"):
        try:
            target = os.readlink(f"{proc_path}/{link}")  # noqa: PTH115  # see above
        except OSError:
            continue
        if target == folder or target.startswith(folder + "/"):
            return True
    return False
