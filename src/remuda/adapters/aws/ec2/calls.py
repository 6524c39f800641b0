"""Calls to EC2: counted, repeated where that is safe, errors translated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from aiobotocore.config import AioConfig
from botocore import xform_name
from botocore.exceptions import ClientError

from remuda.adapters.aws.errors import EC2, FAILURES, answered, code_of, translate
from remuda.domain.errors import Throttled, TimedOut, Unavailable
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client

T = TypeVar("T")

SERVICE = "ec2"
#: For calls that may be repeated: how often, and the first pause.
TRIES = 4
PAUSE_S = 0.5
CONNECT_TIMEOUT_S = 5.0
#: CreateFleet answers when all machines are there, or none will come.
READ_TIMEOUT_S = 60.0
MAX_CONNECTIONS = 10
MAX_PAGES = 1_000


def client_config(*, read_timeout_s: float = READ_TIMEOUT_S) -> AioConfig:
    """For the EC2 client. Its own repetitions are off: `Ec2Calls` repeats, and knows what may be repeated."""
    return AioConfig(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=read_timeout_s,
        max_pool_connections=MAX_CONNECTIONS,
        retries={"mode": "standard", "total_max_attempts": 1},
    )


class Ec2Calls:
    def __init__(
        self, *, client: EC2Client, clock: Clock, ids: Ids, calls: CallCounter, waits_again: bool = True
    ) -> None:
        """Without `waits_again` a call that got no answer in time is not repeated: the next cycle does."""
        self._waits_again = waits_again
        self._client = client
        self._clock = clock
        self._ids = ids
        self._calls = calls

    async def ask(
        self, operation: str, *, repeat: bool = True, passes: Collection[str] = (), **parameters: Any
    ) -> dict[str, Any]:
        """One call, or several where the first ones fail. The codes in `passes` come out as they are: the caller knows
        what to do with them.
        """
        for attempt in range(1, TRIES + 1):
            try:
                return await self._once(operation, parameters)
            except FAILURES as error:
                if isinstance(error, ClientError) and code_of(error) in passes:
                    raise
                self._calls.fail(SERVICE, operation)
                translated = translate(error, EC2, operation)
                # What was throttled was not done: that may be repeated, whatever it was.
                again = isinstance(translated, Throttled) or (repeat and isinstance(translated, Unavailable))
                if isinstance(translated, TimedOut) and not self._waits_again:
                    again = False
                if not again or attempt == TRIES:
                    raise translated from error
            await self.pause(attempt)
        raise AssertionError  # pragma: no cover - the loop returns or raises

    async def pages(self, operation: str, **parameters: Any) -> AsyncIterator[dict[str, Any]]:
        for _ in range(MAX_PAGES):
            page = await self.ask(operation, **parameters)
            yield page
            if not page.get("NextToken"):
                return
            parameters = {**parameters, "NextToken": page["NextToken"]}
        raise Unavailable(f"EC2 {operation}: no end after {MAX_PAGES} pages")

    async def pause(self, attempt: int) -> None:
        await self._clock.sleep(PAUSE_S * 2 ** (attempt - 1) * (0.5 + self._ids.jitter()))

    async def _once(self, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._calls.add(SERVICE, operation)
        answer: dict[str, Any] = await answered(getattr(self._client, xform_name(operation))(**parameters))
        return answer


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
