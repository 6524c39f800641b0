"""The story of a run or an instance, in order, with reasons and what happens next: a pure function of the records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.provision import Provision, ProvisionStatus, machines_ended
from remuda.domain.provision_outcome import ProvisionOutcome, RejectedCandidate, RejectionKind, RunnerSource
from remuda.domain.signals import Report
from remuda.domain.thresholds import Lifetimes, expired


class Severity(StrEnum):
    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    #: Housekeeping.
    MINOR = "minor"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedEvent:
    at: datetime
    #: The instance that it is about, or empty.
    instance_id: str = ""
    what: str
    why: str = ""
    tone: Severity = Severity.PLAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    #: `run` or `instance`.
    kind: str
    subject: str
    title: str
    lines: tuple[ExplainedEvent, ...]
    #: What happens next, a sentence each.
    upcoming: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplanationInput:
    """What was read, whichever story it is for."""

    now: datetime
    lifetimes: Lifetimes
    instances: Mapping[str, Instance]
    histories: Mapping[str, Sequence[HistoryEntry]]
    reports: Mapping[str, Report]


#: What a transition means to a person, and how it sounds.
_WORDS: Mapping[str, tuple[str, Severity]] = {
    "create": ("boots", Severity.PLAIN),
    "tombstone": ("locked, for it has our tags and no record", Severity.BAD),
    "claim": ("claimed from the pool", Severity.GOOD),
    "commit": ("running, takes jobs", Severity.GOOD),
    "release": ("releasing", Severity.PLAIN),
    "extend": ("gets more time", Severity.PLAIN),
    "credential": ("gets a fresh removal credential", Severity.MINOR),
    "pool": ("idle, clean, in the pool", Severity.GOOD),
    "announce": ("announced to the pool", Severity.MINOR),
    "renew": ("stays longer in the pool", Severity.MINOR),
    "retire": ("will not be pooled again", Severity.BAD),
    "quarantine": ("in quarantine, kept for a look", Severity.BAD),
    "confirm": ("terminated", Severity.PLAIN),
}
_REJECTED: Mapping[RejectionKind, str] = {
    RejectionKind.MISMATCH: "candidate rejected: it does not match",
    RejectionKind.CLAIM_LOST: "claim lost",
    RejectionKind.REGISTRATION_FAILED: "claimed, but it did not register",
    RejectionKind.MALFORMED: "a pool message could not be parsed",
    RejectionKind.UNREADABLE: "an instance's record could not be parsed",
    RejectionKind.DUPLICATE: "a pool message was received twice",
}
_BIRTHS = frozenset({"create", "tombstone"})
_TAKEN = frozenset({"create", "claim"})
_KNOWN = _TAKEN | {"commit"}


def explain_run(run_id: str, provisions: Sequence[Provision], evidence: ExplanationInput) -> Explanation:
    entries = [
        (instance_id, entry)
        for instance_id, history in evidence.histories.items()
        for entry in history
        if entry.run_id == run_id
    ]
    # Sorted by time, below; what happened in the same millisecond stays in the order of cause and effect.
    lines = [line for provision in provisions for line in _beginning(provision)]
    lines += [explain_entry(instance_id, entry) for instance_id, entry in entries if entry.transition in _TAKEN]
    lines += [line for provision in provisions for line in _registrations(provision)]
    lines += [explain_entry(instance_id, entry) for instance_id, entry in entries if entry.transition == "commit"]
    lines += [line for provision in provisions for line in _ending(provision)]
    lines += [explain_entry(instance_id, entry) for instance_id, entry in entries if entry.transition not in _KNOWN]
    last = provisions[-1]
    attempts = "" if len(provisions) == 1 else f", {len(provisions)} provisions"
    why = machines_ended(last, evidence.instances)
    told = f"; {why}" if why else f" ({last.why or 'under way'})"
    return Explanation(
        kind="run",
        subject=run_id,
        title=f"Run {run_id}: {last.status.value}{attempts}{told}",
        lines=_in_order(lines),
        upcoming=tuple(_run_next(run_id, provisions, evidence)),
    )


def explain_instance(instance: Instance, evidence: ExplanationInput) -> Explanation:
    entries = evidence.histories.get(instance.instance_id, ())
    lines = [explain_entry(instance.instance_id, entry, with_run=True) for entry in entries]
    if not entries or entries[0].transition not in _BIRTHS:
        gone = "launched" if entries else "launched; its history is not kept any more"
        why = "what came between is not kept any more" if entries else ""
        lines.append(ExplainedEvent(at=instance.created_at, instance_id=instance.instance_id, what=gone, why=why))
    report = evidence.reports.get(instance.instance_id)
    used = f"{instance.uses} use{'' if instance.uses == 1 else 's'}"
    kind = f"{instance.instance_type}, {instance.usage_class}, class {instance.resource_class}, {instance.tier}"
    kind += f", served only {instance.repository}" if instance.repository else ""
    told = [f"{instance.instance_id}: {describe_next(instance, report, evidence)}"]
    if report is not None and report.signal is not None:
        detail = f": {report.detail}" if report.detail else ""
        told.append(f"its agent's last word: {report.signal} of assignment {report.epoch}{detail}")
    return Explanation(
        kind="instance",
        subject=instance.instance_id,
        title=f"Instance {instance.instance_id}: {instance.state.value}, {kind}, {used}, assignment {instance.epoch}",
        lines=_in_order(lines),
        upcoming=tuple(told),
    )


# What happened ----------------------------------------------------------------------------------------------------


def _in_order(lines: Iterable[ExplainedEvent]) -> tuple[ExplainedEvent, ...]:
    return tuple(sorted(lines, key=lambda line: line.at))


def explain_entry(instance_id: str, entry: HistoryEntry, *, with_run: bool = False) -> ExplainedEvent:
    """One step of an instance, in a person's words."""
    if entry.transition.startswith("end-"):
        what, tone = f"terminating, was {entry.source}", Severity.BAD
    else:
        what, tone = _WORDS.get(entry.transition, (entry.transition, Severity.PLAIN))
    if with_run and entry.run_id and entry.transition in {"create", "claim"}:
        what = f"{what} for run {entry.run_id}"
    return ExplainedEvent(at=entry.at, instance_id=instance_id, what=what, why=f"{entry.why} ({entry.by})", tone=tone)


