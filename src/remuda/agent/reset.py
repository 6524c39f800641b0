"""A machine as new after a job: its processes killed, its folders emptied, the runner's software restored, and all that
checked. Which processes those are, and what a job can leave elsewhere, whoever makes it says.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

from remuda.agent import processes
from remuda.agent.findings import MAX_DETAIL, Finding, Kind, counts, printable, some, tell
from remuda.agent.job_files import FOLDER
from remuda.agent.job_user import JobUser
from remuda.domain.errors import Unavailable
from remuda.ports.machine import StepResult
from remuda.procfs import Process

PRIVATE = 0o700
#: Begins the names of folders on their way out. What a crash left of them goes with the next reset.
ASIDE = ".erase-"
_CHUNK = 1024 * 1024
#: Where that is not enough, the last look finds a process.
MAX_SILENCINGS = 3
#: Folders that are made anew, by their names; any other is a home.
_ROOMS = {"work": Kind.WORK, "tmp": Kind.TMP}
#: Attributes that a job can give to its files, and that outlive a change of mode: access lists, rights of a program,
#: notes. Others, a label of SELinux say, belong to the place.
_ATTRIBUTES = ("user.", "system.posix_acl_", "security.capability")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What must be the same. `content` is the digest of a file, the target of a link."""

    kind: str
    mode: int = 0
    size: int = 0
    content: str = ""
    attributes: tuple[tuple[str, bytes], ...] = ()


#: By path below the folder, parents first. The folder itself is "".
Manifest = dict[str, Entry]


class Elsewhere(Protocol):
    """What jobs can leave outside of their folders. All of it raises `Unavailable` where the machine cannot be made
    clean.
    """

    def disarm(self) -> Sequence[Finding]:
        """Remove all that would start processes by itself, and say what it was. Jobs may still run."""

    def remove(self) -> Sequence[Finding]:
        """Remove what jobs left, and say what it was. No process of theirs runs."""

    def left(self) -> Sequence[str]:
        """What is there all the same."""


class Nowhere:
    """Where jobs are not kept apart from all else, there is nothing to be known by its owner."""

    def disarm(self) -> Sequence[Finding]:
        return ()

    def remove(self) -> Sequence[Finding]:
        return ()

    def left(self) -> Sequence[str]:
        return ()


