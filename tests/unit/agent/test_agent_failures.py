"""The agent with failures of the store, the runner and the clock."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

import pytest

from remuda.agent import loop
from remuda.agent.decide import MAX_FAILED_REMOVALS, MAX_STARTS
from remuda.agent.loop import STEP_LIMIT_S
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment, State
from remuda.domain.signals import FailureKind, Signal
from remuda.domain.thresholds import HEARTBEAT_DEAD_AFTER_S, HEARTBEAT_INTERVAL_S
from remuda.domain.transitions import Actor, Extend, Renew
from remuda.ports.machine import AgentState, RemovalStatus, ScriptStatus, StepResult
from simulation.loop import VirtualClock
from tests.support.agents import ID, MARGIN_S, AgentFixture
from tests.support.records import LONG_S, at
from tests.support.virtual_time import until

CLEAN = Signal.UD_REMOVE_REG_REMOVE_RUN_OK


# The store --------------------------------------------------------------------------------------------------------


async def test_unreachable_store_last_threshold_applies(fixture: AgentFixture) -> None:
    await fixture.serve(max_runtime_s=100)
    threshold = fixture.record.threshold
    fixture.store.down = True
    why = await fixture.ended()
    assert why == "threshold passed and the store is unreachable"
    late = fixture.clock.now() - threshold
    assert timedelta(seconds=MARGIN_S) <= late < timedelta(seconds=MARGIN_S + 6)


async def test_last_threshold_applies_after_a_restart(fixture: AgentFixture) -> None:
    fixture.machine.memory = AgentState(script=ScriptStatus.OK, threshold=at(50))
    fixture.store.down = True
    why = await fixture.start()
    assert why == "threshold passed and the store is unreachable"
    assert fixture.clock.now() >= at(50 + MARGIN_S)
    assert fixture.machine.ended == [why]


async def test_without_threshold_the_agent_waits_for_the_store(fixture: AgentFixture) -> None:
    fixture.store.down = True
    task = fixture.start()
    await asyncio.sleep(7_200)
    assert not task.done()
    fixture.store.down = False
    await fixture.create()
    await until(lambda: fixture.signalled(Signal.UD_REG_OK), within_s=10)


async def test_job_continues_while_the_store_is_unreachable(fixture: AgentFixture) -> None:
    await fixture.serve()
    fixture.runner.become(busy=True)
    fixture.store.down = True
    await asyncio.sleep(600)
    fixture.store.down = False
    await asyncio.sleep(10)
    assert fixture.runner.current.busy
    assert fixture.log.count("start") == 1
    assert fixture.report.busy


async def test_runner_does_not_start_after_its_failure_was_signalled(fixture: AgentFixture) -> None:
    """The write of a killed agent may arrive late."""
    fixture.machine.script_s = 5.0
    await fixture.create()
    fixture.start()
    await until(lambda: "script" in fixture.log)
    await fixture.control.write_signal(ID, epoch=1, signal=Signal.UD_REG_FAILED, detail="test")
    await asyncio.sleep(30)
    assert fixture.signalled(Signal.UD_REG_FAILED)
    assert not fixture.runner.configured


async def test_runner_does_not_start_after_its_failure_was_signalled_by_an_earlier_agent(fixture: AgentFixture) -> None:
    fixture.runner.exits = [2] * 100
    fixture.start()
    await fixture.create()
    await until(lambda: fixture.signalled(Signal.UD_REG_OK))
    await fixture.commit()
    await until(lambda: fixture.signalled(Signal.UD_REG_FAILED))
    await fixture.restart()
    await asyncio.sleep(60)
    assert fixture.log.count("start") == MAX_STARTS


async def test_failure_that_the_store_did_not_confirm_is_signalled_again_and_not_repaired(
    fixture: AgentFixture,
) -> None:
    """The lost write may be applied after a later one, when the runner has started."""
    failures = iter([True, True])
    fixture.runner.configure_outcome = StepResult(
        ok=False, detail="config.sh: exit 1", failure=FailureKind.GITHUB_UNREACHABLE
    )
    fixture.store.fails = lambda name: (
        name == "write_signal" and bool(fixture.runner.configured) and next(failures, False)
    )
    await fixture.create()
    fixture.start()
    await until(lambda: bool(fixture.runner.configured))
    fixture.runner.configure_outcome = StepResult(ok=True)
    await until(lambda: fixture.signalled(Signal.UD_REG_FAILED))
    await asyncio.sleep(30)
    assert len(fixture.runner.configured) == 1
    assert (fixture.report.detail, fixture.report.failure) == ("config.sh: exit 1", FailureKind.GITHUB_UNREACHABLE)


async def test_record_is_read_again_after_a_failed_step(fixture: AgentFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is released while its listener fails to start, so there is no second attempt."""
    monkeypatch.setattr(loop, "MAX_RECORD_AGE_S", LONG_S)
    fixture.start()
    await fixture.create()
    await until(lambda: fixture.signalled(Signal.UD_REG_OK))
    starts = 0

    async def fail(_: Assignment) -> NoReturn:
        nonlocal starts
        starts += 1
        if fixture.record.state is State.RUNNING:
            await fixture.release()
        raise Unavailable("cannot start the listener")

    monkeypatch.setattr(fixture.runner, "start", fail)
    await fixture.commit()
    await until(lambda: fixture.signalled(CLEAN))
    assert starts == 1


