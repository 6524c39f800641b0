"""What happened, line by line: a hash of all of it, and the lines themselves where somebody wants to read them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

#: So many lines are hashed at a time.
CHUNK = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    at: float
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.at:9.3f}  {self.who:<18} {self.what}"


class Trace:
    def __init__(self, now: Callable[[], float], *, keep: bool = False) -> None:
        self._now = now
        self._hash = hashlib.blake2b(digest_size=16)
        self._said: list[str] = []
        self._keep = keep
        self.lines: list[Line] = []

    def add(self, who: str, what: str) -> None:
        at = self._now()
        self._said.append(f"{at!r} {who} {what}\n")
        if len(self._said) >= CHUNK:
            self._digest_said()
        if self._keep:
            self.lines.append(Line(at=at, who=who, what=what))

    @property
    def digest(self) -> str:
        self._digest_said()
        return self._hash.hexdigest()

    def _digest_said(self) -> None:
        self._hash.update("".join(self._said).encode())
        self._said.clear()
