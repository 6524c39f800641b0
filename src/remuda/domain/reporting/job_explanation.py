"""Explanation of the jobs of runner sets: queue, machine, start, end and reset, and why a job waits."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from remuda.domain.demand import AFTER_LOSS, SUCCESSES, JobRecord
from remuda.domain.holder import set_subject
from remuda.domain.instance import HistoryEntry
from remuda.domain.pool_config import PoolConfig, parse_runner_name
from remuda.domain.provision import Provision, RunnerSource
from remuda.domain.reporting.demand import (
    DemandInput,
    DemandStatus,
    RunnerSetStatus,
    WaitingJob,
    WaitReason,
    explain_wait,
    is_waiting,
    waited_s,
)
from remuda.domain.reporting.explanation import (
    ExplainedEvent,
    Explanation,
    ExplanationInput,
    Severity,
    describe_next,
    explain_entry,
)
from remuda.domain.reporting.job_queue import command_for_labels, describe_missing_labels
from remuda.domain.timestamps import after

#: Newest jobs and provisions of a set that its explanation lists.
MAX_LISTED = 20
_BIND = "bind"


def explain_job(job: JobRecord, records: ExplanationInput, demand: DemandInput, status: DemandStatus) -> Explanation:
    return Explanation(
        kind="job",
        subject=job.job_id,
        title=f"Job {_name(job)}: {describe_job(job, demand)}",
        events=_in_order(_job_events([job], records, demand)),
        next_steps=tuple(_next_steps([job], records, demand, status)),
    )


def explain_jobs(
    run_id: str, jobs: Sequence[JobRecord], records: ExplanationInput, demand: DemandInput, status: DemandStatus
) -> Explanation:
    """Explain the jobs of one run: those that a set has got, and those that only GitHub's queue knows."""
    queued = [job for job in status.queued if job.run_id == run_id]
    waiting = sum(_is_waiting(job, demand) for job in jobs) + len(queued)
    running = sum(job.is_running and not job.is_lost for job in jobs)
    total = len(jobs) + len(queued)
    counts = f"{total} job{'' if total == 1 else 's'}, {waiting} waiting, {running} running"
    if lost := sum(job.is_lost for job in jobs):
        counts += f", {lost} lost"
    origin = f" of {jobs[-1].repository}" if jobs[-1].repository else ""
    return Explanation(
        kind="run",
        subject=run_id,
        title=f"Run {run_id}{origin}: {counts}",
        events=_in_order(_job_events(jobs, records, demand)),
        next_steps=(
            *_next_steps(jobs, records, demand, status),
            *(f"job {job.name or job.job_id} waits: {job.detail}" for job in queued),
            _describe_queue(jobs[-1].repository, status),
        ),
    )


def _describe_queue(repository: str, status: DemandStatus) -> str:
    """Say when GitHub's queue was read: GitHub does not tell of jobs that no set has got."""
    read_at = status.queues_read_at.get(repository.lower())
    if read_at is None:
        return f"GitHub's queue of {repository or 'its repository'} was not read yet: other jobs of the run may wait"
    return f"GitHub's queue was read at {read_at:%Y-%m-%d %H:%M:%S} UTC"


def explain_queued(subject: str, jobs: Sequence[WaitingJob], config: PoolConfig, command: str = "") -> Explanation:
    """Explain a job, or the jobs of a run, that only GitHub's queue knows. `command` is that of `commands_for`."""
    first, is_run = jobs[0], subject == jobs[0].run_id
    title = f"Run {subject} of {first.repository}: {len(jobs)} waiting, none started"
    events = tuple(
        ExplainedEvent(
            at=job.queued_at,
            what=f"job {job.name or job.job_id} queued with labels {', '.join(job.labels)}",
            why=job.repository,
        )
        for job in jobs
    )
    waits = [f"job {job.name or job.job_id} waits: {job.detail}" for job in jobs]
    commands = dict.fromkeys(text for job in jobs for text in commands_for(job, config, command))
    return Explanation(
        kind="run" if is_run else "job",
        subject=subject,
        title=title if is_run else f"Job {first.name or first.job_id} of run {first.run_id}: waits",
        events=events,
        next_steps=(*waits, *commands),
    )


