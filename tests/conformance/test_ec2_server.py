"""The stand-ins for EC2 and its metadata service refuse what the originals refuse. Sources are in the stand-ins."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import code_of, message_of
from remuda.adapters.aws.ec2.compute import Ec2Compute
from remuda.domain.errors import UserError
from remuda.ports.compute import MachineState
from tests.support.aws.ec2 import Ec2Fixture, ec2_fixture, instance_ids
from tests.support.user_data import fake_imds

UNKNOWN_AMI = "ami-00000000000000000"
UNKNOWN_KEY = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"


@pytest.fixture
async def world() -> AsyncIterator[Ec2Fixture]:
    async with ec2_fixture() as fixture:
        yield fixture


@pytest.fixture
async def compute(world: Ec2Fixture) -> Ec2Compute:
    return await world.prepared_compute()


async def foreign_group(world: Ec2Fixture) -> str:
    vpc = (await world.client.create_vpc(CidrBlock="10.9.0.0/16"))["Vpc"]["VpcId"]
    made = await world.client.create_security_group(GroupName="foreign", Description="-", VpcId=vpc)
    return made["GroupId"]


async def change_template(world: Ec2Fixture, data: Any) -> None:
    """Change the launch template as somebody else may do, or EC2 by a deletion."""
    made = await world.client.create_launch_template_version(
        LaunchTemplateName="remuda-pool", SourceVersion="1", LaunchTemplateData=data
    )
    version = str(made["LaunchTemplateVersion"]["VersionNumber"])
    await world.client.modify_launch_template(LaunchTemplateName="remuda-pool", DefaultVersion=version)


# Launches -------------------------------------------------------------------------------------------------------------

LAUNCH_DATA = [
    ({"ImageId": UNKNOWN_AMI}, "InvalidAMIID.NotFound", f"The image id '[{UNKNOWN_AMI}]' does not exist"),
    ({"KeyName": "nobody"}, "InvalidKeyPair.NotFound", "The key pair 'nobody' does not exist"),
    ({"IamInstanceProfile": {"Name": "nobody"}}, "InvalidParameterValue", "Invalid IAM Instance Profile name"),
    ({"SecurityGroupIds": ["sg-00000000"]}, "InvalidGroup.NotFound", "'sg-00000000' does not exist"),
    (
        {"TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": "team/name", "Value": "x"}]}]},
        "InvalidParameterValue",
        "'team/name' is not a valid tag key",
    ),
]


@pytest.mark.parametrize(("data", "code", "message"), LAUNCH_DATA)
async def test_fleet_with_unknown_parts_is_refused(
    world: Ec2Fixture, compute: Ec2Compute, data: dict[str, Any], code: str, message: str
) -> None:
    """Remuda names EC2's reason, and no instance is launched instead."""
    await change_template(world, data)
    with pytest.raises(UserError, match=re.escape(f"{code}: ")) as refused:
        await compute.launch(world.launch_request(spot=True, launch={"spot-fallback": "on-demand"}))
    assert message in refused.value.message
    assert (refused.value.field, "refresh" in refused.value.fix) == ("launch", True)
    assert world.server.requests()["CreateFleet"] == 1


@pytest.mark.parametrize(("data", "code", "message"), LAUNCH_DATA)
async def test_single_instance_with_unknown_parts_is_refused(
    world: Ec2Fixture, data: dict[str, Any], code: str, message: str
) -> None:
    options = {"MetadataOptions": {"InstanceMetadataTags": "enabled"}, "ImageId": world.options["ami"]}
    with pytest.raises(ClientError) as refused:
        await world.client.run_instances(
            InstanceType="t3.micro", MinCount=1, MaxCount=1, **{"SubnetId": world.subnets[0], **options, **data}
        )
    assert code_of(refused.value) == code
    assert message in message_of(refused.value)


async def test_security_group_of_another_vpc_is_refused(world: Ec2Fixture, compute: Ec2Compute) -> None:
    group = await foreign_group(world)
    await change_template(world, {"SecurityGroupIds": [group]})
    with pytest.raises(UserError, match=f"Security group {group} and subnet .* belong to different networks"):
        await compute.launch(world.launch_request())


async def test_refresh_refuses_a_security_group_of_another_vpc(world: Ec2Fixture) -> None:
    group = await foreign_group(world)
    with pytest.raises(UserError, match=f"security-group-ids: {group} is in vpc-.*, and subnet subnet-") as refused:
        await world.compute().prepare({**world.options, "security-group-ids": group})
    assert refused.value.fix == "set subnet-ids and security-group-ids of one VPC"
    assert "CreateLaunchTemplate" not in world.server.requests()


