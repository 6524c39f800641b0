"""Scale-down cycles over fleets in memory: actions, reports and number of calls."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from remuda.controlplane.scale_down import FleetContext, ScaleDownResult, scale_down
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.scale_down.decisions import Action
from remuda.domain.scale_down.fleet import FleetMachine
from remuda.domain.scale_down.policy import ScaleDownPolicy
from remuda.ports.calls import CallCounter
from simulation.loop import VirtualClock
from simulation.memory.compute import MemoryFleet, MemoryMachines
from tests.support.records import instance_id
from tests.support.scripted_fleet import ENVIRONMENT, ScriptedGitHub, ScriptedRunner, machine
from tests.support.virtual_time import Call, EventRecorder, Killed, hooked


class Fleet:
    """A fleet and a scripted GitHub. The loop's clock starts at NOW."""

    def __init__(self, *machines: FleetMachine) -> None:
        self.machines = MemoryMachines()
        for item in machines:
            self.machines.add(item)
        self.hub = ScriptedGitHub()
        self.notes = EventRecorder()
        self.fleet = MemoryFleet(machines=self.machines, environment=ENVIRONMENT, calls=CallCounter())

    def add_runners(self, *numbers: int, **more: Any) -> None:
        """Register the runners of these machines, all alike."""
        for number in numbers:
            self.hub.add(ScriptedRunner(runner_id=number, name=f"r-{instance_id(number)}", **more))

    async def cycle(
        self, policy: ScaleDownPolicy | None = None, *, dry_run: bool = False, **more: Any
    ) -> ScaleDownResult:
        context = FleetContext(
            environment=ENVIRONMENT,
            fleet=self.fleet,
            github=self.hub,
            clock=VirtualClock(),
            event_log=self.notes,
            calls=self.hub.calls,
            **more,
        )
        return await scale_down(context, policy or ScaleDownPolicy(), dry_run=dry_run)

    @property
    def orphans(self) -> list[str]:
        return [name for name, item in self.machines.alive.items() if item.is_orphan]


async def test_thousand_busy_runners_cost_only_list_calls() -> None:
    fleet = Fleet(*(machine(number) for number in range(1, 1_001)))
    fleet.add_runners(*range(1, 1_001), busy=True)
    result = await fleet.cycle()
    assert len(fleet.hub.requests) == 10
    assert {item.decision.action for item in result.outcomes} == {Action.KEEP}
    assert not fleet.machines.ended


async def test_calls_per_removal_and_per_orphan_lookup() -> None:
    fleet = Fleet(machine(1), machine(2), machine(3, orphan="true", github_runner_id="3"), machine(4))
    fleet.add_runners(1, 2)
    fleet.add_runners(3, online=False, busy=True)
    fleet.add_runners(4, busy=True)
    await fleet.cycle()
    assert sorted(fleet.machines.ended) == list(map(instance_id, (1, 2, 3)))
    assert len(fleet.hub.requests) == 1 + 2 * 2 + 1


async def test_removals_respect_the_github_rate_limit() -> None:
    """At 800 points per minute and 6 per removal, 133 removals run at once and the others a minute later."""
    fleet = Fleet(*(machine(number) for number in range(1, 201)))
    fleet.add_runners(*range(1, 201))
    points: list[tuple[float, int]] = []

    def paced(operation: str, _scope: str, _runner: int) -> bool:
        points.append((asyncio.get_running_loop().time(), 5 if operation == "delete" else 1))
        return False

    fleet.hub.fails = paced
    result = await fleet.cycle()
    assert len(fleet.machines.ended) == 200
    assert 60 <= result.seconds <= 65
    for at, _ in points:
        assert sum(cost for when, cost in points if at <= when < at + 60) <= 900


async def test_dry_run_has_the_same_decisions_and_changes_nothing() -> None:
    fleet = Fleet(
        machine(1), machine(2, orphan="true"), machine(3), machine(4, orphan="true", github_runner_id="4"), machine(5)
    )
    fleet.add_runners(1)
    fleet.add_runners(4, busy=True)
    fleet.add_runners(5, listed_busy=False, busy=True)
    before = dict(fleet.machines.alive)
    planned = await fleet.cycle(dry_run=True)
    assert fleet.machines.alive == before
    assert all(operation in {"list", "get"} for operation, *_ in fleet.hub.requests)
    done = await fleet.cycle()
    shown = [(item.decision.instance_id, item.decision.action) for item in planned.outcomes]
    assert shown == [(item.decision.instance_id, item.decision.action) for item in done.outcomes]
    assert not any(item.done for item in planned.outcomes if item.decision.action not in {Action.KEEP, Action.SKIP})
    assert planned.dry_run


