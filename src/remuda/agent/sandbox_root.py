"""The upper layer of a new sandbox: what jobs must not see of the host, and what they see instead.

The root of a sandbox is an overlay over a read-only clone of the host's root file system or of a job image. Root in a
sandbox can read every file of that clone, so the upper layer hides all that may hold a secret or state of the host. It
also contains the user of jobs and the units that the sandbox starts.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from remuda import scripts

JOB_USER = "runner"
HOME = PurePosixPath("/home/runner")
WORK = HOME / "work"
#: Ids of the user on GitHub's images.
JOB_USER_ID = 1001
HOST_NAME = "runner"
TOOL_CACHE = PurePosixPath("/opt/hostedtoolcache")
#: Where the sandbox writes what the agent reads.
OUTBOX = PurePosixPath("/run/remuda")

#: The environment of the listener, with the paths of GitHub's images.
ENVIRONMENT = {
    "PATH": scripts.SYSTEM_PATH,
    "LANG": "C.UTF-8",
    "HOME": str(HOME),
    "USER": JOB_USER,
    "LOGNAME": JOB_USER,
    "SHELL": "/bin/bash",
    "RUNNER_TOOL_CACHE": str(TOOL_CACHE),
    "AGENT_TOOLSDIRECTORY": str(TOOL_CACHE),
}

#: Folders that are empty in a sandbox, with their modes. The parts of the host they hold: files of administrators, keys
#: and credentials of the cloud's services, data of host services.
_EMPTY_FOLDERS = {
    "home": 0o755,
    "root": 0o700,
    "tmp": 0o1777,
    "mnt": 0o755,
    "media": 0o755,
    "var/tmp": 0o1777,
    "var/crash": 0o755,
    "var/lib/amazon": 0o755,
    "var/lib/cloud": 0o755,
    "var/lib/containerd": 0o711,
    "var/lib/containers": 0o755,
    "var/lib/dhcp": 0o755,
    "var/lib/docker": 0o710,
    "var/lib/NetworkManager": 0o755,
    "var/lib/private": 0o700,
    "var/lib/remuda": 0o700,
    "var/lib/snapd": 0o755,
    "var/lib/sss": 0o755,
    "var/lib/systemd": 0o755,
    "var/lib/ubuntu-advantage": 0o755,
    "var/snap": 0o755,
}
#: Folders whose files are hidden. Programs expect the folders in them, such as /var/log/apt.
_WITHOUT_FILES = ("var/log", "var/mail", "var/spool")
_HIDDEN_FILES = (
    "etc/fstab",
    "etc/crypttab",
    "var/cache/debconf/passwords.dat",
    "var/lib/dbus/machine-id",
    "lost+found",
)
#: Files of /etc that only root can read and that programs in a sandbox need.
_KEPT_PRIVATE_FILES = ("etc/sudoers", "etc/sudoers.d")
#: Groups of the job user, as far as the root file system has them.
_GROUPS = ("docker", "sudo", "wheel", "adm", "systemd-journal")
_UNITS = "etc/systemd/system"
_TARGET = "remuda.target"
#: Links that are in the host's folder of units if another program than the default provides the unit.
_ALIASES = ("dbus.service", "dbus-org.freedesktop.login1.service")
_SERVICES = ("dbus.service", "docker.service", "cron.service", "crond.service", "atd.service")
#: Start only with capabilities that a sandbox has for its own user namespace, and fail for the kernel's.
_MASKED = (
    *("sys-kernel-config.mount", "sys-kernel-debug.mount", "sys-kernel-tracing.mount"),
    *("kmod-static-nodes.service", "systemd-modules-load.service"),
)
_TARGET_UNIT = f"""\
[Unit]
Description=Services of a sandbox
Requires=basic.target
Wants={" ".join(_SERVICES)}
After=basic.target {" ".join(_SERVICES)}
AllowIsolate=yes
"""
#: Docker and runc load an AppArmor profile into the kernel unless this variable is set, and are not permitted to.
_DOCKER_SETTINGS = "[Service]\nEnvironment=container=systemd-nspawn\n"
_OPAQUE = "trusted.overlay.opaque"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobUser:
    """The user that jobs run as inside a sandbox, by ids of the sandbox."""

    uid: int
    gid: int


def build_layer(
    layer: Path, *, root: Path, first_id: int, software: PurePosixPath, hidden: Iterable[str] = (), resolver: str = ""
) -> JobUser:
    """Create the folder `layer` for the root file system `root`. Return the job user.

    All owners are shifted by `first_id`. `software` is the agent's folder, which is empty in a sandbox. `hidden` are
    further paths to hide. `resolver` is the content of /etc/resolv.conf.
    """
    builder = _LayerBuilder(layer, root)
    for name, mode in _EMPTY_FOLDERS.items():
        if name in {"home", "root", "tmp", "var/tmp"} or (root / name).is_dir():
            builder.empty_folder(name, mode)
    for name in _WITHOUT_FILES:
        builder.folders_only(name)
    builder.empty_folder(str(software).lstrip("/"), 0o755)
    builder.folder(str(software / "runner").lstrip("/"))
    user = builder.add_job_user()
    builder.add_units()
    builder.write("etc/machine-id", "", 0o444)
    builder.write("etc/hostname", f"{HOST_NAME}\n")
    builder.write("etc/hosts", f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n127.0.1.1 {HOST_NAME}\n")
    builder.write("etc/resolv.conf", resolver)
    # Last, because it leaves alone what the layer replaces.
    names = (*_HIDDEN_FILES, *_private_files(root), *_swap_files(), *_linked_folders(root), *hidden)
    for name in sorted(name.strip("/") for name in names):
        builder.hide(name)
    for path in (layer, *layer.rglob("*")):
        status = path.lstat()
        os.chown(path, status.st_uid + first_id, status.st_gid + first_id, follow_symlinks=False)
    return user


class _LayerBuilder:
    def __init__(self, layer: Path, root: Path) -> None:
        self._layer = layer
        self._root = root.resolve()
        layer.mkdir()
        layer.chmod(0o755)

    def empty_folder(self, name: str, mode: int) -> Path:
        path = self.folder(name)
        path.chmod(mode)
        os.setxattr(path, _OPAQUE, b"y")
        return path

    def folders_only(self, name: str) -> None:
        """Hide the files in a folder and keep the folders, with their owners and modes."""
        source = self._root / name
        if not source.is_dir():
            return
        self.empty_folder(name, stat.S_IMODE(source.stat().st_mode))
        for folder, _, _ in os.walk(source):
            _copy_status(Path(folder), self.folder(str(Path(folder).relative_to(self._root))))

    def hide(self, name: str) -> None:
        """Hide a file or a folder. Of a folder that the layer has, only the layer's part is shown."""
        # Links on the way are followed: the file can be reached without them, too.
        covered = (self._root / name).parent.resolve() / PurePosixPath(name).name
        if not os.path.lexists(covered) or not covered.is_relative_to(self._root):
            return
        relative = covered.relative_to(self._root)
        path = self._layer / relative
        if any(_is_hidden(self._layer / parent) for parent in relative.parents):
            return
        if path.is_dir() and not path.is_symlink():
            os.setxattr(path, _OPAQUE, b"y")
        elif not os.path.lexists(path):
            self.folder(str(relative.parent))
            # A whiteout is a device with the number 0.
            os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        self.folder(str(PurePosixPath(name).parent))
        path = self._layer / name
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        path.chmod(mode)

    def add_job_user(self) -> JobUser:
        accounts = self._lines("etc/passwd")
        groups = self._lines("etc/group")
        known = {line.split(":")[0]: line.split(":") for line in accounts}
        if JOB_USER in known:
            user = JobUser(uid=int(known[JOB_USER][2]), gid=int(known[JOB_USER][3]))
            accounts = [line for line in accounts if not line.startswith(f"{JOB_USER}:")]
        else:
            used = {int(line.split(":")[2]) for line in (*accounts, *groups)}
            number = next(number for number in range(JOB_USER_ID, JOB_USER_ID + len(used) + 1) if number not in used)
            user = JobUser(uid=number, gid=number)
            groups.append(f"{JOB_USER}:x:{number}:")
        accounts.append(f"{JOB_USER}:x:{user.uid}:{user.gid}::{HOME}:/bin/bash")
        self.write("etc/passwd", _text(accounts))
        self.write("etc/group", _text(map(_with_member, groups)))
        # No password works, neither for the job user nor for those of the host.
        self.write("etc/shadow", _text(f"{line.split(':')[0]}:!*:19000::::::" for line in accounts), 0o640)
        self.write("etc/gshadow", _text(f"{line.split(':')[0]}:!::" for line in groups), 0o640)
        self.write("etc/sudoers.d/remuda", f"{JOB_USER} ALL=(ALL:ALL) NOPASSWD: ALL\n", 0o440)
        (self._layer / "etc/sudoers.d").chmod(0o750)
        self._add_home(user)
        return user

    def add_units(self) -> None:
        """Replace the units of the host's administrator: none of the services enabled there starts."""
        folder = self.empty_folder(_UNITS, 0o755)
        for name in _ALIASES:
            alias = self._root / _UNITS / name
            if alias.is_symlink():
                (folder / name).symlink_to(alias.readlink())
        for name in _MASKED:
            (folder / name).symlink_to("/dev/null")
        self.write(f"{_UNITS}/{_TARGET}", _TARGET_UNIT)
        self.write(f"{_UNITS}/docker.service.d/remuda.conf", _DOCKER_SETTINGS)
        (folder / "default.target").symlink_to(_TARGET)

    def _add_home(self, user: JobUser) -> None:
        home = self.folder(str(HOME).lstrip("/"))
        skeleton = self._root / "etc/skel"
        if skeleton.is_dir():
            shutil.copytree(skeleton, home, symlinks=True, dirs_exist_ok=True)
        (home / WORK.name).mkdir()
        tools = self.folder(str(TOOL_CACHE).lstrip("/"))
        for path in (tools, home, *home.rglob("*")):
            os.chown(path, user.uid, user.gid, follow_symlinks=False)

    def folder(self, name: str) -> Path:
        """Make a folder with its parents. Each looks like the one that it covers."""
        path = self._layer
        for part in PurePosixPath(name).parts:
            path /= part
            if not os.path.lexists(path):
                path.mkdir()
                covered = self._root / path.relative_to(self._layer)
                if covered.is_dir():
                    _copy_status(covered, path)
                else:
                    path.chmod(0o755)
        return path

    def _lines(self, name: str) -> list[str]:
        path = self._root / name
        text = path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""
        return [line for line in text.splitlines() if line.count(":") >= 2 and line.split(":")[2].isdecimal()]


