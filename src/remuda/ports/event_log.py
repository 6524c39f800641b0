"""Log of events: actions of the control plane and the agent, with reasons."""

from __future__ import annotations

from typing import Any, Protocol


class EventLog(Protocol):
    """Receives events while they happen. The CLI shows them, and logs keep them."""

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        """Record one event.

        `action` is a short stable name such as `claim-won`, `why` is text for people, and `facts` are ids, numbers and
        times. None of them may contain credentials.
        """
        ...


class BoundEventLog:
    """Adds common facts to each event of another log. An event's own facts take precedence."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self.facts: dict[str, Any] = {}

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        self._event_log.record(action, why, **{**self.facts, **facts})


class SilentEventLog:
    """Discards all events."""

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        pass
