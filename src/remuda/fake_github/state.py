"""State of the fake GitHub: its data model (runners, tokens, jobs, settings), in memory, and its storage in SQLite."""

import dataclasses
import json
import pathlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Protocol

from remuda.fake_github.fake_runner import VERSION

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
Document = dict[str, Any]
#: Kind, key and document. None instead of a document means that it was deleted.
StoredChange = tuple[str, str, Document | None]


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
    #: Lifetime of OIDC tokens in seconds.
    id_token_life_s: float = 300.0
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
    #: Runner groups of every organization besides its default group. The first has id 2.
    runner_groups: tuple[str, ...] = ()
    #: Whether runners may be registered with `--disableupdate`. Older GitHub Enterprise Servers refuse it.
    supports_disable_update: bool = True
    #: Version to which runners of another one must update themselves, unless they are registered with
    #: `--disableupdate`. Empty: none.
    update_runners_to: str = ""
    #: The GitHub App: its id, its public key (PEM), and the owners that have installed it.
    app_id: str = ""
    app_key: str = ""
    app_owners: tuple[str, ...] = ()
    #: Whether runners that register from now on are removed by the newer of the two flows of actions/runner.
    use_runner_admin_flow: bool = False
    #: Newest version of the runner; the list of runner packages has it.
    newest_runner_version: str = VERSION
    #: Runners of older versions cannot register.
    minimum_runner_version: str = "2.329.0"
    #: Runners of older versions receive no jobs. GitHub's limit follows new releases after 30 days.
    oldest_served_version: str = "2.329.0"


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
    #: Whether the runner is registered with `--disableupdate`.
    disable_update: bool = False
    #: None until the first session, as in GitHub's responses.
    version: str | None = None
    session: str | None = None
    seen_at: float = 0.0
    job_id: int | None = None
    #: Whether its version is too old to receive jobs.
    deprecated: bool = False

    @property
    def online(self) -> bool:
        return self.session is not None

    def accepts(self, job: "GitHubJob") -> bool:
        return not self.deprecated and self.covers(job.repo) and matches(job.labels, self.labels)

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


def is_older(version: str, than: str) -> bool:
    """Whether a version is older. A text that is not a version is older than all."""
    return _numbers(version) < _numbers(than)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()


class TokenClock(Protocol):
    """Time and random tokens."""

    def now(self) -> float:
        """Return the seconds since 1970."""

    def token(self, prefix: str) -> str:
        """Return a new random string with this prefix."""


