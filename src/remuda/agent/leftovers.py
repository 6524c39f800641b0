"""What jobs leave outside of their own folders, where they run as a user of their own: found by its owner wherever that
user may write, and removed. Needs root, and that none of the user's processes is left.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from remuda.agent import keyrings
from remuda.agent.findings import Finding, Kind
from remuda.agent.job_user import JobUser
from remuda.agent.privileges import why_privileged
from remuda.agent.reset import erase
from remuda.agent.shared_places import SharedPlaces, mounts
from remuda.domain.errors import Unavailable
from remuda.ports.clock import Clock

#: Where every user may write, on every system, and where the system keeps things for its users.
SHARED = (
    "/tmp",  # noqa: S108 - looked at, not written to
    "/var/tmp",  # noqa: S108 - as above
    "/dev/shm",  # noqa: S108 - as above
    "/dev/mqueue",
    "/run/lock",
    "/run/screen",
    "/sys/fs/bpf",
    "/var/crash",
    "/var/mail",
    "/var/spool/at",
    "/var/spool/cron",
    "/var/spool/mail",
)
#: What the system writes about a user's programs, and lets that user read.
RECORDS = (
    "/var/lib/systemd/coredump/core.*.{uid}.*",
    "/var/log/journal/*/user-{uid}[.@]*journal",
    "/run/log/journal/*/user-{uid}[.@]*journal",
)
QUEUES = Path("/dev/mqueue")
#: Where the kernel has message queues at all.
HAS_QUEUES = Path("/proc/sys/fs/mqueue")
PROTECTED_LINKS = Path("/proc/sys/fs/protected_hardlinks")
LINGER = Path("/var/lib/systemd/linger")
SYSV = {"shm": ("shmid", "-m"), "sem": ("semid", "-s"), "msg": ("msqid", "-q")}


COMMAND_LIMIT_S = 15.0
MAX_PROBLEMS = 5


def _try(command: Sequence[str]) -> None:
    """What became of it is looked at, not asked."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            list(command), stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_LIMIT_S, check=False
        )


