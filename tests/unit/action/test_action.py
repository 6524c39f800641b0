"""The action's step in this process: inputs, workflow commands, outputs, annotations and summary."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import fork
from remuda.action import output as step_output
from remuda.action import step as action_step
from remuda.action.output import StepLog, one_line, outputs_text, plain_lines
from remuda.action.step import StepOutput, as_inputs, input_variable, main, read_inputs
from remuda.adapters.system.clock import SystemClock
from remuda.aws_lambda.broker import WORKFLOW_INPUTS
from remuda.cli import lifecycle
from remuda.config.settings import SETTINGS
from remuda.domain.errors import Interrupted, RemudaError, Unavailable
from tests.support.action_steps import parse_command, parse_file

ROOT = Path(__file__).parents[3]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
TOKEN = "ghp_s3cret-t0ken"
KEY = "-----BEGIN KEY-----\nMIIEsecretline1\nMIIEsecretline2\n-----END KEY-----\n"

#: Inputs that must exist by these names.
REQUIRED_INPUTS = """mode aws-region ami github-token iam-instance-profile security-group-ids subnet-ids idle-time-sec
pre-runner-script resource-class-config actions-runner-version instance-count usage-class resource-class
allowed-instance-types max-runtime-min"""


class InProcessStep:
    """Runs the step in this process and keeps its log and files."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.summary_file = folder / "summary"
        self.output_file = folder / "output"
        monkeypatch.chdir(folder)
        for name in action_step.SECRET_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(self.summary_file))
        monkeypatch.setenv("GITHUB_OUTPUT", str(self.output_file))
        monkeypatch.setenv("GITHUB_RUN_ID", "42")
        monkeypatch.setenv("REMUDA_CONFIG", "/dev/null")
        # Restored after the test, because the step changes it for its process.
        monkeypatch.setenv("AWS_REGION", "")
        self.log: list[str] = []

    def run(self, **given_inputs: str) -> int:
        for name, value in given_inputs.items():
            self._monkeypatch.setenv(input_variable(name.replace("_", "-")), value)
        stream = io.StringIO()
        code = main(stream)
        self.log = stream.getvalue().splitlines()
        return code

    def commands(self, name: str) -> list[str]:
        found = [command for line in self.log if (command := parse_command(line))]
        return [command.data for command in found if command.name == name]

    def outputs(self) -> dict[str, str]:
        return parse_file(self.output_file.read_text())

    def summary(self) -> str:
        return self.summary_file.read_text()


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InProcessStep:
    return InProcessStep(tmp_path, monkeypatch)


PROVISIONED = {
    "run_id": "42",
    "label": "42",
    "provision_id": "p-1",
    "instances": [
        {
            "instance_id": f"i-0{number}",
            "source": source,
            "instance_type": "c6i.large",
            "usage_class": "spot",
            "state": "running",
            "registration_seconds": 0.5,
        }
        for number, source in enumerate(("pool", "created"))
    ],
    "reused": 1,
    "created": 1,
    "ends_at": "2026-11-18T09:00:00.000Z",
    "tier": "untrusted",
    "tier_reason": "pull request #12 from fork eve/repo",
    "ephemeral": False,
    "seconds": 3.25,
    "phases": {"intent": 0.1, "instances": 3.0, "commit": 0.15},
    "rejected": {},
    "calls": {"dynamodb": {"PutItem": 3}, "ec2": {}},
}


def command_returning(document: dict[str, Any], code: int = 0) -> Any:
    def run(_settings: Any, output: StepOutput, **_more: Any) -> int:
        output.event_log(SystemClock()).record("committed", "all are ready")
        output.say("a message")
        output.result(document)
        return code

    return run


# Names


def test_every_input_is_passed_to_the_step() -> None:
    declared = set(ACTION["inputs"])
    assert set(REQUIRED_INPUTS.split()) <= declared
    assert set(ACTION["outputs"]) == {"label", "instance-ids", "reused", "created"}
    (run,) = ACTION["runs"]["steps"]
    assert declared == action_step.SETTING_INPUTS | action_step.STEP_INPUTS | {"python"}
    passed = {input_variable(name): f"${{{{ inputs.{name} }}}}" for name in declared - {"python"}}
    assert run["env"] == {
        "REMUDA_PYTHON": "${{ inputs.python }}",
        "ACTION_REPOSITORY": "${{ github.action_repository }}",
        "HEAD_REPOSITORY": "${{ github.event.pull_request.head.repo.full_name }}",
        **passed,
    }


