"""What jobs leave outside of their own folders, where they run as a user of their own: found by its owner wherever that
user may write, and removed. Needs root, and that none of the user's processes is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from remuda.agent.job_user import JobUser
from remuda.agent.privileges import why_privileged
from remuda.agent.reset import erase
from remuda.domain.errors import Unavailable

#: Where every user may write, on every system, and where the system keeps things for its users.
SHARED = (
    "/tmp",  # noqa: S108 - looked at, not written to
    "/var/tmp",  # noqa: S108 - as above
    "/dev/shm",  # noqa: S108 - as above
    "/dev/mqueue",
    "/run/lock",
    "/run/screen",
    "/var/crash",
    "/var/mail",
    "/var/spool/at",
    "/var/spool/cron",
    "/var/spool/mail",
)
#: Below these an image may have more of that kind. Not deeper than that: a look at a whole disk would take minutes.
SEARCHED = ("/etc", "/home", "/media", "/mnt", "/opt", "/run", "/srv", "/usr/local", "/var")
SEARCH_DEPTH = 4
LINGER = Path("/var/lib/systemd/linger")
SYSV = {"shm": ("shmid", "-m"), "sem": ("semid", "-s"), "msg": ("msqid", "-q")}


COMMAND_LIMIT_S = 15.0


def _try(command: Sequence[str]) -> None:
    """What became of it is looked at, not asked."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            list(command), stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_LIMIT_S, check=False
        )


def _listed(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries]
    except FileNotFoundError:
        return []


def _look(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


class Leftovers:
    def __init__(
        self,
        *,
        user: JobUser,
        own: Sequence[Path],
        shared: Sequence[str] = SHARED,
        searched: Sequence[str] = SEARCHED,
        privileged: Callable[[JobUser], str] = why_privileged,
    ) -> None:
        """`own` are the user's folders that are made anew anyway."""
        self._user = user
        #: The system makes it when the user logs in.
        self._session = Path(f"/run/user/{user.uid}")
        self._own = frozenset((*own, self._session))
        self._shared = [Path(name) for name in shared]
        self._searched = [Path(name) for name in searched]
        self._privileged = privileged
        self._places: tuple[Path, ...] = ()
        #: Why nothing that is done here makes the machine clean, as it was before any job.
        self._why_not = ""

    async def prepare(self) -> None:
        """Learn where the user may write. Before the first job."""
        await asyncio.to_thread(self._prepare)

    def _prepare(self) -> None:
        places = {Path(os.path.realpath(path)): None for path in self._shared if path.is_dir()}
        for folder in self._searched:
            for path, place in self._writable(folder, SEARCH_DEPTH):
                if place.st_uid == self._user.uid or place.st_gid == self._user.gid:
                    self._why_not = f"{path} is {self._user.name}'s own: what a job puts there, the next one finds"
                else:
                    places[path] = None
        self._places = tuple(places)

    def _writable(self, folder: Path, depth: int) -> Iterator[tuple[Path, os.stat_result]]:
        """Folders that the user may write to, the uppermost only."""
        if folder in self._own or depth < 0:
            return
        try:
            place = folder.lstat()
            if not stat.S_ISDIR(place.st_mode):
                return
            if self._may_write(place):
                yield folder, place
                return
            with os.scandir(folder) as entries:
                below = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            # Gone meanwhile, or nobody's to look at: a network's, say.
            return
        for path in below:
            yield from self._writable(path, depth - 1)

    def _may_write(self, place: os.stat_result) -> bool:
        return bool(
            place.st_uid == self._user.uid
            or (place.st_mode & stat.S_IWGRP and place.st_gid == self._user.gid)
            or place.st_mode & stat.S_IWOTH
        )

    def remove(self) -> Sequence[str]:
        """What was removed. `Unavailable` where something is left, or could be."""
        why_not = self._why_not or self._privileged(self._user)
        if why_not:
            raise Unavailable(f"only a new machine is clean: {why_not}")
        removed = [*self._end_login(), *self._remove_files(), *self._remove_memory()]
        left = [*self._found(), *self._memory()]
        if left:
            raise Unavailable(f"cannot be removed: {left[0]}")
        return removed

    # Files

    def _remove_files(self) -> list[str]:
        removed = []
        for path in self._found():
            erase(path)
            removed.append(str(path))
        return removed

    def _found(self) -> list[Path]:
        return [path for place in (*self._places, self._session) for path in self._below(place)]

    def _below(self, place: Path) -> Iterator[Path]:
        """What the user owns in a folder of another: the uppermost, without a look beyond links and mounts."""
        waiting = [place]
        device = _look(place)
        while waiting:
            for path in _listed(waiting.pop()):
                found = _look(path)
                # Others may remove their own meanwhile.
                if found is None or device is None or found.st_dev != device.st_dev or path in self._own:
                    continue
                if self._user.is_one_of_its(found.st_uid):
                    yield path
                elif stat.S_ISDIR(found.st_mode):
                    waiting.append(path)

    # A login that lasts

    def _end_login(self) -> list[str]:
        """Its service manager would start the user's units again, at the latest when the machine does."""
        linger = LINGER / self._user.name
        if not linger.exists():
            return []
        _try(["loginctl", "disable-linger", self._user.name])
        linger.unlink(missing_ok=True)
        _try(["systemctl", "stop", f"user@{self._user.uid}.service"])
        return [str(linger)]

    # System V's shared memory, semaphores and queues have an owner, but no place

    def _remove_memory(self) -> list[str]:
        found = self._memory()
        for name in found:
            kind, number = name.split()
            _try(["ipcrm", SYSV[kind][1], number])
        return found

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
