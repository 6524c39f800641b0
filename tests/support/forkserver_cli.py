"""Commands as processes that need not import all anew: a server that has, forks one for each.

For tests of many commands, where importing would be most of the work. Each has its own process, streams and
environment; that the installed command starts by itself, others show.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

CLI = "remuda.cli.main"
PRELOADED = "tests.support.preloaded"
ROOT = Path(__file__).parents[2]
STDOUT, STDERR = 1, 2


#: Several threads start commands; their server is started once.
_FIRST = threading.Lock()


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    # It has another search path than its clients, and says nothing where it finds no module.
    with patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        forkserver.ensure_running()
    return context


def _start(order: _Order) -> ForkServerProcess:
    with _FIRST:
        process = _context().Process(target=order.run)
        process.start()
        # Whoever starts the next one would ask how this one ended, and take the answer from him who waits for it.
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    return process


def run_prepared(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_s: float,
    cwd: Path | None = None,
    program: str = CLI,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` does it with what it writes kept. A program is a module whose `main` takes arguments."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as told:
        order = _Order(
            program, list(arguments), dict(environment), str(cwd or Path.cwd()), (out.fileno(), told.fileno())
        )
        process = _start(order)
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(arguments), timeout_s, _written(told).encode())
        return subprocess.CompletedProcess(arguments, process.exitcode, _written(out), _written(told))


def _written(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode())


async def start_prepared(
    arguments: Sequence[str], *, environment: Mapping[str, str], cwd: Path, program: str = CLI
) -> PreparedProcess:
    """As `asyncio.create_subprocess_exec` does it with pipes."""
    readers, ours, theirs = [], [], []
    for _ in range(2):
        read, write = os.pipe()
        ours.append(read)
        theirs.append(write)
    try:
        order = _Order(program, list(arguments), dict(environment), str(cwd), (theirs[0], theirs[1]))
        # The first one waits for the server's imports.
        process = await asyncio.to_thread(_start, order)
    finally:
        for write in theirs:
            os.close(write)
    for read in ours:
        reader = asyncio.StreamReader()
        protocol = partial(asyncio.StreamReaderProtocol, reader)
        await asyncio.get_running_loop().connect_read_pipe(protocol, os.fdopen(read, "rb"))
        readers.append(reader)
    return PreparedProcess(process, *readers)


class PreparedProcess:
    """One under way, as far as tests use asyncio's own."""

    def __init__(self, process: ForkServerProcess, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        self._process = process
        self.stdout = stdout
        self.stderr = stderr

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(self._process.sentinel)

    async def communicate(self) -> tuple[bytes, bytes]:
        out, told = await asyncio.gather(self.stdout.read(), self.stderr.read())
        await self.wait()
        return out, told

    def send_signal(self, number: int) -> None:
        # It may have ended, and its server not yet have said so.
        with contextlib.suppress(ProcessLookupError):
            if self.returncode is None and self._process.pid is not None:
                os.kill(self._process.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class _Order:
    """What the new process does."""

    program: str
    arguments: list[str]
    environment: dict[str, str]
    cwd: str
    #: For stdout and stderr: numbers here; on the way, something that becomes the numbers there.
    streams: tuple[Any, Any]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "streams": tuple(reduction.DupFd(number) for number in self.streams)}

    def run(self) -> None:
        for number, stream in zip((STDOUT, STDERR), self.streams, strict=True):
            opened = stream.detach()
            os.dup2(opened, number)
            os.close(opened)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (STDOUT, STDERR))  # noqa: SIM115 - as long as the process lives
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.argv = ["remuda", *self.arguments]
        sys.exit(importlib.import_module(self.program).main(self.arguments))
