"""The store in one DynamoDB table, for as many processes as there are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from remuda.adapters.aws.dynamodb import expressions, items, schema
from remuda.adapters.aws.dynamodb.history import HistoryWriter
from remuda.adapters.aws.dynamodb.items import Item, Keys, record_of
from remuda.adapters.aws.dynamodb.keys import FixedKeys, InstanceKeys, SharedKeys
from remuda.adapters.aws.dynamodb.poll_intervals import Paces
from remuda.adapters.aws.dynamodb.table import POLL, TRANSACTION, Cancelled, Refused, Table, key_of
from remuda.adapters.aws.dynamodb.watch import Pace, Watch
from remuda.adapters.aws.errors import PART_BLAMELESS, PART_CONDITION_FAILED
from remuda.adapters.aws.gather import chunks, gathered
from remuda.domain import timestamps
from remuda.domain.errors import Conflict, RemudaError, Unavailable, Unreadable
from remuda.domain.instance import LIVE, HistoryEntry, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.signals import FailureKind, Report, Signal
from remuda.domain.transitions import Change
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids
from remuda.ports.event_log import EventLog, SilentEventLog
from remuda.ports.store import HISTORY_LIMIT

if TYPE_CHECKING:
    from types_aiobotocore_dynamodb import DynamoDBClient

#: How many histories are read at a time: a query each.
HISTORIES_AT_ONCE = 64
#: How many changes share a transaction: each may end a report, too.
TOGETHER = TRANSACTION // 2
#: How often a transaction is tried: the second time without those who were to blame for the first refusal.
TOGETHER_TRIES = 2
#: How many of the others are written at a time: a call each.
ALONE_AT_ONCE = 64

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
        """An agent knows its `key_prefix`. The control plane does not: `newest_prefix` asks AWS, when the table is
        prepared; otherwise what was noted then is read. The event_log hears of what fails without failing an operation:
        history, and when a report goes.
        """
        self._table = Table(client=client, name=table, clock=clock, ids=ids, calls=calls)
        self._keys: InstanceKeys = (
            FixedKeys(key_prefix) if newest_prefix is None else SharedKeys(table=self._table, newest=newest_prefix)
        )
        self._event_log = event_log or SilentEventLog()
        self._history = HistoryWriter(table=self._table, writer=ids.new(""), event_log=self._event_log)
        #: Changes whose answers were lost, by instance: they may have been made.
        self._unsure: dict[str, Change] = {}
        self._alone = asyncio.Semaphore(ALONE_AT_ONCE)
        self._watch: Watch[tuple[str, str], Item | None] = Watch(look=self._look, clock=clock, ids=ids)
        self._paces = Paces(clock=clock)
        self._clock = clock
        self._malformed: dict[str, str] = {}

    async def prepare(self) -> Sequence[str]:
        await self._keys.ask()
        created = await schema.prepare(self._table)
        return [*created, *await self._keys.note()]

    async def inspect(self) -> schema.Inspection:
        return await schema.inspect(self._table)

    async def close(self) -> None:
        """The client is its owner's to close, afterwards."""
        await self._watch.close()
        await self._history.close()

    @property
    def malformed_records(self) -> Mapping[str, str]:
        return dict(self._malformed)

    # Control records ------------------------------------------------------------------------------------------

    async def apply(self, change: Change) -> Instance:
        key = (await self._keys_of(change.instance_id)).control(change.instance_id)
        arguments = expressions.change_arguments(change)
        try:
            item = await self._table.update(key, arguments)
        except Refused as refused:
            current = self._parsed(Instance, refused.item, change.instance_id)
            self._settle_unsure(change, current, repeated=refused.repeated)
            message = f"{change.instance_id} is not as {change.entry.transition} expects"
            raise Conflict(message, current=current) from None
        except Unavailable:
            self._unsure[change.instance_id] = change
            raise
        self._unsure.pop(change.instance_id, None)
        self._history.add(change.instance_id, change.entry)
        self._watch.nudge(key_of(key))
        if ends_at := _report_ends_at(change):
            await self._end_report(change.instance_id, ends_at)
        return self._there(Instance, item, change.instance_id)

    async def apply_all(self, changes: Sequence[Change]) -> Sequence[RemudaError | None]:
        if not changes:
            return []
        keys = await self._keys.of([change.instance_id for change in changes])
        done: dict[str, RemudaError | None] = {}
        for part in await gathered(self._apply_together(part, keys) for part in chunks(changes, TOGETHER)):
            done |= part
        return [done[change.instance_id] for change in changes]

    async def _apply_together(
        self,
        changes: Sequence[Change],
        keys: Mapping[str, Keys],
        *,
        unreported: frozenset[str] = frozenset(),
        tries: int = TOGETHER_TRIES,
    ) -> Mapping[str, RemudaError | None]:
        """In one transaction. Where that is refused, those whose records were to blame one by one, which tells what
        is there instead, and the others together once more, without the ends of reports that are not there.
        """
        if len(changes) == 1 or not tries:
            return dict(await gathered(map(self._apply_alone, changes)))
        records = [change.instance_id for change in changes]
        ends = {change.instance_id: at for change in changes if (at := _report_ends_at(change))}
        reports = [name for name in ends if name not in unreported]
        updates: list[tuple[Item, Mapping[str, Any]]] = [
            *(
                (keys[each.instance_id].control(each.instance_id), expressions.change_arguments(each))
                for each in changes
            ),
            *((keys[name].report(name), expressions.report_end(ends[name])) for name in reports),
        ]
        try:
            await self._table.update_together(updates)
        except Cancelled as refused:
            if refused.repeated:
                self._are_unsure(changes)
            alone, silent = _blamed(refused.blames, records, reports)
            rest = [change for change in changes if change.instance_id not in alone]
            parts = [self._apply_together([change], keys) for change in changes if change.instance_id in alone]
            if rest:
                parts.append(self._apply_together(rest, keys, unreported=unreported | silent, tries=tries - 1))
            return {name: failure for part in await gathered(parts) for name, failure in part.items()}
        except RemudaError as error:
            if isinstance(error, Unavailable):
                self._are_unsure(changes)
            return dict.fromkeys(records, error)
        for change in changes:
            self._unsure.pop(change.instance_id, None)
            self._history.add(change.instance_id, change.entry)
            self._watch.nudge(key_of(keys[change.instance_id].control(change.instance_id)))
        return dict.fromkeys(records)

    async def _apply_alone(self, change: Change) -> tuple[str, RemudaError | None]:
        async with self._alone:
            try:
                await self.apply(change)
            except RemudaError as error:
                return change.instance_id, error
        return change.instance_id, None

    def _are_unsure(self, changes: Iterable[Change]) -> None:
        self._unsure |= {change.instance_id: change for change in changes}

    def _settle_unsure(self, change: Change, current: Instance | None, *, repeated: bool) -> None:
        """A refusal that shows the very change whose answer was lost: it was made, and has its line in the history."""
        unsure = repeated or self._unsure.get(change.instance_id) == change
        self._unsure.pop(change.instance_id, None)
        if unsure and current is not None and replace(current, **change.sets) == current:
            self._history.add(change.instance_id, change.entry)

    async def _end_report(self, instance_id: str, ends_at: datetime) -> None:
        """The record is written: what goes wrong here leaves the report to its own end."""
        try:
            key = (await self._keys_of(instance_id)).report(instance_id)
            await self._table.update(key, expressions.report_end(ends_at))
        except Refused:
            return  # there is none
        except RemudaError as error:
            self._event_log.record("report-kept", error.message, instance_id=instance_id)

    async def get(self, instance_id: str) -> Instance | None:
        key = (await self._keys_of(instance_id)).control(instance_id)
        return self._parsed(Instance, await self._table.get(key), instance_id)

    async def get_many(self, instance_ids: Collection[str]) -> Mapping[str, Instance]:
        return await self._get_many(Instance, Keys.control, instance_ids)

    async def find(self, states: Collection[State], *, threshold_before: datetime | None = None) -> Sequence[Instance]:
        searches: list[Awaitable[list[Item]]] = []
        live = sorted(state.value for state in states if state in LIVE)
        if live:
            searches += [self._find_live(number, live, threshold_before) for number in range(items.SHARDS)]
        if State.TERMINATED in states:
            searches.append(self._table.scan(expressions.terminated_scan(threshold_before)))
        found = self._readable(Instance, (item for part in await gathered(searches) for item in part))
        return sorted(found, key=lambda record: (record.threshold, record.instance_id))

    async def _find_live(self, number: int, states: list[str], before: datetime | None) -> list[Item]:
        up_to = None if before is None else (items.LIVE_SK, timestamps.to_text(before))
        expression, condition = expressions.partition(items.LIVE_PK, items.shard(number), up_to=up_to)
        filtered = "" if len(states) == len(LIVE) else expressions.one_of(expression, "state", states)
        arguments = expressions.query_arguments(expression, condition, filtered)
        return await self._table.query({"IndexName": items.LIVE_INDEX, **arguments})

    async def find_by_provision(self, provision_id: str) -> Sequence[Instance]:
        if not provision_id:
            return []
        partition = items.provision_partition(provision_id)
        arguments = expressions.query_arguments(*expressions.partition(items.PROVISION_PK, partition))
        return self._readable(Instance, await self._table.query({"IndexName": items.PROVISION_INDEX, **arguments}))

    async def count_live(self) -> int:
        async def count(number: int) -> int:
            expression, condition = expressions.partition(items.LIVE_PK, items.shard(number))
            keys = {"ProjectionExpression": expression.name(items.PK)}
            arguments = expressions.query_arguments(expression, condition)
            found = await self._table.query({"IndexName": items.LIVE_INDEX, **keys, **arguments})
            return sum(items.is_control(item) for item in found)

        return sum(await gathered(count(number) for number in range(items.SHARDS)))

    async def wait_for_control(
        self, instance_id: str, since: Instance | None, timeout_s: float, *, urgent: bool = True
    ) -> Instance | None:
        pace = self._paces.for_control(instance_id, since, urgent=urgent)
        key = (await self._keys_of(instance_id)).control(instance_id)
        return await self._wait(Instance, key, since, pace, timeout_s)

    async def history(self, instance_id: str) -> Sequence[HistoryEntry]:
        await self._history.flush()
        arguments = expressions.query_arguments(*expressions.partition(items.PK, items.history_pk(instance_id)))
        newest = await self._table.query_first(
            {"ConsistentRead": True, "ScanIndexForward": False, **arguments}, HISTORY_LIMIT
        )
        lines: list[HistoryEntry] = []
        for item in reversed(newest):
            try:
                lines.append(record_of(HistoryEntry, item))
            except ValueError as error:
                self._malformed[f"history of {instance_id}"] = str(error)
        return lines

    async def histories(self, instance_ids: Collection[str]) -> Mapping[str, Sequence[HistoryEntry]]:
        found: dict[str, Sequence[HistoryEntry]] = {}
        for part in chunks(sorted(set(instance_ids)), HISTORIES_AT_ONCE):
            found |= zip(part, await gathered(map(self.history, part)), strict=True)
        return {instance_id: entries for instance_id, entries in found.items() if entries}

    async def forget(self, now: datetime) -> int:  # noqa: ARG002 - the table does it, in its own time
        return 0

    # Reports --------------------------------------------------------------------------------------------------

    async def get_report(self, instance_id: str) -> Report | None:
        key = (await self._keys_of(instance_id)).report(instance_id)
        return self._parsed(Report, await self._table.get(key), instance_id)

    async def get_reports(self, instance_ids: Collection[str]) -> Mapping[str, Report]:
        return await self._get_many(Report, Keys.report, instance_ids)

    async def troubled_reports(self) -> Sequence[Report]:
        async def search(number: int) -> list[Item]:
            arguments = expressions.query_arguments(*expressions.partition(items.LIVE_PK, items.troubled(number)))
            return await self._table.query({"IndexName": items.LIVE_INDEX, **arguments})

        parts = await gathered(search(number) for number in range(items.SHARDS))
        return self._readable(Report, (item for part in parts for item in part))

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
        except Refused as refused:
            current = self._parsed(Report, refused.item, instance_id)
            raise Conflict(f"{instance_id} has signalled something later than {signal}", current=current) from None

    async def beat(
        self, instance_id: str, *, at: datetime, busy: bool, listening: bool, notice: str, version: str
    ) -> None:
        fields = {"beat_at": at, "busy": busy, "listening": listening, "notice": notice, "version": version}
        await self._write_report(instance_id, expressions.beat_arguments(instance_id, fields, now=self._clock.now()))

    async def _write_report(self, instance_id: str, arguments: Mapping[str, Any]) -> None:
        key = (await self._keys_of(instance_id)).report(instance_id)
        await self._table.update(key, arguments)
        self._watch.nudge(key_of(key))

    async def wait_for_report(self, instance_id: str, since: Report | None, timeout_s: float) -> Report | None:
        pace = self._paces.for_report(since)
        key = (await self._keys_of(instance_id)).report(instance_id)
        return await self._wait(Report, key, since, pace, timeout_s)

    # Provisions -----------------------------------------------------------------------------------------------

    async def put_provision(self, provision: Provision) -> None:
        message = f"provision {provision.provision_id} exists"
        await self._put(Provision, items.provision_item(provision), expressions.absent(), message)

    async def replace_provision(self, before: Provision, after: Provision) -> None:
        message = f"provision {before.provision_id} has moved on"
        await self._put(Provision, items.provision_item(after), expressions.as_stored(before), message)

    async def get_provision(self, run_id: str, provision_id: str) -> Provision | None:
        item = await self._table.get(items.key(items.run_pk(run_id), provision_id))
        return self._parsed(Provision, item, provision_id)

    async def provisions_of_run(self, run_id: str) -> Sequence[Provision]:
        arguments = expressions.query_arguments(*expressions.partition(items.PK, items.run_pk(run_id)))
        found = await self._table.query({"ConsistentRead": True, **arguments})
        provisions = self._all(Provision, ((key_of(item)[1], item) for item in found))
        return sorted(provisions.values(), key=lambda each: (each.created_at, each.provision_id))

    async def unsettled_provisions(self, deadline_before: datetime) -> Sequence[Provision]:
        up_to = (items.LIVE_SK, timestamps.to_text(deadline_before))
        arguments = expressions.query_arguments(*expressions.partition(items.LIVE_PK, items.UNSETTLED, up_to=up_to))
        return self._readable(Provision, await self._table.query({"IndexName": items.LIVE_INDEX, **arguments}))

    async def recent_provisions(self, limit: int, *, since: datetime | None = None) -> Sequence[Provision]:
        begun = None if since is None else (items.PROVISION_SK, timestamps.to_text(since))
        arguments = expressions.query_arguments(
            *expressions.partition(items.PROVISION_PK, items.PROVISIONS, since=begun)
        )
        newest = await self._table.query_first(
            {"IndexName": items.PROVISION_INDEX, "ScanIndexForward": False, **arguments},
            limit,
            # One that cannot be read takes no other's place.
            lambda item: bool(self._readable(Provision, [item])),
        )
        return self._readable(Provision, newest)

    # Pool configuration and the sweeps' memory ----------------------------------------------------------------

    async def get_config(self) -> PoolConfig | None:
        config = self._parsed(PoolConfig, await self._table.get(items.CONFIG), "the configuration")
        if config is not None:
            self._learn(config)
        return config

    async def put_config(self, config: PoolConfig) -> None:
        first = config.revision == 1
        condition = expressions.absent() if first else expressions.revision_is(config.revision - 1)
        message = f"revision {config.revision} does not follow the stored one"
        await self._put(PoolConfig, items.document_item(items.CONFIG, config), condition, message)
        self._learn(config)

    def _learn(self, config: PoolConfig) -> None:
        """History is kept as long as the records of ended instances: this is where that is said."""
        self._history.kept = timedelta(seconds=config.lifetimes.keep_records_s)

    async def get_sightings(self) -> Mapping[str, datetime]:
        item = await self._table.get(items.SIGHTINGS)
        return {} if item is None else self._checked(lambda: items.times_of(item), "the sightings")

    async def put_sightings(self, sightings: Mapping[str, datetime]) -> None:
        await self._table.put(items.sightings_item(sightings), {})

    # Inside ---------------------------------------------------------------------------------------------------

    async def _keys_of(self, instance_id: str) -> Keys:
        return (await self._keys.of([instance_id]))[instance_id]

    async def _put(self, kind: type[Any], item: Item, condition: Mapping[str, Any], message: str) -> None:
        try:
            await self._table.put(item, condition)
        except Refused as refused:
            raise Conflict(message, current=self._parsed(kind, refused.item, message)) from None

    async def _get_many(
        self, kind: type[R], key: Callable[[Keys, str], Item], instance_ids: Collection[str]
    ) -> Mapping[str, R]:
        if not instance_ids:
            return {}
        keys = await self._keys.of(sorted(set(instance_ids)))
        places = {instance_id: key_of(key(keys[instance_id], instance_id)) for instance_id in keys}
        found = await self._table.get_all([items.key(*place) for place in places.values()])
        records = {key_of(item): item for item in found}
        return self._all(kind, ((name, records[place]) for name, place in places.items() if place in records))

    async def _wait(self, kind: type[R], key: Item, since: R | None, pace: Pace, timeout_s: float) -> R | None:
        def differs(item: Item | None) -> bool:
            try:
                return (None if item is None else record_of(kind, item)) != since
            except ValueError:
                return True  # the waiter's own parsing says what is wrong

        item: Item | None
        try:
            item = await self._watch.wait(key_of(key), differs, pace=pace, timeout_s=timeout_s)
        except TimeoutError:
            item = await self._table.get(key, prefix=POLL)
        return self._parsed(kind, item, key_of(key)[0])

    async def _look(self, keys: Collection[tuple[str, str]]) -> Mapping[tuple[str, str], Item | None]:
        found = await self._table.get_all([items.key(*key) for key in sorted(keys)], prefix=POLL)
        return dict.fromkeys(keys) | {key_of(item): item for item in found}

    # Parsing --------------------------------------------------------------------------------------------------

    def _parsed(self, kind: type[T], item: Item | None, what: str) -> T | None:
        return None if item is None else self._there(kind, item, what)

    def _there(self, kind: type[T], item: Item, what: str) -> T:
        return self._checked(lambda: record_of(kind, item), what)

    def _checked(self, parse: Callable[[], T], what: str) -> T:
        try:
            return parse()
        except ValueError as error:
            raise Unreadable(self._where, {what: str(error)}) from error

    def _all(self, kind: type[T], found: Iterable[tuple[str, Item]]) -> dict[str, T]:
        records, unreadable = items.sorted_out(kind, found)
        if unreadable:
            raise Unreadable(self._where, unreadable, records=records)
        return records

    def _readable(self, kind: type[T], found: Iterable[Item]) -> list[T]:
        records, unreadable = items.sorted_out(kind, ((" ".join(key_of(item)), item) for item in found))
        self._malformed |= unreadable
        return list(records.values())

    @property
    def _where(self) -> str:
        return f"table {self._table.name}"


def _blamed(
    blames: Sequence[str], records: Sequence[str], reports: Sequence[str]
) -> tuple[Collection[str], frozenset[str]]:
    """Whose records were refused, and whose reports are not there, by what was said of the parts in this order."""
    if len(blames) != len(records) + len(reports):
        return records, frozenset()
    said_of_reports = zip(reports, blames[len(records) :], strict=True)
    return (
        [name for name, blame in zip(records, blames, strict=False) if blame != PART_BLAMELESS],
        frozenset(name for name, blame in said_of_reports if blame == PART_CONDITION_FAILED),
    )


def _report_ends_at(change: Change) -> datetime | None:
    """A report goes with the record of an ended instance."""
    forget_at: datetime | None = change.sets.get("forget_at") if change.sets.get("state") is State.TERMINATED else None
    return forget_at
