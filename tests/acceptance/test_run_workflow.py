"""`remuda run-workflow`: jobs run on instances of their run, failures skip dependents, releases always run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest

from remuda.fake_github import read_endpoint
from remuda.fake_github.client import FakeGitHubClient, JobStep
from tests.support.cli import CommandResult, run_installed
from tests.support.leak_scanner import LeakScanner, ObservedProcesses, issued_credentials, observe_processes
from tests.support.local_backend import run_local

LIMIT_S = 120

WORKFLOW = """
on: push
jobs:
  provision:
    runs-on: ubuntu-latest
    env: {FOR_ONE_STEP: "%s"}
    steps:
      - run: |
          remuda provision --instance-count 2
          test "$FOR_ONE_STEP" = "${{ env.FOR_ONE_STEP }}"
  test:
    needs: provision
    runs-on: ${{ github.run_id }}
    strategy: {matrix: {shard: [1, 2]}}
    steps:
      - run: test "$GITHUB_RUN_ID" = "${{ github.run_id }}" && %s
  after:
    needs: test
    runs-on: ubuntu-latest
    steps: [{run: "true"}]
  release:
    needs: [provision, test]
    if: always()
    runs-on: ubuntu-latest
    steps:
      - run: remuda release
"""


#: A step that ends when both jobs have begun, so that one fast instance cannot run both.
MEET = "{ touch %(at)s/${{ matrix.shard }}; until [ -e %(at)s/1 ] && [ -e %(at)s/2 ]; do sleep 0.05; done; }"
#: A step that waits until the test has read its processes, prints its environment and fails, because only the logs of
#: failed jobs are shown.
PRINT_ENVIRONMENT = r"{ touch %(at)s; while [ -e %(at)s ]; do sleep 0.05; done; printenv | tr '\n' ' '; false; }"


def document_of(done: CommandResult) -> Any:
    assert done.stdout, done.stderr
    return done.document


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("workflow") / "state"
    assert run_local(folder, "up").code == 0
    try:
        assert run_local(folder, "refresh").code == 0
        yield folder
    finally:
        assert document_of(run_local(folder, "down"))["left"] == []


def run(
    backend: Path, tmp_path: Path, run_id: str, step: str, env_value: str = "any", **variables: str
) -> CommandResult:
    file = tmp_path / "w.yml"
    file.write_text(WORKFLOW % (env_value, step))
    # As a separate process, because the test inspects its arguments and environment.
    words = ["run-workflow", str(file), "--run-id", run_id, "--dir", str(backend), "--json"]
    return run_installed(words, environment={**os.environ, **variables}, timeout_s=LIMIT_S)


def states(backend: Path) -> list[str]:
    return [item["state"] for item in document_of(run_local(backend, "status"))["instances"]]


def test_each_job_runs_on_an_instance_of_the_run(backend: Path, tmp_path: Path):
    done = run(backend, tmp_path, "9001", MEET % {"at": tmp_path})
    result = document_of(done)
    assert (done.code, result["conclusion"]) == (0, "success")
    conclusions = {job["name"]: job["conclusion"] for job in result["jobs"]}
    assert set(conclusions.values()) == {"success"}
    instances = [job["instance_id"] for job in result["jobs"] if job["name"].startswith("test")]
    assert len(set(instances)) == 2
    assert set(states(backend)) == {"idle"}


def test_lines_fit_a_narrow_terminal(backend: Path, tmp_path: Path) -> None:
    columns, file = 60, tmp_path / "wide.yml"
    step = {"name": "a step with quite a long name", "run": f"echo {'word ' * 40}"}
    jobs = {"build": {"runs-on": "ubuntu-latest", "steps": [step]}}
    file.write_text(json.dumps({"on": "push", "jobs": jobs}))
    terminal, end = os.openpty()
    termios.tcsetwinsize(end, (24, columns))
    words = [sys.executable, "-m", "remuda", "run-workflow", str(file), "--dir", str(backend), "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=end, env=environment) as process:
        os.close(end)
        shown = b""
        # The terminal fails to be read as soon as no process has it open.
        with contextlib.suppress(OSError):
            while part := os.read(terminal, 4096):
                shown += part
        os.close(terminal)
        assert process.wait(LIMIT_S) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()
    assert max(map(len, lines)) <= columns
    output = [line for line in lines if "word" in line]
    assert sum(line.count("word") for line in output) == 40, lines
    indent = output[0].index("word")
    assert {line[:indent] for line in output[1:]} == {" " * indent}, lines


@pytest.fixture
def scanner(backend: Path) -> LeakScanner:
    endpoint = read_endpoint(backend / "github")
    assert endpoint is not None
    made = {name: secrets.token_urlsafe(30) for name in ("AWS_SECRET_ACCESS_KEY", "FOR_ONE_STEP")}
    return LeakScanner({**made, "REMUDA_GITHUB_TOKEN": endpoint.token})


def test_failed_job_skips_dependents_and_still_releases(backend: Path, tmp_path: Path, scanner: LeakScanner):
    variables, request = dict(scanner.secrets), tmp_path / "request"
    step = PRINT_ENVIRONMENT % {"at": request}
    with observe_processes(request) as processes:
        done = run(backend, tmp_path, "9002", step, variables.pop("FOR_ONE_STEP"), **variables)
    result = document_of(done)
    assert (done.code, result["conclusion"]) == (1, "failure")
    conclusions = {job["name"]: job["conclusion"] for job in result["jobs"]}
    assert conclusions == {
        "provision": "success",
        "test (1)": "failure",
        "test (2)": "failure",
        "after": "skipped",
        "release": "success",
    }
    assert set(states(backend)) == {"idle"}
    assert "GITHUB_RUN_ID=9002" in done.stderr, "the jobs' environment"
    assert "run 9002: failure of test (1), test (2); run the whole workflow again" in done.stderr
    check_advice(backend, tmp_path, result["fix"])
    check_secrets(backend, scanner, done, processes)


def check_advice(backend: Path, tmp_path: Path, advice: str) -> None:
    """The command of the advice runs the workflow again; a re-run of the failed jobs is refused and says why."""
    command = advice.partition(": ")[2]
    assert command == f"remuda run-workflow {tmp_path / 'w.yml'} --dir {backend}"
    (tmp_path / "w.yml").write_text(WORKFLOW % ("any", "true"))
    words = command.split()[1:]
    refused = run_installed([*words, "--rerun-failed", "--json"], environment=os.environ, timeout_s=LIMIT_S)
    error = document_of(refused)["error"]
    assert (refused.code, error["field"]) == (2, "--rerun-failed")
    assert "test (1): it needs runners of run 9002, which has none, and provision succeeded" in error["message"]
    assert error["fix"] == f"run the whole workflow again: {command}"
    again = run_installed([*words, "--json"], environment=os.environ, timeout_s=LIMIT_S)
    assert (again.code, document_of(again)["conclusion"]) == (0, "success")


def check_secrets(backend: Path, scanner: LeakScanner, done: CommandResult, processes: ObservedProcesses) -> None:
    """A job gets the variables of its workflow, but no secret of the process that runs the workflow."""
    instances = f"{backend}/instances/".encode()
    environments = {name: data for name, data in processes.environ_of({os.getuid()}).items() if instances in data}
    assert environments
    assert scanner.find_all(environments) == []
    scanner.add_new(issued_credentials(backend / "github"))
    assert scanner.find_all({"stdout": done.stdout, "stderr": done.stderr, **processes.argv()}) == []
    with_secrets = {path for path in backend.rglob("*") if scanner.find(content(path), str(path))}
    assert {path.name.partition("-")[0] for path in with_secrets} == {"remuda.db", "github.db", "endpoint.json"}
    assert {path.parent for path in with_secrets} == {backend, backend / "github"}


def content(path: Path) -> bytes:
    """Read a file of the running backend, which may delete it at any time."""
    try:
        return path.read_bytes() if path.is_file() else b""
    except FileNotFoundError:
        return b""


def test_interrupted_run_cancels_its_jobs_and_still_releases(backend: Path, tmp_path: Path):
    file = tmp_path / "w.yml"
    file.write_text(WORKFLOW % ("any", "sleep 300"))
    process = subprocess.Popen(
        [sys.executable, "-m", "remuda", "run-workflow", str(file), "--run-id", "9003", "--dir", str(backend)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            if " on i-" in line:
                break
        process.send_signal(signal.SIGINT)
        rest = lines.read()
    assert process.wait(timeout=LIMIT_S) == 130, rest
    assert set(states(backend)) == {"idle"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jobs: [", "is not valid YAML"),
        ("jobs: {a: {runs-on: x, steps: [{uses: a/b}]}}", "line 1: jobs.a.steps[0].uses names the action 'a/b'"),
        ("jobs: {}", "jobs"),
    ],
)
def test_invalid_files_are_rejected(backend: Path, tmp_path: Path, text: str, message: str):
    file = tmp_path / "bad.yml"
    file.write_text(text)
    done = run_local(backend, "run-workflow", str(file))
    assert done.code == 2
    assert message in document_of(done)["error"]["message"]


FEATURES = r"""
name: features
on: push
env: {LEVEL: workflow}
jobs:
  provision:
    runs-on: ubuntu-latest
    outputs:
      label: ${{ steps.runners.outputs.label }}
    steps:
      - uses: actions/checkout@v4
      - id: runners
        run: |
          test "$(cat hello.txt)" = committed
          test "$GITHUB_SHA" = "$(git rev-parse HEAD)"
          remuda provision
          echo "label=$GITHUB_RUN_ID" >> "$GITHUB_OUTPUT"
          echo "provisioned on ${{ github.ref_name }}" >> "$GITHUB_STEP_SUMMARY"
  test:
    needs: provision
    runs-on: ${{ needs.provision.outputs.label }}
    env: {LEVEL: job}
    outputs:
      lines: ${{ steps.write.outputs.lines }}
    steps:
      - uses: actions/checkout@v4
        with: {path: sub}
      - id: write
        run: |
          test -f sub/hello.txt && test ! -e hello.txt
          printf 'lines<<END\none\ntwo=2\nEND\n' >> "$GITHUB_OUTPUT"
          echo "FROM_FILE=x y" >> "$GITHUB_ENV"
          mkdir tools && printf '#!/bin/sh\necho tool\n' > tools/mytool && chmod +x tools/mytool
          echo "$PWD/tools" >> "$GITHUB_PATH"
      - run: test "$FROM_FILE$(mytool)$LEVEL" = "x ytooljob" && test "${{ env.FROM_FILE }}" = "x y"
      - {id: bad, continue-on-error: true, run: exit 3}
      - {id: slow, continue-on-error: true, timeout-minutes: 0.001, run: sleep 60}
      - if: failure()
        run: echo must not run; exit 9
      - if: steps.bad.outcome == 'failure' && steps.slow.outcome == 'failure' && steps.bad.conclusion == 'success'
        shell: python
        working-directory: sub
        run: open("hello.txt").read(); print("visible", "in the tail"); raise SystemExit(4)
      - run: echo must not run
      - if: failure()
        run: echo "after a failure" >> "$GITHUB_STEP_SUMMARY"
  release:
    needs: [provision, test]
    if: always() && contains(needs.*.result, 'failure')
    runs-on: ubuntu-latest
    env: {LINES_OF_TEST: "${{ needs.test.outputs.lines }}"}
    steps:
      - run: remuda release
      - run: test "$LINES_OF_TEST" = "$(printf 'one\ntwo=2')"
