"""The heartbeat, which is written only while the main loop makes progress: a hung agent counts as dead."""

from __future__ import annotations

import asyncio

from remuda.domain.errors import RemudaError
from remuda.domain.thresholds import HEARTBEAT_INTERVAL_S
from remuda.ports.clock import Clock
from remuda.ports.event_log import EventLog
from remuda.ports.machine import Machine
from remuda.ports.runner import RunnerSoftware
from remuda.ports.store import InstanceStore


class Watchdog:
    """Time by which the main loop must report progress again. Past it, the agent is considered hung."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._expires_at = 0.0

    def expect_progress_within(self, limit_s: float) -> None:
        self._expires_at = self._clock.monotonic() + limit_s

    @property
    def healthy(self) -> bool:
        return self._clock.monotonic() < self._expires_at


class Heartbeat:
    def __init__(
        self,
        *,
        instance_id: str,
        store: InstanceStore,
        machine: Machine,
        runner: RunnerSoftware,
        clock: Clock,
        event_log: EventLog,
        watchdog: Watchdog,
        version: str,
        interval_s: float = HEARTBEAT_INTERVAL_S,
    ) -> None:
        self._instance_id = instance_id
        self._store = store
        self._machine = machine
        self._runner = runner
        self._clock = clock
        self._event_log = event_log
        self._watchdog = watchdog
        self._version = version
        self._interval_s = interval_s
        self._notice = ""
        self._due = asyncio.Event()

    def beat_now(self) -> None:
        """Write the next heartbeat at once, because a field that others wait for has changed."""
        self._due.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._due.clear()
            if self._watchdog.healthy:
                await self._beat()
            alarm = loop.call_later(self._interval_s, self._due.set)
            try:
                await self._due.wait()
            finally:
                alarm.cancel()

    async def _beat(self) -> None:
        try:
            runner = self._runner.state()
            await self._store.beat(
                self._instance_id,
                at=self._clock.now(),
                busy=runner.busy,
                listening=runner.listening,
                notice=await self._spot_notice(),
                version=self._version,
            )
        except RemudaError as error:
            self._event_log.record("heartbeat-failed", error.message)

    async def _spot_notice(self) -> str:
        """Return the spot notice, or the last known one. A failed check does not stop the heartbeat."""
        try:
            self._notice = await self._machine.spot_notice() or self._notice
        except RemudaError as error:
            self._event_log.record("spot-notice-failed", error.message)
        return self._notice