class GitHubState:
    """Documents in memory. Each change must be reported with `changed`, so that it is stored and waiters wake up."""

    def __init__(self, *, clock: TokenClock, settings: FakeGitHubSettings | None = None) -> None:
        self.clock = clock
        self.settings = settings or FakeGitHubSettings()
        self.runners: dict[int, RegisteredRunner] = {}
        self.jobs: dict[int, GitHubJob] = {}
        self.tokens: dict[str, IssuedToken] = {}
        self.labels: dict[str, int] = {}
        #: Increases with each change, so that clients can wait for the next one.
        self.version = 0
        self._last_id = 0
        self._secrets: dict[str, int] = {}
        self._dirty: dict[tuple[str, str], None] = {}
        self._woken: set[str] = set()

    def new_id(self) -> int:
        self._last_id += 1
        self.changed("meta", "counter")
        return self._last_id

    def label_id(self, name: str) -> int:
        if name not in self.labels:
            self.labels[name] = self.new_id()
            self.changed("label", name)
        return self.labels[name]

    def add_runner(self, runner: RegisteredRunner) -> None:
        self.runners[runner.id] = runner
        self._secrets[runner.secret] = runner.id
        self.changed("runner", runner.id)

    def drop_runner(self, runner: RegisteredRunner) -> None:
        del self.runners[runner.id]
        self._secrets.pop(runner.secret, None)
        self.changed("runner", runner.id)

    def renew_secret(self, runner: RegisteredRunner, secret: str) -> None:
        self._secrets.pop(runner.secret, None)
        runner.secret = secret
        self._secrets[secret] = runner.id

    def runner_by_secret(self, secret: str) -> RegisteredRunner | None:
        found = self._secrets.get(secret)
        return None if found is None else self.runners.get(found)

    def change_settings(self, settings: FakeGitHubSettings) -> None:
        self.settings = settings
        self.changed("meta", "settings")

    def changed(self, kind: str, key: int | str) -> None:
        self._dirty[kind, str(key)] = None
        self._woken.add(f"{kind}:{key}")

    def take_changes(self) -> list[StoredChange]:
        """Return the changes since the last call, in order."""
        changes = [(kind, key, self._document(kind, key)) for kind, key in self._dirty]
        self._dirty.clear()
        if changes:
            self.version += 1
        return changes

    def take_woken(self) -> set[str]:
        woken, self._woken = self._woken, set()
        return woken

    def load(self, documents: Iterable[tuple[str, str, Document]]) -> None:
        """Load a stored state. Sessions count as seen now, because runners could not reach a stopped server."""
        now = self.clock.now()
        for kind, key, document in documents:
            self._load_one(kind, key, document)
        for runner in self.runners.values():
            if runner.online:
                runner.seen_at = now
        self._dirty.clear()
        self._woken.clear()

    def _load_one(self, kind: str, key: str, document: Document) -> None:
        match kind, key:
            case "meta", "counter":
                self._last_id = document["last_id"]
            case "meta", "settings":
                self.settings = settings_from(document)
            case "label", name:
                self.labels[name] = document["id"]
            case "token", _:
                document["kind"] = TokenKind(document["kind"])
                document["scopes"] = tuple(document["scopes"])
                self.tokens[key] = IssuedToken(**document)
            case "runner", _:
                document["labels"] = tuple(document["labels"])
                self.add_runner(RegisteredRunner(**document))
            case "job", _:
                self.jobs[int(key)] = _job_from(document)

    def _document(self, kind: str, key: str) -> Document | None:
        match kind, key:
            case "meta", "counter":
                return {"last_id": self._last_id}
            case "meta", "settings":
                return dataclasses.asdict(self.settings)
            case "label", name:
                return {"id": self.labels[name]}
            case "token", value:
                return _as_document(self.tokens.get(value))
            case "runner", number:
                return _as_document(self.runners.get(int(number)))
            case "job", number:
                return _as_document(self.jobs.get(int(number)))
        raise ValueError(f"unknown kind of document: {kind}")

    def __iter__(self) -> Iterator[RegisteredRunner]:
        return iter(self.runners.values())


class DocumentStore:
    """Stores each change of the state, so that registrations and jobs survive a kill of the server."""

    def __init__(self, path: pathlib.Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        path.chmod(0o600)
        # NORMAL survives a killed process; only a power failure can lose the last writes.
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS document"
            " (kind TEXT NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID"
        )

    def read(self) -> Iterator[tuple[str, str, Document]]:
        for kind, key, body in self._db.execute("SELECT kind, key, body FROM document"):
            yield kind, key, json.loads(body)

    def write(self, changes: Sequence[StoredChange]) -> None:
        """Write all changes in one transaction."""
        if not changes:
            return
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(
            "DELETE FROM document WHERE kind = ? AND key = ?",
            [(kind, key) for kind, key, document in changes if document is None],
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO document (kind, key, body) VALUES (?, ?, ?)",
            [(kind, key, json.dumps(document)) for kind, key, document in changes if document is not None],
        )
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()


def settings_from(document: Document) -> FakeGitHubSettings:
    known = document.get("known_scopes")
    return FakeGitHubSettings(
        **{
            **document,
            "known_scopes": None if known is None else tuple(known),
            "app_owners": tuple(document.get("app_owners", ())),
            "runner_groups": tuple(document.get("runner_groups", ())),
        }
    )


def _job_from(document: Document) -> GitHubJob:
    conclusion = document["conclusion"]
    return GitHubJob(
        **{
            **document,
            "labels": tuple(document["labels"]),
            "phase": JobPhase(document["phase"]),
            "conclusion": None if conclusion is None else Conclusion(conclusion),
        }
    )


def _as_document(value: IssuedToken | RegisteredRunner | GitHubJob | None) -> Document | None:
    return None if value is None else dataclasses.asdict(value)
