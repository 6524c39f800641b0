"""The clients for AWS: one session, one connection pool a service, closed together.

Region, credentials and endpoints are botocore's business: it reads `AWS_PROFILE`, `AWS_ENDPOINT_URL`,
`AWS_ENDPOINT_URL_DYNAMODB` and the rest by itself. Alone among AWS's libraries it does not read `AWS_REGION`: it is
told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import cache, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.loaders import Loader, create_loader
from botocore.utils import is_valid_endpoint_url, is_valid_ipv6_endpoint_url

from remuda.adapters.aws.errors import DYNAMODB, SQS, settings_checked
from remuda.domain.errors import UserError

if TYPE_CHECKING:
    from types_aiobotocore_dynamodb import DynamoDBClient
    from types_aiobotocore_sqs import SQSClient

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 10.0
#: A receive may be answered after twenty seconds: its wait is on top.
SQS_READ_TIMEOUT_S = 30.0
#: The first try included. What is still refused then is the caller's to judge.
ATTEMPTS = 3
#: Not below what one process works on at a time (`controlplane.context.CONCURRENCY`), polls beside it.
CONNECTIONS = 80


#: As botocore wants it: the key in its own file, the variables, no default, no conversion.
REGION = ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)


#: Agents call the same servers as whoever launches them, where these are not AWS's usual ones.
PASSED_TO_AGENTS = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_DYNAMODB",
    "AWS_ENDPOINT_URL_EC2",
    "AWS_ENDPOINT_URL_STS",
    "AWS_USE_DUALSTACK_ENDPOINT",
    "AWS_USE_FIPS_ENDPOINT",
)


def passed_to_agents(environment: Mapping[str, str]) -> dict[str, str]:
    """It goes into user data, which many may read: no address that carries a credential."""
    passed = {name: environment[name] for name in PASSED_TO_AGENTS if environment.get(name)}
    for name, value in passed.items():
        if "@" in value:
            raise UserError(f"{name} carries a credential", field=name, fix="give an address without a user in it")
        is_address = is_valid_endpoint_url(value) or is_valid_ipv6_endpoint_url(value)
        if name.startswith("AWS_ENDPOINT_URL") and not is_address:
            raise UserError(f"{name} is {value!r}: no address", field=name, fix="give one such as https://host:443")
    return passed


def open_session() -> AioSession:
    session = AioSession(session_vars={"region": REGION})
    session.lazy_register_component("data_loader", lambda: _models(session.get_config_variable("data_path")))
    return session


@cache
def _models(path: str | None) -> Loader:
    """What botocore knows of AWS, read once: a function that stays warm opens a session for each event."""
    return create_loader(path)


def config(*, read_timeout_s: float = READ_TIMEOUT_S) -> AioConfig:
    return AioConfig(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
    )


class AwsClients:
    """`async with AwsClients() as clients: await clients.dynamodb()`. A client is opened on first use."""

    def __init__(self, *, session: AioSession | None = None) -> None:
        self._session = session or open_session()
        self._stack = AsyncExitStack()
        self._opened: dict[str, Any] = {}
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        self._opened.clear()
        await self._stack.aclose()

    async def dynamodb(self) -> DynamoDBClient:
        client: DynamoDBClient = await self.client("dynamodb", DYNAMODB, config())
        return client

    async def sqs(self) -> SQSClient:
        client: SQSClient = await self.client("sqs", SQS, config(read_timeout_s=SQS_READ_TIMEOUT_S))
        return client

    def region(self) -> str:
        """The one that calls go to, unless a client names its own."""
        found = self._session.get_config_variable("region")
        if not found:
            raise UserError("there is no AWS region", field="AWS_REGION", fix="set AWS_REGION")
        return str(found)

    def later(self, name: str, title: str, settings: AioConfig) -> Any:
        """A client that is opened at its first call. EC2's model is large: what never asks EC2 need not read it."""
        return _Later(partial(self.client, name, title, settings))

    async def client(self, name: str, title: str, settings: AioConfig) -> Any:
        """Any other service's client, opened once for each region that `settings` may name."""
        region = settings.region_name  # type: ignore[attr-defined]  # botocore makes it from its options
        opened = f"{name}@{region or ''}"
        if not region:
            self.region()
        async with self._opening:
            if opened not in self._opened:
                create: Any = self._session.create_client
                with settings_checked(title):
                    self._opened[opened] = await self._stack.enter_async_context(create(name, config=settings))
        return self._opened[opened]


class _Later:
    """Calls as the client has them; nothing else of it."""

    def __init__(self, opened: Callable[[], Awaitable[Any]]) -> None:
        self._opened = opened

    def __getattr__(self, operation: str) -> Callable[..., Awaitable[Any]]:
        async def call(**parameters: Any) -> Any:
            return await getattr(await self._opened(), operation)(**parameters)

        return call
