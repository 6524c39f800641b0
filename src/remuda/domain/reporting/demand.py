"""Status of runner sets: their jobs, machines and sessions, and why jobs wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from remuda.domain.demand import (
    MAX_QUEUED_S,
    MAX_TEXT,
    DemandRecord,
    DemandStatistics,
    JobRecord,
    Lease,
    count_waiting,
)
from remuda.domain.instance import LIVE, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.reporting.job_queue import (
    COUNTS_OLD_S,
    MAX_OVERDUE,
    UnassignedJob,
    describe_missing_labels,
    find_run,
    find_unassigned,
    is_old,
    labels_by_run,
    newest_queues,
)
from remuda.domain.resources import Reuse
from remuda.domain.runner_set import RunnerSet
from remuda.domain.signals import Report
from remuda.domain.supply import JOB_COUNTS_FOR_S, SetMachine
from remuda.domain.sweep_record import AnomalyKind, SweepRecord
from remuda.domain.text import truncate
from remuda.domain.thresholds import HEARTBEAT_DEAD_AFTER_S

#: Seconds that a job may wait before the audit reports it. A cold start takes one to two minutes.
WAITING_LIMIT_S = 300.0
#: Age in seconds of the listener's last heartbeat at which it counts as silent.
LISTENER_SILENT_S = 60.0
#: Seconds for which a failed launch explains why jobs wait.
LAUNCH_ERROR_S = 900.0


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
    #: Jobs that have not started, with those above `max`, which GitHub has not assigned: GitHub's count, or that of the
    #: known jobs if it is larger.
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
    #: Whether the counts of jobs are the present ones. If not, they are those of `known_at`.
    is_current: bool = True
    #: Time of the counts of jobs; None if GitHub has told none.
    known_at: datetime | None = None
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

    @property
    def counted_at(self) -> datetime | None:
        """Time of the counts, if they are older than this status; None if they are proven to be those of now."""
        return self.known_at if self.known_at is not None and self.known_at < self.at else None

    @property
    def summary(self) -> str:
        """Whether jobs wait, and why, for people. Example: "3 wait: at max 3"."""
        why = f": {self.detail}" if self.detail else ""
        if self.is_current and self.waiting:
            return f"{self.waiting} wait{'s' if self.waiting == 1 else ''}{why}"
        if self.is_current:
            return f"no job waited at {self.counted_at:%H:%M:%S} UTC" if self.counted_at else "no job waits"
        before = f"; {self.waiting or 'none'} did at {_time(self.known_at)}" if self.known_at else ""
        return f"it is not known whether jobs wait{before}{why}"


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingJob:
    """A job that waits, with the reason."""

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
    #: When it was in GitHub's queue; None if a message told of it.
    read_at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenerStatus:
    """The process that has the lease of the pool's runner sets."""

    owner: str
    beat: int
    #: Its last heartbeat, if that is too long ago or was the end of the process.
    silent_since: datetime | None = None

    @property
    def is_alive(self) -> bool:
        return bool(self.owner) and self.silent_since is None


@dataclass(frozen=True, kw_only=True, slots=True)
class DemandStatus:
    sets: tuple[RunnerSetStatus, ...] = ()
    #: Newest first.
    jobs: tuple[JobRecord, ...] = ()
    #: Jobs in GitHub's queue that no set has got, oldest first.
    queued: tuple[WaitingJob, ...] = ()
    #: Jobs that wait too long, oldest first. Includes those of them that no set has got.
    overdue: tuple[WaitingJob, ...] = ()
    #: When the queue of each repository was read, by its name in lower case.
    queues_read_at: Mapping[str, datetime] = field(default_factory=dict)
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
    sweep: SweepRecord


def demand_status(found: DemandInput) -> DemandStatus:
    sets = {item.name: item for item in found.config.runner_sets}
    names = [*sets, *sorted(name for name in found.demand if name not in sets)]
    listener = listener_status(found.lease, now=found.now)
    queues = newest_queues(found.sweep.audit, found.demand.values())
    runs = labels_by_run(found.instances)
    unassigned = list(find_unassigned(queues, found.config.runner_sets, found.jobs, runs=runs, now=found.now))
    statuses = tuple(_set_status(name, sets.get(name), found, listener, unassigned) for name in names)
    by_name = {item.name: item for item in statuses}
    queued = sorted((_explain_queued(item, by_name, found) for item in unassigned), key=_by_age)
    return DemandStatus(
        sets=statuses,
        jobs=tuple(found.jobs),
        queued=tuple(queued[:MAX_OVERDUE]),
        overdue=tuple(_overdue_jobs(by_name, queued, found)),
        listener=listener,
        disagreements=_lasting_disagreements(statuses, found),
        unaudited={item.repository: item.reason for item in found.sweep.audit.unreadable},
        queues_read_at={queue.repository.lower(): queue.read_at for queue in queues},
    )


