"""Audit of waiting jobs: jobs in GitHub's queue that no runner serves, and differences between GitHub and the records.

The listener reads the queues of repositories with live runs (`controlplane/demand/unassigned.py`), the audit those of
all known repositories, also without a listener. Its results are stored as anomalies of the sweeps. `status` and the
other views derive the reasons from the newest reading of each repository.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from remuda.controlplane.context import Context
from remuda.controlplane.job_queue import MIN_CALLS, QueueReader
from remuda.controlplane.read.demand import read_demand_input
from remuda.controlplane.refresh.machines import FirstSeen, PartialSweep
from remuda.controlplane.refresh.result import RefreshResultBuilder
from remuda.domain.demand import JobRecord, QueuedJob
from remuda.domain.errors import NotFound, RemudaError, UserError
from remuda.domain.holder import RunHolder
from remuda.domain.instance import Instance
from remuda.domain.pool_config import PoolConfig
from remuda.domain.reporting.demand import (
    DemandInput,
    demand_status,
    disagreement_anomaly,
    find_disagreement,
)
from remuda.domain.reporting.job_queue import (
    AUDIT_INTERVAL_S,
    MAX_OVERDUE,
    Audience,
    audited_anomaly,
    job_anomaly,
    labels_by_run,
    parse_audited,
    parse_job,
    parse_unaudited,
    unaudited_anomaly,
)
from remuda.domain.resources import is_repository
from remuda.ports.github import GitHub, GitHubRunner

#: Calls of GitHub per audit. Those that are answered with 304 count here, and not at GitHub.
MAX_CALLS = 40
#: Newest provisions that tell why a set lacks machines.
RECENT_PROVISIONS = 50
#: Maximum characters of all jobs that an audit stores: they share one item of the store with other anomalies.
MAX_STORED = 100_000

_AUDITED = "audited:waiting-jobs"
#: An answer without runs, with its ETag: the next audit need not read it again.
_NO_RUNS = "no-runs:"


class WaitingJobAudit(PartialSweep):
    def __init__(
        self,
        context: Context,
        config: PoolConfig,
        result: RefreshResultBuilder,
        first_seen: FirstSeen,
        *,
        runners: Mapping[str, Sequence[GitHubRunner]],
    ) -> None:
        """`runners` are all runners of the pool's scopes."""
        super().__init__(context, config, result, first_seen)
        self._runners = runners
        self._room_left = MAX_STORED
        #: Labels of the runners of each run with its own provision, and the scope of its repository.
        self._runs: Mapping[str, Sequence[str]] = {}
        self._scopes: dict[str, str] = {}

    async def run(self, records: Mapping[str, Instance]) -> None:
        self._runs = labels_by_run(records.values())
        for item in records.values():
            if isinstance(item.holder, RunHolder) and item.assignment and is_repository(item.assignment.repository):
                self._scopes[item.assignment.repository.lower()] = item.scope
        if not self._config.runner_sets and not self._scopes:
            return
        # The reports would only tell which machines listen already.
        provisions = await self._context.store.recent_provisions(RECENT_PROVISIONS)
        found = await read_demand_input(
            self._context,
            self._config,
            list(records.values()),
            {},
            provisions,
            first_seen=self._first_seen.known,
        )
        for status in demand_status(found).sets:
            if find_disagreement(status, found.demand.get(status.name), found.jobs):
                self._first_seen.since(disagreement_anomaly(status.name))
        github, now = self._context.github, found.now
        last = self._first_seen.known.get(_AUDITED)
        if github is None or (last is not None and now - last < timedelta(seconds=AUDIT_INTERVAL_S)):
            self._first_seen.keep(_AUDITED)
            self._keep(lambda _repository, _anomaly: True)
        else:
            self._first_seen.record(_AUDITED, now)
            await self._audit_queue(github, found)
        self._report(found)

    def _keep(self, is_kept: Callable[[str, str], bool]) -> None:
        """Keep what earlier audits found in these repositories."""
        for anomaly, at in self._first_seen.known.items():
            job = parse_job(anomaly, at)
            repository = (
                job.repository
                if job
                else _parse_no_runs(anomaly)[0] or parse_audited(anomaly) or parse_unaudited(anomaly)[0]
            )
            if repository and is_kept(repository.lower(), anomaly) and self._has_room(anomaly):
                self._first_seen.keep(anomaly)

    def _report(self, found: DemandInput) -> None:
        """Add the jobs that wait too long to the result of the refresh."""
        for job in demand_status(replace(found, first_seen=self._first_seen.seen)).overdue:
            name = f"{job.name or job.job_id} of {job.repository or 'an unknown repository'}"
            sentence = f"job {name}, run {job.run_id}, waits since {job.queued_at:%H:%M:%S} UTC: {job.detail}"
            self._result.waiting_jobs.append(sentence)
            self._context.event_log.record(
                "job-waits", sentence, run_id=job.run_id, runner_set=job.runner_set, reason=job.reason
            )

    # GitHub's queue ---------------------------------------------------------------------------------------------

    async def _audit_queue(self, github: GitHub, found: DemandInput) -> None:
        etags = {
            (repository, status): etag
            for repository, status, etag in map(_parse_no_runs, self._first_seen.known)
            if repository
        }
        reader = QueueReader(github, calls=MAX_CALLS, no_runs=etags)
        repositories = self._repositories(found.jobs)
        # Start with another repository each time, so that the limit of calls affects all of them alike.
        start = int(found.now.timestamp() // AUDIT_INTERVAL_S) % len(repositories) if repositories else 0
        share = max(MIN_CALLS, MAX_CALLS // len(repositories)) if repositories else 0
        done: set[str] = set()
        #: Runs that were not read, of repositories with more runs than calls.
        unread: dict[str, frozenset[str]] = {}
        for repository in (*repositories[start:], *repositories[:start]):
            if reader.calls_left < MIN_CALLS:
                break
            sets = [item for item in self._config.runner_sets if item.covers(repository)]
            try:
                scope = sets[0].scope if sets else self._scopes[repository]
                reading = await reader.read(scope, repository, share=share, now=found.now)
            except NotFound:
                # It was deleted.
                done.add(repository.lower())
                continue
            except UserError as error:
                if not sets:
                    # Runs with their own provision need no permission to read GitHub's queue.
                    continue
                fix = f"; {error.fix}" if error.fix else ""
                self._first_seen.since(unaudited_anomaly(repository, f"{error.message}{fix}"))
                done.add(repository.lower())
                continue
            except RemudaError as error:
                # The next audit repeats it.
                self._context.event_log.record("audit-failed", error.message, repository=repository)
                continue
            done.add(repository.lower())
            if reading.unread:
                unread[repository.lower()] = reading.unread
            else:
                self._first_seen.record(audited_anomaly(repository), found.now)
            self._record_jobs(repository, reading.jobs, found)
        for (repository, status), etag in reader.no_runs.items():
            if repository.lower() in done:
                self._first_seen.since(_no_runs(repository, status, etag))

        def is_kept(repository: str, anomaly: str) -> bool:
            if repository not in unread:
                return repository not in done
            job = parse_job(anomaly, found.now)
            return bool(parse_audited(anomaly)) or (job is not None and job.run_id in unread[repository])

        self._keep(is_kept)

    def _repositories(self, jobs: Iterable[JobRecord]) -> list[str]:
        """The repositories of runs with runners, and those of the sets' scopes: those that are a scope, and those of
        organisations with recent jobs.

        A job without a set in a repository without recent jobs is not found: listing all repositories of an
        organisation would take too many calls.
        """
        scopes = {item.scope.lower() for item in self._config.runner_sets}
        seen = {job.repository.lower() for job in jobs if is_repository(job.repository)}
        of_organisations = {name for name in seen if name.partition("/")[0] in scopes}
        return sorted({scope for scope in scopes if "/" in scope} | of_organisations | self._scopes.keys())

    def _record_jobs(self, repository: str, jobs: Iterable[QueuedJob], found: DemandInput) -> None:
        """Record the jobs that wait for this pool and that no set has got."""
        audience = Audience(
            repository=repository,
            sets=self._config.runner_sets,
            runs=self._runs,
            others=[runner.labels for runner in self._runners_of(repository)],
        )
        unassigned = [job for job in jobs if audience.lacks_runner(job, found.jobs, now=found.now)]
        for job in unassigned[:MAX_OVERDUE]:
            if self._has_room(job_anomaly(job)):
                self._first_seen.record(job_anomaly(job), job.queued_at)

    def _runners_of(self, repository: str) -> list[GitHubRunner]:
        scopes = {repository.lower(), repository.lower().partition("/")[0]}
        return [runner for scope, listed in self._runners.items() if scope.lower() in scopes for runner in listed]

    def _has_room(self, anomaly: str) -> bool:
        self._room_left -= len(anomaly)
        return self._room_left >= 0


def _no_runs(repository: str, status: str, etag: str) -> str:
    return _NO_RUNS + json.dumps([repository, status, etag])


def _parse_no_runs(anomaly: str) -> tuple[str, str, str]:
    """Repository, status and ETag; empty if the anomaly is another."""
    if not anomaly.startswith(_NO_RUNS):
        return "", "", ""
    try:
        repository, status, etag = json.loads(anomaly.removeprefix(_NO_RUNS))
    except (ValueError, TypeError, RecursionError):
        return "", "", ""
    return str(repository), str(status), str(etag)
