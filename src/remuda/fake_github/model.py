"""Data model of the fake GitHub: runners, tokens, jobs, settings."""

import dataclasses
from enum import StrEnum
from typing import Any

#: Labels that GitHub adds to a runner. The REST API calls them read-only.
DEFAULT_LABELS = ("self-hosted", "Linux", "X64")
READ_ONLY_LABELS = frozenset({"self-hosted", "linux", "macos", "windows", "x64", "arm", "arm64"})

MAX_NAME_LENGTH = 64
MAX_LABELS = 100
MAX_LOG_CHARS = 64 * 1024
MAX_COMPLETED_JOBS = 5000
QUEUED_JOB_LIFE_S = 24 * 3600.0
OFFLINE_RUNNER_LIFE_S = 14 * 24 * 3600.0
OFFLINE_EPHEMERAL_LIFE_S = 24 * 3600.0


class ApiError(Exception):
    """A rejected request, with GitHub's status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class TokenKind(StrEnum):
    REGISTRATION = "registration"
    REMOVAL = "removal"
    ACCESS = "access"


class JobPhase(StrEnum):
    """Phase of a job. The REST and admin APIs show ASSIGNED as queued, like GitHub."""

    QUEUED = "queued"
    ASSIGNED = "assigned"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"


class Conclusion(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    CANCELLED = "cancelled"


JOB_TRANSITIONS: dict[JobPhase, frozenset[JobPhase]] = {
    JobPhase.QUEUED: frozenset({JobPhase.ASSIGNED, JobPhase.COMPLETED}),
    JobPhase.ASSIGNED: frozenset({JobPhase.QUEUED, JobPhase.IN_PROGRESS, JobPhase.COMPLETED}),
    JobPhase.IN_PROGRESS: frozenset({JobPhase.COMPLETED}),
    JobPhase.COMPLETED: frozenset(),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FakeGitHubSettings:
    #: Lifetime of registration and removal tokens in seconds.
    token_life_s: float = 3600.0
    #: Seconds until a job fails whose runner no longer renews it. Until then the runner stays busy.
    lease_s: float = 600.0
    #: Seconds until a session without an open poll or another request counts as lost.
    liveness_s: float = 5.0
    #: Seconds until an assigned job that was not picked up is queued again.
    pickup_s: float = 60.0
    #: Owners ("org") and repositories ("owner/repo") that exist; None means all do.
    known_scopes: tuple[str, ...] | None = None
    #: Requests per hour, as reported in the rate limit headers.
    rate_limit: int = 15_000
    #: Whether requests above the limit are rejected.
    enforce_rate_limit: bool = False
    #: The GitHub App: its id, its public key (PEM), and the owners that have installed it.
    app_id: str = ""
    app_key: str = ""
    app_owners: tuple[str, ...] = ()


@dataclasses.dataclass(kw_only=True, slots=True)
class IssuedToken:
    value: str
    kind: TokenKind
    #: Empty for an access token without restriction.
    scopes: tuple[str, ...]
    expires_at: float | None
    #: For access tokens: whether they allow changes.
    write: bool = True


@dataclasses.dataclass(kw_only=True, slots=True)
class RegisteredRunner:
    id: int
    #: "owner/repo" or "org".
    scope: str
    name: str
    labels: tuple[str, ...]
    os: str
    ephemeral: bool
    #: Credential of the runner.
    secret: str
    group_id: int
    created_at: float
    offline_since: float
    #: None until the first session, as in GitHub's responses.
    version: str | None = None
    session: str | None = None
    seen_at: float = 0.0
    job_id: int | None = None

    @property
    def online(self) -> bool:
        return self.session is not None

    def accepts(self, job: "GitHubJob") -> bool:
        return self.covers(job.repo) and matches(job.labels, self.labels)

    def covers(self, repo: str) -> bool:
        scope, target = self.scope.lower(), repo.lower()
        return target == scope or ("/" not in scope and target.split("/")[0] == scope)


@dataclasses.dataclass(kw_only=True, slots=True)
class GitHubJob:
    id: int
    run_id: str
    run_attempt: int
    repo: str
    name: str
    labels: tuple[str, ...]
    steps: list[dict[str, Any]]
    env: dict[str, str]
    created_at: float
    phase: JobPhase = JobPhase.QUEUED
    conclusion: Conclusion | None = None
    runner_id: int | None = None
    runner_name: str | None = None
    started_at: float | None = None
    completed_at: float | None = None
    #: End of the lease of a running job, or of the pick-up time of an assigned job.
    due_at: float | None = None
    cancel_requested: bool = False
    log: str = ""

    @property
    def status(self) -> str:
        return JobPhase.QUEUED if self.phase is JobPhase.ASSIGNED else self.phase


def matches(wanted: tuple[str, ...], offered: tuple[str, ...]) -> bool:
    """Whether all wanted labels are offered, ignoring case. As on GitHub, a job without labels matches no runner."""
    return bool(wanted) and {label.lower() for label in wanted} <= {label.lower() for label in offered}
