"""The pickup manager: the only reader of the pool during a provision; it feeds the claim workers.

It receives messages while workers wait and gives matching ones to them. Messages that do not match are held until the
end of a pass, so that they are not received again and again, and then made visible in batches. For a waiting worker the
pool is exhausted when a pass found no match.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from remuda.controlplane.batching import Batcher
from remuda.controlplane.context import Context
from remuda.controlplane.provision.outcome import OutcomeRecorder
from remuda.domain.errors import NotFound, RemudaError, UserError
from remuda.domain.provision import RejectionKind
from remuda.domain.resources import PoolMessage, RunnerRequest, mismatch
from remuda.ports.pool import BATCH, Delivery

#: Seconds that a received message stays hidden from other provisions.
VISIBILITY_S = 30.0
#: Seconds that a used message waits for others that can share its deletion, less than it stays hidden.
DELETE_AFTER_S = 10.0
#: Seconds for which a stale message is expected in the pool: two sweeps, which delete it.
STALE_FOR_S = 600.0
#: Maximum number of non-matching messages held at once.
MAX_HELD = 200
#: If one non-matching instance was received this often, the queue holds only known mismatches.
MAX_RECEIVES = 5


class UsedMessages:
    """Messages that are no longer needed. Those that are used soon after each other are deleted in one call.

    A message that is not deleted returns to the pool and proves stale.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._batches = Batcher(self._delete, size=BATCH, window_s=DELETE_AFTER_S)
        #: Messages in the pool by class, instance and epoch whose instances were claimed without them, with the time.
        self._stale: dict[tuple[str, str, int], float] = {}
        #: Messages in the pool whose instances are being claimed without them.
        self._claiming: set[tuple[str, str, int]] = set()

    @contextmanager
    def claiming(self, message: PoolMessage) -> Iterator[None]:
        """While the instance of a message that is still in the pool is being claimed. The claim may fail."""
        key = _stale_key(message)
        self._claiming.add(key)
        try:
            yield
        finally:
            self._claiming.discard(key)

    def is_being_claimed(self, message: PoolMessage) -> bool:
        return _stale_key(message) in self._claiming

    def add_stale(self, message: PoolMessage) -> None:
        """The instance of a message that is still in the pool was claimed."""
        self._stale[_stale_key(message)] = self._context.clock.monotonic()

    def count_stale(self, resource_class: str) -> int:
        """Messages that are stale or soon will be. Another process may delete them, so each counts for a time only."""
        oldest = self._context.clock.monotonic() - STALE_FOR_S
        self._stale = {key: at for key, at in self._stale.items() if at > oldest}
        return sum(name == resource_class for name, _, _ in (*self._stale, *self._claiming))

    def take_stale(self, message: PoolMessage) -> bool:
        """Whether a received message is known to be stale."""
        return self._stale.pop(_stale_key(message), None) is not None

    def add(self, resource_class: str, receipt: str) -> None:
        self._batches.add((resource_class, receipt))

    async def close(self) -> None:
        """Delete those that are left."""
        await self._batches.close()

    async def _delete(self, batch: list[tuple[str, str]]) -> None:
        for name in dict.fromkeys(name for name, _ in batch):
            try:
                await self._context.pool.delete(name, [receipt for each, receipt in batch if each == name])
            except RemudaError as error:
                self._context.event_log.record("delete-failed", error.message, resource_class=name)


def _stale_key(message: PoolMessage) -> tuple[str, str, int]:
    return message.resource_class, message.id, message.epoch


