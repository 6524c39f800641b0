"""An AWS stack whose instances are virtual machines."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.domain.instance import Instance
from remuda.domain.signals import Report
from remuda.fake_github.client import FakeGitHubClient, JobStep, JobView
from tests.support.aws.ec2_machines import Ec2MachineRunner, MachineStack, SimulatedMachine, ec2_machines
from tests.support.aws.servers import LOOPBACK, service_client
from tests.support.aws.stack import POOL, SCOPE, aws_stack
from tests.support.cli import run_cli
from tests.support.user_data import FakeImds, fake_imds
from tests.support.virtual_machine.image import Image, build_image
from tests.support.virtual_machine.machine import HOST, VirtualMachine
from tests.support.virtual_machine.software import write_software_disk

#: The name of the disk with the software, in the folder of the stack.
SOFTWARE = "software.tar"
#: Seconds for a machine to boot and register. Generous: the computer may be busy and emulate the machine.
PROVISION_S = 900
#: Seconds that a command may take.
COMMAND_S = PROVISION_S + 300.0
#: Seconds that a job may take.
JOB_S = 900.0
POLL_S = 0.5
#: Exists on a machine while it has a sandbox. A reset removes it.
PREPARED = "/var/lib/remuda/sandboxes/current.json"


class VirtualMachineRunner(Ec2MachineRunner):
    """Boots a virtual machine for each EC2 instance."""

    @contextmanager
    def _metadata_service(self) -> Iterator[FakeImds]:
        with fake_imds() as imds:
            yield imds

    def _start_machine(self, folder: Path, user_data: str, imds: FakeImds) -> SimulatedMachine:
        # The servers of the tests have another address inside the machine.
        imds.values["/latest/user-data"] = user_data.replace(LOOPBACK, HOST)
        software = self._folder / SOFTWARE
        return VirtualMachine(folder, image=Image(folder=self._image), software=software, metadata_url=imds.url)


class VirtualMachineStack(MachineStack):
    @property
    def virtual_machines(self) -> dict[str, VirtualMachine]:
        """By instance id."""
        machines = self.runner.all_machines
        return {key: item for key, item in machines.items() if isinstance(item, VirtualMachine)}

    @property
    def machine(self) -> VirtualMachine:
        """The only machine, or the newest."""
        return list(self.virtual_machines.values())[-1]

    @asynccontextmanager
    async def booting(self, **environment: str) -> AsyncIterator[None]:
        assert not environment, "virtual machines have their own environment"
        async with ec2_machines(
            kind=VirtualMachineRunner,
            ec2_url=self.stack.ec2.url,
            folder=self.folder,
            image=build_image().folder,
            terminate_powered_off=False,
        ) as self._runner:
            yield

    async def refresh(self, *more: str, **variables: str) -> dict[str, Any]:
        """Apply the configuration, with the URL of the fake GitHub as machines see it."""
        result = await super().refresh(*more, **variables)
        async with self._store() as store:
            config = await store.get_config()
            assert config is not None
            url = config.github_url.replace(LOOPBACK, HOST)
            await store.put_config(dataclasses.replace(config, github_url=url, revision=config.revision + 1))
        return result

    async def remuda(self, *arguments: str, **variables: str) -> dict[str, Any]:
        result = await asyncio.to_thread(
            run_cli,
            [*arguments, "--pool", POOL, "--json"],
            environment=self.stack.environment(**variables),
            timeout_s=COMMAND_S,
        )
        assert result.code == 0, f"{arguments}: {result} {self.consoles()}"
        document: dict[str, Any] = result.document
        return document

    async def provision(self, run_id: str, *more: str) -> dict[str, Any]:
        for machine in self.virtual_machines.values():
            if machine.is_on:
                await asyncio.to_thread(_wait_for_sandbox, machine)
        words = ("provision", "--run-id", run_id, "--github-scope", SCOPE, "--provision-timeout-sec", str(PROVISION_S))
        return await self.remuda(*words, *more)

    async def release(self, run_id: str) -> dict[str, Any]:
        return await self.remuda("release", "--run-id", run_id)

    async def start_job(self, run_id: str, *runs: str) -> JobView:
        """Queue a job and wait until a runner runs it."""
        async with self.github() as github:
            job = await github.queue_job(
                repo=SCOPE, run_id=run_id, labels=[run_id], steps=[JobStep(run=run) for run in runs]
            )
            return await self._wait_for_job(github, job, lambda status: status != "queued")

    async def finish_job(self, job: JobView) -> JobView:
        async with self.github() as github:
            return await self._wait_for_job(github, job, lambda status: status == "completed")

    async def run_job(self, run_id: str, *runs: str, **_options: Any) -> JobView:
        return await self.finish_job(await self.start_job(run_id, *runs))

    async def _wait_for_job(self, github: FakeGitHubClient, job: JobView, condition: Callable[[str], bool]) -> JobView:
        deadline = time.monotonic() + JOB_S
        while not condition(job.status):
            assert time.monotonic() < deadline, f"{job} {self.consoles()}"
            job = await github.job(job.id, wait_s=5.0, since=job.status)
        return job

    async def record(self, instance_id: str) -> Instance:
        async with self._store() as store:
            found = await store.get(instance_id)
        assert found is not None
        return found

    async def report(self, instance_id: str) -> Report | None:
        async with self._store() as store:
            return await store.get_report(instance_id)

    @asynccontextmanager
    async def _store(self) -> AsyncIterator[DynamoInstanceStore]:
        async with service_client("dynamodb", self.stack.store.url) as client:
            store = self.stack.instance_store(client)
            try:
                yield store
            finally:
                await store.close()

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        deadline = time.monotonic() + JOB_S
        while not await condition():
            assert time.monotonic() < deadline, f"{what}: {self.consoles()}"
            await asyncio.sleep(POLL_S)


def _wait_for_sandbox(machine: VirtualMachine) -> None:
    """Wait until a machine can serve a claim at once. An emulated one may need longer than a claim waits."""
    done = machine.shell(f"until [ -e {PREPARED} ]; do sleep 1; done", timeout_s=JOB_S)
    assert done.returncode == 0, machine.console


@contextmanager
def virtual_machine_stack(folder: Path) -> Iterator[VirtualMachineStack]:
    """Start all servers. Must be called outside an event loop."""
    build_image()
    with aws_stack(folder) as stack:
        write_software_disk(folder / SOFTWARE)
        yield VirtualMachineStack(stack)
