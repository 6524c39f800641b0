"""Scale-down on AWS with a pool: records rule their machines, the table rules the rest."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from remuda.domain.serialization import to_document
from tests.support.aws_cloud import LIMIT_S, Cloud, aws_cloud
from tests.support.records import instance


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with aws_cloud(tmp_path_factory.mktemp("aws")) as made:
        yield made


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
        instance_id=instance_id, threshold=now + timedelta(seconds=300), created_at=now - timedelta(seconds=300)
    )
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, str(root / "tests" / "support" / "put_record.py"), "remuda-test"],
        input=json.dumps(to_document(record)),
        text=True,
        env={**cloud.environment, "PYTHONPATH": str(root)},
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
