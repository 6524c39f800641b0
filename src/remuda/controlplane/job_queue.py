"""GitHub's queue: the jobs of a repository that wait for a runner.

GitHub has no list of queued jobs, neither of a repository nor of an organisation. The jobs are read from the runs that
may have some: two lists of runs, and one list of jobs per run. All requests are conditional, and GitHub does not count
those whose answer has not changed (https://docs.github.com/rest/using-the-rest-api/best-practices-for-using-the-rest-api).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from remuda.domain.demand import QueuedJob
from remuda.ports.github import GitHub, JobList, RunList

#: Runs that may have queued jobs: GitHub calls a run in progress as soon as one of its jobs runs.
STATUSES = ("queued", "in_progress")
#: Calls that every repository gets, even if there are many: two lists of runs, and the jobs of one run.
MIN_CALLS = len(STATUSES) + 1
QUEUED = "queued"


class QueueReader:
    """Reads queues with a limited number of calls. Remembers answers, so that unchanged ones cost nothing."""

    def __init__(self, github: GitHub, *, calls: int, no_runs: Mapping[tuple[str, str], str] | None = None) -> None:
        """`calls` may be made until it is set again.

        `no_runs` are ETags of empty lists of runs, by repository and status, that another process has received.
        """
        self._github = github
        self.calls_left = calls
        self._runs = {key: RunList(run_ids=(), etag=etag) for key, etag in (no_runs or {}).items()}
        self._jobs: dict[tuple[str, int], JobList] = {}
        #: The number of the read of each run, to read those first that were not read for longest.
        self._read: dict[tuple[str, int], int] = {}
        self._reads = 0

    @property
    def no_runs(self) -> Mapping[tuple[str, str], str]:
        """The ETags of the empty lists of runs."""
        return {key: found.etag for key, found in self._runs.items() if not found.run_ids and found.etag}

    async def read(self, scope: str, repository: str, *, share: int) -> list[QueuedJob]:
        """Return the queued jobs of a repository, by at most `share` calls.

        With more runs than calls, the runs that were not read for longest are read, the oldest first: its jobs have
        waited longest. The jobs of the others are those of the last read.
        """
        limit = max(self.calls_left - share, 0)
        run_ids = await self._list_runs(scope, repository)
        for run_id in sorted(run_ids, key=lambda run_id: (self._read.get((repository, run_id), 0), run_id)):
            if self.calls_left <= limit:
                break
            await self._read_jobs(scope, repository, run_id)
        self._forget(repository, run_ids)
        return [
            QueuedJob(
                job_id=str(job.job_id),
                run_id=str(job.run_id),
                repository=repository,
                name=job.name,
                labels=job.labels,
                queued_at=job.created_at,
            )
            for run_id in sorted(run_ids)
            if (found := self._jobs.get((repository, run_id))) is not None
            for job in found.jobs
            if job.status == QUEUED
        ]

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

    async def _read_jobs(self, scope: str, repository: str, run_id: int) -> None:
        key = (repository, run_id)
        known = self._jobs.get(key)
        self.calls_left -= 1
        self._reads += 1
        self._read[key] = self._reads
        answer = await self._github.list_jobs(scope, repository, run_id, etag=known.etag if known is not None else "")
        self._jobs[key] = answer or known or JobList()

    def _forget(self, repository: str, run_ids: Sequence[int]) -> None:
        """Forget runs that have ended."""
        live = set(run_ids)
        for key in [key for key in self._jobs if key[0] == repository and key[1] not in live]:
            del self._jobs[key], self._read[key]
