"""What a provision holds, or may hold: written down before each call, so that it can be given back at any await."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from remuda.controlplane.context import Context, each, removal_credential, transition
from remuda.controlplane.release.deregistration import deregistered
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import ASSIGNED, Credential, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionStatus, released
from remuda.domain.provision_outcome import ProvisionOutcome
from remuda.domain.transitions import Actor, End, Release, RetireReason, tombstone

#: How long a rollback may take: after that, sweeps finish it.
ROLLBACK_LIMIT_S = 10.0
#: How often one instance is tried again while its record moves.
GIVE_BACK_TRIES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    #: The record as we know it, or as it will be if a write under way succeeds.
    instance: Instance
    #: Whether the record is known to exist: a launch whose record was not written yet has none.
    recorded: bool = True


class AcquiredInstances:
    """By instance and epoch: a worker with a stale message must not speak for another's claim of the same instance."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], Held] = {}

    def hold(self, instance: Instance, *, recorded: bool = True) -> None:
        self._held[instance.instance_id, instance.epoch] = Held(instance=instance, recorded=recorded)

    def drop(self, instance: Instance) -> None:
        self._held.pop((instance.instance_id, instance.epoch), None)

    def all(self) -> tuple[Held, ...]:
        return tuple(self._held.values())


async def roll_back(
    context: Context,
    config: PoolConfig,
    provision: Provision,
    holdings: AcquiredInstances,
    *,
    why: str,
    outcome: ProvisionOutcome,
) -> None:
    """One conditional write for each instance, then the provision's: nothing here waits for a machine."""
    try:
        async with asyncio.timeout(ROLLBACK_LIMIT_S):
            removal = await _removal(context, config, holdings)
            results = await each(holdings.all(), lambda held: _give_back(context, config, held, removal, why=why))
            for result in results:
                if isinstance(result, RemudaError):
                    context.event_log.record("rollback-incomplete", result.message)
            await _close(context, provision, why=why, outcome=outcome)
    except (TimeoutError, RemudaError) as error:
        context.event_log.record("rollback-incomplete", f"sweeps will finish it ({error or 'time is up'})")


async def _removal(context: Context, config: PoolConfig, holdings: AcquiredInstances) -> Credential | None:
    """For those that were registered. Without one they wait for a sweep; the others need not."""
    if not holdings.all():
        return None
    try:
        return await removal_credential(context, config, holdings.all()[0].instance.scope)
    except RemudaError as error:
        context.event_log.record("rollback-incomplete", f"sweeps will finish it ({error.message})")
        return None


async def _give_back(context: Context, config: PoolConfig, held: Held, removal: Credential | None, *, why: str) -> None:
    if not held.recorded:
        await _bury(context, held.instance, why=why)
        return
    instance = held.instance
    for _ in range(GIVE_BACK_TRIES):
        event: End | Release
        if instance.state is State.CREATED:
            event = End(reason=RetireReason.RELEASED, owner=held.instance.owner)
        elif instance.state in ASSIGNED and removal is not None:
            event = Release(
                release_time_s=config.lifetimes.release_time_s,
                credential=removal,
                owner=held.instance.owner,
                deregistered=await deregistered(context, instance),
            )
        else:
            return
        try:
            await transition(context, instance, event, by=Actor.PROVISION, why=why)
        except Conflict as conflict:
            current = conflict.current
            if not isinstance(current, Instance) or current.owner != held.instance.owner or current == instance:
                return
            instance = current
        else:
            return


async def _bury(context: Context, instance: Instance, *, why: str) -> None:
    """A machine that was launched and whose record may be missing: lock the record, then ask for its end."""
    now = context.clock.now()
    stone = replace(
        instance, state=State.TERMINATING, threshold=now, run_id="", last_run_id=instance.run_id, assignment=None
    )
    try:
        await context.store.apply(tombstone(stone, by=Actor.PROVISION, now=now, why=why))
        context.event_log.record(
            "tombstone", why, instance_id=instance.instance_id, retire_reason=RetireReason.UNRECORDED
        )
    except Conflict as conflict:
        current = conflict.current
        if not isinstance(current, Instance) or current.owner != instance.owner or current.state is not State.CREATED:
            return
        event = End(reason=RetireReason.RELEASED, owner=instance.owner)
        await transition(context, current, event, by=Actor.PROVISION, why=why)
    await context.compute.terminate([instance.instance_id])


async def _close(context: Context, provision: Provision, *, why: str, outcome: ProvisionOutcome) -> None:
    current: Provision | None = provision
    while current is not None:
        if current.status is ProvisionStatus.RELEASED:
            if current.outcome is not None:
                return
            # Somebody else released it while it was at work: its story belongs to the record all the same.
            after = replace(current, outcome=outcome)
        else:
            after = released(current, now=context.clock.now(), why=why, outcome=outcome)
        try:
            await context.store.replace_provision(current, after)
        except Conflict as conflict:
            current = conflict.current if isinstance(conflict.current, Provision) else None
        else:
            return
