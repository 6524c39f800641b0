"""The operator's levers: drain, quarantine, terminate. Each goes through the transition table, with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import partial

from remuda.controlplane.context import Context, map_concurrently, read_config, skip_unreadable, transition
from remuda.domain.errors import Conflict, RemudaError, UserError
from remuda.domain.instance import ABSORBING, LIVE, Instance, State, describe_retirement
from remuda.domain.transitions import Actor, End, Quarantine, Retire, RetireReason

#: How often a record that moves meanwhile is tried again.
TRIES = 4
MAX_REASON = 200


#: Events that an operator may trigger.
OperatorEvent = Retire | Quarantine | End


class OperatorAction(StrEnum):
    DRAIN = "drain"
    QUARANTINE = "quarantine"
    TERMINATE = "terminate"


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceSelector:
    """Which instances: by id, or all that match what is given."""

    instance_ids: tuple[str, ...] = ()
    everything: bool = False
    resource_class: str = ""
    ami: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionOutcome:
    instance_id: str
    state: State
    #: Whether this call changed it, or would (with `dry_run`).
    done: bool
    why: str
    run_id: str = ""
    #: A job runs on it.
    busy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorResult:
    lever: OperatorAction
    dry_run: bool
    pulled: tuple[ActionOutcome, ...]
    errors: tuple[str, ...] = field(default=())

    @property
    def done(self) -> tuple[ActionOutcome, ...]:
        return tuple(item for item in self.pulled if item.done)


async def choose(context: Context, choice: InstanceSelector) -> list[Instance]:
    """Live ones only. An id that is not known is an error before anything is done."""
    await read_config(context)
    if choice.instance_ids:
        records = await context.store.get_many(choice.instance_ids)
        missing = sorted(set(choice.instance_ids) - set(records))
        if missing:
            raise UserError(
                f"instance {missing[0]} is not known to pool {context.pool_name}",
                field="INSTANCE",
                fix="remuda status lists those that are",
            )
        return [records[instance_id] for instance_id in dict.fromkeys(choice.instance_ids)]
    found = await context.store.find(LIVE)
    if choice.resource_class:
        found = [item for item in found if item.resource_class == choice.resource_class]
    if choice.ami:
        machines = await context.compute.list_pool()
        made_of = {item.instance_id for item in machines if item.image == choice.ami}
        found = [item for item in found if item.instance_id in made_of]
    return sorted(found, key=lambda item: (item.created_at, item.instance_id))


async def drain(context: Context, instances: Sequence[Instance], *, reason: str, dry_run: bool) -> OperatorResult:
    """No run gets them any more. Those at work finish their run; refresh ends the idle ones."""
    event = Retire(reason=RetireReason.DRAINED, detail=reason[:MAX_REASON])
    return await _pull(context, OperatorAction.DRAIN, instances, event, dry_run=dry_run)


async def quarantine(
    context: Context, instances: Sequence[Instance], *, for_s: float, reason: str, dry_run: bool
) -> OperatorResult:
    """Out of the pool and kept for a look until the limit; again: the limit moves."""
    until = context.clock.now() + timedelta(seconds=for_s)
    event = Quarantine(detail=reason[:MAX_REASON], until=until)
    return await _pull(context, OperatorAction.QUARANTINE, instances, event, dry_run=dry_run)


async def terminate(context: Context, instances: Sequence[Instance], *, reason: str, dry_run: bool) -> OperatorResult:
    """Their end, now, jobs or not. Compute refuses what does not carry the pool's tag; refresh confirms the rest."""
    event = End(reason=RetireReason.TERMINATED_BY_OPERATOR, detail=reason[:MAX_REASON])
    result = await _pull(context, OperatorAction.TERMINATE, instances, event, dry_run=dry_run)
    # Those that were ending already are asked for once more: it does no harm.
    ending = [item.instance_id for item in result.pulled if item.done or item.state is State.TERMINATING]
    if dry_run or not ending:
        return result
    refused = await context.compute.terminate(ending)
    errors = [f"{instance_id}: {why}" for instance_id, why in refused.items()]
    return OperatorResult(lever=result.lever, dry_run=False, pulled=result.pulled, errors=(*result.errors, *errors))


async def _pull(
    context: Context, lever: OperatorAction, instances: Sequence[Instance], event: OperatorEvent, *, dry_run: bool
) -> OperatorResult:
    tell = partial(context.event_log.record, "unreadable")
    reports, _ = await skip_unreadable(context.store.get_reports([item.instance_id for item in instances]), tell)

    async def one(instance: Instance) -> ActionOutcome:
        report = reports.get(instance.instance_id)
        busy = report is not None and report.busy
        for _ in range(TRIES):
            nothing = _nothing_to_do(lever, instance)
            if nothing or dry_run:
                return _pulled(instance, nothing or _describe(event), done=not nothing, busy=busy)
            try:
                await transition(context, instance, event, by=Actor.OPERATOR, why=_describe(event))
            except Conflict as conflict:
                current = conflict.current
                if not isinstance(current, Instance) or current == instance:
                    return _pulled(instance, "its time is up: refresh retires it", done=False, busy=busy)
                instance = current
            else:
                return _pulled(instance, _describe(event), done=True, busy=busy)
        raise Conflict(f"the record of {instance.instance_id} keeps changing")

    pulled: list[ActionOutcome] = []
    errors: list[str] = []
    for instance, result in zip(instances, await map_concurrently(instances, one), strict=True):
        if isinstance(result, RemudaError):
            errors.append(f"{instance.instance_id}: {result.message}")
        else:
            pulled.append(result)
    return OperatorResult(lever=lever, dry_run=dry_run, pulled=tuple(pulled), errors=tuple(errors))


def _nothing_to_do(lever: OperatorAction, instance: Instance) -> str:
    """Why a lever changes nothing here, or empty: pulled twice is pulled once."""
    if instance.state in ABSORBING:
        return f"it is {instance.state} already ({instance.retire_text or 'unknown reason'})"
    if lever is OperatorAction.DRAIN and instance.retire_reason is not None:
        return f"it is retired already ({instance.retire_text})"
    return ""


def _describe(event: OperatorEvent) -> str:
    reason = RetireReason.QUARANTINED if isinstance(event, Quarantine) else event.reason
    return describe_retirement(reason, event.detail)


def _pulled(instance: Instance, why: str, *, done: bool, busy: bool) -> ActionOutcome:
    return ActionOutcome(
        instance_id=instance.instance_id, state=instance.state, run_id=instance.run_id, done=done, why=why, busy=busy
    )
