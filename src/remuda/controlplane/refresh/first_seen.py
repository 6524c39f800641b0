"""First sightings of anomalies, kept across sweeps: an anomaly counts only after it has lasted for a grace period."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from remuda.domain.timestamps import to_milliseconds
from remuda.ports.store import InstanceStore


class FirstSeen:
    """When each anomaly was first seen. An anomaly that a sweep does not see again is dropped."""

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
        """Keep the first sighting, if there is one, because this sweep could not check."""
        if anomaly in self._known:
            self._seen[anomaly] = self._known[anomaly]

    async def save(self, store: InstanceStore) -> None:
        if self._seen != self._known:
            await store.put_sightings(self._seen)
