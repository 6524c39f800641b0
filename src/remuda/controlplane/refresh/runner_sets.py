"""Instances of runner sets whose listener does not do what is due: they return even without one."""

from __future__ import annotations

from datetime import timedelta

from remuda.controlplane.context import transition
from remuda.controlplane.reconcile import binding_of_unknown_job, leave
from remuda.controlplane.refresh.observe import Observed
from remuda.controlplane.refresh.result import RefreshResult, combined, for_each, seen
from remuda.domain.decide.next_step import Leave, leave_holder
from remuda.domain.instance import Instance, State
from remuda.domain.resources import Tier
from remuda.domain.signals import Report
from remuda.domain.sweep_record import Anomaly, AnomalyKind
from remuda.domain.transitions import Actor

#: A job that no listener has recorded is bound if it was seen before and its runner expires within this many seconds,
#: which is more than the time to the next sweep.
BIND_BEFORE_S = 600.0


async def sweep_runner_sets(observed: Observed) -> RefreshResult:
    """Release runners whose job has ended, and bind jobs that would end with the listening time."""
    running = [
        (item, report)
        for item in observed.records.values()
        if item.state is State.RUNNING and item.runner_set
        if (report := observed.reports.get(item.instance_id)) is not None
    ]
    anomalies = [_unrecorded_job(observed, *each) for each in running]
    advanced = await for_each(running, lambda each: _advance(observed, *each), name=lambda each: each[0].instance_id)
    return combined([seen(item for item in anomalies if item is not None), advanced])


def _unrecorded_job(observed: Observed, instance: Instance, report: Report) -> Anomaly | None:
    """A job that the instance has, or has had, and that no listener has recorded."""
    if instance.is_bound:
        return None
    if report.spent_epoch == instance.epoch:
        return observed.sighting(AnomalyKind.SPENT, instance.instance_id, instance.epoch)
    return observed.sighting(AnomalyKind.UNBOUND_JOB, instance.instance_id, instance.epoch) if report.busy else None


async def _advance(observed: Observed, instance: Instance, report: Report) -> RefreshResult:
    unrecorded, is_advanced = _unrecorded_job(observed, instance, report), False
    if report.spent_epoch == instance.epoch:
        # Give the listener, or GitHub's message, the time of a sweep.
        if unrecorded is not None and not observed.was_seen_before(unrecorded):
            return RefreshResult()
        if unrecorded is not None:
            instance = await _bind(observed, instance, report)
        is_advanced = await _release(observed, instance, report)
    elif unrecorded is not None and _is_binding_due(observed, instance, unrecorded):
        await _bind(observed, instance, report)
        is_advanced = True
    return RefreshResult(advanced_in_sets=(instance.instance_id,) if is_advanced else ())


async def _release(observed: Observed, instance: Instance, report: Report) -> bool:
    context, config, leaving = observed.context, observed.config, leave_holder(instance, report)
    if not isinstance(leaving, Leave):
        return False
    await leave(context, config, instance, leaving, by=Actor.REFRESH, why="its job has ended")
    return True


def _is_binding_due(observed: Observed, instance: Instance, unrecorded: Anomaly) -> bool:
    now, margin = observed.context.clock.now(), timedelta(seconds=observed.config.lifetimes.margin_s)
    if instance.threshold <= now - margin:
        # Too late for a new time limit; the report protects the job until the one that the runner began with.
        return False
    lead = timedelta(seconds=BIND_BEFORE_S) if observed.was_seen_before(unrecorded) else margin
    return instance.threshold <= now + max(margin, lead)


async def _bind(observed: Observed, instance: Instance, report: Report) -> Instance:
    runner_set = observed.config.find_set(instance.runner_set)
    set_tier = runner_set.trust if runner_set else Tier.TRUSTED
    event = binding_of_unknown_job(observed.config, report, set_tier=set_tier)
    why = "it has a job, and no listener has recorded it"
    return await transition(observed.context, instance, event, by=Actor.REFRESH, why=why)
