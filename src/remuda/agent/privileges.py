"""Whether jobs could have become root: then nothing on the machine can be trusted after one, not even this agent."""

from __future__ import annotations

import grp
import shutil
import stat
import subprocess
from pathlib import Path

from remuda import scripts
from remuda.agent.job_user import JobUser

#: Whose members are root, or can be at will.
GROUPS = frozenset({"admin", "disk", "docker", "incus-admin", "lxd", "podman", "root", "shadow", "sudo", "wheel"})
#: Whoever may write there has a root to do what he says.
SOCKETS = (
    "/run/docker.sock",
    "/var/run/docker.sock",
    "/run/podman/podman.sock",
    "/run/containerd/containerd.sock",
    "/run/buildkit/buildkitd.sock",
    "/run/crio/crio.sock",
)
SUDO_LIMIT_S = 15.0
_NO_RIGHT = "is not allowed to run sudo"


def why_privileged(user: JobUser) -> str:
    """What makes the user as good as root, or empty."""
    groups = {group.gr_gid: group.gr_name for group in grp.getgrall()}
    mine = user.groups()
    for gid in sorted(mine):
        if groups.get(gid) in GROUPS:
            return f"{user.name} is in group {groups[gid]}"
    for name in SOCKETS:
        if _may_write(Path(name), user, mine):
            return f"{user.name} may write to {name}"
    return _why_sudo(user)


def _may_write(path: Path, user: JobUser, groups: set[int]) -> bool:
    try:
        place = path.stat()
    except OSError:
        return False
    if place.st_uid == user.uid:
        return True
    if place.st_gid in groups:
        return bool(place.st_mode & stat.S_IWGRP)
    return bool(place.st_mode & stat.S_IWOTH)


def _why_sudo(user: JobUser) -> str:
    sudo = shutil.which("sudo", path=scripts.SYSTEM_PATH)
    if sudo is None:
        return ""
    try:
        done = subprocess.run(
            [sudo, "-n", "-l", "-U", user.name],
            env={"PATH": scripts.SYSTEM_PATH, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SUDO_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"sudo does not say what {user.name} may do: {problem}"
    if _NO_RIGHT in done.stdout or _NO_RIGHT in done.stderr:
        return ""
    return f"{user.name} may use sudo"
