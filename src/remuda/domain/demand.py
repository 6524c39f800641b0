"""Demand of runner sets: what GitHub says about their jobs, the records of it, and the number of runners they need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from enum import StrEnum

from remuda.domain.instance import HistoryEntry, State
from remuda.domain.text import truncate

#: Maximum characters of a text that GitHub sent.
MAX_TEXT = 300
MAX_JOB_LABELS = 20
#: Name of the lease of the process that serves the sets.
LISTENER_LEASE = "listener"
#: What follows the loss of a job, for people. The runner renews the lock of its job every minute, and GitHub fails the
#: job when the lock ends (actions/runner, `RenewJobRequestAsync` in JobDispatcher.cs).
AFTER_LOSS = "GitHub fails it within about 10 minutes"
#: Results of jobs that need no re-run. GitHub's messages and its API use different words.
SUCCESSES = frozenset({"succeeded", "success", "skipped"})
#: Results of a job whose runner was told to stop: if an instance shuts down, its runner still tells GitHub.
CANCELLED = frozenset({"canceled", "cancelled"})
#: Seconds for which GitHub keeps a job in its queue. An older record that waits has missed its end.
MAX_QUEUED_S = 86_400.0
#: How long a job's record is kept if no one says.
DEFAULT_RETENTION = timedelta(days=30)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemandStatistics:
    """GitHub's counts of a set's jobs and runners. They may be wrong for a while, in both directions."""

    #: Jobs with the labels of the set that no set has got yet. The capacity that the listener announces limits
    #: `assigned`, and not this count (cloudbase/garm: metrics/scaleset.go).
    available: int = 0
    acquired: int = 0
    #: Jobs that the set must run, including those that run.
    assigned: int = 0
    running: int = 0
    registered: int = 0
    busy: int = 0
    idle: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, max(0, getattr(self, item.name)))

    @property
    def unstarted(self) -> int:
        """Assigned jobs that have not started."""
        return max(0, self.assigned - self.running)


class JobEventKind(StrEnum):
    #: A job waits for a set to acquire it. GitHub Enterprise Server only; github.com assigns jobs directly.
    AVAILABLE = "available"
    ASSIGNED = "assigned"
    STARTED = "started"
    COMPLETED = "completed"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent:
    """One event of a job, as GitHub sent it. The texts are untrusted."""

    kind: JobEventKind
    #: Changes if an assignment lapses and the job is queued again.
    job_id: str
    #: Identifies the job in an acquisition; 0 on github.com.
    request_id: int = 0
    run_id: str = ""
    #: owner/name.
    repository: str = ""
    #: Path of the workflow file and its ref.
    workflow: str = ""
    display_name: str = ""
    #: Name of the event that started the run.
    event: str = ""
    labels: tuple[str, ...] = ()
    queued_at: datetime | None = None
    #: When GitHub assigned the job to the set, and to a runner.
    assigned_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    #: Result of a completed job: succeeded, failed, canceled, …
    result: str = ""
    runner_id: int = 0
    runner_name: str = ""

    def __post_init__(self) -> None:
        _bound(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemandMessage:
    message_id: int
    statistics: DemandStatistics
    events: tuple[JobEvent, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    """A job in GitHub's queue that no set has got. The texts are untrusted.

    Example: the second job of a set with `max = 1`, or a job with the label gpu if no set has this label.
    """

    #: Of GitHub's REST API. Messages about the same job, once a set has got it, have another one.
    job_id: str
    run_id: str
    repository: str
    name: str
    labels: tuple[str, ...]
    queued_at: datetime

    def __post_init__(self) -> None:
        _bound(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RepositoryQueue:
    """Jobs of a repository that no set has got, as they were read at one time."""

    repository: str
    read_at: datetime
    jobs: tuple[QueuedJob, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DemandRecord:
    """State of the listener for one set. Written before a message is acknowledged."""

    runner_set: str
    #: Number of the write, from 1. The store accepts only the successor of the stored one.
    revision: int = 0
    #: Scope and runner group of the set, to find it on GitHub after it was removed from the configuration.
    scope: str = ""
    runner_group: str = ""
    #: 0 before the set exists on GitHub.
    scale_set_id: int = 0
    #: Whether this pool has created the set, or was about to: then it may delete the set.
    has_created: bool = False
    #: The open session, which another listener may take over; empty if none exists.
    session_id: str = ""
    #: Process that has the session.
    owner: str = ""
    last_message_id: int = 0
    statistics: DemandStatistics = field(default_factory=DemandStatistics)
    #: When GitHub told these statistics; None if it has told none.
    counted_at: datetime | None = None
    #: Capacity that was last sent to GitHub.
    capacity: int = 0
    #: Queues of repositories with live runs. Each repository belongs to one of the sets that may serve it.
    queues: tuple[RepositoryQueue, ...] = ()
    updated_at: datetime
    #: Since when the set cannot be served; None if it can.
    failing_since: datetime | None = None
    #: Why its session does not work, and why it gets no machines; empty if it does.
    error: str = ""
    shortage: str = ""

    def __post_init__(self) -> None:
        _bound(self)

    @property
    def may_hide_jobs(self) -> bool:
        """Whether jobs may wait without a message: GitHub assigns no job, and so sends none, above the capacity.

        A job that is cancelled while it is available causes no message either (actions-runner-controller#3156).
        """
        return self.statistics.assigned >= self.capacity or self.statistics.available > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right of one process to serve the sets of a pool, or to run a workflow run again.

    It counts as expired for a reader that has seen no change of it for a time on its own clock, like a heartbeat.
    """

    #: Empty if the owner gave it up.
    owner: str
    beat: int
    #: When it was written, by AWS's or GitHub's time if its owner has it. Views judge by it whether the owner is alive;
    #: whether the lease has expired is decided by changes.
    beat_at: datetime | None = None
    #: When the store may delete it; None: never.
    forget_at: datetime | None = None
    #: Ids of the jobs for which a workflow run was run again.
    job_ids: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """A job of a runner set. For reports and explanations only: nothing is decided by it but its own re-run."""

    job_id: str
    runner_set: str
    #: As in `DemandRecord`.
    revision: int = 0
    run_id: str = ""
    repository: str = ""
    workflow: str = ""
    display_name: str = ""
    event: str = ""
    labels: tuple[str, ...] = ()
    queued_at: datetime | None = None
    assigned_at: datetime | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    result: str = ""
    runner_name: str = ""
    instance_id: str = ""
    #: When the job's machine got a spot notice, and when the job was run again because of it.
    interrupted_at: datetime | None = None
    rerun_at: datetime | None = None
    #: Why it is not run again, for people.
    rerun_detail: str = ""
    #: When its instance ended while it ran, and why, for people. GitHub fails such a job about ten minutes later.
    lost_at: datetime | None = None
    lost_detail: str = ""
    #: When the record was written first; the order of records.
    seen_at: datetime
    #: Time after which the record may be deleted.
    forget_at: datetime | None = None

    def __post_init__(self) -> None:
        _bound(self)

    def check(self) -> None:
        """Raise `ValueError` if a stored record has impossible values."""
        if not self.job_id:
            raise ValueError("its job id is empty")

    @property
    def expires_at(self) -> datetime:
        return self.forget_at or self.seen_at + DEFAULT_RETENTION

    @property
    def is_waiting(self) -> bool:
        return self.started_at is None and self.completed_at is None

    @property
    def is_running(self) -> bool:
        """Whether it runs, as far as GitHub knows."""
        return self.started_at is not None and self.completed_at is None

    @property
    def is_lost(self) -> bool:
        """Whether it was lost with its instance. GitHub may say later that it had ended just before."""
        if self.lost_at is None or self.result.lower() in SUCCESSES:
            return False
        had_ended = self.completed_at is not None and self.completed_at < self.lost_at
        return not had_ended or self.result.lower() in CANCELLED

    @property
    def loss(self) -> str:
        """Completes a sentence about a lost job; empty for others."""
        return f"instance lost: {self.lost_detail}" if self.is_lost else ""

    def with_event(self, event: JobEvent, *, now: datetime) -> JobRecord:
        """Merge an event. Events may come twice, late or in another order; what is known stays."""
        merged = _merged(self, event)
        if event.kind is JobEventKind.STARTED:
            return replace(merged, started_at=self.started_at or event.started_at or now)
        if event.kind is JobEventKind.COMPLETED:
            return replace(
                merged, completed_at=self.completed_at or event.finished_at or now, result=event.result or self.result
            )
        return merged

    def merged_into(self, stored: JobRecord | None) -> JobRecord:
        """What messages said about the job, added to the stored record, which was written in the meantime.

        Example: another listener has noted that the job was interrupted, and this one that the job has started.
        """
        if stored is None:
            return replace(self, revision=0)
        return replace(
            _merged(stored, self),
            started_at=stored.started_at or self.started_at,
            completed_at=stored.completed_at or self.completed_at,
            result=self.result or stored.result,
            instance_id=self.instance_id or stored.instance_id,
            forget_at=max(filter(None, (self.forget_at, stored.forget_at)), default=None),
        )


def _merged(known: JobRecord, newer: JobEvent | JobRecord) -> JobRecord:
    """The newer texts, if there are any, and the times that were known first."""
    return replace(
        known,
        run_id=newer.run_id or known.run_id,
        repository=newer.repository or known.repository,
        workflow=newer.workflow or known.workflow,
        display_name=newer.display_name or known.display_name,
        event=newer.event or known.event,
        labels=newer.labels or known.labels,
        queued_at=known.queued_at or newer.queued_at,
        assigned_at=known.assigned_at or newer.assigned_at,
        runner_name=newer.runner_name or known.runner_name,
    )


def count_waiting(statistics: DemandStatistics, known: Iterable[JobRecord] = (), *, queued: int = 0) -> int:
    """Jobs of a set that have not started, with those above its `max`, which GitHub has not assigned.

    GitHub's count, or that of the jobs that are `known` to wait and of those that were read from GitHub's queue, if one
    is larger: each may lag behind the others.
    """
    waiting = list(known)
    assigned = sum(job.assigned_at is not None for job in waiting)
    return max(statistics.unstarted + statistics.available, len(waiting), assigned + max(queued, statistics.available))


def _bound(record: JobEvent | JobRecord | QueuedJob | DemandRecord) -> None:
    """Sanitize and cut the texts of a record: they come from GitHub, and records must fit into a store's item."""
    for item in fields(record):
        value = getattr(record, item.name)
        if type(value) is str:
            object.__setattr__(record, item.name, truncate(value, MAX_TEXT))
        elif item.name == "labels":
            labels = tuple(truncate(label, MAX_TEXT) for label in value[:MAX_JOB_LABELS])
            object.__setattr__(record, item.name, labels)


def merge_events(
    known: Mapping[str, JobRecord], events: Iterable[JobEvent], *, runner_set: str, now: datetime
) -> dict[str, JobRecord]:
    """Return the records that the events change or add, by job id."""
    changed: dict[str, JobRecord] = {}
    for event in events:
        if not event.job_id:
            continue
        before = changed.get(event.job_id) or known.get(event.job_id)
        record = before or JobRecord(job_id=event.job_id, runner_set=runner_set, seen_at=now)
        after = record.with_event(event, now=now)
        if after != before:
            changed[event.job_id] = after
    return changed


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The end of an instance under its job."""

    at: datetime
    #: For people.
    detail: str


def find_loss(instance_id: str, history: Iterable[HistoryEntry], *, epoch: int) -> Loss | None:
    """Return the end of an instance in this epoch if it came before a release; after one, its job had ended."""
    for entry in history:
        if entry.is_end and entry.epoch == epoch and entry.source is State.RUNNING:
            return Loss(at=entry.at, detail=f"{instance_id} has ended: {entry.why}")
    return None
