"""Waiting for an agent's signal: ends on the event, on a failure, on a dead heartbeat, or when time is up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from remuda.controlplane.context import Context
from remuda.domain.errors import Unavailable
from remuda.domain.signals import Pulse, Report, Verdict
from remuda.domain.thresholds import HEARTBEAT_DEAD_AFTER_S, HEARTBEAT_STALE_AFTER_S

#: A pause after a read that failed.
RETRY_PAUSE_S = 0.5

VerdictOf = Callable[[Report | None, int], Verdict]


class Ended(Enum):
    VERDICT = "verdict"
    DEAD = "the heartbeat is dead"
    TIMEOUT = "time is up"
    LOOK = "a look around is due"


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitResult:
    ended: Ended
    verdict: Verdict
    report: Report | None


class SignalWaiter:
    """One wait for one instance. It keeps what it saw, so that it can be taken up again."""

    def __init__(self, context: Context, *, instance_id: str, epoch: int, verdict_of: VerdictOf) -> None:
        self._context = context
        self._instance_id = instance_id
        self._epoch = epoch
        self._verdict_of = verdict_of
        self._report: Report | None = None
        self._pulse = Pulse(dead_after_s=HEARTBEAT_DEAD_AFTER_S, stale_after_s=HEARTBEAT_STALE_AFTER_S)

    async def wait(self, *, until: float, look_at: float | None = None) -> WaitResult:
        """Until a verdict, or `until` (monotonic). With `look_at` it also returns then, or when `busy` changes."""
        clock = self._context.clock
        while True:
            before = self._report
            verdict = self._verdict_of(self._report, self._epoch)
            if verdict is not Verdict.PENDING:
                return self._result(Ended.VERDICT, verdict)
            now = clock.monotonic()
            if self._pulse.is_dead(now):
                return self._result(Ended.DEAD, verdict)
            if now >= until:
                return self._result(Ended.TIMEOUT, verdict)
            if look_at is not None and now >= look_at:
                return self._result(Ended.LOOK, verdict)
            await self._look(min(until, until if look_at is None else look_at) - now)
            if look_at is not None and before is not None and self._report and self._report.busy != before.busy:
                return self._result(Ended.LOOK, self._verdict_of(self._report, self._epoch))

    async def _look(self, timeout_s: float) -> None:
        clock = self._context.clock
        try:
            self._report = await self._context.store.wait_for_report(
                self._instance_id, self._report, min(timeout_s, HEARTBEAT_DEAD_AFTER_S)
            )
        except Unavailable as error:
            self._context.event_log.record("read-failed", error.message, instance_id=self._instance_id)
            await clock.sleep(min(timeout_s, RETRY_PAUSE_S))
            # What could not be read is no sign of death: the heartbeat gets its time anew.
            self._pulse = replace(self._pulse, changed_at=clock.monotonic())
            return
        self._pulse = self._pulse.observe(self._report, now=clock.now(), monotonic=clock.monotonic())

    def _result(self, ended: Ended, verdict: Verdict) -> WaitResult:
        return WaitResult(ended=ended, verdict=verdict, report=self._report)