def commands_for(job: WaitingJob, config: PoolConfig, command: str) -> tuple[str, ...]:
    """A sentence with the command that gets a runner for the job, if no set serves it.

    `command` is the one that changes the sets of the pool; empty if the reader has no command line.
    """
    if job.reason is not WaitReason.NO_SET or not command:
        return ()
    # Tokens are those of the scopes that the pool serves.
    owner = job.repository.partition("/")[0].lower()
    scopes = [item.scope for item in config.tokens if item.scope.lower() in {owner, job.repository.lower()}]
    scope = next(iter(scopes), job.repository)
    words = command_for_labels(job.labels, config, run_id=job.run_id, scope=scope, command=command, is_scope_given=True)
    return (f"to get a runner: remuda {shlex.join(words)}",) if words else ()


def explain_set(status: RunnerSetStatus, demand: DemandInput, provisions: Sequence[Provision]) -> Explanation:
    """Explain a set by its newest jobs and provisions. `provisions` are its own, newest first."""
    runner_set = status.runner_set
    jobs = [job for job in demand.jobs if job.runner_set == status.name]
    events = [event for job in jobs[:MAX_LISTED] for event in _events_in_set(job)]
    events += [event for provision in provisions[:MAX_LISTED] for event in _provision_events(provision)]
    counts = f"{status.waiting} waiting, {status.running} running, {status.hot} hot, {status.launching} launching"
    labels = f"labels {', '.join(runner_set.labels)}" if runner_set else "no longer configured"
    return Explanation(
        kind="set",
        subject=set_subject(status.name),
        title=f"Runner set {status.name} ({labels}): {counts}, at most {status.max}",
        events=_in_order(events),
        next_steps=tuple(_next_steps_of_set(status, demand)),
    )


def _is_waiting(job: JobRecord, demand: DemandInput) -> bool:
    return is_waiting(job, demand.demand.get(job.runner_set), now=demand.now)


def describe_job(job: JobRecord, demand: DemandInput) -> str:
    if job.completed_at is not None:
        started = "" if job.started_at else " before it started"
        loss = f", {job.loss}" if job.loss else ""
        return f"{job.result or 'completed'}{started}{loss}"
    if job.is_lost:
        return job.loss
    if job.started_at is not None:
        return f"runs since {job.started_at:%H:%M:%S} UTC"
    if _is_waiting(job, demand):
        return f"waits for {waited_s(job, demand.now):.0f} s"
    return "never started; it was cancelled, or queued again under another id"


def _name(job: JobRecord) -> str:
    return f"{job.display_name} ({job.job_id})" if job.display_name else job.job_id


def _in_order(events: Iterable[ExplainedEvent]) -> tuple[ExplainedEvent, ...]:
    return tuple(sorted(events, key=lambda event: event.at))


# Events -------------------------------------------------------------------------------------------------------------


def _job_events(jobs: Sequence[JobRecord], records: ExplanationInput, demand: DemandInput) -> Iterator[ExplainedEvent]:
    for job in jobs:
        yield from _own_events(job)
        for instance_id, entry in _machine_entries(job, records, demand):
            if entry.transition != _BIND:
                # The start of the job says the same.
                yield explain_entry(instance_id, entry, with_run=True)


def _own_events(job: JobRecord) -> Iterator[ExplainedEvent]:
    name = f"job {job.display_name or job.job_id}"
    if job.queued_at is not None:
        origin = ", ".join(text for text in (job.repository, job.workflow, job.event) if text)
        yield ExplainedEvent(at=job.queued_at, what=f"{name} queued with labels {', '.join(job.labels)}", why=origin)
    if job.assigned_at is not None:
        yield ExplainedEvent(at=job.assigned_at, what=f"{name} assigned to set {job.runner_set}", why="by its labels")
    if job.started_at is not None:
        yield ExplainedEvent(
            at=job.started_at,
            instance_id=job.instance_id,
            what=f"{name} started",
            why=f"it waited for {waited_s(job, job.started_at):.2f} s",
            severity=Severity.GOOD,
        )
    if job.interrupted_at is not None:
        yield ExplainedEvent(
            at=job.interrupted_at,
            instance_id=job.instance_id,
            what=f"the machine of {name} got a spot notice",
            why=job.rerun_detail,
            severity=Severity.BAD,
        )
    if job.lost_at is not None and job.is_lost:
        yield ExplainedEvent(
            at=job.lost_at,
            instance_id=job.instance_id,
            what=f"{name} lost its instance",
            why=job.lost_detail,
            severity=Severity.BAD,
        )
    if job.completed_at is not None:
        lapsed = (
            "" if job.started_at else "no runner took it; GitHub queues it again under another id, or it was cancelled"
        )
        result = job.result or "unknown"
        severity = Severity.GOOD if result.lower() in SUCCESSES else Severity.BAD
        yield ExplainedEvent(
            at=job.completed_at,
            instance_id=job.instance_id,
            what=f"{name} ended: {result}",
            why=job.loss or lapsed,
            severity=severity,
        )
    if job.rerun_at is not None:
        yield ExplainedEvent(at=job.rerun_at, what=f"{name} is run again", why="it was lost to a spot interruption")


