"""The real user data and the real agent on a machine of their own: a namespace of this computer, with servers around it
for its metadata, DynamoDB, SQS, EC2, IAM, STS and GitHub.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.aws_cloud import aws_cloud
from tests.support.ec2_machine.machine import NamespaceMachine, bake, why_not
from tests.support.ec2_region import LIMIT_S, Region

JOB_USER = "remuda-job"


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    bake(tmp_path / "image")
    with aws_cloud(tmp_path) as cloud:
        yield Region(folder=tmp_path, cloud=cloud)


#: What a job could look into, and what it must not find there.
LOOKS = """
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
#: All that a job can do to stay.
STAYS = """
mkdir -p /tmp/deep/er && touch /tmp/deep/er/left /var/tmp/left /dev/shm/left ~/left
chmod 000 /tmp/deep
ln -s /etc /tmp/link
echo 'touch /tmp/was-here' >>/var/lib/remuda-jobs/runner/run.sh
ipcmk -M 4096
env -i setsid sh -c 'sleep 1000 & sleep 1001 &' >/dev/null 2>&1 </dev/null
"""
FILES = ("/tmp/deep", "/tmp/link", "/var/tmp/left", "/dev/shm/left", "/home/remuda-job/left")  # noqa: S108 - its own


def agents(machine: NamespaceMachine) -> list[str]:
    """Their pids, as the machine counts them."""
    return machine.run("pgrep", "-f", "remuda agent").stdout.split()


def running(machine: NamespaceMachine, user: str) -> list[str]:
    """What a user runs. What has ended, and only waits for its parent to look, does not."""
    lines = machine.run("ps", "-u", user, "-o", "stat=,args=").stdout.splitlines()
    return [line for line in lines if not line.startswith("Z")]


def sleepers(machine: NamespaceMachine) -> int:
    return sum("sleep 100" in line for line in running(machine, JOB_USER))


@pytest.mark.skipif(bool(why_not()), reason=why_not())
async def test_a_machine_boots_works_is_reset_works_again_and_ends(region: Region) -> None:
    await region.refresh(REMUDA_MARGIN_SEC="0.5")
    async with region.booting():
        assert (await region.provision("1"))["created"] == 1
        ((name, machine),) = region.machines.items()
        job = await region.run_job("1", LOOKS, STAYS)
        assert job.conclusion == "success", f"{job} {machine.console}"
        await until(lambda: sleepers(machine) == 2, "what the job leaves behind runs")
        assert JOB_USER in machine.run("ipcs", "-m").stdout

        # A job of another run that has guessed the label, and would not mind a failure.
        foreign = await region.run_job("9", "touch /tmp/foreign", label="1", always=True)
        assert (foreign.conclusion, foreign.steps[0].conclusion) == ("cancelled", "skipped"), foreign.log
        assert "it belongs to run 9 of" in foreign.log
        assert machine.run("test", "-e", "/tmp/foreign").returncode == 1  # noqa: S108 - the machine's own

        released = await region.remuda("release", "--run-id", "1")
        assert released["released"] == [name], machine.console
        assert running(machine, JOB_USER) == []
        assert JOB_USER not in machine.run("ipcs", "-m").stdout
        for path in FILES:
            assert machine.run("test", "-e", path).returncode == 1, path
        assert "was-here" not in machine.run("cat", "/var/lib/remuda-jobs/runner/run.sh").stdout
        assert machine.run("stat", "-c", "%U", "/var/lib/remuda-jobs/runner/run.sh").stdout.strip() == JOB_USER
        async with region.github() as github:
            assert await github.runners() == []

        # An agent that is killed leaves the listener alone, and the next one finds it.
        assert (await region.provision("2"))["reused"] == 1
        asked = region.cloud.ec2.asked().get("TerminateInstances", 0)
        await region.refresh("--idle-time-sec", "2", REMUDA_MARGIN_SEC="0.5")
        # While it starts something there are two that look like it.
        await until(lambda: len(agents(machine)) == 1, "one agent")
        (agent,) = agents(machine)
        machine.run("kill", "-9", agent)
        job = await region.run_job("2", "echo hello")
        assert job.conclusion == "success", machine.console
        await until(lambda: agents(machine) not in ([], [agent]), "the next agent")
        assert (await region.remuda("release", "--run-id", "2"))["released"] == [name], machine.console

        # Nobody wants it any more: it ends itself, with its own rights.
        await until(lambda: region.cloud.ec2.asked().get("TerminateInstances", 0) > asked, machine.console)


async def until(holds: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit, what
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "this is no machine that Remuda made"),
        ({"REMUDA_BACKEND": "aws"}, "there is no user 'remuda-job' to run jobs as"),
    ],
)
def test_an_agent_that_cannot_start_says_why_in_one_sentence(environment: dict[str, str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "remuda", "agent"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
