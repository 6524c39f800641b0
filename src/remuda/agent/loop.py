"""The agent's main loop: read the record, decide, act, wait for the next event. Its expiry and its heartbeat."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import NamedTuple, TypeVar

from remuda.agent.decide import AgentAction, AgentStep, Observation, next_step, spent_epoch
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.holder import subject_of
from remuda.domain.instance import Instance, State
from remuda.domain.signals import FailureKind, Report, Signal
from remuda.domain.thresholds import HEARTBEAT_INTERVAL_S, expired
from remuda.ports.clock import Clock, Ids
from remuda.ports.event_log import BoundEventLog, EventLog
from remuda.ports.machine import Identity, Machine, RemovalStatus, RunnerSoftware, RunnerState, ScriptStatus
from remuda.ports.store import InstanceStore

T = TypeVar("T")

#: Timeout in seconds of the pre-runner script. The watchdog stops the heartbeat if the script takes longer.
SCRIPT_LIMIT_S = 3_600.0
#: Seconds that any other step may take before the watchdog stops the heartbeat.
STEP_LIMIT_S = 180.0
#: Maximum age in seconds of the record at the start of a step. An older record is read again first.
MAX_RECORD_AGE_S = 0.2
#: Longest wait in seconds without reading the record. A jump of the wall clock during a wait goes unnoticed for up to
#: this long; until then the dead-man timer and the control plane's sweeps enforce the threshold.
WAIT_LIMIT_S = 120.0
#: Seconds that a wait may overrun before the heartbeat stops.
WAIT_GRACE_S = 90.0
#: Pause in seconds after the first failure. Each further failure doubles it, up to the maximum.
BACKOFF_BASE_S = 0.2
BACKOFF_MAX_S = 5.0
#: Limit of the exponent, so that the power stays small after many failures. The maximum is reached earlier.
MAX_DOUBLINGS = 10
#: Seconds until a removal that GitHub rejected because of a running job is tried again, unless the job ends earlier.
BUSY_PAUSE_S = 1.0
#: Minimum number of seconds between the agent's own end and the dead-man timer.
DEAD_MAN_SLACK_S = 5.0


class Agent:
    def __init__(
        self,
        *,
        store: InstanceStore,
        machine: Machine,
        runner: RunnerSoftware,
        clock: Clock,
        ids: Ids,
        event_log: EventLog,
        version: str,
        watchdog: Watchdog | None = None,
    ) -> None:
        """Others may ask the `watchdog` whether the agent works."""
        self._store = store
        self._machine = machine
        self._runner = runner
        self._clock = clock
        self._ids = ids
        #: Adds the instance, epoch and run to every event.
        self._event_log = BoundEventLog(event_log)
        self._version = version
        self._watchdog = watchdog or Watchdog(clock)
        #: The last signal that this process sent and its epoch, whether or not the store accepted it.
        self._signalled: tuple[int, Signal] | None = None
        #: Whether the failure that an earlier agent of this instance may have signalled is known.
        self._knows_report = False
        #: The last signal of a failure, until the store has answered. It is sent again before anything else is done: a
        #: lost write may be applied late, and the runner must not have started by then.
        self._unconfirmed: _OutgoingSignal | None = None
        #: Epoch and state of the record at the last decision. The counters below restart when it changes.
        self._last_epoch_and_state: tuple[int, State] | None = None
        self._starts = 0
        #: Starts after which the agent has paused before the next one.
        self._start_pauses = 0
        #: Removals with the result FAILED. The agent gives up after `MAX_FAILED_REMOVALS`.
        self._failed_removals = 0
        #: Removals with the result FAILED or UNREACHABLE. They determine the pause before the next attempt.
        self._unsuccessful_removals = 0
        #: Seconds that the machine has worked on the current release.
        self._release_s = 0.0
        #: Maximum seconds of the next wait only; None for no special limit.
        self._next_wait_limit_s: float | None = None
        #: Monotonic time of the last read of the record.
        self._record_read_at = 0.0
        #: Consecutive failed steps.
        self._failures = 0

    async def run(self) -> str:
        """Run until the machine must end, and end it. Return the reason."""
        self._watchdog.expect_progress_within(STEP_LIMIT_S)
        identity = await self._machine.identity()
        self._event_log.facts["instance_id"] = identity.instance_id
        expiry = Expiry(machine=self._machine, clock=self._clock, margin_s=identity.margin_s)
        heartbeat = Heartbeat(
            instance_id=identity.instance_id,
            store=self._store,
            machine=self._machine,
            runner=self._runner,
            clock=self._clock,
            event_log=self._event_log,
            watchdog=self._watchdog,
            version=self._version,
        )
        main_task = asyncio.create_task(self._run_until_end(identity, expiry, heartbeat))
        heartbeat_task = asyncio.create_task(heartbeat.run())
        try:
            await asyncio.wait({main_task, heartbeat_task}, return_when=asyncio.FIRST_COMPLETED)
            if not main_task.done():
                # An agent without a heartbeat counts as dead for hours. One that fails is started again.
                await heartbeat_task
            reason = await main_task
        finally:
            for task in (main_task, heartbeat_task):
                task.cancel()
            await asyncio.gather(main_task, heartbeat_task, return_exceptions=True)
        self._event_log.record("end", reason)
        await self._machine.end(reason)
        return reason

    async def _run_until_end(self, identity: Identity, expiry: Expiry, heartbeat: Heartbeat) -> str:
        record: Instance | None = None
        must_read = True
        while True:
            self._watchdog.expect_progress_within(STEP_LIMIT_S)
            try:
                if must_read:
                    record = await self._read_record(identity)
                    must_read = False
                step, runner = self._decide(identity, record, expiry)
                heartbeat.observe(record, runner)
                if step.action is AgentAction.WAIT:
                    record = await self._wait(identity, record, runner, expiry)
                    # An instance may wait for hours: failures long ago do not delay the reaction to the next one.
                    self._failures = 0
                    continue
                if step.action is AgentAction.START and self._start_pauses < self._starts:
                    # Before the record is read that decides: its run may be released during the pause.
                    self._start_pauses = self._starts
                    await self._back_off(self._starts)
                if self._clock.monotonic() - self._record_read_at > MAX_RECORD_AGE_S:
                    # The record may have changed during the last step, wait or pause: decide again with the new one.
                    record = await self._read_record(identity)
                    continue
                if step.action is AgentAction.END:
                    # Ending is irreversible: do it only if the record is still the one that was decided on.
                    fresh = await self._read_record(identity)
                    if fresh == record:
                        return step.reason
                    record = fresh
                    continue
                await self._act(record, step)
                self._failures = 0
            except RemudaError as error:
                self._event_log.record("step-failed", error.message)
                if expiry.has_passed(self._runner.state()):
                    return "threshold passed and the store is unreachable"
                must_read = True
                self._failures += 1
                await self._back_off(self._failures)

    async def _read_record(self, identity: Identity) -> Instance | None:
        record = await self._store.get(identity.instance_id)
        if record is not None and not self._knows_report:
            report = await self._store.get_report(identity.instance_id)
            if report is not None and report.signal is not None and report.signal.failed:
                # Sent before this agent restarted. It stays: a runner must not start after its failure was signalled.
                self._signalled = (report.epoch, report.signal)
            self._knows_report = True
        self._record_read_at = self._clock.monotonic()
        return record

    def _decide(self, identity: Identity, record: Instance | None, expiry: Expiry) -> tuple[AgentStep, RunnerState]:
        runner = self._runner.state()
        signalled = None
        if record is not None:
            expiry.observe(record)
            if self._last_epoch_and_state != (record.epoch, record.state):
                self._last_epoch_and_state = (record.epoch, record.state)
                self._starts = self._start_pauses = self._failed_removals = self._unsuccessful_removals = 0
                self._release_s = 0.0
                self._unconfirmed = None
                # Nobody holds an instance in release; its events belong to who held it last.
                holder = record.latest_holder if record.state is State.RELEASING else record.holder
                self._event_log.facts |= {"epoch": record.epoch, "run_id": subject_of(holder)}
                self._event_log.record("state", f"record state is {record.state}")
            if self._signalled is not None and self._signalled[0] == record.epoch:
                signalled = self._signalled[1]
        elif expiry.has_passed(runner):
            return AgentStep(action=AgentAction.END, reason="threshold passed and the record is gone"), runner
        observation = Observation(
            record=record,
            runner=runner,
            script=self._machine.load().script,
            now=self._clock.now(),
            margin_s=identity.margin_s,
            signalled=signalled,
            starts=self._starts,
            failed_removals=self._failed_removals,
        )
        step = next_step(observation)
        if record is not None and self._unconfirmed is not None and step.action is not AgentAction.END:
            signal = self._unconfirmed.signal
            step = AgentStep(action=AgentAction.SIGNAL, reason="the store did not confirm it", signal=signal)
        return step, runner

    async def _wait(
        self,
        identity: Identity,
        record: Instance | None,
        runner: RunnerState,
        expiry: Expiry,
    ) -> Instance | None:
        """Wait until the record or the runner changes, or the threshold passes. Return the latest record."""
        left_s = expiry.seconds_left(record, runner)
        timeout_s = WAIT_LIMIT_S if left_s is None else min(WAIT_LIMIT_S, max(0.0, left_s) + 0.001)
        if self._next_wait_limit_s is not None:
            timeout_s, self._next_wait_limit_s = min(timeout_s, self._next_wait_limit_s), None
        self._watchdog.expect_progress_within(timeout_s + WAIT_GRACE_S)
        control = asyncio.create_task(
            # While a job runs, a release waits for its end anyway, so the store may poll less often.
            self._store.wait_for_control(identity.instance_id, record, timeout_s, urgent=not runner.busy)
        )
        local = asyncio.create_task(self._runner.wait_for_change(runner, timeout_s))
        try:
            await asyncio.wait({control, local}, return_when=asyncio.FIRST_COMPLETED)
            if not control.done():
                return record
            self._record_read_at = self._clock.monotonic()
            return control.result()
        finally:
            for task in (control, local):
                task.cancel()
            await asyncio.gather(control, local, return_exceptions=True)

    async def _act(self, record: Instance | None, step: AgentStep) -> None:
        self._event_log.record("step", step.reason, step=step.action.value)
        if step.action is AgentAction.RUN_SCRIPT:
            await self._run_script(record)
        elif record is None:
            # All other steps need a record.
            return
        elif self._unconfirmed is not None:
            await self._send(record, self._unconfirmed)
        elif step.action is AgentAction.SIGNAL and step.signal is not None:
            script_detail = self._machine.load().script_detail if step.signal is Signal.UD_FAILED else ""
            await self._signal(record, step.signal, script_detail or step.reason)
        elif step.action is AgentAction.REGISTER and record.assignment is not None:
            started = self._clock.monotonic()
            result = await self._runner.register(record.assignment)
            duration_s = self._clock.monotonic() - started
            signal = Signal.UD_REG_OK if result.ok else Signal.UD_REG_FAILED
            await self._signal(record, signal, result.detail, duration_s=duration_s, failure=result.failure)
        elif step.action is AgentAction.START and record.assignment is not None:
            self._starts += 1
            await self._runner.start(record.assignment)
        elif step.action is AgentAction.REMOVE:
            await self._timed_release(self._remove(record))
        elif step.action is AgentAction.STOP:
            await self._timed_release(self._runner.stop())
        elif step.action is AgentAction.RESET:
            # The reset deletes the list of refused jobs, so it is read first.
            refused_jobs = self._runner.refused()
            if refused_jobs:
                self._event_log.record("job-refused", refused_jobs)
            outcome = await self._timed_release(self._machine.reset())
            self._event_log.record("reset", outcome.detail or step.reason, ok=outcome.ok)
            failed = Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED
            signal = Signal.UD_REMOVE_REG_REMOVE_RUN_OK if outcome.ok else failed
            detail = f"{refused_jobs}; {outcome.detail}" if refused_jobs else outcome.detail
            await self._signal(record, signal, detail, duration_s=self._release_s)

    async def _timed_release(self, release_step: Awaitable[T]) -> T:
        """Await one step of a release and add its duration to `_release_s`, which the last signal reports."""
        started = self._clock.monotonic()
        result = await release_step
        self._release_s += self._clock.monotonic() - started
        return result

    async def _run_script(self, record: Instance | None) -> None:
        self._watchdog.expect_progress_within(SCRIPT_LIMIT_S)
        outcome = await self._machine.run_script(SCRIPT_LIMIT_S)
        script = ScriptStatus.OK if outcome.ok else ScriptStatus.FAILED
        self._machine.save(replace(self._machine.load(), script=script, script_detail=outcome.detail))
        if record is not None:
            await self._signal(record, Signal.UD_OK if outcome.ok else Signal.UD_FAILED, outcome.detail)

    async def _remove(self, record: Instance) -> None:
        if record.assignment is None:
            return
        removal, detail = await self._runner.remove(record.assignment)
        if removal is RemovalStatus.BUSY:
            self._next_wait_limit_s = BUSY_PAUSE_S
            await self._runner.wait_for_change(self._runner.state(), BUSY_PAUSE_S)
        elif removal in {RemovalStatus.FAILED, RemovalStatus.UNREACHABLE}:
            self._event_log.record("removal-failed", detail)
            self._unsuccessful_removals += 1
            # Only the threshold limits the retries while GitHub is unreachable.
            self._failed_removals += removal is RemovalStatus.FAILED
            await self._back_off(self._unsuccessful_removals)

    async def _signal(
        self,
        record: Instance,
        signal: Signal,
        detail: str,
        *,
        duration_s: float | None = None,
        failure: FailureKind | None = None,
    ) -> None:
        duration_s = None if duration_s is None else round(duration_s, 3)
        outgoing = _OutgoingSignal(signal=signal, detail=detail, duration_s=duration_s, failure=failure)
        self._unconfirmed = outgoing if signal.failed else None
        await self._send(record, outgoing)

    async def _send(self, record: Instance, outgoing: _OutgoingSignal) -> None:
        signal = outgoing.signal
        try:
            await self._store.write_signal(
                record.instance_id,
                epoch=record.epoch,
                signal=signal,
                detail=outgoing.detail,
                duration_s=outgoing.duration_s,
                failure=outgoing.failure,
            )
        except Conflict as conflict:
            # The store has a signal of a higher rank or epoch, sent before this agent restarted. It stays, and decides
            # what to do next: a runner must not start after its failure was signalled.
            self._event_log.record("signal-rejected", conflict.message, signal=signal.value)
            stored = conflict.current
            if isinstance(stored, Report) and stored.epoch == record.epoch and stored.signal is not None:
                signal = stored.signal
        self._signalled = (record.epoch, signal)
        self._unconfirmed = None

    async def _back_off(self, failures: int) -> None:
        pause_s = min(BACKOFF_MAX_S, BACKOFF_BASE_S * 2 ** min(failures - 1, MAX_DOUBLINGS))
        await self._clock.sleep(pause_s * (0.5 + self._ids.jitter() / 2))


class _OutgoingSignal(NamedTuple):
    signal: Signal
    detail: str
    duration_s: float | None
    failure: FailureKind | None


class _RunnerFields(NamedTuple):
    """Fields of a heartbeat about the runner. Signals do not contain them, so a change needs a heartbeat."""

    busy: bool
    listening: bool
    spent_epoch: int


def _runner_fields(record: Instance | None, runner: RunnerState) -> _RunnerFields:
    return _RunnerFields(runner.busy, runner.listening, spent_epoch(record, runner))


class Expiry:
    """Enforces the last threshold that was read, even if the store is unreachable: keeps it on disk and sets the
    dead-man timer to it.
    """

    def __init__(self, *, machine: Machine, clock: Clock, margin_s: float) -> None:
        self._machine = machine
        self._clock = clock
        self._margin_s = margin_s
        state = machine.load()
        #: The last threshold without and with a running job.
        self._thresholds = (state.threshold, state.busy_threshold or state.threshold)
        if self._thresholds[1] is not None:
            self._set_dead_man_timer(self._thresholds[1])

    def observe(self, record: Instance) -> None:
        thresholds = free, busy = record.deadline(busy=False), record.deadline(busy=True)
        if thresholds == self._thresholds:
            return
        # A listener may get a job while the agent is down, so the timer allows for it.
        self._set_dead_man_timer(busy)
        kept = replace(self._machine.load(), threshold=free, busy_threshold=None if busy == free else busy)
        self._machine.save(kept)
        # Assigned last, so that the next call repeats a step that failed.
        self._thresholds = thresholds

    def has_passed(self, runner: RunnerState) -> bool:
        threshold = self._thresholds[runner.busy]
        return threshold is not None and expired(threshold, now=self._clock.now(), margin_s=self._margin_s)

    def seconds_left(self, record: Instance | None, runner: RunnerState) -> float | None:
        """Seconds until the agent must end the machine. None if neither the record nor the disk has a threshold."""
        threshold = record.deadline(busy=runner.busy) if record else self._thresholds[runner.busy]
        if threshold is None:
            return None
        return (threshold - self._clock.now()).total_seconds() + self._margin_s

    def _set_dead_man_timer(self, threshold: datetime) -> None:
        slack_s = self._margin_s + max(self._margin_s, DEAD_MAN_SLACK_S)
        self._machine.set_dead_man_timer(threshold + timedelta(seconds=slack_s))


class Watchdog:
    """Time by which the main loop must report progress again. Past it, the agent is considered hung."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._expires_at = 0.0

    def expect_progress_within(self, limit_s: float) -> None:
        self._expires_at = self._clock.monotonic() + limit_s

    @property
    def healthy(self) -> bool:
        return self._clock.monotonic() < self._expires_at


