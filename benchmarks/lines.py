"""Talk with a process that was started with pipes: a line of JSON to it, and one back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any


async def ask(process: asyncio.subprocess.Process, asked: Mapping[str, Any], *, whose: str) -> dict[str, Any]:
    assert process.stdin is not None  # noqa: S101 - it was started with one
    process.stdin.write(json.dumps(asked).encode() + b"\n")
    await process.stdin.drain()
    return await answered(process, whose=whose)


async def answered(process: asyncio.subprocess.Process, *, whose: str) -> dict[str, Any]:
    assert process.stdout is not None  # noqa: S101 - it was started with one
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"{whose} process has ended")
    found: dict[str, Any] = json.loads(line)
    return found
