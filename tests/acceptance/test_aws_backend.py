"""The commands with `--backend aws`, against DynamoDB, SQS, EC2 and GitHub servers on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from remuda.domain.documents import to_document
from support.moto_server import MotoServer
from support.records import instance
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


# The last one here: the record that it makes stays.


async def launch_tagged(cloud: Cloud) -> list[str]:
    """Two machines with the pool's tags and a stray orphan mark."""
    tags = {
        "ghr:environment": "test",
        "ghr:Application": "github-action-runner",
        "ghr:Owner": "octo",
        "ghr:Type": "Org",
        "ghr:orphan": "true",
        "remuda:pool": "test",
    }
    async with cloud.ec2.client() as client:
        answer = await client.run_instances(ImageId=cloud.launch["ami"], MinCount=2, MaxCount=2)
        names = [item["InstanceId"] for item in answer["Instances"]]
        await client.create_tags(Resources=names, Tags=[{"Key": key, "Value": value} for key, value in tags.items()])
    return names


def put_idle_record(cloud: Cloud, instance_id: str) -> None:
    now = datetime.now(UTC)  # noqa: TID251 - the command has the real clock
    record = instance(
        instance_id=instance_id, threshold=now + timedelta(seconds=90), created_at=now - timedelta(seconds=300)
    )
    tests = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, str(tests / "support" / "put_record.py"), "remuda-test"],
        input=json.dumps(to_document(record)),
        text=True,
        env={**cloud.environment, "PYTHONPATH": str(tests)},
        timeout=LIMIT_S,
        check=True,
    )


def test_scale_down_leaves_recorded_machines_to_their_records(cloud: Cloud):
    cloud.refresh()
    idle, unrecorded = asyncio.run(launch_tagged(cloud))
    put_idle_record(cloud, idle)
    keep = json.dumps([{"cron": "* * * * * *", "idleCount": 1}])
    down = {"AWS_ENDPOINT_URL_DYNAMODB": "http://127.0.0.1:9"}
    code, blind = cloud.remuda("scale-down", SCALE_DOWN_CONFIG=keep, **down)
    assert code == 4, blind
    assert {(item["instance_id"], item["action"]) for item in blind["decisions"]} == {
        (idle, "skip"),
        (unrecorded, "skip"),
    }
    assert any("DynamoDB" in error for error in blind["errors"])

    before = threshold_of(cloud, idle)
    code, answer = cloud.remuda("scale-down", SCALE_DOWN_CONFIG=keep)
    actions = {(item["instance_id"], item["action"]) for item in answer["decisions"]}
    assert (idle, "unmark-orphan") in actions
    assert (idle, "keep") in actions
    assert threshold_of(cloud, idle) > before
    # The other is judged by the table.
    assert (unrecorded, "terminate") in actions
    assert code == 0, answer


def threshold_of(cloud: Cloud, instance_id: str) -> str:
    found = cloud.remuda("status")[1]["instances"]
    return str(next(item["threshold"] for item in found if item["instance_id"] == instance_id))
