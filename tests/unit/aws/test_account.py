"""Checks of the AWS account: quotas by family, the role of spot instances, the key of volumes and routes."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from remuda.adapters.aws.account import FAMILIES, STANDARD, AccountDoctor, families_of, judge_quotas
from remuda.domain.resources import DEFAULT_CLASSES, ResourceClass, parse_classes
from remuda.ports.doctor import CheckResult, CheckStatus

KEY = "arn:aws:kms:eu-central-1:123456789012:key/1"
PUBLIC, PRIVATE = {"SubnetId": "subnet-1", "MapPublicIpOnLaunch": True}, {"SubnetId": "subnet-2"}
GATEWAY = {"GatewayId": "igw-1"}


def classes(**types: str) -> tuple[ResourceClass, ...]:
    sizes = {"cpu": 4, "mmem": 4096}
    return parse_classes(
        {name: {**sizes, **({"instance-types": each} if each else {})} for name, each in types.items()}
    )


@pytest.mark.parametrize(
    ("types", "families"),
    [
        ("", {"standard"}),
        ("m7i.* c*", {"standard"}),
        ("im4gn.*", {"standard"}),
        ("g5.xlarge", {"G and VT"}),
        ("g5.* p4d.24xlarge", {"G and VT", "P"}),
        ("x2idn.16xlarge m7i.large", {"X", "standard"}),
        ("inf2.xlarge", {"Inf"}),
        ("*.large", {"standard"}),
    ],
)
def test_families_of_a_class(types: str, families: set[str]) -> None:
    assert families_of(classes(one=types)[0]) == families


def test_a_class_with_gpus_and_without_types_has_families_with_gpus() -> None:
    (made,) = parse_classes({"gpu": {"cpu": 4, "mmem": 4096, "gpu": 1}})
    assert families_of(made) == {"G and VT", "P"}


def test_each_quota_has_its_own_code() -> None:
    codes = [code for each in (STANDARD, *FAMILIES) for code in each.codes.values()]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(
    ("quotas", "status", "text", "requested"),
    [
        ({"on-demand": 512.0, "spot": 512.0}, CheckStatus.OK, "256 instances of large", []),
        (
            {"on-demand": 5.0},
            CheckStatus.WARNING,
            "5 on-demand vCPUs of standard: 2 instances of large, none of 2xlarge",
            ["L-1216C47A --desired-value 200"],
        ),
        ({"on-demand": 512.0, "spot": 100.0}, CheckStatus.WARNING, "is 100", ["L-34B43A08 --desired-value 200"]),
    ],
)
def test_quotas_are_compared_with_the_classes(
    quotas: dict[str, float], status: CheckStatus, text: str, requested: list[str]
) -> None:
    result = judge_quotas({("standard", usage): each for usage, each in quotas.items()}, DEFAULT_CLASSES, 100)
    assert (result.status, text in result.message) == (status, True), result.message
    for each in requested:
        command = "aws service-quotas request-service-quota-increase --service-code ec2 --quota-code"
        assert f"{command} {each}" in result.fix


def test_each_family_is_compared_with_its_own_classes() -> None:
    made = classes(large="", gpu="g5.xlarge")
    quotas = {("standard", "on-demand"): 512.0, ("G and VT", "on-demand"): 0.0}
    result = judge_quotas(quotas, made, 2)
    assert "0 on-demand vCPUs of G and VT: 0 instances of gpu, none of gpu" in result.message
    assert result.fix.count("--quota-code") == 1
    assert "--quota-code L-DB2E81BA --desired-value 8" in result.fix


class AccountClients:
    """The services of AWS that the checks call. `refuses` are operations without permission."""

    def __init__(self, *refuses: str, **answers: Any) -> None:
        self._refuses = refuses
        self._answers = {
            "get_role": {},
            "get_service_quota": {"Quota": {"Value": 512.0}},
            "get_ebs_default_kms_key_id": {"KmsKeyId": "alias/aws/ebs"},
            "describe_key": {"KeyMetadata": {"KeyState": "Enabled", "KeyManager": "CUSTOMER"}},
            "describe_subnets": {"Subnets": [{**PUBLIC, "VpcId": "vpc-1"}]},
            "describe_route_tables": {
                "RouteTables": [
                    {"Associations": [{"Main": True}], "Routes": [{"DestinationCidrBlock": "0.0.0.0/0", **GATEWAY}]}
                ]
            },
            "describe_vpc_endpoints": {"VpcEndpoints": [{"ServiceName": "com.amazonaws.eu-central-1.s3"}]},
            **answers,
        }

    async def client(self, *_: Any) -> AccountClients:
        return self

    def __getattr__(self, name: str) -> Any:
        async def call(**_: Any) -> Any:
            if name in self._refuses:
                raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, name)
            answer = self._answers[name]
            if isinstance(answer, str):
                raise ClientError({"Error": {"Code": answer, "Message": "no"}}, name)
            return answer

        return call


async def result_of(name: str, account: AccountClients, **launch: str) -> CheckResult:
    options = {"subnet-ids": "subnet-1", **{key.replace("_", "-"): value for key, value in launch.items()}}
    clients: Any = account
    doctor = AccountDoctor(clients=clients, launch=options, classes=DEFAULT_CLASSES, max_instances=10)
    (check,) = [each for each in doctor.checks() if each.name == name]
    return await check.run()


@pytest.mark.parametrize(
    ("name", "account", "launch", "status", "words"),
    [
        ("quotas", AccountClients(), {}, CheckStatus.OK, "512 spot vCPUs of standard"),
        # The account has no value of its own.
        (
            "quotas",
            AccountClients(
                get_service_quota="NoSuchResourceException", get_aws_default_service_quota={"Quota": {"Value": 5.0}}
            ),
            {},
            CheckStatus.WARNING,
            "5 spot vCPUs of standard",
        ),
        ("quotas", AccountClients("get_service_quota"), {}, CheckStatus.WARNING, "cannot be read"),
        ("spot role", AccountClients(), {}, CheckStatus.OK, "exists"),
        (
            "spot role",
            AccountClients(get_role="NoSuchEntity"),
            {},
            CheckStatus.WARNING,
            "launches of spot instances fail",
        ),
        ("spot role", AccountClients("get_role"), {}, CheckStatus.WARNING, "cannot be read"),
        ("volume key", AccountClients(), {}, CheckStatus.OK, "AWS manages"),
        (
            "volume key",
            AccountClients(get_ebs_default_kms_key_id={"KmsKeyId": KEY}),
            {},
            CheckStatus.WARNING,
            "roles of the pool have no permission",
        ),
        ("volume key", AccountClients(), {"volume_kms_key": KEY}, CheckStatus.OK, KEY),
        (
            "volume key",
            AccountClients(describe_key={"KeyMetadata": {"KeyState": "Disabled", "KeyManager": "CUSTOMER"}}),
            {"volume_kms_key": KEY},
            CheckStatus.PROBLEM,
            "EC2 ends every instance",
        ),
        ("volume key", AccountClients("get_ebs_default_kms_key_id"), {}, CheckStatus.WARNING, "was not checked"),
        ("routes", AccountClients(), {}, CheckStatus.OK, "public); VPC endpoints: s3"),
        (
            "routes",
            AccountClients(describe_subnets={"Subnets": [{**PRIVATE, "VpcId": "vpc-1"}]}),
            {},
            CheckStatus.WARNING,
            "subnet-2 have no route",
        ),
        ("routes", AccountClients(), {"subnet_ids": ""}, CheckStatus.OK, "no subnets"),
        ("routes", AccountClients("describe_route_tables"), {}, CheckStatus.WARNING, "cannot be read"),
    ],
)
async def test_what_an_account_lacks_is_shown_with_what_to_do(
    name: str, account: AccountClients, launch: dict[str, str], status: CheckStatus, words: str
) -> None:
    result = await result_of(name, account, **launch)
    assert (result.status, words in result.message) == (status, True), result
    assert bool(result.fix) is (status is not CheckStatus.OK)
