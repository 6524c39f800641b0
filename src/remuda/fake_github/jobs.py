"""The job queue: assigns jobs to runners and tracks them to their conclusion."""

from typing import Any, Protocol

from remuda.fake_github.state import (
    JOB_TRANSITIONS,
    MAX_COMPLETED_JOBS,
    MAX_LOG_CHARS,
    MAX_OUTPUTS_CHARS,
    MAX_SUMMARY_CHARS,
    MAX_TAIL_CHARS,
    QUEUED_JOB_LIFE_S,
    ApiError,
    Conclusion,
    GitHubJob,
    GitHubState,
    JobPhase,
    RegisteredRunner,
)

LEASE_LOST = "The self-hosted runner lost communication with the server.\n"
QUEUED_TOO_LONG = "The job was not picked up by a runner in 24 hours.\n"


class JobObserver(Protocol):
    """Learns of the jobs' progress. Scale sets take jobs that no other runner has taken."""

    def job_queued(self, job: GitHubJob) -> None: ...

    def job_started(self, job: GitHubJob) -> None: ...

    def job_finished(self, job: GitHubJob) -> None: ...


class JobQueue:
    def __init__(self, state: GitHubState) -> None:
        self._state = state
        self.observer: JobObserver | None = None
        #: Ids of waiting jobs in order. A job that its runner did not pick up returns to the front.
        self._waiting: list[int] = []
        self._unfinished: dict[int, GitHubJob] = {}
        self._finished: list[int] = []

    def restore(self) -> None:
        """Rebuild the queue from the loaded state."""
        for job in sorted(self._state.jobs.values(), key=lambda job: job.id):
            if job.phase is JobPhase.COMPLETED:
                self._finished.append(job.id)
                continue
            self._unfinished[job.id] = job
            if job.phase is JobPhase.QUEUED:
                self._waiting.append(job.id)

    def add(
        self,
        *,
        repo: str,
        run_id: str,
        run_attempt: int,
        name: str,
        labels: tuple[str, ...],
        steps: list[dict[str, Any]],
        env: dict[str, str],
        event: str = "push",
        workflow: str = "",
        head_repo: str = "",
        contexts: dict[str, Any] | None = None,
        output_expressions: dict[str, str] | None = None,
        checkout: dict[str, str] | None = None,
        only_runner: RegisteredRunner | None = None,
    ) -> GitHubJob:
        """Queue a job and assign it to a free matching runner, if any. `only_runner` restricts the assignment."""
        job = GitHubJob(
            id=self._state.new_id(),
            run_id=run_id,
            run_attempt=run_attempt,
            repo=repo,
            name=name,
            labels=labels,
            steps=steps,
            env=env,
            event=event,
            workflow=workflow,
            head_repo=head_repo or repo,
            contexts=contexts or {},
            output_expressions=output_expressions or {},
            checkout=checkout or {},
            created_at=self._state.clock.now(),
        )
        self._state.jobs[job.id] = job
        self._unfinished[job.id] = job
        self._waiting.append(job.id)
        self._state.changed("job", job.id)
        if only_runner is not None:
            job.scale_set_id = only_runner.scale_set_id
        self.dispatch(job, only_runner)
        if job.phase is JobPhase.QUEUED and self.observer is not None:
            self.observer.job_queued(job)
        return job

    def dispatch(self, job: GitHubJob, only_runner: RegisteredRunner | None = None) -> None:
        """Assign a queued job to a free runner that accepts it, if any."""
        for runner in self._state if only_runner is None else [only_runner]:
            if runner.online and runner.job_id is None and runner.accepts(job):
                self._assign(job, runner)
                return

    @property
    def waiting(self) -> list[GitHubJob]:
        """The queued jobs in order."""
        return [self._state.jobs[job_id] for job_id in self._waiting]

    @property
    def unfinished(self) -> list[GitHubJob]:
        return list(self._unfinished.values())

    def get(self, job_id: int) -> GitHubJob:
        job = self._state.jobs.get(job_id)
        if job is None:
            raise ApiError(404, f"Job {job_id} does not exist.")
        return job

    def offer(self, runner: RegisteredRunner) -> None:
        """Assign the first matching job to an idle runner."""
        if not runner.online or runner.job_id is not None:
            return
        accepted = (job for job in self.waiting if runner.accepts(job))
        # Runners of a scale set get jobs in the order of their assignment to the set.
        job = min(accepted, key=_assigned_at, default=None) if runner.scale_set_id else next(accepted, None)
        if job is not None:
            self._assign(job, runner)

    def acknowledge(self, runner: RegisteredRunner, job_id: int) -> GitHubJob:
        """Mark the job as started by its runner. Idempotent, because the response may get lost."""
        job = self._of(runner, job_id)
        now = self._state.clock.now()
        if job.phase is JobPhase.ASSIGNED:
            self._advance(job, JobPhase.IN_PROGRESS)
            job.started_at = now
            self._state.changed("runner", runner.id)
            if self.observer is not None:
                self.observer.job_started(job)
        job.due_at = now + self._state.settings.lease_s
        return job

    def renew(self, runner: RegisteredRunner, job_id: int) -> GitHubJob:
        job = self._of(runner, job_id)
        if job.phase is JobPhase.IN_PROGRESS:
            job.due_at = self._state.clock.now() + self._state.settings.lease_s
            self._state.changed("job", job.id)
        return job

    def append_output(self, runner: RegisteredRunner, job_id: int, output: str) -> None:
        job = self._of(runner, job_id)
        self._log(job, output)

    def complete(
        self,
        runner: RegisteredRunner,
        job_id: int,
        conclusion: Conclusion,
        *,
        output: str,
        steps: list[dict[str, Any]],
        outputs: dict[str, Any] | None = None,
        summary: str = "",
    ) -> GitHubJob:
        job = self.get(job_id)
        if job.phase is JobPhase.COMPLETED and job.runner_id == runner.id:
            return job  # a repeated report, or a report after the lease has expired
        self._of(runner, job_id)
        self._log(job, output)
        for step, result in zip(job.steps, steps, strict=False):
            step["conclusion"] = result.get("conclusion")
            step["result"] = {
                "name": str(result.get("name", "")),
                "outcome": str(result.get("outcome", "")),
                "seconds": float(result.get("seconds", 0.0)),
                "tail": str(result.get("tail", ""))[-MAX_TAIL_CHARS:],
            }
        values = {str(name): str(value) for name, value in (outputs or {}).items()}
        job.outputs = values if sum(map(len, values.values())) <= MAX_OUTPUTS_CHARS else {}
        job.summary = summary[:MAX_SUMMARY_CHARS]
        self._finish(job, conclusion)
        return job

    def cancel(self, job_id: int) -> GitHubJob:
        job = self.get(job_id)
        if job.phase in {JobPhase.QUEUED, JobPhase.ASSIGNED}:
            self._finish(job, Conclusion.CANCELLED)
        elif job.phase is JobPhase.IN_PROGRESS:
            job.cancel_requested = True
            self._state.changed("job", job.id)
            self._state.changed("runner", job.runner_id or 0)
        return job

    def message_for(self, runner: RegisteredRunner) -> GitHubJob | None:
        """Return the job that the runner must start or cancel, or None."""
        if runner.job_id is None:
            return None
        job = self._state.jobs[runner.job_id]
        if job.phase is JobPhase.ASSIGNED or (job.phase is JobPhase.IN_PROGRESS and job.cancel_requested):
            return job
        return None

    def extend_leases(self, seconds: float) -> None:
        """Apply a changed lease duration to the current leases."""
        for job in self._unfinished.values():
            if job.phase is JobPhase.IN_PROGRESS and job.due_at is not None:
                job.due_at += seconds
                self._state.changed("job", job.id)

    def next_due(self) -> float | None:
        dues = [_due(job) for job in self._unfinished.values()]
        return min(dues, default=None)

    def expire(self) -> None:
        """Fail jobs whose lease has expired, requeue jobs not picked up, and cancel jobs queued for a day."""
        now = self._state.clock.now()
        for job in [job for job in self._unfinished.values() if _due(job) <= now]:
            match job.phase:
                case JobPhase.IN_PROGRESS:
                    self._log(job, LEASE_LOST)
                    self._finish(job, Conclusion.FAILURE)
                case JobPhase.ASSIGNED:
                    self._return_to_queue(job)
                case _:
                    self._log(job, QUEUED_TOO_LONG)
                    self._finish(job, Conclusion.CANCELLED)

    def _assign(self, job: GitHubJob, runner: RegisteredRunner) -> None:
        self._advance(job, JobPhase.ASSIGNED)
        self._waiting.remove(job.id)
        job.runner_id, job.runner_name = runner.id, runner.name
        job.runner_assigned_at = self._state.clock.now()
        job.due_at = self._state.clock.now() + self._state.settings.pickup_s
        runner.job_id = job.id
        self._state.changed("runner", runner.id)

    def _return_to_queue(self, job: GitHubJob) -> None:
        self._advance(job, JobPhase.QUEUED)
        runner = self._release(job)
        job.runner_id = job.runner_name = job.due_at = job.runner_assigned_at = None
        self._waiting.insert(0, job.id)
        for other in self._state:
            if other.online and other.job_id is None and other is not runner and other.accepts(job):
                self._assign(job, other)
                return
        if runner is not None:
            self.offer(runner)

    def _finish(self, job: GitHubJob, conclusion: Conclusion) -> None:
        if job.phase is JobPhase.QUEUED:
            self._waiting.remove(job.id)
        began = job.phase is JobPhase.IN_PROGRESS
        self._advance(job, JobPhase.COMPLETED)
        job.conclusion = conclusion
        job.completed_at = self._state.clock.now()
        job.due_at = None
        if self.observer is not None:
            self.observer.job_finished(job)
        self._retire(job)
        runner = self._release(job)
        if runner is None:
            return
        if runner.ephemeral and began:
            self._state.drop_runner(runner)
        else:
            self.offer(runner)

    def _retire(self, job: GitHubJob) -> None:
        del self._unfinished[job.id]
        self._finished.append(job.id)
        while len(self._finished) > MAX_COMPLETED_JOBS:
            oldest = self._finished.pop(0)
            del self._state.jobs[oldest]
            self._state.changed("job", oldest)

    def _release(self, job: GitHubJob) -> RegisteredRunner | None:
        runner = self._state.runners.get(job.runner_id or 0)
        if runner is None or runner.job_id != job.id:
            return None
        runner.job_id = None
        self._state.changed("runner", runner.id)
        return runner

    def _advance(self, job: GitHubJob, phase: JobPhase) -> None:
        if phase not in JOB_TRANSITIONS[job.phase]:
            raise ApiError(409, f"A job cannot go from {job.phase} to {phase}.")
        job.phase = phase
        self._state.changed("job", job.id)

    def _log(self, job: GitHubJob, output: str) -> None:
        if output:
            job.log = (job.log + output)[-MAX_LOG_CHARS:]
            self._state.changed("job", job.id)

    def _of(self, runner: RegisteredRunner, job_id: int) -> GitHubJob:
        job = self.get(job_id)
        if runner.job_id != job_id:
            raise ApiError(409, f"Job {job_id} is not assigned to runner {runner.name}.")
        return job


def _due(job: GitHubJob) -> float:
    return job.created_at + QUEUED_JOB_LIFE_S if job.due_at is None else job.due_at


def _assigned_at(job: GitHubJob) -> float:
    return job.set_assigned_at or 0.0
