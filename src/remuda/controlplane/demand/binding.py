"""Binding: the run, the repository and the trust of a job that GitHub has started on a runner of a set."""

from __future__ import annotations

from remuda.controlplane.context import CONFLICT_ATTEMPTS, Context, pause_before_retry
from remuda.controlplane.demand.context import DemandContext
from remuda.controlplane.demand.equipment import Equipment
from remuda.controlplane.demand.machines import KnownMachine, MachineTable
from remuda.controlplane.demand.sets import SetState
from remuda.domain.demand import JobEvent
from remuda.domain.errors import Conflict, RemudaError, Unavailable
from remuda.domain.instance import Instance, State
from remuda.domain.pool_config import PoolConfig, parse_runner_name
from remuda.domain.resources import Tier, is_repository
from remuda.domain.transitions import Bind
from remuda.domain.trust import Trust, names_head, trust_of_run

#: Attempts to read the run of a job from GitHub.
READ_ATTEMPTS = 3


class Binder:
    def __init__(self, demand: DemandContext, table: MachineTable, equipment: Equipment) -> None:
        self._demand = demand
        self._table = table
        self._equipment = equipment

    @property
    def _context(self) -> Context:
        return self._demand.context

    @staticmethod
    def parse(config: PoolConfig, runner_name: str) -> tuple[int, str] | None:
        """Return epoch and instance id of a runner; None if it does not belong to this pool."""
        return parse_runner_name(config.pool, runner_name)

    async def bind(self, state: SetState, config: PoolConfig, event: JobEvent) -> None:
        """Bind a started job to its machine. Idempotent. An error is logged: the job is bound late then."""
        parsed = self.parse(config, event.runner_name)
        if parsed is None:
            return
        epoch, instance_id = parsed
        for _ in range(CONFLICT_ATTEMPTS):
            try:
                await self._bind_once(state, config, event, instance_id=instance_id, epoch=epoch)
                break
            except Conflict as conflict:
                self._context.event_log.record("bind-lost", conflict.message, instance_id=instance_id)
                if not isinstance(conflict.current, Instance):
                    break
                # For example, an operator has drained the machine: then it serves the job, and is retired after it.
                self._table.put(conflict.current)
            except RemudaError as error:
                self._context.event_log.record("bind-failed", error.message, instance_id=instance_id)
                break

    async def _bind_once(
        self, state: SetState, config: PoolConfig, event: JobEvent, *, instance_id: str, epoch: int
    ) -> None:
        machine = await self._machine(state, instance_id, epoch)
        if machine is None:
            why = "its machine is not running in this set"
            self._context.event_log.record("job-unmatched", why, instance_id=instance_id, runner_set=state.name)
            return
        machine.job_id = event.job_id
        if not machine.instance.is_bound:
            await self._bind(state, config, machine, event)

    async def _machine(self, state: SetState, instance_id: str, epoch: int) -> KnownMachine | None:
        """The machine, if it runs in this set and epoch. What is known of it may be older than the event."""
        known = self._table.get(instance_id)
        if known is None or not _runs(known, state, epoch):
            record = await self._context.store.get(instance_id)
            known = self._table.put(record) if record is not None else None
        return known if known is not None and _runs(known, state, epoch) else None

    async def _bind(self, state: SetState, config: PoolConfig, machine: KnownMachine, event: JobEvent) -> None:
        trust = await self._trust(state, event)
        bind = Bind(
            runner_name=event.runner_name,
            report=machine.report,
            run_id=event.run_id,
            repository=event.repository if is_repository(event.repository) else "",
            tier=trust.tier,
            set_tier=state.runner_set.trust,
            max_runtime_s=config.lifetimes.max_runtime_s,
            margin_s=config.lifetimes.margin_s,
        )
        await self._equipment.bind(machine, bind, f"job {event.display_name or event.job_id} has started ({trust})")

    async def _trust(self, state: SetState, event: JobEvent) -> Trust:
        """The event's name decides, or one read of the run. A job whose origin is unknown is untrusted."""
        if state.runner_set.trust is Tier.UNTRUSTED:
            return Trust(tier=Tier.UNTRUSTED, why="the set is untrusted")
        if not names_head(event.event):
            return trust_of_run(event.event, "", event.repository)
        github = self._context.github
        if github is None or not is_repository(event.repository) or not event.run_id.isdecimal():
            return Trust(tier=Tier.UNTRUSTED, why=f"event {event.event}, and its run cannot be read")
        for attempt in range(1, READ_ATTEMPTS + 1):
            try:
                run = await github.get_run(state.runner_set.scope, event.repository, int(event.run_id))
            except Unavailable as error:
                self._context.event_log.record("read-failed", error.message, run_id=event.run_id)
                if attempt < READ_ATTEMPTS:
                    await pause_before_retry(self._context)
            except RemudaError as error:
                return Trust(tier=Tier.UNTRUSTED, why=f"its run cannot be read: {error.message}")
            else:
                return trust_of_run(event.event, run.head_repository if run else "", event.repository)
        return Trust(tier=Tier.UNTRUSTED, why="its run cannot be read")


def _runs(machine: KnownMachine, state: SetState, epoch: int) -> bool:
    instance = machine.instance
    return instance.state is State.RUNNING and instance.epoch == epoch and instance.runner_set == state.name
