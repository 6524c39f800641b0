"""Lambda handler: events, results, errors, timeouts and metrics. Runs against servers: acceptance/test_lambda.py."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.adapters.aws import clients as aws_clients
from remuda.aws_lambda import handler as lambda_handler
from remuda.aws_lambda.handler import COMMANDS, LambdaCommand, handler, parse_event
from remuda.aws_lambda.runtime import RESERVE_S, LambdaOutcome, Measurement, emf_line, parse_variables
from remuda.domain.errors import InvariantViolated, Partial, TimedOut, UserError
from remuda.domain.instance import RetireReason
from tests.support.emf import check_emf


class InvocationContext:
    aws_request_id = "r-1"

    def __init__(self, remaining_s: float = 60.0) -> None:
        self._remaining_s = remaining_s

    def get_remaining_time_in_millis(self) -> int:
        return int(self._remaining_s * 1_000)


@pytest.fixture
def replace_refresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the refresh command by a test function."""

    def replace(work: Any) -> None:
        monkeypatch.setattr(lambda_handler, "COMMANDS", {**COMMANDS, "refresh": work})

    return replace


def ending(end: LambdaOutcome | Exception) -> Any:
    """A command with this result or error."""

    async def work(*_: Any) -> LambdaOutcome:
        if isinstance(end, Exception):
            raise end
        return end

    return work


def log_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the log lines without the last one, which contains the metrics."""
    *log, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    check_emf(last)
    return log


def metrics(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the metrics of the only invocation."""
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (line,) = [each for each in found if "_aws" in each]
    check_emf(line)
    (directive,) = line["_aws"]["CloudWatchMetrics"]
    return {item["Name"]: line[item["Name"]] for item in directive["Metrics"]}


@pytest.mark.parametrize(
    ("event", "command"),
    [
        ({"command": "refresh"}, LambdaCommand(name="refresh")),
        ({"command": "refresh", "sweep_only": True}, LambdaCommand(name="refresh", sweep_only=True)),
        ({"command": "scale-down", "dry_run": True}, LambdaCommand(name="scale-down", dry_run=True)),
        (
            {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {"command": "refresh"}},
            LambdaCommand(name="refresh"),
        ),
    ],
)
def test_parse_event(event: Any, command: LambdaCommand):
    assert parse_event(event) == command


