"""The store: the truth about instances and provisions.

Writes are conditional and atomic: the check of a guard and the write it guards are one step for all processes. A
write that is refused raises `Conflict` with the record that is there (`current`), read in the same step. A write whose
answer is lost raises `Unavailable`: it may have been applied, and the caller finds out by reading.

Reads by key (`get`, `get_many`, `provisions_of_run`, …) see every write that was acknowledged before them. Searches
(`find…`, `unsettled_provisions`) may lag: they may miss what was just written and show what has just changed. Their
callers act by conditional write only.

A record that cannot be parsed is told of by name and never hides the others: reads by key raise `Unreadable`, which
also holds those that can be parsed; searches leave it out and keep its name in `malformed_records`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from remuda.domain.errors import RemudaError
from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.signals import FailureKind, Report, Signal
from remuda.domain.transitions import Change

#: How many entries of an instance's history are kept: fifty uses make about 250.
HISTORY_LIMIT = 400


class InstanceStore(Protocol):
    async def prepare(self) -> Sequence[str]:
        """Create and verify what the store needs. Idempotent. Returns what was created, for people."""
        ...

    async def close(self) -> None: ...

    # Control records ------------------------------------------------------------------------------------------

    async def apply(self, change: Change) -> Instance:
        """Carry out a change where its guard admits the stored record.

        Only the fields that the change sets are written: what others wrote to other fields stays. Its history entry is
        written in the same step, or soon after it and at the latest by `close`. A history that cannot be written fails
        nothing: it is told of, and records never rest on it.
        Raises `Conflict(current=record or None)` where the guard does not hold; then nothing was written.
        """
        ...

    async def apply_all(self, changes: Sequence[Change]) -> Sequence[RemudaError | None]:
        """`apply` of changes to different instances, in fewer calls where the store can: for each change what `apply`
        would have raised, or None where it was applied. What is raised instead goes for each of them.
        """
        ...

    async def get(self, instance_id: str) -> Instance | None: ...

    async def get_many(self, instance_ids: Collection[str]) -> Mapping[str, Instance]:
        """Those that exist, by id; in as few calls as the store allows. `Unreadable` where some cannot be parsed."""
        ...

    async def find(self, states: Collection[State], *, threshold_before: datetime | None = None) -> Sequence[Instance]:
        """Every record in one of the states (and with a threshold not after the given time), all pages. May lag."""
        ...

    async def find_by_provision(self, provision_id: str) -> Sequence[Instance]:
        """Every record whose present or last assignment is of this provision. May lag."""
        ...

    async def count_live(self) -> int:
        """How many instances are not terminated. May lag."""
        ...

    async def wait_for_control(
        self, instance_id: str, since: Instance | None, timeout_s: float, *, urgent: bool = True
    ) -> Instance | None:
        """Returns the record as soon as it differs from `since`, else what is there after `timeout_s`. A store that
        has to look for changes looks less often where it is not `urgent`.
        """
        ...

    async def history(self, instance_id: str) -> Sequence[HistoryEntry]:
        """The last `HISTORY_LIMIT` entries, oldest first; all that were applied through this store are in it. One that
        cannot be parsed is left out, and named in `malformed_records`.
        """
        ...

    async def histories(self, instance_ids: Collection[str]) -> Mapping[str, Sequence[HistoryEntry]]:
        """The `history` of each that has one, by id, for reports."""
        ...

    async def forget(self, now: datetime) -> int:
        """Remove terminated records (with reports and history) and settled provisions whose
        `forget_at` has passed. Returns how many; a store that does so by itself returns 0.
        """
        ...

    # Reports --------------------------------------------------------------------------------------------------

    async def get_report(self, instance_id: str) -> Report | None: ...

    async def get_reports(self, instance_ids: Collection[str]) -> Mapping[str, Report]:
        """As `get_many`."""
        ...

    async def troubled_reports(self) -> Sequence[Report]:
        """Those that are `troubled`, for the sweeps. May lag, and may show some of instances that have ended."""
        ...

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
        """Conditional on (epoch, rank) not falling (equal is allowed and rewrites); else `Conflict`.

        Details are cut at `MAX_DETAIL`. Other fields of the report stay.
        """
        ...

    async def beat(
        self, instance_id: str, *, at: datetime, busy: bool, listening: bool, notice: str, version: str
    ) -> None:
        """One heartbeat: the counter rises by one, the fields are replaced, the signal stays."""
        ...

    async def wait_for_report(self, instance_id: str, since: Report | None, timeout_s: float) -> Report | None:
        """Returns the report as soon as it differs from `since`, else what is there after `timeout_s`."""
        ...

    # Provisions -----------------------------------------------------------------------------------------------

    async def put_provision(self, provision: Provision) -> None:
        """Put if absent, else `Conflict`."""
        ...

    async def replace_provision(self, before: Provision, after: Provision) -> None:
        """Conditional on the stored status, instance ids and `settled` being those of `before`; else `Conflict`
        with the stored one as `current` (None where there is none).
        """
        ...

    async def get_provision(self, run_id: str, provision_id: str) -> Provision | None: ...

    async def provisions_of_run(self, run_id: str) -> Sequence[Provision]:
        """Every provision of a run, strongly consistent, oldest first. `Unreadable` where some cannot be parsed; it
        holds the others by their ids.
        """
        ...

    async def unsettled_provisions(self, deadline_before: datetime) -> Sequence[Provision]:
        """Those whose deadline has passed without a release, and released ones that are not settled. May lag."""
        ...

    async def recent_provisions(self, limit: int, *, since: datetime | None = None) -> Sequence[Provision]:
        """The newest (and begun at or after a time), newest first, for reports. May lag."""
        ...

    # Pool configuration and the sweeps' memory ----------------------------------------------------------------

    async def get_config(self) -> PoolConfig | None: ...

    async def put_config(self, config: PoolConfig) -> None:
        """Conditional on the stored revision being `config.revision - 1` (or no configuration at revision 1);
        else `Conflict` with the stored one.
        """
        ...

    async def get_first_seen(self) -> Mapping[str, datetime]:
        """What sweeps saw amiss and since when: they act on the second look only."""
        ...

    async def put_first_seen(self, first_seen: Mapping[str, datetime]) -> None:
        """Replaces all of them; the last writer wins."""
        ...

    @property
    def malformed_records(self) -> Mapping[str, str]:
        """What searches have left out since this store was opened: names, and why each cannot be parsed."""
        ...
