"""Jobs of a runner set on a local backend, the proof that each ran once, and the search for what was left behind."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from remuda.fake_github.client import FakeGitHubClient, JobStep, JobView, RunnerView, ScaleSetView
from tests.support.local_backend import LIMIT_S, LONG_LIFETIMES, POLL_S, REPO, LocalBackend

T = TypeVar("T")

LABELS = ("self-hosted", "remuda", "large")
MAX = 3
STARTED, ENDED = "started", "ended"
#: GitHub's message for a job whose runner disappeared.
LOST = "lost communication"
WORKFLOW = """\
on: push
jobs:
  test:
    runs-on: [%(labels)s]
    strategy: {matrix: {shard: [%(shards)s]}}
    steps:
      - run: %(step)s
"""


def runner_set(**changed: Any) -> dict[str, Any]:
    return {"name": "large", "labels": list(LABELS), "max": MAX, **changed}


def run_of(record: Mapping[str, Any]) -> str:
    """The run of the job that a stored record of a set's machine has; empty if it has none."""
    holder = record.get("holder") or {}
    return str((holder.get("job") or {}).get("run", ""))


def kill_process(pid: int) -> None:
    """Kill a process and wait for its end: on a busy computer it runs for a while, and `up` would not replace it."""
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        ended, _, _ = select.select([descriptor], [], [], LIMIT_S)
        assert ended, f"process {pid} does not end"
    finally:
        os.close(descriptor)


