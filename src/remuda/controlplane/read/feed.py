"""Fleet reader: polls the store and returns what changed since the previous poll. Reads only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable
from remuda.controlplane.read.status import Status, status
from remuda.domain.errors import RemudaError, Unreadable
from remuda.domain.instance import LIVE, HistoryEntry, Instance, State
from remuda.domain.provision import Provision, ProvisionStatus

#: Provisions kept in memory, and how many of the newest each poll reads.
MAX_PROVISIONS = 500
NEWEST_PROVISIONS = 50
#: Histories read per poll. The first poll does not read all of them, so that it returns soon.
HISTORIES_PER_POLL = 200
#: A history may be written shortly after its record, so it is read in the poll that sees the change and in the next.
READS_PER_CHANGE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownInstance:
    instance: Instance
    #: None if it has not been read yet.
    history: Sequence[HistoryEntry] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetChanges:
    """The differences between two polls."""

    instances: Mapping[str, KnownInstance] = field(default_factory=dict)
    #: Instances whose record was deleted or that were terminated too long ago.
    removed_instances: frozenset[str] = frozenset()
    provisions: Sequence[Provision] = ()
    #: Provisions that are too old, or beyond the maximum number.
    removed_provisions: frozenset[str] = frozenset()
    #: None unless the poll read the status.
    status: Status | None = None


class FleetReader:
    """Keeps the records of the last poll to find changes.

    Terminated instances and closed provisions older than `since_s` seconds are dropped.
    """

    def __init__(self, *, since_s: float) -> None:
        self._since = timedelta(seconds=since_s)
        self._instances: dict[str, Instance] = {}
        self._histories: dict[str, Sequence[HistoryEntry]] = {}
        self._provisions: dict[str, Provision] = {}
        #: Number of reads left per history.
        self._unread: dict[str, int] = {}
        #: Changes found and not returned yet: a poll may fail after it found them.
        self._changed: set[str] = set()
        self._removed: set[str] = set()

    @property
    def histories(self) -> Mapping[str, Sequence[HistoryEntry]]:
        return self._histories

    @property
    def is_behind(self) -> bool:
        """Whether some histories have never been read."""
        return any(name not in self._histories for name in self._unread)

    async def poll(
        self, context: Context, *, with_status: bool, include_terminated: bool, check_registrations: bool
    ) -> FleetChanges:
        """Read what may have changed.

        `with_status` adds reports, pools and warnings. `include_terminated` also finds instances that were created and
        terminated between two polls.
        """
        found: Status | None = None
        if with_status or include_terminated:
            found = await status(
                context, include_terminated=include_terminated, check_registrations=check_registrations
            )
            live, newest = found.instances, found.runs
        else:
            live, newest = await asyncio.gather(
                context.store.find(LIVE), context.store.recent_provisions(NEWEST_PROVISIONS)
            )
        horizon = context.clock.now() - self._since
        if not self._provisions or include_terminated:
            newest = [*newest, *await context.store.recent_provisions(MAX_PROVISIONS, since=horizon)]
        deleted: frozenset[str] = frozenset()
        if found is not None:
            closed, deleted = await self._read_open_provisions(context, newest)
            newest = [*newest, *closed]
        await self._read_records(context, live)
        await self._read_histories(context)
        provisions, removed_provisions = self._update_provisions(newest, deleted, horizon)
        changed, self._changed = self._changed, set()
        removed, self._removed = self._removed, set()
        return FleetChanges(
            instances={name: self._known(name) for name in changed if name in self._instances},
            removed_instances=frozenset(name for name in removed if name not in self._instances),
            provisions=provisions,
            removed_provisions=removed_provisions,
            status=found,
        )

    def _known(self, name: str) -> KnownInstance:
        return KnownInstance(instance=self._instances[name], history=self._histories.get(name))

    async def _read_records(self, context: Context, found: Sequence[Instance]) -> None:
        """Find new, changed and removed records."""
        horizon = context.clock.now() - self._since
        current = {item.instance_id: item for item in found if not _is_past(item, horizon)}
        missed = [name for name, item in self._instances.items() if name not in current and item.state in LIVE]
        removed = {name for name, item in self._instances.items() if name not in current and _is_past(item, horizon)}
        if missed:
            # The search may lag and does not return terminated instances, so read these by key.
            records, unreadable = await skip_unreadable(context.store.get_many(missed))
            current.update(records)
            removed |= {name for name in missed if name not in records and name not in unreadable}
        # Compare by identity first: a store may return the same object again.
        known = self._instances
        changed = {name for name, item in current.items() if known.get(name) is not item and known.get(name) != item}
        # Newest first, so that their histories are read first.
        for name in sorted(changed, key=lambda name: current[name].created_at, reverse=True):
            self._instances[name] = current[name]
            self._unread[name] = READS_PER_CHANGE if name in self._histories else 1
        for name in removed:
            for cache in (self._instances, self._histories, self._unread):
                cache.pop(name, None)
        self._changed |= changed
        self._removed |= removed

    async def _read_histories(self, context: Context) -> None:
        names = list(islice(self._unread, HISTORIES_PER_POLL))
        if not names:
            return
        read = await _histories(context, names)
        for name in names:
            self._unread[name] -= 1
            if not self._unread[name]:
                del self._unread[name]
        self._changed |= {name for name in names if self._histories.get(name) != read.get(name, ())}
        self._histories |= {name: read.get(name, ()) for name in names}

    async def _read_open_provisions(
        self, context: Context, newest: Sequence[Provision]
    ) -> tuple[list[Provision], frozenset[str]]:
        """Read known open provisions that are not among the newest. Return them, and the ids of deleted ones."""
        ids = {item.provision_id for item in newest}
        missed = [item for name, item in self._provisions.items() if _is_open(item) and name not in ids]
        read = await map_concurrently(missed, lambda item: context.store.get_provision(item.holder))
        deleted = frozenset(item.provision_id for item, found in zip(missed, read, strict=True) if found is None)
        return [found for found in read if isinstance(found, Provision)], deleted

    def _update_provisions(
        self, newest: Sequence[Provision], deleted: frozenset[str], horizon: datetime
    ) -> tuple[list[Provision], frozenset[str]]:
        """Return new and changed provisions, and the ids of removed ones. Open provisions are never removed."""
        current = {item.provision_id: item for item in newest}
        before, self._provisions = self._provisions, self._provisions | current
        closed = sorted(
            (item for item in self._provisions.values() if not _is_open(item)), key=lambda item: item.created_at
        )
        too_many = closed[: max(len(self._provisions) - MAX_PROVISIONS, 0)]
        too_old = [item for item in closed if item.created_at < horizon]
        removed = {item.provision_id for item in (*too_many, *too_old)} | deleted
        for name in removed:
            del self._provisions[name]
        changed = [item for name, item in current.items() if name not in removed and before.get(name) != item]
        return changed, frozenset(removed & before.keys())


async def _histories(context: Context, names: Sequence[str]) -> Mapping[str, Sequence[HistoryEntry]]:
    """Read histories together, or one by one if one of them cannot be parsed."""
    try:
        return await context.store.histories(names)
    except Unreadable:
        read = await map_concurrently(names, context.store.history)
        return {name: () if isinstance(found, RemudaError) else found for name, found in zip(names, read, strict=True)}


def _is_open(provision: Provision) -> bool:
    return provision.status is ProvisionStatus.OPEN


def _is_past(instance: Instance, horizon: datetime) -> bool:
    """The threshold of a terminated instance is the time when its end was decided."""
    return instance.state is State.TERMINATED and instance.threshold < horizon
