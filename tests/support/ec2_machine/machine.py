"""Machines as EC2 would make them, on this one Linux computer: the real user data and the real agent in namespaces."""

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
from remuda.fake_github.package import PROGRAMS, install
from tests.support.ec2_machine.init import INTERPRETER

ROOT = Path(__file__).parents[3]
INIT = Path(__file__).with_name("init.py")
UNSHARE = ("unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child=KILL")
STOP_WITHIN_S = 60.0


@cache
def why_not() -> str:
    """Why this computer cannot have such machines; empty where it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "machines in namespaces need root on Linux"
    probe = (
        "set -e; mount -t tmpfs t /mnt; mkdir /mnt/u /mnt/w /mnt/r;"
        " mount -t overlay o -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r"
    )
    done = subprocess.run([*UNSHARE, "sh", "-c", probe], capture_output=True, text=True, check=False)
    return f"machines in namespaces need overlay mounts: {done.stderr.strip()}" if done.returncode else ""


def bake(image: Path) -> None:
    """An image with the agent and the runner's stand-in, as deep as /opt/remuda."""
    opt = image / "opt" / "remuda"
    (opt / "bin").mkdir(parents=True)
    remuda = opt / "bin" / "remuda"
    remuda.write_text(f'#!/bin/sh\nexec {sys.executable} -m remuda "$@"\n')
    remuda.chmod(0o755)
    install(opt / "runner")
    for name in PROGRAMS:
        # Jobs are others than whoever runs the tests, and may not look where their interpreter lies.
        program = opt / "runner" / "bin" / name
        lines = program.read_text().splitlines(keepends=True)
        program.write_text("".join([f"#!{INTERPRETER}/bin/python3 -ISB\n", *lines[1:]]))
    for folder in (image, image / "opt", opt, opt / "bin"):
        folder.chmod(0o755)


class NamespaceMachine:
    """One machine. It lives until it powers itself off, or is stopped: then all that ran in it is gone."""

    def __init__(self, folder: Path, *, image: Path, user_data: str, environment: Mapping[str, str]) -> None:
        """`environment` is what the image's services have from the start: where its metadata service is, say."""
        folder.mkdir(parents=True, exist_ok=True)
        layer = folder / "layer"
        layer.mkdir(exist_ok=True)
        (folder / "user-data").write_text(user_data)
        plan = {
            "folder": str(layer),
            "image": str(image),
            "binds": [str(ROOT)],
            "user_data": str(folder / "user-data"),
            "environment": dict(environment),
        }
        self._console = folder / "console.log"
        with self._console.open("ab") as console:
            self._process = subprocess.Popen(
                [*UNSHARE, sys.executable, "-I", str(INIT), json.dumps(plan)],
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
        """All that the user data, the services and their stand-ins have said."""
        return self._console.read_text(errors="replace")

    @property
    def processes(self) -> list[procfs.Process]:
        """Init first."""
        return procfs.descendants(self._process.pid)

    @property
    def root(self) -> Path:
        """Its root, as seen from outside: for looks. Links in it that are absolute lead out of it."""
        return Path(f"/proc/{self.processes[0].pid}/root")

    def run(self, *command: str, user: str = "root", told: str = "") -> subprocess.CompletedProcess[str]:
        """A command inside, with that on its standard input."""
        pid = str(self.processes[0].pid)
        inside = ["nsenter", "--target", pid, "--mount", "--pid", "--ipc", "--root", "--wd=/"]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user != "root" else []
        return subprocess.run(
            [*inside, *become, *command],
            input=told,
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": os.defpath},
        )

    def stop(self) -> None:
        """Returns when nothing of it runs any more. All that runs in it ends before its init does."""
        if not self.is_on:
            return
        init = procfs.descendants(self._process.pid)[:1]
        # Not `unshare` alone: init may have been born a moment ago, and not yet be bound to its life.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_WITHIN_S)
        procfs.kill(init, STOP_WITHIN_S)
