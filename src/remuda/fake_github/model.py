"""What the local GitHub knows: runners, tokens, jobs, settings."""

import dataclasses
from enum import StrEnum
from typing import Any

#: Labels that GitHub gives a runner itself; REST calls them read-only.
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
    """The request cannot be granted; the status and the message are GitHub's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class TokenKind(StrEnum):
    REGISTRATION = "registration"
    REMOVAL = "removal"
    ACCESS = "access"


class JobPhase(StrEnum):
    """Where a job is. REST and the admin API show ASSIGNED as queued, as GitHub does."""

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
    #: Life of registration and removal tokens.
    token_life_s: float = 3600.0
    #: A job whose runner stopped renewing fails after this long; until then the runner stays busy.
    lease_s: float = 600.0
    #: A session without an open poll or a sign of life for this long has vanished.
    liveness_s: float = 5.0
    #: An assigned job that was not picked up is queued again after this long.
    pickup_s: float = 60.0
    #: Owners ("org") and repositories ("owner/repo") that exist; None means all do.
    known_scopes: tuple[str, ...] | None = None
    #: The limit told in the rate headers.
    rate_limit: int = 15_000
    #: Whether going over that limit is refused. Off: a demo may poll as it likes.
    enforce_rate_limit: bool = False
    #: The one GitHub App there may be: its id, its public key (PEM), and who has it installed.
    app_id: str = ""
    app_key: str = ""
    app_owners: tuple[str, ...] = ()


@dataclasses.dataclass(kw_only=True, slots=True)
class IssuedToken:
    value: str
    kind: TokenKind
    #: Empty for an access token that may do everything.
    scopes: tuple[str, ...]
    expires_at: float | None
    #: Access tokens only: False refuses every call that changes something.
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
    #: What the runner proves itself with.
    secret: str
    group_id: int
    created_at: float
    offline_since: float
    #: None until the first session, as in GitHub's answers.
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
    #: Lease of a running job, or the pick-up limit of an assigned one.
    due_at: float | None = None
    cancel_requested: bool = False
    log: str = ""

    @property
    def status(self) -> str:
        return JobPhase.QUEUED if self.phase is JobPhase.ASSIGNED else self.phase


def matches(wanted: tuple[str, ...], offered: tuple[str, ...]) -> bool:
    """All labels, case-insensitively. A job without labels matches nothing, as on GitHub."""
    return bool(wanted) and {label.lower() for label in wanted} <= {label.lower() for label in offered}
