"""The dashboard as a process, its page in Debian's browser, and records to show."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from remuda.adapters.sqlite import tables
from remuda.adapters.sqlite.documents import decode
from remuda.adapters.system.clock import SystemClock
from remuda.domain.instance import Instance, State
from tests.support import sample_records
from tests.support.local_backend import run_local

#: Debian's, or what is called so elsewhere. The first one has no windows: they would take most of the time.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = Path(next(filter(None, map(shutil.which, BROWSERS)), f"/usr/bin/{BROWSERS[0]}"))
#: Generous: nothing waits for it unless something is broken.
LIMIT_S = 60.0
START_MS = 120_000
_COMMAND = str(Path(sys.executable).parent / "remuda")

without_browser = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM.name}: apt-get install it")


def remuda(folder: Path, *arguments: str) -> dict[str, Any]:
    result = run_local(folder, *arguments, environment=environment())
    assert result.code == 0, result
    document: dict[str, Any] = result.document
    return document


def environment(**more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "HOME") if name in os.environ}
    return {**kept, "REMUDA_CONFIG": os.devnull, "GITHUB_REPOSITORY": "remuda/demo", **more}


class Dashboard:
    def __init__(self, folder: Path, *flags: str, port: int = 0, **variables: str) -> None:
        self._process = subprocess.Popen(
            [_COMMAND, "dashboard", "--dir", str(folder), "--port", str(port), "--json", "--quiet", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**variables),
        )
        try:
            self.url = str(self._document()["url"])
        except BaseException:
            self.kill()
            raise
        self.port = int(self.url.rstrip("/").rpartition(":")[2])

    def _document(self) -> dict[str, Any]:
        """The one that it writes when it listens."""
        assert self._process.stdout is not None
        text = ""
        while line := self._process.stdout.readline():
            text += line
            if line == "}\n":
                document: dict[str, Any] = json.loads(text)
                return document
        raise AssertionError(f"the dashboard ended: {text} {self._process.communicate()[1]}")

    def cpu_s(self) -> float:
        """What it has used of a core so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def interrupt(self) -> tuple[int, str]:
        """As Ctrl-C does; its exit code, and what it said."""
        self._process.send_signal(signal.SIGINT)
        _, told = self._process.communicate(timeout=LIMIT_S)
        return self._process.returncode, told

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Records:
    """A pool's store that a test changes as the commands would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = sample_records.prepare(folder)

    def write(self, *lives: sample_records.Life) -> None:
        sample_records.write(self.file, lives, now=SystemClock().now())

    def fleet(self, count: int, transitions: int) -> list[sample_records.Life]:
        lives = list(sample_records.fleet(count, transitions, now=SystemClock().now()))
        self.write(*lives)
        return lives

    def read(self, instance_id: str) -> Instance:
        found: list[str | None] = []
        sample_records.with_store(
            self.file, lambda connection: found.append(tables.one(connection, tables.RecordKind.CONTROL, instance_id))
        )
        assert found[0] is not None
        return decode(Instance, found[0])

    def move(self, instance_id: str) -> Instance:
        """Its next step of life."""
        record, entries = sample_records.moved(self.read(instance_id), now=SystemClock().now())
        self.write((record, entries))
        return record

    def name(self, life: sample_records.Life, **changed: Any) -> sample_records.Life:
        record, entries = life
        return replace(record, **changed), entries


def living(lives: list[sample_records.Life], state: State | None = None) -> list[Instance]:
    return [
        record
        for record, _ in lives
        if record.state is not State.TERMINATED and (state is None or record.state is state)
    ]


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only where there is a browser

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), timeout=START_MS)
        try:
            yield browser
        finally:
            browser.close()
