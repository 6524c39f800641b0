"""What jobs leave outside of their own folders, where they run as a user of their own: found by its owner wherever that
user may write, and removed. Needs root, and that none of the user's processes is left.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from remuda.agent import keyrings
from remuda.agent.findings import Finding, Kind
from remuda.agent.job_user import JobUser
from remuda.agent.privileges import why_privileged
from remuda.agent.reset import ASIDE, erase
from remuda.agent.shared_places import Mount, Places, SharedPlaces, mounts
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
    "/var/lib/apport/coredump/core.*.{uid}.*",
    "/var/lib/systemd/coredump/core.*.{uid}.*",
    "/var/log/event_log/*/user-{uid}[.@]*event_log",
    "/run/log/event_log/*/user-{uid}[.@]*event_log",
)
#: What is here starts by itself. Those of a user are its own, or have its name.
SPOOLS = ("/var/spool/at", "/var/spool/cron")
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
        spools: Sequence[str] = SPOOLS,
        linger: Path = LINGER,
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
        self._spools = [Path(name) for name in spools]
        self._linger = linger / user.name
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

    def disarm(self) -> Sequence[Finding]:
        """End what would start processes of the user by itself. Its processes may run: what they arm meanwhile is
        found once they do no more.
        """
        removed = self._end_login()
        for path in self._armed():
            erase(path)
            removed.append(Finding.file(str(path)))
        return removed

    def remove(self) -> Sequence[Finding]:
        """What was removed. `Unavailable` where something is left, or could be."""
        places = self._places.wait()
        why_not = places.why_not or self._privileged(self._user) or self._unseen()
        if why_not:
            raise Unavailable(f"only a new machine is clean: {why_not}")
        # What is below it cannot be looked at.
        self._insist(self._mounted(places))
        removed = [
            *self.disarm(),
            *self._remove_files(self._all_folders(places)),
            *self._remove_records(),
            *self._remove_memory(),
        ]
        problems: list[str] = []
        try:
            removed += [Finding(kind=Kind.KEY, name=self._user.name)] * keyrings.empty(self._user)
        except Unavailable as problem:
            problems.append(problem.message)
        self._insist([*self._left(places), *places.changes(), *problems])
        return removed

    def left(self) -> Sequence[str]:
        """What is there after all was removed."""
        places = self._places.wait()
        keys = ["a key in the kernel"] * bool(keyrings.empty(self._user))
        return [*self._mounted(places), *self._left(places), *places.changes(), *keys]

    def _left(self, places: Places) -> list[str]:
        files = [*self._armed(), *self._found(self._all_folders(places)), *self._recorded()]
        login = [str(self._linger)] * self._linger.exists()
        return [f"{name} cannot be removed" for name in dict.fromkeys((*map(str, files), *self._memory(), *login))]

    def _insist(self, problems: Sequence[str]) -> None:
        if problems:
            more = f" and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
            raise Unavailable(f"only a new machine is clean: {'; '.join(problems[:MAX_PROBLEMS])}{more}")

    def _mounted(self, places: Places) -> list[str]:
        """By now, and not before the first job: a user can do that in a folder of its own, and hide the folder so."""
        present = mounts()
        found = Counter(mount.path for mount in present if not self._is_session(mount))
        # The system mounts there by itself, at the first look of anybody.
        automatic = {mount.path for mount in present if mount.kind == "autofs"}.intersection(places.mounts)
        return [f"something is mounted at {path}" for path in found - Counter(places.mounts) if path not in automatic]

    def _is_session(self, mount: Mount) -> bool:
        return mount.path == str(self._session) and mount.kind == "tmpfs"

    def _all_folders(self, places: Places) -> list[Path]:
        return list(dict.fromkeys((*self._folders(), *map(Path, places.folders))))

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

    def _found(self, folders: Sequence[Path], *, session: bool = True) -> list[Path]:
        # Not by the number of the device: on a layered disk each file may have another one.
        mounted = {mount.path for mount in mounts()}
        places = (*folders, self._session) if session else folders
        return [path for place in places for path in self._below(place, mounted)]

    def _armed(self) -> list[Path]:
        """Crontabs and at jobs."""
        spools = [path for path in self._spools if path.is_dir()]
        named = [path / self._user.name for spool in spools for path in (spool, spool / "crontabs")]
        owned = self._found(spools, session=False)
        return list(dict.fromkeys((*owned, *(path for path in named if os.path.lexists(path)))))

    def _recorded(self) -> list[Path]:
        return [path for pattern in self._records for path in Path("/").glob(pattern.lstrip("/"))]

    def _remove_records(self) -> list[Finding]:
        removed = []
        for path in self._recorded():
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
                # What a reset that was cut has put aside is ours by now, and a job's all the same.
                if self._user.owns_uid(found.st_uid) or (found.st_uid == 0 and entry.name.startswith(ASIDE)):
                    yield Path(entry.path)
                elif stat.S_ISDIR(found.st_mode):
                    waiting.append(entry.path)

    # A login that lasts

    def _end_login(self) -> list[Finding]:
        """Its service manager would start the user's units again, at the latest when the machine does."""
        if not self._linger.exists():
            return []
        _try(["loginctl", "disable-linger", self._user.name])
        self._linger.unlink(missing_ok=True)
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
            if any(self._user.owns_uid(int(row[column])) for column in ("uid", "cuid")):
                yield row[SYSV[kind][0]]
