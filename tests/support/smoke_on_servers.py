"""A smoke run on the test servers, in a process of its own that can be killed at any step.

The account is that of the servers, `remuda deploy`, `doctor` and `destroy` are the real commands, and instances are
real for EC2's server. Workflows and their jobs are scripted; branches are files, so that they outlive the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.system.clock import SystemClock
from remuda.adapters.system.prices import shipped_prices
from remuda.ports.compute import POOL_TAG
from tests.smoke.account import SmokeAccount
from tests.smoke.budget import Meter
from tests.smoke.record import SmokeRecord
from tests.smoke.sequence import SmokeRun
from tests.support.aws.ec2 import LINUX_AMI
from tests.unit.smoke.test_sequence import FakeRepository, FakeWorld

#: Seconds of a run that pass in a real one.
FASTER = 300.0
#: Variables: folder of the branches, step after which the process is killed, and the operation of AWS after which its
#: command is killed.
FOLDER, KILL_AFTER, CUT = "REMUDA_TEST_SMOKE_FOLDER", "REMUDA_TEST_SMOKE_KILL", "REMUDA_TEST_SMOKE_CUT"


class SmokeClock(SystemClock):
    def monotonic(self) -> float:
        return time.monotonic() * FASTER

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / FASTER)


class PatientMeter(Meter):
    """Without limits: commands take their real time, which the clock multiplies."""

    def check(self) -> None:
        """Accept everything."""


class KilledRun(SmokeRun):
    """One of several at a time, which is not done in an account, so it leaves the other ones alone."""

    async def clean_up_earlier(self) -> None:
        if os.environ.get(KILL_AFTER) == "":
            await super().clean_up_earlier()


class ServerWorld(FakeWorld):
    """The scripted workflows, with the commands and instances of the servers."""

    def __init__(self, folder: Path, pool: str) -> None:
        super().__init__()
        self._folder = folder
        self._pool = pool

    @property
    def _now(self) -> float:
        return time.monotonic() * FASTER

    async def __call__(self, step: str, *arguments: str) -> Mapping[str, Any]:
        if arguments[0] in {"status", "report"}:
            self._advance()
            await self._launch()
            return await super().__call__(step, *arguments)
        # A listener would have to run; its stack is tested elsewhere.
        given = [*arguments]
        if "--runner-sets" in given:
            del given[given.index("--runner-sets") :]
        if arguments[0] == "deploy":
            # The servers have no parameter with Ubuntu's image.
            given += ["--ami", LINUX_AMI]
        await run_remuda(given)
        return await super().__call__(step, *arguments) if arguments[0] != "destroy" else {}

    async def _launch(self) -> None:
        """Launch for every scripted instance that EC2 does not know."""
        for name in [each for each in self.machines if self.machines[each].get("launched") is None]:
            machine = self.machines.pop(name)
            async with AwsClients() as clients:
                ec2 = await clients.client("ec2", "EC2", config())
                tags = [{"ResourceType": "instance", "Tags": [{"Key": POOL_TAG, "Value": self._pool}]}]
                made = await ec2.run_instances(ImageId=LINUX_AMI, MinCount=1, MaxCount=1, TagSpecifications=tags)
            machine["instance_id"] = machine["launched"] = made["Instances"][0]["InstanceId"]
            self.machines[machine["instance_id"]] = machine | {"pool": self._pool}

    # Branches ---------------------------------------------------------------------------------------------------------

    async def push(self, branch: str, files: Mapping[str, str]) -> str:
        (self._folder / branch).touch()
        return await super().push(branch, files)

    async def list_branches(self, prefix: str = "") -> list[str]:
        return [each.name for each in self._folder.iterdir() if each.name.startswith(prefix)]

    async def delete_branch(self, branch: str) -> None:
        (self._folder / branch).unlink(missing_ok=True)


async def run_remuda(arguments: list[str]) -> None:
    """The real command. The clean-up also runs if nothing was deployed."""
    environment = dict(os.environ)
    program = "remuda"
    if cut := environment.get(CUT, ""):
        operation, _, command = cut.partition(" ")
        if arguments[0] == command:
            environment["REMUDA_TEST_CUT_AFTER"] = f"{operation}:{signal.SIGKILL:d}"
            program = "tests.support.aws.cut_command"
    done = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", program, *arguments, "--json"), env=environment, stdout=subprocess.PIPE
    )
    output, _ = await done.communicate()
    if done.returncode == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    document = json.loads(output)
    if done.returncode and (document.get("error") or {}).get("field") != "--pool":
        raise RuntimeError(f"{arguments[0]}: {output.decode()}")


async def smoke(pool: str, scope: str, bundles: str) -> None:
    clock = SmokeClock()
    world = ServerWorld(Path(os.environ[FOLDER]), pool)
    async with AwsClients() as clients:
        run = KilledRun(
            pool=pool,
            scope=scope,
            bundles=bundles,
            remuda=world,
            account=SmokeAccount(clients),
            repository=FakeRepository(world),
            clock=clock,
            meter=PatientMeter(limit_usd=50.0, prices=shipped_prices()),
            say=_say,
            record=SmokeRecord(clock=clock, day=date(2026, 11, 19), region="eu-central-1"),
            on_step_end=_kill,
        )
        if os.environ.get(KILL_AFTER) == "":
            await run.clean_up_earlier()
        else:
            await run.run()


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _kill(step: str) -> None:
    if step == os.environ.get(KILL_AFTER):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(smoke(*sys.argv[1:]))
