"""What an agent does next: a total function of the record, what is on disk and what runs.

Nothing here remembers how the agent got where it is, so a restart at any point goes on rightly.
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

#: How often a listener is started again, and a removal tried again, before the agent gives up.
MAX_STARTS = 5
MAX_REMOVALS = 5

#: Exit codes of the listener after which a new start cannot help: terminal error, version refused.
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
    do: AgentAction
    why: str
    signal: Signal | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """All that the decision rests on."""

    record: Instance | None
    runner: RunnerState
    script: ScriptStatus
    now: datetime
    margin_s: float
    #: The last signal that this process wrote for the record's epoch.
    signalled: Signal | None = None
    #: Failed starts and removals in this state, by this process.
    starts: int = 0
    removals: int = 0


def next_step(view: Observation) -> AgentStep:
    record = view.record
    if record is None:
        if view.script is ScriptStatus.PENDING:
            return AgentStep(do=AgentAction.RUN_SCRIPT, why="the machine has booted")
        return _wait("no record yet")
    if record.state in {State.TERMINATING, State.TERMINATED}:
        return AgentStep(do=AgentAction.END, why=f"the record says {record.state}")
    if expired(record.threshold, now=view.now, margin_s=view.margin_s):
        return AgentStep(do=AgentAction.END, why=f"its time in {record.state} is up")
    match record.state:
        case State.CREATED | State.CLAIMED:
            return _register(view, record)
        case State.RUNNING:
            return _run(view, record)
        case State.RELEASING:
            return _release(view, record)
        case _:
            return _wait("idle, in the pool")


def _wait(why: str) -> AgentStep:
    return AgentStep(do=AgentAction.WAIT, why=why)


def _signal(view: Observation, signal: Signal, why: str) -> AgentStep:
    if view.signalled is not None and view.signalled.rank >= signal.rank:
        return _wait(f"{view.signalled} was signalled")
    return AgentStep(do=AgentAction.SIGNAL, why=why, signal=signal)


def _register(view: Observation, record: Instance) -> AgentStep:
    if view.script is ScriptStatus.PENDING:
        return AgentStep(do=AgentAction.RUN_SCRIPT, why="before the first registration")
    if view.script is ScriptStatus.FAILED:
        return _signal(view, Signal.UD_FAILED, "the pre-runner script failed")
    if view.signalled is not None and view.signalled.rank >= Signal.UD_REG_OK.rank:
        return _wait("registered; the runner starts when the record says running")
    if record.assignment is None:
        return _signal(view, Signal.UD_REG_FAILED, "the record has no assignment")
    if view.runner.listening:
        return _signal(view, Signal.UD_REG_FAILED, "a runner of an earlier assignment is still up")
    if view.runner.configured_as == record.assignment.runner_name:
        return _signal(view, Signal.UD_REG_OK, "registered, runner off")
    if view.runner.configured_as:
        return _signal(view, Signal.UD_REG_FAILED, f"still registered as {view.runner.configured_as}")
    return AgentStep(do=AgentAction.CONFIGURE, why=f"assigned to run {record.run_id}")


def _run(view: Observation, record: Instance) -> AgentStep:
    name = record.assignment.runner_name if record.assignment else ""
    if view.signalled is Signal.UD_REG_FAILED:
        return _wait("the runner failed; waiting to be ended")
    if not name or view.runner.configured_as != name:
        return _signal(view, Signal.UD_REG_FAILED, "not registered for this assignment")
    if view.runner.listening:
        return _wait("a job runs" if view.runner.busy else "listening for jobs")
    if view.runner.spent and view.runner.refused:
        return _signal(view, Signal.UD_REG_FAILED, f"its one job was not the run's: {view.runner.refused}")
    if view.runner.spent:
        return _wait("its one job is over; waiting to be released")
    if view.runner.exit_code in TERMINAL_EXITS:
        return _signal(view, Signal.UD_REG_FAILED, f"the runner ended for good (exit {view.runner.exit_code})")
    if view.starts >= MAX_STARTS:
        return _signal(view, Signal.UD_REG_FAILED, f"the runner ended {view.starts} times")
    return AgentStep(do=AgentAction.START, why=f"committed to run {record.run_id}")


def _release(view: Observation, record: Instance) -> AgentStep:
    if view.signalled is not None and (
        view.signalled is Signal.UD_REMOVE_REG_FAILED or view.signalled.rank >= Signal.UD_REMOVE_REG_REMOVE_RUN_OK.rank
    ):
        return _wait(f"{view.signalled} was signalled")
    if view.runner.busy:
        return _wait("a job runs; it may finish")
    if view.runner.configured_as:
        return _remove(view, record)
    if view.runner.listening:
        return AgentStep(do=AgentAction.STOP, why="its registration is gone")
    if view.signalled is None or view.signalled.rank < Signal.UD_REMOVE_REG_OK.rank:
        return AgentStep(do=AgentAction.SIGNAL, why="no registration is left", signal=Signal.UD_REMOVE_REG_OK)
    return AgentStep(do=AgentAction.RESET, why="released")


def _remove(view: Observation, record: Instance) -> AgentStep:
    credential = record.assignment.credential if record.assignment else None
    if view.removals >= MAX_REMOVALS:
        return _signal(view, Signal.UD_REMOVE_REG_FAILED, f"removal failed {view.removals} times")
    if credential is None or credential.expires_at <= view.now:
        return _wait("waiting for a removal credential")
    return AgentStep(do=AgentAction.REMOVE, why="released")
