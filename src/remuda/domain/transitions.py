"""The table of an instance's transitions and the one function that applies it.

`TRANSITIONS` is the documentation: the state diagram in the docs is generated from it. Every row is one conditional
write on (state, epoch). `advance` checks the row and the evidence for it and returns the write as a `Change`; a store
carries it out where its guard holds and refuses it with the winner's record where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from remuda.domain.errors import IllegalTransition
from remuda.domain.instance import (
    BORN_RETIRED,
    EPHEMERAL,
    NEVER_REUSED,
    Assignment,
    Credential,
    HistoryEntry,
    Instance,
    State,
)
from remuda.domain.resources import PoolMessage, Reuse, Tier
from remuda.domain.signals import Report, Verdict, registration_verdict, removal_verdict
from remuda.domain.timestamps import after, to_milliseconds

#: What a history entry may say at most.
MAX_WHY = 300

_FIELDS = frozenset(item.name for item in fields(Instance))


class Actor(StrEnum):
    PROVISION = "provision"
    RELEASE = "release"
    REFRESH = "refresh"
    SCALE_DOWN = "scale-down"
    #: A person, by `drain`, `quarantine` or `terminate`.
    OPERATOR = "operator"


class Cause(StrEnum):
    """Why an instance ends."""

    EXPIRED = "expired"
    FAILED = "failed"
    TIMED_OUT = "timed-out"
    RELEASED = "released"
    RETIRED = "retired"
    GONE = "gone"
    UNRECORDED = "unrecorded"
    #: A person said so.
    ORDERED = "ordered"


#: Retirements, by how their reasons begin.
_RETIREMENTS = {
    "spot notice": "spot-notice",
    "too old": "too-old",
    "used ": "used-up",
    "drained": "drained",
    "quarantined": "quarantined",
    NEVER_REUSED: "never-reused",
    EPHEMERAL: "ephemeral",
}
#: Every way in which an end is counted.
ENDINGS: tuple[str, ...] = (*(cause.value for cause in Cause), *_RETIREMENTS.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """One row of the table."""

    name: str
    #: None stands for: no record.
    sources: frozenset[State | None]
    #: None stands for: the state stays.
    target: State | None
    by: tuple[Actor, ...]
    when: str
    effect: str
    #: For ends: what may cause one from these states.
    causes: frozenset[Cause] = frozenset()


def _row(  # noqa: PLR0917 - a row of a table reads by position
    name: str,
    sources: tuple[State | None, ...],
    target: State | None,
    by: tuple[Actor, ...],
    when: str,
    effect: str,
    causes: tuple[Cause, ...] = (),
) -> Transition:
    return Transition(
        name=name,
        sources=frozenset(sources),
        target=target,
        by=by,
        when=when,
        effect=effect,
        causes=frozenset(causes),
    )


_P, _L, _R, _S = Actor.PROVISION, Actor.RELEASE, Actor.REFRESH, Actor.SCALE_DOWN
_O = Actor.OPERATOR
_ENDED = "run and assignment cleared; threshold = now"

TRANSITIONS: tuple[Transition, ...] = (
    _row(
        "create",
        (None,),
        State.CREATED,
        (_P,),
        "no record",
        "epoch 1; threshold = provision deadline; retired from birth where it is never to be used again",
    ),
    _row(
        "tombstone",
        (None,),
        State.TERMINATING,
        (_P, _R),
        "EC2 instance with our tags, no record past a grace, or rolled back",
        "locked",
        (Cause.UNRECORDED,),
    ),
    _row(
        "claim",
        (State.IDLE,),
        State.CLAIMED,
        (_P,),
        "message's epoch; tier and repository fit the pool's reuse policy; not retired",
        "epoch + 1; run, owner, assignment; tier falls, never rises; threshold = provision deadline",
    ),
    _row(
        "commit",
        (State.CREATED, State.CLAIMED),
        State.RUNNING,
        (_P,),
        "UD_REG_OK of this epoch, by its owner",
        "threshold = now + max runtime; registration credential dropped",
    ),
    _row(
        "release",
        (State.CLAIMED, State.RUNNING),
        State.RELEASING,
        (_P, _L, _R),
        "provision released or failed",
        "run cleared; threshold = now + release time; removal credential given",
    ),
    _row(
        "extend",
        (State.RELEASING,),
        None,
        (_L, _R),
        "the agent reports a running job",
        "threshold = now + an extension, at most the run's deadline",
    ),
    _row("credential", (State.RELEASING,), None, (_L, _R), "it expires before the threshold", "credential only"),
    _row(
        "pool",
        (State.RELEASING,),
        State.IDLE,
        (_L, _R),
        "UD_REMOVE_REG_REMOVE_RUN_OK of this epoch, not retired",
        "credential dropped; uses + 1; threshold = now + idle time",
    ),
    _row("announce", (State.IDLE,), None, (_L, _R), "never announced, or long ago", "announced now"),
    _row("renew", (State.IDLE,), None, (_S,), "within the idle quota and the maximum age", "threshold only"),
    _row(
        "retire",
        (State.CREATED, State.CLAIMED, State.RUNNING, State.RELEASING, State.IDLE),
        None,
        (_L, _R, _O),
        "spot notice, or drained",
        "not pooled again",
    ),
    _row(
        "quarantine",
        (State.CREATED, State.CLAIMED, State.RUNNING, State.RELEASING, State.IDLE),
        None,
        (_O,),
        "an operator wants a look at it",
        "not claimed again; kept until a limit, by its threshold once it is idle or releasing",
    ),
    _row(
        "end-created",
        (State.CREATED,),
        State.TERMINATING,
        (_P, _L, _R, _O),
        "failed, timed out, released, expired, gone from EC2, ordered",
        _ENDED,
        (Cause.FAILED, Cause.TIMED_OUT, Cause.RELEASED, Cause.EXPIRED, Cause.GONE, Cause.ORDERED),
    ),
    _row(
        "end-claimed",
        (State.CLAIMED,),
        State.TERMINATING,
        (_P, _R, _O),
        "failed signal, owner's timeout, expired, gone, ordered",
        _ENDED,
        (Cause.FAILED, Cause.TIMED_OUT, Cause.EXPIRED, Cause.GONE, Cause.ORDERED),
    ),
    _row(
        "end-running",
        (State.RUNNING,),
        State.TERMINATING,
        (_R, _O),
        "expired, UD_REG_FAILED of this epoch, gone, ordered",
        _ENDED,
        (Cause.EXPIRED, Cause.FAILED, Cause.GONE, Cause.ORDERED),
    ),
    _row(
        "end-releasing",
        (State.RELEASING,),
        State.TERMINATING,
        (_L, _R, _O),
        "UD_REMOVE_*_FAILED of this epoch; OK of this epoch and retired; expired; gone; ordered",
        _ENDED,
        (Cause.FAILED, Cause.RETIRED, Cause.EXPIRED, Cause.GONE, Cause.ORDERED),
    ),
    _row(
        "end-idle",
        (State.IDLE,),
        State.TERMINATING,
        (_R, _O),
        "expired, too old, too many uses, spot notice, reuse is never, gone, ordered",
        _ENDED,
        (Cause.EXPIRED, Cause.RETIRED, Cause.GONE, Cause.ORDERED),
    ),
    _row("confirm", (State.TERMINATING,), State.TERMINATED, (_R,), "EC2 confirmed", "kept for reports, then forgotten"),
)

_BY_NAME = {row.name: row for row in TRANSITIONS}
_ENDS = {
    source: row
    for row in TRANSITIONS
    if row.target is State.TERMINATING
    for source in row.sources
    if source is not None
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteCondition:
    """What must hold of the stored record for a write to happen, checked and written in one step."""

    #: None: there must be no record.
    state: State | None
    epoch: int
    #: Fields with the values that they must have: what a hint says of an instance is proven by its record.
    offered: tuple[tuple[str, Any], ...] = ()
    #: Whose assignment it must be, where that matters.
    owner: str | None = None
    #: The threshold must lie after this time.
    threshold_after: datetime | None = None
    #: The threshold must not lie after this time.
    threshold_at_or_before: datetime | None = None
    #: The record must not be retired.
    not_retired: bool = False
    #: The record must not be in quarantine beyond this time: one that nobody who decided on this write knew of.
    max_quarantined_until: datetime | None = None
    #: One of these it must be of; empty: of any.
    tiers: tuple[Tier, ...] = ()
    #: The only repository that it ever served, where that matters.
    repository: str | None = None

    def admits(self, record: Instance | None) -> bool:
        if record is None or self.state is None:
            return record is None and self.state is None
        return (
            record.state is self.state
            and record.epoch == self.epoch
            and all(getattr(record, name) == value for name, value in self.offered)
            and (self.owner is None or record.owner == self.owner)
            and (self.threshold_after is None or record.threshold > self.threshold_after)
            and (self.threshold_at_or_before is None or record.threshold <= self.threshold_at_or_before)
            and not (self.not_retired and record.retire)
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
    """A conditional write: where `guard` holds, `sets` is laid over the record and `entry` joins its history."""

    instance_id: str
    guard: WriteCondition
    sets: Mapping[str, Any]
    entry: HistoryEntry

    def applied_to(self, record: Instance | None) -> Instance:
        if record is None:
            return Instance(**self.sets)
        return replace(record, **self.sets)


def create(record: Instance, *, by: Actor, why: str) -> Change:
    """∅ → created."""
    if record.state is not State.CREATED or record.epoch != 1:
        raise IllegalTransition(f"{record.instance_id} cannot be born {record.state} at epoch {record.epoch}")
    return _birth(_BY_NAME["create"], record, by=by, at=record.created_at, why=why)


def tombstone(record: Instance, *, by: Actor, now: datetime, why: str) -> Change:
    """∅ → terminating, for a machine that has our tags and no record."""
    if record.state is not State.TERMINATING:
        raise IllegalTransition(f"a tombstone for {record.instance_id} must be terminating, not {record.state}")
    return _birth(_BY_NAME["tombstone"], record, by=by, at=now, why=why)


def _birth(row: Transition, record: Instance, *, by: Actor, at: datetime, why: str) -> Change:
    if by not in row.by:
        raise _illegal(record, f"{row.name} by {by}")
    return Change(
        instance_id=record.instance_id,
        guard=WriteCondition(state=None, epoch=record.epoch),
        sets={name: getattr(record, name) for name in sorted(_FIELDS)},
        entry=HistoryEntry(
            at=to_milliseconds(at),
            transition=row.name,
            source="",
            target=record.state.value,
            epoch=record.epoch,
            run_id=record.run_id or record.last_run_id,
            by=by.value,
            why=why[:MAX_WHY],
            cause=Cause.UNRECORDED.value if record.state is State.TERMINATING else "",
        ),
    )


def presumed(message: PoolMessage, *, now: datetime) -> Instance:
    """The idle record that a message hints at: enough to claim by, because the guard proves it."""
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


# What may happen to an instance. Each carries its own evidence.


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    run_id: str
    owner: str
    provision_id: str
    scope: str
    tier: Tier
    threshold: datetime
    assignment: Assignment
    #: The pool's policy, and the run's repository as records have it.
    reuse: Reuse = Reuse.SAME_TRUST
    repository: str = ""
    #: The clock margin: what is about to expire is not worth claiming.
    margin_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    owner: str
    report: Report | None
    max_runtime_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    release_time_s: float
    credential: Credential
    #: Set by a rollback: only the owner's own assignment.
    owner: str | None = None
    #: GitHub has confirmed that a registration made just in time is gone.
    deregistered: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Extend:
    report: Report
    #: For how long from now, at most until the run's deadline.
    extension_s: float
    #: Nobody ends it before its threshold and the margin: until then it can be saved.
    margin_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RenewCredential:
    credential: Credential


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnToPool:
    report: Report | None
    idle_time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Announce:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Renew:
    #: As it was decided: one that comes late lasts no longer for it.
    until: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Retire:
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    reason: str
    until: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    cause: Cause
    margin_s: float = 0.0
    #: Evidence for FAILED and for RETIRED out of `releasing`.
    report: Report | None = None
    #: Evidence for RETIRED.
    reason: str = ""
    owner: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirm:
    keep_records_s: float


Event = (
    Claim
    | Commit
    | Release
    | Extend
    | RenewCredential
    | ReturnToPool
    | Announce
    | Renew
    | Retire
    | Quarantine
    | End
    | Confirm
)


def advance(instance: Instance, event: Event, *, by: Actor, now: datetime, why: str) -> Change:
    """The write that carries out `event`, or `IllegalTransition` where the table or the evidence forbids it."""
    row = _find_row(instance, event, by)
    now = to_milliseconds(now)
    guard, sets = _effect(instance, event, now)
    if row.target is not None:
        sets = {"state": row.target, **sets}
    target = row.target or instance.state
    return Change(
        instance_id=instance.instance_id,
        guard=guard,
        sets=sets,
        entry=HistoryEntry(
            at=now,
            transition=row.name,
            source=instance.state.value,
            target=target.value,
            epoch=int(sets.get("epoch", instance.epoch)),
            run_id=str(sets.get("run_id") or instance.run_id or instance.last_run_id),
            by=by.value,
            why=why[:MAX_WHY],
            cause=_ending(instance, event) if isinstance(event, End) else "",
        ),
    )


def _ending(instance: Instance, event: End) -> str:
    """Which of `ENDINGS` it is."""
    if event.cause is not Cause.RETIRED:
        return event.cause.value
    reason = instance.retire or event.reason
    return next((kind for begin, kind in _RETIREMENTS.items() if reason.startswith(begin)), Cause.RETIRED.value)


_ROW_OF_EVENT: dict[type, str] = {
    Claim: "claim",
    Commit: "commit",
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


def _find_row(instance: Instance, event: Event, by: Actor) -> Transition:
    name = type(event).__name__.lower()
    row = _ENDS.get(instance.state) if isinstance(event, End) else _BY_NAME[_ROW_OF_EVENT[type(event)]]
    if row is None or instance.state not in row.sources:
        raise _illegal(instance, f"{name} from {instance.state}")
    if by not in row.by:
        raise _illegal(instance, f"{name} from {instance.state} by {by}")
    if by is Actor.PROVISION and isinstance(event, End | Release) and not event.owner:
        raise _illegal(instance, f"{name} by a provision that does not say who owns it")
    if isinstance(event, End):
        if event.cause not in row.causes:
            raise _illegal(instance, f"{name} from {instance.state} because {event.cause}")
        _check_end(instance, event)
        if (by is Actor.OPERATOR) is not (event.cause is Cause.ORDERED):
            raise _illegal(instance, f"{name} by {by} because {event.cause}")
    if isinstance(event, Retire | Quarantine) and not event.reason:
        raise _illegal(instance, "retirement without a reason")
    return row


def _illegal(instance: Instance, what: str) -> IllegalTransition:
    return IllegalTransition(f"no {what} (instance {instance.instance_id}, epoch {instance.epoch})", history=[instance])


def _check_end(instance: Instance, event: End) -> None:
    if event.cause is Cause.FAILED:
        releasing = instance.state is State.RELEASING
        verdict = (removal_verdict if releasing else registration_verdict)(event.report, instance.epoch)
        if verdict is not Verdict.FAILED:
            raise _illegal(instance, "end for failure without a failed signal of this epoch")
    if event.cause is Cause.TIMED_OUT and instance.state is State.CLAIMED and not event.owner:
        raise _illegal(instance, "end of a claim for a timeout that is not its owner's")
    if event.cause is Cause.RETIRED:
        if not (event.reason or instance.retire):
            raise _illegal(instance, "retirement without a reason")
        clean = removal_verdict(event.report, instance.epoch) is Verdict.OK
        if instance.state is State.RELEASING and not clean:
            raise _illegal(instance, "retirement of a releasing instance before its OK")


def _effect(instance: Instance, event: Event, now: datetime) -> tuple[WriteCondition, dict[str, Any]]:
    alive = WriteCondition(state=instance.state, epoch=instance.epoch, threshold_after=now)
    # What is reckoned by the record's time must not cut short a quarantine that came meanwhile.
    timed = replace(alive, max_quarantined_until=_held(instance, now))
    match event:
        case Claim():
            return _claim(instance, event, now)
        case Commit():
            return _commit(instance, event, alive, now)
        case Release():
            return replace(timed, owner=event.owner), _release(instance, event, now)
        case Extend():
            return replace(timed, threshold_after=now - timedelta(seconds=event.margin_s)), _extend(
                instance, event, now
            )
        case RenewCredential():
            return alive, {"assignment": _with_credential(instance, event.credential)}
        case ReturnToPool():
            return _pool(instance, event, timed, now)
        case Announce():
            return alive, {"announced_at": now}
        case Renew():
            # Nor must it cut short what was renewed since.
            return replace(alive, not_retired=True, threshold_at_or_before=event.until), {"threshold": event.until}
        case Retire():
            # The first reason stands: a quarantine that came meanwhile is not made a drain.
            return replace(alive, not_retired=not instance.retire), {"retire": event.reason[:MAX_WHY]}
        case Quarantine():
            return alive, _quarantine(instance, event)
        case End():
            return _end(instance, event, now)
        case Confirm():
            return (
                WriteCondition(state=instance.state, epoch=instance.epoch),
                {"forget_at": after(now, event.keep_records_s)},
            )


#: What a run chooses an instance by, besides its tier.
_OFFERED = ("resource_class", "instance_type", "usage_class", "cpu", "memory_mib")


def _claim(instance: Instance, event: Claim, now: datetime) -> tuple[WriteCondition, dict[str, Any]]:
    tiers = event.reuse.tiers(event.tier)
    if instance.tier not in tiers:
        raise _illegal(instance, f"claim of a {instance.tier} instance for a {event.tier} run (reuse {event.reuse})")
    alone = event.repository if event.repository == instance.repository else ""
    if event.reuse is Reuse.SAME_REPO and not alone:
        raise _illegal(instance, f"claim of an instance of {instance.repository!r} for a run of {event.repository!r}")
    guard = WriteCondition(
        state=State.IDLE,
        epoch=instance.epoch,
        offered=tuple((name, getattr(instance, name)) for name in _OFFERED),
        threshold_after=now + timedelta(seconds=event.margin_s),
        not_retired=True,
        tiers=tiers,
        # What is written down as the only one must be so in the record, not in the hint alone.
        repository=alone or None,
    )
    return guard, {
        "epoch": instance.epoch + 1,
        "tier": event.tier,
        "repository": alone,
        "run_id": event.run_id,
        "owner": event.owner,
        "provision_id": event.provision_id,
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
    return replace(alive, owner=event.owner), {
        "threshold": after(now, event.max_runtime_s),
        "assignment": _with_credential(instance, None),
    }


def _release(instance: Instance, event: Release, now: datetime) -> dict[str, Any]:
    return {
        "run_id": "",
        "last_run_id": instance.run_id,
        "run_deadline": instance.threshold,
        "threshold": _held(instance, after(now, event.release_time_s)),
        "assignment": _without_registration(_with_credential(instance, event.credential), gone=event.deregistered),
    }


def _without_registration(assignment: Assignment | None, *, gone: bool) -> Assignment | None:
    return replace(assignment, runner_id=0) if assignment is not None and gone else assignment


def _quarantine(instance: Instance, event: Quarantine) -> dict[str, Any]:
    until = to_milliseconds(event.until)
    kept = {"retire": event.reason[:MAX_WHY], "quarantined_until": until}
    # A run that has it keeps its own limit; the others would end before anybody had a look.
    if instance.state is State.IDLE:
        return {**kept, "threshold": until}
    if instance.state is State.RELEASING:
        # A job may still run on it: a short look does not cost it its time.
        return {**kept, "threshold": max(instance.threshold, until)}
    return kept


def _held(instance: Instance, threshold: datetime) -> datetime:
    """One that an operator wants to look at is kept so long at least."""
    return max(threshold, instance.quarantined_until) if instance.quarantined_until is not None else threshold


def _extend(instance: Instance, event: Extend, now: datetime) -> dict[str, Any]:
    if not event.report.busy:
        raise _illegal(instance, "extension without a running job")
    wanted = after(now, event.extension_s)
    latest = instance.run_deadline or instance.threshold
    return {"threshold": max(instance.threshold, min(wanted, latest))}


def _pool(
    instance: Instance, event: ReturnToPool, timed: WriteCondition, now: datetime
) -> tuple[WriteCondition, dict[str, Any]]:
    if removal_verdict(event.report, instance.epoch) is not Verdict.OK:
        raise _illegal(instance, "pooling without UD_REMOVE_REG_REMOVE_RUN_OK of this epoch")
    if instance.retire and not instance.is_quarantined(now):
        raise _illegal(instance, f"pooling of an instance that is retired ({instance.retire})")
    return replace(timed, not_retired=not instance.retire), {
        "assignment": None,
        "announced_at": None,
        "run_deadline": None,
        "uses": instance.uses + 1,
        "threshold": _held(instance, after(now, event.idle_time_s)),
    }


def _end(instance: Instance, event: End, now: datetime) -> tuple[WriteCondition, dict[str, Any]]:
    threshold_at_or_before = now - timedelta(seconds=event.margin_s) if event.cause is Cause.EXPIRED else None
    guard = WriteCondition(
        state=instance.state,
        epoch=instance.epoch,
        threshold_at_or_before=threshold_at_or_before,
        owner=event.owner,
        max_quarantined_until=now if _spares_quarantine(instance, event) else None,
    )
    return guard, {
        "run_id": "",
        "last_run_id": instance.run_id or instance.last_run_id,
        "assignment": None,
        "announced_at": None,
        "retire": _last_reason(instance, event),
        # In the past for every reader, so that the sweep for what expired finds it too.
        "threshold": now,
    }


def _spares_quarantine(instance: Instance, event: End) -> bool:
    """What would end although it is well, or after its job, is kept while an operator looks at it."""
    return event.cause is Cause.RETIRED or (event.cause is Cause.FAILED and instance.state is State.RELEASING)


def _last_reason(instance: Instance, event: End) -> str:
    # That it serves one run alone is no reason to end any other way than by its release.
    known = "" if instance.retire in BORN_RETIRED and event.cause is not Cause.RETIRED else instance.retire
    return known or event.reason or event.cause.value


def _with_credential(instance: Instance, credential: Credential | None) -> Assignment | None:
    if instance.assignment is None:
        return None
    return replace(instance.assignment, credential=credential, jit_config="")
