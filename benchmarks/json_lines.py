"""Helper processes: one line of JSON to their standard input, one back from their standard output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

#: Maximum length of a line, which may name every instance of a pool.
MAX_LINE = 2**24


class JsonProcess:
    """Client of a helper process."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._name = name
        self.pid = process.pid
        self._lock = asyncio.Lock()
        #: The response that the process wrote when it was ready.
        self.ready: dict[str, Any] = {}

    async def request(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None  # noqa: S101 - started with a pipe
        async with self._lock:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            await self._process.stdin.drain()
            return await self.response()

    async def response(self) -> dict[str, Any]:
        assert self._process.stdout is not None  # noqa: S101 - started with a pipe
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process {self._name} has exited")
        found: dict[str, Any] = json.loads(line)
        return found


@asynccontextmanager
async def json_process(module: str, *arguments: str) -> AsyncIterator[JsonProcess]:
    """Start a module as a process and wait until it is ready. The environment variables name the servers."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ),
        limit=MAX_LINE,
        # So that Ctrl-C reaches only the benchmark.
        start_new_session=True,
    )
    try:
        made = JsonProcess(process, module)
        made.ready = await made.response()
        yield made
    finally:
        # It may have exited already.
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def respond(document: dict[str, Any]) -> None:
    """Write a response, in the helper process."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
