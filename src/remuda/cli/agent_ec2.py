"""The agent on an EC2 instance: its ports and its first start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

from remuda import __version__
from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.aws.dynamodb.keys import own_key_prefix
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.aws.ec2.calls import Ec2Calls, client_config
from remuda.adapters.aws.imds import Ec2Machine, Imds, imds_endpoint
from remuda.adapters.aws.user_data import MachineLayout
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent import processes
from remuda.agent.job_hook import REFUSED, JobHook
from remuda.agent.job_user import JobUser
from remuda.agent.leftovers import Leftovers
from remuda.agent.loop import Agent
from remuda.agent.machine_folders import MachineFolders
from remuda.agent.reset import Reset
from remuda.agent.runner import ActionsRunner
from remuda.domain.errors import Unavailable, UserError
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import EventLog
from remuda.ports.machine import AgentState, Identity

T = TypeVar("T")

POOL = "REMUDA_POOL"
#: Seconds to wait for metadata and credentials, which may be late at boot. Then systemd restarts the agent.
READY_TIMEOUT_S = 60.0
RETRY_DELAY_S = 1.0


async def run(environment: Mapping[str, str], *, clock: SystemClock, event_log: EventLog) -> None:
    processes.disable_core_dumps()
    layout = MachineLayout()
    user = JobUser.find(layout.job_user)
    folders = MachineFolders(
        state=Path(layout.state), jobs=Path(layout.jobs), pristine=Path(layout.opt) / "runner", user=user
    )
    folders.make()
    leftovers = Leftovers(user=user, own=(folders.jobs, user.home), memory=folders.shared_places, clock=clock)
    reset = Reset(
        kill=partial(processes.kill_user, user, clock=clock),
        runner_folder=folders.runner,
        pristine=folders.pristine,
        recreate=(folders.work, folders.tmp, user.home),
        owner=user,
        elsewhere=leftovers,
    )
    async with AsyncExitStack() as stack:
        ids, calls = SystemIds(), CallCounter()
        clients = await stack.enter_async_context(AwsClients())

        async def terminate(instance_id: str) -> None:
            # Opened on demand: the EC2 client is the largest of all.
            client = await clients.client("ec2", "EC2", client_config())
            ec2 = Ec2Calls(client=client, clock=clock, ids=ids, calls=calls)
            await ec2.call("TerminateInstances", InstanceIds=[instance_id])

        machine = Ec2Machine(
            imds=Imds(endpoint=imds_endpoint(environment), clock=clock),
            clock=clock,
            reset=reset.run,
            layout=layout,
            terminate=terminate,
        )
        stack.push_async_callback(machine.close)
        identity = await _retry_until_ready(machine.identity, clock, event_log)
        _check_pool(identity, environment)
        sts = await clients.client("sts", "STS", config())
        prefix = await _retry_until_ready(partial(own_key_prefix, sts, identity.instance_id), clock, event_log)
        leftovers.prepare(anew=not folders.were_prepared_for(identity.instance_id))
        await _prepare_new_instance(folders, identity.instance_id, machine, reset, leftovers)
        store = DynamoInstanceStore(
            client=await clients.dynamodb(),
            table=f"remuda-{identity.pool}",
            clock=clock,
            ids=ids,
            calls=calls,
            key_prefix=prefix,
        )
        stack.push_async_callback(store.close)
        await Agent(
            store=store,
            machine=machine,
            runner=ActionsRunner(
                folder=folders.runner,
                work=folders.work,
                log=folders.log,
                clock=clock,
                environment=user.environment() | {"TMPDIR": str(folders.tmp)},
                hook=JobHook(folder=folders.hook, pristine=folders.pristine, refused_file=folders.work / REFUSED),
                user=user,
                registrar=folders.registrar,
            ),
            clock=clock,
            ids=ids,
            event_log=event_log,
            version=__version__,
        ).run()


async def _prepare_new_instance(
    folders: MachineFolders, instance_id: str, machine: Ec2Machine, reset: Reset, leftovers: Leftovers
) -> None:
    if folders.were_prepared_for(instance_id):
        return
    # An image of a used instance contains the state of that instance.
    machine.save(AgentState())
    folders.make_registrar()
    await asyncio.to_thread(leftovers.sweep)
    outcome = await reset.make()
    if not outcome.ok:
        raise Unavailable(f"the instance cannot be prepared for jobs: {outcome.detail}")
    folders.mark_prepared_for(instance_id)


def _check_pool(identity: Identity, environment: Mapping[str, str]) -> None:
    configured = environment.get(POOL, identity.pool)
    if configured != identity.pool:
        raise UserError(
            f"{POOL} is {configured!r}, but the tag of the instance is {identity.pool!r}",
            field=POOL,
            fix="launch instances with Remuda, and do not change their tags",
        )


async def _retry_until_ready(call: Callable[[], Awaitable[T]], clock: SystemClock, event_log: EventLog) -> T:
    give_up_at = clock.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            return await call()
        except Unavailable as error:
            if clock.monotonic() >= give_up_at:
                raise
            event_log.record("not-ready", error.message)
        await clock.sleep(RETRY_DELAY_S)
