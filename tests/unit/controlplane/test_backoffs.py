"""Pauses of the control plane after failures: each row of the table with each pattern of failures and successes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from remuda.controlplane.context import Context, retry_write
from remuda.controlplane.demand.context import BackgroundTasks, DemandContext
from remuda.controlplane.demand.lease import ListenerLease
from remuda.controlplane.demand.listener import ListenerService
from remuda.controlplane.demand.machines import KnownMachine, MachineTable
from remuda.controlplane.demand.observer import MachineObserver
from remuda.controlplane.demand.rerun import InterruptedJobs
from remuda.controlplane.demand.session import SetSession
from remuda.controlplane.demand.sets import new_state
from remuda.controlplane.signal_waiter import SignalWaiter
from remuda.domain.demand import DemandMessage, Lease
from remuda.domain.errors import CapacityError, Conflict, NotFound, Throttled, UserError
from remuda.domain.instance import State
from remuda.domain.runner_set import RunnerSet
from remuda.domain.signals import Verdict
from remuda.web.dashboard.feed import Feed
from tests.support.backoffs import (
    FAILS,
    LOST,
    NEXT,
    OTHER_FAILS,
    OTHER_SUCCEEDS,
    SUCCEEDS,
    Backoff,
    Outcomes,
    Range,
    doubled,
    now_s,
)
from tests.support.records import in_set, instance_id
from tests.support.set_world import DemandWorld, runner_set

OTHER_SET = "other"


def in_world(
    run: Callable[[DemandWorld, str], Awaitable[list[float]]],
) -> Callable[[str], Awaitable[list[float]]]:
    async def runs(pattern: str) -> list[float]:
        world = DemandWorld()
        await world.configure_sets()
        return await run(world, pattern)

    return runs


# Acquisitions -----------------------------------------------------------------------------------------------------


def acquisitions(*, for_pool: bool) -> Callable[[DemandWorld, str], Awaitable[list[float]]]:
    """Launches for jobs and for the pool have pauses of their own, in each set."""

    async def run(world: DemandWorld, pattern: str) -> list[float]:
        context, error = world.process(), CapacityError("no capacity")
        state = new_state(context, runner_set(), None)
        other = new_state(context, runner_set(name=OTHER_SET), None)
        pauses = []
        for letter in pattern:
            if letter == FAILS:
                state.note_failure(context, error, for_pool=for_pool)
                pauses.append((state.fill_retry_at if for_pool else state.retry_at) - now_s())
                await asyncio.sleep(pauses[-1])
            elif letter == SUCCEEDS:
                state.note_success(for_pool=for_pool)
                assert (state.fill_retry_at if for_pool else state.retry_at) == 0.0
            else:
                before = (state.fill_failures, state.fill_retry_at) if for_pool else (state.failures, state.retry_at)
                if letter == OTHER_FAILS:
                    state.note_failure(context, error, for_pool=not for_pool)
                    other.note_failure(context, error, for_pool=for_pool)
                else:
                    state.note_success(for_pool=not for_pool)
                    other.note_success(for_pool=for_pool)
                assert before == (
                    (state.fill_failures, state.fill_retry_at) if for_pool else (state.failures, state.retry_at)
                )
        return pauses

    return run


# Steps of machines ------------------------------------------------------------------------------------------------


def steps(error: Exception) -> Callable[[DemandWorld, str], Awaitable[list[float]]]:
    async def run(world: DemandWorld, pattern: str) -> list[float]:
        demand = world.demand()
        service = ListenerService(demand)
        state, other = new_state(demand.context, runner_set(), None), in_set(State.RUNNING, instance_id=instance_id(2))
        table = service._table
        machine, stranger = table.put(in_set(State.RUNNING)), table.put(other)
        assert machine is not None
        assert stranger is not None

        async def step(outcome: Exception | None, of: KnownMachine) -> None:
            async def work() -> None:
                if outcome is not None:
                    raise outcome

            with suppress(RuntimeError):
                await service._equipment.run_step(state, of, work)
            assert not of.handled

        pauses = []
        for letter in pattern:
            if letter == FAILS:
                await step(error, machine)
                pauses.append(machine.retry_at - now_s())
                await asyncio.sleep(pauses[-1])
            elif letter == SUCCEEDS:
                await step(None, machine)
            elif letter == NEXT:
                record = replace(machine.instance, epoch=machine.instance.epoch + 1, state=State.CLAIMED)
                following = table.put(record)
                assert following is not None
                machine = following
                assert machine.retry_at == machine.check_at == 0.0
            else:
                before = machine.retry_at, machine.failures
                await step(error if letter == OTHER_FAILS else None, stranger)
                assert (machine.retry_at, machine.failures) == before
        return pauses

    return run


# Sessions ---------------------------------------------------------------------------------------------------------


class _Session:
    session_id, statistics = "s-1", None

    def __init__(self, outcomes: Outcomes | None) -> None:
        self._outcomes = outcomes

    async def receive(self, *, last_message_id: int, capacity: int) -> DemandMessage | None:  # noqa: ARG002
        if self._outcomes is not None:
            self._outcomes.begin()
            self._outcomes.end()
        return None

    async def close(self) -> None: ...


class _Source:
    """Sessions of the sets with these outcomes: of the polls, or of the attempts to open a session."""

    def __init__(self, polls: dict[str, Outcomes], opens: dict[str, Outcomes]) -> None:
        self._polls, self._opens = polls, opens

    async def find_set(self, runner_set: RunnerSet) -> int:
        for outcomes in (self._polls, self._opens):
            if runner_set.name in outcomes:
                outcomes[runner_set.name].begin()
        return 1

    async def open_session(self, runner_set: RunnerSet, *_: object, **__: object) -> _Session:
        if runner_set.name in self._opens:
            self._opens[runner_set.name].end()
        return _Session(self._polls.get(runner_set.name))


def _session(demand: DemandContext, name: str) -> SetSession:
    service = ListenerService(demand)
    state = new_state(demand.context, runner_set(name=name), None)
    return SetSession(demand, state, service._table, service._binder, config=service.config)


def polls(error: BaseException) -> Callable[[DemandWorld, str], Awaitable[list[float]]]:
    async def run(world: DemandWorld, pattern: str) -> list[float]:
        own = Outcomes(pattern.replace(OTHER_FAILS, "").replace(OTHER_SUCCEEDS, ""), error=error)
        others = {OTHER_FAILS: "F" * 30, OTHER_SUCCEEDS: "S" * 1_000}
        other = Outcomes(next((item for letter, item in others.items() if letter in pattern), ""), error=error)
        source: Any = _Source({"large": own, OTHER_SET: other}, {})
        demand = replace(world.demand(), source=source)
        return await own.run(_session(demand, "large").run(), _session(demand, OTHER_SET).run())

    return run


def openings(error: BaseException) -> Callable[[DemandWorld, str], Awaitable[list[float]]]:
    async def run(world: DemandWorld, pattern: str) -> list[float]:
        own = Outcomes(pattern, error=error)
        source: Any = _Source({}, {"large": own})
        return await own.run(_session(replace(world.demand(), source=source), "large").run())

    return run


# Loops with one pause ---------------------------------------------------------------------------------------------


async def reads_of_records(world: DemandWorld, pattern: str) -> list[float]:
    outcomes = Outcomes(pattern)
    context = world.process(outcomes.hook("store.find"))
    observer = MachineObserver(
        context, MachineTable(context.clock), wake=lambda _: None, on_search=lambda: None, wants_idle=lambda: True
    )
    return await outcomes.run(observer.run())


async def decisions(world: DemandWorld, pattern: str) -> list[float]:
    outcomes = Outcomes(pattern)
    demand = world.demand()
    service = ListenerService(demand)
    await service._start()
    config = service.config()
    reconciler = service._reconciler

    def read() -> Any:
        outcomes.begin()
        outcomes.end()
        return config

    reconciler._config = read
    return await outcomes.run(reconciler.run(new_state(demand.context, runner_set(), None)))


async def reads_of_a_lease(world: DemandWorld, pattern: str) -> list[float]:
    outcomes = Outcomes(pattern)
    context = world.process(outcomes.hook("store.get_lease"))
    world.database.leases["listener"] = Lease(owner="another", beat=1)
    lease = ListenerLease(context, context.store, "own")

    async def renew() -> None:
        while True:
            await asyncio.sleep(10.0)
            held = world.database.leases["listener"]
            world.database.leases["listener"] = replace(held, beat=held.beat + 1)

    return await outcomes.run(lease.acquire(), renew())


async def reads_of_reruns(world: DemandWorld, pattern: str) -> list[float]:
    outcomes = Outcomes(pattern.split(SUCCEEDS, maxsplit=1)[0])
    demand = world.demand(outcomes.hook("store.recent_jobs"))
    reruns = InterruptedJobs(demand, BackgroundTasks(context=demand.context), lambda _: None)
    await outcomes.run(reruns.resume())
    # It ends with the first success.
    rest = pattern.split(SUCCEEDS, maxsplit=1)[1:]
    return outcomes.pauses + (await reads_of_reruns(world, rest[0]) if rest else [])


async def waits_for_a_report(world: DemandWorld, pattern: str) -> list[float]:
    outcomes = Outcomes(pattern)
    context = world.process(outcomes.hook("store.wait_for_report"))
    waiter = SignalWaiter(context, instance_id="i-1", epoch=1, verdict_of=lambda *_: Verdict.PENDING)
    return await outcomes.run(waiter.wait(until=10_000.0))


async def writes(world: DemandWorld, pattern: str) -> list[float]:
    """Each call of `retry_write` ends with its first success or its fifth failure."""
    outcomes = Outcomes(pattern)
    context = world.process()

    async def write() -> None:
        outcomes.begin()
        outcomes.end()

    async def run() -> None:
        while not outcomes.over.is_set():
            await retry_write(context, write)

    return await outcomes.run(run())


async def dashboard_polls(world: DemandWorld, pattern: str) -> list[float]:
    outcomes = Outcomes(pattern)
    feed = Feed(
        open_context=lambda: (_ for _ in ()).throw(AssertionError),
        backend="local",
        interval_s=1.0,
        since_s=60.0,
        clock=world.clock,
        ids=world.ids,
    )

    class Opened:
        async def __aenter__(self) -> Context:
            outcomes.begin()
            return world.process()

        async def __aexit__(self, *_: object) -> None: ...

    async def poll(_context: Context) -> None:
        outcomes.begin()
        outcomes.end()

    feed._open = Opened
    feed._poll = poll  # type: ignore[method-assign,assignment]
    return await outcomes.run(feed.run())


#: Kinds of failures of one machine's steps, and their pauses.
STEPS: dict[str, tuple[Exception, list[Range]]] = {
    "an answer is lost": (LOST, [(2, 2), (4, 4), (8, 8), (16, 16)]),
    "capacity": (CapacityError("none"), [(2, 2), (4, 4), (8, 8), (16, 16)]),
    "throttled shortly": (Throttled("slow", retry_after_s=3.0), [(3, 3), (4, 4), (8, 8), (16, 16)]),
    "throttled for long": (Throttled("slow", retry_after_s=900.0), [(60, 60)]),
    "a conflict": (Conflict("changed"), [(2, 2)]),
    "a bug": (RuntimeError("a bug"), [(16, 16)]),
}
FAILED_CALLS = doubled((0.5, 1.5), 7, most_s=60.0)
#: The same of a session's polls.
POLLS: dict[str, tuple[Exception, list[Range]]] = {
    "an answer is lost": (LOST, FAILED_CALLS),
    "it has lapsed": (NotFound("no session"), [(0.0, 0.0), *FAILED_CALLS[1:]]),
    "a limit with a time": (Throttled("slow", retry_after_s=7.0), [(7, 7)]),
    "a limit without a time": (Throttled("slow", retry_after_s=0.0), FAILED_CALLS),
    "another process has it": (Conflict("a session is open"), [(10, 10)]),
    "a refusal": (UserError("forbidden", field="token", fix="another token"), [(60, 60)]),
    "a bug": (RuntimeError("a bug"), [(60, 60)]),
}
LAUNCHES = doubled((2.5, 7.5), 5, most_s=60.0)
BACKOFFS = (
    Backoff(name="launches for jobs", pauses=LAUNCHES, run=in_world(acquisitions(for_pool=False)), letters="GT"),
    Backoff(name="launches for the pool", pauses=LAUNCHES, run=in_world(acquisitions(for_pool=True)), letters="GT"),
    *(
        Backoff(name=f"steps of a machine: {what}", pauses=pauses, run=in_world(steps(error)), letters="NGT")
        for what, (error, pauses) in STEPS.items()
    ),
    *(
        Backoff(name=f"polls of a session: {what}", pauses=pauses, run=in_world(polls(error)), letters="GT")
        for what, (error, pauses) in POLLS.items()
    ),
    *(
        Backoff(name=f"openings of a session: {what}", pauses=pauses, run=in_world(openings(error)), can_succeed=False)
        for what, (error, pauses) in POLLS.items()
        # Then GitHub has deleted the set, which is created again.
        if what != "it has lapsed"
    ),
    Backoff(name="reads of all records", pauses=[(2, 2)], run=in_world(reads_of_records)),
    Backoff(name="decisions about a set", pauses=[(10, 10)], run=in_world(decisions)),
    Backoff(name="reads of another's lease", pauses=[(5, 5)], run=in_world(reads_of_a_lease)),
    Backoff(name="reads of jobs to run again", pauses=[(5, 5)], run=in_world(reads_of_reruns)),
    Backoff(name="waits for a report", pauses=[(0.5, 0.5)], run=in_world(waits_for_a_report)),
    Backoff(name="writes", pauses=[(0.1, 0.3)], run=in_world(writes), most_failures=4),
    Backoff(
        name="polls of the dashboard",
        pauses=[(0.5, 0.5), (1, 1), (2, 2), (4, 4), (8, 8), (10, 10)],
        run=in_world(dashboard_polls),
    ),
)


@pytest.mark.parametrize("backoff", BACKOFFS, ids=lambda backoff: backoff.name)
async def test_pause_follows_from_the_failures_in_a_row_of_its_own_case(backoff: Backoff) -> None:
    for pattern in backoff.patterns():
        await backoff.check(pattern)