class Reset:
    def __init__(
        self,
        *,
        kill: Callable[[], processes.KillResult],
        runner_folder: Path,
        pristine: Path,
        recreate: Sequence[Path],
        owner: JobUser | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`kill` ends every process of past jobs. `owner` gets the folders, where the agent is root: their parents are
        root's. `elsewhere` is for what jobs left outside of them.
        """
        self._kill = kill
        # Where links lead on the way there is the image's to say; from here on none is followed.
        self._runner = _resolved(runner_folder)
        self._pristine = pristine
        self._recreate = tuple(map(_resolved, recreate))
        self._owner = owner
        self._elsewhere = elsewhere or Nowhere()
        self._manifest: Manifest | None = None
        # By number: what a job puts in the place of one of these folders' parents is no place for us.
        self._parents = {path.parent: _place(path.parent) for path in (self._runner, *self._recreate)}

    async def make(self) -> StepResult:
        """The folders of a machine that had no job yet. Nothing is compared: that would read all of the software once,
        from a disk that a new machine first has to fetch.
        """
        try:
            return await asyncio.to_thread(self._make)
        except (OSError, shutil.Error, Unavailable) as problem:
            return StepResult(ok=False, detail=printable(f"{problem}", MAX_DETAIL))

    async def prepare(self) -> None:
        """Learn what the pristine folder holds. Before the first job, where jobs could change it: it is what they are
        judged by.
        """
        if self._manifest is None:
            self._manifest = await asyncio.to_thread(manifest, self._pristine)

    async def run(self) -> StepResult:
        try:
            await self.prepare()
            return await asyncio.to_thread(self._run)
        except (OSError, Unavailable) as problem:
            return StepResult(ok=False, detail=printable(f"reset failed: {problem}", MAX_DETAIL))

    def _make(self) -> StepResult:
        removed = self._clear()
        erase(self._runner)
        shutil.copytree(self._pristine, self._runner, symlinks=True, copy_function=_copy)
        for path in (self._runner, *self._runner.rglob("*")):
            self._hand_over(path)
        return StepResult(ok=True, detail=tell(removed))

    def _run(self) -> StepResult:
        for parent, place in self._parents.items():
            if _place(parent) != place:
                raise Unavailable(f"{parent} is not the folder it was")
        found, left = self._silence()
        if left:
            names = some([processes.program_name(process.pid) for process in left])
            return StepResult(ok=False, detail=printable(f"cannot be killed: {names}", MAX_DETAIL))
        # Elsewhere first: that tells by name what would make the rest fail, a mount in a folder say.
        found += [
            *self._elsewhere.remove(),
            *self._clear(),
            *(Finding(kind=Kind.RUNNER, name=name) for name in self._restore()),
        ]
        found = [item for item in found if not item.is_usual]
        problem = self._check()
        return StepResult(ok=not problem, detail=printable(f"{problem}{tell(found)}", MAX_DETAIL), found=counts(found))

    def _silence(self) -> tuple[list[Finding], Sequence[Process]]:
        """End all processes, and all that would start some later: what was found, and what is left. Before any file is
        touched: from here on nobody changes what we look at.
        """
        found: list[Finding] = []
        armed = self._elsewhere.disarm()
        for _ in range(MAX_SILENCINGS):
            killing = self._kill()
            found += [*armed, *(Finding(kind=Kind.PROCESS, name=name) for name in killing.killed)]
            if killing.survivors or not killing.killed:
                break
            # What was killed may have armed something just before, and that may have started something since.
            armed = self._elsewhere.disarm()
            if not armed:
                break
        return found, killing.survivors

    def _clear(self) -> list[Finding]:
        """The folders of jobs, all but the runner's. Returns what was there."""
        removed = [Finding(kind=Kind.UNFINISHED, name=name) for name in self._finish_earlier()]
        for path in self._recreate:
            kind = _ROOMS.get(path.name, Kind.HOME)
            removed += [Finding(kind=kind, name=name) for name in _names_in(path)]
            erase(path)
            path.mkdir(mode=PRIVATE)
            path.chmod(PRIVATE)
            self._hand_over(path)
        return removed

    def _finish_earlier(self) -> list[str]:
        found: list[str] = []
        for parent in self._parents:
            if self._owner is None:
                # Jobs may have shut us out. Root is shut out by nobody, and others need the way.
                parent.chmod(PRIVATE)
            for name in [name for name in _listed(parent) if name.startswith(ASIDE)]:
                erase(parent / name)
                found.append(name)
        return found

    def _hand_over(self, path: Path) -> None:
        if self._owner is not None:
            os.chown(path, self._owner.uid, self._owner.gid, follow_symlinks=False)

    def _restore(self) -> list[str]:
        """Make the runner's folder as the pristine one. Returns what was not."""
        wanted = self._manifest or {}
        folders: dict[str, set[str]] = {}
        for name in wanted:
            if name:
                parent, _, own = name.rpartition("/")
                folders.setdefault(parent, set()).add(own)
        changed: list[str] = []
        for name, entry in wanted.items():
            path = self._runner / name
            # A folder's mode is judged at the end: it must let us in first.
            if entry.kind == "folder":
                changed += _open_folder(path, name)
                changed += _strip(path, name, entry.attributes)
                changed += _remove_others(path, name, folders.get(name, set()))
            elif not os.path.lexists(path) or _entry(path) != entry or path.lstat().st_nlink != 1:
                # A second name of the file, elsewhere, would be a way to change it later.
                erase(path)
                _copy(str(self._pristine / name), str(path))
                changed.append(name)
            self._hand_over(path)
        for name, entry in reversed(wanted.items()):
            if entry.kind == "folder":
                _set_mode(self._runner / name, entry.mode)
        return changed

    def _check(self) -> str:
        """What is still wrong, or empty."""
        if self._kill().killed:
            return "processes came back; "
        # Only now: what a process leaves that ran meanwhile is there by now, and no other one runs.
        left = self._elsewhere.left()
        if left:
            return f"left again: {some(left)}; "
        if manifest(self._runner) != self._manifest:
            return "the runner's folder is not as the pristine one; "
        for path in self._recreate:
            place = path.lstat()
            mine = stat.S_ISDIR(place.st_mode) and stat.S_IMODE(place.st_mode) == PRIVATE
            if not mine or any(path.iterdir()):
                return f"{path.name} is not empty; "
        return self._check_owners()

    def _check_owners(self) -> str:
        if self._owner is None:
            return ""
        wanted = (self._owner.uid, self._owner.gid)
        for path in (*(self._runner / name for name in self._manifest or {}), *self._recreate):
            place = path.lstat()
            if (place.st_uid, place.st_gid) != wanted:
                return f"{path} is not {self._owner.name}'s; "
        return ""


def manifest(folder: Path) -> Manifest:
    found: Manifest = {"": _entry(folder)}
    if found[""].kind != "folder":
        return found
    waiting = [""]
    while waiting:
        parent = waiting.pop()
        with os.scandir(folder / parent) as entries:
            names = sorted(entry.name for entry in entries)
        for own in names:
            name = f"{parent}/{own}" if parent else own
            found[name] = _entry(folder / name)
            if found[name].kind == "folder":
                waiting.append(name)
    return found


def erase(path: Path) -> None:
    """Remove a file or a tree, whatever its depth and modes. Links are removed, never followed, also where the tree is
    changed meanwhile; where something else is mounted inside, it fails.

    Each folder is emptied beside the tree, under a short name, in a folder that nobody else may enter: so no path
    grows too long, and no descriptor has to be kept open for each level. All goes by descriptors: no name below
    the parent is looked up twice to mean the same.
    """
    try:
        parent = os.open(path.parent, FOLDER)
    except FileNotFoundError:
        return
    try:
        _erase(parent, path.name)
    finally:
        os.close(parent)


def _erase(parent: int, name: str) -> None:
    try:
        place = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(place.st_mode):
        os.unlink(name, dir_fd=parent)
        return
    own, aside = _make_aside(parent)
    try:
        free = map(str, count())
        waiting = [_move(parent, name, aside, next(free))]
        while waiting:
            folder = waiting.pop()
            if _empty(folder, aside, free, waiting):
                os.rmdir(folder, dir_fd=aside)
    finally:
        os.close(aside)
    os.rmdir(own, dir_fd=parent)


def _make_aside(parent: int) -> tuple[str, int]:
    """A new folder of our own: its name and its descriptor."""
    for own in (f"{ASIDE}{number}" for number in count()):
        try:
            os.mkdir(own, PRIVATE, dir_fd=parent)
        except FileExistsError:
            continue
        descriptor = os.open(own, FOLDER, dir_fd=parent)
        place = os.fstat(descriptor)
        if place.st_uid == os.geteuid() and not stat.S_IMODE(place.st_mode) & ~PRIVATE:
            return own, descriptor
        os.close(descriptor)
        break
    raise OSError(errno.ESTALE, "somebody else has put a folder in the place of ours")


def _empty(folder: str, aside: int, free: Iterator[str], waiting: list[str]) -> bool:
    """Whether it was a folder, and is empty now. What it was when it was listed may be something else by now."""
    try:
        descriptor = os.open(folder, FOLDER, dir_fd=aside)
    except OSError as problem:
        if problem.errno not in {errno.ENOTDIR, errno.ELOOP}:
            raise
        os.unlink(folder, dir_fd=aside)
        return False
    try:
        with os.scandir(descriptor) as entries:
            content = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in content:
            if is_folder:
                waiting.append(_move(descriptor, name, aside, next(free)))
            else:
                os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    return True


def _copy(source: str, target: str) -> None:
    """Links as links. Where the disk can, both names share the content until one is changed: that takes no time."""
    if Path(source).is_symlink():
        shutil.copy2(source, target, follow_symlinks=False)
        return
    with open(source, "rb") as reading, open(target, "xb") as writing:  # noqa: PTH123 - as copytree calls it
        left = os.fstat(reading.fileno()).st_size
        try:
            while left and (done := os.copy_file_range(reading.fileno(), writing.fileno(), left)):
                left -= done
        except OSError:
            # Not between these disks.
            os.lseek(reading.fileno(), 0, os.SEEK_SET)
            os.lseek(writing.fileno(), 0, os.SEEK_SET)
            shutil.copyfileobj(reading, writing)
    shutil.copystat(source, target)


def _move(source: int, name: str, aside: int, target: str) -> str:
    try:
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=aside)
    except PermissionError:
        # A move changes the folder's "..": it must be writable for that.
        _set_mode(name, parent=source)
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=aside)
    # Only now: what could be moved is no place where something else is mounted.
    _set_mode(target, parent=aside)
    return target


