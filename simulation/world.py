"""One simulated world: store, queues, cloud and GitHub in memory, real agents on its machines, real commands.

The invariants are checked at every write, launch, registration and start.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, cast

from remuda.agent.loop import Agent
from remuda.controlplane.context import Context
from remuda.controlplane.operator import OperatorAction
from remuda.controlplane.provision import ProvisionRequest
from remuda.controlplane.refresh import DesiredConfig
from remuda.domain.demand import LISTENER_LEASE, Lease
from remuda.domain.instance import Instance
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.resources import DEFAULT_CLASSES, Tier
from remuda.domain.runner_release import SHA256, VERSION
from remuda.domain.signals import Report
from remuda.domain.thresholds import Lifetimes
from remuda.ports.calls import CallCounter
from remuda.ports.compute import POOL_TAG
from remuda.ports.demand import DemandSource
from remuda.ports.github import COMPLETED, Deletion, GitHubRun, GitHubRunner
from remuda.ports.store import InstanceStore
from simulation.fake_machine import SLOW_SCRIPT_S, FakeMachine, MachineBehaviour, RandomBehaviour
from simulation.faults import MAX_INDEX_LAG_S, MAX_SKEW_S, Fault, FaultInjector, Trace
from simulation.faulty_ports import FaultyCompute, FaultyGitHub, FaultyPool, FaultyStore
from simulation.holds import NumberedCalls, NumberedPort
from simulation.invariants import POOL, SCOPE, Violation, parse_runner
from simulation.loop import Interruption, SeededIds, VirtualClock, VirtualLoop, VirtualProcess, current_process
from simulation.memory.compute import MemoryCloud, MemoryCompute, MemoryMachine
from simulation.memory.demand import MemoryDemandSource, MemoryScaleSets
from simulation.memory.github import MemoryGitHub, MemoryGitHubServer, MemoryJob, MemoryRunner, view_of
from simulation.memory.pool import MemoryQueues, MemoryResourcePool
from simulation.memory.store import ChangeNotifier, MemoryDatabase, MemoryInstanceStore
from simulation.plan import LONG_JOB_S, PlannedCancel, PlannedInterruption, WorldPlan, WorldScale
from simulation.safety import SafetyInvariants
from simulation.scale_sets import CheckedScaleSets, FaultyDemandSource

T = TypeVar("T")

#: Short enough for several uses of an instance in half an hour, with the clock margin and grace periods of a real pool.
LIFETIMES = Lifetimes(
    provision_timeout_s=240.0,
    max_runtime_s=420.0,
    idle_time_s=420.0,
    release_time_s=120.0,
    max_age_s=1_500.0,
    max_uses=6,
    margin_s=60.0,
    unrecorded_grace_s=300.0,
    # Zero, because nothing may depend on this grace period.
    stale_registration_grace_s=0.0,
    gone_after_s=60.0,
    republish_s=120.0,
    keep_records_s=300.0,
    listening_time_s=240.0,
    surplus_grace_s=30.0,
    ended_run_grace_s=150.0,
)
#: Lifetimes of the configurations that a world switches between; the first one applies at the start.
CONFIGURATIONS = (
    LIFETIMES,
    replace(LIFETIMES, idle_time_s=120.0, max_uses=2, stale_registration_grace_s=300.0, keep_records_s=60.0),
    replace(LIFETIMES, max_runtime_s=200.0, release_time_s=60.0, republish_s=60.0),
    replace(LIFETIMES, max_age_s=600.0, provision_timeout_s=120.0, keep_records_s=60.0),
)
#: Faults by which processes crash and pause, if they are no commands.
_INTERRUPTIONS = {
    "agent": (Fault.AGENT_CRASH, Fault.AGENT_PAUSE),
    "listener": (Fault.LISTENER_CRASH, Fault.LISTENER_PAUSE),
}
#: Probability per call that GitHub begins to hang, and the maximum of seconds.
HANG_RATE = 0.01
MAX_HANG_S = 120.0
#: Number of versions of a record that a lagging index can return.
VERSIONS = 12


class Halted(BaseException):
    """Raised to end a world when an invariant is violated."""


class SimulatedProcess(VirtualProcess):
    """A command or an agent in a world, with what the invariants need to know about it."""

    def __init__(
        self,
        loop: VirtualLoop,
        name: str,
        *,
        kind: str,
        skew_s: float = 0.0,
        interruptions: Sequence[Interruption] = (),
        request: ProvisionRequest | None = None,
        run_id: str = "",
        attempt: int = 0,
        action: OperatorAction | None = None,
        for_s: float | None = None,
        desired: DesiredConfig | None = None,
    ) -> None:
        super().__init__(loop, name, skew_s=skew_s, interruptions=interruptions)
        self.kind = kind
        self.request = request
        self.run_id = run_id
        self.attempt = attempt
        #: The command of an operator.
        self.action = action
        #: Seconds of a quarantine that it orders.
        self.for_s = for_s
        #: The configuration that a refresh applies; None if it only sweeps.
        self.desired = desired
        #: Idle instances of each class that a scale-down keeps.
        self.idle_count = 0
        self.started_at = loop.time()
        #: Provisions whose intent it recorded.
        self.provisions: set[str] = set()
        #: Instances that it ever claimed or launched, and receipts of the messages that it got.
        self.held: set[str] = set()
        self.receipts: set[str] = set()
        #: Faults that affected it, without crashes and pauses, and the time of the last.
        self.faults: list[Fault] = []
        self.last_fault_at = self.previous_fault_at = -1e9
        self.calls: Counter[str] = Counter()
        #: Seconds that it was paused in all.
        self.pause_s = 0.0
        #: The last epoch of each instance that it wrote.
        self.epochs: dict[str, int] = {}
        #: Pool messages that it sent: instance and epoch.
        self.sent: set[tuple[str, int]] = set()
        #: Instances whose message it received with a short visibility timeout.
        self.received_early: set[str] = set()
        #: Instances that its last call was about.
        self.subjects: Sequence[str] = ()
        #: Set when it ends.
        self.ended: asyncio.Future[None] = loop.create_future()

    @property
    def is_undisturbed(self) -> bool:
        return not self.faults and not self.pause_s

    @property
    def reads_since(self) -> float:
        """The time since which what it has read was stored. A lagging index returns earlier records."""
        lag_s = MAX_INDEX_LAG_S if Fault.STALE_INDEX in self.faults else 0.0
        return self.started_at - lag_s

    def may_release(self, provision: Provision) -> bool:
        return provision.run_id == self.run_id and provision.attempt <= self.attempt


class _CheckedChanges(ChangeNotifier):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def notify(self, key: tuple[type, str]) -> None:
        kind, instance_id = key
        if kind is Instance:
            self._world.record_written(instance_id)
        elif kind is Report:
            self._world.safety.report_written(instance_id)
        super().notify(key)


class _CheckedProvisions(dict[tuple[str, str], Provision]):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._by_id: dict[str, tuple[str, str]] = {}

    def __setitem__(self, key: tuple[str, str], after: Provision) -> None:
        before = self.get(key)
        self._by_id[after.provision_id] = key
        super().__setitem__(key, after)
        self._world.trace.add("provision", f"{after.provision_id} of {after.subject}.{after.attempt}: {after.status}")
        self._world.safety.provision_written(before, after)

    def by_id(self, provision_id: str) -> Provision | None:
        return self.get(self._by_id.get(provision_id, ("", "")))


class _CheckedLeases(dict[str, Lease]):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def __setitem__(self, name: str, after: Lease) -> None:
        before = self.get(name)
        super().__setitem__(name, after)
        if name == LISTENER_LEASE:
            self._world.safety.patience.lease_written(before, after, self._world.writer())
            self._world.safety.pauses.renewed(after.owner)


class _CheckedRecords(dict[str, T]):
    """Records by name. `written` is called with each record that is written and the one before it."""

    def __init__(self, written: Callable[[T | None, T], None]) -> None:
        super().__init__()
        self._written = written

    def __setitem__(self, name: str, after: T) -> None:
        before = self.get(name)
        super().__setitem__(name, after)
        self._written(before, after)


class _CheckedDatabase(MemoryDatabase):
    provisions: _CheckedProvisions

    def __init__(self, world: World) -> None:
        self._world = world
        super().__init__(changes=_CheckedChanges(world))
        self.provisions = _CheckedProvisions(world)
        self.leases = _CheckedLeases(world)
        self.demand = _CheckedRecords(world.safety.demand_written)
        self.jobs = _CheckedRecords(world.safety.job_written)

    def __setattr__(self, name: str, value: Any) -> None:
        before = getattr(self, name, None)
        super().__setattr__(name, value)
        if name == "config" and isinstance(value, PoolConfig):
            self._world.safety.configured(before, value)


class CheckedGitHub(MemoryGitHubServer):
    """GitHub with checked invariants and with earlier lists of runners."""

    def __init__(self, world: World, token_life_s: float) -> None:
        super().__init__(clock=world.clock, token_life_s=token_life_s)
        self._world = world
        #: Whether it knows the state of runs with their own provision.
        self.knows_runs = Fault.RUN_UNRELEASED in world.plan.faults
        #: When the latest attempt of each run has ended, by the run's id.
        self.ended_at: dict[str, float] = {}
        self.snapshots: deque[tuple[float, tuple[GitHubRunner, ...]]] = deque(maxlen=400)

    def register(self, scope: str, token: str, name: str, labels: Sequence[str]) -> MemoryRunner:
        runner = super().register(scope, token, name, labels)
        self._changed(f"registered {name}")
        self._world.safety.registered(name)
        return runner

    def add(
        self,
        scope: str,
        name: str,
        labels: Sequence[str] = (),
        *,
        ephemeral: bool = False,
        scale_set_id: int = 0,
    ) -> MemoryRunner:
        runner = super().add(scope, name, labels, ephemeral=ephemeral, scale_set_id=scale_set_id)
        if ephemeral:
            self._changed(f"registered {name} for one job")
        if ephemeral and not scale_set_id:
            # That of a set is of no use before its configuration is on the record.
            self._world.safety.registered(name)
        return runner

    def run_begins(self, repository: str, run_id: str, attempt: int) -> None:
        self._set_run(repository, run_id, attempt, "in_progress")
        self.ended_at.pop(run_id, None)

    def run_ends(self, repository: str, run_id: str, attempt: int) -> None:
        """The attempt has ended, unless the run was run again meanwhile."""
        known = self.runs.get((repository.lower(), int(run_id)))
        if known is not None and known.attempt == attempt and not known.has_ended:
            self._set_run(repository, run_id, attempt, COMPLETED)
            self.ended_at[run_id] = self._world.loop.time()

    def _set_run(self, repository: str, run_id: str, attempt: int, status: str) -> None:
        if self.knows_runs:
            self.runs[repository.lower(), int(run_id)] = GitHubRun(
                run_id=int(run_id), status=status, conclusion="", head_repository=repository, attempt=attempt
            )
            self._world.trace.add("github", f"run {run_id} is {status}, attempt {attempt}")

    def connect(
        self, runner_id: int, take: Callable[[MemoryJob], None], removed: Callable[[], None] | None = None
    ) -> bool:
        connected = super().connect(runner_id, take, removed)
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

    def _changed(self, text: str) -> None:
        self.snapshots.append((self._world.loop.time(), tuple(map(view_of, self.runners.values()))))
        self._world.trace.add("github", text)


class _TracedEventLog:
    """Adds events to the trace and checks them for credentials."""

    def __init__(self, world: World, process: SimulatedProcess, instance_id: str = "") -> None:
        """`instance_id` is the machine of an agent."""
        self._world = world
        self._process = process
        self._instance_id = instance_id

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        subject = facts.get("instance_id") or facts.get("run_id") or ""
        self._world.trace.add(self._process.name, f"{action} {subject}: {why}")
        self._world.stats[action] += 1
        self._world.safety.event_recorded(action, why, facts)
        self._world.safety.pauses.event_recorded(self._process, action, why, facts)
        if self._instance_id and action == "state":
            self._world.safety.state_logged(self._instance_id, facts)


class World:
    pool_name = POOL

    #: Maximum error of a process's wall clock. Invariants allow for it.
    max_skew = timedelta(seconds=MAX_SKEW_S)
    #: Time that a write may take to arrive. Invariants allow for it, too.
    max_latency = timedelta(seconds=1)

    def __init__(
        self,
        plan: WorldPlan,
        loop: VirtualLoop,
        *,
        configurations: Sequence[Lifetimes] = CONFIGURATIONS,
        ending_s: float = 20.0,
        remembers_s: float = 600.0,
        token_life_s: float | None = None,
        keep_trace: bool = False,
    ) -> None:
        self.plan = plan
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.trace = Trace(loop.time, keep=keep_trace)
        self.stats: Counter[str] = Counter()
        self.violation: Violation | None = None
        self.faults = FaultInjector(
            enabled=plan.faults,
            rng=random.Random(f"{plan.seed} faults"),
            suppressed=plan.suppressed,
            trace=lambda text: self.trace.add("", text),
            now=loop.time,
        )
        self.ids = SeededIds(random.Random(f"{plan.seed} ids"))
        self._skews = random.Random(f"{plan.seed} skews")
        self._polling = random.Random(f"{plan.seed} polling")
        #: The calls of all processes in worlds that hold one of them; None in the others.
        self.calls = NumberedCalls(self) if plan.numbers_calls else None
        self.configurations: Sequence[Lifetimes] = [_scaled(item, plan.scale) for item in configurations]
        self.lifetimes = self.configurations[0]
        self.throttled_until = self._github_hangs_until = -1.0
        #: The process whose delayed write is being applied.
        self.delayed_writer: SimulatedProcess | None = None
        self.safety = SafetyInvariants(self)
        self.database = _CheckedDatabase(self)
        #: Earlier versions of records, for lagging indexes.
        self.versions: dict[str, deque[tuple[float, Instance | None]]] = {}
        self.queues = MemoryQueues(clock=self.clock)
        self.cloud = MemoryCloud(clock=self.clock, ending_s=ending_s, remembers_s=remembers_s)
        self.cloud.watchers.append(self)
        self.github = CheckedGitHub(self, plan.token_life_s if token_life_s is None else token_life_s)
        self.token = self.github.grant()
        self.scale_sets: MemoryScaleSets = CheckedScaleSets(self)
        self.machines: dict[str, FakeMachine] = {}
        self.processes: dict[str, SimulatedProcess] = {}
        #: Stands for writes by no process of the world.
        self.outsider = SimulatedProcess(loop, "outsider", kind="outsider")
        self._tiers: dict[str, Tier] = {}
        self._interruptions: dict[str, list[PlannedInterruption]] = {}
        self._cancels: dict[str, float] = {}
        for item in plan.operations:
            if isinstance(item, PlannedInterruption):
                self._interruptions.setdefault(item.process, []).append(item)
            elif isinstance(item, PlannedCancel):
                self._cancels[item.process] = item.after_s

    def stop(self, violation: Violation) -> None:
        """End the world at its first violation; later ones may only be consequences."""
        if self.violation is None:
            self.violation = violation
            self.trace.add("", f"VIOLATED {violation}")
            self.loop.errors.append(Halted())

    # Machines

    def behaviour_of(self, instance_id: str, rng: random.Random) -> MachineBehaviour:
        slow = self.plan.scale is WorldScale.SLOW_SCRIPTS
        return RandomBehaviour(self.faults, rng, instance_id, slow_scripts=slow)

    def kill(self, process: SimulatedProcess) -> None:
        process.crash()

    def launched(self, machine: MemoryMachine) -> None:
        if machine.tags.get(POOL_TAG) != POOL:
            return
        self.stats["machines"] += 1
        number = self.stats["machines"]
        self.trace.add("ec2", f"launched {machine.instance_id}")
        self.safety.launched(machine)
        self.machines[machine.instance_id] = FakeMachine(self, machine, number)

    def ending(self, machine: MemoryMachine) -> None:
        fake = self.machines.get(machine.instance_id)
        if fake is None:
            self.safety.violated("S7", f"{machine.instance_id} of another pool was terminated")
            return
        fake.power_off(machine.reason)

    def cut_power(self, instance_id: str, why: str) -> None:
        if self.cloud.is_alive(instance_id):
            self.cloud.end(instance_id, why)

    def github_hangs(self, subjects: Sequence[str]) -> bool:
        """Whether GitHub does not answer a call now. It hangs for a while, for everybody."""
        now = self.loop.time()
        if now >= self._github_hangs_until and self.faults.inject(Fault.GITHUB_HANGS, HANG_RATE, subjects):
            self._github_hangs_until = now + self.faults.rng.uniform(1.0, MAX_HANG_S)
        hangs = now < self._github_hangs_until and self.faults.active
        if hangs:
            self.faults.last_at = now
            self.faults.affected_at.update(dict.fromkeys(subjects, now))
        return hangs

    @contextmanager
    def cloud_as_it_was(self, lag_s: float) -> Generator[None]:
        self.cloud.clock = VirtualClock(self.loop, skew_s=-lag_s)
        try:
            yield
        finally:
            self.cloud.clock = self.clock

    def start_agent(self, machine: FakeMachine, name: str) -> SimulatedProcess:
        process = self._new_process(name, kind="agent", skew_s=machine.skew_s)
        store = self._store(process, CallCounter())
        agent = Agent(
            **self.agent_ports(store, machine, process),
            clock=VirtualClock(self.loop, process),
            ids=self.ids,
            event_log=_TracedEventLog(self, process, machine.instance_id),
            version="simulated",
        )
        process.subjects = (machine.instance_id,)
        process.start(agent.run())
        return process

    def agent_ports(self, store: InstanceStore, machine: FakeMachine, process: SimulatedProcess) -> dict[str, Any]:
        return {
            "store": self.port(FaultyStore(store, self, process), process),
            "machine": self.port(machine, process),
            "runner": self.port(machine, process),
        }

    def _store(self, process: SimulatedProcess, calls: CallCounter) -> MemoryInstanceStore:
        return MemoryInstanceStore(
            clock=VirtualClock(self.loop, process),
            calls=calls,
            database=self.database,
            polling=self._polling.random if self.plan.polls else None,
        )

    def port(self, port: object, process: SimulatedProcess) -> Any:
        """The port of a process, with numbered calls if the plan needs their numbers."""
        return port if self.calls is None else NumberedPort(port, self.calls, process)

    def agent_ended(self, machine: FakeMachine) -> None:
        process = machine.agent
        if process is not None and machine.alive:
            self.safety.process_ended(process)
            if not process.dead and self.cloud.is_alive(machine.instance_id):
                self.safety.violated("S10", f"{process} ended, and its machine runs", machine.instance_id)

    def disturbed_at(self, machine: FakeMachine) -> float:
        """Time at which a fault last affected the machine's agent."""
        process = machine.agent
        return max(machine.disturbed_at, process.last_fault_at if process is not None else machine.disturbed_at)

    # Commands

    def command(
        self,
        name: str,
        kind: str,
        work: Callable[[Context], Coroutine[Any, Any, Any]],
        *,
        credentialed: bool = False,
        **details: Any,
    ) -> SimulatedProcess:
        """Start a command as a process. `details` are those of `SimulatedProcess`."""
        process = self._new_process(name, kind=kind, skew_s=self.skew(self._skews), **details)
        if process.request is not None:
            self._tiers[process.request.run_id] = process.request.tier
        process.on_end = lambda: self._ended(process)
        self.stats[f"{kind}s"] += 1
        self.safety.completeness.began(process)
        process.start(work(self._context(process, credentialed=credentialed)))
        if (after_s := self._cancels.get(name)) is not None:
            self.loop.call_later(after_s, self._cancel, process, context=self.loop.outside)
        return process

    def _context(self, process: SimulatedProcess, *, credentialed: bool) -> Context:
        calls = CallCounter()
        clock = VirtualClock(self.loop, process)
        github = MemoryGitHub(github=self.github, token=self.token, calls=calls) if credentialed else None
        store = self._store(process, calls)
        pool = MemoryResourcePool(clock=clock, ids=self.ids, calls=calls, queues=self.queues)
        compute = MemoryCompute(cloud=self.cloud, pool=POOL, calls=calls)
        return Context(
            pool_name=POOL,
            store=self.port(FaultyStore(store, self, process), process),
            pool=self.port(FaultyPool(pool, self, process), process),
            compute=self.port(FaultyCompute(compute, self, process), process),
            github=self.port(FaultyGitHub(github, self, process), process) if github else None,
            clock=clock,
            ids=self.ids,
            event_log=_TracedEventLog(self, process),
            calls=calls,
        )

    def _new_process(self, name: str, *, kind: str, skew_s: float, **details: Any) -> SimulatedProcess:
        interruptions = [
            Interruption(step=item.step, pause_s=item.pause_s)
            for item in self._interruptions.get(name, ())
            if not item.call
        ]
        process = SimulatedProcess(
            self.loop,
            name,
            kind=kind,
            skew_s=skew_s,
            interruptions=interruptions if self.faults.active else (),
            **details,
        )
        process.on_interruption = lambda interruption: self._interrupted(process, interruption)
        self.processes[name] = process
        return process

    async def called(self, process: SimulatedProcess, operation: str) -> None:
        """Crash or pause after a call was applied and before its answer arrives, if the plan says so."""
        process.calls[operation] += 1
        for item in self._interruptions.get(process.name, ()):
            if item.call == operation and item.step == process.calls[operation] and self.faults.active:
                interruption = Interruption(step=item.step, pause_s=item.pause_s)
                self._interrupted(process, interruption)
                if interruption.pause_s:
                    process.pause(interruption.pause_s)
                else:
                    process.crash()
                # A crashed process does not return from here, a paused one returns later.
                await asyncio.sleep(0)

    def _interrupted(self, process: SimulatedProcess, interruption: Interruption) -> None:
        crash, pause = _INTERRUPTIONS.get(process.kind, (Fault.CRASH, Fault.PAUSE))
        if interruption.pause_s:
            process.pause_s += interruption.pause_s
            process.last_fault_at = self.loop.time() + interruption.pause_s
            self.faults.record(pause, process.subjects)
            self.faults.last_at = process.last_fault_at
        else:
            self.stats["crashes"] += 1
            self.faults.record(crash, process.subjects)
        self.trace.add(process.name, f"interruption: {interruption}")

    def _cancel(self, process: SimulatedProcess) -> None:
        if self.faults.active and process.task is not None and not process.task.done():
            is_listener = process.kind == "listener"
            self.faults.record(Fault.LISTENER_RESTART if is_listener else Fault.CANCEL, self.held_by(process))
            process.task.cancel()

    def _ended(self, process: SimulatedProcess) -> None:
        task = process.task
        end = "killed" if process.dead else "cancelled" if task is not None and task.cancelled() else "done"
        if end == "done" and task is not None and task.exception() is not None:
            end = repr(task.exception())
        self.trace.add(process.name, f"ended: {end}")
        self.safety.process_ended(process)
        if not process.ended.done():
            process.ended.set_result(None)

    def demand_source(self, process: SimulatedProcess) -> DemandSource:
        source = MemoryDemandSource(server=self.scale_sets, calls=CallCounter())
        return cast("DemandSource", self.port(FaultyDemandSource(source, self, process), process))

    def desired(self, config: int) -> DesiredConfig:
        return DesiredConfig(
            pool=POOL,
            classes=DEFAULT_CLASSES,
            lifetimes=self.configurations[config],
            reuse=self.plan.reuses[config],
            launch=_runner_options(self.plan.runners[config]),
            max_instances=self.max_instances,
            runner_sets=self.plan.runner_sets[config],
            github_url="https://github.com",
            scope=SCOPE,
        )

    @property
    def max_instances(self) -> int:
        """Room for the jobs of the sets, besides the runs."""
        return self.plan.instances + sum(item.max + 2 for item in self.plan.runner_sets[0])

    # State of the world

    def record_written(self, instance_id: str) -> None:
        if self.calls is not None:
            self.calls.writes += 1
        record = self.database.instances.get(instance_id)
        self.versions.setdefault(instance_id, deque(maxlen=VERSIONS)).append((self.loop.time(), record))
        if record is None:
            self.trace.add("record", f"{instance_id} was deleted")
        else:
            text = f"{instance_id} {record.state} epoch {record.epoch} held by {record.subject or record.last_subject}"
            self.trace.add("record", f"{text} until {record.threshold:%H:%M:%S}")
        self.safety.record_written(instance_id)

    def versions_since(self, instance_id: str, since: float) -> list[Instance | None]:
        """The versions of a record that were stored at a time or later; none if they are not all known."""
        known = list(self.versions.get(instance_id, ()))
        first = max((at for at, (written_at, _) in enumerate(known) if written_at <= since), default=None)
        if first is None and len(known) == VERSIONS:
            return []
        return [record for _, record in known[first or 0 :]]

    def writer(self, instance_id: str = "") -> SimulatedProcess:  # noqa: ARG002 - for worlds without processes
        """The process that makes the current write."""
        process = self.delayed_writer or current_process()
        return self.processes[process.name] if process is not None else self.outsider

    def skew(self, rng: random.Random) -> float:
        drawn = rng.uniform(-MAX_SKEW_S, MAX_SKEW_S)
        if Fault.CLOCK_SKEW not in self.plan.faults or not self.faults.active:
            return 0.0
        self.faults.record(Fault.CLOCK_SKEW)
        return drawn

    def least(self, name: str) -> float:
        return min(float(getattr(item, name)) for item in self.configurations)

    def most(self, name: str) -> float:
        return max(float(getattr(item, name)) for item in self.configurations)

    def tier_of(self, run_id: str) -> Tier | None:
        return self._tiers.get(run_id)

    def held_by(self, process: SimulatedProcess) -> list[str]:
        return self.of_provisions(process.provisions)

    def of_provisions(self, provision_ids: Collection[str]) -> list[str]:
        """Instances of these provisions, including launched machines without a record yet."""
        recorded = self.database.instances
        held = [item.instance_id for item in recorded.values() if item.provision_id in provision_ids]
        launched = [
            key
            for key, machine in self.machines.items()
            if machine.alive and key not in recorded and self.cloud.machines[key].request.provision_id in provision_ids
        ]
        return [*held, *launched]

    def registrations(self, instance_id: str | None = None) -> list[MemoryRunner]:
        found = [(runner, parse_runner(runner.name)) for runner in self.github.runners.values()]
        return [runner for runner, name in found if name and instance_id in {None, name[1]}]


def _scaled(limits: Lifetimes, scale: WorldScale) -> Lifetimes:
    match scale:
        case WorldScale.SLOW_SCRIPTS:
            return replace(limits, provision_timeout_s=limits.provision_timeout_s + 2 * SLOW_SCRIPT_S)
        case WorldScale.LONG_JOBS:
            return replace(limits, max_runtime_s=limits.max_runtime_s + LONG_JOB_S[1])
        case WorldScale.USUAL:
            return limits


def _runner_options(version: str) -> dict[str, str]:
    return {VERSION: version, SHA256: "0" * 64} if version else {}
