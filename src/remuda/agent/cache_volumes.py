"""Cache volumes: folders of jobs that outlive their sandboxes, such as downloaded packages or docker's images.

A volume belongs to one repository and trust tier, and is mounted only into sandboxes of its runs.
"""

from __future__ import annotations

import hashlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from remuda.agent import mounts, quotas
from remuda.agent.disk_space import FILE_RESERVE, NONE, Space, delete, free_space, start_deletion, start_idle
from remuda.agent.sandbox_root import HOME, TOOL_CACHE, JobUser
from remuda.domain.instance import Assignment

#: Container engines keep files open in these folders, so their services must be restarted.
ENGINE_FOLDERS = ("/var/lib/docker", "/var/lib/containerd")
ENGINE_SERVICES = ("docker.service", "docker.socket", "containerd.service")
MAX_ENGINE_S = 60.0
#: Enters the mount namespace of the process argv[1] and mounts the tree with the descriptor argv[2] at argv[3]. The
#: folder belongs to the host's user argv[4]. A separate process, because threads share their mount namespace.
_MOUNT_INSIDE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
leader, tree, path, owner = sys.argv[1:]
namespace = os.open(f"/proc/{leader}/ns/mnt", os.O_RDONLY)
root = os.open(f"/proc/{leader}/root", os.O_RDONLY)
if libc.setns(namespace, 0x20000):
    sys.exit(os.strerror(ctypes.get_errno()))
os.fchdir(root)
os.chroot(".")
made = []
folder = path
while not os.path.isdir(folder):
    made.append(folder)
    folder = os.path.dirname(folder)
for folder in reversed(made):
    os.mkdir(folder, 0o755)
    os.chown(folder, int(owner), int(owner))
if libc.syscall(429, int(tree), b"", -100, path.encode(), 4):
    sys.exit(os.strerror(ctypes.get_errno()))
