"""Machines in Linux namespaces that run the real user data and the real agent."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from remuda import procfs
from remuda.fake_github import PROGRAMS, install_runner
from remuda.scripts import SYSTEM_PATH
from tests.support.accounts import account_files
from tests.support.namespace_machine.network import SERVERS, own_network
from tests.support.namespace_machine.requirements import UNSHARE, unsupported_reason

INIT = Path(__file__).with_name("init.py")
#: A Python interpreter in the runner's own folder, as the real runner has Node.js: sandboxes hide most other places.
INTERPRETER = Path("/opt/remuda/runner/externals/python/bin/python3")
CURRENT_SANDBOX = "/var/lib/remuda/sandboxes/current.json"
STOP_WITHIN_S = 60.0


def quiet_network() -> AbstractContextManager[None]:
    """A network for the processes of a test with a browser, if machines of other tests may run at the same time.

    They change addresses of this computer, and a browser then aborts its requests (`net::ERR_NETWORK_CHANGED`).
    """
    return nullcontext() if unsupported_reason() else own_network()


def bake_image(image: Path) -> None:
    """Create an image: a folder with the agent and the fake runner, as /opt/remuda of a machine."""
    (image / "bin").mkdir(parents=True)
    remuda = image / "bin" / "remuda"
    remuda.write_text(f'#!/bin/sh\nexec {sys.executable} -m remuda "$@"\n')
    remuda.chmod(0o755)
    install_runner(image / "runner")
    _copy_interpreter(image / "runner" / "externals" / "python")
    for name in PROGRAMS:
        program = image / "runner" / "bin" / name
        lines = program.read_text().splitlines(keepends=True)
        program.write_text("".join([f"#!{INTERPRETER} -ISB\n", *lines[1:]]))
    for folder in (image, image / "bin"):
        folder.chmod(0o755)


def _copy_interpreter(target: Path) -> None:
    """Copy the interpreter and the standard library, without packages and tests."""
    version = sysconfig.get_python_version()
    (target / "bin").mkdir(parents=True)
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    shutil.copy(executable, target / "bin" / INTERPRETER.name)
    ignored = shutil.ignore_patterns(
        *("site-packages", "dist-packages", "test", "tests", "idlelib", "ensurepip", "lib2to3", "tkinter", "config-*"),
        *("turtledemo", "pydoc_data", "*.opt-?.pyc"),
    )
    shutil.copytree(sysconfig.get_path("stdlib"), target / "lib" / f"python{version}", symlinks=True, ignore=ignored)
    for library in Path(sysconfig.get_config_var("LIBDIR")).glob(f"libpython{version}.so*"):
        shutil.copy(library, target / "lib", follow_symlinks=False)


class NamespaceMachine:
    """A machine that runs until it powers itself off or is stopped. All its processes end with it."""

    def __init__(
        self,
        folder: Path,
        *,
        image: Path,
        user_data: str,
        metadata_network: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`metadata_network` is the path of the network namespace with its metadata service.

        `environment` is set for all services of the machine.
        """
        folder.mkdir(parents=True, exist_ok=True)
        disk = folder / "disk"
        if not disk.exists():
            (disk / "opt").mkdir(parents=True)
            # Linked, not copied: an image has thousands of files, and none of them changes.
            subprocess.run(["cp", "-al", str(image), str(disk / "opt" / "remuda")], check=True)
        (folder / "user-data").write_text(user_data)
        number = secrets.token_hex(4)
        self._cgroup = f"remuda-machine-{number}"
        network = {
            "computer": f"/proc/{os.getpid()}/ns/net",
            "interface": f"remuda{number}",
            "servers": SERVERS,
        }
        if metadata_network:
            network["metadata"] = metadata_network
        configuration = {
            "folder": str(disk),
            "user_data": str(folder / "user-data"),
            "files": account_files(),
            "environment": dict(environment or {}),
            "cgroup": self._cgroup,
            "network": network,
        }
        self._console = folder / "console.log"
        with self._console.open("ab") as console:
            self._process = subprocess.Popen(
                [*UNSHARE, sys.executable, "-I", str(INIT), json.dumps(configuration)],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={"PATH": SYSTEM_PATH},
                start_new_session=True,
            )

    @property
    def is_on(self) -> bool:
        return self._process.poll() is None

    @property
    def console(self) -> str:
        """The output of user data, services and replaced commands."""
        return self._console.read_text(errors="replace")

    @property
    def processes(self) -> list[procfs.Process]:
        """The processes of the machine, its init first."""
        return procfs.descendants(self._process.pid)

    def run(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command on the machine, outside all sandboxes."""
        pid = str(self.processes[0].pid)
        inside = ["nsenter", "--target", pid, "--mount", "--pid", "--ipc", "--uts", "--net", "--cgroup", "--wd=/"]
        return subprocess.run(
            [*inside, *command], input=stdin, capture_output=True, text=True, check=False, env={"PATH": SYSTEM_PATH}
        )

    @property
    def has_sandbox(self) -> bool:
        return self.run("test", "-e", CURRENT_SANDBOX).returncode == 0

    def run_in_sandbox(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command as root of the current sandbox."""
        current = json.loads(self.run("cat", CURRENT_SANDBOX).stdout)
        leader = self.run("pgrep", "--parent", str(current["pid"])).stdout.split()[0]
        return self.run("nsenter", f"--target={leader}", "--all", "--wd=/", "--", *command, stdin=stdin)

    def stop(self) -> None:
        """Switch the machine off and delete its disk. Returns when none of its processes is left."""
        if self.is_on:
            init = procfs.descendants(self._process.pid)[:1]
            # The whole group: a new init may not have set its parent-death signal yet, and would outlive `unshare`.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_WITHIN_S)
            procfs.kill(init, STOP_WITHIN_S)
        remove = 'mount -t cgroup2 none /mnt && [ ! -d "$0" ] || find "$0" -depth -type d -exec rmdir {} +'
        subprocess.run(["unshare", "--mount", "sh", "-c", remove, f"/mnt/{self._cgroup}"], check=True)
        # Jobs may have made deeper trees than Python's functions can delete.
        subprocess.run(["rm", "-rf", str(self._console.with_name("disk"))], check=True)
