"""The agent with failures of the store, the runner and the clock."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from remuda.agent.decide import MAX_REMOVALS, MAX_STARTS
from remuda.agent.loop import STEP_LIMIT_S
from remuda.domain.instance import State
from remuda.domain.signals import Signal
from remuda.domain.thresholds import HEARTBEAT_INTERVAL_S
from remuda.domain.transitions import Actor, Extend, Renew
from remuda.ports.machine import AgentState, ScriptStatus
from remuda.ports.runner import RemovalStatus
from simulation.loop import VirtualClock
from tests.support.agents import ID, MARGIN_S, Stable
from tests.support.records import at
from tests.support.virtual_time import run_virtual, until

CLEAN = Signal.UD_REMOVE_REG_REMOVE_RUN_OK


async def running(stable: Stable, max_runtime_s: float = 1_800.0) -> None:
    stable.start()
    await stable.create()
    await until(lambda: stable.signalled(Signal.UD_REG_OK))
    await stable.commit(max_runtime_s)
    await until(lambda: stable.runner.current.listening)


# The store --------------------------------------------------------------------------------------------------------


def test_unreachable_store_last_threshold_applies() -> None:
    async def scenario() -> None:
        stable = Stable()
        await running(stable, max_runtime_s=100)
        threshold = stable.record.threshold
        stable.store.down = True
        assert stable.task is not None
        why = await stable.task
        assert why == "threshold passed and the store is unreachable"
        late = stable.clock.now() - threshold
        assert timedelta(seconds=MARGIN_S) <= late < timedelta(seconds=MARGIN_S + 6)

    run_virtual(scenario())


def test_last_threshold_applies_after_a_restart() -> None:
    async def scenario() -> None:
        stable = Stable()
        stable.machine.memory = AgentState(script=ScriptStatus.OK, threshold=at(50))
        stable.store.down = True
        why = await stable.start()
        assert why == "threshold passed and the store is unreachable"
        assert stable.clock.now() >= at(50 + MARGIN_S)
        assert stable.machine.ended == [why]

    run_virtual(scenario())


def test_without_threshold_the_agent_waits_for_the_store() -> None:
    async def scenario() -> None:
        stable = Stable()
        stable.store.down = True
        task = stable.start()
        await asyncio.sleep(7_200)
        assert not task.done()
        stable.store.down = False
        await stable.create()
        await until(lambda: stable.signalled(Signal.UD_REG_OK), within_s=10)
        await stable.crash()

    run_virtual(scenario())


def test_job_continues_while_the_store_is_unreachable() -> None:
    async def scenario() -> None:
        stable = Stable()
        await running(stable)
        stable.runner.become(busy=True)
        stable.store.down = True
        await asyncio.sleep(600)
        stable.store.down = False
        await asyncio.sleep(10)
        assert stable.runner.current.busy
        assert stable.log.count("start") == 1
        assert stable.report.busy
        await stable.crash()

    run_virtual(scenario())


def test_requests_to_an_unreachable_store_back_off() -> None:
    async def scenario() -> None:
        stable = Stable()
        stable.store.down = True
        stable.start()
        await asyncio.sleep(600)
        asked = [action for action, _, _ in stable.event_log.notes if action == "step-failed"]
        assert 100 < len(asked) < 150
        await stable.crash()

    run_virtual(scenario())


# The end ----------------------------------------------------------------------------------------------------------


def test_record_is_read_again_before_the_end() -> None:
    """The threshold was extended after the agent's last read, so the agent continues."""

    async def scenario() -> None:
        stable = Stable()
        await running(stable, max_runtime_s=100)
        await stable.release(release_time_s=20)
        await until(lambda: stable.signalled(CLEAN))
        await stable.pool()
        await asyncio.sleep(1)

        def renew(name: str) -> bool:
            if name == "get" and stable.record.threshold < stable.clock.now():
                later = stable.clock.now() + timedelta(seconds=500)
                stable.database.instances[ID] = replace(stable.record, threshold=later)
            return False

        stable.store.fails = renew
        await asyncio.sleep(600)
        assert stable.task is not None
        assert not stable.task.done()
        await stable.crash()

    run_virtual(scenario())


