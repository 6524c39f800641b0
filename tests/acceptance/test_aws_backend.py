"""The commands with the AWS backend against test servers, and scale-down of a fleet with a pool on AWS."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.aws.stack import POOL, SCOPE, SHORT_TIMES, AwsStack
from tests.support.cli import run_installed
from tests.support.records import birth, instance
from tests.support.user_data import decode_user_data


def test_provision_whose_machines_never_boot_leaves_nothing(stack: AwsStack):
    code, first = stack.refresh(**SHORT_TIMES)
    assert code == 0, first
    assert any("table" in line for line in first["applied"])
    assert sum("queue" in line for line in first["applied"]) == 7
    assert f"tokens for {SCOPE}" in first["applied"]
    code, again = stack.refresh(**SHORT_TIMES)
    assert (code, again["applied"]) == (0, [])

    assert stack.remuda("status")[1]["instances"] == []
    code, failed = stack.remuda(
        *("provision", "--run-id", "7", "--instance-count", "2", "--github-scope", SCOPE, "--resource-class", "large"),
        # Long enough to launch the instances.
        *("--provision-timeout-sec", "12"),
    )
    assert (code, failed["error"]["type"]) == (4, "TimedOut"), failed
    states = [item["state"] for item in stack.remuda("status")[1]["instances"]]
    assert states == ["terminating"] * 2
    code, swept = stack.refresh("--sweep-only", **SHORT_TIMES)
    assert (code, len(swept["terminated"])) == (0, 2), swept
    assert stack.remuda("status")[1]["instances"] == []
    assert {item["state"] for item in stack.remuda("status", "--all")[1]["instances"]} == {"terminated"}
    assert stack.remuda("release", "--run-id", "7")[0] == 0

    code, explanation = stack.remuda("explain", "7")
    events = [line["what"] for line in explanation["events"]]
    assert (code, events.count("terminated"), "launched 2" in events) == (0, 2, True), explanation
    assert any(what.startswith("failed after") for what in events)
    code, report = stack.remuda("report", "--since", "1h")
    assert (code, report["provisions"]["kinds"]) == (0, {"failed": 1}), report
    assert report["instance_hours"]["booting"] > 0


async def test_launch_template_follows_the_newest_runner(stack: AwsStack):
    pool = "version"

    async def user_data() -> str:
        async with stack.ec2.client() as client:
            answer = await client.describe_launch_template_versions(
                LaunchTemplateName=f"remuda-{pool}", Versions=["$Default"]
            )
        return decode_user_data(answer["LaunchTemplateVersions"][0]["LaunchTemplateData"]["UserData"])

    async with stack.github_client() as github:
        try:
            code, first = await asyncio.to_thread(stack.refresh, pool=pool)
            assert code == 0, first
            assert "runner_version=2.336.0" in (await user_data()).splitlines()
            await github.change_settings(newest_runner_version="2.337.0")
            code, second = await asyncio.to_thread(stack.refresh, pool=pool)
            assert (code, second["changes"]) == (0, {"actions runner": ["2.336.0", "2.337.0"]}), second
            lines = (await user_data()).splitlines()
            assert "runner_version=2.337.0" in lines
            assert any(line.startswith("runner_url_arm64=https://github.com/actions/runner/") for line in lines)
            code, status = await asyncio.to_thread(stack.remuda, "status", pool=pool)
            assert (code, status["runner"]["version"], status["runner"]["deadline"]) == (0, "2.337.0", None)
        finally:
            await github.change_settings(newest_runner_version="2.336.0")


def test_provision_without_capacity_fails_and_leaves_nothing(stack: AwsStack):
    stack.refresh(**SHORT_TIMES)
    code, answer = stack.remuda(
        "provision", "--run-id", "8", "--github-scope", SCOPE, "--allowed-instance-types", "zz*"
    )
    assert (code, answer["error"]["type"]) == (3, "CapacityError"), answer
    assert stack.remuda("status")[1]["instances"] == []


@pytest.mark.parametrize(
    ("code", "exit_code", "fix"),
    [
        ("TagPolicyViolation", 2, "let the organization's tag policy accept the tag that the message names"),
        ("CustomerKeyHasBeenRevoked", 2, "enable the KMS key of volume-kms-key"),
        ("MaxIOPSLimitExceeded", 3, "request a higher quota of storage or IOPS"),
    ],
)
def test_provision_and_explain_name_the_cause_of_a_refused_launch(
    stack: AwsStack, code: str, exit_code: int, fix: str
) -> None:
    stack.refresh(**SHORT_TIMES)
    run_id = f"refused-{code}"
    stack.ec2.configure(refused={"on-demand": [code, "the reason of EC2"]})
    try:
        result, answer = stack.remuda("provision", "--run-id", run_id, "--github-scope", SCOPE)
    finally:
        stack.ec2.configure(refused={})
    assert result == exit_code, answer
    assert f"{code}: the reason of EC2" in answer["error"]["message"]
    assert answer["error"]["fix"].startswith(fix)
    _, explanation = stack.remuda("explain", run_id)
    (failure,) = [event["why"] for event in explanation["events"] if event["what"].startswith("failed after")]
    assert code in failure
    assert fix in failure


def test_provision_and_explain_name_the_reason_of_instances_that_end_at_once(stack: AwsStack) -> None:
    """EC2 cannot use the default key of the account: the launch succeeds, and the instances end without an agent."""
    stack.refresh(**{**SHORT_TIMES, "REMUDA_PROVISION_TIMEOUT_SEC": "60"})
    stack.ec2.configure(early_end=["Client.InternalError", "Client.InternalError: Client error on launch", 1])
    started = time.monotonic()
    try:
        result, answer = stack.remuda("provision", "--run-id", "ended", "--github-scope", SCOPE)
    finally:
        stack.ec2.configure(early_end=None)
        stack.refresh(**SHORT_TIMES)
    assert time.monotonic() - started < 50, "it does not wait until its time limit"
    assert result == 4, answer
    assert "ended before it had registered" in answer["error"]["message"]
    assert "Client.InternalError: Client error on launch" in answer["error"]["message"]
    assert "the account's default key of EBS" in answer["error"]["fix"]
    _, explanation = stack.remuda("explain", "ended")
    (failure,) = [event["why"] for event in explanation["events"] if event["what"].startswith("failed after")]
    assert "Client error on launch" in failure
    _, status = stack.remuda("status")
    assert not [item for item in status["instances"] if item["state"] == "created"]


def test_unknown_instance_profile_is_rejected_before_anything_is_created(stack: AwsStack):
    flags = [*stack.flags(), "--iam-instance-profile", "nobody"]
    code, answer = stack.remuda("refresh", "--github-scope", SCOPE, *flags, pool="profileless")
    assert (code, answer["error"]["field"]) == (2, "iam-instance-profile"), answer
    assert "'nobody'" in answer["error"]["message"]
    code, answer = stack.remuda("status", pool="profileless")
    assert (code, "no table" in answer["error"]["message"]) == (2, True), answer


def test_installed_command_and_forked_command_give_the_same_answers(stack: AwsStack):
    stack.refresh(**SHORT_TIMES)
    for arguments in (("status",), ("release", "--run-id", "9"), ("explain", "no-such-run")):
        code, answer = stack.remuda(*arguments)
        installed = run_installed([*arguments, "--pool", POOL, "--json"], environment=stack.environment())
        assert (installed.code, installed.document.keys()) == (code, answer.keys()), installed.stderr


async def launch_tagged(stack: AwsStack) -> list[str]:
    """Launch two instances with the tags of the pool and an orphan tag."""
    tags = {
        "ghr:environment": POOL,
        "ghr:Application": "github-action-runner",
        "ghr:Owner": "octo",
        "ghr:Type": "Org",
        "ghr:orphan": "true",
        "remuda:pool": POOL,
    }
    async with stack.ec2.client() as client:
        answer = await client.run_instances(ImageId=stack.launch["ami"], MinCount=2, MaxCount=2)
        names = [item["InstanceId"] for item in answer["Instances"]]
        await client.create_tags(Resources=names, Tags=[{"Key": key, "Value": value} for key, value in tags.items()])
    return names


def put_idle_record(stack: AwsStack, instance_id: str) -> None:
    now = datetime.now(UTC)  # noqa: TID251 - the command uses the real clock
    record = instance(
        instance_id=instance_id, threshold=now + timedelta(seconds=300), created_at=now - timedelta(seconds=300)
    )

    async def put(client: Any) -> None:
        store = stack.instance_store(client)
        await store.apply(birth(record))
        await store.close()

    stack.call("dynamodb", put)


#: Modules that take long to import.
SLOW = {
    *("aiobotocore", "aiohttp", "boto3", "botocore.client", "botocore.loaders", "botocore.session", "cryptography"),
    *("httpx", "jwt", "pydantic", "rich", "sqlite3", "starlette", "urllib3", "uvicorn", "yaml"),
}
PROBE = """
import sys
from remuda.cli.main import main
code = main(sys.argv[2:])
print(code, *sorted(set(sys.argv[1].split()) & set(sys.modules)))
"""


def test_commands_import_no_slow_libraries(stack: AwsStack):
    with_github = stack.environment(REMUDA_POOL="imports")
    environment = {name: value for name, value in with_github.items() if name != "REMUDA_GITHUB_TOKEN"}
    assert slow_imports(with_github, "refresh", "--github-scope", SCOPE, *stack.flags()) == ["0"]
    assert slow_imports(environment, "release", "--run-id", "1") == ["0"]
    # It fails at its first call, because the table is missing.
    assert slow_imports(environment, "provision", "--run-id", "1", "--pool", "missing") == ["2"]


def slow_imports(environment: Mapping[str, str], *arguments: str) -> list[str]:
    """The exit code of a command, and the slow modules that it imported."""
    command = [sys.executable, "-c", PROBE, " ".join(SLOW), *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.split()


def test_scale_down_keeps_an_idle_recorded_instance_and_terminates_an_unrecorded_orphan(stack: AwsStack):
    stack.refresh(**SHORT_TIMES)
    idle, unrecorded = asyncio.run(launch_tagged(stack))
    put_idle_record(stack, idle)
    keep = json.dumps([{"cron": "* * * * * *", "idleCount": 1}])
    unreachable = {"AWS_ENDPOINT_URL_DYNAMODB": "http://127.0.0.1:9"}
    code, failed = stack.remuda("scale-down", SCALE_DOWN_CONFIG=keep, **unreachable)
    assert code == 4, failed
    assert {(item["instance_id"], item["action"]) for item in failed["decisions"]} == {
        (idle, "skip"),
        (unrecorded, "skip"),
    }
    assert any("DynamoDB" in error for error in failed["errors"])

    before = threshold_of(stack, idle)
    code, answer = stack.remuda("scale-down", SCALE_DOWN_CONFIG=keep)
    actions = {(item["instance_id"], item["action"]) for item in answer["decisions"]}
    assert (idle, "unmark-orphan") in actions
    assert (idle, "keep") in actions
    assert threshold_of(stack, idle) > before
    assert (unrecorded, "terminate") in actions
    assert code == 0, answer


def threshold_of(stack: AwsStack, instance_id: str) -> str:
    found = stack.remuda("status")[1]["instances"]
    return str(next(item["threshold"] for item in found if item["instance_id"] == instance_id))
