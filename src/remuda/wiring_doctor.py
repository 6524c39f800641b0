"""Settings to a doctor's checks: on each backend, who looks at what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from remuda.adapters.github.client import GitHubClient
from remuda.adapters.github.doctor import GitHubDoctor
from remuda.adapters.local.doctor import LocalDoctor
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.config.settings import Loaded, key
from remuda.controlplane.context import Context
from remuda.controlplane.doctor import pool_checks
from remuda.domain.errors import RemudaError
from remuda.domain.pool_config import PoolConfig
from remuda.ports.calls import CallCounter
from remuda.ports.doctor import Check
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import (
    aws_libraries,
    github_client,
    github_credential,
    layout,
    local_endpoint,
    open_context,
)

if TYPE_CHECKING:
    from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
    from remuda.adapters.aws.ec2.compute import Ec2Compute
    from remuda.adapters.aws.sqs import SqsResourcePool

T = TypeVar("T")


class Once(Generic[T]):
    """What several checks need, made by the first of them: the others get the same, or the same error."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._lock = asyncio.Lock()
        self._made: list[T] = []
        self._failed: RemudaError | None = None

    async def __call__(self) -> T:
        async with self._lock:
            if self._failed is not None:
                raise self._failed
            if not self._made:
                try:
                    self._made.append(await self._make())
                except RemudaError as error:
                    self._failed = error
                    raise
            return self._made[0]


@asynccontextmanager
async def open_doctor(loaded: Loaded, background: Mapping[str, Callable[[], bool]]) -> AsyncIterator[Sequence[Check]]:
    """`background`: the local backend's processes by name, and whether each runs."""
    settings = loaded.settings
    async with AsyncExitStack() as stack:

        async def opened() -> Context:
            return await stack.enter_async_context(
                open_context(settings, SilentEventLog(), credentialed=False, alive=False)
            )

        context = Once(opened)

        async def read() -> PoolConfig | None:
            return await (await context()).store.get_config()

        get_config = Once(read)
        if settings.backend == "aws":
            yield await _aws_checks(loaded, stack, context, get_config)
        else:
            yield _local_checks(loaded, stack, get_config, background)


# Local --------------------------------------------------------------------------------------------------------------


def _local_checks(
    loaded: Loaded,
    stack: AsyncExitStack,
    get_config: Once[PoolConfig | None],
    background: Mapping[str, Callable[[], bool]],
) -> Sequence[Check]:
    settings, clock, places = loaded.settings, SystemClock(), layout(loaded.settings)

    async def github() -> GitHubClient:
        endpoint = local_endpoint(settings)
        token = settings.github_token.get_secret_value() if settings.github_token else endpoint.token
        made = GitHubClient(api_url=endpoint.url, token=token, clock=clock, ids=SystemIds(), calls=CallCounter())
        stack.push_async_callback(made.close)
        return made

    local = LocalDoctor(root=places.root, runner=places.runner, background=background)
    return (
        *local.checks(),
        *pool_checks(get_config, clock, scope=settings.github_scope, needs=(local.ready,)),
        *GitHubDoctor(github=Once(github), scope=settings.github_scope, clock=clock, needs=(local.ready,)).checks(),
    )


# AWS ----------------------------------------------------------------------------------------------------------------


async def _aws_checks(
    loaded: Loaded, stack: AsyncExitStack, context: Once[Context], get_config: Once[PoolConfig | None]
) -> Sequence[Check]:
    settings, clock = loaded.settings, SystemClock()
    with aws_libraries():
        from remuda.adapters.aws.clients import AwsClients  # noqa: PLC0415 - only this backend pays for them
        from remuda.adapters.aws.doctor import CREDENTIALS, AwsAdapters, AwsDoctor  # noqa: PLC0415 - as above
    clients = await stack.enter_async_context(AwsClients())

    async def adapters() -> AwsAdapters:
        opened = await context()
        return AwsAdapters(
            store=cast("DynamoInstanceStore", opened.store),
            pool=cast("SqsResourcePool", opened.pool),
            compute=cast("Ec2Compute", opened.compute),
        )

    async def github() -> GitHubClient:
        credential = await github_credential(settings, clients, needed=True)
        made = github_client(settings, credential, clock, SystemIds(), CallCounter())
        assert made is not None  # noqa: S101 - it was needed: else there was an error
        stack.push_async_callback(made.close)
        return made

    stored = await _stored(get_config)
    scope = settings.github_scope if loaded.given("github_scope") else _scope_of(stored)
    return (
        *AwsDoctor(
            clients=clients,
            adapters=adapters,
            pool=settings.pool,
            launch=_launch(loaded, stored),
            classes=stored.classes
            if stored and not loaded.given("resource_class_config")
            else settings.resource_class_config,
            clock=clock,
        ).checks(),
        *pool_checks(get_config, clock, pool=settings.pool, scope=scope, needs=(CREDENTIALS,)),
        *GitHubDoctor(github=Once(github), scope=scope, clock=clock).checks(),
    )


async def _stored(get_config: Once[PoolConfig | None]) -> PoolConfig | None:
    """The checks tell what is wrong where it cannot be read: they ask again."""
    try:
        return await get_config()
    except RemudaError:
        return None


def _scope_of(stored: PoolConfig | None) -> str:
    return stored.tokens[0].scope if stored and stored.tokens else ""


def _launch(loaded: Loaded, stored: PoolConfig | None) -> Mapping[str, str]:
    """What is given here over what the pool has: what the next refresh would apply."""
    given = {name: value for name, value in loaded.settings.launch_options().items() if _is_given(loaded, name)}
    return {**(stored.launch if stored else {}), **given}


def _is_given(loaded: Loaded, name: str) -> bool:
    return next(loaded.given(field) for field in loaded.origins if key(field) == name)
