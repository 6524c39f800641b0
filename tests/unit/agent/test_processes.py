"""Lookup and killing of processes, with real processes."""

# The tests wait for other processes, and blocking calls are acceptable.
# ruff: noqa: ASYNC110, ASYNC220

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest

from remuda import procfs
from remuda.adapters.system.clock import SystemClock
from remuda.agent import processes
from tests.support.records import LONG_S

#: A subreaper: runs a script, prints "ready", and ends with its input.
SUBREAPER = """
import ctypes, os, signal, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
subprocess.Popen(["/bin/sh", "-c", sys.argv[1]], stdin=subprocess.DEVNULL, stdout=sys.stdout)
sys.stdin.read()
"""


class Tree:
    """A subreaper process and its descendants."""

    def __init__(self, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUBREAPER, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self.process.pid

    def find(self, *command: str) -> procfs.Process:
        """Return the descendant with this command line. Waits until it exists."""
        limit = SystemClock().monotonic() + LONG_S
        while SystemClock().monotonic() < limit:
            for process in procfs.descendants(self.pid):
                if procfs.command(process.pid) == command:
                    return process
        raise TimeoutError(command)

    def close(self) -> None:
        processes.kill_descendants(self.pid, keep=(), clock=SystemClock(), limit_s=LONG_S)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def grow() -> Iterator[Callable[[str], Tree]]:
    """Starts a tree, which is killed at the end."""
    with ExitStack() as trees:
        yield lambda script: trees.enter_context(closing(Tree(script)))


@pytest.mark.parametrize("lists_children", [True, False])
def test_descendants_are_sorted_by_distance(
    grow: Callable[[str], Tree], monkeypatch: pytest.MonkeyPatch, *, lists_children: bool
) -> None:
    assert procfs.LISTS_CHILDREN
    monkeypatch.setattr(procfs, "LISTS_CHILDREN", lists_children)
    tree = grow("sh -c 'echo ready; sleep 1000; :'; :")

    sleeper = tree.find("sleep", "1000")
    found = procfs.descendants(tree.pid)

    assert found[0].ppid == tree.pid
    assert found[-1].pid == sleeper.pid
    assert procfs.descendants(tree.pid, {}) == []


def test_ended_process_is_not_found() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert procfs.read_process(process.pid) is None, "a zombie does nothing any more"
    process.wait()
    assert procfs.read_process(process.pid) is None
    assert procfs.command(process.pid) == ()


def test_reused_pid_is_not_signalled() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        seen = procfs.read_process(process.pid)
        assert seen is not None
        assert procfs.is_alive(seen.pid, seen.started)
        other = procfs.Process(pid=seen.pid, ppid=seen.ppid, started=seen.started - 1)

        assert not procfs.is_alive(other.pid, other.started)
        assert processes.send_signal(other, signal.SIGKILL) is None
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert processes.send_signal(seen, signal.SIGKILL) is None


def test_all_descendants_but_the_kept_ones_are_killed(grow: Callable[[str], Tree]) -> None:
    tree = grow("sleep 1000 & (setsid sh -c 'sleep 1001 & sleep 1002' >/dev/null &) ; echo ready; wait")
    for number in ("1001", "1002"):
        tree.find("sleep", number)
    sleeper = tree.find("sleep", "1000")

    killing = processes.kill_descendants(tree.pid, keep={tree.pid, sleeper.pid}, clock=SystemClock(), limit_s=LONG_S)

    assert killing.survivors == ()
    # Names without arguments, which may contain secrets.
    assert sorted(killing.killed) in (["sh", "sleep", "sleep"], ["sleep", "sleep"])
    # The shell between the two is kept, too.
    assert [process.pid for process in procfs.descendants(tree.pid)] == [sleeper.ppid, sleeper.pid]


def test_process_that_another_restarts_is_killed(grow: Callable[[str], Tree]) -> None:
    tree = grow("while :; do sh -c 'while :; do sleep 1000; done'; done & echo ready; while :; do sleep 999; done")

    killing = processes.kill_descendants(tree.pid, keep=(), clock=SystemClock(), limit_s=LONG_S)

    assert killing.survivors == ()
    assert procfs.descendants(tree.pid) == []


#: A process whose first thread ends while the second continues.
WITHOUT_FIRST_THREAD = """
import ctypes, platform, threading
threading.Thread(target=lambda: threading.Event().wait()).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(dict(x86_64=60, aarch64=93)[platform.machine()], 0)
"""


def test_process_without_its_first_thread_is_found(grow: Callable[[str], Tree]) -> None:
    tree = grow(f"exec {sys.executable} -c '{WITHOUT_FIRST_THREAD}'")
    (process,) = procfs.descendants(tree.pid)
    status = Path(f"/proc/{process.pid}/status")
    while "Z (zombie)" not in status.read_text():
        pass

    assert procfs.is_alive(process.pid, process.started)
    assert len(processes.kill_descendants(tree.pid, keep=(), clock=SystemClock(), limit_s=LONG_S).killed) == 1
    assert procfs.descendants(tree.pid) == []


def test_marker_is_readable_during_an_exec() -> None:
    """During an exec the kernel shows an empty environment."""
    markers = set()
    for _ in range(20):
        process = subprocess.Popen(["/bin/sh", "-c", "exec sleep 1000"], env={procfs.MARKER: "i-1"})
        try:
            markers |= {procfs._variable(f"/proc/{process.pid}", procfs.MARKER) for _ in range(20)}
        finally:
            process.kill()
            process.wait()
    assert markers == {"i-1"}


def test_children_write_no_core_dump() -> None:
    code = (
        "import subprocess; from remuda.agent import processes; processes.disable_core_dumps();"
        "subprocess.run(['sh', '-c', 'ulimit -Hc; ulimit -Sc'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0"]


def test_core_dumps_stay_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applied to a child instead of this process, which could not undo it."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        monkeypatch.setattr(resource, "setrlimit", partial(resource.prlimit, process.pid))
        processes.disable_core_dumps()
        assert resource.prlimit(process.pid, resource.RLIMIT_CORE) == (0, 0)


def test_kill_gives_up_at_the_time_limit(grow: Callable[[str], Tree]) -> None:
    tree = grow("echo ready; exec sleep 1000")

    killing = processes.kill_descendants(tree.pid, keep=(), clock=SystemClock(), limit_s=0)

    assert [process.ppid for process in killing.survivors] == [tree.pid]


def test_process_has_the_name_of_its_program(tmp_path: Path) -> None:
    program = tmp_path / "a (pro) gram"
    # The script prints a line after its own exec.
    program.write_text("#!/bin/sh\necho started\nread line\n")
    program.chmod(0o755)
    process = subprocess.Popen([program, "run"], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    try:
        found = procfs.read_process(process.pid)
        assert found is not None
        assert (found.name, found.pid, found.ppid) == (program.name, process.pid, os.getpid())
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_descendants_reads_no_unrelated_processes(grow: Callable[[str], Tree], monkeypatch: pytest.MonkeyPatch) -> None:
    tree = grow("sh -c 'echo ready; sleep 1000; :'; :")
    sleeper = tree.find("sleep", "1000")
    read: list[int] = []
    read_process = procfs.read_process

    def recorded(pid: int) -> procfs.Process | None:
        read.append(pid)
        return read_process(pid)

    monkeypatch.setattr(procfs, "read_process", recorded)
    found = procfs.descendants(tree.pid)
    # By what identifies it: its name changes when the shell becomes another program.
    assert (sleeper.pid, sleeper.started) in [(process.pid, process.started) for process in found]
    assert sorted(read) == sorted(process.pid for process in found)


def test_children_of_threads_are_descendants() -> None:
    script = """
import subprocess, threading
threading.Thread(target=lambda: (subprocess.Popen(["sleep", "1000"]), print("ready", flush=True), input())).start()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (sleeper,) = procfs.descendants(process.pid)
        assert sleeper.ppid == process.pid
        procfs.kill([sleeper], LONG_S)
        process.communicate(b"\n")


async def test_wait_for_end_returns_when_the_process_ends() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    seen = procfs.read_process(process.pid)
    assert seen is not None
    descriptor = os.pidfd_open(process.pid)
    try:
        assert not await processes.wait_for_end(descriptor, 0.01)
        event = asyncio.Event()
        asyncio.get_running_loop().call_soon(event.set)
        assert not await processes.wait_for_end(descriptor, LONG_S, event)
        waiting = asyncio.ensure_future(processes.wait_for_end(descriptor, LONG_S))
        await asyncio.sleep(0)
        process.kill()
        assert await waiting
    finally:
        os.close(descriptor)
        process.wait()


class TestRun:
    async def run(self, folder: Path, *command: str, timeout_s: float = LONG_S) -> tuple[int | None, str]:
        return await processes.run(command, cwd=folder, environment={"A": "b"}, timeout_s=timeout_s, temp_dir=folder)

    async def test_returns_exit_code_and_output(self, tmp_path: Path) -> None:
        script = "echo out; echo err >&2; echo $A; exit 3"
        assert await self.run(tmp_path, "/bin/sh", "-c", script) == (3, "out\nerr\nb\n")

    async def test_does_not_wait_for_background_processes(self, tmp_path: Path) -> None:
        code, output = await self.run(tmp_path, "/bin/sh", "-c", "sleep 1000 & echo $!")
        os.kill(int(output), signal.SIGKILL)
        assert code == 0

    async def test_process_group_is_killed_at_the_time_limit(self, tmp_path: Path) -> None:
        output, limit_s = "", 0.1
        while not output:
            # Increase the limit until the script has time for its first output.
            limit_s *= 2
            script = "sleep 1000 & echo $!; wait"
            code, output = await self.run(tmp_path, "/bin/sh", "-c", script, timeout_s=limit_s)
            assert code is None
        child = procfs.read_process(int(output))
        while child is not None and procfs.is_alive(child.pid, child.started):
            await asyncio.sleep(0.01)

    async def test_command_that_cannot_start_returns_127(self, tmp_path: Path) -> None:
        code, output = await self.run(tmp_path, "/no/such/program")
        assert code == 127
        assert "/no/such/program" in output
