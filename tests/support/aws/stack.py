"""All servers that a pool on AWS needs, and commands that use them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from remuda.adapters.aws.account import SPOT_ROLE_NAME
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.fake_github import Endpoint
from remuda.fake_github.client import FakeGitHubClient
from remuda.ports.calls import CallCounter
from tests.support.aws.ec2 import Ec2Server
from tests.support.aws.quotas import quota_server
from tests.support.aws.servers import LOOPBACK, Ministack, aws_client, fake_github, ministack
from tests.support.cli import run_cli

T = TypeVar("T")

POOL = "test"
SCOPE = "octo/repo"
#: Variables of refresh with which a provision gives up and instances count as gone within a test.
SHORT_TIMES = {"REMUDA_PROVISION_TIMEOUT_SEC": "6", "REMUDA_MARGIN_SEC": "0.5", "REMUDA_GONE_AFTER_SEC": "1"}


@dataclass(frozen=True, kw_only=True)
class AwsStack:
    folder: Path
    #: DynamoDB, SQS and Secrets Manager.
    store: Ministack
    #: EC2, IAM, Systems Manager and STS.
    ec2: Ec2Server
    github: Endpoint
    #: Launch options for `refresh`: image, subnets, security group, instance profile.
    launch: dict[str, str]
    #: Service Quotas; empty if no command of the test asks for quotas.
    quotas_url: str = ""

    def environment(self, **changed: str) -> dict[str, str]:
        """Variables with which a process uses these servers and no others."""
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.folder),
            **self.store.environment(),
            **self.ec2.environment(),
            **({"AWS_ENDPOINT_URL_SERVICE_QUOTAS": self.quotas_url} if self.quotas_url else {}),
            "GITHUB_API_URL": self.github.url,
            "REMUDA_GITHUB_TOKEN": self.github.token,
            "REMUDA_CONFIG": os.devnull,
            "REMUDA_BACKEND": "aws",
            **changed,
        }

    def flags(self) -> list[str]:
        """The launch options as flags of `refresh`."""
        return [word for name, value in self.launch.items() for word in (f"--{name}", value)]

    def remuda(self, *arguments: str, pool: str = POOL, **variables: str) -> tuple[int, Any]:
        """Run a command. Return its exit code and its JSON document."""
        result = run_cli([*arguments, "--pool", pool, "--json"], environment=self.environment(**variables))
        assert "Traceback" not in result.stderr, result.stderr
        return result.code, result.document

    def refresh(self, *more: str, pool: str = POOL, **variables: str) -> tuple[int, Any]:
        return self.remuda("refresh", "--github-scope", SCOPE, *self.flags(), *more, pool=pool, **variables)

    def github_client(self) -> FakeGitHubClient:
        return FakeGitHubClient(self.github.url, self.github.token)

    def instance_store(self, dynamodb: Any, pool: str = POOL) -> DynamoInstanceStore:
        """The store of a pool whose table exists."""
        return DynamoInstanceStore(
            client=dynamodb,
            table=f"remuda-{pool}",
            clock=SystemClock(),
            ids=SystemIds(),
            calls=CallCounter(),
            newest_prefix=_unused_prefix,
        )

    def call(self, service: str, work: Callable[[Any], Awaitable[T]]) -> T:
        """Call a service directly, from a test without an event loop."""
        return asyncio.run(self._call(service, work))

    async def _call(self, service: str, work: Callable[[Any], Awaitable[T]]) -> T:
        url = self.ec2.url if service in {"ec2", "iam", "ssm", "sts"} else self.store.url
        async with aws_client(service, url) as client:
            return await work(client)

    def put_secret(self, name: str, text: str) -> str:
        """Create a secret and return its ARN."""

        async def create(client: Any) -> str:
            return str((await client.create_secret(Name=name, SecretString=text))["ARN"])

        return self.call("secretsmanager", create)


@contextmanager
def aws_stack(folder: Path, host: str = LOOPBACK) -> Iterator[AwsStack]:
    """Start all servers at this address. Must be called outside an event loop."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        # Real time: records expire by the clock of the server, and the commands use the real clock.
        ministack(folder, starts_at=SystemClock().now(), host=host) as store,
        fake_github(folder / "github", host) as github,
        quota_server(host) as quotas_url,
    ):
        ec2 = Ec2Server(host)
        try:
            launch = asyncio.run(launch_options(ec2))
            asyncio.run(_prepare_account(ec2))
            yield AwsStack(folder=folder, store=store, ec2=ec2, github=github, launch=launch, quotas_url=quotas_url)
        finally:
            ec2.stop()


async def _unused_prefix() -> str:
    raise AssertionError("the key prefix is in the table; only refresh determines it")


async def _prepare_account(ec2: Ec2Server) -> None:
    """A default VPC whose subnets reach the internet, and the role of an account that has had spot instances."""
    async with ec2.iam() as iam:
        await iam.create_role(RoleName=SPOT_ROLE_NAME, AssumeRolePolicyDocument="{}")
    async with ec2.client() as client:
        (vpc,) = (await client.describe_vpcs())["Vpcs"]
        gateway = (await client.create_internet_gateway())["InternetGateway"]["InternetGatewayId"]
        await client.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc["VpcId"])
        (table,) = (await client.describe_route_tables())["RouteTables"]
        name = table["RouteTableId"]
        await client.create_route(RouteTableId=name, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)


async def launch_options(ec2: Ec2Server) -> dict[str, str]:
    async with ec2.client() as client:
        return await ec2.launch_options(client)
