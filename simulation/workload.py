"""What people, workflows and the clock do to a world: runs, releases, sweeps; then peace until all is over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC
from typing import Any

from remuda.controlplane import operator
from remuda.controlplane.context import Context
from remuda.controlplane.provision import ProvisionRequest, provision
from remuda.controlplane.refresh import RefreshResult, refresh
from remuda.controlplane.release import release
from remuda.controlplane.scale_down import FleetContext, scale_down
from remuda.domain.resources import DEFAULT_CLASSES, RunnerRequest, Tier, TypePatterns, UsageClass
from remuda.domain.scale_down.cron import parse_cron
from remuda.domain.scale_down.decisions import ScaleDownPolicy
from remuda.domain.scale_down.idle_config import IdleWindow
from remuda.ports.compute import LaunchRequest
from simulation.faults import Fault
from simulation.fleet import CloudFleet
from simulation.invariants import ABSORBING, BOOT_MIN
from simulation.liveness import SWEEP_S, Liveness
from simulation.memory.github import MemoryJob
from simulation.names import POOL, SCOPE, STRANGERS
from simulation.plan import ExtraRelease, Loss, Pull, Refresh, Run, ScaleDown
from simulation.world import LIFETIMES, SimulatedProcess, World

#: The longest that a world may take to come to rest.
REST_S = 3_600.0
#: How often a workflow looks whether its jobs are over.
LOOK_S = 12.0
#: How many of an operator's orders are about an instance that is not ending already.
LIVE_PULLS = 0.8
_ALWAYS = parse_cron("* * * * *")


class Workload:
    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = random.Random(f"{world.plan.seed} people")
        self._ending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._sweeps = 0
        self._others = 0
        self.liveness: Liveness | None = None

    async def run(self) -> None:
        await self._prepare()
        for item in self._world.plan.operations:
            match item:
                case Run():
                    self._spawn(self._run(item))
                case Refresh():
                    self._spawn(self._refresh(item))
                case ExtraRelease():
                    self._spawn(self._extra_release(item))
                case Loss():
                    self._spawn(self._lose(item))
                case Pull():
                    self._spawn(self._pull(item))
                case ScaleDown():
                    self._spawn(self._scale_down(item))
                case _:
                    # Cuts and interrupts belong to their processes.
                    continue
        self._spawn(self._sweep_regularly())
        await self._world.loop.rest(self._world.plan.hours * 3_600.0)
        await self._come_to_rest()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        task.add_done_callback(self._complain)

    def _complain(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._world.loop.complaints.append(error)

    async def _prepare(self) -> None:
        """A configured pool in a world that others use too."""
        world = self._world
        world.faults.active = False
        for name in STRANGERS:
            world.github.add(SCOPE, name)
        anything = RunnerRequest(
            resource_class=DEFAULT_CLASSES[0],
            usage_class=UsageClass.ON_DEMAND,
            patterns=TypePatterns(("*",)),
            tier=Tier.TRUSTED,
        )
        theirs = LaunchRequest(
            provision_id="p-theirs",
            scope=SCOPE,
            client_token="p-theirs-1",  # noqa: S106 - makes a call idempotent, and is no secret
            count=2,
            request=anything,
            first_life_s=1e8,
            margin_s=1.0,
        )
        world.cloud.launch(theirs, pool="sim-2")
        party = self._start_refresh("refresh 0", 0)
        await party.ended
        world.faults.active = True

    # Workflows

    async def _run(self, run: Run) -> None:
        await self._until(run.at)
        for attempt in range(1, run.attempts + 1):
            if self._ending.is_set():
                return
            if attempt > 1:
                self._world.faults.happens(Fault.RERUN, self._of_run(run.run_id))
            jobs = self._queue(run) if run.eager else []
            party = self._provision(run, attempt)
            await party.ended
            task = party.task
            if not party.dead and task is not None and task.done() and not task.cancelled() and not task.exception():
                self._world.stats["provisions that succeeded"] += 1
                jobs = jobs or self._queue(run)
                await self._until_over(jobs)
            if not run.released:
                self._world.faults.happens(Fault.RELEASE_NEVER, self._of_run(run.run_id))
                return
            self._release(run.run_id, attempt, f"release {run.run_id}.{attempt}")
            for job in jobs:
                if not job.started and not job.conclusion and not job.runner_name:
                    job.conclusion = "cancelled"
            pause_s = self._chance.choice((0.0, self._chance.uniform(0, 5), self._chance.uniform(0, 40)))
            await self._world.loop.rest(pause_s)

    def _provision(self, run: Run, attempt: int) -> SimulatedProcess:
        order = ProvisionRequest(
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
            return await provision(context, order)

        name = f"provision {run.run_id}.{attempt}"
        credentialed = run.credentialed or run.ephemeral
        return self._world.command(name, "provision", work, credentialed=credentialed, order=order)

    def _release(self, run_id: str, attempt: int, name: str) -> SimulatedProcess:
        async def work(context: Context) -> Any:
            return await release(context, run_id=run_id, attempt=attempt)

        credentialed = self._chance.random() < 0.3
        return self._world.command(name, "release", work, credentialed=credentialed, run_id=run_id, attempt=attempt)

    def _queue(self, run: Run) -> list[MemoryJob]:
        github = self._world.github
        return [github.queue(run_id=run.run_id, labels=(run.run_id,), seconds=seconds) for seconds in run.jobs]

    async def _until_over(self, jobs: list[MemoryJob]) -> None:
        """As long as a workflow waits for its jobs; some are cancelled by a person before."""
        limit = self._world.loop.time() + LIFETIMES.max_runtime_s
        while not self._ending.is_set() and self._world.loop.time() < limit:
            if all(job.conclusion for job in jobs):
                return
            await self._world.loop.rest(LOOK_S * (0.5 + self._chance.random()))

    # Operators

    async def _extra_release(self, item: ExtraRelease) -> None:
        await self._until(item.at)
        if self._ending.is_set():
            return
        self._others += 1
        fault = Fault.RELEASE_EARLY if item.early else Fault.RELEASE_TWICE
        self._world.faults.happens(fault, self._of_run(item.run_id))
        self._release(item.run_id, item.attempt, f"release {item.run_id}.{item.attempt} again {self._others}")

    async def _refresh(self, item: Refresh) -> None:
        await self._until(item.at)
        if self._ending.is_set():
            return
        self._others += 1
        running = [key for key, host in self._world.hosts.items() if host.alive]
        every = list(dict.fromkeys([*self._world.database.instances, *running]))
        if item.config is not None:
            self._world.faults.happens(Fault.CONFIG_CHANGE, every)
        self._start_refresh(f"refresh {self._others}a", item.config)
        if item.twice:
            self._world.faults.happens(Fault.REFRESH_TWICE, every)
            self._start_refresh(f"refresh {self._others}b", item.config)

    async def _lose(self, item: Loss) -> None:
        await self._until(item.at)
        alive = [host for host in self._world.hosts.values() if host.alive]
        if not alive or self._ending.is_set():
            return
        host = alive[int(item.pick * len(alive))]
        if item.announced:
            self._world.faults.happens(Fault.SPOT_NOTICE, [host.instance_id])
            host.take_soon()
        else:
            self._world.faults.happens(Fault.POWER_CUT, [host.instance_id])
            self._world.cut_power(host.instance_id, "power cut")

    async def _pull(self, item: Pull) -> None:
        await self._until(item.at)
        records = self._world.database.instances
        live = [key for key, record in records.items() if record.state not in ABSORBING]
        # Some come too late.
        among = live if item.pick < LIVE_PULLS else list(records)
        if not among or self._ending.is_set():
            return
        instance_id = among[int(item.pick * 1_000) % len(among)]
        self._world.faults.happens(Fault(item.lever.value), [instance_id])

        async def work(context: Context) -> operator.OperatorResult:
            chosen = await operator.select_instances(context, operator.InstanceSelector(instance_ids=(instance_id,)))
            match item.lever:
                case operator.OperatorAction.DRAIN:
                    return await operator.drain(context, chosen, reason="to be renewed", dry_run=False)
                case operator.OperatorAction.QUARANTINE:
                    return await operator.quarantine(context, chosen, for_s=item.for_s, reason="odd", dry_run=False)
                case operator.OperatorAction.TERMINATE:
                    return await operator.terminate(context, chosen, reason="in the way", dry_run=False)

        self._world.command(f"operator {item.number}", "operator", work, lever=item.lever)

    async def _scale_down(self, item: ScaleDown) -> None:
        await self._until(item.at)
        if self._ending.is_set():
            return
        window = IdleWindow(cron=_ALWAYS, zone=UTC, zone_name="UTC", idle_count=item.idle_count)
        policy = ScaleDownPolicy(windows=(window,), boot_min=BOOT_MIN)

        async def work(context: Context) -> Any:
            return await scale_down(_fleet_context(context), policy)

        self._world.command(f"scale-down {item.number}", "scale-down", work, credentialed=True)

    def _start_refresh(self, name: str, config: int | None) -> SimulatedProcess:
        desired = None if config is None else self._world.desired(config)

        async def work(context: Context) -> RefreshResult:
            return await refresh(context, desired)

        return self._world.command(name, "refresh", work, credentialed=True)

    async def _sweep_regularly(self) -> None:
        while not self._ending.is_set():
            await self._world.loop.rest(SWEEP_S * (0.8 + 0.4 * self._chance.random()))
            self._sweeps += 1
            self._start_refresh(f"sweep {self._sweeps}", None)

    # Peace

    async def _come_to_rest(self) -> None:
        """Faults stop, nothing new begins; sweeps go on until nothing is left."""
        world = self._world
        self._ending.set()
        world.faults.active = False
        for job in world.github.jobs:
            if not job.conclusion and not job.runner_name:
                job.conclusion = "cancelled"
        self.liveness = Liveness(world)
        until = world.loop.time() + REST_S
        while world.loop.time() < until:
            await self._world.loop.rest(SWEEP_S)
            self._sweeps += 1
            party = self._start_refresh(f"sweep {self._sweeps}", None)
            await party.ended
            self._judge_sweep(party)
            self.liveness.swept()
            if self.liveness.is_over():
                return
        world.safety.violated("L1", f"the world does not come to rest: {self.liveness.left_over()}")

    def _judge_sweep(self, party: SimulatedProcess) -> None:
        """Without faults a sweep has nothing to complain about."""
        task = party.task
        result = task.result() if task is not None and task.done() and not task.exception() else None
        if isinstance(result, RefreshResult) and result.errors:
            self._world.safety.violated("S10", f"{party} reports without any fault: {result.errors[0]}")

    async def _until(self, at: float) -> None:
        await self._world.loop.rest(max(0.0, at - self._world.loop.time()))

    def _of_run(self, run_id: str) -> list[str]:
        provisions = self._world.database.provisions.values()
        return self._world.of_provisions({item.provision_id for item in provisions if item.run_id == run_id})


def _fleet_context(context: Context) -> FleetContext:
    assert context.github is not None  # noqa: S101 - scale-down is always started with a credential

    @asynccontextmanager
    async def opened() -> AsyncIterator[Context]:
        yield context

    return FleetContext(
        environment=POOL,
        fleet=CloudFleet(context.compute),
        github=context.github,
        clock=context.clock,
        event_log=context.event_log,
        calls=context.calls,
        open_pool=opened,
        has_pool=True,
    )
