"""The EC2 adapters: launch templates, launches, terminations, descriptions, tags, spot prices."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import pytest

from remuda.adapters.aws.ec2.compute import BATCH, Ec2Compute, Ec2SpotPrices
from remuda.adapters.aws.ec2.create_fleet import FleetLaunchError, is_mended_by_on_demand
from remuda.adapters.system.clock import SystemIds
from remuda.domain.errors import CapacityError, NotFound, RemudaError, Throttled, Unavailable, UserError
from remuda.domain.resources import Architecture, ResourceClass, TypePatterns
from remuda.ports.compute import POOL_TAG, PROVISION_TAG, LaunchRequest, MachineState, SpotPrices
from tests.support.aws.ec2 import ARM_AMI, LINUX_AMI, WINDOWS_AMI, Ec2Fixture, ec2_fixture, instance_ids
from tests.support.aws.ec2_shim import CATALOGUE, PAGE
from tests.support.records import runner_request
from tests.support.user_data import decode_user_data

NO_ROOM = "InsufficientInstanceCapacity"
UNKNOWN = "i-0123456789abcdef0"
MANY, LAUNCHES = 205, 5


@pytest.fixture
async def world() -> AsyncIterator[Ec2Fixture]:
    async with ec2_fixture() as made:
        yield made


@pytest.fixture
async def compute(world: Ec2Fixture) -> Ec2Compute:
    return await world.prepared_compute()


# Launch templates ----------------------------------------------------------------------------------------------------


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
    assert decode_user_data(sent).startswith("#!/bin/bash\n")


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
    ("options", "field"),
    [
        ({"ami": ""}, "ami"),
        ({"ami": "ubuntu"}, "ami"),
        ({"subnet-ids": ""}, "subnet-ids"),
        ({"subnet-ids": "subnet-12345678 vpc-1"}, "subnet-ids"),
        ({"security-group-ids": "default"}, "security-group-ids"),
        ({"iam-instance-profile": ""}, "iam-instance-profile"),
        ({"iam-instance-profile": "arn:aws:iam::1:role/x"}, "iam-instance-profile"),
        ({"spot-fallback": "yes"}, "spot-fallback"),
        ({"volume-size-gib": "large"}, "volume-size-gib"),
        ({"volume-size-gib": "65537"}, "volume-size-gib"),
        ({"volume-size-gib": "20000", "volume-type": "gp2"}, "volume-size-gib"),
        ({"volume-type": "st1"}, "volume-type"),
        ({"volume-iops": "2999"}, "volume-iops"),
        ({"volume-iops": "3000", "volume-type": "gp2"}, "volume-iops"),
        ({"volume-type": "io2"}, "volume-iops"),
        ({"volume-throughput": "2001"}, "volume-throughput"),
        ({"volume-throughput": "125", "volume-type": "io1", "volume-iops": "100"}, "volume-throughput"),
        ({"volume-iops": "15001"}, "volume-iops"),
        ({"volume-throughput": "751"}, "volume-throughput"),
        ({"volume-kms-key": "alias/runners"}, "volume-kms-key"),
        ({"actions-runner-version": "latest"}, "actions-runner-version"),
        ({"actions-runner-sha256": "abc"}, "actions-runner-sha256"),
        ({"agent-url": "http://example.com/remuda.tar.gz"}, "agent-url"),
        ({"agent-url": "https://example.com/remuda.whl"}, "agent-url"),
        ({"agent-url": "https://user:secret@example.com/remuda.tar.gz"}, "agent-url"),
        ({"agent-url": "https://example.com/remuda.tar.gz?X-Amz-Signature=secret"}, "agent-url"),
        ({"agent-url": "x64=https://example.com/remuda.tar.gz"}, "agent-url"),
        ({"agent-sha256": "x86_64=abc"}, "agent-sha256"),
        ({"github-environment": "line\nbreak"}, "github-environment"),
        ({"pre-runner-script": "\0"}, "pre-runner-script"),
        ({"colour": "red"}, "colour"),
        ({"agent-url": "https://example.com/remuda.tar.gz"}, "agent-sha256"),
        ({"agent-url": "s3://bucket/remuda.tar.gz", "agent-sha256": f"arm64={'0' * 64}"}, "agent-sha256"),
        ({"actions-runner-version": "2.336.0"}, "actions-runner-sha256"),
    ],
)
async def test_invalid_options_are_reported_before_any_call(
    world: Ec2Fixture, options: dict[str, str], field: str
) -> None:
    before = world.server.requests()
    with pytest.raises(UserError) as caught:
        await world.compute().prepare({**world.options, **options})
    assert caught.value.field == field
    assert caught.value.fix
    assert "secret" not in caught.value.message
    assert world.server.requests() == before


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


# Root volumes --------------------------------------------------------------------------------------------------------


async def root_volume(world: Ec2Fixture) -> tuple[str, dict[str, Any]]:
    (mapping,) = (await default_version(world))["LaunchTemplateData"]["BlockDeviceMappings"]
    return mapping["DeviceName"], mapping["Ebs"]


async def test_root_volume_is_30_gib_gp3_and_encrypted_by_default(world: Ec2Fixture) -> None:
    await world.compute().prepare(world.options)
    device, volume = await root_volume(world)
    (image,) = (await world.client.describe_images(ImageIds=[world.options["ami"]]))["Images"]
    assert device == image["RootDeviceName"]
    assert volume == {"VolumeSize": 30, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}


async def test_root_volume_of_an_image_in_a_parameter(world: Ec2Fixture) -> None:
    """The device name is that of the image: another one would add a second volume."""
    world.parameters["/aws/service/windows"] = WINDOWS_AMI
    await world.compute().prepare({**world.options, "ami": "resolve:ssm:/aws/service/windows"})
    assert (await root_volume(world))[0] == "/dev/sda1"
    assert (await default_version(world))["LaunchTemplateData"]["ImageId"] == "resolve:ssm:/aws/service/windows"


async def test_options_of_the_root_volume(world: Ec2Fixture) -> None:
    key = "arn:aws:kms:eu-west-1:123456789012:key/11111111-2222-3333-4444-555555555555"
    options = {"volume-size-gib": "200", "volume-iops": "6000", "volume-throughput": "500", "volume-kms-key": key}
    await world.compute().prepare({**world.options, **options})
    volume = (await root_volume(world))[1]
    assert (volume["VolumeSize"], volume["KmsKeyId"]) == (200, key)
    sent = world.server.last("CreateLaunchTemplate")
    prefix = "LaunchTemplateData.BlockDeviceMapping.1.Ebs"
    assert (sent[f"{prefix}.Iops"], sent[f"{prefix}.Throughput"]) == ("6000", "500")


async def test_a_default_key_that_ec2_cannot_use_ends_the_instances(world: Ec2Fixture, compute: Ec2Compute) -> None:
    """The launch succeeds; only the reason of the end tells why."""
    world.server.configure(default_key="arn:aws:kms:eu-west-1:123456789012:key/11111111-2222-3333-4444-555555555555")
    names = instance_ids(await compute.launch(world.launch_request(count=2)))
    views = await compute.describe(names)
    assert {views[name].end_reason for name in names} == {"Client.InternalError: Client error on launch"}
    assert views[names[0]].describe_end() == "the instance is terminated: Client.InternalError: Client error on launch"
    assert "the account's default key of EBS" in views[names[0]].end_fix


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ("Client.VolumeLimitExceeded", "quota of storage or IOPS"),
        ("Client.InvalidSnapshot.NotFound", "set ami to an image whose snapshots exist"),
        ("Client.InvalidKMSKey.InvalidState", "enable the KMS key of volume-kms-key"),
        ("Client.InstanceInitiatedShutdown", "aws ec2 get-console-output"),
        ("Client.UserInitiatedShutdown", "CloudTrail"),
        ("Server.InsufficientInstanceCapacity", "allow more instance types"),
        ("Server.SpotInstanceTermination", "use on-demand instances"),
        ("Server.InternalError", "retry in a minute"),
        ("Server.SomethingNew", "look the code up"),
    ],
)
async def test_the_reason_of_an_early_end_has_a_fix(
    world: Ec2Fixture, compute: Ec2Compute, code: str, fix: str
) -> None:
    world.server.configure(early_end=[code, f"{code}: what EC2 says", 0])
    (name,) = instance_ids(await compute.launch(world.launch_request()))
    async with asyncio.timeout(10):
        while not (view := (await compute.describe([name]))[name]).end_reason:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
    assert view.end_reason == f"{code}: what EC2 says"
    assert fix in view.end_fix


async def test_root_volume_smaller_than_the_image_is_rejected(world: Ec2Fixture, compute: Ec2Compute) -> None:
    with pytest.raises(UserError, match="volume-size-gib is 14, but the root volume of the image has 15 GiB") as caught:
        await compute.prepare({**world.options, "volume-size-gib": "14"})
    assert caught.value.field == "volume-size-gib"


@pytest.mark.parametrize(
    ("volume", "message"),
    [
        ({"VolumeSize": 20, "Iops": 15_000}, "Iops to volume size ratio of 750.000000 is too high; maximum is 500"),
        ({"VolumeSize": 20, "Throughput": 1_000}, "Throughput (MiBps) to iops ratio of 0.333333 is too high"),
    ],
)
async def test_server_rejects_volumes_like_ec2(
    world: Ec2Fixture, compute: Ec2Compute, volume: dict[str, Any], message: str
) -> None:
    mapping = {"DeviceName": "/dev/xvda", "Ebs": {"VolumeType": "gp3", **volume}}
    data: Any = {"BlockDeviceMappings": [mapping]}
    await compute.prepare(world.options)
    await world.client.create_launch_template_version(
        LaunchTemplateName="remuda-pool", SourceVersion="1", LaunchTemplateData=data
    )
    with pytest.raises(UserError, match=re.escape(message)):
        await compute.launch(world.launch_request())


# Launches ------------------------------------------------------------------------------------------------------------


async def test_instant_fleet_has_one_override_per_subnet(world: Ec2Fixture, compute: Ec2Compute) -> None:
    result = await compute.launch(world.launch_request(count=3, patterns="m6i.* r*"))

    assert len(instance_ids(result)) == 3
    sent = world.server.last("CreateFleet")
    assert sent["Type"] == "instant"
    assert sent["ClientToken"] == "token"
    assert sent["TargetCapacitySpecification.TotalTargetCapacity"] == "3"
    assert sent["TargetCapacitySpecification.DefaultTargetCapacityType"] == "on-demand"
    assert sent["OnDemandOptions.AllocationStrategy"] == "lowest-price"
    template = "LaunchTemplateConfigs.1.LaunchTemplateSpecification"
    assert (sent[f"{template}.LaunchTemplateName"], sent[f"{template}.Version"]) == ("remuda-pool", "$Default")
    for number, subnet in enumerate(world.subnets, start=1):
        override = f"LaunchTemplateConfigs.1.Overrides.{number}"
        assert sent[f"{override}.SubnetId"] == subnet
        assert sent[f"{override}.InstanceRequirements.VCpuCount.Min"] == "2"
        assert sent[f"{override}.InstanceRequirements.MemoryMiB.Min"] == "4096"
        assert sent[f"{override}.InstanceRequirements.AllowedInstanceType.1"] == "m6i.*"
        assert sent[f"{override}.InstanceRequirements.AllowedInstanceType.2"] == "r*"
    assert world.calls.by_service()["ec2"]["CreateFleet"] == 1


async def test_any_type_omits_the_type_list_and_spot_sets_its_strategy(world: Ec2Fixture, compute: Ec2Compute) -> None:
    result = await compute.launch(world.launch_request(spot=True, patterns="* c6i.large"))
    sent = world.server.last("CreateFleet")
    assert not [key for key in sent if "AllowedInstanceType" in key]
    assert sent["SpotOptions.AllocationStrategy"] == "price-capacity-optimized"
    (item,) = await world.instances()
    assert item["InstanceId"] == instance_ids(result)[0]
    assert item["InstanceLifecycle"] == "spot"


async def test_any_type_means_current_types_without_accelerators(world: Ec2Fixture, compute: Ec2Compute) -> None:
    """If all others are used up, no previous generation and no GPU is launched for a class that asks for neither."""
    world.server.configure(capacity={kind: 0 for kind, *_ in CATALOGUE if kind not in {"m4.large", "g5.xlarge"}})
    for number, spot in enumerate((True, False)):
        with pytest.raises(CapacityError):
            await compute.launch(world.launch_request(f"any-{number}", spot=spot))
        for name in ("m4.large", "g5.xlarge"):
            named = world.launch_request(f"{name}-{number}", spot=spot, patterns=name)
            assert [item.instance_type for item in (await compute.launch(named)).instances] == [name]


async def test_the_server_rejects_more_than_four_structures_of_requirements(world: Ec2Fixture) -> None:
    """Sent without a client, which would not let such a request pass here."""
    key = "LaunchTemplateConfigs.1.Overrides.{}.InstanceRequirements.VCpuCount.Min"
    form = {"Action": "CreateFleet", **{key.format(number): "2" for number in range(1, 6)}}
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(world.server.url, data=form)
    assert (answer.status_code, "number of InstanceRequirements (4)" in answer.text) == (400, True)


async def test_one_subnet_per_zone_with_the_most_free_addresses(world: Ec2Fixture, compute: Ec2Compute) -> None:
    first, second = world.subnets
    small = await world.subnet_in(first, prefix=28)
    launch = {"subnet-ids": f"{small},{first},{second}"}
    assert len(instance_ids(await compute.launch(world.launch_request(launch=launch)))) == 1
    sent = world.server.last("CreateFleet")
    assert {value for key, value in sent.items() if key.endswith(".SubnetId")} == {first, second}


async def test_launch_is_found_if_another_process_used_the_token_in_other_subnets(world: Ec2Fixture) -> None:
    first, second = await world.prepared_compute(), world.compute()
    result = await first.launch(world.launch_request(count=2))
    other = world.launch_request(count=2, launch={"subnet-ids": world.subnets[1]})
    assert await second.launch(other) == result
    assert len(await world.instances()) == 2


async def test_launch_in_missing_subnets_is_rejected(world: Ec2Fixture, compute: Ec2Compute) -> None:
    with pytest.raises(UserError, match="subnet-11111111") as caught:
        await compute.launch(world.launch_request(launch={"subnet-ids": "subnet-11111111 subnet-22222222"}))
    assert caught.value.field == "subnet-ids"


async def test_named_types_are_launched_at_any_price(world: Ec2Fixture, compute: Ec2Compute) -> None:
    await compute.launch(world.launch_request(patterns="r6i.large"))
    assert [item["InstanceType"] for item in await world.instances()] == ["r6i.large"]


async def test_price_protection_stays_if_no_type_is_named(world: Ec2Fixture, compute: Ec2Compute) -> None:
    await compute.launch(world.launch_request())
    assert not [key for key in world.server.last("CreateFleet") if "Price" in key]


async def test_burstable_and_metal_types_are_included_if_named(world: Ec2Fixture, compute: Ec2Compute) -> None:
    with pytest.raises(CapacityError):  # the test server has no such types
        await compute.launch(world.launch_request(patterns="t3.* m5.metal"))
    sent = world.server.last("CreateFleet")
    requirements = "LaunchTemplateConfigs.1.Overrides.1.InstanceRequirements"
    assert sent[f"{requirements}.BurstablePerformance"] == "included"
    assert sent[f"{requirements}.BareMetal"] == "included"


def class_request(world: Ec2Fixture, token: str, **fields: Any) -> LaunchRequest:
    wanted = ResourceClass(name="own", **{"cpu": 2, "memory_mib": 1_024, **fields})
    request = runner_request(resource_class=wanted, patterns=wanted.types)
    return replace(world.launch_request(token), request=request)


async def test_one_pool_serves_classes_of_several_architectures_and_gpus(
    world: Ec2Fixture, compute: Ec2Compute
) -> None:
    launched = {}
    classes: dict[str, dict[str, Any]] = {
        "x86": {},
        "arm64": {"ami": ARM_AMI},
        "gpu": {"gpu": 1},
        "gpus": {"gpu": 2, "cpu": 8},
        "types": {"types": TypePatterns.parse("r6i.2*")},
    }
    for name, fields in classes.items():
        (machine,) = (await compute.launch(class_request(world, name, **fields))).instances
        launched[name] = machine.instance_type
    assert launched == {
        "x86": "c6i.large",
        "arm64": "c7g.large",
        "gpu": "g5.xlarge",
        "gpus": "g5.12xlarge",
        "types": "r6i.2xlarge",
    }


async def test_a_class_launches_no_larger_instances(world: Ec2Fixture, compute: Ec2Compute) -> None:
    """The role of workflows may not launch them, so the fleet must not choose one."""
    big = {"cpu": 16, "memory_mib": 200 * 1024}
    with pytest.raises(RemudaError, match=r"No instance type matches.*16 to 64 cpu"):
        await compute.launch(class_request(world, "a", **big))
    (machine,) = (await compute.launch(class_request(world, "b", max_cpu=96, **big))).instances
    assert machine.instance_type == "m6i.24xlarge"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"ami": "ami-00000000000000000"}, "ami ami-00000000000000000 of class 'own' does not exist"),
        ({"ami": ARM_AMI, "architecture": Architecture.X86_64}, f"its image {ARM_AMI} is for arm64"),
        ({"architecture": Architecture.ARM64}, f"its image {LINUX_AMI} is for x86_64"),
        (
            {"types": TypePatterns.parse("c7g.*")},
            f"instance types c7g.\\* of class 'own' are for arm64, and its image {LINUX_AMI} is for x86_64",
        ),
        ({"ami": WINDOWS_AMI}, "root device /dev/sda1, and the image of the pool has /dev/xvda"),
    ],
)
async def test_refresh_checks_the_images_of_classes(world: Ec2Fixture, fields: dict[str, Any], why: str) -> None:
    before = world.server.requests().get("CreateLaunchTemplate", 0)
    with pytest.raises(UserError, match=why) as refused:
        await world.compute().prepare(world.options, [ResourceClass(name="own", cpu=2, memory_mib=512, **fields)])
    assert refused.value.field == "resource-class-config"
    assert world.server.requests().get("CreateLaunchTemplate", 0) == before


async def test_an_image_with_another_root_device_is_not_launched(world: Ec2Fixture, compute: Ec2Compute) -> None:
    """Its root volume would keep the size of the image, because the template maps another device."""
    with pytest.raises(RemudaError, match="the root device of the image is /dev/sda1"):
        await compute.launch(class_request(world, "token", ami=WINDOWS_AMI))


async def test_refresh_accepts_images_of_classes(world: Ec2Fixture) -> None:
    own = ResourceClass(name="own", cpu=2, memory_mib=512, ami=ARM_AMI, architecture=Architecture.ARM64)
    world.parameters["/remuda/pool/ami"] = ARM_AMI
    resolved = replace(own, name="ssm", ami="resolve:ssm:/remuda/pool/ami")
    assert await world.compute().prepare(world.options, [own, resolved])


async def test_architectures_by_the_names_of_types_are_those_of_ec2(world: Ec2Fixture) -> None:
    """The rule must hold for every type that the server knows."""
    pages = world.client.get_paginator("describe_instance_types").paginate()
    found = {
        item["InstanceType"]: item["ProcessorInfo"]["SupportedArchitectures"]
        async for page in pages
        for item in page["InstanceTypes"]
    }
    assert len(found) > 500
    for name, architectures in found.items():
        by_name = TypePatterns((name,)).architecture
        assert by_name in architectures if by_name else name.startswith(("mac", "u-")), name


async def test_everything_that_a_launch_creates_has_the_tag_of_the_pool(world: Ec2Fixture, compute: Ec2Compute) -> None:
    """IAM allows only these: fleets, instances and volumes by the request, network interfaces by the template."""
    await compute.launch(world.launch_request())
    sent = world.server.last("CreateFleet")
    kinds = {value for key, value in sent.items() if key.endswith(".ResourceType")}
    assert kinds == {"fleet", "instance", "volume"}
    data = (await default_version(world))["LaunchTemplateData"]
    wanted = {"ResourceType": "network-interface", "Tags": [{"Key": "remuda:pool", "Value": "pool"}]}
    assert wanted in data["TagSpecifications"]


async def test_instances_and_volumes_are_tagged_at_launch(world: Ec2Fixture, compute: Ec2Compute) -> None:
    options = {"github-environment": "prod"}
    result = await compute.launch(world.launch_request(launch=options, tags={"team": "a", POOL_TAG: "forged"}))

    tags = (await compute.describe(instance_ids(result)))[instance_ids(result)[0]].tags
    assert tags == {
        "ghr:environment": "prod",
        "ghr:Application": "github-action-runner",
        "ghr:Owner": "acme/widgets",
        "ghr:Type": "Repo",
        "remuda:first-life-s": "401",
        "remuda:margin-s": "60",
        "remuda:launch": "token",
        "team": "a",
        POOL_TAG: "pool",
        PROVISION_TAG: "provision-token",
    }
    sent = world.server.last("CreateFleet")
    kinds = {sent[f"TagSpecification.{number}.ResourceType"] for number in (1, 2)}
    assert kinds == {"instance", "volume"}
    for number in (1, 2):
        spelled = {
            sent[f"TagSpecification.{number}.Tag.{each}.Key"]: sent[f"TagSpecification.{number}.Tag.{each}.Value"]
            for each in range(1, len(tags) + 1)
        }
        assert spelled == tags
    assert "CreateTags" not in world.server.requests()


async def test_type_tag_of_an_organisation(world: Ec2Fixture, compute: Ec2Compute) -> None:
    (name,) = instance_ids(await compute.launch(world.launch_request(scope="acme")))
    tags = (await compute.describe([name]))[name].tags
    assert (tags["ghr:Owner"], tags["ghr:Type"], tags["ghr:environment"]) == ("acme", "Org", "pool")


async def test_partial_capacity_returns_instances_and_errors(world: Ec2Fixture, compute: Ec2Compute) -> None:
    first, second = world.subnets
    world.server.configure(capacity={first: 1, second: 1})

    result = await compute.launch(world.launch_request(count=5, patterns="c6i.large"))

    assert len(instance_ids(result)) == 2
    assert len(result.errors) == 2
    for subnet in world.subnets:
        assert any(f"{subnet} c6i.large (on-demand): {NO_ROOM}" in error for error in result.errors)


async def test_missing_capacity_names_the_subnets(world: Ec2Fixture, compute: Ec2Compute) -> None:
    world.server.configure(capacity=dict.fromkeys(world.subnets, 0))
    with pytest.raises(CapacityError) as caught:
        await compute.launch(world.launch_request(count=2, patterns="c6i.large"))
    assert all(f"{subnet} c6i.large" in caught.value.message for subnet in world.subnets)
    assert caught.value.fix
    assert await world.instances() == []


async def test_spot_shortage_is_an_error(world: Ec2Fixture, compute: Ec2Compute) -> None:
    world.server.configure(capacity={"spot": 1})
    result = await compute.launch(world.launch_request(count=3, spot=True))
    assert len(instance_ids(result)) == 1
    assert result.errors
    world.server.configure(capacity={"spot": 0})
    with pytest.raises(CapacityError, match="spot"):
        await compute.launch(world.launch_request("other", count=3, spot=True))


async def test_spot_falls_back_to_on_demand_for_the_rest(world: Ec2Fixture, compute: Ec2Compute) -> None:
    world.server.configure(capacity={"spot": 1})
    request = world.launch_request(count=3, spot=True, launch={"spot-fallback": "on-demand"})

    result = await compute.launch(request)

    kinds = sorted(item.get("InstanceLifecycle", "on-demand") for item in await world.instances())
    assert kinds == ["on-demand", "on-demand", "spot"]
    lifecycles = {item["InstanceId"]: item.get("InstanceLifecycle", "on-demand") for item in await world.instances()}
    assert {item.instance_id: item.usage_class.value for item in result.instances} == lifecycles
    assert any("(spot)" in error for error in result.errors)
    assert (await compute.launch(request)).instances == result.instances
    assert len(await world.instances()) == 3


@pytest.mark.parametrize(
    ("code", "falls_back"),
    [
        ("InsufficientInstanceCapacity", True),
        ("MaxSpotInstanceCountExceeded", True),
        ("RequestLimitExceeded", False),
        ("UnauthorizedOperation", False),
        ("InvalidParameterValue", False),
        # On-demand instances need the same volumes, interfaces, addresses, tags and keys.
        ("MaxIOPSLimitExceeded", False),
        ("NetworkInterfaceLimitExceeded", False),
        ("VolumeLimitExceeded", False),
        ("VcpuLimitExceeded", False),
        ("InsufficientFreeAddressesInSubnet", False),
        ("TagPolicyViolation", False),
        ("CustomerKeyHasBeenRevoked", False),
        ("InternalError", False),
        ("SomethingNew", False),
    ],
)
def test_only_a_shortage_of_spot_makes_it_fall_back(code: str, falls_back: bool) -> None:  # noqa: FBT001
    assert is_mended_by_on_demand([FleetLaunchError(code=code, sentence="")]) is falls_back


@pytest.mark.parametrize(
    ("code", "falls_back"),
    [("InsufficientFreeAddressesInSubnet", True), ("VolumeLimitExceeded", False), ("TagPolicyViolation", False)],
)
def test_an_error_beside_a_shortage_of_spot(code: str, falls_back: bool) -> None:  # noqa: FBT001
    """Another subnet may have addresses; a quota of volumes fails every launch."""
    errors = [FleetLaunchError(code=each, sentence="") for each in ("InsufficientInstanceCapacity", code)]
    assert is_mended_by_on_demand(errors) is falls_back


@pytest.mark.parametrize(
    ("code", "error", "fix"),
    [
        ("TagPolicyViolation", UserError, "tag policy accept the tag"),
        ("TagLimitExceeded", UserError, "EC2 permits 50"),
        ("CustomerKeyHasBeenRevoked", UserError, "enable the KMS key of volume-kms-key"),
        ("KMSKeyNotAccessible", UserError, "enable the KMS key of volume-kms-key"),
        ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", UserError, "aws iam create-service-linked-role"),
        ("PendingVerification", Unavailable, "wait until AWS has verified the account"),
        ("SecurityGroupsPerInterfaceLimitExceeded", UserError, "fewer security-group-ids"),
        ("VolumeIOPSLimit", UserError, "correct the launch options"),
        ("MaxSpotInstanceCountExceeded", CapacityError, "quota of spot instances"),
        ("VcpuLimitExceeded", CapacityError, "quota of running on-demand instances"),
        ("NetworkInterfaceLimitExceeded", CapacityError, "quota of network interfaces"),
        ("MaxIOPSLimitExceeded", CapacityError, "quota of storage or IOPS"),
        ("VolumeLimitExceeded", CapacityError, "quota of storage or IOPS"),
        ("MaxFleetCountExceeded", CapacityError, "quota of fleets"),
        ("InsufficientFreeAddressesInSubnet", CapacityError, "add subnets with free addresses"),
        ("InsufficientVolumeCapacity", CapacityError, "another volume-type"),
        ("SomethingNew", Unavailable, "look the code up"),
    ],
)
async def test_launch_refused_for_another_reason_than_capacity(
    world: Ec2Fixture, compute: Ec2Compute, code: str, error: type[RemudaError], fix: str
) -> None:
    """The error names the cause and its own fix, and no on-demand instance is launched for it."""
    world.server.configure(refused={"spot": [code, "the reason of EC2"]})
    falling_back = {"spot-fallback": "on-demand"} if code != "MaxSpotInstanceCountExceeded" else {}
    with pytest.raises(error, match=f"{code}: the reason of EC2") as caught:
        await compute.launch(world.launch_request(spot=True, launch=falling_back))
    assert fix in caught.value.fix
    assert "allow more instance types" not in caught.value.fix
    assert world.server.requests()["CreateFleet"] == 1


async def test_errors_of_a_partial_launch_have_a_fix(world: Ec2Fixture, compute: Ec2Compute) -> None:
    world.server.configure(
        capacity={"spot": 1}, refused={"on-demand": ["NetworkInterfaceLimitExceeded", "the reason of EC2"]}
    )
    result = await compute.launch(world.launch_request(count=3, spot=True, launch={"spot-fallback": "on-demand"}))
    assert len(result.instances) == 1
    assert result.fix.startswith("request a higher quota of network interfaces")
    assert "allow more instance types" in result.fix


async def test_spot_instances_are_returned_if_the_fallback_fails(world: Ec2Fixture, compute: Ec2Compute) -> None:
    world.server.configure(capacity={"spot": 1, "on-demand": 0})
    result = await compute.launch(world.launch_request(count=3, spot=True, launch={"spot-fallback": "on-demand"}))
    assert len(instance_ids(result)) == 1
    assert any("(on-demand)" in error for error in result.errors)


@pytest.mark.parametrize("honoured", [True, False])
async def test_lost_response_launches_once(world: Ec2Fixture, compute: Ec2Compute, honoured: bool) -> None:  # noqa: FBT001
    world.server.configure(lost=[{"action": "CreateFleet"}], honour_tokens=honoured)

    result = await compute.launch(world.launch_request(count=2))

    assert len(instance_ids(result)) == 2
    assert sorted(item["InstanceId"] for item in await world.instances()) == instance_ids(result)
    assert instance_ids(await compute.launch(world.launch_request(count=2))) == instance_ids(result)
    assert len(await world.instances()) == 2


async def test_client_token_prevents_a_second_launch_if_describe_lags(world: Ec2Fixture, compute: Ec2Compute) -> None:
    world.server.configure(lost=[{"action": "CreateFleet"}], lag=1)
    result = await compute.launch(world.launch_request(count=2))
    assert world.server.requests()["CreateFleet"] == 2
    assert len(instance_ids(result)) == 2
    assert len(await world.instances()) == 2


@pytest.mark.parametrize(("shown", "found"), [(3, 5), (2, 4)])
async def test_instances_of_a_lost_response_appear_one_after_the_other(
    world: Ec2Fixture, compute: Ec2Compute, shown: int, found: int
) -> None:
    """The launch lists instances again while some are missing; those that it does not find are an error."""
    world.server.configure(lost=[{"action": "CreateFleet"}], shown=shown)
    result = await compute.launch(world.launch_request(count=5))
    assert len(instance_ids(result)) == found
    assert world.server.requests()["CreateFleet"] == 1
    assert world.server.requests()["DescribeInstances"] == 3
    assert [f"{found} of 5" in error for error in result.errors] == [True] * (found < 5)


async def test_instances_of_lost_responses_are_found_by_tag(world: Ec2Fixture, compute: Ec2Compute) -> None:
    world.server.configure(
        lost=[{"action": "CreateFleet", "times": 99}],
        faults=[{"action": "DescribeInstances", "code": "InternalError", "status": 500, "times": 99}],
    )
    with pytest.raises(Unavailable):
        await compute.launch(world.launch_request(count=2))
    world.server.configure(lost=[], faults=[])
    assert [view.tags[PROVISION_TAG] for view in await compute.list_pool()] == ["provision-token"] * 2
    # A later launch with the same token returns them.
    assert len(instance_ids(await compute.launch(world.launch_request(count=2)))) == 2
    assert len(await world.instances()) == 2


async def test_same_token_in_another_process_returns_the_same_instances(world: Ec2Fixture) -> None:
    first, second = await world.prepared_compute(), world.compute()
    result = await first.launch(world.launch_request(count=2))
    assert await second.launch(world.launch_request(count=2)) == result
    assert len(await world.instances()) == 2


@pytest.mark.parametrize(
    ("code", "status", "error", "field"),
    [
        ("RequestLimitExceeded", 503, Throttled, ""),
        ("VcpuLimitExceeded", 400, CapacityError, ""),
        ("InsufficientInstanceCapacity", 500, CapacityError, ""),
        ("UnauthorizedOperation", 403, UserError, "aws-permission"),
        ("AuthFailure", 401, UserError, "aws-credentials"),
        ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", 400, UserError, "aws-permission"),
        ("InvalidParameterValue", 400, UserError, "launch"),
        ("InvalidLaunchTemplateName.NotFoundException", 400, UserError, "launch"),
        ("InternalError", 500, Unavailable, ""),
    ],
)
async def test_errors_contain_a_fix(
    world: Ec2Fixture, compute: Ec2Compute, code: str, status: int, error: type[Exception], field: str
) -> None:
    world.server.configure(faults=[{"action": "CreateFleet", "code": code, "status": status, "times": 99}])
    with pytest.raises(error) as caught:
        await compute.launch(world.launch_request())
    assert type(caught.value) is error
    assert code in str(caught.value)
    assert getattr(caught.value, "field", "") == field
    if issubclass(error, UserError | CapacityError):
        assert getattr(caught.value, "fix", "")
    if code == "VcpuLimitExceeded":
        assert "quota" in getattr(caught.value, "fix", "")
    assert await world.instances() == []


async def test_throttled_calls_are_retried(world: Ec2Fixture, compute: Ec2Compute) -> None:
    world.server.configure(
        faults=[{"action": "CreateFleet", "code": "RequestLimitExceeded", "status": 503, "times": 2}]
    )
    assert len(instance_ids(await compute.launch(world.launch_request()))) == 1
    assert len(world.clock.slept) == 2


async def test_new_instance_is_visible_after_the_lag(world: Ec2Fixture, compute: Ec2Compute) -> None:
    world.server.configure(lag=1)
    names = instance_ids(await compute.launch(world.launch_request()))
    assert await compute.describe(names) == {}
    assert (await compute.describe(names))[names[0]].state is MachineState.RUNNING


# Instances -----------------------------------------------------------------------------------------------------------


async def state(world: Ec2Fixture, name: str) -> str:
    return next(str(item["State"]["Name"]) for item in await world.instances() if item["InstanceId"] == name)


async def test_description_contains_the_image(world: Ec2Fixture, compute: Ec2Compute) -> None:
    await compute.launch(world.launch_request())
    assert [view.image for view in await compute.list_pool()] == [world.options["ami"]]


async def test_unknown_ids_do_not_fail_a_batch(world: Ec2Fixture, compute: Ec2Compute) -> None:
    """DescribeTags knows the instances, TerminateInstances does not any more."""
    names = instance_ids(await compute.launch(world.launch_request(count=5)))
    unknown = {"action": "TerminateInstances", "code": "InvalidInstanceID.NotFound"}

    # The error may name the unknown ids or not.
    world.server.configure(faults=[{**unknown, "message": f"The instance IDs '{names[0]}, {UNKNOWN}' do not exist"}])
    assert await compute.terminate(names[:2]) == {}
    assert [await state(world, name) for name in names[:2]] == ["running", "terminated"]
    world.server.configure(faults=[{**unknown, "message": "some do not exist"}])
    assert await compute.terminate(names[2:]) == {}
    assert [await state(world, name) for name in names[2:]] == ["terminated"] * 3


async def test_protected_instance_does_not_fail_a_batch(world: Ec2Fixture, compute: Ec2Compute) -> None:
    names = instance_ids(await compute.launch(world.launch_request(count=3)))
    text = f"The instance '{names[1]}' may not be terminated. Modify its 'disableApiTermination' instance attribute."
    world.server.configure(faults=[{"action": "TerminateInstances", "code": "OperationNotPermitted", "message": text}])
    assert await compute.terminate(names) == {names[1]: text}
    assert [await state(world, name) for name in names] == ["terminated", "running", "terminated"]


async def test_launched_instance_is_terminated_before_it_is_visible(world: Ec2Fixture, compute: Ec2Compute) -> None:
    world.server.configure(lag=1)
    names = instance_ids(await compute.launch(world.launch_request()))
    assert await compute.terminate(names) == {}
    assert await state(world, names[0]) == "terminated"


async def test_terminate_reads_the_pool_tag_and_rejects_foreign_instances(
    world: Ec2Fixture, compute: Ec2Compute
) -> None:
    """An instance without the tag is described, to tell a foreign instance from a missing one."""
    names = instance_ids(await compute.launch(world.launch_request(count=2)))
    before = world.server.requests().get("DescribeInstances", 0)
    assert await compute.terminate(names) == {}
    assert world.server.requests().get("DescribeInstances", 0) == before
    stranger = await world.launch_foreign_instance()
    refused = await compute.terminate([stranger, UNKNOWN, "not-an-id"])
    assert set(refused) == {stranger, "not-an-id"}
    assert POOL_TAG in refused[stranger]
    assert world.server.requests().get("DescribeInstances", 0) == before + 1
    assert await state(world, stranger) == "running"
    assert [await state(world, name) for name in names] == ["terminated"] * 2


async def test_failed_terminations_are_returned(world: Ec2Fixture, compute: Ec2Compute) -> None:
    names = instance_ids(await compute.launch(world.launch_request(count=2)))
    world.server.configure(faults=[{"action": "TerminateInstances", "code": "UnauthorizedOperation", "status": 403}])
    refused = await compute.terminate(names)
    assert sorted(refused) == names
    assert "UnauthorizedOperation" in refused[names[0]]


async def test_many_instances_in_batches_and_pages(world: Ec2Fixture, compute: Ec2Compute) -> None:
    results = [
        await compute.launch(world.launch_request(f"token-{number}", count=MANY // LAUNCHES))
        for number in range(LAUNCHES)
    ]
    names = sorted(name for result in results for name in instance_ids(result))
    await world.launch_foreign_instance()
    assert len(names) == MANY

    assert sorted(view.instance_id for view in await compute.list_pool()) == names
    assert world.server.requests()["DescribeInstances"] == -(-LAUNCHES // PAGE)
    assert len(await compute.describe([*names, UNKNOWN])) == MANY
    await compute.tag(names, {"ghr:orphan": "true"})
    await compute.untag(names, ["ghr:orphan"])
    assert await compute.terminate([*names, UNKNOWN]) == {}

    assert {view.state for view in await compute.list_pool()} == {MachineState.TERMINATED}
    requests = world.server.requests()
    batches = -(-MANY // BATCH)
    assert (requests["CreateFleet"], requests["TerminateInstances"]) == (LAUNCHES, batches)
    assert (requests["CreateTags"], requests["DeleteTags"]) == (batches, batches)


async def test_tagging_skips_and_reports_unknown_instances(world: Ec2Fixture, compute: Ec2Compute) -> None:
    names = instance_ids(await compute.launch(world.launch_request(count=2)))
    text = f"The instance ID '{UNKNOWN}' does not exist"
    world.server.configure(faults=[{"action": "CreateTags", "code": "InvalidInstanceID.NotFound", "message": text}])
    with pytest.raises(NotFound, match=UNKNOWN):
        await compute.tag([names[0], UNKNOWN, names[1]], {"ghr:orphan": "true"})
    assert all(view.tags.get("ghr:orphan") == "true" for view in (await compute.describe(names)).values())
    await compute.untag(names, ["ghr:orphan"])
    assert not any("ghr:orphan" in view.tags for view in (await compute.describe(names)).values())


# Spot prices ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def market(world: Ec2Fixture) -> SpotPrices:
    return Ec2SpotPrices(client=world.product_client, clock=world.clock, ids=SystemIds(), calls=world.calls)


async def test_prices_by_type_and_zone(world: Ec2Fixture, market: SpotPrices) -> None:
    until = world.clock.now()
    points = await market.spot_history(
        ["c6i.large", "m5.large", "zz9.huge"], since=until - timedelta(days=1), until=until
    )
    assert {point.instance_type for point in points} == {"c6i.large", "m5.large"}
    assert len({point.zone for point in points}) > 1
    assert all(point.price > 0 and point.at.tzinfo is not None for point in points)
    assert world.calls.by_service()["ec2"]["DescribeSpotPriceHistory"] >= 1


async def test_no_types_make_no_call(world: Ec2Fixture, market: SpotPrices) -> None:
    until = world.clock.now()
    assert not await market.spot_history([], since=until - timedelta(days=1), until=until)
    assert "ec2" not in world.calls.by_service()


async def test_missing_permission_is_reported(world: Ec2Fixture, market: SpotPrices) -> None:
    until = world.clock.now()
    world.server.configure(
        faults=[{"action": "DescribeSpotPriceHistory", "code": "UnauthorizedOperation", "status": 403, "times": 9}]
    )
    with pytest.raises(UserError):
        await market.spot_history(["c6i.large"], since=until - timedelta(days=1), until=until)
