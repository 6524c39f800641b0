"""GitHub's queue: the jobs of a repository that wait for a runner.

GitHub has no list of queued jobs, neither of a repository nor of an organisation. The jobs are read from the runs that
may have some: two lists of runs, and one list of jobs per run. All requests are conditional, and GitHub does not count
those whose answer has not changed (https://docs.github.com/rest/using-the-rest-api/best-practices-for-using-the-rest-api).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from remuda.domain.demand import QueuedJob
from remuda.ports.github import GitHub, JobList, RunList

#: Runs that may have queued jobs: GitHub calls a run in progress as soon as one of its jobs runs.
STATUSES = ("queued", "in_progress")
#: Calls that every repository gets, even if there are many: two lists of runs, and the jobs of one run.
MIN_CALLS = len(STATUSES) + 1
QUEUED = "queued"


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueReading:
    """The queued jobs of a repository."""

    jobs: Sequence[QueuedJob]
    #: When the part that was not read for longest was the present one.
    read_at: datetime
    #: Runs whose jobs were never read, for lack of calls.
    unread: frozenset[str] = frozenset()


@dataclass(kw_only=True, eq=False, slots=True)
class _KnownRun:
    #: None if its jobs were never read.
    jobs: JobList | None = None
    #: Number of the last read, to read those first that were not read for longest.
    read: int = 0
    #: When its jobs were read, or when it was listed first.
    known_at: datetime


class QueueReader:
    """Reads queues with a limited number of calls. Remembers answers, so that unchanged ones cost nothing."""

    def __init__(self, github: GitHub, *, calls: int, no_runs: Mapping[tuple[str, str], str] | None = None) -> None:
        """`calls` may be made until it is set again.

        `no_runs` are ETags of empty lists of runs, by repository and status, that another process has received.
        """
        self._github = github
        self.calls_left = calls
        self._runs = {key: RunList(run_ids=(), etag=etag) for key, etag in (no_runs or {}).items()}
        #: Live runs by repository and id.
        self._live: dict[str, dict[int, _KnownRun]] = {}
        #: ETags of the lists of all runs, by repository.
        self._all_runs: dict[str, str] = {}
        self._reads = 0

    @property
    def no_runs(self) -> Mapping[tuple[str, str], str]:
        """The ETags of the empty lists of runs."""
        return {key: found.etag for key, found in self._runs.items() if not found.run_ids and found.etag}

    async def has_changed(self, scope: str, repository: str) -> bool:
        """Whether a run of a repository was added or has changed since the last such question. One call."""
        self.calls_left -= 1
        etag = self._all_runs.get(repository, "")
        answer = await self._github.list_runs(scope, repository, status="", etag=etag)
        if answer is not None:
            self._all_runs[repository] = answer.etag
        return answer is not None

    async def read(self, scope: str, repository: str, *, share: int, now: datetime) -> QueueReading:
        """Return the queued jobs of a repository, by at most `share` calls.

        With more runs than calls, the runs that were not read for longest are read, the oldest first: its jobs have
        waited longest. The jobs of the others are those of the last read.
        """
        limit = max(self.calls_left - share, 0)
        before = self._live.get(repository, {})
        # Runs that have ended are forgotten.
        runs = self._live[repository] = {
            run_id: before.get(run_id) or _KnownRun(known_at=now) for run_id in await self._list_runs(scope, repository)
        }
        for run_id, run in sorted(runs.items(), key=lambda item: (item[1].read, item[0])):
            if self.calls_left <= limit:
                break
            await self._read_jobs(scope, repository, run_id, run)
            run.known_at = now
        return QueueReading(
            jobs=[
                QueuedJob(
                    job_id=str(job.job_id),
                    run_id=str(job.run_id),
                    repository=repository,
                    name=job.name,
                    labels=job.labels,
                    queued_at=job.created_at,
                )
                for run in runs.values()
                for job in (run.jobs.jobs if run.jobs else ())
                if job.status == QUEUED
            ],
            read_at=min((run.known_at for run in runs.values()), default=now),
            unread=frozenset(str(run_id) for run_id, run in runs.items() if run.jobs is None),
        )

    def keep_only(self, repositories: Iterable[str]) -> None:
        """Forget what was read of other repositories."""
        kept = set(repositories)
        self._runs = {key: found for key, found in self._runs.items() if key[0] in kept}
        self._live = {name: runs for name, runs in self._live.items() if name in kept}
        self._all_runs = {name: etag for name, etag in self._all_runs.items() if name in kept}

    async def _list_runs(self, scope: str, repository: str) -> Sequence[int]:
        run_ids: set[int] = set()
        for status in STATUSES:
            known = self._runs.get((repository, status))
            self.calls_left -= 1
            answer = await self._github.list_runs(
                scope, repository, status=status, etag=known.etag if known is not None else ""
            )
            found = answer or known or RunList(run_ids=())
            self._runs[repository, status] = found
            run_ids.update(found.run_ids)
        return sorted(run_ids)

    async def _read_jobs(self, scope: str, repository: str, run_id: int, run: _KnownRun) -> None:
        self.calls_left -= 1
        self._reads += 1
        run.read = self._reads
        etag = run.jobs.etag if run.jobs is not None else ""
        answer = await self._github.list_jobs(scope, repository, run_id, etag=etag)
        run.jobs = answer or run.jobs or JobList()
