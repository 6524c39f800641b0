"""State of the fake GitHub in memory, and its storage in SQLite."""

import dataclasses
import json
import pathlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from remuda.fake_github.model import (
    Conclusion,
    FakeGitHubSettings,
    GitHubJob,
    IssuedToken,
    JobPhase,
    RegisteredRunner,
    TokenKind,
)

Document = dict[str, Any]
#: Kind, key and document. None instead of a document means that it was deleted.
StoredChange = tuple[str, str, Document | None]


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
    known, owners = document.get("known_scopes"), document.get("app_owners", ())
    return FakeGitHubSettings(
        **{**document, "known_scopes": None if known is None else tuple(known), "app_owners": tuple(owners)}
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
