"""Audit of waiting jobs: jobs in GitHub's queue that no runner serves, and differences between GitHub and the records.

The listener reads the queues of repositories with live runs (`controlplane/demand/unassigned.py`), the audit those of
all known repositories, also without a listener. `status` and the other views derive the reasons from the newest reading
of each repository.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from remuda.controlplane.job_queue import MIN_CALLS, QueueReader, QueueReading
from remuda.controlplane.read.demand import read_demand_input
from remuda.controlplane.refresh.observe import Observed
from remuda.controlplane.refresh.result import RefreshResult, combined, seen
from remuda.domain.demand import MAX_QUEUED_S, RepositoryQueue
from remuda.domain.errors import NotFound, RemudaError, UserError
from remuda.domain.holder import RunHolder
from remuda.domain.reporting.demand import DemandInput, demand_status, find_disagreement
from remuda.domain.reporting.job_queue import (
    AUDIT_INTERVAL_S,
    MAX_OVERDUE,
    Audience,
    fit_into_record,
    labels_by_run,
)
from remuda.domain.resources import is_repository
from remuda.domain.sweep_record import AnomalyKind, EmptyRunList, QueueAudit, SweepRecord, UnreadableRepository
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.github import GitHub

#: Calls of GitHub per audit. Those that are answered with 304 count here, and not at GitHub.
MAX_CALLS = 40
#: Newest provisions that tell why a set lacks machines.
RECENT_PROVISIONS = 50
#: Maximum characters of all jobs that an audit stores: they share one item of the store with the anomalies.
MAX_STORED = 100_000

#: What the audit of one repository has found: None if the repository was deleted.
Answer = RepositoryQueue | UnreadableRepository | None


async def audit_waiting_jobs(observed: Observed) -> RefreshResult:
    """Find jobs that wait too long, and sets for which GitHub counts jobs that the records do not have."""
    context, config, records = observed.context, observed.config, observed.records
    runs = labels_by_run(records.values())
    scopes = {
        item.assignment.repository.lower(): item.scope
        for item in records.values()
        if isinstance(item.holder, RunHolder) and item.assignment and is_repository(item.assignment.repository)
    }
    if not config.runner_sets and not scopes:
        return RefreshResult()
    # The reports would only tell which machines listen already.
    provisions = await context.store.recent_provisions(RECENT_PROVISIONS)
    instances = list(records.values())
    found = await read_demand_input(context, config, instances, {}, provisions, sweep=observed.before)
    disagreements = [
        observed.sighting(AnomalyKind.DISAGREEMENT, status.name)
        for status in demand_status(found).sets
        if find_disagreement(status, found.demand.get(status.name), found.jobs)
    ]
    audit = observed.before.audit
    is_due = audit.at is None or found.now - audit.at >= timedelta(seconds=AUDIT_INTERVAL_S)
    if context.github is not None and is_due:
        audit = await _Audit(observed=observed, found=found, runs=runs, scopes=scopes).run(context.github)
    sentences = []
    for job in demand_status(replace(found, sweep=SweepRecord(audit=audit))).overdue:
        name = f"{job.name or job.job_id} of {job.repository or 'an unknown repository'}"
        sentences.append(f"job {name}, run {job.run_id}, waits since {job.queued_at:%H:%M:%S} UTC: {job.detail}")
        context.event_log.record(
            "job-waits", sentences[-1], run_id=job.run_id, runner_set=job.runner_set, reason=job.reason
        )
    result = RefreshResult(waiting_jobs=tuple(sentences), record=SweepRecord(audit=audit))
    return combined([seen(disagreements), result])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Audit:
    """One reading of GitHub's queues."""

    observed: Observed
    found: DemandInput
    #: Labels of the runners of each run with its own provision, and the scope of its repository.
    runs: Mapping[str, Sequence[str]]
    scopes: Mapping[str, str]

    async def run(self, github: GitHub) -> QueueAudit:
        before, now = self.observed.before.audit, self.found.now
        etags = {(item.repository, item.status): item.etag for item in before.empty_lists}
        reader = QueueReader(github, calls=MAX_CALLS, no_runs=etags)
        repositories = self._repositories()
        # Start with another repository each time, so that the limit of calls affects all of them alike.
        start = int(now.timestamp() // AUDIT_INTERVAL_S) % len(repositories) if repositories else 0
        share = max(MIN_CALLS, MAX_CALLS // len(repositories)) if repositories else 0
        answers: dict[str, Answer] = {}
        for repository in (*repositories[start:], *repositories[:start]):
            if reader.calls_left < MIN_CALLS:
                break
            try:
                answers[repository] = await self._read(reader, repository, share=share)
            except RemudaError as error:
                # The next audit repeats it.
                self.observed.context.event_log.record("audit-failed", error.message, repository=repository)
        # GitHub has ended the jobs in queues that were read so long ago.
        oldest = now - timedelta(seconds=MAX_QUEUED_S)
        kept: list[RepositoryQueue | UnreadableRepository] = [
            *(item for item in before.queues if item.read_at > oldest),
            *(item for item in before.unreadable if item.at > oldest),
        ]
        results = [*answers.values(), *(item for item in kept if item.repository not in answers)]
        return QueueAudit(
            at=to_milliseconds(now),
            queues=fit_into_record((item for item in results if isinstance(item, RepositoryQueue)), room=MAX_STORED),
            unreadable=tuple(item for item in results if isinstance(item, UnreadableRepository)),
            empty_lists=tuple(
                EmptyRunList(repository=repository, status=status, etag=etag)
                for (repository, status), etag in reader.no_runs.items()
                if repository in repositories
            ),
        )

    def _repositories(self) -> list[str]:
        """The repositories of runs with runners, and those of the sets' scopes: those that are a scope, and those of
        organisations with recent jobs.

        A job without a set in a repository without recent jobs is not found: listing all repositories of an
        organisation would take too many calls.
        """
        scopes = {item.scope.lower() for item in self.found.config.runner_sets}
        seen_names = {job.repository.lower() for job in self.found.jobs if is_repository(job.repository)}
        of_organisations = {name for name in seen_names if name.partition("/")[0] in scopes}
        return sorted({scope for scope in scopes if "/" in scope} | of_organisations | self.scopes.keys())

    async def _read(self, reader: QueueReader, repository: str, *, share: int) -> Answer:
        sets = [item for item in self.found.config.runner_sets if item.covers(repository)]
        scope = sets[0].scope if sets else self.scopes[repository]
        try:
            return self._queue(repository, await reader.read(scope, repository, share=share, now=self.found.now))
        except NotFound:
            return None
        except UserError as error:
            if not sets:
                # Runs with their own provision need no permission to read GitHub's queue.
                return self._before(repository)
            return UnreadableRepository.after(error, repository, now=self.found.now)

    def _queue(self, repository: str, reading: QueueReading) -> Answer:
        """The jobs that wait for this pool and that no set has got."""
        runners = self.observed.runners.items()
        names = {repository, repository.partition("/")[0]}
        audience = Audience(
            repository=repository,
            sets=self.found.config.runner_sets,
            runs=self.runs,
            others=[runner.labels for scope, listed in runners if scope.lower() in names for runner in listed],
        )
        jobs = [job for job in reading.jobs if audience.lacks_runner(job, self.found.jobs, now=self.found.now)]
        jobs = jobs[:MAX_OVERDUE]
        if not reading.unread:
            return RepositoryQueue(repository=repository, read_at=to_milliseconds(self.found.now), jobs=tuple(jobs))
        # Of a repository with more runs than calls, the jobs of the others and the time stay.
        if (before := self._before(repository)) is not None:
            jobs += [job for job in before.jobs if job.run_id in reading.unread]
            return replace(before, jobs=tuple(jobs))
        read_at = min((job.queued_at for job in jobs), default=None)
        return None if read_at is None else RepositoryQueue(repository=repository, read_at=read_at, jobs=tuple(jobs))

    def _before(self, repository: str) -> RepositoryQueue | None:
        """What earlier audits have found."""
        return next((item for item in self.observed.before.audit.queues if item.repository == repository), None)
