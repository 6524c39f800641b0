"""The fleet as it changes: each look reads what may have changed, and says only what has. Reads only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice

from remuda.controlplane.context import Context, readable
from remuda.controlplane.status import Status, status
from remuda.domain.instance import LIVE, HistoryEntry, Instance, State
from remuda.domain.provision import Provision

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
        if not self._provisions or everything:
            since = context.clock.now() - self._since
            newest = await context.store.recent_provisions(PROVISIONS, since=since)
        changed, gone = await self._records(context, live)
        read = await self._read_histories(context)
        touched = {name for name in {*changed, *read} if name in self._instances}
        provisions, lapsed = self._of_runs(newest)
        return Changes(
            instances={name: self._seen(name) for name in touched},
            gone=frozenset(gone),
            provisions=provisions,
            lapsed=lapsed,
            status=found,
        )

    def _seen(self, name: str) -> Seen:
        return Seen(instance=self._instances[name], history=self._histories.get(name))

    async def _records(self, context: Context, found: Sequence[Instance]) -> tuple[set[str], set[str]]:
        """Which records are new or different, and which are out of sight."""
        horizon = context.clock.now() - self._since
        current = {item.instance_id: item for item in found if not _is_past(item, horizon)}
        missed = [name for name, item in self._instances.items() if name not in current and item.state in LIVE]
        gone = {name for name, item in self._instances.items() if name not in current and _is_past(item, horizon)}
        if missed:
            # Searches may lag, and do not show what has ended: the records themselves say.
            records, unreadable = await readable(context.store.get_many(missed), _say_nothing)
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
        return changed, gone

    async def _read_histories(self, context: Context) -> set[str]:
        """Those that were read and are different now."""
        names = list(islice(self._unread, HISTORIES_A_LOOK))
        if not names:
            return set()
        read = await context.store.histories(names)
        for name in names:
            self._unread[name] -= 1
            if not self._unread[name]:
                del self._unread[name]
        changed = {name for name in names if self._histories.get(name) != read.get(name, ())}
        self._histories |= {name: read.get(name, ()) for name in names}
        return changed

    def _of_runs(self, newest: Sequence[Provision]) -> tuple[list[Provision], frozenset[str]]:
        changed = [item for item in newest if self._provisions.get(item.provision_id) != item]
        self._provisions |= {item.provision_id: item for item in changed}
        oldest_first = sorted(self._provisions.values(), key=lambda item: item.created_at)
        lapsed = frozenset(item.provision_id for item in oldest_first[: max(len(oldest_first) - PROVISIONS, 0)])
        for name in lapsed:
            del self._provisions[name]
        return [item for item in changed if item.provision_id not in lapsed], lapsed


def _is_past(instance: Instance, horizon: datetime) -> bool:
    """A terminated instance's threshold is the time when its end was decided."""
    return instance.state is State.TERMINATED and instance.threshold < horizon


def _say_nothing(_: str) -> None:
    """The search for live records has named it already."""