async def test_requests_to_an_unreachable_store_back_off(fixture: AgentFixture) -> None:
    fixture.store.down = True
    fixture.start()
    await asyncio.sleep(600)
    asked = [action for action, _, _ in fixture.event_log.notes if action == "step-failed"]
    assert 100 < len(asked) < 150


async def test_failures_long_ago_do_not_delay_the_next_read(fixture: AgentFixture) -> None:
    """Between two of them, the instance waits for minutes without one."""
    await fixture.serve(max_runtime_s=36_000.0)
    calls: list[tuple[str, float]] = []
    fails = False

    def observe(name: str) -> bool:
        calls.append((name, fixture.clock.monotonic()))
        return fails and name == "wait_for_control"

    fixture.store.fails = observe
    for _ in range(6):
        fails = True
        await until(lambda: any(action == "step-failed" for action, _, _ in fixture.event_log.notes), within_s=200)
        fails = False
        failed_at = fixture.clock.monotonic()
        fixture.event_log.notes.clear()
        await asyncio.sleep(300)
        read_at = next(at for name, at in calls if name == "get" and at >= failed_at)
        assert read_at - failed_at < 0.5


# The end ----------------------------------------------------------------------------------------------------------


async def test_record_is_read_again_before_the_end(fixture: AgentFixture) -> None:
    """The threshold was extended after the agent's last read, so the agent continues."""
    await fixture.serve(max_runtime_s=100)
    await fixture.return_to_pool(release_time_s=20)
    await asyncio.sleep(1)

    def renew(name: str) -> bool:
        if name == "get" and fixture.record.threshold < fixture.clock.now():
            later = fixture.clock.now() + timedelta(seconds=500)
            fixture.database.instances[ID] = replace(fixture.record, threshold=later)
        return False

    fixture.store.fails = renew
    await asyncio.sleep(600)
    assert fixture.agent_runs


async def test_renewed_threshold_applies(fixture: AgentFixture) -> None:
    await fixture.serve()
    await fixture.return_to_pool()
    for _ in range(5):
        await asyncio.sleep(400)
        await fixture.apply(Renew(until=fixture.clock.now() + timedelta(seconds=420)), Actor.SCALE_DOWN)
    assert fixture.agent_runs
    assert await fixture.ended() == "threshold of state idle passed"
    late = fixture.clock.now() - fixture.record.threshold
    assert timedelta(seconds=MARGIN_S) <= late < timedelta(seconds=MARGIN_S + 1)


async def test_machine_without_record_ends_at_its_last_threshold(fixture: AgentFixture) -> None:
    await fixture.serve(max_runtime_s=100)
    threshold = fixture.record.threshold
    del fixture.database.instances[ID]
    assert await fixture.ended() == "threshold passed and the record is gone"
    assert fixture.clock.now() >= threshold + timedelta(seconds=MARGIN_S)


