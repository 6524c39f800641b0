"""A machine's folder: its record, its locks, its power. Standard library only: the supervisor starts with it.

instance.json   the record: who it is, its tags, how it ended       instance.lock   held for each change of it
power           locked as long as the machine has power             boot.json       what the supervisor starts
memory.json     the agent's                                         notice          the spot notice, played by hand
pre-runner.sh   the pre-runner script                               logs/           kept to the end
home/ tmp/ work/ runner/                                            the job's
"""

# pathlib would slow each supervisor's start and add to its memory
# ruff: noqa: PTH105, PTH108, PTH118, PTH123

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from typing import Any

RECORD = "instance.json"
LOCK = "instance.lock"
POWER = "power"
BOOT = "boot.json"
MEMORY = "memory.json"
NOTICE = "notice"
SCRIPT = "pre-runner.sh"
LOGS = "logs"
HOME, TMP, WORK, RUNNER = ("home", "tmp", "work", "runner")
#: What a finished machine leaves, for reports.
KEPT = frozenset({RECORD, LOCK, POWER, LOGS})
MAX_RECORD_BYTES = 1024 * 1024


def read(path: str) -> dict[str, Any] | None:
    """A JSON object, or None where there is none. Jobs may have written there: only the outer shape is sure."""
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read(MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def write(path: str, data: bytes, *, durable: bool = False, mode: int = 0o600) -> None:
    """Readers see the old content or the new one; with `durable`, so does whoever comes after a crash."""
    directory, name = os.path.split(path)
    # A name that no other writer has at this time; one left by a crash is written over.
    draft = os.path.join(directory, f".{name}.{os.getpid()}.{threading.get_ident()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(descriptor)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    if durable:
        _sync(directory)


def _sync(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def encode(document: Any) -> bytes:
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Among all processes. The holder does quick work only."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def change(folder: str, values: dict[str, Any], otherwise: dict[str, Any] | None = None) -> None:
    """Set some of the record's values. `otherwise` fills in what a job may have removed from it."""
    path = os.path.join(folder, RECORD)
    with locked(os.path.join(folder, LOCK)):
        document = (otherwise or {}) | (read(path) or {})
        if not document:
            raise OSError(errno.EINVAL, "no machine's record", path)
        write(path, encode(document | values))


# Power: a lock on an open file that the launcher takes and the supervisor inherits. The kernel lets go of it when the
# last of them dies, however that happens: so a machine is never taken for alive because its number was given anew, nor
# for dead because its supervisor has not come up yet.


def power_on(folder: str) -> int:
    descriptor = os.open(os.path.join(folder, POWER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def note_supervisor(descriptor: int, pid: int, started: int) -> None:
    """LocalLauncher and supervisor both write it, the same: whoever is first."""
    os.pwrite(descriptor, b"%d %d\n" % (pid, started), 0)


def supervisor(folder: str) -> tuple[int, int] | None:
    """Its pid and start time, or None where it has not been started yet."""
    try:
        with open(os.path.join(folder, POWER), "rb") as file:
            pid, started = map(int, file.read(64).split())
    except (OSError, ValueError):
        return None
    return pid, started


def has_power(folder: str) -> bool:
    try:
        descriptor = os.open(os.path.join(folder, POWER), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared: those who only look do not take each other for the machine.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def strip(folder: str) -> None:
    """Remove all but what is kept for reports."""
    with os.scandir(folder) as entries:
        erase([entry.path for entry in entries if entry.name not in KEPT])


def erase(paths: Iterable[str]) -> None:
    """Remove files and trees, as far as that goes. Links are never followed."""
    there = [path for path in paths if os.path.lexists(path)]
    if not there or _run("rm", "-rf", "--", *there) == 0:
        return
    trees = [path for path in there if os.path.lexists(path) and stat.S_ISDIR(os.lstat(path).st_mode)]
    if trees:
        # Folders without write permission resist; below its arguments chmod leaves links alone.
        _run("chmod", "-R", "u+rwX", "--", *trees)
    _run("rm", "-rf", "--", *there)


def _run(*command: str) -> int:
    quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    pid = os.posix_spawnp(command[0], command, {"PATH": os.defpath}, file_actions=quiet)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
