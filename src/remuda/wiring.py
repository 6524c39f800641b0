"""Settings to adapters: the only place that names concrete ones."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from remuda import procfs
from remuda.adapters.local.compute import LocalCompute
from remuda.adapters.local.fleet import LocalFleet
from remuda.adapters.local.layout import LocalLayout
from remuda.adapters.sqlite.pool import SqliteResourcePool
from remuda.adapters.sqlite.store import SqliteInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.config.settings import Settings, is_secret_arn, read_key, variable
from remuda.controlplane.context import Context
from remuda.controlplane.refresh.configure import DesiredConfig
from remuda.controlplane.scale_down import FleetContext
from remuda.domain.errors import UserError
from remuda.domain.pool_config import PoolConfig
from remuda.fake_github import Endpoint, read_endpoint
from remuda.ports.calls import CallCounter
from remuda.ports.compute import Compute
from remuda.ports.event_log import EventLog
from remuda.ports.github import GitHub
from remuda.ports.pool import ResourcePool
from remuda.ports.prices import SpotPrices
from remuda.ports.store import InstanceStore

if TYPE_CHECKING:
    from remuda.adapters.aws.clients import AwsClients
    from remuda.adapters.github.auth import Auth
    from remuda.adapters.github.client import GitHubClient

PUBLIC_API = "https://api.github.com"
#: A cycle of scale-down has minutes: it may wait longer for GitHub than a provision.
FLEET_MAX_WAIT_S = 10.0
#: Of the caller's environment, what a local machine gets to see.
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ")


@dataclass(frozen=True, kw_only=True, slots=True)
class GithubCredential:
    """A token, or an App's id and its key."""

    text: str = field(repr=False)
    app_id: str = ""


def layout(settings: Settings) -> LocalLayout:
    return LocalLayout(settings.dir.absolute())


def local_endpoint(settings: Settings, *, alive: bool = True) -> Endpoint:
    """Where the local GitHub is; with `alive` it must run."""
    endpoint = read_endpoint(layout(settings).github)
    if endpoint is None or (alive and procfs.read_process(endpoint.pid) is None):
        raise UserError(
            f"the local backend in {settings.dir} is not up", field="--dir", fix=f"run remuda up --dir {settings.dir}"
        )
    return endpoint


def check_local(settings: Settings) -> None:
    """For what there is on this machine only."""
    if settings.backend != "local":
        raise UserError(
            f"backend {settings.backend!r} has nothing to start or stop here",
            field="--backend",
            fix="use --backend local",
        )


class _Basics(NamedTuple):
    """What every adapter of a process shares."""

    clock: SystemClock
    ids: SystemIds
    calls: CallCounter


class _Backend(NamedTuple):
    """One backend's adapters, open."""

    pool_name: str
    store: InstanceStore
    pool: ResourcePool
    compute: Compute
    github: GitHub | None
    spot: SpotPrices | None = None


@asynccontextmanager
async def open_context(
    settings: Settings,
    event_log: EventLog,
    *,
    credentialed: bool,
    alive: bool = True,
    calls: CallCounter | None = None,
) -> AsyncIterator[Context]:
    """The ports on the chosen backend.

    `credentialed`: the command acts on GitHub itself (refresh). `alive`: it makes no sense without GitHub; looks and
    sweeps do.
    """
    basics = _Basics(SystemClock(), SystemIds(), calls or CallCounter())
    if settings.backend == "aws":
        opening = _open_aws(settings, event_log, basics, credentialed=credentialed)
    else:
        opening = _open_local(settings, basics, credentialed=credentialed, alive=alive)
    async with opening as backend:
        yield Context(
            pool_name=backend.pool_name,
            store=backend.store,
            pool=backend.pool,
            compute=backend.compute,
            github=backend.github,
            clock=basics.clock,
            ids=basics.ids,
            event_log=event_log,
            calls=basics.calls,
            spot_prices=backend.spot,
        )


