"""Wiring: from settings to adapters. The only package that names concrete adapters.

Functions import the adapters of a backend, so that a command waits only for its own backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.adapters.system.prices import chosen_prices
from remuda.config.settings import LIFETIME_SETTINGS, POOL_SETTINGS, SETTINGS, Settings
from remuda.controlplane.context import Context
from remuda.domain.errors import RemudaError, UserError
from remuda.ports.calls import CallCounter
from remuda.ports.clock import CLOCK_FIX, ServerDates
from remuda.ports.event_log import EventLog
from remuda.wiring.aws import open_aws, open_aws_fleet
from remuda.wiring.backend import SystemPorts
from remuda.wiring.github import PUBLIC_API, missing_credential

if TYPE_CHECKING:
    from remuda.controlplane.refresh.configure import DesiredConfig
    from remuda.controlplane.scale_down import FleetContext


@asynccontextmanager
async def open_context(
    settings: Settings,
    event_log: EventLog,
    *,
    needs_github: bool,
    require_local_github: bool = True,
    calls: CallCounter | None = None,
) -> AsyncIterator[Context]:
    """Open the ports of the configured backend.

    `needs_github`: the command calls GitHub itself, so a credential is required. `require_local_github`: on the local
    backend, fail unless the local GitHub is running; read commands and sweeps work without it.
    """
    clock = SystemClock()
    dates = ServerDates(clock)
    system = SystemPorts(clock, SystemIds(), calls or CallCounter(), dates)
    if settings.backend == "aws":
        opening = open_aws(settings, event_log, system, needs_github=needs_github)
    else:
        from remuda.wiring.local import open_local  # noqa: PLC0415 - see above

        opening = open_local(settings, system, needs_github=needs_github, require_local_github=require_local_github)
    with clock_explained(dates):
        async with opening as backend:
            yield Context(
                pool_name=backend.pool_name,
                store=backend.store,
                pool=backend.pool,
                compute=backend.compute,
                github=backend.github,
                clock=system.clock,
                ids=system.ids,
                event_log=event_log,
                calls=system.calls,
                spot_prices=backend.spot_prices,
                read_prices=partial(chosen_prices, settings.prices),
                dates=dates,
            )


@contextmanager
def clock_explained(dates: ServerDates) -> Iterator[None]:
    """Add a wrong clock to the fix of an error: AWS and GitHub refuse signatures and tokens with a wrong time."""
    try:
        yield
    except RemudaError as error:
        if (wrong := dates.error()) is not None:
            error.fix = f"{error.fix}; {wrong}: {CLOCK_FIX}" if error.fix else f"{CLOCK_FIX}: {wrong}"
        raise


@asynccontextmanager
async def open_fleet(
    settings: Settings, event_log: EventLog, *, calls: CallCounter | None = None
) -> AsyncIterator[FleetContext]:
    """Open the ports of scale-down: instances by tag, GitHub, and the records of the pool if there is one."""
    if settings.backend == "aws":
        counter = calls or CallCounter()
        async with open_aws_fleet(
            settings,
            event_log,
            counter,
            environment=_environment_tag(settings, settings.pool),
            open_pool=lambda: open_context(settings, event_log, needs_github=False, calls=counter),
        ) as context:
            yield context
        return
    async with open_context(settings, event_log, needs_github=True, calls=calls) as pool:
        from remuda.adapters.local.compute import LocalFleet  # noqa: PLC0415 - see above
        from remuda.controlplane.scale_down import FleetContext  # noqa: PLC0415 - see above

        environment = _environment_tag(settings, pool.pool_name)
        if pool.github is None:
            raise missing_credential()
        yield FleetContext(
            environment=environment,
            fleet=LocalFleet(compute=pool.compute, pool=pool.pool_name, environment=environment),
            github=pool.github,
            clock=pool.clock,
            event_log=event_log,
            calls=pool.calls,
            open_pool=lambda: nullcontext(pool),
            has_pool=True,
        )


def _environment_tag(settings: Settings, pool: str) -> str:
    """The value of the ghr:environment tag; instances of the pool have its name by default."""
    return settings.environment or settings.github_environment or pool


def desired(settings: Settings, *, pool: str, keeps_unset: bool = True) -> DesiredConfig:
    """The configuration that `refresh` applies. What no source sets keeps its stored value, or gets its default."""
    from remuda.controlplane.refresh.configure import DesiredConfig  # noqa: PLC0415 - see above

    if settings.backend == "aws" and not settings.given("github_scope"):
        raise UserError(
            "github-scope is not set",
            field="--github-scope",
            fix="give the organization or owner/repo that runners register in",
        )
    if settings.runner_group and "/" in settings.github_scope:
        raise UserError(
            f"runner-group is {settings.runner_group!r}, but {settings.github_scope} is a repository without groups",
            field=settings.shown("runner_group"),
            fix="set github-scope to the organization, or remove runner-group",
        )
    launch, unset = settings.launch_options(), _unset(settings) if keeps_unset else frozenset()
    if settings.backend == "aws":
        from remuda.adapters.aws.ec2.options import Ec2LaunchOptions  # noqa: PLC0415 - slow to import

        try:
            Ec2LaunchOptions.parse(launch)  # Checked before any API call.
        except UserError as error:
            # The pool may have it. The compute adapter checks the whole.
            if error.field not in unset:
                raise
    return DesiredConfig(
        pool=pool,
        classes=settings.resource_class_config,
        lifetimes=settings.lifetimes,
        max_instances=settings.max_instances,
        github_url=_registration_url(settings),
        scope=settings.github_scope,
        runner_group=settings.runner_group,
        launch=launch,
        reuse=settings.reuse,
        runner_sets=settings.runner_sets,
        monthly_budget=settings.monthly_budget,
        unset=unset,
    )


def job_files(settings: Settings, instance_id: str) -> str:
    """The folder, on the instance, of the files of its job. The reset discards them.

    Example: `/var/lib/remuda/sandboxes/*/root/home/runner/work`, where `*` stands for the number of the sandbox.
    """
    if settings.backend == "local":
        from remuda.wiring.local import work_folder  # noqa: PLC0415 - see above

        return str(work_folder(settings, instance_id))
    from remuda.adapters.aws.user_data import MachineLayout  # noqa: PLC0415 - see above
    from remuda.agent.sandbox_root import WORK  # noqa: PLC0415 - see above

    return f"{MachineLayout().sandboxes}/*/root{WORK}"


def _unset(settings: Settings) -> frozenset[str]:
    """Parts of the configuration that no flag, variable or file sets."""
    by_setting = {
        **{setting: name for name, setting in LIFETIME_SETTINGS.items()},
        **{item.name: item.key for item in SETTINGS.values() if item.is_launch_option},
        **{name: name for name in POOL_SETTINGS},
        "resource_class_config": "classes",
    }
    if settings.backend == "local":
        by_setting |= {"boot_delay_sec": "boot-delay-s", "fault": "fault"}
    else:
        by_setting["github_api_url"] = "github_url"
    return frozenset(part for setting, part in by_setting.items() if not settings.given(setting))


def _registration_url(settings: Settings) -> str:
    """The GitHub URL that runners register at."""
    if settings.backend == "local":
        from remuda.wiring.local import local_endpoint  # noqa: PLC0415 - see above

        return local_endpoint(settings).url
    from remuda.adapters.github.client import web_url  # noqa: PLC0415 - see above

    return web_url(settings.github_api_url or PUBLIC_API)
