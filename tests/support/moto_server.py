"""moto's EC2 for tests: started once, reset for each test, stopped at the end."""

from __future__ import annotations

import atexit
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession, get_session

from remuda.adapters.aws.ec2.calls import client_config

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client
    from types_aiobotocore_iam import IAMClient

REGION = "eu-central-1"
#: Generous: nothing waits for it unless something is broken.
LIMIT_S = 120.0
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-moto" / "bin" / "python"
#: Of the images that moto knows, those that tests name: to make all would be most of each reset.
IMAGES = ROOT / "tests" / "data" / "ec2" / "images.json"
AMI = "ami-12c6146b"
PROFILE = "remuda-agent"
TRUST = '{"Version": "2012-10-17", "Statement": []}'


class MotoServer:
    def __init__(self) -> None:
        if not PYTHON.exists():
            raise RuntimeError("the EC2 test server is not installed: run make .venv-moto/.installed")
        self._process = subprocess.Popen(
            [PYTHON, Path(__file__).with_name("moto_app.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for whoever started it: others still need it to clean up.
            start_new_session=True,
            # What the tests' own environment says about AWS is not for it.
            env={
                "PATH": "/usr/bin:/bin",
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "MOTO_AMIS_PATH": str(IMAGES),
            },
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self._profiles: set[str] = set()
        self._http = httpx.Client(base_url=self.url, timeout=LIMIT_S, trust_env=False)

    def stop(self) -> None:
        self._http.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)
        self._process.stdout.close()

    def reset(self) -> None:
        self._http.post("/_shim/reset").raise_for_status()

    def plan(self, **changes: Any) -> None:
        """Faults, capacity, …: as ec2_shim.py lists them."""
        self._http.post("/_shim", json=changes).raise_for_status()

    def asked(self) -> dict[str, int]:
        """How many calls of each kind arrived."""
        counts: dict[str, int] = self._http.get("/_shim").json()["asked"]
        return counts

    def last(self, action: str) -> dict[str, str]:
        """The fields of the last request of this kind."""
        fields: dict[str, str] = self._http.get("/_shim").json()["last"][action]
        return fields

    @asynccontextmanager
    async def client(self) -> AsyncIterator[EC2Client]:
        async with _session().create_client(
            "ec2",
            region_name=REGION,
            endpoint_url=self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=patient_config(),
        ) as client:
            yield client

    def environment(self) -> dict[str, str]:
        """For those who call EC2, and what machines are to AWS."""
        return {f"AWS_ENDPOINT_URL_{service}": self.url for service in ("EC2", "IAM", "STS")}

    @asynccontextmanager
    async def iam(self) -> AsyncIterator[IAMClient]:
        async with _session().create_client(
            "iam",
            region_name=REGION,
            endpoint_url=self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        ) as client:
            yield client

    async def make_profile(self, name: str) -> None:
        """An instance profile with a role of the same name. They outlive a reset."""
        if name in self._profiles:
            return
        async with self.iam() as client:
            await client.create_instance_profile(InstanceProfileName=name)
            await client.create_role(RoleName=name, AssumeRolePolicyDocument=TRUST)
            await client.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
        self._profiles.add(name)

    async def credentials_of(self, profile: str, instance_id: str) -> dict[str, str]:
        """What the metadata of a machine with this profile says, by path: AWS knows the machine by these."""
        async with self.iam() as client:
            found = await client.get_instance_profile(InstanceProfileName=profile)
            role = found["InstanceProfile"]["Roles"][0]
        async with _session().create_client(
            "sts",
            region_name=REGION,
            endpoint_url=self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        ) as sts:
            answer = await sts.assume_role(RoleArn=role["Arn"], RoleSessionName=instance_id)
        given = answer["Credentials"]
        document = {
            "Code": "Success",
            "Type": "AWS-HMAC",
            "AccessKeyId": given["AccessKeyId"],
            "SecretAccessKey": given["SecretAccessKey"],
            "Token": given["SessionToken"],
            "Expiration": given["Expiration"].strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        folder = "iam/security-credentials/"
        return {folder: role["RoleName"], f"{folder}{role['RoleName']}": json.dumps(document)}

    async def launch_options(self, client: EC2Client, *, subnets: int = 2) -> dict[str, str]:
        """As an operator would give them, for what is there after a reset."""
        found = (await client.describe_subnets())["Subnets"]
        names = sorted(subnet["SubnetId"] for subnet in found)[:subnets]
        groups = (await client.describe_security_groups())["SecurityGroups"]
        await self.make_profile(PROFILE)
        return {
            "ami": AMI,
            "subnet-ids": ",".join(names),
            "security-group-ids": groups[0]["GroupId"],
            "iam-instance-profile": PROFILE,
        }


def patient_config() -> AioConfig:
    """As the product has it, with more time: each call has a connection of its own here, and this computer may take its
    time over it.
    """
    return client_config().merge(AioConfig(connect_timeout=LIMIT_S, read_timeout=LIMIT_S))


@cache
def _session() -> AioSession:
    """Reading EC2's model takes a second: once is enough."""
    return get_session()


@cache
def shared_server() -> MotoServer:
    """One for all tests of a process; each resets it first."""
    server = MotoServer()
    atexit.register(server.stop)
    return server
