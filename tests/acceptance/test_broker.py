"""The whole path of a workflow step through the broker: action, OIDC token, Lambda, AWS servers and agents."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import jwt
import pytest

from remuda.ports.machine import StepResult
from tests.support.action_steps import ROOT, ActionResult
from tests.support.aws.in_process_agents import ThreadedAgents, agents_in_thread
from tests.support.aws.servers import LOOPBACK
from tests.support.aws.stack import SCOPE, AwsStack
from tests.support.broker import BrokerStack, broker_stack, workflow_role
from tests.support.bundle_builds import shared_bundles
from tests.support.leak_scanner import LeakScanner, ObservedProcesses, key_pair, observe_processes

POOL = "brokered"
LIMIT_S = 60.0
#: Seconds until a runner sends the next signal to a cancelled step, and an allowance for a busy machine.
SIGTERM_AFTER_S, BUSY_MACHINE_S = 7.5, 15.0
#: The first test may build the bundles.
pytestmark = pytest.mark.timeout(600)

run_ids = count(1000)


@pytest.fixture(scope="module")
def broker(stack: AwsStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerStack]:
    (package,) = shared_bundles(tmp_path_factory).glob("remuda-lambda-*.zip")
    with broker_stack(stack, POOL, package) as started:
        yield started


@pytest.fixture(scope="module")
def pool_agents(stack: AwsStack, broker: BrokerStack) -> Iterator[ThreadedAgents]:
    with agents_in_thread(stack, POOL) as agents:
        yield agents


@pytest.fixture
def agents(pool_agents: ThreadedAgents) -> ThreadedAgents:
    pool_agents.resume()
    pool_agents.pool_agents.registration = StepResult(ok=True)
    return pool_agents


@pytest.fixture
def run_id() -> str:
    return str(next(run_ids))


def run_step(broker: BrokerStack, run: str, mode: str, **inputs: str) -> ActionResult:
    job = broker.job(run, **broker.token_variables(run))
    return job.run(**{"mode": mode, "pool": POOL, **inputs})


def check_refused(done: ActionResult, message: str, fix: str, code: int = 2) -> None:
    """One annotation with the reason and the fix; no output, and a summary."""
    assert done.code == code, done.log
    (error,) = done.annotations("error")
    assert message in error.data
    assert fix in error.data
    assert done.outputs["label"] == ""
    assert "failed" in done.summary


# Provision and release ------------------------------------------------------------------------------------------------


def test_provision_and_release_with_a_role_that_may_only_invoke(
    broker: BrokerStack, agents: ThreadedAgents, run_id: str
):
    first = run_step(broker, run_id, "provision", instance_count="2", max_runtime_min="5")
    assert first.code == 0, first.log
    ids = json.loads(first.outputs["instance-ids"])
    assert first.outputs == {"label": run_id, "instance-ids": json.dumps(ids), "reused": "0", "created": "2"}
    assert {agents.states()[name] for name in ids} == {"running"}
    assert f"### remuda provision: 2 runners for run {run_id}" in first.summary
    assert not first.annotations("error") + first.annotations("warning")
    assert {broker.role.secret, broker.role.session_token} < first.masks

    back = run_step(broker, run_id, "release")
    assert back.code == 0, back.log
    assert {agents.states()[name] for name in ids} == {"idle"}
    assert back.summary.startswith(f"### remuda release: run {run_id}\n\n2 released, in ")
    assert set(broker.server.operations) <= {"provision", "release", "state"}


def test_function_url_needs_no_credentials_of_aws(broker: BrokerStack, agents: ThreadedAgents, run_id: str):
    without = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SESSION_TOKEN": "", "AWS_REGION": ""}
    variables = {**broker.token_variables(run_id), **without, "AWS_ENDPOINT_URL_LAMBDA": ""}
    url = broker.server.function_url(broker.function.name)
    done = broker.job(run_id, **variables).run(mode="provision", pool=POOL, broker_url=url)
    assert done.code == 0, done.log
    assert done.outputs["label"] == run_id
    refused = broker.job(run_id, **variables).run(mode="provision", pool=POOL, broker_url=url, resource_class="huge")
    check_refused(refused, "resource-class 'huge'", "large")
    assert broker.job(run_id, **variables).run(mode="release", pool=POOL, broker_url=url).code == 0


@pytest.mark.skipif(shutil.which("aws") is None, reason="the AWS CLI is not installed: the fallback is not tested")
def test_old_curl_leaves_the_signature_to_the_aws_cli(
    broker: BrokerStack, agents: ThreadedAgents, run_id: str, tmp_path: Path
):
    # As on Ubuntu 22.04. It would sign without the session token.
    (tmp_path / "curl").write_text(
        f'#!/bin/sh\n[ "$1" != --version ] || exec echo "curl 7.81.0"\nexec {shutil.which("curl")} "$@"\n'
    )
    (tmp_path / "curl").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    variables = {**broker.token_variables(run_id), "PATH": path}
    done = broker.job(run_id, **variables).run(mode="release", pool=POOL)
    assert done.code == 0, done.log
    assert "nothing to release" in done.summary
    refused = broker.job(run_id, **variables).run(mode="release", pool="other")
    check_refused(refused, "AWS refused to invoke remuda-other-broker (AccessDeniedException)", "workflow role")


def test_long_provision_shows_progress_with_fresh_tokens_and_leaks_none(
    broker: BrokerStack, agents: ThreadedAgents, run_id: str
):
    variables = broker.token_variables(run_id)
    scanner = LeakScanner(
        {
            "secret key": broker.role.secret,
            "session token": broker.role.session_token,
            "request token": variables["ACTIONS_ID_TOKEN_REQUEST_TOKEN"],
        }
    )
    agents.pause()
    job = broker.job(run_id, **variables)
    with observe_processes() as processes, short_tokens(broker):
        step = job.start_last(mode="provision", pool=POOL, resource_class="xlarge")
        step.read_until("0 of 1 runner registered after ")
        wait_for_curl(processes)
        agents.resume()
        done = job.end_last(step, step.finish(LIMIT_S))
    assert done.code == 0, done.log
    assert done.outputs["label"] == run_id
    tokens = [mask for mask in done.masks if mask.count(".") == 2]
    # Each poll got a new token, because the tokens live for a second only.
    assert len(tokens) > 1
    for number, token in enumerate(tokens):
        scanner.add(f"token {number}", token.rpartition(".")[2])
    assert scanner.find(done.visible_text(), "output of the step") == []
    assert scanner.find_all(processes.argv()) == []
    assert scanner.find(broker.function.log.read_text(), "log of the function") == []
    assert run_step(broker, run_id, "release").code == 0


def wait_for_curl(processes: ObservedProcesses) -> None:
    """Wait until a process of curl, which sends the token, has been read: the step polls the broker until it ends."""
    deadline = time.monotonic() + LIMIT_S
    while not any(b"curl\0-q\0" in line for line in processes.argv().values()):
        assert time.monotonic() < deadline, "the step runs curl"
        processes.poll()


@contextmanager
def short_tokens(broker: BrokerStack, life_s: float = 1.0) -> Iterator[None]:
    async def change(seconds: float) -> None:
        async with broker.stack.github_client() as github:
            await github.change_settings(id_token_life_s=seconds)

    asyncio.run(change(life_s))
    try:
        yield
    finally:
        asyncio.run(change(300.0))


def test_lost_connection_is_followed_to_the_result(broker: BrokerStack, agents: ThreadedAgents, run_id: str):
    broker.server.cut.append("provision")
    done = run_step(broker, run_id, "provision")
    assert done.code == 0, done.log
    assert any(line.startswith("the connection to the broker was lost (curl: (52)") for line in done.log)
    assert done.outputs["label"] == run_id
    (name,) = json.loads(done.outputs["instance-ids"])
    assert agents.states()[name] == "running"
    assert run_step(broker, run_id, "release").code == 0


def test_cancelled_step_stops_its_provision(broker: BrokerStack, agents: ThreadedAgents, run_id: str):
    agents.pause()
    before = agents.states()
    job = broker.job(run_id, **broker.token_variables(run_id))
    step = job.start_last(mode="provision", pool=POOL, resource_class="2xlarge")
    step.read_until("0 of 1 runner registered after ")
    os.kill(step.process.pid, signal.SIGINT)
    done = job.end_last(step, step.finish(SIGTERM_AFTER_S + BUSY_MACHINE_S))
    assert done.code == 130, done.log
    assert "### remuda provision: cancelled" in done.summary
    (notice,) = done.annotations("notice")
    assert "given back" in notice.data
    assert agents.provisions(run_id) == ["released"]
    assert {state for name, state in agents.states().items() if name not in before} == {"terminating"}
    assert done.outputs["label"] == ""


def test_step_cancelled_before_its_request_has_nothing_to_stop(broker: BrokerStack, run_id: str):
    with token_server(lambda: None) as url:
        variables = {"ACTIONS_ID_TOKEN_REQUEST_URL": url, "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "any"}
        job = broker.job(run_id, **variables)
        step = job.start_last(mode="provision", pool=POOL)
        step.read_until("::add-mask::")
        os.kill(step.process.pid, signal.SIGINT)
        done = job.end_last(step, step.finish(SIGTERM_AFTER_S + BUSY_MACHINE_S))
    assert done.code == 130, done.log
    assert [notice.data for notice in done.annotations("notice")] == ["interrupted"]


@contextmanager
def step_with_curl(folder: Path, cases: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A provision whose curl is a script: these cases decide by its configuration."""
    curl = folder / "curl"
    token = """*Bearer*) printf '{"value": "a.b.c"}\\n200' ;;"""
    curl.write_text(f"#!/bin/bash\nrequest=$(cat)\ncase $request in\n{token}\n{cases}\nesac\n")
    curl.chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "FOLDER": str(folder),
        "RUNNER_TEMP": str(folder),
        "INPUT_MODE": "provision",
        "INPUT_BROKER_URL": "https://broker.example",
        "ACTIONS_ID_TOKEN_REQUEST_URL": "https://github.example/?",
        "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "any",
        "GITHUB_RUN_ID": "1",
        **variables,
    }
    command = ["bash", str(ROOT / "deploy" / "action" / "broker.sh")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as step:
        yield step


def test_request_for_a_provision_does_not_follow_its_cancellation(tmp_path: Path):
    # The provision is still connecting when the step is cancelled.
    cases = r"""
    *'"provision\"'*)
      echo >"$FOLDER/started"
      until [ -e "$FOLDER/cancelled" ]; do sleep 0.01; done
      touch "$FOLDER/sent-late"
      ;;
    *'"cancel\"'*)
      touch "$FOLDER/cancelled"
      sleep 0.5
      printf '{"exit": "130", "done": "true", "log": "", "outputs": "", "summary": ""}\n200'
      ;;
    """
    os.mkfifo(tmp_path / "started")
    with step_with_curl(tmp_path, cases) as step:
        # Ends when curl opens the other side.
        (tmp_path / "started").read_text()
        step.send_signal(signal.SIGINT)
        output, _ = step.communicate(timeout=BUSY_MACHINE_S)
    assert step.returncode == 130, output
    assert (tmp_path / "cancelled").exists()
    assert not (tmp_path / "sent-late").exists()


@pytest.mark.parametrize(("file", "outputs"), [("missing/output", "bGFiZWw9MQo="), ("output", "?")])
def test_lost_outputs_fail_the_step(tmp_path: Path, file: str, outputs: str):
    answer = f"""{{"exit": "0", "done": "true", "log": "", "outputs": "{outputs}", "summary": ""}}"""
    cases = rf"""*'"provision\"'*) printf '{answer}\n200' ;;"""
    with step_with_curl(tmp_path, cases, GITHUB_OUTPUT=str(tmp_path / file)) as step:
        output, _ = step.communicate(timeout=BUSY_MACHINE_S)
    assert step.returncode == 4, output
    assert "::error title=remuda provision::the outputs of this step cannot be written; release gives" in output


# Refusals of the broker -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "message", "fix", "code"),
    [
        ({"resource_class": "huge"}, "resource-class 'huge' is not", "large", 2),
        ({"instance_count": "101"}, "max-instances", "", 3),
        ({"instance_count": "1; touch x"}, "instance-count must be an integer", "got '1; touch x'", 2),
        ({"run_id": "1\n::error::x"}, "run-id is '1\\n::error::x'", "github.run_id", 2),
        ({"github_scope": "acme"}, "github-scope is set by the pool", "direct mode", 2),
    ],
    ids=["class", "max-instances", "shell", "newline", "setting of the pool"],
)
def test_refused_input(
    broker: BrokerStack, agents: ThreadedAgents, run_id: str, inputs: dict[str, str], message: str, fix: str, code: int
):
    done = run_step(broker, run_id, "provision", **inputs)
    check_refused(done, message, fix, code)
    assert {command.name for command in done.commands} <= {"add-mask", "group", "endgroup", "error"}


