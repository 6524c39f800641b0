"""The conditional write per event: checks the row and the evidence, and returns the write as a `Change`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any

from remuda.domain.errors import IllegalTransition
from remuda.domain.holder import SetHolder, StartedJob
from remuda.domain.instance import (
    RETIREMENTS,
    SINGLE_USE,
    Actor,
    Assignment,
    Credential,
    HistoryEntry,
    Instance,
    RetireReason,
    State,
)
from remuda.domain.resources import PoolMessage, Reuse, Tier, normalize_repository
from remuda.domain.signals import Report, Verdict, boot_verdict, registration_verdict, removal_verdict
from remuda.domain.timestamps import after, to_milliseconds
from remuda.domain.transitions.table import (
    END_ROWS,
    ROWS_BY_NAME,
    Announce,
    Bind,
    Claim,
    Commit,
    Confirm,
    End,
    Equip,
    Event,
    Extend,
    Fill,
    ListenOn,
    Quarantine,
    Release,
    Renew,
    RenewCredential,
    Retire,
    ReturnToPool,
    Transition,
)

#: Maximum characters of a history entry's text and of a retire detail.
MAX_WHY = 300

_FIELDS = frozenset(item.name for item in fields(Instance))
_ROW_OF_EVENT: dict[type, str] = {
    Claim: "claim",
    Commit: "commit",
    Equip: "equip",
    Bind: "bind",
    ListenOn: "listen-on",
    Fill: "fill",
    Release: "release",
    Extend: "extend",
    RenewCredential: "credential",
    ReturnToPool: "pool",
    Announce: "announce",
    Renew: "renew",
    Retire: "retire",
    Quarantine: "quarantine",
    Confirm: "confirm",
}
#: Fields by which a run selects an instance, besides its tier.
_SELECTED_BY = ("resource_class", "instance_type", "usage_class", "cpu", "memory_mib")


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteCondition:
    """Condition on the stored record. The store checks it and writes in one atomic step."""

    #: None if there must be no record.
    state: State | None
    epoch: int
    #: Fields with the values that the record must have.
    equals: tuple[tuple[str, Any], ...] = ()
    #: Required token of the claim or launch, or None for any.
    claim: str | None = None
    #: The threshold must be later than this.
    threshold_after: datetime | None = None
    #: The threshold must not be later than this.
    threshold_at_or_before: datetime | None = None
    #: The record must have no retire reason.
    not_retired: bool = False
    #: The quarantine must not end later than this. Rejects the write if an operator quarantined the instance after the
    #: decision was made.
    max_quarantined_until: datetime | None = None
    #: Accepted tiers; empty for any.
    tiers: tuple[Tier, ...] = ()
    #: Required repository of the record, or None for any.
    repository: str | None = None

    def is_met_by(self, record: Instance | None) -> bool:
        if record is None or self.state is None:
            return record is None and self.state is None
        return (
            record.state is self.state
            and record.epoch == self.epoch
            and all(getattr(record, name) == value for name, value in self.equals)
            and (self.claim is None or record.claim == self.claim)
            and (self.threshold_after is None or record.threshold > self.threshold_after)
            and (self.threshold_at_or_before is None or record.threshold <= self.threshold_at_or_before)
            and not (self.not_retired and record.retire_reason is not None)
            and (
                self.max_quarantined_until is None
                or record.quarantined_until is None
                or record.quarantined_until <= self.max_quarantined_until
            )
            and (not self.tiers or record.tier in self.tiers)
            and (self.repository is None or record.repository == self.repository)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A conditional write: if `condition` is met, the store writes `sets` and adds `entry` to the history."""

    instance_id: str
    condition: WriteCondition
    sets: Mapping[str, Any]
    entry: HistoryEntry

    def applied_to(self, record: Instance | None) -> Instance:
        if record is None:
            return Instance(**self.sets)
        return replace(record, **self.sets)