async def test_failure_of_one_owner_does_not_affect_others() -> None:
    fleet = Fleet(machine(1), machine(2, owner="beta/x"), machine(3, owner="gamma"), machine(4, owner="beta/x"))
    fleet.add_runners(1)
    fleet.add_runners(2, scope="beta/x")
    fleet.add_runners(3, scope="gamma")
    fleet.hub.fails = lambda _operation, scope, _runner: scope == "beta/x"
    result = await fleet.cycle()
    assert sorted(fleet.machines.ended) == list(map(instance_id, (1, 3)))
    assert not fleet.orphans
    (error,) = result.errors
    assert "beta/x" in error


async def test_failed_lookup_keeps_only_that_runner() -> None:
    fleet = Fleet(*(machine(number) for number in range(1, 4)))
    fleet.add_runners(*range(1, 4))
    fleet.hub.fails = lambda operation, _scope, runner: (operation, runner) in {("get", 1), ("delete", 2)}
    result = await fleet.cycle()
    assert fleet.machines.ended == [instance_id(3)]
    assert [error.split(":")[0] for error in result.errors] == list(map(instance_id, (1, 2)))
    failed = {item.decision.instance_id for item in result.outcomes if not item.done}
    assert failed == set(map(instance_id, (1, 2)))


class Stubborn(MemoryFleet):
    """A fleet that refuses to change some machines."""

    refused: frozenset[str] = frozenset()

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        allowed = [name for name in instance_ids if name not in self.refused]
        return {**await super().terminate(allowed), **{name: "denied" for name in instance_ids if name in self.refused}}

    async def mark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        raise Unavailable(f"tags of {len(instance_ids)} machines cannot be changed")


async def test_failed_actions_are_reported_and_retried() -> None:
    fleet = Fleet(machine(1), machine(2), machine(3))
    fleet.add_runners(1, 2)
    stubborn = Stubborn(machines=fleet.machines, environment=ENVIRONMENT, calls=CallCounter())
    stubborn.refused = frozenset({instance_id(2)})
    usual, fleet.fleet = fleet.fleet, stubborn
    result = await fleet.cycle()
    assert fleet.machines.ended == [instance_id(1)]
    assert [error.split(":")[0] for error in result.errors] == [instance_id(2), instance_id(3)]
    # Its registration is gone, so later cycles find and terminate it as an orphan.
    fleet.fleet = usual
    await fleet.cycle()
    assert fleet.orphans == [instance_id(2), instance_id(3)]
    await fleet.cycle()
    assert not fleet.machines.alive


async def test_busy_orphan_without_runner_id_is_kept_and_unmarked() -> None:
    fleet = Fleet(machine(1, orphan="true"), machine(2, orphan="true"), machine(3, orphan="true"))
    fleet.add_runners(1, busy=True)
    # The list is stale; the read before the termination is not.
    fleet.add_runners(2, busy=True, listed_busy=False)
    fleet.add_runners(3)
    await fleet.cycle()
    assert fleet.machines.ended == [instance_id(3)]
    assert not fleet.orphans
    assert 3 not in fleet.hub.runners


async def test_machine_without_owner_is_searched_in_every_list() -> None:
    lost = machine(1, orphan="true", owner="", Type="")
    fleet = Fleet(lost, machine(2))
    fleet.add_runners(1, 2, busy=True)
    await fleet.cycle()
    assert not fleet.machines.ended
    assert not fleet.orphans


async def test_machine_without_owner_is_kept_if_a_list_failed() -> None:
    lost = machine(1, orphan="true", owner="", Type="")
    fleet = Fleet(lost, machine(2), machine(3, owner="beta/x"))
    fleet.add_runners(1, scope="beta/x", busy=True)
    fleet.add_runners(2, busy=True)
    fleet.hub.fails = lambda _operation, scope, _runner: scope == "beta/x"
    await fleet.cycle()
    assert not fleet.machines.ended
    assert fleet.orphans == [instance_id(1)]


async def test_orphan_without_type_is_searched_at_its_owner() -> None:
    fleet = Fleet(machine(1, orphan="true", Type=""), machine(2, orphan="true", owner="solo/tool", Type="Org"))
    fleet.add_runners(1, busy=True)
    fleet.add_runners(2, scope="solo/tool")
    await fleet.cycle()
    assert fleet.machines.ended == [instance_id(2)]
    assert not fleet.orphans


async def test_runner_id_tag_is_looked_up_before_termination() -> None:
    """Two registrations, one of which is missing in a stale list."""
    fleet = Fleet(machine(1, github_runner_id="9"))
    fleet.add_runners(1)
    fleet.hub.add(ScriptedRunner(runner_id=9, name=f"late-{instance_id(1)}", busy=True, listed=False))
    await fleet.cycle()
    assert not fleet.machines.ended
    assert 1 in fleet.hub.runners


