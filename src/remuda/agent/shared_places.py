"""Where a user may write among what belongs to others: looked for once, on all local disks, and compared afterwards.

What others own there has no owner to be found by after a job: a file that everybody may write to, a name in a folder
that everybody may rename in. So it is marked before, and a machine on which a mark does not fit is not clean.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from remuda.agent.job_user import JobUser
from remuda.agent.reset import ASIDE, digest
from remuda.domain.errors import Unavailable
from remuda.ports.clock import Clock

MOUNTS = Path("/proc/self/mountinfo")
#: The kernel's own: nothing that is written there is kept. Message queues are, and have a place of their own.
PSEUDO = frozenset(
    {
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "efivarfs", "fusectl"),
        *("hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "squashfs"),
        *("sysfs", "tracefs"),
    }
)
#: Another computer's, or another program's: it may hang, and it is no machine's own.
FOREIGN = frozenset(
    {"9p", "afs", "ceph", "cifs", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs", "virtiofs"}
)
#: The kernel notes no time where a file of these is changed by a mapping that was read before.
IN_MEMORY = frozenset({"devtmpfs", "ramfs", "tmpfs"})
#: Of files in memory that anybody may write to, all together.
MAX_DIGESTED = 64 * 1024 * 1024
SEARCH_LIMIT_S = 600.0
#: A release waits that long for a search that is still under way.
WAIT_LIMIT_S = 120.0
MAX_MARKS = 200_000
#: As the kernel writes it: a version, then tag, rights and id of each entry.
_ACL = "system.posix_acl_access"
_ACL_ENTRY = struct.Struct("<HHI")
_NAMED_USER, _NAMED_GROUP = 0x02, 0x08
_WRITE, _PASS = 2, 1
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(kw_only=True)
class Places:
    #: The uppermost folders of others that the user may write to.
    folders: list[str] = field(default_factory=list)
    #: Files of others that it may write to, and their marks.
    files: dict[str, list[int]] = field(default_factory=dict)
    #: Folders of others in which it may rename what is not its own: what was there, by name, and their attributes.
    loose: dict[str, dict[str, int]] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    #: Of those files that are in memory, where a change by a mapping leaves no other trace: what they hold.
    contents: dict[str, str] = field(default_factory=dict)
    #: Where something was mounted before the first job; a place as often as there are mounts.
    mounts: list[str] = field(default_factory=list, compare=False)
    #: Why nothing makes the machine clean, whatever a job did.
    why_not: str = ""

    def marks(self) -> int:
        return len(self.files) + sum(map(len, self.loose.values()))

    def changes(self) -> list[str]:
        """What a job may have done to things of others. What is its own must have been removed."""
        found = [
            f"{path}, which it may write to, is not as it was"
            for path, mark in self.files.items()
            if _mark(path) != mark or (path in self.contents and digest(Path(path)) != self.contents[path])
        ]
        for folder, names in self.loose.items():
            if user_attributes(folder) != self.attributes[folder]:
                found.append(f"{folder}, which it may write to, has other attributes than before")
            found += [
                f"{name} in {folder}, where it may rename all, is not what it was"
                for name, number in names.items()
                if _number(os.path.join(folder, name)) != number  # noqa: PTH118 - a hundred thousand of them
            ]
        return found


class SharedPlaces:
    """Searches in a thread of its own, from the machine's first minute on, and remembers the result in a file of
    root's: an agent that is started again must not take for given what a job has made meanwhile.
    """

    def __init__(
        self,
        *,
        user: JobUser,
        own: Collection[Path],
        shared: Sequence[Path],
        memory: Path,
        clock: Clock,
        searched: Sequence[str] | None = None,
    ) -> None:
        """`own` are folders of the user that are dealt with elsewhere, `shared` some whose content is looked at by its
        owner anyway. `searched` is all local disks where it is not given.
        """
        self._user = user
        self._own = frozenset(map(str, own))
        #: What is made anew is put aside beside it, while we look.
        self._beside = frozenset(str(path.parent) for path in own)
        self._groups = user.groups()
        self._shared = frozenset(map(str, shared))
        self._memory = memory
        self._clock = clock
        self._searched = searched
        self._done = threading.Event()
        self._found = Places(why_not="nobody has looked where it may write")
        present = mounts()
        self._kinds = {mount.path: mount.kind for mount in present}
        self._mounted: list[str] | None = [mount.path for mount in present]
        #: Whether no job can have been here before the search began.
        self._is_first = True
        self._to_digest = MAX_DIGESTED

    def begin(self, *, anew: bool) -> None:
        """`anew` where no job has been on this machine yet."""
        kept = None if anew else self._recall()
        self._is_first = kept is None
        if kept is not None and kept.get("places") is not None:
            with contextlib.suppress(TypeError):
                self._found = Places(**kept["places"])
                self._done.set()
                return
        if kept is not None:
            self._mounted = kept["mounts"] if _are_texts(kept.get("mounts")) else None
        since = self._note_start() if kept is None else int(kept["since"])
        threading.Thread(target=self._run, args=(since,), daemon=True, name="shared-places").start()

    def wait(self, limit_s: float = WAIT_LIMIT_S) -> Places:
        if not self._done.wait(limit_s):
            raise Unavailable("the search for what jobs may write to has not ended")
        return self._found

    # What is remembered

    def _recall(self) -> dict[str, Any]:
        try:
            kept = json.loads(self._memory.read_text(encoding="ascii"))
        except (OSError, ValueError):
            # A machine that has had jobs, and no word of how it was before them.
            return {"since": 0}
        return kept if isinstance(kept, dict) and isinstance(kept.get("since"), int) else {"since": 0}

    def _note_start(self) -> int:
        """When it was, by the clock that files are stamped with."""
        self._memory.write_text(json.dumps({"since": 0}), encoding="ascii")
        since = self._memory.stat().st_ctime_ns
        self._memory.write_text(json.dumps({"since": since, "mounts": self._mounted}), encoding="ascii")
        return since

    def _keep(self, since: int) -> None:
        draft = self._memory.with_name(f".{self._memory.name}.new")
        draft.write_text(json.dumps({"since": since, "places": asdict(self._found)}), encoding="ascii")
        draft.replace(self._memory)

    # The search

    def _run(self, since: int) -> None:
        try:
            self._found = self.search(since)
            self._keep(since)
        except OSError as problem:
            self._found = Places(why_not=f"the search for what it may write to failed: {problem}")
        finally:
            self._done.set()

    def search(self, since: int) -> Places:
        """`since` is when the first job may have begun: what changed later has no mark to be trusted."""
        found = Places(mounts=self._mounted or [])
        if self._mounted is None:
            found.why_not = "nobody has noted what was mounted before the first job"
        limit = self._clock.monotonic() + SEARCH_LIMIT_S
        for root in self._roots():
            for path, place, inside in self._walk(root):
                self._take(found, path, place, since, inside=inside)
                if self._clock.monotonic() > limit or found.marks() > MAX_MARKS:
                    return Places(why_not="what jobs may write to is too much to be looked at")
        return found

    def _roots(self) -> list[str]:
        if self._searched is not None:
            return list(self._searched)
        found = [each for each in mounts() if each.is_written_here and self._reaches(each.path)]
        # What can be changed without a trace is looked at before the first job comes.
        found.sort(key=lambda each: each.kind not in IN_MEMORY)
        return list(dict.fromkeys(each.path for each in found))

    def _walk(self, root: str) -> Iterator[tuple[str, os.stat_result, bool]]:
        """Folders and files that the user can get to, on this mount; whether they are in a folder it may write to."""
        try:
            waiting = [(root, os.lstat(root), False)]
        except OSError:
            return
        while waiting:
            folder, place, inside = waiting.pop()
            yield folder, place, inside
            if not self._may(folder, place, _PASS):
                continue
            inside = inside or folder in self._shared or self._may(folder, place, _WRITE)
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        below = None if entry.is_symlink() else entry.stat(follow_symlinks=False)
                    except OSError:
                        # Gone meanwhile.
                        continue
                    if below is None:
                        continue
                    if not stat.S_ISDIR(below.st_mode):
                        # Nearly all are root's alone: the less is asked about these, the better.
                        if below.st_uid or below.st_mode & _OTHERS_WRITE:
                            yield entry.path, below, inside
                    elif not self._is_left_out(folder, entry):
                        waiting.append((entry.path, below, inside))

    def _is_left_out(self, folder: str, entry: os.DirEntry[str]) -> bool:
        if entry.path in self._own or entry.path in self._kinds:
            return True
        return folder in self._beside and entry.name.startswith(ASIDE)

    def _take(self, found: Places, path: str, place: os.stat_result, since: int, *, inside: bool) -> None:
        kind = stat.S_IFMT(place.st_mode)
        if kind not in {stat.S_IFDIR, stat.S_IFREG, stat.S_IFBLK}:
            return
        if self._user.owns_uid(place.st_uid):
            # In a folder of all it goes by its owner.
            if not inside:
                found.why_not = f"{path} is {self._user.name}'s own: what a job puts there, the next one finds"
            return
        if not self._may(path, place, _WRITE):
            return
        if kind == stat.S_IFBLK:
            found.why_not = f"{self._user.name} may write to the disk {path}"
        elif kind == stat.S_IFREG:
            found.files[path] = _mark_of(place) if place.st_ctime_ns < since else []
            if self._is_in_memory(path):
                self._take_content(found, path, place)
        else:
            self._take_folder(found, path, place, since, inside=inside)

    def _is_in_memory(self, path: str) -> bool:
        above = (self._kinds.get(str(parent)) for parent in Path(path).parents)
        return next(filter(None, above), "") in IN_MEMORY

    def _take_content(self, found: Places, path: str, place: os.stat_result) -> None:
        self._to_digest -= place.st_size
        if not self._is_first:
            # A job may have changed it before this look, and the mark would fit.
            found.files[path] = []
        elif self._to_digest < 0:
            found.why_not = f"{path}, which {self._user.name} may write to, is too large to be compared"
        else:
            with contextlib.suppress(FileNotFoundError):
                found.contents[path] = digest(Path(path))

    def _take_folder(self, found: Places, path: str, place: os.stat_result, since: int, *, inside: bool) -> None:
        if not place.st_mode & stat.S_IWOTH or place.st_gid == self._user.gid:
            found.why_not = f"{path} is {self._user.name}'s own: what a job puts there, the next one finds"
        if not inside:
            found.folders.append(path)
        if place.st_mode & stat.S_ISVTX or path in self._shared:
            return
        if place.st_ctime_ns >= since:
            found.why_not = f"{path}, where {self._user.name} may rename all, was changed before it was looked at"
            return
        with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
            found.loose[path] = {entry.name: entry.inode() for entry in entries}
            found.attributes[path] = user_attributes(path)

    def _reaches(self, path: str) -> bool:
        try:
            return all(self._may(str(parent), parent.lstat(), _PASS) for parent in Path(path).parents)
        except OSError:
            return False

    def _may(self, path: str, place: os.stat_result, right: int) -> bool:
        mode = place.st_mode
        if place.st_uid == self._user.uid or mode & right:
            return True
        if not mode & (right << 3):
            # Also bounds what an access list gives to others by name.
            return False
        return place.st_gid in self._groups or self._is_listed(path, right)

    def _is_listed(self, path: str, right: int) -> bool:
        try:
            text = os.getxattr(path, _ACL, follow_symlinks=False)
        except OSError:
            return False
        wanted = {(_NAMED_USER, self._user.uid), *((_NAMED_GROUP, group) for group in self._groups)}
        entries = _ACL_ENTRY.iter_unpack(text[4:]) if len(text) % _ACL_ENTRY.size == 4 else ()
        return any((tag, number) in wanted and rights & right for tag, rights, number in entries)


class Mount(NamedTuple):
    path: str
    kind: str
    writable: bool

    @property
    def is_written_here(self) -> bool:
        """Whether it is a disk, or memory used as one, of this machine."""
        return (
            self.writable and self.kind not in PSEUDO and self.kind not in FOREIGN and not self.kind.startswith("fuse")
        )


def mounts() -> list[Mount]:
    found = []
    for line in MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        head, _, tail = line.partition(" - ")
        fields = head.split()
        # Spaces and the like are written in octal.
        path = fields[4].encode("utf-8", "surrogateescape").decode("unicode_escape").encode("latin-1")
        found.append(Mount(os.fsdecode(path), tail.split()[0], "ro" not in fields[5].split(",")))
    return found


def user_attributes(path: str) -> str:
    """What everybody who may write to it may have noted there."""
    try:
        names = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith("user.")]
        return repr([(name, os.getxattr(path, name, follow_symlinks=False)) for name in sorted(names)])
    except OSError:
        return ""


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _mark(path: str) -> list[int] | None:
    try:
        return _mark_of(os.lstat(path))
    except OSError:
        return None


def _mark_of(place: os.stat_result) -> list[int]:
    """On a disk every change of content, rights or attributes sets the second, and nobody but the clock can."""
    return [place.st_ino, place.st_ctime_ns]


def _number(path: str) -> int | None:
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None