def test_token_of_another_repository_or_run_is_refused(broker: BrokerStack, run_id: str):
    stranger = broker.job(run_id, **broker.token_variables(run_id, repository="eve/repo"))
    check_refused(stranger.run(mode="provision", pool=POOL), "repository eve/repo ", "Repositories")
    replayed = broker.job(run_id, **broker.token_variables("999"))
    check_refused(replayed.run(mode="provision", pool=POOL), "the token is of run 999, this step is of run", "request")
    attempt = broker.job(run_id, **broker.token_variables(run_id, run_attempt="2"))
    check_refused(attempt.run(mode="release", pool=POOL), "the token is of attempt 2 of run", "request")


def test_wrong_audience_is_refused(broker: BrokerStack, run_id: str):
    # The step asks for a token for the pool in its input, and the function is that of another pool.
    broker.add_function("misnamed")
    broker.server.assume(workflow_role("misnamed", key="ASIAMISNAMED"))
    variables = {**broker.token_variables(run_id), **broker.server.roles["ASIAMISNAMED"].environment()}
    done = broker.job(run_id, **variables).run(mode="release", pool="misnamed")
    check_refused(done, "remuda-misnamed", "remuda-brokered")


def test_forged_and_expired_tokens_are_refused(broker: BrokerStack, run_id: str):
    with short_tokens(broker, -60.0):
        expired = run_step(broker, run_id, "release")
    check_refused(expired, "expired", "new token")

    genuine = request_token(broker.token_variables(run_id))
    claims = jwt.decode(genuine, options={"verify_signature": False})
    header = jwt.get_unverified_header(genuine)
    private, _ = key_pair()
    forged = {
        "signature": jwt.encode(claims, private, "RS256", {"kid": header["kid"]}),
        "claim": tampered(genuine, repository_id="1"),
        "kid": jwt.encode(claims, private, "RS256", {"kid": "unknown"}),
        "issuer": jwt.encode({**claims, "iss": "https://evil.example"}, private, "RS256", {"kid": header["kid"]}),
    }
    for name, token in forged.items():
        with token_server(lambda token=token: token) as url:
            variables = {"ACTIONS_ID_TOKEN_REQUEST_URL": url, "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "any"}
            done = broker.job(run_id, **variables).run(mode="release", pool=POOL)
        assert done.code == 2, (name, done.log)
        (error,) = done.annotations("error")
        assert "token" in error.data
        assert token not in done.visible_text()


def request_token(variables: dict[str, str]) -> str:
    import httpx  # noqa: PLC0415 - only here

    url = variables["ACTIONS_ID_TOKEN_REQUEST_URL"] + f"&audience=remuda-{POOL}"
    headers = {"authorization": f"Bearer {variables['ACTIONS_ID_TOKEN_REQUEST_TOKEN']}"}
    return str(httpx.get(url, headers=headers, trust_env=False).json()["value"])


def tampered(token: str, **claims: str) -> str:
    """The token with other claims and its old signature."""
    header, payload, signature = token.split(".")
    document = {**json.loads(jwt.utils.base64url_decode(payload)), **claims}
    return f"{header}.{jwt.utils.base64url_encode(json.dumps(document).encode()).decode()}.{signature}"


@contextmanager
def token_server(token: Any) -> Iterator[str]:
    """A server in place of GitHub's that answers every request with this token, or not at all."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            value = token()
            if value is None:
                ended.wait()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"value": value}).encode())

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://{LOOPBACK}:{server.server_address[1]}/?api-version=2.0"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


# Refusals before the broker -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "head", "message", "fix"),
    [
        ({}, "", "this job has no OIDC token", "permissions: id-token: write"),
        ({"GITHUB_EVENT_NAME": "pull_request"}, SCOPE, "this job has no OIDC token", "permissions: id-token: write"),
        ({"GITHUB_EVENT_NAME": "pull_request"}, "eve/repo", "pull requests from forks get no OIDC", "runner set"),
        ({"GITHUB_EVENT_NAME": "pull_request"}, "", "pull requests from forks get no OIDC token", "runner set"),
    ],
    ids=["no permission", "same repository", "fork", "deleted fork"],
)
def test_job_without_oidc_token(
    broker: BrokerStack, run_id: str, variables: dict[str, str], head: str, message: str, fix: str
):
    done = broker.job(run_id, head_repository=head, **variables).run(mode="provision", pool=POOL)
    check_refused(done, message, fix)


def test_refusals_of_aws_are_explained(broker: BrokerStack, run_id: str):
    token = broker.token_variables(run_id)

    def run(pool: str = POOL, **variables: str) -> ActionResult:
        return broker.job(run_id, **token, **variables).run(mode="release", pool=pool)

    check_refused(run("other"), "AWS refused to invoke remuda-other-broker (AccessDeniedException)", "workflow role")
    missing = broker.server.assume(workflow_role("missing", key="ASIAMISSING"))
    check_refused(run("missing", **missing.environment()), "remuda-missing-broker does not exist in", "pool and aws-")
    check_refused(run(AWS_SESSION_TOKEN="expired"), "AWS does not accept the credentials of this step", "configure-aws")
    check_refused(run(AWS_SECRET_ACCESS_KEY="wrong"), "(InvalidSignatureException)", "configure-aws-credentials")
    check_refused(run(AWS_ACCESS_KEY_ID=""), "this step has no AWS credentials", "broker-url")
    check_refused(run(AWS_REGION="nowhere"), "aws-region is not a region", "eu-central-1")
    check_refused(run(AWS_ENDPOINT_URL_LAMBDA="http://127.0.0.1:9"), "does not respond (curl: (7)", "network", 4)
    broken = broker.add_function("broken", PYTHONHOME="/nonexistent", REMUDA_POOL="broken")
    broken.handler = "remuda.nothing.handler"
    role = broker.server.assume(workflow_role("broken", key="ASIABROKEN"))
    check_refused(run("broken", **role.environment()), "the broker failed (RequestId:", "/remuda/broken/broker", 4)
    broken.concurrency = 0
    script = broker.action / "deploy" / "action" / "broker.sh"
    patient = script.read_text()
    script.write_text(patient.replace("THROTTLE_LIMIT=600", "THROTTLE_LIMIT=3"))
    try:
        check_refused(run("broken", **role.environment()), "AWS Lambda throttles", "concurrent executions", 4)
    finally:
        script.write_text(patient)


def test_a_step_waits_for_minutes_until_lambda_has_a_free_execution(broker: BrokerStack, run_id: str):
    """A new account has ten, which other waiting workflows may occupy."""
    before = len(broker.server.arrivals)
    broker.server.concurrency = 0
    # Later than the attempts of a request that cannot be sent.
    timer = threading.Timer(6.0, setattr, (broker.server, "concurrency", 1_000))
    timer.start()
    try:
        done = run_step(broker, run_id, "release")
    finally:
        timer.join()
    assert done.code == 0, done.log
    assert len([line for line in done.log if "no free concurrent execution" in line]) == 1
    assert len(broker.server.arrivals) - before >= 3


def test_unused_input_is_a_warning(broker: BrokerStack, run_id: str):
    done = run_step(broker, run_id, "release", idle_time_sec="60", github_token="ghp_not_for_the_broker")
    assert done.code == 0, done.log
    (warning,) = done.annotations("warning")
    assert warning.data.startswith("mode release does not use github-token, idle-time-sec with the broker")
    assert "ghp_not" not in done.visible_text()
