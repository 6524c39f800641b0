"""Processes as the kernel tells of them, and their end. Linux: it reads /proc.

Standard library only, and below everything else: the supervisor of a local machine starts with it alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable, Mapping
from typing import NamedTuple

#: In the environment of everything that runs on a machine; its value is the instance id.
MARKER = "REMUDA_MACHINE"
#: In the environment of a step that must not outlive its agent: what it is and where.
STEP = "REMUDA_STEP"
STEP_LOOKS = 20
STEP_PAUSE_S = 0.1
#: Looks at a process that is between two programs, and the wait after each.
EXEC_LOOKS = 100
EXEC_PAUSE_S = 0.01
#: Processes that are there but do nothing any more: they wait for their parent to look.
_ENDED = frozenset({"Z", "X"})


class Process(NamedTuple):
    pid: int
    ppid: int
    #: Clock ticks since the computer's start: with the pid it names one process for ever.
    started: int
    #: Device number of its terminal; 0 where it has none.
    terminal: int = 0
    #: Its first thread has ended, others run on.
    headless: bool = False


def read_process(pid: int) -> Process | None:
    """One process, or None where it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123  # pathlib would slow each supervisor's start
            text = file.read()
    except OSError:
        return None
    # The name stands in brackets and may hold anything, brackets too.
    fields = text[text.rindex(b")") + 2 :].split()
    headless = fields[0].decode() in _ENDED
    # The first thread may end before the others: then it looks like an end, but is a way to hide.
    if headless and int(fields[17]) <= 1:
        return None
    return Process(pid=pid, ppid=int(fields[1]), started=int(fields[19]), terminal=int(fields[4]), headless=headless)


def is_alive(pid: int, started: int) -> bool:
    process = read_process(pid)
    return process is not None and process.started == started


def all_processes() -> dict[int, Process]:
    """Everyone, by pid."""
    names = os.listdir("/proc")  # noqa: PTH208  # see above
    found = (read_process(int(name)) for name in names if name.isdecimal())
    return {process.pid: process for process in found if process is not None}


def descendants(root: int, processes: Mapping[int, Process] | None = None) -> list[Process]:
    """All below `root`, nearest first."""
    children: dict[int, list[Process]] = {}
    for process in (all_processes() if processes is None else processes).values():
        children.setdefault(process.ppid, []).append(process)
    found: list[Process] = []
    level = [root]
    while level:
        below = [child for pid in level for child in children.pop(pid, [])]
        found += below
        level = [process.pid for process in below]
    return found


def send_signal(pid: int, started: int, number: signal.Signals) -> int | None:
    """Signal exactly this process. Returns a descriptor that becomes readable when it has ended, or None where it is
    gone already. The descriptor pins the process: its number may be given anew, but is never hit.
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
    """SIGKILL them and wait until they have ended, each `wait_s` at most. First all signals: what is killed together
    cannot replace each other.
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
    """What still runs of a machine whose supervisor is dead.

    Sure signs are the marker in the environment, or that it lives in the machine's folder. The second alone is not
    enough against a person who looks around in there: so not what has a terminal, is older than the machine, belongs
    to another machine, or is an ancestor of ours.
    """
    user = os.getuid()
    spared = _ancestors()
    found = []
    for process in all_processes().values():
        if process.pid in spared or _owner(process.pid) != user:
            continue
        place = _place(process)
        marker = _marker(place)
        may_live_here = marker is None and process.terminal == 0 and process.started >= since
        if marker == machine or (may_live_here and _lives_in(place, folder)):
            found.append(process)
    return found


def _ancestors() -> set[int]:
    """The present process and those above it."""
    found: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        process = read_process(pid)
        pid = 0 if process is None else process.ppid
    return found


def _owner(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116  # see above
    except OSError:
        return None


def _place(process: Process) -> str:
    """Where the kernel tells about it: where its first thread has ended, another one has to tell."""
    if process.headless:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process.pid}/task"):  # noqa: PTH208  # see above
                if int(thread) != process.pid:
                    return f"/proc/{process.pid}/task/{thread}"
    return f"/proc/{process.pid}"


def users(pid: int) -> frozenset[int]:
    """All that a process is: its real, effective, saved and file system's user. Empty where it has ended."""
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
    """End what is left of a step that an earlier agent began and did not live to see the end of. Blocks."""
    user = os.getuid()
    for _ in range(STEP_LOOKS):
        found = [
            process
            for process in all_processes().values()
            if _owner(process.pid) == user and _variable(_place(process), STEP) == value
        ]
        if not found:
            return
        kill(found, STEP_PAUSE_S)


def _marker(place: str) -> str | None:
    return _variable(place, MARKER)


def _variable(place: str, name: str) -> str | None:
    prefix = name.encode() + b"="
    for entry in _environment(place).split(b"\0"):
        if entry.startswith(prefix):
            return os.fsdecode(entry[len(prefix) :])
    return None


def _environment(place: str) -> bytes:
    """Between two programs a process shows none, and would be taken for nobody's: what it will have is waited for."""
    settled = False
    try:
        for _ in range(EXEC_LOOKS):
            with open(f"{place}/environ", "rb") as file:  # noqa: PTH123  # see above
                environment = file.read()
            if environment or settled:
                return environment
            settled = not _is_between_programs(place)
            if not settled:
                select.select([], [], [], EXEC_PAUSE_S)
    except OSError:
        pass
    return b""


def _is_between_programs(place: str) -> bool:
    """It has a program, but no code of it yet. OSError where it has none: the kernel's own threads, and what ends."""
    with open(f"{place}/stat", "rb") as file:  # noqa: PTH123  # see above
        text = file.read()
    code_begins = int(text[text.rindex(b")") + 2 :].split()[23])
    return code_begins == 0 and bool(os.readlink(f"{place}/exe"))  # noqa: PTH115  # see above


def _lives_in(place: str, folder: str) -> bool:
    for link in ("cwd", "exe", "root"):
        try:
            target = os.readlink(f"{place}/{link}")  # noqa: PTH115  # see above
        except OSError:
            continue
        if target == folder or target.startswith(folder + "/"):
            return True
    return False
