"""Random jobs of a runner set on a local backend while its processes are killed, and a check of everything at the end.

    python -m tests.support.demand_chaos [--minutes 30] [--seed SEED] [--json]

Listener, agents, the local GitHub and whole machines are killed (kill -9) at random. Every job must run exactly once,
or be reported as failed by GitHub's rules, and nothing may be left: machines, processes, registrations,
sessions, open provisions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random  # noqa: TID251 - a test with a seed
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from statistics import median, quantiles

from remuda.cli.output import Output
from remuda.cli.rendering.table import FittedTable
from remuda.fake_github.client import JobView
from tests.support.demand import DemandBackend, kill_process, runner_set

MAX = 4
#: Seconds after which the local GitHub gives up the job of a lost runner, and takes back one that no runner took.
LEASE_S, PICKUP_S = 15.0, 10.0
#: Jobs that wait or run at a time.
MAX_OPEN = 10
MAX_BURST = 4
JOB_S = (0.1, 5.0)
BURST_S = (0.5, 6.0)
KILL_S = (4.0, 20.0)
OUTAGE_S = (0.0, 4.0)
CANCELLED = 0.05
#: Seconds between two lines of progress.
PROGRESS_S = 60.0


class DemandChaos:
    def __init__(self, backend: DemandBackend, output: Output, seed: int) -> None:
        self._backend = backend
        self._output = output
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self._kills: Counter[str] = Counter()
        self._queued = 0
        self._done: list[JobView] = []
        self._cancelled: set[int] = set()
        self._waits: list[float] = []
        self._following: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> dict[str, object]:
        backend = self._backend
        window = {"hot": 1, "warm": 1}
        await backend.up_with_sets(runner_set(max=MAX, windows=[window]), max_instances=2 * MAX)
        async with backend.github() as github:
            await github.change_settings(lease_s=LEASE_S, pickup_s=PICKUP_S)
        endless = [self._queue_jobs(), self._kill_processes(), self._say_progress()]
        tasks = [asyncio.create_task(work) for work in endless]
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
        await backend.run("up")
        await asyncio.gather(*self._following)
        return {**self._figures(), **await self._check()}

    # Load and faults ------------------------------------------------------------------------------------------------

    async def _queue_jobs(self) -> None:
        while True:
            burst = self._random.randint(1, MAX_BURST)
            for _ in range(min(burst, MAX_OPEN - len(self._following))):
                self._queued += 1
                duration, is_cancelled = self._random.uniform(*JOB_S), self._random.random() < CANCELLED
                task = asyncio.create_task(self._follow(str(self._queued), duration, is_cancelled=is_cancelled))
                self._following.add(task)
                task.add_done_callback(self._following.discard)
            await asyncio.sleep(self._random.uniform(*BURST_S))

    async def _follow(self, run_id: str, duration_s: float, *, is_cancelled: bool) -> None:
        backend, began = self._backend, time.monotonic()
        job = await backend.queue(run_id, step=f"sleep {duration_s:.2f}")
        job = await backend.wait_for(job, "in_progress")
        self._waits.append(time.monotonic() - began)
        if is_cancelled:
            self._cancelled.add(job.id)
            await backend.cancel(job)
        self._done.append(await backend.wait_for(job))

    async def _kill_processes(self) -> None:
        victims = {
            "listener": self._kill_listener,
            "agent": self._kill_agent,
            "local GitHub": self._kill_github,
            "machine": self._kill_machine,
        }
        while True:
            await asyncio.sleep(self._random.uniform(*KILL_S))
            name = self._random.choice(sorted(victims))
            if await victims[name]():
                self._kills[name] += 1

    async def _kill_listener(self) -> bool:
        # It may have been killed a moment ago.
        return _kill(self._backend.background("listener"))

    async def _kill_agent(self) -> bool:
        machine = self._any_machine()
        return machine is not None and _kill(self._backend.agent(machine))

    async def _kill_machine(self) -> bool:
        machine = self._any_machine()
        return machine is not None and _kill(self._backend.supervisor(machine))

    async def _kill_github(self) -> bool:
        if not _kill(self._backend.background("github")):
            return False
        await asyncio.sleep(self._random.uniform(*OUTAGE_S))
        await self._backend.run("up")
        return True

    def _any_machine(self) -> str | None:
        machines = self._backend.machines()
        return self._random.choice(machines) if machines else None

    async def _say_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            conclusions = Counter(job.conclusion for job in self._done)
            self._output.say(f"{self._queued} jobs, {dict(conclusions)}, killed: {dict(self._kills)}")

    # Results --------------------------------------------------------------------------------------------------------

    def _figures(self) -> dict[str, object]:
        waits = sorted(self._waits)
        return {
            "jobs": self._queued,
            **{str(conclusion): count for conclusion, count in Counter(job.conclusion for job in self._done).items()},
            "wait p50 (s)": round(median(waits), 2),
            "wait p95 (s)": round(quantiles(waits, n=20)[-1], 2) if len(waits) > 1 else None,
            **{f"killed: {name}": count for name, count in sorted(self._kills.items())},
            "machines": len(self._backend.records()),
        }

    async def _check(self) -> dict[str, object]:
        """Remove the set, and count what is wrong or left."""
        backend = self._backend
        await backend.configure()
        gone = await _all_within(
            backend.watch_scale_sets(lambda found: not found, "the set is deleted"),
            backend.until_quiet(),
        )
        sessions = await backend.retried(backend.sessions)
        provisions = backend.open_provisions()
        down = (await backend.run("down", code=None)).document
        return {
            "jobs without a conclusion": self._queued - len(self._done),
            "jobs that ran twice or not at all": backend.wrong_runs(self._done, cancelled=self._cancelled),
            "runners with several jobs": backend.twice_used_epochs(self._done),
            "not settled": gone,
            "open sessions": sessions,
            "open provisions": provisions,
            "processes left": [*down.get("left", ["down failed"]), *backend.processes()],
        }


async def _all_within(*waits: Awaitable[object]) -> list[str]:
    results = await asyncio.gather(*waits, return_exceptions=True)
    return [str(result)[:2_000] for result in results if isinstance(result, BaseException)]


def _kill(pid: int | None) -> bool:
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        kill_process(pid)
        return True
    return False


def run(output: Output, *, minutes: float, seed: int) -> int:
    output.say(f"seed {seed}, {minutes:g} minutes")
    folder = Path(tempfile.mkdtemp(prefix="remuda-chaos-"))
    backend = DemandBackend(folder / "state")
    try:
        figures = asyncio.run(DemandChaos(backend, output, seed).run(minutes * 60))
    finally:
        asyncio.run(_stop(backend))
        shutil.rmtree(folder, ignore_errors=True)
    rows = [(name, _shown(value)) for name, value in figures.items()]
    output.show(FittedTable("Chaos", ("figure", "value"), rows))
    failed = [name for name, value in figures.items() if isinstance(value, list) and value]
    failed += [name for name in ("jobs without a conclusion",) if figures[name]]
    output.say("all checks passed" if not failed else f"FAILED: {', '.join(failed)}")
    output.result({"seed": seed, "minutes": minutes, "passed": not failed, **figures})
    return 1 if failed else 0


async def _stop(backend: DemandBackend) -> None:
    if backend.folder.exists():
        await backend.run("down", code=None)


def _shown(value: object) -> str:
    return ("; ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.demand_chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else secrets.randbelow(1_000_000)
    return run(Output(as_json=given.json), minutes=given.minutes, seed=seed)


if __name__ == "__main__":
    sys.exit(main())
