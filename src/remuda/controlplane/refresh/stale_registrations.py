"""Sweep of stale registrations: runners with the pool's name prefix that no assignment owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable
from remuda.controlplane.refresh.first_seen import FirstSeen
from remuda.controlplane.refresh.machines import ENDED
from remuda.controlplane.refresh.result import RefreshResultBuilder
from remuda.domain.errors import RemudaError
from remuda.domain.instance import Instance
from remuda.domain.pool_config import PoolConfig, parse_runner_name
from remuda.domain.resources import is_instance_id
from remuda.domain.stale_registrations import stale_registration_reason
from remuda.ports.compute import MachineView
from remuda.ports.github import Deletion, GitHubRunner


class StaleRegistrationSweep:
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
        self._context = context
        self._config = config
        self._result = result
        self._first_seen = first_seen
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