@asynccontextmanager
async def _open_local(
    settings: Settings, basics: _Basics, *, credentialed: bool, alive: bool
) -> AsyncIterator[_Backend]:
    clock, ids, calls = basics
    async with AsyncExitStack() as stack:
        places = layout(settings)
        endpoint = local_endpoint(settings, alive=alive)
        store = SqliteInstanceStore(path=places.database, clock=clock, ids=ids, calls=calls)
        stack.push_async_callback(store.close)
        settings = with_pool(settings, await store.get_config())
        pool = SqliteResourcePool(path=places.database, clock=clock, ids=ids, calls=calls)
        stack.push_async_callback(pool.close)
        compute = local_compute(settings, calls)
        stack.push_async_callback(compute.close)
        github: GitHub | None = None
        if credentialed or settings.github_token:
            token = settings.github_token.get_secret_value() if settings.github_token else endpoint.token
            github = _github(endpoint.url, clock, ids, calls, token=token)
            stack.push_async_callback(github.close)
        yield _Backend(settings.pool, store, pool, compute, github)


def with_pool(settings: Settings, config: PoolConfig | None) -> Settings:
    """A store belongs to one pool: its name is taken from there, and another one is refused.

    The tags of machines and the names of runners carry it: with the wrong one a sweep would take every machine for
    lost.
    """
    if config is None or config.pool == settings.pool:
        return settings
    if "pool" in settings.model_fields_set:
        raise UserError(
            f"pool is {settings.pool!r}, but {settings.dir} belongs to pool {config.pool!r}",
            field="--pool",
            fix=f"leave --pool out, or name another state folder with --dir for pool {settings.pool!r}",
        )
    return settings.model_copy(update={"pool": config.pool})


def local_compute(settings: Settings, calls: CallCounter) -> LocalCompute:
    places = layout(settings)
    return LocalCompute(
        root=places.instances,
        pool=settings.pool,
        runner_source=places.runner,
        agent_command=[
            *(sys.executable, "-m", "remuda", "agent", "--dir", str(places.root)),
            *("--log-format", settings.log_format),
        ],
        clock=SystemClock(),
        ids=SystemIds(),
        calls=calls,
        environment=passed_on(os.environ),
    )


def agent_logs(settings: Settings) -> dict[str, str]:
    """Agents on EC2 log as `refresh` was told to. Said only where it is not the default: a template without it stays
    as it is.
    """
    is_default = settings.log_format == Settings.model_fields["log_format"].default
    return {} if is_default else {variable("log_format"): settings.log_format}


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in _PASSED_ON if name in environ}


@asynccontextmanager
async def open_fleet(
    settings: Settings, event_log: EventLog, *, calls: CallCounter | None = None
) -> AsyncIterator[FleetContext]:
    """For scale-down: machines by their tags, GitHub, and the pool's records where there is a pool."""
    if settings.backend == "aws":
        async with _open_aws_fleet(settings, event_log, calls or CallCounter()) as context:
            yield context
        return
    async with open_context(settings, event_log, credentialed=True, calls=calls) as pool:
        environment = _fleet_name(settings, pool.pool_name)
        yield FleetContext(
            environment=environment,
            fleet=LocalFleet(compute=pool.compute, pool=pool.pool_name, environment=environment),
            github=_needed(pool.github),
            clock=pool.clock,
            event_log=event_log,
            calls=pool.calls,
            open_pool=lambda: nullcontext(pool),
            has_pool=True,
        )


def _fleet_name(settings: Settings, pool: str) -> str:
    """Machines that Remuda launches carry the pool's name in that tag, unless they were given another."""
    return settings.environment or settings.github_environment or pool


def _needed(github: GitHub | None) -> GitHub:
    if github is None:
        raise _no_credential()
    return github