def create(record: Instance, *, by: Actor, why: str) -> Change:
    """Write the record of a launched instance, if it has none."""
    if record.state is not State.CREATED or record.epoch != 1:
        raise IllegalTransition(f"{record.instance_id} cannot be created as {record.state} at epoch {record.epoch}")
    return _insert(ROWS_BY_NAME["create"], record, by=by, at=record.created_at, why=why)


def tombstone(record: Instance, *, by: Actor, now: datetime, why: str) -> Change:
    """Write a `terminating` record for a machine that has the pool's tags and no record."""
    if record.state is not State.TERMINATING:
        raise IllegalTransition(f"a tombstone for {record.instance_id} must be terminating, not {record.state}")
    return _insert(ROWS_BY_NAME["tombstone"], record, by=by, at=now, why=why)


def _insert(row: Transition, record: Instance, *, by: Actor, at: datetime, why: str) -> Change:
    if by not in row.by:
        raise _illegal(record, f"{row.name} by {by}")
    return Change(
        instance_id=record.instance_id,
        condition=WriteCondition(state=None, epoch=record.epoch),
        sets={name: getattr(record, name) for name in sorted(_FIELDS)},
        entry=HistoryEntry(
            at=to_milliseconds(at),
            transition=row.name,
            source=None,
            target=record.state,
            epoch=record.epoch,
            holder=record.latest_holder,
            by=by,
            why=why[:MAX_WHY],
            retire_reason=RetireReason.UNRECORDED if record.state is State.TERMINATING else None,
        ),
    )


def presumed_idle(message: PoolMessage, *, now: datetime) -> Instance:
    """Return the idle record that a pool message describes. A claim may start from it: its condition verifies it."""
    return Instance(
        instance_id=message.id,
        state=State.IDLE,
        epoch=message.epoch,
        threshold=now,
        resource_class=message.resource_class,
        instance_type=message.instance_type,
        usage_class=message.usage_class,
        cpu=message.cpu,
        memory_mib=message.memory_mib,
        tier=message.tier,
        repository=message.repository,
        created_at=now,
    )


def advance(instance: Instance, event: Event, *, by: Actor, now: datetime, why: str) -> Change:
    """Return the write for an event. Raise `IllegalTransition` if the table or the evidence forbids it."""
    row = _find_row(instance, event, by)
    now = to_milliseconds(now)
    condition, sets = _effect(instance, event, now)
    if row.target is not None:
        sets = {"state": row.target, **sets}
    return Change(
        instance_id=instance.instance_id,
        condition=condition,
        sets=sets,
        entry=HistoryEntry(
            at=now,
            transition=row.name,
            source=instance.state,
            target=row.target or instance.state,
            epoch=int(sets.get("epoch", instance.epoch)),
            holder=sets.get("holder") or instance.latest_holder,
            by=by,
            why=why[:MAX_WHY],
            retire_reason=_end_reason(instance, event) if isinstance(event, End) else None,
        ),
    )


def _end_reason(instance: Instance, event: End) -> RetireReason:
    """Return the reason for the history. A retired instance that ends as planned keeps its first reason."""
    return (instance.retire_reason or event.reason) if event.reason in RETIREMENTS else event.reason


def _find_row(instance: Instance, event: Event, by: Actor) -> Transition:
    name = type(event).__name__.lower()
    row = END_ROWS.get(instance.state) if isinstance(event, End) else ROWS_BY_NAME[_ROW_OF_EVENT[type(event)]]
    if row is None or instance.state not in row.sources:
        raise _illegal(instance, f"{name} from {instance.state}")
    if by not in row.by:
        raise _illegal(instance, f"{name} from {instance.state} by {by}")
    if by is Actor.PROVISION and isinstance(event, End | Release) and not event.claim:
        raise _illegal(instance, f"{name} by a provision that does not name its claim")
    if isinstance(event, End):
        if event.reason not in row.reasons:
            raise _illegal(instance, f"{name} from {instance.state} because {event.reason}")
        _check_end(instance, event)
        if (by is Actor.OPERATOR) is not (event.reason is RetireReason.TERMINATED_BY_OPERATOR):
            raise _illegal(instance, f"{name} by {by} because {event.reason}")
    if isinstance(event, Retire) and event.reason not in RETIREMENTS:
        raise _illegal(instance, f"retirement because {event.reason}")
    return row


