"""Checks of images, subnets and permissions, with scripted answers of EC2."""

from __future__ import annotations

from typing import Any, cast

import pytest
from botocore.exceptions import ClientError

from remuda.adapters.aws.doctor import AwsAdapters, AwsDoctor
from remuda.adapters.aws.ec2.compute import Ec2Compute
from remuda.domain.resources import ResourceClass, TypePatterns
from remuda.ports.calls import CallCounter
from remuda.ports.doctor import CheckResult, CheckStatus
from simulation.loop import SeededIds
from tests.support.virtual_time import FixedClock

AMI = "ami-0123456789abcdef0"
SUBNET, OTHER_SUBNET = "subnet-0123456789abcdef0", "subnet-0123456789abcdef1"
LAUNCH = {"ami": AMI, "subnet-ids": f"{SUBNET},{OTHER_SUBNET}", "iam-instance-profile": "agent"}


class Ec2:
    """EC2 with one image and two subnets, which permits all operations but `denied`."""

    def __init__(self) -> None:
        self.image: dict[str, Any] = {"ImageId": AMI, "State": "available", "Architecture": "x86_64"}
        self.subnets = {
            name: {"SubnetId": name, "AvailabilityZone": zone, "AvailableIpAddressCount": 9}
            for name, zone in ((SUBNET, "eu-central-1a"), (OTHER_SUBNET, "eu-central-1b"))
        }
        self.denied = ""
        self.instance_type = ""

    async def describe_images(self, **_: Any) -> Any:
        return {"Images": [self.image]}

    async def describe_subnets(self, **_: Any) -> Any:
        return {"Subnets": [*self.subnets.values()]}

    async def create_fleet(self, **_: Any) -> Any:
        raise self._dry_run("CreateFleet")

    async def run_instances(self, **parameters: Any) -> Any:
        self.instance_type = parameters["InstanceType"]
        raise self._dry_run("RunInstances")

    def _dry_run(self, operation: str) -> ClientError:
        is_denied = operation == self.denied
        code, text = ("UnauthorizedOperation", "You may not.") if is_denied else ("DryRunOperation", "It would work.")
        error: Any = {"Code": code, "Message": f"{text} Encoded authorization failure message: abc"}
        return ClientError({"Error": error}, operation)


@pytest.fixture
def ec2() -> Ec2:
    return Ec2()


async def check(ec2: Ec2, name: str, *, types: str = "", **launch: str) -> CheckResult:
    made = Ec2Compute(
        client=cast("Any", ec2),
        pool="test",
        clock=FixedClock(),
        ids=SeededIds(),
        calls=CallCounter(),
        read_parameter=cast("Any", None),
    )

    async def adapters() -> AwsAdapters:
        return AwsAdapters(store=cast("Any", None), pool=cast("Any", None), compute=made)

    doctor = AwsDoctor(
        clients=cast("Any", None),
        adapters=adapters,
        pool="test",
        launch={**LAUNCH, **launch},
        classes=[ResourceClass(name="large", cpu=2, memory_mib=4096, types=TypePatterns.parse(types or "*"))],
        clock=FixedClock(),
    )
    (found,) = (item for item in doctor.checks() if item.name == name)
    return await found.run()


async def test_image_must_be_available(ec2: Ec2) -> None:
    assert (await check(ec2, "image")).status is CheckStatus.OK
    ec2.image["State"] = "pending"
    assert f"{AMI} is pending" in (await check(ec2, "image")).message


async def test_downloads_must_have_the_architecture_of_the_image(ec2: Ec2) -> None:
    job_image = {"job-image-url": "https://host/image-arm64.tar", "job-image-sha256": "0" * 64}
    assert "job-image-url for arm64" in (await check(ec2, "image", **job_image)).message
    ec2.image["Architecture"] = "arm64"
    assert (await check(ec2, "image", **job_image)).status is CheckStatus.OK


async def test_subnets_must_exist_and_have_addresses(ec2: Ec2) -> None:
    assert (await check(ec2, "subnets")).status is CheckStatus.OK
    ec2.subnets[SUBNET]["AvailableIpAddressCount"] = 0
    assert (await check(ec2, "subnets")).status is CheckStatus.WARNING
    del ec2.subnets[SUBNET]
    found = await check(ec2, "subnets")
    assert (found.status, found.message.partition(" ")[0]) == (CheckStatus.PROBLEM, SUBNET)


@pytest.mark.parametrize(
    ("types", "used"), [("*", "m5.large"), ("m5.*", "m5.large"), ("c6i.*", "c6i.large"), ("c*.xlarge", "c5.xlarge")]
)
async def test_dry_run_of_a_launch_uses_a_type_of_the_class(ec2: Ec2, types: str, used: str) -> None:
    assert (await check(ec2, "launch permission", types=types)).status is CheckStatus.OK
    assert ec2.instance_type == used


@pytest.mark.parametrize("operation", ["CreateFleet", "RunInstances"])
async def test_denied_launch_is_a_warning_with_the_reason(ec2: Ec2, operation: str) -> None:
    ec2.denied = operation
    found = await check(ec2, "launch permission")
    assert found.status is CheckStatus.WARNING
    assert found.message.endswith(f"({operation}): You may not.")
