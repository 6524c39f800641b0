"""The result of a refresh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remuda.controlplane.context import Context
from remuda.domain.reporting.warnings import WarningKind


@dataclass(frozen=True, kw_only=True, slots=True)
class RefreshResult:
    #: Created resources, changed settings by name, and renewed tokens.
    applied: tuple[str, ...]
    #: Previous and new value per changed setting, except settings that may hold a secret.
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    #: Instances whose termination was decided, with the reason.
    retired: Mapping[str, str]
    #: Instances whose termination EC2 confirmed.
    terminated: tuple[str, ...]
    #: Instances taken back from provisions that failed, crashed or were released.
    rolled_back: tuple[str, ...]
    #: Idle instances for which a pool message was sent.
    published: tuple[str, ...]
    #: Instances whose interrupted release was finished.
    finished_releases: tuple[str, ...]
    #: Names of the stale registrations that were removed.
    stale_registrations: tuple[str, ...]
    #: Number of stale pool messages that were deleted.
    stale_messages: int
    #: Number of old records that were deleted.
    deleted_records: int
    errors: tuple[str, ...]
    #: Sentences, with the kind of each.
    warnings: tuple[str, ...] = ()
    warning_kinds: tuple[WarningKind, ...] = ()
    #: One sentence per job that waits too long for a runner.
    waiting_jobs: tuple[str, ...] = ()
    #: Number of live instances per state before the sweeps; None if they could not be read.
    live_instances: Mapping[str, int] | None = None
    seconds: float
    calls: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class RefreshResultBuilder:
    """Collects what a refresh does, and logs errors as they occur."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._started_at = context.clock.monotonic()
        self.applied: list[str] = []
        self.changes: dict[str, tuple[Any, Any]] = {}
        self.retired: dict[str, str] = {}
        self.terminated: list[str] = []
        self.rolled_back: list[str] = []
        self.published: list[str] = []
        self.finished_releases: list[str] = []
        self.stale_registrations: list[str] = []
        self.stale_messages = 0
        self.deleted_records = 0
        self.live_instances: dict[str, int] | None = None
        self.errors: list[str] = []
        self.warnings: list[tuple[WarningKind, str]] = []
        self.waiting_jobs: list[str] = []

    def warn(self, kind: WarningKind, message: str) -> None:
        self.warnings.append((kind, message))
        self._context.event_log.record("refresh-warning", message)

    def error(self, message: str) -> None:
        # Several sweeps may read the same unreadable record.
        if message in self.errors:
            return
        self.errors.append(message)
        self._context.event_log.record("sweep-failed", message)

    def build(self) -> RefreshResult:
        return RefreshResult(
            applied=tuple(self.applied),
            changes=dict(self.changes),
            retired=dict(self.retired),
            terminated=tuple(self.terminated),
            rolled_back=tuple(self.rolled_back),
            published=tuple(self.published),
            finished_releases=tuple(self.finished_releases),
            stale_registrations=tuple(self.stale_registrations),
            stale_messages=self.stale_messages,
            deleted_records=self.deleted_records,
            errors=tuple(self.errors),
            warnings=tuple(message for _, message in self.warnings),
            warning_kinds=tuple(kind for kind, _ in self.warnings),
            waiting_jobs=tuple(self.waiting_jobs),
            live_instances=self.live_instances,
            seconds=round(self._context.clock.monotonic() - self._started_at, 4),
            calls=self._context.calls.by_service(),
        )
