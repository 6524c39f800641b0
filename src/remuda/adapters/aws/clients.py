"""Clients for AWS services, opened on first use and closed together.

`AwsClients.service` opens Remuda's own client, for the calls of the pool. `AwsClients.client` opens botocore's, for all
other services and operations; it takes half a second to import. Both read the standard variables (`AWS_PROFILE`,
`AWS_ENDPOINT_URL`, `AWS_ENDPOINT_URL_DYNAMODB` and others).
`read_secret` reads a credential from Secrets Manager.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import (
    DYNAMODB,
    SQS,
    ErrorCategory,
    category_of,
    checked_settings,
    code_of,
    translated,
)
from remuda.adapters.aws.environment import HOST_NAMES, REGION, AwsEndpoint, AwsEnvironment, CredentialSource
from remuda.adapters.aws.protocols import JsonProtocol, Protocol, QueryProtocol
from remuda.adapters.aws.service import ServiceClient
from remuda.domain.errors import RemudaError, UserError
from remuda.http import HttpConnections
from remuda.ports.clock import ServerDates

if TYPE_CHECKING:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession
    from botocore.loaders import Loader
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
#: Maximum size of a response in bytes. DynamoDB limits a batch to 16 MB; a page of 1,000 EC2 instances has about 8 MB.
MAX_BODY = 64 * 1024 * 1024

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
#: Protocols of the services that Remuda's own client can call.
PROTOCOLS: Mapping[str, Callable[[], Protocol]] = {
    "dynamodb": partial(JsonProtocol, prefix="DynamoDB_20120810", version="1.0"),
    "sqs": partial(JsonProtocol, prefix="AmazonSQS", version="1.0", is_query_compatible=True),
    "secretsmanager": partial(JsonProtocol, prefix="secretsmanager", version="1.1"),
    "ssm": partial(JsonProtocol, prefix="AmazonSSM", version="1.1"),
    "cloudwatch": partial(
        JsonProtocol, prefix="GraniteServiceVersion20100801", version="1.0", is_query_compatible=True
    ),
    **{name: partial(QueryProtocol, name) for name in ("autoscaling", "cloudformation", "ec2", "iam", "sts")},
}


def agent_environment_from(environment: Mapping[str, str]) -> dict[str, str]:
    """The endpoint settings for agents. They become part of the user data, so a URL with a credential is rejected."""
    passed = {name: environment[name] for name in AGENT_VARIABLES if environment.get(name)}
    for name, value in passed.items():
        if "@" in value:
            raise UserError(f"{name} contains a credential", field=name, fix="remove the user part of the URL")
        if name.startswith("AWS_ENDPOINT_URL") and not _is_url(value):
            raise UserError(f"{name} is not a URL: {value!r}", field=name, fix="set a URL such as https://host:443")
    return passed


def _is_url(value: str) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0 and value.isprintable()
    except ValueError:
        return False


def open_session() -> AioSession:
    """A session of botocore. Unlike the other AWS SDKs it does not read `AWS_REGION`, so it is configured to do so."""
    from aiobotocore.session import AioSession  # noqa: PLC0415 - slow to import

    session = AioSession(session_vars={"region": REGION})
    session.lazy_register_component("data_loader", lambda: _data_loader(session.get_config_variable("data_path")))
    return session


@cache
def _data_loader(path: str | None) -> Loader:
    """The loader of botocore's service models, cached because a warm Lambda function opens a session per event."""
    from botocore.loaders import create_loader  # noqa: PLC0415 - slow to import

    return create_loader(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientConfig:
    connect_timeout_s: float
    read_timeout_s: float
    #: Attempts per call, including the first.
    attempts: int = MAX_ATTEMPTS
    connections: int = CONNECTIONS
    #: Empty: that of the environment.
    region: str = ""

    def for_botocore(self) -> AioConfig:
        from aiobotocore.config import AioConfig  # noqa: PLC0415 - slow to import

        return AioConfig(
            connect_timeout=self.connect_timeout_s,
            read_timeout=self.read_timeout_s,
            retries={"mode": "standard", "total_max_attempts": self.attempts},
            max_pool_connections=self.connections,
            tcp_keepalive=True,
            region_name=self.region or None,
        )


def config(*, read_timeout_s: float = READ_TIMEOUT_S) -> ClientConfig:
    return ClientConfig(connect_timeout_s=CONNECT_TIMEOUT_S, read_timeout_s=read_timeout_s)


def service_client(
    name: str,
    endpoint: AwsEndpoint,
    settings: ClientConfig,
    credentials: CredentialSource,
    *,
    ca_bundle: str = "",
    dates: ServerDates | None = None,
) -> ServiceClient:
    http = HttpConnections(
        endpoint.url,
        connect_timeout_s=settings.connect_timeout_s,
        timeout_s=settings.read_timeout_s,
        connections=settings.connections,
        max_body=MAX_BODY,
        ca_bundle=ca_bundle,
    )
    return ServiceClient(
        name=HOST_NAMES.get(name, name),
        protocol=PROTOCOLS[name](),
        http=http,
        region=endpoint.region,
        credentials=credentials,
        attempts=settings.attempts,
        dates=dates,
    )


class AwsClients:
    """Clients, opened on first use: `async with AwsClients() as clients: await clients.dynamodb()`."""

    def __init__(self, *, session: AioSession | None = None, dates: ServerDates | None = None) -> None:
        """`session`: a session of botocore to share. `dates` observes the time of the answers."""
        self._dates = dates
        self._environment = AwsEnvironment(session=session)
        self._stack = AsyncExitStack()
        self._clients: dict[tuple[str, ...], Any] = {}
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._clients.clear()
        await self._stack.aclose()

    async def dynamodb(self) -> DynamoDBClient:
        client: DynamoDBClient = await self.service("dynamodb", DYNAMODB, config())
        return client

    async def sqs(self) -> SQSClient:
        client: SQSClient = await self.service("sqs", SQS, config(read_timeout_s=SQS_READ_TIMEOUT_S))
        return client

    def region(self) -> str:
        """The region of all clients whose settings do not name another one."""
        region = self._environment.region()
        if not region:
            raise UserError("no AWS region is configured", field="AWS_REGION", fix="set AWS_REGION")
        return region

    async def service(self, name: str, title: str, settings: ClientConfig) -> Any:
        """Remuda's client of a service of `PROTOCOLS`, opened once per region.

        It has the operations of botocore's client, those of EC2, IAM and STS as far as Remuda uses them. `title` is the
        service's name in error messages.
        """
        return await self._open(("service", name, settings.region), title, partial(self._service, name, settings))

    async def client(self, name: str, title: str, settings: ClientConfig) -> Any:
        """The client of botocore for any service, opened once per region."""
        return await self._open(("client", name, settings.region), title, partial(self._client, name, settings))

    async def _open(self, key: tuple[str, ...], title: str, make: Callable[[], Awaitable[Any]]) -> Any:
        if not key[-1]:
            self.region()
        async with self._lock:
            if key not in self._clients:
                with checked_settings(title):
                    self._clients[key] = await make()
        return self._clients[key]

    async def _service(self, name: str, settings: ClientConfig) -> ServiceClient:
        endpoint = await self._environment.endpoint(name, settings.region)
        made = service_client(
            name,
            endpoint,
            settings,
            self._environment.credentials,
            ca_bundle=self._environment.ca_bundle(),
            dates=self._dates,
        )
        self._stack.push_async_callback(made.close)
        return made

    async def _client(self, name: str, settings: ClientConfig) -> Any:
        create: Any = self._environment.session.create_client
        return await self._stack.enter_async_context(create(name, config=settings.for_botocore()))


async def read_secret(clients: AwsClients, arn: str, *, key: str, field: str) -> str:
    """The text of a secret, or the value of `key` if the secret is a JSON object.

    `field` is the setting that contains the ARN. Errors name both, never the secret.
    """
    settings = replace(config(), region=arn.split(":")[3])  # It may differ from the pool's.
    client = await clients.service("secretsmanager", SECRETS_MANAGER, settings)
    try:
        with translated(SECRETS_MANAGER, arn):
            try:
                answer = await client.get_secret_value(SecretId=arn)
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
    client = await clients.service("ssm", SYSTEMS_MANAGER, config())
    with translated(SYSTEMS_MANAGER, f"parameter {name}"):
        answer = await client.get_parameters(Names=[name])
    for parameter in answer.get("Parameters", ()):
        return str(parameter.get("Value", ""))
    raise UserError(
        f"Systems Manager parameter {name} does not exist in this region and account",
        field=name,
        fix="correct its name, or create it",
    )


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
        return base64.b64decode(answer.get("SecretBinary", "")).decode()
    except (TypeError, ValueError):
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
