"""Sources of demand: what tells which jobs the runner sets must run, and registers runners for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from remuda.domain.demand import DemandMessage, DemandRecord, DemandStatistics, JobRecord, Lease
from remuda.domain.runner_set import RunnerSet
from remuda.ports.github import Deletion, JitRunner


class DemandSession(Protocol):
    """The messages of one set. GitHub allows one session per set at a time."""

    @property
    def session_id(self) -> str: ...

    @property
    def statistics(self) -> DemandStatistics | None:
        """The counts when the session was opened; None if GitHub did not say."""
        ...

    async def receive(self, *, last_message_id: int, capacity: int) -> DemandMessage | None:
        """Wait for the next message after `last_message_id`; None if none comes for about 50 s.

        `capacity` is the total number of runners that the set may have, always above 0: GitHub never delivers a job
        that was queued while the capacity was 0. A message is delivered again until it is acknowledged.
        Renews an expired token itself. Raises `NotFound` if the session or the set no longer exists.
        """
        ...

    async def acknowledge(self, message_id: int) -> None: ...

    async def acquire(self, request_ids: Collection[int]) -> Sequence[int]:
        """Acquire available jobs (GitHub Enterprise Server). Return the ids of those that were acquired."""
        ...

    async def close(self) -> None:
        """End the session, so that another process can open one at once."""
        ...


class DemandSource(Protocol):
    """All methods raise `UserError` for a rejected credential or permission, and `Unavailable`."""

    async def find_set(self, runner_set: RunnerSet) -> int | None:
        """Return the id of the set on GitHub; None if it does not exist.

        Raises `UserError` if the set exists with other labels, which GitHub does not change.
        """
        ...

    async def create_set(self, runner_set: RunnerSet) -> int:
        """Create the set on GitHub. Returns its id, also if it was created in the meantime. Raises like `find_set`."""
        ...

    async def delete_set(self, runner_set: RunnerSet) -> bool:
        """Delete the set on GitHub. Return whether there was one. Raises `Conflict` while a runner is busy."""
        ...

    async def count_jobs(self, runner_set: RunnerSet, scale_set_id: int) -> DemandStatistics | None:
        """Return GitHub's present counts of the set, by one call; None if GitHub did not say.

        Messages bring them too, but none comes while jobs wait above the capacity. Raises `NotFound` without the set.
        """
        ...

    async def open_session(
        self, runner_set: RunnerSet, scale_set_id: int, *, owner: str, session_id: str = ""
    ) -> DemandSession:
        """Open a session, or take over the one with this id, if it still exists.

        Raises `Conflict` while another process has a session, and `NotFound` if the set does not exist.
        """
        ...

    async def register(self, runner_set: RunnerSet, scale_set_id: int, *, name: str) -> JitRunner:
        """Register a runner for one job. Raises `Conflict` if the name exists and `NotFound` if the set does not."""
        ...

    async def find_runner(self, runner_set: RunnerSet, *, name: str) -> int | None:
        """Return the id of a registered runner, for a registration whose answer was lost."""
        ...

    async def deregister(self, runner_set: RunnerSet, runner_id: int) -> Deletion:
        """Remove a registration. BUSY is the atomic test of whether the runner has a job.

        GONE if it does not exist any more, for example because the runner has had its job.
        """
        ...

    async def close(self) -> None: ...


class DemandStore(Protocol):
    """Demand and job records. The stores of instances implement it, with the same rules for errors and lag.

    Both have revisions, from 1: a record is written if the stored one has the revision before it, or revision 1 if none
    is stored. So a write that is applied late, after its caller has given up on it and written again, takes nothing
    back. Records of older versions have revision 0. One that cannot be parsed is replaced by any write.
    """

    async def get_demand(self) -> Mapping[str, DemandRecord]:
        """Return the records by the name of the set, strongly consistent."""
        ...

    async def put_demand(self, record: DemandRecord, jobs: Collection[JobRecord] = ()) -> None:
        """Write the set's record and the given jobs, the jobs first or all at once, in as few calls as possible.

        Raises `Conflict` if one of them does not follow the stored one: then the caller reads them again.
        """
        ...

    async def delete_demand(self, runner_set: str) -> None: ...

    async def get_lease(self, name: str) -> Lease | None: ...

    async def replace_lease(self, name: str, before: Lease | None, after: Lease) -> None:
        """Write the lease if the stored one equals `before`. Raises `Conflict` with the stored one otherwise.

        If an answer was lost and the adapter repeated the call, the stored one may already equal `after`.
        """
        ...

    async def get_jobs(self, job_ids: Collection[str]) -> Mapping[str, JobRecord]:
        """Return the existing records by id, strongly consistent. Raises `Unreadable` if some cannot be parsed."""
        ...

    async def put_jobs(self, jobs: Collection[JobRecord]) -> None:
        """Write records. Raises `Conflict` like `put_demand`. Not atomic: if it fails, some may have been written.

        A record may be deleted after its `expires_at`, by `InstanceStore.forget` or by the store itself.
        """
        ...

    async def jobs_of_run(self, run_id: str) -> Sequence[JobRecord]:
        """Return a run's jobs, oldest first. May lag."""
        ...

    async def recent_jobs(self, limit: int, *, since: datetime | None = None) -> Sequence[JobRecord]:
        """Return the newest jobs, newest first. May lag."""
        ...
