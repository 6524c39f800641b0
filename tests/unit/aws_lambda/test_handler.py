"""Events in, one result or one sentence out. What it does on servers is in acceptance/test_lambda.py."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.aws_lambda import handler as lambda_handler
from remuda.aws_lambda.emf import Measure, emf_line
from remuda.aws_lambda.handler import COMMANDS, RESERVE_S, Order, Outcome, handler, parse
from remuda.domain.errors import InvariantViolated, Partial, TimedOut, UserError
from tests.support.emf import check_emf


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
    """The log, without the line of metrics that ends it."""
    *log, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    check_emf(last)
    return log


def measured(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The metrics of the one invocation."""
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (line,) = [each for each in found if "_aws" in each]
    check_emf(line)
    (directive,) = line["_aws"]["CloudWatchMetrics"]
    return {item["Name"]: line[item["Name"]] for item in directive["Metrics"]}


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
        ({"command": 7}, "command is 7"),
        ({"command": "refresh", "sweep_only": "yes"}, "sweep_only is 'yes'"),
    ],
)
def test_events_that_say_nothing_of_use(event: Any, says: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(UserError, match=says):
        handler(event, Invocation())
    (line,) = lines(capsys)
    assert (line["event"], line["level"], line["request"]) == ("failed", "warning", "r-1")


def test_the_result_is_returned_and_logged(does: Any, capsys: pytest.CaptureFixture[str]):
    async def work(_loaded: Any, event_log: Any, *_: Any) -> Outcome:
        event_log.record("end-expired", "its time is up", instance_id="i-1", facts=[1], nothing=None)
        return Outcome(document={"at": datetime(2026, 1, 1, tzinfo=UTC), "terminated": ["i-1"]})

    does(work)
    document = handler({"command": "refresh"}, Invocation())
    assert document == {"at": "2026-01-01 00:00:00+00:00", "terminated": ["i-1"]}
    first, last = lines(capsys)
    assert (first["event"], first["reason"], first["instance_id"]) == ("end-expired", "its time is up", "i-1")
    assert (last["event"], last["result"]) == ("refresh-done", document)


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
    with pytest.raises(UserError, match="REMUDA_POOL must be") as refused:
        handler({"command": "refresh"}, Invocation())
    assert refused.value.__suppress_context__
    assert len(lines(capsys)) == 1


def test_a_credential_shows_in_no_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("REMUDA_GITHUB_TOKEN", "arn:aws:s3:::ghp_s3cret")
    with pytest.raises(UserError) as refused:
        handler({"command": "refresh"}, Invocation())
    assert "ghp_s3cret" not in str(refused.value) + capsys.readouterr().out


# Metrics


def test_an_invocation_in_numbers(does: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    async def work(_loaded: Any, event_log: Any, _order: Order, calls: Any) -> Outcome:
        for cause in ("expired", "expired", "spot-notice", "i-0123 said so"):
            event_log.record("end-idle", "its time is up at 12:31", instance_id="i-0123", run_id="77", cause=cause)
        calls.add("github", "GET runners", 4)
        calls.fail("github", "GET runners")
        calls.add("dynamodb", "Query", 9)
        return Outcome(document={}, counts={"InstancesIdle": 3})

    monkeypatch.setenv("REMUDA_POOL", "ci")
    does(work)
    handler({"command": "refresh"}, Invocation())
    text = capsys.readouterr().out
    last = json.loads(text.splitlines()[-1])
    check_emf(last)
    assert (last["Pool"], last["Command"], last["request"]) == ("ci", "refresh", "r-1")
    assert last["_aws"]["CloudWatchMetrics"][0]["Dimensions"] == [["Pool", "Command"]]
    assert last["_aws"]["CloudWatchMetrics"][0]["Namespace"] == "Remuda"
    numbers = {name: last[name] for name in ("Errors", "Failed", "GithubCalls", "GithubCallErrors", "InstancesIdle")}
    assert numbers == {"Errors": 0, "Failed": 0, "GithubCalls": 4, "GithubCallErrors": 1, "InstancesIdle": 3}
    retired = {name: value for name, value in last.items() if name.startswith("Retired")}
    assert retired == {"Retired": 4, "RetiredExpired": 2, "RetiredSpotNotice": 1, "RetiredOther": 1}
    assert last["Duration"] >= 0
    assert "i-0123" not in text.splitlines()[-1]


def test_what_fails_is_measured_too(does: Any, capsys: pytest.CaptureFixture[str]):
    async def work(*_: Any) -> Outcome:
        raise ValueError("oh")

    does(work)
    with pytest.raises(InvariantViolated):
        handler({"command": "refresh"}, Invocation())
    numbers = measured(capsys)
    assert (numbers["Failed"], numbers["Errors"]) == (1, 1)
    with pytest.raises(UserError):
        handler({"command": "x" * 5_000}, Invocation())
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    check_emf(last)
    assert (last["Pool"], last["Command"], last["Failed"]) == ("unknown", "unknown", 1)


def test_parts_that_were_not_done_are_counted(does: Any, capsys: pytest.CaptureFixture[str]):
    async def work(*_: Any) -> Outcome:
        return Outcome(document={}, errors=("a", "b"))

    does(work)
    with pytest.raises(Partial):
        handler({"command": "refresh"}, Invocation())
    numbers = measured(capsys)
    assert (numbers["Failed"], numbers["Errors"]) == (0, 2)


NAMES = st.text(st.characters(codec="utf-8"))


@given(NAMES, NAMES, st.dictionaries(st.sampled_from(["Duration", "Retired"]), st.floats()), NAMES)
def test_a_line_is_valid_whatever_it_is_given(pool: str, command: str, values: dict[str, float], fact: str):
    measures = {name: Measure(value) for name, value in values.items()} | {"Errors": Measure(0)}
    line = emf_line(measures, at=datetime(2026, 1, 1, tzinfo=UTC), pool=pool, command=command, facts={"request": fact})
    assert len(line.splitlines()) == 1
    check_emf(json.loads(line))
