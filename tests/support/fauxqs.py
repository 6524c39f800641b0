"""A second SQS server, from npm: what the pool rests on must not be one server's whim."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "requirements" / "node_modules" / "fauxqs" / "dist" / "app.js"
#: Generous: nothing waits for it unless something is broken.
LIMIT_S = 120.0


class Fauxqs:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url = f"http://127.0.0.1:{int(self._read())}"

    def let_pass(self, seconds: float) -> None:
        """Move its clock ahead."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        assert self._read() == "moved"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def fauxqs() -> Iterator[Fauxqs]:
    node = shutil.which("node")
    if node is None or not PACKAGE.exists():
        pytest.skip("fauxqs is not installed: run make conformance on a machine with npm")
    command = [node, str(Path(__file__).with_suffix(".mjs")), str(PACKAGE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Fauxqs(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(LIMIT_S)