def _illegal(instance: Instance, what: str) -> IllegalTransition:
    return IllegalTransition(f"no {what} (instance {instance.instance_id}, epoch {instance.epoch})", history=[instance])


def _check_end(instance: Instance, event: End) -> None:
    if event.reason is RetireReason.FAILED:
        releasing = instance.state is State.RELEASING
        verdict = (removal_verdict if releasing else registration_verdict)(event.report, instance.epoch)
        if verdict is not Verdict.FAILED:
            raise _illegal(instance, "end for failure without a failed signal of this epoch")
    if event.reason is RetireReason.TIMED_OUT and instance.state is State.CLAIMED and not event.claim:
        raise _illegal(instance, "end for a timeout that is not that of its claim")
    if event.reason in RETIREMENTS and instance.state is State.RELEASING:
        clean = removal_verdict(event.report, instance.epoch) is Verdict.OK
        if not clean:
            raise _illegal(instance, "retirement of a releasing instance before its OK")


def _effect(instance: Instance, event: Event, now: datetime) -> tuple[WriteCondition, dict[str, Any]]:
    alive = WriteCondition(state=instance.state, epoch=instance.epoch, threshold_after=now)
    # A threshold computed from this record must fit the quarantine, which an operator may move meanwhile.
    timed = replace(alive, equals=(("quarantined_until", instance.quarantined_until),))
    match event:
        case Claim():
            return _claim(instance, event, now)
        case Commit() | Equip() | Bind() | ListenOn() | Fill():
            return _effect_of_start(instance, event, alive, timed, now)
        case Release():
            return _without_new_job(instance, replace(timed, claim=event.claim)), _release(instance, event, now)
        case Extend():
            return _extend(instance, event, timed, now)
        case RenewCredential():
            return alive, {"assignment": _with_credential(instance, event.credential)}
        case ReturnToPool():
            return _pool(instance, event, timed, now)
        case Announce():
            return alive, {"announced_at": now}
        case Renew():
            return _not_shortened(replace(alive, not_retired=True), {"threshold": event.until})
        case Retire():
            return _retire(instance, event, alive)
        case Quarantine():
            return _quarantine(instance, event, alive)
        case End():
            return _end(instance, event, now)
        case Confirm():
            condition = WriteCondition(state=instance.state, epoch=instance.epoch)
            return condition, {"forget_at": after(now, event.keep_records_s)}


def _effect_of_start(
    instance: Instance,
    event: Commit | Equip | Bind | ListenOn | Fill,
    alive: WriteCondition,
    timed: WriteCondition,
    now: datetime,
) -> tuple[WriteCondition, dict[str, Any]]:
    match event:
        case Commit():
            return _commit(instance, event, alive, now)
        case Equip():
            return _equip(instance, event, timed, now)
        case Bind():
            return _bind(instance, event, timed, now)
        case ListenOn():
            return _listen_on(instance, event, timed, now)
        case Fill():
            return _fill(instance, event, timed, now)


def _without_new_job(instance: Instance, condition: WriteCondition) -> WriteCondition:
    """The condition, and for an instance of a runner set that no one has recorded a job meanwhile.

    Example: the release or the end of a listening runner must not overwrite the job that a message has named since.
    """
    if not isinstance(instance.holder, SetHolder):
        return condition
    return replace(condition, equals=(*condition.equals, ("holder", instance.holder)))


