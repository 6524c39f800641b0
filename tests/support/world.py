"""A pool without faults for unit tests: the simulation's world, machines and invariants, with hooks around ports."""

from __future__ import annotations

import asyncio
import random  # noqa: TID251 - the type alone
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

from remuda.controlplane.context import Context
from remuda.controlplane.operator import OperatorAction
from remuda.controlplane.provision import ProvisionRequest, ProvisionResult, provision
from remuda.controlplane.refresh import DesiredConfig, RefreshResult, refresh
from remuda.controlplane.release import ReleaseResult, release
from remuda.domain.instance import ASSIGNED, Instance, State
from remuda.domain.provision import Provision
from remuda.domain.resources import DEFAULT_CLASSES, PoolMessage, Tier, TypePatterns, UsageClass
from remuda.domain.thresholds import Lifetimes
from remuda.domain.transitions import Actor
from remuda.ports.calls import CallCounter
from remuda.ports.compute import POOL_TAG
from remuda.ports.github import Deletion
from remuda.ports.machine import StepResult
from remuda.ports.store import InstanceStore
from simulation.fake_machine import FakeMachine, TimedAction
from simulation.invariants import POOL, SCOPE, Violation
from simulation.liveness import LivenessInvariants
from simulation.loop import VirtualLoop, current_process
from simulation.memory.compute import MemoryCompute
from simulation.memory.github import MemoryGitHub
from simulation.memory.pool import MemoryResourcePool
from simulation.memory.store import MemoryInstanceStore
from simulation.plan import WorldPlan
from simulation.world import SimulatedProcess, World
from tests.support.virtual_time import EventRecorder, Hook, Killed, hooked

SWEEP_S = 10.0
LIFETIMES = Lifetimes(
    provision_timeout_s=60.0,
    max_runtime_s=120.0,
    idle_time_s=90.0,
    release_time_s=30.0,
    margin_s=2.0,
    unrecorded_grace_s=20.0,
    stale_registration_grace_s=30.0,
    gone_after_s=12.0,
    republish_s=40.0,
)
#: Seconds after which every instance has ended: provision, run, release, idle time, settled provisions and sweeps.
ALL_OVER_S = 480.0


@dataclass(kw_only=True, slots=True)
class MachineSettings:
    """Behaviour of the machines of a world, to be changed by tests."""

    boot_s: float = 2.0
    configure_s: float = 0.5
    remove_s: float = 0.3
    reset_s: float = 0.3
    script: StepResult = field(default_factory=lambda: StepResult(ok=True))
    #: Results by instance id; success for the others.
    registration: dict[str, StepResult] = field(default_factory=dict)
    resets: dict[str, StepResult] = field(default_factory=dict)
    #: Machines on which no agent is started.
    without_agent: set[str] = field(default_factory=set)


class _FixedBehaviour:
    def __init__(self, settings: MachineSettings, instance_id: str) -> None:
        self._settings = settings
        self._instance_id = instance_id

    def seconds(self, action: TimedAction) -> float:
        settings = self._settings
        return {
            TimedAction.BOOT: settings.boot_s,
            TimedAction.RESTART: settings.boot_s,
            TimedAction.SCRIPT: 0.1,
            TimedAction.CONFIGURE: settings.configure_s,
            TimedAction.REMOVE: settings.remove_s,
            TimedAction.RESET: settings.reset_s,
        }.get(action, 0.0)

    def boots(self) -> bool:
        return True

    def starts_agent(self) -> bool:
        return self._instance_id not in self._settings.without_agent

    def script(self) -> StepResult:
        return self._settings.script

    def register(self) -> StepResult:
        return self._settings.registration.get(self._instance_id, StepResult(ok=True))

    def reset(self) -> StepResult:
        return self._settings.resets.get(self._instance_id, StepResult(ok=True))


class _Writer(SimulatedProcess):
    """Stands for all commands of one kind: tests call the use cases directly, not in processes."""

    def may_release(self, provision: Provision) -> bool:  # noqa: ARG002
        return True


class _CheckedEvents(EventRecorder):
    def __init__(self, world: PoolWorld) -> None:
        super().__init__()
        self._world = world

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        super().record(action, why, **facts)
        self._world.safety.event_recorded(action, why, facts)


class _CheckedPool(MemoryResourcePool):
    world: PoolWorld

    async def send(self, messages: Collection[PoolMessage], *, delay_s: float = 0.0) -> None:
        self.world.outsider.sent.update((message.id, message.epoch) for message in messages)
        await super().send(messages, delay_s=delay_s)


