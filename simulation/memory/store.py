"""The instance store in memory, for unit tests and the simulation.

It uses no threads; a wait costs nothing until the record changes. Every operation is one step of the event loop, which
makes it atomic. A store with `polling` tells of a change as late as DynamoDB does: at the next read of the waiter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import datetime
from functools import cache, partial
from operator import is_
from typing import Any, TypeVar, cast

from remuda.domain.demand import DemandRecord, JobRecord, Lease
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.holder import Holder
from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.signals import FailureKind, Report, Signal
from remuda.domain.sweep_record import SweepRecord
from remuda.domain.timestamps import to_milliseconds
from remuda.domain.transitions import Change
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock
from remuda.ports.poll_intervals import JITTER, PollInterval, PollIntervals
from remuda.ports.store import HISTORY_LIMIT

T = TypeVar("T")
R = TypeVar("R", Instance, Report)
V = TypeVar("V", PoolConfig, DemandRecord, JobRecord)


class ChangeNotifier:
    """Waiters for changes by key. A change wakes all of them, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[type, str], dict[asyncio.Future[None], None]] = {}

    async def next(self, key: tuple[type, str]) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, {})[woken] = None
        try:
            await woken
        finally:
            waiting = self._waiting.get(key, {})
            waiting.pop(woken, None)
            if not waiting:
                self._waiting.pop(key, None)

    def notify(self, key: tuple[type, str]) -> None:
        for woken in self._waiting.pop(key, {}):
            if not woken.done():
                woken.set_result(None)


@dataclass(kw_only=True, slots=True)
class MemoryDatabase:
    """The database that all store objects share."""

    instances: dict[str, Instance] = field(default_factory=dict)
    histories: dict[str, tuple[HistoryEntry, ...]] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    #: Provisions by run id and provision id.
    provisions: dict[tuple[str, str], Provision] = field(default_factory=dict)
    config: PoolConfig | None = None
    sweep: SweepRecord = field(default_factory=SweepRecord)
    #: Demand by runner set, leases by name, jobs by id.
    demand: dict[str, DemandRecord] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    jobs: dict[str, JobRecord] = field(default_factory=dict)
    prepared: bool = False
    changes: ChangeNotifier = field(default_factory=ChangeNotifier)


