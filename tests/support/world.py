"""A whole pool in one process and in virtual time: real use cases, real agents, machines and GitHub in memory.

Every write of a record is checked against the invariants of the contract as it happens; what was violated is told by
`World.check`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from remuda.agent.loop import Agent
from remuda.controlplane.context import Context
from remuda.controlplane.provision import ProvisionRequest, ProvisionResult, provision
from remuda.controlplane.refresh import DesiredConfig, RefreshResult, refresh
from remuda.controlplane.release import ReleaseResult, release
from remuda.domain.errors import UserError
from remuda.domain.instance import ASSIGNED, Assignment, Instance, State
from remuda.domain.pool_config import parse_runner_name
from remuda.domain.resources import DEFAULT_CLASSES, Tier, TypePatterns, UsageClass
from remuda.domain.signals import FailureKind
from remuda.domain.thresholds import Lifetimes
from remuda.ports.calls import CallCounter
from remuda.ports.compute import POOL_TAG
from remuda.ports.github import Deletion
from remuda.ports.machine import AgentState, Identity, StepResult
from remuda.ports.runner import RemovalStatus, RunnerState
from simulation.loop import SeededIds, VirtualClock
from simulation.memory.compute import MemoryCloud, MemoryCompute, MemoryMachine
from simulation.memory.github import MemoryGitHub, MemoryGitHubServer, MemoryJob
from simulation.memory.pool import MemoryQueues, MemoryResourcePool
from simulation.memory.store import MemoryDatabase, MemoryInstanceStore
from tests.support.invariants import Law
from tests.support.records import NOW
from tests.support.virtual_time import EventRecorder, Hook, Killed, hooked

POOL, SCOPE = "test", "octo/repo"
SWEEP_S = 10.0
LIFETIMES = Lifetimes(
    provision_timeout_s=60.0,
    max_runtime_s=120.0,
    idle_time_s=90.0,
    release_time_s=30.0,
    margin_s=2.0,
    unrecorded_grace_s=20.0,
    registration_grace_s=30.0,
    gone_after_s=12.0,
    reannounce_s=40.0,
)
#: By then every life is over: provision, run, release, idle, the settling of provisions, and two sweeps for each.
ALL_OVER_S = 480.0


@dataclass(kw_only=True, slots=True)
class Behaviour:
    """How the machines of a world behave."""

    boot_s: float = 2.0
    configure_s: float = 0.5
    remove_s: float = 0.3
    reset_s: float = 0.3
    #: By instance id; what is not named does as it should.
    registration: dict[str, StepResult] = field(default_factory=dict)
    resets: dict[str, StepResult] = field(default_factory=dict)
    notices: dict[str, str] = field(default_factory=dict)
    script: StepResult = field(default_factory=lambda: StepResult(ok=True))
    #: Machines whose agent hangs: it is there, and does nothing.
    hung: set[str] = field(default_factory=set)


class Host:
    """One machine: its disk, its runner, its agent and whoever starts that again. Machine and RunnerSoftware in one."""

    def __init__(self, world: World, machine: MemoryMachine) -> None:
        self._world = world
        self.instance_id = machine.instance_id
        self._margin_s = machine.request.margin_s
        self._memory = AgentState()
        self._state = RunnerState()
        self._changed = asyncio.Event()
        self._runner_id = 0
        self._is_jit = False
        self._timers: list[asyncio.TimerHandle] = []
        #: Something of a job may be left on it.
        self.dirty = False
        self.task = asyncio.create_task(self._run())
        self._dead_man = world.loop.call_at(world.loop.time() + machine.request.first_life_s, self.power_off)

    async def _run(self) -> None:
        await asyncio.sleep(self._world.behaviour.boot_s)
        if self.instance_id in self._world.behaviour.hung:
            await asyncio.Future[None]()
        with contextlib.suppress(Killed):
            await self._world.agent(self).run()

    def kill_agent(self) -> None:
        """As kill -9 does; what it started stays, and the machine starts another."""
        self.task.cancel()
        self.task = asyncio.create_task(self._run())

    def power_off(self) -> None:
        self._dead_man.cancel()
        for timer in self._timers:
            timer.cancel()
        if self._state.listening:
            self._world.github.disconnect(self._runner_id)
        self._state = RunnerState()
        self.task.cancel()

    # Machine

    async def identity(self) -> Identity:
        return Identity(instance_id=self.instance_id, pool=POOL, margin_s=self._margin_s)

    def load(self) -> AgentState:
        return self._memory

    def save(self, state: AgentState) -> None:
        self._memory = state

    def set_dead_man_timer(self, at: datetime) -> None:
        self._world.cloud.arm(self.instance_id, at)
        self._dead_man.cancel()
        self._dead_man = self._world.loop.call_at((at - NOW).total_seconds(), self.power_off)

    async def spot_notice(self) -> str:
        return self._world.behaviour.notices.get(self.instance_id, "")

    async def run_script(self, timeout_s: float) -> StepResult:  # noqa: ARG002
        await asyncio.sleep(0.1)
        return self._world.behaviour.script

    async def reset(self) -> StepResult:
        await asyncio.sleep(self._world.behaviour.reset_s)
        outcome = self._world.behaviour.resets.get(self.instance_id, StepResult(ok=True))
        self.dirty = not outcome.ok
        return outcome

    async def end(self, reason: str) -> None:
        self._world.cloud.end(self.instance_id, reason)

    # RunnerSoftware

    def state(self) -> RunnerState:
        return self._state

    async def configure(self, assignment: Assignment) -> StepResult:
        await asyncio.sleep(self._world.behaviour.configure_s)
        outcome = self._world.behaviour.registration.get(self.instance_id, StepResult(ok=True))
        self._is_jit = outcome.ok and bool(assignment.jit_config)
        if self._is_jit:
            self._runner_id = assignment.runner_id
            self._set(RunnerState(configured_as=assignment.runner_name))
            return outcome
        if not outcome.ok or assignment.credential is None:
            return outcome
        try:
            runner = self._world.github.register(
                _scope(assignment), assignment.credential.token, assignment.runner_name, assignment.labels
            )
        except UserError as error:
            return StepResult(ok=False, detail=error.message, failure=FailureKind.CREDENTIAL_REFUSED)
        self._runner_id = runner.runner_id
        self._set(RunnerState(configured_as=assignment.runner_name))
        return outcome

    async def start(self, _assignment: Assignment) -> None:
        self._set(replace(self._state, listening=True, exit_code=None))
        if not self._world.github.connect(self._runner_id, self._take):
            self._set(replace(self._state, listening=False, exit_code=1))

    def refused(self) -> str:
        return ""

    async def remove(self, assignment: Assignment) -> tuple[RemovalStatus, str]:
        await asyncio.sleep(self._world.behaviour.remove_s)
        if self._is_jit:
            if assignment.runner_id and not self._state.spent:
                return RemovalStatus.FAILED, "it was registered just in time: only the service can remove it"
            self._set(replace(self._state, configured_as=""))
            return RemovalStatus.REMOVED, ""
        assert assignment.credential is not None
        try:
            deletion = self._world.github.unregister(_scope(assignment), assignment.credential.token, self._runner_id)
        except UserError as error:
            return RemovalStatus.FAILED, error.message
        if deletion is Deletion.BUSY:
            return RemovalStatus.BUSY, "runs a job"
        self._set(replace(self._state, configured_as=""))
        return RemovalStatus.REMOVED, ""

    async def stop(self) -> None:
        self._world.github.disconnect(self._runner_id)
        self._set(RunnerState())

    async def wait_for_change(self, since: RunnerState, timeout_s: float) -> RunnerState:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._state == since:
                    self._changed.clear()
                    await self._changed.wait()
        return self._state

    def _take(self, job: MemoryJob) -> None:
        job.started = self.dirty = True
        self._world.law.job_starts(job, self.instance_id)
        self._set(replace(self._state, busy=True))
        self._timers.append(self._world.loop.call_later(job.seconds, self._finish, job))

    def _finish(self, job: MemoryJob) -> None:
        self._set(replace(self._state, busy=False))
        self._world.github.finish(job)
        if self._is_jit:
            self._set(replace(self._state, listening=False, exit_code=0, spent=True))

    def _set(self, state: RunnerState) -> None:
        self._state = state
        self._changed.set()


def _scope(assignment: Assignment) -> str:
    return "/".join(assignment.url.split("/")[3:])


class World:
    def __init__(self, *, lifetimes: Lifetimes = LIFETIMES, max_instances: int = 100) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock = VirtualClock()
        self.lifetimes = lifetimes
        self.max_instances = max_instances
        self.behaviour = Behaviour()
        self.law = Law(self)
        self.database = MemoryDatabase(changes=self.law)
        self.queues = MemoryQueues(clock=self.clock)
        self.cloud = MemoryCloud(clock=self.clock, ending_s=1.0)
        self.cloud.watchers.append(self)
        self.github = MemoryGitHubServer(clock=self.clock)
        self.token = self.github.grant()
        self.ids = SeededIds()
        self.hosts: dict[str, Host] = {}
        #: Since when sweeps come regularly.
        self._swept_since = self.clock.now()
        self.agent_hook: Callable[[Host], Hook] | None = None

    # Machines

    def launched(self, machine: MemoryMachine) -> None:
        self.hosts[machine.instance_id] = Host(self, machine)

    def ending(self, machine: MemoryMachine) -> None:
        self.hosts[machine.instance_id].power_off()

    def agent(self, host: Host) -> Agent:
        store = MemoryInstanceStore(clock=self.clock, calls=CallCounter(), database=self.database)
        hook = self.agent_hook(host) if self.agent_hook else None
        return Agent(
            store=hooked(store, "store", hook),
            machine=hooked(host, "machine", hook),
            runner=hooked(host, "runner", hook),
            clock=self.clock,
            ids=self.ids,
            event_log=EventRecorder(),
            version="test",
        )

    # Processes of the control plane

    def process(self, hook: Hook | None = None, *, credentialed: bool = False) -> Context:
        calls = CallCounter()
        github = MemoryGitHub(github=self.github, token=self.token, calls=calls) if credentialed else None
        store = MemoryInstanceStore(clock=self.clock, calls=calls, database=self.database)
        pool = MemoryResourcePool(clock=self.clock, ids=self.ids, calls=calls, queues=self.queues)
        compute = MemoryCompute(cloud=self.cloud, pool=POOL, calls=calls)
        return Context(
            pool_name=POOL,
            store=hooked(store, "store", hook),
            pool=hooked(pool, "pool", hook),
            compute=hooked(compute, "compute", hook),
            github=github and hooked(github, "github", hook),
            clock=self.clock,
            ids=self.ids,
            event_log=EventRecorder(),
            calls=calls,
        )

    def desired(self, **changed: Any) -> DesiredConfig:
        values: dict[str, Any] = {
            "pool": POOL,
            "classes": DEFAULT_CLASSES,
            "lifetimes": self.lifetimes,
            "max_instances": self.max_instances,
            "github_url": "https://github.com",
            "scope": SCOPE,
        }
        return DesiredConfig(**{**values, **changed})

    async def configure(self, **changed: Any) -> RefreshResult:
        return await refresh(self.process(credentialed=True), self.desired(**changed))

    async def sweep(self, hook: Hook | None = None) -> RefreshResult:
        return await refresh(self.process(hook, credentialed=True), None)

    async def provision(self, run_id: str = "1", *, process: Context | None = None, **changed: Any) -> ProvisionResult:
        return await provision(process or self.process(), order(run_id, **changed))

    async def release(self, run_id: str = "1", attempt: int = 1, *, process: Context | None = None) -> ReleaseResult:
        return await release(process or self.process(), run_id=run_id, attempt=attempt)

    async def warm(self, count: int, **changed: Any) -> list[str]:
        """So many idle instances, announced."""
        made = await self.provision("warm-up", count=count, **changed)
        done = await self.release("warm-up")
        assert not done.errors
        return [item.instance.instance_id for item in made.instances]

    async def pass_time(self, seconds: float, *, sweeps: bool = True) -> None:
        """With a sweep now and then, as a pool has them; checked after each."""
        until = self.loop.time() + seconds
        self._swept_since = self.clock.now()
        while (left := until - self.loop.time()) > 0:
            await asyncio.sleep(min(SWEEP_S, left))
            if sweeps:
                result = await self.sweep()
                assert not result.errors, result.errors
                self._check_lives()

    # What is there

    def record(self, instance_id: str) -> Instance:
        return self.database.instances[instance_id]

    def states(self) -> dict[str, State]:
        return {key: record.state for key, record in self.database.instances.items()}

    def in_state(self, *states: State) -> list[str]:
        return sorted(key for key, state in self.states().items() if state in states)

    def registrations(self, instance_id: str | None = None) -> list[Any]:
        found = [(runner, parse_runner_name(POOL, runner.name)) for runner in self.github.runners.values()]
        return [runner for runner, name in found if name and instance_id in {None, name[1]}]

    def hints(self, resource_class: str = "large") -> list[str]:
        messages = self.queues.named(resource_class).messages
        return sorted(item.message.id for item in messages if item.message is not None)

    def alive(self) -> list[str]:
        """Machines of this pool."""
        return [
            instance_id
            for instance_id, machine in self.cloud.machines.items()
            if self.cloud.is_alive(instance_id) and machine.tags[POOL_TAG] == POOL
        ]

    # What must hold

    def check(self) -> None:
        """S1 to S6 and S9, as they happened; L1 and L2 are checked after each sweep."""
        assert not self.law.broken, "\n".join(self.law.broken)

    def _check_lives(self) -> None:
        self.check()
        now, sweeps = (
            self.clock.now(),
            timedelta(seconds=2 * SWEEP_S + self.lifetimes.margin_s) + self.cloud.shutting_down,
        )
        for record in self.database.instances.values():
            if record.state is not State.TERMINATED:
                assert now <= max(record.threshold, self._swept_since) + sweeps, f"L1: {record} is late at {now}"
        grace = sweeps + timedelta(seconds=self.lifetimes.unrecorded_grace_s)
        for instance_id in self.alive():
            launched_at = self.cloud.machines[instance_id].launched_at
            assert instance_id in self.database.instances or now <= max(launched_at, self._swept_since) + grace, (
                f"L2: {instance_id}"
            )

    def check_holds_nothing(self, run_id: str) -> None:
        """L5: a provision that did not succeed holds nothing."""
        held = [item for item in self.database.instances.values() if item.run_id == run_id and item.state in ASSIGNED]
        assert not held, f"L5: run {run_id} still holds {held}"

    async def end(self) -> None:
        """Let all time pass: at the end nothing may be left of anything."""
        await self.pass_time(ALL_OVER_S)
        self.check()
        left = {key: state for key, state in self.states().items() if state is not State.TERMINATED}
        assert not left, f"records are stuck: {left}"
        assert not self.alive(), f"machines are left: {self.alive()}"
        assert not self.registrations(), f"registrations are left: {self.registrations()}"
        open_ones = [item for item in self.database.provisions.values() if item.status.value == "open"]
        assert not open_ones, f"provisions are open: {open_ones}"
        await asyncio.gather(*(host.task for host in self.hosts.values()), return_exceptions=True)


def order(run_id: str, **changed: Any) -> ProvisionRequest:
    values: dict[str, Any] = {
        "run_id": run_id,
        "attempt": 1,
        "count": 1,
        "resource_class": "large",
        "usage_class": UsageClass.ON_DEMAND,
        "patterns": TypePatterns(("*",)),
        "scope": SCOPE,
        "tier": Tier.TRUSTED,
    }
    return ProvisionRequest(**{**values, **changed})


def number_of(instance_id: str) -> int:
    """The inverse of `records.instance_id`."""
    return int(instance_id.removeprefix("i-"), 16)
