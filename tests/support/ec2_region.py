"""A cloud in which machines really boot: namespaces with the real user data and the real agent, servers around them."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remuda.fake_github.client import FakeGitHubClient, JobStep, JobView
from tests.support.aws_cloud import SCOPE, Cloud
from tests.support.ec2_machine.machine import NamespaceMachine
from tests.support.fake_imds import FakeImds, fake_imds
from tests.support.moto_server import PROFILE

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client

#: Generous: nothing waits for it unless something is broken.
LIMIT_S = 240.0
POOL = "test"


@dataclass
class Region:
    """A cloud in which machines really boot."""

    folder: Path
    cloud: Cloud
    machines: dict[str, NamespaceMachine] = field(default_factory=dict)
    metadata: dict[str, FakeImds] = field(default_factory=dict)
    #: False: what is launched now boots once this is True again.
    power: bool = True

    async def remuda(self, *arguments: str) -> dict[str, Any]:
        code, answer = await asyncio.to_thread(self.cloud.remuda, *arguments)
        assert code == 0, f"{arguments}: {answer} {self.consoles()}"
        found: dict[str, Any] = answer
        return found

    async def refresh(self, *more: str) -> dict[str, Any]:
        return await self.remuda("refresh", "--github-scope", SCOPE, *self.cloud.flags(), *more)

    async def provision(self, run_id: str) -> dict[str, Any]:
        return await self.remuda(
            *("provision", "--run-id", run_id, "--github-scope", SCOPE, "--provision-timeout-sec", "200")
        )

    def github(self) -> FakeGitHubClient:
        return FakeGitHubClient(self.cloud.environment["GITHUB_API_URL"], self.cloud.environment["REMUDA_GITHUB_TOKEN"])

    async def run_job(self, run_id: str, *runs: str, label: str = "", always: bool = False) -> JobView:
        async with self.github() as github:
            steps = [JobStep(run=run, always=always) for run in runs]
            job = await github.queue_job(repo=SCOPE, run_id=run_id, labels=[label or run_id], steps=steps)
            limit = time.monotonic() + LIMIT_S
            while job.status != "completed":
                assert time.monotonic() < limit, self.consoles()
                job = await github.job(job.id, wait_s=5.0, since=job.status)
            return job

    def consoles(self) -> str:
        return "\n".join(machine.console for machine in self.machines.values())

    @asynccontextmanager
    async def booting(self) -> AsyncIterator[None]:
        """As soon as EC2 has machines, they boot."""
        async with AsyncExitStack() as stack:
            booting = asyncio.create_task(self._boot_all(stack))
            try:
                yield
            finally:
                booting.cancel()
                await asyncio.gather(booting, return_exceptions=True)
                for machine in self.machines.values():
                    machine.stop()

    async def _boot_all(self, stack: AsyncExitStack) -> None:
        seen = 0
        async with self.cloud.ec2.client() as client:
            while True:
                # The count rises with the machines. To describe them takes both sides much longer.
                launches = (await asyncio.to_thread(self.cloud.ec2.asked)).get("CreateFleet", 0)
                if self.power and launches != seen:
                    seen = launches
                    await self._boot_new(client, stack)
                await asyncio.sleep(0.1)

    async def _boot_new(self, client: EC2Client, stack: AsyncExitStack) -> None:
        found = await client.describe_instances()
        for instance in (instance for reservation in found["Reservations"] for instance in reservation["Instances"]):
            name = instance["InstanceId"]
            if name in self.machines:
                continue
            versions = await client.describe_launch_template_versions(
                LaunchTemplateName=f"remuda-{POOL}", Versions=["$Default"]
            )
            data = versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]["UserData"]
            imds = stack.enter_context(fake_imds())
            tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
            await self._play_metadata(imds, name, tags)
            self.metadata[name] = imds
            self.machines[name] = NamespaceMachine(
                self.folder / name,
                image=self.folder / "image",
                user_data=base64.b64decode(data).decode(),
                environment={"AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.url},
            )

    async def _play_metadata(self, imds: FakeImds, instance_id: str, tags: dict[str, str]) -> None:
        imds.valid = 1_000
        imds.values |= {"instance-id": instance_id, **{f"tags/instance/{key}": value for key, value in tags.items()}}
        imds.values |= await self.cloud.ec2.credentials_of(PROFILE, instance_id)