def _claim(instance: Instance, event: Claim, now: datetime) -> tuple[WriteCondition, dict[str, Any]]:
    tiers = event.reuse.tiers(event.tier)
    if instance.tier not in tiers:
        raise _illegal(instance, f"claim of a {instance.tier} instance for a {event.tier} run (reuse {event.reuse})")
    only_repository = event.repository if event.repository == instance.repository else ""
    if event.reuse is Reuse.SAME_REPO and not only_repository:
        raise _illegal(instance, f"claim of an instance of {instance.repository!r} for a run of {event.repository!r}")
    condition = WriteCondition(
        state=State.IDLE,
        epoch=instance.epoch,
        equals=tuple((name, getattr(instance, name)) for name in _SELECTED_BY),
        threshold_after=now + timedelta(seconds=event.margin_s),
        not_retired=True,
        tiers=tiers,
        # The record must confirm the repository; the pool message alone does not prove it.
        repository=only_repository or None,
    )
    return condition, {
        "epoch": instance.epoch + 1,
        "tier": event.tier,
        "repository": only_repository,
        "holder": event.holder,
        "last_holder": None,
        "claim": event.claim,
        "scope": event.scope,
        "threshold": to_milliseconds(event.threshold),
        "assignment": event.assignment,
        "announced_at": None,
        "run_deadline": None,
    }


def _commit(
    instance: Instance, event: Commit, alive: WriteCondition, now: datetime
) -> tuple[WriteCondition, dict[str, Any]]:
    if registration_verdict(event.report, instance.epoch) is not Verdict.OK:
        raise _illegal(instance, "commit without UD_REG_OK of this epoch")
    return replace(alive, claim=event.claim), {
        "threshold": after(now, event.max_runtime_s),
        "assignment": _with_credential(instance, None),
    }


def _equip(
    instance: Instance, event: Equip, timed: WriteCondition, now: datetime
) -> tuple[WriteCondition, dict[str, Any]]:
    is_held = isinstance(instance.holder, SetHolder)
    if not is_held or instance.assignment is None or not event.jit_config or not event.runner_id:
        raise _illegal(instance, "just-in-time registration of an instance that no runner set holds")
    if instance.state is State.CREATED and boot_verdict(event.report, instance.epoch) is not Verdict.OK:
        raise _illegal(instance, "start of the runner without UD_OK of this epoch")
    assignment = replace(
        instance.assignment,
        credential=None,
        jit_config=event.jit_config,
        runner_id=event.runner_id,
        any_run=True,
        # Also on a new instance: it would pass or refuse the same job by chance otherwise.
        only_trusted=event.strict and instance.tier is Tier.TRUSTED,
    )
    # An instance that was retired meanwhile gets no job.
    return replace(timed, claim=event.claim, not_retired=instance.retire_reason is None), {
        **_listening(now, event.listening_time_s, event.max_runtime_s),
        "assignment": assignment,
    }


def _listening(now: datetime, listening_time_s: float, max_runtime_s: float) -> dict[str, Any]:
    threshold = after(now, listening_time_s)
    return {"threshold": threshold, "run_deadline": after(threshold, max_runtime_s)}


