"""Acquisitions: machines for a set, from the pool if possible, newly launched otherwise.

Machines that are missing at the same time are acquired as one batch, with one record, which is written before a launch.
A claim needs no record but its machine's. A claimed machine is equipped at once; a launched one when its agent reports
that it has booted, which the reconciler sees.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from remuda.controlplane.context import Context, run_to_end
from remuda.controlplane.demand.acquisition_record import AcquisitionRecord
from remuda.controlplane.demand.context import BackgroundTasks, DemandContext
from remuda.controlplane.demand.equipment import Equipment
from remuda.controlplane.demand.machines import KnownMachine, MachineTable
from remuda.controlplane.demand.sets import SetState
from remuda.controlplane.provision import close_pickup
from remuda.controlplane.provision.creation import Creation
from remuda.controlplane.provision.pickup import PickupManager, UsedMessages
from remuda.controlplane.provision.plan import ProvisionLimits, ProvisionPlan
from remuda.controlplane.provision.rollback import AcquiredInstances, give_back
from remuda.controlplane.provision.selection import Selection
from remuda.domain.errors import Interrupted, RemudaError, Unavailable
from remuda.domain.holder import SetHolder
from remuda.domain.instance import Instance
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import MAX_REASON, Provision
from remuda.domain.resources import RunnerRequest, mismatch, normalize_repository, repository_of
from remuda.domain.runner_set import RunnerSet
from remuda.ports.pool import BATCH

#: Messages of claimed machines that may be in the pool of a class: as many as one call deletes.
MAX_STALE = BATCH


def runner_request(config: PoolConfig, runner_set: RunnerSet) -> RunnerRequest:
    """The requirements of a set for its machines."""
    resource_class = config.resource_class(runner_set.resource_class)
    return RunnerRequest(
        resource_class=resource_class,
        usage_class=runner_set.usage_class,
        patterns=resource_class.types.narrowed(runner_set.patterns),
        tier=runner_set.trust,
        reuse=config.reuse,
        repository=normalize_repository(_repository(runner_set)),
    )


def _repository(runner_set: RunnerSet) -> str:
    """The only repository that the set serves; empty if its scope is an organisation."""
    return repository_of(runner_set.scope, "")


def _first(errors: ExceptionGroup[RemudaError]) -> RemudaError:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first


class Acquisitions:
    def __init__(
        self,
        demand: DemandContext,
        table: MachineTable,
        equipment: Equipment,
        tasks: BackgroundTasks,
        *,
        on_rollback: Callable[[], None],
    ) -> None:
        """`on_rollback` is called after machines were given back: their records have changed."""
        self._demand = demand
        self._table = table
        self._equipment = equipment
        self._tasks = tasks
        self._on_rollback = on_rollback
        self._used = UsedMessages(demand.context)

    async def close(self) -> None:
        """Delete the pool messages of claimed machines."""
        await self._used.close()

    def start(self, state: SetState, config: PoolConfig, count: int, *, for_pool: bool = False) -> None:
        """Acquire machines in the background. They count as supply at once."""
        batch = _Batch(
            self._demand,
            self._table,
            self._equipment,
            state,
            used=self._used,
            config=config,
            count=count,
            for_pool=for_pool,
        )
        self._tasks.start("acquisition", self._run(batch))

    async def _run(self, batch: _Batch) -> None:
        try:
            await batch.run()
        finally:
            if batch.has_failed:
                self._on_rollback()


class _Batch:
    """Acquisitions that share one pass over the pool and one launch."""

    def __init__(
        self,
        demand: DemandContext,
        table: MachineTable,
        equipment: Equipment,
        state: SetState,
        *,
        used: UsedMessages,
        config: PoolConfig,
        count: int,
        for_pool: bool,
    ) -> None:
        self._demand = demand
        self._table = table
        self._equipment = equipment
        self._state = state
        self._config = config
        self._for_pool = for_pool
        #: Whether it is started during the pause after a failure, for machines that came to the pool.
        self._is_between = not for_pool and state.retry_at > self._context.clock.monotonic()
        self._request = runner_request(config, state.runner_set)
        self._plan = self._new_plan(count)
        self._record = AcquisitionRecord(self._context, config, self._plan.provision)
        self._used = used
        self._pickup = PickupManager(self._context, self._request, self._record.recorder, used)
        self._creation = Creation(self._context, self._record.recorder, all_or_nothing=False)
        #: Workers that may still find a machine in the pool. The others are launched together.
        self._undecided = count
        self._all_decided = asyncio.Event()
        self._error: RemudaError | None = None
        self._has_launched = False
        self.has_failed = False
        #: Acquisitions without a machine. Those that failed count until the pause after the failure is noted.
        self._counted = 0
        self._count(count)

    @property
    def _context(self) -> Context:
        return self._demand.context

    def _new_plan(self, count: int) -> ProvisionPlan:
        context, config, runner_set = self._context, self._config, self._state.runner_set
        limits = ProvisionLimits.start(context.clock, config.lifetimes.provision_timeout_s)
        purpose = "for the pool" if self._for_pool else "for a job"
        summary = f"{runner_set.usage_class}, {runner_set.trust}, {purpose}, types {runner_set.allowed_instance_types}"
        return ProvisionPlan(
            config=config,
            provision=Provision(
                holder=SetHolder(name=runner_set.name, provision_id=context.ids.new("p-")),
                resource_class=runner_set.resource_class,
                count=count,
                created_at=limits.started_at,
                deadline=limits.deadline,
                request_summary=summary[:MAX_REASON],
            ),
            request=self._request,
            scope=runner_set.scope,
            until=limits.until,
            max_runtime_s=config.lifetimes.max_runtime_s,
            repository=_repository(runner_set),
            runner_set=runner_set,
        )

    async def run(self) -> None:
        provision_id = self._plan.provision.provision_id
        self._table.acquiring.add(provision_id)
        try:
            async with asyncio.TaskGroup() as group:
                services = [group.create_task(self._pickup.run()), group.create_task(self._creation.run())]
                workers = [group.create_task(self._acquire()) for _ in range(self._plan.provision.count)]
                await asyncio.wait(workers)
                for service in services:
                    service.cancel()
        except* RemudaError as errors:
            # Of the pass over the pool. The workers have rolled back.
            self._error = _first(errors)
        except* Exception:
            self._error = Unavailable("a bug")
            raise
        finally:
            self._table.acquiring.discard(provision_id)
            # Before what failed is missing, and the set is woken: it would try again at once.
            self._note_result()
            self._count(-self._counted)
            self._state.wake()
            if not self._for_pool:
                await close_pickup(self._context, self._pickup)

    async def _acquire(self) -> None:
        acquired = AcquiredInstances()
        try:
            claimed: Instance | None = None
            try:
                if not self._for_pool and not self._plan.retire_reason:
                    claimed = await self._claim(acquired)
            finally:
                self._decide()
            instance = claimed or await self._launch(acquired)
            machine = self._table.put(instance)
            self._count(-1)
            if machine is None or machine.instance.epoch != instance.epoch:
                await self._record.given_up()
                return
            machine.read_later(self._context.clock.monotonic())
            machine.acquisition = self._record
            machine.for_pool = self._for_pool
            if claimed is not None:
                await self._equip(machine, acquired)
        except BaseException as error:
            failure = error if isinstance(error, RemudaError) else Interrupted("interrupted")
            await run_to_end(self._give_back(acquired, failure))
            if not isinstance(error, RemudaError):
                raise
            self._error = error

    async def _claim(self, acquired: AcquiredInstances) -> Instance | None:
        selection = Selection(self._context, self._plan, self._pickup, acquired, self._record.recorder)
        claimed = await self._claim_known(selection, MAX_STALE) or await selection.claim()
        # Messages may be hidden by another set's pass: known machines are better than a launch.
        return claimed or await self._claim_known(selection)

    async def _launch(self, acquired: AcquiredInstances) -> Instance:
        """Launch a machine, together with the others that the batch needs."""
        await self._all_decided.wait()
        await self._record.store()
        instance = await self._creation.create_one(self._plan, acquired)
        self._has_launched = True
        return instance

    async def _claim_known(self, selection: Selection, max_stale: float = math.inf) -> Instance | None:
        """Claim a machine that this process knows to be idle. Its pool message stays, until enough can be deleted."""
        while self._used.count_stale(self._request.resource_class.name) < max_stale:
            message = self._table.take_idle(lambda item: mismatch(item.message(), self._request) is None)
            if message is None:
                return None
            with self._used.claiming(message):
                claimed = await selection.claim_known(message)
            if claimed is not None:
                self._used.add_stale(message)
                return claimed
        return None

    async def _equip(self, machine: KnownMachine, acquired: AcquiredInstances) -> None:
        machine.handled = True
        await self._equipment.equip(self._state, self._config, machine, "claimed for a job")
        # Not after a failure: the reconciler would equip the machine while it is given back.
        machine.handled = False
        acquired.remove(machine.instance)
        self._state.wake()

    async def _give_back(self, acquired: AcquiredInstances, failure: RemudaError) -> None:
        context, why = self._context, failure.message
        self.has_failed = True
        items = acquired.all()
        context.event_log.record("rollback", why, run_id=self._plan.provision.subject, instances=len(items))
        await give_back(context, self._config, acquired, why=why)
        for item in items:
            machine = self._table.get(item.instance.instance_id)
            if machine is not None:
                machine.acquisition = None
            self._table.remove(item.instance.instance_id)
        await self._record.given_up(failure)

    def _decide(self) -> None:
        """One more worker knows whether it needs a launch."""
        self._undecided -= 1
        if not self._undecided:
            self._all_decided.set()

    def _count(self, change: int) -> None:
        """Count acquisitions without a machine."""
        self._counted += change
        if self._for_pool:
            self._state.filling += change
        else:
            self._state.acquiring += change

    def _note_result(self) -> None:
        state, error = self._state, self._error
        if self._is_between and not self._has_launched:
            # It says nothing about launches.
            return
        if error is None or self._has_launched:
            # Only failures in a row make the pause longer.
            state.note_success(for_pool=self._for_pool)
        if error is not None:
            state.note_failure(self._context, error, for_pool=self._for_pool)
