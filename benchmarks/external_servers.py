"""Scripted EC2 and GitHub servers with thousands of instances, in a separate process.

General EC2 test servers list thousands of instances too slowly for these measurements.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from datetime import timedelta

from benchmarks.environment import SCOPE
from benchmarks.json_lines import read_response, send_request
from remuda.adapters.system.clock import SystemClock
from remuda.domain.pool_config import runner_name
from remuda.ports.compute import POOL_TAG
from tests.support.fleet_servers import FleetInstance, FleetState, serve_fleet
from tests.support.scripted_fleet import tags

PROCESS_NAME = "external servers"
#: EC2's page size.
EC2_PAGE = 1_000


def main() -> None:
    fleet = FleetState()
    fleet.ec2_page = EC2_PAGE
    fleet.owners.add(SCOPE)
    launched_at = SystemClock().now() - timedelta(hours=1)
    with serve_fleet(fleet) as served:
        _respond({"github": served.github_url, "ec2": served.ec2_url})
        for line in sys.stdin:
            request = json.loads(line)
            pool = request["pool"]
            for name in request["instances"]:
                instance_tags = {**tags(SCOPE), "ghr:environment": pool, POOL_TAG: pool}
                fleet.add_machine(FleetInstance(name, launched_at, "running", instance_tags))
            for name in request["runners"]:
                runner = {"name": runner_name(pool, 1, name), "owner": SCOPE, "busy": True}
                fleet.add_runner({"id": len(fleet.runners) + 1, **runner})
            _respond({})


def _respond(document: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


class ExternalServers:
    """Client of the servers' process."""

    def __init__(self, process: asyncio.subprocess.Process, addresses: dict[str, str]) -> None:
        self._process = process
        self.github_url, self.ec2_url = addresses["github"], addresses["ec2"]

    async def add(self, pool: str, instances: Collection[str], runners: Collection[str] = ()) -> None:
        request = {"pool": pool, "instances": list(instances), "runners": list(runners)}
        await send_request(self._process, request, name=PROCESS_NAME)


@asynccontextmanager
async def external_servers() -> AsyncIterator[ExternalServers]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.external_servers"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ),
        start_new_session=True,
    )
    try:
        yield ExternalServers(process, await read_response(process, name=PROCESS_NAME))
    finally:
        process.kill()
        await process.wait()


if __name__ == "__main__":
    main()
