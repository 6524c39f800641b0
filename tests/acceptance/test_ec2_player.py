"""The player of EC2 instances, as a process: machines boot, power off or lose their power, and nothing is left."""

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

from tests.support.ec2_machine.machine import why_not
from tests.support.ec2_machines import instances
from tests.support.moto_server import AMI, MotoServer

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

LIMIT_S = 120.0
PAUSE_S = 0.1
TESTS = Path(__file__).parents[1]


@pytest.fixture
async def ec2() -> AsyncIterator[tuple[MotoServer, EC2Client]]:
    server = MotoServer()
    try:
        async with server.client() as client:
            yield server, client
    finally:
        server.stop()


def start_player(server: MotoServer, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.ec2_machines", "--ec2", server.url, "--folder", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS)


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


async def launch(client: EC2Client, user_data: str) -> str:
    answer = await client.run_instances(
        ImageId=AMI, InstanceType="t3.micro", MinCount=1, MaxCount=1, UserData=f"#!/bin/bash\n{user_data}\n"
    )
    return answer["Instances"][0]["InstanceId"]


def processes(mark: str) -> list[int]:
    """Whose command line has this word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words:
            found.append(int(path.parent.name))
    return found


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    limit = time.monotonic() + LIMIT_S
    while not await holds():
        assert time.monotonic() < limit, what
        await asyncio.sleep(PAUSE_S)


async def test_machines_live_and_end_as_ec2_says(ec2: tuple[MotoServer, EC2Client], tmp_path: Path):
    server, client = ec2
    folder = tmp_path / "machines"
    # Words that nothing else on this computer has in its command line, other tests' processes included.
    stays, goes = f"4711.{os.getpid()}", f"4712.{os.getpid()}"

    async def state(instance_id: str) -> str:
        return str((await instances(client))[instance_id]["State"]["Name"])

    async def is_off() -> bool:
        return await state(short_lived) == "terminated"

    async def are_on() -> bool:
        return bool(processes(stays) and processes(goes))

    async def one_is_gone() -> bool:
        return not processes(goes)

    process = start_player(server, folder)
    try:
        short_lived = await launch(client, "systemctl poweroff --force")
        ended = await launch(client, f"sleep {goes}")
        await launch(client, f"sleep {stays}")
        await until(is_off, "a machine that powers itself off is terminated")
        await until(are_on, "the others run their user data")
        await client.terminate_instances(InstanceIds=[ended])
        await until(one_is_gone, "a machine that EC2 ends loses its power")
        assert processes(stays)
    finally:
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert f"{short_lived} is over: powered off" in told
    assert f"{ended} is over: ended by EC2" in told
    assert not processes(stays)
    assert not folder.exists()
    assert str(folder) not in mounts()
