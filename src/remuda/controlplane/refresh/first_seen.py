"""Anomalies that sweeps have seen, with the time of the first sweep: an anomaly counts only after a grace period."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from remuda.domain.timestamps import to_milliseconds
from remuda.ports.store import InstanceStore


class FirstSeen:
    """Maps each anomaly to the time when it was first seen. A sweep drops those that it does not see again."""

    def __init__(self, known: Mapping[str, datetime], *, now: datetime) -> None:
        self._known = dict(known)
        self._now = now
        self._seen: dict[str, datetime] = {}

    def since(self, anomaly: str) -> datetime:
        """Record that it is seen now; return when it was first seen."""
        self._seen[anomaly] = self._known.get(anomaly, to_milliseconds(self._now))
        return self._seen[anomaly]

    def was_seen_before(self, anomaly: str) -> bool:
        """Record that it is seen now; return whether the previous sweep saw it, too."""
        self.since(anomaly)
        return anomaly in self._known

    def keep(self, anomaly: str) -> None:
        """Keep the time of a known anomaly, because this sweep could not check it."""
        if anomaly in self._known:
            self._seen[anomaly] = self._known[anomaly]

    async def save(self, store: InstanceStore) -> None:
        if self._seen != self._known:
            await store.put_first_seen(self._seen)
