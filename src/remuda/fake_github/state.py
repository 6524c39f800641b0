"""State of the fake GitHub: its data model (runners, tokens, jobs, settings), in memory, and its storage in SQLite."""

import dataclasses
import datetime as dt
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
#: actions/runner, Runner.Listener/Configuration/Validators.cs, LabelsValidator.
MAX_LABEL_LENGTH = 256
MAX_LOG_CHARS = 64 * 1024
#: Maximum characters of a job's summary, of all its outputs, and of the end of a step's output.
MAX_SUMMARY_CHARS = 256 * 1024
MAX_OUTPUTS_CHARS = 1024 * 1024
MAX_TAIL_CHARS = 8 * 1024
MAX_COMPLETED_JOBS = 5000
#: Maximum number of runs that were begun explicitly.
MAX_RUNS = 1000
QUEUED_JOB_LIFE_S = 24 * 3600.0
OFFLINE_RUNNER_LIFE_S = 14 * 24 * 3600.0
OFFLINE_EPHEMERAL_LIFE_S = 24 * 3600.0
#: Ids of messages as seen on github.com (actions/actions-runner-controller#4602).
FIRST_MESSAGE_ID = 100_000_001
Document = dict[str, Any]
#: Kind, key and document. None instead of a document means that it was deleted.
StoredChange = tuple[str, str, Document | None]


