"""The instances that a provision has got, and their rollback.

Each is tracked before its write, so that a cancellation can undo it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from remuda.controlplane.context import (
    CONFLICT_ATTEMPTS,
    Context,
    apply_confirmed,
    map_concurrently,
    retry_write,
)
from remuda.controlplane.reconcile import TOKEN_TIMEOUT_S, leave, removal_credential
from remuda.domain.decide.next_step import Leave, RegistrationRemoval, leave_holder
from remuda.domain.errors import Conflict, Interrupted, RemudaError
from remuda.domain.instance import Credential, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import (
    Provision,
    ProvisionEnding,
    ProvisionOutcome,
    ProvisionStatus,
    RunnerSource,
    released,
)
from remuda.domain.signals import Report
from remuda.domain.transitions import Actor, RetireReason, tombstone

#: Seconds that a rollback may take. Sweeps finish the rest.
ROLLBACK_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AcquiredInstance:
    """An instance that a provision has got, or may have got: from its claim or launch to the result."""

    #: The current record, or the expected one if a write is in progress.
    instance: Instance
    source: RunnerSource
    #: Whether the record exists. False between a launch and the write of its record.
    recorded: bool = True
    #: With which its agent told that the runner is registered; None until then, and if another process was told.
    report: Report | None = None
    #: Seconds that the registration took on the machine; None if it is not known.
    registration_s: float | None = None


class AcquiredInstances:
    """The instances of a provision.

    Keyed by instance and epoch: a worker with a stale message must not remove another worker's claim of the instance.
    """

    def __init__(self) -> None:
        self._items: dict[tuple[str, int], AcquiredInstance] = {}

    def add(self, instance: Instance, *, recorded: bool = True) -> None:
        """Track an instance, or a later record of one."""
        key = instance.instance_id, instance.epoch
        # Each claim raises the epoch.
        source = RunnerSource.CREATED if instance.epoch == 1 else RunnerSource.POOL
        known = self._items.get(key) or AcquiredInstance(instance=instance, source=source)
        self._items[key] = replace(known, instance=instance, recorded=recorded)

    def register(self, instance: Instance, report: Report | None) -> AcquiredInstance:
        """Note that the runner is registered and not started: it is ready for the commit."""
        key = instance.instance_id, instance.epoch
        registration_s = report.duration_s if report else None
        self._items[key] = replace(self._items[key], report=report, registration_s=registration_s)
        return self._items[key]

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
    """Give back every instance with one conditional write, and close the provision. Does not wait for machines.

    What needs no token of GitHub is done first, because GitHub may not answer.
    """
    try:
        async with asyncio.timeout(ROLLBACK_TIMEOUT_S):
            assigned = await _give_back_all(context, config, acquired.all(), None, why=why)
            await _guarded(context, _close_provision(context, provision, why=why, outcome=outcome))
            await _guarded(context, _release_all(context, config, provision, assigned, why=why))
    except TimeoutError:
        _log_incomplete(context, "timeout")


async def give_back(context: Context, config: PoolConfig, acquired: AcquiredInstances, *, why: str) -> None:
    """Give back what was acquired for a set. A runner that listens stays: it may have a job already."""
    try:
        async with asyncio.timeout(ROLLBACK_TIMEOUT_S):
            await _give_back_all(context, config, acquired.all(), None, why=why)
    except TimeoutError:
        _log_incomplete(context, "timeout")


async def _guarded(context: Context, step: Awaitable[None]) -> None:
    try:
        await step
    except RemudaError as error:
        _log_incomplete(context, error.message)


def _log_incomplete(context: Context, why: str) -> None:
    context.event_log.record("rollback-incomplete", f"sweeps will finish it ({why})")


async def _release_all(
    context: Context, config: PoolConfig, provision: Provision, assigned: Sequence[AcquiredInstance], *, why: str
) -> None:
    """Release the claimed and running instances of a run."""
    if not assigned:
        return
    left_s = (provision.deadline - context.clock.now()).total_seconds()
    # A claimed instance cannot be given back after its threshold, the deadline.
    timeout_s = min(TOKEN_TIMEOUT_S, left_s / 2) if left_s > 0 else TOKEN_TIMEOUT_S
    removal = await removal_credential(context, config, assigned[0].instance.scope, timeout_s=timeout_s)
    await _give_back_all(context, config, assigned, removal, why=why)


async def _give_back_all(
    context: Context,
    config: PoolConfig,
    items: Sequence[AcquiredInstance],
    removal: Credential | None,
    *,
    why: str,
) -> list[AcquiredInstance]:
    """Return the instances that are still assigned."""
    results = await map_concurrently(items, lambda item: _give_back(context, config, item, removal, why=why))
    for result in results:
        if isinstance(result, RemudaError):
            _log_incomplete(context, result.message)
    return [result for result in results if isinstance(result, AcquiredInstance)]


async def _give_back(
    context: Context, config: PoolConfig, item: AcquiredInstance, removal: Credential | None, *, why: str
) -> AcquiredInstance | None:
    """Return the instance if it stays assigned: without a removal credential, or as the listening runner of a set."""
    instance = item.instance
    if not item.recorded:
        # A lost answer: the record may exist, and another process may have continued with it.
        existing = await _tombstone(context, instance, why=why)
        if existing is None:
            return None
        instance = existing
    for _ in range(CONFLICT_ATTEMPTS):
        leaving = leave_holder(instance)
        if leaving is None:
            return None
        if isinstance(leaving, Leave) and not _can_leave(leaving, removal):
            return replace(item, instance=instance)
        claim, by = item.instance.claim, _actor(instance)
        try:
            await leave(context, config, instance, leaving, by=by, why=why, claim=claim, removal=removal)
        except Conflict as conflict:
            current = conflict.current
            if not isinstance(current, Instance) or current.claim != item.instance.claim or current == instance:
                return None
            instance = current
        else:
            return None
    return None


def _can_leave(leaving: Leave, removal: Credential | None) -> bool:
    """A runner of a set that listens may have a job already: the listener decides. Others need a removal token."""
    if leaving.removal is RegistrationRemoval.BY_AGENT:
        return removal is not None
    return leaving.removal is RegistrationRemoval.NOT_RECORDED


def _actor(instance: Instance) -> Actor:
    return Actor.LISTENER if instance.runner_set else Actor.PROVISION


async def _tombstone(context: Context, instance: Instance, *, why: str) -> Instance | None:
    """Create a locked record of a launched machine, then terminate it. Return the provision's record if it exists."""
    now = context.clock.now()
    record = replace(
        instance, state=State.TERMINATING, threshold=now, holder=None, last_holder=instance.holder, assignment=None
    )
    try:
        await apply_confirmed(context, tombstone(record, by=_actor(instance), now=now, why=why))
        context.event_log.record(
            "tombstone", why, instance_id=instance.instance_id, retire_reason=RetireReason.UNRECORDED
        )
    except Conflict as conflict:
        current = conflict.current
        return current if isinstance(current, Instance) and current.claim == instance.claim else None
    await context.compute.terminate([instance.instance_id])
    return None


def _ending(outcome: ProvisionOutcome) -> ProvisionEnding:
    is_interrupted = outcome.exit_code == Interrupted.exit_code
    return ProvisionEnding.INTERRUPTED if is_interrupted else ProvisionEnding.FAILED


async def _close_provision(context: Context, provision: Provision, *, why: str, outcome: ProvisionOutcome) -> None:
    current: Provision | None = provision
    # The intent may not have been written: then the record may be that of another process.
    while current is not None and current.nonce == provision.nonce:
        if current.status is ProvisionStatus.RELEASED:
            if current.outcome is not None:
                return
            # Another process released the run during the provision; add the outcome to its record.
            after = replace(current, outcome=outcome)
        else:
            after = released(current, now=context.clock.now(), why=why, ending=_ending(outcome), outcome=outcome)
        try:
            await retry_write(
                context, partial(context.store.replace_provision, current, after), run_id=provision.subject
            )
        except Conflict as conflict:
            current = conflict.current if isinstance(conflict.current, Provision) else None
        else:
            return
