"""`remuda` with its wall clock frozen at the time in the first argument: `2026-03-11T10:00:00Z scale-down …`.

The monotonic clock still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from remuda.adapters.system.clock import SystemClock
from remuda.cli import main as cli


def main(arguments: Sequence[str]) -> int:
    now, *rest = arguments
    at = datetime.fromisoformat(now)
    SystemClock.now = lambda self: at  # type: ignore[method-assign] # noqa: ARG005 - the port's own name
    return cli.main(rest)
