"""The session of one set: its messages are persisted, acknowledged and handed to the reconciler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable
from remuda.controlplane.demand.binding import Binder
from remuda.controlplane.demand.context import DemandContext
from remuda.controlplane.demand.machines import MachineTable
from remuda.controlplane.demand.sets import SetState
from remuda.domain.demand import DemandMessage, JobEvent, JobEventKind, JobRecord, merge_events
from remuda.domain.errors import Conflict, NotFound, RemudaError, Throttled, Unavailable
from remuda.domain.instance import State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.timestamps import after, to_milliseconds
from remuda.ports.clock import backoff_s
from remuda.ports.demand import DemandSession

#: Seconds between two attempts to open a session while another process has one: GitHub ends it after about 50 s.
CONFLICT_PAUSE_S = 10.0
#: Seconds after the first failed call, and the maximum.
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 60.0
MAX_DOUBLINGS = 7
#: Least seconds of a poll without news. GitHub answers after about 50 s; a proxy or a fault may answer at once.
MIN_POLL_S = 1.0


class SetSession:
    def __init__(
        self,
        demand: DemandContext,
        state: SetState,
        table: MachineTable,
        binder: Binder,
        *,
        config: Callable[[], PoolConfig],
        on_job: Callable[[JobRecord], None] = lambda _job: None,
    ) -> None:
        """`on_job` is called with each job that a message tells something new about."""
        self._demand = demand
        self._state = state
        self._table = table
        self._binder = binder
        self._config = config
        self._on_job = on_job
        self._session: DemandSession | None = None
        self._failures = 0
        self._handled_messages = 0
        #: Changed jobs that `on_job` was not called with yet. A message that comes again changes nothing.
        self._untold: dict[str, JobRecord] = {}

    @property
    def _context(self) -> Context:
        return self._demand.context

    async def run(self) -> None:
        """Serve the set until cancelled. Errors are repeated after a pause; the reconciler goes on meanwhile."""
        while True:
            try:
                await self.open()
                while True:
                    await self.poll()
            except RemudaError as error:
                pause_s = self._note_failure(error)
            except Exception as error:  # noqa: BLE001 - a bug in one set must not stop the others
                why = f"a bug: {type(error).__name__}: {error}"
                self._context.event_log.record("session-failed", why, runner_set=self._state.name)
                self._state.session_problem = why
                pause_s = LAST_PAUSE_S
            self._state.wake()
            await self._context.clock.sleep(pause_s)

    def _note_failure(self, error: RemudaError) -> float:
        """Record why the set cannot be served. Return the seconds to wait."""
        self._failures += 1
        if isinstance(error, NotFound) and self._failures == 1:
            # The session has lapsed, or GitHub has deleted the set. It is created again.
            self._context.event_log.record("session-lost", error.message, runner_set=self._state.name)
            return 0.0
        self._state.session_problem = error.message
        self._context.event_log.record("session-failed", error.message, runner_set=self._state.name, fix=error.fix)
        if isinstance(error, Conflict):
            return CONFLICT_PAUSE_S
        if isinstance(error, Throttled) and error.retry_after_s:
            return error.retry_after_s
        if not isinstance(error, Unavailable | NotFound):
            return LAST_PAUSE_S
        attempt = min(self._failures, MAX_DOUBLINGS)
        return min(LAST_PAUSE_S, backoff_s(attempt, first_s=FIRST_PAUSE_S, ids=self._context.ids))

    async def open(self) -> None:
        """Make sure that the set exists, then open its session or take over that of a process that has ended."""
        state, source = self._state, self._demand.source
        before = state.record
        scale_set_id = await source.find_set(state.runner_set)
        if scale_set_id is None:
            # Recorded before the set exists: it is deleted by this record if it is not configured any more.
            await state.save(self._demand, has_created=True)
            scale_set_id = await source.create_set(state.runner_set)
        if before.scale_set_id not in {0, scale_set_id}:
            self._note_new_set()
        is_same_set = scale_set_id == before.scale_set_id
        session = await source.open_session(
            state.runner_set,
            scale_set_id,
            owner=self._demand.owner,
            session_id=before.session_id if is_same_set else "",
        )
        self._session = session
        is_continued = is_same_set and session.session_id == before.session_id
        state.session_problem = ""
        if session.statistics is not None:
            state.note_statistics(session.statistics)
        self._context.event_log.record(
            "session", "taken over" if is_continued else "opened", runner_set=state.name, scale_set_id=scale_set_id
        )
        # Without counts, the present ones stay: no message repeats what is acknowledged.
        counted_at = to_milliseconds(self._context.with_true_time().clock.now())
        counts: dict[str, Any] = {"statistics": session.statistics, "counted_at": counted_at}
        await state.save(
            self._demand,
            scale_set_id=scale_set_id,
            session_id=session.session_id,
            owner=self._demand.owner,
            # A new session starts with the first message that is available.
            last_message_id=before.last_message_id if is_continued else 0,
            capacity=state.runner_set.max,
            **(counts if session.statistics else {}),
        )
        state.wake()

    def _note_new_set(self) -> None:
        """Registrations of a deleted set are gone. Runners that have a job keep it."""
        for machine in self._table.of_set(self._state.name):
            if machine.instance.state is State.RUNNING and not machine.instance.is_bound:
                machine.unwanted = "its scale set was deleted"

    async def poll(self) -> None:
        """Wait for one message and handle it."""
        state, session = self._state, self._session
        if session is None:
            raise Unavailable("there is no session")
        capacity, last = state.runner_set.max, state.record.last_message_id
        began = self._context.clock.monotonic()
        message = await session.receive(last_message_id=last, capacity=capacity)
        self._failures = 0
        if message is not None:
            await self._handle(session, message, capacity)
        elif capacity != state.record.capacity:
            await state.save(self._demand, capacity=capacity)
        state.wake()
        if message is None or message.message_id <= last:
            await self._context.clock.sleep(max(0.0, began + MIN_POLL_S - self._context.clock.monotonic()))

    async def _handle(self, session: DemandSession, message: DemandMessage, capacity: int) -> None:
        """Persist, then acknowledge. A process that ends in between gets the message again: all of this is idempotent.

        The reconciler is woken first: what it does has its own records.
        """
        state, config = self._state, self._config()
        now = self._context.clock.now()
        known = await self._known_jobs(message.events)
        jobs = merge_events(known, message.events, runner_set=state.name, now=now)
        jobs = {job_id: self._completed_record(job, config) for job_id, job in jobs.items()}
        ends = {event.job_id for event in message.events if event.kind is JobEventKind.COMPLETED and event.runner_name}
        state.note_jobs(jobs)
        state.note_statistics(message.statistics, completed=len(ends))
        counted_at = to_milliseconds(self._context.with_true_time().clock.now())
        state.record = replace(state.record, counted_at=counted_at)
        self._note_completed(config, jobs.values())
        self._untold.update(jobs)
        state.wake()
        await state.save(self._demand, jobs, capacity=capacity)
        started = [event for event in message.events if event.kind is JobEventKind.STARTED]
        await map_concurrently(started, lambda event: self._binder.bind(state, config, event))
        untold, self._untold = self._untold, {}
        for job in untold.values():
            self._on_job(job)
        await self._acknowledge(session, message.message_id)
        self._handled_messages += 1
        await self._acquire_available(session, message.events)

    async def _acknowledge(self, session: DemandSession, message_id: int) -> None:
        """Only an acknowledged message counts as the last one: GitHub does not send it again to who names its id.

        The id is written with the next message. Until then, a new process asks for messages after an older one.
        """
        try:
            await session.acknowledge(message_id)
        except Unavailable:
            raise
        except RemudaError:
            # Repeating cannot help, and would block the set.
            self._note_last(message_id)
            raise
        self._note_last(message_id)

    def _note_last(self, message_id: int) -> None:
        record = self._state.record
        self._state.record = replace(record, last_message_id=max(message_id, record.last_message_id))

    async def _known_jobs(self, events: Iterable[JobEvent]) -> dict[str, JobRecord]:
        """The records of the events' jobs. A new assignment has none, unless a process that ended has written it."""
        state = self._state
        unknown = {
            event.job_id
            for event in events
            if event.job_id
            and event.job_id not in state.jobs
            and (event.kind not in {JobEventKind.ASSIGNED, JobEventKind.AVAILABLE} or not self._handled_messages)
        }
        known = {event.job_id: state.jobs[event.job_id] for event in events if event.job_id in state.jobs}
        if unknown:
            stored, _ = await skip_unreadable(self._demand.store.get_jobs(unknown))
            known |= stored
        return known

    def _completed_record(self, job: JobRecord, config: PoolConfig) -> JobRecord:
        """The record with its machine and the time until which it is kept."""
        parsed = self._binder.parse(config, job.runner_name)
        instance_id = parsed[1] if parsed else job.instance_id
        job = replace(job, instance_id=instance_id)
        if job.completed_at is None:
            # A job may wait and run for longer than the records of ended ones are kept.
            return job
        forget_at = after(self._context.clock.now(), config.lifetimes.keep_records_s)
        # The record of a re-run is kept for longer.
        return replace(job, forget_at=max(forget_at, job.forget_at or forget_at))

    def _note_completed(self, config: PoolConfig, jobs: Iterable[JobRecord]) -> None:
        """The machine of a completed job reports soon that it is spent. GitHub's message alone ends nothing."""
        for job in jobs:
            parsed = self._binder.parse(config, job.runner_name)
            machine = self._table.get(parsed[1]) if parsed else None
            if job.completed_at is not None and machine and parsed and machine.instance.epoch == parsed[0]:
                machine.complete(self._context.clock.now())
                self._table.read_soon(machine)

    async def _acquire_available(self, session: DemandSession, events: Iterable[JobEvent]) -> None:
        """Acquire jobs that wait for a set (GitHub Enterprise Server)."""
        available = [event.request_id for event in events if event.kind is JobEventKind.AVAILABLE and event.request_id]
        if available:
            acquired = await session.acquire(available)
            self._context.event_log.record(
                "acquired", f"{len(acquired)} of {len(available)} available jobs", runner_set=self._state.name
            )

    async def close(self) -> None:
        """End the session, so that another process can open one at once."""
        session, self._session = self._session, None
        if session is None:
            return
        await session.close()
        await self._state.save(self._demand, session_id="", owner="")
