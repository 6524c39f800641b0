"""Creation of new instances: one launch for all that are missing at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from remuda.controlplane.context import Context, apply_confirmed, map_concurrently, transition
from remuda.controlplane.ended import LOOK_S, early_end, end_of, find_ended
from remuda.controlplane.provision.outcome import OutcomeRecorder
from remuda.controlplane.provision.plan import ProvisionPlan, raise_if_past_deadline
from remuda.controlplane.provision.registration import describe_failure, wait_for_registration
from remuda.controlplane.provision.rollback import AcquiredInstance, AcquiredInstances
from remuda.controlplane.signal_waiter import StopReason
from remuda.domain.errors import CapacityError, Conflict, RemudaError, TimedOut, Unavailable
from remuda.domain.instance import LIVE, Actor, Instance, State, describe_retirement
from remuda.domain.resources import normalize_repository
from remuda.domain.signals import Verdict
from remuda.domain.timestamps import to_milliseconds
from remuda.domain.transitions import create
from remuda.ports.compute import Launched, LaunchRequest, LaunchResult
from remuda.ports.github import GitHub

#: Seconds that a cancelled provision waits for the answer of a launch in progress, so that no machine leaks.
LAUNCH_ANSWER_TIMEOUT_S = 4.0
#: Seconds that a failed provision may spend on removing its registrations. Sweeps remove the rest.
REMOVAL_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _LaunchOrder:
    """A machine that a worker waits for."""

    plan: ProvisionPlan
    acquired: AcquiredInstances
    instance: asyncio.Future[Instance]


class Creation:
    """Launches. Concurrent requests share one: those of a run's workers, or those of all provisions of a runner set."""

    def __init__(
        self,
        context: Context,
        recorder: OutcomeRecorder,
        jit: JustInTimeRegistrations | None = None,
        *,
        all_or_nothing: bool = True,
    ) -> None:
        """With `all_or_nothing`, a missing machine fails `run`; without, only the request that waits for it."""
        self._context = context
        self._jit = jit
        self._recorder = recorder
        self._all_or_nothing = all_or_nothing
        self._orders: list[_LaunchOrder] = []
        self._wake = asyncio.Event()
        self._launches = 0

    async def create_one(self, plan: ProvisionPlan, acquired: AcquiredInstances) -> Instance:
        """Launch an instance and write its record."""
        future: asyncio.Future[Instance] = asyncio.get_running_loop().create_future()
        self._orders.append(_LaunchOrder(plan=plan, acquired=acquired, instance=future))
        self._wake.set()
        return await future

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            orders, self._orders = self._orders, []
            if not orders:
                continue
            try:
                instances = await self._launch(orders)
            except RemudaError as error:
                if self._all_or_nothing:
                    raise
                _fail(orders, error)
                continue
            for order, instance in zip(orders, instances, strict=False):
                if not order.instance.done():
                    order.instance.set_result(instance)

    async def _launch(self, orders: Sequence[_LaunchOrder]) -> list[Instance]:
        """Launch for all orders. Without `all_or_nothing`, the last ones may fail alone."""
        plan, context = orders[0].plan, self._context
        if plan.config.budget.is_used_up(context.clock.now()):
            why = plan.config.budget.warning(context.clock.now())
            raise CapacityError(f"the budget of the pool is used up: {why}", fix="raise it with remuda budget")
        count = await self._count_within_limit(plan, len(orders))
        # After the last wait: a machine that is launched past the deadline would only be given back.
        raise_if_past_deadline(context, plan)
        self._launches += 1
        lifetimes = plan.config.lifetimes
        left_s = (plan.provision.deadline - context.clock.now()).total_seconds()
        request = LaunchRequest(
            provision_id=plan.provision.provision_id,
            # With the nonce, because an id may recur after its record was deleted: EC2 would repeat the old answer.
            client_token=f"{plan.provision.provision_id}{plan.provision.nonce}-{self._launches}",
            count=count,
            request=plan.request,
            scope=plan.scope,
            launch=plan.config.launch,
            first_life_s=left_s + 2 * lifetimes.margin_s,
            margin_s=lifetimes.margin_s,
        )
        single_use = describe_retirement(plan.retire_reason, "") if plan.retire_reason else ""
        why = single_use or f"{count} not available in the pool"
        context.event_log.record("launch", why, count=count, run_id=plan.provision.subject)
        result = await self._call_launch(request, orders)
        self._recorder.launch(count, len(result.instances), result.errors, why=single_use)
        launched = len(result.instances)
        if launched < len(orders):
            self._fail_missing(orders, result, requested=count)
        for error in result.errors:
            context.event_log.record("launch-refused", error, run_id=plan.provision.subject)
        orders = orders[:launched]
        created = [self._new_record(order.plan, item) for order, item in zip(orders, result.instances, strict=True)]
        if self._jit is not None:
            created = await self._jit.register(created)
        async with asyncio.TaskGroup() as group:
            writes = [
                group.create_task(self._write_record(record, order))
                for record, order in zip(created, orders, strict=True)
            ]
        instances = [write.result() for write in writes]
        await self._check_limit_after_launch(plan, instances)
        return instances

    def _fail_missing(self, orders: Sequence[_LaunchOrder], result: LaunchResult, *, requested: int) -> None:
        launched, wanted = len(result.instances), len(orders)
        errors = "; ".join(result.errors) or "no reason was given"
        if launched == requested:
            limit = orders[0].plan.config.max_instances
            error = _limit_exceeded(limit, f"{wanted - launched} of {wanted} instances would exceed the limit")
        else:
            error = CapacityError(
                f"{launched} of {requested} instances were launched: {errors}",
                fix=result.fix or "allow more instance types or subnets, another usage class, or try later",
            )
        if self._all_or_nothing:
            raise error
        _fail(orders[launched:], error)

    async def _count_within_limit(self, plan: ProvisionPlan, count: int) -> int:
        live, limit = await self._context.store.count_live(), plan.config.max_instances
        if live + count <= limit:
            return count
        if self._all_or_nothing or live >= limit:
            raise _limit_exceeded(limit, f"{count} more instances would make {live + count}")
        return limit - live

    async def _check_limit_after_launch(self, plan: ProvisionPlan, ours: Sequence[Instance]) -> None:
        """Another provision may have launched at the same time. The oldest instances within the limit stay."""
        limit = plan.config.max_instances
        if await self._context.store.count_live() <= limit:
            return
        live = sorted(await self._context.store.find(LIVE), key=lambda item: (item.created_at, item.instance_id))
        oldest = {item.instance_id for item in live[:limit]}
        if any(instance.instance_id not in oldest for instance in ours):
            raise _limit_exceeded(limit, f"another provision launched first, and there are {len(live)} instances")

    async def _call_launch(self, request: LaunchRequest, orders: Sequence[_LaunchOrder]) -> LaunchResult:
        """Launch and track the machines, even if cancelled while the call is in progress."""
        launching = asyncio.ensure_future(self._context.compute.launch(request))
        try:
            result = await asyncio.shield(launching)
        except asyncio.CancelledError:
            await asyncio.wait({launching}, timeout=LAUNCH_ANSWER_TIMEOUT_S)
            if launching.done() and not launching.cancelled() and launching.exception() is None:
                self._track(launching.result(), orders)
            launching.cancel()
            raise
        self._track(result, orders)
        return result

    def _track(self, result: LaunchResult, orders: Sequence[_LaunchOrder]) -> None:
        for order, launched in zip(orders, result.instances, strict=False):
            order.acquired.add(self._new_record(order.plan, launched), recorded=False)

    def _new_record(self, plan: ProvisionPlan, launched: Launched) -> Instance:
        resource_class = plan.request.resource_class
        return Instance(
            instance_id=launched.instance_id,
            state=State.CREATED,
            epoch=1,
            threshold=to_milliseconds(plan.provision.deadline),
            holder=plan.provision.holder,
            claim=f"{plan.provision.provision_id}/launch",
            resource_class=resource_class.name,
            instance_type=launched.instance_type,
            usage_class=launched.usage_class,
            cpu=resource_class.cpu,
            memory_mib=resource_class.memory_mib,
            scope=plan.scope,
            tier=plan.request.tier,
            repository=normalize_repository(plan.repository),
            runner_version=plan.config.runner_version,
            retire_reason=plan.retire_reason,
            created_at=to_milliseconds(self._context.clock.now()),
            assignment=plan.assignment(launched.instance_id, 1),
        )

    async def _write_record(self, record: Instance, order: _LaunchOrder) -> Instance:
        why = "launched"
        instance = await apply_confirmed(self._context, create(record, by=order.plan.actor, why=why))
        order.acquired.add(instance)
        self._context.event_log.record(
            "create",
            why,
            instance_id=instance.instance_id,
            target=State.CREATED.value,
            run_id=instance.subject,
            epoch=instance.epoch,
        )
        return instance


