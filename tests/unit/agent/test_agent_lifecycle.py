"""The agent's life cycle, and the same life cycle with the agent killed after each step."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from remuda.agent.decide import AgentAction
from remuda.agent.loop import DEAD_MAN_SLACK_S, SCRIPT_LIMIT_S
from remuda.domain.instance import State
from remuda.domain.signals import Signal
from remuda.domain.thresholds import HEARTBEAT_DEAD_AFTER_S
from remuda.domain.transitions import Actor, End, RetireReason
from remuda.ports.machine import ScriptStatus, StepResult
from tests.support.agents import ID, MARGIN_S, AgentFixture
from tests.support.records import assignment, at
from tests.support.virtual_time import until

FIRST, SECOND = assignment(1).runner_name, assignment(2).runner_name
CLEAN = Signal.UD_REMOVE_REG_REMOVE_RUN_OK

LIFE = [
    "script",
    f"register {FIRST}",
    "start",
    "remove REMOVED",
    "stop",
    "reset",
    f"register {SECOND}",
    "start",
    "remove REMOVED",
    "stop",
    "reset",
]


async def use(fixture: AgentFixture, epoch: int) -> None:
    """Register, commit, run a job, release, return to the pool."""
    await until(lambda: fixture.signalled(Signal.UD_REG_OK, epoch))
    assert not fixture.runner.current.listening
    await fixture.commit()
    await until(lambda: fixture.runner.current.listening)
    fixture.runner.become(busy=True)
    await asyncio.sleep(10)
    fixture.runner.become(busy=False)
    await fixture.return_to_pool()


async def life(fixture: AgentFixture) -> None:
    await fixture.create()
    await use(fixture, 1)
    await asyncio.sleep(60)
    await fixture.claim()
    await use(fixture, 2)


async def test_machine_serves_two_runs_and_ends(fixture: AgentFixture) -> None:
    task = fixture.start()
    await life(fixture)
    assert fixture.log == LIFE
    assert [each.runner_name for each in fixture.runner.configured] == [FIRST, SECOND]
    assert {each.token for each in fixture.runner.removed_with if each} == {"removal-t0ken"}
    assert fixture.record.uses == 2
    await fixture.apply(End(reason=RetireReason.GONE), Actor.REFRESH)
    assert await task == "record state is terminating"
    assert fixture.machine.ended == ["record state is terminating"]


async def test_listener_starts_for_its_assignment_and_refused_jobs_are_reported(fixture: AgentFixture) -> None:
    fixture.start()
    await fixture.create()
    fixture.runner.turned_away = "refused 1 foreign job: run 9 of evil/corp"
    await use(fixture, 1)
    assert [each.runner_name for each in fixture.runner.started] == [FIRST]
    report = await fixture.store.get_report(ID)
    assert report is not None
    assert "refused 1 foreign job: run 9 of evil/corp; " in report.detail
    assert ("job-refused", "refused 1 foreign job: run 9 of evil/corp") in [
        (action, why) for action, why, _ in fixture.event_log.notes
    ]


async def test_events_carry_instance_run_and_epoch(fixture: AgentFixture) -> None:
    fixture.start()
    await life(fixture)
    noted = fixture.event_log.notes
    assert {action for action, _, _ in noted} == {"state", "step", "reset"}
    assert {facts["instance_id"] for _, _, facts in noted} == {ID}
    assert all(why for _, why, _ in noted)
    seen = [(why, facts.get("epoch"), facts.get("run_id")) for action, why, facts in noted if action == "state"]
    assert seen[:3] == [
        ("record state is created", 1, "1234"),
        ("record state is running", 1, "1234"),
        ("record state is releasing", 1, "1234"),
    ]
    assert ("record state is idle", 1, "") in seen
    resets = [facts for action, _, facts in noted if action == "step" and facts["step"] == AgentAction.RESET.value]
    assert [(facts["epoch"], facts["run_id"]) for facts in resets] == [(1, "1234"), (2, "1235")]


async def test_waits_are_not_logged(fixture: AgentFixture) -> None:
    fixture.start()
    await life(fixture)
    logged = {facts["step"] for action, _, facts in fixture.event_log.notes if action == "step"}
    assert AgentAction.WAIT.value not in logged


@pytest.mark.parametrize("nth", range(1, 12))
@pytest.mark.parametrize("loses_answer", [False, True], ids=["lost", "applied but reported as failed"])
async def test_failed_store_call_only_delays(fixture: AgentFixture, nth: int, *, loses_answer: bool) -> None:
    """Each store call of the agent fails once: before it is applied, or after (the response is lost)."""
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
    assert [each for each in fixture.log if not each.startswith(("reset", "register"))] == [
        each for each in LIFE if not each.startswith(("reset", "register"))
    ]
    assert fixture.record.state is State.IDLE


@pytest.mark.parametrize("after", range(1, len(LIFE) + 1))
async def test_agent_continues_after_a_kill_at_any_step(fixture: AgentFixture, after: int) -> None:
    """The step is done, but not signalled: the new process decides from the disk and the record."""
    restarted = fixture.kill_after(after)
    fixture.start()
    await life(fixture)
    await restarted
    assert fixture.record.state is State.IDLE
    assert fixture.record.uses == 2
    assert not fixture.runner.current.listening
    assert fixture.runner.current.registered_as == ""
    again = {"register", "reset", "script"}
    once = [each for each in fixture.log if each.split()[0] not in again]
    assert once == [each for each in LIFE if each.split()[0] not in again]


async def test_waits_are_urgent_unless_a_job_runs(fixture: AgentFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may release a machine without a job at any time, and waits for the release."""
    urgent = [False]
    wait = fixture.control.wait_for_control

    async def noted(*given: Any, **named: Any) -> Any:
        urgent.append(named["urgent"])
        return await wait(*given, **named)

    monkeypatch.setattr(fixture.control, "wait_for_control", noted)
    await fixture.serve()
    await asyncio.sleep(1)
    assert urgent[-1], "it waits for a job"
    fixture.runner.become(busy=True)
    await asyncio.sleep(1)
    assert not urgent[-1]
    fixture.runner.become(busy=False)
    await asyncio.sleep(1)
    assert urgent[-1]