"""

#: Folders beside the volumes: their measurements, and discarded volumes until they are deleted.
_SIZES, _TRASH = ".sizes", ".trash"
#: Seconds to wait for measurements. One that takes longer counts at the next eviction.
MEASURE_LIMIT_S = 1.0
MEASURE_POLL_S = 0.005
_MEASURE = """
set -e
bytes=$(du -s --block-size=1 -- "$1" | cut -f 1)
files=$(du -s --inodes -- "$1" | cut -f 1)
echo "$0 $bytes $files" >"$2.$$"
mv "$2.$$" "$2"
"""
#: Project ids of volumes begin here. Those of sandboxes are lower.
_FIRST_PROJECT = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheVolumes:
    #: Root only.
    folder: Path
    #: Paths inside a sandbox.
    paths: tuple[str, ...]
    max_bytes: int

    def mount(self, assignment: Assignment, *, leader: int, first_id: int, user: JobUser) -> None:
        """Mount the volumes of the assignment's repository into the new sandbox of the process `leader`.

        No volume is mounted if the assignment may get a job of another tier: the job is known only after the mount.
        """
        if not assignment.repository or not assignment.is_tier_known or not self.paths:
            return
        volume = self.folder / _name(assignment)
        volume.mkdir(mode=0o755, parents=True, exist_ok=True)
        taken = quotas.usage(volume) or NONE
        files = max(1, taken.files + free_space(volume).files - FILE_RESERVE)
        quotas.limit(volume, _project(volume.name), Space(bytes=self.max_bytes, files=files))
        restart = any(path.startswith(ENGINE_FOLDERS) for path in self.paths)
        if restart:
            _services(leader, "stop")
        try:
            for path in self.paths:
                _mount(volume / path.strip("/").replace("/", "%"), path, leader=leader, first_id=first_id, user=user)
        finally:
            if restart:
                _services(leader, "start")
        # Its time tells which volume was used last.
        os.utime(volume)

    def evict(self, *, min_free: Space = NONE) -> list[str]:
        """Delete the volumes that were used longest ago until the others are small enough. Return their names.

        They leave `min_free` of their disk free. What they take is known from quotas, or from a measurement that begins
        here after each use of a volume. It goes on in the background if the volume has millions of files.
        """
        if not self.folder.is_dir():
            return []
        volumes = [path for path in self.folder.iterdir() if not path.name.startswith(".")]
        volumes.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        taken = self._measured(volumes)
        left = free_space(self.folder) + sum(taken.values(), NONE) - min_free
        left = Space(bytes=min(self.max_bytes, left.bytes), files=left.files)
        evicted = []
        for volume in volumes:
            left -= taken[volume]
            if not left.covers(NONE):
                self._discard(volume)
                evicted.append(volume.name)
        self._delete_discarded(min_free)
        return evicted

    def _measured(self, volumes: Sequence[Path]) -> dict[Path, Space]:
        """Return what volumes take, as far as it is known within a moment."""
        taken = {volume: quotas.usage(volume) for volume in volumes}
        measured = {volume: self.folder / _SIZES / volume.name for volume, space in taken.items() if space is None}
        waiting = [volume for volume, file in measured.items() if _is_old(volume, file)]
        for volume in waiting:
            start_idle(_measurement(volume, measured[volume]))
        give_up_at = time.monotonic() + MEASURE_LIMIT_S
        while time.monotonic() < give_up_at and any(_is_old(volume, measured[volume]) for volume in waiting):
            select.select([], [], [], MEASURE_POLL_S)
        return {volume: space or _read_size(measured[volume]) for volume, space in taken.items()}

    def _discard(self, volume: Path) -> None:
        trash = self.folder / _TRASH
        trash.mkdir(mode=0o700, exist_ok=True)
        volume.rename(trash / f"{volume.name}-{time.monotonic_ns()}")
        (self.folder / _SIZES / volume.name).unlink(missing_ok=True)

    def _delete_discarded(self, min_free: Space) -> None:
        trash = self.folder / _TRASH
        discarded = list(trash.iterdir()) if trash.is_dir() else []
        if not discarded:
            return
        if free_space(self.folder).covers(min_free):
            start_deletion(discarded)
        else:
            delete(discarded)


def _mount(source: Path, path: str, *, leader: int, first_id: int, user: JobUser) -> None:
    owner = user.uid if path.startswith((f"{HOME}/", str(TOOL_CACHE))) else 0
    if not source.exists():
        # Renamed when it has its owner: a folder that an agent left half-made would never be writable for jobs.
        draft = source.with_name(f".{source.name}.new")
        draft.mkdir(mode=0o755, parents=True, exist_ok=True)
        os.chown(draft, owner, owner)
        draft.rename(source)
    tree = mounts.open_idmapped(source, first_id, read_only=False)
    try:
        command = [sys.executable, "-IS", "-c", _MOUNT_INSIDE, str(leader), str(tree), path, str(first_id + owner)]
        done = subprocess.run(command, pass_fds=(tree,), capture_output=True, text=True, check=False)
    finally:
        os.close(tree)
    if done.returncode:
        raise OSError(f"cannot mount the cache {path}: {done.stderr.strip()[-200:]}")


def _name(assignment: Assignment) -> str:
    text = f"{assignment.repository.lower()} {assignment.tier}"
    readable = assignment.repository.lower().replace("/", "-")[:80]
    return f"{readable}-{assignment.tier}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _project(name: str) -> int:
    """The id of a volume's project. Not -1, which is none."""
    return _FIRST_PROJECT + int(hashlib.sha256(name.encode()).hexdigest(), 16) % (2**31 - 1)


def _services(leader: int, verb: str) -> None:
    """Stop or start the services of container engines in the sandbox, as far as it has them."""
    services: Sequence[str] = ENGINE_SERVICES if verb == "stop" else ENGINE_SERVICES[:1]
    subprocess.run(
        ["nsenter", f"--target={leader}", "--all", "--", "systemctl", "--quiet", verb, *services],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=MAX_ENGINE_S,
        check=False,
    )


def _is_old(volume: Path, file: Path) -> bool:
    """Whether the volume was used after it was measured."""
    try:
        return int(file.read_text().split()[0]) != volume.stat().st_mtime_ns
    except (OSError, ValueError, IndexError):
        return True


def _measurement(volume: Path, file: Path) -> list[str]:
    """A command that writes the time of the last use, the bytes and the number of files of a volume."""
    file.parent.mkdir(mode=0o700, exist_ok=True)
    return ["sh", "-c", _MEASURE, str(volume.stat().st_mtime_ns), str(volume), str(file)]


def _read_size(file: Path) -> Space:
    """The last measurement of a volume; nothing if it was never measured."""
    try:
        _, size, files = map(int, file.read_text().split())
    except (OSError, ValueError):
        return NONE
    return Space(bytes=size, files=files)
