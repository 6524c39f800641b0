"""The store of instances, reports, provisions and the pool configuration.

Writes are conditional: the check of the condition and the write are one atomic step for all processes. If the condition
fails, the write raises `Conflict` with the stored record (`current`), read in the same step. If the response is lost,
it raises `Unavailable`: the write may have been applied, and the caller must read to find out.

Reads by key (`get`, `get_many`, `provisions_of_run`, …) see all writes that were acknowledged before. Searches
(`find…`, `unsettled_provisions`) may lag: they may miss recent writes and return old values. Callers must therefore act
on their results only by conditional writes.

A record that cannot be parsed does not hide the others: reads by key raise `Unreadable`, which contains the readable
records; searches omit it and add its name to `malformed_records`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from remuda.domain.errors import RemudaError
from remuda.domain.holder import Holder
from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.signals import FailureKind, Report, Signal
from remuda.domain.sweep_record import SweepRecord
from remuda.domain.transitions import Change
from remuda.ports.demand import DemandStore

#: Maximum history entries per instance. Fifty uses create about 250.
HISTORY_LIMIT = 400


class InstanceStore(DemandStore, Protocol):
    """The store of one pool."""

    async def prepare(self) -> Sequence[str]:
        """Create and verify the tables. Idempotent. Returns what was created, for people."""
        ...

    async def close(self) -> None: ...

    # Control records ------------------------------------------------------------------------------------------

    async def apply(self, change: Change) -> Instance:
        """Apply a change if the stored record meets its condition. Return the new record.

        Only the fields that the change sets are written. The history entry is written in the same step or soon after,
        at the latest by `close`. If it cannot be written, the change still succeeds: no decision depends on it.
        Raises `Conflict(current=record or None)` if the condition is not met; then nothing was written.
        """
        ...

    async def apply_all(self, changes: Sequence[Change]) -> Sequence[RemudaError | None]:
        """Apply changes to different instances, in as few calls as possible.

        Returns for each change the error that `apply` would have raised, or None if it was applied. An error that this
        method raises applies to all of them.
        """
        ...

    async def get(self, instance_id: str) -> Instance | None: ...

    async def get_many(self, instance_ids: Collection[str]) -> Mapping[str, Instance]:
        """Return the existing records by id, in few calls. Raises `Unreadable` if some cannot be parsed."""
        ...

    async def find(self, states: Collection[State], *, threshold_before: datetime | None = None) -> Sequence[Instance]:
        """Return all records in the states, optionally with a threshold not after a time. May lag."""
        ...

    async def find_by_provision(self, provision_id: str) -> Sequence[Instance]:
        """Return all records whose current or last assignment belongs to the provision. May lag."""
        ...

    async def count_live(self) -> int:
        """Return the number of instances that are not terminated. May lag."""
        ...

    async def wait_for_control(
        self, instance_id: str, since: Instance | None, timeout_s: float, *, urgent: bool = True
    ) -> Instance | None:
        """Return the record as soon as it differs from `since`, or the stored one after `timeout_s`.

        A store that polls does so less often if the wait is not `urgent`.
        """
        ...

    async def history(self, instance_id: str) -> Sequence[HistoryEntry]:
        """Return the last `HISTORY_LIMIT` entries, oldest first, including all that were applied through this store.

        Entries that cannot be parsed are omitted and named in `malformed_records`.
        """
        ...

    async def histories(self, instance_ids: Collection[str]) -> Mapping[str, Sequence[HistoryEntry]]:
        """Return the histories by id, for reports. Instances without a history are omitted."""
        ...

    async def forget(self, now: datetime) -> int:
        """Delete terminated records, with reports and history, and settled provisions whose `forget_at` has passed.

        A store that expires them by itself deletes only reports that it could not parse: machines write them, and a
        healthy agent writes its report again. Returns the number of deleted records.
        """
        ...

    # Reports --------------------------------------------------------------------------------------------------

    async def get_report(self, instance_id: str) -> Report | None: ...

    async def get_reports(self, instance_ids: Collection[str]) -> Mapping[str, Report]:
        """Like `get_many`, for reports."""
        ...

    async def troubled_reports(self) -> Sequence[Report]:
        """Return the reports that are `troubled`. May lag, and may include reports of terminated instances."""
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
        """Write a signal if (epoch, rank) does not fall; an equal one overwrites. Raises `Conflict` otherwise.

        The detail is cut at `MAX_DETAIL`. The heartbeat fields of the report keep their values.
        """
        ...

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
        """Write one heartbeat: increment the counter and replace the fields. The signal keeps its value."""
        ...

    async def wait_for_report(self, instance_id: str, since: Report | None, timeout_s: float) -> Report | None:
        """Return the report as soon as it differs from `since`, or the stored one after `timeout_s`."""
        ...

    # Provisions -----------------------------------------------------------------------------------------------

    async def put_provision(self, provision: Provision) -> None:
        """Write a new provision. Raises `Conflict` if it exists."""
        ...

    async def replace_provision(self, before: Provision, after: Provision) -> None:
        """Replace a provision if the stored nonce, status, instance ids and `settled` equal those of `before`.

        Raises `Conflict` with the stored provision as `current` (or None) otherwise.
        """
        ...

    async def get_provision(self, holder: Holder) -> Provision | None:
        """Return the provision that gave an instance this holder."""
        ...

    async def provisions_of_run(self, run_id: str) -> Sequence[Provision]:
        """Return a run's provisions, strongly consistent, oldest first. Raises `Unreadable` if one cannot be parsed."""
        ...

    async def unsettled_provisions(self, deadline_before: datetime) -> Sequence[Provision]:
        """Return unreleased provisions past their deadline and released ones that are not settled. May lag."""
        ...

    async def recent_provisions(self, limit: int, *, since: datetime | None = None) -> Sequence[Provision]:
        """Return the newest provisions, newest first, optionally only those created since a time. May lag."""
        ...

    # Pool configuration and state of the sweeps ---------------------------------------------------------------

    async def get_config(self) -> PoolConfig | None:
        """Return the configuration. Raises `UserError` if the records of the store have another `record_version`."""
        ...

    async def put_config(self, config: PoolConfig) -> None:
        """Write the configuration if the stored revision is `config.revision - 1`, or revision 1 if nothing is stored.

        Raises `Conflict` with the stored configuration otherwise.
        """
        ...

    async def get_sweep_record(self) -> SweepRecord:
        """Return the record of the last sweep; an empty one if there was none."""
        ...

    async def put_sweep_record(self, record: SweepRecord) -> None:
        """Replace the record of the last sweep; the last writer wins."""
        ...

    @property
    def malformed_records(self) -> Mapping[str, str]:
        """Names of the records that searches omitted since the store was opened, with the reasons."""
        ...
