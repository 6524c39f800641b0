"""The sweeps: find and finish what is expired, lost or incomplete.

Machines and runners are listed *before* the records are read: what the later records do not own stays without an owner.
A sweep that fails is reported and does not stop the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import inf

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable, transition_all
from remuda.controlplane.pool_publisher import publish_to_pool
from remuda.controlplane.reconcile import carry_out, leave
from remuda.controlplane.refresh.audit import WaitingJobAudit
from remuda.controlplane.refresh.ended_runs import EndedRunSweep
from remuda.controlplane.refresh.machines import FirstSeen, MachineSweep, PartialSweep, StaleRegistrationSweep
from remuda.controlplane.refresh.result import RefreshResultBuilder
from remuda.controlplane.refresh.runner_sets import RunnerSetSweep
from remuda.domain.decide.next_step import Publish, Write, end_of_time, is_busy, leave_holder, next_step
from remuda.domain.errors import Conflict, NotFound, RemudaError, Unreadable
from remuda.domain.instance import (
    ABSORBING,
    ASSIGNED,
    LIVE,
    Instance,
    State,
)
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionStatus, lost_instances, released, settled
from remuda.domain.reporting.warnings import (
    EXPIRY_WARNING_S,
    SWEEP_DUE,
    describe_near_expiry,
    max_runtime_s,
    sweep_pause_s,
)
from remuda.domain.signals import Report
from remuda.domain.timestamps import after
from remuda.domain.transitions import Actor
from remuda.ports.compute import MachineView
from remuda.ports.github import GitHubRunner
from remuda.ports.pool import BATCH, Delivery

#: Seconds after its deadline until a released provision is settled: a claim in progress may be applied late.
SETTLE_AFTER_S = 60.0
#: Seconds that a received message stays hidden.
VISIBILITY_S = 10.0
#: Steps of one instance in one sweep. Example: a spot notice is recorded, and the idle instance is ended.
MAX_STEPS = 3
#: Messages of a class that one sweep receives.
MAX_MESSAGES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ExternalState:
    """Machines and runners as they were listed before the records were read."""

    listed_at: datetime
    #: None if they could not be listed.
    machines: Sequence[MachineView] | None
    #: By scope, without scopes that could not be listed.
    runners: Mapping[str, Sequence[GitHubRunner]]


class Sweep:
    def __init__(
        self,
        context: Context,
        config: PoolConfig,
        result: RefreshResultBuilder,
        *,
        interval_s: float | None = None,
    ) -> None:
        self._context = context
        self._config = config
        self._result = result
        self._interval_s = interval_s
        self._pause = timedelta(seconds=sweep_pause_s(interval_s))

    async def run(self) -> None:
        context, config, result = self._context, self._config, self._result
        external = await self._list_external()
        first_seen = FirstSeen(await self._load_first_seen(), now=context.clock.now())
        provisions = ProvisionSweep(context, config, result, first_seen)
        await self._guarded("provisions", provisions.run)
        records = {item.instance_id: item for item in await context.store.find(LIVE)}
        counts = Counter(item.state for item in records.values())
        result.live_instances = {state.value: counts[state] for state in State if state in LIVE}
        reports = await self._read_reports(records)
        in_sets: frozenset[str] = frozenset()

        async def sweep_runner_sets() -> None:
            nonlocal in_sets
            in_sets = await RunnerSetSweep(context, config, result, first_seen).run(records, reports)

        await self._guarded("runner sets", sweep_runner_sets)
        ended_runs = EndedRunSweep(context, config, result, first_seen, take_back=provisions.settle)
        await self._guarded("ended runs", lambda: ended_runs.run(records))
        rest = {key: item for key, item in records.items() if key not in in_sets}
        await self._guarded("records", lambda: self._sweep_records(rest, reports))
        await self._guarded("expiry warnings", lambda: self._warn_before_expiry(records, first_seen))
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
        audit = WaitingJobAudit(context, config, result, first_seen, runners=external.runners)
        await self._guarded("waiting jobs", lambda: audit.run(not_retired))
        self._record_next_due(first_seen)
        await self._guarded("anomalies", lambda: first_seen.save(context.store))
        await self._guarded("old records", self._delete_old_records)
        for name, why in context.store.malformed_records.items():
            result.error(f"the record {name} cannot be read: {why}; repair or delete it by hand")

    def _record_next_due(self, first_seen: FirstSeen) -> None:
        """Record until when the next sweep must have run.

        Frequent sweeps write it only if half of that time has passed. Others write it always, which also proves that
        the store can be written to.
        """
        now = self._context.clock.now()
        due = first_seen.known.get(SWEEP_DUE)
        is_recent = (
            self._interval_s is not None and due is not None and now + self._pause / 2 <= due <= now + self._pause
        )
        first_seen.record(SWEEP_DUE, due if due is not None and is_recent else now + self._pause)

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
        github = self._context.github
        if github is None:
            return {}
        runners: dict[str, Sequence[GitHubRunner]] = {}
        scopes = _scopes(self._config)
        for scope, listed in zip(scopes, await map_concurrently(scopes, github.list_runners), strict=True):
            if isinstance(listed, RemudaError):
                self._result.error(f"runners of {scope}: {listed.message}")
            else:
                runners[scope] = listed
        return runners

    async def _read_reports(self, records: Mapping[str, Instance]) -> Mapping[str, Report]:
        """Read only the reports that decide something: those with a problem, and those of releasing instances and of
        runners of sets.

        Without them, only thresholds decide.
        """
        store = self._context.store
        releasing = [
            key
            for key, item in records.items()
            if item.state is State.RELEASING or (item.state is State.RUNNING and item.runner_set)
        ]
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
        overdue = await self._end_overdue(live, reports)
        others = [item for item in live if item.instance_id not in overdue]
        for instance, result in zip(others, await map_concurrently(others, one), strict=True):
            if isinstance(result, RemudaError):
                self._result.error(f"{instance.instance_id}: {result.message}")
        errors = await publish_to_pool(self._context, due, by=Actor.REFRESH)
        for error in errors:
            self._result.error(f"pool messages: {error.message}")
        if not errors:
            self._result.published.extend(item.instance_id for item in due)

    async def _end_overdue(self, live: Sequence[Instance], reports: Mapping[str, Report]) -> frozenset[str]:
        """End instances past their time limit, in one batch per reason. Return their ids."""
        overdue = [item for item in live if self._end_of_time(item, reports) is not None]
        reports = {**reports, **await self._reports_of(overdue, unless=reports)}
        batches: dict[Write, list[Instance]] = {}
        for item in overdue:
            if (end := self._end_of_time(item, reports)) is not None:
                batches.setdefault(end, []).append(item)
        for end, batch in batches.items():
            results = await transition_all(self._context, batch, end.event, by=Actor.REFRESH, why=end.why)
            for instance, error in zip(batch, results, strict=True):
                if error is None:
                    self._result.retired[instance.instance_id] = end.why
                elif not isinstance(error, Conflict):
                    self._result.error(f"{instance.instance_id}: {error.message}")
        return frozenset(item.instance_id for item in overdue)

    def _end_of_time(self, instance: Instance, reports: Mapping[str, Report]) -> Write | None:
        report = reports.get(instance.instance_id)
        return end_of_time(instance, report, self._config.policy, now=self._context.clock.now())

    async def _reports_of(self, instances: Sequence[Instance], *, unless: Mapping[str, Report]) -> Mapping[str, Report]:
        """Read the reports of used instances that are not known yet. An expired instance ends without its report."""
        used = (item.instance_id for item in instances if item.state in {State.RUNNING, State.RELEASING})
        ids = [instance_id for instance_id in used if instance_id not in unless]
        found: Mapping[str, Report] = {}
        try:
            if ids:
                found, _ = await skip_unreadable(self._context.store.get_reports(ids), self._result.error)
        except RemudaError as error:
            self._result.error(f"reports: {error.message}")
        return found

    async def _warn_before_expiry(self, records: Mapping[str, Instance], first_seen: FirstSeen) -> None:
        """Log once that the maximum runtime ends a running job soon."""
        now = self._context.clock.now()
        latest = now + timedelta(seconds=EXPIRY_WARNING_S)
        near = [
            item
            for item in records.values()
            if item.state is State.RUNNING and now < item.deadline(busy=True) <= latest
        ]
        reports = await self._reports_of(near, unless={})
        for instance in near:
            if not is_busy(instance, reports.get(instance.instance_id)):
                continue
            held_by = instance.holder
            provision = await self._context.store.get_provision(held_by) if held_by is not None else None
            text = describe_near_expiry(
                instance,
                reports[instance.instance_id],
                now=now,
                runtime_s=max_runtime_s(provision, self._config.lifetimes),
            )
            if text and not first_seen.was_seen_before(f"expires-soon:{instance.instance_id}:{instance.epoch}"):
                self._context.event_log.record(
                    "expiry-warning", text, instance_id=instance.instance_id, run_id=instance.subject
                )

    async def _advance(self, instance: Instance, report: Report | None) -> Instance:
        """Do what is due, one step after the other, until the machine or another process has to do something."""
        for _ in range(MAX_STEPS):
            before = instance
            instance = await self._step(instance, report)
            if instance == before or instance.state in ABSORBING:
                break
        return instance

    async def _step(self, instance: Instance, report: Report | None) -> Instance:
        context, config = self._context, self._config
        step = next_step(instance, report, config.policy, now=context.clock.now())
        after = await carry_out(context, config, instance, step, by=Actor.REFRESH)
        if after.state is State.IDLE and instance.state is State.RELEASING:
            self._result.finished_releases.append(instance.instance_id)
        if after.state in ABSORBING:
            self._result.retired[instance.instance_id] = step.why if isinstance(step, Write) else after.retire_text
        return after

    def _is_due(self, instance: Instance) -> bool:
        """Whether its pool message was never sent, or so long ago that it may be lost."""
        return isinstance(next_step(instance, None, self._config.policy, now=self._context.clock.now()), Publish)

    def _still_idle(self, records: Mapping[str, Instance]) -> list[Instance]:
        return [item for key, item in records.items() if item.state is State.IDLE and key not in self._result.retired]

    async def _delete_old_records(self) -> None:
        self._result.deleted_records = await self._context.store.forget(self._context.clock.now())


def _scopes(config: PoolConfig) -> list[str]:
    """Scopes in which the pool has registered runners, each once."""
    scopes = [*(item.scope for item in config.tokens), *(item.scope for item in config.runner_sets)]
    return list({scope.lower(): scope for scope in reversed(scopes)}.values())[::-1]


class ProvisionSweep(PartialSweep):
    """Releases provisions past their deadline and takes back the instances of released ones."""

    async def run(self) -> None:
        margin = timedelta(seconds=self._config.lifetimes.margin_s)
        unsettled = await self._context.store.unsettled_provisions(self._context.clock.now() - margin)
        for provision, result in zip(unsettled, await map_concurrently(unsettled, self.settle), strict=True):
            self._report(provision, result)

    async def settle(self, provision: Provision) -> None:
        """Release a provision and take back its instances; settle it as soon as it holds none."""
        if provision.status is not ProvisionStatus.RELEASED:
            provision = await self._release(provision)
        if provision.runner_set:
            # The record of an acquisition that its listener did not end. Its instance is held by the set.
            await self._settle(provision)
            return
        found = await self._context.store.find_by_provision(provision.provision_id)
        ids = {*provision.instance_ids, *(instance.instance_id for instance in found)}
        records, unreadable = await skip_unreadable(self._context.store.get_many(ids), self._result.error)
        assigned = [
            instance
            for instance in records.values()
            if instance.provision_id == provision.provision_id and instance.state in ASSIGNED
        ]
        why = f"its provision was released: {provision.why}" if provision.why else "its provision was released"
        for result in await map_concurrently(assigned, lambda item: self._take_back(item, why)):
            self._report(provision, result)
        now = self._context.clock.now()
        # An unreadable instance may still be assigned.
        if not assigned and not unreadable and self._may_settle(provision, now):
            await self._settle(provision, lost=lost_instances(provision, records))

    async def _settle(self, provision: Provision, *, lost: tuple[str, ...] = ()) -> None:
        forget_at = after(self._context.clock.now(), self._config.lifetimes.keep_records_s)
        await self._context.store.replace_provision(provision, settled(provision, forget_at=forget_at, lost=lost))

    def _report(self, provision: Provision, result: RemudaError | None) -> None:
        if isinstance(result, RemudaError) and not isinstance(result, Conflict):
            self._result.error(f"provision {provision.provision_id}: {result.message}")

    async def _release(self, provision: Provision) -> Provision:
        was_open = provision.status is ProvisionStatus.OPEN
        why = "its deadline passed before the commit" if was_open else "it was not released before its deadline"
        closed = released(provision, now=self._context.clock.now(), why=why)
        await self._context.store.replace_provision(provision, closed)
        self._context.event_log.record("provision-closed", closed.why, run_id=provision.subject)
        return closed

    def _may_settle(self, provision: Provision, now: datetime) -> bool:
        latest = max(provision.deadline, provision.released_at or provision.deadline)
        return now - latest >= timedelta(seconds=SETTLE_AFTER_S + self._config.lifetimes.margin_s)

    async def _take_back(self, instance: Instance, why: str) -> None:
        leaving = leave_holder(instance)
        if leaving is None:
            return
        after = await leave(self._context, self._config, instance, leaving, by=Actor.REFRESH, why=why)
        if after is None:
            # It has a job, or may have one.
            return
        self._result.rolled_back.append(instance.instance_id)
        if after.state in ABSORBING:
            self._result.retired[instance.instance_id] = why


class PoolMessageSweep(PartialSweep):
    """Deletes stale pool messages: messages about instances that are no longer idle, and duplicates.

    A provision drops such messages when it receives them; this sweep removes those that no provision receives.
    Receiving hides messages from provisions, so the sweep receives only if a queue held more messages than its class
    has idle instances in two consecutive sweeps.
    """

    async def run(self, idle_instances: Iterable[Instance]) -> None:
        idle = Counter(item.resource_class for item in idle_instances)
        names = [resource_class.name for resource_class in self._config.classes]
        depths = await map_concurrently(names, self._context.pool.depth)
        for name, depth in zip(names, depths, strict=True):
            try:
                if isinstance(depth, RemudaError):
                    raise depth
                # A message that is being claimed is counted, too, so a single surplus proves nothing.
                if depth > idle[name] and self._first_seen.was_seen_before(f"surplus-messages:{name}"):
                    await self._delete_stale(name, min(depth, MAX_MESSAGES))
            except NotFound:
                self._result.error(f"class {name} has no queue; run remuda refresh")

    async def _delete_stale(self, name: str, limit: int) -> None:
        pool = self._context.pool
        held: set[str] = set()
        valid: dict[tuple[str, int], float] = {}
        received = 0
        try:
            while received < limit:
                receive_at = self._context.clock.monotonic()
                batch = await pool.receive(name, limit=BATCH, visibility_s=VISIBILITY_S)
                if not batch:
                    break
                received += len(batch)
                held.update(delivery.receipt for delivery in batch)
                stale = await self._find_stale(batch, valid, receive_at)
                await pool.delete(name, stale)
                held.difference_update(stale)
                self._result.stale_messages += len(stale)
        finally:
            # Also after an error or a cancellation: provisions need not wait for the visibility timeout.
            await pool.make_visible(name, held)

    async def _find_stale(
        self, batch: Iterable[Delivery], valid: dict[tuple[str, int], float], receive_at: float
    ) -> list[str]:
        """Return the receipts of stale messages and add the others to `valid`, with the time of their receive call.

        A valid message that returns after its visibility timeout is the same message, not a duplicate.
        """
        received_at = self._context.clock.monotonic()
        messages = [(delivery.receipt, delivery.message) for delivery in batch]
        read = self._context.store.get_many({message.id for _, message in messages if message is not None})
        records, unreadable = await skip_unreadable(read, self._result.error)
        stale: list[str] = []
        for receipt, message in messages:
            if message is not None and message.id in unreadable:
                continue
            record = records.get(message.id) if message is not None else None
            if (
                message is None
                or record is None
                or record.state is not State.IDLE
                or record.message() != message
                or received_at - valid.get((message.id, message.epoch), -inf) < VISIBILITY_S
            ):
                stale.append(receipt)
            else:
                valid[message.id, message.epoch] = receive_at
        return stale
