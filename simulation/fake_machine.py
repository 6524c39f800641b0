"""A simulated machine: disk, runner, dead-man timer and supervisor of a real agent.

It implements both ports that an agent drives, `Machine` and `RunnerSoftware`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from remuda.domain.errors import Unavailable, UserError
from remuda.domain.instance import Assignment, State
from remuda.domain.signals import FailureKind
from remuda.ports.github import Deletion
from remuda.ports.machine import AgentState, Identity, RemovalStatus, RunnerState, StepResult
from simulation.faults import GITHUB_TIMEOUT_S, Fault, FaultInjector
from simulation.loop import START
from simulation.memory.compute import MemoryMachine
from simulation.memory.github import MemoryDemandJob, MemoryJob
from simulation.safety import REPORTED_WITHIN_S

if TYPE_CHECKING:
    from simulation.world import SimulatedProcess, World

#: Seconds between a spot notice and the end of the machine.
NOTICE_S = 120.0
#: Deaths of a listener after which an agent may give up.
STARTS = 5
#: States in which an agent may begin its steps.
_RELEASING, _RUNNING = frozenset({State.RELEASING}), frozenset({State.RUNNING})
_ASSIGNED = frozenset({State.CREATED, State.CLAIMED, State.RUNNING})
#: Probability of each error of GitHub when an agent removes its registration.
REFUSED = 0.04
#: Maximum number of further refusals after GitHub has refused the removal of a registration.
MAX_REFUSALS = 3
#: Fraction of the listeners that die once which die after every start.
KEEPS_DYING = 0.4
#: Seconds until a job has failed that the hook refuses.
REFUSAL_S = 1.0
_NEVER = timedelta(days=365)
#: Maximum seconds of a slow pre-runner script.
SLOW_SCRIPT_S = 1_200.0


#: Fraction of the answers of the metadata service that take long, and their least and most seconds.
SLOW_METADATA, SLOW_METADATA_S = 0.1, (0.2, 1.5)


class TimedAction(Enum):
    """Actions on a machine that take time."""

    BOOT = auto()
    #: From the end of an agent to its restart by the supervisor.
    RESTART = auto()
    SCRIPT = auto()
    CONFIGURE = auto()
    #: From the registration to the answer of the runner's configuration.
    CONFIGURED = auto()
    REMOVE = auto()
    STOP = auto()
    RESET = auto()
    #: From the assignment of a job by GitHub to its start.
    JOB_START = auto()
    #: The answer of the metadata service to the question about a spot notice.
    METADATA = auto()


#: Least and most seconds of each action.
_SECONDS = {
    TimedAction.BOOT: (10.0, 70.0),
    TimedAction.RESTART: (1.0, 6.0),
    TimedAction.SCRIPT: (0.5, 5.0),
    TimedAction.CONFIGURE: (0.5, 6.0),
    TimedAction.CONFIGURED: (0.0, 1.0),
    TimedAction.REMOVE: (0.3, 4.0),
    TimedAction.STOP: (0.0, 1.0),
    TimedAction.RESET: (0.5, 5.0),
    TimedAction.JOB_START: (0.1, 4.0),
    TimedAction.METADATA: (0.0, 0.02),
}


class MachineBehaviour(Protocol):
    """Durations and results of the actions on a machine."""

    def seconds(self, action: TimedAction) -> float: ...

    def boots(self) -> bool:
        """Whether anything starts on the machine at all."""
        ...

    def starts_agent(self) -> bool:
        """Whether the supervisor starts an agent now."""
        ...

    def script(self) -> StepResult:
        """Result of the pre-runner script."""
        ...

    def register(self) -> StepResult: ...

    def reset(self) -> StepResult: ...


class RandomBehaviour:
    """Durations at random, and failures by injected faults."""

    def __init__(
        self, faults: FaultInjector, rng: random.Random, instance_id: str, *, slow_scripts: bool = False
    ) -> None:
        self._slow_scripts = slow_scripts
        #: A separate generator: there are so many heartbeats.
        self._metadata = random.Random(f"metadata of {instance_id}")
        self._faults = faults
        self._rng = rng
        self._subjects = [instance_id]

    def seconds(self, action: TimedAction) -> float:
        if action is TimedAction.SCRIPT and self._slow_scripts:
            return self._rng.uniform(0.0, SLOW_SCRIPT_S)
        if action is TimedAction.METADATA:
            is_slow = self._metadata.random() < SLOW_METADATA
            return self._metadata.uniform(*(SLOW_METADATA_S if is_slow else _SECONDS[action]))
        return self._rng.uniform(*_SECONDS[action])

    def boots(self) -> bool:
        return not self._faults.inject(Fault.NEVER_BOOTS, 0.04, self._subjects)

    def starts_agent(self) -> bool:
        return True

    def script(self) -> StepResult:
        return self._unless(Fault.SCRIPT_FAILED, 0.03, "exit 1")

    def register(self) -> StepResult:
        return self._unless(Fault.REGISTRATION_FAILED, 0.04, "config.sh: exit 1")

    def reset(self) -> StepResult:
        return self._unless(Fault.RESET_FAILED, 0.05, "a process of the job is still running")

    def _unless(self, fault: Fault, probability: float, detail: str) -> StepResult:
        failed = self._faults.inject(fault, probability, self._subjects)
        return StepResult(ok=not failed, detail=detail if failed else "")


class FakeMachine:
    def __init__(self, world: World, machine: MemoryMachine, number: int) -> None:
        self._world = world
        self._loop = world.loop
        self.instance_id = machine.instance_id
        self.number = number
        self._margin_s = machine.request.margin_s
        rng = random.Random(f"{world.plan.seed} machine {number}")
        #: Error of its wall clock, the same for every agent that runs on it.
        self.skew_s = world.skew(rng)
        self._rng = rng
        self._behaviour = world.behaviour_of(machine.instance_id, rng)
        self.alive = True
        #: Files or processes of a job may be left on it.
        self.dirty = False
        self.job: MemoryJob | None = None
        #: When its last job ended, when its listener last died, when a step last failed, and whether its script failed.
        self.job_ended_at = self.listener_died_at = self.step_failed_at = -1e9
        self.script_failed = False
        self.agent_state = AgentState()
        self.notice = ""
        self.agent: SimulatedProcess | None = None
        #: When a fault last affected its agent.
        self.disturbed_at = -1e9
        self._agents = 0
        self.started_at = world.loop.time()
        #: How often its listener has died in its epoch.
        self._deaths = 0
        #: How often GitHub refuses the removal of its registration once more.
        self._refusals = 0
        #: Whether it dies after each start in this epoch.
        self._keeps_dying = False
        self._state = RunnerState()
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._runner_id = 0
        self._is_ephemeral = False
        #: Whether its registration is for a job of any run, as in runner sets.
        self._any_run = False
        #: The agent process that started its listener.
        self._starter = 0
        #: Whether its hook refuses untrusted jobs.
        self._only_trusted = False
        self._dead_man = self._later(machine.request.first_life_s, self._dead_man_fires)
        self._script = self._behaviour.script()
        if self._behaviour.boots():
            self._later(self._behaviour.seconds(TimedAction.BOOT), self._start_agent)
        else:
            # The timer is set during the boot.
            self._dead_man.cancel()
            world.cloud.arm(self.instance_id, machine.launched_at + _NEVER)

    # Power

    def _later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, call, context=self._loop.outside)

    def _start_agent(self) -> None:
        if not self.alive or not self._behaviour.starts_agent():
            return
        self._agents += 1
        self.agent = self._world.start_agent(self, f"agent {self.number:04x}.{self._agents}")
        self.agent.on_end = self._agent_ended

    @property
    def has_agent(self) -> bool:
        """Whether its agent runs."""
        task = self.agent.task if self.agent is not None and not self.agent.dead else None
        return task is not None and not task.done()

    def _agent_ended(self) -> None:
        self._world.agent_ended(self)
        if self.alive:
            self.disturbed_at = self._loop.time()
            self._later(self._behaviour.seconds(TimedAction.RESTART), self._start_agent)

    def _dead_man_fires(self) -> None:
        if self.alive:
            self._world.safety.dead_man(self)
            self.power_off("its dead-man timer")

    def power_off(self, why: str) -> None:
        """Stop everything on the machine."""
        if not self.alive:
            return
        self.alive = False
        self._world.trace.add(self.instance_id, f"off: {why}")
        self._dead_man.cancel()
        self._world.safety.demand.liveness.lost(self)
        job, self.job = self.job, None
        if self._state.listening:
            self._world.github.disconnect(self._runner_id)
        if job is not None:
            self._world.stats["jobs lost with their machine"] += 1
        self._state = RunnerState()
        if self.agent is not None:
            self._world.kill(self.agent)

    def give_spot_notice(self) -> None:
        if self.alive and not self.notice:
            self.notice = "terminate"
            self._later(NOTICE_S, lambda: self._world.cut_power(self.instance_id, "spot interruption"))

    # Machine

    async def identity(self) -> Identity:
        return Identity(instance_id=self.instance_id, pool=self._world.pool_name, margin_s=self._margin_s)

    def load(self) -> AgentState:
        return self.agent_state

    def save(self, state: AgentState) -> None:
        self.agent_state = state

    def set_dead_man_timer(self, at: datetime) -> None:
        """By the machine's own clock."""
        if not self.alive:
            return
        true_time = at - timedelta(seconds=self.skew_s)
        self._world.cloud.arm(self.instance_id, true_time)
        self._dead_man.cancel()
        left_s = (true_time - START).total_seconds() - self._loop.time()
        self._dead_man = self._later(max(0.0, left_s), self._dead_man_fires)

    async def spot_notice(self) -> str:
        seconds = self._behaviour.seconds(TimedAction.METADATA)
        if seconds:
            await self._loop.sleep(seconds)
        return self.notice

    async def run_script(self, timeout_s: float) -> StepResult:
        assert timeout_s > SLOW_SCRIPT_S  # noqa: S101 - no simulated script takes longer
        await self._loop.sleep(self._behaviour.seconds(TimedAction.SCRIPT))
        self.script_failed = not self._script.ok
        return self._script

    async def reset(self) -> StepResult:
        self._world.safety.patience.acts(self, "reset", _RELEASING)
        self._world.safety.job_cut_short(self, "reset")
        await self._loop.sleep(self._behaviour.seconds(TimedAction.RESET))
        if self.agent is not None:
            await self._world.called(self.agent, "reset")
        result = self._noted(self._behaviour.reset())
        if result.ok:
            self.dirty = False
        return result

    def _noted(self, result: StepResult) -> StepResult:
        if not result.ok:
            self.step_failed_at = self._loop.time()
        return result

    async def end(self, reason: str) -> None:
        self._world.safety.ends_itself(self, reason)
        self._world.cloud.end(self.instance_id, f"ended itself: {reason}")

    # RunnerSoftware

    def state(self) -> RunnerState:
        return self._state

    async def register(self, assignment: Assignment) -> StepResult:
        self._world.safety.patience.acts(self, "register", _ASSIGNED)
        self._refusals = 0
        await self._loop.sleep(self._behaviour.seconds(TimedAction.CONFIGURE))
        if self._world.faults.inject(Fault.NEVER_REGISTERS, 0.05, [self.instance_id]):
            # Until it is killed it reads nothing, so it does not know of a later threshold.
            self.disturbed_at = math.inf
            try:
                await self._loop.sleep(_NEVER.total_seconds())
            finally:
                self.disturbed_at = self._loop.time()
        self._deaths, self._keeps_dying = 0, False
        result = self._noted(self._behaviour.register())
        if not result.ok:
            return result
        self._is_ephemeral = bool(assignment.jit_config)
        self._any_run = assignment.any_run
        self._only_trusted = assignment.only_trusted
        if self._is_ephemeral:
            # The just-in-time configuration contains the registration: GitHub is not called before the start.
            self._runner_id = assignment.runner_id
            self._set(RunnerState(registered_as=assignment.runner_name))
            return result
        if assignment.credential is None:
            return self._noted(StepResult(ok=False, detail="there is no registration token in the assignment"))
        try:
            await self._raise_github_error()
            runner = self._world.github.register(
                scope_of(assignment), assignment.credential.token, assignment.runner_name, assignment.labels
            )
            self._lose_github_answer()
        except UserError as error:
            return self._noted(StepResult(ok=False, detail=error.message, failure=FailureKind.CREDENTIAL_REFUSED))
        except Unavailable as error:
            return self._noted(StepResult(ok=False, detail=error.message, failure=FailureKind.GITHUB_UNREACHABLE))
        self._runner_id = runner.runner_id
        self._set(RunnerState(registered_as=assignment.runner_name))
        await self._loop.sleep(self._behaviour.seconds(TimedAction.CONFIGURED))
        return result

    async def start(self, _assignment: Assignment) -> None:
        if self._state.listening:
            return
        self._world.safety.patience.acts(self, "listen", _RUNNING)
        self._world.safety.listener_starts(self)
        self._starter = self._agents
        self._set(replace(self._state, listening=True, exit_code=None))
        removed = self._registration_removed if self._is_ephemeral else None
        if not self._world.github.connect(self._runner_id, self._accept, removed):
            self.step_failed_at = self._loop.time()
            self._set(replace(self._state, listening=False, exit_code=1))
        elif self._keeps_dying:
            self._later(self._rng.uniform(0.5, 5.0), self._listener_dies)
        elif self._world.faults.inject(Fault.LISTENER_DIES, 0.08, [self.instance_id]):
            self._keeps_dying = self._rng.random() < KEEPS_DYING
            self._later(self._rng.uniform(0.5, 120.0), self._listener_dies)

    def _listener_dies(self) -> None:
        if self.alive and self._state.listening and self.job is None:
            if self._is_ephemeral and self._rng.random() < 0.8:
                self._exit_without_job()
                return
            self._world.github.disconnect(self._runner_id)
            self.listener_died_at = self._loop.time()
            self._deaths += 1
            if self._deaths >= STARTS:
                self.step_failed_at = self._loop.time()
            self._set(replace(self._state, listening=False, busy=False, exit_code=2))

    def _registration_removed(self) -> None:
        """GitHub answers the next poll of the listener that its registration is gone, and it exits."""
        if self._world.plan.deaf_runners:
            return
        runner_id = self._runner_id
        self._later(self._rng.uniform(0.1, 20.0), lambda: self._exit_removed(runner_id))

    def _exit_removed(self, runner_id: int) -> None:
        if self.alive and self._state.listening and self._runner_id == runner_id and self.job is None:
            self._exit_without_job()

    def _exit_without_job(self) -> None:
        """GitHub sends away a runner that is registered for one job: its registration or its job is gone."""
        self.step_failed_at = self._loop.time()
        self._world.stats["runners sent away"] += 1
        self._world.github.disconnect(self._runner_id)
        # An agent that has not watched the listener from its start cannot tell whether it had a job.
        watched = self._any_run or (self.has_agent and self._agents == self._starter)
        self._set(replace(self._state, listening=False, exit_code=0, spent=True, unused=watched, had_job=not watched))
        self._await_failure(self._state.registered_as)

    def _await_failure(self, name: str) -> None:
        """Check after a while that the agent has reported it, again and again while faults may delay the report."""

        def check() -> None:
            still_so = self.alive and self._state.spent and self._state.registered_as == name
            if still_so and not self._world.safety.sent_away(self, since=self.step_failed_at):
                self._await_failure(name)

        self._later(REPORTED_WITHIN_S, check)

    def refused(self) -> str:
        return ""

    async def remove(self, assignment: Assignment) -> tuple[RemovalStatus, str]:
        self._world.safety.patience.acts(self, "remove its registration", _RELEASING)
        self._world.safety.removal_begins(self, assignment)
        self._world.safety.pauses.removal_begins(self)
        removal, detail = await self._remove(assignment)
        self._world.safety.pauses.removal_ended(self, removal)
        return removal, detail

    async def _remove(self, assignment: Assignment) -> tuple[RemovalStatus, str]:
        await self._loop.sleep(self._behaviour.seconds(TimedAction.REMOVE))
        if self._is_ephemeral:
            return self._remove_ephemeral(assignment)
        if assignment.credential is None:
            return self._removal_failed("there is no removal token in the assignment")
        if self._refusals:
            self._refusals -= 1
            return self._removal_failed("GitHub refuses it again")
        try:
            await self._raise_github_error(REFUSED)
            deletion = self._world.github.unregister(scope_of(assignment), assignment.credential.token, self._runner_id)
            self._lose_github_answer()
            if self._world.faults.inject(Fault.GITHUB_422, 0.04, [self.instance_id]):
                return RemovalStatus.BUSY, "GitHub says that it runs a job"
        except UserError as error:
            self._refusals = self._rng.randint(0, MAX_REFUSALS)
            return self._removal_failed(error.message)
        except Unavailable as error:
            return RemovalStatus.UNREACHABLE, error.message
        if deletion is Deletion.BUSY:
            return RemovalStatus.BUSY, "runs a job"
        self._set(replace(self._state, registered_as=""))
        return RemovalStatus.REMOVED, ""

    def _remove_ephemeral(self, assignment: Assignment) -> tuple[RemovalStatus, str]:
        if assignment.runner_id and not self._state.spent:
            return self._removal_failed("it was registered just in time: only the service can remove it")
        self._set(replace(self._state, registered_as=""))
        return RemovalStatus.REMOVED, ""

    def _removal_failed(self, why: str) -> tuple[RemovalStatus, str]:
        self.step_failed_at = self._loop.time()
        self._world.safety.patience.removal_failed(self)
        return RemovalStatus.FAILED, why

    async def stop(self) -> None:
        self._world.safety.job_cut_short(self, "stop")
        await self._loop.sleep(self._behaviour.seconds(TimedAction.STOP))
        self._world.github.disconnect(self._runner_id)
        self._set(RunnerState())

    async def wait_for_change(self, since: RunnerState, timeout_s: float) -> RunnerState:
        if self._state != since:
            return self._state
        changed: asyncio.Future[None] = self._loop.create_future()
        self._waiters[changed] = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await changed
        finally:
            self._waiters.pop(changed, None)
        return self._state

    async def _raise_github_error(self, probability: float = 0.015) -> None:
        if self._world.github_hangs([self.instance_id]):
            await self._loop.sleep(GITHUB_TIMEOUT_S)
            raise Unavailable("GitHub does not answer")
        for fault, message in (
            (Fault.GITHUB_401, "401"),
            (Fault.GITHUB_403, "403"),
            (Fault.GITHUB_404, "404"),
            (Fault.GITHUB_429, "429"),
            (Fault.GITHUB_5XX, "502"),
        ):
            if self._world.faults.inject(fault, probability, [self.instance_id]):
                if fault in {Fault.GITHUB_401, Fault.GITHUB_403, Fault.GITHUB_404}:
                    raise UserError(f"GitHub answered {message}", field="github-token")
                raise Unavailable(f"GitHub answered {message}")

    def _lose_github_answer(self) -> None:
        if self._world.faults.inject(Fault.GITHUB_UNSURE, 0.04, [self.instance_id]):
            raise Unavailable("GitHub's answer was lost")

    def _accept(self, job: MemoryJob) -> None:
        """Called by GitHub with a job; the runner starts it a moment later, unless GitHub withdraws it by then."""
        withdrawn = self._is_ephemeral and self._world.faults.inject(Fault.LISTENER_DIES, 0.1, [self.instance_id])
        then = self._listener_dies if withdrawn else lambda: self._start_job(job)
        self._later(self._behaviour.seconds(TimedAction.JOB_START), then)

    def _start_job(self, job: MemoryJob) -> None:
        runner = self._world.github.runners.get(self._runner_id)
        if not self.alive or not self._state.listening or runner is None or runner.job is not job or job.started:
            return
        self.job = job
        self.dirty = True
        self._world.github.start(job)
        # The hook runs before any step of the job: a refused one fails without running anything.
        refused = self._only_trusted and isinstance(job, MemoryDemandJob) and job.is_fork
        self._world.safety.job_starts(job, self, refused=refused)
        self._set(replace(self._state, busy=True, had_job=True, saw_job=True))
        self._later(REFUSAL_S if refused else job.seconds, lambda: self._finish(job, "failure" if refused else ""))

    def cancel(self, job: MemoryJob) -> None:
        """A user cancels a running job."""
        self._finish(job, "cancelled")

    def _finish(self, job: MemoryJob, conclusion: str = "") -> None:
        if self.job is job:
            self.job = None
            self.job_ended_at = self._loop.time()
            self._world.github.finish(job, conclusion or job.outcome)
            if self._is_ephemeral:
                self._set(replace(self._state, busy=False, listening=False, exit_code=0, spent=True))
            else:
                self._set(replace(self._state, busy=False))

    def _set(self, state: RunnerState) -> None:
        self._state = state
        for changed in list(self._waiters):
            if not changed.done():
                changed.set_result(None)


def scope_of(assignment: Assignment) -> str:
    return "/".join(assignment.url.split("/")[3:])
