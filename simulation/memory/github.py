"""GitHub's runners in memory, for unit tests and the simulation.

It has no timers and no tasks. Runners register, connect and accept jobs through `MemoryGitHubServer`; the control plane
uses `MemoryGitHub`. Wrap the port to simulate failures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from remuda.domain.errors import Conflict, NotFound, UserError
from remuda.domain.instance import Credential
from remuda.domain.pool_config import DEFAULT_GROUP_ID
from remuda.domain.runner_release import PackageArchitecture, RunnerPackage, RunnerRelease, release_url
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock
from remuda.ports.github import (
    Deletion,
    GitHubRun,
    GitHubRunner,
    JitRunner,
    JobList,
    ListedJob,
    RunList,
    missing_group,
)

if TYPE_CHECKING:
    from simulation.memory.demand import MemoryScaleSets

SERVICE = "github"
PER_PAGE = 100
REGISTRATION, REMOVAL = "registration", "removal"


@dataclass(kw_only=True, slots=True, eq=False)
class MemoryJob:
    job_id: int
    run_id: str
    labels: tuple[str, ...]
    #: Seconds that the job runs.
    seconds: float
    runner_name: str = ""
    started: bool = False
    #: `success`, `failure` or `cancelled`; empty until it ends.
    conclusion: str = ""
    #: Conclusion if nothing interrupts it.
    outcome: str = "success"
    #: owner/name, for lists of a repository's jobs.
    repository: str = ""
    queued_at: datetime | None = None

    @property
    def status(self) -> str:
        if self.conclusion:
            return "completed"
        return "in_progress" if self.started else "queued"


@dataclass(kw_only=True, slots=True, eq=False)
class MemoryDemandJob(MemoryJob):
    """A job that waits for a runner of a scale set."""

    repository: str
    #: Name of the event that started its run, and whether that is a pull request of a fork.
    event: str = "push"
    is_fork: bool = False
    queued_at: datetime
    #: Id in messages. Changes if an assignment lapses.
    key: str
    #: Name in its workflow, the same in every attempt.
    name: str = ""
    #: The set that it is assigned or offered to; 0 while it waits.
    set_id: int = 0
    #: Name of the set that it was assigned to last.
    set_name: str = ""
    is_offered: bool = False
    assigned_at: datetime | None = None
    lapses_at: datetime | None = None
    started_at: datetime | None = None
    #: When GitHub fails it, because its runner is gone.
    fails_at: datetime | None = None
    ended_at: datetime | None = None
    lapses: int = 0
    #: Not assigned before this time.
    waits_until: datetime
    #: Queued while its set announced no capacity: never delivered (facts: the zero-capacity trap).
    is_stranded: bool = False

    @property
    def is_over(self) -> bool:
        return bool(self.conclusion)


@dataclass(kw_only=True, slots=True, eq=False)
class MemoryRunner:
    runner_id: int
    scope: str
    name: str
    labels: tuple[str, ...]
    #: Whether its registration ends with its first job.
    ephemeral: bool = False
    group_id: int = DEFAULT_GROUP_ID
    #: Called with a job; None while the runner does not listen.
    take: Callable[[MemoryJob], None] | None = None
    job: MemoryJob | None = None
    #: The runner scale set that it belongs to, or 0.
    scale_set_id: int = 0
    registered_at: datetime | None = None
    #: Whether it has ever listened.
    was_online: bool = False
    #: Called if its registration is removed while it listens.
    removed: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Access:
    scopes: tuple[str, ...]
    write: bool


class MemoryGitHubServer:
    """The GitHub that all processes share. Its clock is the true time, not that of a process."""

    def __init__(
        self, *, clock: Clock, token_life_s: float = 3_600.0, known_scopes: Collection[str] | None = None
    ) -> None:
        self.clock = clock
        self.token_life = timedelta(seconds=token_life_s)
        #: Scopes that exist; None for all.
        self.known_scopes = known_scopes
        #: Ids of runner groups by name, of every organisation.
        self.groups = {"Default": DEFAULT_GROUP_ID}
        #: Newest version of the actions runner.
        self.runner_version = "2.336.0"
        self.runners: dict[int, MemoryRunner] = {}
        self.jobs: list[MemoryJob] = []
        #: Workflow runs by repository in lower case and id, and the ids of those that were run again.
        self.runs: dict[tuple[str, int], GitHubRun] = {}
        self.reruns: list[int] = []
        #: The scale sets and their jobs, if there are any.
        self.scale_sets: MemoryScaleSets | None = None
        self._access: dict[str, _Access] = {}
        self._tokens: dict[str, tuple[str, str, Credential]] = {}
        self._last_id = 0

    # Credentials

    def grant(self, *, scopes: Sequence[str] = (), write: bool = True) -> str:
        """Create an access token for these scopes, or for all if none are given."""
        token = f"github_pat_{self._new_id():06d}"
        self._access[token] = _Access(scopes=tuple(scopes), write=write)
        return token

    def mint(self, kind: str, scope: str) -> Credential:
        expires_at = to_milliseconds(self.clock.now() + self.token_life)
        credential = Credential(token=f"A{kind.upper()}{self._new_id():06d}", expires_at=expires_at)
        self._tokens[credential.token] = (kind, scope.lower(), credential)
        return credential

    def check(self, token: str, scope: str, *, write: bool) -> None:
        access = self._access.get(token)
        if access is None:
            raise UserError("GitHub refuses the credential: 401", field="github-token")
        known = self.known_scopes is None or scope in self.known_scopes
        if not known or (access.scopes and scope not in access.scopes):
            raise NotFound(f"GitHub does not know {scope}, or the credential may not see it")
        if write and not access.write:
            raise UserError("GitHub refuses the credential: 403", field="github-token")

    # Calls of runners

    def register(self, scope: str, token: str, name: str, labels: Sequence[str]) -> MemoryRunner:
        """Like `config.sh --replace`. A replaced runner keeps its id."""
        self._check_token(REGISTRATION, scope, token)
        runner = self.find(scope, name)
        if runner is None:
            return self.add(scope, name, labels)
        runner.labels = tuple(labels)
        runner.take = None
        return runner

    def unregister(self, scope: str, token: str, runner_id: int) -> Deletion:
        """Like `config.sh remove`."""
        self._check_token(REMOVAL, scope, token)
        return self.delete(scope, runner_id)

    def connect(
        self, runner_id: int, take: Callable[[MemoryJob], None], removed: Callable[[], None] | None = None
    ) -> bool:
        """Start to listen. Return False if the registration is gone."""
        runner = self.runners.get(runner_id)
        if runner is None:
            return False
        runner.take = take
        runner.removed = removed
        runner.was_online = True
        self._offer(runner)
        return True

    def start(self, job: MemoryJob) -> None:
        """A runner starts a job that it was given."""
        job.started = True
        if isinstance(job, MemoryDemandJob) and self.scale_sets is not None:
            self.scale_sets.started(job)

    def disconnect(self, runner_id: int) -> None:
        """Stop listening. A started job fails, one of a set when its lease ends; others go to another runner."""
        runner = self.runners.get(runner_id)
        if runner is None:
            return
        runner.take = None
        job = runner.job
        if isinstance(job, MemoryDemandJob) and self.scale_sets is not None and job.started:
            self.scale_sets.lost(job)
            return
        runner.job = None
        if isinstance(job, MemoryDemandJob) and self.scale_sets is not None:
            self.scale_sets.returned(job)
        elif job is not None and job.started:
            job.conclusion = "failure"
        elif job is not None:
            job.runner_name = ""
            self._place(job)

    def finish(self, job: MemoryJob, conclusion: str = "success") -> None:
        for runner in self.runners.values():
            if runner.job is job:
                job.conclusion = conclusion
                runner.job = None
                if runner.ephemeral:
                    del self.runners[runner.runner_id]
                    if isinstance(job, MemoryDemandJob) and self.scale_sets is not None:
                        self.scale_sets.ended(job, conclusion, runner=runner)
                else:
                    self._offer(runner)
                return

    # Calls of workflows and of the control plane

    def queue(self, *, run_id: str, labels: Sequence[str], seconds: float = 1.0, repository: str = "") -> MemoryJob:
        job = MemoryJob(
            job_id=self._new_id(),
            run_id=run_id,
            labels=tuple(labels),
            seconds=seconds,
            repository=repository,
            queued_at=to_milliseconds(self.clock.now()),
        )
        self.jobs.append(job)
        self._place(job)
        return job

    def add(
        self,
        scope: str,
        name: str,
        labels: Sequence[str] = (),
        *,
        ephemeral: bool = False,
        scale_set_id: int = 0,
    ) -> MemoryRunner:
        runner = MemoryRunner(
            runner_id=self._new_id(),
            scope=scope,
            name=name,
            labels=tuple(labels),
            ephemeral=ephemeral,
            scale_set_id=scale_set_id,
        )
        self.runners[runner.runner_id] = runner
        return runner

    def find(self, scope: str, name: str) -> MemoryRunner | None:
        return next((runner for runner in self.of(scope) if runner.name.lower() == name.lower()), None)

    def of(self, scope: str) -> list[MemoryRunner]:
        return [runner for runner in self.runners.values() if runner.scope.lower() == scope.lower()]

    def delete(self, scope: str, runner_id: int) -> Deletion:
        runner = self.runners.get(runner_id)
        if runner is None or runner.scope.lower() != scope.lower():
            return Deletion.GONE
        if runner.job is not None:
            return Deletion.BUSY
        del self.runners[runner_id]
        if runner.take is not None and runner.removed is not None:
            runner.removed()
        return Deletion.DELETED

    def workflow_jobs(self, repository: str, run_status: str = "") -> list[ListedJob]:
        """The jobs of a repository, optionally only those of runs in a status."""
        statuses = self.run_statuses(repository)
        return [
            ListedJob(
                job_id=job.job_id,
                run_id=int(job.run_id),
                name=f"job {job.job_id}",
                status=job.status,
                labels=job.labels,
                created_at=job.queued_at,
            )
            for job in self._jobs_of(repository)
            if job.queued_at and run_status in {"", statuses[job.run_id]}
        ]

    def run_statuses(self, repository: str) -> dict[str, str]:
        """The status of each run of a repository that has jobs."""
        statuses: dict[str, set[str]] = {}
        for job in self._jobs_of(repository):
            statuses.setdefault(job.run_id, set()).add(job.status)
        return {run_id: _run_status(found) for run_id, found in statuses.items()}

    def _jobs_of(self, repository: str) -> list[MemoryJob]:
        of_sets = self.scale_sets.jobs if self.scale_sets is not None else []
        return [
            job
            for job in (*self.jobs, *of_sets)
            if job.repository.lower() == repository.lower() and job.run_id.isdecimal()
        ]

    def _check_token(self, kind: str, scope: str, token: str) -> None:
        known = self._tokens.get(token)
        if known is None or known[:2] != (kind, scope.lower()) or known[2].expires_at <= self.clock.now():
            raise UserError(f"GitHub refuses the {kind} token: 401", field="github-token")

    def _offer(self, runner: MemoryRunner) -> None:
        if runner.scale_set_id and self.scale_sets is not None:
            self.scale_sets.offer(runner)
            return
        for job in self.jobs:
            if not job.runner_name and not job.conclusion and self._give(job, runner):
                return

    def _place(self, job: MemoryJob) -> None:
        for runner in self.runners.values():
            if self._give(job, runner):
                return

    @staticmethod
    def _give(job: MemoryJob, runner: MemoryRunner) -> bool:
        if runner.take is None or runner.job is not None or runner.scale_set_id:
            return False
        if not set(job.labels) <= set(runner.labels):
            return False
        job.runner_name = runner.name
        runner.job = job
        runner.take(job)
        return True

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id


def _run_status(statuses: Collection[str]) -> str:
    """The status of a run by those of its jobs."""
    only = next(iter(statuses)) if len(set(statuses)) == 1 else ""
    return only or "in_progress"


def _contains(scope: str, repository: str) -> bool:
    """Whether a repository (owner/name) is in the scope. The credential of the scope sees no other."""
    owner, slash, _ = repository.lower().partition("/")
    return bool(slash) and scope.lower() in {owner, repository.lower()}


class MemoryGitHub:
    def __init__(self, *, github: MemoryGitHubServer, token: str, calls: CallCounter) -> None:
        self._github = github
        self._token = token
        self._calls = calls

    async def close(self) -> None:
        """Nothing to close."""

    async def registration_token(self, scope: str) -> Credential:
        self._enter("POST registration-token", scope, write=True)
        return self._github.mint(REGISTRATION, scope)

    async def removal_token(self, scope: str) -> Credential:
        self._enter("POST remove-token", scope, write=True)
        return self._github.mint(REMOVAL, scope)

    async def jit_config(
        self, scope: str, *, name: str, labels: Sequence[str], group_id: int = DEFAULT_GROUP_ID
    ) -> JitRunner:
        self._enter("POST generate-jitconfig", scope, write=True)
        if self._github.find(scope, name) is not None:
            raise Conflict(f"a runner named {name} exists")
        if group_id not in self._github.groups.values():
            raise NotFound(f"there is no runner group {group_id}")
        runner = self._github.add(scope, name, labels, ephemeral=True)
        runner.group_id = group_id
        return JitRunner(runner_id=runner.runner_id, config=f"AJITCONFIG{runner.runner_id:06d}")

    async def runner_group_id(self, scope: str, name: str) -> int:
        self._enter("GET runner-groups", scope)
        if name not in self._github.groups:
            raise missing_group(scope, name, self._github.groups)
        return self._github.groups[name]

    async def runner_downloads(self, scope: str) -> RunnerRelease:
        self._enter("GET downloads", scope)
        return runner_release(self._github.runner_version)

    async def list_runners(self, scope: str) -> Sequence[GitHubRunner]:
        self._enter("GET runners", scope)
        found = [view_of(runner) for runner in self._github.of(scope)]
        for _ in range(PER_PAGE, len(found), PER_PAGE):
            self._calls.add(SERVICE, "GET runners")
        return found

    async def get_runner(self, scope: str, runner_id: int) -> GitHubRunner | None:
        if not self._sees("GET runners", scope):
            return None
        runner = self._github.runners.get(runner_id)
        return view_of(runner) if runner is not None and runner.scope.lower() == scope.lower() else None

    async def get_run(self, scope: str, repository: str, run_id: int, *, etag: str = "") -> GitHubRun | None:
        self._enter("GET run", scope)
        run = self._github.runs.get((repository.lower(), run_id))
        if run is None or not _contains(scope, repository):
            raise NotFound(f"{repository} has no run {run_id}")
        found = replace(run, etag=f'W/"{run.attempt} {run.status}"')
        return None if found.etag == etag else found

    async def rerun_failed_jobs(self, scope: str, repository: str, run_id: int) -> None:
        self._enter("POST rerun-failed-jobs", scope, write=True)
        run = self._github.runs.get((repository.lower(), run_id))
        if run is None or not _contains(scope, repository):
            raise NotFound(f"{repository} has no run {run_id}")
        if run.status != "completed" or run.conclusion == "success":
            raise UserError("GitHub refuses: This workflow run cannot be retried (403)", field="github-token")
        self._github.reruns.append(run_id)
        self._github.runs[repository.lower(), run_id] = replace(
            run, status="queued", conclusion="", attempt=run.attempt + 1
        )
        if self._github.scale_sets is not None:
            self._github.scale_sets.run_again(repository, run_id)

    async def delete_runner(self, scope: str, runner_id: int) -> Deletion:
        if not self._sees("DELETE runners", scope, write=True):
            return Deletion.GONE
        return self._github.delete(scope, runner_id)

    async def list_runs(self, scope: str, repository: str, *, status: str, etag: str = "") -> RunList | None:
        self._enter("GET runs", scope)
        runs = tuple(sorted({job.run_id for job in self._github.workflow_jobs(repository, status)}, reverse=True))
        statuses = self._github.run_statuses(repository)
        listed = [(run_id, statuses[str(run_id)]) for run_id in runs[:PER_PAGE]]
        found = RunList(run_ids=runs[:PER_PAGE], etag=f'W/"{listed}"')
        return None if found.etag == etag else found

    async def list_jobs(self, scope: str, repository: str, run_id: int, *, etag: str = "") -> JobList | None:
        self._enter("GET jobs", scope)
        jobs = tuple(job for job in self._github.workflow_jobs(repository) if job.run_id == run_id)[:PER_PAGE]
        found = JobList(jobs=jobs, etag=f'W/"{hash(jobs)}"' if jobs else "")
        return None if found.etag and found.etag == etag else found

    def _sees(self, operation: str, scope: str, *, write: bool = False) -> bool:
        """GitHub answers 404 for a runner that is gone and for one that the credential cannot see."""
        self._calls.add(SERVICE, operation)
        try:
            self._github.check(self._token, scope, write=write)
        except NotFound:
            return False
        return True

    def _enter(self, operation: str, scope: str, *, write: bool = False) -> None:
        self._calls.add(SERVICE, operation)
        try:
            self._github.check(self._token, scope, write=write)
        except NotFound as error:
            raise UserError(error.message, field="github-scope") from error


def runner_release(version: str) -> RunnerRelease:
    """The packages of a version, with digests that differ by version and architecture."""
    packages = [
        RunnerPackage(
            architecture=each,
            url=release_url(version, each),
            sha256=hashlib.sha256(f"{version} {each}".encode()).hexdigest(),
        )
        for each in PackageArchitecture
    ]
    return RunnerRelease(version=version, packages=tuple(packages))


def view_of(runner: MemoryRunner) -> GitHubRunner:
    return GitHubRunner(
        runner_id=runner.runner_id,
        name=runner.name,
        online=runner.take is not None,
        busy=runner.job is not None and runner.job.started,
        labels=runner.labels,
    )