async def test_recovered_orphan_missing_in_the_list_is_not_marked_again() -> None:
    fleet = Fleet(machine(1, orphan="true", github_runner_id="1"))
    fleet.add_runners(1, busy=True, listed=False)
    result = await fleet.cycle()
    assert [item.decision.action for item in result.outcomes] == [Action.UNMARK_ORPHAN, Action.KEEP]
    assert not fleet.orphans


async def test_budget_spreads_removals_over_cycles() -> None:
    fleet = Fleet(machine(1, orphan="true"), *(machine(number, age_s=600 + number) for number in range(2, 6)))
    fleet.add_runners(*range(1, 6))
    await fleet.cycle(ScaleDownPolicy(max_removals=2))
    assert fleet.machines.ended == list(map(instance_id, (1, 5)))
    await fleet.cycle(ScaleDownPolicy(max_removals=2))
    assert sorted(fleet.machines.ended) == list(map(instance_id, (1, 3, 4, 5)))


async def test_decisions_are_logged_with_reasons() -> None:
    fleet = Fleet(machine(1), machine(2, age_s=1), machine(3))
    fleet.add_runners(1)
    await fleet.cycle()
    logged = {action: why for action, why in fleet.notes.lines if action.startswith("scale-")}
    assert set(logged) == {"scale-terminate", "scale-keep", "scale-mark-orphan"}
    assert all(logged.values())


async def test_missing_permission_to_list_is_an_error() -> None:
    class Denied(MemoryFleet):
        async def list_machines(self, *, orphans: bool = False) -> list[FleetMachine]:
            raise UserError(f"denied ({orphans})", fix="give the role the right")

    fleet = Fleet()
    fleet.fleet = Denied(machines=fleet.machines, environment=ENVIRONMENT, calls=CallCounter())
    with pytest.raises(UserError):
        await fleet.cycle()


async def test_pool_is_opened_only_if_a_machine_has_its_tag() -> None:
    opened = 0

    @asynccontextmanager
    async def open_pool():
        nonlocal opened
        opened += 1
        raise Unavailable("no store here")
        yield

    fleet = Fleet(machine(1), machine(2))
    fleet.add_runners(1)
    result = await fleet.cycle(open_pool=open_pool)
    assert (opened, result.errors, fleet.machines.ended) == (0, (), [instance_id(1)])
    fleet.machines.add(machine(3))
    fleet.machines.alive[instance_id(3)].tags["remuda:pool"] = "test"  # type: ignore[index]
    result = await fleet.cycle(open_pool=open_pool)
    assert opened == 1
    assert len(result.errors) == 1
    assert instance_id(3) in fleet.machines.alive
    assert not fleet.machines.alive[instance_id(3)].is_orphan


async def test_job_assigned_between_check_and_deletion_is_not_killed() -> None:
    fleet = Fleet(machine(1), machine(2, orphan="true"))
    fleet.add_runners(1, 2, busy_after_lookups=1)
    result = await fleet.cycle()
    assert not fleet.machines.ended
    assert not fleet.orphans
    assert not result.errors
    assert "busy" in result.outcomes[-1].decision.reason


# Interruption -----------------------------------------------------------------------------------------------------


def mixed_fleet() -> Fleet:
    fleet = Fleet(
        machine(1),
        machine(2),
        machine(3, orphan="true"),
        machine(4, orphan="true", github_runner_id="4"),
        machine(5, orphan="true", github_runner_id="5"),
        machine(6),
        machine(7),
        machine(8, age_s=1),
    )
    fleet.add_runners(1)
    fleet.add_runners(2, 4, busy=True)
    fleet.add_runners(5, online=False, busy=True)
    fleet.add_runners(7, 8)
    return fleet


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_cycle_killed_at_each_call_is_finished_by_later_cycles(*, after: bool) -> None:
    """The tags are the only state. Each call is interrupted once before and once after it was made."""
    number = 0
    while True:
        number += 1
        fleet, seen = mixed_fleet(), 0

        async def cut(operation: str, call: Call, *, at: int = number) -> object:
            nonlocal seen
            seen += 1
            if seen != at:
                return await call()
            if after:
                await call()
            raise Killed(operation)

        usual = fleet.fleet, fleet.hub
        fleet.fleet, fleet.hub = hooked(fleet.fleet, "fleet", cut), hooked(fleet.hub, "github", cut)
        try:
            await fleet.cycle()
        except Killed:
            pass
        else:
            break
        fleet.fleet, fleet.hub = usual
        for _ in range(3):
            assert not (await fleet.cycle()).errors
        assert sorted(fleet.machines.alive) == list(map(instance_id, (2, 4, 8))), number
        assert not fleet.orphans
        assert set(fleet.hub.runners) == {2, 4, 5, 8}
    assert number > 10
