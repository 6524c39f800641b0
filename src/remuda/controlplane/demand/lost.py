"""Lost jobs: their instance has ended while they ran, and GitHub counts them as running for about ten minutes more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from remuda.controlplane.context import Context
from remuda.controlplane.demand.context import BackgroundTasks, DemandContext, insist
from remuda.controlplane.demand.machines import KnownMachine, MachineTable
from remuda.controlplane.demand.sets import SetState, find_job
from remuda.domain.demand import CANCELLED, SUCCESSES, JobRecord, Loss, find_loss
from remuda.domain.errors import RemudaError
from remuda.domain.instance import Instance
from remuda.domain.pool_config import PoolConfig, parse_runner_name
from remuda.domain.signals import Report

#: Newest jobs in which a new listener searches for lost ones, and their maximum age.
MAX_JOBS = 500
MAX_AGE = timedelta(hours=24)


class LostJobs:
    """Notes the jobs that were lost with their instance, so that no other instance is launched for them.

    Example: the power of an instance fails under a job. A sweep records the instance as gone, the listener sees that,
    and writes `lost_at` and the cause into the job's record, which status and explanations show.
    """

    def __init__(
        self,
        demand: DemandContext,
        tasks: BackgroundTasks,
        find: Callable[[str], SetState | None],
        *,
        on_loss: Callable[[JobRecord, Report | None], None],
    ) -> None:
        """`find` returns the state of a set. `on_loss` is called with each lost job and the last report about it."""
        self._demand = demand
        self._tasks = tasks
        self._find = find
        self._on_loss = on_loss
        #: Jobs that were, or may have been, lost before this process began: by set, the time by the runner's name.
        self._earlier: dict[str, dict[str, datetime]] = {}
        #: Those of them of which it is not known yet.
        self._unchecked: Sequence[JobRecord] = []

    @property
    def _context(self) -> Context:
        return self._demand.context

    def note(self, machine: KnownMachine) -> None:
        """The machine's record says that it has ended, as nobody expected if it has a job."""
        state, assignment = self._find(machine.instance.runner_set), machine.instance.assignment
        if state is None or assignment is None or not machine.has_job:
            return
        if not machine.completed:
            # At once: the next decision must not launch an instance for the job.
            state.note_lost(assignment.runner_name, self._context.clock.now())
        self._tasks.start("lost-job", self._record(state, machine.job_id, machine.instance, machine.report))

    async def _record(self, state: SetState, job_id: str, instance: Instance, report: Report | None) -> None:
        context, runner = self._context, instance.assignment.runner_name if instance.assignment else ""
        histories = await insist(context, "lost-job", lambda: context.store.histories([instance.instance_id]))
        loss = find_loss(instance.instance_id, histories.get(instance.instance_id, ()), epoch=instance.epoch)
        if loss is None:
            # It was released in between: its job had ended.
            state.lost.pop(runner, None)
            return
        job = await insist(context, "lost-job", lambda: find_job(self._demand.store, job_id, instance))
        if job is None or (job.completed_at is not None and job.result.lower() not in CANCELLED):
            return
        await self._write(state, job, loss, instance_id=instance.instance_id)
        self._on_loss(job, report)

    async def _write(self, state: SetState, job: JobRecord, loss: Loss, *, instance_id: str) -> None:
        context, facts = self._context, {"runner_set": state.name, "run_id": job.run_id, "job_id": job.job_id}
        lost: dict[str, Any] = {"lost_at": loss.at, "lost_detail": loss.detail}
        await insist(context, "lost-job", lambda: state.amend_job(self._demand, job.job_id, **lost))
        context.event_log.record("job-lost", loss.detail, instance_id=instance_id, **facts)

    def check_late(self, job: JobRecord, config: PoolConfig, table: MachineTable) -> None:
        """GitHub has told the runner of the job, or its end. Its instance may have ended before: `note` knew no job."""
        is_open = job.runner_name and job.lost_at is None and job.result.lower() not in SUCCESSES
        if is_open and not _has_machine(job, config, table):
            self._tasks.start("lost-job", self._check([job], config))

    # Jobs that were lost before this process began

    async def load(self, config: PoolConfig, table: MachineTable) -> None:
        """Find the jobs that an earlier listener has noted, and those that were lost while none ran.

        A job that runs for GitHub and has no machine counts as lost until the history of its instance is read: no
        instance is launched for it in the meantime. The sets are served although their jobs cannot be read.
        """
        context = self._context
        now = context.clock.now()
        try:
            jobs = await self._demand.store.recent_jobs(MAX_JOBS, since=now - MAX_AGE)
        except RemudaError as error:
            context.event_log.record("lost-jobs-failed", error.message)
            return
        running = [job for job in jobs if job.is_running]
        unnoted = [job for job in running if job.lost_at is None and not _has_machine(job, config, table)]
        for job in running:
            if job.lost_at is not None or job in unnoted:
                self._earlier.setdefault(job.runner_set, {})[job.runner_name] = job.lost_at or now
        self._unchecked = unnoted

    def restore(self, state: SetState) -> None:
        """Give a set that is served from now on its lost jobs."""
        state.lost.update(self._earlier.pop(state.name, {}))

    def check_restored(self, config: PoolConfig) -> None:
        """Find out in the background which of the restored jobs were lost."""
        jobs, self._unchecked = self._unchecked, []
        if jobs:
            self._tasks.start("lost-jobs", self._check(jobs, config))

    async def _check(self, jobs: Sequence[JobRecord], config: PoolConfig) -> None:
        losses: Mapping[str, tuple[Loss, Report | None]] = {}
        try:
            losses = await insist(self._context, "lost-jobs", lambda: self._find_losses(jobs, config))
        finally:
            for job in jobs:
                state = self._find(job.runner_set)
                if job.job_id not in losses and state is not None:
                    # It has ended: if GitHub counts another one, that needs an instance.
                    state.lost.pop(job.runner_name, None)
                    state.wake()
        for job in jobs:
            state = self._find(job.runner_set)
            if state is None or job.job_id not in losses:
                continue
            loss, report = losses[job.job_id]
            if replace(job, lost_at=loss.at, lost_detail=loss.detail).is_lost:
                await self._write(state, job, loss, instance_id=job.instance_id)
                self._on_loss(job, report)

    async def _find_losses(
        self, jobs: Sequence[JobRecord], config: PoolConfig
    ) -> Mapping[str, tuple[Loss, Report | None]]:
        """The losses by job id, each with the last report of its instance."""
        store = self._context.store
        parsed = {job.job_id: found for job in jobs if (found := parse_runner_name(config.pool, job.runner_name))}
        ids = sorted({instance_id for _, instance_id in parsed.values()})
        histories, reports = await asyncio.gather(store.histories(ids), store.get_reports(ids))
        losses = {}
        for job_id, (epoch, instance_id) in parsed.items():
            loss, report = find_loss(instance_id, histories.get(instance_id, ()), epoch=epoch), reports.get(instance_id)
            # A spent instance has reported the end of its job.
            if loss is not None and (report is None or report.spent_epoch != epoch):
                losses[job_id] = (loss, report)
        return losses


def _has_machine(job: JobRecord, config: PoolConfig, table: MachineTable) -> bool:
    epoch, instance_id = parse_runner_name(config.pool, job.runner_name) or (0, "")
    machine = table.get(instance_id)
    return machine is not None and machine.instance.epoch == epoch
