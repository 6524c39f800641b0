"""The pickup manager: one for a provision; it alone talks to the pool and feeds the claim workers.

It receives what is asked for, keeps what fits, holds misfits back for one pass so that they do not come again and
again, and hands them back in batches. The pool counts as exhausted for a worker when a pass over it found nothing
that fits.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from remuda.controlplane.context import Context
from remuda.controlplane.provision.outcome import OutcomeRecorder
from remuda.domain.errors import NotFound, RemudaError, UserError
from remuda.domain.resources import PoolMessage, RunnerRequest, misfit
from remuda.ports.pool import BATCH, Delivery

#: How long a message stays hidden while it is worked on.
VISIBILITY_S = 30.0
#: How many misfits are held back at once.
MAX_HELD = 200
#: So many sightings of one misfit mean that only known misfits return.
MAX_SIGHTINGS = 5


class PickupManager:
    def __init__(self, context: Context, request: RunnerRequest, recorder: OutcomeRecorder) -> None:
        self._context = context
        self._recorder = recorder
        self._request = request
        self._class = request.resource_class.name
        self._waiting: deque[asyncio.Future[Delivery | None]] = deque()
        self._wake = asyncio.Event()
        self._held: list[str] = []
        self._used: list[str] = []
        self._sightings: Counter[str] = Counter()
        #: Given to a worker, and what came again of it: perhaps the very message, back while its claim takes long.
        self._taken: set[tuple[str, int]] = set()
        self._again: dict[tuple[str, int], list[Delivery]] = {}
        #: Those whose message has served.
        self._served: set[tuple[str, int]] = set()
        self._met_misfits = False

    async def next(self) -> Delivery | None:
        """A message that fits, or None when the pool has none now."""
        future: asyncio.Future[Delivery | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._wake.set()
        return await future

    def used(self, delivery: Delivery) -> None:
        """The message has served: it is claimed, or its record proves it stale."""
        self._used.append(delivery.receipt)
        if delivery.message is not None:
            key = (delivery.message.id, delivery.message.epoch)
            self._served.add(key)
            for copy in self._again.pop(key, ()):
                self._drop_duplicate(copy)

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._asked():
                try:
                    await self._pass()
                except NotFound as error:
                    # Trying again would not bring it back.
                    self._fail(UserError(error.message, field="resource-class", fix=error.fix or "run remuda refresh"))
                except RemudaError as error:
                    self._fail(error)

    async def close(self) -> None:
        """Delete what was used, hand back what was not."""
        self._held += [copy.receipt for copies in self._again.values() for copy in copies]
        await self._flush_used(everything=True)
        await self._return_held()

    def _asked(self) -> int:
        self._waiting = deque(future for future in self._waiting if not future.done())
        return len(self._waiting)

    async def _pass(self) -> None:
        """Receive until nobody waits any more or the queue has nothing new."""
        while asked := self._asked():
            # Where misfits are about, asking for just what is needed would take a call for each of them.
            limit = BATCH if self._met_misfits else min(BATCH, asked)
            batch = await self._context.pool.receive(self._class, limit=limit, visibility_s=VISIBILITY_S)
            surplus = [delivery.receipt for delivery in batch if not self._offer(delivery)]
            if surplus:
                await self._context.pool.hand_back(self._class, surplus)
            await self._flush_used(everything=False)
            if not batch or self._only_known_misfits():
                break
            if len(self._held) >= MAX_HELD:
                await self._return_held()
        await self._return_held()
        while self._asked():
            self._waiting.popleft().set_result(None)

    def _offer(self, delivery: Delivery) -> bool:
        """Give a delivery to a worker, hold it or drop it; False where it is surplus."""
        message = delivery.message
        if message is None:
            self._drop(delivery, "malformed", delivery.malformed)
        elif (message.id, message.epoch) in self._served:
            self._drop_duplicate(delivery)
        elif (message.id, message.epoch) in self._taken:
            self._again.setdefault((message.id, message.epoch), []).append(delivery)
        elif why := misfit(message, self._request):
            self._hold(delivery, message, why)
        elif not self._asked():
            return False
        else:
            self._taken.add((message.id, message.epoch))
            self._waiting.popleft().set_result(delivery)
        return True

    def _drop_duplicate(self, delivery: Delivery) -> None:
        name = delivery.message.id if delivery.message else ""
        self._drop(delivery, "duplicate", f"{name} was seen before", name)

    def _drop(self, delivery: Delivery, kind: str, why: str, instance_id: str = "") -> None:
        self._recorder.refuse(kind, why, instance_id)
        self._used.append(delivery.receipt)
        self._context.event_log.record("message-dropped", why, kind=kind)

    def _hold(self, delivery: Delivery, message: PoolMessage, why: str) -> None:
        self._met_misfits = True
        self._held.append(delivery.receipt)
        self._sightings[message.id] += 1
        if self._sightings[message.id] == 1:
            self._recorder.refuse("misfit", why, message.id)
            self._context.event_log.record("misfit", why, instance_id=message.id)

    def _only_known_misfits(self) -> bool:
        return any(count >= MAX_SIGHTINGS for count in self._sightings.values())

    async def _return_held(self) -> None:
        receipts, self._held = self._held, []
        if receipts:
            await self._context.pool.hand_back(self._class, receipts)

    async def _flush_used(self, *, everything: bool) -> None:
        """Deletes go in batches; a message that is not deleted comes again and proves stale."""
        while len(self._used) >= BATCH or (everything and self._used):
            batch, self._used = self._used[:BATCH], self._used[BATCH:]
            await self._context.pool.delete(self._class, batch)

    def _fail(self, error: RemudaError) -> None:
        while self._asked():
            self._waiting.popleft().set_exception(error)
