"""The Lambda function as it is uploaded: unpacked into an empty folder, and nothing else to import from."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import secrets
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import lambda_package
from remuda.fake_github.client import FakeGitHubClient
from tests.support.canary import Canaries, key_pair, minted
from tests.support.cloud import SCOPE, Cloud, cloud
from tests.support.emf import check_emf
from tests.support.registry import answered

#: As Lambda's runtime does: the level that the function's logs are set to, the event, a context with the time that is
#: left, the result or the error's own words with where it came from.
RUNTIME = """
import json, logging, os, sys, traceback
sys.path.insert(0, sys.argv[1])
logging.basicConfig(level=os.environ.get("AWS_LAMBDA_LOG_LEVEL", "WARNING"))
from remuda.aws_lambda.handler import handler

class Context:
    aws_request_id = "r-1"
    def get_remaining_time_in_millis(self):
        return int(sys.argv[3])

try:
    answer = {"result": handler(json.loads(sys.argv[2]), Context())}
except Exception as error:
    answer = {"errorType": type(error).__name__, "errorMessage": str(error)}
    answer["stackTrace"] = traceback.format_exception(error)
print(json.dumps(answer))
"""
LIMIT_S = 240
POOL = "function"
#: Its first test builds the package, from a registry: on a busy machine that takes minutes.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built for this interpreter: Lambda's own would not load here."""
    target = tmp_path_factory.mktemp("lambda") / "function.zip"
    machine = {"aarch64": "arm64"}.get(platform.machine(), platform.machine())
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with patch.dict(os.environ, answered(target.parent)):
        assert lambda_package.main(["--to", str(target), "--architecture", machine, "--python", version]) == 0
    return target


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the servers."""
    return tmp_path_factory.mktemp("cloud")


@pytest.fixture(scope="module")
def servers(home: Path) -> Iterator[Cloud]:
    with cloud(home) as started:
        yield started


@pytest.fixture(scope="module")
def canaries(servers: Cloud) -> Canaries:
    given = {name: secrets.token_urlsafe(30) for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")}
    return Canaries({**given, "GitHub token": servers.github_token})


class Function:
    """What it says is searched for credentials each time, whatever it was told to do."""

    def __init__(self, folder: Path, environment: dict[str, str], canaries: Canaries, github: Path) -> None:
        self._folder = folder
        self._environment = environment
        self._canaries = canaries
        self._github = github
        self.log: list[dict[str, Any]] = []
        #: The line of metrics that ends each invocation.
        self.metrics: dict[str, Any] = {}
        self.output = ""

    def invoke(self, event: Any, *, remaining_s: float = 100.0, **changed: str) -> dict[str, Any]:
        done = subprocess.run(
            # Isolated, and without this virtualenv's packages.
            [
                *(sys.executable, "-I", "-S", "-c", RUNTIME),
                *(str(self._folder), json.dumps(event), str(int(remaining_s * 1_000))),
            ],
            cwd=self._folder,
            env={**self._environment, **changed},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        self.output = done.stdout + done.stderr
        self._canaries.adopt(minted(self._github))
        assert self._canaries.find(self.output, "what the function says") == []
        *log, answer = done.stdout.splitlines()
        *self.log, self.metrics = [json.loads(line) for line in log]
        check_emf(self.metrics)
        result: dict[str, Any] = json.loads(answer)
        return result


@pytest.fixture(scope="module")
def function(
    package: Path, servers: Cloud, home: Path, canaries: Canaries, tmp_path_factory: pytest.TempPathFactory
) -> Function:
    folder = tmp_path_factory.mktemp("task")
    with zipfile.ZipFile(package) as archive:
        archive.extractall(folder)
    secret = servers.put_secret(f"remuda/{POOL}/github", json.dumps({"token": servers.github_token}))
    launch = {f"REMUDA_{name.replace('-', '_').upper()}": value for name, value in servers.launch.items()}
    return Function(
        folder,
        {
            **servers.environment,
            **{name: value for name, value in canaries.secrets.items() if name.startswith("AWS_")},
            **launch,
            "REMUDA_POOL": POOL,
            "REMUDA_GITHUB_SCOPE": SCOPE,
            "REMUDA_GITHUB_TOKEN": secret,
        },
        canaries,
        home / "github",
    )


def test_it_holds_no_tool_and_is_small(package: Path):
    with zipfile.ZipFile(package) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
    assert {"remuda", "aiobotocore", "jwt"} <= tops
    assert not tops & {"pytest", "ruff", "mypy", "hypothesis", "tests", "pip", "bin"}
    assert package.stat().st_size < 30_000_000


def test_refresh_applies_and_sweeps_with_a_token_from_secrets_manager(function: Function, servers: Cloud):
    # Where somebody looks for a fault, libraries tell all that they send and get.
    first = function.invoke({"command": "refresh"}, AWS_LAMBDA_LOG_LEVEL="DEBUG")["result"]
    assert f"tokens for {SCOPE}" in first["applied"]
    assert any("table" in line for line in first["applied"])
    assert first["errors"] == []
    assert function.log[-1]["event"] == "refresh-done"
    assert function.log[-1]["result"] == first
    assert (function.metrics["Pool"], function.metrics["Command"]) == (POOL, "refresh")
    assert (function.metrics["Failed"], function.metrics["Errors"], function.metrics["InstancesIdle"]) == (0, 0, 0)
    assert function.metrics["GithubCalls"] == sum(first["calls"]["github"].values())


def test_an_apps_key_from_secrets_manager_is_used_and_told_nowhere(
    function: Function, servers: Cloud, canaries: Canaries
):
    private, public = key_pair()
    canaries.add("App key", private)
    secret = servers.put_secret(f"remuda/{POOL}/app", json.dumps({"private_key": private}))
    app: dict[str, Any] = {"REMUDA_GITHUB_TOKEN": "", "REMUDA_GITHUB_APP_ID": "4242", "REMUDA_GITHUB_APP_KEY": secret}

    async def prepare() -> None:
        async with FakeGitHubClient(servers.github_url, servers.github_token) as github:
            await github.change_settings(app_id="4242", app_key=public, app_owners=[SCOPE.partition("/")[0]])

    asyncio.run(prepare())
    swept = function.invoke(
        {"detail-type": "Scheduled Event", "detail": {"command": "refresh", "sweep_only": True}},
        AWS_LAMBDA_LOG_LEVEL="DEBUG",
        **app,
    )
    assert swept["result"]["applied"] == []
    assert any(name.startswith("access token") for name in canaries.secrets), "it was given one for its key"


def test_what_cannot_work_is_one_sentence_that_fails_the_invocation(function: Function, servers: Cloud):
    unknown = function.invoke({"command": "reboot"})
    assert unknown["errorType"] == "UserError"
    assert "command is 'reboot'" in unknown["errorMessage"]

    down = function.invoke({"command": "refresh"}, AWS_ENDPOINT_URL_DYNAMODB="http://127.0.0.1:9")
    assert down["errorType"] == "Unavailable"
    assert "DynamoDB" in down["errorMessage"]
    assert (function.metrics["Failed"], function.metrics["Pool"]) == (1, POOL)

    secret = "arn:aws:secretsmanager:eu-central-1:000000000000:secret:remuda/none-AbCdEf"

    async def echo(token: str) -> None:
        async with FakeGitHubClient(servers.github_url, servers.github_token) as github:
            await github.clear_faults()
            if token:
                said = f"Bad request: Authorization: Bearer {token}"
                await github.set_fault("status", operation="list", times=None, status=422, message=said)

    asyncio.run(echo(servers.github_token))
    refused = function.invoke({"command": "refresh"})
    asyncio.run(echo(""))
    assert "Bad request" in refused["errorMessage"], refused

    missing = function.invoke({"command": "refresh"}, REMUDA_GITHUB_TOKEN=secret)
    assert (missing["errorType"], secret in missing["errorMessage"]) == ("UserError", True)


def test_without_time_left_it_is_cut_and_the_next_event_goes_on(function: Function):
    cut = function.invoke({"command": "refresh"}, remaining_s=5.0)
    assert cut["errorType"] == "TimedOut", cut
    assert "was cut" in cut["errorMessage"]
    assert function.invoke({"command": "refresh"})["result"]["errors"] == []
