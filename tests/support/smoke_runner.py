"""Tries an archive of the actions runner in a sandbox of this computer: `make smoke-runner RUNNER=path-or-url`.

It shows whether the sandbox has what the runner needs: libraries, readable folders, permitted system calls. It needs no
GitHub. Without an archive it tries the fake runner.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from tests.support.namespace_machine.machine import bake_image
from tests.support.sandbox_host import Driver, SandboxHost, driver, missing

#: Per check: command, and a text that its output must contain.
CHECKS = (
    ("./config.sh --help", "Configures the runner"),
    ("./bin/Runner.Listener --version", "2."),
    ("./bin/Runner.Listener warmup", ""),
)
DOWNLOAD_TIMEOUT_S = 60.0
MAX_SHOWN = 2_000


class BadArchiveError(Exception):
    """The archive cannot be used. The text names the fix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SmokeCheck:
    command: str
    passed: bool
    exit_code: int
    seconds: float
    output: str


def unpack(source: str, folder: Path) -> Path:
    """Unpack the archive, as the bootstrap of a machine does. Return the runner's folder."""
    runner = folder / "opt" / "runner"
    runner.mkdir(parents=True)
    if not source:
        bake_image(folder / "fake")
        return folder / "fake" / "runner"
    archive = Path(source)
    if source.startswith("https://"):
        archive = folder / "runner.tar.gz"
        _download(source, archive)
    try:
        with tarfile.open(archive) as opened:
            opened.extractall(runner, filter="tar")
    except (OSError, tarfile.TarError) as problem:
        raise BadArchiveError(f"RUNNER {source[:200]!r} cannot be read: {problem}; name a .tar.gz archive") from None
    if not (runner / "bin" / "Runner.Listener").is_file():
        raise BadArchiveError(f"RUNNER {source[:200]!r} has no bin/Runner.Listener; name an archive of actions/runner")
    subprocess.run(["chmod", "-R", "go+rX,go-w", str(runner)], check=True)
    return runner


def _download(url: str, target: Path) -> None:
    try:
        with (
            httpx.stream("GET", url, follow_redirects=True, timeout=DOWNLOAD_TIMEOUT_S) as response,
            target.open("wb") as file,
        ):
            response.raise_for_status()
            for chunk in response.iter_bytes():
                file.write(chunk)
    except httpx.HTTPError as problem:
        raise BadArchiveError(f"RUNNER {url[:200]!r} cannot be downloaded: {problem}; name a file instead") from None


@contextlib.contextmanager
def booted(source: str) -> Iterator[Driver]:
    """A sandbox with the runner of the archive."""
    with tempfile.TemporaryDirectory(prefix="remuda-smoke-") as folder:
        runner = unpack(source, Path(folder))
        with SandboxHost("smoke") as host, driver(host, folder=folder, runner=str(runner)) as agent:
            agent("open")
            agent("ready")
            yield agent
            agent("discard")


def check(agent: Driver, command: str, expected: str) -> SmokeCheck:
    started = time.monotonic()
    result = agent("run_program", script=f"#!/bin/sh\n{command} 2>&1\n")
    return SmokeCheck(
        command=command,
        passed=result["exit_code"] == 0 and expected in result["output"],
        exit_code=result["exit_code"],
        seconds=round(time.monotonic() - started, 3),
        output=result["output"].strip(),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="smoke-runner", description=__doc__)
    parser.add_argument("runner", nargs="?", default="", help="path or https URL of actions-runner-linux-….tar.gz")
    parser.add_argument("--json", action="store_true", help="write the result as JSON")
    options = parser.parse_args(arguments)
    if missing():
        sys.stderr.write(f"sandboxes on this computer: {missing()}\n")
        return 2
    results = []
    try:
        with booted(options.runner) as agent:
            for command, expected in CHECKS:
                results.append(check(agent, command, expected))
                if not options.json:
                    _show(results[-1])
    except BadArchiveError as problem:
        sys.stderr.write(f"{problem}\n")
        return 2
    if options.json:
        sys.stdout.write(f"{json.dumps([asdict(result) for result in results], indent=2)}\n")
    return 0 if all(result.passed for result in results) else 1


def _show(result: SmokeCheck) -> None:
    first = result.output.partition("\n")[0]
    line = f"{'ok  ' if result.passed else 'FAIL'} {result.seconds:6.2f} s  {result.command}"
    sys.stdout.write(f"{line}  {first}\n" if result.passed else f"{line}: exit code {result.exit_code}\n")
    if not result.passed:
        sys.stdout.write(f"{result.output[-MAX_SHOWN:]}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
