"""A pool with runner sets for unit tests: listeners beside GitHub's scale sets in memory, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, tzinfo
from typing import Any

from remuda.controlplane.demand import DemandContext, DemandListener
from remuda.domain.errors import RemudaError
from remuda.domain.runner_set import CapacityWindow, RunnerSet
from remuda.domain.thresholds import Lifetimes
from remuda.ports.demand import DemandSession
from remuda.ports.launch import InstanceLaunch
from simulation.invariants import SCOPE
from simulation.memory.demand import MemoryDemandSource, MemoryScaleSets
from simulation.memory.github import MemoryDemandJob
from tests.support.virtual_time import EventRecorder, Hook, Killed, hooked
from tests.support.world import LIFETIMES, PoolWorld

LABELS = ("self-hosted", "remuda", "large")
#: Longer than a job and its boot, shorter than the tests' patience.
SET_LIFETIMES = Lifetimes(
    **{name: getattr(LIFETIMES, name) for name in LIFETIMES.__slots__}
    | {"listening_time_s": 120.0, "surplus_grace_s": 10.0, "max_runtime_s": 180.0}
)


def runner_set(**changed: Any) -> RunnerSet:
    values: dict[str, Any] = {"name": "large", "labels": LABELS, "resource_class": "large", "scope": SCOPE, "max": 3}
    return RunnerSet(**{**values, **changed})


def window(hot: int = 0, warm: int = 0) -> tuple[CapacityWindow, ...]:
    return (CapacityWindow(hot=hot, warm=warm),)


def zone_of(_name: str) -> tzinfo:
    return UTC


class RunningListener:
    """A listener process of a test."""

    def __init__(self, demand: DemandContext) -> None:
        self.demand = demand
        self.listener = DemandListener(demand)
        self.task = asyncio.create_task(self.listener.run())

    @property
    def events(self) -> list[tuple[str, str]]:
        log = self.demand.context.event_log
        assert isinstance(log, EventRecorder)
        return log.lines

    async def stop(self) -> None:
        """Like Ctrl-C."""
        self.task.cancel()
        with suppress(asyncio.CancelledError, Killed, RemudaError, BaseExceptionGroup):
            await self.task


class _HookedSource(MemoryDemandSource):
    """A source whose sessions have the hook, too."""

    hook: Hook | None = None

    async def open_session(
        self, runner_set: RunnerSet, scale_set_id: int, *, owner: str, session_id: str = ""
    ) -> DemandSession:
        session = await super().open_session(runner_set, scale_set_id, owner=owner, session_id=session_id)
        return hooked(session, "session", self.hook)


class DemandWorld(PoolWorld):
    def __init__(self, **changed: Any) -> None:
        super().__init__(**{"lifetimes": SET_LIFETIMES, **changed})
        self.scale_sets = MemoryScaleSets(github=self.github)
        self.listeners: list[RunningListener] = []

    async def configure_sets(self, *sets: RunnerSet, **changed: Any) -> None:
        await self.configure(runner_sets=sets or (runner_set(),), lifetimes=self.lifetimes, **changed)

    def demand(
        self, hook: Hook | None = None, *, owner: str = "", launch: InstanceLaunch | None = None
    ) -> DemandContext:
        context = self.process(hook, credentialed=True)
        source = _HookedSource(server=self.scale_sets, calls=context.calls)
        source.hook = hook
        return DemandContext(
            context=context,
            source=hooked(source, "source", hook),
            store=context.store,
            zone_of=zone_of,
            owner=owner or f"listener-{len(self.listeners) + 1}",
            launch=launch,
        )

    def listen(self, hook: Hook | None = None, launch: InstanceLaunch | None = None) -> RunningListener:
        listener = RunningListener(self.demand(hook, launch=launch))
        self.listeners.append(listener)
        return listener

    def queue(self, count: int = 1, *, seconds: float = 5.0, **changed: Any) -> list[MemoryDemandJob]:
        values: dict[str, Any] = {"run_id": "77", "labels": LABELS, "repository": SCOPE, "seconds": seconds}
        return [self.scale_sets.queue(**{**values, **changed}) for _ in range(count)]

    async def wait_for(self, condition: Callable[[], object], seconds: float = 60.0) -> float:
        """Wait in virtual time until the condition holds. Return the seconds that it took."""
        began = self.loop.time()
        while not condition():
            assert self.loop.time() - began < seconds, f"not within {seconds} s: {self.describe()}"
            await asyncio.sleep(0.05)
        return self.loop.time() - began

    async def wait_for_jobs(self, jobs: Sequence[MemoryDemandJob], seconds: float = 120.0) -> None:
        await self.wait_for(lambda: all(job.conclusion == "success" for job in jobs), seconds)

    def describe(self) -> str:
        records = [f"{item.instance_id[-2:]} {item.state} {item.run_id}" for item in self.database.instances.values()]
        jobs = [f"{job.key} {job.runner_name} {job.conclusion}" for job in self.scale_sets.jobs]
        return f"{records} {jobs}"

    async def stop_listeners(self) -> None:
        for listener in self.listeners:
            await listener.stop()

    async def end(self) -> None:
        await self.stop_listeners()
        await super().end()
