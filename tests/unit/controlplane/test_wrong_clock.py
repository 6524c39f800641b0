"""A wrong clock of this computer: who notices it, and that nobody else is accused of what follows from it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from remuda.controlplane.context import Context
from remuda.controlplane.read.explain import explain
from remuda.controlplane.read.status import status
from remuda.controlplane.refresh import refresh
from remuda.domain.errors import UserError
from remuda.domain.instance import State
from remuda.domain.reporting.demand import LISTENER_SILENT_S
from remuda.ports.clock import HTTP_DATE, Clock, ServerDates
from remuda.wiring import clock_explained
from tests.support.set_world import DemandWorld, RunningListener, runner_set
from tests.support.world import PoolWorld


class WrongClock:
    """The world's clock as a process with a wrong one sees it."""

    def __init__(self, clock: Clock, ahead_s: float) -> None:
        self._clock = clock
        self._ahead = timedelta(seconds=ahead_s)

    def now(self) -> datetime:
        return self._clock.now() + self._ahead

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)


def process(world: PoolWorld, ahead_s: float, *, answered: bool = True) -> Context:
    """A command whose clock is wrong, and which AWS has answered."""
    clock = WrongClock(world.clock, ahead_s)
    dates = ServerDates(clock)
    if answered:
        dates.observe("AWS", world.clock.now().strftime(HTTP_DATE))
    return replace(world.process(credentialed=True), clock=clock, dates=dates)


@pytest.mark.parametrize(("ahead_s", "text"), [(1_203.0, "20 min ahead of AWS's"), (-1_203.0, "20 min behind AWS's")])
async def test_status_names_the_clock_and_accuses_nobody_else(world: PoolWorld, ahead_s: float, text: str) -> None:
    await world.one()
    await world.pass_time(60)
    found = await status(process(world, ahead_s))
    (warning,) = found.warnings
    assert warning.kind == "clock"
    assert warning.text.startswith(f"the clock of this computer is {text}: set this computer's clock")
    assert abs(found.at - world.clock.now()) < timedelta(seconds=2)
    assert not any(found.agent_death(instance) for instance in found.instances)


async def test_without_an_answer_nobody_knows_that_the_clock_is_wrong(world: PoolWorld) -> None:
    await world.one()
    await world.pass_time(60)
    kinds = {item.kind for item in (await status(process(world, 1_200.0, answered=False))).warnings}
    assert kinds >= {"sweeper", "stale-heartbeat"}


async def test_silent_agent_is_named_although_the_clock_is_wrong(world: PoolWorld) -> None:
    made = await world.one()
    world.stop_agent(made.instance_id)
    await asyncio.sleep(40)
    await world.sweep()
    found = await status(process(world, 1_200.0))
    clock, agent = found.warnings
    assert (clock.kind, agent.kind) == ("clock", "stale-heartbeat")
    assert agent.text == (
        f"no heartbeat for 40 s: its agent or its machine is dead; to end it, run remuda terminate {made.instance_id}"
    )


async def test_explanation_has_the_true_time(world: PoolWorld) -> None:
    made = await world.one()
    await world.pass_time(30)
    assert world.record(made.instance_id).state is State.RUNNING
    explanation = await explain(process(world, 1_200.0), made.instance_id)
    assert not any("dead" in step for step in (explanation.title, *explanation.next_steps))


async def test_refresh_names_a_wrong_clock(world: PoolWorld) -> None:
    result = await refresh(process(world, -600.0), None)
    (warning,) = result.warnings
    assert warning.startswith("the clock of this computer is 10 min behind AWS's")


@pytest.mark.parametrize(
    ("observed", "text"),
    [
        ({}, None),
        ({"AWS": 0.0}, None),
        ({"AWS": 30.0}, None),
        ({"AWS": -40.0}, "the clock of this computer is 40 s behind AWS's"),
        ({"AWS": 1_200.0, "GitHub": 3_600.0}, "the clock of this computer is 20 min ahead of AWS's"),
        ({"AWS": 1_200.0, "GitHub": 1.0}, None),
    ],
)
def test_nearest_system_decides(observed: dict[str, float], text: str | None) -> None:
    now = datetime.fromisoformat("2026-11-19T12:00:00+00:00")

    class Fixed(WrongClock):
        def now(self) -> datetime:
            return now

    dates = ServerDates(Fixed(None, 0.0))  # type: ignore[arg-type]
    for system, ahead_s in observed.items():
        dates.observe(system, (now - timedelta(seconds=ahead_s)).strftime(HTTP_DATE))
    for bad in ("", "yesterday"):
        dates.observe("AWS", bad)
    found = dates.error()
    assert (None if found is None else str(found)) == text


async def test_error_of_a_command_with_a_wrong_clock_names_it(world: PoolWorld) -> None:
    dates = process(world, 1_200.0).dates
    assert dates is not None
    with pytest.raises(UserError) as refused, clock_explained(dates):
        raise UserError("AWS rejects the signature", fix="set valid AWS credentials")
    assert refused.value.fix.startswith(
        "set valid AWS credentials; the clock of this computer is 20 min ahead of AWS's: set this computer's clock"
    )


@pytest.mark.parametrize("ahead_s", [-120.0, 600.0])
async def test_listener_with_a_wrong_clock_is_judged_by_the_true_time(ahead_s: float) -> None:
    sets = DemandWorld()
    await sets.configure_sets(runner_set(max=1))
    demand = sets.demand()
    listener = RunningListener(replace(demand, context=process(sets, ahead_s)))
    await asyncio.sleep(100.0)
    found = (await status(sets.process())).demand
    assert found.listener is not None
    assert found.listener.is_alive
    lease = sets.database.leases["listener"]
    await listener.stop()
    # Killed: it could not give up the lease.
    sets.database.leases["listener"] = lease
    await asyncio.sleep(LISTENER_SILENT_S + 1)
    found = (await status(sets.process())).demand
    assert found.listener is not None
    assert not found.listener.is_alive
    await sets.end()


async def test_count_of_a_listener_with_a_wrong_clock_is_the_present_one() -> None:
    sets = DemandWorld()
    await sets.configure_sets(runner_set(max=1))
    demand = sets.demand()
    listener = RunningListener(replace(demand, context=process(sets, -120.0)))
    (job,) = sets.queue()
    await asyncio.sleep(20.0)
    (found,) = (await status(sets.process())).demand.sets
    assert (found.is_current, found.waiting) == (True, 1)
    sets.scale_sets.cancel(job)
    await listener.stop()
    await sets.end()
