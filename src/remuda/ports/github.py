"""GitHub's API for self-hosted runners.

A scope is an organisation or a repository as owner/repo. Lists lag, and the `busy` flag may be a minute old. Only
`delete_runner` tests atomically whether a runner is busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Protocol

from remuda.domain.errors import UserError
from remuda.domain.instance import Credential
from remuda.domain.pool_config import DEFAULT_GROUP_ID
from remuda.domain.runner_release import RunnerRelease

#: GitHub's status of a workflow run whose jobs have all ended.
COMPLETED = "completed"


@dataclass(frozen=True, kw_only=True, slots=True)
class GitHubRunner:
    runner_id: int
    name: str
    online: bool
    busy: bool
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class JitRunner:
    runner_id: int
    #: A credential.
    config: str = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunList:
    """The newest runs of a repository in one status."""

    run_ids: tuple[int, ...]
    #: Identifies this answer in the next request; empty if GitHub sent none.
    etag: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedJob:
    """A job of a workflow run. Its texts are untrusted."""

    job_id: int
    run_id: int
    name: str
    #: GitHub's status: queued, in_progress, completed, waiting, …
    status: str
    labels: tuple[str, ...]
    created_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class JobList:
    """The jobs of the latest attempt of a run, at most 100."""

    jobs: tuple[ListedJob, ...] = ()
    #: Identifies this answer in the next request; empty if GitHub sent none.
    etag: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GitHubRun:
    """A workflow run. Its texts are untrusted."""

    run_id: int
    #: GitHub's status: queued, in_progress, completed, …
    status: str
    #: Result of a completed run, or empty.
    conclusion: str
    #: Repository of the code that it runs as owner/name; empty if it is unknown or deleted.
    head_repository: str
    #: Number of its latest attempt: 1, and one more with each re-run. The id stays. 0 if GitHub does not say.
    attempt: int = 0
    #: Identifies this answer in the next request; empty if GitHub sent none.
    etag: str = field(default="", compare=False)

    @property
    def has_ended(self) -> bool:
        """Whether all jobs of its latest attempt have ended."""
        return self.status == COMPLETED


class Deletion(Enum):
    DELETED = "deleted"
    GONE = "gone"
    BUSY = "busy"


def missing_group(scope: str, name: str, known: Iterable[str]) -> UserError:
    return UserError(
        f"{scope} has no runner group {name!r}",
        field="runner-group",
        fix=f"set runner-group to one of {', '.join(sorted(known))}",
    )


class GitHub(Protocol):
    """All methods raise `UserError` for a rejected credential or permission, `Throttled` and `Unavailable`."""

    async def close(self) -> None: ...

    async def registration_token(self, scope: str) -> Credential: ...

    async def removal_token(self, scope: str) -> Credential: ...

    async def jit_config(
        self, scope: str, *, name: str, labels: Sequence[str], group_id: int = DEFAULT_GROUP_ID
    ) -> JitRunner:
        """Create a just-in-time registration. Raises `Conflict` if the name exists."""
        ...

    async def runner_group_id(self, scope: str, name: str) -> int:
        """The id of a runner group of an organisation. Raises `UserError` if it does not exist."""
        ...

    async def runner_downloads(self, scope: str) -> RunnerRelease:
        """Return the newest release of the actions runner for Linux."""
        ...

    async def list_runners(self, scope: str) -> Sequence[GitHubRunner]:
        """Return all runners of all pages, or raise: never an incomplete list."""
        ...

    async def get_runner(self, scope: str, runner_id: int) -> GitHubRunner | None: ...

    async def delete_runner(self, scope: str, runner_id: int) -> Deletion: ...

    async def list_runs(self, scope: str, repository: str, *, status: str, etag: str = "") -> RunList | None:
        """Return the newest runs of a repository in a status (empty: in any), at most 100, by one call.

        None if nothing has changed since the answer with this `etag`; such a call does not count for the rate limit.
        The scope selects the credential. Needs the permission to read Actions.
        """
        ...

    async def list_jobs(self, scope: str, repository: str, run_id: int, *, etag: str = "") -> JobList | None:
        """Return the jobs of the run's latest attempt, by one call. Empty if the run is gone.

        None if nothing has changed since the answer with this `etag`, as for `list_runs`.
        """
        ...

    async def get_run(self, scope: str, repository: str, run_id: int, *, etag: str = "") -> GitHubRun | None:
        """Return a workflow run of a repository in the scope. Raises `NotFound` if the credential sees none.

        None if nothing has changed since the answer with this `etag`; such a call does not count for the rate limit.
        Needs the permission to read Actions.
        """
        ...

    async def rerun_failed_jobs(self, scope: str, repository: str, run_id: int) -> None:
        """Run the failed jobs of a completed run again.

        Raises `Conflict` if GitHub refuses because of the run's state, and `UserError` if the permission is missing.
        """
        ...
