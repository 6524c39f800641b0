"""Random faults: killed and stopped processes, a full disk, clocks that step. All are real, and made from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random  # noqa: TID251 - a test with a seed
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from remuda.domain.thresholds import HEARTBEAT_DEAD_AFTER_S
from tests.support.chaos.backends import GITHUB, LISTENER, SWEEPER, LocalChaosBackend
from tests.support.chaos.environment import SmallDisk, SteppedClocks
from tests.support.demand import kill_process

#: Seconds between the beginnings of two faults, and the number of faults at a time.
PAUSE_S = (1.0, 8.0)
MAX_FAULTS = 4
SHORT_STOP_S = (0.5, 8.0)
#: The process looks dead, and returns.
LONG_STOP_S = (HEARTBEAT_DEAD_AFTER_S + 5.0, 40.0)
LONG_STOPS = 0.3
#: Shorter than the lease of a job: GitHub must not give up jobs because it was stopped itself.
SERVER_STOP_S = (0.5, 6.0)
FULL_DISK_S = (1.0, 12.0)
STEP_S = (5.0, 30.0)
#: Seconds by which clocks differ: within the pool's margin, and beyond.
SMALL_STEP_S, LARGE_STEP_S = 25.0, 400.0
LARGE_STEPS = 0.3
#: Relative frequency of the kinds.
WEIGHTS = {"kill": 4, "stop": 4, "full disk": 1, "clock step": 3}


class ChaosFaults:
    def __init__(
        self,
        backend: LocalChaosBackend,
        *,
        clocks: SteppedClocks,
        disk: SmallDisk | None,
        choices: random.Random,
        large_step_s: float,
    ) -> None:
        self._backend = backend
        self._large_step_s = large_step_s
        self._clocks = clocks
        self._disk = disk
        self._random = choices
        self.counts: Counter[str] = Counter()
        #: Ids of the machines whose supervisor was killed.
        self.killed_machines: set[str] = set()
        #: Begin and end of the times in which the disk was full; monotonic.
        self.full_disk: list[tuple[float, float]] = []
        #: Pids of the commands that run now.
        self.commands: set[int] = set()
        self._stopped: set[int] = set()
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Inject faults until cancelled; then end those that last."""
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "kill": self._kill,
            "stop": self._stop,
            "clock step": self._step_clock,
        }
        if self._disk is not None:
            kinds["full disk"] = self._fill_disk
        names = sorted(kinds)
        try:
            while True:
                await asyncio.sleep(self._random.uniform(*PAUSE_S))
                if len(self._running) < MAX_FAULTS:
                    (name,) = self._random.choices(names, [WEIGHTS[name] for name in names])
                    task = asyncio.create_task(_awaited(kinds[name]()))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
                for task in [task for task in self._running if task.done()]:
                    task.result()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    @property
    def has_disk(self) -> bool:
        return self._disk is not None

    def was_full(self, begin: float, end: float) -> bool:
        """Whether the disk was full at any time between these."""
        return any(first <= end and last >= begin for first, last in self.full_disk)

    # Kinds

    async def _kill(self) -> None:
        target, pid, machine = self._victim("listener", "sweeper", "agent", "machine", "local GitHub", "command")
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if target == "machine":
                # Before the kill: its jobs may end in between.
                self.killed_machines.add(machine)
            kill_process(pid)
            self.counts[f"killed: {target}"] += 1

    async def _stop(self) -> None:
        servers = self._backend.servers
        target, pid, _ = self._victim("listener", "sweeper", "agent", "local GitHub", "command", *servers)
        if pid is None or pid in self._stopped:
            return
        is_server = target in servers or target == "local GitHub"
        is_long = not is_server and self._random.random() < LONG_STOPS
        seconds = self._random.uniform(*(SERVER_STOP_S if is_server else LONG_STOP_S if is_long else SHORT_STOP_S))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._stopped.add(pid)
            self.counts[f"stopped: {target}{', long' if is_long else ''}"] += 1
            try:
                await asyncio.sleep(seconds)
            finally:
                self._stopped.discard(pid)
                os.kill(pid, signal.SIGCONT)

    async def _fill_disk(self) -> None:
        assert self._disk is not None
        begin = time.monotonic()
        # Known at once: jobs may fail before the disk is empty again.
        self.full_disk.append((begin, float("inf")))
        self.counts["full disk"] += 1
        try:
            await asyncio.to_thread(self._disk.fill)
            await asyncio.sleep(self._random.uniform(*FULL_DISK_S))
        finally:
            self._disk.empty()
            self.full_disk.remove((begin, float("inf")))
            self.full_disk.append((begin, time.monotonic()))

    async def _step_clock(self) -> None:
        target, pid, _ = self._victim("listener", "sweeper", "agent", "command")
        if pid is None:
            return
        is_large = self._random.random() < LARGE_STEPS
        limit_s = self._large_step_s if is_large else SMALL_STEP_S
        seconds = self._random.uniform(-limit_s, limit_s)
        self.counts[f"clock step: {target}{', beyond the margin' if is_large else ''}"] += 1
        async with self._stepped(pid, seconds):
            await asyncio.sleep(self._random.uniform(*STEP_S))

    @asynccontextmanager
    async def _stepped(self, pid: int, seconds: float) -> AsyncIterator[None]:
        self._clocks.step(pid, seconds)
        try:
            yield
        finally:
            self._clocks.restore(pid)

    # Victims

    def _victim(self, *targets: str) -> tuple[str, int | None, str]:
        """Choose a process. Return what it is, its pid if it runs, and the id of its machine if it has one."""
        target, backend = self._random.choice(targets), self._backend
        background = {"listener": LISTENER, "sweeper": SWEEPER, "local GitHub": GITHUB}
        if target in background:
            return target, backend.background(background[target]), ""
        if target in backend.servers:
            return target, backend.servers[target], ""
        if target == "command":
            running = sorted(self.commands)
            return target, self._random.choice(running) if running else None, ""
        machines = backend.machines()
        machine = self._random.choice(machines) if machines else ""
        find = backend.supervisor if target == "machine" else backend.agent
        return target, find(machine) if machine else None, machine


async def _awaited(work: Awaitable[None]) -> None:
    await work
