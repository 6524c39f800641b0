"""The times, limits and counters that each write must set (T1), computed from its event and the pool's policy.

A record's threshold is not taken for granted: each row of the transition table is computed again here, without the
functions of the control plane. The time of a write is that of its history entry, which must be a time of the writer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from remuda.domain.instance import HistoryEntry, Instance, RetireReason, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from simulation.loop import START

if TYPE_CHECKING:
    from simulation.world import SimulatedProcess, World

Found = Iterable[tuple[str, str]]

#: Least seconds of an extension of a release.
EXTENSION_S = 900.0
#: Seconds from a decision to its write, if no fault affects the writer.
PROMPT_S = 2.0
#: Rows that need time left until the threshold, by the writer's clock.
_BEFORE_THRESHOLD = frozenset(
    {"commit", "equip", "listen-on", "fill", "release", "credential", "pool", "announce", "renew", "retire"}
    | {"quarantine"}
)
#: Rows that are accepted until the threshold and the margin have passed.
_WITHIN_MARGIN = frozenset({"extend", "bind"})
#: Rows that leave the threshold as it is.
_SAME = frozenset({"credential", "announce", "retire", "confirm"})


class PolicyHistory:
    """The pool's configurations with the times from which they applied."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._configured: list[tuple[float, PoolConfig]] = []

    def configured(self, config: PoolConfig) -> None:
        self._configured.append((self._world.loop.time(), config))

    def may_have_read(self, process: SimulatedProcess) -> list[PoolConfig]:
        """Configurations that applied when a process began or later."""
        since = [config for at, config in self._configured if at > process.started_at]
        before = [config for at, config in self._configured if at <= process.started_at]
        return [*before[-1:], *since]