def _limit_exceeded(limit: int, problem: str) -> CapacityError:
    return CapacityError(
        f"{problem}; max-instances is {limit}", fix="raise --max-instances and run remuda refresh, or try later"
    )


def _fail(orders: Sequence[_LaunchOrder], error: RemudaError) -> None:
    for order in orders:
        if not order.instance.done():
            order.instance.set_exception(error)


async def wait_for_created(
    context: Context, plan: ProvisionPlan, instance: Instance, acquired: AcquiredInstances
) -> AcquiredInstance:
    """Wait until a new instance is registered."""
    waited = await wait_for_registration(context, instance, until=plan.until)
    if waited.verdict is Verdict.OK:
        return acquired.register(instance, waited.report)
    why = f"new instance {instance.instance_id}: {describe_failure(waited)}"
    if waited.stopped is StopReason.TIMEOUT:
        raise TimedOut(why, fix="raise --provision-timeout-sec, or read the machine's console log")
    raise Unavailable(why)


async def watch_created(context: Context, acquired: AcquiredInstances) -> None:
    """Raise when a new instance has ended before the commit; its record gets the reason."""
    while True:
        await context.clock.sleep(LOOK_S)
        new = [item.instance for item in acquired.all() if item.recorded and item.instance.state is State.CREATED]
        try:
            ended = await find_ended(context, new)
        except RemudaError as error:
            context.event_log.record("read-failed", error.message)
            continue
        for instance, view in ended:
            event, why = end_of(view, claim=instance.claim)
            # If the write fails, the rollback ends the record, without the reason.
            with suppress(RemudaError):
                await transition(context, instance, event, by=Actor.PROVISION, why=why)
                acquired.remove(instance)
        if ended:
            raise early_end(*ended[0])


