"""Directed schedules: a sample, what they catch, and the worlds that they are made of."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from remuda.controlplane import operator
from remuda.controlplane.demand.listener import ListenerService
from remuda.controlplane.demand.sets import SetState
from remuda.domain.instance import Instance
from simulation.campaign import simulate
from simulation.holds import MAX_STOP_S
from simulation.schedules import STAGES, Schedule, Stage, Way, all_schedules, calls_of, find_schedule, run_schedules

#: One of so many schedules of the sample is run; `make simulate` runs all.
SHARE = 6


@pytest.mark.timeout(600)
def test_no_invariant_is_violated_while_a_call_is_held():
    schedules = all_schedules(complete=False)[::SHARE]
    results = list(run_schedules(schedules, workers=2))
    assert len(results) == len(schedules) > 225
    assert not [result.name for result in results if not result.was_held]
    assert not [f"{result.name}: {result.violation}" for result in results if result.violation]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_the_calls_of_a_stage_are_the_same_each_time(stage: Stage):
    first = simulate(stage.plan)
    assert not first.violation
    assert first.calls == simulate(stage.plan).calls
    held = {call.process for call in calls_of(stage)}
    assert not [name for name in stage.held if not any(process.startswith(name) for process in held)]


def schedule(meanwhile: str, way: Way) -> Schedule:
    stage = next(item for item in STAGES if item.name == "runs, second")
    call = next(item for item in calls_of(stage) if item.process == "provision 2.1" and item.operation == "apply")
    return Schedule(stage=stage, call=call, meanwhile=meanwhile, way=way)


@pytest.mark.parametrize("way", Way)
def test_a_held_process_goes_on_after_the_operation_of_another_one(way: Way):
    chosen = schedule("drain", way)
    assert way is Way.LATE or find_schedule(str(chosen)) == chosen
    result = simulate(chosen.plan, keep_trace=True)
    lines = [(line.source, line.text) for line in result.lines]
    held = next(at for at, line in enumerate(lines) if line[1].startswith("held "))
    ended = lines.index((f"operator {chosen.stage.meanwhile['drain'][0].number}", "ended: done"))  # type: ignore[union-attr]
    goes_on = lines.index(("provision 2.1", "goes on"))
    assert held < ended < goes_on
    between = {source for source, _ in lines[held + 1 : goes_on]}
    assert "provision 2.1" not in between or way is not Way.STOPPED
    applied = [at for at, line in enumerate(lines) if line[0] == "record" and at > held]
    assert applied
    assert result.lines[goes_on].at - result.lines[held].at < MAX_STOP_S


def test_an_operation_that_waits_for_the_held_process_does_not_hold_it_for_ever():
    """The release waits for the agent, until the limit of a hold."""
    stage = next(item for item in STAGES if item.name == "runs")
    call = next(item for item in calls_of(stage) if item.process == "agent 0001.1" and item.operation == "reset")
    result = simulate(Schedule(stage=stage, call=call, meanwhile="release", way=Way.WAITS).plan)
    assert result.held == call
    assert not result.violation


# What the stages alone show, with one mistake each -------------------------------------------------------------------


def violation(name: str) -> str:
    found = simulate(next(item for item in STAGES if item.name == name).plan).violation
    return "" if found is None else f"{found.invariant}: {found.text}"


def test_a_listener_that_nothing_wakes_is_found(monkeypatch: pytest.MonkeyPatch):
    """The next regular decision, a minute later, would heal it."""
    monkeypatch.setattr(SetState, "wake", lambda _state: None)
    assert violation("set").startswith("L9: listener 1.1 has not begun to")


def test_a_result_that_no_record_ever_supported_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operator, "_skip_reason", lambda *_: "already retired")
    assert violation("drain of idle").startswith("R2: operator 1 says that")


def test_a_message_about_another_epoch_is_found(monkeypatch: pytest.MonkeyPatch):
    message = Instance.message
    monkeypatch.setattr(Instance, "message", lambda item: replace(message(item), epoch=item.epoch + 1))
    assert violation("runs").startswith("S18: release 1.1 sends a message about")


def test_a_set_that_is_removed_and_never_deleted_is_found(monkeypatch: pytest.MonkeyPatch):
    async def hang(_self: ListenerService, _served: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ListenerService, "_delete_when_empty", hang)
    assert violation("lost and removed").startswith("D9: set one of octo/repo is not configured, and exists on GitHub")
