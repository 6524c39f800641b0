"""The agent's decision function: all combinations of inputs, checked against the rules of the contract."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import datetime
from functools import cache

import pytest

from remuda.agent.decide import (
    MAX_FAILED_REMOVALS,
    MAX_STARTS,
    SENT_AWAY,
    TERMINAL_EXITS,
    AgentAction,
    AgentStep,
    Observation,
    next_step,
)
from remuda.domain.instance import Credential, State
from remuda.domain.signals import Signal
from remuda.ports.machine import RunnerState, ScriptStatus
from tests.support.records import NOW, assignment, at, in_state

RIGHT = assignment(2).runner_name
RUNNERS = [
    RunnerState(registered_as=name, listening=listening, busy=busy, exit_code=code)
    for name, listening, busy, code in itertools.product(
        ("", RIGHT, "remuda-test-1-i-0"), (False, True), (False, True), (None, 0, 1, 2)
    )
]
SIGNALLED = [None, *Signal]
REMOVE_FAMILY = {signal for signal in Signal if "REMOVE" in signal.name}


def observation(state: State | None, **changed: object) -> Observation:
    record = None if state is None else in_state(state, epoch=2, assignment=_assignment(state), threshold=at(300))
    base = Observation(record=record, runner=RunnerState(), script=ScriptStatus.OK, now=NOW, margin_s=1.0)
    return replace(base, **changed)  # type: ignore[arg-type]


def _assignment(state: State) -> object:
    return None if state in {State.IDLE, State.TERMINATING, State.TERMINATED} else assignment(2)


@cache
def steps() -> list[tuple[Observation, AgentStep]]:
    """The step of each combination. Not computed at import, which each worker does for all files."""
    observations = (
        replace(seen, runner=runner, script=script, signalled=signalled, starts=starts, failed_removals=removals)
        for seen, runner, script, signalled, starts, removals in itertools.product(
            [observation(state) for state in (None, *State)],
            RUNNERS,
            ScriptStatus,
            SIGNALLED,
            (0, MAX_STARTS),
            (0, MAX_FAILED_REMOVALS),
        )
    )
    return [(each, next_step(each)) for each in observations]


def state_of(seen: Observation) -> State | None:
    return seen.record.state if seen.record else None


def observations_leading_to(*actions: AgentAction) -> list[Observation]:
    return [seen for seen, step in steps() if step.action in actions]


def test_every_combination_has_a_step_with_a_reason() -> None:
    assert len(steps()) == 8 * 48 * 3 * 9 * 4
    assert all(step.reason and (step.action is AgentAction.SIGNAL) == (step.signal is not None) for _, step in steps())


@pytest.mark.parametrize(
    ("action", "states"),
    [
        (AgentAction.START, {State.RUNNING}),
        (AgentAction.REGISTER, {State.CREATED, State.CLAIMED}),
        (AgentAction.REMOVE, {State.RELEASING}),
        (AgentAction.STOP, {State.RELEASING}),
        (AgentAction.RESET, {State.RELEASING}),
        (AgentAction.RUN_SCRIPT, {None, State.CREATED, State.CLAIMED}),
        (AgentAction.END, {State.TERMINATING, State.TERMINATED}),
        (AgentAction.SIGNAL, {State.CREATED, State.CLAIMED, State.RUNNING, State.RELEASING}),
    ],
)
def test_actions_occur_only_in_their_states(action: AgentAction, states: set[State | None]) -> None:
    assert {state_of(seen) for seen in observations_leading_to(action)} == states


def test_idle_agent_only_waits() -> None:
    assert {step.action for seen, step in steps() if state_of(seen) is State.IDLE} == {AgentAction.WAIT}


def test_runner_starts_only_for_its_registration_and_if_not_listening() -> None:
    for seen in observations_leading_to(AgentAction.START):
        assert (seen.runner.registered_as, seen.runner.listening) == (RIGHT, False)
        assert seen.runner.exit_code not in TERMINAL_EXITS
        assert seen.starts < MAX_STARTS


def test_refused_version_is_signalled_with_the_runners_own_sentence() -> None:
    sentence = "Runner version v2.330.0 is deprecated and cannot receive messages."
    (seen, *_) = [seen for seen, step in steps() if state_of(seen) is State.RUNNING and "terminal code" in step.reason]
    for code, what in ((7, "GitHub refuses the runner because of its version"), (1, "the terminal code 1")):
        step = next_step(replace(seen, runner=replace(seen.runner, exit_code=code, exit_detail=sentence)))
        assert (step.action, step.signal) == (AgentAction.SIGNAL, Signal.UD_REG_FAILED)
        assert step.reason.endswith(f"{what}: {sentence}")


def test_registration_requires_a_finished_script_and_no_other_registration() -> None:
    for seen in observations_leading_to(AgentAction.REGISTER):
        assert seen.script is ScriptStatus.OK
        assert (seen.runner.registered_as, seen.runner.listening) == ("", False)


def test_release_order_is_remove_stop_reset() -> None:
    for seen in observations_leading_to(AgentAction.STOP):
        assert seen.runner.registered_as == ""
        assert seen.runner.listening
    for seen in observations_leading_to(AgentAction.RESET):
        assert (seen.runner.registered_as, seen.runner.listening) == ("", False)


def test_running_job_is_not_interrupted() -> None:
    """S6: while a job runs, the agent neither ends it nor signals its end."""
    busy = [step for seen, step in steps() if seen.runner.busy and state_of(seen) is State.RELEASING]
    assert {step.action for step in busy} == {AgentAction.WAIT}


def test_signals_belong_to_the_state_of_the_record() -> None:
    for seen, step in steps():
        if step.signal is not None:
            assert (step.signal in REMOVE_FAMILY) == (state_of(seen) is State.RELEASING)


def test_ok_signals_match_the_observed_state() -> None:
    for seen, step in steps():
        if step.signal is Signal.UD_REG_OK:
            assert seen.runner == replace(seen.runner, registered_as=RIGHT, listening=False)
            assert seen.script is ScriptStatus.OK
        if step.signal is Signal.UD_REMOVE_REG_OK:
            assert (seen.runner.registered_as, seen.runner.listening, seen.runner.busy) == ("", False, False)
        # Only the result of the reset signals that the machine is clean.
        assert step.signal is not Signal.UD_REMOVE_REG_REMOVE_RUN_OK


def test_signal_ranks_increase() -> None:
    for seen, step in steps():
        if step.signal is not None and seen.signalled is not None:
            assert step.signal.rank > seen.signalled.rank


def test_agent_waits_after_a_failed_release() -> None:
    failed = {Signal.UD_REMOVE_REG_FAILED, Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED}
    after = {step.action for seen, step in steps() if state_of(seen) is State.RELEASING and seen.signalled in failed}
    assert after == {AgentAction.WAIT}


def test_running_instance_without_registration_signals_a_failure() -> None:
    """Neither listening nor configured for this epoch: `UD_REG_FAILED`, unless already signalled."""
    for seen, step in steps():
        if state_of(seen) is State.RUNNING and seen.runner.registered_as != RIGHT and seen.signalled is None:
            assert step.signal is Signal.UD_REG_FAILED


@pytest.mark.parametrize("code", sorted(TERMINAL_EXITS))
def test_runner_is_not_restarted_after_a_terminal_exit_code(code: int) -> None:
    seen = observation(State.RUNNING, runner=RunnerState(registered_as=RIGHT, exit_code=code))
    assert next_step(seen).signal is Signal.UD_REG_FAILED


def test_runner_is_not_restarted_after_too_many_starts() -> None:
    runner = RunnerState(registered_as=RIGHT, exit_code=2)
    assert next_step(observation(State.RUNNING, runner=runner, starts=MAX_STARTS - 1)).action is AgentAction.START
    assert next_step(observation(State.RUNNING, runner=runner, starts=MAX_STARTS)).signal is Signal.UD_REG_FAILED


def test_jit_runner_that_refused_its_only_job_signals_a_failure() -> None:
    spent = RunnerState(registered_as=RIGHT, exit_code=0, had_job=True, saw_job=True, spent=True)
    assert next_step(observation(State.RUNNING, runner=spent)).action is AgentAction.WAIT
    refused = replace(spent, refused="refused a job of run 9 of eve/r")
    step = next_step(observation(State.RUNNING, runner=refused))
    assert (step.signal, "eve/r" in step.reason) == (Signal.UD_REG_FAILED, True)


@pytest.mark.parametrize(
    "runner",
    [
        RunnerState(exit_code=0, spent=True, unused=True),
        # The agent was down when the listener exited: no job is proven, and none was seen.
        RunnerState(exit_code=0, spent=True, had_job=True),
        RunnerState(exit_code=1, unused=True),
    ],
    ids=["sent away", "while the agent was down", "registration deleted before the session"],
)
def test_jit_runner_that_exited_without_a_job_signals_a_failure(runner: RunnerState) -> None:
    seen = observation(State.RUNNING, runner=replace(runner, registered_as=RIGHT), signalled=Signal.UD_REG_OK)
    step = next_step(seen)
    assert (step.signal, step.reason) == (Signal.UD_REG_FAILED, SENT_AWAY)
    assert next_step(replace(seen, signalled=step.signal)).action is AgentAction.WAIT, "no second registration"


def test_failed_script_is_signalled_once() -> None:
    assert next_step(observation(State.CREATED, script=ScriptStatus.FAILED)).signal is Signal.UD_FAILED
    assert (
        next_step(observation(State.CREATED, script=ScriptStatus.FAILED, signalled=Signal.UD_FAILED)).action
        is AgentAction.WAIT
    )


# The removal ------------------------------------------------------------------------------------------------------

REGISTERED = RunnerState(registered_as=RIGHT, listening=True)


@pytest.mark.parametrize(
    ("credential", "action"),
    [
        (Credential(token="t0ken", expires_at=at(1)), AgentAction.REMOVE),
        (Credential(token="t0ken", expires_at=NOW), AgentAction.WAIT),
        (None, AgentAction.WAIT),
    ],
    ids=["good", "expired", "none"],
)
def test_removal_requires_a_valid_credential(credential: Credential | None, action: AgentAction) -> None:
    record = in_state(State.RELEASING, assignment=replace(assignment(2), credential=credential))
    assert next_step(replace(observation(State.RELEASING), record=record, runner=REGISTERED)).action is action


def test_removal_is_given_up_after_too_many_failures() -> None:
    seen = observation(State.RELEASING, runner=REGISTERED, failed_removals=MAX_FAILED_REMOVALS - 1)
    assert next_step(seen).action is AgentAction.REMOVE
    assert next_step(replace(seen, failed_removals=MAX_FAILED_REMOVALS)).signal is Signal.UD_REMOVE_REG_FAILED


def test_release_of_a_machine_that_never_read_its_claim() -> None:
    """There is nothing to remove or to stop: the agent signals that and resets the machine."""
    first = next_step(observation(State.RELEASING))
    assert first.signal is Signal.UD_REMOVE_REG_OK
    assert next_step(observation(State.RELEASING, signalled=Signal.UD_REMOVE_REG_OK)).action is AgentAction.RESET


# The end ----------------------------------------------------------------------------------------------------------

LIVE_STATES = [state for state in State if state not in {State.TERMINATING, State.TERMINATED}]


@pytest.mark.parametrize("state", LIVE_STATES)
@pytest.mark.parametrize(("threshold", "over"), [(at(-1), True), (at(-0.999), False), (at(1), False)])
def test_agent_ends_after_threshold_and_margin(state: State, threshold: datetime, over: bool) -> None:  # noqa: FBT001
    for runner in RUNNERS:
        seen = observation(state, runner=runner)
        assert seen.record is not None
        late = replace(seen, record=replace(seen.record, threshold=threshold))
        assert (next_step(late).action is AgentAction.END) is over


@pytest.mark.parametrize("state", [State.TERMINATING, State.TERMINATED])
def test_terminated_record_always_ends_the_machine(state: State) -> None:
    assert {step.action for seen, step in steps() if state_of(seen) is state} == {AgentAction.END}


def test_without_record_the_agent_runs_the_script_and_waits() -> None:
    assert next_step(observation(None, script=ScriptStatus.PENDING)).action is AgentAction.RUN_SCRIPT
    assert next_step(observation(None, script=ScriptStatus.OK)).action is AgentAction.WAIT
    assert next_step(observation(None, script=ScriptStatus.FAILED)).action is AgentAction.WAIT
