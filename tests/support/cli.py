"""Runs of the `remuda` command line: forked from a process with its imports done, or as a new interpreter.

A fork takes a tenth of the time of a new interpreter, so tests of many commands use `run_cli` and `start_cli`. Each
command still has its own process, streams and environment. Tests of the installed command use `run_installed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from remuda.adapters.system.clock import SystemClock

CLI = "remuda.cli.main"
#: Imported once by the fork server, because most commands need them.
PRELOADED = (
    "aiobotocore.session",
    "remuda.adapters.aws.clients",
    "remuda.adapters.aws.dynamodb.keys",
    "remuda.adapters.aws.dynamodb.store",
    "remuda.adapters.aws.ec2.compute",
    "remuda.adapters.aws.ec2.options",
    "remuda.adapters.aws.ec2.tagged_fleet",
    "remuda.adapters.aws.sqs",
    "remuda.adapters.github.auth",
    "remuda.adapters.github.client",
    "remuda.cli.lifecycle",
    "remuda.cli.local_backend",
    "remuda.cli.main",
    "remuda.cli.operator",
    "remuda.cli.read",
    "remuda.cli.run_workflow",
    "remuda.cli.terminal",
    "remuda.controlplane.refresh",
    "remuda.controlplane.scale_down",
    "remuda.wiring.local",
    "xml.etree.ElementTree",
)
ROOT = Path(__file__).parents[2]
#: Seconds that a command may take. Generous: only a broken command reaches it.
LIMIT_S = 240.0
STDOUT, STDERR = 1, 2
#: `start_cli` and `run_cli` may be called from several threads, but the fork server must be started once.
_START_LOCK = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """The JSON document on standard output; an empty one if the command wrote none."""
        return json.loads(self.stdout) if self.stdout.strip() else {}


# Forked processes -----------------------------------------------------------------------------------------------------


def run_cli(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_s: float = LIMIT_S,
    cwd: Path | None = None,
    frozen_at: str = "",
) -> CommandResult:
    """Run a command in a forked process and capture its output. `frozen_at` is a time for its wall clock."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        streams = (stdout.fileno(), stderr.fileno())
        process = _fork(_Command(CLI, list(arguments), dict(environment), str(cwd or Path.cwd()), streams, frozen_at))
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(arguments), timeout_s, _content(stderr).encode())
        return CommandResult(code=process.exitcode, stdout=_content(stdout), stderr=_content(stderr))


async def start_cli(
    arguments: Sequence[str], *, environment: Mapping[str, str], cwd: Path, program: str = CLI
) -> ForkedProcess:
    """Start a command in a forked process with pipes for its output. The `main` of `program` takes the arguments."""
    pipes = [os.pipe() for _ in range(2)]
    try:
        streams = (pipes[0][1], pipes[1][1])
        command = _Command(program, list(arguments), dict(environment), str(cwd), streams)
        # In a thread: the first call waits for the imports of the fork server.
        process = await asyncio.to_thread(_fork, command)
    finally:
        for _, write in pipes:
            os.close(write)
    readers = []
    for read, _ in pipes:
        reader = asyncio.StreamReader()
        protocol = partial(asyncio.StreamReaderProtocol, reader)
        await asyncio.get_running_loop().connect_read_pipe(protocol, os.fdopen(read, "rb"))
        readers.append(reader)
    return ForkedProcess(process, *readers)


class ForkedProcess:
    """A running command, with the methods of `asyncio.subprocess.Process` that tests need."""

    def __init__(self, process: ForkServerProcess, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        self._process = process
        self.stdout = stdout
        self.stderr = stderr

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)

    async def communicate(self) -> tuple[bytes, bytes]:
        stdout, stderr = await asyncio.gather(self.stdout.read(), self.stderr.read())
        await self.wait()
        return stdout, stderr

    async def result(self, timeout_s: float = LIMIT_S) -> CommandResult:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await self.communicate()
        assert self.returncode is not None
        return CommandResult(code=self.returncode, stdout=stdout.decode(), stderr=stderr.decode())

    def send_signal(self, number: int) -> None:
        # The process may have ended before the fork server reports its exit code.
        with contextlib.suppress(ProcessLookupError):
            if self.returncode is None and self._process.pid is not None:
                os.kill(self._process.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class _Command:
    """The target of a forked process."""

    program: str
    arguments: list[str]
    environment: dict[str, str]
    cwd: str
    #: File descriptors for stdout and stderr. Pickling replaces them by objects that pass them to the fork server.
    streams: tuple[Any, Any]
    #: Time of the wall clock, if it does not run. The monotonic clock always runs.
    frozen_at: str = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "streams": tuple(reduction.DupFd(number) for number in self.streams)}

    def run(self) -> None:
        for number, stream in zip((STDOUT, STDERR), self.streams, strict=True):
            opened = stream.detach()
            os.dup2(opened, number)
            os.close(opened)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (STDOUT, STDERR))  # noqa: SIM115 - open until the process ends
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.argv = ["remuda", *self.arguments]
        if self.frozen_at:
            frozen = datetime.fromisoformat(self.frozen_at)
            SystemClock.now = lambda self: frozen  # type: ignore[method-assign] # noqa: ARG005 - the port's own name
        sys.exit(importlib.import_module(self.program).main(self.arguments))


def _fork(command: _Command) -> ForkServerProcess:
    with _START_LOCK:
        process = _context().Process(target=command.run)
        process.start()
        # multiprocessing polls all known children on each start, and would take the exit code from the thread that
        # waits for it.
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    return process


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # The fork server ignores a module that it cannot find, and does not inherit sys.path.
    assert all(map(importlib.util.find_spec, PRELOADED))
    context.set_forkserver_preload([*PRELOADED, __name__])
    with patch.dict(os.environ, {"PYTHONPATH": str(ROOT)}):
        forkserver.ensure_running()
    return context


def _content(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode())


# New interpreters -----------------------------------------------------------------------------------------------------


def run_installed(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_s: float = LIMIT_S,
    cwd: Path | None = None,
) -> CommandResult:
    """Run `python -m remuda` and capture its output."""
    done = subprocess.run(
        [sys.executable, "-m", "remuda", *arguments],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=cwd,
    )
    return CommandResult(code=done.returncode, stdout=done.stdout, stderr=done.stderr)