def test_renewed_threshold_applies() -> None:
    async def scenario() -> None:
        stable = Stable()
        await running(stable)
        await stable.release()
        await until(lambda: stable.signalled(CLEAN))
        await stable.pool()
        for _ in range(5):
            await asyncio.sleep(400)
            await stable.apply(Renew(until=stable.clock.now() + timedelta(seconds=420)), Actor.SCALE_DOWN)
        assert stable.task is not None
        assert not stable.task.done()
        assert await stable.task == "threshold of state idle passed"
        late = stable.clock.now() - stable.record.threshold
        assert timedelta(seconds=MARGIN_S) <= late < timedelta(seconds=MARGIN_S + 1)

    run_virtual(scenario())


def test_machine_without_record_ends_at_its_last_threshold() -> None:
    async def scenario() -> None:
        stable = Stable()
        await running(stable, max_runtime_s=100)
        threshold = stable.record.threshold
        del stable.database.instances[ID]
        assert stable.task is not None
        assert await stable.task == "threshold passed and the record is gone"
        assert stable.clock.now() >= threshold + timedelta(seconds=MARGIN_S)

    run_virtual(scenario())


@pytest.mark.parametrize("skew_s", [-30.0, 30.0])
def test_clock_skew_within_the_margin_is_tolerated(skew_s: float) -> None:
    async def scenario() -> None:
        stable = Stable()
        stable.clock = VirtualClock(skew_s=skew_s)
        await running(stable)
        await stable.release()
        await until(lambda: stable.signalled(CLEAN))
        assert stable.log[-3:] == ["remove REMOVED", "stop", "reset"]
        await stable.crash()

    run_virtual(scenario())


# The heartbeat ----------------------------------------------------------------------------------------------------


def test_heartbeat_is_regular_and_reports_the_runner() -> None:
    async def scenario() -> None:
        stable = Stable()
        await running(stable)
        await asyncio.sleep(1)
        before = stable.report.beat
        await asyncio.sleep(100)
        assert stable.report.beat - before == pytest.approx(100 / HEARTBEAT_INTERVAL_S, abs=1)
        assert (stable.report.listening, stable.report.busy, stable.report.version) == (True, False, "1")
        stable.runner.become(busy=True)
        await asyncio.sleep(0.1)
        assert stable.report.busy
        await stable.crash()

    run_virtual(scenario())


def test_spot_notice_is_reported_and_the_job_continues() -> None:
    async def scenario() -> None:
        stable = Stable()
        await running(stable)
        stable.runner.become(busy=True)
        stable.machine.notice = "terminate at noon"
        await asyncio.sleep(HEARTBEAT_INTERVAL_S + 0.1)
        assert stable.report.notice == "terminate at noon"
        assert stable.log[-1] == "start"
        assert stable.runner.current.busy
        await stable.crash()

    run_virtual(scenario())


def test_heartbeat_of_a_hung_agent_stops() -> None:
    async def scenario() -> None:
        stable = Stable()
        stable.machine.reset_s = 100_000
        await running(stable)
        await stable.release(release_time_s=200_000)
        await asyncio.sleep(STEP_LIMIT_S - 10)
        beat = stable.report.beat
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        assert stable.report.beat > beat
        await asyncio.sleep(20)
        beat = stable.report.beat
        await asyncio.sleep(1_000)
        assert stable.report.beat == beat
        await stable.crash()

    run_virtual(scenario())


def test_heartbeats_continue_after_a_failed_one() -> None:
    async def scenario() -> None:
        stable = Stable()
        await running(stable)
        stable.store.fails = lambda name: name == "beat"
        await asyncio.sleep(30)
        beat = stable.report.beat
        stable.store.fails = lambda _name: False
        await asyncio.sleep(30)
        assert stable.report.beat >= beat + 5
        await stable.crash()

    run_virtual(scenario())


# The runner -------------------------------------------------------------------------------------------------------


def test_release_waits_for_a_running_job() -> None:
    async def scenario() -> None:
        stable = Stable()
        await running(stable)
        stable.runner.become(busy=True)
        await stable.release(release_time_s=60)
        for _ in range(10):
            await asyncio.sleep(50)
            await stable.apply(Extend(report=stable.report, extension_s=60, margin_s=0.0), Actor.RELEASE)
        assert stable.log[-1] == "start"
        stable.runner.become(busy=False)
        await until(lambda: stable.signalled(CLEAN), within_s=1)
        await stable.crash()

    run_virtual(scenario())


