"""Clients for AWS services: one session, one connection pool per service, closed together.

botocore reads `AWS_PROFILE`, `AWS_ENDPOINT_URL`, `AWS_ENDPOINT_URL_DYNAMODB` and the other standard variables. Unlike
the other AWS SDKs it does not read `AWS_REGION`, so the session is configured to do so.
`read_secret` reads a credential from Secrets Manager.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Self

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.exceptions import ClientError
from botocore.loaders import Loader, create_loader
from botocore.utils import is_valid_endpoint_url, is_valid_ipv6_endpoint_url

from remuda.adapters.aws.calls import (
    DYNAMODB,
    SQS,
    ErrorCategory,
    await_response,
    category_of,
    checked_settings,
    code_of,
    translated,
)
from remuda.domain.errors import RemudaError, UserError

if TYPE_CHECKING:
    from types_aiobotocore_dynamodb import DynamoDBClient
    from types_aiobotocore_sqs import SQSClient

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 10.0
#: Longer than the longest long poll of SQS (20 seconds).
SQS_READ_TIMEOUT_S = 30.0
#: Attempts per call, including the first.
MAX_ATTEMPTS = 3
#: Connections per service: at least the number of concurrent operations of one process
#: (`controlplane.context.CONCURRENCY`), plus polling.
CONNECTIONS = 80

#: botocore's definition of a setting: key in the AWS config file, environment variables, default, conversion.
REGION = ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)

#: Variables copied to the agents, so that they use the same endpoints as the process that launches them.
AGENT_VARIABLES = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_DYNAMODB",
    "AWS_ENDPOINT_URL_EC2",
    "AWS_ENDPOINT_URL_STS",
    "AWS_USE_DUALSTACK_ENDPOINT",
    "AWS_USE_FIPS_ENDPOINT",
)
SECRETS_MANAGER = "Secrets Manager"
SYSTEMS_MANAGER = "Systems Manager"
_MISSING = "ResourceNotFoundException"
#: The secret is scheduled for deletion.
_BEING_DELETED = "InvalidRequestException"
_DECRYPTION_FAILED = frozenset({"DecryptionFailure", "KMSAccessDeniedException"})


def agent_environment_from(environment: Mapping[str, str]) -> dict[str, str]:
    """The endpoint settings for agents. They become part of the user data, so a URL with a credential is rejected."""
    passed = {name: environment[name] for name in AGENT_VARIABLES if environment.get(name)}
    for name, value in passed.items():
        if "@" in value:
            raise UserError(f"{name} contains a credential", field=name, fix="remove the user part of the URL")
        is_url = is_valid_endpoint_url(value) or is_valid_ipv6_endpoint_url(value)
        if name.startswith("AWS_ENDPOINT_URL") and not is_url:
            raise UserError(f"{name} is not a URL: {value!r}", field=name, fix="set a URL such as https://host:443")
    return passed


def open_session() -> AioSession:
    session = AioSession(session_vars={"region": REGION})
    session.lazy_register_component("data_loader", lambda: _data_loader(session.get_config_variable("data_path")))
    return session


@cache
def _data_loader(path: str | None) -> Loader:
    """The loader of botocore's service models, cached because a warm Lambda function opens a session per event."""
    return create_loader(path)


def config(*, read_timeout_s: float = READ_TIMEOUT_S) -> AioConfig:
    return AioConfig(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
    )


class AwsClients:
    """Clients, opened on first use: `async with AwsClients() as clients: await clients.dynamodb()`."""

    def __init__(self, *, session: AioSession | None = None) -> None:
        self._session = session or open_session()
        self._stack = AsyncExitStack()
        self._clients: dict[str, Any] = {}
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._clients.clear()
        await self._stack.aclose()

    async def dynamodb(self) -> DynamoDBClient:
        client: DynamoDBClient = await self.client("dynamodb", DYNAMODB, config())
        return client

    async def sqs(self) -> SQSClient:
        client: SQSClient = await self.client("sqs", SQS, config(read_timeout_s=SQS_READ_TIMEOUT_S))
        return client

    def region(self) -> str:
        """The region of all clients whose settings do not name another one."""
        region = self._session.get_config_variable("region")
        if not region:
            raise UserError("no AWS region is configured", field="AWS_REGION", fix="set AWS_REGION")
        return str(region)

    def lazy_client(self, name: str, title: str, settings: AioConfig) -> Any:
        """A client that is opened on its first call. EC2's service model takes long to load and is often not needed."""
        return _LazyClient(partial(self.client, name, title, settings))

    async def client(self, name: str, title: str, settings: AioConfig) -> Any:
        """The client of a service, opened once per region. `title` is the service's name in error messages."""
        region = settings.region_name  # type: ignore[attr-defined]  # set by botocore at run time
        key = f"{name}@{region or ''}"
        if not region:
            self.region()
        async with self._lock:
            if key not in self._clients:
                create: Any = self._session.create_client
                with checked_settings(title):
                    self._clients[key] = await self._stack.enter_async_context(create(name, config=settings))
        return self._clients[key]