class MemoryInstanceStore:
    def __init__(
        self,
        *,
        clock: Clock,
        calls: CallCounter,
        database: MemoryDatabase | None = None,
        polling: Callable[[], float] | None = None,
    ) -> None:
        """`polling` draws a number from 0 to 1 for the jitter of a wait; None if waiters are notified of changes."""
        self._clock = clock
        self._calls = calls
        self._database = database or MemoryDatabase()
        self._polling = polling
        self._intervals = PollIntervals(clock=clock)

    async def prepare(self) -> Sequence[str]:
        self._count("prepare")
        created = not self._database.prepared
        self._database.prepared = True
        return ["store in memory"] if created else []

    async def close(self) -> None:
        """Nothing to close."""

    @property
    def malformed_records(self) -> Mapping[str, str]:
        return {}

    # Control records ------------------------------------------------------------------------------------------

    async def apply(self, change: Change) -> Instance:
        self._count("apply")
        return self._change(change)

    def _change(self, change: Change) -> Instance:
        current = self._database.instances.get(change.instance_id)
        if not change.condition.is_met_by(current):
            raise Conflict(f"{change.instance_id} is not as {change.entry.transition} expects", current=current)
        record = _kept(change.applied_to(current))
        entries = (*self._database.histories.get(change.instance_id, ()), _kept(change.entry))
        self._database.instances[change.instance_id] = record
        self._database.histories[change.instance_id] = entries[-HISTORY_LIMIT:]
        self._database.changes.notify((Instance, change.instance_id))
        return record

    async def apply_all(self, changes: Sequence[Change]) -> Sequence[RemudaError | None]:
        errors: list[RemudaError | None] = []
        for change in changes:
            try:
                await self.apply(change)
            except RemudaError as error:
                errors.append(error)
            else:
                errors.append(None)
        return errors

    async def get(self, instance_id: str) -> Instance | None:
        self._count("get")
        return self._database.instances.get(instance_id)

    async def get_many(self, instance_ids: Collection[str]) -> Mapping[str, Instance]:
        self._count("get_many")
        return _those(self._database.instances, instance_ids)

    async def find(self, states: Collection[State], *, threshold_before: datetime | None = None) -> Sequence[Instance]:
        self._count("find")
        return [
            record
            for record in self._database.instances.values()
            if record.state in states and (threshold_before is None or record.threshold <= threshold_before)
        ]

    async def find_by_provision(self, provision_id: str) -> Sequence[Instance]:
        self._count("find_by_provision")
        return [
            record
            for record in self._database.instances.values()
            if provision_id and record.provision_id == provision_id
        ]

    async def count_live(self) -> int:
        self._count("count_live")
        return sum(record.state is not State.TERMINATED for record in self._database.instances.values())

    async def wait_for_control(
        self,
        instance_id: str,
        since: Instance | None,
        timeout_s: float,
        *,
        urgent: bool = True,
    ) -> Instance | None:
        interval = self._intervals.for_control(instance_id, since, urgent=urgent)
        return await self._wait(Instance, self._database.instances, instance_id, since, timeout_s, interval=interval)

    async def history(self, instance_id: str) -> Sequence[HistoryEntry]:
        self._count("history")
        return self._database.histories.get(instance_id, ())

    async def histories(self, instance_ids: Collection[str]) -> Mapping[str, Sequence[HistoryEntry]]:
        self._count("histories")
        return _those(self._database.histories, instance_ids)

    async def forget(self, now: datetime) -> int:
        self._count("forget")
        database = self._database
        due = [record.instance_id for record in database.instances.values() if _is_due(record, now)]
        for instance_id in due:
            del database.instances[instance_id]
            database.histories.pop(instance_id, None)
            database.reports.pop(instance_id, None)
            database.changes.notify((Instance, instance_id))
            database.changes.notify((Report, instance_id))
        old = [
            key
            for key, provision in database.provisions.items()
            if provision.forget_at is not None and provision.forget_at <= now
        ]
        for key in old:
            del database.provisions[key]
        expired = [job.job_id for job in database.jobs.values() if job.expires_at <= now]
        for job_id in expired:
            del database.jobs[job_id]
        leases = [name for name, lease in database.leases.items() if lease.forget_at and lease.forget_at <= now]
        for name in leases:
            del database.leases[name]
        return len(due) + len(old) + len(expired) + len(leases)

    # Reports --------------------------------------------------------------------------------------------------

    async def get_report(self, instance_id: str) -> Report | None:
        self._count("get_report")
        return self._database.reports.get(instance_id)

    async def get_reports(self, instance_ids: Collection[str]) -> Mapping[str, Report]:
        self._count("get_reports")
        return _those(self._database.reports, instance_ids)

    async def troubled_reports(self) -> Sequence[Report]:
        self._count("troubled_reports")
        return [report for report in self._database.reports.values() if report.troubled]

    async def write_signal(
        self,
        instance_id: str,
        *,
        epoch: int,
        signal: Signal,
        detail: str = "",
        duration_s: float | None = None,
        failure: FailureKind | None = None,
    ) -> None:
        self._count("write_signal")
        current = self._database.reports.get(instance_id)
        report = current or Report(instance_id=instance_id)
        if not report.may_become(epoch, signal):
            raise Conflict(f"{instance_id} has signalled {report.signal} of epoch {report.epoch}", current=current)
        self._keep_report(
            report.with_signal(epoch=epoch, signal=signal, detail=detail, duration_s=duration_s, failure=failure)
        )

    async def beat(
        self,
        instance_id: str,
        *,
        at: datetime,
        busy: bool,
        listening: bool,
        notice: str,
        version: str,
        spent_epoch: int = 0,
    ) -> None:
        self._count("beat")
        report = self._database.reports.get(instance_id) or Report(instance_id=instance_id)
        at = to_milliseconds(at)
        self._keep_report(
            report.with_heartbeat(
                at=at, busy=busy, listening=listening, notice=notice, version=version, spent_epoch=spent_epoch
            )
        )

    async def wait_for_report(self, instance_id: str, since: Report | None, timeout_s: float) -> Report | None:
        interval = self._intervals.for_report(since)
        return await self._wait(Report, self._database.reports, instance_id, since, timeout_s, interval=interval)

    # Provisions -----------------------------------------------------------------------------------------------

    async def put_provision(self, provision: Provision) -> None:
        self._count("put_provision")
        current = self._database.provisions.get(_key(provision))
        if current is not None:
            raise Conflict(f"provision {provision.provision_id} exists", current=current)
        self._database.provisions[_key(provision)] = _kept(provision)

    async def replace_provision(self, before: Provision, after: Provision) -> None:
        self._count("replace_provision")
        current = self._database.provisions.get(_key(before))
        if not before.is_as_stored(current):
            raise Conflict(f"provision {before.provision_id} has moved on", current=current)
        self._database.provisions[_key(after)] = _kept(after)

    async def get_provision(self, holder: Holder) -> Provision | None:
        self._count("get_provision")
        return self._database.provisions.get((holder.key, holder.provision_id))

    async def provisions_of_run(self, run_id: str) -> Sequence[Provision]:
        self._count("provisions_of_run")
        return [provision for provision in self._by_age() if provision.holder.key == run_id]

    async def unsettled_provisions(self, deadline_before: datetime) -> Sequence[Provision]:
        self._count("unsettled_provisions")
        return [provision for provision in self._by_age() if provision.is_unsettled(deadline_before)]

    async def recent_provisions(self, limit: int, *, since: datetime | None = None) -> Sequence[Provision]:
        self._count("recent_provisions")
        newest = self._by_age()[::-1]
        return [item for item in newest if since is None or item.created_at >= since][: max(limit, 0)]

    # Runner sets ----------------------------------------------------------------------------------------------

    async def get_demand(self) -> Mapping[str, DemandRecord]:
        self._count("get_demand")
        return dict(sorted(self._database.demand.items()))

    async def put_demand(self, record: DemandRecord, jobs: Collection[JobRecord] = ()) -> None:
        self._count("put_demand")
        self._check_revision(record, self._database.demand.get(record.runner_set))
        self._keep_jobs(jobs)
        self._database.demand[record.runner_set] = _kept(record)

    async def delete_demand(self, runner_set: str) -> None:
        self._count("delete_demand")
        self._database.demand.pop(runner_set, None)

    async def get_lease(self, name: str) -> Lease | None:
        self._count("get_lease")
        return self._database.leases.get(name)

    async def replace_lease(self, name: str, before: Lease | None, after: Lease) -> None:
        self._count("replace_lease")
        current = self._database.leases.get(name)
        if current != before:
            raise Conflict(f"lease {name} was changed by another process", current=current)
        self._database.leases[name] = _kept(after)

    async def get_jobs(self, job_ids: Collection[str]) -> Mapping[str, JobRecord]:
        self._count("get_jobs")
        return _those(self._database.jobs, job_ids)

    async def put_jobs(self, jobs: Collection[JobRecord]) -> None:
        if jobs:
            self._count("put_jobs")
            self._keep_jobs(jobs)

    async def jobs_of_run(self, run_id: str) -> Sequence[JobRecord]:
        self._count("jobs_of_run")
        return [job for job in self._jobs_by_age() if job.run_id == run_id]

    async def recent_jobs(self, limit: int, *, since: datetime | None = None) -> Sequence[JobRecord]:
        self._count("recent_jobs")
        newest = self._jobs_by_age()[::-1]
        return [job for job in newest if since is None or job.seen_at >= since][: max(limit, 0)]

    # Pool configuration and first-seen times ----------------------------------------------------------------

    async def get_config(self) -> PoolConfig | None:
        self._count("get_config")
        config = self._database.config
        if config is not None:
            config.check_record_version()
        return config and _kept(config)

    async def put_config(self, config: PoolConfig) -> None:
        self._count("put_config")
        self._check_revision(config, self._database.config)
        self._database.config = _kept(config)

    async def get_sweep_record(self) -> SweepRecord:
        self._count("get_sweep_record")
        return self._database.sweep

    async def put_sweep_record(self, record: SweepRecord) -> None:
        self._count("put_sweep_record")
        self._database.sweep = _kept(record)

    # Internal ---------------------------------------------------------------------------------------------------

    def _count(self, operation: str) -> None:
        self._calls.add("store", operation)

    def _by_age(self) -> list[Provision]:
        return sorted(self._database.provisions.values(), key=lambda each: (each.created_at, each.provision_id))

    def _jobs_by_age(self) -> list[JobRecord]:
        return sorted(self._database.jobs.values(), key=lambda each: (each.seen_at, each.job_id))

    def _keep_jobs(self, jobs: Collection[JobRecord]) -> None:
        for job in jobs:
            self._check_revision(job, self._database.jobs.get(job.job_id))
        for job in jobs:
            self._database.jobs[job.job_id] = _kept(job)

    @staticmethod
    def _check_revision(record: V, current: V | None) -> None:
        if record.revision != (current.revision if current else 0) + 1:
            raise Conflict(f"revision {record.revision} does not follow the stored one", current=current)

    def _keep_report(self, report: Report) -> None:
        self._database.reports[report.instance_id] = report
        self._database.changes.notify((Report, report.instance_id))

    async def _wait(
        self,
        kind: type[R],
        records: Mapping[str, R],
        instance_id: str,
        since: R | None,
        timeout_s: float,
        *,
        interval: PollInterval,
    ) -> R | None:
        self._count("poll")
        reads = _Reads(interval, self._clock.monotonic(), self._polling) if self._polling is not None else None
        try:
            async with asyncio.timeout(timeout_s):
                while records.get(instance_id) == since:
                    await self._database.changes.next((kind, instance_id))
                    if reads is not None:
                        now = self._clock.monotonic()
                        await self._clock.sleep(reads.next_at(now) - now)
                    self._count("poll")
        except TimeoutError:
            pass
        return records.get(instance_id)


