"""Counter of calls to external services, by service and operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from remuda.domain.errors import Conflict, NotFound, RemudaError


class CallCounter:
    """Adapters count their calls; results and metrics show the counts."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._failures: Counter[tuple[str, str]] = Counter()

    def add(self, service: str, operation: str, count: int = 1) -> None:
        if count:
            self._counts[service, operation] += count

    def fail(self, service: str, operation: str, count: int = 1) -> None:
        """Count added calls as failed: no response or an error.

        A failed condition and a missing item are not failures.
        """
        if count:
            self._failures[service, operation] += count

    @contextmanager
    def counted(self, service: str, operation: str, count: int = 1) -> Iterator[None]:
        """Count calls, and count all of them as failed if the block raises."""
        self.add(service, operation, count)
        try:
            yield
        except (Conflict, NotFound):
            raise
        except RemudaError:
            self.fail(service, operation, count)
            raise

    def reset(self) -> None:
        """Forget all counts, in a process that counts the calls of each request."""
        self._counts.clear()
        self._failures.clear()

    def outcomes(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Return the numbers of successful and failed calls by service and operation."""
        return {
            name: (count - self._failures[name], self._failures[name]) for name, count in sorted(self._counts.items())
        }

    def by_service(self) -> dict[str, dict[str, int]]:
        result: dict[str, dict[str, int]] = {}
        for (service, operation), count in sorted(self._counts.items()):
            result.setdefault(service, {})[operation] = count
        return result
