"""Removal of registrations before their machines are terminated: check again that none is busy, then delete all."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from remuda.domain.errors import RemudaError
from remuda.domain.scale_down.decisions import Decision, found_busy
from remuda.domain.scale_down.fleet import Registration
from remuda.ports.clock import Clock
from remuda.ports.github import Deletion, GitHub, GitHubRunner

#: GitHub's secondary rate limit is 900 points per minute; a read costs one point, a write five. The remaining 100
#: points are for lists.
POINTS_PER_MINUTE = 800
READ_POINTS, WRITE_POINTS = 1, 5
MINUTE_S = 60.0


class GitHubRateLimiter:
    """Limits the points spent in any 60 seconds of the monotonic clock. Within the limit, calls do not wait."""

    def __init__(self, clock: Clock, *, points_per_minute: int = POINTS_PER_MINUTE) -> None:
        self._clock = clock
        self._left = points_per_minute
        #: Time and points of the calls within the last minute.
        self._spent: deque[tuple[float, int]] = deque()
        self._lock = asyncio.Lock()

    async def spend(self, points: int) -> None:
        async with self._lock:
            self._return_points()
            while self._left < points:
                await self._clock.sleep(self._spent[0][0] + MINUTE_S - self._clock.monotonic())
                self._return_points()
            self._left -= points
            self._spent.append((self._clock.monotonic(), points))

    def _return_points(self) -> None:
        while self._spent and self._clock.monotonic() - self._spent[0][0] >= MINUTE_S:
            self._left += self._spent.popleft()[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class RemovalResult:
    #: The given decision, or a new one if a runner is busy.
    decision: Decision
    #: Every registration is gone: the machine may be terminated.
    deregistered: bool = False
    #: Why GitHub did not answer or refused; empty if it did not.
    error: str = ""


def to_registration(runner: GitHubRunner) -> Registration:
    return Registration(runner_id=runner.runner_id, name=runner.name, online=runner.online, busy=runner.busy)


class RegistrationRemover:
    def __init__(self, github: GitHub, limiter: GitHubRateLimiter) -> None:
        self._github = github
        self._limiter = limiter

    async def get(self, scope: str, runner_id: int) -> Registration | None:
        await self._limiter.spend(READ_POINTS)
        runner = await self._github.get_runner(scope, runner_id)
        return None if runner is None else to_registration(runner)

    async def remove(self, item: Decision, *, dry_run: bool) -> RemovalResult:
        """Remove all registrations of a machine, or none if one of them is busy."""
        try:
            busy = await self._remove_unless_busy(item, dry_run=dry_run)
        except RemudaError as error:
            return RemovalResult(decision=item, error=error.message)
        if busy is not None:
            return RemovalResult(decision=found_busy(item, busy))
        return RemovalResult(decision=item, deregistered=True)

    async def _remove_unless_busy(self, item: Decision, *, dry_run: bool) -> Registration | None:
        """Return the busy registration, or None if all are gone."""
        scope, to_delete = item.scope, list(item.registrations)
        if scope is None:
            return None
        for registration in item.registrations:
            current = await self.get(scope, registration.runner_id)
            if current is not None and current.busy:
                return current
        tagged = await self.get(scope, item.tagged_runner_id) if item.tagged_runner_id is not None else None
        if tagged is not None and tagged.belongs_to(item.instance_id):
            if tagged.busy:
                return tagged
            to_delete.append(tagged)
        for registration in () if dry_run else to_delete:
            await self._limiter.spend(WRITE_POINTS)
            # Delete even if the read did not find it: only the deletion is atomic.
            if await self._github.delete_runner(scope, registration.runner_id) is Deletion.BUSY:
                return registration
        return None