def _set_mode(folder: Path | str, mode: int = PRIVATE, parent: int | None = None) -> None:
    """Of a folder: what is none, a link to one say, is left alone."""
    try:
        # This kind of descriptor needs no right to read it.
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except NotADirectoryError:
        return
    try:
        Path(f"/proc/self/fd/{descriptor}").chmod(mode)
    finally:
        os.close(descriptor)


def _entry(path: Path) -> Entry:
    place = path.lstat()
    mode = stat.S_IMODE(place.st_mode)
    if stat.S_ISDIR(place.st_mode):
        return Entry(kind="folder", mode=mode, attributes=_attributes(path))
    if stat.S_ISLNK(place.st_mode):
        return Entry(kind="link", content=os.readlink(path))  # noqa: PTH115  # as it is, not made a path
    if stat.S_ISREG(place.st_mode):
        content = digest(path)
        return Entry(kind="file", mode=mode, size=place.st_size, content=content, attributes=_attributes(path))
    return Entry(kind=f"special {stat.S_IFMT(place.st_mode):o}", mode=mode)


def _attributes(path: Path) -> tuple[tuple[str, bytes], ...]:
    try:
        names = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith(_ATTRIBUTES)]
    except OSError as problem:
        if problem.errno == errno.ENOTSUP:
            return ()
        raise
    return tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in sorted(names))


