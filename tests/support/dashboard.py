"""Dashboard process, headless browser and sample store for tests of the dashboard."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from remuda.adapters.sqlite import tables
from remuda.adapters.sqlite.documents import decode
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.controlplane.context import Context
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Instance, State
from remuda.web.dashboard.feed import Feed
from tests.support import sample_records
from tests.support.local_backend import run_local

#: Executable names, in order of preference. The headless shell starts fastest.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = Path(next(filter(None, map(shutil.which, BROWSERS)), f"/usr/bin/{BROWSERS[0]}"))
#: Upper limit in seconds of any wait; only reached if something is broken.
LIMIT_S = 60.0
START_MS = 120_000
_COMMAND = str(Path(sys.executable).parent / "remuda")

requires_browser = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM.name} is not installed")


@asynccontextmanager
async def _no_store() -> AsyncIterator[Context]:
    raise Unavailable("no store")
    yield


def feed_without_store() -> Feed:
    clock, ids = SystemClock(), SystemIds()
    return Feed(open_context=_no_store, backend="local", interval_s=1.0, since_s=60.0, clock=clock, ids=ids)


def remuda(folder: Path, *arguments: str) -> dict[str, Any]:
    result = run_local(folder, *arguments, environment=environment())
    assert result.code == 0, result
    document: dict[str, Any] = result.document
    return document


def environment(**variables: str) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in ("PATH", "LANG", "HOME") if name in os.environ}
    return {**inherited, "REMUDA_CONFIG": os.devnull, "GITHUB_REPOSITORY": "remuda/demo", **variables}


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
        """Read the JSON document that the process prints once it listens."""
        assert self._process.stdout is not None
        text = ""
        while line := self._process.stdout.readline():
            text += line
            if line == "}\n":
                document: dict[str, Any] = json.loads(text)
                return document
        raise AssertionError(f"the dashboard exited: {text} {self._process.communicate()[1]}")

    def cpu_s(self) -> float:
        """Return the CPU seconds used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def interrupt(self) -> tuple[int, str]:
        """Send SIGINT. Return the exit code and standard error."""
        self._process.send_signal(signal.SIGINT)
        _, stderr = self._process.communicate(timeout=LIMIT_S)
        return self._process.returncode, stderr

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class SampleStore:
    """A SQLite store with sample records that a test changes like the commands do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = sample_records.prepare(folder)

    def write(self, *samples: sample_records.SampleInstance) -> None:
        sample_records.write(self.file, samples, now=SystemClock().now())

    def fleet(self, count: int, transitions: int) -> list[sample_records.SampleInstance]:
        samples = list(sample_records.fleet(count, transitions, now=SystemClock().now()))
        self.write(*samples)
        return samples

    def read(self, instance_id: str) -> Instance:
        found: list[str | None] = []
        sample_records.with_store(
            self.file, lambda connection: found.append(tables.one(connection, tables.RecordKind.CONTROL, instance_id))
        )
        assert found[0] is not None
        return decode(Instance, found[0])

    def advance(self, instance_id: str) -> Instance:
        """Apply the instance's next transition."""
        record, entries = sample_records.next_transition(self.read(instance_id), now=SystemClock().now())
        self.write((record, entries))
        return record


def live_instances(samples: list[sample_records.SampleInstance], state: State | None = None) -> list[Instance]:
    return [
        record
        for record, _ in samples
        if record.state is not State.TERMINATED and (state is None or record.state is state)
    ]


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only if there is a browser

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), timeout=START_MS)
        try:
            yield browser
        finally:
            browser.close()
