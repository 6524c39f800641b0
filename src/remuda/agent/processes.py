"""A machine's processes: finding them, running commands, and the end of a part of the tree."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remuda import procfs
from remuda.agent.job_user import JobUser
from remuda.ports.clock import Clock
from remuda.procfs import Process, all_processes, descendants, read_process

KILL_LIMIT_S = 10.0
#: How long one killed process may take to be gone before the next look.
KILL_PAUSE_S = 0.1
SIGNAL_LIMIT_S = 5.0
#: The end of a command's output that is kept.
MAX_OUTPUT_BYTES = 64 * 1024
#: Empty looks in a row that prove the end: a process whose parent ended during a look is not seen by it.
EMPTY_LOOKS = 2
_PROC = Path("/proc")


def _with_ancestors(pid: int, processes: Mapping[int, Process]) -> set[int]:
    found: set[int] = set()
    while pid in processes and pid not in found:
        found.add(pid)
        pid = processes[pid].ppid
    return found


def children(pid: int) -> list[Process]:
    """Direct ones, without a look at everybody where the kernel lists them."""
    try:
        lists = [path.read_text() for path in (_PROC / str(pid) / "task").glob("*/children")]
    except OSError:
        return []
    if not lists:
        return [process for process in all_processes().values() if process.ppid == pid]
    found = (read_process(int(number)) for text in lists for number in text.split())
    return [process for process in found if process is not None]


def command(pid: int) -> tuple[str, ...]:
    """Its command line; empty where it cannot be read."""
    try:
        text = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(os.fsdecode(part) for part in text.split(b"\0")[:-1])


def program_name(pid: int) -> str:
    """What it is told by: its program's name. Its arguments may hold a secret, and what is told is kept."""
    try:
        return os.fsdecode((_PROC / str(pid) / "comm").read_bytes()).strip() or f"process {pid}"
    except OSError:
        return f"process {pid}"


def find_running(program: Path, processes: Iterable[Process]) -> Iterator[Process]:
    """Those that run this program, by themselves or through an interpreter."""
    for process in processes:
        if str(program) in command(process.pid)[:3]:
            yield process


def user_arguments(user: JobUser | None) -> dict[str, Any]:
    """For the start of a process: as this user and nothing else, with none of the agent's groups."""
    return {} if user is None else {"user": user.uid, "group": user.gid, "extra_groups": []}


def reset_oom_score(pid: int) -> None:
    """The kernel spares the agent when memory runs out. What it starts would be spared as well."""
    with contextlib.suppress(OSError):
        (_PROC / str(pid) / "oom_score_adj").write_text("0")


def disable_core_dumps() -> None:
    """Neither this process, which holds tokens, nor what it starts, jobs for one. None of them can undo it: the limit
    is one for good.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def send_signal(process: Process, number: signal.Signals) -> int | None:
    return procfs.send_signal(process.pid, process.started, number)


@dataclass(frozen=True, kw_only=True, slots=True)
class KillResult:
    #: By the names of their programs.
    killed: tuple[str, ...]
    left: tuple[Process, ...]


def kill_descendants(root: int, *, keep: Collection[int], clock: Clock, limit_s: float = KILL_LIMIT_S) -> KillResult:
    """SIGKILL all descendants of `root` but those in `keep`, until none is left or the time is over. Blocks.
    What stands between `root` and those to keep is kept as well: an interpreter, a wrapper.

    Complete where `root` adopts the orphans below it (a subreaper): then nothing can leave its tree, neither by a
    second fork nor by a session of its own nor by another environment.
    """

    def find() -> list[Process]:
        present = all_processes()
        kept = {above for pid in keep for above in _with_ancestors(pid, present)}
        return [process for process in descendants(root, present) if process.pid not in kept]

    return _kill_until_none(find, kill, clock=clock, limit_s=limit_s)


def kill_user(user: JobUser, *, clock: Clock, limit_s: float = KILL_LIMIT_S) -> KillResult:
    """SIGKILL all that a user runs, until nothing is left or the time is over. Blocks. Needs root.

    Whose a process is survives forks, sessions, another environment and another parent. One signal to all at once is
    what a process that forks all the time cannot outrun; each by itself is what none of them can prevent.
    """

    def find() -> list[Process]:
        return [
            process for process in all_processes().values() if any(map(user.is_one_of_its, procfs.users(process.pid)))
        ]

    def end(found: Sequence[Process]) -> None:
        _signal_all_of(user)
        kill(found)

    return _kill_until_none(find, end, clock=clock, limit_s=limit_s)


#: Not by another program after the change of user: that could not be started where the user has as many processes as it
#: may have. What is imported is so before, from where the user may not look.
_BECOME = """
import os, sys{more}
uid, gid = map(int, sys.argv[1:3])
os.setgroups([])
os.setresgid(gid, gid, gid)
os.setresuid(uid, uid, uid)
"""


def run_as(
    user: JobUser, code: str, *arguments: str, limit_s: float, modules: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Python code in a process that has become the user, with these modules. Needs root; fails as `subprocess.run`."""
    become = _BECOME.format(more="".join(f", {module}" for module in modules))
    return subprocess.run(
        [sys.executable, "-ISc", become + code, str(user.uid), str(user.gid), *arguments],
        env={},
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def _signal_all_of(user: JobUser) -> None:
    """All that it may signal: nobody but its own. Where nobody is left, that is said and not listened to."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        run_as(user, "os.kill(-1, 9)", limit_s=SIGNAL_LIMIT_S)


def _kill_until_none(
    find: Callable[[], list[Process]], end: Callable[[Sequence[Process]], None], *, clock: Clock, limit_s: float
) -> KillResult:
    limit = clock.monotonic() + limit_s
    killed: dict[Process, str] = {}
    empty = 0
    while True:
        found = find()
        empty = 0 if found else empty + 1
        if empty == EMPTY_LOOKS:
            return KillResult(killed=tuple(killed.values()), left=())
        if found and clock.monotonic() >= limit:
            return KillResult(killed=tuple(killed.values()), left=tuple(found))
        for process in found:
            killed.setdefault(process, program_name(process.pid))
        # Where none was seen, too: one that is another process every moment is gone before a look comes to it.
        end(found)


def kill(processes: Iterable[Process]) -> None:
    procfs.kill(processes, KILL_PAUSE_S)


async def wait_for_end(descriptor: int, timeout_s: float) -> bool:
    """Wait for the end of a process by its descriptor. Whether it has ended."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return True


async def run(
    arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], limit_s: float, scratch: Path
) -> tuple[int | None, str]:
    """Its exit code, None where it had to be killed, and the end of its output. The output goes to a file: a pipe
    would be held open by what the command leaves in the background.
    """
    with tempfile.TemporaryFile(dir=scratch) as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                cwd=folder,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as problem:
            return 127, str(problem)
        code: int | None = None
        try:
            async with asyncio.timeout(limit_s):
                code = await process.wait()
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_OUTPUT_BYTES))
        return code, output.read().decode(errors="replace")