@pytest.mark.parametrize("skew_s", [-30.0, 30.0])
async def test_clock_skew_within_the_margin_is_tolerated(fixture: AgentFixture, skew_s: float) -> None:
    fixture.clock = VirtualClock(skew_s=skew_s)
    await fixture.serve()
    await fixture.release()
    await until(lambda: fixture.signalled(CLEAN))
    assert fixture.log[-3:] == ["remove REMOVED", "stop", "reset"]


# The heartbeat ----------------------------------------------------------------------------------------------------


async def test_heartbeat_is_regular_and_reports_the_runner(fixture: AgentFixture) -> None:
    await fixture.serve()
    await asyncio.sleep(1)
    before = fixture.report.beat
    await asyncio.sleep(100)
    assert fixture.report.beat - before == pytest.approx(100 / HEARTBEAT_INTERVAL_S, abs=1)
    assert (fixture.report.listening, fixture.report.busy, fixture.report.version) == (True, False, "1")
    fixture.runner.become(busy=True)
    await asyncio.sleep(0.1)
    assert fixture.report.busy


def test_two_lost_heartbeats_do_not_make_a_machine_dead() -> None:
    assert 3 * HEARTBEAT_INTERVAL_S <= HEARTBEAT_DEAD_AFTER_S


async def test_spot_notice_is_reported_and_the_job_continues(fixture: AgentFixture) -> None:
    await fixture.serve()
    fixture.runner.become(busy=True)
    fixture.machine.notice = "terminate at noon"
    await asyncio.sleep(HEARTBEAT_INTERVAL_S + 0.1)
    assert fixture.report.notice == "terminate at noon"
    assert fixture.log[-1] == "start"
    assert fixture.runner.current.busy


async def test_heartbeat_of_a_hung_agent_stops(fixture: AgentFixture) -> None:
    fixture.machine.reset_s = 100_000
    await fixture.serve()
    await fixture.release(release_time_s=200_000)
    await asyncio.sleep(STEP_LIMIT_S - 10)
    beat = fixture.report.beat
    await asyncio.sleep(HEARTBEAT_INTERVAL_S)
    assert fixture.report.beat > beat
    await asyncio.sleep(20)
    beat = fixture.report.beat
    await asyncio.sleep(1_000)
    assert fixture.report.beat == beat


async def test_heartbeats_continue_after_a_failed_one(fixture: AgentFixture) -> None:
    await fixture.serve()
    fixture.store.fails = lambda name: name == "beat"
    await asyncio.sleep(30)
    beat = fixture.report.beat
    fixture.store.fails = lambda _name: False
    await asyncio.sleep(30)
    assert fixture.report.beat >= beat + 5


