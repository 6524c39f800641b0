"""GitHub credentials in Secrets Manager."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest
from aiobotocore.session import AioSession

from remuda.adapters.aws.clients import SECRETS_MANAGER, AwsClients, config, read_secret
from remuda.config.declaration import Secret
from remuda.config.settings import Settings
from remuda.domain.errors import UserError
from remuda.wiring.github import GithubCredential, github_credential
from tests.support.aws.fault_proxy import fail, fault_proxy
from tests.support.aws.servers import Ministack

REGION = "eu-central-1"
TOKEN = "ghp_kept_elsewhere"


async def put(clients: AwsClients, **content: Any) -> str:
    """Create a secret. Return its ARN."""
    client = await clients.service("secretsmanager", SECRETS_MANAGER, config())
    answer = await client.create_secret(Name=f"remuda/ci/{secrets.token_hex(4)}", **content)
    return str(answer["ARN"])


async def read(clients: AwsClients, arn: str) -> str:
    return await read_secret(clients, arn, key="token", field="github-token")


@pytest.mark.parametrize(
    "content",
    [
        {"SecretString": TOKEN},
        {"SecretString": f"  {TOKEN}\n"},
        {"SecretString": json.dumps({"token": TOKEN, "note": "theirs"})},
        {"SecretBinary": TOKEN.encode()},
    ],
    ids=["text", "text with blanks", "json", "binary"],
)
async def test_secret_is_text_or_a_json_object(clients: AwsClients, content: dict[str, Any]):
    assert await read(clients, await put(clients, **content)) == TOKEN


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"SecretString": " "}, "is empty"),
        ({"SecretString": '{"tokens": "ghp_x"}'}, "has no key 'token'"),
        ({"SecretString": '{"token": 7}'}, "has no key 'token'"),
        ({"SecretString": "{ghp_x"}, "is not valid JSON"),
        ({"SecretBinary": b"\xff\xfe"}, "is not text"),
    ],
    ids=["empty", "other key", "number", "not json", "bytes"],
)
async def test_unusable_secret_is_reported_without_its_value(clients: AwsClients, content: dict[str, Any], says: str):
    arn = await put(clients, **content)
    with pytest.raises(UserError) as refused:
        await read(clients, arn)
    assert says in refused.value.message
    assert arn in refused.value.message
    assert "ghp_x" not in refused.value.message
    assert refused.value.field == "github-token"


async def test_missing_secret(clients: AwsClients):
    arn = f"arn:aws:secretsmanager:{REGION}:000000000000:secret:remuda/ci/none-AbCdEf"
    with pytest.raises(UserError, match="does not exist"):
        await read(clients, arn)


async def test_secret_scheduled_for_deletion(clients: AwsClients):
    arn = await put(clients, SecretString=TOKEN)
    client = await clients.service("secretsmanager", SECRETS_MANAGER, config())
    await client.delete_secret(SecretId=arn, RecoveryWindowInDays=7)
    with pytest.raises(UserError, match="scheduled for deletion"):
        await read(clients, arn)


async def test_secret_is_read_only_if_needed(clients: AwsClients):
    nowhere = f"arn:aws:secretsmanager:{REGION}:000000000000:secret:remuda/ci/none-AbCdEf"
    settings = Settings(github_token=Secret(nowhere))
    assert await github_credential(settings, clients, required=False) is None
    with pytest.raises(UserError, match="does not exist"):
        await github_credential(settings, clients, required=True)


async def test_app_key_can_be_a_secret(clients: AwsClients):
    arn = await put(clients, SecretString=json.dumps({"private_key": "-----BEGIN …"}))
    settings = Settings(github_app_id="7", github_app_key=Secret(arn))
    found = await github_credential(settings, clients, required=True)
    assert found == GithubCredential(text="-----BEGIN …", app_id="7")
    assert "BEGIN" not in repr(found)


async def test_missing_permission(
    clients: AwsClients, server: Ministack, monkeypatch: pytest.MonkeyPatch, aws_session: AioSession
):
    arn = await put(clients, SecretString=TOKEN)
    async with fault_proxy(server.url) as between:
        between.always["GetSecretValue"] = fail(400, "AccessDeniedException")
        monkeypatch.setenv("AWS_ENDPOINT_URL_SECRETS_MANAGER", between.url)
        async with AwsClients(session=aws_session) as refused_ones:
            with pytest.raises(UserError, match="do not permit reading secret") as refused:
                await read(refused_ones, arn)
    assert "secretsmanager:GetSecretValue" in refused.value.fix
