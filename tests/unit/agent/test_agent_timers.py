"""Pauses, waits and limits of the agent: what each of them depends on, and what must not change it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from remuda.domain.instance import Assignment
from remuda.domain.signals import Signal
from remuda.ports.machine import RemovalStatus
from tests.support.agents import AgentFixture
from tests.support.backoffs import FAILS, Backoff, Outcomes
from tests.support.records import at
from tests.support.virtual_time import until

CLEAN = Signal.UD_REMOVE_REG_REMOVE_RUN_OK
#: Seconds of the pauses after the first failure in a row, the second one and so on.
PAUSES = [(0.1, 0.2), (0.2, 0.4), (0.4, 0.8), (0.8, 1.6), (1.6, 3.2), (2.5, 5.0)]
#: Seconds of a wait that nothing ends.
WAIT_S = 120.0
#: Seconds between two heartbeats, and after which they stop if the agent hangs in a step, a script or a wait.
BEAT_S, STEP_S, SCRIPT_S, WAIT_GRACE_S = 5.0, 180.0, 3_600.0, 90.0
FOREVER_S = 1e6


async def serve_runs(fixture: AgentFixture) -> None:
    """Use the instance again and again."""
    await fixture.create()
    while True:
        await serve_run(fixture)
        await fixture.claim()


async def serve_run(fixture: AgentFixture) -> None:
    epoch = fixture.record.epoch
    await until(lambda: fixture.signalled(Signal.UD_REG_OK, epoch), within_s=FOREVER_S, every_s=0.1)
    await fixture.commit()
    await until(lambda: fixture.runner.current.listening, within_s=FOREVER_S, every_s=0.1)
    await fixture.release()
    await until(lambda: fixture.signalled(CLEAN, epoch), within_s=FOREVER_S, every_s=0.1)
    await fixture.pool()


# Pauses after failures --------------------------------------------------------------------------------------------


async def measure(pattern: str, prepare: Callable[[AgentFixture, Outcomes], None]) -> list[float]:
    fixture, outcomes = AgentFixture(), Outcomes(pattern)
    prepare(fixture, outcomes)
    fixture.start()
    pauses = await outcomes.run(serve_runs(fixture))
    await fixture.crash()
    return pauses


async def waits(pattern: str) -> list[float]:
    """The runner listens, and each wait of two minutes is an attempt."""
    fixture, outcomes = AgentFixture(), Outcomes(pattern)
    await fixture.serve(max_runtime_s=FOREVER_S)

    def fails(name: str) -> bool:
        if name == "get":
            outcomes.begin()
        return name == "wait_for_control" and outcomes.next() == FAILS

    fixture.store.fails = fails
    pauses = await outcomes.run(asyncio.sleep(FOREVER_S))
    await fixture.crash()
    return pauses


async def reads(pattern: str) -> list[float]:
    """The first failure in a row is that of a wait, the others are those of the reads after it."""
    fixture, outcomes = AgentFixture(), Outcomes(pattern)
    await fixture.serve(max_runtime_s=FOREVER_S)

    def fails(name: str) -> bool:
        if name == "get":
            outcomes.begin()
            return outcomes.following == FAILS and outcomes.next() == FAILS
        return name == "wait_for_control" and outcomes.next() == FAILS

    fixture.store.fails = fails
    pauses = await outcomes.run(asyncio.sleep(FOREVER_S))
    await fixture.crash()
    return pauses


def calls_of(name: str, before: Callable[[AgentFixture, Outcomes], None]) -> Callable[[str], Awaitable[list[float]]]:
    """The pauses between calls of a method of the runner. `before` decides the outcome of each call."""

    def prepare(fixture: AgentFixture, outcomes: Outcomes) -> None:
        method = getattr(fixture.runner, name)

        async def call(assignment: Assignment) -> Any:
            outcomes.begin()
            before(fixture, outcomes)
            return await method(assignment)

        setattr(fixture.runner, name, call)

    async def run(pattern: str) -> list[float]:
        return await measure(pattern, prepare)

    return run


def register(_: AgentFixture, outcomes: Outcomes) -> None:
    outcomes.end()


def remove(fixture: AgentFixture, outcomes: Outcomes) -> None:
    if outcomes.next() == FAILS:
        fixture.runner.removals = [RemovalStatus.UNREACHABLE]


def start(fixture: AgentFixture, outcomes: Outcomes) -> None:
    if outcomes.next() == FAILS:
        fixture.runner.exits = [2]


async def heartbeats(pattern: str) -> list[float]:
    def prepare(fixture: AgentFixture, outcomes: Outcomes) -> None:
        def fails(name: str) -> bool:
            if name != "beat" or not fixture.runner.current.listening:
                return False
            outcomes.begin()
            return outcomes.next() == FAILS

        fixture.store.fails = fails

    async def serve(fixture: AgentFixture) -> None:
        await fixture.create()
        await until(lambda: fixture.signalled(Signal.UD_REG_OK))
        await fixture.commit()
        await asyncio.sleep(1_000.0)

    fixture, outcomes = AgentFixture(), Outcomes(pattern)
    prepare(fixture, outcomes)
    fixture.start()
    pauses = await outcomes.run(serve(fixture))
    await fixture.crash()
    return pauses


#: A success is the end of the step, so that the next attempt belongs to the next use of the instance.
BACKOFFS = (
    Backoff(name="waits for a change", pauses=PAUSES, run=waits),
    Backoff(name="reads of the record", pauses=PAUSES, run=reads),
    Backoff(name="registrations", pauses=PAUSES, run=calls_of("register", register)),
    Backoff(name="removals of a registration", pauses=PAUSES, run=calls_of("remove", remove)),
    Backoff(name="starts of the runner", pauses=PAUSES, run=calls_of("start", start), most_failures=4),
    Backoff(name="heartbeats", pauses=[(BEAT_S, BEAT_S)], run=heartbeats),
)


@pytest.mark.parametrize("backoff", BACKOFFS, ids=lambda backoff: backoff.name)
async def test_pause_follows_from_the_failures_in_a_row_of_its_own_case(backoff: Backoff) -> None:
    for pattern in backoff.patterns():
        await backoff.check(pattern)


# Waits without an event -------------------------------------------------------------------------------------------


async def nothing(_: AgentFixture) -> None: ...


async def busy_removals(fixture: AgentFixture) -> None:
    fixture.runner.removals = [RemovalStatus.BUSY] * 3


async def unreachable_removals(fixture: AgentFixture) -> None:
    fixture.runner.removals = [RemovalStatus.UNREACHABLE] * 3


async def failed_starts(fixture: AgentFixture) -> None:
    fixture.runner.exits = [2, 2]


async def slow_steps(fixture: AgentFixture) -> None:
    fixture.machine.script_s = fixture.machine.reset_s = 20.0


async def rejected_calls(fixture: AgentFixture) -> None:
    seen = 0

    def fails(_name: str) -> bool:
        nonlocal seen
        seen += 1
        return seen % 7 == 0 and seen < 60

    fixture.store.fails = fails


async def lost_heartbeats(fixture: AgentFixture) -> None:
    fixture.store.fails = lambda name: name == "beat"


DISTURBANCES = (
    nothing, busy_removals, unreachable_removals, failed_starts, slow_steps, rejected_calls, lost_heartbeats
)  # fmt: skip


@pytest.mark.parametrize("rests", ["idle", "listening", "busy"])
@pytest.mark.parametrize("disturb", DISTURBANCES, ids=lambda disturb: disturb.__name__)
async def test_wait_without_an_event_is_as_long_as_ever_whatever_came_before(
    fixture: AgentFixture, disturb: Callable[[AgentFixture], Awaitable[None]], rests: str
) -> None:
    await disturb(fixture)
    fixture.start()
    await fixture.create()
    await serve_run(fixture)
    if rests != "idle":
        await fixture.claim()
        await until(lambda: fixture.signalled(Signal.UD_REG_OK, 2))
        await fixture.commit()
        await until(lambda: fixture.runner.current.listening)
        fixture.runner.become(busy=rests == "busy")
    await asyncio.sleep(10.0)
    if disturb is not lost_heartbeats:
        fixture.store.fails = lambda _name: False
    is_lost = fixture.store.fails
    asked: Counter[str] = Counter()

    def observe(name: str) -> bool:
        asked[name] += 1
        return is_lost(name)

    fixture.store.fails = observe
    await asyncio.sleep(3 * WAIT_S - 20.0)
    assert asked.pop("beat") == pytest.approx((3 * WAIT_S - 20.0) / BEAT_S, abs=2)
    assert asked.pop("wait_for_control") in {2, 3}
    assert not asked


# Limits of steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "limit_s"),
    [("script", SCRIPT_S), ("register", STEP_S), ("start", STEP_S), ("remove", STEP_S), ("reset", STEP_S),
     ("wait", WAIT_S + WAIT_GRACE_S)],
)  # fmt: skip
async def test_heartbeats_of_an_agent_that_hangs_end_with_the_limit_of_its_step(
    fixture: AgentFixture, step: str, limit_s: float
) -> None:
    """Whatever limits the steps before had."""
    hung_at: list[float] = []

    async def hang(*_: object, **__: object) -> Any:
        hung_at.append(fixture.clock.monotonic())
        await asyncio.sleep(FOREVER_S)

    if step == "script":
        fixture.machine.run_script = hang  # type: ignore[method-assign]
    elif step == "reset":
        fixture.machine.reset = hang  # type: ignore[method-assign]
    elif step != "wait":
        setattr(fixture.runner, step, hang)
    fixture.start()
    await fixture.create()
    serving = asyncio.create_task(serve_run(fixture))
    if step == "wait":
        await serving
        await asyncio.sleep(1.0)
        fixture.control.wait_for_control = hang  # type: ignore[method-assign]
        fixture.runner.wait_for_change = hang  # type: ignore[method-assign]
    await until(lambda: bool(hung_at), within_s=500.0)
    await asyncio.sleep(hung_at[0] + limit_s + 3 * BEAT_S - fixture.clock.monotonic())
    beat_at = fixture.report.beat_at
    assert beat_at is not None
    lasted_s = (beat_at - at(hung_at[0])).total_seconds()
    assert limit_s - BEAT_S - 0.1 <= lasted_s <= limit_s
    serving.cancel()