def test_the_step_contains_no_expressions_and_executes_its_scripts() -> None:
    (run,) = ACTION["runs"]["steps"]
    assert "${{" not in run["run"], "the text of an input would become part of the script"
    commands = [line for line in run["run"].splitlines() if ")" in line]
    assert commands
    assert all(") exec bash " in line for line in commands), "signals would reach only the shell"


def test_modes_accept_the_flags_of_their_commands_and_the_credentials() -> None:
    not_inputs = {"backend", "dir", "log-format"}
    credentials = {"github-token", "github-app-id", "github-app-key"}
    for mode, used in action_step.SETTINGS_BY_MODE.items():
        flags = {declared.key for declared in SETTINGS.values() if mode in declared.commands}
        assert used == flags - not_inputs | credentials


def test_messages_name_inputs_instead_of_flags() -> None:
    assert as_inputs("raise --provision-timeout-sec") == "raise provision-timeout-sec"
    assert as_inputs("set REMUDA_GITHUB_TOKEN, or --dir") == "set github-token, or --dir"


# Sample workflows


@pytest.mark.parametrize("file", sorted((ROOT / "deploy" / "workflows").glob("*.yml")), ids=lambda file: file.stem)
def test_sample_workflows_use_existing_inputs_and_release_their_runners(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {}
    uses = {
        (name, step["with"]["mode"]): (job, step["with"])
        for name, job in workflow["jobs"].items()
        for step in job["steps"]
        if step.get("uses", "").startswith(f"{fork.recorded()}@")
    }
    assert uses
    for (_, mode), (job, given_inputs) in uses.items():
        known = action_step.SETTINGS_BY_MODE[mode]
        if mode in action_step.BROKER_MODES:
            known = known & WORKFLOW_INPUTS | {"pool", "broker-url"}
        assert set(given_inputs) <= known | {"mode"}
        assert job["permissions"] == {"id-token": "write"}
    modes = {mode for _, mode in uses}
    if "provision" in modes:
        assert "release" in modes
        release, _ = next(found for (_, mode), found in uses.items() if mode == "release")
        assert release["if"] == "always()"
        assert set(release["needs"]) == set(workflow["jobs"]) - {"release"}


# Workflow commands


UNTRUSTED = st.lists(
    st.sampled_from([*":#[]%\r\n\x0b\x85\u2028\x1b \ufeff\xa0\u200b", "::error::", "::set-output ", "x"])
).map("".join)


@given(UNTRUSTED)
def test_text_is_never_parsed_as_a_command(text: str) -> None:
    stream = io.StringIO()
    log = StepLog(stream)
    log.say(text)
    for line in stream.getvalue().splitlines():
        assert parse_command(line) is None
        # The runner trims .NET's white space characters.
        assert not line.strip("\ufeff\u200b\x85\xa0 ").startswith("::")
        assert "##[" not in line


@given(UNTRUSTED, UNTRUSTED)
def test_annotation_is_exactly_one_command(message: str, title: str) -> None:
    stream = io.StringIO()
    StepLog(stream).annotate("error", message, title=title)
    (line,) = stream.getvalue().split("\n")[:-1]
    command = parse_command(line)
    assert command is not None
    assert (command.name, command.properties.get("title", "")) == ("error", one_line(title))
    assert "\n" not in command.data


def test_control_characters_and_commands_are_neutralized() -> None:
    assert plain_lines("a\x1b[31mb\nc\r\n  ::error::d\n1::2") == ["a[31mb", "c", "|   ::error::d", "1::2"]


@given(st.text(), st.text())
def test_outputs_round_trip(one: str, other: str) -> None:
    values = {"one": " ".join(one.split()), "other": "label=evil\nlabel<<x\nx\n" + " ".join(other.split())}
    counter = iter(range(9))
    assert parse_file(outputs_text(values, lambda: f"end-{next(counter)}-of-it")) == values


def test_delimiter_inside_a_value_is_rejected() -> None:
    with pytest.raises(ValueError, match="delimiter"):
        outputs_text({"label": "1\nend\nother=2"}, lambda: "end")


def test_secrets_are_masked_first_and_never_shown(step: InProcessStep, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_settings: Any, output: StepOutput, **_more: Any) -> int:
        output.say(f"GitHub said {TOKEN}, {KEY}")
        raise Unavailable(f"no answer for {TOKEN}")

    monkeypatch.setattr(lifecycle, "run_release", run)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "sess-t0ken")
    assert step.run(mode="release", github_token=TOKEN, github_app_key=KEY) == 4
    masks = step.commands("add-mask")
    assert {TOKEN, "MIIEsecretline1", "MIIEsecretline2", "sess-t0ken"} <= set(masks)
    assert all(line.startswith("::add-mask::") for line in step.log[: len(masks)])
    seen = "\n".join(step.log[len(masks) :]) + step.summary()
    assert not [secret for secret in masks if secret in seen]
    assert step.commands("error") == ["no answer for ***"]


