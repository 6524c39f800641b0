"""The smoke run's view of an AWS account, on a test server: machines and left-overs by tags, experiments of FIS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from remuda.adapters.aws.clients import AwsClients
from remuda.ports.compute import POOL_TAG
from tests.smoke.account import SmokeAccount, fis_role
from tests.support.aws.ec2 import shared_ec2_server
from tests.support.aws.servers import REGION, aws_client

IMAGE = "ami-12c6146b"


@pytest.fixture
async def account(monkeypatch) -> AsyncIterator[SmokeAccount]:
    server = shared_ec2_server()
    server.reset()
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_REGION": REGION,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        monkeypatch.setenv(name, value)
    async with AwsClients() as clients:
        yield SmokeAccount(clients)


async def launch(pool: str, count: int = 1) -> list[str]:
    async with aws_client("ec2", shared_ec2_server().url) as ec2:
        tags: Any = [{"ResourceType": "instance", "Tags": [{"Key": POOL_TAG, "Value": pool}]}]
        made = await ec2.run_instances(
            ImageId=IMAGE, MinCount=count, MaxCount=count, InstanceType="m5.large", TagSpecifications=tags
        )
    return [each["InstanceId"] for each in made["Instances"]]


async def test_machines_of_a_pool_are_found_and_terminated(account):
    mine, others = await launch("smoke-1", 2), await launch("smoke-10")
    assert sorted(await account.machines("smoke-1")) == sorted(mine)
    await account.terminate(mine)
    await account.terminate([])
    assert await account.machines("smoke-1") == []
    assert await account.machines("smoke-10") == others


async def test_a_spot_notice_needs_a_role_and_both_are_removed_again(account):
    (machine,) = await launch("smoke-1")
    role = await account.create_fis_role("smoke-1")
    assert role.endswith(f"role/{fis_role('smoke-1')}")
    experiment = await account.send_spot_notice("smoke-1", machine, role_arn=role)
    assert (await account.experiment_state(experiment))[0] in {"initiating", "running", "pending"}
    assert await account.pools() == {"smoke-1"}
    await account.terminate([machine])
    # Twice: a clean-up may be repeated.
    await account.remove_experiments("smoke-1")
    await account.remove_experiments("smoke-1")
    async with aws_client("fis", shared_ec2_server().url) as fis:
        assert (await fis.list_experiment_templates())["experimentTemplates"] == []
    async with aws_client("iam", shared_ec2_server().url) as iam:
        assert fis_role("smoke-1") not in [each["RoleName"] for each in (await iam.list_roles())["Roles"]]


async def test_only_pools_of_smoke_runs_are_left_overs(account):
    await launch("smoke-1")
    await launch("ci")
    await account.create_fis_role("smoke-2")
    assert await account.pools() == {"smoke-1", "smoke-2"}
