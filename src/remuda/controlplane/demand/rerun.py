"""Re-runs of jobs that were lost to a spot interruption, once per job and only after their run has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial

from remuda.controlplane.context import Context
from remuda.controlplane.demand.context import INSIST_ATTEMPTS, INSIST_PAUSE_S, BackgroundTasks, DemandContext
from remuda.controlplane.demand.machines import KnownMachine
from remuda.controlplane.demand.sets import SetState, find_job
from remuda.domain.demand import SUCCESSES, JobRecord, Lease
from remuda.domain.errors import Conflict, NotFound, RemudaError, UserError
from remuda.domain.instance import Instance, State
from remuda.domain.resources import is_repository
from remuda.domain.signals import Report
from remuda.domain.timestamps import to_milliseconds

#: Seconds between two reads of a run that has not ended.
POLL_S = 60.0
#: Hours after the interruption in which a run must end to be run again.
GIVE_UP = timedelta(hours=6)
#: Time for which the record of a re-run is kept: the longest time of a workflow run (35 days on github.com).
KEPT = timedelta(days=35)
#: Jobs that a new listener searches for unfinished re-runs.
MAX_JOBS = 500


@dataclass(kw_only=True, eq=False, slots=True)
class _FollowedRun:
    """A run with interrupted jobs. GitHub runs all failed jobs of a run again with one call."""

    job_ids: set[str] = field(default_factory=set)
    #: One job at a time decides about the run.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: When this process has run it again, or has tried to.
    rerun_at: datetime | None = None
    #: The right to run it again that this process has written, or tried to, and not used yet.
    right: Lease | None = None


class InterruptedJobs:
    def __init__(self, demand: DemandContext, tasks: BackgroundTasks, find: Callable[[str], SetState | None]) -> None:
        """`find` returns the state of a set."""
        self._demand = demand
        self._tasks = tasks
        self._find = find
        self._runs: dict[str, _FollowedRun] = {}

    @property
    def _context(self) -> Context:
        return self._demand.context

    def note(self, state: SetState, machines: Iterable[KnownMachine]) -> None:
        """Record the jobs of machines that got a spot notice, if the set runs such jobs again."""
        if not state.runner_set.rerun_on_interruption:
            return
        for machine in machines:
            report, instance = machine.report, machine.instance
            is_hit = (
                report is not None and report.is_interrupted and instance.state is State.RUNNING and instance.is_bound
            )
            if is_hit and not machine.interrupted and not machine.is_spent:
                machine.interrupted = True
                self._tasks.start("interruption", self._record(partial(self._job_of, machine, instance)))

    def note_lost(self, job: JobRecord, report: Report | None) -> None:
        """Record a job that was lost with its instance, if that had a spot notice.

        Nobody may have known which job the instance ran until GitHub told it, after the end of the instance.
        """
        state = self._find(job.runner_set)
        wanted = state is not None and state.runner_set.rerun_on_interruption
        if wanted and report is not None and report.is_interrupted and job.interrupted_at is None:
            self._tasks.start("interruption", self._record(partial(self._get, job.job_id)))

    async def _job_of(self, machine: KnownMachine, instance: Instance) -> JobRecord | None:
        return await find_job(self._demand.store, machine.job_id, instance)

    async def _get(self, job_id: str) -> JobRecord | None:
        return (await self._demand.store.get_jobs([job_id])).get(job_id)

    async def _record(self, find: Callable[[], Awaitable[JobRecord | None]]) -> None:
        """Record it, also if the store does not answer at first, or the job is named only later."""
        for _ in range(INSIST_ATTEMPTS):
            try:
                if await self._try_to_record(await find()):
                    return
            except RemudaError as error:
                self._context.event_log.record("interruption-failed", error.message)
            await self._context.clock.sleep(INSIST_PAUSE_S)

    async def _try_to_record(self, job: JobRecord | None) -> bool:
        """Return whether nothing is left to do."""
        if job is None:
            return False
        state = self._find(job.runner_set)
        if state is None or (job.completed_at is not None and not job.is_lost):
            return True
        job_id = job.job_id
        # An earlier attempt, or another listener, may have recorded it.
        now = job.interrupted_at or to_milliseconds(self._context.clock.now())
        # The record is kept until its run must have ended, however short the records of others are kept.
        forget_at = max(job.expires_at, now + GIVE_UP + timedelta(seconds=2 * POLL_S))
        await state.amend_job(self._demand, job_id, interrupted_at=now, forget_at=forget_at)
        self._context.event_log.record("interrupted", "its machine got a spot notice", run_id=job.run_id, job_id=job_id)
        self.follow(replace(job, interrupted_at=now))
        return True

    def follow(self, job: JobRecord) -> None:
        """Run the job again when its run has ended."""
        state = self._find(job.runner_set)
        wanted = state is not None and state.runner_set.rerun_on_interruption
        is_open = job.interrupted_at is not None and job.rerun_at is None and not job.rerun_detail
        run = self._runs.get(job.run_id) or _FollowedRun()
        if wanted and is_open and job.job_id not in run.job_ids:
            self._runs[job.run_id] = run
            run.job_ids.add(job.job_id)
            self._tasks.start("rerun", self._run_again(job, run))

    async def resume(self) -> None:
        """Follow the jobs that an earlier listener has recorded."""
        since = self._context.clock.now() - GIVE_UP
        while True:
            try:
                jobs = await self._demand.store.recent_jobs(MAX_JOBS, since=since)
            except RemudaError as error:
                self._context.event_log.record("rerun-failed", error.message)
                await self._context.clock.sleep(INSIST_PAUSE_S)
            else:
                break
        for job in jobs:
            self.follow(job)

    async def _run_again(self, job: JobRecord, run: _FollowedRun) -> None:
        try:
            while not await self._advance(job.job_id, run):
                await self._context.clock.sleep(POLL_S)
        finally:
            run.job_ids.discard(job.job_id)
            if not run.job_ids:
                self._runs.pop(job.run_id, None)

    async def _advance(self, job_id: str, run: _FollowedRun) -> bool:
        """Return whether nothing is left to do."""
        try:
            job = await self._get(job_id)
            if job is None or job.rerun_at is not None or job.rerun_detail or job.interrupted_at is None:
                return True
            if job.result in SUCCESSES:
                return await self._close(job, "it succeeded before the interruption")
            if self._context.clock.now() - job.interrupted_at >= GIVE_UP:
                return await self._close(job, "its run did not end")
            if job.completed_at is None:
                # GitHub's message may be missing, so the run decides as well.
                self._context.event_log.record("rerun-waits", "the job has not ended", job_id=job_id)
            async with run.lock:
                return await self._try(job, run)
        except RemudaError as error:
            self._context.event_log.record("rerun-failed", error.message, job_id=job_id)
            return False

    async def _try(self, job: JobRecord, followed: _FollowedRun) -> bool:
        github, state = self._context.github, self._find(job.runner_set)
        if state is None:
            # Its set was removed.
            return True
        if github is None or not is_repository(job.repository) or not job.run_id.isdecimal():
            return await self._close(job, "its run is unknown")
        right = await self._demand.store.get_lease(_right_name(job))
        jobs = await self._demand.store.jobs_of_run(job.run_id)
        # The records of the jobs do not suffice: a search may miss what was written last.
        used = right if right != followed.right else None
        rerun_ids = {*(used.job_ids if used else ()), *(item.job_id for item in jobs if item.rerun_at)}
        if job.job_id in rerun_ids or any(item.job_id in rerun_ids and _is_same(item, job) for item in jobs):
            return await self._close(job, "it was run again once")
        # A run is run again only after its end, and then with all jobs that were lost before.
        reruns = [followed.rerun_at, _taken_at(used), *(item.rerun_at for item in jobs)]
        with_run = max((at for at in reruns if at and job.interrupted_at and at >= job.interrupted_at), default=None)
        if with_run is not None:
            return await self._close(job, "run again with its run", rerun_at=with_run, forget_at=with_run + KEPT)
        scope, run_id = state.runner_set.scope, int(job.run_id)
        try:
            run = await github.get_run(scope, job.repository, run_id)
        except UserError as error:
            return await self._close(job, f"{error.message}; grant the permission Actions: read and write")
        except NotFound:
            return await self._close(job, "its run does not exist")
        if run is None or not run.has_ended:
            return False
        if run.conclusion in SUCCESSES:
            return await self._close(job, "its run succeeded")
        # Recorded before the call: a lost answer must not cause a second one.
        now = to_milliseconds(self._context.clock.now())
        if (right is None or right != followed.right) and not await self._take_right(job, followed, right, now):
            return False
        kept_until = max(job.expires_at, now + KEPT)
        await state.amend_job(self._demand, job.job_id, rerun_at=now, forget_at=kept_until)
        followed.rerun_at, followed.right = now, None
        try:
            await github.rerun_failed_jobs(scope, job.repository, run_id)
        except UserError as error:
            followed.rerun_at = None
            detail = f"{error.message}; if it is missing, grant the permission Actions: write on {job.repository}"
            await state.amend_job(self._demand, job.job_id, rerun_at=None, rerun_detail=detail)
            self._context.event_log.record("rerun-refused", detail, run_id=job.run_id, job_id=job.job_id)
            return True
        except RemudaError as error:
            # GitHub may have received it: never twice.
            await state.amend_job(self._demand, job.job_id, rerun_detail=f"unconfirmed: {error.message}")
            return True
        self._context.event_log.record("rerun", "its machine was interrupted", run_id=job.run_id, job_id=job.job_id)
        return True

    async def _take_right(self, job: JobRecord, run: _FollowedRun, before: Lease | None, now: datetime) -> bool:
        """Take the right to run the run again, unless another listener has taken it since `before` was read.

        Job records cannot tell: a listener that was paused may have read them before the other one wrote them.
        """
        beat, job_ids = (before.beat + 1, before.job_ids) if before is not None else (1, ())
        run.right = Lease(owner=self._demand.owner, beat=beat, forget_at=now + KEPT, job_ids=(*job_ids, job.job_id))
        try:
            await self._demand.store.replace_lease(_right_name(job), before, run.right)
        except Conflict as conflict:
            # Its own, if an answer was lost.
            return bool(conflict.current == run.right)
        return True

    async def _close(self, job: JobRecord, detail: str, **changed: datetime) -> bool:
        if (state := self._find(job.runner_set)) is not None:
            await state.amend_job(self._demand, job.job_id, rerun_detail=detail, **changed)
        return True


def _right_name(job: JobRecord) -> str:
    return f"rerun {job.run_id}"


def _taken_at(right: Lease | None) -> datetime | None:
    return right.forget_at - KEPT if right is not None and right.forget_at is not None else None


def _is_same(one: JobRecord, other: JobRecord) -> bool:
    """Whether both are the same job of a workflow, in different attempts: GitHub gives each attempt a new id."""
    return (one.workflow, one.display_name) == (other.workflow, other.display_name) and one.job_id != other.job_id
