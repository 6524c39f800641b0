"""Status of runner sets: their jobs, machines and sessions, and why jobs wait."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from remuda.domain.demand import MAX_JOB_LABELS, MAX_TEXT, DemandRecord, DemandStatistics, JobRecord, Lease
from remuda.domain.instance import LIVE, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.resources import Reuse
from remuda.domain.runner_set import RunnerSet, with_set_for
from remuda.domain.signals import Report
from remuda.domain.supply import JOB_COUNTS_FOR_S, SetMachine
from remuda.domain.text import truncate

#: Seconds that a job may wait before the audit reports it. A cold start takes one to two minutes.
WAITING_LIMIT_S = 300.0
#: Seconds without a change of the listener's lease after which it counts as silent.
LISTENER_SILENT_S = 60.0
#: Seconds for which GitHub keeps a job in its queue. An older record that waits has missed its end.
MAX_QUEUED_S = 86_400.0
#: Seconds for which a failed launch explains why jobs wait.
LAUNCH_ERROR_S = 900.0
#: Maximum number of sets that a sentence names.
MAX_NAMED_SETS = 5
#: Maximum number of jobs that the audit reports.
MAX_OVERDUE = 50

#: Beginnings of the labels of GitHub's own runners.
_HOSTED_LABELS = ("ubuntu-", "windows-", "macos-")
_WAITING_JOB = "waiting-job:"
_UNAUDITED = "unaudited:"


class SessionState(StrEnum):
    OPEN = "open"
    #: No session has been opened yet.
    NONE = "none"
    #: The listener cannot serve the set; its record has the error.
    FAILING = "failing"
    #: No listener works.
    SILENT = "silent"


class WaitReason(StrEnum):
    #: No set, and no runner of the job's run, has all of its labels.
    NO_SET = "no-set"
    #: The set, or the pool, has its maximum of machines.
    AT_CAPACITY = "at-capacity"
    #: Machines cannot be launched: quota, spot capacity, …
    LAUNCH_FAILED = "launch-failed"
    #: The set has no working session.
    SESSION = "session"
    #: GitHub's counts or queue and the records of the pool disagree.
    DISAGREEMENT = "disagreement"
    #: A runner of the set is being started, or listens.
    STARTING = "starting"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSetStatus:
    name: str
    #: None if the set is no longer configured: it is being drained.
    runner_set: RunnerSet | None
    #: Jobs that have not started: GitHub's count, or that of the known jobs if it is larger.
    waiting: int
    #: GitHub's count of jobs that the set must run, including those that run.
    assigned: int
    #: Machines with a job.
    running: int
    #: Machines that listen for a job.
    hot: int
    #: Idle machines of the pool that the set may take. Sets of the same class share them.
    warm: int
    #: Machines that boot or register.
    launching: int
    max: int
    session: SessionState
    #: Process that has the session.
    owner: str = ""
    #: Since when the set cannot be served.
    failing_since: datetime | None = None
    #: Time of this status.
    at: datetime
    #: Time of the last message or count of GitHub; None if there was none.
    updated_at: datetime | None = None
    #: When the job that has waited longest was queued; None if no known job waits.
    oldest_queued_at: datetime | None = None
    #: Why jobs wait; None if none does.
    reason: WaitReason | None = None
    #: The same for people; also the error of a set that cannot be served.
    detail: str = ""

    @property
    def message_age_s(self) -> float | None:
        return None if self.updated_at is None else max(0.0, (self.at - self.updated_at).total_seconds())

    @property
    def oldest_wait_s(self) -> float | None:
        return None if self.oldest_queued_at is None else max(0.0, (self.at - self.oldest_queued_at).total_seconds())

    @property
    def machines(self) -> int:
        return self.running + self.hot + self.launching

    @property
    def is_at_capacity(self) -> bool:
        return self.machines >= self.max


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    """A job in GitHub's queue that no runner set serves, as the audit found it. The texts are untrusted."""

    job_id: str
    run_id: str
    repository: str
    name: str
    labels: tuple[str, ...]

    def __post_init__(self) -> None:
        for each in ("job_id", "run_id", "repository", "name"):
            object.__setattr__(self, each, truncate(getattr(self, each), MAX_TEXT))
        object.__setattr__(self, "labels", tuple(truncate(label, MAX_TEXT) for label in self.labels[:MAX_JOB_LABELS]))

    def anomaly(self) -> str:
        """Its name among the anomalies of the sweeps."""
        fields = [self.repository, self.run_id, self.job_id, self.name, self.labels]
        return _WAITING_JOB + json.dumps(fields, separators=(",", ":"))

    @classmethod
    def parse(cls, anomaly: str) -> QueuedJob | None:
        """None if the anomaly is another, or of another version."""
        if not anomaly.startswith(_WAITING_JOB):
            return None
        try:
            repository, run_id, job_id, name, labels = json.loads(anomaly.removeprefix(_WAITING_JOB))
            if not all(isinstance(text, str) for text in (repository, run_id, job_id, name, *labels)):
                return None
            return cls(repository=repository, run_id=run_id, job_id=job_id, name=name, labels=tuple(labels))
        except (ValueError, TypeError, RecursionError):
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class OverdueJob:
    """A job that waits longer than `WAITING_LIMIT_S`."""

    job_id: str
    run_id: str
    repository: str
    name: str
    labels: tuple[str, ...]
    #: Empty if no set serves it.
    runner_set: str
    queued_at: datetime
    reason: WaitReason
    #: The reason for people.
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenerStatus:
    """The process that has the lease of the pool's runner sets."""

    owner: str
    beat: int
    #: Since when its lease has not changed, if that is too long ago.
    silent_since: datetime | None = None

    @property
    def is_alive(self) -> bool:
        return bool(self.owner) and self.silent_since is None


