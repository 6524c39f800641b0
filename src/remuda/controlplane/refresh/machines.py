"""Sweeps of machines and runner registrations, which exist outside of the store.

An anomaly counts only after a grace period, so the time of the first sweep that saw it is stored.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypeVar

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable, transition, transition_all
from remuda.controlplane.ended import end_of
from remuda.controlplane.refresh.result import RefreshResultBuilder
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import ABSORBING, Instance, State
from remuda.domain.pool_config import PoolConfig, parse_runner_name, stale_registration_reason
from remuda.domain.resources import UsageClass, is_instance_id
from remuda.domain.timestamps import to_milliseconds
from remuda.domain.transitions import Actor, Confirm, End, RetireReason, tombstone
from remuda.ports.compute import ENDED, PROVISION_TAG, MachineState, MachineView
from remuda.ports.github import Deletion, GitHubRunner
from remuda.ports.store import InstanceStore

T = TypeVar("T")


class FirstSeen:
    """Maps each anomaly to the time when it was first seen. A sweep drops those that it does not see again."""

    def __init__(self, known: Mapping[str, datetime], *, now: datetime) -> None:
        self._known = dict(known)
        self._now = now
        self._seen: dict[str, datetime] = {}

    def since(self, anomaly: str) -> datetime:
        """Record that it is seen now; return when it was first seen."""
        self._seen[anomaly] = self._known.get(anomaly, to_milliseconds(self._now))
        return self._seen[anomaly]

    def was_seen_before(self, anomaly: str) -> bool:
        """Record that it is seen now; return whether the previous sweep saw it, too."""
        self.since(anomaly)
        return anomaly in self._known

    def record(self, anomaly: str, at: datetime) -> None:
        """Record that it is seen now, and exists since a time that is known better than by the sweeps."""
        self._seen[anomaly] = to_milliseconds(at)

    @property
    def known(self) -> Mapping[str, datetime]:
        """Anomalies that earlier sweeps saw, with the time of the first."""
        return self._known

    @property
    def seen(self) -> Mapping[str, datetime]:
        """Anomalies that this sweep has seen or kept so far."""
        return self._seen

    def keep(self, anomaly: str) -> None:
        """Keep the time of a known anomaly, because this sweep could not check it."""
        if anomaly in self._known:
            self._seen[anomaly] = self._known[anomaly]

    async def save(self, store: InstanceStore) -> None:
        if self._seen != self._known:
            await store.put_first_seen(self._seen)


class PartialSweep:
    """Base class of the sweeps of one refresh."""

    def __init__(
        self, context: Context, config: PoolConfig, result: RefreshResultBuilder, first_seen: FirstSeen
    ) -> None:
        self._context = context
        self._config = config
        self._result = result
        self._first_seen = first_seen


class MachineSweep(PartialSweep):
    """Handles machines without a record, records without a machine, and terminations to confirm."""

    async def run(self, views: Sequence[MachineView], records: Mapping[str, Instance], *, listed_at: datetime) -> None:
        """`views` were listed at `listed_at`, which may be long ago if this process was paused meanwhile."""
        machines = {view.instance_id: view for view in views}
        unknown = [key for key in machines if key not in records]
        # The search for records may lag, so read by key before calling a machine unrecorded.
        more, unreadable = await skip_unreadable(self._context.store.get_many(unknown), self._result.error)
        known = {**records, **more}
        live = [item for item in known.values() if item.state not in ABSORBING]
        await self._for_each(live, lambda item: self._close_if_gone(item, machines.get(item.instance_id), listed_at))
        unrecorded = [machines[key] for key in unknown if key not in known and key not in unreadable]
        await self._for_each(unrecorded, self._tombstone_if_unrecorded)
        await self._terminate(machines, known)

    async def _for_each(self, items: Sequence[T], work: Callable[[T], Awaitable[None]]) -> None:
        for result in await map_concurrently(items, work):
            if isinstance(result, RemudaError) and not isinstance(result, Conflict):
                self._result.error(f"machines: {result.message}")

    async def _close_if_gone(self, instance: Instance, view: MachineView | None, listed_at: datetime) -> None:
        if view is not None and view.state not in ENDED:
            return
        if view is None and not self._is_missing(instance, listed_at):
            return
        event, why = end_of(view) if view else (End(reason=RetireReason.GONE), "the machine no longer exists")
        await transition(self._context, instance, event, by=Actor.REFRESH, why=why)
        self._result.retired[instance.instance_id] = why

    def _is_missing(self, instance: Instance, listed_at: datetime) -> bool:
        """Whether the machine was missing in two lists, a grace period apart, and was launched before the grace period.

        Compares with the time of the list, which shows nothing of what happened after it.
        """
        grace = timedelta(seconds=self._config.lifetimes.missing_after_s)
        return listed_at - self._first_seen.since(f"missing:{instance.instance_id}") >= grace and (
            listed_at - instance.created_at >= grace
        )

    async def _tombstone_if_unrecorded(self, view: MachineView) -> None:
        """Write a locked record for a machine that has none after a grace period; `_terminate` then ends it."""
        now = self._context.clock.now()
        grace = timedelta(seconds=self._config.lifetimes.unrecorded_grace_s)
        if view.state in ENDED or now - view.launched_at < grace:
            return
        record = Instance(
            instance_id=view.instance_id,
            state=State.TERMINATING,
            epoch=1,
            threshold=to_milliseconds(now),
            resource_class="",
            instance_type=view.instance_type,
            usage_class=UsageClass.ON_DEMAND,
            cpu=0,
            memory_mib=0,
            created_at=to_milliseconds(view.launched_at),
            # All that is known of its launch. Whose it was stands in the record that was never written.
            claim=view.tags.get(PROVISION_TAG, ""),
            retire_reason=RetireReason.UNRECORDED,
        )
        why = "a machine of this pool without a record"
        await self._context.store.apply(tombstone(record, by=Actor.REFRESH, now=now, why=why))
        self._context.event_log.record(
            "tombstone", why, instance_id=view.instance_id, retire_reason=RetireReason.UNRECORDED
        )
        self._result.retired[view.instance_id] = why

    async def _terminate(self, machines: Mapping[str, MachineView], known: Mapping[str, Instance]) -> None:
        """Terminate machines until EC2 confirms, including those that run although their record is terminated."""
        revived = {
            key
            for key, view in machines.items()
            if key in known and known[key].state is State.TERMINATED and view.state not in ENDED
        }
        ending = {key for key, item in known.items() if item.state is State.TERMINATING} | set(self._result.retired)
        if not ending and not revived:
            return
        # The search may lag, so read the records by key before terminating a machine.
        read = self._context.store.get_many(sorted(ending | revived))
        records, _ = await skip_unreadable(read, self._result.error)
        unconfirmed = [item for key, item in records.items() if key in ending and item.state is State.TERMINATING]
        still_running = [key for key in sorted(revived) if key in records and records[key].state is State.TERMINATED]
        ids = [*sorted(item.instance_id for item in unconfirmed), *still_running]
        if not ids:
            return
        for instance_id, why in (await self._context.compute.terminate(ids)).items():
            self._result.error(f"{instance_id} could not be terminated: {why}")
        described_at = self._context.clock.now()
        views = await self._context.compute.describe(sorted(item.instance_id for item in unconfirmed))
        await self._confirm(
            [item for item in unconfirmed if self._has_ended(item, views.get(item.instance_id), described_at)]
        )

    def _has_ended(self, instance: Instance, view: MachineView | None, described_at: datetime) -> bool:
        if view is not None and view.state is not MachineState.TERMINATED:
            return False
        return view is not None or self._is_missing(instance, described_at)

    async def _confirm(self, ended: Sequence[Instance]) -> None:
        event = Confirm(keep_records_s=self._config.lifetimes.keep_records_s)
        results = await transition_all(self._context, ended, event, by=Actor.REFRESH, why="the machine has ended")
        for instance, error in zip(ended, results, strict=True):
            if error is None:
                self._result.terminated.append(instance.instance_id)
            elif not isinstance(error, Conflict):
                self._result.error(f"machines: {error.message}")


class StaleRegistrationSweep(PartialSweep):
    """Removes stale registrations: runners with the pool's name prefix that no assignment owns."""

    def __init__(
        self,
        context: Context,
        config: PoolConfig,
        result: RefreshResultBuilder,
        first_seen: FirstSeen,
        *,
        machines: Sequence[MachineView] | None,
        listed_at: datetime,
    ) -> None:
        """`machines` and the runners were listed at `listed_at`; None if the machines could not be listed."""
        super().__init__(context, config, result, first_seen)
        self._existing = (
            None if machines is None else {view.instance_id for view in machines if view.state not in ENDED}
        )
        self._listed_at = listed_at

    async def run(self, runners: Mapping[str, Sequence[GitHubRunner]], live: Mapping[str, Instance]) -> None:
        """`runners` were listed before `live` was searched for.

        The search may lag, so it can only show that a registration has an owner. The others are decided by their
        current records.
        """
        ours = [
            (scope, runner, parsed[1])
            for scope, listed in runners.items()
            for runner in listed
            if (parsed := parse_runner_name(self._config.pool, runner.name)) is not None
            # The prefix of pool `ci` is also a prefix of pool `ci-2`: the rest of the name must be an instance id.
            and is_instance_id(parsed[1])
        ]
        ours = [item for item in ours if not self._has_owner(item[1], live.get(item[2]))]
        read = self._context.store.get_many({instance_id for _, _, instance_id in ours})
        records, unreadable = await skip_unreadable(read, self._result.error)
        stale = [
            (scope, runner, why)
            for scope, runner, instance_id in ours
            if instance_id not in unreadable
            and (why := self._stale_reason(runner, records.get(instance_id))) is not None
        ]
        for result in await map_concurrently(stale, lambda item: self._remove(*item)):
            if isinstance(result, RemudaError):
                self._result.error(f"stale registrations: {result.message}")

    def _has_owner(self, runner: GitHubRunner, record: Instance | None) -> bool:
        return record is not None and self._stale_reason(runner, record) is None

    def _stale_reason(self, runner: GitHubRunner, record: Instance | None) -> str | None:
        return stale_registration_reason(
            runner.name,
            record,
            pool=self._config.pool,
            unrecorded_since=self._unrecorded_since(runner) if record is None else None,
            # Not the current time: the process may have been paused since the list was read.
            now=self._listed_at,
            grace_s=self._config.lifetimes.registration_stale_after_s,
        )

    def _unrecorded_since(self, runner: GitHubRunner) -> datetime | None:
        """Return when the registration was first seen without a record and a machine; None if it has a machine.

        An existing machine may get its record any moment; otherwise the machine sweep writes a tombstone.
        """
        parsed, anomaly = parse_runner_name(self._config.pool, runner.name), f"stale-registration:{runner.name}"
        if self._existing is None:
            self._first_seen.keep(anomaly)
            return None
        if parsed is None or parsed[1] in self._existing:
            return None
        return self._first_seen.since(anomaly)

    async def _remove(self, scope: str, runner: GitHubRunner, why: str) -> None:
        github = self._context.github
        if github is None:
            return
        deletion = await github.delete_runner(scope, runner.runner_id)
        self._context.event_log.record(
            "stale-registration", f"{why}: {deletion.value}", runner=runner.name, scope=scope
        )
        if deletion is not Deletion.BUSY:
            self._result.stale_registrations.append(runner.name)
