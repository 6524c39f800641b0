"""The image of the virtual machines: Debian with the packages and Python libraries that an agent needs.

The image is built once and cached in the user's cache folder. The agent itself is not in it: `software.py` makes an
archive of the current source for each test run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import bundles

HERE = Path(__file__).parent
GUEST = HERE / "guest"
SUITE = "bookworm"
#: Environment variable with the URL of a Debian mirror, for computers whose own apt uses none of this suite.
MIRROR = "REMUDA_TEST_DEBIAN_MIRROR"
#: The Python version of the suite.
PYTHON = "3.11"
PACKAGES = (
    *("systemd", "systemd-sysv", "libpam-systemd", "dbus", "udev", "kmod", "procps", "linux-image-cloud-amd64"),
    *("systemd-container", "docker.io", "iptables", "iproute2", "netbase", "curl", "ca-certificates"),
    *("sudo", "cron", "login", "passwd", "util-linux", "e2fsprogs", "acl", "attr", "keyutils", "git"),
    *("python3", "python3-venv", "libicu72", "busybox-static", "bzip2", "xz-utils", "zstd"),
)
#: Units that take time at boot, or that would change the machine during a test.
MASKED = (
    *("serial-getty@ttyS0.service", "getty@tty1.service", "getty.target", "console-getty.service"),
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer"),
    *("e2scrub_reap.service", "systemd-timesyncd.service", "systemd-pstore.service"),
)
#: The container engine runs in the sandbox of a job, not on the machine.
DISABLED = ("docker.service", "docker.socket", "containerd.service")
ENABLED = (
    "systemd-networkd.service",
    "systemd-networkd-wait-online.service",
    "instance-init.service",
    "command-server.service",
)
FILES = {
    "etc/hostname": "machine\n",
    "etc/hosts": "127.0.0.1 localhost machine\n::1 localhost\n",
    "etc/fstab": "/dev/vda / ext4 defaults 0 1\n",
    # A resolver that does not answer would delay commands, one that refuses does not.
    "etc/resolv.conf": "nameserver 127.0.0.1\noptions attempts:1 timeout:1\n",
    "etc/systemd/network/10-dhcp.network": "[Match]\nName=en* eth*\n\n[Network]\nDHCP=ipv4\nIPv6AcceptRA=no\n",
    "etc/systemd/journald.conf.d/console.conf": (
        "[Journal]\nStorage=volatile\nForwardToConsole=yes\nTTYPath=/dev/ttyS0\nMaxLevelConsole=info\n"
    ),
    # Only the modules of the root disk: a smaller initial RAM disk boots faster.
    "etc/initramfs-tools/conf.d/machine": "MODULES=list\nCOMPRESS=zstd\n",
    "etc/initramfs-tools/modules": "virtio_pci\nvirtio_blk\next4\n",
}
DISK_BYTES = 8 * 1024**3
#: Where the libraries of the agent are, as in its bundle.
LIBRARIES = "opt/remuda/lib"
#: Images that no test has used for so many days are removed.
KEEP_DAYS = 14
DAY_S = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    folder: Path

    @property
    def disk(self) -> Path:
        return self.folder / "disk.img"

    @property
    def kernel(self) -> Path:
        return self.folder / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.folder / "initrd.img"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "remuda"


def is_built() -> bool:
    return _image_folder().is_dir()


def build_image() -> Image:
    """The image; built if it is not in the cache. Concurrent calls build it once."""
    target = _image_folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            _remove_old(target.parent)
            with _draft(target) as draft:
                draft.mkdir()
                _build_disk(_debian_archive(), draft)
    os.utime(target)
    return Image(folder=target)


def debian_mirror() -> str:
    """The mirror that this computer's apt uses for the suite; empty if none exists."""
    if given := os.environ.get(MIRROR):
        return given
    if shutil.which("apt-get") is None:
        return ""
    layout = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    lines = _output("apt-get", "indextargets", "--format", layout, "Created-By: Packages").splitlines()
    return next((line.split()[0] for line in lines if line.split()[1:] == [SUITE, "main"]), "")


