"""Lost jobs: their instance has ended while they ran, and GitHub counts them as running for about ten minutes more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from remuda.controlplane.context import Context, retry_write
from remuda.controlplane.demand.context import BackgroundTasks, DemandContext
from remuda.controlplane.demand.machines import KnownMachine, MachineTable
from remuda.controlplane.demand.sets import SetState, find_job
from remuda.domain.demand import JobRecord, Loss, find_loss
from remuda.domain.instance import Instance
from remuda.domain.pool_config import PoolConfig, parse_runner_name

#: Newest jobs in which a new listener searches for lost ones, and their maximum age.
MAX_JOBS = 500
MAX_AGE = timedelta(hours=24)
#: Results of a job whose runner was told to stop: if an instance shuts down, its runner still tells GitHub.
CANCELLED = frozenset({"canceled", "cancelled"})


class LostJobs:
    """Notes the jobs that were lost with their instance, so that no other instance is launched for them.

    Example: the power of an instance fails under a job. A sweep records the instance as gone, the listener sees that,
    and writes `lost_at` and the cause into the job's record, which status and explanations show.
    """

    def __init__(self, demand: DemandContext, tasks: BackgroundTasks, find: Callable[[str], SetState | None]) -> None:
        """`find` returns the state of a set."""
        self._demand = demand
        self._tasks = tasks
        self._find = find
        #: Jobs that were lost before this process began: by set, the time by the name of the job's runner.
        self._earlier: dict[str, dict[str, datetime]] = {}

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
        self._tasks.start("lost-job", self._record(state, machine.job_id, machine.instance))

    async def _record(self, state: SetState, job_id: str, instance: Instance) -> None:
        context, runner = self._context, instance.assignment.runner_name if instance.assignment else ""
        histories = await context.store.histories([instance.instance_id])
        loss = find_loss(instance.instance_id, histories.get(instance.instance_id, ()), epoch=instance.epoch)
        if loss is None:
            # It was released in between: its job had ended.
            state.lost.pop(runner, None)
            return
        job = await find_job(self._demand.store, job_id, instance)
        if job is None or (job.completed_at is not None and job.result.lower() not in CANCELLED):
            return
        facts = {"runner_set": state.name, "run_id": job.run_id, "job_id": job.job_id}
        await retry_write(
            context,
            lambda: state.amend_job(self._demand, job.job_id, lost_at=loss.at, lost_detail=loss.detail),
            **facts,
        )
        context.event_log.record("job-lost", loss.detail, instance_id=instance.instance_id, **facts)

    # Jobs that were lost before this process began

    async def load(self, config: PoolConfig, table: MachineTable) -> None:
        """Find the jobs that an earlier listener has noted, and those whose instance ended while none ran."""
        context = self._context
        jobs = await self._demand.store.recent_jobs(MAX_JOBS, since=context.clock.now() - MAX_AGE)
        running = [job for job in jobs if job.is_running]
        unnoted = [job for job in running if job.lost_at is None and not _has_machine(job, config, table)]
        found = await self._find_lost(unnoted, config) if unnoted else []
        for job in (*running, *found):
            if job.lost_at is not None:
                self._earlier.setdefault(job.runner_set, {})[job.runner_name] = job.lost_at

    async def _find_lost(self, jobs: Sequence[JobRecord], config: PoolConfig) -> list[JobRecord]:
        parsed = {job.job_id: found for job in jobs if (found := parse_runner_name(config.pool, job.runner_name))}
        histories = await self._context.store.histories(sorted({instance_id for _, instance_id in parsed.values()}))
        lost = []
        for job in jobs:
            epoch, instance_id = parsed.get(job.job_id, (0, ""))
            loss: Loss | None = find_loss(instance_id, histories.get(instance_id, ()), epoch=epoch)
            if loss is not None:
                lost.append(replace(job, lost_at=loss.at, lost_detail=loss.detail))
        if lost:
            await self._demand.store.put_jobs(lost)
        return lost

    def restore(self, state: SetState) -> None:
        """Give a set that is served from now on its lost jobs."""
        state.lost.update(self._earlier.pop(state.name, {}))


def _has_machine(job: JobRecord, config: PoolConfig, table: MachineTable) -> bool:
    epoch, instance_id = parse_runner_name(config.pool, job.runner_name) or (0, "")
    machine = table.get(instance_id)
    return machine is not None and machine.instance.epoch == epoch