class _Reads:
    """The times at which a waiter reads: the first at once, the others after the interval and its jitter.

    Only the read that would find a change is made, which costs nothing until there is one.
    """

    def __init__(self, interval: PollInterval, first_at: float, draw: Callable[[], float]) -> None:
        self._interval = interval
        self._interval_s = interval.first_s
        self._at = first_at
        self._factor = 1 + JITTER * (2 * draw() - 1)

    def next_at(self, changed_at: float) -> float:
        """The time of the first read after a change."""
        while self._at <= changed_at:
            self._at += self._interval_s * self._factor
            self._interval_s = self._interval.after(self._interval_s)
        return self._at


def _kept(value: T) -> T:
    """A copy as a real store would return it: times in milliseconds, no shared mutable values."""
    return cast("T", _settled(value))


def _settled(value: Any) -> Any:
    kind: Any = type(value)
    copy = _copier(kind)
    return value if copy is None else copy(value)


@cache
def _copier(kind: Any) -> Callable[[Any], Any] | None:
    """The function that copies values of a type; None if they are immutable. Cached, because it is needed so often."""
    if issubclass(kind, datetime):
        return lambda value: to_milliseconds(value) if value.microsecond % 1000 else value
    if issubclass(kind, tuple):
        return _settled_tuple
    if issubclass(kind, Mapping):
        return lambda value: {key: _settled(item) for key, item in value.items()}
    return partial(_settled_fields, tuple(item.name for item in fields(kind))) if is_dataclass(kind) else None


def _settled_tuple(value: tuple[Any, ...]) -> tuple[Any, ...]:
    after = tuple(map(_settled, value))
    return value if all(map(is_, value, after)) else after


def _settled_fields(names: Sequence[str], value: Any) -> Any:
    changed = {}
    for name in names:
        before = getattr(value, name)
        kind: Any = type(before)
        copy = _copier(kind)
        if copy is not None and (after := copy(before)) is not before:
            changed[name] = after
    return replace(value, **changed) if changed else value


def _those(records: Mapping[str, T], wanted: Collection[str]) -> dict[str, T]:
    """Sorted, so that the order does not depend on string hashes."""
    return {each: records[each] for each in sorted(set(wanted)) if each in records}


def _key(provision: Provision) -> tuple[str, str]:
    return provision.holder.key, provision.provision_id


def _is_due(record: Instance, now: datetime) -> bool:
    return record.state is State.TERMINATED and record.forget_at is not None and record.forget_at <= now
