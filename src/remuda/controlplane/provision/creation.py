"""Creation of what the pool could not give: one launch for all that is missing at a time, all or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from remuda.controlplane.context import Context, apply_surely
from remuda.controlplane.provision.just_in_time import JustInTime
from remuda.controlplane.provision.outcome import OutcomeRecorder
from remuda.controlplane.provision.rollback import AcquiredInstances
from remuda.controlplane.provision.selection import (
    ProvisionPlan,
    RegisteredInstance,
    describe_failure,
    raise_if_hopeless,
    raise_if_late,
)
from remuda.controlplane.signal_waiter import Ended, SignalWaiter
from remuda.domain.errors import CapacityError, TimedOut, Unavailable
from remuda.domain.instance import LIVE, Instance, State
from remuda.domain.provision_outcome import RunnerSource
from remuda.domain.resources import folded
from remuda.domain.signals import Verdict, registration_verdict
from remuda.domain.timestamps import to_milliseconds
from remuda.domain.transitions import Actor, create
from remuda.ports.compute import Launched, LaunchRequest, LaunchResult

#: After a cancellation: how long to wait for the answer of a launch under way, so that nothing leaks.
LAUNCH_ANSWER_S = 4.0


class Creation:
    def __init__(
        self,
        context: Context,
        terms: ProvisionPlan,
        holdings: AcquiredInstances,
        recorder: OutcomeRecorder,
        just_in_time: JustInTime | None = None,
    ) -> None:
        self._context = context
        self._just_in_time = just_in_time
        self._terms = terms
        self._holdings = holdings
        self._recorder = recorder
        self._needs: list[asyncio.Future[Instance]] = []
        self._wake = asyncio.Event()
        self._launches = 0

    async def make_one(self) -> RegisteredInstance:
        """A new instance, registered. Those who ask at the same time share a launch."""
        future: asyncio.Future[Instance] = asyncio.get_running_loop().create_future()
        self._needs.append(future)
        self._wake.set()
        return await self._await_registration(await future)

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            needs, self._needs = self._needs, []
            if needs:
                instances = await self._launch(len(needs))
                for future, instance in zip(needs, instances, strict=True):
                    if not future.done():
                        future.set_result(instance)

    async def _launch(self, count: int) -> list[Instance]:
        terms, context = self._terms, self._context
        raise_if_late(context, terms)
        await self._check_cap(count)
        self._launches += 1
        lifetimes = terms.config.lifetimes
        request = LaunchRequest(
            provision_id=terms.provision.provision_id,
            client_token=f"{terms.provision.provision_id}-{self._launches}",
            count=count,
            request=terms.request,
            scope=terms.scope,
            launch=terms.config.launch,
            first_life_s=(terms.provision.deadline - context.clock.now()).total_seconds() + 2 * lifetimes.margin_s,
            margin_s=lifetimes.margin_s,
        )
        why = terms.retired_because or f"the pool lacks {count}"
        context.event_log.record("launch", why, count=count, run_id=terms.provision.run_id)
        result = await self._ask(request)
        self._recorder.launch(count, len(result.instances), result.errors, why=terms.retired_because)
        if len(result.instances) < count:
            said = "; ".join(result.errors) or "no reason was given"
            raise CapacityError(
                f"{len(result.instances)} of {count} instances could be launched: {said}",
                fix="allow more instance types or subnets, another usage class, or try later",
            )
        for said in result.errors:
            context.event_log.record("launch-refused", said, run_id=terms.provision.run_id)
        newborn = [self._born(launched) for launched in result.instances]
        if self._just_in_time is not None:
            newborn = await self._just_in_time.register(newborn)
        async with asyncio.TaskGroup() as group:
            records = [group.create_task(self._write_record(born)) for born in newborn]
        instances = [record.result() for record in records]
        await self._check_cap_again(instances)
        return instances

    async def _check_cap(self, count: int) -> None:
        most = self._terms.config.max_instances
        live = await self._context.store.count_live()
        if live + count > most:
            raise self._full(f"{count} more instances would make {live + count}")

    async def _check_cap_again(self, ours: Sequence[Instance]) -> None:
        """Others may have launched at the same moment: those who came first stay."""
        most = self._terms.config.max_instances
        if await self._context.store.count_live() <= most:
            return
        live = sorted(await self._context.store.find(LIVE), key=lambda item: (item.created_at, item.instance_id))
        first = {item.instance_id for item in live[:most]}
        if any(instance.instance_id not in first for instance in ours):
            raise self._full(f"others were first, and there are {len(live)} instances")

    def _full(self, what: str) -> CapacityError:
        return CapacityError(
            f"{what}; max-instances is {self._terms.config.max_instances}",
            fix="raise --max-instances and run remuda refresh, or try later",
        )

    async def _ask(self, request: LaunchRequest) -> LaunchResult:
        """Launch, and know the answer even when cancelled meanwhile."""
        launching = asyncio.ensure_future(self._context.compute.launch(request))
        try:
            result = await asyncio.shield(launching)
        except asyncio.CancelledError:
            await asyncio.wait({launching}, timeout=LAUNCH_ANSWER_S)
            if launching.done() and not launching.cancelled() and launching.exception() is None:
                self._remember(launching.result())
            launching.cancel()
            raise
        self._remember(result)
        return result

    def _remember(self, result: LaunchResult) -> None:
        for launched in result.instances:
            self._holdings.hold(self._born(launched), recorded=False)

    def _born(self, launched: Launched) -> Instance:
        terms = self._terms
        wanted = terms.request.resource_class
        return Instance(
            instance_id=launched.instance_id,
            state=State.CREATED,
            epoch=1,
            threshold=to_milliseconds(terms.provision.deadline),
            run_id=terms.provision.run_id,
            owner=f"{terms.provision.provision_id}/launch",
            provision_id=terms.provision.provision_id,
            resource_class=wanted.name,
            instance_type=launched.instance_type,
            usage_class=launched.usage_class,
            cpu=wanted.cpu,
            memory_mib=wanted.memory_mib,
            scope=terms.scope,
            tier=terms.request.tier,
            repository=folded(terms.repository),
            retire=terms.retired_because,
            created_at=to_milliseconds(self._context.clock.now()),
            assignment=terms.assignment(launched.instance_id, 1),
        )

    async def _write_record(self, born: Instance) -> Instance:
        why = f"launched for run {born.run_id}"
        instance = await apply_surely(self._context, create(born, by=Actor.PROVISION, why=why))
        self._holdings.hold(instance)
        self._context.event_log.record(
            "create",
            why,
            instance_id=instance.instance_id,
            target=State.CREATED.value,
            run_id=instance.run_id,
            epoch=instance.epoch,
        )
        return instance

    async def _await_registration(self, instance: Instance) -> RegisteredInstance:
        wait = SignalWaiter(
            self._context, instance_id=instance.instance_id, epoch=instance.epoch, verdict_of=registration_verdict
        )
        waited = await wait.wait(until=self._terms.until)
        if waited.verdict is Verdict.OK:
            return RegisteredInstance(instance=instance, source=RunnerSource.CREATED, report=waited.report)
        raise_if_hopeless(waited)
        why = f"new instance {instance.instance_id}: {describe_failure(waited)}"
        if waited.ended is Ended.TIMEOUT:
            raise TimedOut(why, fix="raise --provision-timeout-sec, or look into the machine's log")
        raise Unavailable(why)