class _LazyClient:
    """Offers the operations of a client, which it opens on the first call."""

    def __init__(self, open_client: Callable[[], Awaitable[Any]]) -> None:
        self._open_client = open_client

    def __getattr__(self, operation: str) -> Callable[..., Awaitable[Any]]:
        async def call(**parameters: Any) -> Any:
            return await getattr(await self._open_client(), operation)(**parameters)

        return call


async def read_secret(clients: AwsClients, arn: str, *, key: str, field: str) -> str:
    """The text of a secret, or the value of `key` if the secret is a JSON object.

    `field` is the setting that contains the ARN. Errors name both, never the secret.
    """
    client = await clients.client("secretsmanager", SECRETS_MANAGER, _in_region_of(arn))
    try:
        with translated(SECRETS_MANAGER, arn):
            try:
                answer = await await_response(client.get_secret_value(SecretId=arn))
            except ClientError as error:
                known = _known_error(error, arn, field)
                if known is None:
                    raise
                raise known from None
    except UserError as error:
        raise UserError(error.message, field=field, fix=error.fix) from None
    return _value(_text(answer, arn, field), arn, key, field)


async def read_parameter(clients: AwsClients, name: str) -> str:
    """The value of a Systems Manager parameter: a name, or NAME:VERSION. EC2 reads images with the same call."""
    client = await clients.client("ssm", SYSTEMS_MANAGER, config())
    with translated(SYSTEMS_MANAGER, f"parameter {name}"):
        answer = await await_response(client.get_parameters(Names=[name]))
    for parameter in answer.get("Parameters", ()):
        return str(parameter.get("Value", ""))
    raise UserError(
        f"Systems Manager parameter {name} does not exist in this region and account",
        field=name,
        fix="correct its name, or create it",
    )


def _in_region_of(arn: str) -> AioConfig:
    """The client settings for the secret's region, which may differ from the pool's."""
    return config().merge(AioConfig(region_name=arn.split(":")[3]))


def _known_error(error: ClientError, arn: str, field: str) -> RemudaError | None:
    code = code_of(error)
    if code == _MISSING:
        return UserError(f"secret {arn} does not exist", field=field, fix="set the ARN of a secret of this account")
    if code == _BEING_DELETED:
        return UserError(f"secret {arn} is scheduled for deletion", field=field, fix="restore it, or set another ARN")
    if category_of(code) is ErrorCategory.PERMISSION:
        return UserError(
            f"the AWS credentials do not permit reading secret {arn}",
            field=field,
            fix="grant secretsmanager:GetSecretValue on it",
        )
    if code in _DECRYPTION_FAILED:
        return UserError(
            f"the AWS credentials do not permit decrypting secret {arn}",
            field=field,
            fix="grant kms:Decrypt on the secret's key",
        )
    return None


def _text(answer: dict[str, Any], arn: str, field: str) -> str:
    if "SecretString" in answer:
        return str(answer["SecretString"])
    try:
        return bytes(answer.get("SecretBinary", b"")).decode()
    except UnicodeDecodeError:
        raise UserError(f"secret {arn} is not text", field=field, fix="store the credential as text") from None


def _value(text: str, arn: str, key: str, field: str) -> str:
    text = text.strip()
    fix = f'store the credential as plain text, or as JSON: {{"{key}": "…"}}'
    if text.startswith("{"):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            raise UserError(f"secret {arn} starts with {{ but is not valid JSON", field=field, fix=fix) from None
        value = document.get(key)
        if not isinstance(value, str):
            raise UserError(f"secret {arn} has no key {key!r}", field=field, fix=fix)
        text = value.strip()
    if not text:
        raise UserError(f"secret {arn} is empty", field=field, fix=fix)
    return text
