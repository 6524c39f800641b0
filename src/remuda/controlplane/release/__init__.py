"""Release: give a run's instances back, clean, and into the pool.

Idempotent, resumable, concurrent: what another release did or left half done is recognised by the records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from remuda.controlplane.context import (
    AMBIGUOUS_PAUSE_S,
    Context,
    each,
    read_config,
    readable,
    removal_credential,
    transition,
)
from remuda.controlplane.release.advance import PoolPublisher, settle
from remuda.controlplane.release.deregistration import deregistered
from remuda.controlplane.signal_waiter import Ended, SignalWaiter
from remuda.domain.errors import Conflict, RemudaError, Unavailable, Unreadable
from remuda.domain.instance import ABSORBING, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionStatus, released
from remuda.domain.signals import removal_verdict
from remuda.domain.transitions import Actor, End, Release, RetireReason

#: How often a waiting release looks at the record, its threshold and its credential.
LOOK_S = 5.0
#: How often a record that moves meanwhile is tried again.
TRIES = 4


class Fate(Enum):
    #: Clean and in the pool.
    RELEASED = "released"
    #: Ended on purpose: too old, used up, never ready.
    RETIRED = "retired"
    #: Not finished: its threshold ends it.
    EXPIRED = "expired"
    #: Nothing to do, or not ours any more.
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    instance_id: str
    fate: Fate
    why: str
    #: The machine's own part: deregistration and reset.
    deregistration_s: float | None = None
    #: What its agent said of that: what was found and removed, and jobs that were turned away.
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseResult:
    run_id: str
    outcomes: tuple[Outcome, ...]
    errors: tuple[str, ...]
    seconds: float
    calls: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def of(self, fate: Fate) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.fate is fate)


async def release(context: Context, *, run_id: str, attempt: int) -> ReleaseResult:
    started = context.clock.monotonic()
    config = await read_config(context)
    errors: list[str] = []
    ours = await _mark(context, run_id=run_id, attempt=attempt, errors=errors)
    instances = await _instances_of(context, ours, errors=errors)
    if not ours:
        context.event_log.record("release", f"run {run_id} has no provision up to attempt {attempt}", run_id=run_id)

    announcer = PoolPublisher(context, by=Actor.RELEASE)
    provision_ids = {item.provision_id for item in ours}

    async def one(instance: Instance) -> Outcome:
        return await _Releasing(context, config, announcer).run(instance, provision_ids)

    results = await each(instances, one)
    await announcer.close()
    outcomes: list[Outcome] = []
    for instance, result in zip(instances, results, strict=True):
        if isinstance(result, RemudaError):
            errors.append(f"{instance.instance_id}: {result.message}")
        else:
            outcomes.append(result)
    return ReleaseResult(
        run_id=run_id,
        outcomes=tuple(outcomes),
        errors=tuple(errors),
        seconds=round(context.clock.monotonic() - started, 4),
        calls=context.calls.by_service(),
    )


async def _mark(context: Context, *, run_id: str, attempt: int, errors: list[str]) -> list[Provision]:
    """Mark the run's provisions up to our attempt as released. This also stops one that is still at work."""
    ours = [item for item in await _provisions_of(context, run_id, errors) if item.attempt <= attempt]

    async def mark(provision: Provision) -> Provision:
        unsure: Unavailable | None = None
        for _ in range(TRIES):
            if provision.status is ProvisionStatus.RELEASED:
                return provision
            after = released(provision, now=context.clock.now(), why=f"by attempt {attempt}")
            try:
                await context.store.replace_provision(provision, after)
            except Conflict as conflict:
                if not isinstance(conflict.current, Provision):
                    raise
                provision = conflict.current
            except Unavailable as error:
                # It may have been applied: the next try finds out.
                context.event_log.record("write-unsure", error.message, run_id=run_id)
                unsure = error
                await context.clock.sleep(AMBIGUOUS_PAUSE_S * (0.5 + context.ids.jitter()))
            else:
                return after
        if unsure is not None:
            raise unsure
        raise Conflict(f"provision {provision.provision_id} keeps changing")

    marked: list[Provision] = []
    for provision, result in zip(ours, await each(ours, mark), strict=True):
        if isinstance(result, RemudaError):
            errors.append(f"provision {provision.provision_id}: {result.message}")
        else:
            marked.append(result)
    return marked


async def _provisions_of(context: Context, run_id: str, errors: list[str]) -> Sequence[Provision]:
    try:
        return await context.store.provisions_of_run(run_id)
    except Unreadable as error:
        errors.append(error.message)
        return list(error.records.values())


async def _instances_of(context: Context, provisions: Sequence[Provision], *, errors: list[str]) -> list[Instance]:
    """What the commits recorded; for provisions cut short before that, what the index shows."""
    ids: dict[str, None] = {}
    for provision in provisions:
        if provision.settled:
            continue
        ids |= dict.fromkeys(provision.instance_ids)
        if not provision.instance_ids:
            found = await context.store.find_by_provision(provision.provision_id)
            ids |= dict.fromkeys(instance.instance_id for instance in found)
    records, _ = await readable(context.store.get_many(list(ids)), errors.append)
    return [records[instance_id] for instance_id in ids if instance_id in records]


