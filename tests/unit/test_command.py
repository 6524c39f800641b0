"""How a command ends: its exit code, and one sentence or one document whatever went wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from remuda.domain.errors import (
    CapacityError,
    Conflict,
    IllegalTransition,
    Interrupted,
    InvariantViolated,
    NotFound,
    RemudaError,
    Throttled,
    TimedOut,
    Unavailable,
    UserError,
)
from remuda.domain.instance import State
from remuda.domain.signals import Signal
from remuda.entrypoints.output import Output
from remuda.entrypoints.run import command
from remuda.entrypoints.views import instance_document
from support.builders import in_state, report

#: The documented exit codes.
CODES: list[tuple[RemudaError, int]] = [
    (UserError("x"), 2),
    (CapacityError("x"), 3),
    (Conflict("x"), 4),
    (NotFound("x"), 4),
    (Unavailable("x"), 4),
    (Throttled("x"), 4),
    (TimedOut("x"), 4),
    (Interrupted("x"), 130),
    (InvariantViolated("x"), 70),
    (IllegalTransition("x"), 70),
]


def failing(error: BaseException) -> Any:
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(("error", "code"), CODES, ids=lambda value: type(value).__name__)
def test_each_error_has_its_exit_code_and_its_document(
    error: RemudaError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(Output(as_json=True), failing(error)) == code
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"]["type"] == type(error).__name__
    assert shown.err == "remuda: x\n"


def test_an_error_for_people_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    error = UserError("dir 'a\nb' [bold]is[/bold] wrong", field="--dir", fix="name another")
    assert command(Output(as_json=False, quiet=True), failing(error)) == 2
    assert capsys.readouterr() == ("", "remuda: dir 'a b' [bold]is[/bold] wrong; name another\n")


def test_a_bug_is_one_sentence_with_its_place_and_exits_70(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(Output(as_json=True), failing(KeyError("lost"))) == 70
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert len(shown.err.splitlines()) == 1
    message = json.loads(shown.out)["error"]["message"]
    assert message.startswith("a bug: KeyError: 'lost' (test_command.py:")


def test_an_interrupt_before_there_is_anything_to_clean_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(Output(as_json=False), failing(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_a_result_is_one_document_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(as_json=True, quiet=True)

    def work() -> int:
        output.say("for people")
        output.result({"run_id": "1"})
        return 0

    assert command(output, work) == 0
    shown = capsys.readouterr()
    assert (json.loads(shown.out), shown.err) == ({"run_id": "1"}, "")


@pytest.mark.parametrize("state", State)
def test_no_record_is_shown_with_its_credential(state: State) -> None:
    text = json.dumps(instance_document(in_state(state)))
    assert "t0ken" not in text
    assert "credential" not in text
    assert "t0ken" not in repr(in_state(state))
    assert "t0ken" not in repr(report(Signal.UD_REG_OK))


SIGNALLED = """
import asyncio, os, signal, sys
from remuda.domain.errors import Interrupted
from remuda.entrypoints.run import run_async

async def work():
    try:
        await asyncio.sleep(60)
    finally:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        await asyncio.sleep(0.2)
        print("given back", flush=True)

async def begin():
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
    await work()

try:
    run_async(begin)
except Interrupted as error:
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(("then", "finishes"), [("SIGTERM", True), ("SIGINT", False)])
def test_only_the_same_signal_again_cuts_the_giving_back(then: str, *, finishes: bool) -> None:
    done = subprocess.run([sys.executable, "-c", SIGNALLED, then], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")
    assert ("given back" in done.stdout) == finishes
