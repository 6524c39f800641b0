"""Settings to adapters: the only place that names concrete ones."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from remuda import procfs
from remuda.adapters.local.compute import LocalCompute
from remuda.adapters.sqlite.pool import SqliteResourcePool
from remuda.adapters.sqlite.store import SqliteInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.controlplane.context import Context
from remuda.controlplane.refresh.configure import Desired
from remuda.domain.errors import UserError
from remuda.domain.pool_config import PoolConfig
from remuda.githubsim.endpoint import Endpoint, read_endpoint
from remuda.ports.calls import CallCounter
from remuda.ports.forge import Forge
from remuda.ports.journal import Journal
from remuda.settings import Settings

#: Of the caller's environment, what a local machine gets to see.
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ")


@dataclass(frozen=True, slots=True)
class LocalLayout:
    """What lies where in the state folder of the local backend."""

    root: Path

    @property
    def database(self) -> Path:
        return self.root / "remuda.db"

    @property
    def github(self) -> Path:
        return self.root / "github"

    @property
    def runner(self) -> Path:
        return self.root / "runner"

    @property
    def instances(self) -> Path:
        return self.root / "instances"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def sweeper(self) -> Path:
        return self.root / "sweeper.json"


def layout(settings: Settings) -> LocalLayout:
    return LocalLayout(settings.dir.absolute())


def local_endpoint(settings: Settings, *, alive: bool = True) -> Endpoint:
    """Where the local GitHub is; with `alive` it must run."""
    endpoint = read_endpoint(layout(settings).github)
    if endpoint is None or (alive and procfs.look(endpoint.pid) is None):
        raise UserError(
            f"the local backend in {settings.dir} is not up", field="--dir", fix=f"run remuda up --dir {settings.dir}"
        )
    return endpoint


def check_backend(settings: Settings) -> None:
    if settings.backend != "local":
        raise UserError(
            f"backend {settings.backend!r} is not part of this version", field="--backend", fix="use --backend local"
        )


@asynccontextmanager
async def open_context(
    settings: Settings, journal: Journal, *, credentialed: bool, alive: bool = True
) -> AsyncIterator[Context]:
    """The ports on the chosen backend.

    `credentialed`: the command acts on GitHub itself (refresh). `alive`: it makes no sense without GitHub; looks and
    sweeps do.
    """
    check_backend(settings)
    async with AsyncExitStack() as stack:
        clock, ids, calls = SystemClock(), SystemIds(), CallCounter()
        places = layout(settings)
        endpoint = local_endpoint(settings, alive=alive)
        store = SqliteInstanceStore(path=places.database, clock=clock, ids=ids, calls=calls)
        stack.push_async_callback(store.close)
        settings = with_pool(settings, await store.get_config())
        pool = SqliteResourcePool(path=places.database, clock=clock, ids=ids, calls=calls)
        stack.push_async_callback(pool.close)
        compute = local_compute(settings, calls)
        stack.push_async_callback(compute.close)
        forge = _forge(settings, endpoint, clock, ids, calls) if credentialed or settings.github_token else None
        if forge is not None:
            stack.push_async_callback(forge.close)
        yield Context(
            pool_name=settings.pool,
            store=store,
            pool=pool,
            compute=compute,
            forge=forge,
            clock=clock,
            ids=ids,
            journal=journal,
            calls=calls,
        )


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
        agent_command=[sys.executable, "-m", "remuda", "agent", "--dir", str(places.root)],
        clock=SystemClock(),
        ids=SystemIds(),
        calls=calls,
        environment=passed_on(os.environ),
    )


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in _PASSED_ON if name in environ}


def _forge(settings: Settings, endpoint: Endpoint, clock: SystemClock, ids: SystemIds, calls: CallCounter) -> Forge:
    from remuda.adapters.github.client import GithubForge  # noqa: PLC0415 - an HTTP client costs start-up time

    token = settings.github_token.get_secret_value() if settings.github_token else endpoint.token
    return GithubForge(api_url=endpoint.url, token=token, clock=clock, ids=ids, calls=calls)


def desired(settings: Settings, *, pool: str) -> Desired:
    """What `refresh` should make true."""
    return Desired(
        pool=pool,
        classes=settings.resource_class_config,
        lifetimes=settings.lifetimes,
        max_instances=settings.max_instances,
        github_url=local_endpoint(settings).url,
        scope=settings.github_scope,
        launch=settings.launch_options(),
    )
