"""The first process of a namespace machine: sets up its namespaces and replaces cloud-init and systemd.

Started by `machine.py` in new mount, PID, IPC, UTS and network namespaces; standard library only. The root is that of
this computer, read-only, with folders of the machine mounted over those that a machine writes to. The process runs the
user data, then the services and timers that the replacements of `systemctl` and `systemd-run` request
(`command_proxy.py`). When it exits, the machine is off.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import json
import os
import platform
import secrets
import selectors
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

REPLACED_COMMANDS = Path("/run/replaced-commands")
SOCKET = "/run/init.sock"
#: The repository, from which the agent runs.
ROOT = Path(__file__).parents[3]
UNITS = Path("/etc/systemd/system")
PATH = f"{REPLACED_COMMANDS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: systemd does not run here, and the packages of this computer must not change.
COMMANDS = ("systemctl", "systemd-run", "shutdown", "apt-get", "dnf")
#: Folders that do not exist on this computer, and their parents, over which an overlay is mounted to create them.
NEW_FOLDERS = {"/opt/remuda": "/opt", "/var/lib/remuda": "/var/lib"}
CGROUPS = Path("/sys/fs/cgroup")
FUSE = Path("/dev/fuse")
CLONE_NEWCGROUP = 0x02000000
#: The number of the system call keyctl by architecture, and its operation JOIN_SESSION_KEYRING.
KEYCTL = {"x86_64": 250, "aarch64": 219}
JOIN_SESSION_KEYRING = 1
#: The exit code of systemctl for an unknown unit.
NOT_LOADED = 5


def log(*words: object) -> None:
    sys.stdout.write(f"init: {' '.join(map(str, words))}\n")
    sys.stdout.flush()


def ignore_exit(_code: int) -> None:
    """Default callback for the exit of a process."""


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)


def mount(*arguments: object) -> None:
    run("mount", *arguments)


def enter_cgroup(name: str) -> None:
    """Move to a new cgroup and make it the root of the machine's cgroups."""
    mount("-t", "cgroup2", "none", "/mnt")
    cgroup = Path("/mnt", name)
    cgroup.mkdir()
    (cgroup / "cgroup.procs").write_text("0")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWCGROUP):
        raise OSError(ctypes.get_errno(), "unshare")
    # A cgroup that contains processes itself cannot limit those of child cgroups.
    (cgroup / "init").mkdir()
    (cgroup / "init" / "cgroup.procs").write_text("0")
    run("umount", "/mnt")


def connect(network: dict[str, str]) -> None:
    """Connect the machine to the test servers of this computer, and to its metadata service if it has one."""
    outside = ("nsenter", f"--net={network['computer']}", "ip")
    run("ip", "link", "set", "lo", "up")
    veth = ("type", "veth", "peer", "name", network["interface"], "netns", network["computer"])
    run("ip", "link", "add", "name", "ens5", *veth)
    run(*outside, "link", "set", network["interface"], "up")
    run("ip", "link", "set", "ens5", "up")
    while True:
        # The range of carriers (RFC 6598). The route is created on this computer only if the address is free.
        address = f"100.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"
        command = [*outside, "route", "add", f"{address}/32", "dev", network["interface"]]
        if subprocess.run(command, check=False).returncode == 0:
            break
    run("ip", "address", "add", f"{address}/32", "dev", "ens5")
    run("ip", "route", "add", network["servers"], "dev", "ens5")
    if "metadata" in network:
        run("ip", "link", "add", "name", "ens6", "type", "veth", "peer", "name", "eth0", "netns", network["metadata"])
        inside = ("nsenter", f"--net={network['metadata']}", "ip")
        run(*inside, "link", "set", "eth0", "up")
        run(*inside, "route", "add", "169.254.169.1/32", "dev", "eth0")
        run("ip", "address", "add", "169.254.169.1/24", "dev", "ens6")
        run("ip", "link", "set", "ens6", "up")