async def test_heartbeats_continue_after_the_files_of_the_runner_could_not_be_used(
    fixture: AgentFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fixture.serve()

    def fail() -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(fixture.runner, "state", fail)
        # Less than the main loop waits: it does not read the files meanwhile.
        await asyncio.sleep(HEARTBEAT_INTERVAL_S + 1)
    failed = [why for action, why, _ in fixture.event_log.notes if action == "heartbeat-failed"]
    assert failed == ["[Errno 28] No space left on device"]
    beat = fixture.report.beat
    await asyncio.sleep(30)
    assert fixture.report.beat >= beat + 5


async def test_agent_fails_if_its_heartbeat_fails(fixture: AgentFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    await fixture.serve()

    def fail() -> NoReturn:
        raise AssertionError("a bug")

    monkeypatch.setattr(fixture.runner, "state", fail)
    assert fixture.task is not None
    with pytest.raises(AssertionError, match="a bug"):
        await asyncio.wait_for(fixture.task, HEARTBEAT_INTERVAL_S + 1)
    assert not fixture.machine.ended


# The runner -------------------------------------------------------------------------------------------------------


async def test_release_waits_for_a_running_job(fixture: AgentFixture) -> None:
    await fixture.serve()
    fixture.runner.become(busy=True)
    await fixture.release(release_time_s=60)
    for _ in range(10):
        await asyncio.sleep(50)
        await fixture.apply(Extend(report=fixture.report, extension_s=60, margin_s=0.0), Actor.RELEASE)
    assert fixture.log[-1] == "start"
    fixture.runner.become(busy=False)
    await until(lambda: fixture.signalled(CLEAN), within_s=1)


@pytest.mark.parametrize(
    ("status", "times", "least_s"),
    [
        pytest.param(RemovalStatus.FAILED, MAX_FAILED_REMOVALS - 1, 0.2 + 0.4 + 0.8 + 1.6, id="failed, with backoff"),
        pytest.param(RemovalStatus.UNREACHABLE, MAX_FAILED_REMOVALS + 3, 0, id="GitHub unreachable, without limit"),
        pytest.param(RemovalStatus.BUSY, 3 * MAX_FAILED_REMOVALS, 3 * MAX_FAILED_REMOVALS - 1, id="running job"),
    ],
)
async def test_removal_is_retried(fixture: AgentFixture, status: RemovalStatus, times: int, least_s: float) -> None:
    await fixture.serve()
    fixture.runner.removals = [status] * times
    await fixture.release()
    started = fixture.clock.monotonic()
    await until(lambda: fixture.signalled(CLEAN))
    assert fixture.log.count(f"remove {status.name}") == times
    assert fixture.clock.monotonic() - started >= least_s
    assert "stop" not in fixture.log[: fixture.log.index("remove REMOVED")]


async def test_repeatedly_failed_removal_is_signalled_and_the_runner_keeps_running(fixture: AgentFixture) -> None:
    await fixture.serve()
    fixture.runner.removals = [RemovalStatus.FAILED] * 100
    await fixture.release()
    await until(lambda: fixture.signalled(Signal.UD_REMOVE_REG_FAILED))
    await asyncio.sleep(60)
    assert fixture.log.count("remove FAILED") == MAX_FAILED_REMOVALS
    assert "stop" not in fixture.log
    assert "reset" not in fixture.log


async def test_exited_listener_is_restarted_with_backoff(fixture: AgentFixture) -> None:
    fixture.runner.exits = [2] * (MAX_STARTS - 1)
    started = fixture.clock.monotonic()
    await fixture.serve()
    assert fixture.log.count("start") == MAX_STARTS
    assert fixture.clock.monotonic() - started >= 0.2 + 0.4 + 0.8 + 1.6


async def test_runner_is_not_started_again_if_its_run_was_released_during_the_pause(fixture: AgentFixture) -> None:
    """The record that was read before the pause is too old to start a runner by it (seed 41001437)."""
    fixture.runner.exits = [2] * (MAX_STARTS - 1)
    fixture.start()
    await fixture.create()
    await until(lambda: fixture.signalled(Signal.UD_REG_OK))
    await fixture.commit()
    await until(lambda: fixture.log.count("start") == 3 and not fixture.runner.current.listening)
    await asyncio.sleep(0.2)
    await fixture.release()
    await until(lambda: fixture.signalled(CLEAN))
    assert fixture.log.count("start") == 3


@pytest.mark.parametrize(("code", "starts"), [(2, MAX_STARTS), (1, 1)])
async def test_listener_that_keeps_exiting_is_signalled(fixture: AgentFixture, code: int, starts: int) -> None:
    fixture.runner.exits = [code] * 100
    fixture.start()
    await fixture.create()
    await until(lambda: fixture.signalled(Signal.UD_REG_OK))
    await fixture.commit()
    await until(lambda: fixture.signalled(Signal.UD_REG_FAILED))
    await asyncio.sleep(60)
    assert fixture.log.count("start") == starts


async def test_release_during_registration_leaves_no_registration(fixture: AgentFixture) -> None:
    """The claim was rolled back before the agent read it: the agent cleans up."""
    await fixture.serve()
    await fixture.return_to_pool()
    await fixture.crash()
    await fixture.claim()
    await fixture.release()
    fixture.start()
    await until(lambda: fixture.signalled(CLEAN, 2))
    assert len(fixture.runner.configured) == 1
    assert fixture.record.state is State.RELEASING


async def test_attempt_counters_restart_with_each_assignment(fixture: AgentFixture) -> None:
    fixture.runner.exits = [2] * (MAX_STARTS - 1)
    await fixture.serve()
    await fixture.return_to_pool()
    await fixture.claim()
    fixture.runner.exits = [2] * (MAX_STARTS - 1)
    await until(lambda: fixture.signalled(Signal.UD_REG_OK, 2))
    await fixture.commit()
    await until(lambda: fixture.runner.current.listening)
    assert fixture.log.count("start") == 2 * MAX_STARTS
