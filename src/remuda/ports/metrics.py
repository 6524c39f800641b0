"""Metrics: measurements that a monitoring service stores and raises alarms for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class MetricWriter(Protocol):
    async def write(self, values: Mapping[str, float]) -> None:
        """Write these values by name, in as few calls as possible. Raises `UserError` and `Unavailable`."""
        ...