class ApiError(Exception):
    """A rejected request, with GitHub's status and message."""

    def __init__(self, status: int, message: str, *, type_name: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        #: Name of the exception that the Actions service reports.
        self.type_name = type_name


class TokenKind(StrEnum):
    REGISTRATION = "registration"
    REMOVAL = "removal"
    ACCESS = "access"
    #: For the Actions service: all its operations for one scope, or one message session.
    ADMIN = "admin"
    QUEUE = "queue"


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
    #: Permissions of its installations, like those of an `IssuedToken`.
    app_permissions: dict[str, str] | None = None
    #: Whether runners that register from now on are removed by the newer of the two flows of actions/runner.
    use_runner_admin_flow: bool = False
    #: Newest version of the runner; the list of runner packages has it.
    newest_runner_version: str = VERSION
    #: Runners of older versions cannot register.
    minimum_runner_version: str = "2.329.0"
    #: Runners of older versions receive no jobs. GitHub's limit follows new releases after 30 days.
    oldest_served_version: str = "2.329.0"
    #: Lifetimes of the tokens of the Actions service in seconds.
    admin_token_life_s: float = 3600.0
    queue_token_life_s: float = 3600.0
    #: Seconds until a poll for messages ends without one.
    message_poll_s: float = 50.0
    #: Seconds until a message session without a request ends.
    message_session_s: float = 50.0
    #: Whether messages that were not acknowledged are lost with their session.
    session_loses_messages: bool = False
    #: Seconds until the assignment of a job to a scale set lapses if no runner takes the job.
    assignment_life_s: float = 300.0
    #: Seconds until a job is assigned again after its assignment has lapsed, times the number of lapses.
    reassignment_delay_s: float = 30.0
    #: Seconds without a session after which a scale set is deleted.
    scale_set_life_s: float = 7 * 24 * 3600.0
    #: Whether a job that is queued while a set announces the capacity 0 is never assigned to this set.
    zero_capacity_trap: bool = True
    #: Whether scale sets must acquire jobs, as on GitHub Enterprise Server. github.com assigns them directly.
    jobs_must_be_acquired: bool = False
    #: Whether responses of the Actions service begin with a byte order mark.
    byte_order_mark: bool = True
    #: Whether scale sets and registration tokens have only the fields that GitHub's client of scale sets needs, as in
    #: its tests (actions/scaleset, client_test.go, TestGetRunnerScaleSet; client.go, registrationToken).
    only_needed_fields: bool = False


@dataclasses.dataclass(kw_only=True, slots=True)
class IssuedToken:
    value: str
    kind: TokenKind
    #: Empty for an access token without restriction.
    scopes: tuple[str, ...]
    expires_at: float | None
    #: For access tokens: "read" or "write" by kind of permission, such as {"actions": "read"}. None: all permissions.
    permissions: dict[str, str] | None = None


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
    #: The scale set that it belongs to; 0 if none.
    scale_set_id: int = 0

    @property
    def online(self) -> bool:
        return self.session is not None

    def accepts(self, job: "GitHubJob") -> bool:
        if self.deprecated or job.scale_set_id != self.scale_set_id:
            return False
        return bool(self.scale_set_id) or (covers(self.scope, job.repo) and matches(job.labels, self.labels))


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
    #: Contexts of the job's expressions, and the expressions of its outputs by name.
    contexts: dict[str, Any] = dataclasses.field(default_factory=dict)
    output_expressions: dict[str, str] = dataclasses.field(default_factory=dict)
    #: The snapshot that actions/checkout copies: its `kind` and `path`.
    checkout: dict[str, str] = dataclasses.field(default_factory=dict)
    outputs: dict[str, str] = dataclasses.field(default_factory=dict)
    summary: str = ""
    #: Name of the event that started the run, the workflow's path and ref, and the repository of the commit.
    event: str = "push"
    workflow: str = ""
    head_repo: str = ""
    #: The scale set that the job is assigned to; 0 if none.
    scale_set_id: int = 0
    #: The job's id in messages. It changes when an assignment has lapsed.
    message_job_id: str = ""
    set_assigned_at: float | None = None
    runner_assigned_at: float | None = None
    #: When the assignment to the set lapses; after a lapse, when the job may be assigned again.
    set_due_at: float | None = None
    lapses: int = 0
    #: Sets that never get the job, and those that it was offered to.
    blind_sets: list[int] = dataclasses.field(default_factory=list)
    offered_sets: list[int] = dataclasses.field(default_factory=list)

    @property
    def status(self) -> str:
        return JobPhase.QUEUED if self.phase is JobPhase.ASSIGNED else self.phase


@dataclasses.dataclass(kw_only=True, slots=True)
class WorkflowRunRecord:
    """A workflow run that `remuda run-workflow` began. It may have jobs that are not queued yet, or run elsewhere."""

    repo: str
    run_id: str
    attempt: int
    event: str
    created_at: float
    #: None until the attempt has ended.
    conclusion: Conclusion | None = None

    @property
    def key(self) -> str:
        return f"{self.repo.lower()}/{self.run_id}"


@dataclasses.dataclass(kw_only=True, slots=True)
class ScaleSet:
    id: int
    #: "owner/repo" or "org".
    scope: str
    name: str
    group_id: int
    labels: tuple[str, ...]
    disable_update: bool
    created_at: float
    #: Time of the last connection.
    seen_at: float
    #: Empty if there is no session.
    session_id: str = ""
    session_owner: str = ""
    #: Announced by the last poll of the session; None if there was none.
    capacity: int | None = None
    last_message_id: int = FIRST_MESSAGE_ID - 1
    last_event_id: int = 0
    #: Ids of the events that are not part of a message yet, and of those that come later with their time.
    ready: list[int] = dataclasses.field(default_factory=list)
    delayed: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    #: Messages that were not acknowledged, with the ids of their events.
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def covers(scope: str, repo: str) -> bool:
    """Whether runners of a scope may serve jobs of the repository."""
    scope, target = scope.lower(), repo.lower()
    return target == scope or ("/" not in scope and target.split("/")[0] == scope)


def matches(wanted: tuple[str, ...], offered: tuple[str, ...]) -> bool:
    """Whether all wanted labels are offered, ignoring case. As on GitHub, a job without labels matches no runner."""
    return bool(wanted) and {label.lower() for label in wanted} <= {label.lower() for label in offered}


def timestamp(at: float | None) -> str | None:
    if at is None:
        return None
    moment = dt.datetime.fromtimestamp(at, tz=dt.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


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
        self.scale_sets: dict[int, ScaleSet] = {}
        #: Runs that were begun explicitly, by "owner/repo/run id".
        self.workflow_runs: dict[str, WorkflowRunRecord] = {}
        #: Job messages of scale sets by "set/event".
        self.set_events: dict[str, Document] = {}
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

    def put_run(self, run: WorkflowRunRecord) -> None:
        self.workflow_runs[run.key] = run
        self.changed("workflow-run", run.key)
        while len(self.workflow_runs) > MAX_RUNS:
            oldest = next(iter(self.workflow_runs))
            del self.workflow_runs[oldest]
            self.changed("workflow-run", oldest)

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
        for scale_set in self.scale_sets.values():
            if scale_set.session_id:
                scale_set.seen_at = now
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
                # The state of an earlier version: it stored whether an access token allows changes.
                document.pop("write", None)
                self.tokens[key] = IssuedToken(**document)
            case "runner", _:
                document["labels"] = tuple(document["labels"])
                self.add_runner(RegisteredRunner(**document))
            case "job", _:
                self.jobs[int(key)] = _job_from(document)
            case "scale-set", _:
                document["labels"] = tuple(document["labels"])
                document["delayed"] = [(at, event) for at, event in document["delayed"]]
                self.scale_sets[int(key)] = ScaleSet(**document)
            case "workflow-run", _:
                self.workflow_runs[key] = _run_from(document)
            case "set-event", _:
                self.set_events[key] = document

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
            case "scale-set", number:
                return _as_document(self.scale_sets.get(int(number)))
            case "workflow-run", name:
                return _as_document(self.workflow_runs.get(name))
            case "set-event", name:
                return self.set_events.get(name)
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


def _run_from(document: Document) -> WorkflowRunRecord:
    conclusion = document["conclusion"]
    return WorkflowRunRecord(**{**document, "conclusion": None if conclusion is None else Conclusion(conclusion)})


def _as_document(
    value: IssuedToken | RegisteredRunner | GitHubJob | ScaleSet | WorkflowRunRecord | None,
) -> Document | None:
    return None if value is None else dataclasses.asdict(value)
