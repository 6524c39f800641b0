"""The listener's lease: one process serves the sets of a pool, others wait as a standby.

A lease is judged like a heartbeat, by its change on the reader's own clock. Two processes may hold it for a moment, for
example after a pause; all their writes are conditional, so that is safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from remuda.controlplane.context import Context, pause_before_retry
from remuda.domain.demand import LISTENER_LEASE, Lease
from remuda.domain.errors import Conflict, RemudaError, Unavailable
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.demand import DemandStore

#: Seconds between two renewals.
BEAT_S = 10.0
#: Seconds without a change after which a lease has expired.
EXPIRES_AFTER_S = 35.0
#: Seconds without a successful renewal after which the holder stops: earlier than another process can take the lease.
STOPS_AFTER_S = 25.0
#: Least seconds of a renewal until its answer.
ANSWER_S = 4.0
#: Seconds between two reads of a standby.
STANDBY_POLL_S = 5.0


class LeaseLost(Conflict):
    """Another listener serves the pool."""


class ListenerLease:
    def __init__(
        self,
        context: Context,
        store: DemandStore,
        owner: str,
        *,
        has_ended: Callable[[str], bool] = lambda _: False,
        on_standby: Callable[[], None] = lambda: None,
    ) -> None:
        """`has_ended` knows of an owner that its process does not run any more.

        `on_standby` is called when another process has the lease.
        """
        self._has_ended = has_ended
        self._on_standby = on_standby
        self._context = context
        self._store = store
        self._owner = owner
        self._held: Lease | None = None
        #: Monotonic time at which the last successful write began: others may see it before its answer is here.
        self._renewed_at = 0.0

    async def acquire(self, *, wait: bool = True) -> None:
        """Wait until this process has the lease. Without `wait`, raise `LeaseLost` if another process has it."""
        seen: Lease | None = None
        seen_at = self._context.clock.monotonic()
        announced = False
        while True:
            try:
                current = await self._store.get_lease(LISTENER_LEASE)
                now = self._context.clock.monotonic()
                if current != seen:
                    seen, seen_at = current, now
                if self._is_free(current, now - seen_at):
                    await self._write(current)
                    return
            except Conflict:
                await pause_before_retry(self._context)
                continue
            except Unavailable as error:
                self._context.event_log.record("read-failed", error.message)
            else:
                if not wait:
                    raise LeaseLost(
                        f"another listener serves pool {self._context.pool_name}",
                        fix="omit --once, to wait until the other listener ends",
                    )
                if not announced and current is not None:
                    announced = True
                    self._context.event_log.record("standby", f"{current.owner} serves the pool")
                    self._on_standby()
            await self._context.clock.sleep(STANDBY_POLL_S)

    def _is_free(self, current: Lease | None, unchanged_s: float) -> bool:
        if current is None or current.owner in {"", self._owner} or unchanged_s >= EXPIRES_AFTER_S:
            return True
        return self._has_ended(current.owner)

    async def keep(self) -> None:
        """Renew the lease. Raise `LeaseLost` if another process has it, or may have it."""
        while True:
            await self._context.clock.sleep(max(0.0, min(BEAT_S, self._stops_in())))
            try:
                # The answer of a hanging store would come after another process has taken the lease.
                async with asyncio.timeout(max(ANSWER_S, self._stops_in())):
                    await self._write(self._held)
            except Conflict as conflict:
                raise LeaseLost("another listener has taken over") from conflict
            except (Unavailable, TimeoutError) as error:
                why = error.message if isinstance(error, Unavailable) else "no answer in time"
                self._context.event_log.record("lease-unconfirmed", why)
                if self._stops_in() <= 0:
                    raise LeaseLost("the lease could not be renewed") from error

    def _stops_in(self) -> float:
        """Seconds until the holder stops, unless it can renew the lease before."""
        return self._renewed_at + STOPS_AFTER_S - self._context.clock.monotonic()

    async def give_up(self) -> None:
        """Let another process take the lease at once."""
        held, self._held = self._held, None
        if held is not None:
            with suppress(RemudaError):
                await self._store.replace_lease(LISTENER_LEASE, held, self._after(held, owner=""))

    def _after(self, before: Lease | None, *, owner: str) -> Lease:
        # Judged by other computers.
        beat_at = to_milliseconds(self._context.with_true_time().clock.now())
        return Lease(owner=owner, beat=before.beat + 1 if before is not None else 1, beat_at=beat_at)

    async def _write(self, before: Lease | None) -> None:
        after, began = self._after(before, owner=self._owner), self._context.clock.monotonic()
        try:
            await self._store.replace_lease(LISTENER_LEASE, before, after)
        except Conflict as conflict:
            current = conflict.current
            if not isinstance(current, Lease) or current.owner != self._owner:
                raise
            # The answer to an earlier write was lost, and nobody knows when it was applied.
            after, began = current, self._renewed_at
        except Unavailable:
            await pause_before_retry(self._context)
            if await self._store.get_lease(LISTENER_LEASE) != after:
                raise
        self._held, self._renewed_at = after, began
