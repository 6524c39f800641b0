"""Operator actions: drain, quarantine and terminate instances. Idempotent; each is a transition with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from functools import partial

from remuda.controlplane.context import (
    CONFLICT_ATTEMPTS,
    Context,
    find_by_prefix,
    map_concurrently,
    read_config,
    skip_unreadable,
    transition,
)
from remuda.domain.errors import Conflict, RemudaError, UserError
from remuda.domain.holder import Holder
from remuda.domain.instance import ABSORBING, LIVE, Instance, State, describe_retirement
from remuda.domain.resources import MAX_SHOWN
from remuda.domain.text import quote, suggest
from remuda.domain.transitions import Actor, End, Quarantine, Retire, RetireReason

#: Maximum number of characters of an operator's reason.
MAX_REASON = 200

#: Events that an operator may trigger.
OperatorEvent = Retire | Quarantine | End


class OperatorAction(StrEnum):
    DRAIN = "drain"
    QUARANTINE = "quarantine"
    TERMINATE = "terminate"


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceSelector:
    """Instances by id, or all live instances that match the given class and image."""

    instance_ids: tuple[str, ...] = ()
    everything: bool = False
    resource_class: str = ""
    ami: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionOutcome:
    """The effect of an action on one instance."""

    instance_id: str
    state: State
    #: Whether the action changed the instance; with `dry_run`, whether it would.
    done: bool
    why: str
    holder: Holder | None = None
    #: Whether a job runs on it.
    busy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorResult:
    action: OperatorAction
    dry_run: bool
    outcomes: tuple[ActionOutcome, ...]
    errors: tuple[str, ...] = ()

    @property
    def done(self) -> tuple[ActionOutcome, ...]:
        return tuple(item for item in self.outcomes if item.done)


async def select_instances(context: Context, selector: InstanceSelector) -> list[Instance]:
    """Return the selected instances. The beginning of an id is enough if it is unique; an unknown id is an error."""
    config = await read_config(context)
    if selector.instance_ids:
        records = dict(await context.store.get_many(selector.instance_ids))
        unknown = sorted(set(selector.instance_ids) - set(records))
        live = await context.store.find(LIVE) if unknown else ()
        for missing in unknown:
            match = find_by_prefix(live, missing)
            if match is None:
                raise UserError(
                    f"instance {missing} is not known to pool {context.pool_name}",
                    field="INSTANCE",
                    fix="list the known instances with 'remuda status --wide'",
                )
            records[missing] = match
        chosen = {records[each].instance_id: records[each] for each in selector.instance_ids}
        return list(chosen.values())
    found = await context.store.find(LIVE)
    if selector.resource_class:
        # Instances of a class that the configuration no longer has may still exist.
        known = dict.fromkeys([*(each.name for each in config.classes), *(item.resource_class for item in found)])
        if selector.resource_class not in known:
            raise UserError(
                f"--resource-class is {quote(selector.resource_class, MAX_SHOWN)}, "
                f"which is not a class of pool {context.pool_name}",
                field="--resource-class",
                fix=suggest(selector.resource_class, known),
            )
        found = [item for item in found if item.resource_class == selector.resource_class]
    if selector.ami:
        machines = await context.compute.list_pool()
        matching = {item.instance_id for item in machines if item.image == selector.ami}
        found = [item for item in found if item.instance_id in matching]
    return sorted(found, key=lambda item: (item.created_at, item.instance_id))


async def drain(context: Context, instances: Sequence[Instance], *, reason: str, dry_run: bool) -> OperatorResult:
    """Give the instances no further run. Running jobs finish; refresh ends idle instances."""
    event = Retire(reason=RetireReason.DRAINED, detail=reason[:MAX_REASON])
    return await _apply(context, OperatorAction.DRAIN, instances, event, dry_run=dry_run)


async def quarantine(
    context: Context, instances: Sequence[Instance], *, for_s: float, reason: str, dry_run: bool
) -> OperatorResult:
    """Remove the instances from the pool and keep them for `for_s` seconds. A second call moves the end."""
    until = context.clock.now() + timedelta(seconds=for_s)
    event = Quarantine(detail=reason[:MAX_REASON], until=until)
    return await _apply(context, OperatorAction.QUARANTINE, instances, event, dry_run=dry_run)


async def terminate(context: Context, instances: Sequence[Instance], *, reason: str, dry_run: bool) -> OperatorResult:
    """End the instances now, with their jobs. Machines without the pool's tag are refused; refresh confirms the end."""
    event = End(reason=RetireReason.TERMINATED_BY_OPERATOR, detail=reason[:MAX_REASON])
    result = await _apply(context, OperatorAction.TERMINATE, instances, event, dry_run=dry_run)
    # Includes instances that were terminating before: an earlier call to EC2 may have been lost.
    ending = [item.instance_id for item in result.outcomes if item.done or item.state is State.TERMINATING]
    if dry_run or not ending:
        return result
    failures = await context.compute.terminate(ending)
    errors = [f"{instance_id}: {why}" for instance_id, why in failures.items()]
    return replace(result, errors=(*result.errors, *errors))


async def _apply(
    context: Context, action: OperatorAction, instances: Sequence[Instance], event: OperatorEvent, *, dry_run: bool
) -> OperatorResult:
    report_error = partial(context.event_log.record, "unreadable")
    ids = [item.instance_id for item in instances]
    reports, _ = await skip_unreadable(context.store.get_reports(ids), report_error)
    why = _describe(event)

    async def one(instance: Instance) -> ActionOutcome:
        report = reports.get(instance.instance_id)
        busy = report is not None and report.busy
        for _ in range(CONFLICT_ATTEMPTS):
            skip_reason = _skip_reason(action, instance)
            if skip_reason or dry_run:
                return _outcome(instance, skip_reason or why, done=not skip_reason, busy=busy)
            try:
                await transition(context, instance, event, by=Actor.OPERATOR, why=why)
            except Conflict as conflict:
                current = conflict.current
                if not isinstance(current, Instance) or current == instance:
                    return _outcome(instance, "its time is up; refresh will retire it", done=False, busy=busy)
                instance = current
            else:
                return _outcome(instance, why, done=True, busy=busy)
        raise Conflict(f"the record of {instance.instance_id} keeps changing")

    outcomes: list[ActionOutcome] = []
    errors: list[str] = []
    for instance, result in zip(instances, await map_concurrently(instances, one), strict=True):
        if isinstance(result, RemudaError):
            errors.append(f"{instance.instance_id}: {result.message}")
        else:
            outcomes.append(result)
    return OperatorResult(action=action, dry_run=dry_run, outcomes=tuple(outcomes), errors=tuple(errors))


def _skip_reason(action: OperatorAction, instance: Instance) -> str:
    """Why the action does not apply to the instance; empty if it does."""
    if instance.state in ABSORBING:
        return f"already {instance.state} ({instance.retire_text or 'unknown reason'})"
    if action is OperatorAction.DRAIN and instance.retire_reason is not None:
        return f"already retired ({instance.retire_text})"
    return ""


def _describe(event: OperatorEvent) -> str:
    reason = RetireReason.QUARANTINED if isinstance(event, Quarantine) else event.reason
    return describe_retirement(reason, event.detail)


def _outcome(instance: Instance, why: str, *, done: bool, busy: bool) -> ActionOutcome:
    return ActionOutcome(
        instance_id=instance.instance_id, state=instance.state, holder=instance.holder, done=done, why=why, busy=busy
    )