@pytest.mark.parametrize("state", ["created", "registered", "listening", "busy", "clean"])
async def test_restart_during_a_wait_repeats_no_work(fixture: AgentFixture, state: str) -> None:
    fixture.start()
    await fixture.create()
    await until(lambda: fixture.signalled(Signal.UD_REG_OK))
    if state != "registered":
        await fixture.commit()
        await until(lambda: fixture.runner.current.listening)
    if state == "busy":
        fixture.runner.become(busy=True)
        await fixture.release()
    if state == "clean":
        await fixture.release()
        await until(lambda: fixture.signalled(CLEAN))
        await fixture.pool()
    await asyncio.sleep(5)
    done = list(fixture.log)
    await fixture.restart()
    await asyncio.sleep(60)
    assert fixture.log == done
    assert fixture.agent_runs


# Signals and their details ----------------------------------------------------------------------------------------


async def test_signal_contains_the_duration_of_the_machines_work(fixture: AgentFixture) -> None:
    fixture.machine.reset_s = 2.5
    fixture.start()
    await fixture.create()
    await until(lambda: fixture.signalled(Signal.UD_REG_OK))
    assert fixture.report.duration_s == 0.0
    await fixture.commit()
    await until(lambda: fixture.runner.current.listening)
    await fixture.release()
    await until(lambda: fixture.signalled(CLEAN))
    assert fixture.report.duration_s == pytest.approx(2.5)


async def test_script_failure_after_the_record_is_signalled_with_its_output(fixture: AgentFixture) -> None:
    fixture.machine.script = StepResult(ok=False, detail="no such package")
    await fixture.create()
    fixture.start()
    await until(lambda: fixture.signalled(Signal.UD_FAILED))
    assert "no such package" in fixture.report.detail
    assert fixture.machine.memory.script is ScriptStatus.FAILED
    assert fixture.log == ["script"]


