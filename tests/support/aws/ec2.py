"""The EC2, IAM, Systems Manager and STS test server (moto), and a fixture with a client and `Ec2Compute` on it."""

from __future__ import annotations

import atexit
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx

from remuda.adapters.aws.clients import ClientConfig
from remuda.adapters.aws.ec2.calls import client_config
from remuda.adapters.aws.ec2.compute import Ec2Compute
from remuda.adapters.aws.service import ServiceClient
from remuda.adapters.system.clock import SystemIds
from remuda.domain.resources import TypePatterns, UsageClass
from remuda.ports.calls import CallCounter
from remuda.ports.compute import LaunchRequest, LaunchResult
from tests.support.aws.servers import HERE, LOOPBACK, REGION, ROOT, ServerError, aws_client, service_client
from tests.support.records import launch_request, runner_request
from tests.support.virtual_time import AdjustableClock

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client
    from types_aiobotocore_iam import IAMClient

#: Seconds that a call may take. Generous: only a broken server reaches it.
LIMIT_S = 120.0
PYTHON = ROOT / ".venv-moto" / "bin" / "python"
#: The few images that tests name. moto's own list would take most of the time of a reset.
IMAGES = ROOT / "tests" / "data" / "ec2" / "images.json"
LINUX_AMI = "ami-076f415166b04f5fe"
ARM_AMI = "ami-0e9271c829888680e"
WINDOWS_AMI = "ami-12c6146b"
PROFILE = "remuda-agent"
#: The role of the profile.
AGENT_ROLE = f"arn:aws:iam::123456789012:role/{PROFILE}"
TRUST_POLICY = '{"Version": "2012-10-17", "Statement": []}'


class Ec2Server:
    def __init__(self, host: str = LOOPBACK) -> None:
        if not PYTHON.exists():
            raise ServerError("the EC2 test server is not installed; run make .venv-moto/.installed")
        self._process = subprocess.Popen(
            [PYTHON, HERE / "ec2_shim.py", host, REGION],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C must not reach the server: tests need it for their cleanup.
            start_new_session=True,
            # Without the AWS variables of the tests.
            env={
                "PATH": "/usr/bin:/bin",
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "MOTO_AMIS_PATH": str(IMAGES),
            },
        )
        assert self._process.stdout is not None
        self.url = f"http://{host}:{int(self._process.stdout.readline())}"
        self._profiles: set[str] = set()
        self._http = httpx.Client(base_url=self.url, timeout=LIMIT_S, trust_env=False)

    def stop(self) -> None:
        self._http.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def reset(self) -> None:
        """Remove all instances and injected faults. Instance profiles stay."""
        self._http.post("/_shim/reset").raise_for_status()

    def configure(self, **changes: Any) -> None:
        """Set faults, capacity or lag, as listed in `ec2_shim.py`."""
        self._http.post("/_shim", json=changes).raise_for_status()

    def requests(self) -> dict[str, int]:
        """The number of requests per action."""
        counts: dict[str, int] = self._http.get("/_shim").json()["requests"]
        return counts

    def last(self, action: str) -> dict[str, str]:
        """The fields of the last request of this action."""
        fields: dict[str, str] = self._http.get("/_shim").json()["last"][action]
        return fields

    def environment(self) -> dict[str, str]:
        """Variables with which a process uses this server for EC2, IAM, Systems Manager and STS."""
        return {f"AWS_ENDPOINT_URL_{service}": self.url for service in ("EC2", "IAM", "SSM", "STS")}

    def client(self) -> AbstractAsyncContextManager[EC2Client]:
        """The client of botocore, for what tests do themselves."""
        return aws_client("ec2", self.url, config=slow_server_config().for_botocore())

    def product_client(self) -> ServiceClient:
        return service_client("ec2", self.url, settings=slow_server_config())

    def iam(self) -> AbstractAsyncContextManager[IAMClient]:
        return aws_client("iam", self.url)

    async def make_key(self) -> str:
        """Create a KMS key and return its ARN."""
        async with aws_client("kms", self.url) as client:
            made = await client.create_key()
        return str(made["KeyMetadata"]["Arn"])

    async def make_profile(self, name: str) -> None:
        """Create an instance profile with a role of the same name."""
        if name in self._profiles:
            return
        async with self.iam() as client:
            await client.create_instance_profile(InstanceProfileName=name)
            await client.create_role(RoleName=name, AssumeRolePolicyDocument=TRUST_POLICY)
            await client.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
        self._profiles.add(name)

    async def launch_options(self, client: EC2Client, *, subnets: int = 2) -> dict[str, str]:
        """Launch options that are valid on this server."""
        found = (await client.describe_subnets())["Subnets"]
        names = sorted(subnet["SubnetId"] for subnet in found)[:subnets]
        groups = (await client.describe_security_groups())["SecurityGroups"]
        await self.make_profile(PROFILE)
        return {
            "ami": LINUX_AMI,
            "subnet-ids": ",".join(names),
            "security-group-ids": groups[0]["GroupId"],
            "iam-instance-profile": PROFILE,
        }