# Cache ----------------------------------------------------------------------------------------------------------------


def _image_folder() -> Path:
    guest = {path.name: path.read_text() for path in sorted(GUEST.iterdir()) if path.is_file()}
    recipe = [_debian_digest(), Path(__file__).read_text(), guest, bundles.requirements()]
    return cache_folder() / "virtual-machines" / f"image-{_digest(recipe)}"


def _debian_digest() -> str:
    return _digest([SUITE, PACKAGES])


def _digest(recipe: object) -> str:
    return hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]


@contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """A path that gets the name of the target when the block ends without an error."""
    with tempfile.TemporaryDirectory(prefix=".draft-", dir=target.parent) as folder:
        draft = Path(folder) / target.name
        yield draft
        draft.replace(target)


def _remove_old(folder: Path) -> None:
    newest = max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)
    for path in [*folder.glob("image-*"), *folder.glob("debian-*.tar"), *folder.glob(".draft-*")]:
        if newest - path.stat().st_mtime > KEEP_DAYS * DAY_S:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


# Build ----------------------------------------------------------------------------------------------------------------


def _debian_archive() -> Path:
    """The root file system after debootstrap, cached separately because it takes the longest."""
    target = _image_folder().parent / f"debian-{_debian_digest()}.tar"
    if not target.exists():
        with _draft(target) as draft:
            root = draft.with_name("root")
            _run(
                *("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"),
                *(SUITE, root, debian_mirror()),
            )
            for path in (root / "var/cache/apt/archives").glob("*.deb"):
                path.unlink()
            _run("tar", "-C", root, "--xattrs", "--xattrs-include=*", "--numeric-owner", "-cf", draft, ".")
    os.utime(target)
    return target


def _build_disk(archive: Path, folder: Path) -> None:
    root = folder / "root"
    root.mkdir(mode=0o755)
    _run("tar", "-C", root, "--xattrs", "--xattrs-include=*", "--numeric-owner", "-xpf", archive)
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    _install_guest_files(root)
    _install_libraries(root)
    _run("chroot", root, "systemctl", "mask", *MASKED)
    _run("chroot", root, "systemctl", "disable", *DISABLED)
    _run("chroot", root, "systemctl", "enable", *ENABLED)
    _run("chroot", root, "update-initramfs", "-u", "-k", "all")
    for name in ("vmlinuz", "initrd.img"):
        shutil.copyfile(_newest(root / "boot", f"{name}-*"), folder / name)
    disk = folder / "disk.img"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    _run("mke2fs", "-q", "-t", "ext4", "-L", "root", "-d", root, disk)
    shutil.rmtree(root)


def _newest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime)


def _install_guest_files(root: Path) -> None:
    units, programs = root / "etc/systemd/system", root / "usr/local/lib/test-machine"
    programs.mkdir(parents=True)
    for source in GUEST.iterdir():
        if source.is_file():
            target = (units if source.suffix == ".service" else programs) / source.name
            shutil.copyfile(source, target)
            target.chmod(0o644 if source.suffix == ".service" else 0o755)


def _install_libraries(root: Path) -> None:
    """Install the libraries of the agent's bundle for the machine's Python, compiled because emulation is slow."""
    (root / LIBRARIES).parent.mkdir(parents=True)
    bundles.install(bundles.requirements(), root / LIBRARIES, "x86_64", PYTHON)
    _run("chroot", root, "python3", "-m", "compileall", "-q", "-j", "0", f"/{LIBRARIES}")


def _run(*command: object) -> None:
    """Run a command; show its output only if it fails."""
    words = [str(word) for word in command]
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    with contextlib.suppress(KeyError):
        del environment["PIP_CONSTRAINT"]
    environment["PATH"] = f"{environment.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, env=environment
    )
    if done.returncode:
        output = done.stdout.decode(errors="replace")
        raise RuntimeError(f"the image cannot be built: {words[0]} exited with {done.returncode}:\n{output[-4000:]}")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
