"""Pool messages: sent when an instance becomes idle, so that a provision or a runner set can claim it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from remuda.controlplane.batching import Batcher
from remuda.controlplane.context import Context, transition_all
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import Instance
from remuda.domain.transitions import Actor, Announce
from remuda.ports.pool import BATCH

#: Seconds that a pool message waits for others that can share its call.
BATCH_WINDOW_S = 0.03
#: Instances whose pool messages are recorded as sent in one call.
RECORD_BATCH = 50


async def publish_to_pool(context: Context, instances: Collection[Instance], *, by: Actor) -> list[RemudaError]:
    """Send pool messages for idle instances, then record that. After a crash in between, the message is repeated."""
    try:
        sent = await _send_messages(context, instances)
    except RemudaError as error:
        return [error]
    return await _record_sent(context, sent, by=by)


async def _send_messages(context: Context, instances: Collection[Instance]) -> list[Instance]:
    """Return the idle instances whose messages were sent. Retired and quarantined ones cannot be claimed."""
    idle = [instance for instance in instances if instance.retire_reason is None]
    if idle:
        await context.pool.send([instance.message() for instance in idle])
    return idle


async def _record_sent(context: Context, sent: Sequence[Instance], *, by: Actor) -> list[RemudaError]:
    results = await transition_all(context, sent, Announce(), by=by, why="sent to the pool")
    # After a conflict, a provision has claimed it already.
    return [result for result in results if result is not None and not isinstance(result, Conflict)]


class PoolPublisher:
    """Publishes instances in batches as they become idle. Sweeps publish what it could not."""

    def __init__(
        self,
        context: Context,
        *,
        by: Actor,
        on_sent: Callable[[Sequence[Instance]], None] = lambda _instances: None,
        record_after_s: float = 0.0,
        is_idle: Callable[[Instance], bool] = lambda _instance: True,
    ) -> None:
        """`on_sent` is called with the instances of each batch, whether or not it could be sent.

        That a message was sent is recorded after `record_after_s`, if `is_idle` does not know of a claim by then.
        """
        self._context = context
        self._by = by
        self._on_sent = on_sent
        self._is_idle = is_idle
        self._sending = Batcher(self._send, size=BATCH, window_s=BATCH_WINDOW_S)
        self._recording = Batcher(self._record, size=RECORD_BATCH, window_s=record_after_s)

    def add(self, instance: Instance) -> None:
        self._sending.add(instance)

    async def close(self) -> None:
        await self._sending.close()
        await self._recording.close()

    async def _send(self, batch: list[Instance]) -> None:
        try:
            for instance in await _send_messages(self._context, batch):
                self._recording.add(instance)
        except RemudaError as error:
            self._context.event_log.record("publish-failed", error.message, instances=len(batch))
        self._on_sent(batch)

    async def _record(self, batch: list[Instance]) -> None:
        idle = [instance for instance in batch if self._is_idle(instance)]
        for error in await _record_sent(self._context, idle, by=self._by):
            self._context.event_log.record("publish-failed", error.message, instances=len(batch))
