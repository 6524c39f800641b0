"""Builders of instances in each state and of events, whose fields tests override by keyword."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from remuda.domain.instance import Credential, Instance, State
from remuda.domain.resources import Tier
from remuda.domain.signals import Report, Signal
from remuda.domain.transitions import (
    Actor,
    Announce,
    Change,
    Claim,
    Commit,
    Confirm,
    End,
    Event,
    Extend,
    Quarantine,
    Release,
    Renew,
    RenewCredential,
    Retire,
    RetireReason,
    ReturnToPool,
    advance,
)
from tests.support.records import NOW, assignment, at, instance, instance_id

OWNER = "p-1/a"
REMOVAL = Credential(token="removal-t0ken", expires_at=at(3_600))


def in_state(state: State, **changed: Any) -> Instance:
    """An instance in this state with epoch 2 that has served one run before."""
    base = instance(state=state, epoch=2, uses=1, owner=OWNER, provision_id="p-1", scope="octo/repo")
    runs = {"run_id": "1234", "last_run_id": "1233", "assignment": assignment(2)}
    without_credential = replace(assignment(2), credential=None)
    values: dict[State, dict[str, Any]] = {
        State.CREATED: {**runs, "epoch": 1, "uses": 0, "last_run_id": "", "assignment": assignment(1)},
        State.CLAIMED: runs,
        State.RUNNING: {**runs, "assignment": without_credential, "threshold": at(1_800)},
        State.RELEASING: {
            "last_run_id": "1234",
            "assignment": replace(assignment(2), credential=REMOVAL),
            "threshold": at(300),
            "run_deadline": at(1_800),
        },
        State.IDLE: {"last_run_id": "1234", "announced_at": at(-5)},
        State.TERMINATING: {"last_run_id": "1234", "retire_reason": RetireReason.EXPIRED, "threshold": at(0)},
        State.TERMINATED: {
            "last_run_id": "1234",
            "retire_reason": RetireReason.EXPIRED,
            "threshold": at(0),
            "forget_at": at(600),
        },
    }
    return replace(base, **{**values[state], **changed})


def report(signal: Signal | None = None, epoch: int = 2, **changed: Any) -> Report:
    return Report(instance_id=instance_id(1), epoch=epoch, signal=signal, **changed)


def claim(**changed: Any) -> Claim:
    values: dict[str, Any] = {
        "run_id": "1235",
        "owner": "p-2/b",
        "provision_id": "p-2",
        "scope": "octo/other",
        "tier": Tier.TRUSTED,
        "threshold": at(300),
        "assignment": assignment(3),
        "margin_s": 60.0,
    }
    return Claim(**{**values, **changed})


def write(record: Instance, event: Event, by: Actor) -> Change:
    return advance(record, event, by=by, now=NOW, why="a test")


def evidence(record: Instance) -> dict[type, Event]:
    """One valid event of each type for this instance."""
    epoch = record.epoch
    clean = report(Signal.UD_REMOVE_REG_REMOVE_RUN_OK, epoch)
    events: tuple[Event, ...] = (
        claim(tier=record.tier),
        Commit(owner=OWNER, report=report(Signal.UD_REG_OK, epoch), max_runtime_s=1_800.0),
        Release(release_time_s=300.0, credential=REMOVAL, owner=OWNER),
        Extend(report=report(epoch=epoch, busy=True), extension_s=300.0, margin_s=0.0),
        RenewCredential(credential=REMOVAL),
        ReturnToPool(report=clean, idle_time_s=420.0),
        Announce(),
        Renew(until=at(420)),
        Retire(reason=RetireReason.SPOT_NOTICE, detail="soon"),
        Quarantine(detail="odd", until=at(3_600)),
        Confirm(keep_records_s=600.0),
    )
    return {type(event): event for event in events}


def end(record: Instance, reason: RetireReason, **changed: Any) -> End:
    """Return an end with all the evidence that its reason may require."""
    failed = Signal.UD_REMOVE_REG_FAILED if record.state is State.RELEASING else Signal.UD_REG_FAILED
    signal = failed if reason is RetireReason.FAILED else Signal.UD_REMOVE_REG_REMOVE_RUN_OK
    values: dict[str, Any] = {"reason": reason, "report": report(signal, record.epoch), "owner": OWNER}
    return End(**{**values, **changed})
