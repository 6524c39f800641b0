"""Files and locks in a local machine's folder. Uses the standard library only, because the supervisor imports it.

instance.json     the record: identity, tags, end                 instance.lock   held during each change of the record
power             locked while the machine is powered on          boot.json       input of the supervisor
agent-state.json  state of the agent                              notice          a spot notice, written by hand
pre-runner.sh     the pre-runner script                           logs/           kept after the end
home/ tmp/ work/ runner/                                          used by jobs
"""

# pathlib would slow down the start of each supervisor and increase its memory use
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
AGENT_STATE = "agent-state.json"
NOTICE = "notice"
SCRIPT = "pre-runner.sh"
LOGS = "logs"
HOME, TMP, WORK, RUNNER = ("home", "tmp", "work", "runner")
#: Entries of a finished machine that are kept for reports.
KEPT = frozenset({RECORD, LOCK, POWER, LOGS})
MAX_RECORD_BYTES = 1024 * 1024


def read(path: str) -> dict[str, Any] | None:
    """Read a JSON object, or return None. Jobs can write to the file, so the caller must check the content."""
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read(MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def write(path: str, data: bytes, *, durable: bool = False, mode: int = 0o600) -> None:
    """Write the file atomically. With `durable`, it also holds the old or the new content after a crash."""
    directory, name = os.path.split(path)
    # Unique among concurrent writers; a file left by a crash is overwritten.
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
    """Hold a lock among all processes."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def change(folder: str, values: dict[str, Any], defaults: dict[str, Any] | None = None) -> None:
    """Set some of the record's values. `defaults` replace values that a job may have removed from the record."""
    path = os.path.join(folder, RECORD)
    with locked(os.path.join(folder, LOCK)):
        document = (defaults or {}) | (read(path) or {})
        if not document:
            raise OSError(errno.EINVAL, "the machine's record is missing", path)
        write(path, encode(document | values))


# A machine is powered on while a file lock is held. The launcher takes the lock and the supervisor inherits it; the
# kernel releases it when the last of them ends. A reused pid therefore cannot make a dead machine look alive, and a
# machine whose supervisor is still starting does not look dead.


def power_on(folder: str) -> int:
    descriptor = os.open(os.path.join(folder, POWER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def write_supervisor(descriptor: int, pid: int, started: int) -> None:
    """Write the supervisor's pid and start time. Launcher and supervisor both write the same content."""
    os.pwrite(descriptor, b"%d %d\n" % (pid, started), 0)


def supervisor(folder: str) -> tuple[int, int] | None:
    """Return the supervisor's pid and start time, or None if it has not been started yet."""
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
        # A shared lock, so that concurrent checks do not count as the machine's lock.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def strip(folder: str) -> None:
    """Remove everything except the entries that are kept for reports."""
    with os.scandir(folder) as entries:
        erase([entry.path for entry in entries if entry.name not in KEPT])


def erase(paths: Iterable[str]) -> None:
    """Remove files and folders as far as possible. Links are not followed."""
    existing = [path for path in paths if os.path.lexists(path)]
    if not existing or _run("rm", "-rf", "--", *existing) == 0:
        return
    folders = [path for path in existing if os.path.lexists(path) and stat.S_ISDIR(os.lstat(path).st_mode)]
    if folders:
        # rm fails in folders without write permission. chmod -R does not follow links below its arguments.
        _run("chmod", "-R", "u+rwX", "--", *folders)
    _run("rm", "-rf", "--", *existing)


def _run(*command: str) -> int:
    quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
    pid = os.posix_spawnp(command[0], command, {"PATH": os.defpath}, file_actions=quiet)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
