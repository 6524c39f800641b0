"""Requests to a subprocess: one line of JSON to its standard input, one back from its standard output."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any


async def send_request(process: asyncio.subprocess.Process, request: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    assert process.stdin is not None  # noqa: S101 - started with a pipe
    process.stdin.write(json.dumps(request).encode() + b"\n")
    await process.stdin.drain()
    return await read_response(process, name=name)


async def read_response(process: asyncio.subprocess.Process, *, name: str) -> dict[str, Any]:
    assert process.stdout is not None  # noqa: S101 - started with a pipe
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"the {name} process has exited")
    found: dict[str, Any] = json.loads(line)
    return found
