"""Time and chance for the local GitHub: the one module that touches the real ones."""

import secrets
import time
from typing import Protocol


class TokenClock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch."""

    def token(self, prefix: str) -> str:
        """A new unguessable string that starts with the prefix."""


class SystemTokenClock:
    def now(self) -> float:
        return time.time()  # noqa: TID251  # this is where the real time comes in

    def token(self, prefix: str) -> str:
        return prefix + secrets.token_hex(16)
