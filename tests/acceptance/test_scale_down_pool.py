"""Scale-down of a fleet with a pool on AWS: recorded instances follow their records, all others their tags."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.aws.stack import POOL, SHORT_TIMES, AwsStack, aws_stack
from tests.support.records import birth, instance


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AwsStack]:
    with aws_stack(tmp_path_factory.mktemp("aws")) as started:
        yield started


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
