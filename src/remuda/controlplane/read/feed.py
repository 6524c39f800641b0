"""The fleet as it changes: each look reads what may have changed, and says only what has. Reads only."""

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

#: How many provisions are kept in sight, and how many of the newest each look reads.
PROVISIONS = 500
NEWEST_PROVISIONS = 50
#: How many histories one look reads: the first view does not wait for all of them.
HISTORIES_A_LOOK = 200
#: A history may be written soon after its record: it is read at the change, and at the look after it.
HISTORY_READS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    instance: Instance
    #: None where it is not read yet.
    history: Sequence[HistoryEntry] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What one look found to be different from the look before."""

    instances: Mapping[str, Seen] = field(default_factory=dict)
    #: Instances that are out of sight: forgotten, or ended long ago.
    gone: frozenset[str] = frozenset()
    provisions: Sequence[Provision] = ()
    #: Provisions that are too many or too old.
    lapsed: frozenset[str] = frozenset()
    #: With a thorough look only.
    status: Status | None = None


class FleetReader:
    """Holds what it has seen, so that it can tell what is new."""

    def __init__(self, *, since_s: float) -> None:
        self._since = timedelta(seconds=since_s)
        self._instances: dict[str, Instance] = {}
        self._histories: dict[str, Sequence[HistoryEntry]] = {}
        self._provisions: dict[str, Provision] = {}
        #: Whose history is to be read, and how often still.
        self._unread: dict[str, int] = {}
        #: What was found and not told yet: a look may fail after it.
        self._changed: set[str] = set()
        self._gone: set[str] = set()

    @property
    def histories(self) -> Mapping[str, Sequence[HistoryEntry]]:
        return self._histories

    @property
    def is_behind(self) -> bool:
        """Whether there are histories that no look has read yet."""
        return any(name not in self._histories for name in self._unread)

    async def look(self, context: Context, *, thorough: bool, everything: bool, ghosts: bool) -> Changes:
        """`thorough`: with reports, pools and warnings. `everything`: with what was terminated meanwhile, unseen."""
        found: Status | None = None
        if thorough or everything:
            found = await status(context, everything=everything, ghosts=ghosts)
            live, newest = found.instances, found.runs
        else:
            live, newest = await asyncio.gather(
                context.store.find(LIVE), context.store.recent_provisions(NEWEST_PROVISIONS)
            )
        horizon = context.clock.now() - self._since
        if not self._provisions or everything:
            newest = [*newest, *await context.store.recent_provisions(PROVISIONS, since=horizon)]
        forgotten: frozenset[str] = frozenset()
        if found is not None:
            became, forgotten = await self._read_open(context, newest)
            newest = [*newest, *became]
        await self._read_records(context, live)
        await self._read_histories(context)
        provisions, lapsed = self._of_runs(newest, forgotten, horizon)
        changed, self._changed = self._changed, set()
        gone, self._gone = self._gone, set()
        return Changes(
            instances={name: self._seen(name) for name in changed if name in self._instances},
            gone=frozenset(name for name in gone if name not in self._instances),
            provisions=provisions,
            lapsed=lapsed,
            status=found,
        )

    def _seen(self, name: str) -> Seen:
        return Seen(instance=self._instances[name], history=self._histories.get(name))

    async def _read_records(self, context: Context, found: Sequence[Instance]) -> None:
        """Which records are new or different, and which are out of sight."""
        horizon = context.clock.now() - self._since
        current = {item.instance_id: item for item in found if not _is_past(item, horizon)}
        missed = [name for name, item in self._instances.items() if name not in current and item.state in LIVE]
        gone = {name for name, item in self._instances.items() if name not in current and _is_past(item, horizon)}
        if missed:
            # Searches may lag, and do not show what has ended: the records themselves say.
            records, unreadable = await skip_unreadable(context.store.get_many(missed), _say_nothing)
            current.update(records)
            gone |= {name for name in missed if name not in records and name not in unreadable}
        # A store may give the very same record again: that is told quickest.
        known = self._instances
        changed = {name for name, item in current.items() if known.get(name) is not item and known.get(name) != item}
        # The newest first: they are what people look at.
        for name in sorted(changed, key=lambda name: current[name].created_at, reverse=True):
            self._instances[name] = current[name]
            self._unread[name] = HISTORY_READS if name in self._histories else 1
        for name in gone:
            for kept in (self._instances, self._histories, self._unread):
                kept.pop(name, None)
        self._changed |= changed
        self._gone |= gone

    async def _read_histories(self, context: Context) -> None:
        names = list(islice(self._unread, HISTORIES_A_LOOK))
        if not names:
            return
        read = await _histories(context, names)
        for name in names:
            self._unread[name] -= 1
            if not self._unread[name]:
                del self._unread[name]
        self._changed |= {name for name in names if self._histories.get(name) != read.get(name, ())}
        self._histories |= {name: read.get(name, ()) for name in names}

    async def _read_open(self, context: Context, newest: Sequence[Provision]) -> tuple[list[Provision], frozenset[str]]:
        """Those that were open and are not among the newest: what became of them, and which are forgotten."""
        told = {item.provision_id for item in newest}
        missed = [item for name, item in self._provisions.items() if _is_open(item) and name not in told]
        read = await map_concurrently(missed, lambda item: context.store.get_provision(item.run_id, item.provision_id))
        forgotten = frozenset(item.provision_id for item, found in zip(missed, read, strict=True) if found is None)
        return [found for found in read if isinstance(found, Provision)], forgotten

    def _of_runs(
        self, newest: Sequence[Provision], forgotten: frozenset[str], horizon: datetime
    ) -> tuple[list[Provision], frozenset[str]]:
        """What is new or different, and what is out of sight: too old, or too many. What is open is neither."""
        current = {item.provision_id: item for item in newest}
        before, self._provisions = self._provisions, self._provisions | current
        closed = sorted(
            (item for item in self._provisions.values() if not _is_open(item)), key=lambda item: item.created_at
        )
        too_many = closed[: max(len(self._provisions) - PROVISIONS, 0)]
        too_old = [item for item in closed if item.created_at < horizon]
        lapsed = {item.provision_id for item in (*too_many, *too_old)} | forgotten
        for name in lapsed:
            del self._provisions[name]
        changed = [item for name, item in current.items() if name not in lapsed and before.get(name) != item]
        return changed, frozenset(lapsed & before.keys())


async def _histories(context: Context, names: Sequence[str]) -> Mapping[str, Sequence[HistoryEntry]]:
    """One that cannot be parsed hides no others."""
    try:
        return await context.store.histories(names)
    except Unreadable:
        read = await map_concurrently(names, context.store.history)
        return {name: () if isinstance(found, RemudaError) else found for name, found in zip(names, read, strict=True)}


def _is_open(provision: Provision) -> bool:
    return provision.status is ProvisionStatus.OPEN


def _is_past(instance: Instance, horizon: datetime) -> bool:
    """A terminated instance's threshold is the time when its end was decided."""
    return instance.state is State.TERMINATED and instance.threshold < horizon


def _say_nothing(_: str) -> None:
    """The search for live records has named it already."""
