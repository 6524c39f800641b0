"""The state of one runner set in the listener: its demand, its jobs, its errors and its acquisitions in progress."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from remuda.controlplane.context import Context, retry_conflicts, retry_write, skip_unreadable
from remuda.controlplane.demand.context import DemandContext
from remuda.domain.demand import MAX_TEXT, DemandRecord, DemandStatistics, JobRecord
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import Instance
from remuda.domain.runner_set import RunnerSet
from remuda.domain.supply import JOB_COUNTS_FOR_S
from remuda.domain.text import truncate
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.clock import backoff_s
from remuda.ports.demand import DemandStore

#: Jobs that a set remembers. GitHub's messages may be missing, so some are never completed.
MAX_JOBS = 5_000
#: Registrations of a set in progress at once. Those of a scope that does not answer must not delay other sets.
CONCURRENT_REGISTRATIONS = 32
#: Age at which the recorded statistics of an earlier process say nothing.
STATISTICS_LIFE = timedelta(minutes=10)
#: Seconds for which a job's end that only its machine has reported reduces GitHub's count. Its message may never come.
ENDED_COUNTS_FOR_S = 30.0
#: Seconds for which a job that was lost with its instance reduces GitHub's count. GitHub fails a job ten minutes after
#: the last sign of its runner, and its message about that may never come.
LOST_COUNTS_FOR_S = 660.0


#: Seconds after the first failed acquisition of a set, and the maximum.
FIRST_RETRY_S = 5.0
LAST_RETRY_S = 60.0
#: Doublings of the pause after which it stays at its maximum.
MAX_DOUBLINGS = 5


@dataclass(kw_only=True, eq=False)
class SetState:
    runner_set: RunnerSet
    record: DemandRecord
    #: Removed from the configuration: it gives up its runners and is deleted on GitHub.
    draining: bool = False
    #: Jobs that have not ended, by id.
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    #: Jobs of them that have ended by their machines' reports, with the time.
    ended: dict[str, datetime] = field(default_factory=dict)
    #: Jobs that were lost with their instance, by the name of their runner, with the time.
    lost: dict[str, datetime] = field(default_factory=dict)
    #: Acquisitions in progress that have no machine yet, for jobs and for the pool.
    acquiring: int = 0
    filling: int = 0
    #: Consecutive failed acquisitions, and the monotonic time before which none is started, for jobs and for the pool.
    failures: int = 0
    retry_at: float = 0.0
    fill_failures: int = 0
    fill_retry_at: float = 0.0
    #: Whether the instances of the last launch ended before they had booted: until one boots, launches prove nothing.
    ends_early: bool = False
    #: Machines that came to the pool in the meantime: so many may be acquired before that time.
    returned: int = 0
    #: Problems of the acquisitions and of the session, for people; empty if there are none.
    shortage: str = ""
    session_problem: str = ""
    #: Set by whatever may change a decision.
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    registrations: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONCURRENT_REGISTRATIONS))
    #: Jobs whose present record is not known to be stored, by id. A message that comes again does not change them.
    _unwritten: dict[str, JobRecord] = field(default_factory=dict)
    _write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return self.runner_set.name

    @property
    def scale_set_id(self) -> int:
        return self.record.scale_set_id

    @property
    def statistics(self) -> DemandStatistics:
        return self.record.statistics

    def wake(self) -> None:
        self.woken.set()

    # Acquisitions

    def note_success(self, *, for_pool: bool) -> None:
        """An acquisition has its machine."""
        if self.ends_early:
            return
        if for_pool:
            self.fill_failures, self.fill_retry_at = 0, 0.0
        else:
            self.failures, self.retry_at = 0, 0.0
        self.shortage = ""

    def note_failure(self, context: Context, error: RemudaError, *, for_pool: bool) -> None:
        """After a failure, the set waits before it tries again: longer after each, as every launch may fail."""
        failures = (self.fill_failures if for_pool else self.failures) + 1
        pause_s = backoff_s(min(failures, MAX_DOUBLINGS), first_s=FIRST_RETRY_S, ids=context.ids)
        retry_at = context.clock.monotonic() + min(pause_s, LAST_RETRY_S)
        # Jobs do not wait because the pool could not be filled.
        if for_pool:
            self.fill_failures, self.fill_retry_at = failures, retry_at
        else:
            self.failures, self.retry_at = failures, retry_at
        self.shortage = error.describe(MAX_TEXT)
        facts = {"runner_set": self.name, "fix": error.fix, "for_pool": for_pool}
        context.event_log.record("acquisition-failed", error.message, **facts)

    def note_early_end(self, context: Context, error: RemudaError, *, for_pool: bool) -> None:
        """The instances of a launch ended before they had booted. Without a pause, new ones would follow at once."""
        self.ends_early = True
        self.note_failure(context, error, for_pool=for_pool)

    def note_boot(self) -> None:
        """A launched instance has booted, so launches work again."""
        if self.ends_early:
            self.ends_early = False
            self.failures = self.fill_failures = 0
            self.shortage = ""

    # Jobs

    def note_jobs(self, changed: Mapping[str, JobRecord]) -> None:
        for job_id, job in changed.items():
            if job.completed_at is not None:
                self.jobs.pop(job_id, None)
                self.ended.pop(job_id, None)
                self.lost.pop(job.runner_name, None)
            else:
                self.jobs[job_id] = job
        while len(self.jobs) > MAX_JOBS:
            self.jobs.pop(next(iter(self.jobs)))

    def note_ended(self, job_id: str, now: datetime) -> None:
        """Note that the machine of a job has reported its end."""
        if job_id in self.jobs:
            self.ended.setdefault(job_id, now)

    def ended_jobs(self, now: datetime) -> int:
        """Jobs that have ended although no message says so yet."""
        oldest = now - timedelta(seconds=ENDED_COUNTS_FOR_S)
        return sum(ended_at >= oldest for job_id, ended_at in self.ended.items() if job_id in self.jobs)

    def note_lost(self, runner_name: str, now: datetime) -> None:
        """Note that the instance of a job has ended under it."""
        self.lost.setdefault(runner_name, now)

    def note_statistics(self, statistics: DemandStatistics, *, completed: int = 0) -> None:
        """Note GitHub's counts, which came with the end of `completed` jobs.

        If fewer jobs run without a message about the end of one, a lost one has probably ended: the oldest. It must not
        cancel out a job that starts later.
        """
        unexplained = self.statistics.running - statistics.running - completed
        for name in sorted(self.lost, key=lambda name: self.lost[name])[: max(0, unexplained)]:
            del self.lost[name]
        self.record = replace(self.record, statistics=statistics)

    def lost_jobs(self, now: datetime) -> int:
        """Jobs that were lost with their instance, and that GitHub still counts."""
        oldest = now - timedelta(seconds=LOST_COUNTS_FOR_S)
        self.lost = {name: lost_at for name, lost_at in self.lost.items() if lost_at >= oldest}
        return len(self.lost)

    def waiting_jobs(self, now: datetime) -> list[JobRecord]:
        """Known jobs that have not started. Those that GitHub must have assigned again by now do not count."""
        oldest = now - timedelta(seconds=JOB_COUNTS_FOR_S)
        return [job for job in self.jobs.values() if job.is_waiting and job.seen_at >= oldest]

    def recheck_at(self, now: datetime) -> datetime | None:
        """The next time at which a job stops counting by itself, as one that waits, has ended or was lost."""
        seen = (job.seen_at for job in self.jobs.values() if job.is_waiting)
        times = [
            *(at + timedelta(seconds=ENDED_COUNTS_FOR_S) for at in self.ended.values()),
            *(at + timedelta(seconds=LOST_COUNTS_FOR_S) for at in self.lost.values()),
            *(at + timedelta(seconds=JOB_COUNTS_FOR_S) for at in seen),
        ]
        return min((at for at in times if at >= now), default=None)

    # Record

    async def save(self, demand: DemandContext, jobs: Mapping[str, JobRecord] | None = None, **changed: object) -> None:
        """Write the record with the changed fields, and the jobs. The latest state is written, in order.

        Jobs that could not be written are written with the next call.
        """
        self.record = replace(self.record, **changed)  # type: ignore[arg-type]
        self._unwritten.update(jobs or {})
        context = demand.context

        async def write() -> None:
            updated_at = to_milliseconds(context.clock.now())
            record = replace(self.record, updated_at=updated_at, revision=self.record.revision + 1)
            given = dict(self._unwritten)
            rows = [replace(job, revision=job.revision + 1) for job in given.values()]
            try:
                await retry_write(context, lambda: demand.store.put_demand(record, rows), runner_set=self.name)
            except Conflict:
                await self._read_again(demand)
                raise
            self.record = replace(self.record, updated_at=updated_at, revision=record.revision)
            self._unwritten = {key: job for key, job in self._unwritten.items() if given.get(key) is not job}
            for row in rows:
                self._note_stored(row.job_id, row)

        async with self._write_lock:
            await retry_conflicts(context, write)

    async def _read_again(self, demand: DemandContext) -> None:
        """Continue from the stored records: another listener has written them, or a write whose answer was lost has."""
        stored, _ = await skip_unreadable(demand.store.get_demand())
        revision = stored[self.name].revision if self.name in stored else 0
        self.record = replace(self.record, revision=revision)
        jobs, _ = await skip_unreadable(demand.store.get_jobs(self._unwritten))
        for job_id in [*self._unwritten]:
            self._note_stored(job_id, jobs.get(job_id))

    def _note_stored(self, job_id: str, row: JobRecord | None) -> None:
        for known in (self.jobs, self._unwritten):
            if job_id in known:
                known[job_id] = known[job_id].merged_into(row)

    async def amend_job(self, demand: DemandContext, job_id: str, **changed: Any) -> None:
        """Write what no message says about a job: its re-run or its loss. Messages that come later do not change it."""

        async def write() -> None:
            job = (await demand.store.get_jobs([job_id])).get(job_id)
            if job is not None:
                row = replace(job, **changed, revision=job.revision + 1)
                await demand.store.put_jobs([row])
                self._note_stored(job_id, row)

        async with self._write_lock:
            await retry_conflicts(demand.context, write)

    async def save_problem(self, demand: DemandContext) -> None:
        """Record since when the set cannot be served, or that it can. Writes only changes."""
        problem, shortage = truncate(self.session_problem, MAX_TEXT), truncate(self.shortage, MAX_TEXT)
        if (problem, shortage) == (self.record.error, self.record.shortage):
            return
        now = to_milliseconds(demand.context.clock.now())
        since = (self.record.failing_since or now) if problem or shortage else None
        await self.save(demand, error=problem, shortage=shortage, failing_since=since)


async def find_job(store: DemandStore, job_id: str, instance: Instance) -> JobRecord | None:
    """The job of an instance, which an earlier listener may have bound: then its id is not known."""
    if job_id:
        return (await store.get_jobs([job_id])).get(job_id)
    name = instance.assignment.runner_name if instance.assignment else ""
    jobs = await store.jobs_of_run(instance.run_id) if instance.run_id else ()
    return next((job for job in jobs if name and job.runner_name == name), None)


def new_state(context: Context, runner_set: RunnerSet, stored: DemandRecord | None) -> SetState:
    now = to_milliseconds(context.clock.now())
    record = stored or DemandRecord(runner_set=runner_set.name, updated_at=now)
    if now - record.updated_at > STATISTICS_LIFE:
        # No runner is launched for the jobs of yesterday, if the session cannot be opened at once.
        record = replace(record, statistics=DemandStatistics(), counted_at=None)
    return SetState(
        runner_set=runner_set,
        record=replace(record, scope=runner_set.scope, runner_group=runner_set.runner_group),
    )
