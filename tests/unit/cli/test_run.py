"""Exit codes, errors and logs of a command, and what it reads from the event of its run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remuda.adapters.system.clock import SystemClock
from remuda.cli import lifecycle
from remuda.cli.agent import LineEventLog
from remuda.cli.agent import main as run_agent
from remuda.cli.lifecycle import check_label, read_event, repository, trust
from remuda.cli.main import app
from remuda.cli.output import ConsoleEventLog, Output, early_log_format, set_log_format
from remuda.cli.rendering.results import instance_document
from remuda.cli.run import run_command
from remuda.config.settings import Settings
from remuda.config.sources import load
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
from remuda.domain.instance import Instance, State
from remuda.domain.resources import Tier
from remuda.domain.signals import Signal
from remuda.domain.trust import UnreadablePayload
from remuda.wiring.aws import agent_log_environment
from tests.support.records import in_set, in_state, report, set_holder

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
    assert run_command(Output(as_json=True), failing(error)) == code
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"]["type"] == type(error).__name__
    assert shown.err == "remuda: x\n"


def test_an_error_for_people_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    error = UserError("dir 'a\nb' [bold]is[/bold] wrong", field="--dir", fix="name another")
    assert run_command(Output(as_json=False, quiet=True), failing(error)) == 2
    assert capsys.readouterr() == ("", "remuda: dir 'a b' [bold]is[/bold] wrong; name another\n")


def test_a_bug_is_one_line_with_its_place_and_exits_70(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(Output(as_json=True), failing(KeyError("lost"))) == 70
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert len(shown.err.splitlines()) == 1
    message = json.loads(shown.out)["error"]["message"]
    assert message.startswith("a bug: KeyError: 'lost' (test_run.py:")


def test_a_keyboard_interrupt_exits_130_silently(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(Output(as_json=False), failing(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_a_result_is_one_document_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(as_json=True, quiet=True)

    def work() -> int:
        output.say("for people")
        output.result({"run_id": "1"})
        return 0

    assert run_command(output, work) == 0
    shown = capsys.readouterr()
    assert (json.loads(shown.out), shown.err) == ({"run_id": "1"}, "")


@pytest.mark.parametrize("state", State)
def test_documents_of_instances_contain_no_credential(state: State) -> None:
    text = json.dumps(instance_document(in_state(state)))
    assert "t0ken" not in text
    assert "credential" not in text
    assert "t0ken" not in repr(in_state(state))
    assert "t0ken" not in repr(report(Signal.UD_REG_OK))


@pytest.mark.parametrize(
    ("record", "holder", "last_holder"),
    [
        (in_state(State.RUNNING), {"run_id": "1234", "attempt": 1, "provision_id": "p-1"}, None),
        (in_state(State.IDLE), None, {"run_id": "1234", "attempt": 1, "provision_id": "p-1"}),
        (in_set(State.RUNNING), {"runner_set": "large", "job": None, "provision_id": "p-1"}, None),
        (
            in_set(State.RUNNING, holder=set_holder(run_id="77")),
            {"runner_set": "large", "job": {"run_id": "77"}, "provision_id": "p-1"},
            None,
        ),
    ],
)
def test_documents_of_instances_show_the_holder(record: Instance, holder: Any, last_holder: Any) -> None:
    document = instance_document(record)
    assert (document["holder"], document["last_holder"]) == (holder, last_holder)


# Structured logs --------------------------------------------------------------------------------------------------


@pytest.fixture
def json_logs() -> Iterator[None]:
    set_log_format("json")
    yield
    set_log_format("text")


@pytest.mark.parametrize("why", ["clean", 'a "quote"', "two\nlines", "\u2028 and \x1b[31m"])
def test_an_agent_logs_one_line_per_event_in_both_formats(why: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"instance_id": "i-1", "run_id": "7", "epoch": 3, "signal": None}
    LineEventLog(SystemClock(), as_json=True).record("removal-failed", why, **facts)
    LineEventLog(SystemClock()).record("removal-failed", why, **facts)
    (logged, plain) = capsys.readouterr().out.splitlines()
    line = json.loads(logged)
    fields = {name: line[name] for name in ("event", "level", "reason", "instance_id", "run_id", "epoch")}
    assert fields == {
        "event": "removal-failed",
        "level": "warning",
        "reason": " ".join(why.splitlines()),
        "instance_id": "i-1",
        "run_id": "7",
        "epoch": 3,
    }
    assert "signal" not in line
    assert "removal-failed instance_id=i-1 run_id=7 epoch=3" in plain


def test_agents_get_the_log_format_only_if_it_is_not_the_default() -> None:
    """Otherwise the launch template of every pool would change."""
    assert agent_log_environment(Settings()) == {}
    assert agent_log_environment(Settings(log_format="json")) == {"REMUDA_LOG_FORMAT": "json"}


@pytest.mark.parametrize(
    ("arguments", "environ", "is_json"),
    [
        ([], {}, False),
        (["--log-format", "json"], {}, True),
        ([], {"REMUDA_LOG_FORMAT": "json"}, True),
        (["--log-format", "text"], {"REMUDA_LOG_FORMAT": "json"}, False),
        ([], {"REMUDA_LOG_FORMAT": "yaml"}, False),
    ],
)
def test_an_agent_reports_a_failed_start_in_its_log_format(
    arguments: list[str],
    environ: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_json: bool,
) -> None:
    monkeypatch.delenv("REMUDA_BACKEND", raising=False)
    monkeypatch.delenv("REMUDA_LOG_FORMAT", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert run_agent(arguments) == UserError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    if is_json:
        logged = json.loads(line)
        assert (logged["level"], logged["event"], logged["type"]) == ("error", "error", "UserError")
        assert logged["fix"]
    else:
        assert line.startswith("remuda agent: REMUDA_BACKEND is ''")


@pytest.mark.usefixtures("json_logs")
def test_a_json_log_has_one_line_per_event(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(as_json=True)
    event_log = ConsoleEventLog(output, SystemClock())
    facts = {"instance_id": "i-1", "run_id": "7", "epoch": 3}
    event_log.record("claim-lost", "two\nlines", **facts, source="")
    event_log.record("announce", "sent to the pool", instance_id="i-1")
    output.say("for people", style="bold yellow")
    output.say("")
    output.show("a table")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert all(line.pop("at").endswith("Z") for line in lines)
    assert lines == [
        {"level": "warning", "event": "claim-lost", "reason": "two\nlines", **facts},
        {"level": "info", "event": "announce", "reason": "sent to the pool", "instance_id": "i-1"},
        {"level": "warning", "event": "message", "text": "for people"},
    ]


@pytest.mark.usefixtures("json_logs")
def test_quiet_json_logs_contain_only_errors(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(as_json=False, quiet=True)
    ConsoleEventLog(output, SystemClock()).record("launch", "why")
    output.say("x")
    assert run_command(output, failing(UserError("dir is wrong", field="--dir", fix="name another"))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert (found["event"], found["level"], found["type"]) == ("error", "error", "UserError")
    assert (found["reason"], found["fix"]) == ("dir is wrong", "name another")


@pytest.mark.parametrize(
    ("arguments", "environ", "found"),
    [
        (["status", "--log-format", "json"], {}, "json"),
        (["status", "--log-format=json"], {"REMUDA_LOG_FORMAT": "text"}, "json"),
        (["status", "--log-format"], {}, ""),
        (["status"], {"REMUDA_LOG_FORMAT": "json"}, "json"),
        (["status"], {}, ""),
    ],
)
def test_the_log_format_is_found_before_settings_are_loaded(
    arguments: list[str], environ: dict[str, str], found: str
) -> None:
    assert early_log_format(arguments, environ) == found


def test_every_command_has_a_log_format() -> None:
    for name, registered in app.commands.items():
        assert "log_format" in {param.name for param in registered.params}, name


SIGNALLED = """
import asyncio, os, signal, sys
from remuda.domain.errors import Interrupted
from remuda.cli.run import run_async

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
def test_only_a_repeated_signal_interrupts_the_cleanup(then: str, *, finishes: bool) -> None:
    done = subprocess.run([sys.executable, "-c", SIGNALLED, then], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")
    assert ("given back" in done.stdout) == finishes


# Event of the run -----------------------------------------------------------------------------------------------------


FORK = {
    "pull_request": {"number": 3, "head": {"repo": {"full_name": "eve/r"}}, "base": {"repo": {"full_name": "octo/r"}}}
}


def loaded(flags: dict[str, str] | None = None, **environ: str) -> Settings:
    return load(flags or {}, environ=environ, file=Path(os.devnull))


@pytest.fixture
def fork_event(tmp_path: Path) -> str:
    """The payload file of a pull request from a fork."""
    file = tmp_path / "event.json"
    file.write_text(json.dumps(FORK))
    return str(file)


def test_the_event_determines_the_tier(fork_event: str) -> None:
    found = trust(loaded(GITHUB_EVENT_NAME="pull_request", GITHUB_EVENT_PATH=fork_event))
    assert (found.tier, found.why) == (Tier.UNTRUSTED, "pull request #3 from fork eve/r")


@pytest.mark.parametrize("source", ["flag", "variable"])
def test_a_tier_above_the_event_is_rejected_by_its_source(fork_event: str, source: str) -> None:
    environ = {"GITHUB_EVENT_NAME": "pull_request", "GITHUB_EVENT_PATH": fork_event}
    flags = {"tier": "trusted"} if source == "flag" else {}
    with pytest.raises(UserError, match="from fork eve/r") as refused:
        trust(loaded(flags, **environ, **({} if flags else {"REMUDA_TIER": "trusted"})))
    assert refused.value.field == ("--tier" if source == "flag" else "REMUDA_TIER")


def test_without_an_event_the_default_tier_is_trusted() -> None:
    assert trust(loaded()).tier is Tier.TRUSTED
    assert trust(loaded({"tier": "untrusted"})).tier is Tier.UNTRUSTED


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\xff\xfe", '{"a": ' * 100_000, "null", "7"])
def test_an_invalid_payload_is_untrusted(tmp_path: Path, text: str) -> None:
    file = tmp_path / "event.json"
    file.write_bytes(text.encode("latin-1"))
    found = trust(loaded(GITHUB_EVENT_NAME="pull_request", GITHUB_EVENT_PATH=str(file)))
    assert found.tier is Tier.UNTRUSTED


def test_a_pipe_or_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_event(str(tmp_path / "pipe")).why == "not a regular file"
    assert isinstance(read_event(str(tmp_path)), UnreadablePayload)
    assert isinstance(read_event(""), UnreadablePayload)
    assert isinstance(read_event("a\0b"), UnreadablePayload)
    monkeypatch.setattr(lifecycle, "MAX_EVENT_BYTES", 10)
    (tmp_path / "long").write_text('{"a": "01234567890"}')
    assert read_event(str(tmp_path / "long")).why == "larger than 10 bytes"


@pytest.mark.parametrize(
    ("text", "cause"), [(None, "No such file or directory"), ("{", "not JSON"), ("[]", "not a JSON object")]
)
def test_an_unreadable_payload_is_reported_with_its_cause(tmp_path: Path, text: str | None, cause: str) -> None:
    file = tmp_path / "event.json"
    if text is not None:
        file.write_text(text)
    environ = {"GITHUB_EVENT_NAME": "pull_request", "GITHUB_EVENT_PATH": str(file)}
    why = trust(loaded(None, **environ)).why
    assert why == f"event pull_request, whose payload cannot be read: {str(file)[:120]}: {cause}"
    with pytest.raises(UserError, match=cause) as refused:
        trust(loaded({"tier": "trusted"}, **environ))
    assert str(file)[:120] in refused.value.fix
    assert "omit --tier" in refused.value.fix


def test_a_missing_payload_file_names_the_variable() -> None:
    assert trust(loaded(GITHUB_EVENT_NAME="pull_request")).why.endswith("GITHUB_EVENT_PATH is not set")
    # The name of this event is sufficient.
    assert trust(loaded(GITHUB_EVENT_NAME="push")).tier is Tier.TRUSTED


def test_the_repository_comes_from_the_workflow_or_the_scope() -> None:
    assert repository(loaded(GITHUB_REPOSITORY="octo/r")) == "octo/r"
    assert repository(loaded({"github_scope": "octo"}, GITHUB_REPOSITORY="octo/r")) == "octo/r"
    assert repository(loaded({"github_scope": "octo"})) == ""
    # A workflow of another repository may provision runners of this one; they serve only this one.
    assert repository(loaded({"github_scope": "octo/r"}, GITHUB_REPOSITORY="octo/other")) == "octo/r"


@pytest.mark.parametrize("scope", ["octo", "octo/r"])
def test_a_repository_outside_the_scope_is_rejected(scope: str) -> None:
    with pytest.raises(UserError, match="eve/r") as refused:
        repository(loaded({"github_scope": scope, "repository": "eve/r"}))
    assert (refused.value.field, bool(refused.value.fix)) == ("--repository", True)


@pytest.mark.parametrize("text", ["octo", "octo/r/x", "../r", "octo/r\n"])
def test_an_invalid_repository_is_rejected(text: str) -> None:
    with pytest.raises(UserError, match="repository"):
        loaded({"repository": text})


def test_a_payload_without_an_event_name_is_untrusted(fork_event: str) -> None:
    assert trust(loaded(GITHUB_EVENT_PATH=fork_event)).tier is Tier.UNTRUSTED


@pytest.mark.parametrize("run_id", ["build-12", "12x", "large"])
def test_in_a_workflow_a_label_without_the_run_number_is_rejected(run_id: str) -> None:
    with pytest.raises(UserError, match=run_id) as refused:
        check_label(run_id, environ={"GITHUB_RUN_ID": "12"}, field="--run-id")
    assert (refused.value.field, bool(refused.value.fix)) == ("--run-id", True)
    check_label(run_id, environ={}, field="--run-id")


@pytest.mark.parametrize("run_id", ["12", "12-large", "12.a", "12_a", "99"])
def test_labels_that_begin_with_the_run_number_are_accepted(run_id: str) -> None:
    check_label(run_id, environ={"GITHUB_RUN_ID": "12"}, field="--run-id")
