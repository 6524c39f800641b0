"""Release: mark the run's provisions as released, then bring each of their instances back to the pool.

Idempotent, resumable and safe to run concurrently: the records show what another release did or left unfinished.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeGuard

from remuda.controlplane.context import (
    CONFLICT_ATTEMPTS,
    Context,
    map_concurrently,
    pause_before_retry,
    read_config,
    retry_write,
    skip_unreadable,
)
from remuda.controlplane.pool_publisher import PoolPublisher
from remuda.controlplane.reconcile import advance, leave, remove_jit_registration
from remuda.controlplane.signal_waiter import SignalWaiter, StopReason, WaitResult
from remuda.domain.decide.next_step import Leave, Terminate, leave_holder
from remuda.domain.errors import Conflict, RemudaError, Unavailable, Unreadable
from remuda.domain.instance import ABSORBING, Instance, RetireReason, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import (
    Provision,
    ProvisionEnding,
    ProvisionStatus,
    describe_status,
    lost_instances,
    released,
)
from remuda.domain.signals import removal_verdict
from remuda.domain.transitions import Actor

#: Seconds between two checks of the record, its threshold and its credential while a release waits for the agent.
RECHECK_INTERVAL_S = 5.0


class ReleaseStatus(Enum):
    #: Reset and in the pool.
    RELEASED = "released"
    #: Terminated on purpose: too old, used too often, never ready.
    RETIRED = "retired"
    #: Not finished; the instance is terminated at its threshold.
    EXPIRED = "expired"
    #: Nothing to do, or no longer assigned to this run.
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseOutcome:
    """The result for one instance."""

    instance_id: str
    status: ReleaseStatus
    why: str
    #: Seconds that deregistration and reset took on the machine; None if the agent did not report it.
    deregistration_s: float | None = None
    #: The agent's report: what it found and removed, and foreign jobs that it refused.
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseResult:
    run_id: str
    outcomes: tuple[ReleaseOutcome, ...]
    errors: tuple[str, ...]
    #: Sentences about provisions that expired before the release, and about lost instances.
    warnings: tuple[str, ...] = ()
    seconds: float
    calls: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def of(self, status: ReleaseStatus) -> tuple[ReleaseOutcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.status is status)


async def release(context: Context, *, run_id: str, attempt: int) -> ReleaseResult:
    """Release the instances of all the run's provisions up to this attempt."""
    started = context.clock.monotonic()
    config = await read_config(context)
    errors: list[str] = []
    provisions = await _mark_released(context, run_id=run_id, attempt=attempt, errors=errors)
    instances = await _instances_of(context, provisions, errors=errors)
    if not provisions and not errors:
        context.event_log.record("release", f"run {run_id} has no provision up to attempt {attempt}", run_id=run_id)

    publisher = PoolPublisher(context, by=Actor.RELEASE)
    provision_ids = {item.provision_id for item in provisions}

    async def one(instance: Instance) -> ReleaseOutcome:
        return await _InstanceReleaser(context, config, publisher).run(instance, provision_ids)

    # All at once: those that wait for a running job must not keep the others from being released.
    results = await map_concurrently(instances, one, limit=len(instances))
    await publisher.close()
    outcomes: list[ReleaseOutcome] = []
    for instance, result in zip(instances, results, strict=True):
        if isinstance(result, RemudaError):
            errors.append(f"{instance.instance_id}: {result.message}")
        else:
            outcomes.append(result)
    return ReleaseResult(
        run_id=run_id,
        outcomes=tuple(outcomes),
        errors=tuple(errors),
        warnings=tuple(_warnings(provisions, instances)),
        seconds=round(context.clock.monotonic() - started, 4),
        calls=context.calls.by_service(),
    )


def _warnings(provisions: Sequence[Provision], instances: Sequence[Instance]) -> Iterator[str]:
    records = {item.instance_id: item for item in instances}
    for provision in provisions:
        lost = lost_instances(provision, records)
        if provision.ending is ProvisionEnding.EXPIRED:
            yield f"run {provision.run_id} expired: its max-runtime-min was over before it was released"
        elif lost:
            yield f"run {provision.run_id}: {describe_status(provision, lost)}"


