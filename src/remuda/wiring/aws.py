"""Wiring of the AWS backend. The AWS libraries are an extra and slow to import, so functions import them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.config.declaration import variable
from remuda.config.settings import SETTINGS, Settings
from remuda.controlplane.context import Context
from remuda.domain.errors import UserError
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import EventLog
from remuda.wiring.backend import Backend, SystemPorts
from remuda.wiring.github import github_client, github_credential, missing_credential

if TYPE_CHECKING:
    from remuda.controlplane.scale_down import FleetContext
    from remuda.ports.launch import InstanceLaunch
    from remuda.ports.metrics import MetricWriter

#: Seconds that scale-down may wait for GitHub's rate limit. A cycle has minutes, a provision does not.
FLEET_MAX_WAIT_S = 10.0


@contextmanager
def aws_libraries() -> Iterator[None]:
    """Turn a failed import of an AWS library into an error for the user."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"the aws backend needs a library that is not installed: {error.name}",
            field="--backend",
            fix="install remuda[aws]",
        ) from None


def check_region(given: str = "") -> None:
    """Reject an unknown region before any call. `given` is that of the flag; without, it is that of the environment.

    Commands call it, functions and agents do not: AWS sets their region, which may be newer than their bundle.
    """
    with aws_libraries():
        from remuda.adapters.aws import regions  # noqa: PLC0415 - see above
        from remuda.adapters.aws.environment import AwsEnvironment  # noqa: PLC0415 - see above
    variables = (name for name in ("AWS_REGION", "AWS_DEFAULT_REGION") if os.environ.get(name))
    region = given or AwsEnvironment().region()
    # A missing region has its own error.
    if region:
        regions.check_region(region, field="--region" if given else next(variables, "region of the AWS profile"))


def agent_log_environment(settings: Settings) -> dict[str, str]:
    """The log format for agents. The default is left out, so that the launch template of a pool stays as it is."""
    is_default = settings.log_format == SETTINGS["log_format"].default
    return {} if is_default else {variable("log_format"): settings.log_format}


@asynccontextmanager
async def open_aws(
    settings: Settings, event_log: EventLog, system: SystemPorts, *, needs_github: bool
) -> AsyncIterator[Backend]:
    with aws_libraries():
        from remuda.adapters.aws.clients import (  # noqa: PLC0415 - see above
            AwsClients,
            agent_environment_from,
            config,
            read_parameter,
        )
        from remuda.adapters.aws.dynamodb.keys import role_key_prefix  # noqa: PLC0415 - see above
        from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore  # noqa: PLC0415 - see above
        from remuda.adapters.aws.ec2.calls import client_config  # noqa: PLC0415 - see above
        from remuda.adapters.aws.ec2.compute import Ec2Compute, Ec2SpotPrices  # noqa: PLC0415 - see above
        from remuda.adapters.aws.sqs import SqsResourcePool  # noqa: PLC0415 - see above
    clock, ids, calls, dates = system
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(AwsClients(dates=dates))
        name = f"remuda-{settings.pool}"

        async def newest_prefix() -> str:
            return await role_key_prefix(
                await clients.service("iam", "IAM", config()), settings.launch_options(), calls
            )

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
        ec2 = await clients.service("ec2", "EC2", client_config())
        compute = Ec2Compute(
            client=ec2,
            pool=settings.pool,
            clock=clock,
            ids=ids,
            calls=calls,
            read_parameter=partial(read_parameter, clients),
            agent_environment=agent_environment_from(os.environ) | agent_log_environment(settings),
        )
        stack.push_async_callback(compute.close)
        credential = await github_credential(settings, clients, required=needs_github)
        github = github_client(settings, credential, clock, ids, calls, dates=dates) if credential else None
        if github is not None:
            stack.push_async_callback(github.close)
        spot = Ec2SpotPrices(client=ec2, clock=clock, ids=ids, calls=calls)
        yield Backend(settings.pool, store, pool, compute, github, spot)


@asynccontextmanager
async def open_metrics(settings: Settings, calls: CallCounter) -> AsyncIterator[MetricWriter | None]:
    """The metrics of the listener in CloudWatch; None on another backend."""
    if settings.backend != "aws":
        yield None
        return
    with aws_libraries():
        from remuda.adapters.aws import cloudwatch  # noqa: PLC0415 - see above
        from remuda.adapters.aws.clients import AwsClients, config  # noqa: PLC0415 - see above
    async with AwsClients() as clients:
        client = await clients.service(cloudwatch.SERVICE, cloudwatch.CLOUDWATCH, config())
        yield cloudwatch.CloudWatchMetrics(client=client, pool=settings.pool, command="listen", calls=calls)


@asynccontextmanager
async def open_launch(settings: Settings, calls: CallCounter) -> AsyncIterator[InstanceLaunch | None]:
    """The launch of this instance by the group of the listener; None elsewhere, for example in a container."""
    if settings.backend != "aws":
        yield None
        return
    with aws_libraries():
        from remuda.adapters.aws import launch  # noqa: PLC0415 - see above
        from remuda.adapters.aws.clients import AwsClients, config  # noqa: PLC0415 - see above
    group, instance_id = (os.environ.get(name, "") for name in (launch.GROUP_VARIABLE, launch.INSTANCE_VARIABLE))
    if not (group and instance_id):
        yield None
        return
    async with AwsClients() as clients:
        yield launch.GroupLaunch(
            autoscaling=await clients.service("autoscaling", launch.AUTO_SCALING, config()),
            cloudformation=await clients.service("cloudformation", launch.CLOUDFORMATION, config()),
            group=group,
            instance_id=instance_id,
            stack=os.environ.get(launch.STACK_VARIABLE, ""),
            calls=calls,
        )


@asynccontextmanager
async def open_aws_fleet(
    settings: Settings,
    event_log: EventLog,
    calls: CallCounter,
    *,
    environment: str,
    open_pool: Callable[[], AbstractAsyncContextManager[Context]],
) -> AsyncIterator[FleetContext]:
    """The ports of scale-down. `open_pool` opens the records of the pool, which scale-down needs only at times."""
    with aws_libraries():
        from remuda.adapters.aws.clients import AwsClients  # noqa: PLC0415 - see above
        from remuda.adapters.aws.ec2.calls import client_config  # noqa: PLC0415 - see above
        from remuda.adapters.aws.ec2.tagged_fleet import READ_TIMEOUT_S, Ec2Fleet  # noqa: PLC0415 - see above
    from remuda.controlplane.scale_down import FleetContext  # noqa: PLC0415 - only scale-down needs it

    async with AsyncExitStack() as stack:
        clock, ids = SystemClock(), SystemIds()
        clients = await stack.enter_async_context(AwsClients())
        credential = await github_credential(settings, clients, required=True)
        if credential is None:
            raise missing_credential()
        github = github_client(settings, credential, clock, ids, calls, max_wait_s=FLEET_MAX_WAIT_S)
        stack.push_async_callback(github.close)
        ec2 = await clients.service("ec2", "EC2", client_config(read_timeout_s=READ_TIMEOUT_S))
        yield FleetContext(
            environment=environment,
            fleet=Ec2Fleet(client=ec2, environment=environment, clock=clock, ids=ids, calls=calls),
            github=github,
            clock=clock,
            event_log=event_log,
            calls=calls,
            open_pool=open_pool,
            has_pool=settings.given("pool"),
        )
