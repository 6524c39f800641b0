"""The agent of a machine that a runner set holds: every decision, its life cycle, kills at each step, time limits."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from functools import cache

import pytest

from remuda.agent.decide import (
    MAX_FAILED_REMOVALS,
    MAX_STARTS,
    AgentAction,
    AgentStep,
    Observation,
    next_step,
    spent_epoch,
)
from remuda.agent.loop import DEAD_MAN_SLACK_S
from remuda.domain.instance import Instance, State
from remuda.domain.signals import Signal
from remuda.domain.transitions import Actor, ListenOn
from remuda.ports.machine import RunnerState, ScriptStatus
from tests.support.agents import ID, MARGIN_S, AgentFixture
from tests.support.records import NOW, assignment, at, in_set, set_holder
from tests.support.virtual_time import until

CLEAN = Signal.UD_REMOVE_REG_REMOVE_RUN_OK
RIGHT = assignment(2).runner_name

# Decisions --------------------------------------------------------------------------------------------------------

#: How a just-in-time listener ended: exit code, whether it had a job, spent, unused.
ENDS = [
    (None, False, False, False),
    (None, True, False, False),
    (0, True, True, False),
    (0, False, True, True),
    (1, False, False, True),
    (1, False, False, False),
    (1, True, False, False),
    (2, False, False, False),
    (2, True, False, False),
    (7, False, False, False),
]
RUNNERS = [
    RunnerState(
        registered_as=name,
        listening=listening,
        busy=busy,
        exit_code=code,
        had_job=had_job or busy,
        spent=spent,
        unused=unused,
        refused=refused,
    )
    for name, listening, busy, (code, had_job, spent, unused), refused in itertools.product(
        ("", RIGHT, "remuda-test-1-i-0"), (False, True), (False, True), ENDS, ("", "refused 1 untrusted job")
    )
    if not (listening and code is not None)
]


def machine(state: State, *, jit: bool = False, **changed: object) -> Instance:
    record = in_set(state, epoch=2, threshold=at(300), **changed)
    if record.assignment is None:
        return record
    given = replace(record.assignment, runner_name=RIGHT, credential=None, jit_config="configuration" if jit else "")
    return replace(record, assignment=given)


@cache
def steps() -> list[tuple[Observation, AgentStep]]:
    """The step of each combination. Not computed at import, which each worker does for all files."""
    records = [machine(state, jit=jit) for state in State for jit in (False, True)]
    observations = (
        Observation(
            record=record,
            runner=runner,
            script=script,
            now=NOW,
            margin_s=1.0,
            signalled=signalled,
            starts=starts,
            failed_removals=removals,
        )
        for record, runner, script, signalled, starts, removals in itertools.product(
            records, RUNNERS, ScriptStatus, (None, *Signal), (0, MAX_STARTS), (0, MAX_FAILED_REMOVALS)
        )
    )
    return [(each, next_step(each)) for each in observations]


def in_state(state: State) -> list[tuple[Observation, AgentStep]]:
    return [(seen, step) for seen, step in steps() if seen.record is not None and seen.record.state is state]


def test_every_combination_has_a_step_with_a_reason() -> None:
    assert len(steps()) == len(State) * 2 * len(RUNNERS) * 3 * 9 * 4
    assert all(step.reason and (step.action is AgentAction.SIGNAL) == (step.signal is not None) for _, step in steps())


@pytest.mark.parametrize("state", [State.CREATED, State.CLAIMED])
def test_before_its_registration_it_runs_the_script_and_reports_ready(state: State) -> None:
    found = in_state(state)
    actions = {step.action for _, step in found}
    assert actions == {AgentAction.RUN_SCRIPT, AgentAction.SIGNAL, AgentAction.WAIT}
    for seen, step in found:
        if step.signal is not None:
            ok = seen.script is ScriptStatus.OK
            assert step.signal is (Signal.UD_OK if ok else Signal.UD_FAILED)
        if step.action is AgentAction.RUN_SCRIPT:
            assert seen.script is ScriptStatus.PENDING


def test_it_registers_only_with_a_configuration_and_without_another_runner() -> None:
    registering = [seen for seen, step in steps() if step.action is AgentAction.REGISTER]
    assert registering
    for seen in registering:
        assert seen.record is not None
        assert seen.record.state is State.RUNNING
        assert seen.record.assignment is not None
        assert seen.record.assignment.jit_config
        assert (seen.runner.registered_as, seen.runner.listening) == ("", False)


def test_listener_starts_only_after_the_signal_of_its_registration() -> None:
    starting = [seen for seen, step in steps() if step.action is AgentAction.START]
    assert starting
    for seen in starting:
        assert seen.signalled is not None
        assert seen.signalled.rank >= Signal.UD_REG_OK.rank
        assert (seen.runner.registered_as, seen.runner.listening) == (RIGHT, False)


def test_only_the_registration_of_this_assignment_is_signalled_as_ok() -> None:
    signalling = [seen for seen, step in in_state(State.RUNNING) if step.signal is Signal.UD_REG_OK]
    assert {seen.runner.registered_as for seen in signalling} == {RIGHT}


def test_listener_that_has_had_a_job_never_starts_again() -> None:
    """One job per epoch."""
    for seen, step in steps():
        exited = seen.runner.exit_code is not None
        if step.action is AgentAction.START:
            assert not (exited and seen.runner.had_job and not seen.runner.busy)
            assert not (exited and (seen.runner.spent or seen.runner.unused))


def test_ended_job_and_removed_registration_are_no_failures() -> None:
    for seen, step in in_state(State.RUNNING):
        runner = seen.runner
        ended = runner.exit_code is not None and not runner.busy and runner.registered_as == RIGHT
        if ended and (runner.had_job or runner.spent or runner.unused):
            waits = step.action is AgentAction.WAIT or step.signal is Signal.UD_REG_OK
            assert waits, (seen, step)


@pytest.mark.parametrize("code", [1, 7])
def test_refused_configuration_is_a_failure(code: int) -> None:
    runner = RunnerState(registered_as=RIGHT, exit_code=code, exit_detail="Invalid jit config.")
    seen = Observation(
        record=machine(State.RUNNING, jit=True),
        runner=runner,
        script=ScriptStatus.OK,
        now=NOW,
        margin_s=1.0,
        signalled=Signal.UD_REG_OK,
        starts=1,
    )
    step = next_step(seen)
    assert (step.signal, "Invalid jit config." in step.reason) == (Signal.UD_REG_FAILED, True)
    assert next_step(replace(seen, signalled=Signal.UD_REG_FAILED)).action is AgentAction.WAIT


def test_removal_needs_no_token() -> None:
    removing = [seen for seen, step in steps() if step.action is AgentAction.REMOVE]
    assert removing
    for seen, step in in_state(State.RELEASING):
        if seen.runner.busy:
            assert step.action is AgentAction.WAIT
        elif seen.runner.registered_as and seen.signalled is None:
            given_up = seen.failed_removals >= MAX_FAILED_REMOVALS
            assert step.action is (AgentAction.SIGNAL if given_up else AgentAction.REMOVE)


def test_signal_ranks_increase() -> None:
    for seen, step in steps():
        if step.signal is not None and seen.signalled is not None:
            assert step.signal.rank > seen.signalled.rank


def test_only_an_ended_job_of_this_registration_is_reported_as_spent() -> None:
    for seen, _ in steps():
        runner = seen.runner
        expected = (
            seen.record is not None
            and seen.record.assignment is not None
            and runner.registered_as == RIGHT
            and runner.exit_code is not None
            and not runner.busy
            and not runner.unused
            and (runner.had_job or runner.spent)
        )
        assert spent_epoch(seen.record, runner) == (2 if expected else 0)
    assert spent_epoch(None, RunnerState(registered_as=RIGHT, exit_code=0, spent=True)) == 0


@pytest.mark.parametrize(("busy", "bound", "end"), [(True, False, 900), (False, False, 300), (True, True, 300)])
def test_a_job_that_nobody_recorded_has_until_the_deadline_of_runs(*, busy: bool, bound: bool, end: float) -> None:
    record = machine(State.RUNNING, run_deadline=at(900))
    if bound:
        record = replace(record, holder=set_holder(record.runner_set, "77"))
    runner = RunnerState(registered_as=RIGHT, listening=True, busy=busy, had_job=busy)
    for now, over in ((end + 0.999, False), (end + 1, True)):
        seen = Observation(
            record=record, runner=runner, script=ScriptStatus.OK, now=at(now), margin_s=1.0, signalled=Signal.UD_REG_OK
        )
        assert (next_step(seen).action is AgentAction.END) is over


# Life cycle -------------------------------------------------------------------------------------------------------

LIFE = [
    "script",
    f"register {assignment(1).runner_name}",
    "start",
    "remove REMOVED",
    "reset",
    f"register {assignment(2).runner_name}",
    "start",
    "remove REMOVED",
    "reset",
]


async def use(fixture: AgentFixture, epoch: int) -> None:
    """Wait for the boot, equip, run a job, release, return to the pool."""
    await until(lambda: fixture.signalled(Signal.UD_OK, epoch))
    assert fixture.runner.current.registered_as == ""
    await fixture.equip()
    await until(lambda: fixture.signalled(Signal.UD_REG_OK, epoch) and fixture.report.listening)
    fixture.runner.become(busy=True, had_job=True)
    await until(lambda: fixture.report.busy)
    await fixture.bind()
    await asyncio.sleep(10)
    fixture.runner.finish_only_job()
    await until(lambda: fixture.report.spent_epoch == epoch)
    assert (fixture.report.busy, fixture.report.listening) == (False, False)
    await fixture.release_from_set()
    await until(lambda: fixture.signalled(CLEAN, epoch))
    await fixture.pool()


async def life(fixture: AgentFixture) -> None:
    await fixture.create_in_set()
    await use(fixture, 1)
    await asyncio.sleep(60)
    await fixture.claim_for_set()
    await use(fixture, 2)


async def test_machine_serves_two_jobs_with_a_registration_each(fixture: AgentFixture) -> None:
    fixture.start()
    await life(fixture)
    assert fixture.log == LIFE
    assert [each.jit_config for each in fixture.runner.configured] == ["configuration-1", "configuration-2"]
    assert all(each.any_run for each in fixture.runner.started)
    assert fixture.runner.removed_with == [None, None]
    assert (fixture.record.state, fixture.record.uses) == (State.IDLE, 2)
    await until(lambda: fixture.report.spent_epoch == 0)


async def test_job_is_reported_until_the_end_of_the_release(fixture: AgentFixture) -> None:
    """It may have had the job while its registration was removed, and no one else has noticed it."""
    fixture.start()
    await fixture.create_in_set()
    await until(lambda: fixture.signalled(Signal.UD_OK))
    await fixture.equip()
    await until(lambda: fixture.report.listening)
    fixture.runner.become(busy=True, had_job=True)
    fixture.runner.finish_only_job()
    await until(lambda: fixture.report.spent_epoch == 1)
    await fixture.release_from_set()
    await until(lambda: fixture.signalled(CLEAN, 1))
    await asyncio.sleep(10)
    assert fixture.report.spent_epoch == 1


async def test_end_of_the_job_is_reported_at_once(fixture: AgentFixture) -> None:
    fixture.start()
    await fixture.create_in_set()
    await until(lambda: fixture.signalled(Signal.UD_OK))
    await fixture.equip()
    await until(lambda: fixture.report.listening)
    fixture.runner.become(busy=True, had_job=True)
    await until(lambda: fixture.report.busy)
    fixture.runner.finish_only_job()
    await until(lambda: fixture.report.spent_epoch == 1, within_s=0.1)


async def test_job_that_ended_while_the_agent_was_down_is_reported_as_soon_as_the_record_is_read(
    fixture: AgentFixture,
) -> None:
    await listen(fixture)
    fixture.runner.become(busy=True, had_job=True)
    await until(lambda: fixture.report.busy)
    await fixture.crash()
    fixture.runner.finish_only_job()
    left = ["get"]
    # The first heartbeat is written before the record is known.
    fixture.store.fails = lambda name: name in left and not left.remove(name)  # type: ignore[func-returns-value]
    fixture.start()
    await until(lambda: not fixture.report.busy, within_s=0.1)
    assert fixture.report.spent_epoch == 0
    await until(lambda: fixture.report.spent_epoch == 1, within_s=1)


@pytest.mark.parametrize("after", range(1, len(LIFE) + 1))
async def test_agent_continues_after_a_kill_at_any_step(fixture: AgentFixture, after: int) -> None:
    restarted = fixture.kill_after(after)
    fixture.start()
    await life(fixture)
    await restarted
    assert (fixture.record.state, fixture.record.uses) == (State.IDLE, 2)
    assert fixture.runner.current.registered_as == ""
    again = {"register", "reset", "script"}
    assert [each for each in fixture.log if each.split()[0] not in again] == [
        each for each in LIFE if each.split()[0] not in again
    ]
    assert [each.epoch for each in await fixture.control.history(ID) if each.transition == "equip"] == [1, 2]


@pytest.mark.parametrize("nth", range(1, 12))
@pytest.mark.parametrize("loses_answer", [False, True], ids=["lost", "applied but reported as failed"])
async def test_failed_store_call_only_delays(fixture: AgentFixture, nth: int, *, loses_answer: bool) -> None:
    seen = 0

    def cut(_name: str) -> bool:
        nonlocal seen
        seen += 1
        return seen % 12 == nth

    if loses_answer:
        fixture.store.loses_answer = cut
    else:
        fixture.store.fails = cut
    fixture.start()
    await life(fixture)
    assert fixture.record.state is State.IDLE
    assert [each for each in fixture.log if each == "start"] == ["start"] * 2


@pytest.mark.parametrize("state", ["ready", "listening", "busy", "spent", "unused"])
async def test_restart_during_a_wait_repeats_no_work(fixture: AgentFixture, state: str) -> None:
    fixture.start()
    await fixture.create_in_set()
    await until(lambda: fixture.signalled(Signal.UD_OK))
    if state != "ready":
        await fixture.equip()
        await until(lambda: fixture.report.listening)
    if state in {"busy", "spent"}:
        fixture.runner.become(busy=True, had_job=True)
    if state == "spent":
        fixture.runner.finish_only_job()
    if state == "unused":
        fixture.runner.become(listening=False, exit_code=1, unused=True)
    await asyncio.sleep(5)
    done, before = list(fixture.log), fixture.report
    await fixture.restart()
    await asyncio.sleep(60)
    assert fixture.log == done
    after = fixture.report
    assert (after.signal, after.busy, after.listening) == (before.signal, before.busy, before.listening)
    assert after.spent_epoch == before.spent_epoch == (1 if state == "spent" else 0)


# The listener ends without a job ----------------------------------------------------------------------------------


async def listen(fixture: AgentFixture, listening_time_s: float = 900.0) -> None:
    fixture.start()
    await fixture.create_in_set()
    await until(lambda: fixture.signalled(Signal.UD_OK))
    await fixture.equip(listening_time_s)
    await until(lambda: fixture.report.listening)


@pytest.mark.parametrize("code", [0, 1])
async def test_listener_without_a_job_whose_registration_was_removed_is_released_as_unused(
    fixture: AgentFixture, code: int
) -> None:
    await listen(fixture)
    fixture.runner.become(listening=False, exit_code=code, spent=code == 0, unused=True)
    await until(lambda: not fixture.report.listening)
    await asyncio.sleep(60)
    assert fixture.signalled(Signal.UD_REG_OK), "no failure"
    assert fixture.report.spent_epoch == 0, "it had no job"
    await fixture.release_from_set()
    await until(lambda: fixture.signalled(CLEAN))
    await fixture.pool()
    await fixture.claim_for_set()
    await use(fixture, 2)


@pytest.mark.parametrize("is_bound_first", [True, False])
@pytest.mark.parametrize("code", [0, 1])
async def test_job_that_only_github_has_seen_is_reported_as_ended(
    fixture: AgentFixture, code: int, *, is_bound_first: bool
) -> None:
    """Its log was lost, for example because the disk was full."""
    await listen(fixture)
    if is_bound_first:
        await fixture.bind()
    fixture.runner.become(listening=False, exit_code=code, spent=code == 0, unused=True)
    await until(lambda: not fixture.report.listening)
    if not is_bound_first:
        await fixture.bind()
    await until(lambda: fixture.report.spent_epoch == 1)
    await fixture.release_from_set()
    await until(lambda: fixture.signalled(CLEAN))


async def test_refused_configuration_is_signalled_as_a_failure(fixture: AgentFixture) -> None:
    fixture.runner.exits = [1]
    fixture.start()
    await fixture.create_in_set()
    await until(lambda: fixture.signalled(Signal.UD_OK))
    await fixture.equip()
    await until(lambda: fixture.signalled(Signal.UD_REG_FAILED))
    assert fixture.log.count("start") == 1


async def test_listener_that_is_not_needed_is_stopped_after_its_registration_was_removed(fixture: AgentFixture) -> None:
    await listen(fixture)
    await fixture.release_from_set()
    await until(lambda: fixture.signalled(CLEAN))
    assert fixture.log[-3:] == ["remove REMOVED", "stop", "reset"]


async def test_release_before_its_registration(fixture: AgentFixture) -> None:
    fixture.start()
    await fixture.create_in_set()
    await use(fixture, 1)
    await fixture.claim_for_set()
    await until(lambda: fixture.signalled(Signal.UD_OK, 2))
    await fixture.release_from_set()
    await until(lambda: fixture.signalled(CLEAN, 2))
    assert len(fixture.runner.configured) == 1


# Time limits ------------------------------------------------------------------------------------------------------


async def test_unrecorded_job_outlives_the_listening_time(fixture: AgentFixture) -> None:
    await listen(fixture, listening_time_s=100.0)
    await asyncio.sleep(50)
    fixture.runner.become(busy=True, had_job=True)
    await asyncio.sleep(500)
    assert fixture.agent_runs
    started = fixture.clock.monotonic()
    assert "threshold" in await fixture.ended()
    assert fixture.record.run_deadline is not None
    left_s = (fixture.record.run_deadline - at(started)).total_seconds()
    assert fixture.clock.monotonic() - started == pytest.approx(left_s + MARGIN_S, abs=1)


async def test_unrecorded_job_outlives_the_listening_time_without_a_store(fixture: AgentFixture) -> None:
    await listen(fixture, listening_time_s=100.0)
    fixture.runner.become(busy=True, had_job=True)
    await asyncio.sleep(10)
    fixture.store.down = True
    await fixture.restart()
    await asyncio.sleep(500)
    assert fixture.agent_runs, "the disk has the deadline of a job"
    fixture.runner.become(busy=False)
    assert "unreachable" in await fixture.ended()


async def test_listener_without_a_job_ends_at_its_threshold(fixture: AgentFixture) -> None:
    await listen(fixture, listening_time_s=100.0)
    threshold = fixture.record.threshold
    await fixture.ended()
    assert fixture.clock.now() >= threshold
    assert (fixture.clock.now() - threshold).total_seconds() < 2 * MARGIN_S


async def test_dead_man_timer_allows_for_a_job_that_begins_while_the_agent_is_down(fixture: AgentFixture) -> None:
    await listen(fixture)
    assert fixture.record.run_deadline is not None
    slack_s = MARGIN_S + DEAD_MAN_SLACK_S
    assert (fixture.machine.armed[-1] - fixture.record.run_deadline).total_seconds() == slack_s
    await fixture.crash()
    fixture.start()
    assert (fixture.machine.armed[-1] - fixture.record.run_deadline).total_seconds() == slack_s
    await fixture.bind()
    bound = fixture.record.threshold
    await until(lambda: (fixture.machine.armed[-1] - bound).total_seconds() == slack_s)


async def test_renewed_listening_time_moves_the_limits(fixture: AgentFixture) -> None:
    await listen(fixture, listening_time_s=100.0)
    await asyncio.sleep(60)
    event = ListenOn(report=fixture.report, listening_time_s=100.0, max_runtime_s=1_800.0)
    await fixture.apply(event, Actor.LISTENER)
    await asyncio.sleep(80)
    assert fixture.agent_runs
    assert fixture.machine.memory.threshold == fixture.record.threshold
    assert fixture.machine.memory.busy_threshold == fixture.record.run_deadline


async def test_listener_that_exits_while_the_end_of_its_job_is_reported(
    fixture: AgentFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exit must not wait for the next regular heartbeat: the machine would be idle without being in the pool."""
    fixture.start()
    await fixture.create_in_set()
    await until(lambda: fixture.signalled(Signal.UD_OK))
    await fixture.equip()
    await until(lambda: fixture.report.listening)
    fixture.runner.become(busy=True, had_job=True)
    await until(lambda: fixture.report.busy)

    async def exit_meanwhile() -> str:
        if not fixture.runner.current.busy:
            fixture.runner.finish_only_job()
        return ""

    monkeypatch.setattr(fixture.machine, "spot_notice", exit_meanwhile)
    fixture.runner.become(busy=False)
    await asyncio.sleep(0.1)
    assert (fixture.report.listening, fixture.report.spent_epoch) == (False, 1)
