"""Provision: as many registered, committed runners as a run asks for, from the pool if it can, created if it must.

Intent first, then selection and creation side by side, then the commit. Whatever goes wrong on the way gives back
everything with one conditional write for each instance; sweeps finish the rest.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from remuda.controlplane.context import AMBIGUOUS_PAUSE_S, AMBIGUOUS_TRIES, Context, read_config
from remuda.controlplane.provision.commit import commit
from remuda.controlplane.provision.creation import Creation
from remuda.controlplane.provision.just_in_time import JustInTime
from remuda.controlplane.provision.outcome import OutcomeRecorder
from remuda.controlplane.provision.pickup import PickupManager
from remuda.controlplane.provision.request import Provisioned, ProvisionRequest, ProvisionResult, no_credential
from remuda.controlplane.provision.rollback import AcquiredInstances, roll_back
from remuda.controlplane.provision.selection import ProvisionPlan, RegisteredInstance, Selection
from remuda.domain.errors import CapacityError, Conflict, RemudaError, Unavailable, UserError
from remuda.domain.instance import Credential, Instance
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.provision_outcome import MAX_REASON, ProvisionOutcome
from remuda.domain.resources import Reuse, RunnerRequest, folded
from remuda.domain.signals import took_s
from remuda.domain.timestamps import to_milliseconds

__all__ = ["ProvisionRequest", "ProvisionResult", "Provisioned", "provision"]


#: A provision gives up so long before its deadline (or this part of its time, if less): what it claimed can be given
#: back only while its threshold has not passed.
ROLLBACK_RESERVE_S = 10.0
ROLLBACK_RESERVE_PART = 0.1


async def provision(context: Context, order: ProvisionRequest) -> ProvisionResult:
    recorder = OutcomeRecorder(context.clock)
    terms = await _agree(context, order)
    await _intend(context, terms.provision)
    recorder.done("intent")
    if order.tier_why:
        context.event_log.record("tier", f"{order.tier}: {order.tier_why}", run_id=order.run_id)
    holdings = AcquiredInstances()
    just_in_time = JustInTime(context, context.github, terms) if order.ephemeral and context.github else None
    pickup = PickupManager(context, terms.request, recorder)
    max_runtime_s = order.max_runtime_s or terms.config.lifetimes.max_runtime_s
    try:
        ready = await _gather(context, terms, pickup, holdings, recorder, just_in_time=just_in_time)
        recorder.done("instances")
        running = await commit(context, terms.provision, ready, holdings, recorder, max_runtime_s=max_runtime_s)
    except BaseException as error:
        why = error.message if isinstance(error, RemudaError) else "interrupted"
        await _undo(context, terms, holdings, why=why, course=recorder.course(error=why))
        if just_in_time is not None:
            await asyncio.shield(asyncio.ensure_future(just_in_time.undo()))
        raise
    return ProvisionResult(
        run_id=order.run_id,
        provision_id=terms.provision.provision_id,
        label=order.run_id,
        instances=tuple(_provisioned(item, instance) for item, instance in zip(ready, running, strict=True)),
        tier=order.tier,
        tier_why=order.tier_why,
        ephemeral=order.ephemeral,
        seconds=recorder.seconds,
        phases=recorder.phases,
        calls=context.calls.by_service(),
        refused=dict(recorder.refused),
    )


async def _intend(context: Context, intent: Provision) -> None:
    """Write the intent, and know that it was written even where an answer was lost: its id is ours alone, so what is
    stored as we wrote it was written by us.
    """
    for attempt in range(1, AMBIGUOUS_TRIES + 1):
        try:
            await context.store.put_provision(intent)
        except Conflict as conflict:
            if conflict.current == intent:
                return
            raise
        except Unavailable as error:
            context.event_log.record("write-unsure", error.message, run_id=intent.run_id)
            if attempt == AMBIGUOUS_TRIES:
                raise
            await context.clock.sleep(AMBIGUOUS_PAUSE_S * (0.5 + context.ids.jitter()))
        else:
            return


async def _agree(context: Context, order: ProvisionRequest) -> ProvisionPlan:
    """Everything that can be refused is refused here, before the first claim or launch."""
    if order.ephemeral and context.github is None:
        raise no_credential()
    config = await read_config(context)
    resource_class = config.resource_class(order.resource_class)
    if config.reuse is Reuse.SAME_REPO and not order.ephemeral and not order.repository:
        raise UserError(
            f"the pool's reuse is {config.reuse}, and nobody says which repository run {order.run_id} is of",
            field="repository",
            fix="give --repository owner/name",
        )
    if order.count > config.max_instances:
        raise CapacityError(
            f"instance-count is {order.count}; the pool's max-instances is {config.max_instances}",
            fix="ask for fewer, or raise --max-instances and run remuda refresh",
        )
    if order.run_id.lower() in {candidate.name.lower() for candidate in config.classes}:
        raise UserError(
            f"run-id is {order.run_id!r}, the name of a class: as a label it would attract other runs' jobs",
            field="run-id",
            fix="give the workflow's run id (github.run_id)",
        )
    timeout_s = order.timeout_s or config.lifetimes.provision_timeout_s
    now = context.clock.now()
    deadline = to_milliseconds(now + timedelta(seconds=timeout_s))
    return ProvisionPlan(
        config=config,
        provision=Provision(
            provision_id=context.ids.new("p-"),
            run_id=order.run_id,
            attempt=order.attempt,
            resource_class=order.resource_class,
            count=order.count,
            created_at=to_milliseconds(now),
            deadline=deadline,
            asked=_asked(order),
        ),
        request=RunnerRequest(
            resource_class=resource_class,
            usage_class=order.usage_class,
            patterns=order.patterns,
            tier=order.tier,
            reuse=config.reuse,
            repository=folded(order.repository),
        ),
        scope=order.scope,
        repository=order.repository,
        registration=await _registration(context, config, order, timeout_s),
        until=context.clock.monotonic() + timeout_s - min(ROLLBACK_RESERVE_S, timeout_s * ROLLBACK_RESERVE_PART),
    )


async def _registration(
    context: Context, config: PoolConfig, order: ProvisionRequest, timeout_s: float
) -> Credential | None:
    """A token that outlives the provision, or an error before anything is claimed: it would burn the pool."""
    if order.ephemeral:
        # Sweeps look for lost registrations in the pool's own scopes alone.
        config.tokens_for(order.scope)
        return None
    if context.github is not None:
        return await context.github.registration_token(order.scope)
    credential = config.tokens_for(order.scope).registration
    left_s = (credential.expires_at - context.clock.now()).total_seconds()
    if left_s < timeout_s:
        raise UserError(
            f"the pool's registration token for {order.scope} is good for {max(0, left_s):.0f} s more; "
            f"a provision may take {timeout_s:.0f} s",
            field="github-scope",
            fix="run remuda refresh",
        )
    return credential


def _asked(order: ProvisionRequest) -> str:
    tier = f"{order.tier} ({order.tier_why})" if order.tier_why else order.tier
    kind = f"ephemeral, {order.usage_class}" if order.ephemeral else order.usage_class
    return f"{kind}, {tier}, for {order.repository or order.scope}, types {order.patterns}"[:MAX_REASON]


async def _gather(
    context: Context,
    terms: ProvisionPlan,
    pickup: PickupManager,
    holdings: AcquiredInstances,
    recorder: OutcomeRecorder,
    *,
    just_in_time: JustInTime | None,
) -> list[RegisteredInstance]:
    """One worker for each instance asked for: from the pool first, created where the pool is exhausted, or where what
    is asked for serves one run alone.
    """
    selection = Selection(context, terms, pickup, holdings, recorder)
    creation = Creation(context, terms, holdings, recorder, just_in_time)

    async def fill() -> RegisteredInstance:
        taken = None if terms.retired_because else await selection.take_one()
        ready = taken or await creation.make_one()
        recorder.take(ready.instance.instance_id, ready.source, _registration_s(ready))
        return ready

    try:
        async with asyncio.TaskGroup() as group:
            services = [group.create_task(work) for work in (pickup.run(), creation.run(), selection.watch())]
            workers = [group.create_task(fill()) for _ in range(terms.provision.count)]
            await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for service in services:
                service.cancel()
    except BaseExceptionGroup as group_error:
        raise _first(group_error) from group_error
    finally:
        await _close_pickup(context, pickup)
    return [worker.result() for worker in workers]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that says most: one of ours before anything else."""
    for error in group.exceptions:
        if isinstance(error, RemudaError):
            return error
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def _close_pickup(context: Context, pickup: PickupManager) -> None:
    try:
        await asyncio.shield(pickup.close())
    except RemudaError as error:
        # Messages that stay come back after their visibility timeout and prove stale.
        context.event_log.record("hand-back-failed", error.message)


async def _undo(
    context: Context, terms: ProvisionPlan, holdings: AcquiredInstances, *, why: str, course: ProvisionOutcome
) -> None:
    context.event_log.record("rollback", why, run_id=terms.provision.run_id, instances=len(holdings.all()))
    undoing = roll_back(context, terms.config, terms.provision, holdings, why=why, course=course)
    await asyncio.shield(asyncio.ensure_future(undoing))


def _provisioned(item: RegisteredInstance, instance: Instance) -> Provisioned:
    return Provisioned(instance=instance, source=item.source, registration_s=_registration_s(item))


def _registration_s(item: RegisteredInstance) -> float | None:
    return took_s(item.report.detail) if item.report else None
