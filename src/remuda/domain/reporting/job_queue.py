"""Jobs in GitHub's queue that no set has got: which of them this pool must serve, and which labels are missing.

The listener and the audit of `refresh` read the queues (`controlplane/job_queue.py`). The listener stores them in the
records of the sets, the audit in the record of the sweep; the newer reading of a repository counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from remuda.domain.demand import MAX_QUEUED_S, MAX_TEXT, DemandRecord, JobRecord, QueuedJob, RepositoryQueue
from remuda.domain.holder import RunHolder
from remuda.domain.instance import Instance
from remuda.domain.pool_config import PoolConfig
from remuda.domain.resources import is_class_name, labels_of_run, split_label
from remuda.domain.runner_set import RunnerSet, with_set_for
from remuda.domain.serialization import to_document
from remuda.domain.sweep_record import QueueAudit
from remuda.domain.text import truncate

#: Seconds between two audits of GitHub's queue, a little less than the interval of the schedule.
AUDIT_INTERVAL_S = 270.0
#: Age in seconds at which a reading of a queue is shown with its time: an audit was missed.
QUEUE_OLD_S = 2 * AUDIT_INTERVAL_S
#: Age in seconds at which a count that the listener must ask for is old. It asks every 15 seconds, and writes down at
#: least every 30 that nothing has changed.
COUNTS_OLD_S = 90.0
#: Seconds that a job may be in the queue before it counts: GitHub assigns a job at once if a set has room, and some
#: systems register a runner only when there is a job.
SETTLE_S = 20.0
#: Maximum number of jobs that are kept and reported, per repository and in total.
MAX_OVERDUE = 50
#: Maximum number of sets that a sentence names.
MAX_NAMED_SETS = 5

_SELF_HOSTED = "self-hosted"
#: Beginnings of the labels of GitHub's own runners.
_HOSTED_LABELS = ("ubuntu-", "windows-", "macos-")


@dataclass(frozen=True, kw_only=True, slots=True)
class Audience:
    """Who may serve the jobs of a repository: the runner sets, the runners of runs, and runners of other systems."""

    repository: str
    #: All sets of the pool.
    sets: Sequence[RunnerSet]
    #: The labels of the runners of each run with its own provision.
    runs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: The labels of each runner that is registered for the repository.
    others: Sequence[Sequence[str]] = ()

    def lacks_runner(self, job: QueuedJob, known: Iterable[JobRecord], *, now: datetime) -> bool:
        """Whether a queued job waits for a runner of this pool, and no set has got it. `known` are the sets' jobs."""
        # A runner that exists does not get further labels, so a job that names its run need not wait first.
        names_run = any(split_label(label)[0] in self.runs for label in job.labels)
        if not names_run and (now - job.queued_at).total_seconds() <= SETTLE_S:
            return False
        return not self._is_served(job) and not _is_known(job, known)

    def find_set(self, job: QueuedJob) -> RunnerSet | None:
        """The set that GitHub may give the job to."""
        return next((item for item in self.sets if item.covers(self.repository) and item.serves(job.labels)), None)

    def _is_served(self, job: QueuedJob) -> bool:
        """Whether the job needs no runner set: it is for GitHub's runners, or its run or scope has runners for it."""
        if self.find_set(job) is not None:
            return False
        wanted = _lowered(job.labels)
        of_run = _lowered(self.runs.get(find_run(job.labels, job.run_id, self.runs), ()))
        if wanted <= of_run:
            return True
        of_sets = {label.lower() for item in self.sets if item.covers(self.repository) for label in item.labels}
        if not wanted & ({_SELF_HOSTED} | of_sets | of_run):
            return True
        return any(wanted <= _lowered(labels) for labels in self.others)


def _lowered(labels: Iterable[str]) -> set[str]:
    return {label.lower() for label in labels}


