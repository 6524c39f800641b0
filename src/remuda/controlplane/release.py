"""Release: mark the run's provisions as released, then bring each of their instances back to the pool.

Idempotent, resumable and safe to run concurrently: the records show what another release did or left unfinished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import TypeGuard

from remuda.controlplane.batching import Batcher
from remuda.controlplane.context import (
    CONFLICT_ATTEMPTS,
    Context,
    map_concurrently,
    pause_before_retry,
    read_config,
    retry_write,
    skip_unreadable,
    transition,
    transition_all,
    transition_with_provision,
)
from remuda.controlplane.signal_waiter import SignalWaiter, StopReason, WaitResult
from remuda.domain.errors import Conflict, ProvisionConflict, RemudaError, Unavailable, Unreadable
from remuda.domain.instance import ABSORBING, Credential, Instance, State, holder_id
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import (
    Provision,
    ProvisionChange,
    ProvisionEnding,
    ProvisionStatus,
    describe_status,
    lost_instances,
    released,
    settled,
)
from remuda.domain.release_policy import credential_expires_early, next_for_releasing
from remuda.domain.resources import Tier
from remuda.domain.signals import Report, Verdict, removal_verdict
from remuda.domain.timestamps import after
from remuda.domain.transitions import Actor, Announce, Bind, End, Event, Release, RenewCredential, Retire, RetireReason
from remuda.ports.github import Deletion, GitHub
from remuda.ports.pool import BATCH

#: Seconds between two checks of the record, its threshold and its credential while a release waits for the agent.
RECHECK_INTERVAL_S = 5.0
#: Seconds that a pool message waits for others that can share its call.
BATCH_WINDOW_S = 0.03
#: Instances whose pool messages are recorded as sent in one call.
RECORD_BATCH = 50
#: A cached removal token with fewer seconds left is replaced.
MIN_TOKEN_LIFE_S = 1_800.0
#: Seconds that GitHub has for a removal token, or for the removal of a registration, before instances are given back
#: without its answer.
TOKEN_TIMEOUT_S = 3.0
#: Seconds after a failed attempt in which the pool's token is used at once.
TOKEN_RETRY_S = 30.0


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
                if instance.state is State.CREATED:
                    await self._transition(instance, End(reason=RetireReason.RELEASED), "released before it was ready")
                    await remove_jit_registration(self._context, instance)
                    return _outcome(instance, ReleaseStatus.RETIRED, "it was still booting")
                if instance.state not in {State.CLAIMED, State.RUNNING}:
                    return _outcome(instance, ReleaseStatus.SKIPPED, f"already {instance.state}")
                instance = await self._start(instance)
            except Conflict as conflict:
                if not isinstance(conflict.current, Instance) or conflict.current == instance:
                    return _outcome(instance, ReleaseStatus.SKIPPED, "its time is up; refresh will retire it")
                if instance.state is State.RELEASING and (outcome := _finished_by_another(instance, conflict.current)):
                    return outcome
                instance = conflict.current
        raise Conflict(f"the record of {instance.instance_id} keeps changing")

    async def _start(self, instance: Instance) -> Instance:
        event = Release(
            release_time_s=self._config.lifetimes.release_time_s,
            credential=await removal_credential(self._context, self._config, instance.scope),
            deregistered=await remove_jit_registration(self._context, instance),
        )
        return await self._transition(instance, event, "by its workflow")

    async def _transition(self, instance: Instance, event: Release | End, why: str) -> Instance:
        return await transition(self._context, instance, event, by=Actor.RELEASE, why=why)

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
            if waited.stopped is StopReason.TIMEOUT:
                return _outcome(
                    instance, ReleaseStatus.EXPIRED, "it did not finish in time; its threshold will retire it"
                )
            try:
                if waited.stopped is StopReason.RECHECK:
                    instance = await self._read_again(instance)
                after = await advance_release(context, self._config, instance, waited.report, by=Actor.RELEASE)
            except Unavailable as error:
                context.event_log.record("read-failed", error.message, instance_id=instance.instance_id)
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


def _reported_outcome(instance: Instance, status: ReleaseStatus, why: str, waited: WaitResult) -> ReleaseOutcome:
    return ReleaseOutcome(
        instance_id=instance.instance_id,
        status=status,
        why=why,
        deregistration_s=waited.report.duration_s if waited.report else None,
        detail=waited.report.detail if waited.report else "",
    )


# The second half of a release, shared with `refresh`: from the agent's report to the pool or the end -----------------


async def advance_release(
    context: Context, config: PoolConfig, instance: Instance, report: Report | None, *, by: Actor
) -> Instance:
    """Apply the next transition of a releasing instance, if one is due. Return its record."""
    now = context.clock.now()
    upcoming = next_for_releasing(
        instance,
        report,
        now=now,
        lifetimes=config.lifetimes,
        reuse=config.reuse,
        runner_version=config.runner_version,
    )
    if upcoming is not None:
        return await transition(context, instance, upcoming.event, by=by, why=upcoming.why)
    # A failure is final. Only a quarantine keeps the machine then, and its agent needs no credential any more.
    is_pending = removal_verdict(report, instance.epoch) is Verdict.PENDING
    if is_pending and credential_expires_early(instance, now=now, margin_s=config.lifetimes.margin_s):
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
    try:
        sent = await _send_messages(context, instances)
    except RemudaError as error:
        return [error]
    return await _record_sent(context, sent, by=by)


async def _send_messages(context: Context, instances: Collection[Instance]) -> list[Instance]:
    """Return the idle instances whose messages were sent. Retired and quarantined ones cannot be claimed."""
    idle = [instance for instance in instances if instance.retire_reason is None]
    if idle:
        await context.pool.send([instance.message() for instance in idle])
    return idle


async def _record_sent(context: Context, sent: Sequence[Instance], *, by: Actor) -> list[RemudaError]:
    results = await transition_all(context, sent, Announce(), by=by, why="sent to the pool")
    # After a conflict, a provision has claimed it already.
    return [result for result in results if result is not None and not isinstance(result, Conflict)]


class PoolPublisher:
    """Publishes instances in batches as they become idle. Sweeps publish what it could not."""

    def __init__(
        self,
        context: Context,
        *,
        by: Actor,
        on_sent: Callable[[Sequence[Instance]], None] = lambda _instances: None,
        record_after_s: float = 0.0,
        is_idle: Callable[[Instance], bool] = lambda _instance: True,
    ) -> None:
        """`on_sent` is called with the instances of each batch, whether or not it could be sent.

        That a message was sent is recorded after `record_after_s`, if `is_idle` does not know of a claim by then.
        """
        self._context = context
        self._by = by
        self._on_sent = on_sent
        self._is_idle = is_idle
        self._sending = Batcher(self._send, size=BATCH, window_s=BATCH_WINDOW_S)
        self._recording = Batcher(self._record, size=RECORD_BATCH, window_s=record_after_s)

    def add(self, instance: Instance) -> None:
        self._sending.add(instance)

    async def close(self) -> None:
        await self._sending.close()
        await self._recording.close()

    async def _send(self, batch: list[Instance]) -> None:
        try:
            for instance in await _send_messages(self._context, batch):
                self._recording.add(instance)
        except RemudaError as error:
            self._context.event_log.record("publish-failed", error.message, instances=len(batch))
        self._on_sent(batch)

    async def _record(self, batch: list[Instance]) -> None:
        idle = [instance for instance in batch if self._is_idle(instance)]
        for error in await _record_sent(self._context, idle, by=self._by):
            self._context.event_log.record("publish-failed", error.message, instances=len(batch))


# Removal of registrations: the agent's credential, and the API call for just-in-time runners -------------------------


async def removal_credential(
    context: Context, config: PoolConfig, scope: str, *, timeout_s: float = TOKEN_TIMEOUT_S
) -> Credential:
    """Mint a removal token, or take the one in the pool's configuration if this process has no GitHub credential.

    The pool's token may expire too early. A sweep then renews it on the instance.
    """
    if context.github is None:
        return config.tokens_for(scope).removal
    stored = config.find_tokens(scope)
    if stored is not None and context.clock.monotonic() < context.removal_token_retry_at.get(scope, -inf):
        return stored.removal
    try:
        return await _mint_removal_token(context, context.github, scope, timeout_s=timeout_s)
    except RemudaError as error:
        # Instances must be released even if GitHub does not answer.
        if stored is None:
            raise
        context.removal_token_retry_at[scope] = context.clock.monotonic() + TOKEN_RETRY_S
        context.event_log.record("removal-token-failed", f"{error.message}; using the pool's token", scope=scope)
        return stored.removal


async def _mint_removal_token(context: Context, github: GitHub, scope: str, *, timeout_s: float) -> Credential:
    try:
        # The wait for another's attempt counts as well.
        async with asyncio.timeout(timeout_s), context.removal_token_lock:
            token = context.removal_tokens.get(scope)
            if token is None or (token.expires_at - context.clock.now()).total_seconds() < MIN_TOKEN_LIFE_S:
                token = context.removal_tokens[scope] = await github.removal_token(scope)
            return token
    except TimeoutError:
        raise Unavailable(f"GitHub made no removal token in {timeout_s:.1f} s") from None


# Machines of runner sets: GitHub has removed their registration before they are released ----------------------------


def release_of_set(config: PoolConfig, *, deregistered: bool) -> Release:
    """The event that releases a machine of a runner set. No removal token is needed."""
    return Release(release_time_s=config.lifetimes.release_time_s, credential=None, deregistered=deregistered)


def binding_of_unknown_job(config: PoolConfig, report: Report | None, *, set_tier: Tier) -> Bind:
    """The event that binds a job which no message has named: its run is unknown, and it counts as untrusted."""
    return Bind(
        report=report,
        tier=Tier.UNTRUSTED,
        set_tier=set_tier,
        max_runtime_s=config.lifetimes.max_runtime_s,
        margin_s=config.lifetimes.margin_s,
    )


async def transition_in_set(
    context: Context,
    instance: Instance,
    event: Event,
    replaced: Callable[[Provision | None], Provision | None],
    *,
    by: Actor,
    why: str,
    provision: Provision | None = None,
) -> tuple[Instance, Provision | None]:
    """Apply a transition of a machine of a runner set and replace its provision in one step. Return both records.

    `replaced` returns the new provision, or None if the stored one remains. It gets None if none is stored any more.
    `provision` is the stored one, if known.
    """
    for _ in range(CONFLICT_ATTEMPTS):
        if provision is None:
            provision = await context.store.get_provision(holder_id(instance.runner_set), instance.provision_id)
        new = replaced(provision)
        if provision is None or new is None:
            return await transition(context, instance, event, by=by, why=why), provision
        change = ProvisionChange(before=provision, after=new)
        try:
            changed = await transition_with_provision(context, instance, event, change, by=by, why=why)
        except ProvisionConflict as conflict:
            provision = conflict.current
        else:
            return changed, new
    raise Conflict(f"the provision of {instance.instance_id} keeps changing")


async def leave_provision(
    context: Context,
    config: PoolConfig,
    instance: Instance,
    event: Event,
    *,
    by: Actor,
    why: str,
    provision: Provision | None = None,
) -> tuple[Instance, Provision | None]:
    """Apply a transition after which the provision of a machine of a runner set does not hold it any more."""

    def closed(stored: Provision | None) -> Provision | None:
        return closed_provision(context, config, stored, instance, why, ending=_ending_after(event))

    return await transition_in_set(context, instance, event, closed, by=by, why=why, provision=provision)


def _ending_after(event: Event) -> ProvisionEnding:
    """The ending of the provision of a machine of a runner set, by the event that takes the machine from it."""
    if not isinstance(event, End) or event.reason is RetireReason.RELEASED:
        return ProvisionEnding.RELEASED
    return ProvisionEnding.EXPIRED if event.reason is RetireReason.EXPIRED else ProvisionEnding.FAILED


def closed_provision(
    context: Context,
    config: PoolConfig,
    provision: Provision | None,
    instance: Instance,
    why: str,
    *,
    ending: ProvisionEnding = ProvisionEnding.RELEASED,
) -> Provision | None:
    """The provision of a machine of a runner set that it does not hold any more; None if that is recorded."""
    if provision is None or provision.settled:
        return None
    if provision.status is ProvisionStatus.COMMITTED and instance.instance_id not in provision.instance_ids:
        # It holds another machine: a claim whose answer was lost was applied after the launch of that one.
        return None
    now = context.clock.now()
    if provision.status is not ProvisionStatus.RELEASED:
        provision = released(provision, now=now, why=why, ending=ending)
    return settled(provision, forget_at=after(now, config.lifetimes.keep_records_s))


async def deregister_set_runner(context: Context, instance: Instance, *, by: Actor) -> bool:
    """Remove the registration of a runner of a set. Return whether it certainly has no job any more.

    A registration that is gone may have been used up by a job that no one has recorded: a trusted machine is retired.
    """
    assignment = instance.assignment
    if context.github is None or assignment is None or not assignment.runner_id:
        return False
    deletion = await context.github.delete_runner(instance.scope, assignment.runner_id)
    context.event_log.record("deregistered", deletion.value, instance_id=instance.instance_id)
    if deletion is Deletion.GONE:
        await retire_after_unknown_job(context, instance, by=by)
    return deletion is not Deletion.BUSY


async def retire_after_unknown_job(context: Context, instance: Instance, *, by: Actor) -> Instance:
    """Retire a trusted machine that may have served an unknown job."""
    if instance.is_bound or instance.retire_reason is not None or instance.tier is not Tier.TRUSTED:
        return instance
    event = Retire(
        reason=RetireReason.UNTRUSTED_JOB, detail="its registration was gone: it may have had an unknown job"
    )
    return await transition(context, instance, event, by=by, why=event.detail)


async def remove_jit_registration(context: Context, instance: Instance) -> bool:
    """Delete the registration of a just-in-time runner; no removal token can do that. Return whether it is gone.

    GitHub refuses while a job runs, and removes the registration with the end of the job. Without a credential or an
    answer, the registration outlives the machine until a sweep removes it.
    """
    assignment = instance.assignment
    if context.github is None or assignment is None or not assignment.runner_id:
        return False
    try:
        async with asyncio.timeout(TOKEN_TIMEOUT_S):
            deletion = await context.github.delete_runner(instance.scope, assignment.runner_id)
    except (TimeoutError, RemudaError) as error:
        why = str(error) or "timeout"
        context.event_log.record("deregistration-failed", why, instance_id=instance.instance_id)
        return False
    context.event_log.record("deregistered", deletion.value, instance_id=instance.instance_id)
    return deletion is not Deletion.BUSY