def digest(path: Path) -> str:
    running = hashlib.sha256()
    try:
        # Not to hang, should it be a pipe by now.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:
        return "unreadable"
    with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123  # a descriptor
        while chunk := file.read(_CHUNK):
            running.update(chunk)
    return running.hexdigest()


def _open_folder(path: Path, name: str) -> list[str]:
    if os.path.lexists(path):
        if stat.S_ISDIR(path.lstat().st_mode):
            _set_mode(path)
            return []
        erase(path)
    path.mkdir(mode=PRIVATE)
    return [name or "the runner's folder"]


def _strip(path: Path, name: str, wanted: tuple[tuple[str, bytes], ...]) -> list[str]:
    """Give a folder the attributes it should have."""
    found = _attributes(path)
    if found == wanted:
        return []
    for key, _ in found:
        os.removexattr(path, key, follow_symlinks=False)
    for key, value in wanted:
        os.setxattr(path, key, value, follow_symlinks=False)
    return [name or "the runner's folder"]


def _remove_others(folder: Path, name: str, wanted: Collection[str]) -> list[str]:
    others = [own for own in _names_in(folder) if own not in wanted]
    for own in others:
        erase(folder / own)
    return [f"{name}/{own}" if name else own for own in others]


def _names_in(path: Path) -> list[str]:
    """What is directly in a folder of ours; where something else took its place, that."""
    if not os.path.lexists(path):
        return []
    if not stat.S_ISDIR(path.lstat().st_mode):
        return [path.name]
    _set_mode(path)
    return _listed(path)


def _listed(path: Path) -> list[str]:
    descriptor = os.open(path, FOLDER)
    try:
        with os.scandir(descriptor) as entries:
            return sorted(entry.name for entry in entries)
    finally:
        os.close(descriptor)


def _place(path: Path) -> tuple[int, int]:
    place = path.lstat()
    return place.st_dev, place.st_ino


def _resolved(path: Path) -> Path:
    return path.parent.resolve() / path.name