class ThresholdInvariant:
    def __init__(self, world: World, policies: PolicyHistory) -> None:
        self._world = world
        self._policies = policies
        #: Deadline of each provision as it was recorded first.
        self._deadlines: dict[str, datetime] = {}

    def provision_recorded(self, provision: Provision, process: SimulatedProcess) -> Found:
        """A provision ends at its creation and the timeout, of the request or of the pool."""
        self._deadlines[provision.provision_id] = provision.deadline
        if not provision.runner_set:
            # That of a set is written before its launch, or after its claims.
            yield from self._timely(provision.created_at, process, "a provision")
        if process.task is None:
            # A unit test, which may request any timeout.
            return
        seconds = {config.lifetimes.provision_timeout_s for config in self._policies.may_have_read(process)}
        if not any(_is_after(provision.deadline, provision.created_at, item) for item in seconds):
            yield "T1", f"its deadline is {provision.deadline}, and the timeout is {sorted(seconds)} s"

    def written(
        self, before: Instance | None, after: Instance, entry: HistoryEntry, process: SimulatedProcess
    ) -> Found:
        yield from self._timely(entry.at, process, entry.transition)
        if before is None:
            if after.state is State.CREATED and after.threshold != self._deadlines.get(after.provision_id):
                yield "T1", f"created until {after.threshold}, not until its provision's deadline"
            return
        policies = self._policies.may_have_read(process)
        if not policies:
            return
        yield from self._in_time(before, entry, policies)
        expected = [self._threshold(before, after, entry, config, process) for config in policies]
        if after.threshold not in expected:
            wanted = ", ".join(sorted({str(item) for item in expected}))
            yield "T1", f"{entry.transition} at {entry.at} until {after.threshold}, expected {wanted}"
        yield from self._other_times(before, after, entry, policies)
        if after.uses != before.uses + (entry.transition == "pool") or after.created_at != before.created_at:
            yield "T1", f"{entry.transition} changed {before.uses} uses to {after.uses}, or the time of its creation"
        if entry.transition == "quarantine":
            yield from self._quarantined(after, entry, process)

    def _timely(self, at: datetime, process: SimulatedProcess, what: str) -> Found:
        """The time of a write is a time at which the writer ran, and a recent one unless a fault delayed it."""
        skew = timedelta(seconds=process.skew_s)
        now = self._world.clock.now() + skew
        start = START + skew + timedelta(seconds=process.started_at)
        tick = timedelta(milliseconds=1)
        if process.task is None:
            start = now - timedelta(days=1)
        elif process.is_undisturbed:
            start = max(start, now - timedelta(seconds=PROMPT_S))
        if not start - tick <= at <= now + tick:
            yield "T1", f"{what} at {at} by {process}, whose clock shows {now}"

    def _in_time(self, before: Instance, entry: HistoryEntry, policies: list[PoolConfig]) -> Found:
        """Rows that do not end an instance need time until its threshold; an expiry needs it to be over."""
        margins = [timedelta(seconds=config.lifetimes.margin_s) for config in policies]
        row, at = entry.transition, entry.at
        if row in _BEFORE_THRESHOLD:
            allowed = before.threshold > at
        elif row in _WITHIN_MARGIN:
            allowed = any(before.threshold > at - margin for margin in margins)
        elif row == "claim":
            allowed = any(before.threshold > at + margin for margin in margins)
        elif entry.retire_reason is RetireReason.EXPIRED and entry.target is State.TERMINATING:
            allowed = any(before.threshold <= at - margin for margin in margins)
        else:
            return
        if not allowed:
            yield "T1", f"{row} at {at}, and its threshold as {before.state} is {before.threshold}"

    def _threshold(
        self, before: Instance, after: Instance, entry: HistoryEntry, config: PoolConfig, process: SimulatedProcess
    ) -> datetime:
        """The threshold that a write must set under one configuration."""
        at, limits, held = entry.at, config.lifetimes, before.quarantined_until or START
        if entry.target is State.TERMINATING:
            return at
        rules: dict[str, Callable[[], datetime]] = {
            "claim": lambda: self._claimed(after, at, config, process),
            # A unit test may request any runtime.
            "commit": lambda: after.threshold if process.task is None else _after(at, limits.max_runtime_s),
            "equip": lambda: _after(at, limits.listening_time_s),
            "listen-on": lambda: _after(at, limits.listening_time_s),
            "bind": lambda: _after(at, limits.max_runtime_s),
            "fill": lambda: _after(at, limits.idle_time_s),
            "pool": lambda: max(_after(at, limits.idle_time_s), held),
            "release": lambda: max(_after(at, limits.release_time_s), held),
            "extend": lambda: max(
                before.threshold,
                min(_after(at, max(limits.release_time_s, EXTENSION_S)), before.run_deadline or before.threshold),
            ),
            "renew": lambda: self._renewed(before, after, at, config, process),
            "quarantine": lambda: self._held(before, after),
        }
        return before.threshold if entry.transition in _SAME else rules[entry.transition]()

    def _claimed(self, after: Instance, at: datetime, config: PoolConfig, process: SimulatedProcess) -> datetime:
        """The deadline of the provision. The time of a claim for a set began with the pass over the pool."""
        if not after.runner_set:
            return self._deadlines.get(after.provision_id, START)
        latest = _after(at, config.lifetimes.provision_timeout_s)
        prompt = process.is_undisturbed and process.task is not None
        earliest = latest - timedelta(seconds=PROMPT_S) if prompt else at
        return after.threshold if earliest <= after.threshold <= latest else latest

    @staticmethod
    def _held(before: Instance, after: Instance) -> datetime:
        until = after.quarantined_until or START
        if before.state is State.IDLE:
            return until
        return max(before.threshold, until) if before.state is State.RELEASING else before.threshold

    def _renewed(
        self, before: Instance, after: Instance, at: datetime, config: PoolConfig, process: SimulatedProcess
    ) -> datetime:
        """The idle time from the decision, at most the maximum age. A fault may delay the write."""
        oldest = _after(before.created_at, config.lifetimes.max_age_s)
        latest = min(_after(at, config.lifetimes.idle_time_s), oldest)
        prompt = process.is_undisturbed and process.task is not None
        earliest = min(latest - timedelta(seconds=PROMPT_S), oldest) if prompt else before.threshold
        return after.threshold if earliest <= after.threshold <= latest else latest

    def _quarantined(self, after: Instance, entry: HistoryEntry, process: SimulatedProcess) -> Found:
        """A quarantine lasts as long as the operator ordered."""
        until = after.quarantined_until
        if process.for_s is None or until is None:
            return
        ordered_at = until - timedelta(seconds=process.for_s)
        start = START + timedelta(seconds=process.started_at + process.skew_s)
        tick = timedelta(milliseconds=1)
        if not start - tick <= ordered_at <= entry.at + tick:
            yield "T1", f"in quarantine until {until}, but {process.for_s:.0f} s were ordered at {start}"

    def _other_times(self, before: Instance, after: Instance, entry: HistoryEntry, policies: list[PoolConfig]) -> Found:
        row, at = entry.transition, entry.at
        if row != "quarantine" and after.quarantined_until != before.quarantined_until:
            yield "T1", f"{row} changed the end of its quarantine to {after.quarantined_until}"
        kept = [_after(at, config.lifetimes.keep_records_s) for config in policies]
        if row == "confirm" and after.forget_at not in kept:
            yield "T1", f"its record is kept until {after.forget_at}, expected {kept[-1]}"
        if row == "announce" and after.announced_at != at:
            yield "T1", f"announced at {after.announced_at} by a write at {at}"
        if row in {"equip", "listen-on"}:
            deadlines: set[datetime | None] = {
                _after(after.threshold, config.lifetimes.max_runtime_s) for config in policies
            }
        elif row == "release":
            deadlines = {_busy_deadline(before)}
        elif row in {"claim", "bind", "pool"}:
            deadlines = {None}
        else:
            deadlines = {before.run_deadline}
        if after.run_deadline not in deadlines:
            yield "T1", f"{row} lets a job run until {after.run_deadline}, expected {deadlines}"


def _busy_deadline(record: Instance) -> datetime:
    """The time until which a job may run: that of the run, or of a listening runner of a set."""
    listens = record.state is State.RUNNING and not record.is_bound
    return max(record.threshold, record.run_deadline) if listens and record.run_deadline else record.threshold


def _after(at: datetime, seconds: float) -> datetime:
    later = at + timedelta(seconds=seconds)
    return later.replace(microsecond=later.microsecond // 1000 * 1000)


def _is_after(later: datetime, at: datetime, seconds: float) -> bool:
    """Whether a time follows another by these seconds. Both are cut to milliseconds."""
    return abs((later - at).total_seconds() - seconds) < 0.002
