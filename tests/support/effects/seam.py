"""The seam: all functions through which the agent acts on its host, by module, and what replaces each in the model.

While `installed`, a call that comes from an agent of a `Life` goes to the model host. Each effect is announced to
`ModelHost.effect`, which may kill the agent, reboot the host or let the effect fail. Other callers, such as pytest, are
not affected. `tests/unit/agent/test_effects.py` fails if the agent uses a function that no table here knows.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import errno
import io
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Self
from unittest import mock

from remuda import inotify, procfs
from remuda.agent import (
    cache_volumes,
    connections,
    fuse_connections,
    kernel_state,
    mounts,
    processes,
    quotas,
    sandbox,
    socket_filter,
    system_call_filter,
)
from remuda.agent.guard_process import GuardProcess
from remuda.agent.kernel_modules import KernelModules
from simulation.loop import VirtualProcess, current_process
from tests.support.effects.host import HostProcess, ModelHost
from tests.support.virtual_time import Killed

#: Functions of the operating system that change files. All take a path first, those in `TWO_PATHS` a second one.
FILE_EFFECTS = ("chmod", "chown", "mkdir", "mknod", "remove", "rename", "replace", "rmdir", "unlink", "utime")
TWO_PATHS = frozenset({"rename", "replace"})
#: Functions that look at files without changing them.
FILE_READS = ("access", "listdir", "lstat", "readlink", "scandir", "stat")

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_PLACEHOLDER = "/dev/null"
_REAL_OPEN, _REAL_IO_OPEN, _REAL_CLOSE, _REAL_SYMLINK = os.open, io.open, os.close, os.symlink
_REAL_LSTAT = os.lstat

_hosts: dict[VirtualProcess, ModelHost] = {}


def attach(process: VirtualProcess, host: ModelHost) -> None:
    """Let the calls of an agent go to this host."""
    _hosts[process] = host


def detach_all() -> None:
    _hosts.clear()


def _host() -> ModelHost | None:
    """The host of the running code; None for code that is not an agent's."""
    process = current_process()
    if process is None:
        return None
    if process.dead:
        raise Killed
    return _hosts.get(process)


def _the_host() -> ModelHost:
    host = _host()
    if host is None:
        raise AssertionError("a part of the model was called from outside an agent")
    return host


def _fail(target: object, code: int = errno.EIO) -> OSError:
    return OSError(code, f"{os.strerror(code)} (injected)", str(target))


# Files --------------------------------------------------------------------------------------------------------------


def _file_read(name: str) -> Callable[..., Any]:
    real = getattr(os, name)

    def call(path: Any = ".", *given: Any, **named: Any) -> Any:
        host = _host()
        return real(path if host is None else host.real(path), *given, **named)

    return call


