"""Looks at the local backend: is it up, and is what machines start from in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from remuda.ports.doctor import Check, CheckResult, ok, problem

#: What a runner's folder begins with.
SCRIPTS = ("config.sh", "run.sh")


class LocalDoctor:
    #: The check that the pool's and GitHub's need.
    ready = "local backend"

    def __init__(self, *, root: Path, runner: Path, background: Mapping[str, Callable[[], bool]]) -> None:
        """`background`: processes by name, and whether each runs."""
        self._root = root
        self._runner = runner
        self._background = background
        self._fix = f"run remuda up --dir {root}"

    def checks(self) -> Sequence[Check]:
        return (
            Check(name=self.ready, look=self._up),
            Check(name="runner software", look=self._software, needs=(self.ready,)),
        )

    async def _up(self) -> CheckResult:
        if not self._root.is_dir():
            return problem(f"there is no state folder {self._root}", self._fix)
        if not os.access(self._root, os.R_OK | os.W_OK | os.X_OK):
            return problem(f"{self._root} is not yours to write", "give --dir a folder that you may write")
        down = [name for name, runs in self._background.items() if not runs()]
        if down:
            return problem(f"{' and '.join(down)} {'does' if len(down) == 1 else 'do'} not run", self._fix)
        return ok(f"up in {self._root}")

    async def _software(self) -> CheckResult:
        missing = [name for name in SCRIPTS if not os.access(self._runner / name, os.X_OK)]
        if missing:
            return problem(f"{', '.join(missing)} missing in {self._runner}", self._fix)
        return ok(str(self._runner))