# Listener -----------------------------------------------------------------------------------------------------------


def listener_status(lease: Lease | None, *, now: datetime) -> ListenerStatus | None:
    """Decide by the time in the lease, which its owner wrote.

    Both correct their clocks by the time of AWS or GitHub. Without an answer of these, each uses its own clock, and a
    difference between the clocks counts as silence, or hides it.
    """
    if lease is None:
        return None
    beat_at = lease.beat_at
    is_silent = not lease.owner or (beat_at is not None and now - beat_at > timedelta(seconds=LISTENER_SILENT_S))
    return ListenerStatus(
        owner=truncate(lease.owner, MAX_TEXT), beat=lease.beat, silent_since=beat_at if is_silent else None
    )


# Sets ---------------------------------------------------------------------------------------------------------------


def _set_status(
    name: str,
    runner_set: RunnerSet | None,
    found: DemandInput,
    listener: ListenerStatus | None,
    unassigned: Iterable[UnassignedJob],
) -> RunnerSetStatus:
    record = found.demand.get(name)
    statistics = record.statistics if record else DemandStatistics()
    running, hot, launching = _count_machines(
        _set_machine(item, found) for item in found.instances if item.runner_set == name
    )
    waiting = [job for job in found.jobs if job.runner_set == name and is_waiting(job, record, now=found.now)]
    session = _session(record, listener)
    known_at = _known_at(record, session, listener, now=found.now)
    # Those that were read some time ago may have been assigned since.
    read = [item.job for item in unassigned if item.set_name == name and item.counts(found.now)]
    oldest = [job.queued_at or job.seen_at for job in waiting] + [job.queued_at for job in read]
    status = RunnerSetStatus(
        name=name,
        runner_set=runner_set,
        waiting=count_waiting(statistics, waiting, queued=len(read)),
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
        is_current=session is SessionState.OPEN and known_at is not None and not _is_past(known_at, found.now),
        known_at=known_at,
        updated_at=(record.counted_at or record.updated_at) if record else None,
        oldest_queued_at=min(oldest, default=None),
    )
    return _with_reason(status, record, listener, found)


def _set_machine(instance: Instance, found: DemandInput) -> SetMachine:
    report = found.reports.get(instance.instance_id)
    limit = timedelta(seconds=HEARTBEAT_DEAD_AFTER_S + found.config.lifetimes.margin_s)
    is_dead = report is not None and report.beat_at is not None and found.now - report.beat_at > limit
    return SetMachine(instance=instance, report=report, dead=is_dead)


def _known_at(
    record: DemandRecord | None, session: SessionState, listener: ListenerStatus | None, *, now: datetime
) -> datetime | None:
    """When the counts of a set's jobs were the present ones.

    GitHub sends a message for every change, so an open session proves the counts, whatever their age, unless jobs may
    wait without a message: then they are as old as the last answer.
    """
    if record is None:
        return None
    counted_at = record.counted_at or record.updated_at
    if record.may_hide_jobs:
        return counted_at
    ends = {
        SessionState.OPEN: now,
        SessionState.FAILING: record.failing_since,
        SessionState.SILENT: listener.silent_since if listener else None,
        SessionState.NONE: record.updated_at,
    }
    return max(counted_at, ends[session] or counted_at)


def _is_past(at: datetime, now: datetime) -> bool:
    return now - at > timedelta(seconds=COUNTS_OLD_S)


def is_waiting(job: JobRecord, record: DemandRecord | None, *, now: datetime) -> bool:
    """Whether a job waits, as far as known: GitHub does not always tell that a job was cancelled or queued again."""
    if not job.is_waiting or waited_s(job, now) > MAX_QUEUED_S:
        return False
    counts = record.statistics if record else DemandStatistics()
    # Jobs above the capacity are counted, too, and say nothing about one that was assigned.
    counted = counts.unstarted if job.assigned_at is not None else count_waiting(counts)
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
        elif item.is_listening and not item.dead:
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
    if not problem and not status.is_current:
        problem = "GitHub does not tell its counts: see the log of remuda listen"
    if not status.waiting:
        return replace(status, detail=problem)
    shortage = record.shortage if record else ""
    reason, detail = (WaitReason.SESSION, problem) if problem else _machine_reason(status, shortage, found)
    return replace(status, reason=reason, detail=detail)


