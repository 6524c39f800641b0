"""The real user data and the real agent on namespace machines, and the process that runs machines for EC2 instances."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.aws.ec2 import LINUX_AMI, Ec2Server, describe_instances
from tests.support.aws.ec2_machines import LIMIT_S, MachineStack
from tests.support.aws.servers import ROOT
from tests.support.cli import run_installed
from tests.support.namespace_machine.machine import NamespaceMachine, unsupported_reason

requires_machines = pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason())
JOB_USER = "remuda-job"
#: A job step that tries to read and write what jobs must not.
PROBE = """
set -x
id -Gn
! ls /var/lib/remuda || exit 11
! ls /opt/remuda/registrar || exit 12
! touch /opt/remuda/runner/mine || exit 13
! touch /var/lib/remuda-jobs/mine || exit 14
! touch /var/lib/remuda-jobs/hook/mine || exit 17
! sh -c 'echo exit 0 >/var/lib/remuda-jobs/hook/job-started.sh' || exit 18
cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' >seen
! grep -e REMUDA -e ACTIONS_RUNNER_INPUT -e AWS_ seen || exit 15
[ "$HOME" = ~remuda-job ] && [ "$(id -un)" = "$USER" ] || exit 16
[ "$(ulimit -Hc)" = 0 ] || exit 19
[ "$(grep -cx remuda-job /etc/cron.deny)" = 1 ] || [ ! -e /etc/debian_version ] || exit 20
"""
#: A job step that leaves files and processes behind.
LEAVE_TRACES = """
mkdir -p /tmp/deep/er && touch /tmp/deep/er/left /var/tmp/left /dev/shm/left ~/left
chmod 000 /tmp/deep
ln -s /etc /tmp/link
echo 'touch /tmp/was-here' >>/var/lib/remuda-jobs/runner/run.sh
ipcmk -M 4096
env -i setsid sh -c 'sleep 1000 & sleep 1001 &' >/dev/null 2>&1 </dev/null
"""
FILES = ("/tmp/deep", "/tmp/link", "/var/tmp/left", "/dev/shm/left", "/home/remuda-job/left")  # noqa: S108 - of the machine


def agents(machine: NamespaceMachine) -> list[str]:
    """Pids of the agents inside the machine."""
    return machine.run("pgrep", "-f", "remuda agent").stdout.split()


def running(machine: NamespaceMachine, user: str) -> list[str]:
    """The processes of a user, without zombies."""
    lines = machine.run("ps", "-u", user, "-o", "stat=,args=").stdout.splitlines()
    return [line for line in lines if not line.startswith("Z")]


def sleepers(machine: NamespaceMachine) -> int:
    return sum("sleep 100" in line for line in running(machine, JOB_USER))


@pytest.mark.namespaces
@requires_machines
async def test_machine_boots_runs_jobs_is_reset_and_terminates_itself(machine_stack: MachineStack) -> None:
    await machine_stack.refresh(REMUDA_MARGIN_SEC="0.5")
    async with machine_stack.booting():
        assert (await machine_stack.provision("1"))["created"] == 1
        ((name, machine),) = machine_stack.machines.items()
        job = await machine_stack.run_job("1", PROBE, LEAVE_TRACES)
        assert job.conclusion == "success", f"{job} {machine.console}"
        await until(lambda: sleepers(machine) == 2, "the processes that the job left run")
        assert JOB_USER in machine.run("ipcs", "-m").stdout

        # A job of another run with the same label, whose step runs even after a failure.
        foreign = await machine_stack.run_job("9", "touch /tmp/foreign", label="1", always=True)
        assert (foreign.conclusion, foreign.steps[0].conclusion) == ("cancelled", "skipped"), foreign.log
        assert "it belongs to run 9 of" in foreign.log
        assert machine.run("test", "-e", "/tmp/foreign").returncode == 1  # noqa: S108 - of the machine

        released = await machine_stack.remuda("release", "--run-id", "1")
        assert released["released"] == [name], machine.console
        assert running(machine, JOB_USER) == []
        assert JOB_USER not in machine.run("ipcs", "-m").stdout
        for path in FILES:
            assert machine.run("test", "-e", path).returncode == 1, path
        assert "was-here" not in machine.run("cat", "/var/lib/remuda-jobs/runner/run.sh").stdout
        assert machine.run("stat", "-c", "%U", "/var/lib/remuda-jobs/runner/run.sh").stdout.strip() == JOB_USER
        async with machine_stack.github() as github:
            assert await github.runners() == []

        # The next agent takes over the listener of a killed agent.
        assert (await machine_stack.provision("2"))["reused"] == 1
        terminations = machine_stack.stack.ec2.requests().get("TerminateInstances", 0)
        await machine_stack.refresh("--idle-time-sec", "2", REMUDA_MARGIN_SEC="0.5")
        # While the agent starts a process, the child has the same command line.
        await until(lambda: len(agents(machine)) == 1, "one agent")
        (agent,) = agents(machine)
        machine.run("kill", "-9", agent)
        job = await machine_stack.run_job("2", "echo hello")
        assert job.conclusion == "success", machine.console
        await until(lambda: agents(machine) not in ([], [agent]), "the next agent")
        assert (await machine_stack.remuda("release", "--run-id", "2"))["released"] == [name], machine.console

        # An unused machine terminates its instance itself, with the permissions of its role.
        await until(
            lambda: machine_stack.stack.ec2.requests().get("TerminateInstances", 0) > terminations, machine.console
        )


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "this is no instance of Remuda"),
        ({"REMUDA_BACKEND": "aws"}, "there is no user 'remuda-job' to run jobs as"),
    ],
)
def test_agent_that_cannot_start_reports_the_reason_in_one_line(environment: dict[str, str], message: str) -> None:
    result = run_installed(["agent"], environment=environment)
    assert (result.code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client


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


@pytest.mark.namespaces
@requires_machines
async def test_machines_follow_their_instances_and_leave_nothing(ec2: tuple[Ec2Server, EC2Client], tmp_path: Path):
    server, client = ec2
    folder = tmp_path / "machines"
    # Unique on this computer, where other tests run at the same time.
    kept, terminated = f"4711.{os.getpid()}", f"4712.{os.getpid()}"

    async def is_off() -> bool:
        instances = await describe_instances(client)
        return bool(instances[powered_off_id]["State"]["Name"] == "terminated")

    process = start_runner(server, folder)
    try:
        powered_off_id = await launch(client, "systemctl poweroff --force")
        terminated_id = await launch(client, f"sleep {terminated}")
        await launch(client, f"sleep {kept}")
        async with asyncio.timeout(LIMIT_S):
            while not await is_off():  # noqa: ASYNC110 - the server sends no event
                await asyncio.sleep(0.1)
        await until(lambda: bool(processes_with(kept) and processes_with(terminated)), "the others run")
        await client.terminate_instances(InstanceIds=[terminated_id])
        await until(lambda: not processes_with(terminated), "the machine of a terminated instance is switched off")
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
