"""Contract tests of the fleet port, over all adapters, and all scale-down scenarios with the real adapters."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Protocol

import pytest

from remuda.adapters.aws.ec2.tagged_fleet import Ec2Fleet
from remuda.adapters.github import client as github_client
from remuda.adapters.local.compute import LocalFleet
from remuda.adapters.system.clock import SystemIds
from remuda.config.settings import Settings
from remuda.config.sources import load
from remuda.controlplane.scale_down import FleetContext, ScaleDownResult, scale_down
from remuda.domain.errors import UserError
from remuda.domain.resources import DEFAULT_CLASSES, RunnerRequest, Tier, TypePatterns, UsageClass
from remuda.domain.scale_down.decisions import Action
from remuda.domain.scale_down.fleet import FleetMachine
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock
from remuda.ports.compute import LaunchRequest, TaggedFleet
from remuda.ports.event_log import SilentEventLog
from simulation.memory.compute import MemoryCloud, MemoryCompute, MemoryFleet, MemoryMachines
from tests.support.aws.ec2 import LINUX_AMI, shared_ec2_server, slow_server_config
from tests.support.aws.servers import service_client
from tests.support.fleet_servers import TOKEN, FleetInstance, FleetState, FleetUrls, serve_fleet
from tests.support.records import LONG_S, NOW
from tests.support.scripted_fleet import ENVIRONMENT, REFUSED, SCENARIOS, expected, tags, variables
from tests.support.virtual_time import AdjustableClock, FixedClock

ORPHAN = "ghr:orphan"


class FleetBackend(Protocol):
    def open(self) -> TaggedFleet: ...

    async def launch(self, tags: dict[str, str]) -> str: ...

    async def tags_of(self, instance_id: str) -> dict[str, str] | None:
        """Return the tags, or None if the machine has ended."""
        ...


class MemoryFleetBackend:
    def __init__(self) -> None:
        self.machines = MemoryMachines()

    def open(self) -> TaggedFleet:
        return MemoryFleet(machines=self.machines, environment=ENVIRONMENT, calls=CallCounter())

    async def launch(self, tags: dict[str, str]) -> str:
        name = f"i-{len(self.machines.alive) + 1:017x}"
        self.machines.add(FleetMachine(instance_id=name, launched_at=NOW, tags=tags))
        return name

    async def tags_of(self, instance_id: str) -> dict[str, str] | None:
        machine = self.machines.alive.get(instance_id)
        return None if machine is None else dict(machine.tags)


class LocalFleetBackend:
    """The local fleet adapter over the memory compute adapter."""

    def __init__(self) -> None:
        self.cloud = MemoryCloud(clock=FixedClock(NOW))
        self.compute = MemoryCompute(cloud=self.cloud, pool="pool", calls=CallCounter())

    def open(self) -> TaggedFleet:
        return LocalFleet(compute=self.compute, pool="pool", environment=ENVIRONMENT)

    async def launch(self, tags: dict[str, str]) -> str:
        request = LaunchRequest(
            provision_id="p",
            client_token=f"t-{len(self.cloud.machines)}",
            count=1,
            request=RunnerRequest(
                resource_class=DEFAULT_CLASSES[0],
                usage_class=UsageClass.ON_DEMAND,
                patterns=TypePatterns(("*",)),
                tier=Tier.TRUSTED,
            ),
            scope="acme",
            first_life_s=600,
            margin_s=1,
            tags=tags,
        )
        launched = await self.compute.launch(request)
        return launched.instances[0].instance_id

    async def tags_of(self, instance_id: str) -> dict[str, str] | None:
        return dict(self.cloud.machines[instance_id].tags) if self.cloud.is_alive(instance_id) else None


class MotoFleetBackend:
    def __init__(self, client: Any) -> None:
        self._client = client

    def open(self) -> TaggedFleet:
        return Ec2Fleet(
            client=self._client,
            environment=ENVIRONMENT,
            clock=AdjustableClock(longest_sleep_s=0.0),
            ids=SystemIds(),
            calls=CallCounter(),
        )

    async def launch(self, tags: dict[str, str]) -> str:
        answer = await self._client.run_instances(
            ImageId=LINUX_AMI,
            MinCount=1,
            MaxCount=1,
            TagSpecifications=[
                {"ResourceType": "instance", "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
            ],
        )
        return str(answer["Instances"][0]["InstanceId"])

    async def tags_of(self, instance_id: str) -> dict[str, str] | None:
        answer = await self._client.describe_instances(InstanceIds=[instance_id])
        (item,) = answer["Reservations"][0]["Instances"]
        if item["State"]["Name"] not in {"pending", "running"}:
            return None
        return {tag["Key"]: tag["Value"] for tag in item.get("Tags", ())}


@pytest.fixture(params=["memory", "local", "moto"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[FleetBackend]:
    if request.param == "memory":
        yield MemoryFleetBackend()
    elif request.param == "local":
        yield LocalFleetBackend()
    else:
        server = shared_ec2_server()
        server.reset()
        async with server.product_client() as client:
            yield MotoFleetBackend(client)


async def test_list_contains_only_the_environments_machines(backend: FleetBackend) -> None:
    active = await backend.launch(tags())
    orphan = await backend.launch(tags(orphan="true"))
    no_orphan = await backend.launch(tags(orphan="false"))
    await backend.launch({**tags(), "ghr:environment": "other"})
    await backend.launch({**tags(), "ghr:Application": "other"})
    fleet = backend.open()
    assert [item.instance_id for item in await fleet.list_machines()] == [active, orphan, no_orphan]
    (found,) = await fleet.list_machines(orphans=True)
    assert (found.instance_id, found.is_orphan, found.scope) == (orphan, True, "acme")
    assert found.launched_at is not None
    assert found.launched_at.utcoffset() == timedelta(0)
    await fleet.close()


async def test_mark_and_unmark_orphans(backend: FleetBackend) -> None:
    names = [await backend.launch(tags()) for _ in range(2)]
    fleet = backend.open()
    await fleet.list_machines()
    assert await fleet.mark_orphans(names) == {}
    assert [((await backend.tags_of(name)) or {}).get(ORPHAN) for name in names] == ["true", "true"]
    assert await fleet.unmark_orphans(names[:1]) == {}
    assert ORPHAN not in ((await backend.tags_of(names[0])) or {})
    assert [item.instance_id for item in await fleet.list_machines(orphans=True)] == names[1:]


async def test_terminate_is_idempotent(backend: FleetBackend) -> None:
    names = [await backend.launch(tags()) for _ in range(3)]
    fleet = backend.open()
    await fleet.list_machines()
    assert await fleet.terminate(names[:2]) == {}
    assert [await backend.tags_of(name) is None for name in names] == [True, True, False]
    assert await fleet.terminate(names[:2]) == {}
    assert [item.instance_id for item in await fleet.list_machines()] == names[2:]


async def test_machines_that_were_not_listed_are_rejected(backend: FleetBackend) -> None:
    stranger = await backend.launch({**tags(), "ghr:environment": "other"})
    own = await backend.launch(tags())
    fleet = backend.open()
    await fleet.list_machines()
    for change in (fleet.terminate, fleet.mark_orphans, fleet.unmark_orphans):
        assert list(await change([stranger, own])) == [stranger]
    before = await backend.tags_of(stranger)
    assert before is not None
    assert ORPHAN not in before
    assert await backend.tags_of(own) is None


# EC2 only -------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def ec2_fleet(served: FleetUrls, clock: Clock, environment: str = ENVIRONMENT) -> AsyncIterator[Ec2Fleet]:
    async with service_client("ec2", served.ec2_url, settings=slow_server_config()) as opened:
        client: Any = opened
        yield Ec2Fleet(client=client, environment=environment, clock=clock, ids=SystemIds(), calls=CallCounter())


@asynccontextmanager
async def scripted(world: FleetState) -> AsyncIterator[Ec2Fleet]:
    with serve_fleet(world) as served:
        async with ec2_fleet(served, AdjustableClock(longest_sleep_s=0.0)) as fleet:
            yield fleet


def crowd(count: int) -> FleetState:
    world = FleetState()
    for number in range(count):
        world.add_machine(FleetInstance(f"i-{number:017x}", NOW, "running", tags()))
    return world


async def test_list_reads_all_pages_and_changes_are_batched() -> None:
    world = crowd(250)
    async with scripted(world) as fleet:
        names = [item.instance_id for item in await fleet.list_machines()]
        assert len(names) == 250
        assert await fleet.mark_orphans(names) == {}
        assert await fleet.terminate(names) == {}
    assert world.effects.calls == {"ec2 DescribeInstances": 3, "ec2 CreateTags": 3, "ec2 TerminateInstances": 3}
    assert len(world.effects.terminated) == 250


@pytest.mark.parametrize("protected", [(7, 40), (0, 1), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)])
async def test_protected_machine_does_not_prevent_termination_of_others(protected: tuple[int, ...]) -> None:
    world = crowd(60)
    world.ec2_faults = [
        {
            "action": "TerminateInstances",
            "instance_id": f"i-{number:017x}",
            "code": "OperationNotPermitted",
            "http_status": 400,
        }
        for number in protected
    ]
    async with scripted(world) as fleet:
        names = [item.instance_id for item in await fleet.list_machines()]
        assert sorted(await fleet.terminate(names)) == [f"i-{number:017x}" for number in protected]
    assert len(world.effects.terminated) == 60 - len(protected)


async def test_unavailable_ec2_is_not_called_per_machine() -> None:
    world = crowd(100)
    world.ec2_faults = [{"action": "TerminateInstances", "code": "InternalError", "http_status": 500}]
    async with scripted(world) as fleet:
        names = [item.instance_id for item in await fleet.list_machines()]
        assert len(await fleet.terminate(names)) == 100
    assert world.effects.calls["ec2 TerminateInstances"] <= 40


async def test_list_contains_pending_and_running_machines_with_their_system() -> None:
    world = FleetState()
    for number, state in enumerate(("pending", "running", "stopping", "stopped", "shutting-down", "terminated")):
        world.add_machine(FleetInstance(f"i-{number:017x}", None, state, tags(), platform="windows" if number else ""))
    async with scripted(world) as fleet:
        found = await fleet.list_machines()
    assert [(item.instance_id[-1], item.os, item.launched_at) for item in found] == [
        ("0", "linux", None),
        ("1", "windows", None),
    ]


# Every observed scale-down scenario with the real adapters, against scripted servers ----------------------------------


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
    async with ec2_fleet(served, clock, settings.environment) as fleet:
        context = FleetContext(
            environment=settings.environment,
            fleet=fleet,
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
