"""The backends of a chaos run: the local backend, and the AWS adapters on test servers with local machines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from remuda.adapters.aws.user_data import FIRST_LIFE_TAG, MARGIN_TAG
from remuda.adapters.local.compute import LocalCompute
from remuda.adapters.local.launch import LocalLauncher, is_on
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.config.declaration import variable
from remuda.config.settings import Settings
from remuda.config.sources import load
from remuda.controlplane.context import Context
from remuda.domain.errors import RemudaError
from remuda.fake_github import install_runner
from remuda.ports.calls import CallCounter
from remuda.ports.compute import POOL_TAG
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import open_context
from tests.support.aws.ec2 import Ec2Server, describe_instances, instance_credentials
from tests.support.aws.ec2_machines import LIVE, POLL_S, Ec2MachineRunner, ec2_machines
from tests.support.aws.servers import ROOT, fake_github, ministack
from tests.support.aws.stack import AwsStack, launch_options
from tests.support.chaos.environment import SteppedClocks
from tests.support.cli import CommandResult, ForkedProcess
from tests.support.demand import DemandBackend
from tests.support.local_backend import REPO
from tests.support.records import launch_request

GITHUB, SWEEPER, LISTENER = "github", "sweeper", "listener"
BACKGROUND = (GITHUB, SWEEPER, LISTENER)
AWS_POOL = "chaos"
AGENT = "tests.support.chaos.aws_agent"
#: Seconds between two checks whether the background processes run.
KEEP_S = 1.0
SWEEP_S = 5
#: Seconds after which the boot of a machine is tried again, if its disk was full.
BOOT_RETRY_S = 1.0


class LocalChaosBackend(DemandBackend):
    """The local backend. Its background processes are started again when they end, as a service manager does."""

    #: The processes that must run. The sweeper starts the listener.
    kept: tuple[str, ...] = (GITHUB, SWEEPER)
    #: The pids of servers that can be stopped for a while, by name.
    servers: Mapping[str, int] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.run("up")
        async with self._kept_up():
            yield

    @asynccontextmanager
    async def _kept_up(self) -> AsyncIterator[None]:
        keeper = asyncio.create_task(self._keep_up())
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _keep_up(self) -> None:
        while True:
            if any(self.background(name) is None for name in self.kept):
                await self._start_missing()
            await asyncio.sleep(KEEP_S)

    async def _start_missing(self) -> None:
        # It fails while the disk is full.
        await self.run("up", code=None)

    async def start(self, *arguments: str, **options: Any) -> ForkedProcess:
        process = await super().start(*arguments, **options)
        # Thousands of commands are started; each ends before the backend does.
        self._started.remove(process)
        return process

    def background(self, name: str) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return super().background(name)
        return None

    @asynccontextmanager
    async def context(self) -> AsyncIterator[Context]:
        async with open_context(
            self._own_settings(), SilentEventLog(), needs_github=False, require_local_github=False
        ) as context:
            yield context

    def _own_settings(self) -> Settings:
        return load({"dir": str(self.folder)}, environ={})

    async def live_on_compute(self) -> list[str]:
        """Ids of the machines that the cloud still runs."""
        return self.machines()

    async def shut_down(self) -> list[str]:
        """Stop everything. Return what is left."""
        down = (await self.run("down", code=None)).document
        return [str(pid) for pid in (*down.get("left", ["down failed"]), *self.processes())]


@contextmanager
def local_backend(folder: Path, clocks: SteppedClocks) -> Iterator[LocalChaosBackend]:
    yield LocalChaosBackend(folder)


# AWS ----------------------------------------------------------------------------------------------------------------


class AwsChaosBackend(LocalChaosBackend):
    """The AWS adapters on test servers.

    DynamoDB, SQS and EC2 are servers on loopback. Each EC2 instance is a local machine with the real agent, which uses
    the store in DynamoDB. Listener and sweeper are the commands that the stack runs on AWS.
    """

    kept = BACKGROUND

    def __init__(self, folder: Path, stack: AwsStack, clocks: SteppedClocks) -> None:
        super().__init__(folder)
        self._stack = stack
        self._python = str(clocks.python)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self.servers = {"DynamoDB and SQS": stack.store.process.pid, "EC2": stack.ec2.pid}
        self.flags = ()
        launch = {name.replace("-", "_"): value for name, value in stack.launch.items()}
        settings = {"pool": AWS_POOL, "github_scope": REPO, **launch}
        self.environment = stack.environment(**{variable(name): value for name, value in settings.items()})
        # Also for the agents of machines that boot now.
        os.environ.update({name: text for name, text in self.environment.items() if name.startswith("AWS_")})
        install_runner(folder / "runner")
        (folder / "logs").mkdir()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(
                ec2_machines(
                    ec2_url=self._stack.ec2.url,
                    folder=self.folder / "instances",
                    kind=LocalProcessMachines,
                    image=self.folder / "runner",
                    environment=self.environment,
                    python=self._python,
                )
            )
            self.start_background(GITHUB)
            await self.retried(self.sessions)
            await self.run("refresh")
            await stack.enter_async_context(self._kept_up())
            yield

    async def _start_missing(self) -> None:
        for name in (SWEEPER, LISTENER, GITHUB):
            if self.background(name) is None:
                self.start_background(name)

    async def refresh(self, **settings: object) -> CommandResult:
        done = await super().refresh(**settings)
        if (listener := self.background(LISTENER)) is not None:
            # It reads the configuration at once, as on the local backend.
            os.kill(listener, signal.SIGHUP)
        return done

    def start_background(self, name: str) -> subprocess.Popen[bytes]:
        commands = {
            SWEEPER: ("remuda", "refresh", "--sweep-only", "--every", str(SWEEP_S)),
            LISTENER: ("remuda", "listen"),
            GITHUB: ("remuda.fake_github", "--dir", str(self.folder / GITHUB)),
        }
        if name in self._children:
            self._children[name].poll()
        # Not on the disk of the machines.
        with (self.folder.parent / f"{name}.log").open("ab") as log:
            self._children[name] = subprocess.Popen(
                [self._python, "-m", *commands[name]],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
            )
        return self._children[name]

    def background(self, name: str) -> int | None:
        child = self._children.get(name)
        return child.pid if child is not None and child.poll() is None else None

    def agent(self, instance_id: str) -> int | None:
        return self._process_with(instance_id, AGENT.encode())

    def _own_settings(self) -> Settings:
        return load({}, environ=self.environment)

    def summary(self) -> str:
        return ", ".join(self.machines())

    async def live_on_compute(self) -> list[str]:
        async with self._stack.ec2.client() as ec2:
            return [key for key, item in (await describe_instances(ec2)).items() if item["State"]["Name"] in LIVE]

    async def shut_down(self) -> list[str]:
        for name in BACKGROUND:
            if (pid := self.background(name)) is not None:
                os.kill(pid, signal.SIGTERM)
                await asyncio.to_thread(self._children[name].wait)
        return [str(pid) for pid in self.processes()]


class LocalProcessMachines(Ec2MachineRunner):
    """Boots a local machine per EC2 instance: a folder, a supervisor and an agent."""

    def __init__(self, *, python: str, **options: Any) -> None:
        super().__init__(**options)
        self._python = python
        self._compute = LocalCompute(**self._launch_options({}))

    def _launch_options(self, environment: Mapping[str, str]) -> dict[str, Any]:
        return {
            "root": self._folder,
            "pool": AWS_POOL,
            "runner_source": self._image,
            "agent_command": [self._python, "-m", AGENT],
            "clock": SystemClock(),
            "ids": SystemIds(),
            "calls": CallCounter(),
            "environment": environment,
        }

    async def _run_machine(self, instance_id: str, description: Mapping[str, Any]) -> None:
        folder = self._folder / instance_id
        try:
            await self._boot(instance_id, {tag["Key"]: tag["Value"] for tag in description.get("Tags", ())})
            while is_on(folder):  # noqa: ASYNC110 - the supervisor sends no event
                await asyncio.sleep(POLL_S)
            await self._ec2.terminate_instances(InstanceIds=[instance_id])
        finally:
            # What is left of a machine whose supervisor was killed.
            await self._compute.terminate([instance_id])

    async def _boot(self, instance_id: str, tags: Mapping[str, str]) -> None:
        given = await instance_credentials(self._sts_url, instance_id, role=self._role)
        environment = {
            **(self._environment or {}),
            "PYTHONPATH": str(ROOT),
            "AWS_ACCESS_KEY_ID": given["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": given["SecretAccessKey"],
            "AWS_SESSION_TOKEN": given["Token"],
        }
        launcher = OneMachineLauncher(instance_id, **self._launch_options(environment))
        request = launch_request(
            instance_id,
            first_life_s=float(tags[FIRST_LIFE_TAG]),
            margin_s=float(tags[MARGIN_TAG]),
            tags={**tags, POOL_TAG: AWS_POOL},
        )
        while not (self._folder / instance_id).exists():
            try:
                await asyncio.to_thread(launcher.launch, request)
            except (RemudaError, OSError):
                await asyncio.sleep(BOOT_RETRY_S)


class OneMachineLauncher(LocalLauncher):
    """Launches the machine of an EC2 instance."""

    def __init__(self, instance_id: str, *, calls: CallCounter, **options: Any) -> None:  # noqa: ARG002 - of the compute
        super().__init__(**options)
        self._instance_id = instance_id

    def _new_id(self) -> str:
        return self._instance_id


@contextmanager
def aws_backend(folder: Path, clocks: SteppedClocks) -> Iterator[AwsChaosBackend]:
    servers = folder.with_name("servers")
    servers.mkdir()
    # Its address and its token stay when the backend starts it again.
    with fake_github(folder / GITHUB) as github:
        pass
    with ministack(servers, starts_at=SystemClock().now()) as store:
        ec2 = Ec2Server()
        try:
            launch = asyncio.run(launch_options(ec2))
            stack = AwsStack(folder=servers, store=store, ec2=ec2, github=github, launch=launch)
            yield AwsChaosBackend(folder, stack, clocks)
        finally:
            ec2.stop()