def _is_known(job: QueuedJob, records: Iterable[JobRecord]) -> bool:
    """Whether a set has the job. Messages of sets identify jobs by other ids than the REST API."""
    return any(
        record.run_id == job.run_id and record.completed_at is None and record.display_name in {job.name, ""}
        for record in records
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class UnassignedJob:
    """A job in GitHub's queue that no set has got."""

    job: QueuedJob
    queue: RepositoryQueue
    #: The set that has its labels, or empty.
    set_name: str

    def counts(self, now: datetime) -> bool:
        """Whether it counts as waiting. If its queue was read some time ago, a set may have got it since."""
        return now - self.queue.read_at <= timedelta(seconds=COUNTS_OLD_S)


def find_unassigned(
    queues: Iterable[RepositoryQueue],
    sets: Sequence[RunnerSet],
    known: Sequence[JobRecord],
    *,
    runs: Mapping[str, Sequence[str]] | None = None,
    now: datetime,
) -> Iterator[UnassignedJob]:
    """The jobs of the queues without those that a set has got since the queue was read. `known` are the sets' jobs."""
    for queue in queues:
        audience = Audience(repository=queue.repository, sets=sets, runs=runs or {})
        for job in queue.jobs:
            if (now - job.queued_at).total_seconds() > MAX_QUEUED_S:
                # GitHub has ended it. The repository may be deleted, or not readable any more.
                continue
            if audience.lacks_runner(job, known, now=now):
                serving = audience.find_set(job)
                yield UnassignedJob(job=job, queue=queue, set_name=serving.name if serving else "")


# Storage ------------------------------------------------------------------------------------------------------------


def newest_queues(audit: QueueAudit, records: Iterable[DemandRecord]) -> list[RepositoryQueue]:
    """The newest reading of each repository, by the listener or by the audit."""
    found = {queue.repository.lower(): queue for queue in audit.queues}
    for queue in (queue for record in records for queue in record.queues):
        before = found.get(queue.repository.lower())
        if before is None or before.read_at <= queue.read_at:
            found[queue.repository.lower()] = queue
    return [found[name] for name in sorted(found)]


def is_old(queue: RepositoryQueue, now: datetime) -> bool:
    return now - queue.read_at > timedelta(seconds=QUEUE_OLD_S)


def fit_into_record(queues: Iterable[RepositoryQueue], *, room: int) -> tuple[RepositoryQueue, ...]:
    """The queues without the last jobs, for which there is no room in a record. `room` is in characters."""
    fitting = []
    for queue in queues:
        kept = []
        for job in queue.jobs:
            room -= stored_size(job)
            if room >= 0:
                kept.append(job)
        fitting.append(replace(queue, jobs=tuple(kept)))
    return tuple(fitting)


def stored_size(job: QueuedJob) -> int:
    """Characters of a job in a record."""
    return len(json.dumps(to_document(job)))


# Labels -------------------------------------------------------------------------------------------------------------


def labels_by_run(instances: Iterable[Instance]) -> dict[str, tuple[str, ...]]:
    """The labels of the runners of each run with its own provision."""
    found: dict[str, dict[str, None]] = {}
    for item in instances:
        if isinstance(item.holder, RunHolder) and item.assignment is not None:
            found.setdefault(item.holder.run_id, {}).update(dict.fromkeys(item.assignment.labels))
    return {run_id: tuple(labels) for run_id, labels in found.items()}


def find_run(labels: Iterable[str], run_id: str, runs: Mapping[str, Sequence[str]]) -> str:
    """The run whose runners a job means by its labels, else the job's own run; empty if it has no runners."""
    named = [run for label in labels if (run := split_label(label)[0]) in runs]
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
    others = [label for label in labels if split_label(label)[0] != (run or run_id)]
    if not of_run and run_id and len(others) < len(labels):
        problem = f"run {run_id} has no runners: they were released, or none were provisioned"
        classes = [label for label in others if is_class_name(label)]
        return f"{problem}; use runs-on: {_label_for(classes, run_id, run_id)}" if others else problem
    if missing:
        noun = "label" if len(missing) == 1 else "labels"
        problem = f"no runner has {noun} {_listed(missing)}"
    else:
        problem = f"no runner has all of the labels {_listed(labels)}"
    if of_run:
        classes = [label for label in others if labels_of_run(run, label)[1].lower() in known]
        label = _label_for(classes, run, run_id)
        return f"{problem}; run {run} has runners with labels {_listed(of_run)}: use runs-on: {label}"
    if not sets:
        return f"{problem}, and there is no runner set"
    named = [f"{item.name} ({_listed(item.labels)})" for item in sets[:MAX_NAMED_SETS]]
    more = f" and {len(sets) - len(named)} more" if len(sets) > len(named) else ""
    # GitHub does not change the labels of a set, and a new set with those of the job would compete for its jobs.
    wanted = {label.lower() for label in labels}
    part = next((item for item in sets if wanted > {label.lower() for label in item.labels}), None)
    reason = f"a set with more labels would get the jobs of {part.name}" if part else ""
    instead = f"; use runs-on: [{_listed(part.labels)}]: {reason}" if part else ""
    return f"{problem}; sets: {', '.join(named)}{more}{instead}"


def _label_for(classes: Sequence[str], run: str, run_id: str) -> str:
    """The label for `runs-on` of a job of the run `run_id` that asked for runners of `run`, perhaps with a class."""
    name = "${{ github.run_id }}" if run == run_id else run
    return labels_of_run(name, classes[0])[1] if len(classes) == 1 else name


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
    named = [split_label(label) for label in labels]
    if run_id and any(run == run_id or run.startswith(f"{run_id}-") for run, _ in named):
        # Runners of a run have no other labels.
        (run, resource_class), *others = named
        if others or resource_class not in {"", *classes}:
            return ()
        in_class = ("--resource-class", resource_class) if resource_class else ()
        return ("provision", *given, "--run-id", run, *in_class)
    if any(label.lower().startswith(_HOSTED_LABELS) for label in labels):
        return ()
    sets = with_set_for(labels, config.runner_sets, classes=classes, scope=scope)
    if sets is None:
        return ()
    return (command, *given, "--runner-sets", json.dumps([item.document() for item in sets]))


def _listed(labels: Iterable[str]) -> str:
    return ", ".join(truncate(label, MAX_TEXT) for label in labels)
