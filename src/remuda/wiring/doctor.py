"""Wiring of `remuda doctor`: the checks of each backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from remuda.adapters.github.client import GitHubClient
from remuda.adapters.github.doctor import GitHubDoctor
from remuda.adapters.local.layout import LocalDoctor
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.config.settings import SETTINGS, Settings
from remuda.controlplane.context import Context
from remuda.controlplane.doctor import pool_checks, release_check, runner_set_check
from remuda.controlplane.read.status import status
from remuda.domain.errors import RemudaError
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.reporting.demand import DemandStatus
from remuda.domain.runner_release import LATEST, VERSION
from remuda.ports.calls import CallCounter
from remuda.ports.doctor import Check
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import open_context
from remuda.wiring.aws import aws_libraries
from remuda.wiring.github import github_client, github_credential, missing_credential, token_client
from remuda.wiring.local import layout, local_endpoint

if TYPE_CHECKING:
    from remuda.adapters.aws.clients import AwsClients
    from remuda.adapters.aws.doctor import AwsAdapters
    from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
    from remuda.adapters.aws.ec2.compute import Ec2Compute
    from remuda.adapters.aws.sqs import SqsResourcePool

T = TypeVar("T")


class Once(Generic[T]):
    """A value that several checks share. The first one creates it; the others get the same value or error."""

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
async def open_doctor(
    settings: Settings, background: Mapping[str, Callable[[], bool]]
) -> AsyncIterator[Sequence[Check]]:
    """Open the checks. `background` maps each background process of the local backend to a check whether it runs."""
    async with AsyncExitStack() as stack:

        async def opened() -> Context:
            return await stack.enter_async_context(
                open_context(settings, SilentEventLog(), needs_github=False, require_local_github=False)
            )

        context = Once(opened)

        async def read() -> PoolConfig | None:
            return await (await context()).store.get_config()

        get_config = Once(read)
        if settings.backend == "aws":
            yield await _aws_checks(settings, stack, context, get_config)
        else:
            yield _local_checks(settings, stack, context, get_config, background)


def _local_checks(
    settings: Settings,
    stack: AsyncExitStack,
    context: Once[Context],
    get_config: Once[PoolConfig | None],
    background: Mapping[str, Callable[[], bool]],
) -> Sequence[Check]:
    clock, places = SystemClock(), layout(settings)

    async def github() -> GitHubClient:
        endpoint = local_endpoint(settings)
        token = settings.github_token.text if settings.github_token else endpoint.token
        made = token_client(endpoint.url, clock, SystemIds(), CallCounter(), token=token)
        stack.push_async_callback(made.close)
        return made

    local = LocalDoctor(root=places.root, runner=places.runner, background=background)
    return (
        *local.checks(),
        *pool_checks(get_config, clock, scope=settings.github_scope, needs=(local.ready,)),
        runner_set_check(partial(_read_demand, context, get_config)),
        release_check(partial(_read_provisions, context)),
        *GitHubDoctor(github=Once(github), scope=settings.github_scope, clock=clock, needs=(local.ready,)).checks(),
    )


def provision_checks(
    settings: Settings, context: Context, clients: AwsClients, stored: PoolConfig | None
) -> Sequence[Check]:
    """What the broker checks under its own role. `context` has the adapters of AWS."""
    from remuda.adapters.aws.doctor import AwsDoctor  # noqa: PLC0415 - AWS libraries are slow to import

    async def adapters() -> AwsAdapters:
        return _aws_adapters(context)

    return AwsDoctor(
        clients=clients,
        adapters=adapters,
        pool=settings.pool,
        launch=_launch_options(settings, stored),
        classes=stored.classes if stored else settings.resource_class_config,
        clock=SystemClock(),
    ).provision_checks()


def _aws_adapters(opened: Context) -> AwsAdapters:
    from remuda.adapters.aws.doctor import AwsAdapters  # noqa: PLC0415 - as above

    return AwsAdapters(
        store=cast("DynamoInstanceStore", opened.store),
        pool=cast("SqsResourcePool", opened.pool),
        compute=cast("Ec2Compute", opened.compute),
    )


async def _aws_checks(
    settings: Settings, stack: AsyncExitStack, context: Once[Context], get_config: Once[PoolConfig | None]
) -> Sequence[Check]:
    clock = SystemClock()
    with aws_libraries():
        from remuda.adapters.aws.account import AccountDoctor  # noqa: PLC0415 - AWS libraries are slow to import
        from remuda.adapters.aws.clients import AwsClients  # noqa: PLC0415 - as above
        from remuda.adapters.aws.doctor import CREDENTIALS, AwsDoctor  # noqa: PLC0415 - as above
        from remuda.adapters.aws.functions import FunctionsDoctor  # noqa: PLC0415 - as above
    clients = await stack.enter_async_context(AwsClients())

    async def adapters() -> AwsAdapters:
        return _aws_adapters(await context())

    async def github() -> GitHubClient:
        credential = await github_credential(settings, clients, required=True)
        if credential is None:
            raise missing_credential()
        made = github_client(settings, credential, clock, SystemIds(), CallCounter())
        stack.push_async_callback(made.close)
        return made

    stored = await _stored_config(get_config)
    scope = settings.github_scope if settings.given("github_scope") else _stored_scope(stored)
    launch = _launch_options(settings, stored)
    given = settings.given("resource_class_config")
    classes = stored.classes if stored and not given else settings.resource_class_config
    return (
        *AwsDoctor(
            clients=clients, adapters=adapters, pool=settings.pool, launch=launch, classes=classes, clock=clock
        ).checks(),
        *AccountDoctor(
            clients=clients,
            launch=launch,
            classes=classes,
            max_instances=stored.max_instances if stored else settings.max_instances,
            needs=(CREDENTIALS,),
        ).checks(),
        *FunctionsDoctor(clients=clients, pool=settings.pool, needs=(CREDENTIALS,)).checks(),
        *pool_checks(get_config, clock, pool=settings.pool, scope=scope, needs=(CREDENTIALS,)),
        runner_set_check(partial(_read_demand, context, get_config)),
        release_check(partial(_read_provisions, context)),
        *GitHubDoctor(github=Once(github), scope=scope, clock=clock).checks(),
    )


async def _read_demand(context: Once[Context], get_config: Once[PoolConfig | None]) -> DemandStatus:
    config = await get_config()
    if config is None or not config.runner_sets:
        return DemandStatus()
    return (await status(await context(), check_registrations=False)).demand


async def _read_provisions(context: Once[Context], limit: int) -> Sequence[Provision]:
    return await (await context()).store.recent_provisions(limit)


async def _stored_config(get_config: Once[PoolConfig | None]) -> PoolConfig | None:
    """The configuration of the pool, or None if it cannot be read: the checks report the error."""
    try:
        return await get_config()
    except RemudaError:
        return None


def _stored_scope(stored: PoolConfig | None) -> str:
    return stored.tokens[0].scope if stored and stored.tokens else ""


def _launch_options(settings: Settings, stored: PoolConfig | None) -> Mapping[str, str]:
    """The options that the next refresh would apply: those of the pool, overridden by those given here."""
    given = {item.key for item in SETTINGS.values() if settings.given(item.name)}
    options = {name: value for name, value in settings.launch_options().items() if name in given}
    launch = {**(stored.launch if stored else {}), **options}
    if stored and stored.runner and launch.get(VERSION) == LATEST:
        launch |= stored.runner.launch_options()
    return launch