def _beginning(provision: Provision) -> Iterator[ExplainedEvent]:
    count, kind = provision.count, provision.resource_class
    asks = f"attempt {provision.attempt} asks for {count} {kind} runner{'' if count == 1 else 's'}"
    yield ExplainedEvent(at=provision.created_at, what=asks, why=provision.request_summary)
    outcome = provision.outcome
    if outcome is None:
        return
    for rejection in outcome.rejections:
        yield _rejection_line(rejection, _at(provision, outcome, rejection.seconds))
    untold = sum(outcome.rejected.values()) - len(outcome.rejections)
    if untold > 0:
        kinds = ", ".join(f"{count} {kind}" for kind, count in outcome.rejected.items())
        yield ExplainedEvent(
            at=outcome.ended_at, what=f"{untold} more pool messages were rejected", why=f"in all: {kinds}"
        )
    for launch in outcome.launches:
        short = launch.launched < launch.count
        what = f"launch of {launch.count}: {launch.launched} came" if short else f"launched {launch.count}"
        alone = f"{launch.why}; nothing is taken from the pool" if launch.why else ""
        why = "; ".join(launch.errors) or alone or "the pool had no more that fit"
        tone = Severity.BAD if short else Severity.PLAIN
        yield ExplainedEvent(at=_at(provision, outcome, launch.seconds), what=what, why=why, tone=tone)


def _registrations(provision: Provision) -> Iterator[ExplainedEvent]:
    outcome = provision.outcome
    if outcome is None:
        return
    for acquired in outcome.acquired:
        came = "from the pool" if acquired.source is RunnerSource.POOL else "newly created"
        own = (
            f"; its own registration took {acquired.registration_s:.2f} s"
            if acquired.registration_s is not None
            else ""
        )
        yield ExplainedEvent(
            at=_at(provision, outcome, acquired.seconds),
            instance_id=acquired.instance_id,
            what="registered",
            why=f"{came}, {acquired.seconds:.2f} s after the run asked{own}",
            tone=Severity.GOOD,
        )


def _ending(provision: Provision) -> Iterator[ExplainedEvent]:
    outcome = provision.outcome
    if outcome is not None and outcome.error:
        what = f"gave up after {outcome.seconds:.2f} s"
        yield ExplainedEvent(at=outcome.ended_at, what=what, why=outcome.error, tone=Severity.BAD)
    elif outcome is not None:
        what = f"complete after {outcome.seconds:.2f} s: {outcome.reused} reused, {outcome.created} created"
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in outcome.phases.items())
        yield ExplainedEvent(at=outcome.ended_at, what=what, why=phases, tone=Severity.GOOD)
    if provision.released_at is not None:
        gave_up = not provision.instance_ids
        what = "the provision is closed" if gave_up else "the run gives its runners back"
        tone = Severity.BAD if gave_up else Severity.PLAIN
        yield ExplainedEvent(at=provision.released_at, what=what, why=provision.why, tone=tone)