def _bind(
    instance: Instance, event: Bind, timed: WriteCondition, now: datetime
) -> tuple[WriteCondition, dict[str, Any]]:
    assignment, holder = instance.assignment, instance.holder
    if not isinstance(holder, SetHolder) or holder.job is not None or assignment is None:
        raise _illegal(instance, "job on an instance that no runner set holds, or that has one already")
    by_event = bool(event.runner_name) and event.runner_name == assignment.runner_name
    if not by_event and not _has_had_job(event.report, instance.epoch):
        raise _illegal(instance, "job without an event or a report about this epoch's runner")
    # Without the event, no one knows whose code has run.
    tier = event.tier if by_event else Tier.UNTRUSTED
    repository = normalize_repository(event.repository) if by_event else ""
    if instance.tier is Tier.UNTRUSTED:
        tier = Tier.UNTRUSTED
    is_first_use = instance.uses == 0 and not instance.repository
    job = StartedJob(run_id=event.run_id if by_event else "")
    sets: dict[str, Any] = {
        "holder": replace(holder, job=job),
        "tier": tier,
        "repository": repository if is_first_use or repository == instance.repository else "",
        "threshold": after(now, event.max_runtime_s),
        "run_deadline": None,
        "assignment": replace(assignment, credential=None, jit_config="", tier=tier, repository=repository),
    }
    # The first reason to retire stands, also one that was written meanwhile.
    # The set's trust may have been lowered since it got the instance, which has served trusted jobs.
    is_lowered = tier is Tier.UNTRUSTED and Tier.TRUSTED in {event.set_tier, instance.tier}
    is_retired = is_lowered and instance.retire_reason is None
    if is_retired:
        detail = f"run {job.run_id}" if job.run_id else "its run is unknown"
        sets |= {"retire_reason": RetireReason.UNTRUSTED_JOB, "retire_detail": detail}
    earliest = now - timedelta(seconds=event.margin_s)
    return _without_new_job(instance, replace(timed, threshold_after=earliest, not_retired=is_retired)), sets


def _has_had_job(report: Report | None, epoch: int) -> bool:
    """Whether the agent reports that a job runs, or has run, in this epoch."""
    if report is None or report.epoch != epoch:
        return False
    return report.busy or report.spent_epoch == epoch


def _listen_on(
    instance: Instance, event: ListenOn, timed: WriteCondition, now: datetime
) -> tuple[WriteCondition, dict[str, Any]]:
    if instance.is_bound:
        raise _illegal(instance, "renewal of a runner that has a job or that no set holds")
    if event.report.epoch != instance.epoch or event.report.busy or not event.report.listening:
        raise _illegal(instance, "renewal of a runner that does not listen in this epoch, or is busy")
    sets = {
        **_listening(now, event.listening_time_s, event.max_runtime_s),
        # Its listener has started, so the configuration is not needed any more.
        "assignment": _with_credential(instance, None),
    }
    return _not_shortened(_without_new_job(instance, timed), sets)


def _fill(
    instance: Instance, event: Fill, timed: WriteCondition, now: datetime
) -> tuple[WriteCondition, dict[str, Any]]:
    if not isinstance(instance.holder, SetHolder) or instance.retire_reason is not None:
        raise _illegal(instance, "pooling of a new instance that no runner set launched, or that is retired")
    if boot_verdict(event.report, instance.epoch) is not Verdict.OK:
        raise _illegal(instance, "pooling of a new instance without UD_OK of this epoch")
    return replace(timed, claim=event.claim, not_retired=True), {
        "holder": None,
        "last_holder": instance.holder,
        "assignment": None,
        "announced_at": None,
        "threshold": after(now, event.idle_time_s),
    }


def _release(instance: Instance, event: Release, now: datetime) -> dict[str, Any]:
    assignment = _with_credential(instance, event.credential)
    if assignment is not None and event.deregistered:
        assignment = replace(assignment, runner_id=0)
    return {
        "holder": None,
        "last_holder": instance.holder,
        "run_deadline": instance.deadline(busy=True),
        "threshold": _at_least_quarantine(instance, after(now, event.release_time_s)),
        "assignment": assignment,
    }


def _not_shortened(condition: WriteCondition, sets: dict[str, Any]) -> tuple[WriteCondition, dict[str, Any]]:
    """Reject a write that is late, or made with a slow clock, if another one has given the instance more time."""
    return replace(condition, threshold_at_or_before=sets["threshold"]), sets


def _retire(instance: Instance, event: Retire, alive: WriteCondition) -> tuple[WriteCondition, dict[str, Any]]:
    # The first reason stands: a drain must not overwrite a quarantine that was written later.
    condition = replace(alive, not_retired=instance.retire_reason is None)
    if event.reason is RetireReason.UNTRUSTED_JOB:
        condition = _without_new_job(instance, condition)
    return condition, {"retire_reason": event.reason, "retire_detail": event.detail[:MAX_WHY]}