@dataclass(frozen=True, kw_only=True, slots=True)
class DemandStatus:
    sets: tuple[RunnerSetStatus, ...] = ()
    #: Newest first.
    jobs: tuple[JobRecord, ...] = ()
    #: Jobs that wait too long, oldest first.
    overdue: tuple[OverdueJob, ...] = ()
    #: None if no listener ever ran.
    listener: ListenerStatus | None = None
    #: Sets for which GitHub's counts and the records have disagreed for long, with the sentence.
    disagreements: Mapping[str, str] = field(default_factory=dict)
    #: Repositories whose queue could not be audited, with the reason.
    unaudited: Mapping[str, str] = field(default_factory=dict)

    def find_set(self, name: str) -> RunnerSetStatus | None:
        return next((item for item in self.sets if item.name == name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemandInput:
    """Records that the status is derived from."""

    now: datetime
    config: PoolConfig
    demand: Mapping[str, DemandRecord]
    lease: Lease | None
    #: Newest first.
    jobs: Sequence[JobRecord]
    instances: Sequence[Instance]
    reports: Mapping[str, Report]
    #: Newest first.
    provisions: Sequence[Provision]
    first_seen: Mapping[str, datetime]


def demand_status(found: DemandInput) -> DemandStatus:
    sets = {item.name: item for item in found.config.runner_sets}
    names = [*sets, *sorted(name for name in found.demand if name not in sets)]
    listener = listener_status(found.lease, found.first_seen, now=found.now)
    statuses = tuple(_set_status(name, sets.get(name), found, listener) for name in names)
    return DemandStatus(
        sets=statuses,
        jobs=tuple(found.jobs),
        overdue=tuple(_overdue_jobs(statuses, found)),
        listener=listener,
        disagreements=_lasting_disagreements(statuses, found),
        unaudited=dict(pair for anomaly in found.first_seen if (pair := parse_unaudited(anomaly))[0]),
    )


# Listener -----------------------------------------------------------------------------------------------------------


def listener_anomaly(lease: Lease) -> str:
    """Name of the observation that a lease has this value: a sweep that sees it again has seen no heartbeat."""
    return f"listener:{lease.beat}:{lease.owner}"


def listener_status(lease: Lease | None, first_seen: Mapping[str, datetime], *, now: datetime) -> ListenerStatus | None:
    """Decide by the time of the sweep that saw the same lease first: one read of a lease does not tell its age."""
    if lease is None:
        return None
    since = first_seen.get(listener_anomaly(lease))
    is_silent = since is not None and now - since > timedelta(seconds=LISTENER_SILENT_S)
    return ListenerStatus(
        owner=truncate(lease.owner, MAX_TEXT), beat=lease.beat, silent_since=since if is_silent else None
    )


# Sets ---------------------------------------------------------------------------------------------------------------


def _set_status(
    name: str, runner_set: RunnerSet | None, found: DemandInput, listener: ListenerStatus | None
) -> RunnerSetStatus:
    record = found.demand.get(name)
    statistics = record.statistics if record else DemandStatistics()
    running, hot, launching = _count_machines(
        SetMachine(instance=item, report=found.reports.get(item.instance_id))
        for item in found.instances
        if item.runner_set == name
    )
    waiting = [job for job in found.jobs if job.runner_set == name and is_waiting(job, record, now=found.now)]
    session = _session(record, listener)
    status = RunnerSetStatus(
        name=name,
        runner_set=runner_set,
        waiting=max(count_waiting(statistics), len(waiting)),
        assigned=statistics.assigned,
        running=running,
        hot=hot,
        warm=sum(_is_warm_for(item, runner_set, found.config.reuse, found.now) for item in found.instances)
        if runner_set
        else 0,
        launching=launching,
        max=runner_set.max if runner_set else 0,
        session=session,
        owner=record.owner if record else "",
        failing_since=record.failing_since if record else None,
        at=found.now,
        updated_at=record.updated_at if record else None,
        oldest_queued_at=min((job.queued_at or job.seen_at for job in waiting), default=None),
    )
    return _with_reason(status, record, listener, found)


def count_waiting(statistics: DemandStatistics) -> int:
    return statistics.available + max(0, statistics.assigned - statistics.running)


def is_waiting(job: JobRecord, record: DemandRecord | None, *, now: datetime) -> bool:
    """Whether a job waits, as far as known: GitHub does not always tell that a job was cancelled or queued again."""
    if not job.is_waiting or waited_s(job, now) > MAX_QUEUED_S:
        return False
    counted = count_waiting(record.statistics) if record else 0
    return counted > 0 or waited_s(job, now) <= JOB_COUNTS_FOR_S


def waited_s(job: JobRecord, now: datetime) -> float:
    """Seconds from the queue to the start, or to the end of a job that never started, or until now."""
    end = job.started_at or job.completed_at or now
    return max(0.0, (end - (job.queued_at or job.seen_at)).total_seconds())


def _count_machines(machines: Iterable[SetMachine]) -> tuple[int, int, int]:
    """Machines with a job, that listen, and that boot or register."""
    running = hot = launching = 0
    for item in machines:
        if item.instance.state in {State.CREATED, State.CLAIMED}:
            launching += 1
        elif item.instance.state is not State.RUNNING or item.is_spent:
            # A runner that has had its job is no capacity any more.
            continue
        elif item.instance.is_bound or item.is_busy:
            running += 1
        elif item.is_listening:
            hot += 1
        else:
            launching += 1
    return running, hot, launching


def _is_warm_for(instance: Instance, runner_set: RunnerSet, reuse: Reuse, now: datetime) -> bool:
    """Whether the set may take the machine, judged by its record alone."""
    return (
        instance.state is State.IDLE
        and instance.retire_reason is None
        and not instance.is_quarantined(now)
        and instance.resource_class == runner_set.resource_class
        and instance.usage_class is runner_set.usage_class
        and instance.tier in reuse.tiers(runner_set.trust)
        and runner_set.patterns.matches(instance.instance_type)
    )


def _session(record: DemandRecord | None, listener: ListenerStatus | None) -> SessionState:
    if listener is not None and not listener.is_alive:
        return SessionState.SILENT
    if record is not None and record.error:
        return SessionState.FAILING
    return SessionState.OPEN if record is not None and record.session_id else SessionState.NONE


def _with_reason(
    status: RunnerSetStatus, record: DemandRecord | None, listener: ListenerStatus | None, found: DemandInput
) -> RunnerSetStatus:
    problem = _session_problem(status, record, listener)
    if not status.waiting:
        return replace(status, detail=problem)
    shortage = record.shortage if record else ""
    reason, detail = (WaitReason.SESSION, problem) if problem else _machine_reason(status, shortage, found)
    return replace(status, reason=reason, detail=detail)


def _session_problem(status: RunnerSetStatus, record: DemandRecord | None, listener: ListenerStatus | None) -> str:
    if status.session is SessionState.SILENT and listener is not None:
        since = f"since {listener.silent_since:%Y-%m-%d %H:%M:%S} UTC" if listener.silent_since else "at present"
        who = f" ({listener.owner})" if listener.owner else ""
        return f"the listener{who} is silent {since}: start remuda listen"
    if status.session is SessionState.FAILING and record is not None:
        return record.error
    if status.session is SessionState.NONE:
        return "no listener has a session for the set: start remuda listen"
    return ""


def _machine_reason(status: RunnerSetStatus, shortage: str, found: DemandInput) -> tuple[WaitReason, str]:
    if status.runner_set is None:
        return WaitReason.AT_CAPACITY, "the set is no longer configured and takes no more jobs"
    if status.is_at_capacity and status.waiting > status.hot + status.launching:
        return WaitReason.AT_CAPACITY, f"the set has {status.machines} of at most {status.max} runners"
    if error := shortage or _launch_error(status.name, found):
        return WaitReason.LAUNCH_FAILED, f"no machine can be acquired: {error}"
    live = sum(item.state in LIVE for item in found.instances)
    if not status.launching and not status.hot and live >= found.config.max_instances:
        return WaitReason.AT_CAPACITY, f"the pool has {live} of at most {found.config.max_instances} instances"
    if status.launching:
        return WaitReason.STARTING, f"{_machines(status.launching)} of the set {_verb(status.launching, 'start')}"
    if status.hot:
        count = status.hot
        return WaitReason.STARTING, f"{_machines(count)} of the set {_verb(count, 'listen')}; GitHub assigns the job"
    return WaitReason.STARTING, "the listener takes a machine from the pool or launches one"


def _machines(count: int) -> str:
    return f"{count} machine{'' if count == 1 else 's'}"


def _verb(count: int, verb: str) -> str:
    return f"{verb}s" if count == 1 else verb


def _launch_error(name: str, found: DemandInput) -> str:
    """The error of the set's last launch, unless it succeeded or is long ago."""
    horizon = found.now - timedelta(seconds=LAUNCH_ERROR_S)
    for provision in found.provisions:
        outcome = provision.outcome
        if provision.runner_set != name or outcome is None:
            continue
        if outcome.ended_at < horizon:
            return ""
        errors = [error for launch in outcome.launches for error in launch.errors if launch.launched < launch.count]
        return truncate("; ".join(errors) or outcome.error, MAX_TEXT)
    return ""


# Labels -------------------------------------------------------------------------------------------------------------


def labels_by_run(instances: Iterable[Instance]) -> dict[str, tuple[str, ...]]:
    """The labels of the runners of each run with its own provision."""
    found: dict[str, dict[str, None]] = {}
    for item in instances:
        if item.run_id and not item.runner_set and item.assignment is not None:
            found.setdefault(item.run_id, {}).update(dict.fromkeys(item.assignment.labels))
    return {run_id: tuple(labels) for run_id, labels in found.items()}


def find_run(labels: Iterable[str], run_id: str, runs: Mapping[str, Sequence[str]]) -> str:
    """The run whose runners a job means by its labels, else the job's own run; empty if it has no runners."""
    named = [label for label in labels if label in runs]
    return named[0] if named else run_id if run_id in runs else ""


def describe_missing_labels(
    labels: Sequence[str],
    sets: Sequence[RunnerSet],
    *,
    run_id: str = "",
    runs: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Say why no runner serves a job with these labels. `runs` has the labels of the runners of each run.

    GitHub gives a job to a runner that has all of its labels, see docs/adr/0040-default-labels.md.
    """
    run = find_run(labels, run_id, runs or {})
    of_run = (runs or {}).get(run, ())
    # A job that names a run is for the runners of this run, whatever labels the sets have.
    known = {label.lower() for label in of_run} or {label.lower() for item in sets for label in item.labels}
    missing = [label for label in labels if label.lower() not in known]
    if not of_run and run_id and run_id in labels:
        return f"run {run_id} has no runners: they were released, or none were provisioned"
    if missing:
        noun = "label" if len(missing) == 1 else "labels"
        problem = f"no runner has {noun} {_listed(missing)}"
    else:
        problem = f"no runner has all of the labels {_listed(labels)}"
    if of_run:
        label = "${{ github.run_id }}" if run == run_id else run
        return f"{problem}; run {run} has runners with labels {_listed(of_run)}: use runs-on: {label}"
    if not sets:
        return f"{problem}, and there is no runner set"
    named = [f"{item.name} ({_listed(item.labels)})" for item in sets[:MAX_NAMED_SETS]]
    more = f" and {len(sets) - len(named)} more" if len(sets) > len(named) else ""
    return f"{problem}; sets: {', '.join(named)}{more}"


def command_for_labels(
    labels: Sequence[str],
    config: PoolConfig,
    *,
    run_id: str,
    scope: str,
    command: str = "refresh",
    is_scope_given: bool = False,
) -> tuple[str, ...]:
    """The words of a command after `remuda` that gets runners for a job that no runner serves; none if there is none.

    `command` is the one that changes the sets of the pool: `deploy` on AWS, where the refresh of the stack applies the
    stack's own. `scope` is that of a new set. Example: `refresh --runner-sets '[{"name": "gpu", …}]'`.
    """
    given = ("--github-scope", scope) if is_scope_given else ()
    classes = [item.name for item in config.classes]
    of_run = [label for label in labels if label == run_id or label.startswith(f"{run_id}-")]
    if run_id and of_run:
        others = [label for label in labels if label not in of_run]
        if len(of_run) > 1 or len(others) > 1 or not set(others) <= set(classes):
            return ()
        in_class = ("--resource-class", *others) if others else ()
        return ("provision", *given, "--run-id", of_run[0], *in_class)
    if any(label.lower().startswith(_HOSTED_LABELS) for label in labels):
        return ()
    sets = with_set_for(labels, config.runner_sets, classes=classes, scope=scope)
    if sets is None:
        return ()
    return (command, *given, "--runner-sets", json.dumps([item.document() for item in sets]))


def _listed(labels: Iterable[str]) -> str:
    return ", ".join(truncate(label, MAX_TEXT) for label in labels)


def sets_for(repository: str, sets: Iterable[RunnerSet]) -> list[RunnerSet]:
    """The sets that a repository's jobs may use."""
    repository = repository.lower()
    owner = repository.partition("/")[0]
    return [item for item in sets if item.scope.lower() in {repository, owner}]


# Audit --------------------------------------------------------------------------------------------------------------


def _overdue_jobs(statuses: Sequence[RunnerSetStatus], found: DemandInput) -> list[OverdueJob]:
    by_name = {item.name: item for item in statuses}
    jobs = [*_overdue_records(by_name, found), *_overdue_in_queue(by_name, found)]
    return sorted(jobs, key=lambda item: (item.queued_at, item.job_id))[:MAX_OVERDUE]


def _overdue_records(by_name: Mapping[str, RunnerSetStatus], found: DemandInput) -> Iterator[OverdueJob]:
    for job in found.jobs:
        status = by_name.get(job.runner_set)
        record = found.demand.get(job.runner_set)
        if status is None or not is_waiting(job, record, now=found.now) or waited_s(job, found.now) <= WAITING_LIMIT_S:
            continue
        reason, detail = explain_wait(job, status, record)
        yield OverdueJob(
            job_id=job.job_id,
            run_id=job.run_id,
            repository=job.repository,
            name=job.display_name,
            labels=job.labels,
            runner_set=job.runner_set,
            queued_at=job.queued_at or job.seen_at,
            reason=reason,
            detail=detail,
        )


def explain_wait(job: JobRecord, status: RunnerSetStatus, record: DemandRecord | None) -> tuple[WaitReason, str]:
    """Why a job of a set waits."""
    counted = count_waiting(record.statistics) if record else 0
    if status.session is SessionState.OPEN and not counted:
        after = f" as {job.display_name}" if job.display_name else ""
        text = f"GitHub counts no waiting job in the set: it was cancelled, or queued again{after} under another id"
        return WaitReason.DISAGREEMENT, text
    return status.reason or WaitReason.STARTING, status.detail or "the listener takes a machine for it"


def _overdue_in_queue(by_name: Mapping[str, RunnerSetStatus], found: DemandInput) -> Iterator[OverdueJob]:
    """Jobs that the last audit found in GitHub's queue, with the reason by the present state."""
    for anomaly, queued_at in found.first_seen.items():
        job = QueuedJob.parse(anomaly)
        if job is None:
            continue
        candidates = sets_for(job.repository, found.config.runner_sets)
        serving = next((item for item in candidates if item.serves(job.labels)), None)
        if serving is None:
            runs = labels_by_run(found.instances)
            reason = WaitReason.NO_SET
            detail = describe_missing_labels(job.labels, candidates, run_id=job.run_id, runs=runs)
        else:
            reason, detail = _why_not_assigned(by_name[serving.name])
        yield OverdueJob(
            job_id=job.job_id,
            run_id=job.run_id,
            repository=job.repository,
            name=job.name,
            labels=job.labels,
            runner_set=serving.name if serving else "",
            queued_at=queued_at,
            reason=reason,
            detail=detail,
        )


def _why_not_assigned(status: RunnerSetStatus) -> tuple[WaitReason, str]:
    """GitHub assigns jobs to a set only while its session is open, and not more than its capacity."""
    if status.session is not SessionState.OPEN:
        return WaitReason.SESSION, status.detail
    if status.is_at_capacity or status.assigned >= status.max:
        return WaitReason.AT_CAPACITY, f"set {status.name} has all of its {status.max} runners in use"
    text = f"GitHub has not assigned it to set {status.name}, which has its labels; cancel it and run it again"
    return WaitReason.DISAGREEMENT, text


def unaudited_anomaly(repository: str, reason: str) -> str:
    return _UNAUDITED + json.dumps([truncate(repository, MAX_TEXT), truncate(reason, MAX_TEXT)])


def parse_unaudited(anomaly: str) -> tuple[str, str]:
    """Repository and reason; empty if the anomaly is another."""
    if not anomaly.startswith(_UNAUDITED):
        return "", ""
    try:
        repository, reason = json.loads(anomaly.removeprefix(_UNAUDITED))
    except (ValueError, TypeError, RecursionError):
        return "", ""
    return truncate(str(repository), MAX_TEXT), truncate(str(reason), MAX_TEXT)


def disagreement_anomaly(name: str) -> str:
    return f"demand-disagrees:{name}"


def find_disagreement(status: RunnerSetStatus, record: DemandRecord | None, jobs: Iterable[JobRecord]) -> str:
    """Say how GitHub's count and the known jobs of a set differ at this moment. Empty if they agree."""
    if record is None or status.session is not SessionState.OPEN:
        return ""
    counted = count_waiting(record.statistics)
    known = sum(job.runner_set == status.name and job.is_waiting for job in jobs)
    if counted and not known:
        return f"GitHub counts {counted} waiting job{'' if counted == 1 else 's'}, but has sent none that waits"
    return ""


def _lasting_disagreements(statuses: Sequence[RunnerSetStatus], found: DemandInput) -> dict[str, str]:
    """A difference is normal while a message is under way. The sweeps record how long it lasts."""
    limit = timedelta(seconds=WAITING_LIMIT_S)
    lasting = {}
    for status in statuses:
        since = found.first_seen.get(disagreement_anomaly(status.name))
        text = find_disagreement(status, found.demand.get(status.name), found.jobs)
        if text and since is not None and found.now - since > limit:
            lasting[status.name] = text
    return lasting
