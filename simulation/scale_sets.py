"""Runner scale sets of a simulated world: GitHub's service with faults, and the ports of listeners to it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from remuda.domain.demand import DemandMessage, DemandStatistics, JobEvent, JobEventKind
from remuda.domain.errors import Conflict, NotFound, TimedOut, Unavailable
from remuda.domain.runner_set import RunnerSet
from remuda.ports.demand import DemandSession
from remuda.ports.github import Deletion, JitRunner
from simulation.faults import Fault
from simulation.faulty_ports import OFTEN, RARE, SOME, Call, FaultyPort
from simulation.invariants import parse_runner
from simulation.memory.demand import SUCCESSES, MemoryScaleSet, MemoryScaleSets
from simulation.memory.github import MemoryDemandJob, MemoryRunner

if TYPE_CHECKING:
    from simulation.world import SimulatedProcess, World

#: Seconds in which a runner must take an assigned job, normally and after a fault.
LAPSE_S = 600.0
EARLY_LAPSE_S = (5.0, 60.0)
#: Maximum seconds of wrong statistics, of a late event and of a call that hangs.
WRONG_S = 240.0
LATE_S = 180.0
HANG_S = 300.0
#: Seconds after which a registration is removed that never connected.
NEVER_USED_S = 600.0
#: Seconds after which a job fails whose runner is gone.
LEASE_S = 600.0


class CheckedScaleSets(MemoryScaleSets):
    """The scale sets of a world: traced, with wrong statistics, and events that are late, lost or wrong."""

    def __init__(self, world: World) -> None:
        super().__init__(
            github=world.github,
            lapse_s=LAPSE_S,
            never_used_s=NEVER_USED_S,
            lease_s=LEASE_S,
            offers_jobs=world.plan.offers_jobs,
            restarts_ids=world.plan.restarts_ids,
        )
        self._world = world
        self._faults = world.faults
        #: Error of each set's count of assigned jobs, and the time at which it ends.
        self._errors: dict[int, tuple[float, int]] = {}

    def tell(self, set_id: int, event: JobEvent) -> None:
        scale_set = self.sets.get(set_id)
        if scale_set is None:
            return
        self._world.trace.add("github", f"set {scale_set.name}: job {event.job_id} {event.kind} {event.runner_name}")
        parsed = parse_runner(event.runner_name)
        subjects = [parsed[1]] if parsed else []
        if self._faults.inject(Fault.EVENT_LOST, SOME, subjects):
            scale_set.wake()
        elif self._faults.inject(Fault.EVENT_LATE, SOME, subjects):
            self._send_later(scale_set, event, LATE_S)
        else:
            super().tell(set_id, event)
        if event.kind is JobEventKind.STARTED and self._faults.inject(Fault.COMPLETED_EARLY, SOME, subjects):
            self._send_later(scale_set, replace(event, kind=JobEventKind.COMPLETED, result="succeeded"), 20.0)

    def _send_later(self, scale_set: MemoryScaleSet, event: JobEvent, most_s: float) -> None:
        at = self.clock.now() + timedelta(seconds=self._faults.rng.uniform(0.5, most_s))
        scale_set.late.append((at, event))
        scale_set.wake()

    def statistics(self, scale_set: MemoryScaleSet) -> DemandStatistics:
        true = super().statistics(scale_set)
        now = self._world.loop.time()
        for fault, sign in ((Fault.STATISTICS_HIGH, 1), (Fault.STATISTICS_LOW, -1)):
            if self._faults.inject(fault, SOME):
                until = now + self._faults.rng.uniform(5.0, WRONG_S)
                self._errors[scale_set.scale_set_id] = (until, sign * self._faults.rng.randint(1, 3))
        until, error = self._errors.get(scale_set.scale_set_id, (0.0, 0))
        if now >= until or not self._faults.active:
            return true
        return replace(true, assigned=true.assigned + error, running=max(0, true.running + error))

    def lapse_after(self, job: MemoryDemandJob) -> timedelta:
        if self._faults.inject(Fault.ASSIGNMENT_LAPSES, SOME):
            return timedelta(seconds=self._faults.rng.uniform(*EARLY_LAPSE_S))
        return super().lapse_after(job)

    def register(self, scale_set: MemoryScaleSet, name: str) -> MemoryRunner:
        runner = super().register(scale_set, name)
        self._world.stats["registrations of sets"] += 1
        return runner

    def ended(self, job: MemoryDemandJob, result: str, *, runner: MemoryRunner | None = None) -> None:
        super().ended(job, result, runner=runner)
        self._end_run(job)

    def _lapse(self, job: MemoryDemandJob) -> None:
        super()._lapse(job)
        self._end_run(job)

    def _end_run(self, job: MemoryDemandJob) -> None:
        """A run ends with its last job. It succeeds if the last attempt of each job did."""
        jobs = [item for item in self.jobs if item.run_id == job.run_id]
        if all(item.is_over for item in jobs):
            last = {item.name: item.conclusion for item in jobs}
            conclusion = "success" if SUCCESSES.issuperset(last.values()) else "failure"
            key = (job.repository.lower(), int(job.run_id))
            self.github.runs[key] = replace(self.github.runs[key], status="completed", conclusion=conclusion)

    def delete(self, scale_set_id: int) -> None:
        if scale_set_id in self.sets:
            self._world.safety.demand.deleted_at[self.sets[scale_set_id].name] = self._world.loop.time()
        super().delete(scale_set_id)

    def run_again(self, repository: str, run_id: int) -> None:
        self._world.stats["re-runs"] += 1
        self._world.trace.add("github", f"runs the failed jobs of run {run_id} again")
        self._world.safety.demand.run_restarted(run_id)
        super().run_again(repository, run_id)

    def run_again_by_user(self, repository: str, run_id: int) -> None:
        key = (repository.lower(), run_id)
        run = self.github.runs[key]
        if run.status == "completed" and run.conclusion != "success":
            self.github.runs[key] = replace(run, status="queued", conclusion="")
            self.run_again(repository, run_id)

    def remove_some_registration(self) -> None:
        """GitHub removes the registration of an idle runner."""
        idle = [runner for runner in self.github.runners.values() if runner.scale_set_id and runner.job is None]
        if idle and self._faults.inject(Fault.REGISTRATION_GONE, RARE / 2):
            runner = idle[self._faults.rng.randrange(len(idle))]
            self._world.trace.add("github", f"removes the registration {runner.name}")
            self.github.delete(runner.scope, runner.runner_id)


class _FaultyDemandPort(FaultyPort):
    """Calls to the Actions service."""

    def _wrap(self, operation: str, inner: Call) -> Call:
        async def call(*given: Any, **named: Any) -> Any:
            return await self._request(operation, inner, *given, **named)

        return call

    async def _request(self, operation: str, inner: Call, *given: Any, **named: Any) -> Any:
        await self._transfer()
        self._trace(operation)
        await self._fail(operation)
        fails = self._inject(Fault.DEMAND_FAILED, RARE)
        if fails and self._rng.random() < 0.5:
            raise Unavailable(f"the Actions service did not answer {operation}")
        answer = await inner(*given, **named)
        await self._world.called(self._process, operation)
        if fails:
            raise Unavailable(f"the answer of the Actions service to {operation} was lost")
        if self._rng.random() < 0.5:
            await self._transfer()
        return answer

    async def _fail(self, operation: str) -> None:
        if self._inject(Fault.DEMAND_HANGS, RARE):
            await self._world.loop.sleep(self._rng.uniform(5.0, HANG_S))
            if self._rng.random() < 0.5:
                raise TimedOut(f"the Actions service did not answer {operation} in time")


class FaultyDemandSource(_FaultyDemandPort):
    async def find_set(self, runner_set: RunnerSet) -> int | None:
        self._world.safety.pauses.opens_session(self._process, runner_set.name)
        found: int | None = await self._request("find_set", self._port.find_set, runner_set)
        return found

    async def open_session(
        self, runner_set: RunnerSet, scale_set_id: int, *, owner: str, session_id: str = ""
    ) -> DemandSession:
        if self._inject(Fault.SESSION_CONFLICT, OFTEN):
            await self._transfer()
            raise Conflict("the set has a session of another process")
        session = await self._request(
            "open_session", self._port.open_session, runner_set, scale_set_id, owner=owner, session_id=session_id
        )
        faulty = FaultyDemandSession(session, self._world, self._process, runner_set, scale_set_id)
        return cast("DemandSession", self._world.port(faulty, self._process))

    async def register(self, runner_set: RunnerSet, scale_set_id: int, *, name: str) -> JitRunner:
        runner: JitRunner = await self._request("register", self._port.register, runner_set, scale_set_id, name=name)
        if self._inject(Fault.JIT_UNSURE, OFTEN):
            raise Unavailable("the answer to a registration was lost")
        return runner

    async def delete_set(self, runner_set: RunnerSet) -> bool:
        async def delete() -> bool:
            self._world.safety.demand.liveness.deletes(runner_set, self._process)
            existed: bool = await self._port.delete_set(runner_set)
            return existed

        return bool(await self._request("delete_set", delete))

    async def deregister(self, runner_set: RunnerSet, runner_id: int) -> Deletion:
        async def delete() -> Deletion:
            self._world.safety.deregistration_requested(runner_id)
            deletion: Deletion = await self._port.deregister(runner_set, runner_id)
            return deletion

        deletion: Deletion = await self._request("deregister", delete)
        return deletion


class FaultyDemandSession(_FaultyDemandPort):
    def __init__(
        self, port: Any, world: World, process: SimulatedProcess, runner_set: RunnerSet, scale_set_id: int
    ) -> None:
        super().__init__(port, world, process)
        self._set = runner_set
        self._scale_set_id = scale_set_id
        self._last: DemandMessage | None = None

    async def receive(self, *, last_message_id: int, capacity: int) -> DemandMessage | None:
        self._world.safety.demand.polled(self._process, self._set.name, capacity)
        self._world.safety.pauses.acts(self._process)
        if self._inject(Fault.SESSION_LOST, RARE / 2):
            self._world.scale_sets.close_session(self._scale_set_id, self._port.session_id)
            raise NotFound("the session does not exist")
        if self._last is not None and self._inject(Fault.EVENT_TWICE, SOME):
            await self._transfer()
            self._world.safety.pauses.polled(self._process, self._set.name)
            return self._last
        message: DemandMessage | None = await self._request(
            "receive", self._port.receive, last_message_id=last_message_id, capacity=capacity
        )
        self._last = message or self._last
        self._world.safety.pauses.polled(self._process, self._set.name)
        return message

    async def acknowledge(self, message_id: int) -> None:
        async def acknowledge() -> None:
            sets = self._world.scale_sets.sets
            messages = sets[self._scale_set_id].messages if self._scale_set_id in sets else []
            events = [event for item in messages if item.message_id == message_id for event in item.events]
            self._world.safety.demand.liveness.acknowledged(self._process, events)
            await self._port.acknowledge(message_id)

        await self._request("acknowledge", acknowledge)

    async def acquire(self, request_ids: Collection[int]) -> Collection[int]:
        acquired: Collection[int] = await self._request("acquire", self._port.acquire, request_ids)
        return acquired