def _no_credential() -> UserError:
    return UserError(
        "there is no GitHub credential",
        field="REMUDA_GITHUB_TOKEN",
        fix="set REMUDA_GITHUB_TOKEN, or REMUDA_GITHUB_APP_ID and REMUDA_GITHUB_APP_KEY",
    )


@asynccontextmanager
async def _open_aws_fleet(settings: Settings, event_log: EventLog, calls: CallCounter) -> AsyncIterator[FleetContext]:
    with aws_libraries():
        from remuda.adapters.aws.clients import AwsClients  # noqa: PLC0415 - only this backend pays for AWS's libraries
        from remuda.adapters.aws.ec2.calls import client_config  # noqa: PLC0415 - as above
        from remuda.adapters.aws.ec2.tagged_fleet import READ_TIMEOUT_S, Ec2RunnerFleet  # noqa: PLC0415 - as above
    async with AsyncExitStack() as stack:
        clock, ids = SystemClock(), SystemIds()
        clients = await stack.enter_async_context(AwsClients())
        credential = await github_credential(settings, clients, needed=True)
        github = _needed(github_client(settings, credential, clock, ids, calls, max_wait_s=FLEET_MAX_WAIT_S))
        stack.push_async_callback(github.close)
        ec2 = await clients.client("ec2", "EC2", client_config(read_timeout_s=READ_TIMEOUT_S))
        environment = _fleet_name(settings, settings.pool)
        yield FleetContext(
            environment=environment,
            fleet=Ec2RunnerFleet(client=ec2, environment=environment, clock=clock, ids=ids, calls=calls),
            github=github,
            clock=clock,
            event_log=event_log,
            calls=calls,
            open_pool=lambda: open_context(settings, event_log, credentialed=False, calls=calls),
            has_pool="pool" in settings.model_fields_set,
        )