async def _mark_released(context: Context, *, run_id: str, attempt: int, errors: list[str]) -> list[Provision]:
    """Mark the run's provisions up to our attempt as released. This also stops one that is still in progress."""
    ours = [item for item in await _provisions_of(context, run_id, errors) if item.attempt <= attempt]

    async def mark(provision: Provision) -> Provision:
        for _ in range(CONFLICT_ATTEMPTS):
            if provision.status is ProvisionStatus.RELEASED:
                return provision
            before = provision
            is_open = before.status is ProvisionStatus.OPEN
            why = f"released by attempt {attempt} before its runners were ready" if is_open else f"by attempt {attempt}"
            after = released(before, now=context.clock.now(), why=why)
            try:
                await _replace(context, before, after)
            except Conflict as conflict:
                if not isinstance(conflict.current, Provision):
                    raise
                provision = conflict.current
            else:
                return after
        raise Conflict(f"provision {provision.provision_id} keeps changing")

    marked: list[Provision] = []
    for provision, result in zip(ours, await map_concurrently(ours, mark), strict=True):
        if isinstance(result, RemudaError):
            errors.append(f"provision {provision.provision_id}: {result.message}")
        else:
            marked.append(result)
    return marked


async def _replace(context: Context, before: Provision, after: Provision) -> None:
    """Repeat the write if its answer is lost. If it was applied, `Conflict.current` of the repetition is released."""
    await retry_write(context, lambda: context.store.replace_provision(before, after), run_id=before.run_id)


async def _provisions_of(context: Context, run_id: str, errors: list[str]) -> Sequence[Provision]:
    try:
        return await context.store.provisions_of_run(run_id)
    except Unreadable as error:
        errors.append(error.message)
        return list(error.records.values())


async def _instances_of(context: Context, provisions: Sequence[Provision], *, errors: list[str]) -> list[Instance]:
    """Instances by the ids that the commit recorded; for an uncommitted provision, those that the index shows."""
    ids: dict[str, None] = {}
    for provision in provisions:
        if provision.settled:
            continue
        ids |= dict.fromkeys(provision.instance_ids)
        if not provision.instance_ids:
            found = await context.store.find_by_provision(provision.provision_id)
            ids |= dict.fromkeys(instance.instance_id for instance in found)
    records, _ = await skip_unreadable(context.store.get_many(list(ids)), errors.append)
    return [records[instance_id] for instance_id in ids if instance_id in records]