def _file_effect(name: str) -> Callable[..., Any]:
    real = getattr(os, name)

    def call(path: Any, *given: Any, **named: Any) -> Any:
        host = _host()
        if host is None or named.get("dir_fd") is not None:
            return real(path, *given, **named)
        path = host.name(path)
        if host.effect(name, given[0] if name in TWO_PATHS else path):
            raise _fail(path, errno.ENOSPC if name in {"mkdir", "rename", "replace"} else errno.EIO)
        source = host.real(path)
        if name in TWO_PATHS:
            host.before_rename(path)
            result = real(source, host.real(given[0]))
            host.renamed(path, str(given[0]))
            return result
        if name == "mknod":
            return _REAL_CLOSE(_REAL_OPEN(source, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        if name == "rmdir" and host.is_cgroup(path):
            return host.remove_cgroup(path)
        if name == "mkdir":
            result = real(source, *given, **named)
            host.made_folder(path)
            return result
        if name == "chown":
            # It needs root, so the model only notes it.
            _REAL_LSTAT(source)
            host.owners[path] = given[0]
            return None
        return real(source, *given, **named)

    return call


def _symlink(target: Any, path: Any, *given: Any, **named: Any) -> None:
    host = _host()
    if host is not None and host.effect("symlink", path):
        raise _fail(path, errno.ENOSPC)
    _REAL_SYMLINK(target, path if host is None else host.real(path), *given, **named)


def _open_descriptor(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    host = _host()
    if host is None or dir_fd is not None:
        return _REAL_OPEN(path, flags, mode, dir_fd=dir_fd)
    if flags & _WRITES and host.effect("open", path):
        raise _fail(path, errno.ENOSPC)
    descriptor = _REAL_OPEN(host.real(path), flags, mode)
    host.descriptors.pop(descriptor, None)
    if flags & _WRITES:
        host.descriptors[descriptor] = str(path)
    return descriptor


class _Writer(io.RawIOBase):
    """A file that is open for writing. Each write is an effect; a killed agent's buffers are lost."""

    def __init__(self, host: ModelHost, path: str, descriptor: int) -> None:
        super().__init__()
        self._host, self._path, self._descriptor = host, path, descriptor
        self._process = current_process()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        content = bytes(data)
        if self._process is not None and self._process.dead:
            return len(content)
        if self._host.effect("write", self._path, content):
            raise _fail(self._path, errno.ENOSPC)
        self._host.write(self._path, self._descriptor, content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            super().close()
            _REAL_CLOSE(self._descriptor)


def _open(file: Any, mode: str = "r", buffering: int = -1, *given: Any, **named: Any) -> IO[Any]:
    host = _host()
    if host is None or named.get("opener") is not None:
        return _REAL_IO_OPEN(file, mode, buffering, *given, **named)
    if str(file) == "/proc/self/mountinfo":
        return io.BytesIO(host.mount_table())
    writes = not set(mode).isdisjoint("wax")
    if isinstance(file, int):
        if not writes or file not in host.descriptors:
            return _REAL_IO_OPEN(file, mode, buffering, *given, **named)
        descriptor = file
    elif not writes:
        return _REAL_IO_OPEN(host.real(file), mode, buffering, *given, **named)
    else:
        if host.is_control_file(str(file)) and not host.has_control_file(str(file)):
            folder = os.path.dirname(file)  # noqa: PTH120
            code = errno.EACCES if os.path.exists(folder) else errno.ENOENT  # noqa: PTH110
            raise OSError(code, "the kernel makes these files", str(file))
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if "a" in mode else os.O_TRUNC)
        descriptor = _open_descriptor(file, flags, 0o666)
    writer: IO[Any] = io.BufferedWriter(_Writer(host, host.descriptors[descriptor], descriptor))
    return writer if "b" in mode else io.TextIOWrapper(writer, encoding=named.get("encoding") or "utf-8")


def _fsync(descriptor: int) -> None:
    host = _host()
    if host is not None and host.effect("fsync", host.descriptors.get(descriptor, "a folder")):
        raise _fail("fsync")


def _fchmod(descriptor: int, mode: int) -> None:
    host = _host()
    if host is not None and host.effect("fchmod", host.descriptors.get(descriptor, "")):
        raise _fail("fchmod")
    _REAL_FCHMOD(descriptor, mode)


_REAL_FCHMOD, _REAL_LISTXATTR, _REAL_SETXATTR = os.fchmod, os.listxattr, os.setxattr


def _setxattr(path: Any, name: str, value: bytes, *given: Any, **named: Any) -> None:
    host = _host()
    if host is None:
        _REAL_SETXATTR(path, name, value, *given, **named)
    elif host.effect("setxattr", path):
        raise _fail(path)
    else:
        host.attributes.setdefault(str(path), []).append(name)


def _listxattr(path: Any = None, **named: Any) -> list[str]:
    host = _host()
    return _REAL_LISTXATTR(path, **named) if host is None else host.attributes.get(str(path), [])


def _is_mount(path: Path) -> bool:
    host = _host()
    return _REAL_IS_MOUNT(path) if host is None else host.is_mount(str(path))


_REAL_IS_MOUNT, _REAL_DISK_USAGE, _REAL_RMTREE = Path.is_mount, shutil.disk_usage, shutil.rmtree
_REAL_STATVFS = os.statvfs


def _disk_usage(path: Any) -> Any:
    host = _host()
    if host is None:
        return _REAL_DISK_USAGE(path)
    return SimpleNamespace(total=host.disk_free * 2, used=host.disk_free, free=host.disk_free)


def _statvfs(path: Any) -> Any:
    host = _host()
    if host is None:
        return _REAL_STATVFS(path)
    return SimpleNamespace(f_bavail=host.disk_free, f_frsize=1, f_files=0, f_favail=0)


def _rmtree(path: Any, ignore_errors: bool = False, *given: Any, **named: Any) -> None:  # noqa: FBT001, FBT002
    """One effect for each file and folder, so that a deletion can be cut half-way."""
    host = _host()
    if host is None:
        _REAL_RMTREE(path, ignore_errors, *given, **named)
        return
    try:
        for folder, folders, files in os.walk(path, topdown=False):
            for name in files:
                os.unlink(f"{folder}/{name}")  # noqa: PTH108
            for name in folders:
                os.rmdir(f"{folder}/{name}")  # noqa: PTH106
        os.rmdir(path)  # noqa: PTH106
    except OSError:
        if not ignore_errors:
            raise


# Processes ----------------------------------------------------------------------------------------------------------


def _popen(command: Any, **named: Any) -> Any:
    host = _host()
    if host is None:
        return _REAL_POPEN(command, **named)
    if host.effect("start", _program(command)):
        raise _fail(command[0], errno.EAGAIN)
    return SimpleNamespace(pid=host.programs.popen(tuple(map(str, command)), named).pid, returncode=None)


_REAL_POPEN, _REAL_RUN, _REAL_EXEC = subprocess.Popen, subprocess.run, asyncio.create_subprocess_exec


def _run(command: Any, **named: Any) -> Any:
    host = _host()
    if host is None:
        return _REAL_RUN(command, **named)
    words = tuple(map(str, command))
    if host.effect("run", _program(command)):
        code, error = 1, "injected"
        output = ""
    else:
        code, output, error = host.programs.run(words)
    return subprocess.CompletedProcess(words, code, output, error)


async def _exec(*command: Any, **named: Any) -> Any:
    host = _host()
    if host is None:
        return await _REAL_EXEC(*command, **named)
    if host.effect("start", _program(command)):
        raise _fail(command[0], errno.EAGAIN)
    return host.programs.child(tuple(map(str, command)), named)


def _program(command: Any) -> str:
    """A command for reports: its program and its last words, without the text of scripts."""
    words = [str(word) for word in command if "\n" not in str(word) and not str(word).startswith("--")]
    return " ".join([words[0].rpartition("/")[2], *words[1:][-3:]])


def _killpg(group: int, number: int) -> None:
    host = _host()
    if host is None:
        _REAL_KILLPG(group, number)
    elif not host.effect("kill", f"group {group}"):
        host.end_by_pid(group)


def _waitpid(pid: int, options: int) -> tuple[int, int]:
    host = _host()
    if host is None:
        return _REAL_WAITPID(pid, options)
    if pid not in host.processes:
        raise ChildProcessError(errno.ECHILD, "no child")
    return (0, 0)


def _pidfd_open(pid: int, flags: int = 0) -> int:
    host = _host()
    if host is None:
        return _REAL_PIDFD_OPEN(pid, flags)
    if pid not in host.processes:
        raise ProcessLookupError(errno.ESRCH, "no such process")
    descriptor = _REAL_OPEN(_PLACEHOLDER, os.O_RDONLY | os.O_CLOEXEC)
    host.pidfds[descriptor] = host.processes[pid]
    return descriptor


_REAL_KILLPG, _REAL_WAITPID, _REAL_PIDFD_OPEN = os.killpg, os.waitpid, os.pidfd_open


async def _wait_for_end(descriptor: int, timeout_s: float, event: asyncio.Event | None = None) -> bool:
    process, event = _the_host().pidfds[descriptor], event or asyncio.Event()
    if not process.alive:
        return True
    process.watchers.append(event.set)
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    finally:
        process.watchers.remove(event.set)
    return not process.alive


def _read_process(pid: int) -> procfs.Process | None:
    found = _the_host().processes.get(pid)
    return None if found is None else _as_process(found)


def _as_process(process: HostProcess) -> procfs.Process:
    return procfs.Process(pid=process.pid, ppid=process.ppid, started=process.started, name=process.name)


def _is_alive(pid: int, started: int) -> bool:
    found = _the_host().processes.get(pid)
    return found is not None and found.started == started


def _all_processes() -> dict[int, procfs.Process]:
    return {pid: _as_process(each) for pid, each in _the_host().processes.items()}


def _descendants(root: int, _processes: object = None) -> list[procfs.Process]:
    return [_as_process(each) for each in _the_host().descendants(root)]


def _children(pid: int) -> list[procfs.Process]:
    return [_as_process(each) for each in _the_host().processes.values() if each.ppid == pid]


def _runner_processes(_sandboxes: sandbox.Sandboxes) -> list[procfs.Process]:
    """The processes in the cgroup that the listener has started in."""
    found = _the_host().processes.values()
    return [_as_process(each) for each in found if each.cgroup.endswith("/remuda-runner")]


def _send_signal(pid: int, started: int, number: signal.Signals) -> int | None:
    host = _the_host()
    if not _is_alive(pid, started):
        return None
    if host.effect("kill", f"{host.processes[pid].name} {number.name}"):
        raise _fail(pid, errno.EPERM)
    descriptor = _pidfd_open(pid)
    host.signal(pid, number)
    return descriptor


def _kill_step(value: str) -> None:
    host = _the_host()
    for process in list(host.processes.values()):
        if process.environment.get(procfs.STEP) == value and not host.effect("kill", process.name):
            host.end(process)


def _command(pid: int) -> tuple[str, ...]:
    found = _the_host().processes.get(pid)
    return () if found is None else found.command


def _users(pid: int) -> frozenset[int]:
    found = _the_host().processes.get(pid)
    return frozenset() if found is None else frozenset({found.user})


@contextlib.contextmanager
def _watch(path: Path, on_change: Callable[[], object]) -> Iterator[bool]:
    watchers = _the_host().watchers.setdefault(str(path), [])
    watchers.append(on_change)
    try:
        yield True
    finally:
        watchers.remove(on_change)


# Mounts and the rest ------------------------------------------------------------------------------------------------


def _mount_call(number: int, *given: Any) -> int:
    """The system calls of `mounts`: clone a tree, change its owners, mount it."""
    host = _the_host()
    if number == mounts._OPEN_TREE:
        descriptor = _REAL_OPEN(_PLACEHOLDER, os.O_RDONLY | os.O_CLOEXEC)
        host.trees[descriptor] = os.fsdecode(given[1])
        return descriptor
    if number == mounts._MOVE_MOUNT:
        target = os.fsdecode(given[3])
        if host.effect("mount", target):
            raise _fail(target)
        host.mount(target, "idmapped", source=host.trees[given[0]])
    return 0


def _user_namespace(_first_id: int) -> int:
    _the_host()
    return _REAL_OPEN(_PLACEHOLDER, os.O_RDONLY | os.O_CLOEXEC)


def _read_filter(pid: int) -> list[bytes]:
    if pid not in _the_host().processes:
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
    return [b"filter"]


def _limit_quota(folder: Path, _project: int, _space: object) -> bool:
    """The model's disk has no quotas."""
    _the_host().effect("quota", folder)
    return False


def _delete_connections() -> None:
    if _the_host().effect("delete", "connections"):
        raise _fail("connections")


def _set_used(_guard: GuardProcess, *, used: bool) -> None:
    """On a page of memory, which the guard shares with agents."""
    _the_host().counts_as_used = used


def _nothing() -> None:
    """For what only concerns the agent's own process."""


def _select(*_: object) -> None:
    """Blocking waits of threads: time passes for the host."""
    _the_host().block(0.01)


_TIME = SimpleNamespace(
    monotonic=lambda: _the_host().now(),
    monotonic_ns=lambda: _the_host().unique_ns(),
)


class _NotifySocket:
    """The socket on which systemd-nspawn says that its container has booted."""

    def __init__(self, *_: object) -> None:
        self._host = _the_host()
        self._path = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._host.sockets.pop(self._path, None)

    def setblocking(self, _flag: bool) -> None:  # noqa: FBT001
        """The model never blocks."""

    def bind(self, path: str) -> None:
        if self._host.effect("bind", path):
            raise _fail(path)
        if Path(path).exists():
            raise _fail(path, errno.EADDRINUSE)
        _REAL_CLOSE(_REAL_OPEN(self._host.real(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        self._path = path
        self._host.sockets[path] = self.messages = asyncio.Queue[bytes]()


_SOCKET = SimpleNamespace(AF_UNIX=1, SOCK_DGRAM=2, socket=_NotifySocket)

#: Whole functions that the model replaces for every caller, by owner and name. Only agents call them in these tests.
REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (procfs, "read_process", _read_process),
    (procfs, "is_alive", _is_alive),
    (procfs, "all_processes", _all_processes),
    (procfs, "descendants", _descendants),
    (procfs, "children", _children),
    (procfs, "command", _command),
    (procfs, "send_signal", _send_signal),
    (procfs, "kill_step", _kill_step),
    (procfs, "users", _users),
    (procfs, "wait_for", lambda descriptor, _timeout: not _the_host().pidfds[descriptor].alive),
    (processes, "all_processes", _all_processes),
    (processes, "descendants", _descendants),
    (processes, "wait_for_end", _wait_for_end),
    (processes, "join_new_session_keyring", _nothing),
    (processes, "disable_core_dumps", _nothing),
    (inotify, "watch", _watch),
    (mounts, "_call", _mount_call),
    (mounts, "_user_namespace", _user_namespace),
    (system_call_filter, "read", _read_filter),
    # The guard has tests of its own; here, it only hears whether the sandbox is used, and nothing is ever short.
    (GuardProcess, "start", lambda _guard: None),
    (GuardProcess, "watch", lambda _guard: None),
    (GuardProcess, "set_used", _set_used),
    (KernelModules, "prepare", lambda _modules: None),
    (sandbox.Sandboxes, "processes", _runner_processes),
    (quotas, "limit", _limit_quota),
    (quotas, "usage", lambda _folder: None),
    (connections, "delete_all", _delete_connections),
    (cache_volumes, "time", _TIME),
    (cache_volumes, "select", SimpleNamespace(select=_select)),
    (system_call_filter, "start_filtered", lambda _program, start: start()),
    (socket_filter, "permits_socketcall", lambda: False),
    (fuse_connections, "abort", lambda _users: None),
    (kernel_state, "read_state", lambda: {"module": {}, "interface": {}, "setting": dict(_the_host().kernel)}),
    (sandbox, "time", _TIME),
    (sandbox, "socket", _SOCKET),
    (sandbox, "select", SimpleNamespace(select=_select)),
)
#: Functions of the standard library that go to the model for agents only.
REDIRECTED: tuple[tuple[Any, str, Any], ...] = (
    *((os, name, _file_read(name)) for name in FILE_READS),
    *((os, name, _file_effect(name)) for name in FILE_EFFECTS),
    (os, "symlink", _symlink),
    (os, "open", _open_descriptor),
    (os, "fsync", _fsync),
    (os, "fchmod", _fchmod),
    (os, "setxattr", _setxattr),
    (os, "listxattr", _listxattr),
    (os, "killpg", _killpg),
    (os, "waitpid", _waitpid),
    (os, "pidfd_open", _pidfd_open),
    (io, "open", _open),
    (builtins, "open", _open),
    (pathlib.Path, "is_mount", _is_mount),
    (os, "statvfs", _statvfs),
    (shutil, "disk_usage", _disk_usage),
    (shutil, "rmtree", _rmtree),
    (subprocess, "Popen", _popen),
    (subprocess, "run", _run),
    (asyncio, "create_subprocess_exec", _exec),
)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (*REPLACED, *REDIRECTED):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.callback(detach_all)
        yield
