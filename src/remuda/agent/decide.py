"""The agent's decision function: the next step from the record, the disk state and the running processes.

The decision depends on its arguments only, so an agent that restarts at any point continues correctly.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from remuda.domain.instance import Instance, State
from remuda.domain.signals import Signal
from remuda.domain.thresholds import expired
from remuda.ports.machine import ScriptStatus
from remuda.ports.runner import RunnerState

#: Starts of the listener before the agent signals a failure.
MAX_STARTS = 5
#: Failed removals of the registration before the agent signals a failure.
MAX_REMOVALS = 5

#: Exit codes of the listener after which a restart cannot help: terminal error, version refused.
TERMINAL_EXITS = frozenset({1, 7})


class AgentAction(Enum):
    WAIT = "wait"
    RUN_SCRIPT = "run the pre-runner script"
    CONFIGURE = "register"
    START = "start the runner"
    REMOVE = "remove the registration"
    STOP = "stop the runner"
    RESET = "reset the machine"
    SIGNAL = "signal"
    END = "end the machine"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentStep:
    action: AgentAction
    #: For people; nothing reads it back.
    reason: str
    #: Set if and only if the action is SIGNAL.
    signal: Signal | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The complete input of a decision."""

    record: Instance | None
    runner: RunnerState
    script: ScriptStatus
    now: datetime
    margin_s: float
    #: The last signal that this process wrote for the record's epoch.
    signalled: Signal | None = None
    #: Starts of the listener by this process since the record entered its state.
    starts: int = 0
    #: Failed removals by this process since the record entered its state.
    removals: int = 0


def next_step(seen: Observation) -> AgentStep:
    record = seen.record
    if record is None:
        if seen.script is ScriptStatus.PENDING:
            return AgentStep(action=AgentAction.RUN_SCRIPT, reason="the machine has booted")
        return _wait("no record yet")
    if record.state in {State.TERMINATING, State.TERMINATED}:
        return AgentStep(action=AgentAction.END, reason=f"record state is {record.state}")
    if expired(record.threshold, now=seen.now, margin_s=seen.margin_s):
        return AgentStep(action=AgentAction.END, reason=f"threshold of state {record.state} passed")
    match record.state:
        case State.CREATED | State.CLAIMED:
            return _when_assigned(seen, record)
        case State.RUNNING:
            return _when_running(seen, record)
        case State.RELEASING:
            return _when_releasing(seen, record)
        case _:
            return _wait("idle, in the pool")


def _wait(reason: str) -> AgentStep:
    return AgentStep(action=AgentAction.WAIT, reason=reason)


def _signal_once(seen: Observation, signal: Signal, reason: str) -> AgentStep:
    """Signal unless this process already wrote a signal of the same or a higher rank."""
    if seen.signalled is not None and seen.signalled.rank >= signal.rank:
        return _wait(f"already signalled {seen.signalled}")
    return AgentStep(action=AgentAction.SIGNAL, reason=reason, signal=signal)


def _when_assigned(seen: Observation, record: Instance) -> AgentStep:
    if seen.script is ScriptStatus.PENDING:
        return AgentStep(action=AgentAction.RUN_SCRIPT, reason="required before the first registration")
    if seen.script is ScriptStatus.FAILED:
        return _signal_once(seen, Signal.UD_FAILED, "the pre-runner script failed")
    if seen.signalled is not None and seen.signalled.rank >= Signal.UD_REG_OK.rank:
        return _wait("registered; the runner starts when the record is running")
    if record.assignment is None:
        return _signal_once(seen, Signal.UD_REG_FAILED, "the record has no assignment")
    if seen.runner.listening:
        return _signal_once(seen, Signal.UD_REG_FAILED, "a runner of an earlier assignment is still listening")
    if seen.runner.configured_as == record.assignment.runner_name:
        return _signal_once(seen, Signal.UD_REG_OK, "registered, runner off")
    if seen.runner.configured_as:
        return _signal_once(seen, Signal.UD_REG_FAILED, f"still registered as {seen.runner.configured_as}")
    return AgentStep(action=AgentAction.CONFIGURE, reason=f"assigned to run {record.run_id}")


def _when_running(seen: Observation, record: Instance) -> AgentStep:
    name = record.assignment.runner_name if record.assignment else ""
    if seen.signalled is Signal.UD_REG_FAILED:
        return _wait("the runner failed; waiting for termination")
    if not name or seen.runner.configured_as != name:
        return _signal_once(seen, Signal.UD_REG_FAILED, "not registered for this assignment")
    if seen.runner.listening:
        return _wait("a job is running" if seen.runner.busy else "listening for jobs")
    if seen.runner.spent and seen.runner.refused:
        return _signal_once(seen, Signal.UD_REG_FAILED, f"its only job belonged to another run: {seen.runner.refused}")
    if seen.runner.spent:
        return _wait("its only job has ended; waiting for release")
    if seen.runner.exit_code in TERMINAL_EXITS:
        return _signal_once(
            seen, Signal.UD_REG_FAILED, f"the runner exited with the terminal code {seen.runner.exit_code}"
        )
    if seen.starts >= MAX_STARTS:
        return _signal_once(seen, Signal.UD_REG_FAILED, f"the runner exited {seen.starts} times")
    return AgentStep(action=AgentAction.START, reason=f"committed to run {record.run_id}")


def _when_releasing(seen: Observation, record: Instance) -> AgentStep:
    if seen.signalled is not None and (
        seen.signalled is Signal.UD_REMOVE_REG_FAILED or seen.signalled.rank >= Signal.UD_REMOVE_REG_REMOVE_RUN_OK.rank
    ):
        return _wait(f"already signalled {seen.signalled}")
    if seen.runner.busy:
        return _wait("a job is running and may finish")
    if seen.runner.configured_as:
        return _remove(seen, record)
    if seen.runner.listening:
        return AgentStep(action=AgentAction.STOP, reason="its registration is removed")
    if seen.signalled is None or seen.signalled.rank < Signal.UD_REMOVE_REG_OK.rank:
        return AgentStep(
            action=AgentAction.SIGNAL, reason="no registration on this machine", signal=Signal.UD_REMOVE_REG_OK
        )
    return AgentStep(action=AgentAction.RESET, reason="released")


def _remove(seen: Observation, record: Instance) -> AgentStep:
    credential = record.assignment.credential if record.assignment else None
    if seen.removals >= MAX_REMOVALS:
        return _signal_once(seen, Signal.UD_REMOVE_REG_FAILED, f"removal failed {seen.removals} times")
    if credential is None or credential.expires_at <= seen.now:
        return _wait("waiting for a removal credential")
    return AgentStep(action=AgentAction.REMOVE, reason="released")
