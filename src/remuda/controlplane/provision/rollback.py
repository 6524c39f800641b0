"""Acquired instances and their rollback. Each is tracked before its write, so that a cancellation can undo it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial

from remuda.controlplane.context import CONFLICT_ATTEMPTS, Context, map_concurrently, retry_write, transition
from remuda.controlplane.release import removal_credential, remove_jit_registration
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import ASSIGNED, Credential, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionOutcome, ProvisionStatus, released
from remuda.domain.transitions import Actor, End, Release, RetireReason, tombstone

#: Seconds that a rollback may take. Sweeps finish the rest.
ROLLBACK_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AcquiredInstance:
    #: The current record, or the expected one if a write is in progress.
    instance: Instance
    #: Whether the record exists. False between a launch and the write of its record.
    recorded: bool = True


class AcquiredInstances:
    """The instances that a provision has, or may have, acquired.

    Keyed by instance and epoch: a worker with a stale message must not remove another worker's claim of the instance.
    """

    def __init__(self) -> None:
        self._items: dict[tuple[str, int], AcquiredInstance] = {}

    def add(self, instance: Instance, *, recorded: bool = True) -> None:
        self._items[instance.instance_id, instance.epoch] = AcquiredInstance(instance=instance, recorded=recorded)

    def remove(self, instance: Instance) -> None:
        self._items.pop((instance.instance_id, instance.epoch), None)

    def all(self) -> tuple[AcquiredInstance, ...]:
        return tuple(self._items.values())


async def roll_back(
    context: Context,
    config: PoolConfig,
    provision: Provision,
    acquired: AcquiredInstances,
    *,
    why: str,
    outcome: ProvisionOutcome,
) -> None:
    """Give back every instance with one conditional write, then close the provision. Does not wait for machines."""
    try:
        async with asyncio.timeout(ROLLBACK_TIMEOUT_S):
            removal = await _removal_credential(context, config, acquired)
            results = await map_concurrently(
                acquired.all(), lambda item: _give_back(context, config, item, removal, why=why)
            )
            for result in results:
                if isinstance(result, RemudaError):
                    context.event_log.record("rollback-incomplete", result.message)
            # A runner of a set that listens keeps its provision: a sweep would take it back otherwise.
            if not any(result is True for result in results):
                await _close_provision(context, provision, why=why, outcome=outcome)
    except (TimeoutError, RemudaError) as error:
        context.event_log.record("rollback-incomplete", f"sweeps will finish it ({error or 'timeout'})")


async def _removal_credential(context: Context, config: PoolConfig, acquired: AcquiredInstances) -> Credential | None:
    """Without one, registered instances wait for a sweep; the others can still be given back."""
    if not acquired.all() or acquired.all()[0].instance.runner_set:
        return None
    try:
        return await removal_credential(context, config, acquired.all()[0].instance.scope)
    except RemudaError as error:
        context.event_log.record("rollback-incomplete", f"sweeps will finish it ({error.message})")
        return None


async def _give_back(
    context: Context, config: PoolConfig, item: AcquiredInstance, removal: Credential | None, *, why: str
) -> bool:
    """Return whether the provision keeps the instance."""
    if not item.recorded:
        await _tombstone(context, item.instance, why=why)
        return False
    instance = item.instance
    for _ in range(CONFLICT_ATTEMPTS):
        event: End | Release
        if instance.state is State.CREATED:
            event = End(reason=RetireReason.RELEASED, owner=item.instance.owner)
        elif instance.runner_set and instance.state is State.CLAIMED:
            event = Release(release_time_s=config.lifetimes.release_time_s, credential=None, owner=item.instance.owner)
        elif instance.runner_set:
            # It listens, so it may have a job already: the listener decides.
            return instance.state is State.RUNNING
        elif instance.state in ASSIGNED and removal is not None:
            event = Release(
                release_time_s=config.lifetimes.release_time_s,
                credential=removal,
                owner=item.instance.owner,
                deregistered=await remove_jit_registration(context, instance),
            )
        else:
            return False
        try:
            await transition(context, instance, event, by=_actor(instance), why=why)
        except Conflict as conflict:
            current = conflict.current
            if not isinstance(current, Instance) or current.owner != item.instance.owner or current == instance:
                return False
            instance = current
        else:
            return False
    return False


def _actor(instance: Instance) -> Actor:
    return Actor.LISTENER if instance.runner_set else Actor.PROVISION


async def _tombstone(context: Context, instance: Instance, *, why: str) -> None:
    """Lock the record of a launched machine, creating it if it is missing, then terminate the machine."""
    now = context.clock.now()
    record = replace(
        instance, state=State.TERMINATING, threshold=now, run_id="", last_run_id=instance.run_id, assignment=None
    )
    try:
        await context.store.apply(tombstone(record, by=_actor(instance), now=now, why=why))
        context.event_log.record(
            "tombstone", why, instance_id=instance.instance_id, retire_reason=RetireReason.UNRECORDED
        )
    except Conflict as conflict:
        current = conflict.current
        if not isinstance(current, Instance) or current.owner != instance.owner or current.state is not State.CREATED:
            return
        event = End(reason=RetireReason.RELEASED, owner=instance.owner)
        await transition(context, current, event, by=_actor(instance), why=why)
    await context.compute.terminate([instance.instance_id])


async def _close_provision(context: Context, provision: Provision, *, why: str, outcome: ProvisionOutcome) -> None:
    current: Provision | None = provision
    while current is not None:
        if current.status is ProvisionStatus.RELEASED:
            if current.outcome is not None:
                return
            # Another process released the run during the provision; add the outcome to its record.
            after = replace(current, outcome=outcome)
        else:
            after = released(current, now=context.clock.now(), why=why, outcome=outcome)
        try:
            await retry_write(
                context, partial(context.store.replace_provision, current, after), run_id=provision.run_id
            )
        except Conflict as conflict:
            current = conflict.current if isinstance(conflict.current, Provision) else None
        else:
            return
