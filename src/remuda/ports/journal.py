"""What happened and why, as it happens. The CLI shows it, logs keep it; use cases only tell."""

from __future__ import annotations

from typing import Any, Protocol


class Journal(Protocol):
    def note(self, action: str, why: str = "", **facts: Any) -> None:
        """`action` is a short stable word pair such as `claim-won`; facts are ids, numbers, times. No credentials."""
        ...


class BoundJournal:
    """Tells another one, with facts that belong to every event: what a note itself says goes before them."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.facts: dict[str, Any] = {}

    def note(self, action: str, why: str = "", **facts: Any) -> None:
        self._journal.note(action, why, **{**self.facts, **facts})


class SilentJournal:
    def note(self, action: str, why: str = "", **facts: Any) -> None:
        pass
