"""What a refresh did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remuda.controlplane.context import Context
from remuda.ports.event_log import EventLog


@dataclass(frozen=True, kw_only=True, slots=True)
class RefreshResult:
    #: What was made, and the settings that changed, by name.
    applied: tuple[str, ...]
    #: What each of those settings was and is, where that can be told.
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    #: Instances that were locked for their end, and those whose end is confirmed.
    retired: Mapping[str, str]
    terminated: tuple[str, ...]
    #: Instances taken back from provisions that failed, crashed or were released.
    rolled_back: tuple[str, ...]
    announced: tuple[str, ...]
    #: Interrupted releases that were brought to their end.
    finished: tuple[str, ...]
    #: Registrations that nobody owns.
    removed: tuple[str, ...]
    #: Messages about instances that are not idle any more.
    dropped: int
    forgotten: int
    errors: tuple[str, ...]
    #: Live instances by state, as the sweeps found them; None where they could not be read.
    fleet: Mapping[str, int] | None = None
    seconds: float
    calls: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class Tally:
    """Collects as the sweeps go."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self.applied: list[str] = []
        self.changes: dict[str, tuple[Any, Any]] = {}
        self.retired: dict[str, str] = {}
        self.terminated: list[str] = []
        self.rolled_back: list[str] = []
        self.announced: list[str] = []
        self.finished: list[str] = []
        self.removed: list[str] = []
        self.dropped = 0
        self.forgotten = 0
        self.fleet: dict[str, int] | None = None
        self.errors: list[str] = []

    def error(self, what: str) -> None:
        # Several sweeps may meet the same record.
        if what in self.errors:
            return
        self.errors.append(what)
        self._event_log.record("sweep-failed", what)

    def result(self, context: Context, started: float) -> RefreshResult:
        return RefreshResult(
            applied=tuple(self.applied),
            changes=dict(self.changes),
            retired=dict(self.retired),
            terminated=tuple(self.terminated),
            rolled_back=tuple(self.rolled_back),
            announced=tuple(self.announced),
            finished=tuple(self.finished),
            removed=tuple(self.removed),
            dropped=self.dropped,
            forgotten=self.forgotten,
            errors=tuple(self.errors),
            fleet=self.fleet,
            seconds=round(context.clock.monotonic() - started, 4),
            calls=context.calls.by_service(),
        )