"""


def test_features_of_workflows_on_both_kinds_of_runners(backend: Path, tmp_path: Path):
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "hello.txt").write_text("committed")
    (repository / "w.yml").write_text(FEATURES)
    git = ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "--quiet", "--initial-branch", "topic"], ["add", "."], ["commit", "--quiet", "-m", "m"]):
        subprocess.run([*git, *words], check=True)
    (repository / "hello.txt").write_text("changed")

    done = run_local(backend, "run-workflow", str(repository / "w.yml"), "--run-id", "9100")
    jobs = {job["name"]: job for job in document_of(done)["jobs"]}
    conclusions = {name: job["conclusion"] for name, job in jobs.items()}
    assert conclusions == {"provision": "success", "test": "failure", "release": "success"}, done.stderr
    assert jobs["provision"]["outputs"] == {"label": "9100"}
    assert jobs["provision"]["summary"] == "provisioned on topic\n"
    assert jobs["test"]["summary"] == "after a failure\n"
    outcomes = ["success", "success", "success", "failure", "failure", "skipped", "failure", "skipped", "success"]
    assert [step["outcome"] for step in jobs["test"]["steps"]] == outcomes
    assert jobs["test"]["steps"][3]["conclusion"] == "success"
    assert "uncommitted changes are not included" in done.stderr
    assert "| visible in the tail" in done.stderr
    assert "| provisioned on topic" in done.stderr
    assert (repository / "hello.txt").read_text() == "changed"
    assert sorted(path.name for path in repository.iterdir()) == [".git", "hello.txt", "w.yml"]


def test_all_problems_are_reported_before_anything_runs(backend: Path, tmp_path: Path):
    file, trace = tmp_path / "w.yml", tmp_path / "trace"
    file.write_text(
        f"on: push\njobs:\n  first:\n    runs-on: ubuntu-latest\n    steps: [{{run: touch {trace}}}]\n"
        "  test:\n    runs-on: x\n    services: {db: {image: postgres}}\n    container: node\n"
        "    steps: [{uses: a/b@v1}]\n"
    )
    done = run_local(backend, "run-workflow", str(file))
    assert done.code == 2
    error = document_of(done)["error"]
    assert error["message"] == "the workflow has 3 problems"
    assert [detail.split(" ")[2] for detail in error["details"]] == [
        "jobs.test.services",
        "jobs.test.container",
        "jobs.test.steps[0].uses",
    ]
    assert "error: line 8: jobs.test.services needs containers" in done.stderr
    assert not trace.exists()


async def test_runner_of_a_run_takes_no_job_that_asks_for_default_labels(backend: Path):
    """docs/adr/0040-default-labels.md: default labels would also match jobs of other runs."""
    assert run_local(backend, "provision", "--run-id", "9200").code == 0
    endpoint = read_endpoint(backend / "github")
    assert endpoint is not None
    async with FakeGitHubClient(endpoint.url, endpoint.token) as client:
        (runner,) = [item for item in await client.runners() if "9200" in item.labels]
        assert runner.labels == ("9200", "9200/large")
        steps, repo = [JobStep(run="true")], runner.scope
        wanted = (["self-hosted"], ["self-hosted", "linux"], ["self-hosted", "9200"], ["linux", "x64"], ["large"])
        others = [await client.queue_job(repo=repo, run_id=9201, labels=labels, steps=steps) for labels in wanted]
        own = await client.queue_job(repo=repo, run_id=9200, labels=["9200/LARGE"], steps=steps)
        while own.status != "completed":
            own = await client.job(own.id, wait_s=LIMIT_S)
        # The queue is served in order: the runner had the choice of the earlier ones.
        assert [(await client.job(job.id)).runner_name for job in others] == [None] * len(others)
        for job in others:
            await client.cancel_job(job.id)
    assert own.conclusion == "success"
    assert run_local(backend, "release", "--run-id", "9200").code == 0


TOKENS = """
on: push
permissions: {id-token: write}
jobs:
  allowed:
    runs-on: ubuntu-latest
    environment: production
    steps:
      - run: |
          curl --silent --fail -H "Authorization: Bearer $ACTIONS_ID_TOKEN_REQUEST_TOKEN" \\
            "$ACTIONS_ID_TOKEN_REQUEST_URL&audience=remuda-ci" > "%(folder)s/token"
  denied:
    runs-on: ubuntu-latest
    permissions: {contents: read}
    steps:
      - run: test -z "$ACTIONS_ID_TOKEN_REQUEST_URL$ACTIONS_ID_TOKEN_REQUEST_TOKEN"