def _at(provision: Provision, outcome: ProvisionOutcome, seconds: float) -> datetime:
    """Seconds count from before the record was written: the end is what both clocks know."""
    return max(provision.created_at, outcome.ended_at - timedelta(seconds=outcome.seconds - seconds))


def _rejection_line(rejection: RejectedCandidate, at: datetime) -> ExplainedEvent:
    what = _REJECTED[rejection.kind]
    tone = Severity.BAD if rejection.kind is RejectionKind.REGISTRATION_FAILED else Severity.PLAIN
    return ExplainedEvent(at=at, instance_id=rejection.instance_id, what=what, why=rejection.why, tone=tone)


# What happens next ------------------------------------------------------------------------------------------------


def _run_next(run_id: str, provisions: Sequence[Provision], evidence: ExplanationInput) -> Iterator[str]:
    for provision in provisions:
        if provision.status is ProvisionStatus.OPEN:
            yield _open_next(provision, evidence)
    committed = [item for item in provisions if item.status is ProvisionStatus.COMMITTED]
    ended = [machines_ended(item, evidence.instances) for item in committed]
    if committed and all(ended):
        until = f"{committed[-1].deadline:%Y-%m-%d %H:%M:%S} UTC"
        yield f"{ended[-1]}: there is nothing to release; refresh closes the run once its time is up ({until})"
    elif committed:
        yield f"the run keeps its runners until remuda release --run-id {run_id}, or until their time is up"
    held = [item for item in evidence.instances.values() if run_id == (item.run_id or item.last_run_id)]
    for instance in sorted(held, key=lambda item: item.instance_id):
        yield f"{instance.instance_id}: {describe_next(instance, evidence.reports.get(instance.instance_id), evidence)}"
    others = [item for item in evidence.instances.values() if run_id != (item.run_id or item.last_run_id)]
    for instance in sorted(others, key=lambda item: item.instance_id):
        run = instance.run_id or instance.last_run_id or "none"
        yield f"{instance.instance_id}: has moved on; it is {instance.state}, its run is {run}"
    if not committed and not held and not others:
        yield "nothing: the run holds no machine"


def _open_next(provision: Provision, evidence: ExplanationInput) -> str:
    left_s = (provision.deadline - evidence.now).total_seconds()
    if left_s >= 0:
        return f"provision {provision.provision_id} is at work; it has {left_s:.0f} s left to be complete"
    return f"provision {provision.provision_id} is past its deadline: the next refresh takes back what it holds"


def describe_next(instance: Instance, report: Report | None, evidence: ExplanationInput) -> str:
    """What happens to an instance next, in one sentence."""
    until = f"{instance.threshold:%Y-%m-%d %H:%M:%S} UTC"
    reason = instance.retire or "no reason was kept"
    if instance.state is State.TERMINATED:
        forget = f"; its record is kept until {instance.forget_at:%Y-%m-%d}" if instance.forget_at else ""
        return f"terminated ({reason}); nothing happens any more{forget}"
    if instance.state is State.TERMINATING:
        return f"terminating ({reason}); refresh asks for its end until it is confirmed"
    margin_s = evidence.lifetimes.margin_s
    if expired(instance.threshold, now=evidence.now, margin_s=margin_s):
        return f"its time as {instance.state} is up: the next refresh retires it"
    busy = report is not None and report.busy
    ending = f"; then it ends: {instance.retire}" if instance.retire else ""
    return {
        State.CREATED: f"boots and registers; if it is not running by {until}, it is retired",
        State.CLAIMED: f"registers; if it is not running by {until}, it is retired",
        State.RUNNING: ("runs a job" if busy else "waits for jobs of its run")
        + f" until the run is released, at most until {until}{ending}",
        State.RELEASING: ("waits for its job to end" if busy else "deregisters and resets")
        + (ending or f", then it joins the pool; if it has not by {until}, it is retired"),
        State.IDLE: f"is kept for a look until {until}, then it is retired ({instance.retire})"
        if instance.quarantined_until is not None
        else f"waits for a run in the pool; if none claims it by {until}, it is retired{ending}",
    }[instance.state]
