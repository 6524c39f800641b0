"""Builders of valid records and events, whose fields tests override by keyword."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import datetime, timedelta
from typing import Any

from remuda.domain.demand import DemandRecord, JobRecord, QueuedJob, RepositoryQueue
from remuda.domain.holder import Holder, RunHolder, SetHolder, StartedJob
from remuda.domain.instance import ASSIGNED, Assignment, Credential, HistoryEntry, Instance, State
from remuda.domain.pool_config import RECORD_VERSION, PoolConfig, ScopeTokens
from remuda.domain.provision import Provision
from remuda.domain.resources import (
    DEFAULT_CLASSES,
    PoolMessage,
    ResourceClass,
    RunnerRequest,
    Tier,
    TypePatterns,
    UsageClass,
)
from remuda.domain.signals import Report, Signal
from remuda.domain.sweep_record import (
    Anomaly,
    AnomalyKind,
    EmptyRunList,
    QueueAudit,
    RunAnswer,
    SweepRecord,
    UnreadableRepository,
)
from remuda.domain.thresholds import Lifetimes
from remuda.domain.transitions import (
    Actor,
    Announce,
    Bind,
    Change,
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
    RetireReason,
    ReturnToPool,
    WriteCondition,
    advance,
)
from remuda.ports.compute import LaunchRequest
from simulation.loop import START

#: Seconds to wait for an event that must happen. Generous: only a broken test reaches it.
LONG_S = 60.0
#: Seconds to wait for an event that must not happen.
SHORT_S = 0.05

NOW = START


def at(seconds: float) -> datetime:
    """The time `seconds` after NOW."""
    return NOW + timedelta(seconds=seconds)


def instance_id(number: int) -> str:
    return f"i-{number:017x}"


def run_holder(run_id: str = "1234", provision_id: str = "p-1", attempt: int = 1) -> RunHolder:
    return RunHolder(run_id=run_id, attempt=attempt, provision_id=provision_id)


def set_holder(name: str = "large", run_id: str | None = None, provision_id: str = "p-1") -> SetHolder:
    """A runner set, whose job is of this run; an empty run id for a job that nobody has named, None for no job."""
    job = None if run_id is None else StartedJob(run_id=run_id)
    return SetHolder(name=name, job=job, provision_id=provision_id)


def _named(changed: Mapping[str, Any]) -> Holder:
    """The holder that these keywords name: a run, or a runner set with the run of its job, if it has one."""
    provision_id = changed.get("provision_id", "p-1")
    if runner_set := changed.get("runner_set"):
        return set_holder(runner_set, changed.get("run_id"), provision_id)
    return run_holder(changed.get("run_id", "1234"), provision_id, changed.get("attempt", 1))


_NAMING = frozenset({"run_id", "runner_set", "provision_id", "attempt"})


def held(state: State, /, **changed: Any) -> dict[str, Any]:
    """The fields to change. `run_id`, `runner_set`, `provision_id` and `attempt` name the holder, or the last one."""
    kept = {name: value for name, value in changed.items() if name not in _NAMING}
    if kept == changed:
        return changed
    is_nobody = changed.get("run_id") == "" and not changed.get("runner_set")
    return {"holder" if state in ASSIGNED else "last_holder": None if is_nobody else _named(changed), **kept}


def instance(number: int = 1, **changed: Any) -> Instance:
    """An instance, by default idle and never used. See `held` for its holder."""
    values: dict[str, Any] = {
        "instance_id": instance_id(number),
        "state": State.IDLE,
        "epoch": 1,
        "threshold": at(420),
        "resource_class": "large",
        "instance_type": "c6i.large",
        "usage_class": UsageClass.ON_DEMAND,
        "cpu": 2,
        "memory_mib": 4_096,
        "created_at": NOW,
    }
    state = changed.get("state", State.IDLE)
    return Instance(**{**values, **held(state, **changed)})


def entry(transition: str = "test", **changed: Any) -> HistoryEntry:
    values: dict[str, Any] = {
        "at": NOW,
        "transition": transition,
        "source": State.IDLE,
        "target": State.IDLE,
        "epoch": 1,
        "holder": None,
        "by": Actor.REFRESH,
        "why": "a test",
    }
    return HistoryEntry(**{**values, **held(State.RUNNING, **changed)})


def birth(record: Instance) -> Change:
    """A change that creates this record, whatever its state."""
    return Change(
        instance_id=record.instance_id,
        condition=WriteCondition(state=None, epoch=record.epoch),
        sets={item.name: getattr(record, item.name) for item in fields(Instance)},
        entry=entry("birth", source=None, target=record.state),
    )


def change(record: Instance, guard: WriteCondition | None = None, transition: str = "test", **sets: Any) -> Change:
    """A change of fields, by default guarded by state and epoch of the record."""
    return Change(
        instance_id=record.instance_id,
        condition=guard or WriteCondition(state=record.state, epoch=record.epoch),
        sets=sets,
        entry=entry(transition),
    )


def assignment(epoch: int = 1, number: int = 1) -> Assignment:
    return Assignment(
        url="https://github.com/octo/repo",
        runner_name=f"remuda-test-{epoch}-{instance_id(number)}",
        labels=("1234", "1234/large"),
        credential=Credential(token="t0ken", expires_at=at(3_600)),
    )


def provision(number: int = 1, **changed: Any) -> Provision:
    values: dict[str, Any] = {
        "resource_class": "large",
        "count": 2,
        "created_at": at(number),
        "deadline": at(number + 300),
    }
    named = {"provision_id": f"p-{number}", **changed}
    return Provision(**{**values, **held(State.RUNNING, **named)})


def demand_record(runner_set: str = "large", **changed: Any) -> DemandRecord:
    values: dict[str, Any] = {"revision": 1, "scale_set_id": 3, "capacity": 5, "updated_at": NOW}
    return DemandRecord(runner_set=runner_set, **{**values, **changed})


def job_record(number: int = 1, **changed: Any) -> JobRecord:
    values: dict[str, Any] = {
        "job_id": f"job-{number}",
        "runner_set": "large",
        "revision": 1,
        "run_id": "77",
        "repository": "octo/repo",
        "labels": ("self-hosted", "large"),
        "queued_at": at(number - 1),
        "seen_at": at(number),
    }
    return JobRecord(**{**values, **changed})


def sweep_record(**changed: Any) -> SweepRecord:
    """The record of a sweep that has seen something of each kind."""
    job = QueuedJob(job_id="9", run_id="7", repository="octo/app", name="gpu", labels=("gpu",), queued_at=at(-900))
    refused = UnreadableRepository(repository="octo/lib", reason="403", at=at(-60))
    anomalies = (
        Anomaly(kind=AnomalyKind.MISSING, subject=instance_id(1), first_seen_at=at(-60)),
        Anomaly(kind=AnomalyKind.SPENT, subject=instance_id(2), epoch=3, first_seen_at=at(-30)),
    )
    runs = (
        RunAnswer(repository="octo/app", run_id="7", asked_at=at(-60), etag='"e"'),
        RunAnswer(repository="octo/app", run_id="8", asked_at=at(-60), ended_attempt=2, ended_at=at(-90)),
    )
    audit = QueueAudit(
        at=at(-60),
        queues=(RepositoryQueue(repository="octo/app", read_at=at(-60), jobs=(job,)),),
        unreadable=(refused,),
        empty_lists=(EmptyRunList(repository="octo/app", status="queued", etag='"e"'),),
    )
    values: dict[str, Any] = {"anomalies": anomalies, "runs": runs, "unreadable": (refused,), "audit": audit}
    return SweepRecord(next_due_at=at(900), **{**values, **changed})


def runner_request(**changed: Any) -> RunnerRequest:
    values: dict[str, Any] = {
        "resource_class": ResourceClass(name="large", cpu=2, memory_mib=4_096),
        "usage_class": UsageClass.ON_DEMAND,
        "patterns": TypePatterns(("*",)),
        "tier": Tier.TRUSTED,
    }
    return RunnerRequest(**{**values, **changed})


def launch_request(token: str = "token", **changed: Any) -> LaunchRequest:
    values: dict[str, Any] = {
        "provision_id": f"provision-{token}",
        "client_token": token,
        "count": 1,
        "request": runner_request(),
        "scope": "octo/repo",
        "launch": {},
        "first_life_s": 600.0,
        "margin_s": 1.0,
    }
    return LaunchRequest(**{**values, **changed})


def pool_config(revision: int = 1, **changed: Any) -> PoolConfig:
    token = Credential(token="t0ken", expires_at=at(3_600))
    values: dict[str, Any] = {
        "pool": "test",
        "classes": DEFAULT_CLASSES,
        "lifetimes": Lifetimes(keep_records_s=600.0),
        "max_instances": 100,
        "github_url": "https://github.com",
        "applied_at": NOW,
        "revision": revision,
        "record_version": RECORD_VERSION,
        "tokens": (ScopeTokens(scope="octo/repo", registration=token, removal=token),),
        "launch": {"image": "ami-1"},
    }
    return PoolConfig(**{**values, **changed})


def message(number: int = 1, **changed: Any) -> PoolMessage:
    values: dict[str, Any] = {
        "id": instance_id(number),
        "epoch": 1,
        "resource_class": "large",
        "instance_type": "c6i.large",
        "usage_class": UsageClass.SPOT,
        "cpu": 2,
        "memory_mib": 4_096,
    }
    return PoolMessage(**{**values, **changed})


CLAIM = "p-1/a"
REMOVAL = Credential(token="removal-t0ken", expires_at=at(3_600))


def in_state(state: State, **changed: Any) -> Instance:
    """An instance in this state with epoch 2 that has served one run before."""
    base = instance(state=state, epoch=2, uses=1, claim=CLAIM, scope="octo/repo")
    runs = {"holder": run_holder(), "assignment": assignment(2)}
    before = {"holder": None, "last_holder": run_holder()}
    without_credential = replace(assignment(2), credential=None)
    values: dict[State, dict[str, Any]] = {
        State.CREATED: {**runs, "epoch": 1, "uses": 0, "assignment": assignment(1)},
        State.CLAIMED: runs,
        State.RUNNING: {**runs, "assignment": without_credential, "threshold": at(1_800)},
        State.RELEASING: {
            **before,
            "assignment": replace(assignment(2), credential=REMOVAL),
            "threshold": at(300),
            "run_deadline": at(1_800),
        },
        State.IDLE: {**before, "announced_at": at(-5)},
        State.TERMINATING: {**before, "retire_reason": RetireReason.EXPIRED, "threshold": at(0)},
        State.TERMINATED: {
            **before,
            "retire_reason": RetireReason.EXPIRED,
            "threshold": at(0),
            "forget_at": at(600),
        },
    }
    return replace(base, **{**values[state], **held(state, **changed)})


def in_set(state: State, **changed: Any) -> Instance:
    """An instance in this state that the runner set `large` holds, without a job."""
    values: dict[str, Any] = {"holder" if state in ASSIGNED else "last_holder": set_holder()}
    if state in ASSIGNED:
        values["assignment"] = replace(assignment(1 if state is State.CREATED else 2), credential=None)
    if state is State.RUNNING:
        values |= {"threshold": at(900), "run_deadline": at(2_700)}
    changed = held(state, **{"runner_set": "large", **changed}) if _NAMING & set(changed) else changed
    return in_state(state, **{**values, **changed})


def report(signal: Signal | None = None, epoch: int = 2, **changed: Any) -> Report:
    return Report(instance_id=instance_id(1), epoch=epoch, signal=signal, **changed)


def claim(**changed: Any) -> Claim:
    values: dict[str, Any] = {
        "holder": run_holder("1235", "p-2"),
        "claim": "p-2/b",
        "scope": "octo/other",
        "tier": Tier.TRUSTED,
        "threshold": at(300),
        "assignment": assignment(3),
        "margin_s": 60.0,
    }
    return Claim(**{**values, **held(State.CLAIMED, **changed)})


def claim_change(record: Instance, token: str) -> Change:
    event = claim(
        holder=run_holder(provision_id=token.partition("/")[0]),
        claim=token,
        scope="octo/repo",
        tier=record.tier,
        assignment=assignment(record.epoch + 1),
        margin_s=1.0,
    )
    return advance(record, event, by=Actor.PROVISION, now=NOW, why="picked from the pool")


def write(record: Instance, event: Event, by: Actor) -> Change:
    return advance(record, event, by=by, now=NOW, why="a test")


def evidence(record: Instance) -> dict[type, Event]:
    """One valid event of each type for this instance."""
    epoch = record.epoch
    clean = report(Signal.UD_REMOVE_REG_REMOVE_RUN_OK, epoch)
    events: tuple[Event, ...] = (
        claim(tier=record.tier),
        Commit(claim=CLAIM, report=report(Signal.UD_REG_OK, epoch), max_runtime_s=1_800.0),
        Release(release_time_s=300.0, credential=REMOVAL, claim=CLAIM),
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


def evidence_in_set(record: Instance) -> dict[type, Event]:
    """One valid event of each type for this instance of a runner set."""
    epoch = record.epoch
    listening = report(Signal.UD_REG_OK, epoch, listening=True)
    limits: Any = {"listening_time_s": 900.0, "max_runtime_s": 1_800.0}
    booted = report(Signal.UD_OK, epoch)
    name = record.assignment.runner_name if record.assignment else "none"
    events: tuple[Event, ...] = (
        Equip(claim=CLAIM, report=booted, jit_config="configuration", runner_id=7, **limits),
        Bind(runner_name=name, run_id="77", set_tier=Tier.TRUSTED, max_runtime_s=1_800.0, margin_s=60.0),
        ListenOn(report=listening, **limits),
        Fill(claim=CLAIM, report=booted, idle_time_s=420.0),
    )
    return {type(event): event for event in events}


def end(record: Instance, reason: RetireReason, **changed: Any) -> End:
    """Return an end with all the evidence that its reason may require."""
    failed = Signal.UD_REMOVE_REG_FAILED if record.state is State.RELEASING else Signal.UD_REG_FAILED
    signal = failed if reason is RetireReason.FAILED else Signal.UD_REMOVE_REG_REMOVE_RUN_OK
    values: dict[str, Any] = {"reason": reason, "report": report(signal, record.epoch), "claim": CLAIM}
    return End(**{**values, **changed})
