"""Scale-down with a pool: recorded machines are kept, and idle instances are renewed up to the quota."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from remuda.adapters.local.compute import LocalFleet
from remuda.controlplane.read.feed import KnownInstance
from remuda.controlplane.scale_down import FleetContext, ScaleDownResult, scale_down
from remuda.domain.errors import Unavailable
from remuda.domain.instance import State
from remuda.domain.scale_down.decisions import Action, ScaleDownPolicy
from remuda.web.dashboard.serialize import decisions, milliseconds
from simulation.invariants import POOL, SCOPE
from tests.support.scripted_fleet import idle_window, tags
from tests.support.virtual_time import Call, Hook, failing
from tests.support.world import PoolWorld

ORPHAN = "ghr:orphan"
CYCLE_S = 30.0


def keeping(idle_count: int) -> ScaleDownPolicy:
    return ScaleDownPolicy(windows=(idle_window(idle_count),), boot_min=0.5)


async def cycle(
    world: PoolWorld,
    policy: ScaleDownPolicy | None = None,
    hook: Hook | None = None,
    *,
    fleet: type[LocalFleet] = LocalFleet,
    dry_run: bool = False,
) -> ScaleDownResult:
    pool = world.process(hook, credentialed=True)
    assert pool.github is not None
    context = FleetContext(
        environment=POOL,
        fleet=fleet(compute=pool.compute, pool=POOL, environment=POOL),
        github=pool.github,
        clock=pool.clock,
        event_log=pool.event_log,
        calls=pool.calls,
        open_pool=lambda: nullcontext(pool),
        has_pool=True,
    )
    return await scale_down(context, policy or ScaleDownPolicy(boot_min=0.5), dry_run=dry_run)


def mark(world: PoolWorld, *instance_ids: str) -> None:
    for name in instance_ids:
        assert world.cloud.retag(name, lambda present: {**present, ORPHAN: "true"})


def is_marked(world: PoolWorld, instance_id: str) -> bool:
    return ORPHAN in world.cloud.machines[instance_id].tags


async def pass_time(world: PoolWorld, seconds: float, policy: ScaleDownPolicy) -> None:
    for _ in range(int(seconds / CYCLE_S)):
        await world.pass_time(CYCLE_S)
        result = await cycle(world, policy)
        assert not result.errors


async def test_quota_renews_two_and_the_third_expires(world: PoolWorld) -> None:
    ids = await world.warm(3)
    await pass_time(world, 300, keeping(2))
    assert len(world.in_state(State.IDLE)) == 2
    assert set(world.in_state(State.IDLE)) < set(ids)
    # After the window they are not renewed.
    await world.pass_time(120)
    assert not world.in_state(State.IDLE)


async def test_dashboard_shows_each_renewal_once(world: PoolWorld) -> None:
    kept = set(await world.warm(2))
    await pass_time(world, 180, keeping(2))
    histories = await world.process().store.histories(sorted(kept))
    for name in kept:
        shown = decisions(KnownInstance(instance=world.record(name), history=histories[name]))
        (kept,) = (json.loads(text) for _, key, text in shown if key == f"{name}/kept")
        assert (kept["by"], kept["instance"], kept["what"]) == ("scale-down", name, "kept in the pool")
        assert kept["why"]
        assert kept["at"] == max(milliseconds(entry.at) for entry in histories[name] if entry.transition == "renew")


async def test_renewed_instances_can_be_claimed(world: PoolWorld) -> None:
    await world.warm(2)
    await pass_time(world, 180, keeping(2))
    result = await world.provision("2", count=2)
    assert result.reused == 2
    await world.release("2")


async def test_renewal_stops_at_the_maximum_age(world: PoolWorld) -> None:
    (name,) = await world.warm(1)
    record = world.record(name)
    world.lifetimes = replace(world.lifetimes, max_age_s=200.0)
    await world.configure(lifetimes=world.lifetimes)
    for _ in range(8):
        await asyncio.sleep(CYCLE_S)
        await cycle(world, keeping(1))
        now = world.record(name)
        latest = (now.threshold - record.created_at).total_seconds()
        assert latest <= 200.0
    await world.sweep()
    assert world.record(name).state in {State.TERMINATING, State.TERMINATED}


async def test_machine_with_a_live_record_is_kept_and_unmarked(world: PoolWorld) -> None:
    """Idle instances have no registration, and reused ones are older than the boot time."""
    await world.warm(2)
    made = await world.provision("2")
    await asyncio.sleep(60)
    everyone = world.alive()
    mark(world, *everyone)
    result = await cycle(world)
    assert world.alive() == everyone
    assert not any(is_marked(world, name) for name in everyone)
    assert {item.decision.action for item in result.outcomes} == {Action.UNMARK_ORPHAN}
    result = await cycle(world)
    assert {item.decision.action for item in result.outcomes} == {Action.KEEP}
    assert all("record" in item.decision.reason for item in result.outcomes)
    # GitHub was not called.
    assert "github" not in result.calls
    assert made.instances
    await world.release("2")


async def test_pool_machine_without_a_record_is_decided_by_its_registrations() -> None:
    world = PoolWorld()
    await world.configure()
    (name,) = await world.warm(1)
    world.cloud.retag(name, lambda present: {**present, **tags(SCOPE), "ghr:environment": POOL})
    del world.database.instances[name]
    await asyncio.sleep(40)
    assert (await cycle(world)).of(Action.MARK_ORPHAN)
    assert is_marked(world, name)
    assert (await cycle(world)).of(Action.TERMINATE)
    assert not world.alive()


async def test_pool_machines_are_skipped_if_the_store_is_unreachable(world: PoolWorld) -> None:
    ids = await world.warm(2)
    await asyncio.sleep(60)
    mark(world, ids[0])
    result = await cycle(world, keeping(2), failing("store.", Unavailable("the store is out of reach")))
    assert sorted(world.alive()) == sorted(ids)
    assert is_marked(world, ids[0])
    assert {item.decision.action for item in result.outcomes} == {Action.SKIP}
    (error,) = result.errors
    assert "out of reach" in error


async def test_record_written_during_the_lists_counts(world: PoolWorld) -> None:
    """Records are read again after the lists, because a new machine gets its record after its launch."""
    (name,) = await world.warm(1)
    world.cloud.retag(name, lambda present: {**present, **tags(SCOPE), "ghr:environment": POOL})
    record = world.database.instances.pop(name)
    await asyncio.sleep(40)
    mark(world, name)

    async def late(operation: str, call: Call) -> Any:
        if operation == "github.list_runners":
            world.database.instances[name] = record
        return await call()

    result = await cycle(world, hook=late)
    assert [item.decision.action for item in result.outcomes] == [Action.UNMARK_ORPHAN]
    assert world.alive() == [name]


async def test_machine_of_another_pool_is_skipped(world: PoolWorld) -> None:
    (name,) = await world.warm(1)

    class Mixed(LocalFleet):
        async def list_machines(self, *, orphans: bool = False) -> Any:
            found = await super().list_machines(orphans=orphans)
            for machine in found:
                machine.tags["remuda:pool"] = "other"  # type: ignore[index]
            return found

    record = world.database.instances.pop(name)
    result = await cycle(world, ScaleDownPolicy(), fleet=Mixed)
    assert [item.decision.action for item in result.outcomes] == [Action.SKIP]
    assert "other" in result.outcomes[0].decision.reason
    world.database.instances[name] = record


async def test_claim_before_the_renewal_wins(world: PoolWorld) -> None:
    await world.warm(1)
    claimed = asyncio.Event()

    async def slow(operation: str, call: Call) -> Any:
        if operation == "store.apply" and not claimed.is_set():
            claimed.set()
            await world.provision("2")
        return await call()

    await asyncio.sleep(CYCLE_S)
    result = await cycle(world, keeping(1), slow)
    assert not result.errors
    (outcome,) = result.outcomes
    assert "not renewed" in outcome.decision.reason
    (name,) = world.in_state(State.RUNNING)
    assert world.record(name).epoch == 2
    await world.release("2")


async def test_claim_after_the_renewal_succeeds(world: PoolWorld) -> None:
    await world.warm(1)
    await asyncio.sleep(CYCLE_S)
    result = await cycle(world, keeping(1))
    assert "kept as idle: 1 of 1" in result.outcomes[0].decision.reason
    provisioned = await world.provision("2")
    assert provisioned.reused == 1
    await world.release("2")


@pytest.mark.parametrize("dry_run", [True, False])
async def test_dry_run_renews_nothing(world: PoolWorld, *, dry_run: bool) -> None:
    (name,) = await world.warm(1)
    await asyncio.sleep(CYCLE_S)
    before = world.record(name).threshold
    result = await cycle(world, keeping(1), dry_run=dry_run)
    assert (world.record(name).threshold == before) is dry_run
    assert "kept as idle" in result.outcomes[0].decision.reason
