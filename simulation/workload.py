"""The workload of a simulated world: workflow runs, user actions and sweeps, then sweeps until nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC
from typing import Any

from remuda.controlplane import operator
from remuda.controlplane.context import Context
from remuda.controlplane.demand import DemandContext, DemandListener
from remuda.controlplane.provision import ProvisionRequest, provision
from remuda.controlplane.refresh import RefreshResult, refresh
from remuda.controlplane.release import release
from remuda.controlplane.scale_down import FleetContext, scale_down
from remuda.domain.demand import LISTENER_LEASE
from remuda.domain.errors import NotFound
from remuda.domain.resources import DEFAULT_CLASSES, RunnerRequest, Tier, TypePatterns, UsageClass
from remuda.domain.scale_down.fleet import (
    GHR_APPLICATION,
    GHR_APPLICATION_TAG,
    GHR_ENVIRONMENT_TAG,
    GHR_ORPHAN_TAG,
    GHR_OWNER_TAG,
    GHR_TYPE_TAG,
    REPO,
    YES,
    FleetMachine,
)
from remuda.domain.scale_down.idle_config import IdleWindow, parse_cron
from remuda.domain.scale_down.policy import ScaleDownPolicy
from remuda.ports.compute import POOL_TAG, LaunchRequest, MachineState, MachineView
from remuda.ports.github import GitHubRun
from simulation.fake_machine import FakeMachine
from simulation.faults import Fault
from simulation.invariants import ABSORBING, FOREIGN_RUNNERS, POOL, SCOPE
from simulation.listener_liveness import ListenerLiveness
from simulation.liveness import SWEEP_S, LivenessInvariants
from simulation.memory.github import MemoryDemandJob, MemoryJob
from simulation.plan import (
    ExtraRelease,
    JobEnd,
    ListenerOutage,
    MachineLoss,
    Operation,
    OperatorCommand,
    PlannedDemand,
    PlannedRefresh,
    PlannedRun,
    PlannedScaleDown,
    SetChange,
    SetDeletion,
    Takeover,
)
from simulation.safety import BOOT_MIN
from simulation.scale_sets import CheckedScaleSets
from simulation.world import SimulatedProcess, World

#: Maximum seconds from the end of the faults until all jobs of sets are over, and then until nothing is left, besides
#: the time of a provision and a run.
MAX_DEMAND_S = 5_400.0
MAX_REST_S = 3_600.0
#: Seconds in which a listener has read what it was told to read, and acts on it.
READS_S = 3.0
#: Seconds between two checks of the runner sets.
CHECK_S = 5.0
#: Minimum and maximum seconds until a listener is restarted.
RESTART_S = (0.5, 8.0)
#: Fraction of worlds whose listeners are not stopped, but lost at the end.
LOST_LISTENERS = 0.3
#: Approximate seconds between two checks of a workflow for the end of its jobs.
JOB_CHECK_S = 12.0
#: Fraction of attempts whose workflow does not release them, in worlds where GitHub knows the state of runs.
UNRELEASED = 0.5
#: Fraction of operator commands that concern a live instance.
LIVE_COMMANDS = 0.8
_ALWAYS = parse_cron("* * * * *")


class Workload:
    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = random.Random(f"{world.plan.seed} people")
        self._ending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._sweeps = 0
        self._extra_commands = 0
        self._listeners: dict[int, SimulatedProcess] = {}
        self._services: dict[str, DemandListener] = {}
        self._wake_ups = ListenerLiveness(world, self._services)
        self._listening = True
        self._may_listen = asyncio.Event()
        self._may_listen.set()
        self.liveness: LivenessInvariants | None = None

    async def run(self) -> None:
        await self._prepare()
        # Interruptions and cancellations belong to their processes.
        works: dict[type, Callable[[Any], Coroutine[Any, Any, None]]] = {
            PlannedRun: self._run,
            PlannedRefresh: self._refresh,
            ExtraRelease: self._extra_release,
            MachineLoss: self._lose,
            OperatorCommand: self._operate,
            PlannedScaleDown: self._scale_down,
            PlannedDemand: self._demand,
            SetDeletion: self._delete_set,
            SetChange: self._change_sets,
            JobEnd: self._end_jobs,
            ListenerOutage: self._interrupt_listening,
            Takeover: self._take_over,
        }
        if self._world.calls is not None:
            self._world.calls.perform = lambda item: self._perform(item, works[type(item)])
        for item in self._world.plan.operations:
            if type(item) in works:
                self._spawn(self._at(item, works[type(item)]))
        self._spawn(self._sweep_regularly())
        self._spawn(self._check_regularly())
        for slot in range(1, self._world.plan.listeners + 1):
            self._spawn(self._keep_listening(slot))
        if self._world.plan.listeners:
            self._spawn(self._check_sets())
        await self._world.loop.sleep(self._world.plan.hours * 3_600.0)
        await self._come_to_rest()

    async def _perform(self, item: Operation, work: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Do an operation to its end; of a run, its provision; of a job, its start."""
        known = set(self._world.processes)
        if isinstance(item, PlannedRun):
            self._spawn(work(item))
            await self._world.loop.sleep(0.01)
        else:
            await work(item)
        if isinstance(item, PlannedDemand) and not item.cancelled_after_s:
            while not all(job.started for job in self._world.scale_sets.jobs if job.run_id == item.run_id):
                await self._world.loop.sleep(1.0)
        for name, process in list(self._world.processes.items()):
            if name not in known and process.kind != "agent":
                await process.ended

    async def _at(self, item: Operation, work: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        await self._world.loop.sleep(max(0.0, item.at - self._world.loop.time()))
        if not self._ending.is_set():
            await work(item)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        task.add_done_callback(self._collect_error)

    def _collect_error(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._world.loop.errors.append(error)

    async def _prepare(self) -> None:
        """Configure the pool, in a cloud and a GitHub that other pools use, too."""
        world = self._world
        world.faults.active = False
        for name in FOREIGN_RUNNERS:
            world.github.add(SCOPE, name)
        any_machine = RunnerRequest(
            resource_class=DEFAULT_CLASSES[0],
            usage_class=UsageClass.ON_DEMAND,
            patterns=TypePatterns(("*",)),
            tier=Tier.TRUSTED,
        )
        foreign = LaunchRequest(
            provision_id="p-foreign",
            scope=SCOPE,
            client_token="p-foreign-1",  # noqa: S106 - not a secret
            count=2,
            request=any_machine,
            first_life_s=1e8,
            margin_s=1.0,
        )
        world.cloud.launch(foreign, pool=f"{POOL}-2")
        process = self._start_refresh("refresh 0", 0)
        await process.ended
        world.faults.active = True

    # Workflows

    async def _run(self, run: PlannedRun) -> None:
        for attempt in range(1, run.attempts + 1):
            if self._ending.is_set():
                return
            if attempt > 1:
                self._world.faults.record(Fault.RERUN, self._of_run(run.run_id))
            self._world.github.run_begins(run.repository, run.run_id, attempt)
            jobs = self._queue(run) if run.eager else []
            process = self._provision(run, attempt)
            await process.ended
            task = process.task
            if not process.dead and task is not None and task.done() and not task.cancelled() and not task.exception():
                self._world.stats["provisions that succeeded"] += 1
                jobs = jobs or self._queue(run)
                await self._until_over(jobs)
            if not run.released:
                self._world.faults.record(Fault.RELEASE_NEVER, self._of_run(run.run_id))
                if self._world.github.knows_runs:
                    await self._end_run(run, attempt, jobs)
                return
            if self._is_unreleased(run, attempt):
                # Its workflow has no release job; a user may run it again before a sweep notices.
                self._world.faults.record(Fault.RUN_UNRELEASED, self._of_run(run.run_id))
                await self._end_run(run, attempt, jobs)
                await self._world.loop.sleep(self._rng.uniform(0, 4 * self._world.lifetimes.ended_run_grace_s))
                continue
            release = self._release(run.run_id, attempt, f"release {run.run_id}.{attempt}")
            if self._world.github.knows_runs:
                self._spawn(self._end_run(run, attempt, jobs, release))
            for job in jobs:
                if not job.started and not job.conclusion and not job.runner_name:
                    job.conclusion = "cancelled"
            pause_s = self._rng.choice((0.0, self._rng.uniform(0, 5), self._rng.uniform(0, 40)))
            await self._world.loop.sleep(pause_s)

    def _is_unreleased(self, run: PlannedRun, attempt: int) -> bool:
        if Fault.RUN_UNRELEASED not in self._world.plan.faults:
            return False
        return random.Random(f"{self._world.plan.seed} {run.run_id}.{attempt} unreleased").random() < UNRELEASED

    async def _end_run(
        self, run: PlannedRun, attempt: int, jobs: list[MemoryJob], release: SimulatedProcess | None = None
    ) -> None:
        """GitHub calls a run ended when all of its jobs are over. The release is the last one."""
        if release is not None:
            await release.ended
        for job in jobs:
            if not job.started and not job.conclusion and not job.runner_name:
                job.conclusion = "cancelled"
        while not all(job.conclusion for job in jobs):
            await self._world.loop.sleep(JOB_CHECK_S)
        self._world.github.run_ends(run.repository, run.run_id, attempt)

    def _provision(self, run: PlannedRun, attempt: int) -> SimulatedProcess:
        request = ProvisionRequest(
            run_id=run.run_id,
            attempt=attempt,
            count=run.count,
            resource_class=run.resource_class,
            usage_class=run.usage_class,
            patterns=TypePatterns(("*",)),
            scope=SCOPE,
            tier=run.tier,
            repository=run.repository,
            ephemeral=run.ephemeral,
        )

        async def work(context: Context) -> Any:
            return await provision(context, request)

        name = f"provision {run.run_id}.{attempt}"
        credentialed = run.credentialed or run.ephemeral
        return self._world.command(name, "provision", work, credentialed=credentialed, request=request)

    def _release(self, run_id: str, attempt: int, name: str) -> SimulatedProcess:
        async def work(context: Context) -> Any:
            return await release(context, run_id=run_id, attempt=attempt)

        credentialed = self._rng.random() < 0.3
        return self._world.command(name, "release", work, credentialed=credentialed, run_id=run_id, attempt=attempt)

    def _queue(self, run: PlannedRun) -> list[MemoryJob]:
        github = self._world.github
        return [github.queue(run_id=run.run_id, labels=(run.run_id,), seconds=seconds) for seconds in run.jobs]

    async def _until_over(self, jobs: list[MemoryJob]) -> None:
        """Wait until the jobs have ended, at most the maximum runtime."""
        limit = self._world.loop.time() + self._world.lifetimes.max_runtime_s
        while not self._ending.is_set() and self._world.loop.time() < limit:
            if all(job.conclusion for job in jobs):
                return
            await self._world.loop.sleep(JOB_CHECK_S * (0.5 + self._rng.random()))

    # Runner sets

    async def _keep_listening(self, slot: int) -> None:
        """Run a listener, and another one when it has ended."""
        number = 0
        while self._listening:
            number += 1
            process = self._listeners[slot] = self._listen(f"listener {slot}.{number}")
            await process.ended
            await self._world.loop.sleep(self._rng.uniform(*RESTART_S))
            await self._may_listen.wait()

    def _listen(self, name: str) -> SimulatedProcess:
        async def work(context: Context) -> None:
            source = self._world.demand_source(self._world.processes[name])
            demand = DemandContext(
                context=context, source=source, store=context.store, zone_of=lambda _name: UTC, owner=name
            )
            listener = self._services[name] = DemandListener(demand)
            try:
                await listener.run()
            finally:
                self._services.pop(name, None)

        return self._world.command(name, "listener", work, credentialed=True)

    async def _check_regularly(self) -> None:
        while self._listening:
            await self._world.loop.sleep(CHECK_S)
            self._world.safety.patience.check()

    async def _check_sets(self) -> None:
        while self._listening:
            await self._world.loop.sleep(CHECK_S)
            if isinstance(self._world.scale_sets, CheckedScaleSets):
                self._world.scale_sets.remove_some_registration()
            self._world.safety.demand.check()
            self._wake_ups.check()

    async def _demand(self, item: PlannedDemand) -> None:
        sets = self._world.scale_sets
        head = "stranger/fork" if item.is_fork else SCOPE
        self._world.github.runs[SCOPE.lower(), int(item.run_id)] = GitHubRun(
            run_id=int(item.run_id), status="in_progress", conclusion="", head_repository=head, attempt=1
        )
        self._world.safety.demand.run_restarted(int(item.run_id))
        job = sets.queue(
            run_id=item.run_id,
            labels=item.labels,
            repository=SCOPE,
            event=item.event,
            is_fork=item.is_fork,
            seconds=item.seconds,
            outcome="failure" if item.fails else "success",
        )
        if item.notices_after_s:
            self._spawn(self._interrupt(job, item.notices_after_s))
        if item.rerun_after_s:
            self._spawn(self._run_again(job, item.rerun_after_s))
        if not item.cancelled_after_s:
            return
        await self._world.loop.sleep(item.cancelled_after_s)
        for machine in self._world.machines.values():
            machine.cancel(job)
        sets.cancel(job)

    async def _interrupt(self, job: MemoryDemandJob, notices_after_s: Sequence[float]) -> None:
        """Give a spot notice to the machine of each of the first attempts of a job."""
        seen: list[MemoryJob] = []
        for after_s in notices_after_s:
            while not (started := [item for item in self._attempts(job) if item.started and item not in seen]):
                if self._ending.is_set():
                    return
                await self._world.loop.sleep(JOB_CHECK_S / 2)
            seen += started
            await self._world.loop.sleep(after_s)
            for machine in self._world.machines.values():
                if machine.job in started and machine.alive and not self._ending.is_set():
                    self._give_notice(machine)

    def _attempts(self, job: MemoryDemandJob) -> list[MemoryDemandJob]:
        return [item for item in self._world.scale_sets.jobs if (item.run_id, item.name) == (job.run_id, job.name)]

    async def _run_again(self, job: MemoryDemandJob, after_s: float) -> None:
        """A user runs the failed jobs of a run again."""
        while not job.is_over and not self._ending.is_set():
            await self._world.loop.sleep(JOB_CHECK_S)
        await self._world.loop.sleep(after_s)
        if not self._ending.is_set() and isinstance(self._world.scale_sets, CheckedScaleSets):
            self._world.scale_sets.run_again_by_user(SCOPE, int(job.run_id))

    def _give_notice(self, machine: FakeMachine) -> None:
        self._world.faults.record(Fault.SPOT_NOTICE, [machine.instance_id])
        machine.give_spot_notice()
        self._world.safety.demand.interrupted(machine)

    async def _delete_set(self, item: SetDeletion) -> None:
        sets = self._world.scale_sets
        if sets.sets:
            chosen = list(sets.sets)[int(item.pick * len(sets.sets))]
            self._world.faults.record(Fault.SET_DELETED)
            self._world.trace.add("github", f"deletes scale set {sets.sets[chosen].name}")
            sets.delete(chosen)

    async def _change_sets(self, item: SetChange) -> None:
        """Apply a configuration, and let the listeners read it."""
        self._world.faults.record(Fault.CONFIG_CHANGE)
        process = self._start_refresh(f"set change {item.number}", item.config)
        await process.ended
        for listener in self._services.values():
            listener.reload()
        await self._world.loop.sleep(READS_S)

    async def _end_jobs(self, _item: JobEnd) -> None:
        for machine in self._world.machines.values():
            if isinstance(machine.job, MemoryDemandJob):
                machine.cancel(machine.job)
        await self._world.loop.sleep(READS_S)

    async def _interrupt_listening(self, item: ListenerOutage) -> None:
        self._world.faults.record(Fault.LISTENER_CRASH)
        self._world.faults.record(Fault.CONFIG_CHANGE)
        self._may_listen.clear()
        for process in self._listeners.values():
            process.crash()
        process = self._start_refresh(f"set change {item.number}", item.config)
        await process.ended
        await self._world.loop.sleep(item.for_s)
        self._may_listen.set()

    async def _take_over(self, _item: Takeover) -> None:
        leases = self._world.database.leases
        before = leases.get(LISTENER_LEASE)
        while before is not None and leases[LISTENER_LEASE].owner == before.owner:
            await self._world.loop.sleep(1.0)
        await self._world.loop.sleep(READS_S)

    async def _finish_demand(self) -> None:
        """Serve the jobs that are left, then remove the sets; or lose the listeners with their sets."""
        world = self._world
        demand, sets = world.safety.demand, world.scale_sets
        for process in [item for item in world.processes.values() if item.kind == "refresh"]:
            # A slow one must not undo the next configuration.
            await process.ended
        # The jobs of sets that were removed or changed can be served again.
        process = self._start_refresh("refresh with all sets", 0)
        await process.ended
        wanted = {item.name: set(item.labels) for item in world.plan.runner_sets[0]}
        for item in list(sets.sets.values()):
            if set(item.labels) != wanted.get(item.name, set(item.labels)):
                # Its labels were changed while it did not exist. A user must delete it, or give it another name.
                sets.delete(item.scale_set_id)
        await self._sweep_until(lambda: not demand.open_jobs() and not demand.liveness.waiting_reruns(), MAX_DEMAND_S)
        demand.check_jobs()
        demand.liveness.check_reruns()
        if self._rng.random() < LOST_LISTENERS:
            self._listening = False
            for process in self._listeners.values():
                process.crash()
            return
        process = self._start_refresh("refresh without sets", 0, without_sets=True)
        await process.ended
        await self._sweep_until(lambda: not sets.sets, MAX_DEMAND_S)
        self._listening = False
        for process in self._listeners.values():
            if process.task is not None:
                process.task.cancel()
            await process.ended
        demand.at_rest()

    async def _sweep_until(self, is_done: Callable[[], bool], limit_s: float) -> None:
        until = self._world.loop.time() + limit_s
        while not is_done() and self._world.loop.time() < until:
            await self._sweep_once()

    async def _sweep_once(self) -> None:
        await self._world.loop.sleep(SWEEP_S)
        self._sweeps += 1
        process = self._start_refresh(f"sweep {self._sweeps}", None)
        await process.ended
        self._check_sweep(process)

    # Operators

    async def _extra_release(self, item: ExtraRelease) -> None:
        self._extra_commands += 1
        fault = Fault.RELEASE_EARLY if item.early else Fault.RELEASE_TWICE
        self._world.faults.record(fault, self._of_run(item.run_id))
        self._release(item.run_id, item.attempt, f"release {item.run_id}.{item.attempt} again {self._extra_commands}")

    async def _refresh(self, item: PlannedRefresh) -> None:
        self._extra_commands += 1
        running = [key for key, machine in self._world.machines.items() if machine.alive]
        every = list(dict.fromkeys([*self._world.database.instances, *running]))
        if item.config is not None:
            self._world.faults.record(Fault.CONFIG_CHANGE, every)
        self._start_refresh(f"refresh {self._extra_commands}a", item.config)
        if item.twice:
            self._world.faults.record(Fault.REFRESH_TWICE, every)
            self._start_refresh(f"refresh {self._extra_commands}b", item.config)

    async def _lose(self, item: MachineLoss) -> None:
        alive = [machine for machine in self._world.machines.values() if machine.alive]
        if not alive:
            return
        machine = alive[int(item.pick * len(alive))]
        if item.with_notice:
            self._give_notice(machine)
        else:
            self._world.faults.record(Fault.POWER_CUT, [machine.instance_id])
            self._world.cut_power(machine.instance_id, "power cut")

    async def _operate(self, item: OperatorCommand) -> None:
        records = self._world.database.instances
        live = [key for key, record in records.items() if record.state not in ABSORBING]
        # Some concern an instance that is already terminating.
        among = live if item.pick < LIVE_COMMANDS else list(records)
        if not among:
            return
        instance_id = among[int(item.pick * 1_000) % len(among)]
        self._world.faults.record(Fault(item.action.value), [instance_id])

        async def work(context: Context) -> operator.OperatorResult:
            chosen = await operator.select_instances(context, operator.InstanceSelector(instance_ids=(instance_id,)))
            match item.action:
                case operator.OperatorAction.DRAIN:
                    return await operator.drain(context, chosen, reason="replacement", dry_run=False)
                case operator.OperatorAction.QUARANTINE:
                    return await operator.quarantine(
                        context, chosen, for_s=item.for_s, reason="inspection", dry_run=False
                    )
                case operator.OperatorAction.TERMINATE:
                    return await operator.terminate(context, chosen, reason="not needed", dry_run=False)

        self._world.command(f"operator {item.number}", "operator", work, action=item.action, for_s=item.for_s)

    async def _scale_down(self, item: PlannedScaleDown) -> None:
        window = IdleWindow(cron=_ALWAYS, zone=UTC, zone_name="UTC", idle_count=item.idle_count)
        policy = ScaleDownPolicy(windows=(window,), boot_min=BOOT_MIN)

        async def work(context: Context) -> Any:
            return await scale_down(_fleet_context(context, self._others()), policy)

        process = self._world.command(f"scale-down {item.number}", "scale-down", work, credentialed=True)
        process.idle_count = item.idle_count

    def _others(self) -> list[MachineView]:
        """Machines of another pool of the same environment."""
        found = (self._world.cloud.view(key) for key in self._world.cloud.machines)
        return [view for view in found if view is not None and view.tags.get(POOL_TAG) != POOL]

    def _start_refresh(self, name: str, config: int | None, *, without_sets: bool = False) -> SimulatedProcess:
        desired = None if config is None else self._world.desired(config)
        if desired is not None and without_sets:
            desired = replace(desired, runner_sets=())

        async def work(context: Context) -> RefreshResult:
            return await refresh(context, desired)

        return self._world.command(name, "refresh", work, credentialed=True, desired=desired)

    async def _sweep_regularly(self) -> None:
        while not self._ending.is_set():
            await self._world.loop.sleep(SWEEP_S * (0.8 + 0.4 * self._rng.random()))
            self._sweeps += 1
            self._start_refresh(f"sweep {self._sweeps}", None)

    # After the faults

    async def _come_to_rest(self) -> None:
        """End the faults and start nothing new; sweep until nothing is left."""
        world = self._world
        self._ending.set()
        world.faults.active = False
        for job in world.github.jobs:
            if not job.conclusion and not job.runner_name:
                job.conclusion = "cancelled"
        if world.plan.listeners:
            await self._finish_demand()
        self.liveness = LivenessInvariants(world)
        until = world.loop.time() + MAX_REST_S + world.lifetimes.max_runtime_s + world.lifetimes.provision_timeout_s
        while world.loop.time() < until:
            await self._sweep_once()
            self.liveness.swept()
            if self.liveness.is_at_rest():
                return
        world.safety.violated("L1", f"the world does not come to rest: {self.liveness.describe_rest()}")

    def _check_sweep(self, process: SimulatedProcess) -> None:
        """A sweep without faults reports no errors."""
        task = process.task
        result = task.result() if task is not None and task.done() and not task.exception() else None
        if isinstance(result, RefreshResult) and result.errors:
            self._world.safety.violated("S10", f"{process} reports an error without faults: {result.errors[0]}")

    def _of_run(self, run_id: str) -> list[str]:
        provisions = self._world.database.provisions.values()
        return self._world.of_provisions({item.provision_id for item in provisions if item.run_id == run_id})


def _fleet_context(context: Context, others: Sequence[MachineView]) -> FleetContext:
    assert context.github is not None  # noqa: S101 - scale-down is always started with a credential

    @asynccontextmanager
    async def opened() -> AsyncIterator[Context]:
        yield context

    return FleetContext(
        environment=POOL,
        fleet=CloudFleet(context.compute, others),
        github=context.github,
        clock=context.clock,
        event_log=context.event_log,
        calls=context.calls,
        open_pool=opened,
        has_pool=True,
    )


#: Tags of every machine that the pool launches.
TAGS = {
    GHR_ENVIRONMENT_TAG: POOL,
    GHR_APPLICATION_TAG: GHR_APPLICATION,
    GHR_OWNER_TAG: SCOPE,
    GHR_TYPE_TAG: REPO,
}
_ALIVE = frozenset({MachineState.PENDING, MachineState.RUNNING})


class CloudFleet:
    """The pool's machines and those of another pool as a tagged fleet, for scale-down."""

    def __init__(self, compute: Any, others: Sequence[MachineView]) -> None:
        self._compute = compute
        self._others = others

    async def close(self) -> None:
        """Nothing to close."""

    async def list_machines(self, *, orphans: bool = False) -> Sequence[FleetMachine]:
        views: list[MachineView] = [*await self._compute.list_pool(), *self._others]
        found = [
            FleetMachine(instance_id=view.instance_id, launched_at=view.launched_at, tags={**TAGS, **view.tags})
            for view in views
            if view.state in _ALIVE
        ]
        return [machine for machine in found if machine.is_orphan or not orphans]

    async def mark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        return await self._change(instance_ids, self._compute.tag(instance_ids, {GHR_ORPHAN_TAG: YES}))

    async def unmark_orphans(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        return await self._change(instance_ids, self._compute.untag(instance_ids, {GHR_ORPHAN_TAG}))

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        refused: Mapping[str, str] = await self._compute.terminate(instance_ids)
        return refused

    @staticmethod
    async def _change(instance_ids: Collection[str], change: Awaitable[None]) -> Mapping[str, str]:
        try:
            await change
        except NotFound as error:
            return dict.fromkeys(instance_ids, error.message)
        return {}
