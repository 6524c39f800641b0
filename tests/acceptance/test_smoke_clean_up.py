"""A smoke run that is killed at any step: the next one removes all that it has left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.smoke.workflow import ROOT
from tests.support.aws.deployment import EmptyAccount, empty_account
from tests.support.aws.stack import SCOPE, AwsStack
from tests.support.smoke_on_servers import CUT, FOLDER, KILL_AFTER

#: Where the process is killed: after a step, or in it, with its command, after an operation of AWS.
KILLS = {
    "smoke-00000001": {CUT: "CreateSecret deploy"},
    "smoke-00000002": {CUT: "ExecuteChangeSet deploy"},
    "smoke-00000003": {KILL_AFTER: "spot notice"},
    "smoke-00000004": {CUT: "DeleteStack destroy"},
}
#: The other steps leave nothing that these do not leave, too, and each kill takes a deployment.
OTHER_KILLS = {
    f"smoke-1000000{number}": {KILL_AFTER: step}
    for number, step in enumerate(("deploy", "doctor", "cold run", "reuse", "runner set", "destroy"))
}
if os.environ.get("REMUDA_TEST_ALL_KILLS"):
    KILLS |= OTHER_KILLS
#: Runs at a time, each of which has a command that uses a processor.
AT_A_TIME = 2


@pytest.fixture(scope="module")
def account(stack: AwsStack) -> Iterator[EmptyAccount]:
    with empty_account(stack) as made:
        yield made


async def test_the_next_run_removes_what_killed_runs_have_left(account: EmptyAccount, tmp_path: Path) -> None:
    branches = tmp_path / "branches"
    branches.mkdir()
    bundles = str(account.bundles())
    moto = account.stack.ec2.url
    environment = account.environment(
        **{FOLDER: str(branches), "AWS_ENDPOINT_URL_FIS": moto, "PYTHONPATH": str(ROOT)},
    )
    limit = asyncio.Semaphore(AT_A_TIME)

    async def start(pool: str, **more: str) -> tuple[int | None, str]:
        async with limit:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.support.smoke_on_servers", pool, SCOPE, bundles),
                env={**environment, **more},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            output, _ = await process.communicate()
            return process.returncode, output.decode()

    ended = await asyncio.gather(*(start(pool, **more) for pool, more in KILLS.items()))
    assert not [output for code, output in ended if code != -signal.SIGKILL]
    left = {pool: await asyncio.to_thread(left_of, account, pool) for pool in KILLS}
    assert all(left.values()), "every kill leaves something"
    assert list(branches.iterdir())
    code, output = await start("smoke-ffffffff", **{KILL_AFTER: ""})
    assert code == 0, output
    left = {pool: await asyncio.to_thread(left_of, account, pool) for pool in KILLS}
    assert not any(left.values()), left
    assert not list(branches.iterdir())


def left_of(account: EmptyAccount, pool: str) -> list[str]:
    """Everything of the pool, with its instances and the experiment's role."""

    async def instances(ec2: Any) -> list[str]:
        filters = [
            {"Name": "tag:remuda:pool", "Values": [pool]},
            {"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]},
        ]
        found = await ec2.describe_instances(Filters=filters)
        return [each["InstanceId"] for group in found["Reservations"] for each in group["Instances"]]

    async def roles(iam: Any) -> list[str]:
        found = (await iam.list_roles(MaxItems=1_000))["Roles"]
        return [each["RoleName"] for each in found if each["RoleName"].startswith(f"remuda-{pool}")]

    return [*account.resources(pool), *account.call("ec2", instances), *account.call("iam", roles)]
