"""Where an instance's items are: below the user id that AWS knows the machine by, which begins with its role's id.

The role in a profile may be replaced while machines live. So the ids of former roles are kept beside the present one:
new records go below the newest, older ones are found where they are.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from remuda.adapters.aws.dynamodb import expressions, items
from remuda.adapters.aws.dynamodb.items import Keys
from remuda.adapters.aws.dynamodb.table import Refused, Table, key_of
from remuda.domain.errors import Conflict, Unavailable, UserError
from remuda.domain.serialization import to_document
from remuda.domain.timestamps import to_milliseconds

#: How long what was read about the roles is taken for true. Less than machines without a record are left alone.
READ_AGAIN_S = 60.0
#: How often a write is tried again when another refresh was first.
TRIES = 3
#: Instances whose place is remembered.
MAX_KNOWN = 10_000
_FIRST = expressions.absent()


class InstanceKeys(Protocol):
    async def ask(self) -> None:
        """Find out what to note. Before the table is touched: where that fails, nothing was changed."""
        ...

    async def note(self) -> Sequence[str]:
        """Note it in the table. What is new, for people."""
        ...

    async def of(self, instance_ids: Collection[str]) -> Mapping[str, Keys]: ...


class FixedKeys:
    """For one who knows the prefix: an agent."""

    def __init__(self, prefix: str) -> None:
        self._keys = Keys(prefix=prefix)

    async def ask(self) -> None:
        return

    async def note(self) -> Sequence[str]:
        return []

    async def of(self, instance_ids: Collection[str]) -> Mapping[str, Keys]:
        return dict.fromkeys(instance_ids, self._keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownPrefix:
    prefix: str
    since: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownPrefixes:
    """Newest first."""

    prefixes: tuple[KnownPrefix, ...] = ()


class SharedKeys:
    """For the control plane. `newest` asks AWS, when the table is prepared; all others read what was noted then."""

    def __init__(self, *, table: Table, newest: Callable[[], Awaitable[str]]) -> None:
        self._table = table
        self._newest = newest
        self._asked = ""
        self._known: KnownPrefixes | None = None
        self._read_at = 0.0
        self._reading = asyncio.Lock()
        self._places: OrderedDict[str, Keys] = OrderedDict()

    async def ask(self) -> None:
        self._asked = await self._newest()

    async def note(self) -> Sequence[str]:
        prefix = self._asked
        for _ in range(TRIES):
            before = await self._read()
            if before is not None and before.prefixes[0].prefix == prefix:
                self._take(before)
                return []
            after = self._with(prefix, before)
            condition = (
                expressions.absent()
                if before is None
                else expressions.is_still("prefixes", to_document(before)["prefixes"])
            )
            try:
                await self._table.put(items.document_item(items.PREFIXES, after), condition)
            except Refused:
                continue
            self._take(after)
            return [f"keys of records begin with {prefix}"]
        raise Conflict("the keys of records keep changing; is another refresh at work?")

    async def of(self, instance_ids: Collection[str]) -> Mapping[str, Keys]:
        known = await self._fresh()
        candidates = [Keys(prefix=each.prefix) for each in known.prefixes]
        if len(candidates) == 1:
            return dict.fromkeys(instance_ids, candidates[0])
        await self._locate([name for name in instance_ids if name not in self._places], candidates)
        return {name: self._places.get(name, candidates[0]) for name in instance_ids}

    async def _locate(self, instance_ids: Sequence[str], candidates: Sequence[Keys]) -> None:
        """Find out which of the keys there is; of a machine without a record nothing is remembered."""
        if not instance_ids:
            return
        wanted = {key_of(keys.control(name)): (name, keys) for keys in reversed(candidates) for name in instance_ids}
        found = {key_of(item) for item in await self._table.get_all([items.key(*place) for place in wanted])}
        # The newest comes last, and stays.
        self._places.update(wanted[place] for place in wanted if place in found)
        while len(self._places) > MAX_KNOWN:
            self._places.popitem(last=False)

    async def _fresh(self) -> KnownPrefixes:
        async with self._reading:
            if self._known is None or self._table.clock.monotonic() - self._read_at >= READ_AGAIN_S:
                known = await self._read()
                if known is None:
                    raise UserError(
                        f"table {self._table.name} does not say whose role its machines have", fix="run remuda refresh"
                    )
                self._take(known)
            assert self._known is not None  # noqa: S101 - taken just now
            return self._known

    async def _read(self) -> KnownPrefixes | None:
        item = await self._table.get(items.PREFIXES)
        if item is None:
            return None
        try:
            known = items.record_of(KnownPrefixes, item)
            if not known.prefixes:
                raise ValueError("it is empty")  # noqa: TRY301 - as unreadable as the rest
        except ValueError as error:
            raise Unavailable(f"the keys in table {self._table.name} cannot be read: {error}") from error
        return known

    def _with(self, prefix: str, before: KnownPrefixes | None) -> KnownPrefixes:
        """A former one is forgotten when no record can be below it any more."""
        now = self._table.clock.now()
        kept: list[KnownPrefix] = []
        successor = now
        for each in before.prefixes if before else ():
            if each.prefix != prefix and now - successor < items.KEPT:
                kept.append(each)
            successor = each.since
        return KnownPrefixes(prefixes=(KnownPrefix(prefix=prefix, since=to_milliseconds(now)), *kept))

    def _take(self, known: KnownPrefixes) -> None:
        self._known = known
        self._read_at = self._table.clock.monotonic()