def _listed(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def why_unseen(links: Path = PROTECTED_LINKS, queues: Path = HAS_QUEUES) -> str:
    """What a job could leave without a trace of its own, or empty."""
    with contextlib.suppress(OSError):
        if links.read_text(encoding="ascii").strip() == "0":
            return "jobs may make hard links to files of others: set fs.protected_hardlinks = 1"
    # Queues are there without a mount, too, and then without anybody who sees them.
    if queues.exists() and not any(mount.path == str(QUEUES) and mount.kind == "mqueue" for mount in mounts()):
        return f"message queues cannot be looked at: {QUEUES} is not mounted"
    return ""


class Leftovers:
    def __init__(
        self,
        *,
        user: JobUser,
        own: Sequence[Path],
        memory: Path,
        clock: Clock,
        shared: Sequence[str] = SHARED,
        searched: Sequence[str] | None = None,
        records: Sequence[str] = RECORDS,
        privileged: Callable[[JobUser], str] = why_privileged,
        unseen: Callable[[], str] = why_unseen,
    ) -> None:
        """`own` are the user's folders that are made anew anyway. `memory` is a file that jobs cannot reach."""
        self._user = user
        #: The system makes it when the user logs in.
        self._session = Path(f"/run/user/{user.uid}")
        skipped = (*own, self._session)
        self._skipped = frozenset(map(str, skipped))
        self._shared = [Path(name) for name in shared]
        self._records = [name.format(uid=user.uid) for name in records]
        self._privileged = privileged
        self._unseen = unseen
        self._places = SharedPlaces(
            user=user, own=skipped, shared=self._folders(), memory=memory, clock=clock, searched=searched
        )

    def prepare(self, *, anew: bool) -> None:
        """Begin to learn where the user may write. `anew` where no job has been on this machine yet."""
        self._places.begin(anew=anew)

    def sweep(self) -> list[Finding]:
        """What can be removed before it is known where else the user may write: of a machine that had no job, only its
        image can have left something.
        """
        return self._remove_files(self._folders())

    def remove(self) -> Sequence[Finding]:
        """What was removed. `Unavailable` where something is left, or could be."""
        places = self._places.wait()
        why_not = places.why_not or self._privileged(self._user) or self._unseen()
        if why_not:
            raise Unavailable(f"only a new machine is clean: {why_not}")
        folders = list(dict.fromkeys((*self._folders(), *map(Path, places.folders))))
        removed = [
            *self._end_login(),
            *self._remove_files(folders),
            *self._remove_records(),
            *self._remove_memory(),
        ]
        problems = [f"{name} cannot be removed" for name in (*map(str, self._found(folders)), *self._memory())]
        problems += places.changes()
        try:
            removed += [Finding(kind=Kind.KEY, name=self._user.name)] * keyrings.empty(self._user)
        except Unavailable as problem:
            problems.append(problem.message)
        if problems:
            more = f" and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
            raise Unavailable(f"only a new machine is clean: {'; '.join(problems[:MAX_PROBLEMS])}{more}")
        return removed

    def _folders(self) -> list[Path]:
        """Those that every system has; some come with their first use."""
        return list(dict.fromkeys(Path(os.path.realpath(path)) for path in self._shared if path.is_dir()))

    # Files

    def _remove_files(self, folders: Sequence[Path]) -> list[Finding]:
        removed = []
        for path in self._found(folders):
            erase(path)
            removed.append(Finding.file(str(path)))
        return removed

    def _found(self, folders: Sequence[Path]) -> list[Path]:
        # Not by the number of the device: on a layered disk each file may have another one.
        mounted = {mount.path for mount in mounts()}
        return [path for place in (*folders, self._session) for path in self._below(place, mounted)]

    def _remove_records(self) -> list[Finding]:
        removed = []
        for path in (path for pattern in self._records for path in Path("/").glob(pattern.lstrip("/"))):
            erase(path)
            removed.append(Finding(kind=Kind.RECORD, name=str(path)))
        return removed

    def _below(self, place: Path, mounted: Collection[str]) -> Iterator[Path]:
        """What the user owns in a folder of another: the uppermost, without a look beyond links and mounts."""
        waiting = [str(place)]
        while waiting:
            for entry in _listed(waiting.pop()):
                if entry.path in self._skipped or entry.path in mounted:
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    # Others may remove their own meanwhile.
                    continue
                if self._user.is_one_of_its(found.st_uid):
                    yield Path(entry.path)
                elif stat.S_ISDIR(found.st_mode):
                    waiting.append(entry.path)

    # A login that lasts

    def _end_login(self) -> list[Finding]:
        """Its service manager would start the user's units again, at the latest when the machine does."""
        linger = LINGER / self._user.name
        if not linger.exists():
            return []
        _try(["loginctl", "disable-linger", self._user.name])
        linger.unlink(missing_ok=True)
        _try(["systemctl", "stop", f"user@{self._user.uid}.service"])
        return [Finding(kind=Kind.LOGIN, name=self._user.name)]

    # System V's shared memory, semaphores and queues have an owner, but no place

    def _remove_memory(self) -> list[Finding]:
        found = self._memory()
        for name in found:
            kind, number = name.split()
            _try(["ipcrm", SYSV[kind][1], number])
        return [Finding(kind=Kind.SYSTEM_V, name=name) for name in found]

    def _memory(self) -> list[str]:
        return [f"{kind} {number}" for kind in SYSV for number in self._numbers(kind)]

    def _numbers(self, kind: str) -> Iterator[str]:
        try:
            header, *lines = Path(f"/proc/sysvipc/{kind}").read_text(encoding="ascii").splitlines()
        except (OSError, ValueError):
            return
        names = header.split()
        for line in lines:
            row = dict(zip(names, line.split(), strict=False))
            if any(self._user.is_one_of_its(int(row[column])) for column in ("uid", "cuid")):
                yield row[SYSV[kind][0]]
