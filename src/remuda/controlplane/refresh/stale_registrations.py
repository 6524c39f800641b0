"""Ghost registrations: runners with our prefix that no assignment owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable
from remuda.controlplane.refresh.machines import OVER, FirstSeen
from remuda.controlplane.refresh.result import Tally
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
        tally: Tally,
        sightings: FirstSeen,
        *,
        machines: Sequence[MachineView] | None,
        listed_at: datetime,
    ) -> None:
        """`machines` were listed at that time, as the runners were; None: they could not be."""
        self._context = context
        self._config = config
        self._tally = tally
        self._sightings = sightings
        self._standing = None if machines is None else {view.instance_id for view in machines if view.state not in OVER}
        self._listed_at = listed_at

    async def run(self, runners: Mapping[str, Sequence[GitHubRunner]], live: Mapping[str, Instance]) -> None:
        """`runners` were listed before `live` was searched for. A search may lag: it may clear one for now, but
        those that it does not clear are judged by their records, read now.
        """
        ours = [
            (scope, runner, parsed[1])
            for scope, listed in runners.items()
            for runner in listed
            if (parsed := parse_runner_name(self._config.pool, runner.name)) is not None
            # The prefix of pool `ci` also begins the names of a pool `ci-2`: the rest must be an instance.
            and is_instance_id(parsed[1])
        ]
        ours = [item for item in ours if not self._is_cleared(item[1], live.get(item[2]))]
        read = self._context.store.get_many({instance_id for _, _, instance_id in ours})
        records, unreadable = await skip_unreadable(read, self._tally.error)
        ghosts = [
            (scope, runner, why)
            for scope, runner, instance_id in ours
            if instance_id not in unreadable and (why := self._why(runner, records.get(instance_id))) is not None
        ]
        for result in await map_concurrently(ghosts, lambda ghost: self._remove(*ghost)):
            if isinstance(result, RemudaError):
                self._tally.error(f"ghost registrations: {result.message}")

    def _is_cleared(self, runner: GitHubRunner, record: Instance | None) -> bool:
        return record is not None and self._why(runner, record) is None

    def _why(self, runner: GitHubRunner, record: Instance | None) -> str | None:
        return stale_registration_reason(
            runner.name,
            record,
            pool=self._config.pool,
            unrecorded_since=self._unrecorded_since(runner) if record is None else None,
            # This process may have stood still since then: that is no time in which anybody looked.
            now=self._listed_at,
            grace_s=self._config.lifetimes.registration_stale_after_s,
        )

    def _unrecorded_since(self, runner: GitHubRunner) -> datetime | None:
        """A machine that stands there may get its record any moment; if it gets none, it is buried, and that is one."""
        parsed, sighting = parse_runner_name(self._config.pool, runner.name), f"stale-registration:{runner.name}"
        if self._standing is None:
            self._sightings.keep(sighting)
            return None
        if parsed is None or parsed[1] in self._standing:
            return None
        return self._sightings.since(sighting)

    async def _remove(self, scope: str, runner: GitHubRunner, why: str) -> None:
        github = self._context.github
        if github is None:
            return
        deletion = await github.delete_runner(scope, runner.runner_id)
        self._context.event_log.record(
            "stale-registration", f"{why}: {deletion.value}", runner=runner.name, scope=scope
        )
        if deletion is not Deletion.BUSY:
            self._tally.removed.append(runner.name)