def _events_in_set(job: JobRecord) -> Iterator[ExplainedEvent]:
    """Start and end of a job, or its place in the queue if it has neither."""
    events = list(_own_events(job))
    later = [event for event in events if event.at not in {job.queued_at, job.assigned_at}]
    yield from later or events[:1]


def _machine_entries(
    job: JobRecord, records: ExplanationInput, demand: DemandInput
) -> Iterator[tuple[str, HistoryEntry]]:
    """The transitions of the job's machine in the epoch that served it."""
    epoch, instance_id = _machine_of(job, demand) or (0, "")
    for entry in records.histories.get(instance_id, ()):
        if entry.epoch == epoch:
            yield instance_id, entry


def _provision_events(provision: Provision) -> Iterator[ExplainedEvent]:
    outcome = provision.outcome
    if outcome is None:
        what = "a machine is wanted" if provision.count == 1 else f"{provision.count} machines are wanted"
        yield ExplainedEvent(at=provision.created_at, what=what, why=provision.request_summary)
        return
    errors = [error for launch in outcome.launches for error in launch.errors]
    if outcome.error or errors:
        why = "; ".join(errors) or outcome.error
        what = "not all machines were launched" if outcome.acquired else "no machine was acquired"
        yield ExplainedEvent(at=outcome.ended_at, what=what, why=why, severity=Severity.BAD)
    for item in outcome.acquired:
        source = "from the pool" if item.source is RunnerSource.POOL else "newly launched"
        yield ExplainedEvent(
            at=after(provision.created_at, item.seconds),
            instance_id=item.instance_id,
            what=f"machine acquired, {source}",
            why=f"after {item.seconds:.2f} s",
            severity=Severity.GOOD,
        )


# Next steps ---------------------------------------------------------------------------------------------------------


def _next_steps(
    jobs: Sequence[JobRecord], records: ExplanationInput, demand: DemandInput, status: DemandStatus
) -> Iterator[str]:
    for job in jobs:
        if _is_waiting(job, demand):
            yield f"job {_name(job)} waits for {waited_s(job, records.now):.0f} s: {_why(job, demand, status)}"
        elif job.is_lost and job.completed_at is None:
            yield f"job {_name(job)} was lost with its instance: {AFTER_LOSS}"
    machines = {parsed for job in jobs if (parsed := _machine_of(job, demand)) is not None}
    for epoch, instance_id in sorted(machines):
        instance = records.instances.get(instance_id)
        if instance is None:
            yield f"{instance_id}: its record is not kept any more"
        elif instance.epoch == epoch:
            yield f"{instance_id}: {describe_next(instance, records.reports.get(instance_id), records)}"
        else:
            yield f"{instance_id}: was reused since; it is {instance.state}"
    if not machines and all(job.completed_at is not None for job in jobs):
        yield "nothing: no machine of this pool served it"


def _machine_of(job: JobRecord, demand: DemandInput) -> tuple[int, str] | None:
    return parse_runner_name(demand.config.pool, job.runner_name)


def _why(job: JobRecord, demand: DemandInput, status: DemandStatus) -> str:
    sets = demand.config.runner_sets
    found = status.find_set(job.runner_set)
    if found is None:
        return describe_missing_labels(job.labels, [item for item in sets if item.covers(job.repository)])
    return explain_wait(job, found, demand.demand.get(job.runner_set))[1]


def _next_steps_of_set(status: RunnerSetStatus, demand: DemandInput) -> Iterator[str]:
    yield status.summary
    if status.oldest_wait_s is not None:
        yield f"the oldest waits for {status.oldest_wait_s:.0f} s"
    if status.is_at_capacity and status.reason is None:
        yield f"the set has its maximum of {status.max} runners: another job would wait"
    owner = f" of {status.owner}" if status.owner else ""
    age = "no message yet" if status.message_age_s is None else f"last news {status.message_age_s:.0f} s ago"
    yield f"session{owner}: {status.session}, {age}"
    record = demand.demand.get(status.name)
    if record is not None:
        counts, verb = record.statistics, "counts"
        if not status.is_current:
            verb = f"counted at {status.known_at:%Y-%m-%d %H:%M:%S} UTC" if status.known_at else "counted"
        yield (
            f"GitHub {verb} {counts.assigned} assigned and {counts.running} running jobs, "
            f"{counts.registered} runners, {counts.busy} busy"
        )
