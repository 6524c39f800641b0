"""Invalid input of commands: rejected with one line, before any change.

Most cases run the command in this process; one test compares it with the installed command.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from remuda.cli.main import main

REMUDA = Path(sys.executable).with_name("remuda")
LIMIT_S = 120
ANY_RUN = ("provision", "--run-id", "1")


class Shell:
    """Runs `remuda` in an empty directory with a minimal environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.environ = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(REMUDA), *arguments],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def here(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command in this process."""
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", [str(REMUDA), *arguments])
            for name in os.environ.keys() - self.environ.keys():
                patch.delenv(name)
            for name, value in self.environ.items():
                patch.setenv(name, value)
            code = main(list(arguments))
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def refused(self, *arguments: str, code: int = 2, installed: bool = False) -> dict[str, Any]:
        """Run the command and return its error. Check that it is one line and that no file is created."""
        before = sorted(self.folder.rglob("*"))
        done = (self if installed else self.here)(*arguments, "--json")
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        document = json.loads(done.stdout)
        assert list(document) == ["error"]
        error: dict[str, Any] = document["error"]
        assert list(error) == ["type", "message", "field", "fix"]
        lines = done.stderr.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("remuda: ")
        assert error["message"].splitlines()[0][:100] in lines[0]
        assert len(lines[0]) < 600
        assert sorted(self.folder.rglob("*")) == before
        return error


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        (*ANY_RUN, "--instance-count", "0"),
        ("refresh", "--resource-class-config", "[" * 50_000),
        ("provision", "--nope"),
        ("status", "--backend", "aws"),
        ("release", "--run-id", "1", "--dir", "elsewhere"),
    ],
    ids=lambda each: " ".join(each)[:30],
)
def test_the_installed_command_behaves_as_in_this_process(shell: Shell, arguments: tuple[str, ...]) -> None:
    done, here = shell(*arguments, "--json"), shell.here(*arguments, "--json")
    assert (done.returncode, here.returncode) == (2, 2)
    assert without_backends(done.stdout) == without_backends(here.stdout)
    assert without_backends(done.stderr) == without_backends(here.stderr)


def without_backends(text: str) -> str:
    """The text without the names of local backends that run on this computer and may end at any time."""
    return re.sub(r', or use the one that is running with [^"\n]*', "", text)


# Values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["0", "-1", "1.5", "1e9", "NaN", "", "x" * 10_000], ids=lambda each: each[:5] or "empty"
)
def test_an_invalid_count_is_rejected_with_flag_value_and_range(shell: Shell, value: str) -> None:
    error = shell.refused(*ANY_RUN, "--instance-count", value)
    assert (error["type"], error["field"]) == ("UserError", "--instance-count")
    assert error["message"].startswith(f"--instance-count must be an integer from 1 to 1000, got {value!r}"[:80])


@pytest.mark.parametrize(
    "value", ["", " ", "1 2", "1,2", "self-hosted", "x" * 10_000], ids=lambda each: each[:5] or "empty"
)
def test_an_invalid_run_id_is_rejected(shell: Shell, value: str) -> None:
    error = shell.refused("provision", "--run-id", value)
    assert error["field"] == "--run-id"
    assert "run id" in error["fix"]


FORK = {"pull_request": {"number": 7, "head": {"repo": {"full_name": "eve/r"}}}, "repository": {"full_name": "octo/r"}}


def test_a_tier_above_the_event_is_rejected(shell: Shell) -> None:
    event = shell.folder / "event.json"
    event.write_text(json.dumps(FORK))
    shell.environ |= {"GITHUB_EVENT_NAME": "pull_request_target", "GITHUB_EVENT_PATH": str(event)}
    error = shell.refused(*ANY_RUN, "--tier", "trusted")
    assert (error["field"], error["fix"]) == (
        "--tier",
        "omit --tier: untrusted code runs on separate instances",
    )
    assert error["message"] == "tier is trusted, but the event is untrusted: pull request #7 from fork eve/r"


def test_ephemeral_runners_require_a_credential(shell: Shell) -> None:
    shell.environ |= {"AWS_REGION": "eu-central-1", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    error = shell.refused(*ANY_RUN, "--backend", "aws", "--ephemeral", "--github-scope", "octo")
    assert (error["type"], error["field"]) == ("UserError", "ephemeral")
    assert error["message"].startswith("ephemeral runners need a GitHub credential")
    assert "REMUDA_GITHUB_TOKEN" in error["fix"]
    assert "leave --ephemeral out" in error["fix"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("provision", "--run-id", "1", "--repository", "octo"), "--repository"),
        (("provision", "--run-id", "1", "--github-scope", "octo", "--repository", "eve/r"), "--repository"),
        (("provision", "--run-id", "1", "--github-scope", "octo/r", "--repository", "octo/s"), "--repository"),
        (("refresh", "--reuse", "sometimes"), "--reuse"),
    ],
)
def test_an_invalid_repository_or_reuse_policy_is_rejected(
    shell: Shell, arguments: tuple[str, ...], field: str
) -> None:
    error = shell.refused(*arguments)
    assert error["field"] == field
    assert error["fix"] or "must be" in error["message"]


def test_ephemeral_must_be_true_or_false(shell: Shell) -> None:
    shell.environ["REMUDA_EPHEMERAL"] = "yes"
    error = shell.refused(*ANY_RUN)
    assert (error["field"], error["message"]) == (
        "REMUDA_EPHEMERAL",
        "REMUDA_EPHEMERAL must be true or false, got 'yes'",
    )


@pytest.mark.parametrize("command", ["provision", "release"])
def test_a_run_id_is_required(shell: Shell, command: str) -> None:
    assert shell.refused(command)["field"] == "--run-id"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--idle-time-sec", "0"),
        ("--idle-time-sec", "604801"),
        ("--release-time-sec", "1"),
        ("--max-runtime-min", "0"),
        ("--max-runtime-min", "inf"),
        ("--max-age-sec", "-5"),
        ("--max-uses", "0"),
        ("--max-instances", "1e9"),
    ],
)
def test_lifetimes_out_of_range_are_rejected(shell: Shell, option: str, value: str) -> None:
    error = shell.refused("refresh", option, value)
    assert (error["field"], value in error["message"]) == (option, True)
    assert error["message"].startswith(f"{option} must be a")


def test_an_expert_setting_has_no_flag_but_a_variable(shell: Shell) -> None:
    assert "--margin-sec" in shell.refused("refresh", "--margin-sec", "1")["message"]
    shell.environ["REMUDA_MARGIN_SEC"] = "NaN"
    assert shell.refused("refresh")["field"] == "REMUDA_MARGIN_SEC"


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"large": {"cpu": 0, "mmem": 1}}', "[" * 50_000, "NaN"], ids=lambda t: t[:12]
)
def test_malformed_classes_are_rejected(shell: Shell, text: str) -> None:
    assert shell.refused("refresh", "--resource-class-config", text)["field"] == "--resource-class-config"


@pytest.mark.parametrize("text", ["", "c?", "c*" * 5_000, "c*,;"], ids=lambda each: each[:5] or "empty")
def test_invalid_type_patterns_are_rejected(shell: Shell, text: str) -> None:
    error = shell.refused(*ANY_RUN, "--allowed-instance-types", text)
    assert error["field"] == "--allowed-instance-types"


def test_an_error_in_the_environment_names_the_variable(shell: Shell) -> None:
    shell.environ["REMUDA_INSTANCE_COUNT"] = "many"
    error = shell.refused(*ANY_RUN, installed=True)
    assert (error["field"], error["message"]) == (
        "REMUDA_INSTANCE_COUNT",
        "REMUDA_INSTANCE_COUNT must be an integer from 1 to 1000, got 'many'",
    )


def test_invalid_utf8_is_rejected(shell: Shell) -> None:
    assert shell.refused(*ANY_RUN, "--pool", os.fsdecode(b"\xff\xfe"), installed=True)["field"] == "--pool"


# Options and commands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "field", "named", "fix"),
    [
        (("provision", "--nope"), "--nope", "--nope", "see remuda provision --help"),
        (("nope",), "", "nope", "see remuda --help"),
        (("status", "extra"), "", "extra", "see remuda status --help"),
        (("refresh", "--every", "often"), "--every", "--every", "see remuda refresh --help"),
        (("refresh", "--every", "nan"), "--every", "--every", "see remuda refresh --help"),
        (("run-workflow",), "", "file", "see remuda run-workflow --help"),
    ],
    ids=["option", "command", "argument", "no number", "nan", "missing"],
)
def test_usage_errors_have_the_same_form_as_others(
    shell: Shell, arguments: tuple[str, ...], field: str, named: str, fix: str
) -> None:
    error = shell.refused(*arguments)
    assert error["type"] == "UserError"
    assert field in {error["field"], ""}
    assert named.lower() in error["message"].lower()
    assert error["fix"] == fix


def test_without_arguments_help_is_shown(shell: Shell) -> None:
    done = shell()
    assert (done.returncode, done.stderr) == (0, "")
    assert "provision" in done.stdout


def test_without_json_an_error_is_one_line(shell: Shell) -> None:
    done = shell(*ANY_RUN, "--instance-count", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "remuda: --instance-count must be an integer from 1 to 1000, got '0'\n"


@pytest.mark.parametrize("command", ["up", "down", "demo"])
def test_local_commands_are_rejected_on_aws(shell: Shell, command: str) -> None:
    error = shell.refused(command, "--backend", "aws")
    assert (error["field"], error["fix"]) == ("--backend", "use --backend local")


@pytest.mark.parametrize("arguments", [("refresh", "--github-scope", "a/b"), ("status",), ANY_RUN], ids=lambda a: a[0])
def test_aws_requires_a_region(shell: Shell, arguments: tuple[str, ...]) -> None:
    error = shell.refused(*arguments, "--backend", "aws")
    assert (error["field"], error["fix"]) == ("AWS_REGION", "set AWS_REGION")


#: Command, field, parts of the message, and parts of the fix. Run before a backend exists: nothing is called.
MISTAKES = [
    # Options
    ("provision --ru-id 3", "--ru-id", "--ru-id", "did you mean '--run-id'? see remuda provision --help"),
    ("stauts", None, "stauts", "did you mean 'status'?"),
    ("refresh --github-token x", "--github-token", "--github-token", "set REMUDA_GITHUB_TOKEN: other users"),
    ("deploy --monthly-budget 5", "--monthly-budget", "--monthly-budget", "run remuda budget 500 --backend aws"),
    ("deploy --pre-runner-script x", "--pre-runner-script", "", "put the script into the image of --ami"),
    (
        "deploy --dry-run --dist . --region eu-central-1 --github-token @no",
        "--github-token",
        "no cannot be read",
        "name a readable file after the @",
    ),
    ("refresh --margin-sec 3", "--margin-sec", "--margin-sec", "set REMUDA_MARGIN_SEC, or margin-sec in remuda.toml"),
    ("status --yes", "--yes", "--yes", "it is an option of remuda terminate, deploy, destroy"),
    ("destroy --backend aws", "--backend", "--backend", "omit it: remuda destroy always works on AWS"),
    ("status --region eu-west-1", "--region", "--region", "set AWS_REGION"),
    ("up --max-uses 5", "--max-uses", "--max-uses", "run remuda refresh with --max-uses after remuda up"),
    ("budget -5", "-5", "-5", "give a number from 0, as in remuda budget 500"),
    ("budget much", "DOLLARS", "got 'much'", "such as remuda budget 500"),
    # Settings
    ("refresh --ami ami-01234567", "--ami", "is 'ami-01234567', which the local", "omit --ami, or use --backend aws"),
    ("doctor --ami ami-01234567", "--ami", "is 'ami-01234567', which the local", "omit --ami, or use --backend aws"),
    ("refresh --actions-runner-version 2.330.0", "--actions-runner-version", "2.330.0", "or use --backend aws"),
    ("refresh --prices nope.json", "--prices", "'nope.json' cannot be read", "JSON price table"),
    ("refresh --runner-sets @no.json", "--runner-sets", "'@no.json', but the file cannot be read", "after the @"),
    ("refresh --runner-sets sets.json", "--runner-sets", "'sets.json', the name of a file", "write @sets.json"),
    ("refresh --runner-sets @sets.json", "--runner-sets", "unknown key 'label'", "did you mean labels?"),
    ("""refresh --runner-sets '[{"name":"x","labels":[""],"max":1}]'""", "--runner-sets", "labels[0] is ''", "give 1"),
    ("""refresh --runner-sets '{"name":"x","max":1}'""", "--runner-sets", "is one set, not a list", "brackets"),
    (
        """refresh --resource-class-config '{"l":{"cpus":2}}'""",
        "--resource-class-config",
        "'cpus'",
        "did you mean cpu?",
    ),
    (
        """refresh --resource-class-config '{"l":{"cpu":2}}'""",
        "--resource-class-config",
        "'l' has no mmem",
        "give an int",
    ),
    ("""scale-down --idle-config '[{"idlecount":1}]'""", "--idle-config", "key 'idlecount'", "did you mean idleCount?"),
    ("provision --run-id https://github.com/a/b/actions/runs/12", "--run-id", "an address", "give the run id: 12"),
    ("refresh --github-scope https://github.com/acme/app", "--github-scope", "an address", "alone: acme/app"),
    # Ids
    ("drain i-abc", "INSTANCE", "is 'i-abc', with 3 digits", "give at least the first 8 digits after i-"),
    ("terminate i-", "INSTANCE", "is 'i-', with 0 digits", "give at least the first 8 digits after i-"),
    ("quarantine", "INSTANCE", "no instance is given", "name instances: remuda status --wide lists them"),
    ("explain i-1234567", "RUN|JOB|SET|INSTANCE", "with 7 digits", "give at least the first 8 digits after i-"),
    ("quarantine foo", "INSTANCE", "is 'foo', not an instance id", "run remuda status --wide"),
    ("drain --ami foo", "--ami", "is 'foo', not the id of an image", "such as ami-0123456789abcdef0"),
    # Places
    ("down --dir /nowhere", "--dir", "is '/nowhere', where there is no local backend", "--dir"),
    ("status --dir sets.json", "--dir", "--dir sets.json is a file", "name the directory of remuda up"),
    ("status --dir 'a state'", "--dir", "in a state is not running", "run remuda up --dir 'a state'"),
    ("demo --dir sets.json", "--dir", "--dir sets.json cannot be used", "name a directory that you can write to"),
    ("down --purge", "--dir", "is '.remuda', where there is no local backend", "--dir"),
    ("destroy --yes --region eu-central-9", "--region", "is 'eu-central-9', which is not a region", "use eu-central-"),
    ("deploy --yes --region eu-cental-1 --dist .", "--region", "is 'eu-cental-1'", "use eu-central-1"),
]


@pytest.mark.parametrize(("command", "field", "message", "fix"), MISTAKES, ids=[each[0][:60] for each in MISTAKES])
def test_a_mistake_is_answered_with_field_value_and_fix(
    shell: Shell, command: str, field: str | None, message: str, fix: str
) -> None:
    (shell.folder / "sets.json").write_text('[{"name": "gpu", "label": ["gpu"], "max": 1}]')
    error = shell.refused(*shlex.split(command))
    assert error["type"] == "UserError"
    assert field in {error["field"], None}
    assert message in error["message"]
    assert fix in error["fix"]


def test_an_option_without_its_value_names_the_command(shell: Shell) -> None:
    done = shell.here("refresh", "--ami")
    assert done.stderr == "remuda: Option '--ami' requires an argument; see remuda refresh --help\n"


@pytest.mark.parametrize(
    ("region", "fix"), [("eu-central-9", "use eu-central-"), ("frankfurt", "use a region"), ("EU-WEST-1", "eu-west-1")]
)
def test_an_unknown_region_is_rejected_before_any_call(shell: Shell, region: str, fix: str) -> None:
    shell.environ["AWS_REGION"] = region
    error = shell.refused("status", "--backend", "aws")
    assert (error["field"], region in error["message"]) == ("AWS_REGION", True)
    assert fix in error["fix"]
    assert "pip install --upgrade botocore" in error["fix"]


def test_an_aws_setting_of_the_environment_is_reported_on_the_local_backend(backend: Shell) -> None:
    """A settings file may serve both backends."""
    backend.environ["REMUDA_AMI"] = "ami-01234567"
    done = backend("refresh", "--dir", "state")
    del backend.environ["REMUDA_AMI"]
    assert (done.returncode, "warning: REMUDA_AMI has no effect on the local backend" in done.stderr) == (0, True)


def test_json_settings_are_read_from_a_file(backend: Shell) -> None:
    (backend.folder / "classes.json").write_text('{"large": {"cpu": 1, "mmem": 512}}')
    done = backend("config", "--json", "--resource-class-config", "@classes.json")
    assert done.returncode == 2, "config takes no settings as flags"
    backend.environ["REMUDA_RESOURCE_CLASS_CONFIG"] = "@classes.json"
    done = backend("config", "--json")
    del backend.environ["REMUDA_RESOURCE_CLASS_CONFIG"]
    assert json.loads(done.stdout)["settings"]["resource-class-config"]["value"] == {"large": {"cpu": 1, "mmem": 512}}


#: Workflow, place, and parts of the message and of the fix.
WORKFLOWS = [
    ("{runs-on: ubuntu-latest, if: always, %s}", "jobs.a.if", "names always, a function", "write always()"),
    ("{runs-on: ubuntu-latest, if: '${{ always }}', %s}", "jobs.a.if", "names always, a function", "write always()"),
    ("{runs-on: '', %s}", "jobs.a.runs-on", "is missing", "give ubuntu-latest"),
    ("{runs-on: [large, ''], %s}", "jobs.a.runs-on[1]", "is ''", "give the label of a runner"),
    ("{runs-on: '${{ github.runid }}', %s}", "jobs.a.runs-on", "github.runid", "did you mean run_id?"),
    ("{runs-on: ubuntu-latest, need: b, %s}", "jobs.a.need", "is an unknown key", "did you mean needs?"),
    ("{runs-on: ubuntu-latest, needs: b, %s}", "jobs.a.needs", "names 'b', which does not exist", "name a job"),
    ("{runs-on: ubuntu-latest, steps: {run: 'true'}}", "jobs.a.steps", "is not a list", "begins with '- '"),
    (
        "{runs-on: ubuntu-latest, steps: [{uses: acme/remuda@v1, with: {mode: provision}}]}",
        "jobs.a.steps[0].uses",
        "names the action 'acme/remuda@v1'",
        "as in run: remuda provision --instance-count 2",
    ),
    (
        "{runs-on: ubuntu-latest, steps: [{run: 'true', with: {x: y}}]}",
        "jobs.a.steps[0].with",
        "is for actions, and the step runs commands",
        "set env instead",
    ),
    ("{runs-on: ubuntu-latest, timeout-minutes: 5m, %s}", "jobs.a.timeout-minutes", "is '5m'", "give minutes"),
]


@pytest.mark.parametrize("job", ["a b", "1", "a.b", "-a"])
def test_the_id_of_a_job_is_one_of_github(shell: Shell, job: str) -> None:
    (shell.folder / "w.yml").write_text(f"jobs:\n  {job}: {{runs-on: ubuntu-latest, steps: [{{run: 'true'}}]}}\n")
    error = shell.refused("run-workflow", "w.yml")
    assert (error["field"], error["message"]) == (f"jobs.{job}", f"line 2: jobs.{job} is no id of a job")
    assert "begin with a letter" in error["fix"]


@pytest.mark.parametrize(("job", "field", "message", "fix"), WORKFLOWS, ids=[each[0][:60] for each in WORKFLOWS])
def test_a_mistake_in_a_workflow_is_answered_with_its_place(
    shell: Shell, job: str, field: str, message: str, fix: str
) -> None:
    text = job % "steps: [{run: 'true'}]" if "%s" in job else job
    (shell.folder / "w.yml").write_text(f"on: push\njobs:\n  a: {text}\n")
    error = shell.refused("run-workflow", "w.yml")
    assert error["field"] == field
    assert message in error["message"]
    assert fix in error["fix"]


def test_at_most_three_other_backends_are_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [f"/srv/{name}" for name in ("a", "b c", "d", "e")]
    monkeypatch.setattr("remuda.wiring.local.running_backends", lambda _: others)
    assert shell.refused("down", "--dir", "elsewhere")["fix"] == "use --dir /srv/a or --dir '/srv/b c' or --dir /srv/d"


# State directory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [ANY_RUN, ("release", "--run-id", "1"), ("refresh",), ("status",)], ids=lambda a: a[0]
)
def test_a_stopped_backend_is_reported_with_the_command_to_start_it(shell: Shell, arguments: tuple[str, ...]) -> None:
    error = shell.refused(*arguments, "--dir", "elsewhere")
    # Backends of other tests may be running.
    assert (error["field"], error["fix"].partition(",")[0]) == ("--dir", "run remuda up --dir elsewhere")


@pytest.mark.parametrize("value", ["", "x" * 5_000], ids=["empty", "long"])
@pytest.mark.parametrize("arguments", [("up",), ("down", "--purge"), ("status",)], ids=lambda a: a[0])
def test_an_invalid_directory_is_rejected(shell: Shell, arguments: tuple[str, ...], value: str) -> None:
    assert shell.refused(*arguments, "--dir", value)["field"] == "--dir"


def test_a_file_as_state_directory_is_rejected(shell: Shell) -> None:
    shell.state.write_text("a file")
    error = shell.refused("up", "--dir", "state")
    assert (error["field"], error["fix"]) == ("--dir", "name a directory that you can write to")


@pytest.fixture
def store(shell: Shell) -> Path:
    """The path of the store in a directory whose backend seems to run."""
    (shell.state / "github").mkdir(parents=True)
    endpoint = {"url": "http://127.0.0.1:9", "pid": os.getpid(), "token": "t0ken"}
    (shell.state / "github" / "endpoint.json").write_text(json.dumps(endpoint))
    return shell.state / "remuda.db"


def test_a_missing_store_is_reported_with_the_command_to_create_it(shell: Shell, store: Path) -> None:
    error = shell.refused("status", "--dir", "state")
    assert "remuda.db" in error["message"]
    assert "remuda up" in error["fix"]


def test_a_corrupt_store_is_rejected(shell: Shell, store: Path) -> None:
    store.write_bytes(b"this is not a database" * 500)
    error = shell.refused("status", "--dir", "state")
    assert "remuda.db" in error["message"]
    assert "away" in error["fix"]


def test_a_database_of_another_program_is_rejected(shell: Shell, store: Path) -> None:
    with sqlite3.connect(store) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    assert "not a Remuda store" in shell.refused("status", "--dir", "state")["message"]


def test_a_directory_as_store_is_rejected(shell: Shell, store: Path) -> None:
    store.mkdir()
    assert "folder" in shell.refused("status", "--dir", "state")["message"]


def test_no_error_shows_the_token_of_the_local_github(shell: Shell, store: Path) -> None:
    store.write_bytes(b"garbage" * 500)
    done = shell("status", "--dir", "state", "--json")
    assert "t0ken" not in done.stdout + done.stderr


# Settings file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("pool = ", "config", "is not TOML"),
        ("pool = " + "[" * 50_000, "config", "is not TOML"),
        ("max-uses = " + "1" * 5_000, "config", "is not TOML"),
        ("instance-cuont = 1", "instance-cuont", "unknown key"),
        ("instance-count = 0", "instance-count", "instance-count must be an integer from 1 to 1000, got 0"),
        ("instance-count = true", "instance-count", "instance-count must be an integer from 1 to 1000, got True"),
        ("[resource-class-config.large]\ncpu = 0\nmmem = 1", "resource-class-config", "cpu of 'large' is 0"),
        ("[[runner-sets]]\nname = 'x'\nlabel = ['a']\nmax = 1", "runner-sets", "unknown key 'label'"),
    ],
    ids=["syntax", "nesting", "number", "key", "value", "truth", "table", "set"],
)
def test_an_invalid_settings_file_is_reported_before_any_change(
    shell: Shell, text: str, field: str, message: str
) -> None:
    (shell.folder / "remuda.toml").write_text(text)
    error = shell.refused("up")
    assert (error["field"], message in error["message"]) == (field, True)
    assert error["fix"] or "must be" in error["message"]


@pytest.mark.parametrize(
    ("text", "field", "fix"),
    [
        ("[pool]\nname = 'ci'", "pool", 'write pool = "ci"'),
        ("[max-uses]\nvalue = 7", "max-uses", "write max-uses = 7"),
        ("[max-uses]", "max-uses", "write max-uses = 50"),
        ("[github-token]\nvalue = 'ghp_s3cret'", "github-token", "write github-token = …"),
        ("[runner-sets]\nname = 'x'", "runner-sets", "write [[runner-sets]], with two brackets, above each element"),
        ("[idle-config]\ncron = 'x'", "idle-config", "write [[idle-config]], with two brackets, above each element"),
        ("[remuda]\npool = 'ci'", "remuda", "write its settings at the top of the file, without [remuda]"),
        ("[scale-down]\nidle_config = []", "scale-down", "did you mean scale_down?"),
        ("runner_sets = []", "runner_sets", "did you mean runner-sets?"),
        ("Pool = 'ci'", "Pool", "did you mean pool?"),
        ("pool = ci", "config", 'texts have quotation marks, as in pool = "ci"'),
    ],
)
def test_a_settings_file_with_a_wrong_form_is_answered_in_toml(shell: Shell, text: str, field: str, fix: str) -> None:
    (shell.folder / "remuda.toml").write_text(text)
    error = shell.refused("refresh")
    assert error["field"] == field
    assert fix in error["fix"]
    assert "s3cret" not in str(error)


@pytest.mark.parametrize("command", ["down", "refresh", "provision", "release", "status", "config"])
def test_every_command_reports_an_invalid_settings_file(shell: Shell, command: str) -> None:
    (shell.folder / "remuda.toml").write_text("pool = ")
    assert shell.refused(command)["field"] == "config"


def test_a_named_settings_file_must_exist(shell: Shell) -> None:
    error = shell.refused("config", "--config", "missing.toml")
    assert (error["field"], "missing.toml" in error["message"]) == ("config", True)


def test_config_prints_values_and_sources_but_no_secret(shell: Shell) -> None:
    (shell.folder / "remuda.toml").write_text('github-token = "ghp_s3cret"\nmax-uses = 7')
    done = shell("config", "--json")
    rows = json.loads(done.stdout)["settings"]
    assert rows["max-uses"] == {"value": 7, "source": "file: max-uses"}
    assert rows["github-token"]["value"] == "(hidden)"
    assert "ghp_s3cret" not in done.stdout + done.stderr + shell("config").stderr


# Imports of help ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["provision", "--help"], ["--version"]], ids=" ".join)
def test_help_imports_neither_clients_nor_servers(shell: Shell, arguments: list[str]) -> None:
    probe = (
        "import sys\n"
        "from remuda.cli.main import main\n"
        f"code = main({arguments!r})\n"
        "heavy = {'boto3', 'botocore', 'aiobotocore', 'httpx', 'starlette', 'uvicorn', 'yaml', 'sqlite3',\n"
        "         'asyncio', 'pydantic', 'rich'}\n"
        "sys.exit(code or ', '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], env=shell.environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# Running backend --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("up"))
    try:
        up = shell("up", "--dir", "state", "--quiet")
        assert up.returncode == 0, up.stderr
        refreshed = shell("refresh", "--dir", "state", "--quiet")
        assert refreshed.returncode == 0, refreshed.stderr
        yield shell
    finally:
        down = shell("down", "--dir", "state", "--purge", "--quiet")
        assert down.returncode == 0, down.stderr


def machines(shell: Shell) -> list[Path]:
    return sorted((shell.state / "instances").glob("i-*"))


def test_an_unknown_class_is_reported_with_the_known_ones(backend: Shell) -> None:
    done = backend(*ANY_RUN, "--dir", "state", "--resource-class", "colossal", "--json", "--quiet")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["field"]) == (2, "resource-class")
    assert "colossal" in error["message"]
    assert "xlarge" in error["fix"]
    assert machines(backend) == []


def test_an_unknown_class_is_not_drained(backend: Shell) -> None:
    done = backend("drain", "--dir", "state", "--resource-class", "xxlarge", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["field"], error["fix"]) == (2, "--resource-class", "did you mean xlarge?")


@pytest.mark.parametrize("command", [("deploy", "--dry-run", "--dist", "."), ("refresh", "--backend", "aws")])
def test_classes_that_do_not_fit_into_a_policy_are_refused_before_any_call(
    shell: Shell, command: tuple[str, ...]
) -> None:
    classes = {
        name: {"cpu": 2, "mmem": 4096, "instance-types": " ".join(f"{name}{i}i.{i}xlarge" for i in range(1, 70))}
        for name in "cmr"
    }
    shell.environ["AWS_REGION"] = "eu-central-1"
    more = ("--pool", "ci", "--github-scope", "acme", "--resource-class-config", json.dumps(classes))
    error = shell.refused(*command, *more)
    assert error["field"] == "resource-class-config"
    assert "the policy provision for 3 classes has" in error["message"]
    assert "wildcard" in error["fix"]


def test_a_scope_without_a_token_is_reported_before_any_launch(backend: Shell) -> None:
    done = backend(*ANY_RUN, "--dir", "state", "--github-scope", "some/other", "--json", "--quiet")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["field"]) == (2, "github-scope")
    assert error["fix"] == "run remuda refresh --dir state --github-scope some/other"
    assert machines(backend) == []


def test_a_second_listener_says_how_to_wait(backend: Shell) -> None:
    sets = '[{"name": "x", "labels": ["x"], "resource-class": "large", "max": 1}]'
    assert backend("refresh", "--dir", "state", "--runner-sets", sets).returncode == 0
    until = time.monotonic() + LIMIT_S
    while json.loads(backend("status", "--dir", "state", "--json").stdout)["runner_sets"][0]["session"] != "open":
        assert time.monotonic() < until
    done = backend("listen", "--once", "--dir", "state", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["fix"]) == (4, "omit --once, to wait until the other listener ends")


def test_a_locked_store_is_unavailable(backend: Shell) -> None:
    connection = sqlite3.connect(backend.state / "remuda.db", timeout=LIMIT_S, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        done = backend(*ANY_RUN, "--dir", "state", "--json", "--quiet")
    finally:
        connection.close()
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["type"]) == (4, "Unavailable")
    assert "locked" in error["message"]
    assert "Traceback" not in done.stderr
    assert machines(backend) == []
