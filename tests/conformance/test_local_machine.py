"""The machine port of a local machine: its state, and its pipe to the supervisor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from remuda.adapters.local import folder as files
from remuda.adapters.local.machine import LocalMachine
from remuda.adapters.local.supervisor import FD_VARIABLE
from remuda.adapters.system.clock import SystemClock
from remuda.domain.errors import Unavailable, UserError
from remuda.ports.machine import AgentState, Machine, ScriptStatus, StepResult
from tests.support.records import NOW


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The supervisor's end of its pipe to the agent."""
    supervisor, agent = os.pipe()
    monkeypatch.setenv(FD_VARIABLE, str(agent))
    yield supervisor
    os.close(agent)
    os.close(supervisor)


async def clean() -> StepResult:
    return StepResult(ok=True, detail="clean")


def open_machine(folder: Path) -> Machine:
    return LocalMachine(folder=folder, clock=SystemClock(), reset=clean)


@pytest.mark.usefixtures("pipe")
def test_saved_state_is_loaded(tmp_path: Path) -> None:
    assert open_machine(tmp_path).load() == AgentState()
    state = AgentState(script=ScriptStatus.OK, script_detail="fine", threshold=NOW)
    open_machine(tmp_path).save(state)
    assert open_machine(tmp_path).load() == state


@pytest.mark.usefixtures("pipe")
@pytest.mark.parametrize("text", ["{", "[]", '{"threshold": "soon"}'])
def test_unreadable_state_is_an_empty_one(tmp_path: Path, text: str) -> None:
    (tmp_path / files.AGENT_STATE).write_text(text)
    assert open_machine(tmp_path).load() == AgentState()


async def test_supervisor_gets_one_line_per_request(tmp_path: Path, pipe: int) -> None:
    machine = open_machine(tmp_path)
    machine.set_dead_man_timer(NOW + timedelta(seconds=1.5))
    await machine.end("threshold\npassed")
    at, end = os.read(pipe, 4096).decode().splitlines()
    assert at == f"dead-man-timer {NOW.timestamp() + 1.5:.3f}"
    assert end == "end threshold passed"


@pytest.mark.usefixtures("pipe")
async def test_identity_needs_a_record(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot read the machine's record"):
        await open_machine(tmp_path).identity()


@pytest.mark.parametrize("value", ["", "x", "99999"])
def test_agent_started_by_hand_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(FD_VARIABLE, value)
    with pytest.raises(UserError, match=FD_VARIABLE):
        open_machine(tmp_path)
