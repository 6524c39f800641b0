"""GitHub's runner scale sets in memory: sets, message sessions, assignments and just-in-time runners.

The rules are those that were observed on github.com and in `actions/scaleset`: one session per set, messages that come
again until they are acknowledged, jobs that are assigned to a set and taken by any of its idle runners in the order of
their assignment, assignments that lapse, and jobs that are lost while a capacity of 0 is announced. There are no
timers: what is due happens within the next call. Wrap the port, or override methods, to simulate failures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from remuda.domain.demand import DemandMessage, DemandStatistics, JobEvent, JobEventKind
from remuda.domain.errors import Conflict, NotFound, UserError
from remuda.domain.runner_set import RunnerSet
from remuda.ports.calls import CallCounter
from remuda.ports.demand import DemandSession
from remuda.ports.github import Deletion, JitRunner
from simulation.memory.github import MemoryDemandJob, MemoryGitHubServer, MemoryRunner

#: Counted apart from GitHub's API: the Actions service has its own limits.
SERVICE = "scale-sets"
#: Seconds that a poll waits for a message.
POLL_S = 50.0
#: Maximum events per message (actions/scaleset, README).
MAX_EVENTS = 50
#: Times that a job is queued again after a lapsed assignment.
MAX_LAPSES = 3
#: Seconds until a lapsed job is assigned again, per earlier lapse.
LAPSE_DELAY_S = 10.0
#: Conclusions of jobs that are not run again with the failed ones.
SUCCESSES = frozenset({"success", "succeeded"})
_SAME_IN_EVERY_ATTEMPT = ("name", "run_id", "labels", "repository", "event", "is_fork", "seconds", "outcome")
#: Seconds after which an available job that no one acquired is offered again.
OFFER_AGAIN_S = 60.0


@dataclass(kw_only=True, slots=True, eq=False)
class MemoryScaleSet:
    scale_set_id: int
    scope: str
    name: str
    labels: tuple[str, ...]
    #: Capacity that the last poll announced; None before the first one.
    capacity: int | None = None
    #: Owner by session id. There is one at most.
    sessions: dict[str, str] = field(default_factory=dict)
    #: When the session was used last; None for one that does not end by itself.
    used_at: datetime | None = None
    #: Messages that were not acknowledged, oldest first.
    messages: list[DemandMessage] = field(default_factory=list)
    last_message_id: int = 0
    #: Id of the newest message that was delivered: later events go to another one.
    delivered_id: int = 0
    #: Events that are sent later.
    late: list[tuple[datetime, JobEvent]] = field(default_factory=list)
    waiters: dict[asyncio.Future[None], None] = field(default_factory=dict)

    def wake(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def serves(self, job: MemoryDemandJob) -> bool:
        repository, scope = job.repository.lower(), self.scope.lower()
        in_scope = repository == scope or repository.startswith(f"{scope}/")
        return in_scope and _lowered(tuple(job.labels)) <= _lowered(tuple(self.labels))


@lru_cache(maxsize=256)
def _lowered(labels: tuple[str, ...]) -> frozenset[str]:
    return frozenset(label.lower() for label in labels)


class MemoryScaleSets:
    """The service that all listeners share. Its clock is the true time, not that of a process."""

    def __init__(
        self,
        *,
        github: MemoryGitHubServer,
        poll_s: float = POLL_S,
        session_life_s: float = 50.0,
        lapse_s: float = 86_400.0,
        never_used_s: float = 86_400.0,
        lease_s: float = 0.0,
        offers_jobs: bool = False,
        restarts_ids: bool = False,
    ) -> None:
        self.github = github
        self.clock = github.clock
        #: Time without a poll after which a session ends.
        self.session_life = timedelta(seconds=session_life_s)
        self.poll_s = poll_s
        #: Time in which a runner must take an assigned job.
        self.lapse = timedelta(seconds=lapse_s)
        #: Time after which a registration is removed that never connected.
        self.never_used = timedelta(seconds=never_used_s)
        #: Time after which a job fails whose runner is gone. Until then, it counts as running, and its runner as busy.
        self.lease = timedelta(seconds=lease_s)
        #: Whether jobs are offered and must be acquired, as on GitHub Enterprise Server.
        self.offers_jobs = offers_jobs
        #: Whether responses name the labels of a set. GitHub's own client does not need them.
        self.lists_labels = True
        #: Whether the ids of messages begin again with each session.
        self.restarts_ids = restarts_ids
        self.sets: dict[int, MemoryScaleSet] = {}
        self.jobs: list[MemoryDemandJob] = []
        self._open: list[MemoryDemandJob] = []
        self._last_id = 0
        github.scale_sets = self

    def new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def named(self, name: str) -> MemoryScaleSet:
        """The set of this name. Tests give each set its own name."""
        found = next((item for item in self.sets.values() if item.name == name), None)
        if found is None:
            raise NotFound(f"there is no scale set {name}")
        return found

    # Jobs of tests, which need no session and no runner

    def assign(self, name: str, job_id: str, **known: Any) -> MemoryDemandJob:
        """Assign a job to a set."""
        scale_set = self.named(name)
        known = {"run_id": f"run-{job_id}", "repository": "octo/repo", "labels": scale_set.labels, **known}
        job = self._new_job(key=job_id, seconds=1.0, **known)
        job.set_id, job.set_name = scale_set.scale_set_id, scale_set.name
        self._assign(job, scale_set)
        return job

    def start(self, name: str, job_id: str, runner_name: str) -> None:
        """Start a job on a runner."""
        job = self._find_job(name, job_id)
        runner = self.github.find(self.named(name).scope, runner_name)
        job.runner_name = runner_name
        if runner is not None:
            runner.job = job
        self.github.start(job)

    def complete(self, name: str, job_id: str, result: str = "succeeded") -> None:
        """End a job. The registration of its runner ends with it."""
        job = self._find_job(name, job_id)
        runner = self._runner_of(job)
        if runner is not None:
            self.github.finish(job, result)
        else:
            self.ended(job, result)

    def _find_job(self, name: str, job_id: str) -> MemoryDemandJob:
        jobs = self._of(self.named(name).scale_set_id)
        return next(job for job in jobs if job.key == job_id)

    # Calls of workflows and runners

    def queue(
        self,
        *,
        run_id: str,
        labels: Sequence[str],
        repository: str,
        event: str = "push",
        is_fork: bool = False,
        seconds: float = 1.0,
        outcome: str = "success",
    ) -> MemoryDemandJob:
        job = self._new_job(
            run_id=run_id,
            labels=tuple(labels),
            repository=repository,
            event=event,
            is_fork=is_fork,
            seconds=seconds,
            outcome=outcome,
        )
        self.settle()
        return job

    def run_again(self, repository: str, run_id: int) -> None:
        """Queue the failed jobs of a run again, under new ids and as the next attempt."""
        key = (repository.lower(), str(run_id))
        last = {job.name: job for job in self.jobs if (job.repository.lower(), job.run_id) == key}
        for job in last.values():
            if job.is_over and job.conclusion not in SUCCESSES:
                self._new_job(**{name: getattr(job, name) for name in _SAME_IN_EVERY_ATTEMPT})
        self.settle()

    def _new_job(self, *, key: str = "", **known: Any) -> MemoryDemandJob:
        number, now = self.new_id(), self.clock.now()
        known = {"name": f"job {number}", **known}
        job = MemoryDemandJob(job_id=number, key=key or f"job-{number}", queued_at=now, waits_until=now, **known)
        self.jobs.append(job)
        self._open.append(job)
        return job

    def cancel(self, job: MemoryDemandJob) -> None:
        """End a job that no runner has started."""
        if not job.is_over and not job.started:
            runner = self._runner_of(job)
            if runner is not None:
                runner.job = None
            self.ended(job, "canceled")
            if runner is not None:
                self.offer(runner)

    def offer(self, runner: MemoryRunner) -> None:
        """Give an idle runner the job of its set that was assigned first."""
        if runner.take is None or runner.job is not None:
            return
        waiting = [job for job in self._of(runner.scale_set_id) if not job.runner_name and not job.is_offered]
        if waiting:
            job = min(waiting, key=lambda item: (item.assigned_at or item.queued_at, item.job_id))
            job.runner_name = runner.name
            runner.job = job
            runner.take(job)

    def started(self, job: MemoryDemandJob) -> None:
        job.started_at = self.clock.now()
        runner = self._runner_of(job)
        event = self._event(
            JobEventKind.STARTED, job, runner_id=runner.runner_id if runner else 0, runner_name=job.runner_name
        )
        self.tell(job.set_id, event)

    def returned(self, job: MemoryDemandJob) -> None:
        """A runner that had not started it is gone: another one gets it, until the assignment lapses."""
        job.runner_name = ""
        self._place(job.set_id)

    def lost(self, job: MemoryDemandJob) -> None:
        """The runner of a started job is gone."""
        job.fails_at = self.clock.now() + self.lease
        self.settle()

    def ended(self, job: MemoryDemandJob, result: str, *, runner: MemoryRunner | None = None) -> None:
        runner = runner or self._runner_of(job)
        job.conclusion, job.ended_at = result, self.clock.now()
        event = self._event(
            JobEventKind.COMPLETED,
            job,
            result=result,
            finished_at=self.clock.now(),
            runner_id=runner.runner_id if runner else 0,
            runner_name=job.runner_name,
        )
        self.tell(job.set_id, event)
        self.settle()

    # Calls of listeners

    def find(self, scope: str, name: str) -> MemoryScaleSet | None:
        key = (scope.lower(), name.lower())
        return next((item for item in self.sets.values() if (item.scope.lower(), item.name.lower()) == key), None)

    def create(self, runner_set: RunnerSet) -> MemoryScaleSet:
        scale_set = MemoryScaleSet(
            scale_set_id=self.new_id(), scope=runner_set.scope, name=runner_set.name, labels=runner_set.labels
        )
        self.sets[scale_set.scale_set_id] = scale_set
        return scale_set

    def delete(self, scale_set_id: int) -> None:
        """Delete a set. Its jobs that no runner has go back to the queue, and its idle registrations are removed."""
        removed = self.sets.pop(scale_set_id)
        for runner in self.runners_of(scale_set_id):
            self.github.delete(runner.scope, runner.runner_id)
        for job in self._of(scale_set_id):
            if not job.runner_name:
                self._requeue(job)
        removed.sessions.clear()
        removed.wake()
        self.settle()

    def get(self, scale_set_id: int) -> MemoryScaleSet:
        self.settle()
        if scale_set_id not in self.sets:
            raise NotFound(f"there is no scale set {scale_set_id}")
        return self.sets[scale_set_id]

    def open_session(self, scale_set: MemoryScaleSet, *, owner: str, session_id: str) -> str:
        if session_id not in scale_set.sessions:
            if scale_set.sessions:
                raise Conflict(f"runner set {scale_set.name} has a session of another process")
            session_id = f"session-{self.new_id()}"
            if self.restarts_ids:
                scale_set.messages = [replace(item, message_id=at) for at, item in enumerate(scale_set.messages, 1)]
                scale_set.last_message_id = scale_set.delivered_id = len(scale_set.messages)
        scale_set.sessions[session_id] = owner
        scale_set.used_at = self.clock.now()
        self.settle()
        return session_id

    def use(self, scale_set_id: int, session_id: str) -> MemoryScaleSet:
        """The set of a session, which must exist."""
        scale_set = self.get(scale_set_id)
        if session_id not in scale_set.sessions:
            raise NotFound(f"session {session_id} does not exist")
        scale_set.used_at = self.clock.now()
        return scale_set

    def close_session(self, scale_set_id: int, session_id: str) -> None:
        scale_set = self.sets.get(scale_set_id)
        if scale_set is not None:
            scale_set.sessions.pop(session_id, None)
            scale_set.wake()

    def announce(self, scale_set: MemoryScaleSet, capacity: int) -> None:
        scale_set.capacity = capacity
        self.settle()

    def next_message(self, scale_set: MemoryScaleSet, last_message_id: int) -> DemandMessage | None:
        message = next((item for item in scale_set.messages if item.message_id > last_message_id), None)
        if message is not None:
            scale_set.delivered_id = max(scale_set.delivered_id, message.message_id)
        return message

    def acquire(self, scale_set: MemoryScaleSet, request_ids: Collection[int]) -> list[int]:
        acquired = []
        for job in self._of(scale_set.scale_set_id):
            if job.is_offered and job.job_id in request_ids:
                job.is_offered = False
                self._assign(job, scale_set)
                acquired.append(job.job_id)
        return acquired

    def register(self, scale_set: MemoryScaleSet, name: str) -> MemoryRunner:
        if self.github.find(scale_set.scope, name) is not None:
            raise Conflict(f"a runner named {name} exists")
        runner = self.github.add(
            scale_set.scope, name, scale_set.labels, ephemeral=True, scale_set_id=scale_set.scale_set_id
        )
        runner.registered_at = self.clock.now()
        return runner

    @property
    def open_jobs(self) -> list[MemoryDemandJob]:
        """Jobs that are not over, in the order in which they were queued."""
        self._open = [job for job in self._open if not job.is_over]
        return self._open

    # Time

    def settle(self) -> None:
        """Do everything that is due: end sessions and registrations, let assignments lapse, assign jobs."""
        now = self.clock.now()
        for scale_set in list(self.sets.values()):
            # A poll that is under way keeps its session.
            life = self.session_life + timedelta(seconds=self.poll_s)
            if scale_set.used_at is not None and now - scale_set.used_at > life:
                scale_set.sessions.clear()
            due = [event for at, event in scale_set.late if at <= now]
            scale_set.late = [item for item in scale_set.late if item[0] > now]
            for event in due:
                self.send(scale_set.name, event)
        for runner in list(self.github.runners.values()):
            unused = runner.scale_set_id and runner.registered_at is not None and not runner.was_online
            if unused and runner.registered_at is not None and now - runner.registered_at >= self.never_used:
                self.github.delete(runner.scope, runner.runner_id)
        for job in self.open_jobs:
            if not job.is_over and job.fails_at is not None and job.fails_at <= now:
                self._fail(job)
        for job in self.open_jobs:
            if not job.is_over and not job.runner_name and job.lapses_at is not None and job.lapses_at <= now:
                self._lapse(job)
        for job in self.open_jobs:
            if not job.is_over and not job.set_id:
                self._find_set(job)

    def next_due(self) -> datetime | None:
        """The next time at which `settle` has something to do for jobs."""
        now = self.clock.now()
        times: list[datetime] = []
        for job in self.open_jobs:
            if job.runner_name:
                times += [job.fails_at] if job.fails_at is not None else []
                continue
            times += [at for at in (job.lapses_at, None if job.set_id else job.waits_until) if at is not None]
        for scale_set in self.sets.values():
            times += [at for at, _ in scale_set.late]
        later = [at for at in times if at > now]
        return min(later) if later else None

    def lapse_after(self, job: MemoryDemandJob) -> timedelta:  # noqa: ARG002 - for subclasses
        return self.lapse

    def tell(self, set_id: int, event: JobEvent) -> None:
        """Send an event of a job to its set. Subclasses may lose or delay it."""
        if set_id in self.sets:
            self.send(self.sets[set_id].name, event)

    def send(self, name: str, *events: JobEvent) -> None:
        """Add events to the set's next message, which has the present statistics."""
        scale_set = self.named(name)
        last = scale_set.messages[-1] if scale_set.messages else None
        if (
            last is not None
            and last.message_id > scale_set.delivered_id
            and len(last.events) + len(events) <= MAX_EVENTS
        ):
            scale_set.messages.pop()
            events = (*last.events, *events)
        else:
            scale_set.last_message_id += 1
        scale_set.messages.append(
            DemandMessage(
                message_id=scale_set.last_message_id, statistics=self.statistics(scale_set), events=tuple(events)
            )
        )
        scale_set.wake()

    def statistics(self, scale_set: MemoryScaleSet) -> DemandStatistics:
        jobs = self._of(scale_set.scale_set_id)
        runners = self.runners_of(scale_set.scale_set_id)
        busy = sum(runner.job is not None for runner in runners)
        assigned = [job for job in jobs if not job.is_offered]
        return DemandStatistics(
            available=len(jobs) - len(assigned) + self._unassigned(scale_set),
            acquired=sum(not job.runner_name for job in assigned),
            assigned=len(assigned),
            running=sum(job.started for job in assigned),
            registered=len(runners),
            busy=busy,
            idle=len(runners) - busy,
        )

    def _fail(self, job: MemoryDemandJob) -> None:
        runner = self._runner_of(job)
        if runner is not None:
            runner.job = None
        self.ended(job, "failed", runner=runner)

    def _unassigned(self, scale_set: MemoryScaleSet) -> int:
        """Jobs above the capacity: they are counted, and no message tells of them. Offered ones are counted already."""
        if self.offers_jobs or scale_set.capacity == 0:
            return 0
        return sum(not job.set_id and not job.started and scale_set.serves(job) for job in self.open_jobs)

    def _find_set(self, job: MemoryDemandJob) -> None:
        for scale_set in self.sets.values():
            if not scale_set.serves(job):
                continue
            if scale_set.capacity == 0 and scale_set.sessions:
                job.is_stranded = True
            if job.is_stranded or not scale_set.sessions or not scale_set.capacity:
                continue
            if len(self._of(scale_set.scale_set_id)) >= scale_set.capacity or self.clock.now() < job.waits_until:
                continue
            job.set_id, job.set_name = scale_set.scale_set_id, scale_set.name
            if self.offers_jobs:
                job.is_offered = True
                job.lapses_at = self.clock.now() + timedelta(seconds=OFFER_AGAIN_S)
                self.tell(scale_set.scale_set_id, self._event(JobEventKind.AVAILABLE, job))
            else:
                self._assign(job, scale_set)
            return

    def _assign(self, job: MemoryDemandJob, scale_set: MemoryScaleSet) -> None:
        job.assigned_at = self.clock.now()
        job.lapses_at = job.assigned_at + self.lapse_after(job)
        self.tell(scale_set.scale_set_id, self._event(JobEventKind.ASSIGNED, job))
        self._place(scale_set.scale_set_id)

    def _lapse(self, job: MemoryDemandJob) -> None:
        if job.is_offered:
            # Nobody acquired it: it is offered once more.
            job.lapses_at = self.clock.now() + timedelta(seconds=OFFER_AGAIN_S)
            self.tell(job.set_id, self._event(JobEventKind.AVAILABLE, job))
            return
        job.lapses += 1
        self.tell(job.set_id, self._event(JobEventKind.COMPLETED, job, result="canceled"))
        if job.lapses > MAX_LAPSES:
            job.conclusion = "canceled"
        self._requeue(job)
        job.waits_until = self.clock.now() + timedelta(seconds=LAPSE_DELAY_S * job.lapses)
        job.key = f"{job.key.partition('.')[0]}.{job.lapses}"

    def _requeue(self, job: MemoryDemandJob) -> None:
        job.set_id = 0
        job.is_offered = False
        job.assigned_at = job.lapses_at = None

    def _place(self, set_id: int) -> None:
        for runner in self.runners_of(set_id):
            self.offer(runner)

    def _of(self, set_id: int) -> list[MemoryDemandJob]:
        return [job for job in self.open_jobs if job.set_id == set_id]

    def runners_of(self, set_id: int) -> list[MemoryRunner]:
        return [runner for runner in self.github.runners.values() if runner.scale_set_id == set_id]

    def _runner_of(self, job: MemoryDemandJob) -> MemoryRunner | None:
        return next((runner for runner in self.github.runners.values() if runner.job is job), None)

    def _event(
        self,
        kind: JobEventKind,
        job: MemoryDemandJob,
        *,
        result: str = "",
        finished_at: datetime | None = None,
        runner_id: int = 0,
        runner_name: str = "",
    ) -> JobEvent:
        return JobEvent(
            kind=kind,
            job_id=job.key,
            # 0 on github.com, where jobs are assigned directly.
            request_id=job.job_id if self.offers_jobs else 0,
            run_id=job.run_id,
            repository=job.repository,
            workflow=f"{job.repository}/.github/workflows/test.yml@refs/heads/main",
            display_name=job.name,
            event=job.event,
            labels=job.labels,
            queued_at=job.queued_at,
            assigned_at=job.assigned_at,
            started_at=job.started_at,
            finished_at=finished_at,
            result=result,
            runner_id=runner_id,
            runner_name=runner_name,
        )


