"""Key prefixes from IAM and STS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from remuda.adapters.aws.dynamodb.keys import own_key_prefix, role_key_prefix
from remuda.domain.errors import UserError
from remuda.ports.calls import CallCounter
from tests.support.aws.ec2 import PROFILE, Ec2Server, instance_credentials, shared_ec2_server
from tests.support.aws.servers import aws_client

INSTANCE = "i-0123456789abcdef0"
LAUNCH = {"ami": "ami-12345678", "subnet-ids": "subnet-12345678"}


@dataclass(frozen=True)
class Account:
    server: Ec2Server
    iam: Any

    async def prefix_of(self, profile: str) -> str:
        return await role_key_prefix(self.iam, {**LAUNCH, "iam-instance-profile": profile}, CallCounter())


@pytest.fixture
async def account() -> AsyncIterator[Account]:
    server = shared_ec2_server()
    await server.make_profile(PROFILE)
    async with server.iam() as iam:
        yield Account(server=server, iam=iam)


async def test_machine_and_control_plane_compute_the_same_prefix(account: Account) -> None:
    prefix = await account.prefix_of(PROFILE)
    profile = (await account.iam.get_instance_profile(InstanceProfileName=PROFILE))["InstanceProfile"]
    assert await account.prefix_of(profile["Arn"]) == prefix
    given = await instance_credentials(account.server.url, INSTANCE)
    async with aws_client(
        "sts",
        account.server.url,
        aws_access_key_id=given["AccessKeyId"],
        aws_secret_access_key=given["SecretAccessKey"],
        aws_session_token=given["Token"],
    ) as sts:
        assert await own_key_prefix(sts, INSTANCE) == prefix
        with pytest.raises(UserError, match="not to instance i-0"):
            await own_key_prefix(sts, "i-0" + "1" * 16)


async def test_credentials_of_another_identity_are_rejected(account: Account) -> None:
    async with aws_client("sts", account.server.url) as sts:
        with pytest.raises(UserError, match="not to instance"):
            await own_key_prefix(sts, INSTANCE)


async def test_missing_profile_and_profile_without_role_are_rejected(account: Account) -> None:
    with pytest.raises(UserError, match="instance profile 'unknown' does not exist") as caught:
        await account.prefix_of("unknown")
    assert caught.value.field == "iam-instance-profile"
    await account.iam.create_instance_profile(InstanceProfileName="empty")
    try:
        with pytest.raises(UserError, match="'empty' has no role") as caught:
            await account.prefix_of("empty")
        assert caught.value.field == "iam-instance-profile"
    finally:
        await account.iam.delete_instance_profile(InstanceProfileName="empty")
