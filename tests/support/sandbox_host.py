"""A host for sandboxes on this computer's kernel: own mount, process, network, IPC and cgroup namespaces.

Names of interfaces, user ids of sandboxes and cgroups of several tests cannot collide, and all processes and mounts of
a host end with its first process.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from remuda import procfs
from tests.support.accounts import account_files

ROOT = Path(__file__).parents[2]
KERNEL = (5, 19)
#: Limit for fork bombs, so that they do not stop other programs of this computer.
MAX_TASKS = 1_500
#: Seconds for the response to one request.
LIMIT_S = 90.0
#: Mounts what belongs to the namespaces, and becomes a process that reaps orphans as PID 1 does.
_SETUP = """
set -e
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir /sys/fs/cgroup/init
echo 0 >/sys/fs/cgroup/init/cgroup.procs
mkdir -p /run/systemd
mount -t tmpfs tmpfs /run/systemd
for name in passwd group; do mount --bind "$0/$name" "/etc/$name"; done
ip link set lo up
exec "$@"
"""
_INIT = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
print("ready", flush=True)
while True:
    signal.sigwait({signal.SIGCHLD})
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


def missing() -> str:
    """Say what prevents sandboxes on this computer, or return empty."""
    if os.geteuid() != 0:
        return "needs root"
    if tuple(int(part) for part in platform.release().split(".")[:2]) < KERNEL:
        return f"needs Linux {KERNEL[0]}.{KERNEL[1]}"
    for command, package in (("systemd-nspawn", "systemd-container"), ("ip", "iproute2"), ("setpriv", "util-linux")):
        if shutil.which(command) is None:
            return f"needs {command}: install the package {package}"
    return "" if _cgroups("cgroup2") else "needs cgroup v2: mount it at /sys/fs/cgroup"


def _cgroups(kind: str, controller: str = "") -> Path | None:
    """Return where this computer has mounted cgroups of version 2, or the version 1 hierarchy of a controller."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] == kind and (not controller or controller in after.split()[2].split(",")):
            return Path(before.split()[4])
    return None


class SandboxHost:
    """The namespaces. `run` and `start` execute programs in them."""

    def __init__(self, name: str) -> None:
        root = _cgroups("cgroup2")
        assert root is not None
        self._root = root
        self._name = f"remuda-test-{name}-{os.getpid()}"
        self.cgroup = root / self._name
        pids = _cgroups("cgroup", "pids")
        #: The cgroup with the limit of tasks.
        self._limited = self.cgroup if pids is None else pids / self._name
        memory = _cgroups("cgroup", "memory")
        #: The cgroup that counts memory.
        self._counted = self.cgroup if memory is None else memory / self._name
        self._process: subprocess.Popen[str] | None = None
        self._init = 0

    def __enter__(self) -> Self:
        for folder in self._own_cgroups:
            folder.mkdir()
        with contextlib.suppress(OSError):
            (self._limited / "pids.max").write_text(str(MAX_TASKS))
        # So that nothing outlives a test that is killed.
        unshare = (
            "setpriv",
            "--pdeathsig=KILL",
            "unshare",
            "--mount",
            "--net",
            "--pid",
            "--ipc",
            "--cgroup",
            "--fork",
            "--kill-child",
        )
        with tempfile.TemporaryDirectory(prefix="remuda-test-accounts-") as accounts:
            for name, text in account_files().items():
                Path(accounts, Path(name).name).write_text(text, encoding="utf-8")
            init = ("sh", "-c", _SETUP, accounts, sys.executable, "-IS", "-c", _INIT)
            self._process = subprocess.Popen(
                self._joining(self.cgroup, [*unshare, "--mount-proc", *init]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            assert self._process.stdout is not None
            if self._process.stdout.readline() != "ready\n":
                self.__exit__()
                raise RuntimeError("the namespaces cannot be created")
        self._init = procfs.descendants(self._process.pid)[0].pid
        # A cgroup that contains processes cannot pass controllers on.
        (self._root / "cgroup.procs").write_text(str(self._process.pid))
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
        for folder in self._own_cgroups:
            _remove(folder)

    @property
    def _own_cgroups(self) -> set[Path]:
        return {self.cgroup, self._limited, self._counted}

    @property
    def charged_bytes(self) -> int | None:
        """The memory for which the processes of this host pay, of the kernel as well. None: it is not counted here."""
        for name in ("memory.current", "memory.usage_in_bytes"):
            with contextlib.suppress(FileNotFoundError):
                return int((self._counted / name).read_text())
        return None

    def start(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[str]:
        enter = ("nsenter", f"--target={self._init}", "--mount", "--net", "--pid", "--ipc", "--cgroup", "--")
        arguments = self._joining(self.cgroup / "init", [*enter, *map(str, command)])
        return subprocess.Popen(arguments, text=True, **options)

    def start_module(self, module: str, **options: Any) -> subprocess.Popen[str]:
        """Start a module of this repository with its options as JSON."""
        # The working folder does not outlive the change of namespaces.
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        command = (sys.executable, "-m", module, json.dumps(options))
        return self.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def run(self, *command: str | Path) -> str:
        process = self.start(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = process.communicate()
        assert process.returncode == 0, output
        return output

    def _joining(self, cgroup: Path, command: Sequence[str]) -> list[str]:
        join = 'for each in "$0" "$1" "$2"; do echo $$ >"$each/cgroup.procs" || exit; done && shift 2 && exec "$@"'
        limited, counted = (cgroup if each == self.cgroup else each for each in (self._limited, self._counted))
        return ["sh", "-c", join, str(cgroup), str(limited), str(counted), *command]


def _remove(cgroup: Path) -> None:
    """Remove a cgroup as soon as its processes have ended."""
    for _ in range(500):
        try:
            for folder, _, _ in os.walk(cgroup, topdown=False):
                Path(folder).rmdir()
        except OSError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["sleep", "0.01"], check=False)
        else:
            return


class Driver:
    """Client of a process with the real `Sandboxes` and `Listener` on a host. Its module names the requests."""

    def __init__(self, host: SandboxHost, **options: Any) -> None:
        self._process = host.start_module("tests.support.sandbox_driver", **options)

    def __call__(self, request: str, /, *, limit_s: float = LIMIT_S, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([request, arguments]) + "\n")
        self._process.stdin.flush()
        readable, _, _ = select.select([self._process.stdout], [], [], limit_s)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            raise RuntimeError(f"the driver has {'ended' if readable else 'hung'} during {request!r}")
        kind, result = json.loads(line)
        assert kind == "result", result
        return result

    def die(self) -> None:
        """Kill the process, as a crash of the agent."""
        with contextlib.suppress(RuntimeError):
            self("die")
        self.close()

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            self._process.wait(LIMIT_S / 10)
        except subprocess.TimeoutExpired:
            # The process itself ends with the host.
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def driver(host: SandboxHost, **options: Any) -> Iterator[Driver]:
    made = Driver(host, **options)
    try:
        yield made
    finally:
        made.close()
