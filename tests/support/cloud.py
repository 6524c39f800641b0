"""Everything that the aws backend talks to, on this machine: DynamoDB, SQS, IAM, STS and secrets; EC2; GitHub."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from aiobotocore.session import AioSession, get_session

from tests.support.cli import run_cli
from tests.support.moto_server import MotoServer
from tests.support.servers import ENVIRONMENT, Ministack, ministack

T = TypeVar("T")

LIMIT_S = 120
SCOPE = "octo/repo"
PROFILE = "remuda-agent"
#: Images that the EC2 server knows from the start (tests/data/ec2).
LINUX_AMI = "ami-076f415166b04f5fe"
ARM_AMI = "ami-0e9271c829888680e"
WINDOWS_AMI = "ami-12c6146b"
ROLE_TRUST = json.dumps({"Version": "2012-10-17", "Statement": []})


@dataclass(frozen=True)
class Cloud:
    server: Ministack
    ec2: MotoServer
    github_url: str
    github_token: str
    #: As an operator would set it, but for the pool.
    environment: dict[str, str]
    #: The settings that a launch needs, by flag.
    launch: dict[str, str]

    def remuda(self, *arguments: str, **changed: str) -> tuple[int, Any]:
        done = run_cli(
            [*arguments, "--backend", "aws", "--json"],
            environment={**self.environment, **changed},
            timeout_s=LIMIT_S,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.code, json.loads(done.stdout)

    def flags(self, **changed: str) -> list[str]:
        launch = {**self.launch, **{name.replace("_", "-"): value for name, value in changed.items()}}
        return [word for name, value in launch.items() for word in (f"--{name}", value)]

    def refresh(self, pool: str, *more: str, **changed: str) -> tuple[int, Any]:
        return self.remuda("refresh", "--pool", pool, "--github-scope", SCOPE, *self.flags(), *more, **changed)

    def call(self, service: str, work: Callable[[Any], Awaitable[T]]) -> T:
        """One conversation with a service of the first server, or with EC2."""
        return asyncio.run(self._call(service, work))

    async def _call(self, service: str, work: Callable[[Any], Awaitable[T]]) -> T:
        create: Any = _SESSION.create_client
        opened = create(
            service,
            region_name=ENVIRONMENT["AWS_REGION"],
            endpoint_url=self.ec2.url if service == "ec2" else self.server.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        async with opened as client:
            return await work(client)

    def put_secret(self, name: str, text: str) -> str:
        """Its ARN."""
        return self.call("secretsmanager", lambda client: _put_secret(client, name, text))


_SESSION: AioSession = get_session()


async def _put_secret(client: Any, name: str, text: str) -> str:
    return str((await client.create_secret(Name=name, SecretString=text))["ARN"])


async def _make_profile(client: Any) -> None:
    await client.create_role(RoleName=PROFILE, AssumeRolePolicyDocument=ROLE_TRUST)
    await client.create_instance_profile(InstanceProfileName=PROFILE)
    await client.add_role_to_instance_profile(InstanceProfileName=PROFILE, RoleName=PROFILE)


async def _options(ec2: MotoServer) -> dict[str, str]:
    async with ec2.client() as client:
        return {**await ec2.launch_options(client), "ami": LINUX_AMI, "iam-instance-profile": PROFILE}


@contextmanager
def cloud(folder: Path) -> Iterator[Cloud]:
    """The servers' clocks are right."""
    github = [sys.executable, "-m", "remuda.fake_github", "--dir", str(folder / "github")]
    now = datetime.now(UTC)  # noqa: TID251 - the server's clock, by ours
    with (
        ministack(folder, starts_at=now) as server,
        subprocess.Popen(github, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http")
        endpoint = json.loads((folder / "github" / "endpoint.json").read_text())
        ec2 = MotoServer()
        try:
            made = Cloud(
                server=server,
                ec2=ec2,
                github_url=endpoint["url"],
                github_token=endpoint["token"],
                environment={
                    "PATH": os.environ["PATH"],
                    "HOME": str(folder),
                    **server.environment(),
                    "AWS_ENDPOINT_URL_EC2": ec2.url,
                    "GITHUB_API_URL": endpoint["url"],
                    "REMUDA_GITHUB_TOKEN": endpoint["token"],
                    "REMUDA_CONFIG": os.devnull,
                },
                launch=asyncio.run(_options(ec2)),
            )
            made.call("iam", _make_profile)
            yield made
        finally:
            ec2.stop()
            process.terminate()
