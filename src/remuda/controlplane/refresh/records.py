"""Records of instances: those that are expired, have failed, or wait for their next step."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from remuda.controlplane.context import transition_all
from remuda.controlplane.pool_publisher import publish_to_pool
from remuda.controlplane.reconcile import carry_out
from remuda.controlplane.refresh.observe import Observed
from remuda.controlplane.refresh.result import RefreshResult, combined, for_each, seen
from remuda.domain.decide.next_step import Publish, Step, Write, end_of_time, is_busy, next_step
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import ABSORBING, Instance, State
from remuda.domain.reporting.warnings import EXPIRY_WARNING_S, describe_near_expiry, max_runtime_s
from remuda.domain.sweep_record import AnomalyKind
from remuda.domain.transitions import Actor

#: Steps of one instance in one sweep. Example: a spot notice is recorded, and the idle instance is ended.
MAX_STEPS = 3


async def sweep_records(observed: Observed) -> RefreshResult:
    """End expired and failed instances, advance interrupted releases, and publish idle instances that are due."""
    live = [item for item in observed.records.values() if item.state not in ABSORBING]
    overdue = {item.instance_id: end for item in live if (end := _end_of_time(observed, item)) is not None}
    ended = await _end_overdue(observed, overdue)
    due: list[Instance] = []

    async def advance(instance: Instance) -> RefreshResult:
        instance, result = await _advance(observed, instance)
        if isinstance(_next_step(observed, instance), Publish):
            due.append(instance)
        return result

    others = [item for item in live if item.instance_id not in overdue]
    advanced = await for_each(others, advance, name=lambda item: item.instance_id)
    errors = await publish_to_pool(observed.context, due, by=Actor.REFRESH)
    published = RefreshResult(
        errors=tuple(f"pool messages: {error.message}" for error in errors),
        published=() if errors else tuple(item.instance_id for item in due),
    )
    return combined([ended, advanced, published])


async def _end_overdue(observed: Observed, overdue: Mapping[str, Write]) -> RefreshResult:
    """End instances past their time limit, in one batch per reason."""
    batches: dict[Write, list[Instance]] = {}
    for instance_id, end in overdue.items():
        batches.setdefault(end, []).append(observed.records[instance_id])
    retired: dict[str, str] = {}
    errors: list[str] = []
    for end, batch in batches.items():
        results = await transition_all(observed.context, batch, end.event, by=Actor.REFRESH, why=end.why)
        for instance, error in zip(batch, results, strict=True):
            if error is None:
                retired[instance.instance_id] = end.why
            elif not isinstance(error, Conflict):
                errors.append(f"{instance.instance_id}: {error.message}")
    return RefreshResult(retired=retired, errors=tuple(errors))


def _end_of_time(observed: Observed, instance: Instance) -> Write | None:
    report, now = observed.reports.get(instance.instance_id), observed.context.clock.now()
    return end_of_time(instance, report, observed.config.policy, now=now)


def _next_step(observed: Observed, instance: Instance) -> Step | None:
    report = observed.reports.get(instance.instance_id)
    return next_step(instance, report, observed.config.policy, now=observed.context.clock.now())


async def _advance(observed: Observed, instance: Instance) -> tuple[Instance, RefreshResult]:
    """Do what is due, one step after the other, until the machine or another process has to do something."""
    done: list[RefreshResult] = []
    for _ in range(MAX_STEPS):
        before = instance
        try:
            instance, result = await _take_step(observed, before)
        except Conflict:
            # Another process changed it; the next sweep reads it again.
            break
        except RemudaError as error:
            done.append(RefreshResult(errors=(f"{before.instance_id}: {error.message}",)))
            break
        done.append(result)
        if instance == before or instance.state in ABSORBING:
            break
    return instance, combined(done)


async def _take_step(observed: Observed, instance: Instance) -> tuple[Instance, RefreshResult]:
    context, config, step = observed.context, observed.config, _next_step(observed, instance)
    after = await carry_out(context, config, instance, step, by=Actor.REFRESH)
    if after.state is State.IDLE and instance.state is State.RELEASING:
        return after, RefreshResult(finished_releases=(instance.instance_id,))
    if after.state in ABSORBING:
        why = step.why if isinstance(step, Write) else after.retire_text
        return after, RefreshResult(retired={instance.instance_id: why})
    return after, RefreshResult()


async def warn_before_expiry(observed: Observed) -> RefreshResult:
    """Log once that the maximum runtime ends a running job soon."""
    context, now, anomalies = observed.context, observed.context.clock.now(), []
    latest = now + timedelta(seconds=EXPIRY_WARNING_S)
    for instance in observed.records.values():
        report = observed.reports.get(instance.instance_id)
        is_near = instance.state is State.RUNNING and now < instance.deadline(busy=True) <= latest
        if report is None or not is_near or not is_busy(instance, report):
            continue
        provision = await context.store.get_provision(instance.holder) if instance.holder is not None else None
        runtime_s = max_runtime_s(provision, observed.config.lifetimes)
        if not (text := describe_near_expiry(instance, report, now=now, runtime_s=runtime_s)):
            continue
        anomalies.append(observed.sighting(AnomalyKind.EXPIRES_SOON, instance.instance_id, instance.epoch))
        if not observed.was_seen_before(anomalies[-1]):
            context.event_log.record("expiry-warning", text, instance_id=instance.instance_id, run_id=instance.subject)
    return seen(anomalies)
