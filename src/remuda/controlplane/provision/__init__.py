"""Provision: registered and committed runners for a run, from the pool if possible, newly created otherwise.

The flow is to record the intent, to acquire instances and to commit them.

Claim workers and launches run in parallel. If anything fails before the commit, every acquired instance is given back
with one conditional write; sweeps finish what the rollback could not.
"""

from __future__ import annotations

import asyncio

from remuda.controlplane.context import Context, map_concurrently, record_intent, retry_write, run_to_end, transition
from remuda.controlplane.provision.creation import Creation, JustInTimeRegistrations, wait_for_created, watch_created
from remuda.controlplane.provision.outcome import OutcomeRecorder
from remuda.controlplane.provision.pickup import PickupManager
from remuda.controlplane.provision.plan import (
    ProvisionPlan,
    ProvisionRequest,
    ProvisionResult,
    already_provisioned,
    make_plan,
)
from remuda.controlplane.provision.rollback import AcquiredInstance, AcquiredInstances, roll_back
from remuda.controlplane.provision.selection import Selection
from remuda.domain.errors import Conflict, Interrupted, RemudaError, Unavailable
from remuda.domain.provision import MAX_ERROR, Provision, committed
from remuda.domain.transitions import Actor, Commit

__all__ = ["ProvisionRequest", "ProvisionResult", "provision"]


async def provision(context: Context, request: ProvisionRequest) -> ProvisionResult:
    recorder = OutcomeRecorder(context.clock)
    plan = await make_plan(context, request)
    acquired = AcquiredInstances()
    jit = JustInTimeRegistrations(context, context.github, plan) if request.ephemeral and context.github else None
    try:
        await record_intent(context, plan.provision)
        recorder.end_phase("intent")
        if request.tier_reason:
            context.event_log.record("tier", f"{request.tier}: {request.tier_reason}", run_id=request.run_id)
        await _acquire_all(context, plan, acquired, recorder, jit)
        recorder.end_phase("instances")
        await _commit(context, plan, acquired, recorder)
    except BaseException as error:
        if "intent" not in recorder.phases and isinstance(error, Conflict):
            # Another provision of the run started at the same moment, and its record was first.
            raise already_provisioned(request, error.current, now=context.clock.now()) from error
        # The intent may have been written even if its write failed.
        failure = error if isinstance(error, RemudaError) else Interrupted("interrupted")
        await _undo(context, plan, acquired, recorder, failure)
        if jit is not None:
            await run_to_end(jit.remove_all())
        raise
    return ProvisionResult(
        run_id=request.run_id,
        provision_id=plan.provision.provision_id,
        label=request.run_id,
        instances=acquired.all(),
        tier=request.tier,
        tier_reason=request.tier_reason,
        ephemeral=request.ephemeral,
        seconds=recorder.seconds,
        phases=recorder.phases,
        calls=context.calls.by_service(),
        rejected=dict(recorder.rejected),
    )


async def _acquire_all(
    context: Context,
    plan: ProvisionPlan,
    acquired: AcquiredInstances,
    recorder: OutcomeRecorder,
    jit: JustInTimeRegistrations | None,
) -> None:
    """Run one worker per requested instance. Each claims from the pool, and creates an instance if the pool is
    exhausted or if the plan needs new instances.
    """
    pickup = PickupManager(context, plan.request, recorder)
    selection = Selection(context, plan, pickup, acquired, recorder)
    creation = Creation(context, recorder, jit)

    async def acquire_one() -> None:
        registered = None if plan.retire_reason else await selection.claim_one()
        if registered is None:
            created = await creation.create_one(plan, acquired)
            registered = await wait_for_created(context, plan, created, acquired)
        recorder.acquire(registered.instance.instance_id, registered.source, registration_s=registered.registration_s)

    try:
        async with asyncio.TaskGroup() as group:
            services = [
                group.create_task(service)
                for service in (
                    pickup.run(),
                    creation.run(),
                    selection.watch_provision_open(),
                    watch_created(context, acquired),
                )
            ]
            workers = [group.create_task(acquire_one()) for _ in range(plan.provision.count)]
            await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for service in services:
                service.cancel()
    except BaseExceptionGroup as group_error:
        raise _most_specific(group_error) from group_error
    finally:
        await close_pickup(context, pickup)


def _most_specific(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first `RemudaError` of the group, else its first error."""
    for error in group.exceptions:
        if isinstance(error, RemudaError):
            return error
    first = group.exceptions[0]
    return _most_specific(first) if isinstance(first, BaseExceptionGroup) else first


async def close_pickup(context: Context, pickup: PickupManager) -> None:
    try:
        await run_to_end(pickup.close())
    except RemudaError as error:
        # The messages become visible again after their timeout; claims recognise those that are stale by then.
        context.event_log.record("make-visible-failed", error.message)


async def _commit(
    context: Context,
    plan: ProvisionPlan,
    acquired: AcquiredInstances,
    recorder: OutcomeRecorder,
) -> None:
    """Move every instance to `running`, then the provision to `committed`. Until then everything can be undone."""
    provision = plan.provision

    async def start(item: AcquiredInstance) -> None:
        event = Commit(claim=item.instance.claim, report=item.report, max_runtime_s=plan.max_runtime_s)
        count = "the only instance" if provision.count == 1 else f"all {provision.count} instances"
        why = f"{count} of run {provision.run_id} registered"
        acquired.add(await transition(context, item.instance, event, by=Actor.PROVISION, why=why))

    for result in await map_concurrently(acquired.all(), start):
        if isinstance(result, Conflict):
            raise Unavailable(f"an instance was lost before the commit: {result.message}")
        if isinstance(result, RemudaError):
            raise result
    running = [item.instance for item in acquired.all()]
    deadline = max((instance.threshold for instance in running), default=provision.deadline)
    ids = tuple(instance.instance_id for instance in running)
    recorder.end_phase("commit")
    await record_commit(context, provision, committed(provision, ids, deadline=deadline, outcome=recorder.outcome()))


async def record_commit(context: Context, provision: Provision, after: Provision) -> None:
    async def write() -> None:
        try:
            await context.store.replace_provision(provision, after)
        except Conflict as conflict:
            if conflict.current != after:
                raise Conflict(
                    f"run {provision.run_id} was released while it was being provisioned", current=conflict.current
                ) from conflict

    await retry_write(context, write, run_id=provision.subject)
    count = len(after.instance_ids)
    running = "1 instance is running" if count == 1 else f"{count} instances are running"
    context.event_log.record("committed", running, run_id=provision.subject)


async def _undo(
    context: Context,
    plan: ProvisionPlan,
    acquired: AcquiredInstances,
    recorder: OutcomeRecorder,
    failure: RemudaError,
) -> None:
    why = failure.message
    context.event_log.record("rollback", why, run_id=plan.provision.subject, instances=len(acquired.all()))
    outcome = recorder.outcome(error=failure.describe(MAX_ERROR), exit_code=failure.exit_code)
    await run_to_end(roll_back(context, plan.config, plan.provision, acquired, why=why, outcome=outcome))
