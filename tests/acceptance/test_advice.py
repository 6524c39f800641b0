"""Every command that the product advises exists, ends, and does not fail.

The commands are found in the source and in what commands print, so that a new advice is tested by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from remuda.cli.main import app
from tests.support.advice import advised_in_source, commands_in
from tests.support.cli import CommandResult, run_cli
from tests.support.local_backend import run_local

#: Commands that run until they are interrupted, or on AWS, or that end the backend of the test. They are parsed only.
NOT_RUN = frozenset({"terminate", "listen", "dashboard", "deploy", "destroy", "down", "demo", "run-workflow"})
#: Values for the expressions of advised commands.
RUN_ID, SCOPE, SET = "77", "remuda/demo", "set.advised"
SETS = '[{"name": "advised", "labels": ["advised"], "resource-class": "large", "max": 1}]'
ADVISED = advised_in_source()
OF_RUN = "on: push\njobs:\n  one: {runs-on: '${{ github.run_id }}', steps: [{run: 'true'}]}\n"
OF_OTHER_RUN = "on: push\njobs:\n  one: {runs-on: 90/large, steps: [{run: 'true'}]}\n"
OF_NO_SET = "on: push\njobs:\n  one: {runs-on: [self-hosted, gpu], steps: [{run: 'true'}]}\n"
#: Fails in its first attempt.
FLAKY = "on: push\njobs:\n  one: {runs-on: advised, steps: [{run: 'test ${{ github.run_attempt }} = 2'}]}\n"


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("advice") / "a state"
    try:
        assert run_local(folder, "up").code == 0
        assert run_local(folder, "refresh", "--runner-sets", SETS).code == 0
        assert run_local(folder, "provision", "--run-id", RUN_ID).code == 0
        yield folder
    finally:
        assert run_local(folder, "down").document["left"] == []


def paste(backend: Path, words: Sequence[str], **variables: str) -> CommandResult:
    """Run an advised command as it is printed."""
    return run_cli(words, environment={**os.environ, **variables}, cwd=backend.parent)


def filled(words: Sequence[str], backend: Path) -> list[str]:
    """The command with values for the expressions of its text."""
    values = {"--dir": str(backend), "--run-id": RUN_ID, "--github-scope": SCOPE, "--instance-count": "1"}
    found = []
    for before, word in zip(["", *words], words, strict=False):
        is_open = "{" in word or word == "set.NAME"
        default = SET if word == "set.NAME" else "500" if words[0] == "budget" else RUN_ID
        found.append(values.get(before, default) if is_open else word)
    return found


def test_the_source_advises_commands() -> None:
    names = {words[0] for words in ADVISED.values()}
    assert {"up", "refresh", "status", "explain", "release", "provision", "budget", "listen", "deploy"} <= names


@pytest.mark.parametrize("words", ADVISED.values(), ids=ADVISED.keys())
def test_an_advised_command_is_accepted_by_the_command_line(words: list[str]) -> None:
    name, *rest = filled(words, Path("state"))
    app.commands[name].make_context(name, rest)


#: The same command is advised in many places.
RUN = {" ".join(words): words for words in ADVISED.values() if words[0] not in NOT_RUN}


@pytest.mark.parametrize("words", RUN.values(), ids=RUN.keys())
def test_an_advised_command_runs(backend: Path, words: list[str]) -> None:
    has_dir = "--dir" in words
    # Some are steps of workflows, which have the id of their run.
    done = paste(
        backend, [*filled(words, backend), *(() if has_dir else ("--dir", str(backend)))], GITHUB_RUN_ID=RUN_ID
    )
    # A second provision of the run is refused; its advice is to release the first.
    assert done.code == 0 or "remuda release" in done.stderr, done.stderr


# Printed commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("drain", "i-0123456789abcdef0"),
        ("drain", "i-abc"),
        ("explain", "i-abc"),
        ("provision", "--run-id", "78", "--github-scope", "some/other"),
        ("provision", "--run-id", RUN_ID),
        ("provision", "--run-id", "79", "--resource-class", "colossal"),
        ("provision", "--run-id", "80", "--instance-count", "900"),
        ("budget",),
        ("budget", "much"),
        ("refresh", "--monthly-budgett", "5"),
        ("explain", RUN_ID),
        ("config", "--pool"),
        ("status",),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_a_printed_command_runs(backend: Path, arguments: tuple[str, ...]) -> None:
    words = [*arguments, "--dir", str(backend)]
    printed = paste(backend, words)
    for command in commands_in(printed.stdout + printed.stderr):
        assert {"--dir", "--help"} & set(command), f"{command} does not name the backend"
        done = paste(backend, command)
        assert done.code == 0, (command, done.stderr)


def test_status_of_a_stopped_backend_says_how_to_start_it(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    try:
        (again,) = commands_in(run_cli(["up", "--dir", str(folder)], environment=os.environ, cwd=tmp_path).stderr)
        assert paste(folder, again).code == 0
        run_local(folder, "down")
        stopped = paste(folder, ["status", "--dir", str(folder)])
        advised = list(commands_in(stopped.stderr + stopped.stdout))
        assert ["up", "--dir", str(folder)] in advised
        assert {paste(folder, words).code for words in advised} == {0}
        assert "is not running" not in paste(folder, ["status", "--dir", str(folder)]).stderr
    finally:
        run_local(folder, "down")


def test_the_advice_after_a_failed_job_of_a_set_ends(backend: Path, tmp_path: Path) -> None:
    file = tmp_path / "flaky.yml"
    file.write_text(FLAKY)
    failed = paste(backend, ["run-workflow", str(file), "--dir", str(backend)])
    assert failed.code == 1, failed.stderr
    (words,) = commands_in(failed.stderr.splitlines()[-1])
    assert words[-1] == "--rerun-failed"
    assert paste(backend, words).code == 0


def test_a_refused_job_says_why_and_is_not_to_be_run_again(backend: Path, tmp_path: Path) -> None:
    """A job asks for the runners of a run that is not its own."""
    assert run_local(backend, "provision", "--run-id", "90").code == 0
    file = tmp_path / "refused.yml"
    file.write_text(OF_OTHER_RUN)
    failed = paste(backend, ["run-workflow", str(file), "--dir", str(backend)])
    assert failed.code == 1, failed.stderr
    assert "Remuda refused this job: it belongs to run" in failed.stderr
    assert "this machine is assigned to run " in failed.stderr
    assert "correct runs-on of the jobs that were refused" in failed.stderr
    assert "--rerun-failed" not in failed.stderr
    assert run_local(backend, "release", "--run-id", "90").code == 0


@pytest.mark.parametrize(("text", "command"), [(OF_RUN, "provision"), (OF_NO_SET, "refresh")], ids=["run", "set"])
def test_the_command_for_a_waiting_job_gets_it_a_runner(backend: Path, tmp_path: Path, text: str, command: str) -> None:
    file = tmp_path / "waiting.yml"
    file.write_text(text)
    words = [sys.executable, "-m", "remuda", "run-workflow", str(file), "--dir", str(backend)]
    waiting = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=backend.parent)
    assert waiting.stderr is not None
    with waiting.stderr as lines:
        assert any("to get a runner" in line for line in lines)
        (found,) = commands_in(next(lines))
        assert found[0] == command
        done = paste(backend, found)
        assert done.code == 0, done.stderr
        rest = lines.read()
    assert waiting.wait() == 0, rest
