"""The first process of a namespace machine: mounts its root and replaces cloud-init and systemd.

Started by `machine.py` in new mount, PID and IPC namespaces; standard library only. The root is that of this computer
below an overlay that takes all writes and is discarded with the machine. The process runs the user data, then the
services and timers that the replacements of `systemctl` and `systemd-run` request (`command_proxy.py`). When it exits,
the machine is off.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import json
import os
import platform
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPLACED_COMMANDS = Path("/run/replaced-commands")
SOCKET = "/run/init.sock"
UNITS = Path("/etc/systemd/system")
#: Where all users of the machine can read the interpreter, whatever the permissions of its folder on this computer.
INTERPRETER = Path("/opt/interpreter")
PATH = f"{REPLACED_COMMANDS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMMANDS = (
    *("systemctl", "systemd-run", "shutdown"),
    *("iptables", "ip6tables", "iptables-restore", "ip6tables-restore"),
)
#: Large folders, mounted read-only: the agent checks every writable file of the system, which would take long.
LARGE = ("/usr/include", "/usr/lib", "/usr/share", "/usr/src")
#: The exit code of systemctl for an unknown unit.
NOT_LOADED = 5
#: The number of the system call, by architecture. No C library wraps it.
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def log(*words: object) -> None:
    sys.stdout.write(f"init: {' '.join(map(str, words))}\n")
    sys.stdout.flush()


def ignore_exit(_code: int) -> None:
    """Default callback for the exit of a process."""


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def enter_root(configuration: dict[str, Any]) -> None:
    """Mount the root of the machine and change into it."""
    mount("--make-rprivate", "/")
    layer = Path(configuration["folder"])
    mount("-t", "tmpfs", "-o", "mode=755", "layer", layer)
    upper, work, root = (layer / name for name in ("upper", "work", "root"))
    for folder in (upper, work, root):
        folder.mkdir(mode=0o755)
    subprocess.run(["cp", "-a", f"{configuration['image']}/.", upper], check=True)
    mount("-t", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={work}", "root", root)
    for name, mode in (("run", "755"), ("tmp", "1777"), ("var/tmp", "1777")):
        mount("-t", "tmpfs", "-o", f"mode={mode}", name, root / name)
    (root / "run/lock").mkdir()
    (root / "run/lock").chmod(0o1777)
    mount("--rbind", "/dev", root / "dev")
    mount("-t", "tmpfs", "-o", "mode=1777", "shm", root / "dev/shm")
    (root / "dev/mqueue").mkdir(exist_ok=True)
    mount("-t", "mqueue", "mqueue", root / "dev/mqueue")
    mount("-t", "proc", "proc", root / "proc")
    large = [path for path in LARGE if Path(path).is_dir()]
    binds = {path: path for path in [*large, *configuration["binds"]]} | {sys.base_prefix: str(INTERPRETER)}
    for source, target in binds.items():
        inside = root / target.lstrip("/")
        inside.mkdir(parents=True, exist_ok=True)
        mount("--rbind", source, inside)
        mount("-o", "remount,bind,ro", inside)
    proxy = Path(__file__).with_name("command_proxy.py").read_text()
    for name in COMMANDS:
        path = root / str(REPLACED_COMMANDS).lstrip("/") / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{INTERPRETER}/bin/python3 -IS\n{proxy}")
        path.chmod(0o755)
    pivot_root(root)


def pivot_root(root: Path) -> None:
    """Make this folder the root. Unlike after `chroot`, users can create namespaces then, as on EC2."""
    libc = ctypes.CDLL(None, use_errno=True)
    os.chdir(root)
    if libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"."):
        raise OSError(ctypes.get_errno(), "pivot_root")
    # The old root is stacked below the new one at the same path.
    subprocess.run(["umount", "-l", "."], check=True)
    os.chdir("/")


class MachineInit:
    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = {"PATH": PATH, "LANG": "C.UTF-8", **environment}
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Callable[[int], None]] = {}
        #: Monotonic time, number and action of each timer. The number keeps `heapq` from comparing actions.
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._timers: dict[str, int] = {}
        self._number = 0
        self._rules: list[list[str]] = []
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
        return 0 if verb in {"daemon-reload", "enable"} else 1

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

    def _iptables(self, arguments: list[str]) -> int:
        rule = [word for word in arguments if word not in {"-w", "-C", "-I"}]
        if "-C" in arguments:
            return 0 if rule in self._rules else 1
        self._rules.append(rule)
        return 0

    def _iptables_restore(self, _arguments: list[str]) -> int:
        return 0

    _ip6tables = _iptables
    _ip6tables_restore = _iptables_restore

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
    user_data = Path(configuration["user_data"]).read_text()
    enter_root(configuration)
    path = Path("/run/user-data")
    path.write_text(user_data)
    init = MachineInit(configuration["environment"])
    init.start(["bash", str(path)])
    init.run()


if __name__ == "__main__":
    main()