@pytest.mark.parametrize("restart", [False, True])
async def test_script_failure_before_the_record_is_signalled_with_its_output(
    fixture: AgentFixture, *, restart: bool
) -> None:
    fixture.machine.script = StepResult(ok=False, detail="no such package")
    fixture.start()
    await until(lambda: fixture.machine.memory.script is ScriptStatus.FAILED)
    if restart:
        await fixture.restart()
    await fixture.create()
    await until(lambda: fixture.signalled(Signal.UD_FAILED))
    assert "no such package" in fixture.report.detail


async def test_script_runs_once_per_machine(fixture: AgentFixture) -> None:
    fixture.start()
    await life(fixture)
    await fixture.restart()
    await asyncio.sleep(30)
    assert fixture.log.count("script") == 1


async def test_heartbeat_continues_while_the_script_runs(fixture: AgentFixture) -> None:
    """A script has its own time limit, which is longer than that of other steps."""
    fixture.machine.script_s = SCRIPT_LIMIT_S - 60
    fixture.start()
    await fixture.create()
    while fixture.machine.memory.script is not ScriptStatus.OK:
        await asyncio.sleep(HEARTBEAT_DEAD_AFTER_S)
        assert fixture.report.beat_at is not None
        silent_s = (fixture.clock.now() - fixture.report.beat_at).total_seconds()
        assert silent_s < HEARTBEAT_DEAD_AFTER_S


async def test_heartbeat_stops_if_the_script_hangs(fixture: AgentFixture) -> None:
    fixture.machine.script_s = 10 * SCRIPT_LIMIT_S
    fixture.start()
    await fixture.create()
    await asyncio.sleep(SCRIPT_LIMIT_S + 2 * HEARTBEAT_DEAD_AFTER_S)
    beats = fixture.report.beat
    await asyncio.sleep(HEARTBEAT_DEAD_AFTER_S)
    assert fixture.report.beat == beats


async def test_failed_registration_is_signalled_immediately(fixture: AgentFixture) -> None:
    fixture.runner.configure_outcome = StepResult(ok=False, detail="credential refused: 401")
    fixture.start()
    await fixture.create()
    await until(lambda: fixture.signalled(Signal.UD_REG_FAILED), within_s=1)
    assert "credential refused: 401" in fixture.report.detail
    await asyncio.sleep(60)
    assert len(fixture.runner.configured) == 1


async def test_failed_reset_is_signalled_and_not_repeated(fixture: AgentFixture) -> None:
    fixture.machine.reset_outcome = StepResult(ok=False, detail="2 processes left")
    await fixture.serve()
    await fixture.release()
    await until(lambda: fixture.signalled(Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED))
    assert "2 processes left" in fixture.report.detail
    await asyncio.sleep(60)
    assert fixture.log.count("reset") == 1


async def test_machine_waits_for_a_late_record(fixture: AgentFixture) -> None:
    fixture.start()
    await asyncio.sleep(200)
    assert fixture.log == ["script"]
    assert fixture.report.beat > 10
    await fixture.create()
    await until(lambda: fixture.signalled(Signal.UD_REG_OK), within_s=1)


async def test_dead_man_timer_follows_thresholds_and_fires_after_the_agents_own_end(fixture: AgentFixture) -> None:
    await fixture.serve(max_runtime_s=600)
    slack_s = MARGIN_S + DEAD_MAN_SLACK_S
    assert fixture.machine.armed[0] == at(300 + slack_s)
    assert (fixture.machine.armed[-1] - fixture.record.threshold).total_seconds() == slack_s
    assert fixture.machine.memory.threshold == fixture.record.threshold
    await fixture.restart()
    armed = fixture.machine.armed[-1]
    fixture.machine.armed.clear()
    fixture.store.down = True
    await asyncio.sleep(1)
    assert fixture.machine.armed == [armed]