@dataclass(kw_only=True, eq=False, slots=True)
class Heartbeat:
    """The heartbeat, which is written only while the main loop makes progress: a hung agent counts as dead."""

    instance_id: str
    store: InstanceStore
    machine: Machine
    runner: RunnerSoftware
    clock: Clock
    event_log: EventLog
    watchdog: Watchdog
    version: str
    notice: str = field(default="", init=False)
    due: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    #: The last record that was read.
    record: Instance | None = field(default=None, init=False)
    #: What the last heartbeat said. A failed one is repeated after the interval.
    written: _RunnerFields | None = field(default=None, init=False)

    def observe(self, record: Instance | None, runner: RunnerState) -> None:
        """Write the next heartbeat at once if a field that others wait for differs from the last one."""
        self.record = record
        if self._fields(runner) != self.written:
            self.due.set()

    def _fields(self, runner: RunnerState) -> _RunnerFields:
        """That its registration was used up is said until the end of the release, also after the runner was removed."""
        fields, record, written = _runner_fields(self.record, runner), self.record, self.written
        if record is None or written is None or record.state is not State.RELEASING:
            return fields
        return fields._replace(spent_epoch=record.epoch) if written.spent_epoch == record.epoch else fields

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self.due.clear()
            if self.watchdog.healthy:
                await self._beat()
            alarm = loop.call_later(HEARTBEAT_INTERVAL_S, self.due.set)
            try:
                await self.due.wait()
            finally:
                alarm.cancel()

    async def _beat(self) -> None:
        try:
            notice = await self._spot_notice()
            fields = self.written = self._fields(self.runner.state())
            await self.store.beat(
                self.instance_id, at=self.clock.now(), notice=notice, version=self.version, **fields._asdict()
            )
        except (RemudaError, OSError) as error:
            # An OSError is of the files of the runner, for example if the disk is full.
            self.event_log.record("heartbeat-failed", error.message if isinstance(error, RemudaError) else str(error))

    async def _spot_notice(self) -> str:
        """Return the spot notice, or the last known one. A failed check does not stop the heartbeat."""
        try:
            self.notice = await self.machine.spot_notice() or self.notice
        except RemudaError as error:
            self.event_log.record("spot-notice-failed", error.message)
        return self.notice
