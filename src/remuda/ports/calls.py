"""How many calls were made to which service: adapters count, results show it."""

from __future__ import annotations

from collections import Counter


class CallCounter:
    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, service: str, operation: str) -> None:
        self._counts[service, operation] += 1

    def by_service(self) -> dict[str, dict[str, int]]:
        result: dict[str, dict[str, int]] = {}
        for (service, operation), count in sorted(self._counts.items()):
            result.setdefault(service, {})[operation] = count
        return result
