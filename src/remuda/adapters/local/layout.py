"""Paths in the state folder of the local backend, and its doctor checks."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from remuda.disk import DiskUsage, describe_low, existing
from remuda.ports.doctor import Check, CheckResult, ok, problem, warning

#: Scripts that the runner software must contain.
SCRIPTS = ("config.sh", "run.sh")
#: Used share of a disk from which there is a warning.
DISK_WARNING_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class LocalLayout:
    root: Path

    @property
    def database(self) -> Path:
        return self.root / "remuda.db"

    @property
    def changes(self) -> Path:
        """The files by which writers of the database wake waiting processes."""
        return self.root / "remuda.db-changes"

    @property
    def github(self) -> Path:
        return self.root / "github"

    @property
    def runner(self) -> Path:
        return self.root / "runner"

    @property
    def instances(self) -> Path:
        return self.root / "instances"

    @property
    def logs(self) -> Path:
        return self.root / "logs"


#: The background process that most checks need.
LOCAL_GITHUB = "the local GitHub"


class LocalDoctor:
    """Checks whether the local backend is up and the runner software is installed."""

    #: Name of the check on which the checks of the pool and of GitHub depend.
    ready = "local backend"

    def __init__(
        self,
        *,
        root: Path,
        runner: Path,
        background: Mapping[str, Callable[[], bool]],
        disk_usage: Callable[[Path], DiskUsage] = shutil.disk_usage,
    ) -> None:
        """`background` maps the names of background processes to functions that check whether they run."""
        self._disk_usage = disk_usage
        self._root = root
        self._runner = runner
        self._background = background
        self._fix = f"run {shlex.join(['remuda', 'up', '--dir', str(root)])}"

    def checks(self) -> Sequence[Check]:
        return (
            Check(name=self.ready, run=self._up),
            Check(name="background processes", run=self._processes, needs=(self.ready,)),
            Check(name="disk", run=self._disk),
            Check(name="runner software", run=self._software, needs=(self.ready,)),
        )

    async def _up(self) -> CheckResult:
        if not self._root.is_dir():
            return problem(f"the state folder {self._root} does not exist", self._fix)
        if not os.access(self._root, os.R_OK | os.W_OK | os.X_OK):
            return problem(f"no write access to {self._root}", "pass a writable folder with --dir")
        down = self._stopped()
        if LOCAL_GITHUB in down:
            return problem(f"not running: {' and '.join(down)}", self._fix)
        return ok(f"up in {self._root}")

    async def _processes(self) -> CheckResult:
        down = self._stopped()
        if down:
            return problem(f"not running: {' and '.join(down)}", self._fix)
        return ok(f"running: {' and '.join(self._background)}")

    def _stopped(self) -> list[str]:
        return [name for name, runs in self._background.items() if not runs()]

    async def _disk(self) -> CheckResult:
        """Of the nearest existing folder, because the state folder may be missing."""
        folder = existing(self._root)
        try:
            used = self._disk_usage(folder)
        except OSError as error:
            return warning(f"the disk of {folder} cannot be checked: {error.strerror}", "check it by hand")
        # Blocks that are reserved for root count as used.
        share = 1 - used.free / used.total if used.total else 0.0
        text = f"{share:.0%} of the disk of {folder} is used, {used.free / 2**20:,.0f} MiB are free"
        fix = f"free space on the disk of {folder}: a full disk stops every change of the pool"
        if low := describe_low(folder, used):
            return problem(low, fix)
        if share >= DISK_WARNING_SHARE:
            return warning(text, fix)
        return ok(text)

    async def _software(self) -> CheckResult:
        missing = [name for name in SCRIPTS if not os.access(self._runner / name, os.X_OK)]
        if missing:
            return problem(f"missing in {self._runner}: {', '.join(missing)}", self._fix)
        return ok(str(self._runner))
