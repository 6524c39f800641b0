"""Audit of waiting jobs: jobs in GitHub's queue that no runner serves, and signs of a silent listener.

Its results are stored as anomalies of the sweeps. `status` and the other views derive the reasons from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from remuda.controlplane.context import Context
from remuda.controlplane.read.demand import read_demand_input
from remuda.controlplane.refresh.machines import FirstSeen, PartialSweep
from remuda.controlplane.refresh.result import RefreshResultBuilder
from remuda.domain.demand import JobRecord
from remuda.domain.errors import NotFound, RemudaError, UserError
from remuda.domain.instance import Instance
from remuda.domain.pool_config import PoolConfig
from remuda.domain.reporting.demand import (
    MAX_OVERDUE,
    WAITING_LIMIT_S,
    DemandInput,
    QueuedJob,
    demand_status,
    disagreement_anomaly,
    find_disagreement,
    find_run,
    labels_by_run,
    listener_anomaly,
    parse_unaudited,
    sets_for,
    unaudited_anomaly,
)
from remuda.domain.resources import is_repository
from remuda.ports.github import GitHub, GitHubRunner, ListedJob

#: Seconds between two audits of GitHub's queue, a little less than the interval of the schedule.
AUDIT_INTERVAL_S = 270.0
#: Calls of GitHub per audit.
MAX_CALLS = 40
#: Calls that every repository gets, even if there are many: two lists of runs.
MIN_CALLS = 2
#: Newest provisions that tell why a set lacks machines.
RECENT_PROVISIONS = 50
#: Runs that may have queued jobs: GitHub calls a run in progress as soon as one of its jobs runs.
STATUSES = ("queued", "in_progress")
#: Maximum characters of all jobs that an audit stores: they share one item of the store with other anomalies.
MAX_STORED = 100_000
SELF_HOSTED = "self-hosted"

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
        self._calls_left = 0
        self._room_left = MAX_STORED
        #: Labels of the runners of each run with its own provision, and the scope of its repository.
        self._runs: Mapping[str, Sequence[str]] = {}
        self._scopes: dict[str, str] = {}

    async def run(self, records: Mapping[str, Instance]) -> None:
        self._runs = labels_by_run(records.values())
        for item in records.values():
            if item.run_id in self._runs and item.assignment and is_repository(item.assignment.repository):
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
        if found.lease is not None and found.lease.owner:
            self._first_seen.since(listener_anomaly(found.lease))
        for status in demand_status(found).sets:
            if find_disagreement(status, found.demand.get(status.name), found.jobs):
                self._first_seen.since(disagreement_anomaly(status.name))
        github, now = self._context.github, found.now
        last = self._first_seen.known.get(_AUDITED)
        if github is None or (last is not None and now - last < timedelta(seconds=AUDIT_INTERVAL_S)):
            self._first_seen.keep(_AUDITED)
            self._keep(lambda _repository: True)
        else:
            self._first_seen.record(_AUDITED, now)
            await self._audit_queue(github, found)
        self._report(found)

    def _keep(self, is_kept: Callable[[str], bool]) -> None:
        """Keep what earlier audits found in these repositories."""
        for anomaly in self._first_seen.known:
            job = QueuedJob.parse(anomaly)
            repository = job.repository if job else _parse_no_runs(anomaly)[0] or parse_unaudited(anomaly)[0]
            if repository and is_kept(repository) and self._has_room(anomaly):
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
        self._calls_left = MAX_CALLS
        repositories = self._repositories(found.jobs)
        # Start with another repository each time, so that the limit of calls affects all of them alike.
        start = int(found.now.timestamp() // AUDIT_INTERVAL_S) % len(repositories) if repositories else 0
        done: set[str] = set()
        for repository in (*repositories[start:], *repositories[:start]):
            share = max(MIN_CALLS, MAX_CALLS // len(repositories))
            if self._calls_left < MIN_CALLS:
                break
            try:
                jobs = await self._queued_jobs(github, repository, share)
            except NotFound:
                continue
            except UserError as error:
                if not sets_for(repository, self._config.runner_sets):
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
            for job in jobs[:MAX_OVERDUE]:
                self._check(job, repository, found)
        self._keep(lambda repository: repository.lower() not in done)

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

    async def _queued_jobs(self, github: GitHub, repository: str, share: int) -> list[ListedJob]:
        """The queued jobs of a repository, by at most `share` calls."""
        sets = sets_for(repository, self._config.runner_sets)
        scope = sets[0].scope if sets else self._scopes[repository]
        etags = {
            (name, status): etag
            for name, status, etag in map(_parse_no_runs, self._first_seen.known)
            if name == repository
        }
        limit = max(self._calls_left - share, 0)
        run_ids: list[int] = []
        for status in STATUSES:
            self._calls_left -= 1
            etag = etags.get((repository, status), "")
            runs = await github.list_runs(scope, repository, status=status, etag=etag)
            if runs is not None:
                etag = "" if runs.run_ids else runs.etag
                # Oldest first: they have waited longest.
                run_ids += reversed(runs.run_ids)
            if etag:
                self._first_seen.since(_no_runs(repository, status, etag))
        jobs: list[ListedJob] = []
        for run_id in run_ids:
            if self._calls_left <= limit:
                break
            self._calls_left -= 1
            jobs += [job for job in await github.list_jobs(scope, repository, run_id) if job.status == "queued"]
        return jobs

    def _check(self, job: ListedJob, repository: str, found: DemandInput) -> None:
        """Record a job that waits too long and that the listener does not know."""
        names_run = any(label in self._runs for label in job.labels)
        # A runner that exists does not get further labels, so a job that names its run need not wait first.
        if not names_run and (found.now - job.created_at).total_seconds() <= WAITING_LIMIT_S:
            return
        if self._is_served(job, repository) or _is_known(job, found.jobs):
            return
        queued = QueuedJob(
            job_id=str(job.job_id), run_id=str(job.run_id), repository=repository, name=job.name, labels=job.labels
        )
        if self._has_room(queued.anomaly()):
            self._first_seen.record(queued.anomaly(), job.created_at)

    def _has_room(self, anomaly: str) -> bool:
        self._room_left -= len(anomaly)
        return self._room_left >= 0

    def _is_served(self, job: ListedJob, repository: str) -> bool:
        """Whether the job needs no runner set: it is for GitHub's runners, or its run or scope has runners for it."""
        wanted = {label.lower() for label in job.labels}
        sets = sets_for(repository, self._config.runner_sets)
        if any(item.serves(job.labels) for item in sets):
            return False
        of_run = self._runs.get(find_run(job.labels, str(job.run_id), self._runs), ())
        if wanted <= {label.lower() for label in of_run}:
            return True
        ours = {SELF_HOSTED, *(label.lower() for item in sets for label in item.labels)}
        if not wanted & (ours | {label.lower() for label in of_run}):
            return True
        scopes = {repository.lower(), repository.lower().partition("/")[0]}
        return any(
            wanted <= {label.lower() for label in runner.labels}
            for scope, listed in self._runners.items()
            if scope.lower() in scopes
            for runner in listed
        )


def _is_known(job: ListedJob, records: Iterable[JobRecord]) -> bool:
    """Whether a set has the job. Messages of sets identify jobs by other ids than the REST API."""
    return any(
        record.run_id == str(job.run_id) and record.completed_at is None and record.display_name in {job.name, ""}
        for record in records
    )


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
