"""A simulated machine: its disk, its runner, its dead-man timer, and whoever starts its agent again.

Machine and RunnerSoftware in one, as the agent's ports ask. The agent on it is the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from remuda.domain.errors import Unavailable, UserError
from remuda.domain.instance import Assignment
from remuda.domain.signals import CREDENTIAL_REFUSED, FORGE_UNREACHABLE
from remuda.ports.github import Deletion
from remuda.ports.machine import AgentState, Identity, StepResult
from remuda.ports.runner import RemovalStatus, RunnerState
from simulation.faults import Fault
from simulation.loop import START
from simulation.memory.compute import MemoryMachine
from simulation.memory.github import MemoryJob

if TYPE_CHECKING:
    from simulation.world import SimulatedProcess, World

#: How long after its notice a spot machine is taken.
NOTICE_S = 120.0
#: How long whoever starts the agent again waits.
RESTART_S = (1.0, 6.0)
NEVER = timedelta(days=365)


class Host:
    def __init__(self, world: World, machine: MemoryMachine, number: int) -> None:
        self._world = world
        self._loop = world.loop
        self.instance_id = machine.instance_id
        self.number = number
        self._margin_s = machine.request.margin_s
        self._chance = random.Random(f"{world.plan.seed} machine {number}")
        #: Its wall clock, the same for every agent that runs on it.
        self.skew_s = world.skew(self._chance)
        self.alive = True
        #: Something of a job may be left on it.
        self.dirty = False
        self.job: MemoryJob | None = None
        self.memory = AgentState()
        self.notice = ""
        self.agent: SimulatedProcess | None = None
        #: When its agent was last disturbed by a fault.
        self.disturbed_at = -1e9
        self._agents = 0
        self._state = RunnerState()
        self._changed: dict[asyncio.Future[None], None] = {}
        self._runner_id = 0
        #: It is registered for one job.
        self._is_jit = False
        self._dead_man = self._later(machine.request.first_life_s, self._dead_man_fires)
        sick = world.faults.strikes_now
        about = [self.instance_id]
        self._script = StepResult(ok=not sick(Fault.SCRIPT_FAILED, 0.03, about), detail="exit 1")
        if sick(Fault.NEVER_BOOTS, 0.04, about):
            # Its timer is set by what never ran.
            self._dead_man.cancel()
            world.cloud.arm(self.instance_id, machine.launched_at + NEVER)
        else:
            self._later(self._chance.uniform(10.0, 70.0), self._start_agent)

    # Power

    def _later(self, seconds: float, call: object) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, call, context=self._loop.outside)  # type: ignore[arg-type]

    def _start_agent(self) -> None:
        if not self.alive:
            return
        self._agents += 1
        self.agent = self._world.agent(self, f"agent {self.number:04x}.{self._agents}")
        self.agent.on_end = self._agent_ended

    def _agent_ended(self) -> None:
        self._world.agent_ended(self)
        if self.alive:
            self.disturbed_at = self._loop.time()
            self._later(self._chance.uniform(*RESTART_S), self._start_agent)

    def _dead_man_fires(self) -> None:
        if self.alive:
            self._world.safety.dead_man(self)
            self.power_off("its dead-man timer")

    def power_off(self, why: str) -> None:
        """The end of the machine, whoever asked for it: nothing on it runs any more."""
        if not self.alive:
            return
        self.alive = False
        self._world.trace.add(self.instance_id, f"off: {why}")
        self._dead_man.cancel()
        job, self.job = self.job, None
        if self._state.listening:
            self._world.github.disconnect(self._runner_id)
        if job is not None:
            self._world.stats["jobs lost with their machine"] += 1
        self._state = RunnerState()
        if self.agent is not None:
            self.agent.crash()

    def take_soon(self) -> None:
        """A spot machine's end is announced."""
        if self.alive and not self.notice:
            self.notice = "terminate"
            self._later(NOTICE_S, lambda: self._world.cut_power(self.instance_id, "taken by the spot market"))

    # Machine

    async def identity(self) -> Identity:
        return Identity(instance_id=self.instance_id, pool=self._world.pool_name, margin_s=self._margin_s)

    def load(self) -> AgentState:
        return self.memory

    def save(self, state: AgentState) -> None:
        self.memory = state

    def set_dead_man_timer(self, at: datetime) -> None:
        """By the machine's own clock."""
        if not self.alive:
            return
        truly_at = at - timedelta(seconds=self.skew_s)
        self._world.cloud.arm(self.instance_id, truly_at)
        self._dead_man.cancel()
        left_s = (truly_at - START).total_seconds() - self._loop.time()
        self._dead_man = self._later(max(0.0, left_s), self._dead_man_fires)

    async def spot_notice(self) -> str:
        return self.notice

    async def run_script(self, timeout_s: float) -> StepResult:  # noqa: ARG002 - none takes so long
        await self._loop.rest(self._chance.uniform(0.5, 5.0))
        if not self._script.ok:
            self._world.faults.cover(Fault.SCRIPT_FAILED, self.instance_id)
        return self._script

    async def reset(self) -> StepResult:
        self._world.safety.job_cut_short(self, "reset")
        await self._loop.rest(self._chance.uniform(0.5, 5.0))
        if self.agent is not None:
            await self._world.called(self.agent, "reset")
        if self._world.faults.strikes_now(Fault.RESET_FAILED, 0.05, [self.instance_id]):
            return StepResult(ok=False, detail="a process of the job is still there")
        self.dirty = False
        return StepResult(ok=True)

    async def end(self, reason: str) -> None:
        self._world.safety.ends_itself(self, reason)
        self._world.cloud.end(self.instance_id, f"ended itself: {reason}")

    # RunnerSoftware

    def state(self) -> RunnerState:
        return self._state

    async def configure(self, assignment: Assignment) -> StepResult:
        await self._loop.rest(self._chance.uniform(0.5, 6.0))
        about = [self.instance_id]
        faults = self._world.faults
        if faults.strikes_now(Fault.REGISTRATION_FAILED, 0.04, about):
            return StepResult(ok=False, detail="config.sh: exit 1")
        self._is_jit = bool(assignment.jit_config)
        if self._is_jit:
            # The listener brings it with it: nobody is asked before its start.
            self._runner_id = assignment.runner_id
            self._set(RunnerState(configured_as=assignment.runner_name))
            return StepResult(ok=True)
        if assignment.credential is None:
            return StepResult(ok=False, detail="there is no registration token in the assignment")
        try:
            self._github_answers()
            runner = self._world.github.register(
                scope_of(assignment), assignment.credential.token, assignment.runner_name, assignment.labels
            )
            self._answer_comes()
        except UserError as error:
            return StepResult(ok=False, detail=f"{CREDENTIAL_REFUSED}: {error.message}")
        except Unavailable as error:
            return StepResult(ok=False, detail=f"{FORGE_UNREACHABLE}: {error.message}")
        self._runner_id = runner.runner_id
        self._set(RunnerState(configured_as=assignment.runner_name))
        await self._loop.rest(self._chance.random())
        return StepResult(ok=True)

    async def start(self, _assignment: Assignment) -> None:
        if self._state.listening:
            return
        self._world.safety.listener_starts(self)
        self._set(replace(self._state, listening=True, exit_code=None))
        if not self._world.github.connect(self._runner_id, self._take):
            self._set(replace(self._state, listening=False, exit_code=1))
        elif self._world.faults.strikes_now(Fault.LISTENER_DIES, 0.08, [self.instance_id]):
            self._later(self._chance.uniform(0.5, 120.0), self._listener_dies)

    def _listener_dies(self) -> None:
        if self.alive and self._state.listening and self.job is None:
            self._world.faults.cover(Fault.LISTENER_DIES, self.instance_id)
            self._world.github.disconnect(self._runner_id)
            self._set(replace(self._state, listening=False, busy=False, exit_code=2))

    def refused(self) -> str:
        return ""

    async def remove(self, assignment: Assignment) -> tuple[RemovalStatus, str]:
        await self._loop.rest(self._chance.uniform(0.3, 4.0))
        if self._is_jit:
            return self._remove_jit(assignment)
        if assignment.credential is None:
            return RemovalStatus.FAILED, "there is no removal token in the assignment"
        try:
            self._github_answers()
            deletion = self._world.github.unregister(scope_of(assignment), assignment.credential.token, self._runner_id)
            self._answer_comes()
            if self._world.faults.strikes_now(Fault.GITHUB_422, 0.04, [self.instance_id]):
                return RemovalStatus.BUSY, "GitHub says that it runs a job"
        except UserError as error:
            return RemovalStatus.FAILED, error.message
        except Unavailable as error:
            return RemovalStatus.UNREACHABLE, error.message
        if deletion is Deletion.BUSY:
            return RemovalStatus.BUSY, "runs a job"
        self._set(replace(self._state, configured_as=""))
        return RemovalStatus.REMOVED, ""

    def _remove_jit(self, assignment: Assignment) -> tuple[RemovalStatus, str]:
        if assignment.runner_id and not self._state.spent:
            return RemovalStatus.FAILED, "it was registered just in time: only the service can remove it"
        self._set(replace(self._state, configured_as=""))
        return RemovalStatus.REMOVED, ""

    async def stop(self) -> None:
        self._world.safety.job_cut_short(self, "stop")
        await self._loop.rest(self._chance.random())
        self._world.github.disconnect(self._runner_id)
        self._set(RunnerState())

    async def wait_for_change(self, since: RunnerState, timeout_s: float) -> RunnerState:
        if self._state != since:
            return self._state
        changed: asyncio.Future[None] = self._loop.create_future()
        self._changed[changed] = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await changed
        finally:
            self._changed.pop(changed, None)
        return self._state

    def _github_answers(self) -> None:
        for fault, message in (
            (Fault.GITHUB_401, "401"),
            (Fault.GITHUB_403, "403"),
            (Fault.GITHUB_404, "404"),
            (Fault.GITHUB_429, "429"),
            (Fault.GITHUB_5XX, "502"),
        ):
            if self._world.faults.strikes_now(fault, 0.015, [self.instance_id]):
                if fault in {Fault.GITHUB_401, Fault.GITHUB_403, Fault.GITHUB_404}:
                    raise UserError(f"GitHub answered {message}", field="github-token")
                raise Unavailable(f"GitHub answered {message}")

    def _answer_comes(self) -> None:
        if self._world.faults.strikes_now(Fault.GITHUB_UNSURE, 0.04, [self.instance_id]):
            raise Unavailable("GitHub's answer was lost")

    def _take(self, job: MemoryJob) -> None:
        """GitHub has given a job; the runner begins a moment later."""
        self._later(self._chance.uniform(0.1, 4.0), lambda: self._begin(job))

    def _begin(self, job: MemoryJob) -> None:
        runner = self._world.github.runners.get(self._runner_id)
        if not self.alive or not self._state.listening or runner is None or runner.job is not job:
            return
        self.job = job
        job.started = self.dirty = True
        self._world.safety.job_starts(job, self)
        self._set(replace(self._state, busy=True))
        self._later(job.seconds, lambda: self._finish(job))

    def _finish(self, job: MemoryJob) -> None:
        if self.job is job:
            self.job = None
            self._world.github.finish(job)
            if self._is_jit:
                self._set(replace(self._state, busy=False, listening=False, exit_code=0, spent=True))
            else:
                self._set(replace(self._state, busy=False))

    def _set(self, state: RunnerState) -> None:
        self._state = state
        for changed in list(self._changed):
            if not changed.done():
                changed.set_result(None)


def scope_of(assignment: Assignment) -> str:
    return "/".join(assignment.url.split("/")[3:])
