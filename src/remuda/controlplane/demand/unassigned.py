"""Jobs that GitHub has queued and given to no set. No message tells of them, so the listener asks GitHub.

- **Counts.** GitHub assigns as many jobs to a set as the listener announces, and sends no message about the others.
  While a set is full, the listener reads GitHub's count every `COUNT_S` seconds: one call of the Actions service, which
  has its own limits. A set with room costs no call: a job that comes is assigned, and a message tells of it.
- **Queues.** Which jobs these are, and which ask for a label that no set has, only GitHub's lists of runs tell. The
  listener reads them every `QUEUES_S` seconds where jobs may wait: a set of the repository is full, or jobs waited at
  the last reading. In other repositories with live runs it asks every `LIVE_S` seconds whether a run was added or has
  changed, by one call, and reads the jobs only then. All this takes `MAX_CALLS` calls per turn on average: at most
  1,440 in an hour, and GitHub does not count unchanged answers. Without live runs, it makes no call; the audit of
  `refresh` reads the other repositories.

Nothing is launched because of these jobs: the set has its maximum, or no set has their labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from remuda.controlplane.context import Context, map_concurrently
from remuda.controlplane.demand.context import DemandContext
from remuda.controlplane.demand.sets import SetState
from remuda.controlplane.job_queue import MIN_CALLS, QueueReader
from remuda.domain.demand import MAX_QUEUED_S, QueuedJob, RepositoryQueue
from remuda.domain.errors import NotFound, RemudaError
from remuda.domain.pool_config import PoolConfig
from remuda.domain.reporting.job_queue import MAX_OVERDUE, SETTLE_S, Audience, fit_into_record
from remuda.domain.resources import is_repository, split_label
from remuda.domain.runner_set import RunnerSet
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.github import GitHub

#: Seconds between two counts of a full set.
COUNT_S = 15.0
#: Seconds after which a count, or a queue, that has not changed is written again: its age shows that it is present.
CONFIRM_COUNT_S = 30.0
CONFIRM_QUEUE_S = 60.0
#: Seconds between two turns: readings of the queues where jobs may wait.
QUEUES_S = 20.0
#: Seconds between two questions whether the runs of another repository with live runs have changed.
LIVE_S = 60.0
#: Calls of GitHub per turn. Those above it are missing in the next turns.
MAX_CALLS = 8
#: Seconds for which a list of a scope's runners, or its failure, is used. It is read if a job asks for a label that no
#: set has.
RUNNERS_S = 60.0
#: Maximum characters of the jobs in one record: all records of a set must fit into an item of the store.
MAX_STORED = 50_000


class UnassignedJobs:
    def __init__(
        self, demand: DemandContext, states: Callable[[], Mapping[str, SetState]], *, config: Callable[[], PoolConfig]
    ) -> None:
        """`states` and `config` return the present sets and configuration."""
        self._demand = demand
        self._all_states = states
        self._config = config
        self._reader: QueueReader | None = None
        self._queues: dict[str, RepositoryQueue] = {}
        #: Labels of the runners of a scope, or the error of their list, with the monotonic time.
        self._runners: dict[str, tuple[float, list[Sequence[str]] | RemudaError]] = {}
        #: Whether runs have their own provision, in this turn.
        self._has_provision: dict[str, bool] = {}
        #: Monotonic time of the last reading of a repository, or of the question whether it has changed.
        self._asked_at: dict[str, float] = {}
        #: Repositories with jobs that were queued just before the last reading: GitHub may still assign them.
        self._unsettled: set[str] = set()
        #: Errors that were logged, by what failed: each is logged once.
        self._problems: dict[str, str] = {}

    @property
    def _context(self) -> Context:
        return self._demand.context

    def _states(self) -> list[SetState]:
        """The sets with a session."""
        states = self._all_states().values()
        return [state for state in states if state.record.session_id and not state.draining]

    # Counts

    async def count_regularly(self) -> None:
        while True:
            await self._context.clock.sleep(COUNT_S)
            await map_concurrently([state for state in self._states() if state.record.may_hide_jobs], self._count)

    async def _count(self, state: SetState) -> None:
        before, what = state.record.counted_at, f"the count of {state.name}"
        try:
            counts = await self._demand.source.count_jobs(state.runner_set, state.scale_set_id)
        except RemudaError as error:
            self._note(what, error.message, fix=error.fix)
            return
        if counts is None:
            self._note(what, "GitHub answers without counts of jobs")
            return
        self._problems.pop(what, None)
        if state.record.counted_at != before or not state.record.session_id:
            # A message has told newer counts, or the set is not served any more.
            return
        now = to_milliseconds(self._context.with_true_time().clock.now())
        is_due = before is None or now - before >= timedelta(seconds=CONFIRM_COUNT_S)
        if is_due or counts.available != state.statistics.available:
            # The other counts belong to the messages: they must not be newer than the events that they come with.
            statistics = replace(state.statistics, available=counts.available)
            await state.save(self._demand, statistics=statistics, counted_at=now)

    # Queues

    async def read_regularly(self) -> None:
        while True:
            await self._context.clock.sleep(QUEUES_S)
            if (github := self._context.github) is not None:
                await self._read_queues(github)

    async def _read_queues(self, github: GitHub) -> None:
        states = self._states()
        reader = self._reader = self._reader or QueueReader(github, calls=0)
        reader.calls_left = min(MAX_CALLS, reader.calls_left + MAX_CALLS)
        self._has_provision.clear()
        suspected = self._suspected_repositories(states)
        known = suspected | self._live_repositories(states)
        now = self._context.clock.monotonic()
        due = [name for name in known if name in suspected or now - self._asked_at.get(name, now - LIVE_S) >= LIVE_S]
        failed: set[str] = set()
        share = max(MIN_CALLS, MAX_CALLS // len(due)) if due else 0
        for repository in sorted(due, key=lambda name: (self._asked_at.get(name, 0.0), name)):
            if reader.calls_left < MIN_CALLS:
                break
            self._asked_at[repository] = now
            try:
                await self._read_queue(github, reader, repository, share=share, is_suspected=repository in suspected)
                self._problems.pop(repository, None)
            except NotFound:
                # It was deleted.
                self._queues.pop(repository, None)
                self._unsettled.discard(repository)
            except RemudaError as error:
                self._note(repository, error.message, fix=error.fix)
                failed.add(repository)
        self._queues = {name: queue for name, queue in self._queues.items() if name in known}
        self._asked_at = {name: at for name, at in self._asked_at.items() if name in known}
        self._unsettled &= known
        # A change that could not be read is one for the next question, too.
        reader.keep_only(known - failed)
        await map_concurrently(states, self._save)

    def _suspected_repositories(self, states: Iterable[SetState]) -> set[str]:
        """Repositories that may have jobs that no set gets: of sets that are full, and those where such jobs were."""
        found = {name for name, queue in self._queues.items() if queue.jobs} | self._unsettled
        for state in states:
            found |= {queue.repository for queue in state.record.queues if queue.jobs}
            if state.record.may_hide_jobs:
                found |= self._repositories_of(state)
            if state.statistics.available:
                found.add(state.runner_set.scope)
        return self._served(found)

    def _live_repositories(self, states: Iterable[SetState]) -> set[str]:
        """Repositories with a job that has not ended."""
        return self._served(name for state in states for name in self._repositories_of(state))

    def _repositories_of(self, state: SetState) -> set[str]:
        # The end of an older job may never be reported.
        horizon = self._context.clock.now() - timedelta(seconds=MAX_QUEUED_S)
        return {job.repository for job in state.jobs.values() if job.seen_at > horizon}

    def _served(self, names: Iterable[str]) -> set[str]:
        sets = self._config().runner_sets
        return {name.lower() for name in names if is_repository(name) and any(item.covers(name) for item in sets)}

    async def _read_queue(
        self, github: GitHub, reader: QueueReader, repository: str, *, share: int, is_suspected: bool
    ) -> None:
        sets = self._config().runner_sets
        scope = next(item.scope for item in sets if item.covers(repository))
        is_new = repository not in self._queues
        if not is_suspected and not await reader.has_changed(scope, repository) and not is_new:
            return
        now = self._context.with_true_time().clock.now()
        reading = await reader.read(scope, repository, share=share, now=now)
        audience = Audience(repository=repository, sets=sets)
        known = [job for state in self._all_states().values() for job in state.jobs.values()]
        found = [job for job in reading.jobs if audience.lacks_runner(job, known, now=now)]
        settled = now + timedelta(seconds=SETTLE_S)
        is_settled = not any(audience.lacks_runner(job, known, now=settled) for job in reading.jobs if job not in found)
        (self._unsettled.discard if is_settled and not reading.unread else self._unsettled.add)(repository)
        if any(audience.find_set(job) is None for job in found):
            audience = replace(audience, others=await self._labels_of_runners(github, reader, scope))
            found = [job for job in found if audience.lacks_runner(job, known, now=now)]
            found = [job for job in found if audience.find_set(job) or not await self._has_own_runners(job)]
        self._queues[repository] = RepositoryQueue(
            repository=repository, read_at=to_milliseconds(reading.read_at), jobs=tuple(found[:MAX_OVERDUE])
        )

    async def _labels_of_runners(self, github: GitHub, reader: QueueReader, scope: str) -> list[Sequence[str]]:
        """Other systems may have runners for a job that no set serves."""
        now = self._context.clock.monotonic()
        at, labels = self._runners.get(scope, (now - RUNNERS_S, []))
        if now - at >= RUNNERS_S:
            before = self._github_calls()
            try:
                labels = [runner.labels for runner in await github.list_runners(scope)]
            except RemudaError as error:
                labels = error
            # A list has several pages, and is read again if it was incomplete.
            reader.calls_left -= max(1, self._github_calls() - before)
            self._runners[scope] = (now, labels)
        if isinstance(labels, RemudaError):
            raise labels
        return labels

    def _github_calls(self) -> int:
        """Calls for lists of runners that this process has made."""
        return self._context.calls.by_service().get("github", {}).get("GET runners", 0)

    async def _has_own_runners(self, job: QueuedJob) -> bool:
        """Whether the job's run has its own provision. The audit, which knows its runners, judges such jobs."""
        if any(split_label(label)[0] == job.run_id for label in job.labels):
            return True
        if job.run_id not in self._has_provision:
            self._has_provision[job.run_id] = bool(await self._context.store.provisions_of_run(job.run_id))
        return self._has_provision[job.run_id]

    async def _save(self, state: SetState) -> None:
        """Write the queues that belong to the set, unless the record has them."""
        sets = self._config().runner_sets
        ours = [queue for _, queue in sorted(self._queues.items()) if _owner(queue.repository, sets) == state.name]
        queues = fit_into_record(ours, room=MAX_STORED)
        if not _differs(state.record.queues, queues):
            return
        try:
            await state.save(self._demand, queues=queues)
        except RemudaError as error:
            self._note(f"the queues of {state.name}", error.message, fix=error.fix)

    def _note(self, what: str, problem: str, *, fix: str = "") -> None:
        if self._problems.get(what) != problem:
            self._context.event_log.record("queue-failed", f"{what}: {problem}", fix=fix)
        self._problems[what] = problem


def _owner(repository: str, sets: Iterable[RunnerSet]) -> str:
    """The set whose record has the queue of a repository."""
    return next((item.name for item in sets if item.covers(repository)), "")


def _differs(before: Sequence[RepositoryQueue], after: Sequence[RepositoryQueue]) -> bool:
    """Whether the jobs differ, or the time is to be written again."""
    if [(queue.repository, queue.jobs) for queue in before] != [(queue.repository, queue.jobs) for queue in after]:
        return True
    limit = timedelta(seconds=CONFIRM_QUEUE_S)
    return any(new.read_at - old.read_at >= limit for old, new in zip(before, after, strict=True))