@pytest.mark.parametrize(
    ("event", "message"),
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
def test_invalid_events_are_rejected_and_logged(event: Any, message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(UserError, match=message):
        handler(event, InvocationContext())
    (line,) = log_lines(capsys)
    assert (line["event"], line["level"], line["request"]) == ("failed", "warning", "r-1")


def test_result_is_returned_and_logged(replace_refresh: Any, capsys: pytest.CaptureFixture[str]):
    async def work(_loaded: Any, event_log: Any, *_: Any) -> LambdaOutcome:
        event_log.record("end-expired", "its time is up", instance_id="i-1", facts=[1], nothing=None)
        return LambdaOutcome(document={"at": datetime(2026, 1, 1, tzinfo=UTC), "terminated": ["i-1"]})

    replace_refresh(work)
    document = handler({"command": "refresh"}, InvocationContext())
    assert document == {"at": "2026-01-01 00:00:00+00:00", "terminated": ["i-1"]}
    first, last = log_lines(capsys)
    assert (first["event"], first["reason"], first["instance_id"]) == ("end-expired", "its time is up", "i-1")
    assert (last["event"], last["result"]) == ("refresh-done", document)


def test_errors_fail_the_invocation_after_the_result_is_logged(
    replace_refresh: Any, capsys: pytest.CaptureFixture[str]
):
    replace_refresh(ending(LambdaOutcome(document={"errors": ["machines: no"]}, errors=("machines: no",))))
    with pytest.raises(Partial, match="1 errors; first: machines: no"):
        handler({"command": "refresh"}, InvocationContext())
    assert log_lines(capsys)[-1]["result"] == {"errors": ["machines: no"]}


def test_work_is_cancelled_before_the_functions_timeout(replace_refresh: Any):
    closed = []

    async def work(*_: Any) -> LambdaOutcome:
        try:
            await asyncio.Event().wait()
        finally:
            closed.append(True)
        raise AssertionError

    replace_refresh(work)
    with pytest.raises(TimedOut, match="refresh was cancelled"):
        handler({"command": "refresh"}, InvocationContext(RESERVE_S + 0.05))
    assert closed


def test_work_is_cancelled_at_once_without_remaining_time(replace_refresh: Any):
    async def work(*_: Any) -> LambdaOutcome:
        await asyncio.Event().wait()
        raise AssertionError

    replace_refresh(work)
    with pytest.raises(TimedOut):
        handler({"command": "refresh"}, InvocationContext(1.0))


def test_timeout_error_of_the_work_is_a_bug(replace_refresh: Any):
    replace_refresh(ending(TimeoutError("theirs")))
    with pytest.raises(InvariantViolated, match="TimeoutError"):
        handler({"command": "refresh"}, InvocationContext())


def test_invalid_settings_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("REMUDA_POOL", "No Such Pool!")
    with pytest.raises(UserError, match="REMUDA_POOL must be") as raised:
        handler({"command": "refresh"}, InvocationContext())
    assert raised.value.__suppress_context__
    assert len(log_lines(capsys)) == 1


def test_credentials_are_not_logged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("REMUDA_GITHUB_TOKEN", "arn:aws:s3:::ghp_s3cret")
    with pytest.raises(UserError) as raised:
        handler({"command": "refresh"}, InvocationContext())
    assert "ghp_s3cret" not in str(raised.value) + capsys.readouterr().out


# Metrics


def test_metrics_of_an_invocation(
    replace_refresh: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    async def work(_loaded: Any, event_log: Any, _command: LambdaCommand, calls: Any) -> LambdaOutcome:
        for reason in (RetireReason.EXPIRED, RetireReason.EXPIRED, RetireReason.SPOT_NOTICE, "i-0123 said so"):
            event_log.record(
                "end-idle", "its time is up at 12:31", instance_id="i-0123", run_id="77", retire_reason=reason
            )
        calls.add("github", "GET runners", 4)
        calls.fail("github", "GET runners")
        calls.add("dynamodb", "Query", 9)
        return LambdaOutcome(document={}, counts={"InstancesIdle": 3})

    monkeypatch.setenv("REMUDA_POOL", "ci")
    replace_refresh(work)
    handler({"command": "refresh"}, InvocationContext())
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


def test_failed_invocations_are_measured(replace_refresh: Any, capsys: pytest.CaptureFixture[str]):
    replace_refresh(ending(ValueError("oh")))
    with pytest.raises(InvariantViolated):
        handler({"command": "refresh"}, InvocationContext())
    numbers = metrics(capsys)
    assert (numbers["Failed"], numbers["Errors"]) == (1, 1)
    with pytest.raises(UserError):
        handler({"command": "x" * 5_000}, InvocationContext())
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    check_emf(last)
    assert (last["Pool"], last["Command"], last["Failed"]) == ("unknown", "unknown", 1)


def test_errors_are_counted(replace_refresh: Any, capsys: pytest.CaptureFixture[str]):
    replace_refresh(ending(LambdaOutcome(document={}, errors=("a", "b"))))
    with pytest.raises(Partial):
        handler({"command": "refresh"}, InvocationContext())
    numbers = metrics(capsys)
    assert (numbers["Failed"], numbers["Errors"]) == (0, 2)


NAMES = st.text(st.characters(codec="utf-8"))


@given(NAMES, NAMES, st.dictionaries(st.sampled_from(["Duration", "Retired"]), st.floats()), NAMES)
def test_emf_line_is_valid_for_any_input(pool: str, command: str, values: dict[str, float], fact: str):
    measures = {name: Measurement(value) for name, value in values.items()} | {"Errors": Measurement(0)}
    line = emf_line(measures, at=datetime(2026, 1, 1, tzinfo=UTC), pool=pool, command=command, facts={"request": fact})
    assert len(line.splitlines()) == 1
    check_emf(json.loads(line))


# Settings -----------------------------------------------------------------------------------------------------------


def test_variables_of_a_parameter() -> None:
    text = 'REMUDA_AMI=ami-1\nREMUDA_KEY_NAME=\nREMUDA_RESOURCE_CLASS_CONFIG={\n "large": {}\n}\nREMUDA_POOL=a=b'
    assert parse_variables(text) == {
        "REMUDA_AMI": "ami-1",
        "REMUDA_KEY_NAME": "",
        "REMUDA_RESOURCE_CLASS_CONFIG": '{\n "large": {}\n}',
        "REMUDA_POOL": "a=b",
    }
    assert parse_variables("") == {}


def test_settings_come_from_the_parameter_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, replace_refresh: Any
) -> None:
    """The environment has priority."""
    names: list[str] = []
    found: list[Any] = []

    async def read_parameter(_clients: Any, name: str) -> str:
        names.append(name)
        return "REMUDA_KEY_NAME=people\nREMUDA_POOL=other\nREMUDA_GITHUB_SCOPE=octo\nREMUDA_AMI="

    async def work(settings: Any, *_: Any) -> LambdaOutcome:
        found.append((settings.pool, settings.key_name, settings.github_scope, settings.ami))
        return LambdaOutcome(document={})

    monkeypatch.setattr(aws_clients, "read_parameter", read_parameter)
    monkeypatch.setenv("REMUDA_SETTINGS_PARAMETER", "/remuda/ci/settings")
    monkeypatch.setenv("REMUDA_POOL", "ci")
    replace_refresh(work)
    handler({"command": "refresh"}, InvocationContext())
    assert names == ["/remuda/ci/settings"]
    assert found == [("ci", "people", "octo", "")]
