"""The agent on an EC2 instance: its ports and its first start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TypeVar

from remuda import __version__
from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.aws.dynamodb.keys import own_key_prefix
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.aws.ec2.calls import Ec2Calls, client_config
from remuda.adapters.aws.ec2.options import ANY_MODULE, DEFAULT_CACHE_GIB
from remuda.adapters.aws.imds import Ec2Machine, Imds, imds_endpoint
from remuda.adapters.aws.user_data import CACHE_GIB_VARIABLE, CACHE_PATHS_VARIABLE, MODULES_VARIABLE, MachineLayout
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.adapters.system.service_manager import ServiceManager
from remuda.agent import mounts, processes, sandbox_root
from remuda.agent.cache_volumes import CacheVolumes
from remuda.agent.job_hook import REFUSED, JobHook
from remuda.agent.kernel_modules import KernelModules
from remuda.agent.loop import Agent, Watchdog
from remuda.agent.runner import ActionsRunner
from remuda.agent.sandbox import Sandboxes, SandboxOptions
from remuda.domain.errors import Unavailable, UserError
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import EventLog
from remuda.ports.machine import AgentState, Identity, ScriptStatus

T = TypeVar("T")

POOL = "REMUDA_POOL"
#: Seconds to wait for metadata and credentials, which may be late at boot. Then systemd restarts the agent.
READY_TIMEOUT_S = 60.0
RETRY_DELAY_S = 1.0
#: Seconds until the agent's loop must begin. Sandboxes of an earlier agent are discarded first.
START_LIMIT_S = 600.0


async def run(environment: Mapping[str, str], *, clock: SystemClock, event_log: EventLog) -> None:
    processes.disable_core_dumps()
    layout = MachineLayout()
    software, state = Path(layout.opt), Path(layout.state)
    sandboxes = Sandboxes(
        SandboxOptions(
            storage=Path(layout.sandboxes),
            runner=software / "runner",
            software=PurePosixPath(layout.opt),
            hidden=(layout.state,),
            root=_job_root(layout),
            caches=_caches(state, environment),
            modules=_modules(environment),
        ),
        record=event_log.record,
    )
    watchdog = Watchdog(clock)
    watchdog.expect_progress_within(START_LIMIT_S)
    async with AsyncExitStack() as stack:
        reports = asyncio.create_task(ServiceManager(environment).keep_alive(lambda: watchdog.healthy))
        stack.callback(reports.cancel)
        ids, calls = SystemIds(), CallCounter()
        clients = await stack.enter_async_context(AwsClients())

        async def terminate(instance_id: str) -> None:
            client = await clients.service("ec2", "EC2", client_config())
            ec2 = Ec2Calls(client=client, clock=clock, ids=ids, calls=calls)
            await ec2.call("TerminateInstances", InstanceIds=[instance_id])

        machine = Ec2Machine(
            imds=Imds(endpoint=imds_endpoint(environment), clock=clock),
            clock=clock,
            reset=sandboxes.reset,
            prepare_jobs=sandboxes.prepare,
            layout=layout,
            terminate=terminate,
        )
        stack.push_async_callback(machine.close)
        identity = await _retry_until_ready(machine.identity, clock, event_log)
        _check_pool(identity, environment)
        sts = await clients.service("sts", "STS", config())
        prefix = await _retry_until_ready(partial(own_key_prefix, sts, identity.instance_id), clock, event_log)
        _discard_state_of_image(state, identity.instance_id, machine)
        config_folder = _config_folder(state / "registration", software / "runner")
        stack.push_async_callback(sandboxes.close)
        # The pre-runner script changes the root file system, so that no sandbox may exist before it has ended.
        await sandboxes.open(prepare=machine.load().script is not ScriptStatus.PENDING)
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
                host=sandboxes,
                config_folder=config_folder,
                state_folder=state,
                log=sandboxes.log_folder / "runner.log",
                work=sandbox_root.WORK,
                clock=clock,
                environment=sandbox_root.ENVIRONMENT,
                hook=JobHook(
                    folder=PurePosixPath(layout.opt) / "hook",
                    pristine=software / "runner",
                    refused_file=sandbox_root.OUTBOX / REFUSED,
                    refused_file_outside=sandboxes.outbox / REFUSED,
                ),
            ),
            clock=clock,
            ids=ids,
            event_log=event_log,
            version=__version__,
            watchdog=watchdog,
        ).run()


def _discard_state_of_image(state: Path, instance_id: str, machine: Ec2Machine) -> None:
    """Discard the state of another instance, if this one was launched from an image of it."""
    marker = state / "instance-id"
    with contextlib.suppress(OSError, ValueError):
        if marker.read_text(encoding="utf-8").strip() == instance_id:
            return
    machine.save(AgentState())
    # A failure must be seen: from the next line on, what is left counts as this instance's own.
    mounts.run("rm", "-rf", "--", *(state / name for name in ("registration", "sandboxes", "caches")))
    marker.write_text(f"{instance_id}\n", encoding="utf-8")


def _job_root(layout: MachineLayout) -> Path:
    job_image = Path(layout.job_image)
    return job_image if job_image.exists() else Path("/")


def _caches(state: Path, environment: Mapping[str, str]) -> CacheVolumes | None:
    paths = tuple(filter(None, environment.get(CACHE_PATHS_VARIABLE, "").split(":")))
    if not paths:
        return None
    max_bytes = int(environment.get(CACHE_GIB_VARIABLE, "") or DEFAULT_CACHE_GIB) * 1024**3
    return CacheVolumes(folder=state / "caches", paths=paths, max_bytes=max_bytes)


def _modules(environment: Mapping[str, str]) -> KernelModules:
    names = tuple(filter(None, environment.get(MODULES_VARIABLE, "").split(",")))
    return KernelModules(are_open=True) if names == (ANY_MODULE,) else KernelModules(further=names)


def _config_folder(folder: Path, runner: Path) -> Path:
    """Mount a private copy of the runner software, in which registrations are made and removed."""
    root = folder / "root"
    try:
        for path in (folder, folder / "changes", folder / "work", root):
            path.mkdir(mode=0o700, exist_ok=True)
        if not root.is_mount():
            mounts.mount_overlay(root, lower=runner, upper=folder / "changes", work=folder / "work", volatile=False)
    except OSError as problem:
        raise Unavailable(f"cannot create {folder}: {problem}") from problem
    return root


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
