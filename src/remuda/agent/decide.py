"""The agent's decision function: the next step from the record, the runner's state and the script's status.

The last signal and the counters of an observation are kept in memory and lost when the agent restarts, so steps may
repeat then. This is safe: each step can be repeated, the store rejects a signal of a lower rank than the stored one,
and the record's threshold limits the time of all retries.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from remuda.domain.holder import SetHolder
from remuda.domain.instance import Instance, State
from remuda.domain.signals import Signal
from remuda.domain.thresholds import expired
from remuda.ports.machine import RunnerState, ScriptStatus

#: Starts of the listener before the agent signals a failure.
MAX_STARTS = 5
#: Failed removals of the registration before the agent signals a failure.
MAX_FAILED_REMOVALS = 5

#: Failure of a runner that was registered for one job and exited without it.
SENT_AWAY = "the runner exited without a job, because GitHub has removed its registration or withdrawn its job"
#: Exit code of a listener whose version GitHub refuses.
VERSION_REFUSED_EXIT = 7
#: Exit codes of the listener after which a restart cannot help: terminal error, version refused.
TERMINAL_EXITS = frozenset({1, VERSION_REFUSED_EXIT})


class AgentAction(Enum):
    WAIT = "wait"
    RUN_SCRIPT = "run the pre-runner script"
    REGISTER = "register"
    START = "start the runner"
    REMOVE = "remove the registration"
    STOP = "stop the runner"
    RESET = "reset the machine"
    SIGNAL = "signal"
    END = "end the machine"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentStep:
    action: AgentAction
    #: For logs only.
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
    #: The last signal that this process sent for the record's epoch, whether or not the store accepted it.
    signalled: Signal | None = None
    #: Starts of the listener by this process since the record entered its state.
    starts: int = 0
    #: Failed removals by this process since the record entered its state.
    failed_removals: int = 0


def next_step(observation: Observation) -> AgentStep:
    record = observation.record
    if record is None:
        if observation.script is ScriptStatus.PENDING:
            return AgentStep(action=AgentAction.RUN_SCRIPT, reason="the machine has booted")
        return _wait("no record yet")
    if record.state in {State.TERMINATING, State.TERMINATED}:
        return AgentStep(action=AgentAction.END, reason=f"record state is {record.state}")
    if expired(record.deadline(busy=observation.runner.busy), now=observation.now, margin_s=observation.margin_s):
        return AgentStep(action=AgentAction.END, reason=f"threshold of state {record.state} passed")
    match record.state:
        case State.CREATED | State.CLAIMED:
            return _when_assigned(observation, record)
        case State.RUNNING:
            return _when_running(observation, record)
        case State.RELEASING:
            return _when_releasing(observation, record)
        case _:
            return _wait("idle, in the pool")


def _wait(reason: str) -> AgentStep:
    return AgentStep(action=AgentAction.WAIT, reason=reason)


def _signal_once(observation: Observation, signal: Signal, reason: str) -> AgentStep:
    """Signal unless this process already sent a signal of the same or a higher rank."""
    if observation.signalled is not None and observation.signalled.rank >= signal.rank:
        return _wait(f"already signalled {observation.signalled}")
    return AgentStep(action=AgentAction.SIGNAL, reason=reason, signal=signal)


def _when_assigned(observation: Observation, record: Instance) -> AgentStep:
    if observation.script is ScriptStatus.PENDING:
        return AgentStep(action=AgentAction.RUN_SCRIPT, reason="required before the first registration")
    if observation.script is ScriptStatus.FAILED:
        return _signal_once(observation, Signal.UD_FAILED, "the pre-runner script failed")
    if observation.signalled is not None and observation.signalled.rank >= Signal.UD_REG_OK.rank:
        return _wait("registered; the runner starts when the record is running")
    if record.assignment is None:
        return _signal_once(observation, Signal.UD_REG_FAILED, "the record has no assignment")
    if record.runner_set:
        # It gets its registration with the state `running`.
        return _signal_once(observation, Signal.UD_OK, "ready for a job of its runner set")
    if observation.runner.listening:
        return _signal_once(observation, Signal.UD_REG_FAILED, "a runner of an earlier assignment is still listening")
    if observation.runner.registered_as == record.assignment.runner_name:
        return _signal_once(observation, Signal.UD_REG_OK, "registered, runner off")
    if observation.runner.registered_as:
        return _signal_once(
            observation, Signal.UD_REG_FAILED, f"still registered as {observation.runner.registered_as}"
        )
    return AgentStep(action=AgentAction.REGISTER, reason=f"assigned to run {record.run_id}")


def _when_running(observation: Observation, record: Instance) -> AgentStep:
    name = record.assignment.runner_name if record.assignment else ""
    if observation.signalled is Signal.UD_REG_FAILED:
        return _wait("the runner failed; waiting for termination")
    if record.runner_set and (step := _before_listening(observation, record)):
        return step
    if not name or observation.runner.registered_as != name:
        return _signal_once(observation, Signal.UD_REG_FAILED, "not registered for this assignment")
    if observation.runner.listening:
        return _wait("a job is running" if observation.runner.busy else "listening for jobs")
    if record.runner_set and (observation.runner.unused or spent_epoch(record, observation.runner)):
        is_used = spent_epoch(record, observation.runner)
        used = "its job has ended" if is_used else "GitHub sent its runner away before it had a job"
        return _wait(f"{used}; waiting for release")
    # A spent runner was registered for a single job: it cannot be started again.
    if observation.runner.spent and observation.runner.refused:
        return _signal_once(
            observation, Signal.UD_REG_FAILED, f"its only job belonged to another run: {observation.runner.refused}"
        )
    # A job of its run may still wait, and only a new instance can run it: a runner's name never recurs, so this one
    # cannot register again. A job that ran unseen, for example while the disk was full, counts as none here. That is
    # harmless: the instance has nothing left to do.
    if observation.runner.unused or (observation.runner.spent and not observation.runner.saw_job):
        return _signal_once(observation, Signal.UD_REG_FAILED, SENT_AWAY)
    if observation.runner.spent:
        return _wait("its only job has ended; waiting for release")
    if observation.runner.exit_code in TERMINAL_EXITS:
        return _signal_once(observation, Signal.UD_REG_FAILED, _describe_exit(observation.runner))
    if observation.starts >= MAX_STARTS:
        return _signal_once(observation, Signal.UD_REG_FAILED, f"the runner exited {observation.starts} times")
    return AgentStep(action=AgentAction.START, reason=f"committed to run {record.run_id}")


def _before_listening(observation: Observation, record: Instance) -> AgentStep | None:
    """Return the step of a machine of a runner set that is due before its listener starts."""
    runner, assignment = observation.runner, record.assignment
    if assignment is not None and assignment.jit_config and not runner.registered_as and not runner.listening:
        return AgentStep(action=AgentAction.REGISTER, reason=f"equipped for runner set {record.runner_set}")
    is_registered = assignment is not None and runner.registered_as == assignment.runner_name
    if is_registered and (observation.signalled is None or observation.signalled.rank < Signal.UD_REG_OK.rank):
        # Also after a restart: without a signal of this epoch, no one counts its heartbeats.
        return AgentStep(action=AgentAction.SIGNAL, reason="registered just in time", signal=Signal.UD_REG_OK)
    return None


def spent_epoch(record: Instance | None, runner: RunnerState) -> int:
    """The epoch of the record if its just-in-time registration is used up, or 0.

    A listener of a set that fails after its job began is used up too: a restart must not run a second job.
    """
    if record is None or record.assignment is None or runner.registered_as != record.assignment.runner_name:
        return 0
    if runner.listening or runner.busy or runner.exit_code is None:
        return 0
    if runner.unused:
        # It may have had a job that the agent has not seen, for example while the disk was full. GitHub has.
        had_job = isinstance(record.holder, SetHolder) and record.state is State.RUNNING and record.is_bound
        return record.epoch if had_job else 0
    return record.epoch if runner.spent or (record.runner_set and runner.had_job) else 0


def _describe_exit(runner: RunnerState) -> str:
    what = f"the runner exited with the terminal code {runner.exit_code}"
    if runner.exit_code == VERSION_REFUSED_EXIT:
        what = "GitHub refuses the runner because of its version"
    return f"{what}: {runner.exit_detail}" if runner.exit_detail else what


def _when_releasing(observation: Observation, record: Instance) -> AgentStep:
    # UD_REMOVE_REG_FAILED is final too, although its rank is lower than that of UD_REMOVE_REG_REMOVE_RUN_OK.
    if observation.signalled is not None and (
        observation.signalled is Signal.UD_REMOVE_REG_FAILED
        or observation.signalled.rank >= Signal.UD_REMOVE_REG_REMOVE_RUN_OK.rank
    ):
        return _wait(f"already signalled {observation.signalled}")
    if observation.runner.busy:
        return _wait("a job is running and may finish")
    if observation.runner.registered_as:
        return _remove(observation, record)
    if observation.runner.listening:
        return AgentStep(action=AgentAction.STOP, reason="its registration is removed")
    if observation.signalled is None or observation.signalled.rank < Signal.UD_REMOVE_REG_OK.rank:
        return AgentStep(
            action=AgentAction.SIGNAL, reason="no registration on this machine", signal=Signal.UD_REMOVE_REG_OK
        )
    return AgentStep(action=AgentAction.RESET, reason="released")


def _remove(observation: Observation, record: Instance) -> AgentStep:
    credential = record.assignment.credential if record.assignment else None
    if observation.failed_removals >= MAX_FAILED_REMOVALS:
        return _signal_once(
            observation, Signal.UD_REMOVE_REG_FAILED, f"removal failed {observation.failed_removals} times"
        )
    if not record.runner_set and (credential is None or credential.expires_at <= observation.now):
        return _wait("waiting for a removal credential")
    return AgentStep(action=AgentAction.REMOVE, reason="released")
