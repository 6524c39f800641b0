"""Launch template versions, and invalid launch options."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest

from remuda.domain.errors import UserError
from tests.support.aws.ec2 import Ec2Fixture, ec2_fixture


@pytest.fixture
async def world() -> AsyncIterator[Ec2Fixture]:
    async with ec2_fixture() as made:
        yield made


async def default_version(world: Ec2Fixture) -> dict[str, Any]:
    answer = await world.client.describe_launch_template_versions(
        LaunchTemplateName="remuda-pool", Versions=["$Default"]
    )
    return dict(answer["LaunchTemplateVersions"][0])


async def test_template_allows_self_termination_and_metadata_tags(world: Ec2Fixture) -> None:
    compute = world.compute()
    assert list(await compute.prepare(world.options)) == ["created launch template remuda-pool"]

    data = (await default_version(world))["LaunchTemplateData"]
    assert data["ImageId"] == world.options["ami"]
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert data["IamInstanceProfile"] == {"Name": "remuda-agent"}
    assert data["SecurityGroupIds"] == [world.options["security-group-ids"]]
    assert data["MetadataOptions"] == {
        "HttpEndpoint": "enabled",
        "HttpTokens": "required",
        "HttpProtocolIpv6": "disabled",
        "HttpPutResponseHopLimit": 1,
        "InstanceMetadataTags": "enabled",
    }
    sent = world.server.last("CreateLaunchTemplate")["LaunchTemplateData.UserData"]
    assert base64.b64decode(sent).startswith(b"#!/bin/bash\n")


async def test_new_version_only_if_the_content_changed(world: Ec2Fixture) -> None:
    compute = world.compute()
    await compute.prepare(world.options)
    # Subnets are not part of the template.
    assert list(await compute.prepare({**world.options, "subnet-ids": world.subnets[0]})) == []
    assert (await default_version(world))["VersionNumber"] == 1

    changed = {**world.options, "pre-runner-script": "echo hello"}
    assert list(await world.compute().prepare(changed)) == ["launch template remuda-pool: version 2 is the default"]
    assert (await default_version(world))["VersionNumber"] == 2
    assert list(await compute.prepare(changed)) == []
    assert world.server.requests()["CreateLaunchTemplateVersion"] == 1


async def test_existing_version_becomes_the_default(world: Ec2Fixture) -> None:
    compute = world.compute()
    await compute.prepare(world.options)
    changed = {**world.options, "pre-runner-script": "echo hello"}
    world.server.configure(faults=[{"action": "ModifyLaunchTemplate", "code": "UnauthorizedOperation", "status": 403}])
    with pytest.raises(UserError, match="ModifyLaunchTemplate"):
        await compute.prepare(changed)
    assert list(await compute.prepare(changed)) == ["launch template remuda-pool: version 2 is the default"]
    assert world.server.requests()["CreateLaunchTemplateVersion"] == 1


async def test_concurrent_refreshes_create_one_template(world: Ec2Fixture) -> None:
    changes = await asyncio.gather(*(world.compute().prepare(world.options) for _ in range(2)))
    assert sorted(map(list, changes)) == [[], ["created launch template remuda-pool"]]
    assert (await default_version(world))["VersionNumber"] == 1


async def test_template_of_another_owner_is_rejected(world: Ec2Fixture) -> None:
    await world.client.create_launch_template(LaunchTemplateName="remuda-pool", LaunchTemplateData={"ImageId": "ami-1"})
    with pytest.raises(UserError, match="does not belong to this pool"):
        await world.compute().prepare(world.options)
    assert (await default_version(world))["LaunchTemplateData"]["ImageId"] == "ami-1"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ami", ""),
        ("ami", "ubuntu"),
        ("subnet-ids", ""),
        ("subnet-ids", "subnet-12345678 vpc-1"),
        ("security-group-ids", "default"),
        ("iam-instance-profile", ""),
        ("iam-instance-profile", "arn:aws:iam::1:role/x"),
        ("spot-fallback", "yes"),
        ("actions-runner-version", "latest"),
        ("actions-runner-sha256", "abc"),
        ("agent-url", "http://example.com/remuda.whl"),
        ("agent-url", "https://user:secret@example.com/remuda.whl"),
        ("agent-url", "https://example.com/remuda.whl?X-Amz-Signature=secret"),
        ("github-environment", "line\nbreak"),
        ("pre-runner-script", "\0"),
        ("colour", "red"),
    ],
)
async def test_invalid_options_are_reported_before_any_call(world: Ec2Fixture, field: str, value: str) -> None:
    before = world.server.requests()
    with pytest.raises(UserError) as caught:
        await world.compute().prepare({**world.options, field: value})
    assert caught.value.field == field
    assert caught.value.fix
    assert "secret" not in caught.value.message
    assert world.server.requests() == before


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"agent-url": "https://example.com/remuda.tar.gz"}, "agent-sha256"),
        ({"agent-url": "s3://bucket/remuda-1-py3-none-any.whl", "agent-sha256": "0" * 64}, "python-url"),
        ({"actions-runner-version": "2.336.0"}, "actions-runner-sha256"),
    ],
)
async def test_download_without_digest_is_rejected(world: Ec2Fixture, options: dict[str, str], field: str) -> None:
    with pytest.raises(UserError) as caught:
        await world.compute().prepare({**world.options, **options})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ami", "ami-0123456789abcdef0"),
        ("subnet-ids", "subnet-0123456789abcdef0"),
        ("security-group-ids", "sg-0123456789abcdef0"),
    ],
)
async def test_missing_resources_are_reported(world: Ec2Fixture, field: str, value: str) -> None:
    with pytest.raises(UserError, match=value) as caught:
        await world.compute().prepare({**world.options, field: value})
    assert caught.value.field == field
    assert "CreateLaunchTemplate" not in world.server.requests()
