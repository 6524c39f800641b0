"""The second half of a release, shared by `release` and `refresh`: from the agent's report to the pool or the end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from remuda.controlplane.context import Context, map_concurrently, transition
from remuda.controlplane.deregistration import removal_credential
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.release_policy import credential_expires_early, next_for_releasing
from remuda.domain.signals import Report
from remuda.domain.transitions import Actor, Announce, RenewCredential
from remuda.ports.pool import BATCH

#: Seconds that a pool message waits for others that can share its call.
BATCH_WINDOW_S = 0.03


async def advance_release(
    context: Context, config: PoolConfig, instance: Instance, report: Report | None, *, by: Actor
) -> Instance:
    """Apply the next transition of a releasing instance, if one is due. Return its record."""
    now = context.clock.now()
    upcoming = next_for_releasing(instance, report, now=now, lifetimes=config.lifetimes, reuse=config.reuse)
    if upcoming is not None:
        return await transition(context, instance, upcoming.event, by=by, why=upcoming.why)
    if credential_expires_early(instance, now=now, margin_s=config.lifetimes.margin_s):
        return await _renew_credential(context, config, instance, by=by)
    return instance


async def _renew_credential(context: Context, config: PoolConfig, instance: Instance, *, by: Actor) -> Instance:
    fresh = await removal_credential(context, config, instance.scope)
    current = instance.assignment.credential if instance.assignment else None
    if current is not None and fresh.expires_at <= current.expires_at:
        return instance
    event = RenewCredential(credential=fresh)
    return await transition(context, instance, event, by=by, why="the removal credential expires")


async def publish_to_pool(context: Context, instances: Collection[Instance], *, by: Actor) -> list[RemudaError]:
    """Send pool messages for idle instances, then record that. After a crash in between, the message is repeated."""
    # Retired and quarantined instances cannot be claimed.
    idle = [instance for instance in instances if instance.state is State.IDLE and instance.retire_reason is None]
    if not idle:
        return []
    try:
        await context.pool.send([instance.message() for instance in idle])
    except RemudaError as error:
        return [error]

    async def record_sent(instance: Instance) -> None:
        try:
            await transition(context, instance, Announce(), by=by, why="sent to the pool")
        except Conflict:
            # A provision has claimed it already.
            return

    results = await map_concurrently(idle, record_sent)
    return [result for result in results if isinstance(result, RemudaError)]


class PoolPublisher:
    """Publishes instances in batches as they become idle. Sweeps publish what it could not."""

    def __init__(self, context: Context, *, by: Actor) -> None:
        self._context = context
        self._by = by
        self._waiting: list[Instance] = []
        self._batch_is_full = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, instance: Instance) -> None:
        self._waiting.append(instance)
        if len(self._waiting) >= BATCH:
            self._batch_is_full.set()
        if self._task is None or self._task.done():
            self._batch_is_full.clear()
            self._task = asyncio.create_task(self._send_soon())

    async def close(self) -> None:
        self._batch_is_full.set()
        if self._task is not None:
            await self._task
        await self._send()

    async def _send_soon(self) -> None:
        try:
            async with asyncio.timeout(BATCH_WINDOW_S):
                await self._batch_is_full.wait()
        except TimeoutError:
            pass
        await self._send()

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            for error in await publish_to_pool(self._context, batch, by=self._by):
                self._context.event_log.record("publish-failed", error.message, instances=len(batch))
