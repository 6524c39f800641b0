"""Hypothesis strategies for bad input: valid documents with a few values removed, replaced, swapped or nested.

Fully random input is rejected by the first check; input with one error gets further.

The short profile tries the same examples on every run. `REMUDA_FUZZ=5000` tries that many new examples per test;
failing ones are kept in `.hypothesis` and tried first the next time.

`CorruptingStore` is a store in memory with corrupt documents, which it parses like SQLite and DynamoDB do.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from remuda.domain.errors import MAX_MESSAGE, RemudaError, Unreadable
from remuda.domain.holder import Holder
from remuda.domain.instance import Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.serialization import from_document
from remuda.domain.signals import Report
from remuda.domain.sweep_record import SweepRecord
from remuda.domain.transitions import Change
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock
from simulation.loop import new_loop
from simulation.memory.store import MemoryDatabase, MemoryInstanceStore

#: Default number of examples per test in the short profile.
SHORT = 40
LONG = int(os.environ.get("REMUDA_FUZZ", "0"))

ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\nERROR forged line\u202e\x00"
LONE = "\ud800"
DEEP = 3_000


def fuzzed(examples: int = SHORT) -> Callable[[Any], Any]:
    """Hypothesis settings of a property. Pass a smaller number if examples are slow."""
    return settings(
        max_examples=max(LONG * examples // SHORT, 1) if LONG else examples,
        derandomize=not LONG,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=bool(LONG),
    )


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


TIMES = (
    "0001-01-01T00:00:00.000Z",
    "9999-12-31T23:59:59.999Z",
    "0000-00-00T00:00:00.000Z",
    "2025-02-30T12:00:00.000Z",
    "1900-01-01T00:00:00.000Z",
    "2025-05-31T12:00:00+00:00",
    "2025-05-31T12:00:00",
    "9999-12-31T23:59:59-23:59",
    "0001-01-01T00:00:00+23:59",
)
TEXTS = (
    "",
    " ",
    "None",
    "null",
    "-1",
    "1e400",
    "nan",
    ESCAPES,
    LONE,
    "x" * 1_200,
    "../../etc/passwd",
    "::error::x",
    *TIMES,
)
NUMBERS = (
    *(0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400, -(10**400)),
    *(0.5, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")),
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [None],
    {"": None},
    {"message": {}},
    [[[]]],
    {"a": {"a": {"a": {}}}},
)

extremes = st.sampled_from([*TEXTS, *NUMBERS, *OTHERS])
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | extremes,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a document, outermost first."""
    yield path
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from places(item, (*path, number))


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


def _changed(draw: st.DrawFn, value: Any) -> Any:
    kind = draw(st.integers(0, 6))
    if kind == 0:
        return draw(any_json)
    if kind == 1:
        return [value]
    if kind == 2:
        return {"value": value}
    if isinstance(value, str) and kind in {3, 4}:
        cut = draw(st.integers(0, len(value)))
        return value[:cut] + draw(st.sampled_from(["", *TEXTS]) | st.text(max_size=5)) + value[cut:]
    if isinstance(value, dict) and kind in {3, 4, 5}:
        key = draw(st.sampled_from([*value, "extra", "", ESCAPES, "x" * 300, "__proto__"]))
        return {**value, key: draw(any_json)}
    if isinstance(value, list) and kind in {3, 4, 5}:
        return [*value, *value[:1] * draw(st.integers(0, 3)), draw(extremes)]
    return draw(extremes)


@st.composite
def mutated(draw: st.DrawFn, document: Any, *, most: int = 3) -> Any:
    """The document with one to `most` errors."""
    holder = {"": copy.deepcopy(document)}
    for _ in range(draw(st.integers(1, most))):
        found = [path for path in places(holder) if path]
        path = draw(st.sampled_from(found))
        parent = _at(holder, path[:-1])
        kind = draw(st.integers(0, 5))
        if kind == 0 and len(path) > 1:
            del parent[path[-1]]
        elif kind == 1:
            other = draw(st.sampled_from(found))
            parent[path[-1]] = copy.deepcopy(_at(holder, other))
        else:
            parent[path[-1]] = copy.deepcopy(_changed(draw, parent[path[-1]]))
    return holder[""]


@st.composite
def spoiled_text(draw: st.DrawFn, document: Any) -> bytes:
    """Bytes of a mutated document, or of a valid one that was truncated, extended, or replaced."""
    kind = draw(st.integers(0, 9))
    if kind <= 4:
        return json.dumps(draw(mutated(document))).encode()
    good = json.dumps(document).encode()
    at = draw(st.integers(0, len(good)))
    match kind:
        case 5:
            return good[:at]
        case 6:
            return good[:at] + draw(st.binary(min_size=1, max_size=6)) + good[at:]
        case 7 if isinstance(document, dict) and document:
            # A duplicate key; the last one counts.
            key = draw(st.sampled_from(list(document)))
            return good[:-1] + b"," + json.dumps(key).encode() + b":" + json.dumps(draw(extremes)).encode() + b"}"
        case 8:
            whole = [b"", b"null", b"[" * DEEP, b'{"a":' * DEEP, b"[" * DEEP + b"]" * DEEP, b"1" * 5_000, b"NaN"]
            return draw(
                st.sampled_from([*whole, b"\xff\xfe{}", b"\xef\xbb\xbf" + good, b"<!DOCTYPE html><html>502</html>"])
            )
        case _:
            return draw(st.binary(max_size=64))


def in_virtual_time(work: Awaitable[Any], limit_s: float) -> Any:
    """Run in virtual time and return the result, or the checked error."""

    async def bounded() -> Any:
        async with asyncio.timeout(limit_s):
            return await work

    with asyncio.Runner(loop_factory=new_loop) as runner:
        try:
            return runner.run(bounded())
        except RemudaError as error:
            check_told(error)
            return error


def check_told(error: BaseException) -> None:
    """Check that an error is a RemudaError with a printable message of limited length."""
    assert isinstance(error, RemudaError), f"{type(error).__name__}: {error}"
    check_shown(error.message, MAX_MESSAGE)
    check_shown(error.fix, MAX_MESSAGE)


def check_shown(text: str, most: int) -> None:
    assert text.isprintable(), ascii(text)
    assert len(text) <= most, len(text)
    text.encode()


# Corrupt records ------------------------------------------------------------------------------------------------------

T = TypeVar("T")
NAME = "a corrupt store"


class CorruptDocuments:
    """Documents that replace records, by type and name, until the record is written again."""

    def __init__(self) -> None:
        self.documents: dict[tuple[type[Any], str], Any] = {}
        #: The same for the record of the last sweep.
        self.sweep: Any = None

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

    async def write_signal(self, instance_id: str, **signalled: Any) -> None:
        self._corrupt.documents.pop((Report, instance_id), None)
        await super().write_signal(instance_id, **signalled)

    # Provisions, configuration, record of the last sweep

    async def get_provision(self, holder: Holder) -> Provision | None:
        return self._corrupt.read(Provision, holder.provision_id, await super().get_provision(holder))

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

    async def get_sweep_record(self) -> SweepRecord:
        if self._corrupt.sweep is None:
            return await super().get_sweep_record()
        try:
            return from_document(SweepRecord, self._corrupt.sweep)
        except ValueError as error:
            raise Unreadable(NAME, {"sweep": str(error)}) from error

    async def put_sweep_record(self, record: SweepRecord) -> None:
        self._corrupt.sweep = None
        await super().put_sweep_record(record)
