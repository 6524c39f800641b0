"""The instance store in a SQLite file, shared by the processes of one computer."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from remuda.adapters.sqlite import tables
from remuda.adapters.sqlite.connection import BUSY_TIMEOUT_S, ChangePoller, SqliteFile
from remuda.adapters.sqlite.documents import decode, encode
from remuda.adapters.sqlite.tables import Key, RecordKind
from remuda.domain.demand import DemandRecord, JobRecord, Lease
from remuda.domain.errors import Conflict, RemudaError, Unreadable
from remuda.domain.holder import Holder
from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.signals import FailureKind, Report, Signal
from remuda.domain.sweep_record import SweepRecord
from remuda.domain.transitions import Change
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids

T = TypeVar("T")
R = TypeVar("R", Instance, Report)

_CONFIG = "config"
_SWEEP = "sweep"
#: Prefixes of single documents.
_DEMAND = "demand/"
_LEASE = "lease/"
_KINDS: Mapping[type[Any], RecordKind] = {Instance: RecordKind.CONTROL, Report: RecordKind.REPORT}


class SqliteInstanceStore:
    def __init__(
        self, *, path: Path, clock: Clock, ids: Ids, calls: CallCounter, busy_timeout_s: float = BUSY_TIMEOUT_S
    ) -> None:
        self._file = SqliteFile(path=path, busy_timeout_s=busy_timeout_s, thread_name="remuda-store")
        self._ids = ids
        self._calls = calls
        self._malformed: dict[str, str] = {}
        # Documents and records of the last search per operation: a repeated search parses only changed documents.
        self._parsed: dict[str, dict[str, tuple[str, Any]]] = {}
        self._poller: ChangePoller[Key, str | None] = ChangePoller(
            file=self._file,
            read_values=tables.by_keys,
            on_read=partial(calls.add, "store", "poll"),
            clock=clock,
            ids=ids,
        )

    async def prepare(self) -> Sequence[str]:
        self._calls.add("store", "prepare")
        path = self._file.path
        created = await self._file.create(path.with_name(self._ids.new(f".{path.name}-")))
        return [f"store {path}"] if created else []

    async def close(self) -> None:
        await self._poller.close()
        await self._file.close()

    @property
    def malformed_records(self) -> Mapping[str, str]:
        return dict(self._malformed)

    # Control records ------------------------------------------------------------------------------------------

    async def apply(self, change: Change) -> Instance:
        # Parse the written document, so that the caller gets exactly what readers will get.
        written = await self._write("apply", partial(self._change, change=change), changed=_control([change]))
        return self._parse(Instance, written, change.instance_id)

    async def apply_all(self, changes: Sequence[Change]) -> Sequence[RemudaError | None]:
        def job(connection: sqlite3.Connection) -> list[Conflict | None]:
            conflicts: list[Conflict | None] = []
            for change in changes:
                try:
                    self._change(connection, change)
                except Conflict as conflict:
                    conflicts.append(conflict)
                else:
                    conflicts.append(None)
            return conflicts

        return await self._write("apply_all", job, changed=_control(changes))

    def _change(self, connection: sqlite3.Connection, change: Change) -> str:
        current = self._one(connection, Instance, change.instance_id)
        if not change.condition.is_met_by(current):
            raise Conflict(f"{change.instance_id} is not as {change.entry.transition} expects", current=current)
        return tables.write_instance(connection, change.applied_to(current), change.entry)

    async def get(self, instance_id: str) -> Instance | None:
        return await self._read("get", lambda connection: self._one(connection, Instance, instance_id))

    async def get_many(self, instance_ids: Collection[str]) -> Mapping[str, Instance]:
        return await self._get_many("get_many", Instance, instance_ids)

    async def find(self, states: Collection[State], *, threshold_before: datetime | None = None) -> Sequence[Instance]:
        return await self._search(Instance, "find", partial(tables.in_states, states=states, before=threshold_before))

    async def find_by_provision(self, provision_id: str) -> Sequence[Instance]:
        return await self._search(
            Instance, "find_by_provision", partial(tables.of_provision, provision_id=provision_id)
        )

    async def count_live(self) -> int:
        return await self._read("count_live", tables.count_live)

    async def wait_for_control(
        self,
        instance_id: str,
        since: Instance | None,
        timeout_s: float,
        *,
        urgent: bool = True,  # noqa: ARG002 - polling a local file is cheap, so every wait is urgent
    ) -> Instance | None:
        return await self._wait(Instance, instance_id, since, timeout_s)

    async def history(self, instance_id: str) -> Sequence[HistoryEntry]:
        docs = await self._read("history", partial(tables.history, instance_id=instance_id))
        return self._entries(instance_id, docs)

    async def histories(self, instance_ids: Collection[str]) -> Mapping[str, Sequence[HistoryEntry]]:
        rows = await self._read("histories", partial(tables.histories, instance_ids=instance_ids))
        docs: dict[str, list[str]] = {}
        for instance_id, doc in rows:
            docs.setdefault(instance_id, []).append(doc)
        return {instance_id: self._entries(instance_id, found) for instance_id, found in docs.items()}

    async def forget(self, now: datetime) -> int:
        return await self._write("forget", partial(tables.write_forget, now=now))

    # Reports --------------------------------------------------------------------------------------------------

    async def get_report(self, instance_id: str) -> Report | None:
        return await self._read("get_report", lambda connection: self._one(connection, Report, instance_id))

    async def get_reports(self, instance_ids: Collection[str]) -> Mapping[str, Report]:
        return await self._get_many("get_reports", Report, instance_ids)

    async def troubled_reports(self) -> Sequence[Report]:
        found = await self._search(Report, "troubled_reports", tables.all_reports)
        return [report for report in found if report.troubled]

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
        def job(connection: sqlite3.Connection) -> None:
            current = self._one(connection, Report, instance_id)
            report = current or Report(instance_id=instance_id)
            if not report.may_become(epoch, signal):
                raise Conflict(f"{instance_id} has signalled {report.signal} of epoch {report.epoch}", current=current)
            signalled = report.with_signal(
                epoch=epoch, signal=signal, detail=detail, duration_s=duration_s, failure=failure
            )
            tables.write_report(connection, signalled)

        await self._write("write_signal", job, changed=[(RecordKind.REPORT, instance_id)])

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
        def job(connection: sqlite3.Connection) -> None:
            report = self._one(connection, Report, instance_id) or Report(instance_id=instance_id)
            beaten = report.with_heartbeat(
                at=at, busy=busy, listening=listening, notice=notice, version=version, spent_epoch=spent_epoch
            )
            tables.write_report(connection, beaten)

        await self._write("beat", job, changed=[(RecordKind.REPORT, instance_id)])

    async def wait_for_report(self, instance_id: str, since: Report | None, timeout_s: float) -> Report | None:
        return await self._wait(Report, instance_id, since, timeout_s)

    # Provisions -----------------------------------------------------------------------------------------------

    async def put_provision(self, provision: Provision) -> None:
        def job(connection: sqlite3.Connection) -> None:
            current = self._provision(connection, provision.holder)
            if current is not None:
                raise Conflict(f"provision {provision.provision_id} exists", current=current)
            tables.write_provision(connection, provision)

        await self._write("put_provision", job)

    async def replace_provision(self, before: Provision, after: Provision) -> None:
        await self._write("replace_provision", partial(self._replace_provision, before=before, after=after))

    def _replace_provision(self, connection: sqlite3.Connection, before: Provision, after: Provision) -> None:
        current = self._provision(connection, before.holder)
        if not before.is_as_stored(current):
            raise Conflict(f"provision {before.provision_id} has changed", current=current)
        tables.write_provision(connection, after)

    async def get_provision(self, holder: Holder) -> Provision | None:
        return await self._read("get_provision", lambda connection: self._provision(connection, holder))

    async def provisions_of_run(self, run_id: str) -> Sequence[Provision]:
        docs = await self._read("provisions_of_run", partial(tables.of_run, run_id=run_id))
        return list(self._parse_strictly(Provision, docs).values())

    async def unsettled_provisions(self, deadline_before: datetime) -> Sequence[Provision]:
        return await self._search(
            Provision, "unsettled_provisions", partial(tables.unsettled, deadline_before=deadline_before)
        )

    async def recent_provisions(self, limit: int, *, since: datetime | None = None) -> Sequence[Provision]:
        return await self._search(Provision, "recent_provisions", partial(tables.recent, limit=limit, since=since))

    # Runner sets ----------------------------------------------------------------------------------------------

    async def get_demand(self) -> Mapping[str, DemandRecord]:
        return self._parse_strictly(
            DemandRecord, await self._read("get_demand", partial(tables.singles, prefix=_DEMAND))
        )

    async def put_demand(self, record: DemandRecord, jobs: Collection[JobRecord] = ()) -> None:
        def job(connection: sqlite3.Connection) -> None:
            name = f"{_DEMAND}{record.runner_set}"
            _check_revision(record, tables.single(connection, name))
            _write_jobs(connection, jobs)
            tables.write_single(connection, name, encode(record))

        await self._write("put_demand", job)

    async def delete_demand(self, runner_set: str) -> None:
        await self._write("delete_demand", partial(tables.write_deleted_single, name=f"{_DEMAND}{runner_set}"))

    async def get_lease(self, name: str) -> Lease | None:
        return await self._read("get_lease", partial(self._lease, name=name))

    async def replace_lease(self, name: str, before: Lease | None, after: Lease) -> None:
        def job(connection: sqlite3.Connection) -> None:
            current = self._lease(connection, name)
            if current != before:
                raise Conflict(f"lease {name} was changed by another process", current=current)
            tables.write_single(connection, f"{_LEASE}{name}", encode(after))

        await self._write("replace_lease", job)

    def _lease(self, connection: sqlite3.Connection, name: str) -> Lease | None:
        return self._parse_optional(Lease, tables.single(connection, f"{_LEASE}{name}"), f"lease {name}")

    async def get_jobs(self, job_ids: Collection[str]) -> Mapping[str, JobRecord]:
        return self._parse_strictly(JobRecord, await self._read("get_jobs", partial(tables.jobs, job_ids=job_ids)))

    async def put_jobs(self, jobs: Collection[JobRecord]) -> None:
        if jobs:
            await self._write("put_jobs", partial(_write_jobs, jobs=jobs))

    async def jobs_of_run(self, run_id: str) -> Sequence[JobRecord]:
        return await self._search(JobRecord, "jobs_of_run", partial(tables.jobs_of_run, run_id=run_id))

    async def recent_jobs(self, limit: int, *, since: datetime | None = None) -> Sequence[JobRecord]:
        return await self._search(JobRecord, "recent_jobs", partial(tables.recent_jobs, limit=limit, since=since))

    # Pool configuration and the sweeps' memory ----------------------------------------------------------------

    async def get_config(self) -> PoolConfig | None:
        text = await self._read("get_config", partial(tables.single, name=_CONFIG))
        config = self._parse_optional(PoolConfig, text, _CONFIG)
        if config is not None:
            config.check_record_version()
        return config

    async def put_config(self, config: PoolConfig) -> None:
        def job(connection: sqlite3.Connection) -> None:
            current = self._parse_optional(PoolConfig, tables.single(connection, _CONFIG), _CONFIG)
            if config.revision != (current.revision if current else 0) + 1:
                raise Conflict(f"revision {config.revision} does not follow the stored one", current=current)
            tables.write_single(connection, _CONFIG, encode(config))

        await self._write("put_config", job)

    async def get_sweep_record(self) -> SweepRecord:
        text = await self._read("get_sweep_record", partial(tables.single, name=_SWEEP))
        return self._parse_optional(SweepRecord, text, _SWEEP) or SweepRecord()

    async def put_sweep_record(self, record: SweepRecord) -> None:
        text = encode(record)
        await self._write("put_sweep_record", lambda connection: tables.write_single(connection, _SWEEP, text))

    # Jobs -----------------------------------------------------------------------------------------------------

    async def _read(self, operation: str, job: Callable[[sqlite3.Connection], T]) -> T:
        with self._calls.counted("store", operation):
            return await self._file.run(job)

    async def _write(
        self, operation: str, job: Callable[[sqlite3.Connection], T], *, changed: Collection[Key] = ()
    ) -> T:
        """Run a job in a transaction. `changed` are the records that it writes and others may wait for."""
        with self._calls.counted("store", operation):
            return await self._file.write(job, changed)

    async def _search(
        self, record: type[T], operation: str, job: Callable[[sqlite3.Connection], Sequence[tuple[str, str]]]
    ) -> Sequence[T]:
        texts = await self._read(operation, job)
        records, unreadable = _parse_all(record, texts, self._parsed.get(operation, {}))
        self._malformed |= unreadable
        self._parsed[operation] = {name: (text, records[name]) for name, text in texts if name in records}
        return list(records.values())

    async def _get_many(self, operation: str, record: type[R], instance_ids: Collection[str]) -> Mapping[str, R]:
        docs = await self._read(operation, partial(tables.many, kind=_KINDS[record], instance_ids=instance_ids))
        return self._parse_strictly(record, docs.items())

    async def _wait(self, record: type[R], instance_id: str, since: R | None, timeout_s: float) -> R | None:
        def differs(text: str | None) -> bool:
            try:
                return (None if text is None else decode(record, text, instance_id)) != since
            except ValueError:
                return True  # the caller parses it again and reports the error

        key = (_KINDS[record], instance_id)
        try:
            text = await self._poller.wait(key, differs, timeout_s)
        except TimeoutError:
            text = await self._read("poll", partial(tables.one, kind=key[0], instance_id=instance_id))
        return self._parse_optional(record, text, instance_id)

    # Parsing --------------------------------------------------------------------------------------------------

    def _one(self, connection: sqlite3.Connection, record: type[R], instance_id: str) -> R | None:
        return self._parse_optional(record, tables.one(connection, _KINDS[record], instance_id), instance_id)

    def _provision(self, connection: sqlite3.Connection, holder: Holder) -> Provision | None:
        return self._parse_optional(Provision, tables.provision(connection, holder), holder.provision_id)

    def _parse_optional(self, record: type[T], text: str | None, what: str) -> T | None:
        return None if text is None else self._parse(record, text, what)

    def _parse(self, record: type[T], text: str, what: str) -> T:
        try:
            return decode(record, text, what)
        except ValueError as error:
            raise Unreadable(str(self._file.path), {what: str(error)}) from error

    def _entries(self, instance_id: str, docs: Iterable[str]) -> list[HistoryEntry]:
        entries: list[HistoryEntry] = []
        for doc in docs:
            try:
                entries.append(decode(HistoryEntry, doc))
            except ValueError as error:
                self._malformed[f"history of {instance_id}"] = str(error)
        return entries

    def _parse_strictly(self, record: type[T], texts: Iterable[tuple[str, str]]) -> dict[str, T]:
        records, unreadable = _parse_all(record, texts)
        if unreadable:
            raise Unreadable(str(self._file.path), unreadable, records=records)
        return records


def _write_jobs(connection: sqlite3.Connection, jobs: Collection[JobRecord]) -> None:
    stored = dict(tables.jobs(connection, {job.job_id for job in jobs}))
    for job in jobs:
        _check_revision(job, stored.get(job.job_id))
    tables.write_jobs(connection, jobs)


def _check_revision(record: DemandRecord | JobRecord, text: str | None) -> None:
    """Raise `Conflict` if the record does not follow the stored document. One that cannot be parsed is replaced."""
    try:
        current = None if text is None else decode(type(record), text)
    except ValueError:
        return
    if record.revision != (current.revision if current else 0) + 1:
        raise Conflict(f"revision {record.revision} does not follow the stored one", current=current)


def _control(changes: Iterable[Change]) -> list[Key]:
    return [(RecordKind.CONTROL, change.instance_id) for change in changes]


def _parse_all(
    record: type[T], texts: Iterable[tuple[str, str]], before: Mapping[str, tuple[str, T]] | None = None
) -> tuple[dict[str, T], dict[str, str]]:
    """Return the parsed records and the parse errors, by name. `before` holds parsed texts and records."""
    records: dict[str, T] = {}
    unreadable: dict[str, str] = {}
    known = before or {}
    for name, text in texts:
        past = known.get(name)
        try:
            records[name] = past[1] if past is not None and past[0] == text else decode(record, text, name)
        except ValueError as error:
            unreadable[name] = str(error)
    return records, unreadable
