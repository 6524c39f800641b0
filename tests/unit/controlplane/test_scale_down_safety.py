"""Random fleets, tags, stale lists, faults and races: scale-down kills no job and no machine with a live record.

The one exception is a confirmed orphan: marked as orphan, and its own runner is offline and busy at once.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remuda.controlplane.context import Context
from remuda.controlplane.scale_down import FleetContext, ScaleDownResult, scale_down
from remuda.domain.errors import Unavailable
from remuda.domain.instance import LIVE, State
from remuda.domain.scale_down.decisions import Action, ScaleDownPolicy
from remuda.domain.scale_down.fleet import FleetMachine
from remuda.domain.scale_down.idle_config import Eviction
from remuda.ports.calls import CallCounter
from simulation.loop import SeededIds, VirtualClock
from simulation.memory.compute import MemoryCloud, MemoryCompute, MemoryFleet, MemoryMachines
from simulation.memory.pool import MemoryQueues, MemoryResourcePool
from simulation.memory.store import MemoryDatabase, MemoryInstanceStore
from tests.support.records import birth, instance, instance_id, pool_config
from tests.support.scripted_fleet import ENVIRONMENT, ScriptedGitHub, ScriptedRunner, idle_window, machine
from tests.support.virtual_time import EventRecorder, hooked, run_virtual

POOL = "test"
OWNERS = ("acme", "beta", "solo/tool")
CYCLES = 3
EXAMPLES = 400


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
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
