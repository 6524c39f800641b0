"""Jobs as plain processes in folders of this computer: the local backend. This is no isolation.

A reset kills the processes that jobs left and makes the folders anew. It does not find what jobs changed elsewhere.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from remuda.agent.listener import WAIT_FOR_UPDATE, Files, StartCommand
from remuda.agent.processes import KillResult
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment
from remuda.ports.machine import StepResult
from remuda.procfs import Process

MAX_DETAIL = 500


class JobFolders:
    """The folders `runner`, `home`, `work` and `tmp` of a local machine.

    `processes` returns all processes of the machine, `kill` ends those of past jobs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pristine: Path,
        processes: Callable[[], list[Process]],
        kill: Callable[[], KillResult],
    ) -> None:
        self._folder = folder
        self._pristine = pristine
        self._processes = processes
        self._kill = kill

    @property
    def runner_folder(self) -> Path:
        return self._folder / "runner"

    async def ready(self) -> None:
        """The folders exist from the start."""

    async def prepare_start(self, assignment: Assignment, files: Files) -> StartCommand:  # noqa: ARG002  # no volumes
        try:
            await asyncio.to_thread(self._write, files)
        except OSError as problem:
            raise Unavailable(f"cannot start the listener: {problem}") from problem
        start = f'cd "$0" || exit; [ -z "$1" ] || {{ {WAIT_FOR_UPDATE}; }}; exec "$0/bin/Runner.Listener" run'
        return StartCommand(arguments=("/bin/sh", "-c", start, str(self.runner_folder)))

    def _write(self, files: Files) -> None:
        for name in (".env", ".path"):
            _erase(self.runner_folder / name)
        for path, (content, mode) in files.items():
            target = Path(path)
            target.parent.mkdir(exist_ok=True)
            target.unlink(missing_ok=True)
            target.write_bytes(content)
            target.chmod(mode)

    def processes(self) -> list[Process]:
        return self._processes()

    async def reset(self) -> StepResult:
        try:
            return await asyncio.to_thread(self._reset)
        except (OSError, shutil.Error) as problem:
            return StepResult(ok=False, detail=f"reset failed: {problem}"[:MAX_DETAIL])

    def _reset(self) -> StepResult:
        survivors = self._kill().survivors
        if survivors:
            names = ", ".join(process.name for process in survivors)
            return StepResult(ok=False, detail=f"cannot be killed: {names}"[:MAX_DETAIL])
        for name in ("runner", "home", "work", "tmp"):
            _erase(self._folder / name)
        for name in ("home", "work", "tmp"):
            (self._folder / name).mkdir(mode=0o700)
        shutil.copytree(self._pristine, self.runner_folder, symlinks=True)
        if self._kill().killed:
            return StepResult(ok=False, detail="processes of a job came back")
        return StepResult(ok=True)


def _erase(path: Path) -> None:
    """Remove a tree of any depth and with any modes, without following links."""
    if path.is_dir() and not path.is_symlink():
        subprocess.run(["chmod", "-R", "u+rwx", str(path)], stderr=subprocess.DEVNULL, check=False)
    done = subprocess.run(["rm", "-rf", "--", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip())
