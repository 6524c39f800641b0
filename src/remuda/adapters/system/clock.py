"""The system clock and random ids. No other module uses the real time or randomness."""

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
        import asyncio  # noqa: PLC0415 - commands that only print help use the clock, but no event loop

        await asyncio.sleep(seconds)


class SystemIds:
    def new(self, prefix: str) -> str:
        return prefix + os.urandom(8).hex()

    def jitter(self) -> float:
        return random.random()
