"""Machines for the instances of an EC2 test server.

The test server manages instances, but runs nothing. `Ec2MachineRunner` follows it and replaces the hardware of EC2: it
boots a machine with the user data of the instance and its own metadata service, switches it off when EC2 terminates
the instance, and terminates the instance when the machine powers itself off.

    python -m tests.support.aws.ec2_machines --ec2 URL --folder FOLDER

runs until SIGINT or SIGTERM and prints one line per event.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from remuda.fake_github.client import FakeGitHubClient, JobStep, JobView
from tests.support.aws.ec2 import (
    AGENT_ROLE,
    PROFILE,
    describe_instances,
    instance_changes,
    instance_credentials,
    slow_server_config,
)
from tests.support.aws.servers import REGION, aws_client
from tests.support.aws.stack import SCOPE, AwsStack
from tests.support.fake_s3 import FakeS3, fake_s3
from tests.support.namespace_machine.machine import NamespaceMachine, bake_image
from tests.support.namespace_machine.network import MetadataNetwork
from tests.support.namespace_machine.requirements import unsupported_reason
from tests.support.user_data import CREDENTIALS, FakeImds, decode_user_data, fake_imds

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client

#: Seconds to wait for a job. Generous: only a broken machine reaches it.
LIMIT_S = 240.0
POLL_S = 0.25
LIVE = frozenset({"pending", "running"})
#: Valid metadata tokens per machine: bootstrap, agent and botocore each have their own.
TOKENS = 1_000
POWERED_OFF = "powered off"
#: The line in which the agent logs why it ends its machine.
_END = re.compile(r"^\S+ end instance_id=\S+ (?:\w+=\S* )*(.+)$", re.MULTILINE)


class SimulatedMachine(Protocol):
    """A machine as EC2 sees it."""

    @property
    def is_on(self) -> bool: ...

    @property
    def console(self) -> str: ...

    def stop(self) -> None: ...


@dataclass(kw_only=True)
class _Booted:
    task: asyncio.Task[None]
    imds: FakeImds | None = None
    machine: SimulatedMachine | None = None
    powered_off: bool = False


class Ec2MachineRunner:
    def __init__(
        self,
        *,
        ec2: EC2Client,
        ec2_url: str,
        folder: Path,
        image: Path,
        log: Callable[[str], None] = lambda _line: None,
        terminate_powered_off: bool = True,
        environment: Mapping[str, str] | None = None,
        sts_url: str = "",
        role: str = AGENT_ROLE,
    ) -> None:
        """`terminate_powered_off` is false in tests that check whether agents terminate their instances themselves.

        `environment` is set for the user data and all services of machines in namespaces. `sts_url` is the server of
        `role`, by default that of EC2.
        """
        self._ec2_url = ec2_url
        self._sts_url = sts_url or ec2_url
        self._role = role
        self._environment = environment
        self._ec2 = ec2
        self._folder = folder
        self._image = image
        self._log = log
        self._terminate_powered_off = terminate_powered_off
        self._booted: dict[str, _Booted] = {}
        #: Whether new instances do not boot yet.
        self.paused = False

    async def run(self) -> None:
        """Run until cancelled; then switch all machines off."""
        try:
            async with aclosing(instance_changes(self._ec2_url)) as changes:
                async for _ in changes:
                    await self._update()
        finally:
            tasks = [booted.task for booted in self._booted.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def machines(self) -> dict[str, NamespaceMachine]:
        """The machines in namespaces, by instance id."""
        return {key: item for key, item in self.all_machines.items() if isinstance(item, NamespaceMachine)}

    @property
    def all_machines(self) -> dict[str, SimulatedMachine]:
        """By instance id."""
        return {key: item.machine for key, item in self._booted.items() if item.machine is not None}

    @property
    def metadata(self) -> dict[str, FakeImds]:
        """The metadata services by instance id."""
        return {key: item.imds for key, item in self._booted.items() if item.imds is not None}

    def console(self, instance_id: str) -> str:
        machine = self.all_machines.get(instance_id)
        return machine.console if machine is not None else ""

    def consoles(self) -> str:
        return "\n".join(machine.console for machine in self.all_machines.values())

    def end_reason(self, instance_id: str) -> str:
        """The reason that the agent logged when it ended its machine, or `POWERED_OFF` if the dead man timer did."""
        if found := _END.findall(self.console(instance_id)):
            return str(found[-1])
        booted = self._booted.get(instance_id)
        return POWERED_OFF if booted is not None and booted.powered_off else ""

    async def _update(self) -> None:
        found = await describe_instances(self._ec2)
        live = {key: item for key, item in found.items() if item["State"]["Name"] in LIVE}
        if not self.paused:
            for instance_id in live.keys() - self._booted.keys():
                task = asyncio.create_task(self._run_machine(instance_id, live[instance_id]))
                self._booted[instance_id] = _Booted(task=task)
        for instance_id, booted in self._booted.items():
            if instance_id not in live:
                # The task switches its machine off when cancelled.
                booted.task.cancel()

    async def _run_machine(self, instance_id: str, description: Mapping[str, Any]) -> None:
        with self._metadata_service() as imds:
            imds.valid = TOKENS
            imds.describe(
                instance_id,
                tags={tag["Key"]: tag["Value"] for tag in description.get("Tags", ())},
                zone=description["Placement"]["AvailabilityZone"],
                life_cycle=description.get("InstanceLifecycle", "on-demand"),
            )
            credentials = await instance_credentials(self._sts_url, instance_id, role=self._role)
            imds.set_credentials(self._role.rpartition("/")[2], credentials)
            machine = self._start_machine(self._folder / instance_id, await self._user_data(instance_id), imds)
            booted = self._booted[instance_id]
            booted.imds, booted.machine = imds, machine
            self._log(f"{instance_id} boots ({description['InstanceType']})")
            try:
                while machine.is_on:  # noqa: ASYNC110 - the process in the namespace sends no event
                    await asyncio.sleep(POLL_S)
                booted.powered_off = True
                if self._terminate_powered_off:
                    # The launch template says that a machine that powers off is terminated.
                    await self._ec2.terminate_instances(InstanceIds=[instance_id])
            finally:
                machine.stop()
                self._log(f"{instance_id} ended: {self.end_reason(instance_id) or 'terminated by EC2'}")

    @contextmanager
    def _metadata_service(self) -> Iterator[FakeImds]:
        with closing(MetadataNetwork()) as network, fake_imds(network.sockets) as imds:
            imds.network = network.path
            yield imds

    def _start_machine(self, folder: Path, user_data: str, imds: FakeImds) -> SimulatedMachine:
        return NamespaceMachine(
            folder,
            image=self._image,
            user_data=user_data,
            metadata_network=imds.network,
            environment=self._environment,
        )

    async def _user_data(self, instance_id: str) -> str:
        answer = await self._ec2.describe_instance_attribute(InstanceId=instance_id, Attribute="userData")
        return decode_user_data(answer["UserData"]["Value"])


@asynccontextmanager
async def ec2_machines(
    *, ec2_url: str, folder: Path, kind: type[Ec2MachineRunner] = Ec2MachineRunner, **options: Any
) -> AsyncIterator[Ec2MachineRunner]:
    """Run machines in the background. `options` are those of `kind`."""
    async with aws_client("ec2", ec2_url, config=slow_server_config().for_botocore()) as ec2:
        runner = kind(ec2=ec2, ec2_url=ec2_url, folder=folder, **options)
        running = asyncio.create_task(runner.run())
        try:
            yield runner
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


@asynccontextmanager
async def ec2_machines_in_new_folder(
    *, ec2_url: str, folder: Path, log: Callable[[str], None]
) -> AsyncIterator[Ec2MachineRunner]:
    """Run machines from a standard image in a folder that is created first and removed afterwards."""
    folder.mkdir(parents=True)  # noqa: ASYNC240 - it takes no time
    try:
        bake_image(folder / "image")
        async with ec2_machines(ec2_url=ec2_url, folder=folder, image=folder / "image", log=log) as runner:
            yield runner
    finally:
        shutil.rmtree(folder)


# A stack with machines ------------------------------------------------------------------------------------------------


class MachineStack:
    """An AWS stack whose instances boot, and the commands and jobs of one pool on it.

    The machines start from the image in `folder/image`.
    """

    def __init__(self, stack: AwsStack) -> None:
        self.stack = stack
        self._runner: Ec2MachineRunner | None = None

    @property
    def folder(self) -> Path:
        return self.stack.folder

    @property
    def runner(self) -> Ec2MachineRunner:
        assert self._runner is not None, "use it within booting()"
        return self._runner

    @property
    def machines(self) -> dict[str, NamespaceMachine]:
        return self.runner.machines

    @asynccontextmanager
    async def booting(self, *, sts_url: str = "", role: str = AGENT_ROLE, **environment: str) -> AsyncIterator[None]:
        async with ec2_machines(
            ec2_url=self.stack.ec2.url,
            folder=self.folder,
            image=self.folder / "image",
            terminate_powered_off=False,
            environment=environment,
            sts_url=sts_url,
            role=role,
        ) as self._runner:
            yield

    def consoles(self) -> str:
        return self._runner.consoles() if self._runner else ""

    async def remuda(self, *arguments: str, **variables: str) -> dict[str, Any]:
        code, document = await asyncio.to_thread(self.stack.remuda, *arguments, **variables)
        assert code == 0, f"{arguments}: {document} {self.consoles()}"
        found: dict[str, Any] = document
        return found

    async def refresh(self, *more: str, **variables: str) -> dict[str, Any]:
        return await self.remuda("refresh", "--github-scope", SCOPE, *self.stack.flags(), *more, **variables)

    async def provision(self, run_id: str, *more: str) -> dict[str, Any]:
        return await self.remuda(
            *("provision", "--run-id", run_id, "--github-scope", SCOPE, "--provision-timeout-sec", "200", *more)
        )

    def github(self) -> FakeGitHubClient:
        return self.stack.github_client()

    async def run_job(self, run_id: str, *runs: str, label: str = "", always: bool = False) -> JobView:
        async with self.github() as github:
            steps = [JobStep(run=run, condition="always()" if always else "") for run in runs]
            job = await github.queue_job(repo=SCOPE, run_id=run_id, labels=[label or run_id], steps=steps)
            deadline = time.monotonic() + LIMIT_S
            while job.status != "completed":
                assert time.monotonic() < deadline, self.consoles()
                job = await github.job(job.id, wait_s=5.0, since=job.status)
            return job


@contextmanager
def machine_bucket(stack: MachineStack, role: str = PROFILE) -> Iterator[FakeS3]:
    """S3 for the machines. It accepts the credentials that they have of this role."""
    host = str(urlsplit(stack.stack.ec2.url).hostname)

    def find_credentials(key: str) -> Mapping[str, str] | None:
        found = [json.loads(imds.values[CREDENTIALS + role]) for imds in stack.runner.metadata.values()]
        return next((item for item in found if item["AccessKeyId"] == key), None)

    with socket.create_server((host, 0)) as listening, fake_s3(REGION, find_credentials, listening) as server:
        server.url = f"http://{host}:{listening.getsockname()[1]}"
        yield server


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that sends no event."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


# The process ----------------------------------------------------------------------------------------------------------


async def _main(ec2_url: str, folder: Path) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)

    def log(line: str) -> None:
        print(line, flush=True)  # noqa: T201 - the log of this process

    async with ec2_machines_in_new_folder(ec2_url=ec2_url, folder=folder, log=log):
        await ended.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.aws.ec2_machines", description=__doc__)
    parser.add_argument("--ec2", required=True, help="URL of the EC2 server")
    parser.add_argument("--folder", type=Path, required=True, help="folder to create, and to remove at the end")
    given = parser.parse_args()
    if reason := unsupported_reason():
        sys.stderr.write(f"{reason}\n")
        return 2
    asyncio.run(_main(given.ec2, given.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
