"""The checks of a chaos run: each job's end has a cause, and nothing is left at the end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from remuda.cli.demo.report import Histories, live_instances, read_histories
from remuda.domain.instance import State
from remuda.domain.provision import ProvisionStatus
from remuda.domain.resources import DEFAULT_CLASSES
from tests.support.chaos.backends import LocalChaosBackend
from tests.support.chaos.faults import ChaosFaults
from tests.support.chaos.load import ChaosLoad, FollowedJob
from tests.support.demand import ENDED, LOST, STARTED

T = TypeVar("T")

#: Seconds in which everything must settle after the last job, and again after all machines are drained: all limits of
#: the pool are shorter, and so is the time for which a process with a wrong clock can hide a message.
SETTLE_S = 480.0
POLL_S = 0.5
#: Seconds that a job may wait for its start: several times as long as any recovery takes, so that a stall is noticed.
MAX_WAIT_S = 300.0
FAR = timedelta(days=1)


class ChaosJudge:
    def __init__(self, backend: LocalChaosBackend, faults: ChaosFaults, load: ChaosLoad, *, settle_s: float) -> None:
        self._backend = backend
        self._settle_s = settle_s
        self._faults = faults
        self._load = load
        #: Jobs that did not succeed, by cause.
        self.causes: Counter[str] = Counter()
        self.histories: Histories = {}
        self._until = 0.0

    # Jobs

    def wrong_jobs(self) -> dict[str, list[str]]:
        """Violations, by the rule."""
        runs = self._backend.runs()
        killed, wrong, endless, late = [], [], [], []
        for job in self._load.jobs:
            view, ran = job.view, runs.get(job.view.name, Counter())
            shown = f"{view.name}: {view.conclusion} on {view.runner_name}, {dict(ran)}, {view.log[-300:]!r}"
            if job.wait_s is not None and job.wait_s > MAX_WAIT_S:
                late.append(f"{view.name}: {job.wait_s:.0f} s")
            if view.status != "completed":
                endless.append(f"{shown} is {view.status}")
            elif ran[STARTED] > 1 or ran[ENDED] > 1 or (view.conclusion == "success" and ran[ENDED] != 1):
                wrong.append(shown)
            elif view.conclusion != "success":
                cause = self._cause(job)
                self.causes[cause or "without a fault"] += 1
                if not cause:
                    killed.append(shown)
        return {
            "jobs killed before their time": killed,
            "jobs that ran twice or not at all": wrong,
            "jobs without an end": endless,
            f"jobs that waited for more than {MAX_WAIT_S:g} s": late,
            "runners of the set with several jobs": self._backend.twice_used_epochs(
                [job.view for job in self._load.jobs if not job.machines]
            ),
        }

    def _cause(self, job: FollowedJob) -> str:
        """The fault that explains why a job did not succeed; empty if none exists."""
        if job.is_cancelled and not job.machines:
            return "cancelled on purpose"
        # A job of a run is cancelled here if no machine of its run is left.
        machines = job.machines if job.is_cancelled else (machine_of(job),)
        if all(machine in self._faults.killed_machines for machine in machines):
            return "machine killed"
        # Until the end of the job: its runner may have been lost before.
        if self._faults.was_full(job.queued_at, job.ended_at):
            return "disk full, runner lost" if LOST in job.view.log else "disk full, job failed"
        return ""

    # The end

    async def settle(self, remove_set: Callable[[], Awaitable[object]]) -> dict[str, list[str]]:
        """Remove the set, drain all machines, and return what is left, by kind."""
        backend = self._backend
        self._until = time.monotonic() + self._settle_s
        await remove_set()
        async with backend.context() as context:

            async def settled() -> list[str]:
                known = await read_histories(context.store)
                return [
                    f"{item.instance_id} {item.state}"
                    for item, _ in known.values()
                    if item.state not in {State.IDLE, State.TERMINATED}
                ]

            left = {"not settled": await self._until_empty(settled)}
            left["scale sets"] = await self._until_empty(lambda: backend.retried(self._scale_sets))
            self._until = time.monotonic() + self._settle_s
            await backend.run("drain", "--all", "--reason", "the end of the test")

            async def open_provisions() -> list[str]:
                found = await context.store.unsettled_provisions(context.clock.now() + FAR)
                # A released one is settled by the first sweep after its deadline.
                return [f"{item.run_id} {item.status}" for item in found if item.status is not ProvisionStatus.RELEASED]

            async def messages() -> list[str]:
                depths = {item.name: await context.pool.depth(item.name) for item in DEFAULT_CLASSES}
                return [f"{depth} of {name}" for name, depth in depths.items() if depth]

            async def live() -> list[str]:
                return live_instances(await read_histories(context.store))

            left["records of live machines"] = await self._until_empty(live)
            left["machines"] = await self._until_empty(backend.live_on_compute)
            left["processes of machines"] = await self._until_empty(self._processes)
            left["registrations"] = await self._until_empty(lambda: backend.retried(self._registrations))
            left["open provisions"] = await self._until_empty(open_provisions)
            left["messages"] = await self._until_empty(messages)
            self.histories = await read_histories(context.store)
        left["sessions"] = await backend.retried(backend.sessions)
        return left

    async def _until_empty(self, read: Callable[[], Awaitable[Sequence[str]]]) -> list[str]:
        """Wait until nothing is found. Return what is left at the end of the time limit."""
        while (found := list(await read())) and time.monotonic() < self._until:  # noqa: ASYNC110 - no events
            await asyncio.sleep(POLL_S)
        return found

    async def _scale_sets(self) -> list[str]:
        async with self._backend.github() as github:
            return [item.name for item in await github.scale_sets()]

    async def _registrations(self) -> list[str]:
        return [item.name for item in await self._backend.registrations()]

    async def _processes(self) -> list[str]:
        return [str(pid) for pid in await asyncio.to_thread(self._backend.processes)]


def machine_of(job: FollowedJob) -> str:
    return "i-" + str(job.view.runner_name).rpartition("-i-")[2]


def reuse(histories: Histories) -> dict[str, int]:
    """Number of launched machines, and of claims from the pool."""
    entries = [entry for _, history in histories.values() for entry in history]
    return {
        "machines launched": len(histories),
        "machines reused": sum(entry.target is State.CLAIMED and entry.source is State.IDLE for entry in entries),
    }