def test_removal_rejected_for_a_running_job_does_not_count_as_failed() -> None:
    async def scenario() -> None:
        stable = Stable()
        await running(stable)
        refusals = 3 * MAX_REMOVALS
        stable.runner.removals = [RemovalStatus.BUSY] * refusals
        await stable.release()
        started = stable.clock.monotonic()
        await until(lambda: stable.signalled(CLEAN))
        assert stable.log.count("remove BUSY") == refusals
        assert stable.clock.monotonic() - started >= refusals - 1
        assert "stop" not in stable.log[: stable.log.index("remove REMOVED")]
        await stable.crash()

    run_virtual(scenario())


def test_failed_removal_is_retried_with_backoff() -> None:
    async def scenario() -> None:
        stable = Stable()
        await running(stable)
        stable.runner.removals = [RemovalStatus.FAILED] * (MAX_REMOVALS - 1)
        await stable.release()
        started = stable.clock.monotonic()
        await until(lambda: stable.signalled(CLEAN))
        assert stable.log.count("remove FAILED") == MAX_REMOVALS - 1
        assert stable.clock.monotonic() - started >= 0.2 + 0.4 + 0.8 + 1.6
        await stable.crash()

    run_virtual(scenario())


def test_repeatedly_failed_removal_is_signalled_and_the_runner_keeps_running() -> None:
    async def scenario() -> None:
        stable = Stable()
        await running(stable)
        stable.runner.removals = [RemovalStatus.FAILED] * 100
        await stable.release()
        await until(lambda: stable.signalled(Signal.UD_REMOVE_REG_FAILED))
        await asyncio.sleep(60)
        assert stable.log.count("remove FAILED") == MAX_REMOVALS
        assert "stop" not in stable.log
        assert "reset" not in stable.log
        await stable.crash()

    run_virtual(scenario())


def test_removal_is_retried_without_limit_while_github_is_unreachable() -> None:
    async def scenario() -> None:
        stable = Stable()
        await running(stable)
        stable.runner.removals = [RemovalStatus.UNREACHABLE] * (MAX_REMOVALS + 3)
        await stable.release()
        await until(lambda: stable.signalled(CLEAN))
        assert stable.log.count("remove UNREACHABLE") == MAX_REMOVALS + 3
        await stable.crash()

    run_virtual(scenario())


def test_exited_listener_is_restarted_with_backoff() -> None:
    async def scenario() -> None:
        stable = Stable()
        stable.runner.exits = [2] * (MAX_STARTS - 1)
        started = stable.clock.monotonic()
        await running(stable)
        assert stable.log.count("start") == MAX_STARTS
        assert stable.clock.monotonic() - started >= 0.2 + 0.4 + 0.8 + 1.6
        await stable.crash()

    run_virtual(scenario())


@pytest.mark.parametrize(("code", "starts"), [(2, MAX_STARTS), (1, 1)])
def test_listener_that_keeps_exiting_is_signalled(code: int, starts: int) -> None:
    async def scenario() -> None:
        stable = Stable()
        stable.runner.exits = [code] * 100
        stable.start()
        await stable.create()
        await until(lambda: stable.signalled(Signal.UD_REG_OK))
        await stable.commit()
        await until(lambda: stable.signalled(Signal.UD_REG_FAILED))
        await asyncio.sleep(60)
        assert stable.log.count("start") == starts
        await stable.crash()

    run_virtual(scenario())


def test_release_during_registration_leaves_no_registration() -> None:
    """The claim was rolled back before the agent read it: the agent cleans up."""

    async def scenario() -> None:
        stable = Stable()
        await running(stable)
        await stable.release()
        await until(lambda: stable.signalled(CLEAN))
        await stable.pool()
        await stable.crash()
        await stable.claim()
        await stable.release()
        stable.start()
        await until(lambda: stable.signalled(CLEAN, 2))
        assert len(stable.runner.configured) == 1
        assert stable.record.state is State.RELEASING
        await stable.crash()

    run_virtual(scenario())


def test_attempt_counters_restart_with_each_assignment() -> None:
    async def scenario() -> None:
        stable = Stable()
        stable.runner.exits = [2] * (MAX_STARTS - 1)
        await running(stable)
        await stable.release()
        await until(lambda: stable.signalled(CLEAN))
        await stable.pool()
        await stable.claim()
        stable.runner.exits = [2] * (MAX_STARTS - 1)
        await until(lambda: stable.signalled(Signal.UD_REG_OK, 2))
        await stable.commit()
        await until(lambda: stable.runner.current.listening)
        assert stable.log.count("start") == 2 * MAX_STARTS
        await stable.crash()

    run_virtual(scenario())
