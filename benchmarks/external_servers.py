"""Scripted EC2 and GitHub servers with thousands of instances, in a separate process.

General EC2 test servers list thousands of instances too slowly for these measurements.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from datetime import timedelta

from benchmarks.environment import SCOPE
from benchmarks.json_lines import JsonProcess, json_process, respond
from remuda.adapters.system.clock import SystemClock
from remuda.domain.pool_config import runner_name
from remuda.ports.compute import POOL_TAG
from tests.support.fleet_servers import FleetInstance, FleetState, serve_fleet
from tests.support.scripted_fleet import tags

#: EC2's page size.
EC2_PAGE = 1_000


def main() -> None:
    fleet = FleetState()
    fleet.ec2_page = EC2_PAGE
    fleet.owners.add(SCOPE)
    launched_at = SystemClock().now() - timedelta(hours=1)
    with serve_fleet(fleet) as served:
        respond({"github": served.github_url, "ec2": served.ec2_url})
        for line in sys.stdin:
            request = json.loads(line)
            pool = request["pool"]
            for name in request["instances"]:
                instance_tags = {**tags(SCOPE), "ghr:environment": pool, POOL_TAG: pool}
                fleet.add_machine(FleetInstance(name, launched_at, "running", instance_tags))
            for name in request["runners"]:
                runner = {"name": runner_name(pool, 1, name), "owner": SCOPE, "busy": True}
                fleet.add_runner({"id": len(fleet.runners) + 1, **runner})
            respond({})


class ExternalServers:
    """Client of the servers' process."""

    def __init__(self, process: JsonProcess) -> None:
        self._process = process
        self.github_url, self.ec2_url = process.ready["github"], process.ready["ec2"]

    async def add(self, pool: str, instances: Collection[str], runners: Collection[str] = ()) -> None:
        await self._process.request(pool=pool, instances=list(instances), runners=list(runners))


@asynccontextmanager
async def external_servers() -> AsyncIterator[ExternalServers]:
    async with json_process("benchmarks.external_servers") as process:
        yield ExternalServers(process)


if __name__ == "__main__":
    main()
