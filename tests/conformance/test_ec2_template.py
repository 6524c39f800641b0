"""The launch template by content, and launch options that are wrong."""

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


async def test_a_template_that_lets_machines_end_and_know_themselves(world: Ec2Fixture) -> None:
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


async def test_a_new_version_only_where_something_changed(world: Ec2Fixture) -> None:
    compute = world.compute()
    await compute.prepare(world.options)
    # Where machines go is no part of the template.
    assert list(await compute.prepare({**world.options, "subnet-ids": world.subnets[0]})) == []
    assert (await default_version(world))["VersionNumber"] == 1

    changed = {**world.options, "pre-runner-script": "echo hello"}
    assert list(await world.compute().prepare(changed)) == ["launch template remuda-pool: version 2 is the default"]
    assert (await default_version(world))["VersionNumber"] == 2
    assert list(await compute.prepare(changed)) == []
    assert world.server.requests()["CreateLaunchTemplateVersion"] == 1


async def test_a_version_that_was_not_made_the_default_is_taken_up(world: Ec2Fixture) -> None:
    compute = world.compute()
    await compute.prepare(world.options)
    changed = {**world.options, "pre-runner-script": "echo hello"}
    world.server.configure(faults=[{"action": "ModifyLaunchTemplate", "code": "UnauthorizedOperation", "status": 403}])
    with pytest.raises(UserError, match="ModifyLaunchTemplate"):
        await compute.prepare(changed)
    assert list(await compute.prepare(changed)) == ["launch template remuda-pool: version 2 is the default"]
    assert world.server.requests()["CreateLaunchTemplateVersion"] == 1


async def test_two_refreshes_at_once_make_one_template(world: Ec2Fixture) -> None:
    told = await asyncio.gather(*(world.compute().prepare(world.options) for _ in range(2)))
    assert sorted(map(list, told)) == [[], ["created launch template remuda-pool"]]
    assert (await default_version(world))["VersionNumber"] == 1


async def test_somebody_elses_template_is_left_alone(world: Ec2Fixture) -> None:
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
async def test_wrong_options_are_named_before_any_call(world: Ec2Fixture, field: str, value: str) -> None:
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
async def test_nothing_is_fetched_without_its_digest(world: Ec2Fixture, options: dict[str, str], field: str) -> None:
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
async def test_what_is_not_there_is_named(world: Ec2Fixture, field: str, value: str) -> None:
    with pytest.raises(UserError, match=value) as caught:
        await world.compute().prepare({**world.options, field: value})
    assert caught.value.field == field
    assert "CreateLaunchTemplate" not in world.server.requests()