class _CheckedCompute(MemoryCompute):
    world: PoolWorld

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        self.world.safety.termination_requested(sorted(instance_ids))
        return await super().terminate(instance_ids)


class _CheckedGitHub(MemoryGitHub):
    world: PoolWorld

    async def delete_runner(self, scope: str, runner_id: int) -> Deletion:
        self.world.safety.removal_requested(runner_id)
        return await super().delete_runner(scope, runner_id)


class PoolWorld(World):
    """The world of the simulation without faults. Violations are collected, and raised by `check`."""

    max_skew = timedelta(0)
    max_latency = timedelta(0)

    def __init__(self, *, lifetimes: Lifetimes = LIFETIMES, max_instances: int = 100) -> None:
        plan = WorldPlan(seed=1, hours=0.0, instances=max_instances, faults=frozenset(), operations=())
        loop = cast("VirtualLoop", asyncio.get_running_loop())
        super().__init__(
            plan, loop, configurations=(lifetimes,), ending_s=1.0, remembers_s=3_600.0, token_life_s=3_600.0
        )
        self.behaviour = MachineSettings()
        self.violations: list[Violation] = []
        self._ignored: set[str] = set()
        #: Called with each machine whose agent starts; returns a hook around the agent's port calls.
        self.agent_hook: Callable[[FakeMachine], Hook] | None = None
        self._writers: dict[str, _Writer] = {}

    def ignore(self, *invariants: str) -> None:
        """Do not check these: the test sets up a state that no command would reach."""
        self._ignored.update(invariants)

    def stop(self, violation: Violation) -> None:
        if violation.invariant not in self._ignored:
            self.violations.append(violation)

    def writer(self, instance_id: str = "") -> SimulatedProcess:
        process = current_process()
        if process is not None:
            return self.processes[process.name]
        entries = self.database.histories.get(instance_id)
        if not entries:
            return self.outsider
        kind, transition = entries[-1].by, entries[-1].transition
        writer = self._writers.get(kind)
        if writer is None:
            writer = self._writers[kind] = _Writer(self.loop, f"a {kind}", kind=kind)
            writer.provisions, writer.sent = self.outsider.provisions, self.outsider.sent
        if kind == Actor.OPERATOR:
            actions = {"retire": OperatorAction.DRAIN, "quarantine": OperatorAction.QUARANTINE}
            writer.action = actions.get(transition, OperatorAction.TERMINATE)
        return writer

    # Machines

    def behaviour_of(self, instance_id: str, rng: random.Random) -> _FixedBehaviour:  # noqa: ARG002
        return _FixedBehaviour(self.behaviour, instance_id)

    def kill(self, process: SimulatedProcess) -> None:
        if process.task is not None:
            process.task.cancel()

    def agent_ports(self, store: InstanceStore, machine: FakeMachine, process: SimulatedProcess) -> dict[str, Any]:  # noqa: ARG002
        hook = self.agent_hook(machine) if self.agent_hook else None
        return {
            "store": hooked(store, "store", hook),
            "machine": hooked(machine, "machine", hook),
            "runner": hooked(machine, "runner", hook),
        }

    def agent_ended(self, machine: FakeMachine) -> None:
        task = machine.agent.task if machine.agent else None
        # Tests kill agents by cancellation.
        killed = task is not None and (task.cancelled() or isinstance(task.exception(), Killed))
        if not killed:
            super().agent_ended(machine)

    def stop_agent(self, instance_id: str) -> None:
        """Stop the agent of a machine for good."""
        self.behaviour.without_agent.add(instance_id)
        machine = self.machines[instance_id]
        if machine.agent is not None:
            self.kill(machine.agent)

    # Commands

    def process(self, hook: Hook | None = None, *, credentialed: bool = False) -> Context:
        """The context of a command."""
        calls = CallCounter()
        store = MemoryInstanceStore(clock=self.clock, calls=calls, database=self.database)
        pool = _CheckedPool(clock=self.clock, ids=self.ids, calls=calls, queues=self.queues)
        compute = _CheckedCompute(cloud=self.cloud, pool=POOL, calls=calls)
        github = _CheckedGitHub(github=self.github, token=self.token, calls=calls)
        pool.world = compute.world = github.world = self
        return Context(
            pool_name=POOL,
            store=hooked(store, "store", hook),
            pool=hooked(pool, "pool", hook),
            compute=hooked(compute, "compute", hook),
            github=hooked(github, "github", hook) if credentialed else None,
            clock=self.clock,
            ids=self.ids,
            event_log=_CheckedEvents(self),
            calls=calls,
        )

    def configuration(self, **changed: Any) -> DesiredConfig:
        values: dict[str, Any] = {
            "pool": POOL,
            "classes": DEFAULT_CLASSES,
            "lifetimes": self.lifetimes,
            "max_instances": self.plan.instances,
            "github_url": "https://github.com",
            "scope": SCOPE,
        }
        return DesiredConfig(**{**values, **changed})

    async def configure(self, **changed: Any) -> RefreshResult:
        configuration = self.configuration(**changed)
        self.configurations = (*self.configurations, configuration.lifetimes)
        return await refresh(self.process(credentialed=True), configuration)

    async def sweep(self, hook: Hook | None = None) -> RefreshResult:
        return await refresh(self.process(hook, credentialed=True), None)

    async def provision(self, run_id: str = "1", *, process: Context | None = None, **changed: Any) -> ProvisionResult:
        return await provision(process or self.process(), provision_request(run_id, **changed))

    async def one(self, run_id: str = "1", **changed: Any) -> Instance:
        """Provision one instance."""
        (item,) = (await self.provision(run_id, **changed)).instances
        return item.instance

    async def release(self, run_id: str = "1", attempt: int = 1, *, process: Context | None = None) -> ReleaseResult:
        return await release(process or self.process(), run_id=run_id, attempt=attempt)

    async def warm(self, count: int, **changed: Any) -> list[str]:
        """Provision and release, so that the pool has this many idle instances."""
        made = await self.provision("warm-up", count=count, **changed)
        done = await self.release("warm-up")
        assert not done.errors
        return [item.instance.instance_id for item in made.instances]

    async def pass_time(
        self, seconds: float, *, sweeps: bool = True, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Let time pass with regular sweeps, and check the invariants after each. Ends early when it `is_over`."""
        until = self.loop.time() + seconds
        liveness = LivenessInvariants(self, sweep_s=SWEEP_S, sweep_duration_s=0.0)
        while (left := until - self.loop.time()) > 0 and not is_over():
            await asyncio.sleep(min(SWEEP_S, left))
            if sweeps:
                result = await self.sweep()
                assert not result.errors, result.errors
                liveness.swept()
                self.check()

    # State of the world

    def record(self, instance_id: str) -> Instance:
        return self.database.instances[instance_id]

    def states(self) -> dict[str, State]:
        return {key: record.state for key, record in self.database.instances.items()}

    def in_state(self, *states: State) -> list[str]:
        return sorted(key for key, state in self.states().items() if state in states)

    def messages(self, resource_class: str = "large") -> list[str]:
        """Instances with a message in the queue of this class."""
        messages = self.queues.named(resource_class).messages
        return sorted(item.message.id for item in messages if item.message is not None)

    def alive(self) -> list[str]:
        """Live machines of this pool."""
        return [
            instance_id
            for instance_id, machine in self.cloud.machines.items()
            if self.cloud.is_alive(instance_id) and machine.tags[POOL_TAG] == POOL
        ]

    # Checks

    def check(self) -> None:
        """Raise if an invariant was violated."""
        assert not self.violations, "\n".join(map(str, self.violations))

    def check_holds_nothing(self, run_id: str) -> None:
        """L5: a provision that did not succeed holds nothing."""
        held = [item for item in self.database.instances.values() if item.run_id == run_id and item.state in ASSIGNED]
        assert not held, f"L5: run {run_id} still holds {held}"

    def _left(self) -> list[str]:
        """Everything that must end by itself."""
        records = [f"record {key}: {state}" for key, state in self.states().items() if state is not State.TERMINATED]
        provisions = [f"open {item}" for item in self.database.provisions.values() if item.status.value == "open"]
        machines = [f"machine {item}" for item in self.alive()]
        return [*records, *provisions, *machines, *(f"registration {item}" for item in self.registrations())]

    async def end(self) -> None:
        """Let time pass until nothing is left, and check that nothing comes back with the next sweeps."""
        await self.pass_time(ALL_OVER_S, is_over=lambda: not self._left())
        await self.pass_time(2 * SWEEP_S)
        self.check()
        assert not self._left()


def provision_request(run_id: str, **changed: Any) -> ProvisionRequest:
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
