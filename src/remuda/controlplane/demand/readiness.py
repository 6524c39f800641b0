"""Completion of the launch of a new listener, once it has proved that it could serve the pool.

The Auto Scaling group of the listener keeps the old instance until then, so a broken bundle or image replaces nothing.
The proof: the process serves, or waits as a standby; it reads the configuration; and GitHub answers it. Example: an
image with wrong CA certificates starts a process that becomes a standby, but never reaches GitHub: it is abandoned.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from remuda.controlplane.context import read_config
from remuda.controlplane.demand.context import DemandContext
from remuda.domain.errors import RemudaError, UserError
from remuda.ports.launch import InstanceLaunch

#: Seconds between two attempts, and their number: together 15 minutes, after which nothing waits any more.
RETRY_S = 10.0
ATTEMPTS = 90


class Readiness:
    def __init__(self, demand: DemandContext) -> None:
        self._demand = demand
        self._works = asyncio.Event()

    def note_work(self) -> None:
        """The process serves the pool, or is a standby."""
        self._works.set()

    async def report(self) -> None:
        """Complete the launch when the proof is there. Does nothing for a listener that no group has launched."""
        launch = self._demand.launch
        if launch is None:
            return
        await self._works.wait()
        for _ in range(ATTEMPTS):
            if await self._try(launch):
                return
            await self._demand.context.clock.sleep(RETRY_S)

    async def _try(self, launch: InstanceLaunch) -> bool:
        """Whether the report has arrived."""
        context = self._demand.context
        try:
            await self._ask_github()
            was_awaited = await launch.complete()
        except RemudaError as error:
            context.event_log.record("launch-not-completed", error.message)
            return False
        if was_awaited:
            context.event_log.record("launch-completed", "the listener works; its predecessor may end")
        return True

    async def _ask_github(self) -> None:
        """Raises `Unavailable` if GitHub does not answer."""
        config = await read_config(self._demand.context)
        for runner_set in config.runner_sets[:1]:
            # GitHub refuses a wrong credential or other labels of the set to the old listener, too.
            with suppress(UserError):
                await self._demand.source.find_set(runner_set)