# The step


def test_provision_writes_outputs_and_summary(step: InProcessStep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "run_provision", command_returning(PROVISIONED))
    assert step.run(mode="provision", instance_count="2", aws_region="eu-central-1") == 0
    assert step.outputs() == {"label": "42", "instance-ids": '["i-00", "i-01"]', "reused": "1", "created": "1"}
    page = step.summary()
    assert "### remuda provision: 2 runners for run 42" in page
    assert "| i-00 | c6i.large | spot | reused | 0.50 s |" in page
    assert "| i-01 | c6i.large | spot | created | 0.50 s |" in page
    assert "| total | 3.25 s |" in page
    assert "They end at 2026-11-18T09:00:00.000Z, even if a job runs" in page
    assert "Tier untrusted: pull request &#35;12 from fork eve/repo" in page
    assert "API calls: dynamodb 3" in page
    opened, event, closed, message = step.log
    assert (opened, closed, message) == ("::group::remuda provision", "::endgroup::", "a message")
    assert event.endswith("all are ready")


def test_long_summaries_are_truncated(step: InProcessStep, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {**PROVISIONED, "instances": PROVISIONED["instances"] * 100}  # type: ignore[operator]
    monkeypatch.setattr(lifecycle, "run_provision", command_returning(many))
    step.run(mode="provision")
    assert "and 100 more" in step.summary()
    assert len(json.loads(step.outputs()["instance-ids"])) == 200


def test_release_warns_of_unreleased_instances(step: InProcessStep, monkeypatch: pytest.MonkeyPatch) -> None:
    late = [f"i-{number}" for number in range(10)]
    document: dict[str, Any] = {
        "run_id": "42",
        "released": ["i-a"],
        "retired": [],
        "expired": late,
        "skipped": [],
        "reasons": {**dict.fromkeys(late, "its heartbeat is dead"), "i-a": "clean, in the pool"},
        "deregistration_seconds": {"i-a": 1.0},
        "warnings": ["run 42 expired"],
        "errors": ["i-b: no answer"],
        "seconds": 2.0,
        "calls": {},
    }
    monkeypatch.setattr(lifecycle, "run_release", command_returning(document, 4))
    assert step.run(mode="release") == 4
    warnings = step.commands("warning")
    assert warnings[0] == "i-0 is not released: its heartbeat is dead"
    assert warnings[-1] == "and 4 more: see the log"
    assert "| i-a | released | clean, in the pool | 1.00 s |" in step.summary()
    assert "| i-b: no answer |" in step.summary()
    assert "⚠ run 42 expired" in step.summary()
    assert not step.output_file.exists()


def test_scale_down_summary_lists_decisions_with_reasons(step: InProcessStep, monkeypatch: pytest.MonkeyPatch) -> None:
    decision = {"instance_id": "i-1", "owner": "octo", "action": "terminate", "reason": "idle", "phase": "active"}
    document = {
        "environment": "ci",
        "dry_run": True,
        "idle_quota": {"idle_count": 2, "eviction": "oldest_first", "window": None},
        "decisions": [{**decision, "done": False}],
        "errors": [],
        "seconds": 0.5,
        "calls": {},
    }
    monkeypatch.setattr(lifecycle, "run_scale_down", command_returning(document))
    assert step.run(mode="scale-down", dry_run="true", environment="ci") == 0
    assert step.summary().startswith("### remuda scale-down: ci, dry run\n")
    assert "| i-1 | octo | terminate | idle | no |" in step.summary()


@pytest.mark.parametrize(
    ("given_inputs", "message"),
    [
        ({"mode": "provison"}, "mode is 'provison'; did you mean provision?"),
        ({"mode": ""}, "mode is ''; use provision, release, refresh, scale-down"),
        (
            {"mode": "provision", "instance_count": "$(touch x)"},
            "instance-count must be an integer from 1 to 1000, got '$(touch x)'",
        ),
        (
            {"mode": "provision", "usage_class": "##[add-path]/x"},
            "usage-class must be on-demand or spot, got '## [add-path]/x'",
        ),
        (
            {"mode": "provision", "aws_region": "eu\nX=1"},
            "aws-region is 'eu\\nX=1'; use a region such as eu-central-1",
        ),
        ({"mode": "refresh", "sweep_only": "yes"}, "sweep-only is 'yes'; use true or false"),
        (
            {"mode": "release", "run_id": "self-hosted"},
            "run-id is 'self-hosted', a default label",
        ),
        ({"mode": "provision", "config": "/no/such.toml"}, "/no/such.toml cannot be read"),
    ],
)
def test_invalid_input_is_one_annotation(step: InProcessStep, given_inputs: dict[str, str], message: str) -> None:
    assert step.run(**given_inputs) == 2
    (error,) = step.commands("error")
    assert error.startswith(message)
    assert not step.output_file.exists()
    assert "failed" in step.summary()


def test_errors_in_environment_variables_name_the_input(step: InProcessStep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMUDA_INSTANCE_COUNT", "no number")
    assert step.run(mode="provision") == 2
    assert step.commands("error")[0].startswith("instance-count must be an integer from 1 to 1000, got 'no number'")


@pytest.mark.parametrize(
    ("error", "level", "head"),
    [
        (Interrupted("interrupted; all instances returned"), "notice", "cancelled"),
        (KeyboardInterrupt(), "notice", "cancelled"),
        (Unavailable("no answer", fix="try --pool x"), "error", "failed"),
        (KeyError("<b>"), "error", "failed"),
    ],
)
def test_failures_write_an_annotation_and_a_summary(
    step: InProcessStep, monkeypatch: pytest.MonkeyPatch, error: BaseException, level: str, head: str
) -> None:
    def run(*_given: Any, **_more: Any) -> int:
        raise error

    monkeypatch.setattr(lifecycle, "run_refresh", run)
    codes = {KeyboardInterrupt: 130, KeyError: 70}
    assert step.run(mode="refresh") == (error.exit_code if isinstance(error, RemudaError) else codes[type(error)])
    assert len(step.commands(level)) == 1
    assert step.summary().startswith(f"### remuda refresh: {head}\n")
    assert "<b>" not in step.summary()


def test_blank_inputs_are_not_set() -> None:
    found = read_inputs({"INPUT_MODE": "refresh\n", "INPUT_AMI": " ", "INPUT_POOL": ""})
    assert found.given == {"mode": "refresh"}


# Summary


@given(st.text())
def test_summary_text_is_escaped(value: str) -> None:
    shown = step_output.escape(value)
    assert not set(shown) & set('|<>`*_[]\\"!~^$@{}\n\r\x1b')
    assert "://" not in shown


@pytest.mark.parametrize("script", sorted(ROOT.joinpath("deploy", "action").glob("*.sh")), ids=lambda file: file.name)
def test_scripts_pass_shellcheck(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck): the scripts are not linted")
    done = subprocess.run(["shellcheck", "--severity=style", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_secrets_are_not_cut_into_parts_that_are_not_recognized(
    step: InProcessStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary cuts long texts."""
    secret = "eyJhbGciOi_-" * 100

    def run(_settings: Any, output: StepOutput, **_more: Any) -> int:
        output.result({**PROVISIONED, "tier_reason": f"because of {secret}"})
        raise Unavailable(f"no answer for {secret}")

    monkeypatch.setattr(lifecycle, "run_provision", run)
    assert step.run(mode="provision", github_token=secret) == 4
    assert "eyJhbGciOi" not in step.summary()
    assert "no answer for &#42;&#42;&#42;" in step.summary()


def test_broker_step_has_no_syntax_newer_than_the_bash_of_macos() -> None:
    """Bash 3.2 has other rules for quotes in patterns, and none of the newer expansions and commands."""
    text = (ROOT / "deploy" / "action" / "broker.sh").read_text(encoding="utf-8")
    newer = (
        r"=~ [^$]|\$\{\w+(,|\^|@)|\b(mapfile|readarray|coproc|declare -[An]|local -n|wait -n|BASHPID|EPOCH\w+)\b|&>>"
    )
    assert re.findall(f".*(?:{newer}).*", text) == []