async def test_unknown_kms_key_ends_the_instances_after_the_launch(world: Ec2Fixture) -> None:
    compute = world.compute()
    await compute.prepare({**world.options, "volume-kms-key": UNKNOWN_KEY})
    names = instance_ids(await compute.launch(world.launch_request(count=2)))
    assert [view.state for view in (await compute.describe(names)).values()] == [MachineState.TERMINATED] * 2
    reasons = {item["StateReason"]["Code"] for item in await world.instances()}
    assert reasons == {"Client.InvalidKMSKey.InvalidState"}


async def test_known_key_pair_and_kms_key_are_accepted(world: Ec2Fixture) -> None:
    await world.client.create_key_pair(KeyName="people")
    compute = world.compute()
    await compute.prepare({**world.options, "volume-kms-key": await world.server.make_key(), "key-name": "people"})
    names = instance_ids(await compute.launch(world.launch_request(count=2)))
    assert [view.state for view in (await compute.describe(names)).values()] == [MachineState.RUNNING] * 2


# Requests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"ClientToken": "x" * 65}, "InvalidClientToken"),
        ({"TargetCapacitySpecification": {"TotalTargetCapacity": 0}}, "InvalidTargetCapacitySpecification"),
    ],
)
async def test_fleet_that_ec2_refuses(
    world: Ec2Fixture, compute: Ec2Compute, changes: dict[str, Any], code: str
) -> None:
    assert compute
    request: dict[str, Any] = {
        "Type": "instant",
        "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": {"LaunchTemplateName": "remuda-pool"}}],
        "TargetCapacitySpecification": {"TotalTargetCapacity": 1},
        **changes,
    }
    with pytest.raises(ClientError) as refused:
        await world.client.create_fleet(**request)
    assert code_of(refused.value) == code


async def test_user_data_over_the_limit_is_refused(world: Ec2Fixture) -> None:
    for size, code in ((16_384, ""), (16_385, "InvalidUserData.Malformed")):
        data = base64.b64encode(b"x" * size).decode()
        try:
            await world.client.create_launch_template(
                LaunchTemplateName=f"size-{size}", LaunchTemplateData={"UserData": data}
            )
            found = ""
        except ClientError as error:
            found = code_of(error)
        assert found == code


@pytest.mark.parametrize("key", ["aws:team", "AWS:team"])
async def test_reserved_tag_keys_are_refused(world: Ec2Fixture, compute: Ec2Compute, key: str) -> None:
    (name,) = instance_ids(await compute.launch(world.launch_request()))
    with pytest.raises(UserError, match="reserved for internal use"):
        await compute.tag([name], {key: "x"})
    with pytest.raises(UserError, match="reserved for internal use"):
        await compute.launch(world.launch_request("other", tags={key: "x"}))


@pytest.mark.parametrize("key", ["team name", "team/name", ".", "..", "_index", "größe"])
async def test_tag_keys_that_metadata_cannot_show_are_refused(world: Ec2Fixture, compute: Ec2Compute, key: str) -> None:
    (name,) = instance_ids(await compute.launch(world.launch_request()))
    with pytest.raises(UserError, match="is not a valid tag key"):
        await compute.tag([name], {key: "x"})
    with pytest.raises(UserError, match="is not a valid tag key"):
        await compute.launch(world.launch_request("other", tags={key: "x"}))
    # Without tags in its metadata, an instance may have them.
    stranger = await world.launch_foreign_instance()
    await world.client.create_tags(Resources=[stranger], Tags=[{"Key": key, "Value": "x"}])


@pytest.mark.parametrize(
    "action",
    ["DescribeInstances", "DescribeTags", "DescribeSubnets", "DescribeSecurityGroups", "DescribeInstanceTypes"],
)
async def test_small_pages_are_refused(world: Ec2Fixture, action: str) -> None:
    """Sent without a client library: botocore would refuse some of them itself."""
    async with httpx.AsyncClient(base_url=world.server.url, trust_env=False) as client:
        answer = await client.post("/", data={"Action": action, "Version": "2016-11-15", "MaxResults": "4"})
    assert (answer.status_code, "<Code>InvalidParameterValue</Code>" in answer.text) == (400, True)
    assert "Value ( 4 ) for parameter maxResults is invalid" in answer.text


async def test_ids_and_pages_exclude_each_other(world: Ec2Fixture) -> None:
    name = await world.launch_foreign_instance()
    with pytest.raises(ClientError, match="InvalidParameterCombination"):
        await world.client.describe_instances(InstanceIds=[name], MaxResults=5)


# Metadata -------------------------------------------------------------------------------------------------------------


def test_metadata_service_gives_a_proxy_no_token() -> None:
    with fake_imds() as imds, httpx.Client(base_url=imds.url, trust_env=False) as client:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        assert client.put("/latest/api/token", headers=headers).status_code == 200
        forwarded = client.put("/latest/api/token", headers={**headers, "X-Forwarded-For": "10.0.0.1"})
        assert (forwarded.status_code, forwarded.text) == (403, "")
        assert len(imds.tokens) == 1
