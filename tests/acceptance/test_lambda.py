"""The packaged Lambda function, unpacked into an empty folder and run without other packages."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from remuda.deployment.idle_cost import METRICS
from tests.support.aws.stack import SCOPE, AwsStack
from tests.support.bundle_builds import shared_bundles
from tests.support.emf import check_emf
from tests.support.leak_scanner import LeakScanner, issued_credentials, key_pair

#: Like Lambda's runtime: sets the log level, passes event and context, and prints the result or the error.
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
#: The first test builds the package, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle, built for this interpreter instead of Lambda's."""
    (bundle,) = shared_bundles(tmp_path_factory).glob("remuda-lambda-*.zip")
    return bundle


@pytest.fixture(scope="module")
def scanner(stack: AwsStack) -> LeakScanner:
    given = {name: secrets.token_urlsafe(30) for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")}
    return LeakScanner({**given, "GitHub token": stack.github.token})


class PackagedFunction:
    """Invokes the function and searches its output for credentials each time."""

    def __init__(self, folder: Path, environment: dict[str, str], scanner: LeakScanner, github: Path) -> None:
        self._folder = folder
        self._environment = environment
        self._scanner = scanner
        self._github = github
        self.log: list[dict[str, Any]] = []
        #: The last line of the invocation's log.
        self.metrics: dict[str, Any] = {}
        self.output = ""

    def invoke(self, event: Any, *, remaining_s: float = 100.0, **changed: str) -> dict[str, Any]:
        done = subprocess.run(
            # Isolated from the packages of this virtualenv.
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
        self._scanner.add_new(issued_credentials(self._github))
        assert self._scanner.find(self.output, "output of the function") == []
        *log, answer = done.stdout.splitlines()
        *self.log, self.metrics = [json.loads(line) for line in log]
        check_emf(self.metrics)
        result: dict[str, Any] = json.loads(answer)
        return result


@pytest.fixture(scope="module")
def function(
    package: Path, stack: AwsStack, scanner: LeakScanner, tmp_path_factory: pytest.TempPathFactory
) -> PackagedFunction:
    folder = tmp_path_factory.mktemp("task")
    with zipfile.ZipFile(package) as archive:
        archive.extractall(folder)
    secret = stack.put_secret(f"remuda/{POOL}/github", json.dumps({"token": stack.github.token}))
    launch = {f"REMUDA_{name.replace('-', '_').upper()}": value for name, value in stack.launch.items()}
    return PackagedFunction(
        folder,
        {
            **stack.environment(),
            **{name: value for name, value in scanner.secrets.items() if name.startswith("AWS_")},
            **launch,
            "REMUDA_POOL": POOL,
            "REMUDA_GITHUB_SCOPE": SCOPE,
            "REMUDA_GITHUB_TOKEN": secret,
        },
        scanner,
        stack.folder / "github",
    )


def test_package_is_small_and_contains_no_tools(package: Path):
    with zipfile.ZipFile(package) as archive:
        packages = {name.partition("/")[0] for name in archive.namelist()}
    assert {"remuda", "aiobotocore", "jwt"} <= packages
    assert not packages & {"pytest", "ruff", "mypy", "hypothesis", "tests", "pip", "bin"}


def test_refresh_applies_and_sweeps_with_a_token_from_secrets_manager(function: PackagedFunction, stack: AwsStack):
    # At this level, libraries would log requests and responses.
    first = function.invoke({"command": "refresh"}, AWS_LAMBDA_LOG_LEVEL="DEBUG")["result"]
    assert f"tokens for {SCOPE}" in first["applied"]
    assert any("table" in line for line in first["applied"])
    assert first["errors"] == []
    assert function.log[-1]["event"] == "refresh-done"
    assert function.log[-1]["result"] == first
    assert (function.metrics["Pool"], function.metrics["Command"]) == (POOL, "refresh")
    assert (function.metrics["Failed"], function.metrics["Errors"], function.metrics["InstancesIdle"]) == (0, 0, 0)
    assert function.metrics["RunnerVersionWarnings"] == 0
    assert function.metrics["GithubCalls"] == sum(first["calls"]["github"].values())
    # Which costs money, each of them.
    assert written(function) == METRICS["refresh"]
    function.invoke({"command": "scale-down", "dry_run": True}, ENVIRONMENT=POOL)
    assert written(function) == METRICS["scale-down"]


def written(function: PackagedFunction) -> int:
    """The number of metrics of the last invocation."""
    (directive,) = function.metrics["_aws"]["CloudWatchMetrics"]
    return len(directive["Metrics"])


def test_app_key_from_secrets_manager_is_used_and_never_logged(
    function: PackagedFunction, stack: AwsStack, scanner: LeakScanner
):
    private, public = key_pair()
    scanner.add("App key", private)
    secret = stack.put_secret(f"remuda/{POOL}/app", json.dumps({"private_key": private}))
    app: dict[str, Any] = {"REMUDA_GITHUB_TOKEN": "", "REMUDA_GITHUB_APP_ID": "4242", "REMUDA_GITHUB_APP_KEY": secret}

    async def prepare() -> None:
        async with stack.github_client() as github:
            await github.change_settings(app_id="4242", app_key=public, app_owners=[SCOPE.partition("/")[0]])

    asyncio.run(prepare())
    swept = function.invoke(
        {"detail-type": "Scheduled Event", "detail": {"command": "refresh", "sweep_only": True}},
        AWS_LAMBDA_LOG_LEVEL="DEBUG",
        **app,
    )
    assert swept["result"]["applied"] == []
    assert any(name.startswith("access token") for name in scanner.secrets), "an access token was created with the key"


def test_settings_are_read_from_a_parameter(function: PackagedFunction, stack: AwsStack):
    name = f"/remuda/{POOL}/settings"
    missing = function.invoke({"command": "refresh"}, REMUDA_SETTINGS_PARAMETER=name)
    assert (missing["errorType"], name in missing["errorMessage"]) == ("UserError", True)

    classes = json.dumps({f"class-{number}": {"cpu": 2, "mmem": 4096} for number in range(2)}, indent=2)
    text = f"REMUDA_RESOURCE_CLASS_CONFIG={classes}\nREMUDA_MAX_USES=7\nREMUDA_POOL=other"

    async def put(client: Any) -> None:
        await client.put_parameter(Name=name, Value=text, Type="String", Tier="Intelligent-Tiering")

    stack.call("ssm", put)
    applied = function.invoke({"command": "refresh"}, REMUDA_SETTINGS_PARAMETER=name)["result"]
    assert {"resource-class-config", "max-uses"} <= set(applied["applied"])
    # The next tests use the same pool.
    assert function.invoke({"command": "refresh"})["result"]["errors"] == []


def test_failures_are_raised_with_one_line(function: PackagedFunction, stack: AwsStack):
    unknown = function.invoke({"command": "reboot"})
    assert unknown["errorType"] == "UserError"
    assert "command is 'reboot'" in unknown["errorMessage"]

    down = function.invoke({"command": "refresh"}, AWS_ENDPOINT_URL_DYNAMODB="http://127.0.0.1:9")
    assert down["errorType"] == "Unavailable"
    assert "DynamoDB" in down["errorMessage"]
    assert (function.metrics["Failed"], function.metrics["Pool"]) == (1, POOL)

    secret = "arn:aws:secretsmanager:eu-central-1:000000000000:secret:remuda/none-AbCdEf"

    async def echo(token: str) -> None:
        async with stack.github_client() as github:
            await github.clear_faults()
            if token:
                message = f"Bad request: Authorization: Bearer {token}"
                await github.set_fault("status", operation="list", times=None, status=422, message=message)

    asyncio.run(echo(stack.github.token))
    refused = function.invoke({"command": "refresh"})
    asyncio.run(echo(""))
    assert "Bad request" in refused["errorMessage"], refused

    missing = function.invoke({"command": "refresh"}, REMUDA_GITHUB_TOKEN=secret)
    assert (missing["errorType"], secret in missing["errorMessage"]) == ("UserError", True)


def test_without_remaining_time_it_is_cancelled_and_the_next_event_continues(function: PackagedFunction):
    cancelled = function.invoke({"command": "refresh"}, remaining_s=5.0)
    assert cancelled["errorType"] == "TimedOut", cancelled
    assert "was cancelled" in cancelled["errorMessage"]
    assert function.invoke({"command": "refresh"})["result"]["errors"] == []