class MemoryDemandSession:
    def __init__(self, server: MemoryScaleSets, scale_set: MemoryScaleSet, session_id: str, calls: CallCounter) -> None:
        self._server = server
        self._id = scale_set.scale_set_id
        self._session_id = session_id
        self._calls = calls
        self._statistics = server.statistics(scale_set)

    @property
    def session_id(self) -> str:
        return self._session_id

    @property
    def statistics(self) -> DemandStatistics:
        return self._statistics

    async def receive(self, *, last_message_id: int, capacity: int) -> DemandMessage | None:
        server = self._server
        server.announce(self._enter("GET message"), capacity)
        until = server.clock.now() + timedelta(seconds=server.poll_s)
        while True:
            scale_set = server.use(self._id, self._session_id)
            message = server.next_message(scale_set, last_message_id)
            now = server.clock.now()
            if message is not None or now >= until:
                return message
            due = server.next_due()
            await self._changed(scale_set, (min(until, due or until) - now).total_seconds())

    @staticmethod
    async def _changed(scale_set: MemoryScaleSet, timeout_s: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        scale_set.waiters[woken] = None
        try:
            async with asyncio.timeout(timeout_s):
                await woken
        except TimeoutError:
            pass
        finally:
            scale_set.waiters.pop(woken, None)

    async def acknowledge(self, message_id: int) -> None:
        scale_set = self._enter("DELETE message")
        scale_set.messages = [item for item in scale_set.messages if item.message_id != message_id]

    async def acquire(self, request_ids: Collection[int]) -> Sequence[int]:
        return self._server.acquire(self._enter("POST acquirejobs"), request_ids)

    async def close(self) -> None:
        self._calls.add(SERVICE, "DELETE sessions")
        self._server.close_session(self._id, self._session_id)

    def _enter(self, operation: str) -> MemoryScaleSet:
        self._calls.add(SERVICE, operation)
        return self._server.use(self._id, self._session_id)


class MemoryDemandSource:
    def __init__(self, *, server: MemoryScaleSets, calls: CallCounter) -> None:
        self._server = server
        self._calls = calls

    async def close(self) -> None:
        """Nothing to close."""

    async def find_set(self, runner_set: RunnerSet) -> int | None:
        self._count("GET runnerscalesets")
        found = self._server.find(runner_set.scope, runner_set.name)
        return self._checked_id(found, runner_set) if found else None

    async def create_set(self, runner_set: RunnerSet) -> int:
        self._count("POST runnerscalesets")
        found = self._server.find(runner_set.scope, runner_set.name) or self._server.create(runner_set)
        return self._checked_id(found, runner_set)

    def _checked_id(self, found: MemoryScaleSet, runner_set: RunnerSet) -> int:
        differ = _lowered(found.labels) != _lowered(runner_set.labels)
        if self._server.lists_labels and differ:
            raise UserError(
                f"runner set {runner_set.name!r} has the labels {', '.join(found.labels)} on GitHub",
                field="runner-sets",
                fix="GitHub does not change labels: give the set another name",
            )
        return found.scale_set_id

    async def delete_set(self, runner_set: RunnerSet) -> bool:
        self._count("DELETE runnerscalesets")
        self._server.settle()
        found = self._server.find(runner_set.scope, runner_set.name)
        if found is None:
            return False
        if any(runner.job is not None for runner in self._server.runners_of(found.scale_set_id)):
            raise Conflict(f"a runner of {runner_set.name} has a job")
        self._server.delete(found.scale_set_id)
        return True

    async def count_jobs(
        self,
        runner_set: RunnerSet,  # noqa: ARG002 - the id is enough
        scale_set_id: int,
    ) -> DemandStatistics | None:
        self._count("GET runnerscalesets")
        return self._server.statistics(self._server.get(scale_set_id))

    async def open_session(
        self,
        runner_set: RunnerSet,  # noqa: ARG002 - the id is enough
        scale_set_id: int,
        *,
        owner: str,
        session_id: str = "",
    ) -> DemandSession:
        self._count("POST sessions")
        found = self._server.get(scale_set_id)
        session_id = self._server.open_session(found, owner=owner, session_id=session_id)
        return MemoryDemandSession(self._server, found, session_id, self._calls)

    async def register(
        self,
        runner_set: RunnerSet,  # noqa: ARG002 - the id is enough
        scale_set_id: int,
        *,
        name: str,
    ) -> JitRunner:
        self._count("POST generatejitconfig")
        runner = self._server.register(self._server.get(scale_set_id), name)
        return JitRunner(runner_id=runner.runner_id, config=f"AJITCONFIG{runner.runner_id:06d}")

    async def find_runner(self, runner_set: RunnerSet, *, name: str) -> int | None:
        self._count("GET agents")
        self._server.settle()
        runner = self._server.github.find(runner_set.scope, name)
        return runner.runner_id if runner is not None else None

    async def deregister(self, runner_set: RunnerSet, runner_id: int) -> Deletion:
        self._count("DELETE agents")
        return self._server.github.delete(runner_set.scope, runner_id)

    def _count(self, operation: str) -> None:
        self._calls.add(SERVICE, operation)
