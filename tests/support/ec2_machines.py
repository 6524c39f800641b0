"""Machines for the instances that an EC2 server reports.

An EC2 test server has instances, but nothing runs on them. The player looks at the server and does what the cloud's
hardware would: it boots a machine with the instance's real user data and a metadata service of its own, pulls its plug
when EC2 says that it ends, and tells EC2 when it has powered itself off.

    python -m tests.support.ec2_machines --ec2 URL --folder FOLDER

plays until it is interrupted or terminated, one line an event; nothing of it is left then.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiobotocore.session import get_session

from tests.support.ec2_machine.machine import NamespaceMachine, bake, why_not
from tests.support.fake_imds import FakeImds, fake_imds
from tests.support.moto_server import PROFILE, REGION, patient_config

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client
    from types_aiobotocore_sts import STSClient

LOOK_EVERY_S = 0.25
ALIVE = frozenset({"pending", "running"})
ROLE = f"arn:aws:iam::123456789012:role/{PROFILE}"
#: Bootstrap, agent and AWS's library each have a token of their own.
TOKENS = 1_000
POWERED_OFF = "powered off"
#: How the agent's event_log says why it ends.
_END = re.compile(r"^\S+ end instance_id=\S+ (?:\w+=\S* )*(.+)$", re.MULTILINE)

Say = Callable[[str], None]


@dataclass(kw_only=True)
class _Played:
    task: asyncio.Task[None]
    imds: FakeImds | None = None
    machine: NamespaceMachine | None = None
    powered_off: bool = False


class Player:
    def __init__(self, *, ec2: EC2Client, sts: STSClient, folder: Path, say: Say) -> None:
        self._ec2 = ec2
        self._sts = sts
        self._folder = folder
        self._say = say
        self._played: dict[str, _Played] = {}

    async def run(self) -> None:
        """Until cancelled; then every plug is pulled."""
        bake(self._folder / "image")
        try:
            while True:
                await self._look()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            tasks = [played.task for played in self._played.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def notice(self, instance_id: str, *, action: str, at: str) -> None:
        """The spot market wants the machine back."""
        imds = self._played[instance_id].imds
        if imds is None:
            raise LookupError(f"{instance_id} does not run")
        imds.notice(action, at)

    def console(self, instance_id: str) -> str:
        machine = self._played[instance_id].machine if instance_id in self._played else None
        return machine.console if machine is not None else ""

    def consoles(self) -> str:
        """Of all machines, for whoever looks for what went wrong."""
        return "\n".join(self.console(instance_id) for instance_id in self._played)

    def last_word(self, instance_id: str) -> str:
        """Why its agent ended the machine; where that said nothing, whether it powered itself off: its timer did."""
        if found := _END.findall(self.console(instance_id)):
            return str(found[-1])
        played = self._played.get(instance_id)
        return POWERED_OFF if played is not None and played.powered_off else ""

    async def _look(self) -> None:
        found = await instances(self._ec2)
        alive = {key: item for key, item in found.items() if item["State"]["Name"] in ALIVE}
        for instance_id in alive.keys() - self._played.keys():
            self._played[instance_id] = _Played(task=asyncio.create_task(self._play(instance_id, alive[instance_id])))
        for instance_id, played in self._played.items():
            if instance_id not in alive:
                # Ends the machine on its way out.
                played.task.cancel()

    async def _play(self, instance_id: str, seen: Mapping[str, Any]) -> None:
        """One machine, from its boot to its end."""
        with fake_imds() as imds:
            imds.valid = TOKENS
            tags = {tag["Key"]: tag["Value"] for tag in seen.get("Tags", ())}
            imds.be(
                instance_id,
                tags=tags,
                zone=seen["Placement"]["AvailabilityZone"],
                life_cycle=seen.get("InstanceLifecycle", "on-demand"),
            )
            credentials = await self._credentials(instance_id)
            imds.give_credentials(PROFILE, lambda: credentials)
            machine = NamespaceMachine(
                self._folder / instance_id,
                image=self._folder / "image",
                user_data=await self._user_data(instance_id),
                environment={"AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.url},
            )
            played = self._played[instance_id]
            played.imds, played.machine = imds, machine
            self._say(f"{instance_id} boots ({seen['InstanceType']})")
            try:
                while machine.is_on:  # noqa: ASYNC110 - nothing else tells
                    await asyncio.sleep(LOOK_EVERY_S)
                played.powered_off = True
                # As its launch template says: a machine that powers off is terminated.
                await self._ec2.terminate_instances(InstanceIds=[instance_id])
            finally:
                machine.stop()
                self._say(f"{instance_id} is over: {self.last_word(instance_id) or 'ended by EC2'}")

    async def _user_data(self, instance_id: str) -> str:
        answer = await self._ec2.describe_instance_attribute(InstanceId=instance_id, Attribute="userData")
        return base64.b64decode(answer["UserData"]["Value"]).decode()

    async def _credentials(self, instance_id: str) -> dict[str, str]:
        """The role's, in a session with the machine's name, as EC2 gives them."""
        given = (await self._sts.assume_role(RoleArn=ROLE, RoleSessionName=instance_id))["Credentials"]
        return {
            "AccessKeyId": given["AccessKeyId"],
            "SecretAccessKey": given["SecretAccessKey"],
            "Token": given["SessionToken"],
            "Expiration": given["Expiration"].strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


async def instances(ec2: EC2Client) -> dict[str, dict[str, Any]]:
    """All that EC2 shows, by id."""
    found: dict[str, dict[str, Any]] = {}
    async for page in ec2.get_paginator("describe_instances").paginate():
        for reservation in page["Reservations"]:
            for item in reservation["Instances"]:
                found[item["InstanceId"]] = dict(item)
    return found


@asynccontextmanager
async def player(*, ec2_url: str, folder: Path, say: Say) -> AsyncIterator[Player]:
    """Plays in the background. The folder is its own, and gone afterwards."""
    folder.mkdir(parents=True)  # noqa: ASYNC240 - it takes no time
    session: Any = get_session()
    given = {
        "region_name": REGION,
        "endpoint_url": ec2_url,
        "aws_access_key_id": "test",
        "aws_secret_access_key": "test",
        "config": patient_config(),
    }
    async with AsyncExitStack() as stack:
        ec2, sts = [await stack.enter_async_context(session.create_client(name, **given)) for name in ("ec2", "sts")]
        made = Player(ec2=ec2, sts=sts, folder=folder, say=say)
        running = asyncio.create_task(made.run())
        try:
            yield made
        finally:
            running.cancel()
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    await running
            finally:
                shutil.rmtree(folder)


async def _main(ec2_url: str, folder: Path) -> None:
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    async with player(ec2_url=ec2_url, folder=folder, say=lambda line: print(line, flush=True)):  # noqa: T201 - its log
        await over.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.ec2_machines", description=__doc__)
    parser.add_argument("--ec2", required=True, help="address of the EC2 server")
    parser.add_argument("--folder", type=Path, required=True, help="a folder to make, and to remove at the end")
    given = parser.parse_args()
    if reason := why_not():
        sys.stderr.write(f"{reason}\n")
        return 2
    asyncio.run(_main(given.ec2, given.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
