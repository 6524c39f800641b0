"""An EC2 and a GitHub with as many machines as are asked for, in a process of their own.

No ready-made EC2 server lists thousands of machines in a time that would let anything else be seen.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from datetime import timedelta

from benchmarks.lines import answered, ask
from benchmarks.world import SCOPE
from remuda.adapters.system.clock import SystemClock
from remuda.domain.pool_config import runner_name
from remuda.ports.compute import POOL_TAG
from tests.support.fleet_world import FleetWorld, Machine, serve
from tests.support.fleets import tags

WHOSE = "the outside world's"
#: As many as EC2 shows in one answer.
EC2_PAGE = 1_000


def main() -> None:
    world = FleetWorld()
    world.ec2_page = EC2_PAGE
    world.owners.add(SCOPE)
    launched_at = SystemClock().now() - timedelta(hours=1)
    with serve(world) as served:
        _answer({"github": served.github_url, "ec2": served.ec2_url})
        for line in sys.stdin:
            asked = json.loads(line)
            pool = asked["pool"]
            for name in asked["machines"]:
                marks = {**tags(SCOPE), "ghr:environment": pool, POOL_TAG: pool}
                world.add_machine(Machine(name, launched_at, "running", marks))
            for name in asked["runners"]:
                runner = {"name": runner_name(pool, 1, name), "owner": SCOPE, "busy": True}
                world.add_runner({"id": len(world.runners) + 1, **runner})
            _answer({})


def _answer(document: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


class Outside:
    """The other end."""

    def __init__(self, process: asyncio.subprocess.Process, addresses: dict[str, str]) -> None:
        self._process = process
        self.github_url, self.ec2_url = addresses["github"], addresses["ec2"]

    async def add(self, pool: str, machines: Collection[str], runners: Collection[str] = ()) -> None:
        asked = {"pool": pool, "machines": list(machines), "runners": list(runners)}
        await ask(self._process, asked, whose=WHOSE)


@asynccontextmanager
async def outside() -> AsyncIterator[Outside]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.outside"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ),
        start_new_session=True,
    )
    try:
        yield Outside(process, await answered(process, whose=WHOSE))
    finally:
        process.kill()
        await process.wait()


if __name__ == "__main__":
    main()
