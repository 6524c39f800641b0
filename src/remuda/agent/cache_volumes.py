"""Cache volumes: folders of jobs that outlive their sandboxes, such as downloaded packages or docker's images.

A volume belongs to one repository and trust tier, and is mounted only into sandboxes of its runs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from remuda.agent import mounts
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheVolumes:
    #: Root only.
    folder: Path
    #: Paths inside a sandbox.
    paths: tuple[str, ...]
    max_bytes: int

    def mount(self, assignment: Assignment, *, leader: int, first_id: int, user: JobUser) -> None:
        """Mount the volumes of the assignment's repository into the new sandbox of the process `leader`."""
        if not assignment.repository or not self.paths:
            return
        volume = self.folder / _name(assignment)
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

    def evict(self, *, min_free: int = 0) -> list[str]:
        """Delete the volumes that were used longest ago until the others are small enough. Return their names.

        They leave `min_free` bytes of their disk free.
        """
        if not self.folder.is_dir():
            return []
        volumes = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        sizes = {volume: _size(volume) for volume in volumes}
        left = min(self.max_bytes, sum(sizes.values()) + shutil.disk_usage(self.folder).free - min_free)
        evicted = []
        for volume in volumes:
            left -= sizes[volume]
            if left < 0:
                # Not rmtree, which fails for folders that a job has nested too deeply.
                mounts.run("rm", "-rf", "--", volume)
                evicted.append(volume.name)
        return evicted


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


def _size(folder: Path) -> int:
    done = subprocess.run(["du", "-s", "--block-size=1", str(folder)], capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0]) if done.stdout[:1].isdecimal() else 0
