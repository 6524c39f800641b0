"""Scale-down of a fleet of busy runners: only list calls are needed."""

from __future__ import annotations

from datetime import timedelta

from benchmarks.environment import BenchmarkEnvironment
from benchmarks.figures import Figure, FigureKind, Results
from benchmarks.floor import Floor
from remuda.adapters.aws.clients import open_session
from remuda.adapters.aws.ec2.calls import client_config
from remuda.adapters.aws.ec2.tagged_fleet import Ec2Fleet
from remuda.adapters.github.client import GitHubClient
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.config.settings import Settings
from remuda.controlplane.scale_down import FleetContext, scale_down
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import SilentEventLog
from tests.support.fleet_servers import TOKEN, FleetInstance, FleetState, serve_fleet
from tests.support.records import instance_id
from tests.support.scripted_fleet import ENVIRONMENT, ORG, tags

GITHUB_CALLS_LIMIT = 13


def busy_fleet(number: int) -> FleetState:
    fleet = FleetState()
    fleet.owners.add(ORG)
    launched_at = SystemClock().now() - timedelta(hours=1)
    for each in range(number):
        name = instance_id(each)
        fleet.add_machine(FleetInstance(name, launched_at, "running", tags()))
        fleet.add_runner({"id": each + 1, "name": f"runner-{name}", "owner": ORG, "busy": True})
    return fleet


async def run(environment: BenchmarkEnvironment, _floor: Floor) -> Results:
    number = environment.size.busy_runners
    fleet = busy_fleet(number)
    clock, ids, calls = SystemClock(), SystemIds(), CallCounter()
    with serve_fleet(fleet) as served:
        async with open_session().create_client("ec2", config=client_config(), endpoint_url=served.ec2_url) as client:
            github = GitHubClient(api_url=served.github_url, token=TOKEN, clock=clock, ids=ids, calls=calls)
            context = FleetContext(
                environment=ENVIRONMENT,
                fleet=Ec2Fleet(client=client, environment=ENVIRONMENT, clock=clock, ids=ids, calls=calls),
                github=github,
                clock=clock,
                event_log=SilentEventLog(),
                calls=calls,
            )
            done = await scale_down(context, Settings().scale_down_policy)
            await github.close()
    if done.errors or fleet.effects.terminated:
        raise RuntimeError(f"scale-down failed: {done.errors}")
    return Results(
        figures=(
            Figure(
                name=f"scale-down of {number:,} busy runners: GitHub calls",
                unit="calls",
                predecessor="1,012, in 23 s",
                limit=GITHUB_CALLS_LIMIT,
                measured=fleet.effects.github_calls(),
                kind=FigureKind.COUNT,
                note=f"{done.seconds:.2f} s",
            ),
        )
    )
