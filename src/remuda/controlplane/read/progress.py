"""Progress of a run's provision, for a workflow step that waits for it. Reads only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from remuda.controlplane.context import Context, skip_unreadable
from remuda.controlplane.provision.rollback import AcquiredInstance
from remuda.domain.instance import ABSORBING, Instance, State
from remuda.domain.provision import AcquiredRunner, Provision, ProvisionStatus, RunnerSource
from remuda.domain.signals import Report, Verdict, registration_verdict

#: Instances that a line names.
MAX_NAMED = 5
_WAITS_FOR = {State.CREATED: "booting", State.CLAIMED: "registering"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionProgress:
    #: The newest provision of the attempt; None if none exists yet.
    provision: Provision | None
    #: For people, in one line.
    text: str
    #: Whether the provision cannot end any more: it is open after its deadline.
    is_overdue: bool = False

    @property
    def is_done(self) -> bool:
        is_open = self.provision is None or self.provision.status is ProvisionStatus.OPEN
        return not is_open or self.is_overdue


async def read_progress(context: Context, *, run_id: str, attempt: int, resource_class: str) -> ProvisionProgress:
    """The progress of the newest provision of this class: a run may have one per class."""
    provisions = [
        item
        for item in await context.store.provisions_of_run(run_id)
        if (item.attempt, item.resource_class) == (attempt, resource_class)
    ]
    if not provisions:
        return ProvisionProgress(provision=None, text=f"run {run_id} has no provision of attempt {attempt} yet")
    newest = max(provisions, key=lambda item: (item.created_at, item.provision_id))
    if newest.status is not ProvisionStatus.OPEN:
        return ProvisionProgress(provision=newest, text=f"run {run_id}: {newest.why}")
    now = context.clock.now()
    if now >= newest.deadline:
        return ProvisionProgress(provision=newest, text=f"run {run_id} was not provisioned in time", is_overdue=True)
    found = await context.store.find_by_provision(newest.provision_id)
    ids = [instance.instance_id for instance in found]
    reports, _ = await skip_unreadable(
        context.store.get_reports(ids), partial(context.event_log.record, "unreadable", run_id=run_id)
    )
    seconds = (now - newest.created_at).total_seconds()
    return ProvisionProgress(provision=newest, text=describe_waiting(newest, found, reports, seconds=seconds))


def describe_waiting(
    provision: Provision, instances: Sequence[Instance], reports: Mapping[str, Report], *, seconds: float
) -> str:
    """The number of registered runners, and what the others are doing."""
    live = [instance for instance in instances if instance.state not in ABSORBING]
    waiting = sorted(
        (instance for instance in live if not _is_registered(instance, reports.get(instance.instance_id))),
        key=lambda instance: instance.instance_id,
    )
    noun = "runner" if provision.count == 1 else "runners"
    head = f"{len(live) - len(waiting)} of {provision.count} {noun} registered after {max(0.0, seconds):.0f} s"
    named = [f"{item.instance_id} ({_WAITS_FOR.get(item.state, item.state)})" for item in waiting[:MAX_NAMED]]
    more = len(waiting) - len(named)
    rest = ", ".join(named) + (f" and {more} more" if more else "")
    if not live:
        return f"{head}; no instance yet"
    if not rest:
        return f"{head}; waiting for the others" if len(live) < provision.count else f"{head}; starting the runners"
    return f"{head}; waiting for {rest}"


def _is_registered(instance: Instance, report: Report | None) -> bool:
    return instance.state is State.RUNNING or registration_verdict(report, instance.epoch) is Verdict.OK


async def provisioned_instances(context: Context, provision: Provision) -> tuple[AcquiredInstance, ...]:
    """The instances of a committed provision, as the provision itself reported them."""
    records, _ = await skip_unreadable(
        context.store.get_many(provision.instance_ids),
        partial(context.event_log.record, "unreadable", run_id=provision.run_id),
    )
    outcome = provision.outcome
    acquired = {item.instance_id: item for item in (outcome.acquired if outcome else ())}
    # The outcome lists a limited number of runners, but counts all of them.
    unlisted = (outcome.reused if outcome else 0) - sum(item.source is RunnerSource.POOL for item in acquired.values())
    found = []
    for instance_id in provision.instance_ids:
        if instance_id not in records:
            continue
        item = acquired.get(instance_id)
        if item is None:
            source = RunnerSource.POOL if unlisted > 0 else RunnerSource.CREATED
            unlisted -= 1
            item = AcquiredRunner(instance_id=instance_id, source=source, seconds=0.0)
        found.append(
            AcquiredInstance(instance=records[instance_id], source=item.source, registration_s=item.registration_s)
        )
    return tuple(found)
