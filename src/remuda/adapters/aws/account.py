"""Checks of the AWS account: what launches need that belongs to no pool. Each missing part is shown with its request.

Example on a new account: "on-demand standard (L-1216C47A): 5 vCPUs, and max-instances of 10 needs 20", with the command
that requests more.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import code_of, translated
from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.aws.ec2.options import SUBNETS, VOLUME_KMS_KEY
from remuda.adapters.aws.ec2.routes import outbound_route
from remuda.domain.errors import UserError
from remuda.domain.resources import ResourceClass, split_type
from remuda.ports.doctor import Check, CheckResult, ok, problem, warning

QUOTAS = "quotas"
SPOT_ROLE_NAME = "AWSServiceRoleForEC2Spot"
#: What GetEbsDefaultKmsKeyId returns if the account has no key of its own.
AWS_KEY = "alias/aws/ebs"
SERVICE_QUOTAS = "Service Quotas"
_NO_QUOTA = "NoSuchResourceException"


@dataclass(frozen=True, kw_only=True)
class Family:
    """Instance families that share the quotas of their running vCPUs."""

    name: str
    #: Letters before the generation in the names of families. Standard has all others.
    letters: frozenset[str]
    #: Quota codes of the service ec2, by usage class.
    codes: Mapping[str, str]


def _family(name: str, letters: str, on_demand: str, spot: str) -> Family:
    return Family(name=name, letters=frozenset(letters.split()), codes={"on-demand": on_demand, "spot": spot})


#: "Amazon EC2 service quotas" in the AWS General Reference.
STANDARD = _family("standard", "", "L-1216C47A", "L-34B43A08")
FAMILIES = (
    _family("G and VT", "g gr vt", "L-DB2E81BA", "L-3819A6DF"),
    _family("P", "p", "L-417A185B", "L-7212CCBC"),
    _family("X", "x", "L-7295265B", "L-E3A00192"),
    _family("F", "f", "L-74FC7D96", "L-88CF9481"),
    _family("Inf", "inf", "L-1945791B", "L-B5D1601B"),
    _family("Trn", "trn", "L-2C3B7624", "L-6B0D517C"),
    _family("DL", "dl", "L-6E869C2A", "L-85EED4F7"),
)


def families_of(wanted: ResourceClass) -> set[str]:
    """Names of the families that a class may launch."""
    if wanted.types.match_all:
        # EC2 chooses among all types: those with GPUs are in these two.
        return {"G and VT", "P"} if wanted.gpu else {STANDARD.name}
    letters = (re.match(r"[a-z]*", split_type(word)[0]) for word in wanted.types.words)
    return {_family_of(found[0]).name for found in letters if found}


def _family_of(letters: str) -> Family:
    return next((each for each in FAMILIES if letters in each.letters), STANDARD)


async def read_quotas(clients: AwsClients, classes: Collection[ResourceClass]) -> dict[tuple[str, str], float]:
    """The vCPUs of each family of the classes, by its name and usage class."""
    used = {name for each in classes for name in families_of(each)}
    wanted = [
        (each.name, usage, code)
        for each in (STANDARD, *FAMILIES)
        if each.name in used
        for usage, code in each.codes.items()
    ]
    values = await asyncio.gather(*(_quota(clients, code) for _, _, code in wanted))
    return {(name, usage): value for (name, usage, _), value in zip(wanted, values, strict=True)}


async def _quota(clients: AwsClients, code: str) -> float:
    """The quota of the account, or the default of AWS if the account has no value."""
    client = await clients.client("service-quotas", SERVICE_QUOTAS, config())
    wanted = {"ServiceCode": "ec2", "QuotaCode": code}
    with translated(SERVICE_QUOTAS, code):
        try:
            answer = await client.get_service_quota(**wanted)
        except ClientError as error:
            if code_of(error) != _NO_QUOTA:
                raise
            answer = await client.get_aws_default_service_quota(**wanted)
    return float(answer["Quota"]["Value"])


def judge_quotas(
    quotas: Mapping[tuple[str, str], float], classes: Collection[ResourceClass], max_instances: int
) -> CheckResult:
    """Compare each quota with one instance of the largest class, and with `max_instances` of the smallest."""
    texts, requests = [], []
    for each in (STANDARD, *FAMILIES):
        of_family = [item for item in classes if each.name in families_of(item)]
        for usage, code in each.codes.items():
            vcpus = quotas.get((each.name, usage))
            if vcpus is None or not of_family:
                continue
            smallest, largest = (choose(of_family, key=lambda item: item.cpu) for choose in (min, max))
            text = f"{vcpus:g} {usage} vCPUs of {each.name}: {int(vcpus // smallest.cpu)} instances of {smallest.name}"
            if too_large := [item.name for item in of_family if item.cpu > vcpus]:
                text += f", none of {', '.join(too_large)}"
            texts.append(text)
            if (needed := max(largest.cpu, max_instances * smallest.cpu)) > vcpus:
                requests.append(f"--quota-code {code} --desired-value {needed:g}")
    if not requests:
        return ok("; ".join(texts))
    command = "aws service-quotas request-service-quota-increase --service-code ec2"
    return warning(
        f"{'; '.join(texts)} (max-instances is {max_instances})",
        f"run {', '.join(f'{command} {each}' for each in requests)}, or lower max-instances",
    )


class AccountDoctor:
    def __init__(
        self,
        *,
        clients: AwsClients,
        launch: Mapping[str, str],
        classes: Collection[ResourceClass],
        max_instances: int,
        needs: tuple[str, ...] = (),
    ) -> None:
        """`launch` are the launch options of the pool."""
        self._clients = clients
        self._launch = launch
        self._classes = classes
        self._max_instances = max_instances
        self._needs = needs

    def checks(self) -> Sequence[Check]:
        return (
            Check(name=QUOTAS, run=self.quotas, needs=self._needs),
            Check(name="spot role", run=self._spot_role, needs=self._needs),
            Check(name="volume key", run=self._volume_key, needs=self._needs),
            Check(name="routes", run=self._routes, needs=self._needs),
        )

    async def quotas(self) -> CheckResult:
        try:
            found = await read_quotas(self._clients, self._classes)
        except UserError as error:
            return warning(f"the quotas of EC2 cannot be read: {error.message}", "check them in Service Quotas")
        return judge_quotas(found, self._classes, self._max_instances)

    async def _spot_role(self) -> CheckResult:
        """Roles of Remuda may not create it, so the first launch on spot would fail."""
        client = await self._clients.client("iam", "IAM", config())
        try:
            with translated("IAM", SPOT_ROLE_NAME):
                try:
                    await client.get_role(RoleName=SPOT_ROLE_NAME)
                except ClientError as error:
                    if code_of(error) != "NoSuchEntity":
                        raise
                    return warning(
                        f"{SPOT_ROLE_NAME} does not exist: launches of spot instances fail",
                        "run aws iam create-service-linked-role --aws-service-name spot.amazonaws.com",
                    )
        except UserError as error:
            return warning(f"the role of spot instances cannot be read: {error.message}", "grant iam:GetRole")
        return ok(f"{SPOT_ROLE_NAME} exists")

    async def _volume_key(self) -> CheckResult:
        """The key that EC2 takes for the encrypted root volumes. `remuda deploy` also checks its policy."""
        given = self._launch.get(VOLUME_KMS_KEY, "")
        try:
            key = given or await self._default_key()
            if key.endswith(AWS_KEY):
                return ok("the key that AWS manages for EBS")
            client = await self._clients.client("kms", "KMS", config())
            with translated("KMS", key):
                metadata: Mapping[str, Any] = (await client.describe_key(KeyId=key))["KeyMetadata"]
        except UserError as error:
            fix = "grant ec2:GetEbsDefaultKmsKeyId and kms:DescribeKey to check it"
            return warning(f"the KMS key of the volumes was not checked: {error.message}", fix)
        if metadata["KeyState"] != "Enabled":
            return problem(
                f"KMS key {key} is {metadata['KeyState']}: EC2 ends every instance after its launch",
                f"run aws kms enable-key --key-id {key}",
            )
        if not given and metadata["KeyManager"] == "CUSTOMER":
            return warning(
                f"{key} is the account's default key of EBS, and the roles of the pool have no permission to use it",
                "run remuda deploy, which sets volume-kms-key and gives them the permission",
            )
        return ok(key)

    async def _default_key(self) -> str:
        client = await self._clients.client("ec2", "EC2", config())
        with translated("EC2", "the default key of EBS"):
            return str((await client.get_ebs_default_kms_key_id())["KmsKeyId"])

    async def _routes(self) -> CheckResult:
        """Whether instances reach GitHub, and which gateway endpoints relieve the NAT."""
        names = self._launch.get(SUBNETS, "").replace(",", " ").split()
        if not names:
            return ok("not checked: the pool has no subnets")
        client = await self._clients.client("ec2", "EC2", config())
        try:
            with translated("EC2", "routes of the subnets"):
                subnets = (await client.describe_subnets(Filters=[{"Name": "subnet-id", "Values": names}]))["Subnets"]
                of_vpc = [{"Name": "vpc-id", "Values": sorted({str(each["VpcId"]) for each in subnets})}]
                tables = (await client.describe_route_tables(Filters=of_vpc))["RouteTables"]
                endpoints = (await client.describe_vpc_endpoints(Filters=of_vpc))["VpcEndpoints"]
        except UserError as error:
            fix = "grant ec2:DescribeSubnets, ec2:DescribeRouteTables and ec2:DescribeVpcEndpoints"
            return warning(f"the routes of the subnets cannot be read: {error.message}", fix)
        routes = {str(each["SubnetId"]): outbound_route(each, tables) for each in subnets}
        known = sorted({str(each["ServiceName"]).rpartition(".")[2] for each in endpoints})
        shown = f"; VPC endpoints: {', '.join(known) or 'none'}"
        if isolated := [name for name, route in routes.items() if route == "none"]:
            return warning(
                f"{', '.join(isolated)} have no route to the internet that instances without a public address can "
                f"use{shown}; GitHub has none",
                "add a NAT gateway and a route to it, or use public subnets that assign public addresses",
            )
        kinds = sorted(set(routes.values()))
        return ok(f"instances reach GitHub ({', '.join(kinds)}){shown}")
