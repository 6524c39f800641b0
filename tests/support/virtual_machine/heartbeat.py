"""Pauses of an agent's heartbeat, as the control plane sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.virtual_machine.stack import VirtualMachineStack

POLL_S = 0.5


@asynccontextmanager
async def pauses_of_heartbeat(stack: VirtualMachineStack, name: str) -> AsyncIterator[list[float]]:
    """Yields the seconds that passed between new heartbeats, and after the last one."""
    pauses: list[float] = [0.0]

    async def watch() -> None:
        seen, seen_at = None, time.monotonic()
        while True:
            report = await stack.report(name)
            if report is not None and report.beat != seen:
                seen, seen_at = report.beat, time.monotonic()
                pauses.append(0.0)
            pauses[-1] = time.monotonic() - seen_at
            await asyncio.sleep(POLL_S)

    watching = asyncio.create_task(watch())
    try:
        yield pauses
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