@cache
def shared_ec2_server() -> Ec2Server:
    """One server per test process. Each test resets it first."""
    server = Ec2Server()
    atexit.register(server.stop)
    return server


def slow_server_config() -> ClientConfig:
    """The product's configuration with longer timeouts: the test server may be slow on a busy computer."""
    return replace(client_config(), connect_timeout_s=LIMIT_S, read_timeout_s=LIMIT_S)


async def instance_credentials(sts_url: str, instance_id: str, *, role: str = AGENT_ROLE) -> dict[str, str]:
    """Credentials of the role in a session named after the instance, as the metadata service returns them."""
    async with aws_client("sts", sts_url, config=slow_server_config().for_botocore()) as sts:
        given = (await sts.assume_role(RoleArn=role, RoleSessionName=instance_id))["Credentials"]
    return {
        "AccessKeyId": given["AccessKeyId"],
        "SecretAccessKey": given["SecretAccessKey"],
        "Token": given["SessionToken"],
        "Expiration": given["Expiration"].strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


async def describe_instances(client: EC2Client) -> dict[str, dict[str, Any]]:
    """All instances on the server by id."""
    return {
        item["InstanceId"]: dict(item)
        async for page in client.get_paginator("describe_instances").paginate()
        for reservation in page["Reservations"]
        for item in reservation["Instances"]
    }


async def instance_changes(ec2_url: str) -> AsyncGenerator[None]:
    """Yield at once, after each change of instances, and at least every second."""
    async with httpx.AsyncClient(base_url=ec2_url, timeout=LIMIT_S, trust_env=False) as http:
        known = -1
        while True:
            known = (await http.get("/_shim", params={"changes": known})).json()["changes"]
            yield


# Compute --------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Ec2Fixture:
    server: Ec2Server
    client: EC2Client
    product_client: Any
    #: Valid launch options.
    options: dict[str, str]
    calls: CallCounter
    clock: AdjustableClock
    #: Systems Manager parameters.
    parameters: dict[str, str] = field(default_factory=dict)

    @property
    def subnets(self) -> list[str]:
        return self.options["subnet-ids"].split(",")

    def compute(self, pool: str = "pool") -> Ec2Compute:
        async def read_parameter(name: str) -> str:
            return self.parameters[name]

        return Ec2Compute(
            client=self.product_client,
            pool=pool,
            clock=self.clock,
            ids=SystemIds(),
            calls=self.calls,
            read_parameter=read_parameter,
        )

    async def prepared_compute(self, pool: str = "pool") -> Ec2Compute:
        compute = self.compute(pool)
        await compute.prepare(self.options)
        return compute

    def launch_request(
        self,
        token: str = "token",
        *,
        patterns: str = "*",
        spot: bool = False,
        launch: dict[str, str] | None = None,
        **more: Any,
    ) -> LaunchRequest:
        usage_class = UsageClass.SPOT if spot else UsageClass.ON_DEMAND
        values: dict[str, Any] = {"scope": "acme/widgets", "first_life_s": 400.2, "margin_s": 60, **more}
        return launch_request(
            token,
            request=runner_request(usage_class=usage_class, patterns=TypePatterns.parse(patterns)),
            launch={**self.options, **(launch or {})},
            **values,
        )

    async def instances(self) -> list[dict[str, Any]]:
        return list((await describe_instances(self.client)).values())

    async def subnet_in(self, zone_of: str, *, prefix: int) -> str:
        """A new subnet in the zone of another one, with 2 ** (32 - prefix) addresses."""
        (known,) = (await self.client.describe_subnets(SubnetIds=[zone_of]))["Subnets"]
        made = await self.client.create_subnet(
            VpcId=known["VpcId"], CidrBlock=f"172.31.192.0/{prefix}", AvailabilityZone=known["AvailabilityZone"]
        )
        return made["Subnet"]["SubnetId"]

    async def launch_foreign_instance(self) -> str:
        """Launch an instance that belongs to no pool."""
        answer = await self.client.run_instances(
            ImageId=self.options["ami"], InstanceType="t3.micro", MinCount=1, MaxCount=1
        )
        return answer["Instances"][0]["InstanceId"]


@asynccontextmanager
async def ec2_fixture() -> AsyncIterator[Ec2Fixture]:
    server = shared_ec2_server()
    server.reset()
    async with server.client() as client, server.product_client() as product_client:
        options = await server.launch_options(client)
        yield Ec2Fixture(
            server=server,
            client=client,
            product_client=product_client,
            options=options,
            calls=CallCounter(),
            clock=AdjustableClock(longest_sleep_s=0.0),
        )


def instance_ids(result: LaunchResult) -> list[str]:
    return [launched.instance_id for launched in result.instances]
