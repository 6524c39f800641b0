"""The process that runs machines for EC2 instances: they boot, power off or are switched off, and leave nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.aws.ec2 import LINUX_AMI, Ec2Server, describe_instances
from tests.support.namespace_machine.machine import unsupported_reason

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client

pytestmark = pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason())

LIMIT_S = 120.0
POLL_S = 0.1
ROOT = Path(__file__).parents[2]


@pytest.fixture
async def ec2() -> AsyncIterator[tuple[Ec2Server, EC2Client]]:
    server = Ec2Server()
    try:
        async with server.client() as client:
            yield server, client
    finally:
        server.stop()


def start_runner(server: Ec2Server, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.aws.ec2_machines", "--ec2", server.url, "--folder", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


async def launch(client: EC2Client, user_data: str) -> str:
    answer = await client.run_instances(
        ImageId=LINUX_AMI, InstanceType="t3.micro", MinCount=1, MaxCount=1, UserData=f"#!/bin/bash\n{user_data}\n"
    )
    return answer["Instances"][0]["InstanceId"]


def processes_with(word: str) -> list[int]:
    """Pids of the processes with this word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if word.encode() in words:
            found.append(int(path.parent.name))
    return found


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(POLL_S)


async def test_machines_follow_their_instances_and_leave_nothing(ec2: tuple[Ec2Server, EC2Client], tmp_path: Path):
    server, client = ec2
    folder = tmp_path / "machines"
    # Unique on this computer, where other tests run at the same time.
    kept, terminated = f"4711.{os.getpid()}", f"4712.{os.getpid()}"

    async def is_off() -> bool:
        instances = await describe_instances(client)
        return bool(instances[powered_off_id]["State"]["Name"] == "terminated")

    async def are_on() -> bool:
        return bool(processes_with(kept) and processes_with(terminated))

    async def is_switched_off() -> bool:
        return not processes_with(terminated)

    process = start_runner(server, folder)
    try:
        powered_off_id = await launch(client, "systemctl poweroff --force")
        terminated_id = await launch(client, f"sleep {terminated}")
        await launch(client, f"sleep {kept}")
        await until(is_off, "the instance of a machine that powers itself off is terminated")
        await until(are_on, "the others run their user data")
        await client.terminate_instances(InstanceIds=[terminated_id])
        await until(is_switched_off, "the machine of a terminated instance is switched off")
        assert processes_with(kept)
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert f"{powered_off_id} ended: powered off" in output
    assert f"{terminated_id} ended: terminated by EC2" in output
    assert not processes_with(kept)
    assert not folder.exists()
    assert str(folder) not in mounts()