def _session_problem(status: RunnerSetStatus, record: DemandRecord | None, listener: ListenerStatus | None) -> str:
    if status.session is SessionState.SILENT and listener is not None:
        since = f"since {_time(listener.silent_since)}" if listener.silent_since else "at present"
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
        return WaitReason.AT_CAPACITY, f"at max {status.max}"
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


# Waiting jobs -------------------------------------------------------------------------------------------------------


def _explain_queued(item: UnassignedJob, by_name: Mapping[str, RunnerSetStatus], found: DemandInput) -> WaitingJob:
    job = item.job
    if item.set_name:
        reason, detail = _why_not_assigned(by_name[item.set_name])
    else:
        candidates = [item for item in found.config.runner_sets if item.covers(job.repository)]
        runs = labels_by_run(found.instances)
        reason = WaitReason.NO_SET
        detail = describe_missing_labels(job.labels, candidates, run_id=job.run_id, runs=runs)
    if is_old(item.queue, found.now):
        detail += f" (GitHub's queue was last read at {_time(item.queue.read_at)})"
    return WaitingJob(
        job_id=job.job_id,
        run_id=job.run_id,
        repository=job.repository,
        name=job.name,
        labels=job.labels,
        runner_set=item.set_name,
        queued_at=job.queued_at,
        reason=reason,
        detail=detail,
        read_at=item.queue.read_at,
    )


def _by_age(job: WaitingJob) -> tuple[datetime, str]:
    return job.queued_at, job.job_id


def _overdue_jobs(
    by_name: Mapping[str, RunnerSetStatus], queued: Iterable[WaitingJob], found: DemandInput
) -> list[WaitingJob]:
    """Jobs that wait for long, and those that no runner of their run will ever take."""
    horizon, runs = found.now - timedelta(seconds=WAITING_LIMIT_S), labels_by_run(found.instances)
    late = [job for job in queued if job.queued_at < horizon or find_run(job.labels, "", runs)]
    return sorted([*late, *_overdue_records(by_name, found)], key=_by_age)[:MAX_OVERDUE]


def _overdue_records(by_name: Mapping[str, RunnerSetStatus], found: DemandInput) -> Iterator[WaitingJob]:
    for job in found.jobs:
        status = by_name.get(job.runner_set)
        record = found.demand.get(job.runner_set)
        if status is None or not is_waiting(job, record, now=found.now) or waited_s(job, found.now) <= WAITING_LIMIT_S:
            continue
        reason, detail = explain_wait(job, status, record)
        yield WaitingJob(
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


def _why_not_assigned(status: RunnerSetStatus) -> tuple[WaitReason, str]:
    """GitHub assigns jobs to a set only while its session is open, and not more than its capacity."""
    if status.session is not SessionState.OPEN:
        return WaitReason.SESSION, status.detail
    if status.is_at_capacity or status.assigned >= status.max:
        return WaitReason.AT_CAPACITY, f"set {status.name} is at max {status.max}"
    text = f"GitHub has not assigned it to set {status.name}, which has its labels; cancel it and run it again"
    return WaitReason.DISAGREEMENT, text


def find_disagreement(status: RunnerSetStatus, record: DemandRecord | None, jobs: Iterable[JobRecord]) -> str:
    """Say how GitHub's count and the known jobs of a set differ at this moment. Empty if they agree."""
    if record is None or status.session is not SessionState.OPEN:
        return ""
    counts = record.statistics
    # GitHub sends no message about jobs above the capacity.
    counted = count_waiting(counts) if counts.assigned < record.capacity else counts.unstarted
    known = sum(job.runner_set == status.name and job.is_waiting for job in jobs)
    if counted and not known:
        return f"GitHub counts {counted} waiting job{'' if counted == 1 else 's'}, but has sent none that waits"
    return ""


def _lasting_disagreements(statuses: Sequence[RunnerSetStatus], found: DemandInput) -> dict[str, str]:
    """A difference is normal while a message is under way. The sweeps record how long it lasts."""
    limit = timedelta(seconds=WAITING_LIMIT_S)
    lasting = {}
    for status in statuses:
        since = found.sweep.first_seen(AnomalyKind.DISAGREEMENT, status.name)
        text = find_disagreement(status, found.demand.get(status.name), found.jobs)
        if text and since is not None and found.now - since > limit:
            lasting[status.name] = text
    return lasting
