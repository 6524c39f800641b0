"""Events in, one result or one sentence out. What it does on servers is in acceptance/test_lambda.py."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from remuda.domain.errors import InvariantViolated, Partial, TimedOut, UserError
from remuda.entrypoints import lambda_handler
from remuda.entrypoints.lambda_handler import COMMANDS, RESERVE_S, Order, Outcome, handler, parse


class Invocation:
    aws_request_id = "r-1"

    def __init__(self, remaining_s: float = 60.0) -> None:
        self._remaining_s = remaining_s

    def get_remaining_time_in_millis(self) -> int:
        return int(self._remaining_s * 1_000)


@pytest.fixture
def does(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts something else in the place of refresh."""

    def plant(work: Any) -> None:
        monkeypatch.setattr(lambda_handler, "COMMANDS", {**COMMANDS, "refresh": work})

    return plant


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("event", "order"),
    [
        ({"command": "refresh"}, Order(command="refresh")),
        ({"command": "refresh", "sweep_only": True}, Order(command="refresh", sweep_only=True)),
        ({"command": "scale-down", "dry_run": True}, Order(command="scale-down", dry_run=True)),
        (
            {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {"command": "refresh"}},
            Order(command="refresh"),
        ),
    ],
)
def test_events(event: Any, order: Order):
    assert parse(event) == order


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({}, "the event has no command"),
        (None, "the event has no command"),
        (["refresh"], "the event has no command"),
        ({"source": "aws.events", "detail": {}}, "the event has no command"),
        ({"command": "reboot"}, "command is 'reboot'"),
        ({"command": 7}, "command is '7'"),
        ({"command": "refresh", "sweep_only": "yes"}, "sweep_only is 'yes'"),
    ],
)
def test_events_that_say_nothing_of_use(event: Any, says: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(UserError, match=says):
        handler(event, Invocation())
    (line,) = lines(capsys)
    assert (line["action"], line["request"]) == ("failed", "r-1")


def test_the_result_is_returned_and_logged(does: Any, capsys: pytest.CaptureFixture[str]):
    async def work(_loaded: Any, journal: Any, _order: Order) -> Outcome:
        journal.note("end-expired", "its time is up", instance_id="i-1", facts=[1], nothing=None)
        return Outcome(document={"at": datetime(2026, 1, 1, tzinfo=UTC), "terminated": ["i-1"]})

    does(work)
    document = handler({"command": "refresh"}, Invocation())
    assert document == {"at": "2026-01-01 00:00:00+00:00", "terminated": ["i-1"]}
    first, last = lines(capsys)
    assert (first["action"], first["why"], first["instance_id"]) == ("end-expired", "its time is up", "i-1")
    assert (last["action"], last["result"]) == ("refresh-done", document)


def test_what_was_not_done_fails_the_invocation_after_the_rest_is_logged(does: Any, capsys: pytest.CaptureFixture[str]):
    async def work(*_: Any) -> Outcome:
        return Outcome(document={"errors": ["machines: no"]}, errors=("machines: no",))

    does(work)
    with pytest.raises(Partial, match="1 parts were not done; the first: machines: no"):
        handler({"command": "refresh"}, Invocation())
    assert lines(capsys)[-1]["result"] == {"errors": ["machines: no"]}


def test_work_is_cut_before_the_functions_time_is_up(does: Any):
    closed = []

    async def work(*_: Any) -> Outcome:
        try:
            await asyncio.Event().wait()
        finally:
            closed.append(True)
        raise AssertionError

    does(work)
    with pytest.raises(TimedOut, match="refresh was cut"):
        handler({"command": "refresh"}, Invocation(RESERVE_S + 0.05))
    assert closed


def test_without_time_nothing_is_begun_for_long(does: Any):
    async def work(*_: Any) -> Outcome:
        await asyncio.Event().wait()
        raise AssertionError

    does(work)
    with pytest.raises(TimedOut):
        handler({"command": "refresh"}, Invocation(1.0))


def test_a_time_out_of_the_work_itself_is_no_cut(does: Any):
    async def work(*_: Any) -> Outcome:
        raise TimeoutError("theirs")

    does(work)
    with pytest.raises(InvariantViolated, match="TimeoutError"):
        handler({"command": "refresh"}, Invocation())


def test_bad_settings_are_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("REMUDA_POOL", "No Such Pool!")
    with pytest.raises(UserError, match="pool is") as refused:
        handler({"command": "refresh"}, Invocation())
    assert refused.value.__suppress_context__
    assert len(lines(capsys)) == 1


def test_a_credential_shows_in_no_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("REMUDA_GITHUB_TOKEN", "arn:aws:s3:::ghp_s3cret")
    with pytest.raises(UserError) as refused:
        handler({"command": "refresh"}, Invocation())
    assert "ghp_s3cret" not in str(refused.value) + capsys.readouterr().out
