"""Wiring of the local backend."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from remuda import procfs
from remuda.adapters.local.compute import LocalCompute
from remuda.adapters.local.folder import WORK
from remuda.adapters.local.layout import LocalLayout
from remuda.adapters.sqlite.pool import SqliteResourcePool
from remuda.adapters.sqlite.store import SqliteInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.config.settings import Settings
from remuda.domain.errors import UserError
from remuda.domain.pool_config import PoolConfig
from remuda.fake_github import Endpoint, read_endpoint
from remuda.ports.calls import CallCounter
from remuda.ports.github import GitHub
from remuda.wiring.backend import Backend, SystemPorts
from remuda.wiring.github import token_client

#: Module that runs as the local GitHub.
GITHUB_MODULE = "remuda.fake_github"
#: Other local backends that a message names.
MAX_NAMED = 3
#: Variables of the caller's environment that local instances inherit.
_INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ")


def layout(settings: Settings) -> LocalLayout:
    return LocalLayout(settings.dir.absolute())


def work_folder(settings: Settings, instance_id: str) -> Path:
    return layout(settings).instances / instance_id / WORK


def check_local(settings: Settings) -> None:
    """For commands that only the local backend has."""
    if settings.backend != "local":
        raise UserError(
            f"this command does not exist for backend {settings.backend!r}",
            field="--backend",
            fix="use --backend local",
        )


def local_endpoint(settings: Settings, *, require_running: bool = True) -> Endpoint:
    """The endpoint of the local GitHub."""
    endpoint = read_endpoint(layout(settings).github)
    if endpoint is None or (require_running and procfs.read_process(endpoint.pid) is None):
        if settings.dir.is_file():
            raise UserError(f"--dir {settings.dir} is a file", field="--dir", fix="name the directory of remuda up")
        others = named_backends(settings)
        use_other = f", or use the one that is running with {others}" if others else ""
        raise UserError(
            f"the local backend in {settings.dir} is not running",
            field="--dir",
            fix=f"run {shlex.join(['remuda', 'up', '--dir', str(settings.dir)])}{use_other}",
        )
    return endpoint


def named_backends(settings: Settings) -> str:
    """The flags that name other local backends, for a message: `--dir one or --dir two`; empty if none runs."""
    return " or ".join(f"--dir {shlex.quote(each)}" for each in running_backends(settings)[:MAX_NAMED])


def running_backends(settings: Settings) -> list[str]:
    """State directories of the user's other local backends, found by the processes of their local GitHub.

    The nearest come first, because a message names only some of them. Example: in `app/ci`, the backend of
    `app/.remuda` precedes that of `other/.remuda`.
    """
    here, found = str(layout(settings).root), set()
    for pid in procfs.all_processes():
        with suppress(OSError, ValueError):
            words = procfs.command(pid)
            is_ours = Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
            if is_ours and GITHUB_MODULE in words:
                found.add(str(Path(words[words.index("--dir") + 1]).parent))
    return sorted(found - {here}, key=lambda each: (-len(os.path.commonpath((here, each))), each))


@asynccontextmanager
async def open_local(
    settings: Settings, system: SystemPorts, *, needs_github: bool, require_local_github: bool
) -> AsyncIterator[Backend]:
    clock, ids, calls, dates = system
    async with AsyncExitStack() as stack:
        database = layout(settings).database
        endpoint = local_endpoint(settings, require_running=require_local_github)
        store = local_store(settings, system)
        stack.push_async_callback(store.close)
        settings = with_stored_pool(settings, await store.get_config())
        pool = SqliteResourcePool(path=database, clock=clock, ids=ids, calls=calls)
        stack.push_async_callback(pool.close)
        compute = local_compute(settings, calls)
        stack.push_async_callback(compute.close)
        github: GitHub | None = None
        if needs_github or settings.github_token:
            token = settings.github_token.text if settings.github_token else endpoint.token
            github = token_client(endpoint.url, clock, ids, calls, token=token, dates=dates)
            stack.push_async_callback(github.close)
        yield Backend(settings.pool, store, pool, compute, github)


def local_store(settings: Settings, system: SystemPorts | None = None) -> SqliteInstanceStore:
    clock, ids, calls, _ = system or SystemPorts(SystemClock(), SystemIds(), CallCounter())
    return SqliteInstanceStore(path=layout(settings).database, clock=clock, ids=ids, calls=calls)


async def stored_config(settings: Settings) -> PoolConfig | None:
    store = local_store(settings)
    try:
        return await store.get_config()
    finally:
        await store.close()


def with_stored_pool(settings: Settings, config: PoolConfig | None) -> Settings:
    """The settings with the pool name of the store, which belongs to one pool; an explicit other name is an error.

    Tags of instances and names of runners contain it: with a wrong name a sweep would consider every instance lost.
    """
    if config is None or config.pool == settings.pool:
        return settings
    if settings.given("pool"):
        raise UserError(
            f"pool is {settings.pool!r}, but {settings.dir} belongs to pool {config.pool!r}",
            field="--pool",
            fix=f"omit --pool, or use another state directory with --dir for pool {settings.pool!r}",
        )
    return replace(settings, pool=config.pool)


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
        environment=child_environment(os.environ),
    )


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of background processes and local instances."""
    return {name: environ[name] for name in _INHERITED_VARIABLES if name in environ}