def mount_folders(folder: Path, files: dict[str, str]) -> None:
    """Mount the machine's own folders and files, which are on the disk: a sandbox cannot be made from an overlay.

    `files` are the contents of the machine's files by path.
    """
    mount("-t", "sysfs", "sysfs", "/sys")
    mount("-t", "cgroup2", "cgroup2", CGROUPS)
    for target, parent in NEW_FOLDERS.items():
        own = folder / target.lstrip("/")
        layers = [folder / "layers" / parent.lstrip("/") / name for name in ("upper", "work")]
        for path in (own, *layers):
            path.mkdir(parents=True, exist_ok=True)
        mount("-t", "overlay", "-o", f"lowerdir={parent},upperdir={layers[0]},workdir={layers[1]}", "new", parent)
        Path(target).mkdir(exist_ok=True)
        mount("--bind", own, target)
    own = folder / "systemd"
    if not own.exists():
        run("cp", "-a", UNITS.parent, own)
    mount("--bind", own, UNITS.parent)
    for name, text in files.items():
        own = folder / name.lstrip("/")
        if not own.exists():
            own.parent.mkdir(exist_ok=True)
            own.write_text(text)
        mount("--bind", own, name)
    # After the mounts above, which would inherit it.
    mount("-o", "remount,bind,ro", "/")
    mount("--rbind", ROOT, "/mnt")
    for target, mode in (("/tmp", "1777"), ("/var/tmp", "1777"), ("/run", "755"), ("/dev/shm", "1777")):  # noqa: S108
        mount("-t", "tmpfs", "-o", f"mode={mode}", "machine", target)
    if not ROOT.exists():
        # It is in a folder that is empty now.
        ROOT.mkdir(parents=True)
        mount("--move", "/mnt", ROOT)
    Path("/run/lock").mkdir()
    Path("/run/lock").chmod(0o1777)
    if FUSE.exists():
        # Everybody may use it where udev runs.
        own = Path("/run/fuse")
        os.mknod(own, stat.S_IFCHR, FUSE.stat().st_rdev)
        own.chmod(0o666)
        mount("--bind", own, FUSE)
    mount("-t", "proc", "proc", "/proc")


def replace_commands() -> None:
    proxy = Path(__file__).with_name("command_proxy.py").read_text()
    REPLACED_COMMANDS.mkdir()
    for name in COMMANDS:
        path = REPLACED_COMMANDS / name
        path.write_text(f"#!{sys.executable} -IS\n{proxy}")
        path.chmod(0o755)


