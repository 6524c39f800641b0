"""A store in memory with corrupt documents, which it parses like SQLite and DynamoDB do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from remuda.domain.errors import Unreadable
from remuda.domain.instance import Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.serialization import from_document, parse
from remuda.domain.signals import FailureKind, Report, Signal
from remuda.domain.transitions import Change
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock
from simulation.memory.store import MemoryDatabase, MemoryInstanceStore

T = TypeVar("T")
NAME = "a corrupt store"


class CorruptDocuments:
    """Documents that replace records, by type and name, until the record is written again."""

    def __init__(self) -> None:
        self.documents: dict[tuple[type[Any], str], Any] = {}
        self.first_seen: Any = None

    def read(self, kind: type[T], name: str, stored: T | None) -> T | None:
        """Parse the document that replaces a record, if any. Raise `Unreadable` if it is malformed."""
        if stored is None or (kind, name) not in self.documents:
            return stored
        try:
            record = from_document(kind, self.documents[kind, name])
            own = getattr(record, "instance_id", None) or getattr(record, "provision_id", name)
            if own != name:
                raise ValueError("the record has the key of another record")  # noqa: TRY301 - as the rest
        except ValueError as error:
            raise Unreadable(NAME, {name: str(error)}) from error
        return record


class CorruptingStore(MemoryInstanceStore):
    def __init__(
        self, *, clock: Clock, calls: CallCounter, database: MemoryDatabase, corrupt: CorruptDocuments
    ) -> None:
        super().__init__(clock=clock, calls=calls, database=database)
        self._corrupt = corrupt
        self._malformed: dict[str, str] = {}

    @property
    def malformed_records(self) -> Mapping[str, str]:
        return dict(self._malformed)

    def _all(self, kind: type[T], found: Mapping[str, T]) -> Mapping[str, T]:
        records: dict[str, T] = {}
        bad: dict[str, str] = {}
        for name, stored in found.items():
            try:
                record = self._corrupt.read(kind, name, stored)
            except Unreadable as error:
                bad |= error.unreadable
            else:
                assert record is not None
                records[name] = record
        if bad:
            raise Unreadable(NAME, bad, records=records)
        return records

    def _readable(self, kind: type[T], found: Mapping[str, T]) -> list[T]:
        try:
            return list(self._all(kind, found).values())
        except Unreadable as error:
            self._malformed |= error.unreadable
            return list(error.records.values())

    # Control records

    async def apply(self, change: Change) -> Instance:
        name = change.instance_id
        current = self._corrupt.read(Instance, name, self._database.instances.get(name))
        if (Instance, name) in self._corrupt.documents and current is not None:
            # A document that can be parsed is the record from now on, even if its content is wrong.
            self._database.instances[name] = current
            del self._corrupt.documents[Instance, name]
        return await super().apply(change)

    async def get(self, instance_id: str) -> Instance | None:
        return self._corrupt.read(Instance, instance_id, await super().get(instance_id))

    async def get_many(self, instance_ids: Collection[str]) -> Mapping[str, Instance]:
        return self._all(Instance, await super().get_many(instance_ids))

    async def find(self, states: Collection[State], *, threshold_before: datetime | None = None) -> Sequence[Instance]:
        found = self._readable(Instance, self._database.instances)
        return [
            item
            for item in found
            if item.state in states and (threshold_before is None or item.threshold <= threshold_before)
        ]

    async def find_by_provision(self, provision_id: str) -> Sequence[Instance]:
        found = await super().find_by_provision(provision_id)
        return self._readable(Instance, {item.instance_id: item for item in found})

    async def wait_for_control(
        self, instance_id: str, since: Instance | None, timeout_s: float, *, urgent: bool = True
    ) -> Instance | None:
        found = await super().wait_for_control(instance_id, since, timeout_s, urgent=urgent)
        return self._corrupt.read(Instance, instance_id, found)

    # Reports

    async def get_report(self, instance_id: str) -> Report | None:
        return self._corrupt.read(Report, instance_id, await super().get_report(instance_id))

    async def get_reports(self, instance_ids: Collection[str]) -> Mapping[str, Report]:
        return self._all(Report, await super().get_reports(instance_ids))

    async def troubled_reports(self) -> Sequence[Report]:
        return [report for report in self._readable(Report, self._database.reports) if report.troubled]

    async def wait_for_report(self, instance_id: str, since: Report | None, timeout_s: float) -> Report | None:
        stored = self._database.reports.get(instance_id)
        if (Report, instance_id) in self._corrupt.documents:
            report = self._corrupt.read(Report, instance_id, stored)
            if report != since:
                return report
            since = stored
        found = await super().wait_for_report(instance_id, since, timeout_s)
        return self._corrupt.read(Report, instance_id, found)

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
        self._corrupt.documents.pop((Report, instance_id), None)
        await super().write_signal(
            instance_id, epoch=epoch, signal=signal, detail=detail, duration_s=duration_s, failure=failure
        )

    # Provisions, configuration, first_seen

    async def get_provision(self, run_id: str, provision_id: str) -> Provision | None:
        return self._corrupt.read(Provision, provision_id, await super().get_provision(run_id, provision_id))

    async def provisions_of_run(self, run_id: str) -> Sequence[Provision]:
        found = await super().provisions_of_run(run_id)
        return list(self._all(Provision, {item.provision_id: item for item in found}).values())

    async def unsettled_provisions(self, deadline_before: datetime) -> Sequence[Provision]:
        found = await super().unsettled_provisions(deadline_before)
        return self._readable(Provision, {item.provision_id: item for item in found})

    async def replace_provision(self, before: Provision, after: Provision) -> None:
        if (Provision, before.provision_id) in self._corrupt.documents:
            raise Unreadable(NAME, {before.provision_id: "corrupt"})
        await super().replace_provision(before, after)

    async def get_config(self) -> PoolConfig | None:
        return self._corrupt.read(PoolConfig, "config", await super().get_config())

    async def get_first_seen(self) -> Mapping[str, datetime]:
        if self._corrupt.first_seen is None:
            return await super().get_first_seen()
        try:
            found: Mapping[str, datetime] = parse(Mapping[str, datetime], self._corrupt.first_seen, "first_seen")
        except ValueError as error:
            raise Unreadable(NAME, {"first_seen": str(error)}) from error
        return found

    async def put_first_seen(self, first_seen: Mapping[str, datetime]) -> None:
        self._corrupt.first_seen = None
        await super().put_first_seen(first_seen)
