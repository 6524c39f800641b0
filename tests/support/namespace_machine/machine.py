"""Machines in Linux namespaces that run the real user data and the real agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from remuda import procfs
from remuda.fake_github import PROGRAMS, install_runner
from tests.support.namespace_machine.init import INTERPRETER

ROOT = Path(__file__).parents[3]
INIT = Path(__file__).with_name("init.py")
UNSHARE = ("unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child=KILL")
STOP_WITHIN_S = 60.0


@cache
def unsupported_reason() -> str:
    """The reason why this computer cannot run such machines; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "machines in namespaces need root on Linux"
    probe = (
        "set -e; mount -t tmpfs t /mnt; mkdir /mnt/u /mnt/w /mnt/r;"
        " mount -t overlay o -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r"
    )
    done = subprocess.run([*UNSHARE, "sh", "-c", probe], capture_output=True, text=True, check=False)
    return f"machines in namespaces need overlay mounts: {done.stderr.strip()}" if done.returncode else ""


def bake_image(image: Path) -> None:
    """Create an image: a folder with the agent and the fake runner below opt/remuda."""
    opt = image / "opt" / "remuda"
    (opt / "bin").mkdir(parents=True)
    remuda = opt / "bin" / "remuda"
    remuda.write_text(f'#!/bin/sh\nexec {sys.executable} -m remuda "$@"\n')
    remuda.chmod(0o755)
    install_runner(opt / "runner")
    for name in PROGRAMS:
        # The user of jobs may not be allowed to read the folder of the interpreter that runs the tests.
        program = opt / "runner" / "bin" / name
        lines = program.read_text().splitlines(keepends=True)
        program.write_text("".join([f"#!{INTERPRETER}/bin/python3 -ISB\n", *lines[1:]]))
    for folder in (image, image / "opt", opt, opt / "bin"):
        folder.chmod(0o755)


class NamespaceMachine:
    """A machine that runs until it powers itself off or is stopped. All its processes end with it."""

    def __init__(self, folder: Path, *, image: Path, user_data: str, environment: Mapping[str, str]) -> None:
        """`environment` is set for all services of the machine, such as the URL of its metadata service."""
        folder.mkdir(parents=True, exist_ok=True)
        layer = folder / "layer"
        layer.mkdir(exist_ok=True)
        (folder / "user-data").write_text(user_data)
        configuration = {
            "folder": str(layer),
            "image": str(image),
            "binds": [str(ROOT)],
            "user_data": str(folder / "user-data"),
            "environment": dict(environment),
        }
        self._console = folder / "console.log"
        with self._console.open("ab") as console:
            self._process = subprocess.Popen(
                [*UNSHARE, sys.executable, "-I", str(INIT), json.dumps(configuration)],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
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

    @property
    def root(self) -> Path:
        """The root folder as seen from outside. Absolute links in it point outside the machine."""
        return Path(f"/proc/{self.processes[0].pid}/root")

    def run(self, *command: str, user: str = "root", stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command inside the machine."""
        pid = str(self.processes[0].pid)
        inside = ["nsenter", "--target", pid, "--mount", "--pid", "--ipc", "--root", "--wd=/"]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user != "root" else []
        return subprocess.run(
            [*inside, *become, *command],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": os.defpath},
        )

    def stop(self) -> None:
        """Switch the machine off. Returns when none of its processes is left."""
        if not self.is_on:
            return
        init = procfs.descendants(self._process.pid)[:1]
        # The whole group: a new init may not have set its parent-death signal yet, and would outlive `unshare`.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_WITHIN_S)
        procfs.kill(init, STOP_WITHIN_S)
