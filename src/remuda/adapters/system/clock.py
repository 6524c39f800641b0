"""The real clock and the real source of ids: the one place that touches them."""

from __future__ import annotations

import os
import random
import time
from datetime import UTC, datetime


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        import asyncio  # noqa: PLC0415 - help tells the time too, and must not pay for an event loop

        await asyncio.sleep(seconds)


class SystemIds:
    def new(self, prefix: str) -> str:
        return prefix + os.urandom(8).hex()

    def jitter(self) -> float:
        return random.random()
