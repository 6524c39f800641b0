"""Scale-down with a pool: recorded machines are kept, and idle instances are renewed up to the quota."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.adapters.local.compute import LocalFleet
from remuda.controlplane.context import Context
from remuda.controlplane.read.feed import KnownInstance
from remuda.controlplane.scale_down import FleetContext, ScaleDownResult, scale_down
from remuda.domain.errors import Unavailable
from remuda.domain.instance import LIVE, State
from remuda.domain.resources import DEFAULT_CLASSES, ResourceClass, Reuse, TypePatterns
from remuda.domain.scale_down.decisions import Action
from remuda.domain.scale_down.fleet import FleetMachine
from remuda.domain.scale_down.idle_config import Eviction
from remuda.domain.scale_down.policy import ScaleDownPolicy
from remuda.ports.calls import CallCounter
from remuda.web.dashboard.serialize import decisions, milliseconds
from simulation.invariants import POOL, SCOPE
from simulation.loop import SeededIds, VirtualClock
from simulation.memory.compute import MemoryCloud, MemoryCompute, MemoryFleet, MemoryMachines
from simulation.memory.pool import MemoryQueues, MemoryResourcePool
from simulation.memory.store import MemoryDatabase, MemoryInstanceStore
from tests.support.mutations import fuzzed
from tests.support.records import birth, instance, instance_id, pool_config
from tests.support.scripted_fleet import ENVIRONMENT, ScriptedGitHub, ScriptedRunner, idle_window, machine, tags
from tests.support.virtual_time import Call, EventRecorder, Hook, failing, hooked, run_virtual
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
    assert result.errors == (f"pool {POOL}: the store is out of reach",)


async def test_nothing_is_renewed_in_a_pool_without_a_configuration() -> None:
    result = await cycle(PoolWorld(), keeping(2))
    assert not result.errors


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
            for each in found:
                each.tags["remuda:pool"] = "other"  # type: ignore[index]
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


# Random fleets, tags, stale lists, faults and races: no job and no machine with a live record is killed ---------------
#
# The one exception is a confirmed orphan: marked as orphan, and its own runner is offline and busy at once.


OWNERS = ("acme", "beta", "solo/tool")
CYCLES = 3


@dataclass(frozen=True)
class Case:
    machines: list[FleetMachine]
    runners: list[ScriptedRunner]
    #: State of the record per machine.
    records: dict[int, State]
    #: Numbers of the calls to GitHub that fail.
    failing: frozenset[int]
    store_fails_at: int | None
    idle_count: int
    eviction: Eviction
    budget: int | None


@st.composite
def machine_tags(draw: st.DrawFn, number: int) -> dict[str, str]:
    """Valid and invalid tags."""
    kept: dict[str, str] = {}
    if draw(st.booleans()):
        kept["orphan"] = draw(st.sampled_from(["true", "true", "true", "false"]))
    runner_id_tag = draw(st.sampled_from(["", "own", "other", "none", "junk"]))
    if runner_id_tag:
        ids = {"own": str(number), "other": str(number % 5 + 1), "none": "777", "junk": "x1"}
        kept["github_runner_id"] = ids[runner_id_tag]
    if draw(st.integers(0, 9)) == 0:
        kept["bypass"] = "true"
    if draw(st.integers(0, 9)) == 0:
        kept["Type"] = draw(st.sampled_from(["", "Org", "Repo"]))
    return kept


@st.composite
def cases(draw: st.DrawFn) -> Case:
    machines: list[FleetMachine] = []
    runners: list[ScriptedRunner] = []
    records: dict[int, State] = {}
    for number in range(1, draw(st.integers(1, 6)) + 1):
        owner = draw(st.sampled_from(OWNERS))
        age = draw(st.sampled_from([None, -60, 30, 299, 300, 301, 3_600]))
        made = machine(number, age_s=age, owner=owner, **draw(machine_tags(number)))
        if draw(st.integers(0, 3)) == 0:
            made.tags["remuda:pool"] = POOL  # type: ignore[index]
            if draw(st.booleans()):
                records[number] = draw(st.sampled_from(sorted(State)))
        machines.append(made)
        for extra in range(draw(st.integers(0, 2))):
            flags = st.sampled_from([None, True, False])
            runner = ScriptedRunner(
                runner_id=number if not extra else 100 * extra + number,
                name=f"r{extra}-{instance_id(number)}",
                scope=owner,
                online=draw(st.booleans()),
                busy=draw(st.booleans()),
                listed_online=draw(flags),
                listed_busy=draw(flags),
                busy_after_lookups=draw(st.sampled_from([None, None, 1, 2])),
            )
            runners.append(runner)
    return Case(
        machines=machines,
        runners=runners,
        records=records,
        failing=draw(st.frozensets(st.integers(1, 25), max_size=6)),
        store_fails_at=draw(st.none() | st.integers(1, 6)),
        idle_count=draw(st.integers(0, 3)),
        eviction=draw(st.sampled_from(Eviction)),
        budget=draw(st.none() | st.integers(0, 3)),
    )


class CheckedMachines(MemoryMachines):
    """Checks each termination when it happens."""

    __slots__ = ("broken", "case", "database", "hub")

    def __init__(self, case: Case, hub: ScriptedGitHub, database: MemoryDatabase) -> None:
        super().__init__()
        self.case = case
        self.hub = hub
        self.database = database
        self.broken: list[str] = []

    def end(self, instance_id: str) -> None:
        ended = self.alive.get(instance_id)
        if ended is not None:
            self._check(ended)
        super().end(instance_id)

    def _check(self, ended: FleetMachine) -> None:
        record = self.database.instances.get(ended.instance_id)
        if record is not None and record.state in LIVE:
            self.broken.append(f"{ended.instance_id} has a live record ({record.state})")
        if ended.is_bypassed:
            self.broken.append(f"{ended.instance_id} is to be left alone")
        own = self.hub.runners.get(ended.runner_id or 0)
        confirmed = ended.is_orphan and own is not None and own.busy and not own.online
        for runner in self.hub.runners.values():
            if runner.busy and runner.name.endswith(ended.instance_id) and not confirmed:
                self.broken.append(f"{ended.instance_id} ran a job as {runner.name}")


class Trial:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.asked = 0
        self.store_asked = 0
        self.hub = ScriptedGitHub(fails=self._fails)
        for runner in case.runners:
            self.hub.add(runner)
        self.database = MemoryDatabase()
        self.machines = CheckedMachines(case, self.hub, self.database)
        for item in case.machines:
            self.machines.add(item)

    def _fails(self, _operation: str, _scope: str, _runner_id: int) -> bool:
        self.asked += 1
        return self.asked in self.case.failing

    async def _store_hook(self, operation: str, call: Any) -> Any:
        self.store_asked += 1
        if self.store_asked == self.case.store_fails_at:
            raise Unavailable(f"{operation} fails")
        return await call()

    async def run(self) -> list[ScaleDownResult]:
        clock, ids, calls = VirtualClock(), SeededIds(), CallCounter()
        store = MemoryInstanceStore(clock=clock, calls=calls, database=self.database)
        await store.put_config(pool_config())
        for number, state in self.case.records.items():
            await store.apply(birth(instance(number, state=state)))
        context = Context(
            pool_name=POOL,
            store=hooked(store, "store", self._store_hook),
            pool=MemoryResourcePool(clock=clock, ids=ids, calls=calls, queues=MemoryQueues(clock=clock)),
            compute=MemoryCompute(cloud=MemoryCloud(clock=clock), pool=POOL, calls=calls),
            github=None,
            clock=clock,
            ids=ids,
            event_log=EventRecorder(),
            calls=calls,
        )

        window = idle_window(self.case.idle_count, eviction=self.case.eviction)
        fleet = FleetContext(
            environment=ENVIRONMENT,
            fleet=MemoryFleet(machines=self.machines, environment=ENVIRONMENT, calls=calls),
            github=self.hub,
            clock=clock,
            event_log=EventRecorder(),
            calls=calls,
            open_pool=lambda: nullcontext(context),
        )
        policy = ScaleDownPolicy(windows=(window,), max_removals=self.case.budget)
        results = []
        for _ in range(CYCLES):
            results.append(await scale_down(fleet, policy))
            await clock.sleep(300)
        return results


@given(cases())
@fuzzed(120)
def test_no_job_is_killed_and_no_recorded_machine_terminated(case: Case) -> None:
    trial = Trial(case)
    results = run_virtual(trial.run())
    assert not trial.machines.broken, trial.machines.broken
    for result in results:
        assert all(item.decision.reason for item in result.outcomes)
        not_done = [item for item in result.outcomes if not item.done]
        assert not not_done or result.errors, "failed actions are reported"
    terminated = [item for result in results for item in result.of(Action.TERMINATE) if item.done]
    assert sorted(item.decision.instance_id for item in terminated) == sorted(trial.machines.ended)


LARGER = ResourceClass(name="large", cpu=4, memory_mib=8_192)


@pytest.mark.parametrize(
    "changed",
    [
        {"classes": DEFAULT_CLASSES[1:]},
        {"classes": (LARGER, *DEFAULT_CLASSES[1:])},
        {"classes": (replace(DEFAULT_CLASSES[0], types=TypePatterns(("t9.*",))), *DEFAULT_CLASSES[1:])},
        {"reuse": Reuse.SAME_REPO},
    ],
    ids=["removed class", "larger class", "other types", "several repositories"],
)
async def test_idle_instances_that_no_run_can_get_are_not_renewed(world: PoolWorld, changed: dict[str, Any]) -> None:
    await world.warm(1, repository="acme/one")
    (useless,) = await world.warm(1, repository="acme/two")
    (useful,) = await world.warm(1, resource_class="xlarge", repository="acme/one")
    await world.configure(**changed)
    await pass_time(world, 180, keeping(1))
    assert world.in_state(State.IDLE) == [useful]
    assert world.record(useless).state is State.TERMINATED
