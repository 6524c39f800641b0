"""The reconciler: compares what the sets need with their machines, and starts the steps that are due.

One loop per set, and one for idle machines. A loop decides when it is woken (by a message, a changed report, a finished
step) and when a time limit is reached. Decisions are pure; steps run in the background, one per machine at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime

from remuda.controlplane.context import Context, map_concurrently, transition
from remuda.controlplane.demand.acquisition import Acquisitions, runner_request
from remuda.controlplane.demand.context import BackgroundTasks, DemandContext
from remuda.controlplane.demand.equipment import Equipment
from remuda.controlplane.demand.machines import KnownMachine, MachineTable
from remuda.controlplane.demand.sets import SetState
from remuda.domain.decide.next_step import Write, next_step
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import Actor, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.resources import Reuse, mismatch
from remuda.domain.runner_set import RunnerSet
from remuda.domain.supply import (
    IdleRenewal,
    MachineStep,
    SupplyPlan,
    WarmKey,
    WarmTarget,
    decide_supply,
    decide_warm,
)
from remuda.domain.timestamps import seconds_to_minute
from remuda.domain.transitions import Renew

#: Least seconds between two decisions of a set that nothing wakes.
MIN_PAUSE_S = 0.2
#: Most seconds while a set has fewer runners than it wants and waits for machines that come to the pool.
DEFICIT_PAUSE_S = 2.0
#: Seconds after an unexpected error in a decision.
ERROR_PAUSE_S = 10.0


class Reconciler:
    def __init__(
        self,
        demand: DemandContext,
        table: MachineTable,
        equipment: Equipment,
        acquisitions: Acquisitions,
        tasks: BackgroundTasks,
        *,
        config: Callable[[], PoolConfig],
        on_reconcile: Callable[[SetState, Iterable[KnownMachine]], None] = lambda _state, _machines: None,
    ) -> None:
        """`config` returns the present configuration. `on_reconcile` is called with the machines of each decision."""
        self._on_reconcile = on_reconcile
        self._demand = demand
        self._table = table
        self._equipment = equipment
        self._acquisitions = acquisitions
        self._tasks = tasks
        self._config = config
        self._last: dict[str, tuple[int, int, int]] = {}

    @property
    def _context(self) -> Context:
        return self._demand.context

    async def run(self, state: SetState) -> None:
        """Decide about one set until cancelled."""
        while True:
            state.woken.clear()
            try:
                plan = self.reconcile(state)
                await state.save_problem(self._demand)
                pause_s = self._pause_s(state, plan)
            except RemudaError as error:
                self._context.event_log.record("reconcile-failed", error.message, runner_set=state.name)
                pause_s = ERROR_PAUSE_S
            except Exception as error:  # noqa: BLE001 - a bug in one set must not stop the others
                why = f"a bug: {type(error).__name__}: {error}"
                self._context.event_log.record("reconcile-failed", why, runner_set=state.name)
                pause_s = ERROR_PAUSE_S
            await self._wait(state.woken, pause_s)

    async def _wait(self, woken: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await woken.wait()
        except TimeoutError:
            pass

    def _pause_s(self, state: SetState, plan: SupplyPlan) -> float:
        clock, machines = self._context.clock, list(self._table.of_set(state.name))
        now = clock.now()
        at = [plan.recheck_at, state.recheck_at(now), *(machine.taken_until for machine in machines)]
        times = [(each - now).total_seconds() for each in at if each is not None and each >= now]
        # Capacity windows open at a minute.
        times.append(seconds_to_minute(now))
        if plan.deficit:
            retry_s = state.retry_at - clock.monotonic()
            times.append(retry_s if retry_s > 0 else DEFICIT_PAUSE_S)
        times += [machine.retry_at - clock.monotonic() for machine in machines if machine.retry_at > clock.monotonic()]
        return max(MIN_PAUSE_S, min(times))

    def decide(self, state: SetState) -> SupplyPlan:
        """What the set needs, and which steps are due, by what is known now. Starts nothing."""
        clock, config, runner_set = self._context.clock, self._config(), state.runner_set
        now, monotonic = clock.now(), clock.monotonic()
        return decide_supply(
            runner_set,
            runner_set.capacity_at(now, zone_of=self._demand.zone_of),
            state.statistics,
            [machine.view(now, monotonic) for machine in self._table.of_set(state.name)],
            waiting_jobs=len(state.waiting_jobs(now)),
            ended_jobs=state.ended_jobs(now),
            lost_jobs=state.lost_jobs(now),
            acquiring=state.acquiring,
            publishing=self._table.publishing(state.name),
            draining=state.draining,
            lifetimes=config.lifetimes,
            now=now,
        )

    def reconcile(self, state: SetState) -> SupplyPlan:
        """Decide once and start what is due."""
        clock, config = self._context.clock, self._config()
        now, monotonic = clock.now(), clock.monotonic()
        machines = list(self._table.of_set(state.name))
        for machine in machines:
            if machine.spent_since is not None and machine.instance.is_bound:
                state.note_ended(machine.job_id, now)
            if machine.has_booted:
                state.note_boot()
        plan = self.decide(state)
        for machine in machines:
            is_surplus = machine.instance.instance_id in plan.surplus
            machine.surplus_since = (machine.surplus_since or now) if is_surplus else None
        self._log(state, plan)
        self._on_reconcile(state, machines)
        self._start_steps(state, config, plan)
        self._start_upkeep(state, config, machines, now=now, monotonic=monotonic)
        if plan.deficit and state.scale_set_id:
            self._acquire(state, config, plan, is_paused=state.retry_at > monotonic)
        elif not state.acquiring:
            # What came while nothing was missing says nothing about a later pause.
            state.returned = 0
        return plan

    def _acquire(self, state: SetState, config: PoolConfig, plan: SupplyPlan, *, is_paused: bool) -> None:
        """During the pause after a failure, acquire only what came to the pool: launches would fail again."""
        count = min(plan.deficit, state.returned) if is_paused else plan.acquire
        if count < plan.deficit and not is_paused:
            count = min(plan.deficit, max(count, self._count_idle(state, config)))
        state.returned = 0
        if count:
            self._acquisitions.start(state, config, count)

    def _count_idle(self, state: SetState, config: PoolConfig) -> int:
        """Known idle machines that fit the set. They may be claimed by another process meanwhile."""
        idle = self._table.idle()
        request = runner_request(config, state.runner_set)
        return sum(mismatch(item.message(), request) is None for item in idle)

    def _log(self, state: SetState, plan: SupplyPlan) -> None:
        counts = (plan.desired, plan.supply, plan.deficit)
        if self._last.get(state.name, (0, 0, 0)) == counts:
            return
        self._last[state.name] = counts
        self._context.event_log.record(
            "supply",
            f"{plan.why}: {plan.desired} wanted, {plan.supply} here",
            runner_set=state.name,
            desired=plan.desired,
            supply=plan.supply,
            deficit=plan.deficit,
            waiting=plan.waiting,
        )

    def _start_steps(self, state: SetState, config: PoolConfig, plan: SupplyPlan) -> None:
        equipment = self._equipment
        steps: list[tuple[tuple[MachineStep, ...], Callable[[KnownMachine, str], Awaitable[None]]]] = [
            (plan.end, lambda machine, why: equipment.end(state, machine, why)),
            (plan.bind, lambda machine, why: equipment.bind_late(state, config, machine, why)),
            (plan.release, lambda machine, why: equipment.release(config, machine, why)),
            (plan.withdraw, lambda machine, why: equipment.withdraw(state, config, machine, why)),
            (plan.renew, lambda machine, why: equipment.renew(config, machine, why)),
            (plan.fill, lambda machine, why: equipment.fill(config, machine, why)),
        ]
        if state.scale_set_id:
            steps.append((plan.equip, lambda machine, why: equipment.equip(state, config, machine, why)))
        for due, work in steps:
            for step in due:
                machine = self._table.get(step.machine.instance.instance_id)
                if machine is not None and not machine.handled:
                    self._start(state, machine, work, step.why)

    def _start(
        self, state: SetState, machine: KnownMachine, work: Callable[[KnownMachine, str], Awaitable[None]], why: str
    ) -> None:
        machine.handled = True
        self._tasks.start("step", self._equipment.run_step(state, machine, lambda: work(machine, why)))

    def _start_upkeep(
        self, state: SetState, config: PoolConfig, machines: list[KnownMachine], *, now: datetime, monotonic: float
    ) -> None:
        """Finish releases, which do not depend on the demand."""
        for machine in machines:
            if machine.handled or machine.retry_at > monotonic:
                continue
            if machine.instance.state is State.RELEASING and self._can_advance(config, machine, now):
                self._start(state, machine, lambda machine, _why: self._equipment.advance(config, machine), "")

    @staticmethod
    def _can_advance(config: PoolConfig, machine: KnownMachine, now: datetime) -> bool:
        return isinstance(next_step(machine.instance, machine.report, config.policy, now=now), Write)

    # Idle machines

    def wants_idle(self, states: Mapping[str, SetState]) -> bool:
        return any(target.wanted for target in self._targets(states, self._context.clock.now()))

    def _targets(self, states: Mapping[str, SetState], now: datetime) -> list[WarmTarget]:
        """Idle machines that the open windows of all sets require. Sets with the same requirements share them."""
        config = self._config()
        if config.reuse is Reuse.NEVER:
            return []
        wanted: dict[WarmKey, list[SetState]] = {}
        for state in states.values():
            if self._warm(state, now):
                wanted.setdefault(_warm_key(config, state.runner_set), []).append(state)
        return [
            WarmTarget(
                key=key,
                request=runner_request(config, group[0].runner_set),
                wanted=sum(self._warm(state, now) for state in group),
                filling=sum(self._filling(state) for state in group),
                sets=tuple(state.name for state in group),
            )
            for key, group in wanted.items()
        ]

    def _warm(self, state: SetState, now: datetime) -> int:
        """Idle machines that the set's open window asks for; 0 if its class does not exist."""
        window = state.runner_set.capacity_at(now, zone_of=self._demand.zone_of)
        has_class = any(item.name == state.runner_set.resource_class for item in self._config().classes)
        return window.warm if has_class and not state.draining else 0

    def _filling(self, state: SetState) -> int:
        return state.filling + sum(machine.for_pool for machine in self._table.of_set(state.name))

    async def keep_warm(self, states: Mapping[str, SetState]) -> None:
        """Launch and renew idle machines once."""
        clock, config = self._context.clock, self._config()
        now = clock.now()
        plan = decide_warm(
            targets := self._targets(states, now), self._table.idle(), lifetimes=config.lifetimes, now=now
        )
        for target in targets:
            deficit, state = plan.deficits[target.key], states[target.sets[0]]
            if deficit and state.fill_retry_at <= clock.monotonic():
                self._context.event_log.record(
                    "warm", f"{target.wanted} idle machines wanted, {deficit} missing", runner_set=state.name
                )
                self._acquisitions.start(state, config, deficit, for_pool=True)
        for renewal, result in zip(plan.renewals, await map_concurrently(plan.renewals, self._renew_idle), strict=True):
            if isinstance(result, RemudaError):
                self._context.event_log.record("renew-failed", result.message, instance_id=renewal.instance.instance_id)

    async def _renew_idle(self, renewal: IdleRenewal) -> None:
        try:
            instance = await transition(
                self._context, renewal.instance, Renew(until=renewal.until), by=Actor.LISTENER, why=renewal.why
            )
        except Conflict:
            # It was claimed, or its time is up: the next search shows it.
            return
        self._table.add_idle(instance, self._context.clock.monotonic())


def _warm_key(config: PoolConfig, runner_set: RunnerSet) -> WarmKey:
    request = runner_request(config, runner_set)
    return WarmKey(
        resource_class=request.resource_class.name,
        usage_class=request.usage_class,
        tier=request.tier,
        repository=request.repository if config.reuse is Reuse.SAME_REPO else "",
    )
