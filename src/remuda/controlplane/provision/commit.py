"""The commit: every instance to `running`, then the provision to `committed`. Until then, all can be undone."""

from __future__ import annotations

from collections.abc import Sequence

from remuda.controlplane.context import AMBIGUOUS_TRIES, Context, each, transition
from remuda.controlplane.provision.outcome import OutcomeRecorder
from remuda.controlplane.provision.rollback import AcquiredInstances
from remuda.controlplane.provision.selection import RegisteredInstance
from remuda.domain.errors import Conflict, RemudaError, Unavailable
from remuda.domain.instance import Instance
from remuda.domain.provision import Provision, committed
from remuda.domain.transitions import Actor, Commit


async def commit(
    context: Context,
    provision: Provision,
    ready: Sequence[RegisteredInstance],
    holdings: AcquiredInstances,
    recorder: OutcomeRecorder,
    *,
    max_runtime_s: float,
) -> list[Instance]:
    async def start(item: RegisteredInstance) -> Instance:
        event = Commit(owner=item.instance.owner, report=item.report, max_runtime_s=max_runtime_s)
        run = f"of run {provision.run_id}"
        why = f"the one {run} is registered" if provision.count == 1 else f"all {provision.count} {run} are registered"
        running = await transition(context, item.instance, event, by=Actor.PROVISION, why=why)
        holdings.hold(running)
        return running

    running: list[Instance] = []
    for result in await each(ready, start):
        if isinstance(result, Conflict):
            raise Unavailable(f"an instance was lost before the commit: {result.message}")
        if isinstance(result, RemudaError):
            raise result
        running.append(result)
    deadline = max((instance.threshold for instance in running), default=provision.deadline)
    ids = tuple(instance.instance_id for instance in running)
    recorder.done("commit")
    await _record(context, provision, committed(provision, ids, deadline=deadline, outcome=recorder.outcome()))
    return running


async def _record(context: Context, provision: Provision, after: Provision) -> None:
    for attempt in range(AMBIGUOUS_TRIES):
        try:
            await context.store.replace_provision(provision, after)
        except Conflict as conflict:
            if conflict.current == after:
                break
            raise Conflict(
                f"run {provision.run_id} was released while it was being provisioned", current=conflict.current
            ) from conflict
        except Unavailable:
            if attempt == AMBIGUOUS_TRIES - 1:
                raise
        else:
            break
    count = len(after.instance_ids)
    told = "the one asked for is running" if count == 1 else f"all {count} asked for are running"
    context.event_log.record("committed", told, run_id=provision.run_id)
