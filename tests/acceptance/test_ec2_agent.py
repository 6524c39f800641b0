"""The real user data and the real agent on a machine of their own: a namespace of this computer, with servers around it
for its metadata, DynamoDB, SQS, EC2, IAM, STS and GitHub.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from remuda.githubsim.client import SimClient, SimJob, SimStep
from support.ec2_machine.machine import NamespaceMachine, bake, why_not
from support.fake_imds import FakeImds, fake_imds
from support.moto_server import PROFILE, MotoServer
from support.servers import ministack

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

LIMIT_S = 60.0
SCOPE = "octo/repo"
POOL = "test"
JOB_USER = "remuda-job"


@dataclass
class Cloud:
    folder: Path
    ec2: MotoServer
    environment: dict[str, str]
    github_url: str
    github_token: str
    machines: dict[str, NamespaceMachine] = field(default_factory=dict)

    async def remuda(self, *arguments: str) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "remuda", *arguments, "--backend", "aws", "--pool", POOL, "--json"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                out, told = await process.communicate()
        except TimeoutError:
            process.kill()
            pytest.fail(f"{arguments}: no end; {self.consoles()}", pytrace=False)
        assert process.returncode == 0, f"{arguments}: {out.decode()} {told.decode()} {self.consoles()}"
        answer: dict[str, Any] = json.loads(out)
        return answer

    async def refresh(self) -> dict[str, Any]:
        async with self.ec2.client() as client:
            launch = await self.ec2.launch_options(client)
        flags = [word for name, value in launch.items() for word in (f"--{name}", value)]
        return await self.remuda("refresh", "--github-scope", SCOPE, *flags)

    async def provision(self, run_id: str) -> dict[str, Any]:
        return await self.remuda(
            *("provision", "--run-id", run_id, "--github-scope", SCOPE, "--provision-timeout-sec", "45")
        )

    async def records(self) -> dict[str, dict[str, Any]]:
        return {item["instance_id"]: item for item in (await self.remuda("status"))["instances"]}

    def github(self) -> SimClient:
        return SimClient(self.github_url, self.github_token)

    async def run_job(self, run_id: str, *runs: str) -> SimJob:
        async with self.github() as github:
            steps = [SimStep(run=run) for run in runs]
            job = await github.queue_job(repo=SCOPE, run_id=run_id, labels=[run_id], steps=steps)
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
        async with self.ec2.client() as client:
            while True:
                found = await client.describe_instances()
                for reservation in found["Reservations"]:
                    for instance in reservation["Instances"]:
                        name = instance["InstanceId"]
                        if name not in self.machines:
                            versions = await client.describe_launch_template_versions(
                                LaunchTemplateName=f"remuda-{POOL}", Versions=["$Default"]
                            )
                            data = versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]["UserData"]
                            imds = stack.enter_context(fake_imds())
                            tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
                            await self._play_metadata(imds, name, tags)
                            self.machines[name] = NamespaceMachine(
                                self.folder / name,
                                image=self.folder / "image",
                                user_data=base64.b64decode(data).decode(),
                                environment={"AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.url},
                            )
                await asyncio.sleep(0.1)

    async def _play_metadata(self, imds: FakeImds, instance_id: str, tags: dict[str, str]) -> None:
        imds.valid = 1_000
        imds.values |= {"instance-id": instance_id, **{f"tags/instance/{key}": value for key, value in tags.items()}}
        imds.values |= await self.ec2.credentials_of(PROFILE, instance_id)


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    github = [sys.executable, "-m", "remuda.githubsim", "--dir", str(tmp_path / "github")]
    bake(tmp_path / "image")
    ec2 = MotoServer()
    with ministack(tmp_path) as server, subprocess.Popen(github, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http")
        endpoint = json.loads((tmp_path / "github" / "endpoint.json").read_text())
        try:
            yield Cloud(
                folder=tmp_path,
                ec2=ec2,
                environment={
                    "PATH": os.environ["PATH"],
                    "HOME": str(tmp_path),
                    **server.environment(),
                    **ec2.environment(),
                    "GITHUB_API_URL": endpoint["url"],
                    "REMUDA_GITHUB_TOKEN": endpoint["token"],
                    "REMUDA_CONFIG": os.devnull,
                },
                github_url=endpoint["url"],
                github_token=endpoint["token"],
            )
        finally:
            ec2.stop()
            process.terminate()


async def until(holds: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit, what
        await asyncio.sleep(0.05)


async def test_a_machine_boots_works_is_reset_and_works_again(cloud: Cloud) -> None:
    await cloud.refresh()
    async with cloud.booting():
        first = await cloud.provision("1")
        assert first["created"] == 1
        (machine,) = cloud.machines.values()
        job = await cloud.run_job("1", "id -un >/tmp/who", "echo hello")
        assert job.conclusion == "success", machine.console
        assert machine.run("cat", "/tmp/who").stdout.strip() == JOB_USER  # noqa: S108 - the machine's own
        released = await cloud.remuda("release", "--run-id", "1")
        assert len(released["released"]) == 1, machine.console
        assert [each["state"] for each in (await cloud.records()).values()] == ["idle"]
