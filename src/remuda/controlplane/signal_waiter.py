"""Waiting for an agent's signal: ends on the signal, a failure, a dead heartbeat or a timeout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from remuda.controlplane.context import Context
from remuda.domain.errors import Unavailable
from remuda.domain.signals import Pulse, Report, Verdict
from remuda.domain.thresholds import HEARTBEAT_DEAD_AFTER_S, HEARTBEAT_STALE_AFTER_S

#: Seconds before a failed read is repeated.
READ_RETRY_PAUSE_S = 0.5

VerdictOf = Callable[[Report | None, int], Verdict]


class StopReason(Enum):
    """Why a wait returned. The value is for people."""

    VERDICT = "verdict"
    DEAD = "the heartbeat is dead"
    TIMEOUT = "time is up"
    #: The caller asked to return at this time, or the runner's busy flag changed.
    RECHECK = "recheck is due"


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitResult:
    stopped: StopReason
    verdict: Verdict
    report: Report | None


class SignalWaiter:
    """Waits for one instance in one epoch. Keeps the last report and heartbeat, so that a wait can be resumed."""

    def __init__(self, context: Context, *, instance_id: str, epoch: int, verdict_of: VerdictOf) -> None:
        self._context = context
        self._instance_id = instance_id
        self._epoch = epoch
        self._verdict_of = verdict_of
        self._report: Report | None = None
        self._pulse = Pulse(dead_after_s=HEARTBEAT_DEAD_AFTER_S, stale_after_s=HEARTBEAT_STALE_AFTER_S)

    async def wait(self, *, until: float, recheck_at: float | None = None) -> WaitResult:
        """Wait for a verdict until the monotonic time `until`.

        With `recheck_at`, also return at that time, or when the runner's busy flag changes.
        """
        clock = self._context.clock
        while True:
            before = self._report
            verdict = self._verdict_of(self._report, self._epoch)
            if verdict is not Verdict.PENDING:
                return self._result(StopReason.VERDICT, verdict)
            now = clock.monotonic()
            if self._pulse.is_dead(now):
                return self._result(StopReason.DEAD, verdict)
            if now >= until:
                return self._result(StopReason.TIMEOUT, verdict)
            if recheck_at is not None and now >= recheck_at:
                return self._result(StopReason.RECHECK, verdict)
            await self._read_report(min(until, until if recheck_at is None else recheck_at) - now)
            if recheck_at is not None and before is not None and self._report and self._report.busy != before.busy:
                return self._result(StopReason.RECHECK, self._verdict_of(self._report, self._epoch))

    async def _read_report(self, timeout_s: float) -> None:
        clock = self._context.clock
        try:
            self._report = await self._context.store.wait_for_report(
                self._instance_id, self._report, min(timeout_s, HEARTBEAT_DEAD_AFTER_S)
            )
        except Unavailable as error:
            self._context.event_log.record("read-failed", error.message, instance_id=self._instance_id)
            await clock.sleep(min(timeout_s, READ_RETRY_PAUSE_S))
            # A failed read says nothing about the agent: restart the heartbeat's timeout.
            self._pulse = replace(self._pulse, changed_at=clock.monotonic())
            return
        self._pulse = self._pulse.observe(self._report, now=clock.now(), monotonic=clock.monotonic())

    def _result(self, stopped: StopReason, verdict: Verdict) -> WaitResult:
        return WaitResult(stopped=stopped, verdict=verdict, report=self._report)
