"""Explanation of a run or an instance: its events in order, with reasons, and the next steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from remuda.domain.holder import describe_holder, subject_of
from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.provision import (
    Provision,
    ProvisionOutcome,
    ProvisionStatus,
    RejectedCandidate,
    RejectionKind,
    RunnerSource,
    describe_status,
    lost_instances,
)
from remuda.domain.reporting.warnings import REPLACE_LOST, describe_dead_agent, describe_failed_runner
from remuda.domain.signals import Report
from remuda.domain.thresholds import Lifetimes, expired


class Severity(StrEnum):
    NORMAL = "normal"
    GOOD = "good"
    BAD = "bad"
    #: Housekeeping.
    MINOR = "minor"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedEvent:
    at: datetime
    #: Instance that the event is about, or empty.
    instance_id: str = ""
    what: str
    why: str = ""
    severity: Severity = Severity.NORMAL


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    #: `run`, `instance`, `job` or `set`.
    kind: str
    subject: str
    title: str
    events: tuple[ExplainedEvent, ...]
    #: One sentence per step.
    next_steps: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplanationInput:
    """Records that an explanation is derived from."""

    now: datetime
    lifetimes: Lifetimes
    instances: Mapping[str, Instance]
    histories: Mapping[str, Sequence[HistoryEntry]]
    reports: Mapping[str, Report]


#: Description and severity per transition that does not terminate an instance.
_DESCRIPTIONS: Mapping[str, tuple[str, Severity]] = {
    "create": ("boots", Severity.NORMAL),
    "tombstone": ("locked: it has the pool's tags but no record", Severity.BAD),
    "claim": ("claimed from the pool", Severity.GOOD),
    "commit": ("running, accepts jobs", Severity.GOOD),
    "equip": ("registered for one job of its set, starts to listen", Severity.GOOD),
    "bind": ("runs a job", Severity.GOOD),
    "listen-on": ("keeps listening", Severity.MINOR),
    "fill": ("idle, in the pool ahead of demand", Severity.GOOD),
    "release": ("releasing", Severity.NORMAL),
    "extend": ("threshold extended", Severity.NORMAL),
    "credential": ("removal credential renewed", Severity.MINOR),
    "pool": ("idle, clean, in the pool", Severity.GOOD),
    "announce": ("announced to the pool", Severity.MINOR),
    "renew": ("kept in the pool", Severity.MINOR),
    "retire": ("will not return to the pool", Severity.BAD),
    "quarantine": ("in quarantine", Severity.BAD),
    "confirm": ("terminated", Severity.NORMAL),
}
_REJECTIONS: Mapping[RejectionKind, str] = {
    RejectionKind.MISMATCH: "candidate rejected: it does not match the request",
    RejectionKind.CLAIM_LOST: "claim lost",
    RejectionKind.REGISTRATION_FAILED: "claimed, but it did not register",
    RejectionKind.MALFORMED: "unreadable pool message",
    RejectionKind.UNREADABLE: "unreadable instance record",
    RejectionKind.DUPLICATE: "duplicate pool message",
}
_ACQUIRED = frozenset({"create", "claim"})
_COMMIT = "commit"
_BIND = "bind"
_ANNOUNCE = "announce"


def explain_run(run_id: str, provisions: Sequence[Provision], records: ExplanationInput) -> Explanation:
    entries = [
        (instance_id, entry)
        for instance_id, history in records.histories.items()
        for entry in history
        if entry.holder is not None and entry.holder.run_id == run_id
    ]
    late = _ACQUIRED | {_COMMIT}
    # The stable sort below keeps this causal order for events of the same millisecond.
    events = [event for provision in provisions for event in _request_events(provision)]
    events += [explain_entry(instance_id, entry) for instance_id, entry in entries if entry.transition in _ACQUIRED]
    events += [event for provision in provisions for event in _registration_events(provision)]
    events += [explain_entry(instance_id, entry) for instance_id, entry in entries if entry.transition == _COMMIT]
    events += [event for provision in provisions for event in _end_events(provision)]
    events += [explain_entry(instance_id, entry) for instance_id, entry in entries if entry.transition not in late]
    last = provisions[-1]
    attempts = "" if len(provisions) == 1 else f", {len(provisions)} provisions"
    reason = describe_status(last, lost_instances(last, records.instances)) or "in progress"
    return Explanation(
        kind="run",
        subject=run_id,
        title=f"Run {run_id}: {last.shown_status}{attempts} ({reason})",
        events=_in_order(events),
        next_steps=tuple(_next_steps_of_run(run_id, provisions, records)),
    )


def explain_instance(instance: Instance, records: ExplanationInput) -> Explanation:
    entries = records.histories.get(instance.instance_id, ())
    events = [explain_entry(instance.instance_id, entry, with_run=True) for entry in entries]
    if not entries or entries[0].source is not None:
        what = "launched" if entries else "launched; its history is not kept any more"
        why = "events in between are not kept any more" if entries else ""
        events.append(ExplainedEvent(at=instance.created_at, instance_id=instance.instance_id, what=what, why=why))
    report = records.reports.get(instance.instance_id)
    used = f"{instance.uses} use{'' if instance.uses == 1 else 's'}"
    kind = f"{instance.instance_type}, {instance.usage_class}, class {instance.resource_class}, {instance.tier}"
    kind += f", served only {instance.repository}" if instance.repository else ""
    state = instance.state.value + (", its agent is dead" if _agent_death(instance, report, records) else "")
    next_steps = [f"{instance.instance_id}: {describe_next(instance, report, records)}"]
    if report is not None and report.signal is not None:
        next_steps.append(f"last signal of its agent: {report.describe_signal()}")
    return Explanation(
        kind="instance",
        subject=instance.instance_id,
        title=f"Instance {instance.instance_id}: {state}, {kind}, {used}, epoch {instance.epoch}",
        events=_in_order(events),
        next_steps=tuple(next_steps),
    )


# Events -----------------------------------------------------------------------------------------------------------


def _in_order(events: Iterable[ExplainedEvent]) -> tuple[ExplainedEvent, ...]:
    return tuple(sorted(events, key=lambda event: event.at))


def explain_entry(instance_id: str, entry: HistoryEntry, *, with_run: bool = False) -> ExplainedEvent:
    """Describe one transition of an instance; `with_run` names the run that acquired it."""
    if entry.is_end and entry.source is not None:
        what, severity = f"terminating, was {entry.source}", Severity.BAD
    else:
        what, severity = _DESCRIPTIONS.get(entry.transition, (entry.transition, Severity.NORMAL))
    if with_run and entry.holder is not None and entry.transition in _ACQUIRED | {_BIND}:
        what = f"{what} for {describe_holder(entry.holder)}"
    why = f"{entry.why} ({entry.by})"
    if entry.transition == _ANNOUNCE:
        # The description says it all; only the actor is new.
        what, why = f"{what} ({entry.by})", ""
    return ExplainedEvent(at=entry.at, instance_id=instance_id, what=what, why=why, severity=severity)


def _request_events(provision: Provision) -> Iterator[ExplainedEvent]:
    count, kind = provision.count, provision.resource_class
    what = f"attempt {provision.attempt} requests {count} {kind} runner{'' if count == 1 else 's'}"
    yield ExplainedEvent(at=provision.created_at, what=what, why=provision.request_summary)
    outcome = provision.outcome
    if outcome is None:
        return
    for rejection in outcome.rejections:
        yield _rejection_event(rejection, _at(provision, outcome, rejection.seconds))
    not_listed = sum(outcome.rejected.values()) - len(outcome.rejections)
    if not_listed > 0:
        kinds = ", ".join(f"{count} {kind}" for kind, count in outcome.rejected.items())
        what = f"{not_listed} more candidates were rejected"
        yield ExplainedEvent(at=outcome.ended_at, what=what, why=f"in total: {kinds}")
    for launch in outcome.launches:
        short = launch.launched < launch.count
        what = f"launched {launch.launched} of {launch.count}" if short else f"launched {launch.count}"
        pool_skipped = f"{launch.why}; the pool is not used" if launch.why else ""
        why = "; ".join(launch.errors) or pool_skipped or "the pool has no more matching instances"
        severity = Severity.BAD if short else Severity.NORMAL
        yield ExplainedEvent(at=_at(provision, outcome, launch.seconds), what=what, why=why, severity=severity)


def _registration_events(provision: Provision) -> Iterator[ExplainedEvent]:
    outcome = provision.outcome
    if outcome is None:
        return
    for runner in outcome.acquired:
        source = "from the pool" if runner.source is RunnerSource.POOL else "newly created"
        own = f"; the registration took {runner.registration_s:.2f} s" if runner.registration_s is not None else ""
        yield ExplainedEvent(
            at=_at(provision, outcome, runner.seconds),
            instance_id=runner.instance_id,
            what="registered",
            why=f"{source}, {runner.seconds:.2f} s after the request{own}",
            severity=Severity.GOOD,
        )


def _end_events(provision: Provision) -> Iterator[ExplainedEvent]:
    outcome = provision.outcome
    if outcome is not None and outcome.error:
        what = f"failed after {outcome.seconds:.2f} s"
        yield ExplainedEvent(at=outcome.ended_at, what=what, why=outcome.error, severity=Severity.BAD)
    elif outcome is not None:
        what = f"complete after {outcome.seconds:.2f} s: {outcome.reused} reused, {outcome.created} created"
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in outcome.phases.items())
        yield ExplainedEvent(at=outcome.ended_at, what=what, why=phases, severity=Severity.GOOD)
    if provision.released_at is not None:
        failed = not provision.instance_ids
        what = "the provision is closed" if failed else "the run releases its runners"
        severity = Severity.BAD if failed else Severity.NORMAL
        yield ExplainedEvent(at=provision.released_at, what=what, why=provision.why, severity=severity)


def _at(provision: Provision, outcome: ProvisionOutcome, seconds: float) -> datetime:
    """Convert seconds since the start to a time. The start precedes the record, so the end is the reference."""
    return max(provision.created_at, outcome.ended_at - timedelta(seconds=outcome.seconds - seconds))


def _rejection_event(rejection: RejectedCandidate, at: datetime) -> ExplainedEvent:
    severity = Severity.BAD if rejection.kind is RejectionKind.REGISTRATION_FAILED else Severity.NORMAL
    what = _REJECTIONS[rejection.kind]
    return ExplainedEvent(at=at, instance_id=rejection.instance_id, what=what, why=rejection.why, severity=severity)


# Next steps -------------------------------------------------------------------------------------------------------


def _next_steps_of_run(run_id: str, provisions: Sequence[Provision], records: ExplanationInput) -> Iterator[str]:
    for provision in provisions:
        if provision.status is ProvisionStatus.OPEN:
            yield _next_step_of_open(provision, records)
    committed = [item for item in provisions if item.status is ProvisionStatus.COMMITTED]
    if committed and all(
        len(lost_instances(item, records.instances)) == len(item.instance_ids) > 0 for item in committed
    ):
        until = f"{committed[-1].deadline:%Y-%m-%d %H:%M:%S} UTC"
        lost = describe_status(committed[-1], committed[-1].instance_ids)
        yield f"{lost}: there is nothing to release; refresh closes the run after its deadline ({until})"
    elif committed:
        yield f"the run keeps its runners until remuda release --run-id {run_id}, or until their threshold"
    if any(_is_short(item, records) for item in committed):
        yield REPLACE_LOST
    held = [item for item in records.instances.values() if _serves(item, run_id)]
    for instance in sorted(held, key=lambda item: item.instance_id):
        yield f"{instance.instance_id}: {describe_next(instance, records.reports.get(instance.instance_id), records)}"
    others = [item for item in records.instances.values() if not _serves(item, run_id)]
    for instance in sorted(others, key=lambda item: item.instance_id):
        run = subject_of(instance.latest_holder) or "none"
        yield f"{instance.instance_id}: reassigned; it is {instance.state}, its run is {run}"
    if not committed and not held and not others:
        yield "nothing: the run holds no instance"


def _serves(instance: Instance, run_id: str) -> bool:
    """Whether it serves the run, or served it last."""
    return instance.latest_holder is not None and instance.latest_holder.run_id == run_id


def _is_short(provision: Provision, records: ExplanationInput) -> bool:
    """Whether a committed run has fewer working runners than it asked for."""
    held = (records.instances[item] for item in provision.instance_ids if item in records.instances)
    return bool(lost_instances(provision, records.instances)) or any(
        describe_failed_runner(item, records.reports.get(item.instance_id)) for item in held
    )


def _next_step_of_open(provision: Provision, records: ExplanationInput) -> str:
    left_s = (provision.deadline - records.now).total_seconds()
    if left_s >= 0:
        return f"provision {provision.provision_id} is in progress; its deadline is in {left_s:.0f} s"
    return f"provision {provision.provision_id} is past its deadline: the next refresh releases its instances"


def describe_next(instance: Instance, report: Report | None, records: ExplanationInput) -> str:
    """Describe in one sentence what happens to an instance next."""
    until = f"{instance.threshold:%Y-%m-%d %H:%M:%S} UTC"
    reason = instance.retire_text or "unknown reason"
    if instance.state is State.TERMINATED:
        forget = f"; its record is kept until {instance.forget_at:%Y-%m-%d}" if instance.forget_at else ""
        return f"terminated ({reason}){forget}"
    if instance.state is State.TERMINATING:
        return f"terminating ({reason}); refresh repeats the request until EC2 confirms it"
    margin_s = records.lifetimes.margin_s
    if expired(instance.threshold, now=records.now, margin_s=margin_s):
        return f"its threshold as {instance.state} has passed: the next refresh terminates it"
    if failure := describe_failed_runner(instance, report):
        return f"{failure}; the next refresh terminates it"
    if death := _agent_death(instance, report, records):
        return f"{death}; unless it returns, it is terminated as {instance.state} after {until}"
    busy = report is not None and report.busy
    ending = f"; then it is terminated: {instance.retire_text}" if instance.retire_reason else ""
    if instance.runner_set and instance.state is State.RUNNING:
        return _describe_next_in_set(instance, report, until, ending)
    return {
        State.CREATED: f"boots and registers; if it is not running by {until}, it is terminated",
        State.CLAIMED: f"registers; if it is not running by {until}, it is terminated",
        State.RUNNING: ("runs a job" if busy else "waits for jobs of its run")
        + f" until the run is released, at most until {until}{ending}",
        State.RELEASING: ("waits for its job to end" if busy else "deregisters and resets")
        + (ending or f", then it returns to the pool; if it has not by {until}, it is terminated"),
        State.IDLE: f"is in quarantine until {until}, then it is terminated ({instance.retire_text})"
        if instance.quarantined_until is not None
        else f"waits for a run in the pool; if none claims it by {until}, it is terminated{ending}",
    }[instance.state]


def _agent_death(instance: Instance, report: Report | None, records: ExplanationInput) -> str:
    return describe_dead_agent(instance, report, now=records.now, margin_s=records.lifetimes.margin_s)


def _describe_next_in_set(instance: Instance, report: Report | None, until: str, ending: str) -> str:
    pool = ending or ", then it is reset and returns to the pool"
    if report is not None and report.spent_epoch == instance.epoch:
        return f"has run its job of set {instance.runner_set} and is about to be released{pool}"
    if instance.is_bound:
        run = f"run {instance.run_id}" if instance.run_id else "a run that nobody has named"
        return f"runs a job of {run} for set {instance.runner_set}, at most until {until}{pool}"
    if report is not None and report.busy:
        return f"runs a job of set {instance.runner_set} that GitHub has not reported yet{pool}"
    return f"listens for a job of set {instance.runner_set}; without one it is released after {until}{ending}"
