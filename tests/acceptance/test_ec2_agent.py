"""The real user data and the real agent on namespace machines, and the process that runs machines for EC2 instances."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from remuda.fake_github.client import JobView
from tests.support.aws.ec2 import LINUX_AMI, Ec2Server, describe_instances
from tests.support.aws.ec2_machines import LIMIT_S, MachineStack, machine_bucket, until
from tests.support.aws.servers import ROOT
from tests.support.bundle_builds import shared_bundles
from tests.support.cli import run_installed
from tests.support.fake_s3 import FakeS3
from tests.support.namespace_machine.machine import NamespaceMachine
from tests.support.namespace_machine.requirements import unsupported_reason
from tests.support.user_data import fake_imds

requires_machines = pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason())
#: A job step that uses what jobs have, and tries to read, as root, what they must not.
PROBE = """
set -x
[ "$(id -un)" = runner ] && [ "$HOME" = /home/runner ] && [ "$PWD" = /home/runner/work/repo/repo ] || exit 11
[ "$(sudo id -u)" = 0 ] && sudo systemctl is-active dbus.service || exit 12
[ "$(ls /opt/remuda)" = "hook
runner" ] || exit 13
[ -z "$(sudo find /var/lib/remuda /root /etc/ssh/ssh_host_* -type f 2>/dev/null)" ] || exit 14
sudo sh -c 'cat /proc/[0-9]*/environ' 2>/dev/null | tr '\\0' '\\n' >seen
! grep -e REMUDA -e ACTIONS_RUNNER_INPUT -e AWS_ seen || exit 15
! pgrep -f 'remuda agent' || exit 16
! curl -sS --max-time 1 http://169.254.169.254/latest/api/token || exit 17
"""
#: A job step that leaves files and processes behind, as root.
LEAVE_TRACES = """
sudo touch /tmp/left /var/tmp/left /dev/shm/left ~/left /etc/left /usr/bin/left /run/left
echo 'touch /tmp/was-here' | sudo tee -a /opt/remuda/runner/run.sh
ipcmk -M 4096
env -i sudo setsid sh -c 'sleep 1000 & sleep 1001 &' >/dev/null 2>&1 </dev/null
"""
#: A job step that prints the traces that it finds.
FIND_TRACES = """
set +e
ls -d /tmp/left /var/tmp/left /dev/shm/left ~/left /etc/left /usr/bin/left /run/left 2>/dev/null
grep was-here /opt/remuda/runner/run.sh
ipcs -m | grep -w 4096
pgrep -af '^sleep 100'
true
"""
TRACES = 7 + 1 + 1 + 2


def agents(machine: NamespaceMachine) -> list[str]:
    """Pids of the agents inside the machine."""
    return machine.run("pgrep", "-f", "remuda agent").stdout.split()


def sleepers(machine: NamespaceMachine) -> list[str]:
    return machine.run("pgrep", "-f", "^sleep 100").stdout.split()


def found(job: JobView) -> list[str]:
    """The lines that a job with the step `FIND_TRACES` printed."""
    assert job.conclusion == "success", job
    lines = [line for line in job.log.splitlines() if line and not line.startswith(("#", "A job hook"))]
    return [line for line in lines if "left" in line or "was-here" in line or "4096" in line or "sleep" in line]


@pytest.fixture
def bucket(machine_stack: MachineStack) -> Iterator[FakeS3]:
    with machine_bucket(machine_stack) as made:
        yield made


def upload_agent(bucket: FakeS3, bundles: Path) -> dict[str, str]:
    """Upload the agent's bundle and return the settings that install it."""
    (bundle,) = bundles.glob("remuda-agent-*.tar.gz")
    bucket.objects[f"/bucket/agent/{bundle.name}"] = bundle.read_bytes()
    return {
        "REMUDA_AGENT_URL": f"s3://bucket/agent/{bundle.name}",
        "REMUDA_AGENT_SHA256": hashlib.sha256(bundle.read_bytes()).hexdigest(),
    }


# It may build the bundle, which takes minutes on a busy machine.
@pytest.mark.timeout(900)
@pytest.mark.namespaces
@requires_machines
async def test_machine_boots_runs_jobs_is_reset_and_terminates_itself(
    machine_stack: MachineStack, bucket: FakeS3, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # A stock image, without an agent.
    (machine_stack.folder / "image" / "bin" / "remuda").unlink()
    settings = {"REMUDA_MARGIN_SEC": "0.5", **upload_agent(bucket, shared_bundles(tmp_path_factory))}
    await machine_stack.refresh(**settings)
    async with machine_stack.booting(AWS_ENDPOINT_URL_S3=bucket.url):
        assert (await machine_stack.provision("1"))["created"] == 1
        ((name, machine),) = machine_stack.machines.items()
        assert agents(machine), "the agent of the bundle"
        job = await machine_stack.run_job("1", PROBE, LEAVE_TRACES)
        assert job.conclusion == "success", f"{job} {machine.console}"
        assert len(sleepers(machine)) == 2
        # Jobs of the same run share the sandbox.
        assert len(found(await machine_stack.run_job("1", FIND_TRACES))) == TRACES

        # A job of another run with the same label, whose step runs even after a failure.
        foreign = await machine_stack.run_job("9", "touch /tmp/foreign", label="1", always=True)
        assert (foreign.conclusion, foreign.steps[0].conclusion) == ("cancelled", "skipped"), foreign.log
        assert "it belongs to run 9 of" in foreign.log
        assert "foreign" not in (await machine_stack.run_job("1", "ls /tmp")).log

        released = await machine_stack.remuda("release", "--run-id", "1")
        assert released["released"] == [name], machine.console
        assert sleepers(machine) == []
        async with machine_stack.github() as github:
            assert await github.runners() == []

        # A runner that is registered just in time works in the same folder.
        assert (await machine_stack.provision("3", "--ephemeral"))["created"] == 1
        job = await machine_stack.run_job("3", '[ "$(pwd)" = /home/runner/work/repo/repo ]')
        assert job.conclusion == "success", f"{job} {machine.console}"
        await machine_stack.remuda("release", "--run-id", "3")

        # The next agent takes over the listener of a killed agent.
        assert (await machine_stack.provision("2"))["reused"] == 1
        assert found(await machine_stack.run_job("2", FIND_TRACES)) == []
        terminations = machine_stack.stack.ec2.requests().get("TerminateInstances", 0)
        await machine_stack.refresh("--idle-time-sec", "2", **settings)
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


def test_agent_that_cannot_start_reports_the_reason_in_one_line() -> None:
    with fake_imds() as imds:
        other_pool = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.url, "REMUDA_BACKEND": "aws", "REMUDA_POOL": "other"}
        cases = {
            "this is no instance of Remuda": {},
            "REMUDA_POOL is 'other', but the tag of the instance is 'pool'": other_pool,
        }
        for message, environment in cases.items():
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
