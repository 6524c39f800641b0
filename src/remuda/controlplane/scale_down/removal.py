"""Registrations off GitHub, before their machines may go: looked at again, then deleted, all of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from remuda.domain.errors import RemudaError
from remuda.domain.fleet import Registration
from remuda.domain.scale_down import Decision, found_busy
from remuda.ports.clock import Clock
from remuda.ports.forge import Deletion, Forge, ForgeRunner

#: GitHub's secondary limit: points a minute; a read is one, a write five.
POINTS_A_MINUTE = 900
READ_POINTS, WRITE_POINTS = 1, 5


class Pace:
    """Spends points no faster than GitHub lets them grow back. A first burst costs no wait."""

    def __init__(self, clock: Clock, *, points_a_minute: int = POINTS_A_MINUTE) -> None:
        self._clock = clock
        self._most = float(points_a_minute)
        self._level = self._most
        self._at = clock.monotonic()
        self._turn = asyncio.Lock()

    async def spend(self, points: int) -> None:
        async with self._turn:
            self._refill()
            if self._level < points:
                await self._clock.sleep((points - self._level) * 60 / self._most)
                self._refill()
            self._level -= points

    def _refill(self) -> None:
        now = self._clock.monotonic()
        self._level = min(self._most, self._level + (now - self._at) * self._most / 60)
        self._at = now


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """What became of a decision to remove a runner."""

    #: As it was, or as it is now that the runner turned out to be busy.
    decision: Decision
    #: Every registration is gone: the machine may go.
    clear: bool = False
    #: Why GitHub could not be asked, or would not.
    failed: str = ""


def registration_of(runner: ForgeRunner) -> Registration:
    return Registration(runner_id=runner.runner_id, name=runner.name, online=runner.online, busy=runner.busy)


class Deregistration:
    def __init__(self, forge: Forge, pace: Pace) -> None:
        self._forge = forge
        self._pace = pace

    async def look(self, scope: str, runner_id: int) -> Registration | None:
        await self._pace.spend(READ_POINTS)
        runner = await self._forge.get_runner(scope, runner_id)
        return None if runner is None else registration_of(runner)

    async def remove(self, item: Decision, *, dry_run: bool) -> Removal:
        """Every registration is read again first: one that is busy keeps them all."""
        scope = item.scope
        if scope is None:
            return Removal(decision=item, clear=not item.registrations)
        try:
            for registration in item.registrations:
                seen = await self.look(scope, registration.runner_id)
                if seen is not None and seen.busy:
                    return Removal(decision=found_busy(item, seen))
            for registration in () if dry_run else item.registrations:
                await self._pace.spend(WRITE_POINTS)
                # Also where the look found none: the deletion is the one atomic test.
                if await self._forge.delete_runner(scope, registration.runner_id) is Deletion.BUSY:
                    return Removal(decision=found_busy(item, registration))
        except RemudaError as error:
            return Removal(decision=item, failed=error.message)
        return Removal(decision=item, clear=True)
