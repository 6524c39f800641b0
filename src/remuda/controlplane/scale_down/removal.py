"""Registrations off GitHub, before their machines may go: looked at again, then deleted, all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from remuda.domain.errors import RemudaError
from remuda.domain.scale_down.decisions import Decision, found_busy
from remuda.domain.scale_down.fleet import Registration
from remuda.ports.clock import Clock
from remuda.ports.github import Deletion, GitHub, GitHubRunner

#: GitHub's secondary limit is 900 points a minute; a read is one, a write five. The rest is for the lists.
POINTS_A_MINUTE = 800
READ_POINTS, WRITE_POINTS = 1, 5
MINUTE_S = 60.0


class Pace:
    """Never more than so many points in any minute, by the monotonic clock. What fits costs no wait."""

    def __init__(self, clock: Clock, *, points_a_minute: int = POINTS_A_MINUTE) -> None:
        self._clock = clock
        self._left = points_a_minute
        #: When points were spent, and how many: they come back a minute later.
        self._spent: deque[tuple[float, int]] = deque()
        self._turn = asyncio.Lock()

    async def spend(self, points: int) -> None:
        async with self._turn:
            self._collect()
            while self._left < points:
                await self._clock.sleep(self._spent[0][0] + MINUTE_S - self._clock.monotonic())
                self._collect()
            self._left -= points
            self._spent.append((self._clock.monotonic(), points))

    def _collect(self) -> None:
        while self._spent and self._clock.monotonic() - self._spent[0][0] >= MINUTE_S:
            self._left += self._spent.popleft()[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """What became of a decision to remove a runner."""

    #: As it was, or as it is now that the runner turned out to be busy.
    decision: Decision
    #: Every registration is gone: the machine may go.
    clear: bool = False
    #: Why GitHub could not be asked, or would not.
    failed: str = ""


def registration_of(runner: GitHubRunner) -> Registration:
    return Registration(runner_id=runner.runner_id, name=runner.name, online=runner.online, busy=runner.busy)


class Deregistration:
    def __init__(self, github: GitHub, pace: Pace) -> None:
        self._github = github
        self._pace = pace

    async def look(self, scope: str, runner_id: int) -> Registration | None:
        await self._pace.spend(READ_POINTS)
        runner = await self._github.get_runner(scope, runner_id)
        return None if runner is None else registration_of(runner)

    async def remove(self, item: Decision, *, dry_run: bool) -> Removal:
        """Every registration is read again first: one that is busy keeps them all."""
        try:
            busy = await self._remove(item, dry_run=dry_run)
        except RemudaError as error:
            return Removal(decision=item, failed=error.message)
        if busy is not None:
            return Removal(decision=found_busy(item, busy))
        return Removal(decision=item, clear=True)

    async def _remove(self, item: Decision, *, dry_run: bool) -> Registration | None:
        """The one that is busy, or None where all are gone."""
        scope, doomed = item.scope, list(item.registrations)
        if scope is None:
            return None
        for registration in item.registrations:
            seen = await self.look(scope, registration.runner_id)
            if seen is not None and seen.busy:
                return seen
        told = await self.look(scope, item.tagged_runner_id) if item.tagged_runner_id is not None else None
        if told is not None and told.belongs_to(item.instance_id):
            if told.busy:
                return told
            doomed.append(told)
        for registration in () if dry_run else doomed:
            await self._pace.spend(WRITE_POINTS)
            # Also where the look found none: the deletion is the one atomic test.
            if await self._github.delete_runner(scope, registration.runner_id) is Deletion.BUSY:
                return registration
        return None