class MachineInit:
    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = {"PATH": PATH, "LANG": "C.UTF-8", **environment}
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Callable[[int], None]] = {}
        #: Monotonic time, number and action of each timer. The number keeps `heapq` from comparing actions.
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._timers: dict[str, int] = {}
        self._number = 0
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(SOCKET)
        self._server.listen(50)
        os.chmod(SOCKET, 0o600)  # noqa: PTH101 - not a file to open
        wakes, self._waker = socket.socketpair()
        for each in (wakes, self._waker):
            each.setblocking(False)  # noqa: FBT003 - it takes no keyword
        self._wakes = wakes
        signal.set_wakeup_fd(self._waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._server, selectors.EVENT_READ, self._answer)
        self._selector.register(wakes, selectors.EVENT_READ, self._reap)

    def run(self) -> None:
        while True:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            pause_s = self._due[0][0] - now if self._due else None
            for key, _ in self._selector.select(pause_s):
                key.data()

    def start(self, command: Sequence[str], ended: Callable[[int], None] = ignore_exit, **changed: str) -> int:
        process = subprocess.Popen(command, env={**self._environment, **changed}, stdin=subprocess.DEVNULL)
        process.returncode = 0  # reaped in `_reap`, together with orphaned processes
        self._children[process.pid] = ended
        return process.pid

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakes.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._children.pop(found[0], ignore_exit)(os.waitstatus_to_exitcode(found[1]))

    def _after(self, seconds: float, action: Callable[[], None]) -> int:
        self._number += 1
        heapq.heappush(self._due, (time.monotonic() + seconds, self._number, action))
        return self._number

    # Commands of the machine that are executed here

    def _answer(self) -> None:
        connection, _ = self._server.accept()
        with connection, connection.makefile("rwb") as stream:
            name, *arguments = json.loads(stream.readline())
            log(name, *arguments)
            code = getattr(self, "_" + name.replace("-", "_"))(arguments)
            stream.write(f"{code}\n".encode())

    def _systemctl(self, arguments: list[str]) -> int:
        verb, *rest = [word for word in arguments if not word.startswith("--")]
        if verb == "poweroff":
            log("power off")
            os._exit(0)
        if verb == "start":
            for name in rest:
                self._start_service(name)
            return 0
        if verb == "stop":
            return max((self._stop(name) for name in rest), default=0)
        return 0 if verb in {"daemon-reload", "enable", "mask"} else 1

    def _stop(self, name: str) -> int:
        number = self._timers.pop(name, None)
        if number is None:
            return NOT_LOADED
        self._due = [each for each in self._due if each[1] != number]
        heapq.heapify(self._due)
        return 0

    def _systemd_run(self, arguments: list[str]) -> int:
        flags = [word for word in arguments if word.startswith("--")]
        options = dict(word.removeprefix("--").split("=", 1) for word in flags if "=" in word)
        # The command starts at the first word that is not a flag, and may have flags itself.
        command = arguments[next(index for index, word in enumerate(arguments) if not word.startswith("--")) :]
        name = f"{options['unit']}.timer"
        if name in self._timers:
            return 1
        self._timers[name] = self._after(float(options["on-active"]), lambda: self._fire(name, command))
        return 0

    def _fire(self, name: str, command: list[str]) -> None:
        self._timers.pop(name, None)
        self.start(command)

    def _shutdown(self, arguments: list[str]) -> int:
        self._after(60 * float(arguments[-1].removeprefix("+")), lambda: os._exit(0))
        return 0

    def _apt_get(self, _arguments: list[str]) -> int:
        return 0

    _dnf = _apt_get

    # Services

    def _start_service(self, name: str) -> None:
        lines = (UNITS / name).read_text().splitlines()
        unit = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
        variables = Path(unit["EnvironmentFile"]).read_text().splitlines() if "EnvironmentFile" in unit else []
        environment = dict(line.split("=", 1) for line in variables)

        def run() -> None:
            self.start(shlex.split(unit["ExecStartPre"]), begin, **environment)

        def begin(code: int) -> None:
            if code:
                self._after(float(unit["RestartSec"]), run)
                return
            pid = self.start(shlex.split(unit["ExecStart"]), again, **environment)
            # Root in a container may lack this permission.
            with contextlib.suppress(PermissionError):
                Path(f"/proc/{pid}/oom_score_adj").write_text(unit["OOMScoreAdjust"])

        def again(code: int) -> None:
            log(name, "ended with", code)
            if unit["Restart"] == "always":
                self._after(float(unit["RestartSec"]), run)

        run()


def main() -> None:
    configuration = json.loads(sys.argv[1])
    # Read now: the new /tmp may hide it.
    user_data = Path(configuration["user_data"]).read_text()
    mount("--make-rprivate", "/")
    connect(configuration["network"])
    enter_cgroup(configuration["cgroup"])
    mount_folders(Path(configuration["folder"]), configuration["files"])
    replace_commands()
    path = Path("/run/user-data")
    path.write_text(user_data)
    # Services of systemd have a session keyring, which their children inherit.
    ctypes.CDLL(None).syscall(KEYCTL[platform.machine()], JOIN_SESSION_KEYRING, None)
    init = MachineInit(configuration["environment"])
    init.start(["bash", str(path)])
    init.run()


if __name__ == "__main__":
    main()
