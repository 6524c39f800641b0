"""The agent: observe, decide, act, wait for the next event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import TypeVar

from remuda.agent.decide import AgentAction, AgentStep, Observation, next_step
from remuda.agent.expiry import Expiry
from remuda.agent.heartbeat import Heartbeat, Watchdog
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import Instance, State
from remuda.domain.signals import Signal, with_took
from remuda.ports.clock import Clock, Ids
from remuda.ports.event_log import BoundEventLog, EventLog
from remuda.ports.machine import Identity, Machine, ScriptStatus
from remuda.ports.runner import RemovalStatus, RunnerSoftware, RunnerState
from remuda.ports.store import InstanceStore

T = TypeVar("T")

#: How long each step may take before the heartbeat stops.
SCRIPT_LIMIT_S = 3_600.0
STEP_LIMIT_S = 180.0
#: How old what was read may be when a step begins: no older than where the agent had waited instead.
FRESH_S = 0.2
#: The longest wait without a look around, and how late its end may be before the heartbeat stops. A clock that steps
#: forward meanwhile makes a threshold pass unseen for so long: the dead-man timer and the sweeps cover that.
WAIT_LIMIT_S = 120.0
WAIT_GRACE_S = 90.0
#: After a failure: the first and the longest pause.
BACKOFF_FIRST_S = 0.2
BACKOFF_LAST_S = 5.0
MAX_DOUBLINGS = 10
#: A removal that was refused because a job runs is tried again after so long, unless the job ends before.
BUSY_PAUSE_S = 1.0


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
    ) -> None:
        self._store = store
        self._machine = machine
        self._runner = runner
        self._clock = clock
        self._ids = ids
        #: Every event says which assignment it belongs to.
        self._event_log = BoundEventLog(event_log)
        self._version = version
        self._vital = Watchdog(clock)
        self._signalled: tuple[int, Signal] | None = None
        self._position: tuple[int, State] | None = None
        self._starts = 0
        self._removals = 0
        #: All that did not succeed, whosever fault it was.
        self._tries = 0
        self._release_s = 0.0
        self._pause_s = 0.0
        #: When the record was last read.
        self._looked_at = 0.0
        #: Steps that failed one after the other, whatever they were.
        self._failures = 0

    async def run(self) -> str:
        """Live until the end; returns why it came."""
        self._vital.works_for(STEP_LIMIT_S)
        identity = await self._machine.identity()
        self._event_log.facts["instance_id"] = identity.instance_id
        lifetime = Expiry(machine=self._machine, clock=self._clock, margin_s=identity.margin_s)
        heartbeat = Heartbeat(
            instance_id=identity.instance_id,
            store=self._store,
            machine=self._machine,
            runner=self._runner,
            clock=self._clock,
            event_log=self._event_log,
            vital=self._vital,
            version=self._version,
        )
        beating = asyncio.create_task(heartbeat.run())
        try:
            why = await self._live(identity, lifetime, heartbeat)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        self._event_log.record("end", why)
        await self._machine.end(why)
        return why

    async def _live(self, identity: Identity, lifetime: Expiry, heartbeat: Heartbeat) -> str:
        record: Instance | None = None
        reachable = False
        while True:
            self._vital.works_for(STEP_LIMIT_S)
            try:
                if not reachable:
                    record = await self._look(identity)
                    reachable = True
                step, runner = self._decide(identity, record, lifetime)
                if step.do is AgentAction.WAIT:
                    record = await self._wait(identity, record, runner, lifetime, heartbeat)
                    continue
                if self._clock.monotonic() - self._looked_at > FRESH_S:
                    # The last step took time, or the runner woke it: look again before the next step.
                    record = await self._look(identity)
                    continue
                if step.do is AgentAction.END:
                    fresh = await self._look(identity)
                    if fresh == record:
                        return step.why
                    record = fresh
                    continue
                await self._act(record, step)
                # A signal is a write of its own: a beat tells what it does not.
                if _beats_tell(self._runner.state()) != _beats_tell(runner):
                    heartbeat.soon()
                self._failures = 0
            except RemudaError as error:
                self._event_log.record("step-failed", error.message)
                if lifetime.is_over():
                    return "its time is up and the store cannot be read"
                reachable = False
                self._failures += 1
                await self._back_off(self._failures)

    async def _look(self, identity: Identity) -> Instance | None:
        record = await self._store.get(identity.instance_id)
        self._looked_at = self._clock.monotonic()
        return record

    def _decide(self, identity: Identity, record: Instance | None, lifetime: Expiry) -> tuple[AgentStep, RunnerState]:
        runner = self._runner.state()
        signalled = None
        if record is not None:
            lifetime.observe(record)
            if self._position != (record.epoch, record.state):
                self._position = (record.epoch, record.state)
                self._starts = self._removals = self._tries = 0
                self._release_s = 0.0
                # A release is still about the run that it ends.
                run_id = record.last_run_id if record.state is State.RELEASING else record.run_id
                self._event_log.facts |= {"epoch": record.epoch, "run_id": run_id}
                self._event_log.record("state", f"the record says {record.state}")
            if self._signalled is not None and self._signalled[0] == record.epoch:
                signalled = self._signalled[1]
        elif lifetime.is_over():
            return AgentStep(do=AgentAction.END, why="its time is up and its record is gone"), runner
        view = Observation(
            record=record,
            runner=runner,
            script=self._machine.load().script,
            now=self._clock.now(),
            margin_s=identity.margin_s,
            signalled=signalled,
            starts=self._starts,
            removals=self._removals,
        )
        return next_step(view), runner

    async def _wait(
        self,
        identity: Identity,
        record: Instance | None,
        runner: RunnerState,
        lifetime: Expiry,
        heartbeat: Heartbeat,
    ) -> Instance | None:
        """Until the record or the runner changes, or time is up."""
        left_s = lifetime.seconds_left(record)
        timeout_s = WAIT_LIMIT_S if left_s is None else min(WAIT_LIMIT_S, max(0.0, left_s) + 0.001)
        if self._pause_s:
            timeout_s, self._pause_s = min(timeout_s, self._pause_s), 0.0
        self._vital.works_for(timeout_s + WAIT_GRACE_S)
        control = asyncio.create_task(
            # While a job runs nothing that the record may say can be done; its end is the runner's news.
            self._store.wait_for_control(identity.instance_id, record, timeout_s, urgent=not runner.busy)
        )
        local = asyncio.create_task(self._runner.wait_for_change(runner, timeout_s))
        try:
            await asyncio.wait({control, local}, return_when=asyncio.FIRST_COMPLETED)
            if local.done() and local.result() != runner:
                heartbeat.soon()
            if not control.done():
                return record
            self._looked_at = self._clock.monotonic()
            return control.result()
        finally:
            for task in (control, local):
                task.cancel()
            await asyncio.gather(control, local, return_exceptions=True)

    async def _act(self, record: Instance | None, step: AgentStep) -> None:
        self._event_log.record("step", step.why, do=step.do.value)
        if step.do is AgentAction.RUN_SCRIPT:
            await self._run_script(record)
        elif record is None:
            return
        elif step.do is AgentAction.SIGNAL and step.signal is not None:
            told = self._machine.load().script_detail if step.signal is Signal.UD_FAILED else ""
            await self._signal(record, step.signal, told or step.why)
        elif step.do is AgentAction.CONFIGURE and record.assignment is not None:
            started = self._clock.monotonic()
            outcome = await self._runner.configure(record.assignment)
            signal = Signal.UD_REG_OK if outcome.ok else Signal.UD_REG_FAILED
            await self._signal(record, signal, outcome.detail, took_s=self._clock.monotonic() - started)
        elif step.do is AgentAction.START and record.assignment is not None:
            if self._starts:
                await self._back_off(self._starts)
            self._starts += 1
            await self._runner.start(record.assignment)
        elif step.do is AgentAction.REMOVE:
            await self._timed_release(self._remove(record))
        elif step.do is AgentAction.STOP:
            await self._timed_release(self._runner.stop())
        elif step.do is AgentAction.RESET:
            refused = self._note_refused()
            outcome = await self._timed_release(self._machine.reset())
            self._event_log.record("reset", outcome.detail or step.why, ok=outcome.ok, **_facts(outcome.found))
            failed = Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED
            signal = Signal.UD_REMOVE_REG_REMOVE_RUN_OK if outcome.ok else failed
            await self._signal(record, signal, f"{refused}{outcome.detail}", took_s=self._release_s)

    def _note_refused(self) -> str:
        """Before the reset, which takes the notes away."""
        refused = self._runner.refused()
        if not refused:
            return ""
        self._event_log.record("job-refused", refused)
        return f"{refused}; "

    async def _timed_release(self, work: Awaitable[T]) -> T:
        """A release is several steps; what they take together is the machine's own part of it."""
        started = self._clock.monotonic()
        result = await work
        self._release_s += self._clock.monotonic() - started
        return result

    async def _run_script(self, record: Instance | None) -> None:
        self._vital.works_for(SCRIPT_LIMIT_S)
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
            self._pause_s = BUSY_PAUSE_S
            await self._runner.wait_for_change(self._runner.state(), BUSY_PAUSE_S)
        elif removal in {RemovalStatus.FAILED, RemovalStatus.UNREACHABLE}:
            self._event_log.record("removal-failed", detail)
            self._tries += 1
            # Its threshold limits how often a github that does not answer is asked again.
            self._removals += removal is RemovalStatus.FAILED
            await self._back_off(self._tries)

    async def _signal(self, record: Instance, signal: Signal, detail: str, took_s: float | None = None) -> None:
        if took_s is not None:
            detail = with_took(took_s, detail)
        try:
            await self._store.write_signal(record.instance_id, epoch=record.epoch, signal=signal, detail=detail)
        except Conflict as conflict:
            # A later signal is there already, written before a restart: that one stands.
            self._event_log.record("signal-refused", conflict.message, signal=signal.value)
        self._signalled = (record.epoch, signal)

    async def _back_off(self, failures: int) -> None:
        pause_s = min(BACKOFF_LAST_S, BACKOFF_FIRST_S * 2 ** min(failures - 1, MAX_DOUBLINGS))
        await self._clock.sleep(pause_s * (0.5 + self._ids.jitter() / 2))


def _beats_tell(runner: RunnerState) -> tuple[bool, bool]:
    return runner.busy, runner.listening


def _facts(found: Mapping[str, int]) -> dict[str, int]:
    return {kind.lower().replace(" ", "_"): number for kind, number in found.items()}
