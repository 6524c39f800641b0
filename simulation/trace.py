"""The trace of one simulated world: a hash of all events, and the events themselves on request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

#: Number of lines that are hashed together.
CHUNK = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceLine:
    at: float
    source: str
    text: str

    def __str__(self) -> str:
        return f"{self.at:9.3f}  {self.source:<18} {self.text}"


class Trace:
    def __init__(self, now: Callable[[], float], *, keep: bool = False) -> None:
        self._now = now
        self._hash = hashlib.blake2b(digest_size=16)
        self._unhashed: list[str] = []
        self._keep = keep
        self.lines: list[TraceLine] = []

    def add(self, source: str, text: str) -> None:
        at = self._now()
        self._unhashed.append(f"{at!r} {source} {text}\n")
        if len(self._unhashed) >= CHUNK:
            self._update_hash()
        if self._keep:
            self.lines.append(TraceLine(at=at, source=source, text=text))

    @property
    def digest(self) -> str:
        self._update_hash()
        return self._hash.hexdigest()

    def _update_hash(self) -> None:
        self._hash.update("".join(self._unhashed).encode())
        self._unhashed.clear()
