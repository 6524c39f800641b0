"""Everything the local GitHub remembers, and what changed since someone last asked."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from remuda.fake_github.clock import TokenClock
from remuda.fake_github.model import (
    Conclusion,
    FakeGitHubSettings,
    GitHubJob,
    IssuedToken,
    JobPhase,
    RegisteredRunner,
    TokenKind,
)

#: Kind, key and document of something to store; no document means it is gone.
Document = dict[str, Any]
StoredChange = tuple[str, str, Document | None]


class GitHubState:
    """Documents in memory. Whoever changes one says so with `changed`; the server stores and wakes by that."""

    def __init__(self, *, clock: TokenClock, settings: FakeGitHubSettings | None = None) -> None:
        self.clock = clock
        self.settings = settings or FakeGitHubSettings()
        self.runners: dict[int, RegisteredRunner] = {}
        self.jobs: dict[int, GitHubJob] = {}
        self.tokens: dict[str, IssuedToken] = {}
        self.labels: dict[str, int] = {}
        #: Rises with every change; lets a client wait for the next one.
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
        """What to store since the last call, in the order it changed."""
        taken = [(kind, key, self._document(kind, key)) for kind, key in self._dirty]
        self._dirty.clear()
        if taken:
            self.version += 1
        return taken

    def take_woken(self) -> set[str]:
        woken, self._woken = self._woken, set()
        return woken

    def load(self, documents: Iterable[tuple[str, str, Document]]) -> None:
        """Take up a stored state. Open sessions get a fresh chance: the time down was not theirs."""
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
