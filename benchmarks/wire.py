"""What goes over the wire: each request that a client sends, repetitions too, by service and operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class WireCount:
    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()

    def watch(self, client: Any) -> None:
        """Each request is told of just before it is sent."""
        client.meta.events.register("before-send", self._sent)

    def _sent(self, event_name: str, **_: Any) -> None:
        service, operation = event_name.split(".")[1:]
        self._seen[service.lower(), operation] += 1

    @contextmanager
    def during(self) -> Iterator[Counted]:
        """Filled when the block ends."""
        before = Counter(self._seen)
        counted = Counted()
        try:
            yield counted
        finally:
            for (service, operation), count in (self._seen - before).items():
                counted.by_operation[service, operation] = count


class Counted:
    def __init__(self) -> None:
        self.by_operation: Counter[tuple[str, str]] = Counter()

    def of(self, service: str) -> int:
        return sum(count for (name, _), count in self.by_operation.items() if name == service)

    def told(self) -> str:
        """For people: operation and count, the most frequent first."""
        return ", ".join(f"{count} {operation}" for (_, operation), count in self.by_operation.most_common())
