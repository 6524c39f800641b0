"""The load: jobs of a runner set, and runs that provision machines, use them and release them."""

from __future__ import annotations

import asyncio
import random  # noqa: TID251 - a test with a seed
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from remuda.fake_github.client import JobView
from tests.support.chaos.backends import LocalChaosBackend
from tests.support.chaos.faults import ChaosFaults
from tests.support.cli import CommandResult
from tests.support.demand import LABELS

#: Seconds in which each job must end. Generous: only a job that was lost reaches it.
JOB_LIMIT_S = 900.0
COMMAND_LIMIT_S = 900.0
PROVISION_S = 100
JOB_POLL_S = 5.0
MAX_BURST = 4
BURST_S = (0.5, 6.0)
RUN_S = (2.0, 8.0)
#: Shares of the machines: the limit of the runner set, and the machines of all runs at a time.
SET_SHARE, RUN_SHARE = 0.6, 0.3
#: Jobs of the set at a time, by its limit: more than machines, so that some wait.
QUEUED_SHARE = 1.5
MAX_RUN = 4
#: Attempts to release a run: a release may be killed, or find the disk full.
MAX_RELEASES = 20
CANCELLED = 0.05
MAX_ERROR_CHARS = 2_000


@dataclass(kw_only=True)
class FollowedJob:
    view: JobView
    queued_at: float
    wait_s: float | None = None
    ended_at: float = 0.0
    is_cancelled: bool = False
    #: Ids of the machines of its run; none for a job of the set.
    machines: tuple[str, ...] = ()


class ChaosLoad:
    def __init__(
        self,
        backend: LocalChaosBackend,
        faults: ChaosFaults,
        *,
        machines: int,
        choices: random.Random,
        job_limit_s: float,
    ) -> None:
        self._backend = backend
        self._job_limit_s = job_limit_s
        self._faults = faults
        self._random = choices
        self.set_max = max(1, round(machines * SET_SHARE))
        self._run_max = max(1, round(machines * RUN_SHARE))
        #: Longer on many machines, so that the computer can start as many jobs as end.
        self._job_s = (0.1, max(5.0, machines * 1.2))
        self.jobs: list[FollowedJob] = []
        #: Commands by their result.
        self.commands: Counter[str] = Counter()
        #: What this program could not do.
        self.errors: list[str] = []
        #: Number of machines by the task that uses them.
        self._set_jobs: dict[asyncio.Task[None], int] = {}
        self._runs: dict[asyncio.Task[None], int] = {}
        self._next_run = 0

    async def run(self) -> None:
        await asyncio.gather(self._queue_set_jobs(), self._start_runs())

    async def finish(self) -> None:
        """Wait for all jobs and runs."""
        await asyncio.gather(*self._set_jobs, *self._runs, return_exceptions=True)

    def _follow(self, work: Coroutine[None, None, None], tasks: dict[asyncio.Task[None], int], count: int) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            del tasks[task]
            if not task.cancelled() and (error := task.exception()) is not None:
                self.errors.append("".join(traceback.format_exception(error))[-MAX_ERROR_CHARS:])

        task = asyncio.create_task(work)
        tasks[task] = count
        task.add_done_callback(ended)

    # The set

    async def _queue_set_jobs(self) -> None:
        while True:
            burst = self._random.randint(1, max(MAX_BURST, self.set_max // 4))
            for _ in range(min(burst, round(self.set_max * QUEUED_SHARE) - len(self._set_jobs))):
                self._follow(self._run_set_job(self._new_run()), self._set_jobs, 1)
            await asyncio.sleep(self._random.uniform(*BURST_S))

    async def _run_set_job(self, run_id: str) -> None:
        job = await self._queue(run_id, LABELS)
        if self._random.random() < CANCELLED:
            await self._wait(job, "in_progress")
            job.is_cancelled = True
            await self._backend.cancel(job.view)
        await self._wait(job)

    # Runs

    async def _start_runs(self) -> None:
        while True:
            count = self._random.randint(1, min(MAX_RUN, self._run_max))
            if sum(self._runs.values()) + count <= self._run_max:
                self._follow(self._run(self._new_run(), count), self._runs, count)
            await asyncio.sleep(self._random.uniform(*RUN_S))

    async def _run(self, run_id: str, count: int) -> None:
        """One workflow run: provision, one job per machine, release. GitHub's workflow releases in any case."""
        provisioned = await self._command(
            *("provision", "--run-id", run_id, "--instance-count", str(count)),
            *("--provision-timeout-sec", str(PROVISION_S)),
        )
        if provisioned.code == 0:
            machines = tuple(item["instance_id"] for item in provisioned.document["instances"])
            jobs = [await self._queue(run_id, [run_id], machines) for _ in machines]
            await asyncio.gather(*(self._wait(job) for job in jobs))
        # Without a release, a run keeps its machines until its maximum runtime.
        for _ in range(MAX_RELEASES):
            if (await self._command("release", "--run-id", run_id)).code == 0:
                break

    async def _command(self, *words: str) -> CommandResult:
        process = await self._backend.start(*words, "--json")
        async with self._known(process.pid):
            result = await process.result(COMMAND_LIMIT_S)
        if result.code == 0:
            outcome = "ok"
        elif result.code < 0:
            outcome = "killed"
        else:
            outcome = str(result.document.get("error", {}).get("type", f"exit code {result.code}"))
        assert "Traceback" not in result.stderr, result.stderr
        self.commands[f"{words[0]}: {outcome}"] += 1
        return result

    @asynccontextmanager
    async def _known(self, pid: int) -> AsyncIterator[None]:
        """The command may be hit by a fault."""
        self._faults.commands.add(pid)
        try:
            yield
        finally:
            self._faults.commands.discard(pid)

    # Jobs

    def _new_run(self) -> str:
        self._next_run += 1
        return str(self._next_run)

    async def _queue(self, run_id: str, labels: Sequence[str], machines: tuple[str, ...] = ()) -> FollowedJob:
        seconds = self._random.uniform(*self._job_s)
        queued_at = time.monotonic()
        view = await self._backend.queue(run_id, step=f"sleep {seconds:.2f}", labels=labels)
        job = FollowedJob(view=view, queued_at=queued_at, machines=machines)
        self.jobs.append(job)
        return job

    async def _wait(self, job: FollowedJob, status: str = "completed") -> None:
        """Wait until the job has this status or has completed."""
        until = time.monotonic() + self._job_limit_s
        while job.view.status not in {status, "completed"} and time.monotonic() < until:
            job.view = await self._backend.retried(partial(self._next, job.view))
            if job.wait_s is None and job.view.started_at:
                job.wait_s = time.monotonic() - job.queued_at
            if job.view.status == "queued" and job.machines and not set(job.machines) & set(self._backend.machines()):
                # No runner of its run is left.
                job.is_cancelled = True
                await self._backend.cancel(job.view)
        job.ended_at = time.monotonic()

    async def _next(self, view: JobView) -> JobView:
        async with self._backend.github() as github:
            return await github.job(view.id, wait_s=JOB_POLL_S, since=view.status)
