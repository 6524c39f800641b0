"""Steps of one machine in a set: equip, fill, bind, renew, release, withdraw and end.

Each step is one or a few conditional writes, in an order that another process can continue from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from remuda.controlplane.context import Context, pause_before_retry, run_to_end, transition
from remuda.controlplane.demand.context import DemandContext
from remuda.controlplane.demand.machines import KnownMachine, MachineTable
from remuda.controlplane.demand.sets import SetState
from remuda.controlplane.ended import end_of
from remuda.controlplane.pool_publisher import PoolPublisher
from remuda.controlplane.reconcile import advance, binding_of_unknown_job, leave, retire_after_unknown_job
from remuda.domain.decide.next_step import Leave, RegistrationRemoval
from remuda.domain.errors import Conflict, NotFound, RemudaError, Throttled, Unavailable
from remuda.domain.instance import Actor, Instance, RetireReason, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.signals import Verdict, boot_verdict, registration_verdict
from remuda.domain.transitions import Bind, End, Equip, Event, Fill, ListenOn
from remuda.ports.compute import MachineView
from remuda.ports.github import Deletion, JitRunner

#: Attempts of a registration whose answer is lost.
REGISTRATION_ATTEMPTS = 3
#: Seconds that a failed step may spend on removing its registration. Sweeps remove the rest.
REMOVAL_TIMEOUT_S = 5.0
#: Seconds before a failed step is repeated: doubled with each failure, up to the maximum.
STEP_RETRY_S = 2.0
LAST_STEP_RETRY_S = 16.0
MAX_DOUBLINGS = 3
#: Maximum seconds if GitHub asks for a longer pause.
MAX_THROTTLED_S = 60.0


class Equipment:
    def __init__(self, demand: DemandContext, table: MachineTable, publisher: PoolPublisher) -> None:
        self._demand = demand
        self._table = table
        self._publisher = publisher

    @property
    def _context(self) -> Context:
        return self._demand.context

    async def run_step(self, state: SetState, machine: KnownMachine, step: Callable[[], Awaitable[None]]) -> None:
        """Run a step of a machine that has no other in progress. A conflict shows its present record."""
        machine.handled = True
        try:
            await step()
        except Conflict as conflict:
            instance_id = machine.instance.instance_id
            self._context.event_log.record("step-lost", conflict.message, instance_id=instance_id)
            if isinstance(conflict.current, Instance) and conflict.current != machine.instance:
                self._note(conflict.current)
            else:
                await self._read_again(machine)
        except RemudaError as error:
            self._postpone(machine, error)
            instance_id = machine.instance.instance_id
            self._context.event_log.record("step-failed", error.message, instance_id=instance_id, runner_set=state.name)
        except Exception:
            # Without a pause, a bug would be repeated forever at once.
            machine.retry_at = self._context.clock.monotonic() + LAST_STEP_RETRY_S
            raise
        else:
            machine.failures = 0
        finally:
            machine.handled = False
            state.wake()

    def _postpone(self, machine: KnownMachine, error: RemudaError) -> None:
        machine.failures += 1
        pause_s = STEP_RETRY_S * 2 ** min(machine.failures - 1, MAX_DOUBLINGS)
        if isinstance(error, Throttled):
            # Other steps of the machine wait as well: its renewal, or its release after a job.
            pause_s = min(max(pause_s, error.retry_after_s), MAX_THROTTLED_S)
        machine.retry_at = self._context.clock.monotonic() + pause_s

    async def _read_again(self, machine: KnownMachine) -> None:
        instance_id = machine.instance.instance_id
        machine.retry_at = self._context.clock.monotonic() + STEP_RETRY_S
        try:
            current = await self._context.store.get(instance_id)
        except RemudaError as error:
            self._context.event_log.record("read-failed", error.message, instance_id=instance_id)
            return
        if current is None:
            self._table.remove(instance_id)
        else:
            self._note(current)

    def _note(self, instance: Instance) -> None:
        self._table.put(instance)

    async def _transition(self, machine: KnownMachine, event: Event, why: str) -> Instance:
        instance = await transition(self._context, machine.instance, event, by=Actor.LISTENER, why=why)
        self._note(instance)
        return instance

    # Registration

    async def equip(self, state: SetState, config: PoolConfig, machine: KnownMachine, why: str) -> None:
        """Register a runner for the machine, and let it listen."""
        instance = machine.instance
        if instance.assignment is None:
            raise Unavailable(f"{instance.instance_id} has no assignment")
        if instance.tier is not state.runner_set.trust:
            raise Unavailable(f"{instance.instance_id} is {instance.tier}, and its set is {state.runner_set.trust} now")
        async with state.registrations:
            runner = await self._register(state, instance.assignment.runner_name)
        event = Equip(
            claim=instance.claim,
            report=machine.report,
            jit_config=runner.config,
            runner_id=runner.runner_id,
            strict=state.runner_set.strict,
            listening_time_s=config.lifetimes.listening_time_s,
            max_runtime_s=config.lifetimes.max_runtime_s,
        )

        try:
            running = await self._transition(machine, event, why)
        except BaseException:
            await self._remove_registration(state, runner.runner_id)
            raise
        if (acquisition := machine.acquisition) is not None:
            machine.acquisition = None
            await acquisition.acquired(running)

    async def _register(self, state: SetState, name: str) -> JitRunner:
        """Register a runner. A registration of this name can only be ours, from a call whose answer was lost."""
        source, runner_set = self._demand.source, state.runner_set
        for attempt in range(1, REGISTRATION_ATTEMPTS + 1):
            try:
                return await source.register(runner_set, state.scale_set_id, name=name)
            except Conflict:
                runner_id = await source.find_runner(runner_set, name=name)
                if runner_id is not None:
                    await source.deregister(runner_set, runner_id)
            except NotFound as error:
                # The session ends for the same reason, and creates the set again.
                raise Unavailable(f"runner set {state.name} does not exist on GitHub") from error
            except Throttled:
                raise
            except Unavailable:
                if attempt == REGISTRATION_ATTEMPTS:
                    raise
                await pause_before_retry(self._context)
        raise Unavailable(f"GitHub keeps a runner named {name}")

    async def _remove_registration(self, state: SetState, runner_id: int) -> None:
        async def remove() -> None:
            try:
                async with asyncio.timeout(REMOVAL_TIMEOUT_S):
                    await self._demand.source.deregister(state.runner_set, runner_id)
            except (TimeoutError, RemudaError) as error:
                self._context.event_log.record("deregistration-failed", f"a sweep removes it ({error or 'timeout'})")

        await run_to_end(remove())

    async def _leave_set(self, machine: KnownMachine, event: Event, why: str) -> Instance:
        """Apply a transition by which the machine leaves its set."""
        instance = await self._transition(machine, event, why)
        await _give_up(machine)
        return instance

    # The pool

    async def fill(self, config: PoolConfig, machine: KnownMachine, why: str) -> None:
        instance = machine.instance
        event = Fill(claim=instance.claim, report=machine.report, idle_time_s=config.lifetimes.idle_time_s)
        self._publish(await self._transition(machine, event, why))
        await _give_up(machine)

    def _publish(self, instance: Instance) -> None:
        """Send the message of an idle machine, unless it is in use again: the answer to its write came late."""
        if self._table.get(instance.instance_id) is None:
            self._table.add_publishing(instance)
            self._publisher.add(instance)

    async def advance(self, config: PoolConfig, machine: KnownMachine) -> None:
        """Move a releasing machine on, by its report: to the pool, or to its end."""
        instance = await advance(self._context, config, machine.instance, machine.report, by=Actor.LISTENER)
        self._note(instance)
        if instance.state is State.IDLE:
            self._publish(instance)

    # A listening runner

    async def bind(self, machine: KnownMachine, event: Bind, why: str) -> None:
        await self._transition(machine, event, why)

    async def bind_late(self, state: SetState, config: PoolConfig, machine: KnownMachine, why: str) -> None:
        event = binding_of_unknown_job(config, machine.report, set_tier=state.runner_set.trust)
        await self._transition(machine, event, why)

    async def renew(self, config: PoolConfig, machine: KnownMachine, why: str) -> None:
        """Prolong the listening time."""
        if machine.report is None:
            return
        lifetimes = config.lifetimes
        event = ListenOn(
            report=machine.report,
            listening_time_s=lifetimes.listening_time_s,
            max_runtime_s=lifetimes.max_runtime_s,
        )
        await self._transition(machine, event, why)

    # The end of a use

    async def release(self, config: PoolConfig, machine: KnownMachine, why: str) -> None:
        """Release a machine that has no job, and whose registration GitHub has removed."""
        leaving = Leave(removal=RegistrationRemoval.USED_UP)
        self._note(await leave(self._context, config, machine.instance, leaving, by=Actor.LISTENER, why=why))
        await _give_up(machine)

    async def withdraw(self, state: SetState, config: PoolConfig, machine: KnownMachine, why: str) -> None:
        """Remove the registration of a machine without a job, then release it. If it has a job, it keeps it."""
        instance = machine.instance
        runner_id = await self._find_registration(state, instance)
        deletion = Deletion.DELETED
        if runner_id:
            deletion = await self._demand.source.deregister(state.runner_set, runner_id)
        if deletion is Deletion.BUSY and instance.state is State.CLAIMED:
            # The job cannot start here: the configuration of this runner has died with its listener.
            raise Unavailable(f"GitHub keeps its registration of {instance.instance_id}, because of a job")
        if deletion is Deletion.BUSY:
            machine.take(self._context.clock.now())
            self._context.event_log.record(
                "kept", "it has a job", instance_id=instance.instance_id, runner_set=state.name
            )
            return
        if deletion is Deletion.GONE:
            self._note(await retire_after_unknown_job(self._context, instance, by=Actor.LISTENER))
        await self.release(config, machine, why)

    async def _find_registration(self, state: SetState, instance: Instance) -> int:
        """The id of the registration; 0 if none exists. A claim may have been interrupted before it was recorded."""
        if instance.assignment is None:
            return 0
        if instance.state is State.CLAIMED:
            found = await self._demand.source.find_runner(state.runner_set, name=instance.assignment.runner_name)
            return found or 0
        return instance.assignment.runner_id

    async def record_end(self, machine: KnownMachine, view: MachineView) -> None:
        """Record that the cloud has ended the instance."""
        await self._leave_set(machine, *end_of(view))

    async def end(self, state: SetState, machine: KnownMachine, why: str) -> None:
        """Terminate a machine that failed, or a new one that cannot be used."""
        instance, report = machine.instance, machine.report
        verdict = boot_verdict if instance.state is State.CREATED else registration_verdict
        failed = verdict(report, instance.epoch) is Verdict.FAILED
        event = End(
            reason=RetireReason.FAILED if failed else RetireReason.RELEASED, report=report, claim=instance.claim
        )
        await self._leave_set(machine, event, why)
        if instance.assignment is not None and instance.assignment.runner_id:
            await self._remove_registration(state, instance.assignment.runner_id)


async def _give_up(machine: KnownMachine) -> None:
    """Its acquisition, if it is not complete, ends without a runner."""
    if (acquisition := machine.acquisition) is not None:
        machine.acquisition = None
        await acquisition.given_up()
