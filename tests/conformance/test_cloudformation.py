"""The template makes what refresh would make, as far as a server shows: refresh finds nothing left to do."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from build import DEPLOY
from policies import CLASSES, policies
from remuda.adapters.aws.clients import config, open_session
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.aws.sqs import SqsResourcePool
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.ports.calls import CallCounter
from statements import filled
from support.moto_server import REGION, shared_server

ACCOUNT = "123456789012"
PROVIDER = f"arn:aws:iam::{ACCOUNT}:oidc-provider/token.actions.githubusercontent.com"


class Stack:
    """A stack of the template, and clients for what is in it."""

    def __init__(self, opened: AsyncExitStack) -> None:
        self._opened = opened
        self._session = open_session()
        # A pool that no other test has: the server is shared.
        self.pool = secrets.token_hex(4)
        self.name = f"remuda-{self.pool}"

    async def client(self, service: str) -> Any:
        create: Any = self._session.create_client
        made = create(
            service,
            region_name=REGION,
            endpoint_url=shared_server().url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=config(read_timeout_s=60),
        )
        return await self._opened.enter_async_context(made)

    async def create(self, **parameters: str) -> set[str]:
        """The names of its roles."""
        client = await self.client("cloudformation")
        await client.create_stack(
            StackName=self.name,
            TemplateBody=(DEPLOY / "cloudformation.yml").read_text(encoding="utf-8"),
            Capabilities=["CAPABILITY_NAMED_IAM"],
            Parameters=[
                {"ParameterKey": key, "ParameterValue": value}
                for key, value in {"Pool": self.pool, **parameters}.items()
            ],
        )
        (stack,) = (await client.describe_stacks(StackName=self.name))["Stacks"]
        assert stack["StackStatus"] == "CREATE_COMPLETE"
        roles = (await (await self.client("iam")).list_roles())["Roles"]
        return {role["RoleName"] for role in roles if role["RoleName"].startswith(f"{self.name}-")}


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with AsyncExitStack() as opened:
        yield Stack(opened)


async def test_refresh_finds_table_and_queues_as_it_wants_them(stack):
    await stack.create()
    given: dict[str, Any] = {"clock": SystemClock(), "ids": SystemIds(), "calls": CallCounter()}
    store = DynamoInstanceStore(client=await stack.client("dynamodb"), table=stack.name, **given)
    pool = SqsResourcePool(client=await stack.client("sqs"), prefix=stack.name, **given)
    # Where it is not the server's known gap (TTL in templates), there is nothing to do.
    assert set(await store.prepare()) <= {f"expiry of old items in table {stack.name}"}
    assert not await pool.prepare(CLASSES)
    await store.close()


async def test_the_policies_in_the_stack_are_those_of_the_source(stack):
    await stack.create()
    iam = await stack.client("iam")
    for policy in policies():
        arn = f"arn:aws:iam::{ACCOUNT}:policy/{stack.name}-{policy.name}"
        version = (await iam.get_policy_version(PolicyArn=arn, VersionId="v1"))["PolicyVersion"]["Document"]
        found = json.loads(version) if isinstance(version, str) else version
        assert found == filled(policy, pool=stack.pool, account=ACCOUNT, region=REGION)


async def test_roles_for_workflows_are_made_for_a_repository_only(stack):
    assert await stack.create() == {f"{stack.name}-agent"}


async def test_the_roles_trust_the_repository(stack):
    roles = await stack.create(OidcProviderArn=PROVIDER, Repository="acme/app")
    assert roles == {f"{stack.name}-{name}" for name in ("agent", "workflow", "refresh")}
    iam = await stack.client("iam")
    subjects = {}
    for name in ("workflow", "refresh"):
        role = (await iam.get_role(RoleName=f"{stack.name}-{name}"))["Role"]
        (trust,) = role["AssumeRolePolicyDocument"]["Statement"]
        assert trust["Principal"] == {"Federated": PROVIDER}
        subjects[name] = trust["Condition"]["StringLike"]["token.actions.githubusercontent.com:sub"]
    assert subjects == {"workflow": "repo:acme/app:*", "refresh": "repo:acme/app:ref:refs/heads/main"}


async def test_the_profile_carries_the_agents_role(stack):
    await stack.create()
    iam = await stack.client("iam")
    profile = (await iam.get_instance_profile(InstanceProfileName=f"{stack.name}-agent"))["InstanceProfile"]
    assert [role["RoleName"] for role in profile["Roles"]] == [f"{stack.name}-agent"]
