"""An AWS stack whose instances are virtual machines."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from tests.support.aws.ec2_machines import Ec2MachineRunner, Machine, MachineStack, ec2_machines
from tests.support.aws.servers import LOOPBACK, aws_client
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


class VirtualMachineRunner(Ec2MachineRunner):
    """Boots a virtual machine for each EC2 instance."""

    @contextmanager
    def _metadata_service(self) -> Iterator[FakeImds]:
        with fake_imds() as imds:
            yield imds

    def _start_machine(self, folder: Path, user_data: str, imds: FakeImds) -> Machine:
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
    async def booting(self) -> AsyncIterator[None]:
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
        async with aws_client("dynamodb", self.stack.store.url) as client:
            store = self.stack.instance_store(client)
            config = await store.get_config()
            assert config is not None
            url = config.github_url.replace(LOOPBACK, HOST)
            await store.put_config(dataclasses.replace(config, github_url=url, revision=config.revision + 1))
            await store.close()
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

    async def provision(self, run_id: str) -> dict[str, Any]:
        words = ("provision", "--run-id", run_id, "--github-scope", SCOPE, "--provision-timeout-sec", str(PROVISION_S))
        return await self.remuda(*words)


@contextmanager
def virtual_machine_stack(folder: Path) -> Iterator[VirtualMachineStack]:
    """Start all servers. Must be called outside an event loop."""
    build_image()
    with aws_stack(folder) as stack:
        write_software_disk(folder / SOFTWARE)
        yield VirtualMachineStack(stack)