def _private_files(root: Path) -> Iterator[str]:
    """Yield the files of /etc that not every user can read, such as private keys."""
    etc = root / "etc"
    private: set[Path] = set()
    for folder, folders, files in os.walk(etc):
        here = Path(folder)
        if here.parent in private or not here.stat().st_mode & stat.S_IXOTH:
            private.add(here)
        for name in (*files, *(name for name in folders if (here / name).is_symlink())):
            path = here / name
            status = path.lstat()
            relative = str(path.relative_to(root))
            readable = stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_IROTH
            if not relative.startswith(_KEPT_PRIVATE_FILES) and (here in private or not readable):
                yield relative


def _linked_folders(root: Path) -> Iterator[str]:
    """Yield the folders that are hidden under the name of a link only."""
    for name in (*_EMPTY_FOLDERS, *_WITHOUT_FILES):
        if (root / name).is_symlink():
            yield os.path.relpath((root / name).resolve(), root.resolve())


def _is_hidden(path: Path) -> bool:
    return path.is_char_device() or (path.is_dir() and _OPAQUE in os.listxattr(path))


def _swap_files() -> Iterator[str]:
    """Yield the swap files: they hold memory of all processes."""
    try:
        lines = Path("/proc/swaps").read_text(encoding="utf-8").splitlines()[1:]
    except OSError:
        return
    for path, kind, *_ in map(str.split, lines):
        if kind == "file":
            yield path.lstrip("/")


def host_resolver() -> str:
    """Return the host's resolver configuration, with name servers that a sandbox can reach.

    If the host uses a local resolver (systemd-resolved), its upstream servers are in another file.
    """
    for path in (Path("/run/systemd/resolve/resolv.conf"), Path("/etc/resolv.conf")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        servers = [line.split()[1] for line in text.splitlines() if line.startswith("nameserver ") and line.split()[1:]]
        if any(not server.startswith("127.") and server != "::1" for server in servers):
            return text
    # The resolver of a VPC: https://docs.aws.amazon.com/vpc/latest/userguide/AmazonDNS-concepts.html
    return "nameserver 169.254.169.253\n"


def _with_member(line: str) -> str:
    name, *rest = line.split(":")
    if name not in _GROUPS or len(rest) != 3:  # password, id, members
        return line
    members = [member for member in rest[2].split(",") if member and member != JOB_USER]
    return ":".join([name, *rest[:2], ",".join([*members, JOB_USER])])


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _copy_status(source: Path, target: Path) -> None:
    status = source.stat()
    os.chown(target, status.st_uid, status.st_gid)
    target.chmod(stat.S_IMODE(status.st_mode))
