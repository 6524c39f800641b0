"""The commands with `--backend aws`, against DynamoDB, SQS, EC2 and GitHub servers on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from support.moto_server import MotoServer
from support.servers import ministack

LIMIT_S = 120
SCOPE = "octo/repo"


@dataclass(frozen=True)
class Cloud:
    environment: dict[str, str]
    launch: dict[str, str]
    ec2: MotoServer

    def remuda(self, *arguments: str, **changed: str) -> tuple[int, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "remuda", *arguments, "--backend", "aws", "--pool", "test", "--json"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env={**self.environment, **changed},
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, json.loads(done.stdout)

    def flags(self) -> list[str]:
        return [word for name, value in self.launch.items() for word in (f"--{name}", value)]

    def refresh(self, *more: str, **changed: str) -> tuple[int, Any]:
        times = ("--provision-timeout-sec", "6", "--margin-sec", "0.5", "--gone-after-sec", "1")
        return self.remuda("refresh", "--github-scope", SCOPE, *self.flags(), *times, *more, **changed)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    folder = tmp_path_factory.mktemp("aws")
    github = [sys.executable, "-m", "remuda.githubsim", "--dir", str(folder / "github")]
    with ministack(folder) as server, subprocess.Popen(github, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http")
        endpoint = json.loads((folder / "github" / "endpoint.json").read_text())
        ec2 = MotoServer()
        try:
            yield Cloud(
                environment={
                    "PATH": os.environ["PATH"],
                    "HOME": str(folder),
                    **server.environment(),
                    "AWS_ENDPOINT_URL_EC2": ec2.url,
                    "GITHUB_API_URL": endpoint["url"],
                    "REMUDA_GITHUB_TOKEN": endpoint["token"],
                    "REMUDA_CONFIG": os.devnull,
                },
                launch=asyncio.run(options(ec2)),
                ec2=ec2,
            )
        finally:
            ec2.stop()
            process.terminate()


async def options(ec2: MotoServer) -> dict[str, str]:
    async with ec2.client() as client:
        return await ec2.launch_options(client)


def test_a_provision_whose_machines_never_come_up_leaves_nothing(cloud: Cloud):
    code, first = cloud.refresh()
    assert code == 0, first
    assert any("table" in line for line in first["applied"])
    assert sum("queue" in line for line in first["applied"]) == 7
    assert f"tokens for {SCOPE}" in first["applied"]
    code, again = cloud.refresh()
    assert (code, again["applied"]) == (0, [])

    assert cloud.remuda("status")[1]["instances"] == []
    code, failed = cloud.remuda(
        "provision", "--run-id", "7", "--instance-count", "2", "--github-scope", SCOPE, "--resource-class", "large"
    )
    assert (code, failed["error"]["type"]) == (4, "TimedOut"), failed
    states = [item["state"] for item in cloud.remuda("status")[1]["instances"]]
    assert states == ["terminating"] * 2
    code, swept = cloud.refresh("--sweep-only")
    assert (code, len(swept["terminated"])) == (0, 2), swept
    assert cloud.remuda("status")[1]["instances"] == []
    assert {item["state"] for item in cloud.remuda("status", "--all")[1]["instances"]} == {"terminated"}
    assert cloud.remuda("release", "--run-id", "7")[0] == 0

    code, story = cloud.remuda("explain", "7")
    told = [line["what"] for line in story["lines"]]
    assert (code, told.count("terminated"), "launched 2" in told) == (0, 2, True), story
    assert any(what.startswith("gave up after") for what in told)
    code, report = cloud.remuda("report", "--since", "1h")
    assert (code, report["provisions"]["kinds"]) == (0, {"failed": 1}), report
    assert report["machine_hours"]["booting"] > 0


def test_no_capacity_is_told_with_who_had_none(cloud: Cloud):
    cloud.refresh()
    code, answer = cloud.remuda(
        "provision", "--run-id", "8", "--github-scope", SCOPE, "--allowed-instance-types", "zz*"
    )
    assert (code, answer["error"]["type"]) == (3, "CapacityError"), answer
    assert cloud.remuda("status")[1]["instances"] == []


@pytest.mark.parametrize(
    ("changed", "code", "says"),
    [
        ({"AWS_ENDPOINT_URL_DYNAMODB": "http://127.0.0.1:9"}, 4, "DynamoDB"),
        ({"AWS_REGION": "", "AWS_DEFAULT_REGION": ""}, 2, "region"),
        ({"REMUDA_GITHUB_TOKEN": ""}, 2, "GitHub"),
    ],
    ids=["endpoint down", "no region", "no token"],
)
def test_what_cannot_work_is_one_sentence(cloud: Cloud, changed: dict[str, str], code: int, says: str):
    found, answer = cloud.refresh(**changed)
    assert (found, says in answer["error"]["message"]) == (code, True), answer
    assert "\n" not in answer["error"]["message"]


def test_a_refused_github_token_is_told_before_anything_is_applied(cloud: Cloud):
    code, answer = cloud.remuda("refresh", "--github-scope", "octo/other", *cloud.flags(), REMUDA_GITHUB_TOKEN="no")
    assert (code, "GitHub refuses" in answer["error"]["message"]) == (2, True), answer


def test_a_pool_without_a_table_says_what_to_do(cloud: Cloud):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "remuda",
            "provision",
            "--run-id",
            "9",
            "--backend",
            "aws",
            "--pool",
            "nobody",
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=cloud.environment,
    )
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, "remuda refresh" in error["fix"]) == (2, True), error
