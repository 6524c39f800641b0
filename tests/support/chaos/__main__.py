"""Jobs on many machines while processes, the disk and clocks fail at random, and a check of everything.

    python -m tests.support.chaos [--backend local|aws-servers] [--machines 8] [--minutes 30] [--seed SEED] [--json]

Jobs of a runner set and runs with provision and release use the pool at the same time. Listener, sweeper, agents,
commands, the local GitHub and whole machines are killed (kill -9) or stopped (SIGSTOP) at random, some for longer than
a heartbeat may take; the disk of the pool is full for seconds; clocks of single processes step by up to minutes. Every
job must run exactly once, or fail for a fault that hit its own machine, and nothing may be left at the end.

The full disk needs root, because it is a separate file system.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random  # noqa: TID251 - a test with a seed
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

from remuda.cli.output import Output
from remuda.cli.rendering.table import FittedTable
from tests.support.chaos.backends import LocalChaosBackend, aws_backend, local_backend
from tests.support.chaos.environment import SmallDisk, SteppedClocks, small_disk
from tests.support.chaos.faults import LARGE_STEP_S, ChaosFaults
from tests.support.chaos.judge import SETTLE_S, ChaosJudge, reuse
from tests.support.chaos.load import JOB_LIMIT_S, PROVISION_S, ChaosLoad
from tests.support.demand import runner_set

BACKENDS = {"local": local_backend, "aws-servers": aws_backend}
#: Seconds after which the local GitHub gives up the job of a lost runner, and takes back one that no runner took.
LEASE_S, PICKUP_S = 45.0, 15.0
#: Megabytes of the disk: as many files as the load needs, and little to fill.
DISK_MB = 256
#: Times of the pool. Clocks differ by less than the margin, except in large steps.
SETTINGS = {
    "margin_sec": 30,
    # A killed listener leaves its open provisions until then.
    "provision_timeout_sec": PROVISION_S,
    "idle_time_sec": 150,
    "release_time_sec": 90,
    "gone_after_sec": 10,
    "unrecorded_grace_sec": 60,
    "stale_registration_grace_sec": 60,
    "republish_sec": 60,
    "surplus_grace_sec": 5,
}
#: Times of a run of less than a minute, with which everything settles within seconds.
SHORT_SETTINGS = {
    **SETTINGS,
    "margin_sec": 2,
    "provision_timeout_sec": 45,
    "idle_time_sec": 30,
    "release_time_sec": 20,
    "gone_after_sec": 1,
    "unrecorded_grace_sec": 10,
    "stale_registration_grace_sec": 5,
    "surplus_grace_sec": 1,
}
SHORT_LEASE_S = 15.0
#: Its limits, in seconds: generous, and together less than a test may take, so that it reports what is left.
SHORT_JOB_LIMIT_S, SHORT_SETTLE_S = 180.0, 150.0
#: The largest step of its clocks, in seconds.
SHORT_STEP_S = 60.0
MINUTE_S = 60.0
#: Seconds between two lines of progress.
PROGRESS_S = 60.0
PERCENTILE_GROUPS = 20


class ChaosRun:
    def __init__(
        self,
        backend: LocalChaosBackend,
        output: Output,
        *,
        clocks: SteppedClocks,
        disk: SmallDisk | None,
        machines: int,
        seconds: float,
        seed: int,
    ) -> None:
        self._backend = backend
        self._output = output
        self._machines = machines
        self._seconds = seconds
        self._is_short = seconds < MINUTE_S
        choices = random.Random(seed)  # noqa: S311 - not for secrets
        large_step_s = SHORT_STEP_S if self._is_short else LARGE_STEP_S
        self._faults = ChaosFaults(backend, clocks=clocks, disk=disk, choices=choices, large_step_s=large_step_s)
        job_limit_s = SHORT_JOB_LIMIT_S if self._is_short else JOB_LIMIT_S
        self._load = ChaosLoad(backend, self._faults, machines=machines, choices=choices, job_limit_s=job_limit_s)
        settle_s = SHORT_SETTLE_S if self._is_short else SETTLE_S
        self._judge = ChaosJudge(backend, self._faults, self._load, settle_s=settle_s)

    async def run(self) -> tuple[dict[str, object], dict[str, list[str]]]:
        """Return the figures, and the violations by rule."""
        async with self._backend.running():
            await self._configure(runner_set(max=self._load.set_max, windows=[{"hot": 1, "warm": 1}]))
            async with self._backend.github() as github:
                await github.change_settings(lease_s=SHORT_LEASE_S if self._is_short else LEASE_S, pickup_s=PICKUP_S)
            endless = [self._load.run(), self._faults.run(), self._say_progress()]
            tasks = [asyncio.create_task(work) for work in endless]
            done, _ = await asyncio.wait(tasks, timeout=self._seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                task.result()
            self._output.say("no more faults; waiting for all jobs")
            await self._load.finish()
            self._output.say("all jobs have ended; removing the set and all machines")
            wrong = self._judge.wrong_jobs()
            left = await self._judge.settle(self._configure)
        left["processes"] = await self._backend.shut_down()
        violations = {**wrong, **left, "errors of the load": self._load.errors}
        return self._figures(), violations

    async def _configure(self, *sets: dict[str, object]) -> None:
        times = SHORT_SETTINGS if self._is_short else SETTINGS
        changed = {**times, "max_instances": self._machines}
        await self._backend.refresh(**{**self._backend.set_settings(*sets), **changed})

    async def _say_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            conclusions = Counter(str(job.view.conclusion) for job in self._load.jobs)
            faults = sum(self._faults.counts.values())
            self._output.say(f"{len(self._backend.machines())} machines, jobs {dict(conclusions)}, {faults} faults")

    def _figures(self) -> dict[str, object]:
        jobs, load = self._load.jobs, self._load
        waits = sorted(job.wait_s for job in jobs if job.wait_s is not None)
        return {
            "jobs": len(jobs),
            "jobs of the set": sum(not job.machines for job in jobs),
            "succeeded": sum(job.view.conclusion == "success" for job in jobs),
            **{f"not succeeded: {cause}": count for cause, count in sorted(self._judge.causes.items())},
            **dict(sorted(load.commands.items())),
            "full disks are possible": self._faults.has_disk,
            "faults": sum(self._faults.counts.values()),
            **dict(sorted(self._faults.counts.items())),
            **reuse(self._judge.histories),
            "wait p50 (s)": round(median(waits), 1) if waits else None,
            "wait p95 (s)": round(quantiles(waits, n=PERCENTILE_GROUPS)[-1], 1) if len(waits) > 1 else None,
            "longest wait (s)": round(waits[-1], 1) if waits else None,
        }


def run(output: Output, *, backend_name: str, machines: int, minutes: float, seed: int, keep: Path | None) -> int:
    output.say(f"seed {seed}, {minutes:g} minutes, {machines} machines, {backend_name}")
    folder = Path(tempfile.mkdtemp(prefix="remuda-chaos-"))
    try:
        with ExitStack() as stack:
            disk = None
            try:
                disk = stack.enter_context(small_disk(folder / "state", DISK_MB, spared=folder / "state" / "github"))
            except (OSError, subprocess.CalledProcessError) as problem:
                output.say(f"no full disk: a small one cannot be mounted: {problem}")
            clocks = SteppedClocks(folder / "python")
            # Commands are forked from this interpreter, and start others with it.
            multiprocessing.set_executable(str(clocks.python))
            backend = stack.enter_context(BACKENDS[backend_name](folder / "state", clocks))
            chaos = ChaosRun(
                backend, output, clocks=clocks, disk=disk, machines=machines, seconds=minutes * MINUTE_S, seed=seed
            )
            figures, violations = asyncio.run(_finally_shut_down(chaos, backend))
            broken = {rule: found for rule, found in violations.items() if found}
            if broken and keep is not None:
                # Now: the disk disappears with its mount.
                shutil.copytree(folder, keep, symlinks=True, ignore=shutil.ignore_patterns("python", "runner"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [(name, str(value)) for name, value in figures.items()]
    rows += [(rule, "; ".join(found) or "none") for rule, found in violations.items()]
    output.show(FittedTable("Chaos", ("figure", "value"), rows))
    output.say("all checks passed" if not broken else f"FAILED: {', '.join(broken)}")
    head = {"seed": seed, "minutes": minutes, "machines": machines, "backend": backend_name, "passed": not broken}
    output.result({**head, "figures": figures, "violations": violations})
    return 1 if broken else 0


async def _finally_shut_down(
    chaos: ChaosRun, backend: LocalChaosBackend
) -> tuple[dict[str, object], dict[str, list[str]]]:
    try:
        return await chaos.run()
    finally:
        await backend.shut_down()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.chaos", description=__doc__)
    parser.add_argument("--backend", choices=sorted(BACKENDS), default="local")
    parser.add_argument("--machines", type=int, default=8, help="maximum number of machines (default: 8)")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--keep", type=Path, help="new folder for logs and records, if a check fails")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    # Both signals raise KeyboardInterrupt, so that everything is stopped.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    return run(
        Output(as_json=given.json),
        backend_name=given.backend,
        machines=given.machines,
        minutes=given.minutes,
        seed=given.seed if given.seed is not None else secrets.randbelow(1_000_000),
        keep=given.keep,
    )


if __name__ == "__main__":
    sys.exit(main())
