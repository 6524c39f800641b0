"""The instance store in one DynamoDB table, shared by any number of processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from remuda.adapters.aws.calls import chunks, gather
from remuda.adapters.aws.dynamodb import expressions, items, revisions
from remuda.adapters.aws.dynamodb.changes import ChangeWriter, HistoryWriter
from remuda.adapters.aws.dynamodb.items import Item, ItemKeys, record_of
from remuda.adapters.aws.dynamodb.keys import FixedKeys, InstanceKeys, StoredKeys
from remuda.adapters.aws.dynamodb.polling import ItemPoller
from remuda.adapters.aws.dynamodb.table import (
    POLL,
    WRITE_BATCH,
    ConditionFailed,
    Table,
    key_of,
)
from remuda.domain import timestamps
from remuda.domain.demand import DemandRecord, JobRecord, Lease
from remuda.domain.errors import Conflict, RemudaError, Unreadable
from remuda.domain.holder import Holder
from remuda.domain.instance import LIVE, HistoryEntry, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.signals import FailureKind, Report, Signal
from remuda.domain.sweep_record import SweepRecord
from remuda.domain.transitions import Change
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids
from remuda.ports.event_log import EventLog, SilentEventLog
from remuda.ports.poll_intervals import PollInterval, PollIntervals
from remuda.ports.store import HISTORY_LIMIT

if TYPE_CHECKING:
    from types_aiobotocore_dynamodb import DynamoDBClient

    from remuda.adapters.aws.dynamodb.schema import TableInspection

#: Concurrent history queries.
CONCURRENT_HISTORIES = 64
#: Part of the keys of writes that are only tried.
TRIED = "tried"
#: Unreadable reports that one call of `forget` deletes.
MAX_DELETED = 100

T = TypeVar("T")
R = TypeVar("R", Instance, Report)


class DynamoInstanceStore:
    def __init__(
        self,
        *,
        client: DynamoDBClient,
        table: str,
        clock: Clock,
        ids: Ids,
        calls: CallCounter,
        key_prefix: str = "",
        newest_prefix: Callable[[], Awaitable[str]] | None = None,
        event_log: EventLog | None = None,
    ) -> None:
        """An agent passes its `key_prefix`. The control plane passes `newest_prefix`, which `prepare` calls and whose
        result is stored in the table. Failures that do not fail an operation go to `event_log`: of history entries, and
        of the expiry of reports.
        """
        self._table = Table(client=client, name=table, clock=clock, ids=ids, calls=calls)
        self._keys: InstanceKeys = (
            FixedKeys(key_prefix) if newest_prefix is None else StoredKeys(table=self._table, newest=newest_prefix)
        )
        self._event_log = event_log or SilentEventLog()
        self._history = HistoryWriter(table=self._table, writer_id=ids.new(""), event_log=self._event_log)
        self._poller: ItemPoller[tuple[str, str], Item | None] = ItemPoller(read=self._read, clock=clock, ids=ids)
        self._intervals = PollIntervals(clock=clock)
        self._changes = ChangeWriter(
            table=self._table,
            keys=self._keys,
            history=self._history,
            event_log=self._event_log,
            on_write=self._poller.wake,
            parse=self._parse_instance,
        )
        self._clock = clock
        self._malformed: dict[str, str] = {}
        #: Partition keys of the reports that could not be parsed, with the reason.
        self._malformed_reports: dict[str, str] = {}

    async def prepare(self) -> Sequence[str]:
        from remuda.adapters.aws.dynamodb import schema  # noqa: PLC0415 - a provision does not need it

        await self._keys.fetch()
        created = await schema.prepare(self._table)
        return [*created, *await self._keys.store()]

    async def inspect(self) -> TableInspection:
        from remuda.adapters.aws.dynamodb import schema  # noqa: PLC0415 - see above

        return await schema.inspect(self._table)

    async def try_writes(self) -> None:
        """Make the writes of a provision under conditions that are never met, so that nothing changes.

        Raises if the credentials do not permit one of them.
        """
        for prefix in (items.CONTROL_PREFIX, items.REPORT_PREFIX):
            with suppress(ConditionFailed):
                await self._table.update_unread(items.key(f"{prefix}{TRIED}", TRIED), expressions.never_updated())
        with suppress(ConditionFailed):
            await self._table.put(items.key(items.provisions_pk(TRIED), TRIED), expressions.never_put())

    async def close(self) -> None:
        """Write pending history. The client belongs to the caller, who closes it afterwards or uses the store again."""
        await self._poller.close()
        await self._history.close()

    @property
    def malformed_records(self) -> Mapping[str, str]:
        return dict(self._malformed)

    # Control records ------------------------------------------------------------------------------------------

    async def apply(self, change: Change) -> Instance:
        return await self._changes.apply(change)

    async def apply_all(self, changes: Sequence[Change]) -> Sequence[RemudaError | None]:
        return await self._changes.apply_all(changes)

    async def get(self, instance_id: str) -> Instance | None:
        key = (await self._keys_of(instance_id)).control(instance_id)
        return self._parsed(Instance, await self._table.get(key), instance_id)

    async def get_many(self, instance_ids: Collection[str]) -> Mapping[str, Instance]:
        return await self._get_many(Instance, ItemKeys.control, instance_ids)

    async def find(self, states: Collection[State], *, threshold_before: datetime | None = None) -> Sequence[Instance]:
        searches: list[Awaitable[list[Item]]] = []
        live = sorted(state.value for state in states if state in LIVE)
        if live:
            searches += [self._find_live(number, live, threshold_before) for number in range(items.SHARDS)]
        if State.TERMINATED in states:
            searches.append(self._table.scan(expressions.terminated_scan(threshold_before)))
        found = self._parse_readable(Instance, (item for part in await gather(searches) for item in part))
        return sorted(found, key=lambda record: (record.threshold, record.instance_id))

    async def _find_live(self, number: int, states: list[str], before: datetime | None) -> list[Item]:
        up_to = None if before is None else (items.LIVE_SK, timestamps.to_text(before))
        expression, condition = expressions.key_condition(items.LIVE_PK, items.shard(number), up_to=up_to)
        filter_expression = "" if len(states) == len(LIVE) else expressions.one_of(expression, "state", states)
        arguments = expressions.query_arguments(expression, condition, filter_expression)
        return await self._table.query({"IndexName": items.LIVE_INDEX, **arguments})

    async def find_by_provision(self, provision_id: str) -> Sequence[Instance]:
        if not provision_id:
            return []
        partition = items.provision_partition(provision_id)
        arguments = expressions.query_arguments(*expressions.key_condition(items.PROVISION_PK, partition))
        return self._parse_readable(
            Instance, await self._table.query({"IndexName": items.PROVISION_INDEX, **arguments})
        )

    async def count_live(self) -> int:
        async def count(number: int) -> int:
            expression, condition = expressions.key_condition(items.LIVE_PK, items.shard(number))
            keys = {"ProjectionExpression": expression.name(items.PK)}
            arguments = expressions.query_arguments(expression, condition)
            found = await self._table.query({"IndexName": items.LIVE_INDEX, **keys, **arguments})
            return sum(items.is_control(item) for item in found)

        return sum(await gather(count(number) for number in range(items.SHARDS)))

    async def wait_for_control(
        self, instance_id: str, since: Instance | None, timeout_s: float, *, urgent: bool = True
    ) -> Instance | None:
        interval = self._intervals.for_control(instance_id, since, urgent=urgent)
        key = (await self._keys_of(instance_id)).control(instance_id)
        return await self._wait(Instance, key, since, interval, timeout_s)

    async def history(self, instance_id: str) -> Sequence[HistoryEntry]:
        await self._history.flush()
        arguments = expressions.query_arguments(*expressions.key_condition(items.PK, items.history_pk(instance_id)))
        newest = await self._table.query_first(
            {"ConsistentRead": True, "ScanIndexForward": False, **arguments}, HISTORY_LIMIT
        )
        entries: list[HistoryEntry] = []
        for item in reversed(newest):
            try:
                entries.append(record_of(HistoryEntry, item))
            except ValueError as error:
                self._malformed[f"history of {instance_id}"] = str(error)
        return entries

    async def histories(self, instance_ids: Collection[str]) -> Mapping[str, Sequence[HistoryEntry]]:
        found: dict[str, Sequence[HistoryEntry]] = {}
        for part in chunks(sorted(set(instance_ids)), CONCURRENT_HISTORIES):
            found |= zip(part, await gather(map(self.history, part)), strict=True)
        return {instance_id: entries for instance_id, entries in found.items() if entries}

    async def forget(self, now: datetime) -> int:  # noqa: ARG002 - DynamoDB expires items by their TTL
        """Delete the unreadable reports that this process has read, with other items that their machines wrote."""
        return sum([await self._delete_report(pk) for pk in list(self._malformed_reports)[:MAX_DELETED]])

    async def _delete_report(self, pk: str) -> int:
        arguments = expressions.query_arguments(*expressions.key_condition(items.PK, pk))
        found = await self._table.query_first({"ConsistentRead": True, **arguments}, WRITE_BATCH)
        # Before other items of the machine, which may be more than one batch.
        keys = [items.key(pk, items.REPORT), *(items.key(*key_of(item)) for item in found)]
        keys = list({key_of(key): key for key in keys}.values())[:WRITE_BATCH]
        await self._table.delete_all(keys)
        self._event_log.record("report-deleted", self._malformed_reports.pop(pk), key=pk, items=len(keys))
        self._malformed.pop(f"{pk} {items.REPORT}", None)
        return len(keys)

    # Reports --------------------------------------------------------------------------------------------------

    async def get_report(self, instance_id: str) -> Report | None:
        key = (await self._keys_of(instance_id)).report(instance_id)
        return self._parsed(Report, await self._table.get(key), instance_id)

    async def get_reports(self, instance_ids: Collection[str]) -> Mapping[str, Report]:
        return await self._get_many(Report, ItemKeys.report, instance_ids)

    async def troubled_reports(self) -> Sequence[Report]:
        async def search(number: int) -> list[Item]:
            expression, condition = expressions.key_condition(items.TROUBLED_PK, items.troubled(number))
            # Other items that a machine adds to the index are not read.
            condition += f" AND {expression.name(items.SK)} = {expression.value(items.REPORT)}"
            arguments = expressions.query_arguments(expression, condition)
            return await self._table.query({"IndexName": items.TROUBLED_INDEX, **arguments})

        parts = await gather(search(number) for number in range(items.SHARDS))
        return self._parse_readable(Report, (item for part in parts for item in part))

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
        arguments = expressions.signal_arguments(
            Report(instance_id=instance_id).with_signal(
                epoch=epoch, signal=signal, detail=detail, duration_s=duration_s, failure=failure
            ),
            now=self._clock.now(),
        )
        try:
            await self._write_report(instance_id, arguments)
        except ConditionFailed:
            stored = await self._table.get((await self._keys_of(instance_id)).report(instance_id))
            current = self._parsed(Report, stored, instance_id)
            raise Conflict(f"{instance_id} already has a later signal than {signal}", current=current) from None

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
        fields = {
            "beat_at": at,
            "busy": busy,
            "listening": listening,
            "spent_epoch": spent_epoch,
            "notice": notice,
            "version": version,
        }
        await self._write_report(instance_id, expressions.beat_arguments(instance_id, fields, now=self._clock.now()))

    async def _write_report(self, instance_id: str, arguments: Mapping[str, Any]) -> None:
        key = (await self._keys_of(instance_id)).report(instance_id)
        await self._table.update_unread(key, arguments)
        self._poller.wake(key_of(key))

    async def wait_for_report(self, instance_id: str, since: Report | None, timeout_s: float) -> Report | None:
        interval = self._intervals.for_report(since)
        key = (await self._keys_of(instance_id)).report(instance_id)
        return await self._wait(Report, key, since, interval, timeout_s)

    # Provisions -----------------------------------------------------------------------------------------------

    async def put_provision(self, provision: Provision) -> None:
        message = f"provision {provision.provision_id} already exists"
        await self._put(Provision, items.provision_item(provision), expressions.if_absent(), message)

    async def replace_provision(self, before: Provision, after: Provision) -> None:
        message = f"provision {before.provision_id} was changed by another process"
        await self._put(Provision, items.provision_item(after), expressions.if_stored_is(before), message)

    async def get_provision(self, holder: Holder) -> Provision | None:
        item = await self._table.get(items.provision_key(holder))
        return self._parsed(Provision, item, holder.provision_id)

    async def provisions_of_run(self, run_id: str) -> Sequence[Provision]:
        arguments = expressions.query_arguments(*expressions.key_condition(items.PK, items.provisions_pk(run_id)))
        found = await self._table.query({"ConsistentRead": True, **arguments})
        provisions = self._parse_all(Provision, ((key_of(item)[1], item) for item in found))
        return sorted(provisions.values(), key=lambda each: (each.created_at, each.provision_id))

    async def unsettled_provisions(self, deadline_before: datetime) -> Sequence[Provision]:
        up_to = (items.LIVE_SK, timestamps.to_text(deadline_before))
        arguments = expressions.query_arguments(*expressions.key_condition(items.LIVE_PK, items.UNSETTLED, up_to=up_to))
        return self._parse_readable(Provision, await self._table.query({"IndexName": items.LIVE_INDEX, **arguments}))

    async def recent_provisions(self, limit: int, *, since: datetime | None = None) -> Sequence[Provision]:
        return await self._newest(Provision, items.PROVISIONS, limit, since)

    # Runner sets ----------------------------------------------------------------------------------------------

    async def get_demand(self) -> Mapping[str, DemandRecord]:
        arguments = expressions.query_arguments(*expressions.key_condition(items.PK, items.DEMAND))
        found = await self._table.query({"ConsistentRead": True, **arguments})
        return self._parse_all(DemandRecord, ((key_of(item)[1], item) for item in found))

    async def put_demand(self, record: DemandRecord, jobs: Collection[JobRecord] = ()) -> None:
        await revisions.put_jobs(self._table, jobs, record)

    async def delete_demand(self, runner_set: str) -> None:
        await self._table.delete_all([items.demand_key(runner_set)])

    async def get_lease(self, name: str) -> Lease | None:
        return self._parsed(Lease, await self._table.get(items.lease_key(name)), f"lease {name}")

    async def replace_lease(self, name: str, before: Lease | None, after: Lease) -> None:
        item = items.lease_item(name, after)
        await self._put(Lease, item, expressions.if_lease_is(before), f"lease {name} was changed by another process")

    async def get_jobs(self, job_ids: Collection[str]) -> Mapping[str, JobRecord]:
        wanted = sorted(set(job_ids))
        found = await self._table.get_all([items.job_key(job_id) for job_id in wanted]) if wanted else []
        names = ((key_of(item)[0].removeprefix(items.JOB_PREFIX), item) for item in found)
        return self._parse_all(JobRecord, names)

    async def put_jobs(self, jobs: Collection[JobRecord]) -> None:
        await revisions.put_jobs(self._table, jobs)

    async def jobs_of_run(self, run_id: str) -> Sequence[JobRecord]:
        partition = items.jobs_of_run_partition(run_id)
        arguments = expressions.query_arguments(*expressions.key_condition(items.LIVE_PK, partition))
        found = await self._table.query({"IndexName": items.LIVE_INDEX, **arguments})
        return sorted(self._parse_readable(JobRecord, found), key=lambda each: (each.seen_at, each.job_id))

    async def recent_jobs(self, limit: int, *, since: datetime | None = None) -> Sequence[JobRecord]:
        return await self._newest(JobRecord, items.JOBS, limit, since)

    async def _newest(self, kind: type[T], partition: str, limit: int, since: datetime | None) -> list[T]:
        """The newest records of a partition of the provision index, which sorts them by time."""
        from_key = None if since is None else (items.PROVISION_SK, timestamps.to_text(since))
        arguments = expressions.query_arguments(
            *expressions.key_condition(items.PROVISION_PK, partition, since=from_key)
        )
        newest = await self._table.query_first(
            {"IndexName": items.PROVISION_INDEX, "ScanIndexForward": False, **arguments},
            limit,
            # Unreadable records do not count towards the limit.
            lambda item: bool(self._parse_readable(kind, [item])),
        )
        return self._parse_readable(kind, newest)

    # Pool configuration and the record of the last sweep -------------------------------------------------------

    async def get_config(self) -> PoolConfig | None:
        config = self._parsed(PoolConfig, await self._table.get(items.CONFIG), "the configuration")
        if config is not None:
            config.check_record_version()
            self._use_retention(config)
        return config

    async def put_config(self, config: PoolConfig) -> None:
        condition = expressions.if_revision_is(config.revision - 1)
        message = f"configuration revision {config.revision} does not follow the stored revision"
        await self._put(PoolConfig, items.document_item(items.CONFIG, config), condition, message)
        self._use_retention(config)

    def _use_retention(self, config: PoolConfig) -> None:
        """Keep history entries as long as the records of terminated instances."""
        self._history.retention = timedelta(seconds=config.lifetimes.keep_records_s)

    async def get_sweep_record(self) -> SweepRecord:
        item = await self._table.get(items.SWEEP)
        return self._parsed(SweepRecord, item, "the record of the last sweep") or SweepRecord()

    async def put_sweep_record(self, record: SweepRecord) -> None:
        await self._table.put(items.document_item(items.SWEEP, record), {})

    # Internals ------------------------------------------------------------------------------------------------

    async def _keys_of(self, instance_id: str) -> ItemKeys:
        return (await self._keys.of([instance_id]))[instance_id]

    async def _put(self, kind: type[Any], item: Item, condition: Mapping[str, Any], message: str) -> None:
        try:
            await self._table.put(item, condition)
        except ConditionFailed as failed:
            raise Conflict(message, current=self._parsed(kind, failed.item, message)) from None

    async def _get_many(
        self, kind: type[R], key: Callable[[ItemKeys, str], Item], instance_ids: Collection[str]
    ) -> Mapping[str, R]:
        if not instance_ids:
            return {}
        keys = await self._keys.of(sorted(set(instance_ids)))
        places = {instance_id: key_of(key(keys[instance_id], instance_id)) for instance_id in keys}
        found = await self._table.get_all([items.key(*place) for place in places.values()])
        records = {key_of(item): item for item in found}
        return self._parse_all(kind, ((name, records[place]) for name, place in places.items() if place in records))

    async def _wait(
        self, kind: type[R], key: Item, since: R | None, interval: PollInterval, timeout_s: float
    ) -> R | None:
        def differs(item: Item | None) -> bool:
            try:
                return (None if item is None else record_of(kind, item)) != since
            except ValueError:
                return True  # parsed again below, which raises the error

        item: Item | None
        try:
            item = await self._poller.wait(key_of(key), differs, interval=interval, timeout_s=timeout_s)
        except TimeoutError:
            item = await self._table.get(key, prefix=POLL)
        return self._parsed(kind, item, key_of(key)[0])

    async def _read(self, keys: Collection[tuple[str, str]]) -> Mapping[tuple[str, str], Item | None]:
        found = await self._table.get_all([items.key(*key) for key in sorted(keys)], prefix=POLL)
        return dict.fromkeys(keys) | {key_of(item): item for item in found}

    # Parsing --------------------------------------------------------------------------------------------------

    def _parse_instance(self, item: Item, instance_id: str) -> Instance:
        return self._parse(Instance, item, instance_id)

    def _parsed(self, kind: type[T], item: Item | None, what: str) -> T | None:
        return None if item is None else self._parse(kind, item, what)

    def _parse(self, kind: type[T], item: Item, what: str) -> T:
        try:
            return record_of(kind, item)
        except ValueError as error:
            raise Unreadable(self._table_name, {what: str(error)}) from error

    def _parse_all(self, kind: type[T], found: Iterable[tuple[str, Item]]) -> dict[str, T]:
        records, unreadable = self._collect(kind, dict(found))
        if unreadable:
            raise Unreadable(self._table_name, unreadable, records=records)
        return records

    def _parse_readable(self, kind: type[T], found: Iterable[Item]) -> list[T]:
        records, unreadable = self._collect(kind, {" ".join(key_of(item)): item for item in found})
        self._malformed |= unreadable
        return list(records.values())

    def _collect(self, kind: type[T], found: Mapping[str, Item]) -> tuple[dict[str, T], dict[str, str]]:
        records, unreadable = items.parse_all(kind, found.items())
        if kind is Report:
            self._malformed_reports |= {key_of(found[name])[0]: why for name, why in unreadable.items()}
        return records, unreadable

    @property
    def _table_name(self) -> str:
        return f"table {self._table.name}"