class JustInTimeRegistrations:
    """Just-in-time registrations: one GitHub call per new instance, each for one job.

    GitHub keeps such a registration from the call on, whether or not its machine starts. A provision that fails removes
    those that it made; after a crash, the sweep for stale registrations finds them by name.
    """

    def __init__(self, context: Context, github: GitHub, plan: ProvisionPlan) -> None:
        self._context = context
        self._github = github
        self._plan = plan
        self._runner_ids: dict[str, int] = {}

    async def register(self, instances: Sequence[Instance]) -> list[Instance]:
        """Return the instances with their registrations.

        An error is raised only after all calls have returned, so that every registration that was made is known.
        """
        registered: list[Instance] = []
        failures: list[RemudaError] = []
        for result in await map_concurrently(instances, self._register):
            if isinstance(result, RemudaError):
                failures.append(result)
            else:
                registered.append(result)
        if failures:
            raise failures[0]
        return registered

    async def _register(self, instance: Instance) -> Instance:
        assignment = self._plan.assignment(instance.instance_id, instance.epoch)
        name = assignment.runner_name
        try:
            runner = await self._github.jit_config(
                self._plan.scope, name=name, labels=assignment.labels, group_id=self._plan.runner_group_id
            )
        except Conflict as conflict:
            # Runner names never recur, so this registration is not ours.
            raise Unavailable(
                f"GitHub already has a runner named {name}: {conflict.message}", fix="run remuda refresh and try again"
            ) from conflict
        self._runner_ids[name] = runner.runner_id
        self._context.event_log.record(
            "registered", "just in time, for one job", instance_id=instance.instance_id, run_id=instance.subject
        )
        return replace(instance, assignment=replace(assignment, jit_config=runner.config, runner_id=runner.runner_id))

    async def remove_all(self) -> None:
        """Remove the registrations of a failed provision."""
        try:
            async with asyncio.timeout(REMOVAL_TIMEOUT_S):
                results = await map_concurrently(self._runner_ids.values(), self._remove)
        except TimeoutError:
            self._context.event_log.record("rollback-incomplete", "timeout; sweeps will remove the registrations")
            return
        for result in results:
            if isinstance(result, RemudaError):
                self._context.event_log.record("rollback-incomplete", f"a registration is left: {result.message}")

    async def _remove(self, runner_id: int) -> None:
        await self._github.delete_runner(self._plan.scope, runner_id)
