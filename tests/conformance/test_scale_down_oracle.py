"""Every observed scale-down scenario with the real GitHub and EC2 adapters, against scripted servers."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from aiobotocore.session import AioSession, get_session

from remuda.adapters.aws.ec2.tagged_fleet import Ec2Fleet
from remuda.adapters.github import client as github_client
from remuda.adapters.system.clock import SystemIds
from remuda.config.settings import Settings
from remuda.config.sources import load
from remuda.controlplane.scale_down import FleetContext, ScaleDownResult, scale_down
from remuda.domain.errors import UserError
from remuda.domain.scale_down.decisions import Action
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import SilentEventLog
from tests.support.aws.ec2 import slow_server_config
from tests.support.fleet_servers import TOKEN, FleetState, FleetUrls, serve_fleet
from tests.support.records import LONG_S
from tests.support.scripted_fleet import REFUSED, SCENARIOS, expected, variables
from tests.support.virtual_time import FixedClock


@cache
def _session() -> AioSession:
    """Cached: loading EC2's service model takes a second."""
    return get_session()


def ec2_client(served: FleetUrls) -> Any:
    return _session().create_client(
        "ec2",
        region_name="eu-central-1",
        endpoint_url=served.ec2_url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=slow_server_config(),
    )


class HangTimeouts:
    """Replaces `asyncio.timeout`: expires when all open calls hang, however slow the test machine is."""

    def __init__(self, world: FleetState) -> None:
        self._open: set[asyncio.Timeout] = set()
        self._hanging = 0
        loop = asyncio.get_running_loop()
        world.on_hang = lambda: loop.call_soon_threadsafe(self._count_hanging)

    @asynccontextmanager
    async def timeout(self, _: float) -> AsyncIterator[None]:
        async with asyncio.timeout(LONG_S) as limit:
            self._open.add(limit)
            try:
                yield
            finally:
                self._open.remove(limit)
                self._check()

    def _count_hanging(self) -> None:
        self._hanging += 1
        self._check()

    def _check(self) -> None:
        if self._open and len(self._open) == self._hanging:
            self._hanging = 0
            for limit in self._open:
                limit.reschedule(asyncio.get_running_loop().time())


async def run_cycle(served: FleetUrls, settings: Settings, now: datetime, *, dry_run: bool = False) -> ScaleDownResult:
    clock, ids, calls = FixedClock(now), SystemIds(), CallCounter()
    github = github_client.GitHubClient(api_url=served.github_url, token=TOKEN, clock=clock, ids=ids, calls=calls)
    async with ec2_client(served) as client:
        context = FleetContext(
            environment=settings.environment,
            fleet=Ec2Fleet(client=client, environment=settings.environment, clock=clock, ids=ids, calls=calls),
            github=github,
            clock=clock,
            event_log=SilentEventLog(),
            calls=calls,
        )
        try:
            return await scale_down(context, settings.scale_down_policy, dry_run=dry_run)
        finally:
            await github.close()


def carried_out(result: ScaleDownResult, action: Action) -> set[str]:
    return {item.decision.instance_id for item in result.of(action) if item.done}


def call_bound(world: FleetState, scenario: Mapping[str, Any]) -> int:
    """Maximum number of calls: pages, two per checked or deleted registration, one per orphan with a runner id."""
    owners = {item["owner"] for item in scenario["github"]["owners"]}
    runners = Counter(str(item["owner"]) for item in scenario["github"]["runners"])
    pages = sum(max(1, math.ceil(runners[owner] / 100)) for owner in owners)
    with_id = sum("ghr:github_runner_id" in item["tags"] for item in scenario["instances"])
    return pages + 2 * (len(world.effects.deregistered) + len(world.effects.terminated) + 1) + with_id


@pytest.mark.usefixtures("patient_client")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario["name"])
async def test_cycle_does_what_the_scenario_expects(
    scenario: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = FleetState.from_scenario(scenario)
    monkeypatch.setattr(github_client, "asyncio", HangTimeouts(world))
    if scenario["name"] in REFUSED:
        with pytest.raises(UserError):
            load({}, environ=variables(scenario))
        return
    settings = load({}, environ=variables(scenario))
    with serve_fleet(world) as served:
        for cycle in scenario["cycles"]:
            world.begin_cycle(changes=cycle["changes"], faults=cycle["faults"])
            result = await run_cycle(served, settings, datetime.fromisoformat(cycle["now"]))
            wanted = expected(scenario, cycle)
            assert set(world.effects.terminated) == wanted.terminated, result
            assert set(world.effects.tagged) == wanted.tagged, result
            assert set(world.effects.untagged) == wanted.untagged, result
            assert not world.effects.killed_busy
            assert carried_out(result, Action.TERMINATE) == wanted.terminated
            assert carried_out(result, Action.MARK_ORPHAN) == wanted.tagged
            assert all(item.decision.reason for item in result.outcomes)
            reachable = all(owner["app_installed"] for owner in scenario["github"]["owners"])
            if reachable and not any(cycle["faults"].values()):
                assert not result.errors
                assert world.effects.github_calls() <= call_bound(world, scenario)
