"""What happened and why, as it happens. The CLI shows it, logs keep it; use cases only tell."""

from __future__ import annotations

from typing import Any, Protocol


class EventLog(Protocol):
    def record(self, action: str, why: str = "", **facts: Any) -> None:
        """`action` is a short stable word pair such as `claim-won`; facts are ids, numbers, times. No credentials."""
        ...


class BoundEventLog:
    """Tells another one, with facts that belong to every event: what a note itself says goes before them."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self.facts: dict[str, Any] = {}

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        self._event_log.record(action, why, **{**self.facts, **facts})


class SilentEventLog:
    def record(self, action: str, why: str = "", **facts: Any) -> None:
        pass
