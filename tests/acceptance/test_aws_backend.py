"""The commands with `--backend aws`, against DynamoDB, SQS, EC2 and GitHub servers on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.aws_cloud import LIMIT_S, SCOPE, Cloud, aws_cloud


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with aws_cloud(tmp_path_factory.mktemp("aws")) as made:
        yield made


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
        *("provision", "--run-id", "7", "--instance-count", "2", "--github-scope", SCOPE, "--resource-class", "large"),
        # Enough to launch them, little enough to wait for.
        *("--provision-timeout-sec", "12"),
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
    assert report["instance_hours"]["booting"] > 0


def test_no_capacity_is_told_with_who_had_none(cloud: Cloud):
    cloud.refresh()
    code, answer = cloud.remuda(
        "provision", "--run-id", "8", "--github-scope", SCOPE, "--allowed-instance-types", "zz*"
    )
    assert (code, answer["error"]["type"]) == (3, "CapacityError"), answer
    assert cloud.remuda("status")[1]["instances"] == []


def test_a_profile_that_there_is_not_is_named_before_anything_is_made(cloud: Cloud):
    flags = [*cloud.flags(), "--iam-instance-profile", "nobody"]
    code, answer = cloud.remuda("refresh", "--github-scope", SCOPE, *flags, pool="profileless")
    assert (code, answer["error"]["field"]) == (2, "iam-instance-profile"), answer
    assert "'nobody'" in answer["error"]["message"]
    code, answer = cloud.remuda("status", pool="profileless")
    assert (code, "no table" in answer["error"]["message"]) == (2, True), answer


def test_the_installed_command_does_as_the_prepared_one(cloud: Cloud):
    """Tests of many commands save their imports (`support/cli.py`)."""
    cloud.refresh()
    for arguments in (("status",), ("release", "--run-id", "9"), ("explain", "no-such-run")):
        code, answer = cloud.remuda(*arguments)
        done = subprocess.run(
            [sys.executable, "-m", "remuda", *arguments, "--backend", "aws", "--pool", "test", "--json"],
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
            env=cloud.environment,
        )
        assert (done.returncode, json.loads(done.stdout).keys()) == (code, answer.keys()), done.stderr