def _quarantine(instance: Instance, event: Quarantine, alive: WriteCondition) -> tuple[WriteCondition, dict[str, Any]]:
    until = to_milliseconds(event.until)
    kept = {
        "retire_reason": RetireReason.QUARANTINED,
        "retire_detail": event.detail[:MAX_WHY],
        "quarantined_until": until,
    }
    # In the other states the run's own limit stays in force.
    if instance.state is State.IDLE:
        return alive, {**kept, "threshold": until}
    if instance.state is State.RELEASING:
        # A job may still run: a short quarantine must not reduce its time.
        return _not_shortened(alive, {**kept, "threshold": max(instance.threshold, until)})
    return alive, kept


def _at_least_quarantine(instance: Instance, at: datetime) -> datetime:
    """Return the later of a time and the end of the quarantine."""
    return max(at, instance.quarantined_until) if instance.quarantined_until is not None else at


def _extend(
    instance: Instance, event: Extend, timed: WriteCondition, now: datetime
) -> tuple[WriteCondition, dict[str, Any]]:
    if not event.report.busy:
        raise _illegal(instance, "extension without a running job")
    wanted = after(now, event.extension_s)
    latest = instance.run_deadline or instance.threshold
    condition = replace(timed, threshold_after=now - timedelta(seconds=event.margin_s))
    return _not_shortened(condition, {"threshold": max(instance.threshold, min(wanted, latest))})


def _pool(
    instance: Instance, event: ReturnToPool, timed: WriteCondition, now: datetime
) -> tuple[WriteCondition, dict[str, Any]]:
    if removal_verdict(event.report, instance.epoch) is not Verdict.OK:
        raise _illegal(instance, "pooling without UD_REMOVE_REG_REMOVE_RUN_OK of this epoch")
    if instance.retire_reason is not None and not instance.is_quarantined(now):
        raise _illegal(instance, f"pooling of an instance that is retired ({instance.retire_text})")
    return replace(timed, not_retired=instance.retire_reason is None), {
        "assignment": None,
        "announced_at": None,
        "run_deadline": None,
        "uses": instance.uses + 1,
        "threshold": _at_least_quarantine(instance, after(now, event.idle_time_s)),
    }


def _end(instance: Instance, event: End, now: datetime) -> tuple[WriteCondition, dict[str, Any]]:
    expired = event.reason is RetireReason.EXPIRED
    condition = WriteCondition(
        state=instance.state,
        epoch=instance.epoch,
        threshold_at_or_before=now - timedelta(seconds=event.margin_s) if expired else None,
        claim=event.claim,
        max_quarantined_until=now if _respects_quarantine(instance, event) else None,
    )
    reason, detail = _final_reason(instance, event)
    return _without_new_job(instance, condition), {
        "holder": None,
        "last_holder": instance.latest_holder,
        "assignment": None,
        "announced_at": None,
        "retire_reason": reason,
        "retire_detail": detail[:MAX_WHY],
        # In the past for every reader, so that the sweep for expired instances finds it too.
        "threshold": now,
    }


def _respects_quarantine(instance: Instance, event: End) -> bool:
    """Whether a quarantine prevents this end: it is planned, or its job is over."""
    failed_release = event.reason is RetireReason.FAILED and instance.state is State.RELEASING
    return event.reason in RETIREMENTS or failed_release


def _final_reason(instance: Instance, event: End) -> tuple[RetireReason, str]:
    """Return the reason that the record keeps: the first one, unless it only says that the instance is single-use."""
    first = instance.retire_reason
    if first is None or (first in SINGLE_USE and event.reason not in RETIREMENTS):
        return event.reason, event.detail
    return first, instance.retire_detail


def _with_credential(instance: Instance, credential: Credential | None) -> Assignment | None:
    if instance.assignment is None:
        return None
    return replace(instance.assignment, credential=credential, jit_config="")
