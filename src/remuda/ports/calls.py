"""How many calls were made to which service, and how many of them failed: adapters count, results show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from remuda.domain.errors import Conflict, NotFound, RemudaError


class CallCounter:
    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._failures: Counter[tuple[str, str]] = Counter()

    def add(self, service: str, operation: str, count: int = 1) -> None:
        if count:
            self._counts[service, operation] += count

    def fail(self, service: str, operation: str, count: int = 1) -> None:
        """Of the calls that were added: they got no answer, or an error. A condition that does not hold, and something
        that is not there, are answers.
        """
        if count:
            self._failures[service, operation] += count

    @contextmanager
    def counted(self, service: str, operation: str, count: int = 1) -> Iterator[None]:
        """Calls with their outcome: all or none of them fail."""
        self.add(service, operation, count)
        try:
            yield
        except (Conflict, NotFound):
            raise
        except RemudaError:
            self.fail(service, operation, count)
            raise

    def outcomes(self) -> dict[tuple[str, str], tuple[int, int]]:
        """By service and operation: how many did not fail, and how many did."""
        return {
            name: (count - self._failures[name], self._failures[name]) for name, count in sorted(self._counts.items())
        }

    def by_service(self) -> dict[str, dict[str, int]]:
        result: dict[str, dict[str, int]] = {}
        for (service, operation), count in sorted(self._counts.items()):
            result.setdefault(service, {})[operation] = count
        return result