class _InstanceReleaser:
    def __init__(self, context: Context, config: PoolConfig, publisher: PoolPublisher) -> None:
        self._context = context
        self._config = config
        self._publisher = publisher

    async def run(self, instance: Instance, provision_ids: set[str]) -> ReleaseOutcome:
        for _ in range(CONFLICT_ATTEMPTS):
            if instance.provision_id not in provision_ids:
                return _outcome(instance, ReleaseStatus.SKIPPED, "assigned to another provision by now")
            try:
                if instance.state is State.RELEASING:
                    return await self._finish(instance)
                leaving = leave_holder(instance)
                if leaving is None:
                    return _outcome(instance, ReleaseStatus.SKIPPED, f"already {instance.state}")
                if isinstance(leaving, Terminate):
                    await self._leave(instance, leaving, "released before it was ready")
                    await remove_jit_registration(self._context, instance)
                    return _outcome(instance, ReleaseStatus.RETIRED, "it was still booting")
                instance = await self._leave(instance, leaving, "by its workflow")
            except Conflict as conflict:
                if not isinstance(conflict.current, Instance) or conflict.current == instance:
                    return _outcome(instance, ReleaseStatus.SKIPPED, "its time is up; refresh will retire it")
                if instance.state is State.RELEASING and (outcome := _finished_by_another(instance, conflict.current)):
                    return outcome
                instance = conflict.current
        raise Conflict(f"the record of {instance.instance_id} keeps changing")

    async def _leave(self, instance: Instance, leaving: Terminate | Leave, why: str) -> Instance:
        return await leave(self._context, self._config, instance, leaving, by=Actor.RELEASE, why=why)

    async def _finish(self, instance: Instance) -> ReleaseOutcome:
        """Wait for the agent to deregister and reset. A running job may finish first."""
        context = self._context
        waiter = SignalWaiter(
            context, instance_id=instance.instance_id, epoch=instance.epoch, verdict_of=removal_verdict
        )
        while True:
            now = context.clock.monotonic()
            left_s = (instance.threshold - context.clock.now()).total_seconds()
            recheck_at = now + min(RECHECK_INTERVAL_S, max(0.5, left_s / 2))
            waited = await waiter.wait(until=now + left_s, recheck_at=recheck_at)
            if waited.stopped is StopReason.DEAD:
                return _outcome(instance, ReleaseStatus.EXPIRED, "its heartbeat is dead; its threshold will retire it")
            try:
                if waited.stopped is not StopReason.VERDICT:
                    before, instance = instance, await self._read_again(instance)
                    if waited.stopped is StopReason.TIMEOUT and instance.threshold <= before.threshold:
                        return _unfinished(instance)
                after = await advance(context, self._config, instance, waited.report, by=Actor.RELEASE)
            except Unavailable as error:
                context.event_log.record("read-failed", error.message, instance_id=instance.instance_id)
                if waited.stopped is StopReason.TIMEOUT:
                    return _unfinished(instance)
                await pause_before_retry(context)
                continue
            except Conflict as conflict:
                # A sweep or another release may extend the same job any number of times.
                if not _is_extended(instance, conflict.current):
                    raise
                instance = conflict.current
                continue
            if after.state is State.IDLE:
                self._publisher.add(after)
                return _reported_outcome(after, ReleaseStatus.RELEASED, "clean, in the pool", waited)
            if after.state is not State.RELEASING:
                return _reported_outcome(after, ReleaseStatus.RETIRED, after.retire_text, waited)
            if waited.stopped is StopReason.VERDICT and after == instance:
                # The agent has failed, and a quarantine keeps the machine: no further report will come.
                return _outcome(instance, ReleaseStatus.SKIPPED, f"not clean, and kept: {instance.retire_text}")
            instance = after

    async def _read_again(self, instance: Instance) -> Instance:
        """Raise `Conflict` if a sweep or another release has finished the release meanwhile."""
        current = await self._context.store.get(instance.instance_id)
        if current is None or (current.state, current.epoch) != (instance.state, instance.epoch):
            raise Conflict(f"{instance.instance_id} was changed by another process", current=current)
        return current


def _is_extended(instance: Instance, current: object) -> TypeGuard[Instance]:
    """Whether another process has given the same release more time."""
    return (
        isinstance(current, Instance)
        and (current.state, current.epoch) == (instance.state, instance.epoch)
        and current.threshold > instance.threshold
    )


def _finished_by_another(instance: Instance, current: Instance) -> ReleaseOutcome | None:
    """The outcome if a sweep or another release finished first; None if the release is still in progress."""
    if current.epoch > instance.epoch or current.state is State.IDLE:
        return _outcome(instance, ReleaseStatus.RELEASED, "clean, in the pool")
    if current.state not in ABSORBING:
        return None
    expired = current.retire_reason is RetireReason.EXPIRED
    return _outcome(instance, ReleaseStatus.EXPIRED if expired else ReleaseStatus.RETIRED, current.retire_text)


def _outcome(instance: Instance, status: ReleaseStatus, why: str) -> ReleaseOutcome:
    return ReleaseOutcome(instance_id=instance.instance_id, status=status, why=why)


def _unfinished(instance: Instance) -> ReleaseOutcome:
    return _outcome(instance, ReleaseStatus.EXPIRED, "it did not finish in time; its threshold will retire it")


def _reported_outcome(instance: Instance, status: ReleaseStatus, why: str, waited: WaitResult) -> ReleaseOutcome:
    return ReleaseOutcome(
        instance_id=instance.instance_id,
        status=status,
        why=why,
        deregistration_s=waited.report.duration_s if waited.report else None,
        detail=waited.report.detail if waited.report else "",
    )
