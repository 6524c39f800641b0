"""The listener: the process that serves all runner sets of a pool, one at a time by its lease."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from remuda.controlplane.context import Context, read_config, run_to_end
from remuda.controlplane.demand.acquisition import Acquisitions
from remuda.controlplane.demand.binding import Binder
from remuda.controlplane.demand.context import BackgroundTasks, DemandContext
from remuda.controlplane.demand.ended import EndedInstances
from remuda.controlplane.demand.equipment import Equipment
from remuda.controlplane.demand.heartbeat import pool_counts, write_heartbeats
from remuda.controlplane.demand.lease import LeaseLost, ListenerLease
from remuda.controlplane.demand.lost import LostJobs
from remuda.controlplane.demand.machines import MachineTable
from remuda.controlplane.demand.observer import MachineObserver
from remuda.controlplane.demand.readiness import Readiness
from remuda.controlplane.demand.reconciler import Reconciler
from remuda.controlplane.demand.rerun import InterruptedJobs
from remuda.controlplane.demand.session import SetSession
from remuda.controlplane.demand.sets import SetState, new_state
from remuda.controlplane.demand.unassigned import UnassignedJobs
from remuda.controlplane.pool_publisher import PoolPublisher
from remuda.domain.demand import DemandRecord, JobRecord
from remuda.domain.errors import Conflict, RemudaError, Unavailable, UserError
from remuda.domain.instance import Actor, Instance
from remuda.domain.pool_config import PoolConfig
from remuda.domain.runner_set import RunnerSet

#: Seconds between two reads of the configuration.
CONFIG_S = 60.0
#: Seconds until it is recorded that a machine is in the pool. Until then, the next job may have claimed it.
RECORD_AFTER_S = 5.0
#: Seconds between two attempts to delete a removed set.
DELETE_S = 10.0
#: Seconds that a stopping listener waits for steps in progress, and for GitHub to end its sessions.
FINISH_S = 5.0
CLOSE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenerResult:
    """The sets after one reconcile."""

    #: Wanted runners, runners and problem by set.
    sets: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    errors: tuple[str, ...] = ()


@dataclass(kw_only=True, eq=False)
class _ServedSet:
    state: SetState
    session: SetSession
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def stop(self) -> None:
        for task in self.tasks:
            task.cancel()


class DemandListener:
    def __init__(self, demand: DemandContext) -> None:
        self._demand = demand
        self._readiness = Readiness(demand)
        self._lease = ListenerLease(
            self._context,
            demand.store,
            demand.owner,
            has_ended=demand.has_ended,
            on_standby=self._readiness.note_work,
        )
        self._service: ListenerService | None = None

    @property
    def _context(self) -> Context:
        return self._demand.context

    async def run(self) -> None:
        """Serve the pool until cancelled: as a standby first, if another process has the lease."""
        reports = BackgroundTasks(context=self._context)
        reports.start("launch", self._readiness.report())
        try:
            await self._take_turns()
        finally:
            await run_to_end(reports.drain(0.0))

    async def _take_turns(self) -> None:
        while True:
            await self._lease.acquire()
            service = self._service = ListenerService(self._demand, on_start=self._readiness.note_work)
            try:
                await self._serve(service)
            except LeaseLost as lost:
                self._context.event_log.record("lease-lost", lost.message)
                continue
            finally:
                # Give up the lease also if the service ends by an error or a cancellation.
                await run_to_end(self._lease.give_up())

    def reload(self) -> None:
        """Read the configuration soon."""
        if self._service is not None:
            self._service.reload()

    async def _serve(self, service: ListenerService) -> None:
        keeping = asyncio.ensure_future(self._lease.keep())
        serving = asyncio.ensure_future(service.run())
        is_lost = False
        try:
            await asyncio.wait({keeping, serving}, return_when=asyncio.FIRST_COMPLETED)
            is_lost = keeping.done()
            (keeping if is_lost else serving).result()
        finally:
            for task in (keeping, serving):
                task.cancel()
            await asyncio.wait({keeping, serving})
            # The sessions belong to the process that has taken over.
            await run_to_end(service.stop(keep_sessions=is_lost))

    async def run_once(self) -> ListenerResult:
        """Open the sessions, reconcile once, wait for the steps and stop."""
        await self._lease.acquire(wait=False)
        service = ListenerService(self._demand)
        try:
            return await service.run_once()
        finally:
            await run_to_end(service.stop())
            await run_to_end(self._lease.give_up())


class ListenerService:
    """Service of all runner sets. Only the holder of the lease runs it."""

    def __init__(self, demand: DemandContext, *, on_start: Callable[[], None] = lambda: None) -> None:
        """`on_start` is called when the records are read and the loops of the sets run."""
        self._demand = demand
        self._on_start = on_start
        context = demand.context
        self._config: PoolConfig | None = None
        self._config_due = asyncio.Event()
        self._sets: dict[str, _ServedSet] = {}
        #: If one of them fails, for example because the log cannot be written, the listener ends and is started again.
        self._loops = asyncio.TaskGroup()
        self._table = MachineTable(context.clock)
        self._tasks = BackgroundTasks(context=context)
        self._publisher = PoolPublisher(
            context,
            by=Actor.LISTENER,
            on_sent=self._note_idle,
            record_after_s=RECORD_AFTER_S,
            is_idle=self._table.is_idle,
        )
        self._equipment = Equipment(demand, self._table, self._publisher)
        self._warm_due = asyncio.Event()
        self._observer = MachineObserver(
            context,
            self._table,
            wake=self._wake,
            on_search=self._warm_due.set,
            wants_idle=lambda: self._reconciler.wants_idle(self._states()),
        )
        self._table.on_due = self._observer.wake
        #: Tasks that may wait for hours, and continue in the next process.
        self._followers = BackgroundTasks(context=context)
        self._interrupted = InterruptedJobs(demand, self._followers, lambda name: self._states().get(name))
        self._lost = LostJobs(
            demand, self._tasks, lambda name: self._states().get(name), on_loss=self._interrupted.note_lost
        )
        self._table.on_end = self._lost.note
        self._acquisitions = Acquisitions(
            demand, self._table, self._equipment, self._tasks, on_rollback=self._observer.search_soon
        )
        self._reconciler = Reconciler(
            demand,
            self._table,
            self._equipment,
            self._acquisitions,
            self._tasks,
            config=self.config,
            on_reconcile=self._interrupted.note,
        )
        self._ended = EndedInstances(
            context,
            self._table,
            self._equipment,
            self._tasks,
            find=lambda name: self._states().get(name),
        )
        self._unassigned = UnassignedJobs(demand, self._states, config=self.config)
        self._binder = Binder(demand, self._table, self._equipment)

    @property
    def _context(self) -> Context:
        return self._demand.context

    def config(self) -> PoolConfig:
        if self._config is None:
            raise Unavailable("the configuration was not read yet")
        return self._config

    def _states(self) -> dict[str, SetState]:
        return {name: served.state for name, served in self._sets.items()}

    def _counts(self) -> Mapping[str, float]:
        return pool_counts(self._context, self._states().values(), self._table)

    def _wake(self, name: str) -> None:
        served = self._sets.get(name)
        if served is not None:
            served.state.wake()

    def _note_job(self, job: JobRecord) -> None:
        """A message has told something new about a job."""
        if job.completed_at is not None:
            self._interrupted.follow(job)
        self._lost.check_late(job, self.config(), self._table)

    def _note_idle(self, instances: Sequence[Instance]) -> None:
        """Machines are in the pool: sets that wait for one of their class try to get it."""
        for instance in instances:
            self._table.add_idle(instance, self._context.clock.monotonic())
        counts = Counter(instance.resource_class for instance in instances)
        for served in self._sets.values():
            if count := counts[served.state.runner_set.resource_class]:
                served.state.returned += count
                served.state.wake()

    async def run(self) -> None:
        stored = await self._start()
        try:
            async with self._loops as group:
                group.create_task(self._observer.run())
                group.create_task(self._keep_warm())
                group.create_task(self._ended.run())
                group.create_task(self._unassigned.count_regularly())
                group.create_task(self._unassigned.read_regularly())
                if (metrics := self._demand.metrics) is not None:
                    group.create_task(write_heartbeats(self._context, metrics, self._counts))
                group.create_task(self._reload_regularly())
                self._apply(stored)
                self._lost.check_restored(self.config())
                self._on_start()
                self._followers.start("rerun", self._interrupted.resume())
                while True:
                    await self._config_due.wait()
                    self._config_due.clear()
                    await self._reload()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _start(self) -> Mapping[str, DemandRecord]:
        """Read the configuration, the records of the sets and of their machines."""
        self._config = await read_config(self._context)
        stored = await self._demand.store.get_demand()
        await self._observer.search()
        await self._lost.load(self._config, self._table)
        return stored

    def reload(self) -> None:
        self._config_due.set()

    async def _reload_regularly(self) -> None:
        while True:
            await self._context.clock.sleep(CONFIG_S)
            self._config_due.set()

    async def _reload(self) -> None:
        try:
            self._config = await read_config(self._context)
            self._apply({})
            # Idle machines may be wanted from now on.
            self._observer.wake()
        except RemudaError as error:
            self._context.event_log.record("read-failed", error.message)

    # Sets

    def _apply(self, stored: Mapping[str, DemandRecord]) -> None:
        """Start new sets, change known ones, and drain those that are not configured any more."""
        configured = {item.name: item for item in self.config().runner_sets}
        for name, record in stored.items():
            if name not in configured or _is_other_set(configured[name], record):
                self._serve(removed_set(name, record), record, draining=True)
        for name in self._table.set_names():
            if name not in configured and name not in self._sets:
                scope = next(machine.instance.scope for machine in self._table.of_set(name))
                record = DemandRecord(runner_set=name, scope=scope, updated_at=self._context.clock.now())
                self._serve(removed_set(name, record), record, draining=True)
        for name, runner_set in configured.items():
            served = self._sets.get(name)
            if served is None:
                self._serve(runner_set, stored.get(name))
            elif _is_other_set(runner_set, served.state.record):
                self._drain(served)
            else:
                self._resume(served)
                served.state.runner_set = runner_set
                served.state.wake()
        for name, served in self._sets.items():
            if name not in configured:
                self._drain(served)

    def _resume(self, served: _ServedSet) -> None:
        """Serve a set again that was removed and is back: the last job of a removed set may run for hours."""
        if served.state.draining:
            served.state.draining = False
            served.stop()
            self._start_loops(served)

    def _start_loops(self, served: _ServedSet) -> None:
        served.tasks = [
            self._loops.create_task(served.session.run()),
            self._loops.create_task(self._reconciler.run(served.state)),
        ]

    def _serve(self, runner_set: RunnerSet, record: DemandRecord | None, *, draining: bool = False) -> None:
        state = new_state(self._context, runner_set, record)
        self._lost.restore(state)
        session = SetSession(
            self._demand,
            state,
            self._table,
            self._binder,
            config=self.config,
            on_job=self._note_job,
        )
        served = self._sets[runner_set.name] = _ServedSet(state=state, session=session)
        if draining:
            self._drain(served)
        else:
            self._start_loops(served)

    def _drain(self, served: _ServedSet) -> None:
        """Stop polling, give up the runners, and delete the set on GitHub when the last job has ended."""
        if served.state.draining:
            return
        served.state.draining = True
        served.stop()
        self._context.event_log.record(
            "drain", "the set was removed from the configuration", runner_set=served.state.name
        )
        served.tasks = [
            self._loops.create_task(self._reconciler.run(served.state)),
            self._loops.create_task(self._delete_when_empty(served)),
        ]

    async def _delete_when_empty(self, served: _ServedSet) -> None:
        state, clock = served.state, self._context.clock
        with suppress(RemudaError):
            await served.session.close()
        while True:
            held = list(self._table.of_set(state.name))
            try:
                if not held and not state.acquiring and not state.filling and not await self._is_restored(state):
                    # A set that this pool has never served may be that of another pool.
                    is_own = bool(state.scale_set_id) or state.record.has_created
                    existed = is_own and await self._demand.source.delete_set(state.runner_set)
                    await self._demand.store.delete_demand(state.name)
                    why = "deleted on GitHub" if existed else "it was never served, or does not exist on GitHub"
                    self._context.event_log.record("set-deleted", why, runner_set=state.name)
                    break
            except Conflict:
                pass
            except RemudaError as error:
                self._context.event_log.record("delete-failed", error.message, runner_set=state.name)
            await clock.sleep(DELETE_S)
        for task in served.tasks[:1]:
            task.cancel()
        self._sets.pop(state.name, None)
        # The set may have been configured again, with another scope.
        self._apply({})

    async def _is_restored(self, state: SetState) -> bool:
        """Whether the set has been configured again since the configuration was read."""
        config = await read_config(self._context)
        found = config.find_set(state.name)
        is_restored = found is not None and not _is_other_set(found, state.record)
        if is_restored:
            self.reload()
        return is_restored

    async def _keep_warm(self) -> None:
        """After each search for records."""
        while True:
            await self._warm_due.wait()
            self._warm_due.clear()
            try:
                await self._reconciler.keep_warm(self._states())
            except UserError as error:
                self._context.event_log.record("warm-failed", error.message)

    # Once, and the end

    async def run_once(self) -> ListenerResult:
        stored = await self._start()
        errors: list[str] = []
        sets: dict[str, Mapping[str, object]] = {}
        for runner_set in self.config().runner_sets:
            state = new_state(self._context, runner_set, stored.get(runner_set.name))
            self._lost.restore(state)
            session = SetSession(self._demand, state, self._table, self._binder, config=self.config)
            self._sets[runner_set.name] = _ServedSet(state=state, session=session)
            try:
                await session.open()
            except RemudaError as error:
                errors.append(f"{runner_set.name}: {error.message}")
                state.session_problem = error.message
        self._lost.check_restored(self.config())
        await self._observer.read_reports()
        for name, state in self._states().items():
            plan = self._reconciler.reconcile(state)
            sets[name] = {"desired": plan.desired, "supply": plan.supply, "waiting": plan.waiting}
        await self._reconciler.keep_warm(self._states())
        await self._tasks.drain(self.config().lifetimes.provision_timeout_s)
        for name, state in self._states().items():
            await state.save_problem(self._demand)
            if state.shortage:
                errors.append(f"{name}: {state.shortage}")
        return ListenerResult(sets=sets, errors=tuple(errors))

    async def stop(self, *, keep_sessions: bool = False) -> None:
        """Stop polling, finish or roll back what is in progress, and end the sessions. Machines keep running."""
        loops = [task for served in self._sets.values() for task in served.tasks]
        for task in loops:
            task.cancel()
        if loops:
            await asyncio.wait(loops)
        await self._followers.drain(0.0)
        await self._tasks.drain(FINISH_S)
        with suppress(RemudaError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._publisher.close()
                await self._acquisitions.close()
        if not keep_sessions:
            await asyncio.gather(*(self._close(served) for served in self._sets.values()))

    async def _close(self, served: _ServedSet) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await served.session.close()
        except (RemudaError, TimeoutError) as error:
            why = f"the session ends by itself ({error or 'timeout'})"
            self._context.event_log.record("session-failed", why, runner_set=served.state.name)


def _is_other_set(runner_set: RunnerSet, record: DemandRecord) -> bool:
    """Whether the record belongs to a set of the same name in another scope or runner group."""
    if not record.scope:
        return False
    known = (record.scope.lower(), record.runner_group.lower())
    return known != (runner_set.scope.lower(), runner_set.runner_group.lower())


def removed_set(name: str, record: DemandRecord) -> RunnerSet:
    """A set that is not configured any more, with enough fields to find it on GitHub."""
    return RunnerSet(
        name=name, labels=(name,), resource_class="", scope=record.scope, runner_group=record.runner_group, max=1
    )