class _Releasing:
    """One instance's way back."""

    def __init__(self, context: Context, config: PoolConfig, announcer: PoolPublisher) -> None:
        self._context = context
        self._config = config
        self._announcer = announcer

    async def run(self, instance: Instance, provision_ids: set[str]) -> Outcome:
        for _ in range(TRIES):
            if instance.provision_id not in provision_ids:
                return _skipped(instance, "it has another assignment by now")
            try:
                if instance.state is State.RELEASING:
                    return await self._finish(instance)
                if instance.state is State.CREATED:
                    end = End(reason=RetireReason.RELEASED)
                    await self._go(instance, end, "released before it was ready")
                    await deregistered(self._context, instance)
                    return Outcome(instance_id=instance.instance_id, fate=Fate.RETIRED, why="it was still booting")
                if instance.state not in {State.CLAIMED, State.RUNNING}:
                    return _skipped(instance, f"it is {instance.state} already")
                instance = await self._start(instance)
            except Conflict as conflict:
                if not isinstance(conflict.current, Instance) or conflict.current == instance:
                    return _skipped(instance, "its time is up; refresh will retire it")
                if instance.state is State.RELEASING and (outcome := _ended_by_another(instance, conflict.current)):
                    return outcome
                instance = conflict.current
        raise Conflict(f"the record of {instance.instance_id} keeps changing")

    async def _start(self, instance: Instance) -> Instance:
        event = Release(
            release_time_s=self._config.lifetimes.release_time_s,
            credential=await removal_credential(self._context, self._config, instance.scope),
            deregistered=await deregistered(self._context, instance),
        )
        return await self._go(instance, event, "by its workflow")

    async def _go(self, instance: Instance, event: Release | End, why: str) -> Instance:
        return await transition(self._context, instance, event, by=Actor.RELEASE, why=why)

    async def _finish(self, instance: Instance) -> Outcome:
        """Wait for the agent's word; a job that still runs may finish."""
        context = self._context
        epoch = instance.epoch
        wait = SignalWaiter(context, instance_id=instance.instance_id, epoch=epoch, verdict_of=removal_verdict)
        while True:
            now = context.clock.monotonic()
            left_s = (instance.threshold - context.clock.now()).total_seconds()
            waited = await wait.wait(until=now + left_s, look_at=now + min(LOOK_S, max(0.5, left_s / 2)))
            if waited.ended is Ended.DEAD:
                return _left(instance, "its heartbeat is dead; its threshold will retire it")
            if waited.ended is Ended.TIMEOUT:
                return _left(instance, "it did not finish in time; its threshold will retire it")
            try:
                if waited.ended is Ended.LOOK:
                    instance = await self._reread(instance)
                after = await settle(context, self._config, instance, waited.report, by=Actor.RELEASE)
            except Unavailable as error:
                context.event_log.record("read-failed", error.message, instance_id=instance.instance_id)
                await context.clock.sleep(AMBIGUOUS_PAUSE_S * (0.5 + context.ids.jitter()))
                continue
            took = waited.report.duration_s if waited.report else None
            detail = waited.report.detail if waited.report else ""
            if after.state is State.IDLE:
                self._announcer.add(after)
                return Outcome(
                    instance_id=instance.instance_id,
                    fate=Fate.RELEASED,
                    why="clean, in the pool",
                    deregistration_s=took,
                    detail=detail,
                )
            if after.state is not State.RELEASING:
                return Outcome(
                    instance_id=instance.instance_id,
                    fate=Fate.RETIRED,
                    why=after.retire_text,
                    deregistration_s=took,
                    detail=detail,
                )
            if waited.ended is Ended.VERDICT and after == instance:
                # Its last word is said, and nothing follows from it: an operator keeps it for a look.
                return _skipped(instance, f"not clean, and kept: {instance.retire_text}")
            instance = after

    async def _reread(self, instance: Instance) -> Instance:
        """The record may have moved meanwhile: a sweep may have ended it, another release finished it."""
        current = await self._context.store.get(instance.instance_id)
        if current is None or (current.state, current.epoch) != (instance.state, instance.epoch):
            raise Conflict(f"{instance.instance_id} moved on", current=current)
        return current


def _ended_by_another(instance: Instance, current: Instance) -> Outcome | None:
    """A sweep or another release was quicker while we waited: the same end, whoever wrote it."""
    if current.epoch > instance.epoch or current.state is State.IDLE:
        return Outcome(instance_id=instance.instance_id, fate=Fate.RELEASED, why="clean, in the pool")
    if current.state not in ABSORBING:
        return None
    fate = Fate.EXPIRED if current.retire_reason is RetireReason.EXPIRED else Fate.RETIRED
    return Outcome(instance_id=instance.instance_id, fate=fate, why=current.retire_text)


def _skipped(instance: Instance, why: str) -> Outcome:
    return Outcome(instance_id=instance.instance_id, fate=Fate.SKIPPED, why=why)


def _left(instance: Instance, why: str) -> Outcome:
    return Outcome(instance_id=instance.instance_id, fate=Fate.EXPIRED, why=why)