"""


def test_only_jobs_with_permission_get_oidc_tokens(backend: Path, tmp_path: Path):
    file = tmp_path / "tokens.yml"
    file.write_text(TOKENS % {"folder": tmp_path})
    # As in a step on GitHub that has the permission itself.
    outer = {"ACTIONS_ID_TOKEN_REQUEST_URL": "http://127.0.0.1:9/?a=b", "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "outer"}
    words = ["run-workflow", str(file), "--run-id", "5150", "--dir", str(backend), "--json"]
    done = run_installed(words, environment={**os.environ, **outer})
    assert document_of(done)["conclusion"] == "success", done.stderr
    token = json.loads((tmp_path / "token").read_text())["value"]
    claims = jwt.decode(token, options={"verify_signature": False})
    assert (claims["aud"], claims["run_id"], claims["event_name"]) == ("remuda-ci", "5150", "workflow_dispatch")
    assert claims["sub"].endswith(":environment:production")
    assert token not in done.stdout + done.stderr

    refused = run_installed([*words[:3], "no-number", *words[4:]], environment=os.environ)
    assert refused.code == 2
    assert "requires a run id as on GitHub, got 'no-number'" in document_of(refused)["error"]["message"]


WITHOUT_RELEASE = """
on: push
jobs:
  provision:
    runs-on: ubuntu-latest
    steps: [{run: remuda provision --instance-count 1}]
  test:
    needs: provision
    runs-on: ${{ github.run_id }}
    steps: [{run: "true"}]
