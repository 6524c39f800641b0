"""The sweeps: what is expired, lost, half done or nobody's is found and finished.

The outside world is listed *before* the records are read: what a list shows and the records then disown stays
disowned. Each sweep stands alone; one that fails is reported, and the others go on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable, transition, transition_all
from remuda.controlplane.refresh.machines import FirstSeen, MachineSweep
from remuda.controlplane.refresh.pool_messages import PoolMessageSweep
from remuda.controlplane.refresh.provisions import ProvisionSweep
from remuda.controlplane.refresh.result import Tally
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
    """What was listed before the records were read, and when. None where it could not be."""

    listed_at: datetime
    machines: Sequence[MachineView] | None
    runners: Mapping[str, Sequence[GitHubRunner]]


class Sweep:
    def __init__(self, context: Context, config: PoolConfig, tally: Tally) -> None:
        self._context = context
        self._config = config
        self._tally = tally

    async def run(self) -> None:
        context, config, tally = self._context, self._config, self._tally
        outside = await self._look_outside()
        sightings = FirstSeen(await self._seen_before(), now=context.clock.now())
        await self._guarded("provisions", ProvisionSweep(context, config, tally).run)
        records = {item.instance_id: item for item in await context.store.find(LIVE)}
        counts = Counter(item.state for item in records.values())
        tally.fleet = {state.value: counts[state] for state in State if state in LIVE}
        reports = await self._reports(records)
        await self._guarded("records", lambda: self._sweep_records(records, reports))
        if outside.machines is not None:
            machines = MachineSweep(context, config, tally, sightings)
            views = outside.machines
            await self._guarded("machines", lambda: machines.run(views, records, listed_at=outside.listed_at))
        hints = PoolMessageSweep(context, config, tally, sightings)
        await self._guarded("stale hints", lambda: hints.run(self._still_idle(records)))
        ghosts = StaleRegistrationSweep(
            context, config, tally, sightings, machines=outside.machines, listed_at=outside.listed_at
        )
        untouched = {key: item for key, item in records.items() if key not in tally.retired}
        await self._guarded("ghost registrations", lambda: ghosts.run(outside.runners, untouched))
        await self._guarded("sightings", lambda: sightings.save(context.store))
        await self._guarded("old records", self._forget)
        for name, why in context.store.malformed_records.items():
            tally.error(f"the record {name} cannot be read: {why}; mend it, or remove it by hand")

    async def _guarded(self, what: str, sweep: Callable[[], Awaitable[None]]) -> None:
        try:
            await sweep()
        except RemudaError as error:
            self._tally.error(f"{what}: {error.message}")

    async def _seen_before(self) -> Mapping[str, datetime]:
        """What sweeps remember is theirs: where it cannot be parsed they begin anew, and wait as long as for the first
        sight.
        """
        try:
            return await self._context.store.get_sightings()
        except Unreadable as error:
            self._tally.error(f"{error.message}; it begins anew")
            await self._context.store.put_sightings({})
            return {}

    async def _look_outside(self) -> ExternalState:
        listed_at = self._context.clock.now()
        async with asyncio.TaskGroup() as group:
            machines = group.create_task(self._list_machines())
            runners = group.create_task(self._list_runners())
        return ExternalState(listed_at=listed_at, machines=machines.result(), runners=runners.result())

    async def _list_machines(self) -> Sequence[MachineView] | None:
        try:
            return await self._context.compute.list_pool()
        except RemudaError as error:
            self._tally.error(f"machines: {error.message}")
            return None

    async def _list_runners(self) -> Mapping[str, Sequence[GitHubRunner]]:
        runners: dict[str, Sequence[GitHubRunner]] = {}
        github = self._context.github
        for scope in [item.scope for item in self._config.tokens] if github is not None else []:
            try:
                runners[scope] = await github.list_runners(scope) if github is not None else ()
            except RemudaError as error:
                self._tally.error(f"runners of {scope}: {error.message}")
        return runners

    async def _reports(self, records: Mapping[str, Instance]) -> Mapping[str, Report]:
        """Those on which something hangs: of the others a sweep would learn that all is well. Where they cannot be
        had, time decides alone.
        """
        store = self._context.store
        releasing = [key for key, item in records.items() if item.state is State.RELEASING]
        found: dict[str, Report] = {}

        async def troubled() -> None:
            found.update({report.instance_id: report for report in await store.troubled_reports()})

        async def waited_for() -> None:
            reports, _ = await skip_unreadable(store.get_reports(releasing), self._tally.error)
            found.update(reports)

        await self._guarded("reports of trouble", troubled)
        await self._guarded("reports of releases", waited_for)
        return found

    async def _sweep_records(self, records: Mapping[str, Instance], reports: Mapping[str, Report]) -> None:
        """Expired, failed, interrupted, to be announced: one decision for each record."""
        due: list[Instance] = []

        async def one(instance: Instance) -> None:
            try:
                after = await self._decide(instance, reports.get(instance.instance_id))
            except Conflict:
                # It moved on meanwhile: the next sweep sees it as it is then.
                return
            if after.state is State.IDLE and self._is_due(after):
                due.append(after)

        live = [item for item in records.values() if item.state not in ABSORBING]
        overdue = await self._end_overdue(live)
        others = [item for item in live if item.instance_id not in overdue]
        for instance, result in zip(others, await map_concurrently(others, one), strict=True):
            if isinstance(result, RemudaError):
                self._tally.error(f"{instance.instance_id}: {result.message}")
        errors = await publish_to_pool(self._context, due, by=Actor.REFRESH)
        for error in errors:
            self._tally.error(f"announcements: {error.message}")
        if not errors:
            self._tally.announced.extend(item.instance_id for item in due)

    async def _end_overdue(self, live: Sequence[Instance]) -> frozenset[str]:
        """Those whose time is up, whatever their reports say: all of one state in one go. Which they were."""
        margin_s, now = self._config.lifetimes.margin_s, self._context.clock.now()
        overdue = [item for item in live if expired(item.threshold, now=now, margin_s=margin_s)]
        event = End(reason=RetireReason.EXPIRED, margin_s=margin_s)
        for state in sorted({item.state for item in overdue}):
            some = [item for item in overdue if item.state is state]
            why = f"its time as {state} is up"
            results = await transition_all(self._context, some, event, by=Actor.REFRESH, why=why)
            for instance, error in zip(some, results, strict=True):
                if error is None:
                    self._tally.retired[instance.instance_id] = why
                elif not isinstance(error, Conflict):
                    self._tally.error(f"{instance.instance_id}: {error.message}")
        return frozenset(item.instance_id for item in overdue)

    async def _decide(self, instance: Instance, report: Report | None) -> Instance:
        now = self._context.clock.now()
        if report is not None and report.notice and instance.retire_reason is None and instance.threshold > now:
            event = Retire(reason=RetireReason.SPOT_NOTICE, detail=report.notice)
            instance = await self._go(instance, event, describe_retirement(event.reason, event.detail))
        if instance.state is State.RELEASING:
            before = instance
            instance = await advance_release(self._context, self._config, instance, report, by=Actor.REFRESH)
            if instance.state is State.IDLE:
                self._tally.finished.append(instance.instance_id)
            if instance.state in ABSORBING:
                self._tally.retired[instance.instance_id] = instance.retire_text
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
        # An idle instance has ended its use: one more would be counted when it ends the next.
        most = lifetimes.max_uses + 1
        return decide_retirement(
            instance, now=now, max_age_s=lifetimes.max_age_s, max_uses=most, reuse=self._config.reuse
        )

    async def _end(self, instance: Instance, event: End, why: str) -> Instance:
        after = await self._go(instance, event, why)
        self._tally.retired[instance.instance_id] = why
        return after

    async def _go(self, instance: Instance, event: End | Retire, why: str) -> Instance:
        return await transition(self._context, instance, event, by=Actor.REFRESH, why=why)

    def _is_due(self, instance: Instance) -> bool:
        if instance.announced_at is None:
            return True
        age = self._context.clock.now() - instance.announced_at
        return age >= timedelta(seconds=self._config.lifetimes.reannounce_s)

    def _still_idle(self, records: Mapping[str, Instance]) -> list[Instance]:
        return [item for key, item in records.items() if item.state is State.IDLE and key not in self._tally.retired]

    async def _forget(self) -> None:
        self._tally.forgotten = await self._context.store.forget(self._context.clock.now())