class DemandBackend(LocalBackend):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        #: Each job appends a line when it starts and when it ends.
        self._log = folder.parent / "jobs.log"
        self._log.touch()
        self.jobs: list[int] = []

    async def up_with_sets(self, *sets: Mapping[str, Any], **settings: object) -> None:
        await self.up(sweeper=True, **{**self.set_settings(*sets), **settings})

    async def configure(self, *sets: Mapping[str, Any]) -> None:
        await self.refresh(**self.set_settings(*sets))

    @staticmethod
    def set_settings(*sets: Mapping[str, Any]) -> dict[str, object]:
        return {**LONG_LIFETIMES, "margin_sec": 1, "surplus_grace_sec": 0.5, "runner_sets": json.dumps(sets)}

    # Jobs

    def workflow(self, name: str, *, shards: int, step: str, labels: Sequence[str] = LABELS) -> str:
        """Write a workflow. Return its path."""
        file = self.folder.parent / f"{name}.yml"
        numbers = ", ".join(str(number + 1) for number in range(shards))
        file.write_text(WORKFLOW % {"labels": ", ".join(labels), "shards": numbers, "step": step})
        return str(file)

    async def queue(self, run_id: str, *, step: str = "true", labels: Sequence[str] = LABELS) -> JobView:
        """Queue a job that writes down when it runs."""
        name = f"{run_id}-{len(self.jobs)}"
        steps = [JobStep(run=f"echo {name} {STARTED} >>{self._log}; {step}; echo {name} {ENDED} >>{self._log}")]
        job = await self.retried(
            lambda: self._with_github(
                lambda github: github.queue_job(repo=REPO, run_id=run_id, labels=labels, name=name, steps=steps)
            )
        )
        self.jobs.append(job.id)
        return job

    async def watch_runners(self, condition: Callable[[Sequence[RunnerView]], bool], what: str) -> list[RunnerView]:
        """Wait until the registrations fulfil the condition, and return them."""
        return await self._watch(lambda github, **since: github.watch_runners(**since), condition, what)

    async def watch_scale_sets(
        self, condition: Callable[[Sequence[ScaleSetView]], bool], what: str
    ) -> list[ScaleSetView]:
        return await self._watch(lambda github, **since: github.watch_scale_sets(**since), condition, what)

    async def _watch(
        self, read: Callable[..., Awaitable[tuple[int, list[T]]]], condition: Callable[[Sequence[T]], bool], what: str
    ) -> list[T]:
        until, version = time.monotonic() + LIMIT_S, None
        async with self.github() as github:
            while True:
                version, found = await self.retried(partial(read, github, since=version, wait_s=5.0))
                if condition(found):
                    return found
                assert time.monotonic() < until, f"{what}: not within {LIMIT_S} s; {found}; {self.summary()}"

    async def wait_for(self, job: JobView, status: str = "completed") -> JobView:
        """Wait until the job has this status or has completed, also while the local GitHub is restarted."""
        until = time.monotonic() + LIMIT_S
        while job.status not in {status, "completed"}:
            assert time.monotonic() < until, f"job {job.name} stays {job.status}; {self.summary()}"
            job = await self.retried(partial(self._next, job))
        return job

    async def _next(self, job: JobView) -> JobView:
        async with self.github() as github:
            return await github.job(job.id, wait_s=5, since=job.status)

    async def cancel(self, job: JobView) -> None:
        await self.retried(lambda: self._with_github(lambda github: github.cancel_job(job.id)))

    async def sessions(self) -> list[str]:
        """Owners of the open message sessions."""
        found = await self._with_github(lambda github: github.scale_sets())
        return [item.session_owner for item in found if item.session_owner]

    async def _with_github(self, call: Callable[[FakeGitHubClient], Awaitable[T]]) -> T:
        async with self.github() as github:
            return await call(github)

    async def retried(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call until the local GitHub answers."""
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                return await call()
            except httpx.HTTPError:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(POLL_S)

    # Processes

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a background process. Return its pid."""
        pid = self.background(name)
        assert pid is not None, f"{name} is not running"
        if number == signal.SIGKILL:
            kill_process(pid)
        else:
            os.kill(pid, number)
        return pid

    async def restarted(self, name: str, killed: int) -> None:
        await self.until(lambda: self.background(name) not in {None, killed}, f"{name} runs again")

    def bound(self, run_id: str) -> list[str]:
        """Ids of the machines that run a job of this run."""
        return [key for key, item in self.records().items() if run_of(item) == run_id and item["state"] == "running"]

    # Checks

    def runs(self) -> dict[str, Counter[str]]:
        """Number of starts and ends per job, by the name of the job."""
        found: dict[str, Counter[str]] = {}
        for line in self._log.read_text().splitlines():
            name, event = line.split()
            found.setdefault(name, Counter())[event] += 1
        return found

    def wrong_runs(self, jobs: Sequence[JobView], *, cancelled: Collection[int] = ()) -> list[str]:
        """Jobs that did not run exactly once and were not reported as failed by GitHub's rules.

        `cancelled` are the ids of jobs that were cancelled on purpose.
        """
        runs, wrong = self.runs(), []
        for job in jobs:
            ran = runs.get(job.name, Counter())
            if job.conclusion == "success":
                is_right = ran == {STARTED: 1, ENDED: 1}
            elif job.conclusion == "failure":
                is_right = ran[STARTED] <= 1 and LOST in job.log
            else:
                is_right = job.id in cancelled and ran[STARTED] <= 1
            if not is_right:
                wrong.append(f"{job.name}: {job.conclusion}, {dict(ran)}, {job.log[-300:]!r}")
        return wrong

    def twice_used_epochs(self, jobs: Sequence[JobView]) -> list[str]:
        """Runners that served more than one job. Their names contain machine and epoch."""
        names = Counter(job.runner_name for job in jobs if job.runner_name and job.started_at)
        return [name for name, count in names.items() if count > 1]

    async def until_quiet(self) -> None:
        """Wait until no machine of a set is in use, no registration is left and every provision is closed."""
        await self.until_settled(states=("idle", "terminated"))
        await self.until(lambda: not self.open_provisions(), "every provision is closed")

    def open_provisions(self) -> list[str]:
        """Ids of the open provisions of sets."""
        documents = [json.loads(row[0]) for row in self.rows("SELECT doc FROM provisions")]
        return [
            item["holder"]["provision"]
            for item in documents
            if "set" in item["holder"] and item["status"] != "released"
        ]