"""


@pytest.mark.timeout(2 * LIMIT_S)
def test_run_without_a_release_job_is_warned_about_and_released_by_the_sweeper(tmp_path: Path) -> None:
    """In its own backend, whose sweeper runs in the background with a short grace period."""
    backend, file = tmp_path / "state", tmp_path / "workflow.yml"
    file.write_text(WITHOUT_RELEASE)
    assert run_local(backend, "up").code == 0
    try:
        environment = os.environ | {"REMUDA_ENDED_RUN_GRACE_SEC": "2"}
        assert run_local(backend, "refresh", environment=environment).code == 0
        done = run_local(backend, "run-workflow", str(file), "--run-id", "4711", "--json")
        assert done.code == 0, done.stderr
        assert "warning: the workflow runs remuda provision and never remuda release" in done.stderr
        (warning,) = document_of(done)["warnings"]
        assert "needs: [provision, test]" in warning

        watch = [sys.executable, "-m", "remuda", "status", "--watch", "--json", "--every", "2", "--dir", str(backend)]
        with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            for line in watching.stdout:
                (shown,) = json.loads(line)["runs"]
                if shown["status"] == "unreleased":
                    break
            watching.terminate()
        explained = document_of(run_local(backend, "explain", "4711", "--json"))
        assert "its workflow run ended in attempt 1 and did not release it" in explained["title"]
        found = run_local(backend, "doctor", "--json")
        (check,) = [item for item in document_of(found)["checks"] if item["name"] == "releases"]
        assert (check["status"], check["fix"]) == ("warning", "add a release job with if: always() to its workflow")
    finally:
        assert document_of(run_local(backend, "down"))["left"] == []
