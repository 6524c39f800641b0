"""The sweeps: find and finish what is expired, lost or incomplete.

Machines and runners are listed *before* the records are read: what the later records do not own stays without an owner.
A sweep that fails is reported and does not stop the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable, transition, transition_all
from remuda.controlplane.refresh.first_seen import FirstSeen
from remuda.controlplane.refresh.machines import MachineSweep
from remuda.controlplane.refresh.pool_messages import PoolMessageSweep
from remuda.controlplane.refresh.provisions import ProvisionSweep
from remuda.controlplane.refresh.result import RefreshResultBuilder
from remuda.controlplane.refresh.stale_registrations import StaleRegistrationSweep
from remuda.controlplane.release.advance import advance_release, publish_to_pool
from remuda.domain.errors import Conflict, RemudaError, Unreadable
from remuda.domain.instance import ABSORBING, LIVE, Instance, Retirement, State, decide_retirement, describe_retirement
from remuda.domain.pool_config import PoolConfig
from remuda.domain.signals import Report, Verdict, registration_verdict
from remuda.domain.thresholds import expired
from remuda.domain.transitions import Actor, End, Retire, RetireReason
from remuda.ports.compute import MachineView
from remuda.ports.github import GitHubRunner


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalState:
    """Machines and runners as they were listed before the records were read."""

    listed_at: datetime
    #: None if they could not be listed.
    machines: Sequence[MachineView] | None
    #: By scope, without scopes that could not be listed.
    runners: Mapping[str, Sequence[GitHubRunner]]


class Sweep:
    def __init__(self, context: Context, config: PoolConfig, result: RefreshResultBuilder) -> None:
        self._context = context
        self._config = config
        self._result = result

    async def run(self) -> None:
        context, config, result = self._context, self._config, self._result
        external = await self._list_external()
        first_seen = FirstSeen(await self._load_first_seen(), now=context.clock.now())
        await self._guarded("provisions", ProvisionSweep(context, config, result).run)
        records = {item.instance_id: item for item in await context.store.find(LIVE)}
        counts = Counter(item.state for item in records.values())
        result.live_instances = {state.value: counts[state] for state in State if state in LIVE}
        reports = await self._read_reports(records)
        await self._guarded("records", lambda: self._sweep_records(records, reports))
        if external.machines is not None:
            machines = MachineSweep(context, config, result, first_seen)
            views = external.machines
            await self._guarded("machines", lambda: machines.run(views, records, listed_at=external.listed_at))
        messages = PoolMessageSweep(context, config, result, first_seen)
        await self._guarded("stale pool messages", lambda: messages.run(self._still_idle(records)))
        registrations = StaleRegistrationSweep(
            context, config, result, first_seen, machines=external.machines, listed_at=external.listed_at
        )
        not_retired = {key: item for key, item in records.items() if key not in result.retired}
        await self._guarded("stale registrations", lambda: registrations.run(external.runners, not_retired))
        await self._guarded("anomalies", lambda: first_seen.save(context.store))
        await self._guarded("old records", self._delete_old_records)
        for name, why in context.store.malformed_records.items():
            result.error(f"the record {name} cannot be read: {why}; repair or delete it by hand")

    async def _guarded(self, name: str, sweep: Callable[[], Awaitable[None]]) -> None:
        try:
            await sweep()
        except RemudaError as error:
            self._result.error(f"{name}: {error.message}")

    async def _load_first_seen(self) -> Mapping[str, datetime]:
        """If the stored anomalies cannot be parsed, start without any: every grace period begins again."""
        try:
            return await self._context.store.get_first_seen()
        except Unreadable as error:
            self._result.error(f"{error.message}; it is replaced")
            await self._context.store.put_first_seen({})
            return {}

    async def _list_external(self) -> ExternalState:
        listed_at = self._context.clock.now()
        async with asyncio.TaskGroup() as group:
            machines = group.create_task(self._list_machines())
            runners = group.create_task(self._list_runners())
        return ExternalState(listed_at=listed_at, machines=machines.result(), runners=runners.result())

    async def _list_machines(self) -> Sequence[MachineView] | None:
        try:
            return await self._context.compute.list_pool()
        except RemudaError as error:
            self._result.error(f"machines: {error.message}")
            return None

    async def _list_runners(self) -> Mapping[str, Sequence[GitHubRunner]]:
        runners: dict[str, Sequence[GitHubRunner]] = {}
        github = self._context.github
        for scope in [item.scope for item in self._config.tokens] if github is not None else []:
            try:
                runners[scope] = await github.list_runners(scope) if github is not None else ()
            except RemudaError as error:
                self._result.error(f"runners of {scope}: {error.message}")
        return runners

    async def _read_reports(self, records: Mapping[str, Instance]) -> Mapping[str, Report]:
        """Read only the reports that decide something: those with a problem, and those of releasing instances.

        Without them, only thresholds decide.
        """
        store = self._context.store
        releasing = [key for key, item in records.items() if item.state is State.RELEASING]
        found: dict[str, Report] = {}

        async def read_troubled() -> None:
            found.update({report.instance_id: report for report in await store.troubled_reports()})

        async def read_releasing() -> None:
            reports, _ = await skip_unreadable(store.get_reports(releasing), self._result.error)
            found.update(reports)

        await self._guarded("reports with a problem", read_troubled)
        await self._guarded("reports of releases", read_releasing)
        return found

    # Records ----------------------------------------------------------------------------------------------------

    async def _sweep_records(self, records: Mapping[str, Instance], reports: Mapping[str, Report]) -> None:
        """End expired and failed instances, advance interrupted releases, and publish idle instances that are due."""
        due: list[Instance] = []

        async def one(instance: Instance) -> None:
            try:
                after = await self._advance(instance, reports.get(instance.instance_id))
            except Conflict:
                # Another process changed it; the next sweep reads it again.
                return
            if after.state is State.IDLE and self._is_due(after):
                due.append(after)

        live = [item for item in records.values() if item.state not in ABSORBING]
        overdue = await self._end_overdue(live)
        others = [item for item in live if item.instance_id not in overdue]
        for instance, result in zip(others, await map_concurrently(others, one), strict=True):
            if isinstance(result, RemudaError):
                self._result.error(f"{instance.instance_id}: {result.message}")
        errors = await publish_to_pool(self._context, due, by=Actor.REFRESH)
        for error in errors:
            self._result.error(f"pool messages: {error.message}")
        if not errors:
            self._result.published.extend(item.instance_id for item in due)

    async def _end_overdue(self, live: Sequence[Instance]) -> frozenset[str]:
        """End instances past their threshold, in one batch per state. Return their ids."""
        margin_s, now = self._config.lifetimes.margin_s, self._context.clock.now()
        overdue = [item for item in live if expired(item.threshold, now=now, margin_s=margin_s)]
        event = End(reason=RetireReason.EXPIRED, margin_s=margin_s)
        for state in sorted({item.state for item in overdue}):
            batch = [item for item in overdue if item.state is state]
            why = f"its time as {state} is up"
            results = await transition_all(self._context, batch, event, by=Actor.REFRESH, why=why)
            for instance, error in zip(batch, results, strict=True):
                if error is None:
                    self._result.retired[instance.instance_id] = why
                elif not isinstance(error, Conflict):
                    self._result.error(f"{instance.instance_id}: {error.message}")
        return frozenset(item.instance_id for item in overdue)

    async def _advance(self, instance: Instance, report: Report | None) -> Instance:
        now = self._context.clock.now()
        if report is not None and report.notice and instance.retire_reason is None and instance.threshold > now:
            event = Retire(reason=RetireReason.SPOT_NOTICE, detail=report.notice)
            instance = await self._transition(instance, event, describe_retirement(event.reason, event.detail))
        if instance.state is State.RELEASING:
            before = instance
            instance = await advance_release(self._context, self._config, instance, report, by=Actor.REFRESH)
            if instance.state is State.IDLE:
                self._result.finished_releases.append(instance.instance_id)
            if instance.state in ABSORBING:
                self._result.retired[instance.instance_id] = instance.retire_text
            if instance != before:
                return instance
        if instance.state is State.RUNNING and registration_verdict(report, instance.epoch) is Verdict.FAILED:
            why = f"its runner failed: {report.detail if report else ''}"
            return await self._end(instance, End(reason=RetireReason.FAILED, report=report), why)
        if instance.state is State.IDLE and (found := self._retirement(instance, now)):
            return await self._end(instance, End(reason=found.reason, detail=found.detail), str(found))
        return instance

    def _retirement(self, instance: Instance, now: datetime) -> Retirement | None:
        lifetimes = self._config.lifetimes
        # The last use is already counted here; at a release it is not. So the limit is higher by one.
        max_uses = lifetimes.max_uses + 1
        return decide_retirement(
            instance, now=now, max_age_s=lifetimes.max_age_s, max_uses=max_uses, reuse=self._config.reuse
        )

    async def _end(self, instance: Instance, event: End, why: str) -> Instance:
        after = await self._transition(instance, event, why)
        self._result.retired[instance.instance_id] = why
        return after

    async def _transition(self, instance: Instance, event: End | Retire, why: str) -> Instance:
        return await transition(self._context, instance, event, by=Actor.REFRESH, why=why)

    def _is_due(self, instance: Instance) -> bool:
        """Whether its pool message was never sent, or so long ago that it may be lost."""
        if instance.announced_at is None:
            return True
        age = self._context.clock.now() - instance.announced_at
        return age >= timedelta(seconds=self._config.lifetimes.reannounce_s)

    def _still_idle(self, records: Mapping[str, Instance]) -> list[Instance]:
        return [item for key, item in records.items() if item.state is State.IDLE and key not in self._result.retired]

    async def _delete_old_records(self) -> None:
        self._result.deleted_records = await self._context.store.forget(self._context.clock.now())
