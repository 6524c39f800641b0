"""One simulated world: store, queues, cloud and GitHub in memory, real agents on its machines, real commands.

Everything that is written, launched, registered or started is shown to the judge (`Safety`) as it happens.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, cast

from remuda.agent.loop import Agent
from remuda.controlplane.context import Context
from remuda.controlplane.operator import OperatorAction
from remuda.controlplane.provision import ProvisionRequest
from remuda.controlplane.refresh import DesiredConfig
from remuda.domain.instance import Instance
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.resources import DEFAULT_CLASSES, Tier
from remuda.domain.signals import Report
from remuda.domain.thresholds import Lifetimes
from remuda.ports.calls import CallCounter
from remuda.ports.compute import POOL_TAG
from remuda.ports.github import Deletion, GitHubRunner
from simulation.fake_machine import Host
from simulation.faults import MAX_SKEW_S, NO_RECORD, Fault, Faults
from simulation.faulty_ports import FaultyCompute, FaultyGitHub, FaultyPool, FaultyStore
from simulation.invariants import Safety, Violation
from simulation.loop import Cut, Process, SeededIds, VirtualClock, VirtualLoop, current_process
from simulation.memory.compute import MemoryCloud, MemoryCompute, MemoryMachine
from simulation.memory.github import MemoryGitHub, MemoryGitHubServer, MemoryJob, MemoryRunner
from simulation.memory.pool import MemoryQueues, MemoryResourcePool
from simulation.memory.store import Changes, MemoryDatabase, MemoryInstanceStore
from simulation.names import POOL, SCOPE, runner_of
from simulation.plan import Interrupt, Plan, ProcessCut
from simulation.trace import Trace

#: Short enough that half an hour holds several lives, with the margin and graces of a real pool.
LIFETIMES = Lifetimes(
    provision_timeout_s=240.0,
    max_runtime_s=420.0,
    idle_time_s=420.0,
    release_time_s=120.0,
    max_age_s=1_500.0,
    max_uses=6,
    margin_s=60.0,
    unrecorded_grace_s=300.0,
    # The grace of a ghost is for people's peace of mind: nothing may hang on it, but that EC2's list has caught up.
    ghost_grace_s=0.0,
    gone_after_s=60.0,
    reannounce_s=120.0,
    keep_records_s=300.0,
)
#: As the lifetimes, shorter than real ones: some credentials run out while they are held.
TOKEN_LIFE_S = 400.0
#: What people change the configuration to, in flight.
CONFIGURATIONS = (
    LIFETIMES,
    replace(LIFETIMES, idle_time_s=120.0, max_uses=2, ghost_grace_s=300.0, keep_records_s=60.0),
    replace(LIFETIMES, max_runtime_s=200.0, release_time_s=60.0, reannounce_s=60.0),
    replace(LIFETIMES, max_age_s=600.0, provision_timeout_s=120.0, keep_records_s=60.0),
)
#: How many versions of a record a lagging index can show.
VERSIONS = 12


class Halted(BaseException):
    """An invariant is violated: the world stops."""


class SimulatedProcess(Process):
    """A process of a world, and who it is."""

    def __init__(
        self,
        loop: VirtualLoop,
        name: str,
        *,
        kind: str,
        skew_s: float = 0.0,
        cuts: Sequence[Cut] = (),
        order: ProvisionRequest | None = None,
        run_id: str = "",
        attempt: int = 0,
        lever: OperatorAction | None = None,
    ) -> None:
        super().__init__(loop, name, skew_s=skew_s, cuts=cuts)
        self.kind = kind
        self.order = order
        self.run_id = run_id
        self.attempt = attempt
        #: What an operator pulls.
        self.lever = lever
        self.started_at = loop.time()
        #: Those whose intent it wrote.
        self.provisions: set[str] = set()
        #: Faults that it met, and when the last.
        self.hits = 0
        self.hit_at = -1e9
        self.calls: Counter[str] = Counter()
        self.paused_once = False
        self.pause_s = 0.0
        #: Hints that it sent: instance and epoch.
        self.sent: set[tuple[str, int]] = set()
        #: Instances whose hint was shown to it, and might be shown again at once.
        self.shown_early: set[str] = set()
        #: The instances that its last call was about.
        self.touching: Sequence[str] = ()
        #: Set when it ends.
        self.ended: asyncio.Future[None] = loop.create_future()

    def may_release(self, provision: Provision) -> bool:
        return provision.run_id == self.run_id and provision.attempt <= self.attempt


class _Watched(Changes):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def tell(self, key: tuple[type, str]) -> None:
        kind, instance_id = key
        if kind is Instance:
            self._world.record_written(instance_id)
        elif kind is Report:
            self._world.safety.report_written(instance_id)
        super().tell(key)


class _Provisions(dict[tuple[str, str], Provision]):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._by_id: dict[str, tuple[str, str]] = {}

    def __setitem__(self, key: tuple[str, str], after: Provision) -> None:
        before = self.get(key)
        self._by_id[after.provision_id] = key
        super().__setitem__(key, after)
        self._world.trace.add(
            "provision", f"{after.provision_id} of run {after.run_id}.{after.attempt}: {after.status}"
        )
        self._world.safety.provision_written(before, after)

    def by_id(self, provision_id: str) -> Provision | None:
        return self.get(self._by_id.get(provision_id, ("", "")))


class _Database(MemoryDatabase):
    provisions: _Provisions

    def __init__(self, world: World) -> None:
        self._world = world
        super().__init__(changes=_Watched(world))
        self.provisions = _Provisions(world)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "config" and isinstance(value, PoolConfig):
            self._world.safety.configured(value)


class WatchedGithub(MemoryGitHubServer):
    """GitHub, which remembers what its list looked like, and shows what happens to the judge."""

    def __init__(self, world: World) -> None:
        super().__init__(clock=world.clock, token_life_s=TOKEN_LIFE_S)
        self._world = world
        self.snapshots: deque[tuple[float, tuple[GitHubRunner, ...]]] = deque(maxlen=400)

    def register(self, scope: str, token: str, name: str, labels: Sequence[str]) -> MemoryRunner:
        runner = super().register(scope, token, name, labels)
        self._changed(f"registered {name}")
        self._world.safety.registered(name)
        return runner

    def add(self, scope: str, name: str, labels: Sequence[str] = (), *, ephemeral: bool = False) -> MemoryRunner:
        runner = super().add(scope, name, labels, ephemeral=ephemeral)
        if ephemeral:
            self._changed(f"registered {name} for one job")
            self._world.safety.registered(name)
        return runner

    def connect(self, runner_id: int, take: Callable[[MemoryJob], None]) -> bool:
        connected = super().connect(runner_id, take)
        self._changed(f"listener of {runner_id}: {connected}")
        return connected

    def disconnect(self, runner_id: int) -> None:
        super().disconnect(runner_id)
        self._changed(f"no listener of {runner_id}")

    def finish(self, job: MemoryJob, conclusion: str = "success") -> None:
        super().finish(job, conclusion)
        self._changed(f"job of run {job.run_id} on {job.runner_name}: {job.conclusion}")

    def delete(self, scope: str, runner_id: int) -> Deletion:
        deletion = super().delete(scope, runner_id)
        self._changed(f"delete {runner_id}: {deletion.value}")
        return deletion

    def _changed(self, what: str) -> None:
        views = tuple(
            GitHubRunner(
                runner_id=runner.runner_id,
                name=runner.name,
                online=runner.take is not None,
                busy=runner.job is not None and runner.job.started,
                labels=runner.labels,
            )
            for runner in self.runners.values()
        )
        self.snapshots.append((self._world.loop.time(), views))
        self._world.trace.add("github", what)


class _Lagging:
    """A clock that is behind: what a service shows that has not caught up."""

    def __init__(self, clock: VirtualClock, lag_s: float) -> None:
        self._clock = clock
        self._lag = timedelta(seconds=lag_s)

    def now(self) -> datetime:
        return self._clock.now() - self._lag

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


class _EventLog:
    """Tells the trace, and the judge looks for credentials."""

    def __init__(self, world: World, party: SimulatedProcess) -> None:
        self._world = world
        self._party = party

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        about = facts.get("instance_id") or facts.get("run_id") or ""
        self._world.trace.add(self._party.name, f"{action} {about}: {why}")
        self._world.stats[action] += 1
        self._world.safety.noted(action, why, facts)


class World:
    pool_name = POOL

    def __init__(self, plan: Plan, loop: VirtualLoop, *, keep_trace: bool = False) -> None:
        self.plan = plan
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.trace = Trace(loop.time, keep=keep_trace)
        self.stats: Counter[str] = Counter()
        self.violation: Violation | None = None
        self.faults = Faults(
            on=plan.faults,
            chance=random.Random(f"{plan.seed} faults"),
            spared=plan.spared,
            state_of=self._state_of,
            tell=lambda what: self.trace.add("", what),
        )
        self.ids = SeededIds(random.Random(f"{plan.seed} ids"))
        self._skews = random.Random(f"{plan.seed} skews")
        self.lifetimes = LIFETIMES
        self.throttled_until = -1.0
        #: Whose late write is applied just now.
        self.acting: SimulatedProcess | None = None
        self.safety = Safety(self)
        self.database = _Database(self)
        #: What records looked like, for indexes that lag.
        self.versions: dict[str, deque[tuple[float, Instance | None]]] = {}
        self.queues = MemoryQueues(clock=self.clock)
        self.cloud = MemoryCloud(clock=self.clock, ending_s=20.0, remembers_s=600.0)
        self.cloud.watchers.append(self)
        self.github = WatchedGithub(self)
        self._token = self.github.grant()
        self.hosts: dict[str, Host] = {}
        self.parties: dict[str, SimulatedProcess] = {}
        self.nobody = SimulatedProcess(loop, "nobody", kind="nobody")
        self._tiers: dict[str, Tier] = {}
        self._cuts: dict[str, list[ProcessCut]] = {}
        self._interrupts: dict[str, float] = {}
        for item in plan.operations:
            if isinstance(item, ProcessCut):
                self._cuts.setdefault(item.party, []).append(item)
            elif isinstance(item, Interrupt):
                self._interrupts[item.party] = item.after_s

    def stop(self, violation: Violation) -> None:
        """The first violation ends the world: what follows from it tells nothing more."""
        if self.violation is None:
            self.violation = violation
            self.trace.add("", f"VIOLATED {violation}")
            self.loop.complaints.append(Halted())

    # Machines

    def launched(self, machine: MemoryMachine) -> None:
        if machine.tags.get(POOL_TAG) != POOL:
            return
        self.stats["lives"] += 1
        number = self.stats["lives"]
        self.trace.add("ec2", f"launched {machine.instance_id}")
        self.safety.launched(machine)
        self.hosts[machine.instance_id] = Host(self, machine, number)

    def ending(self, machine: MemoryMachine) -> None:
        host = self.hosts.get(machine.instance_id)
        if host is None:
            self.safety.violated("S7", f"{machine.instance_id} of another pool was ended")
            return
        host.power_off(machine.reason)

    def cut_power(self, instance_id: str, why: str) -> None:
        if self.cloud.is_alive(instance_id):
            self.cloud.end(instance_id, why)

    @contextmanager
    def cloud_as_it_was(self, lag_s: float) -> Generator[None]:
        self.cloud.clock = _Lagging(self.clock, lag_s)
        try:
            yield
        finally:
            self.cloud.clock = self.clock

    def agent(self, host: Host, name: str) -> SimulatedProcess:
        party = self._party(name, kind="agent", skew_s=host.skew_s)
        store = MemoryInstanceStore(clock=self.clock, calls=CallCounter(), database=self.database)
        agent = Agent(
            store=cast("Any", FaultyStore(store, self, party)),
            machine=host,
            runner=host,
            clock=VirtualClock(self.loop, party),
            ids=self.ids,
            event_log=_EventLog(self, party),
            version="simulated",
        )
        party.touching = (host.instance_id,)
        party.start(agent.run())
        return party

    def agent_ended(self, host: Host) -> None:
        party = host.agent
        if party is not None and host.alive:
            self.safety.process_ended(party)

    def disturbed_at(self, host: Host) -> float:
        """When something last kept its agent from doing its work."""
        party = host.agent
        return max(host.disturbed_at, party.hit_at if party is not None else host.disturbed_at)

    # Commands

    def command(
        self,
        name: str,
        kind: str,
        work: Callable[[Context], Coroutine[Any, Any, Any]],
        *,
        credentialed: bool = False,
        order: ProvisionRequest | None = None,
        run_id: str = "",
        attempt: int = 0,
        lever: OperatorAction | None = None,
    ) -> SimulatedProcess:
        """Start one; it is told when it has ended."""
        who = {"order": order, "run_id": run_id, "attempt": attempt, "lever": lever}
        party = self._party(name, kind=kind, skew_s=self.skew(self._skews), **who)
        if order is not None:
            self._tiers[order.run_id] = order.tier
        party.on_end = lambda: self._ended(party)
        self.stats[f"{kind}s"] += 1
        party.start(work(self._context(party, credentialed=credentialed)))
        if (after_s := self._interrupts.get(name)) is not None:
            self.loop.call_later(after_s, self._interrupt, party, context=self.loop.outside)
        return party

    def _context(self, party: SimulatedProcess, *, credentialed: bool) -> Context:
        calls = CallCounter()
        clock = VirtualClock(self.loop, party)
        github = MemoryGitHub(github=self.github, token=self._token, calls=calls) if credentialed else None
        store = MemoryInstanceStore(clock=clock, calls=calls, database=self.database)
        pool = MemoryResourcePool(clock=clock, ids=self.ids, calls=calls, queues=self.queues)
        compute = MemoryCompute(cloud=self.cloud, pool=POOL, calls=calls)
        return Context(
            pool_name=POOL,
            store=cast("Any", FaultyStore(store, self, party)),
            pool=cast("Any", FaultyPool(pool, self, party)),
            compute=cast("Any", FaultyCompute(compute, self, party)),
            github=cast("Any", FaultyGitHub(github, self, party)) if github else None,
            clock=clock,
            ids=self.ids,
            event_log=_EventLog(self, party),
            calls=calls,
        )

    def _party(self, name: str, *, kind: str, skew_s: float, **who: Any) -> SimulatedProcess:
        cuts = [Cut(step=item.step, pause_s=item.pause_s) for item in self._cuts.get(name, ()) if not item.call]
        party = SimulatedProcess(
            self.loop, name, kind=kind, skew_s=skew_s, cuts=cuts if self.faults.active else (), **who
        )
        party.on_cut = lambda cut: self._cut(party, cut)
        self.parties[name] = party
        return party

    async def called(self, party: SimulatedProcess, operation: str) -> None:
        """A call was carried out, and its answer is on the way: the time for a crash that was planned for it."""
        party.calls[operation] += 1
        for item in self._cuts.get(party.name, ()):
            if item.call == operation and item.step == party.calls[operation] and self.faults.active:
                cut = Cut(step=item.step, pause_s=item.pause_s)
                self._cut(party, cut)
                if cut.pause_s:
                    party.pause(cut.pause_s)
                else:
                    party.crash()
                # A dead process does not come back from here, a paused one later.
                await asyncio.sleep(0)

    def _cut(self, party: SimulatedProcess, cut: Cut) -> None:
        is_agent = party.kind == "agent"
        if cut.pause_s:
            party.paused_once = True
            party.pause_s += cut.pause_s
            party.hit_at = self.loop.time() + cut.pause_s
            self.faults.happens(Fault.AGENT_PAUSE if is_agent else Fault.PAUSE, party.touching)
        else:
            self.stats["crashes"] += 1
            self.faults.happens(Fault.AGENT_CRASH if is_agent else Fault.CRASH, party.touching)
        self.trace.add(party.name, f"cut: {cut}")

    def _interrupt(self, party: SimulatedProcess) -> None:
        if self.faults.active and party.task is not None and not party.task.done():
            self.faults.happens(Fault.CANCEL, self.held_by(party))
            party.task.cancel()

    def _ended(self, party: SimulatedProcess) -> None:
        task = party.task
        how = "killed" if party.dead else "interrupted" if task is not None and task.cancelled() else "done"
        if how == "done" and task is not None and task.exception() is not None:
            how = repr(task.exception())
        self.trace.add(party.name, f"ended: {how}")
        self.safety.process_ended(party)
        if not party.ended.done():
            party.ended.set_result(None)

    def desired(self, config: int) -> DesiredConfig:
        return DesiredConfig(
            pool=POOL,
            classes=DEFAULT_CLASSES,
            lifetimes=CONFIGURATIONS[config],
            reuse=self.plan.reuses[config],
            max_instances=self.plan.instances,
            github_url="https://github.com",
            scope=SCOPE,
        )

    # What is there

    def record_written(self, instance_id: str) -> None:
        record = self.database.instances.get(instance_id)
        self.versions.setdefault(instance_id, deque(maxlen=VERSIONS)).append((self.loop.time(), record))
        if record is None:
            self.trace.add("record", f"{instance_id} is forgotten")
        else:
            said = f"{instance_id} {record.state} epoch {record.epoch} run {record.run_id or record.last_run_id}"
            self.trace.add("record", f"{said} until {record.threshold:%H:%M:%S}")
        self.safety.record_written(instance_id)
        writer = self.acting or current_process()
        if writer is not None and writer.skew_s:
            self.faults.cover(Fault.CLOCK_SKEW, instance_id)

    def skew(self, chance: random.Random) -> float:
        drawn = chance.uniform(-MAX_SKEW_S, MAX_SKEW_S)
        if Fault.CLOCK_SKEW not in self.plan.faults or not self.faults.active:
            return 0.0
        self.faults.happens(Fault.CLOCK_SKEW)
        return drawn

    def least(self, name: str) -> float:
        return min(float(getattr(item, name)) for item in CONFIGURATIONS)

    def most(self, name: str) -> float:
        return max(float(getattr(item, name)) for item in CONFIGURATIONS)

    def tier_of(self, run_id: str) -> Tier | None:
        return self._tiers.get(run_id)

    def held_by(self, party: SimulatedProcess) -> list[str]:
        return self.of_provisions(party.provisions)

    def of_provisions(self, provision_ids: Collection[str]) -> list[str]:
        """Their instances, and the machines that were launched for them and have no record yet."""
        recorded = self.database.instances
        held = [item.instance_id for item in recorded.values() if item.provision_id in provision_ids]
        launched = [
            key
            for key, host in self.hosts.items()
            if host.alive and key not in recorded and self.cloud.machines[key].request.provision_id in provision_ids
        ]
        return [*held, *launched]

    def registrations(self, instance_id: str | None = None) -> list[MemoryRunner]:
        found = [(runner, runner_of(runner.name)) for runner in self.github.runners.values()]
        return [runner for runner, name in found if name and instance_id in {None, name[1]}]

    def _state_of(self, instance_id: str) -> str:
        record = self.database.instances.get(instance_id)
        return record.state.value if record is not None else NO_RECORD