class PickupManager:
    def __init__(
        self, context: Context, request: RunnerRequest, recorder: OutcomeRecorder, used: UsedMessages | None = None
    ) -> None:
        """`used` belongs to the caller, who closes it; otherwise the used messages are deleted at the end."""
        self._own_used = UsedMessages(context)
        self._used = used or self._own_used
        self._context = context
        self._recorder = recorder
        self._request = request
        self._class = request.resource_class.name
        self._waiting: deque[asyncio.Future[Delivery | None]] = deque()
        self._wake = asyncio.Event()
        #: Receipts to make visible again.
        self._held: list[str] = []
        self._mismatch_receives: Counter[str] = Counter()
        #: Messages by instance and epoch: given to a worker; received again meanwhile; no longer needed.
        self._in_progress: set[tuple[str, int]] = set()
        #: Receipts of those that their worker has neither used nor handed back, and of surplus that is not visible yet.
        self._unsettled: set[str] = set()
        self._copies: dict[tuple[str, int], list[Delivery]] = {}
        self._finished: set[tuple[str, int]] = set()
        self._has_seen_mismatch = False

    async def next_match(self) -> Delivery | None:
        """Wait for a matching message. Return None if the pool has none now."""
        future: asyncio.Future[Delivery | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._wake.set()
        return await future

    def mark_used(self, delivery: Delivery) -> None:
        """The message is no longer needed: its instance is claimed, or its record proves it stale."""
        self._unsettled.discard(delivery.receipt)
        self._used.add(self._class, delivery.receipt)
        if delivery.message is not None:
            key = (delivery.message.id, delivery.message.epoch)
            self._finished.add(key)
            for copy in self._copies.pop(key, ()):
                self._drop_duplicate(copy)

    def hand_back(self, delivery: Delivery) -> None:
        """The message is valid, but its instance cannot be claimed now. Visible again after this pass."""
        self._unsettled.discard(delivery.receipt)
        self._held.append(delivery.receipt)

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting_count():
                try:
                    await self._run_pass()
                except NotFound as error:
                    # The queue does not exist, so a retry cannot succeed.
                    self._fail(UserError(error.message, field="resource-class", fix=error.fix or "run remuda refresh"))
                except RemudaError as error:
                    self._fail(error)

    async def close(self) -> None:
        """Delete used messages, unless the caller does, and make all others visible.

        Also those whose worker was cancelled before its claim.
        """
        self._held += sorted(self._unsettled)
        self._held += [copy.receipt for copies in self._copies.values() for copy in copies]
        await self._own_used.close()
        await self._make_held_visible()

    def _waiting_count(self) -> int:
        self._waiting = deque(future for future in self._waiting if not future.done())
        return len(self._waiting)

    async def _run_pass(self) -> None:
        """Receive until no worker waits or the queue has nothing new."""
        without_match: list[asyncio.Future[Delivery | None]] = []
        while waiting := self._waiting_count():
            # If the queue holds mismatches, small batches would cost one call per mismatch.
            stale = self._used.count_stale(self._class)
            limit = BATCH if self._has_seen_mismatch else min(BATCH, waiting + stale)
            batch = await self._context.pool.receive(self._class, limit=limit, visibility_s=VISIBILITY_S)
            surplus = [delivery.receipt for delivery in batch if not self._accept(delivery)]
            if surplus:
                self._unsettled.update(surplus)
                await self._context.pool.make_visible(self._class, surplus)
                self._unsettled.difference_update(surplus)
            if not batch or self._has_only_known_mismatches():
                without_match = list(self._waiting)
                break
            if len(self._held) >= MAX_HELD:
                await self._make_held_visible()
        await self._make_held_visible()
        # A worker that came meanwhile waits for the next pass.
        for future in without_match:
            if not future.done():
                future.set_result(None)

    def _accept(self, delivery: Delivery) -> bool:
        """Give a delivery to a worker, hold it or drop it. Return False if it is surplus."""
        message = delivery.message
        if message is None:
            self._drop(delivery, RejectionKind.MALFORMED, delivery.malformed)
        elif self._used.take_stale(message):
            self._drop(delivery, RejectionKind.CLAIM_LOST, "stale pool message: claimed without it", message.id)
        elif self._used.is_being_claimed(message):
            # Visible again after this pass: it is needed if the claim fails.
            self._held.append(delivery.receipt)
        elif (message.id, message.epoch) in self._finished:
            self._drop_duplicate(delivery)
        elif (message.id, message.epoch) in self._in_progress:
            # A duplicate, or the same message again because its claim takes longer than the visibility timeout.
            self._copies.setdefault((message.id, message.epoch), []).append(delivery)
        elif why := mismatch(message, self._request):
            self._hold(delivery, message, why)
        elif not self._waiting_count():
            return False
        else:
            self._in_progress.add((message.id, message.epoch))
            self._unsettled.add(delivery.receipt)
            self._waiting.popleft().set_result(delivery)
        return True

    def _drop_duplicate(self, delivery: Delivery) -> None:
        name = delivery.message.id if delivery.message else ""
        self._drop(delivery, RejectionKind.DUPLICATE, f"second message about {name}", name)

    def _drop(self, delivery: Delivery, kind: RejectionKind, why: str, instance_id: str = "") -> None:
        self._recorder.reject(kind, why, instance_id)
        self._used.add(self._class, delivery.receipt)
        self._context.event_log.record("message-dropped", why, kind=kind.value)

    def _hold(self, delivery: Delivery, message: PoolMessage, why: str) -> None:
        self._has_seen_mismatch = True
        self._held.append(delivery.receipt)
        self._mismatch_receives[message.id] += 1
        if self._mismatch_receives[message.id] == 1:
            self._recorder.reject(RejectionKind.MISMATCH, why, message.id)
            self._context.event_log.record("mismatch", why, instance_id=message.id)

    def _has_only_known_mismatches(self) -> bool:
        return any(count >= MAX_RECEIVES for count in self._mismatch_receives.values())

    async def _make_held_visible(self) -> None:
        if receipts := list(self._held):
            await self._context.pool.make_visible(self._class, receipts)
            # Only now: a cancelled call is repeated at the end.
            del self._held[: len(receipts)]

    def _fail(self, error: RemudaError) -> None:
        while self._waiting_count():
            self._waiting.popleft().set_exception(error)