@contextmanager
def aws_libraries() -> Iterator[None]:
    """Around their import: they are an extra."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"the aws backend needs a library that is not installed: {error.name}",
            field="--backend",
            fix="install remuda[aws]",
        ) from None


@asynccontextmanager
async def _open_aws(
    settings: Settings, event_log: EventLog, basics: _Basics, *, credentialed: bool
) -> AsyncIterator[_Backend]:
    with aws_libraries():
        from remuda.adapters.aws.clients import (  # noqa: PLC0415 - only this backend pays for AWS's libraries
            AwsClients,
            config,
            passed_to_agents,
        )
        from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore  # noqa: PLC0415 - as above
        from remuda.adapters.aws.ec2.calls import client_config  # noqa: PLC0415 - as above
        from remuda.adapters.aws.ec2.compute import Ec2Compute  # noqa: PLC0415 - as above
        from remuda.adapters.aws.ec2.prices import Ec2SpotPrices  # noqa: PLC0415 - as above
        from remuda.adapters.aws.identity import key_prefix_of  # noqa: PLC0415 - as above
        from remuda.adapters.aws.sqs import SqsResourcePool  # noqa: PLC0415 - as above
    clock, ids, calls = basics
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(AwsClients())
        name = f"remuda-{settings.pool}"

        async def newest_prefix() -> str:
            return await key_prefix_of(await clients.client("iam", "IAM", config()), settings.launch_options(), calls)

        store = DynamoInstanceStore(
            client=await clients.dynamodb(),
            table=name,
            clock=clock,
            ids=ids,
            calls=calls,
            newest_prefix=newest_prefix,
            event_log=event_log,
        )
        stack.push_async_callback(store.close)
        pool = SqsResourcePool(client=await clients.sqs(), prefix=name, clock=clock, ids=ids, calls=calls)
        stack.push_async_callback(pool.close)
        # A warm provision, a release or a look at the pool never asks EC2.
        ec2 = clients.later("ec2", "EC2", client_config())
        compute = Ec2Compute(
            client=ec2,
            pool=settings.pool,
            clock=clock,
            ids=ids,
            calls=calls,
            agent_environment=passed_to_agents(os.environ) | agent_logs(settings),
        )
        stack.push_async_callback(compute.close)
        credential = await github_credential(settings, clients, needed=credentialed)
        github = github_client(settings, credential, clock, ids, calls)
        if github is not None:
            stack.push_async_callback(github.close)
        spot = Ec2SpotPrices(client=ec2, clock=clock, ids=ids, calls=calls)
        yield _Backend(settings.pool, store, pool, compute, github, spot)


async def github_credential(settings: Settings, clients: AwsClients, *, needed: bool) -> GithubCredential | None:
    """What the settings give or name. A secret is read only where it is `needed`: a workflow that shares its settings
    with `refresh` goes without it, by the pool's tokens.
    """
    app = settings.github_token is None and bool(settings.github_app_id)
    given = settings.github_app_key if app else settings.github_token
    text = given.get_secret_value() if given else ""
    if not text and not app:
        if needed:
            raise _no_credential()
        return None
    if is_secret_arn(text):
        if not needed:
            return None
        from remuda.adapters.aws.secrets import read_secret  # noqa: PLC0415 - only this backend pays for it

        key, field = ("private_key", "github-app-key") if app else ("token", "github-token")
        text = await read_secret(clients, text, key=key, field=field)
    elif app:
        text = read_key(text)
    return GithubCredential(text=text, app_id=settings.github_app_id if app else "")


def github_client(
    settings: Settings,
    credential: GithubCredential | None,
    clock: SystemClock,
    ids: SystemIds,
    calls: CallCounter,
    *,
    max_wait_s: float | None = None,
) -> GitHubClient | None:
    api_url = settings.github_api_url or PUBLIC_API
    if credential is None:
        return None
    if not credential.app_id:
        return _github(api_url, clock, ids, calls, token=credential.text, max_wait_s=max_wait_s)
    from remuda.adapters.github.auth import AppAuth  # noqa: PLC0415 - only an App needs cryptography

    auth = AppAuth(app_id=credential.app_id, key=credential.text, clock=clock)
    return _github(api_url, clock, ids, calls, auth=auth, max_wait_s=max_wait_s)


def _github(
    api_url: str,
    clock: SystemClock,
    ids: SystemIds,
    calls: CallCounter,
    *,
    token: str = "",
    auth: Auth | None = None,
    max_wait_s: float | None = None,
) -> GitHubClient:
    from remuda.adapters.github.client import MAX_WAIT_S, GitHubClient  # noqa: PLC0415 - HTTP costs start-up time

    return GitHubClient(
        api_url=api_url,
        token=token,
        auth=auth,
        clock=clock,
        ids=ids,
        calls=calls,
        max_wait_s=MAX_WAIT_S if max_wait_s is None else max_wait_s,
    )


def _github_url(settings: Settings) -> str:
    """Where runners register."""
    if settings.backend == "local":
        return local_endpoint(settings).url
    from remuda.adapters.github.client import web_url  # noqa: PLC0415 - as above

    return web_url(settings.github_api_url or PUBLIC_API)


def desired(settings: Settings, *, pool: str) -> DesiredConfig:
    """What `refresh` should make true."""
    if settings.backend == "aws" and "github_scope" not in settings.model_fields_set:
        raise UserError(
            "github-scope is not given",
            field="--github-scope",
            fix="give an organisation or owner/repo that runners serve",
        )
    launch = settings.launch_options()
    if settings.backend == "aws":
        from remuda.adapters.aws.ec2.options import Options  # noqa: PLC0415 - as above

        Options.parse(launch)  # before any call is made
    return DesiredConfig(
        pool=pool,
        classes=settings.resource_class_config,
        lifetimes=settings.lifetimes,
        max_instances=settings.max_instances,
        github_url=_github_url(settings),
        scope=settings.github_scope,
        launch=launch,
        reuse=settings.reuse,
    )
